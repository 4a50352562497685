"""How fast does a 4-bit checkpoint answer on one core when its weights stay packed, next to its bf16 form?

python benchmarks/speed/answers.py [--hidden 1024] [--intermediate 2816] [--blocks 8] [--vocabulary 4096] [--rows]

The model is random. Both networks take turns in one process on one thread, and seconds are those of the CPU. With
--rows, layers alone are timed by the kernel and by decoded strips for more and more rows of inputs: `MAX_ROWS` of
`loading/kernel_linear.py` is from this table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from loading import write
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.utils import logging

import nearplane
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.loading.kernel_linear import KernelLinear, kernel_linear

SHAPES = ((1024, 1024), (2816, 1024), (2048, 2048))  # (out, in) of the layers of --rows
ROWS = (1, 16, 64, 96, 128, 192, 256, 384, 512)


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def answer(model: PreTrainedModel, prompt: Tensor, tokens: int) -> tuple[float, float]:
    """Return the CPU seconds until the first token, and of each further token."""
    cache, first = None, 0.0
    with torch.inference_mode():
        began, given = time.process_time(), prompt
        for i in range(tokens):
            result = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, given = result.past_key_values, result.logits[:, -1:].argmax(-1)
            if i == 0:
                first = time.process_time() - began
    return first, (time.process_time() - began - first) / (tokens - 1)


def compare_answers(options: argparse.Namespace) -> None:
    """Print tokens per second of the packed network and of the decoded one."""
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.intermediate, num_hidden_layers=options.blocks,
        num_attention_heads=16, num_key_value_heads=16, vocab_size=options.vocabulary, dtype="bfloat16",
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        write(out, Path(folder) / "source", config, 4, "compressed-tensors")
        networks = {name: nearplane.load(out, device="cpu", packed=name == "packed") for name in ("packed", "bf16")}
    print("prompt | network | first token, s | further tokens per second | ratio to bf16")
    for length in options.prompts:
        prompt = torch.randint(0, options.vocabulary, (1, length))
        turns = [{name: answer(model, prompt, options.tokens) for name, model in networks.items()} for _ in range(5)]
        medians = {name: np.median([turn[name] for turn in turns], axis=0) for name in networks}
        for name, (first, further) in medians.items():
            ratio = medians["bf16"] / medians[name]
            print(f"{length} | {name} | {first:.2f} | {1 / further:.1f} | {ratio[0]:.2f}, {ratio[1]:.2f}", flush=True)


def layer(out: int, columns: int, bits: int, group: int) -> KernelLinear:
    """Return a layer of random codes."""
    half, groups = 1 << bits - 1, columns // group
    grid = Grid(
        scale=torch.full((out, groups), 2.0**-8), zero=torch.zeros(out, groups), group=torch.arange(columns) // group,
        low=-half, high=half - 1,
    )  # fmt: skip
    made = kernel_linear(
        QuantizedMatrix(codes=torch.randint(-half, half, (out, columns), dtype=torch.int32), grid=grid)
    )
    assert made is not None
    return made


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
                works |= {f"{bits} kernel": partial(packed.product, x), f"{bits} strips": partial(packed.by_strips, x)}
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
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 128, 512])
    parser.add_argument("--rows", action="store_true")
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.rows:
        compare_rows()
    else:
        compare_answers(options)


if __name__ == "__main__":
    main()
