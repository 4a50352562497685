"""How long does a coded checkpoint take to load, next to its bf16 form read by safetensors with copies?

python benchmarks/speed/loading.py [--hidden 2048] [--intermediate 5632] [--blocks 10] [--bits 3]

The model is random: codes are Gaussian, and their spread differs by column as water-filling makes it. Files are warm (in the
page cache) and compiled code is loaded; each time is the first load of a process of its own, for a second one reuses memory.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import nearplane
from nearplane.coding.scales import stored_base
from nearplane.formats.container import Place
from nearplane.formats.layer_format import Quantized
from nearplane.formats.table import FORMATS, open_container
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.schemes import GridScheme

OCTAVES = 0.8  # standard deviation of the columns' spread


def sampled(out: int, columns: int, bits: float, rng: np.random.Generator) -> QuantizedMatrix:
    """Return codes of about `bits` of entropy that decode to weights of about 0.02."""
    octaves = np.round(4 * rng.normal(0, OCTAVES, columns)).astype(np.int32)
    spread = 2 ** (bits - math.log2(math.sqrt(2 * math.pi * math.e))) * 2.0 ** (octaves / 4)
    codes = np.rint(rng.standard_normal((out, columns), np.float32) * spread.astype(np.float32)).astype(np.int32)
    grid = ProductGrid(
        base=stored_base(0.01), columns=torch.from_numpy(-octaves), column_resolution=4,
        rows=torch.zeros(out, dtype=torch.int32), row_resolution=1,
    )  # fmt: skip
    return QuantizedMatrix(codes=torch.from_numpy(codes), grid=grid)


def on_grid(out: int, columns: int, bits: float, rng: np.random.Generator) -> QuantizedMatrix:
    """Return uniform 4-bit codes in groups of 128."""
    codes = torch.from_numpy(rng.integers(-8, 8, (out, columns), np.int8)).to(torch.int32)
    scale = torch.full((out, columns // 128), 2.0**-8)
    group = torch.arange(columns) // 128
    return QuantizedMatrix(codes=codes, grid=Grid(scale=scale, zero=0 * scale, group=group, low=-8, high=7))


MATRICES = {"nearplane": sampled, "compressed-tensors": on_grid}  # by format


def write(out: Path, source: Path, config: LlamaConfig, bits: float, format: str = "nearplane") -> int:
    """Write a random quantized checkpoint and return its number of quantized weights."""
    source.mkdir(parents=True)
    config.save_pretrained(source)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    layers = {name: part for name, part in model.named_modules() if type(part) is torch.nn.Linear and name != "lm_head"}
    rng, weights = np.random.default_rng(0), 0
    scheme = RateScheme(rate=bits) if format == "nearplane" else GridScheme(bits=4, group_size=128)
    network = Quantized(scheme=scheme, quantized=list(layers), ignore=["lm_head"], version=nearplane.__version__)
    quantization = FORMATS[format].layers.describe(network)
    blocks = len(model.model.layers)
    rest = {name: torch.randn(tensor.shape, dtype=torch.bfloat16) for name, tensor in model.state_dict().items()}
    place = Place(out=out, source=source)
    with open_container(place, quantization, dtype=torch.bfloat16, shards=blocks + 1) as writer:
        for i in range(blocks):
            for name, layer in layers.items():
                if name.startswith(f"model.layers.{i}."):
                    writer.add(name, MATRICES[format](*layer.weight.shape, bits, rng))
                    weights += rest.pop(f"{name}.weight").numel()
            writer.close_block({})
        writer.close_block(rest)
        writer.record_json = '{"files": {}}'
    return weights


def copy_all(folder: Path) -> dict[str, torch.Tensor]:
    """Read a dense folder into memory of its own."""
    return {
        name: tensor.clone()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def measure(what: str, folders: list[str]) -> None:
    """Print the seconds that the last of the folders takes, once the others have warmed what there is to warm."""
    logging.disable_progress_bar()
    for folder in folders:
        began = time.perf_counter()
        kept = nearplane.load(folder, device="cpu") if what == "coded" else copy_all(Path(folder))
        seconds = time.perf_counter() - began
        del kept
    print(seconds)


def seconds_of(what: str, place: Path) -> float:
    """Run `measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", what, str(place / "small" / what), str(place / what)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Build, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--bits", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], options.measure[1:])
        return
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for part, (hidden, intermediate, blocks) in {
            "small": (512, 1024, 1), "": (options.hidden, options.intermediate, options.blocks)
        }.items():  # fmt: skip
            config = LlamaConfig(
                hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=blocks,
                num_attention_heads=16, num_key_value_heads=16, vocab_size=2048, dtype="bfloat16",
                tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
            )  # fmt: skip
            weights = write(place / part / "coded", place / part / "source", config, options.bits)
            size = nearplane.export(place / part / "coded", place / part / "dense")
        coded = sum(file.stat().st_size for file in (place / "coded").glob("*.safetensors"))
        print(f"{weights / 1e6:,.0f} M weights coded: {coded / 1e6:,.0f} MB, in bf16 {size / 1e6:,.0f} MB")
        loads, copies = [], []
        for _ in range(options.repeats):  # taking turns: a machine that slows down slows both
            loads.append(seconds_of("coded", place))
            copies.append(seconds_of("dense", place))
        cores = len(os.sched_getaffinity(0))
        print(
            f"nearplane.load {np.median(loads):.2f} s, safetensors with copies {np.median(copies):.2f} s, {cores} cores"
        )
        ratio, least = np.median(loads) / np.median(copies), min(loads) / min(copies)
        print(f"ratio {ratio:.2f} of the medians of {options.repeats}, {least:.2f} of the least")


if __name__ == "__main__":
    main()
