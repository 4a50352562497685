"""Does peak memory grow with depth? Quantizes random models of 4 and 16 blocks, each in a process of its own.

    python benchmarks/speed/memory.py [--hidden 1024] [--blocks 4 16] [--samples 16] [--seqlen 256]
    python benchmarks/speed/memory.py --start --blocks 1

With --start the resident memory up to the first solved layer is printed instead, step by step, and what of it are pages of files.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

BUILD = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from nearplane.demo import MODEL
torch.manual_seed(0)
hidden, blocks = int(sys.argv[1]), int(sys.argv[2])
config = LlamaConfig(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=blocks, num_attention_heads=hidden // 64,
                     num_key_value_heads=hidden // 128, vocab_size=4096, max_position_embeddings=512, tie_word_embeddings=True)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[3], max_shard_size="200MB")
for name in ("tokenizer.json", "tokenizer_config.json"):
    open(sys.argv[3] + "/" + name, "wb").write((MODEL / name).read_bytes())
"""


STEPS = {  # what a run does before its first block, in order: the function that ends with it
    "opening the model": ("nearplane.verbs.quantize", "open_resolved"),
    "text, tokenizer, windows": ("nearplane.verbs.quantize", "calibration_windows"),
    "a window through a block": ("nearplane.planning.request", "try_blocks"),
    "reading back by transformers": ("nearplane.planning.request", "check_loads"),
    "compiled kernels, LLVM": ("nearplane.planning.forecast", "load_libraries"),
    "freed memory returned": ("nearplane.planning.run", "plan"),
}
LIBRARIES = ("numpy", "torch", "transformers.modeling_utils", "numba", "nearplane.verbs.quantize")


class Enough(Exception):  # noqa: N818  (not an error)
    """Ends a run."""


def row(step: str) -> None:
    """Print the resident memory of this process in MB, and the part of it that is pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {
        line.split(":")[0]: 1024 * int(line.split()[1]) / 1e6 for line in lines if line.startswith(("VmRSS", "RssFile"))
    }
    print(f"| {step} | {sizes['VmRSS']:.0f} | {sizes['RssFile']:.0f} |", flush=True)


def start(folder: str, out: str, samples: str, seqlen: str) -> None:
    """Import the libraries one by one and quantize up to the first block; print a row after every step."""
    row("python")
    for name in LIBRARIES:
        importlib.import_module(name)
        row(name)
    for step, (module, function) in STEPS.items():
        watch(step, importlib.import_module(module), function)
    try:
        quantize(folder, out, samples, seqlen)
    except Enough:
        return


def watch(step: str, module: ModuleType, function: str) -> None:
    """Let a function of a module print a row when it ends; after the last step, end the run."""
    original = getattr(module, function)

    def watched(*args: Any, **keywords: Any) -> Any:
        result = original(*args, **keywords)
        row(step)
        if step == [*STEPS][-1]:
            raise Enough
        return result

    setattr(module, function, watched)


def quantize(folder: str, out: str, samples: str, seqlen: str) -> None:
    """Quantize in this process and print its peak memory in MB."""
    import nearplane
    from nearplane.demo import CALIBRATION

    tokens = {"calibration": str(CALIBRATION), "samples": int(samples), "seqlen": int(seqlen)}
    record = nearplane.quantize(folder, out, bits=4, **tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    blocks = len(record.layers) // 7
    print(
        f"{blocks:3d} blocks  weight files {record.bytes / 1e6:8.1f} MB  {record.seconds:6.1f} s  peak {peak:8.1f} MB"
    )


def main() -> None:
    """Build the models, quantize each in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--start", action="store_true", help="the memory up to the first block, step by step")
    arguments = parser.parse_args()
    mode = "--one-start" if arguments.start else "--one"
    with tempfile.TemporaryDirectory() as place:
        for blocks in arguments.blocks:
            folder = Path(place) / f"model-{blocks}"
            subprocess.run([sys.executable, "-c", BUILD, str(arguments.hidden), str(blocks), str(folder)], check=True)
            tokens = (str(arguments.samples), str(arguments.seqlen))
            command = [sys.executable, __file__, mode, str(folder), str(Path(place) / f"out-{blocks}"), *tokens]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["--one"]:
            quantize(*sys.argv[2:])
        case ["--one-start"]:
            start(*sys.argv[2:])
        case _:
            main()
