"""Random problems for Triton kernels, run by Triton's interpreter on the CPU: `interpreted_problems.py COUNT MODULE...`.

The interpreter is chosen when triton is imported, so this is a process of its own. For each problem of each module it
prints a line of JSON: what `problem(seed)` asks, and what `solved` of it finds.
"""

import json
import os
import sys
from importlib import import_module

os.environ["TRITON_INTERPRET"] = "1"

import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in map(import_module, sys.argv[2:]):
        for seed in range(int(sys.argv[1])):
            asked = module.problem(seed)
            print(json.dumps({"module": module.__name__} | asked | module.solved(asked)))
