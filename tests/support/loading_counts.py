"""Coded layers loaded on the pretended GPU, with Triton's kernels and without: `python loading_counts.py`.

It prints a line of JSON for each way: launches, waits and copies of loading a Llama of two blocks and of one product, and
whether all weights and products are those of the CPU.
"""

from __future__ import annotations

import json
import os
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
from native_checkpoints import save_tiny, write_native
from nearplane.coding import on_device
from nearplane.formats.stored import Stored
from nearplane.loading import packed_linear
from nearplane.loading.dense_network import dense_network
from nearplane.loading.packed_linear import BUFFERS, PackedLinear
from pretended_launches import interpreted

DEVICE = "pretend:0"
TOKENS = torch.arange(1, 8)[None]


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


def loaded(folder: Path, use: bool) -> dict[str, Any]:
    """Load a folder on the pretended GPU, call the model, and compare with the CPU."""
    expected = nearplane.load(folder, device="cpu")
    dense = dict(dense_network(folder).named_parameters())
    with torch.no_grad(), interpreted() as gpu, kernels(use):
        model = nearplane.load(folder, device=DEVICE)
        loading = asdict(gpu.total)
        gpu.forget()
        logits = model(TOKENS.to(DEVICE)).logits.cpu()
        calling = gpu.of("loading/").launches
        layers = packed(model)
        assert layers
        same = [
            torch.equal(getattr(layer, name).cpu(), getattr(packed(expected)[path], name))
            for path, layer in layers.items()
            for name in BUFFERS
        ]
        same += [layer.groups == packed(expected)[path].groups for path, layer in layers.items()]
        parameters = dict(model.named_parameters())
        same += [torch.equal(x.cpu(), parameters[name].cpu()) for name, x in expected.named_parameters()]
        same += [
            torch.equal(x.cpu(), dense[name])
            for name, x in dense_network(folder, device=torch.device(DEVICE)).named_parameters()
        ]
        stored = Stored(folder)
        for name in stored.names():
            tensors = stored.tensors(name)
            same.append(
                stored.matrix(name, tensors, torch.device(DEVICE)).to("cpu").same_as(stored.matrix(name, tensors))
            )
        close = torch.allclose(logits, expected(TOKENS).logits, rtol=1e-4, atol=1e-5)
    counts = {"layers": len(layers), "loading": loading, "products": calling}
    return counts | {"different": same.count(False), "compared": len(same), "close": close}


def main() -> None:
    """Load with kernels and without."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        save_tiny(Path(place) / "source", "llama", num_hidden_layers=2)
        write_native(Path(place) / "out", Path(place) / "source", embeddings=True)
        for use in (False, True):
            print(json.dumps({"kernels": use} | loaded(Path(place) / "out", use)))


if __name__ == "__main__":
    main()
