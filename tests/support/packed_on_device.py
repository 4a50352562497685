"""Coded layers on the pretended GPU in Triton's interpreter; `interpreted_problems.py` runs them.

A result has launches, waits and copies of loading and of a product, without kernels or with them, and whether all weights
are those of the CPU; with `everything` also of the ways by which runs read layers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import nearplane
from native_checkpoints import save_tiny, write_native
from nearplane.coding import on_device
from nearplane.formats.stored import Stored
from nearplane.loading import packed_linear
from nearplane.loading.dense_network import dense_network
from nearplane.loading.packed_linear import PackedLinear
from pretended import pretended
from pretended_triton import interpreted

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


def problem(seed: int) -> dict[str, Any]:
    """Return what is loaded: a Llama without kernels and with them, also in every way, a Mixtral, the golden folder."""
    sources = ("llama", "llama", "llama", "llama", "mixtral", "golden")
    return {"kernels": seed not in (0, 2), "everything": seed > 1, "source": sources[seed]}


def solved(asked: dict[str, Any]) -> dict[str, Any]:
    """Write a folder, and load it with kernels or without."""
    with tempfile.TemporaryDirectory() as place:
        source, out = Path(place) / "source", Path(place) / "out"
        if asked["source"] == "golden":
            out = GOLDEN
        elif asked["source"] == "llama":
            save_tiny(source, "llama", **SIZES)
            write_native(out, source, embeddings=True)
        else:  # experts in stacked parameters
            save_tiny(source, "mixtral", **SIZES)
            tokens = torch.randint(3, SIZES["vocab_size"], (12, 32), generator=torch.Generator().manual_seed(1))
            nearplane.quantize(source, out, calibration=tokens, rate=3.0, allocate="uniform", device="cpu")
        return loaded(out, asked["kernels"], asked["everything"])
