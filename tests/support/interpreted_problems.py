"""Random problems for Triton kernels, run by Triton's interpreter on the CPU: `interpreted_problems.py COUNT MODULE ...`.

The interpreter is chosen when triton is imported, so this is a process of its own. For each problem of each module it
prints a line of JSON: what `problem(seed)` asks, and what `solved` of it finds.
"""

import json
import os
import sys
from importlib import import_module

os.environ["TRITON_INTERPRET"] = "1"

import torch

from quick_interpreter import quicken

if __name__ == "__main__":
    torch.set_num_threads(1)
    quicken()
    for count, name in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        module = import_module(name)
        for seed in range(int(count)):
            asked = module.problem(seed)
            print(json.dumps({"module": name} | asked | module.solved(asked)))
