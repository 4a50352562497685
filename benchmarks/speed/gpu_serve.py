"""What serving a coded matrix takes on a card: decoding it once, and products of few rows; a part of `benchmarks/gpu.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from gpu_parts import Shape

from nearplane.coding.blob import Contents, decode_packed, encode
from nearplane.coding.on_device import Blob, decode_all, decoder_of
from nearplane.coding.scales import Scales, stored_base
from nearplane.loading.packed_linear import PackedLinear

SPREADS = {1.5: 0.65, 3.0: 1.95}  # rate in bits: standard deviation of the codes
ROWS = (1, 16)
CLOSE = 0.02  # relative error of products of bfloat16 inputs by decoded weights, which are rounded to bfloat16


class Served(NamedTuple):
    """A figure beside what it is compared with, in seconds."""

    of: str
    measured: float
    beside: float | None
    note: str


def served(
    place: torch.device, shape: Shape, seconds: Callable[[Callable[[], object]], float], memory: float | None
) -> Iterator[Served]:
    """Yield what a matrix of a model's MLP takes.

    Args:
        place: The card.
        shape: The model.
        seconds: Returns the seconds of a call.
        memory: Bytes that the card reads and writes in a second; None: not measured.
    """
    out, columns, generator = shape.intermediate, shape.hidden, np.random.default_rng(0)
    for rate, spread in SPREADS.items():
        codes = np.round(generator.standard_normal((out, columns), np.float32) * spread).astype(np.int32)
        scales = Scales(
            base=stored_base(0.01), columns=np.zeros(columns, np.int32), column_resolution=4,
            rows=np.zeros(out, np.int32), row_resolution=4,
        )  # fmt: skip
        coded, name = encode(Contents(codes=codes, scales=scales)), f"{out} x {columns}, rate {rate}"
        blob = Blob(torch.from_numpy(coded).to(place), name)
        if decoder_of(place) is None:
            yield Served(name, 0.0, None, "FAILED: this card has no decoder")
            return
        took = seconds(lambda blob=blob: decode_all([blob], place)[0].packed())
        (matrix,) = decode_all([blob], place)
        packed = matrix.packed()
        least = None if memory is None else (len(coded) + packed.codes.numel() + 2 * codes.size) / memory
        same = np.array_equal(np.asarray(decode_packed(coded).codes), packed.codes.cpu().numpy())
        note = f"{len(coded) / 1e6:.3g} MB; beside reading it and writing bytes and packed codes; {_verdict(same)}"
        yield Served(f"decode {name}", took, least, note)
        layer = PackedLinear(columns, out, bias=False, dtype=torch.bfloat16, device=place)
        layer.fill(packed, place)
        dense = torch.from_numpy(codes).to(place, torch.bfloat16) * 0.01
        for rows in ROWS:
            x = torch.randn(rows, columns, device=place).to(torch.bfloat16)
            with torch.inference_mode():
                y, expected = layer(x).float(), (x @ dense.T).float()
                took, beside = seconds(partial(layer, x)), seconds(lambda x=x, dense=dense: x @ dense.T)
            error = float((y - expected).norm() / expected.norm())
            note = f"beside bfloat16; off by {error:.1e}, at most {CLOSE:g}: {_verdict(error <= CLOSE)}"
            yield Served(f"{rows} rows by {name}", took, beside, note)


def _verdict(right: bool) -> str:
    return "ok" if right else "FAILED"
