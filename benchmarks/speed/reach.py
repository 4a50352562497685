"""How long would larger models take, and how much memory? Measured on small stacks of blocks, extrapolated by counting.

    OMP_NUM_THREADS=1 python benchmarks/speed/reach.py [--quick]

Random Llamas of one to eight blocks are quantized to 4 bits, each in a process of its own. CPU time is taken to be
`fixed + a * (multiplications that grow with tokens) + b * (those that do not)`, memory `fixed + c * (what is counted below)`; the
constants are least squares over the first runs, the other runs check them. Then come the shapes of three real models with the
default number of windows of 2,048 tokens, and with 32 of 512.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from stages import LETTERS, save_tokenizer, write_text

from nearplane.calibration.windows import DEFAULT_SEQLEN, DEFAULT_TOKENS_PER_INPUT, MAX_DEFAULT_TOKENS


@dataclass(frozen=True)
class Run:
    """Shapes of a network, and what it is calibrated on."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int
    windows: int
    seqlen: int

    @property
    def layers(self) -> list[list[tuple[int, int]]]:
        """(out, in) of the layers of a block, by the input that they share."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.intermediate
        return [[(queries, h), (keys, h), (keys, h)], [(h, queries)], [(i, h), (i, h)], [(h, i)]]

    @property
    def weights(self) -> int:
        return sum(out * columns for group in self.layers for out, columns in group)

    @property
    def tokens(self) -> int:
        return self.windows * self.seqlen

    def by_tokens(self) -> float:
        """Multiplications of forwards and moments, in units of 1e12: two streams; H by half, C, or twice (out, in)."""
        forwards = 2 * (self.weights + self.seqlen * self.heads * self.head_dim)
        moments = sum(
            group[0][1] ** 2 / 2 + (2 * group[0][0] * group[0][1] if len(group) == 1 else group[0][1] ** 2)
            for group in self.layers
        )
        return self.blocks * self.tokens * (forwards + moments) / 1e12

    def by_shapes(self) -> float:
        """Multiplications of factors and solves, in units of 1e12: a third of in^3 a factor, out in^2 a product."""
        return (
            self.blocks * sum(group[0][1] ** 3 / 3 + sum(o * i * i for o, i in group) for group in self.layers) / 1e12
        )

    def memory(self) -> float:
        """Bytes: a block twice, hidden states of two streams and what is paused, and ten matrices (in, in) of half float64."""
        paused = max(self.hidden + 2 * self.heads * self.head_dim, self.hidden + self.intermediate)
        widest = max(self.hidden, self.intermediate, self.heads * self.head_dim)
        return 8.0 * self.weights + 4.0 * self.tokens * (2 * self.hidden + paused) + 60.0 * widest**2


FITTED = [
    Run(512, 1536, 8, 4, 64, 4, 16, 512),
    Run(512, 1536, 8, 4, 64, 4, 48, 512),
    Run(1024, 3072, 16, 8, 128, 4, 16, 512),
    Run(1024, 3072, 16, 8, 128, 4, 32, 512),
    Run(2048, 6144, 16, 8, 128, 1, 16, 512),
]
CHECKED = [Run(1024, 3072, 16, 8, 128, 8, 16, 512), Run(2048, 8192, 32, 8, 64, 1, 24, 512)]
NAMED = {
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, 28),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 32),
    "Llama-3.1-70B": (8192, 28672, 64, 8, 128, 80),
}


def build(run: Run, folder: str) -> None:
    """Write the random model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=run.hidden, intermediate_size=run.intermediate, num_hidden_layers=run.blocks,
        num_attention_heads=run.heads, num_key_value_heads=run.kv_heads, head_dim=run.head_dim, vocab_size=LETTERS,
        max_position_embeddings=run.seqlen, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="200MB")
    save_tokenizer(folder)


def measure(model: str, text: str, out: str, windows: str, seqlen: str) -> None:
    """Quantize in this process; print CPU seconds and peak bytes as JSON."""
    import nearplane

    nearplane.quantize  # noqa: B018  # imports
    began = time.process_time()
    nearplane.quantize(model, out, bits=4, group_size=128, samples=int(windows), seqlen=int(seqlen), calibration=text)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": time.process_time() - began, "peak": peak}))


def measured(run: Run, place: Path) -> tuple[float, float]:
    """Return CPU seconds and peak bytes of a run in a process of its own."""
    model, text, out = (str(place / name) for name in ("model", "text.txt", "out"))
    with tempfile.TemporaryDirectory(dir=place) as folder:
        model, out = f"{folder}/model", f"{folder}/out"
        subprocess.run([sys.executable, __file__, "--build", json.dumps(vars(run)), model], check=True)
        write_text(Path(text), (run.windows + max(4, run.windows // 8)) * run.seqlen)
        command = [sys.executable, __file__, "--one", model, text, out, str(run.windows), str(run.seqlen)]
        environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", **os.environ}  # as the command line sets it
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        said = json.loads(done.stdout.splitlines()[-1])
    return said["seconds"], said["peak"]


def main() -> None:
    """Measure, fit, check, extrapolate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest two runs only: does it work?")
    arguments = parser.parse_args()
    fitted, checked = (FITTED[:2], []) if arguments.quick else (FITTED, CHECKED)
    with tempfile.TemporaryDirectory() as place:
        found = [measured(run, Path(place)) for run in fitted + checked]
    seconds, peaks = (np.array(column) for column in zip(*found, strict=True))
    work = np.array([[1.0, run.by_tokens(), run.by_shapes()] for run in fitted + checked])
    held = np.array([[1.0, run.memory()] for run in fitted + checked])
    count = len(fitted)
    costs = np.linalg.lstsq(work[:count] / seconds[:count, None], np.ones(count), rcond=None)[0]  # relative errors
    bytes_ = np.linalg.lstsq(held[:count] / peaks[:count, None], np.ones(count), rcond=None)[0]
    print(f"CPU s = {costs[0]:.1f} + {costs[1]:.2f} by tokens + {costs[2]:.2f} by shapes")
    print(f"peak = {bytes_[0] / 1e9:.2f} GB + {bytes_[1]:.2f} of what is counted")
    print("| hidden | intermediate | blocks | tokens | CPU s | by the formula | peak GB | by the formula |")
    for run, took, peak, a, b in zip(fitted + checked, seconds, peaks, work @ costs, held @ bytes_, strict=True):
        mark = "" if run in fitted else " (check)"
        print(
            f"| {run.hidden} | {run.intermediate} | {run.blocks}{mark} | {run.tokens:,} | {took:.1f} | {a:.1f} | "
            f"{peak / 1e9:.2f} | {b / 1e9:.2f} |"
        )
    print("| model | tokens | CPU hours | peak GB |")
    for name, shape in NAMED.items():
        default = min(DEFAULT_TOKENS_PER_INPUT * max(shape[:2]), MAX_DEFAULT_TOKENS)
        for windows, seqlen in ((-(-default // DEFAULT_SEQLEN), DEFAULT_SEQLEN), (32, 512)):
            run = Run(*shape, windows, seqlen)
            took = float(np.array([1.0, run.by_tokens(), run.by_shapes()]) @ costs)
            peak = float(np.array([1.0, run.memory()]) @ bytes_)
            print(f"| {name} | {run.tokens:,} | {took / 3600:.1f} | {peak / 1e9:.1f} |")


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["--one"]:
            measure(*sys.argv[2:])
        case ["--build"]:
            build(Run(**json.loads(sys.argv[2])), sys.argv[3])
        case _:
            main()
