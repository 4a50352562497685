"""Coded layers on the pretended GPU in Triton's interpreter: `python packed_on_device.py PRODUCTS [everything]`.

The interpreter is chosen when triton is imported, so this is a process of its own. It prints a line of JSON for loading a
Llama of one block without kernels and one with them: launches, waits and copies of loading and of a product, and whether
all weights are those of the CPU; with `everything` also of the ways by which runs read layers, of a Mixtral and of the
golden checkpoint. Then it prints a line for each of PRODUCTS random products, see `product_problems.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

import nearplane
import product_problems
from native_checkpoints import save_tiny, write_native
from nearplane.coding import on_device
from nearplane.formats.stored import Stored
from nearplane.loading import packed_linear
from nearplane.loading.dense_network import dense_network
from nearplane.loading.packed_linear import PackedLinear
from pretended import pretended
from pretended_triton import interpreted
from quick_interpreter import quicken

SIZES = dict(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=24, num_attention_heads=2, head_dim=4)
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "rate"
DEVICE = "pretend:0"
TOKENS = torch.ones(1, 1, dtype=torch.int64)


@contextmanager
def kernels(use: bool) -> Iterator[None]:
    """Let the pretended GPU use the kernels of CUDA, or none."""
    tables = (on_device.DECODERS, packed_linear.PRODUCTS)
    with mock.patch.dict(tables[0]), mock.patch.dict(tables[1]):
        for table in tables:
            table |= {"pretend": table["cuda"]} if use else {}
        yield


def packed(model: torch.nn.Module) -> dict[str, PackedLinear]:
    """Return the packed layers of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def loaded(folder: Path, use: bool, everything: bool) -> dict[str, Any]:
    """Load a folder on the pretended GPU, call the model, and compare with the CPU."""
    expected = nearplane.load(folder, dtype="float32", device="cpu")
    with torch.no_grad(), pretended() as gpu, interpreted(), kernels(use):
        model = nearplane.load(folder, dtype="float32", device=DEVICE)
        loading = asdict(gpu.total)
        model.set_experts_implementation("eager")  # the pretended GPU has no histogram of integers
        gpu.forget()
        logits = model(TOKENS.to(DEVICE)).logits.cpu()
        calling = gpu.of("loading/").launches
        layers = packed(model)
        assert layers
        same = [torch.equal(layer.weight.cpu(), expected.get_submodule(path).weight) for path, layer in layers.items()]
        parameters = dict(model.named_parameters())
        same += [torch.equal(x.cpu(), parameters[name].cpu()) for name, x in expected.named_parameters()]
        if everything:
            same += read_otherwise(folder)
        close = torch.allclose(logits, expected(TOKENS).logits, rtol=1e-4, atol=1e-5)
    counts = {"layers": len(layers), "loading": loading, "products": calling}
    return counts | {"different": same.count(False), "compared": len(same), "close": close}


def read_otherwise(folder: Path) -> list[bool]:
    """Return whether layers that are decoded for computation, for tuning and for verification are those of the CPU."""
    device, stored = torch.device(DEVICE), Stored(folder)
    expected = dict(dense_network(folder).named_parameters())
    same = [torch.equal(x.cpu(), expected[name]) for name, x in dense_network(folder, device=device).named_parameters()]
    for name in stored.names():
        tensors = stored.tensors(name)
        same.append(stored.matrix(name, tensors, device).to("cpu").same_as(stored.matrix(name, tensors)))
    return same


def main() -> None:
    """Load with kernels and without, and multiply."""
    torch.set_num_threads(1)
    count, everything = int(sys.argv[1]), "everything" in sys.argv
    quicken()
    with tempfile.TemporaryDirectory() as place:
        save_tiny(Path(place) / "source", "llama", **SIZES)
        write_native(Path(place) / "out", Path(place) / "source", embeddings=True)
        for use in (False, True):
            print(json.dumps({"kernels": use} | loaded(Path(place) / "out", use, everything)))
        if everything:  # experts in stacked parameters
            save_tiny(Path(place) / "experts", "mixtral", **SIZES)
            tokens = torch.randint(3, SIZES["vocab_size"], (12, 32), generator=torch.Generator().manual_seed(1))
            options = dict(calibration=tokens, rate=3.0, allocate="uniform", device="cpu")
            nearplane.quantize(Path(place) / "experts", Path(place) / "coded", **options)
            for folder in (Path(place) / "coded", GOLDEN):
                print(json.dumps({"kernels": True} | loaded(folder, True, everything)))
    for seed in range(count):
        asked = product_problems.problem(seed)
        print(json.dumps(asked | product_problems.solved(asked)))


if __name__ == "__main__":
    main()
