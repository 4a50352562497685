"""How fast does a checkpoint answer on the CPU when its weights stay packed, next to its bf16 form?

python benchmarks/speed/answers.py [--hidden 1024] [--intermediate 2816] [--blocks 8] [--vocabulary 4096] [--rows]

Models are random. All networks take turns in one process. On one thread seconds are those of the CPU. With --rows,
layers alone are timed by the packed codes and by decoded strips for more and more rows of inputs: `MAX_ROWS` of
`loading/grid_linear.py` is from this table.
"""

from __future__ import annotations

import argparse
import gc
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from loading import write
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.utils import logging

import nearplane
from nearplane.demo import MODEL
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.loading.grid_linear import GridLinear, grid_linear

SHAPES = ((1024, 1024), (2816, 1024), (2048, 2048))  # (out, in) of the layers of --rows
ROWS = (1, 4, 8, 12, 16, 32, 128, 512)


def clock() -> float:
    """Return CPU seconds on one thread, wall-clock seconds on several."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = clock()
    work()
    return clock() - began


def answer(model: PreTrainedModel, prompt: Tensor, tokens: int) -> tuple[float, float]:
    """Return the seconds until the first token, and of each further token."""
    cache, first = None, 0.0
    with torch.inference_mode():
        began, given = clock(), prompt
        for i in range(tokens):
            result = model(given, cache=cache, use_cache=True, logits_to_keep=1)
            cache, given = result.cache, result.logits[:, -1:].argmax(-1)
            if i == 0:
                first = clock() - began
    return first, (clock() - began - first) / (tokens - 1)


def held(model: PreTrainedModel) -> int:
    """Return the bytes of the weights, also packed ones."""
    storages = [part.untyped_storage() for part in chain(model.parameters(), model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def write_both(place: Path, options: argparse.Namespace) -> None:
    """Write a random model with 4 bits on a grid, and one that is entropy-coded."""
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.intermediate, num_hidden_layers=options.blocks,
        num_attention_heads=options.hidden // 64, num_key_value_heads=options.hidden // 256, head_dim=64,
        vocab_size=options.vocabulary, dtype="bfloat16", tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    write(place / "grid", place / "source", config, 4, "compressed-tensors")
    write(place / "rate", place / "again", config, 3)


NETWORKS = {  # folder, options of load
    "bf16": ("grid", {"packed": False}),
    "4 bits": ("grid", {}),
    "4 bits, head int8": ("grid", {"head": "int8"}),
    "rate 3, head int8": ("rate", {"head": "int8"}),
}


def compare_answers(options: argparse.Namespace) -> None:
    """Print memory and tokens per second of the packed networks and of a decoded one."""
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        write_both(Path(folder), options)
        for name in NETWORKS:
            subprocess.run([sys.executable, __file__, "--peak", folder, name], check=True)
        networks = {
            name: nearplane.load(Path(folder, part), device="cpu", **rest) for name, (part, rest) in NETWORKS.items()
        }
    print("prompt | network | weights, MB | first token, s | further tokens per second | ratios to bf16")
    for length in options.prompts:
        prompt = torch.randint(0, options.vocabulary, (1, length))
        turns = [{name: answer(model, prompt, options.tokens) for name, model in networks.items()} for _ in range(3)]
        medians = {name: np.median([turn[name] for turn in turns], axis=0) for name in networks}
        for name, (first, further) in medians.items():
            size, ratio = held(networks[name]), medians["bf16"] / medians[name]
            print(
                f"{length} | {name} | {size / 1e6:.0f} ({size / held(networks['bf16']):.2f}) | {first:.2f} | "
                f"{1 / further:.2f} | {ratio[0]:.2f}, {ratio[1]:.2f}",
                flush=True,
            )


def show_peak(folder: str, name: str) -> None:
    """Print by how much a process grows at most while it loads a network, and what the weights take."""
    part, rest = NETWORKS[name]
    logging.disable_progress_bar()
    nearplane.load(MODEL, device="cpu")  # imports, and compiles
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    model = nearplane.load(Path(folder, part), device="cpu", **rest)
    print(
        f"{name}: {memory('VmHWM') - before:.0f} MB more at the peak of loading, {held(model) / 1e6:.0f} MB of weights"
    )


def memory(field: str) -> float:
    """Return a field of this process' status in MB."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024 / 1e6


def layer(out: int, columns: int, bits: int, group: int) -> GridLinear:
    """Return a layer of random codes."""
    half, groups = 1 << bits - 1, columns // group
    grid = Grid(
        scale=torch.full((out, groups), 2.0**-8), zero=torch.zeros(out, groups), group=torch.arange(columns) // group,
        low=-half, high=half - 1,
    )  # fmt: skip
    codes = torch.randint(-half, half, (out, columns), dtype=torch.int32)
    made = grid_linear(QuantizedMatrix(codes=codes, grid=grid), torch.bfloat16)
    assert made is not None
    return made


def by_codes(packed: GridLinear, x: Tensor) -> Tensor:
    """Return the product of any number of inputs with the codes."""
    return packed.product(x.float()).to(x.dtype)


def compare_rows() -> None:
    """Print milliseconds of layers by the kernel, by decoded strips, and of a dense layer."""
    print("out x in | rows | 4 bits: kernel, strips | 8 bits: kernel, strips | bf16, ms")
    for out, columns in SHAPES:
        layers = {bits: layer(out, columns, bits, 128 if bits == 4 else columns) for bits in (4, 8)}
        dense = nn.Linear(columns, out, bias=False, dtype=torch.bfloat16)
        for rows in ROWS:
            x = torch.randn(rows, columns, dtype=torch.bfloat16)
            works: dict[str, Callable[[], object]] = {"dense": partial(dense, x)}
            for bits, packed in layers.items():
                works |= {
                    f"{bits} kernel": partial(by_codes, packed, x),
                    f"{bits} strips": partial(packed.by_strips, x),
                }
            with torch.inference_mode():
                turns = [{name: 1e3 * seconds(work) for name, work in works.items()} for _ in range(6)][1:]
            ms = {name: np.median([turn[name] for turn in turns]) for name in works}
            pairs = " | ".join(f"{ms[f'{bits} kernel']:.2f}, {ms[f'{bits} strips']:.2f}" for bits in layers)
            print(f"{out} x {columns} | {rows} | {pairs} | {ms['dense']:.2f}", flush=True)


def main() -> None:
    """Compare answers, or layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--place", help="folder for the checkpoints, which are deleted")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.peak:
        show_peak(*options.peak)
    elif options.rows:
        compare_rows()
    else:
        compare_answers(options)


if __name__ == "__main__":
    main()
