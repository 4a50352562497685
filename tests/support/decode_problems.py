"""Random batches of coded matrices for the decoder in Triton, see `interpreted_problems.py`; the CPU's is the reference."""

from __future__ import annotations

from operator import attrgetter
from typing import Any
from unittest import mock

import numpy as np
import torch

from coded_matrices import contents_of, mended
from nearplane.coding import layout, on_device
from nearplane.coding.blob import Contents, decode, decode_packed, encode
from nearplane.errors import FormatError
from pretended import pretended
from pretended_triton import interpreted

KINDS = ("gaussian", "heavy", "sparse", "constant", "huge", "columns")
FIELDS = (
    "patches.rows", "patches.columns", "patches.delta", "orders.columns", "orders.rows", "scales.column_scale", "scales.row_scale"
)  # fmt: skip


def problem(seed: int) -> dict[str, Any]:
    """Return kinds and sizes of some matrices, the symbols of a chunk, whether one is damaged, and the launches."""
    rng = np.random.default_rng(seed)
    kinds = [KINDS[(seed + i) % len(KINDS)] for i in range(rng.integers(1, 4))]
    shapes = [[int(rng.integers(1, 14)), int(rng.integers(1, 20))] for _ in kinds]
    chunk = int(rng.choice([40, 150, layout.CHUNK_SYMBOLS]))
    launches = len(kinds) if seed % 3 == 0 else 1  # of batches with one matrix each, or of one batch
    return {
        "seed": seed,
        "kinds": kinds,
        "shapes": shapes,
        "chunk": chunk,
        "damaged": seed % 4 == 3,
        "launches": launches,
    }


def contents(kind: str, shape: list[int], rng: np.random.Generator) -> Contents:
    """Return a matrix of a kind."""
    spread = 2.0 ** rng.uniform(-2, 3)
    codes = rng.standard_normal(shape) * spread
    if kind == "heavy":
        codes = rng.standard_cauchy(shape) * spread
    elif kind == "sparse":
        codes *= rng.random(shape) < 0.05
    elif kind == "constant":
        codes[:] = round(spread)
    elif kind == "huge":
        codes = rng.integers(-(2**31), 2**31, shape).astype(np.float64)
    elif kind == "columns":
        codes *= 2.0 ** rng.integers(-6, 6, shape[1])
    codes = np.clip(np.rint(codes), -(2**31), 2**31 - 1).astype(np.int64)
    scales = dict(
        columns=rng.integers(-40, 41, shape[1]).astype(np.int32), rows=rng.integers(-3, 4, shape[0]).astype(np.int32)
    )
    return contents_of(codes, **scales)


def damaged(blob: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a blob with some bytes of its second half replaced, and with checksums that are right.

    It may have several faults, of which the CPU and a device may name different ones.
    """
    blob = blob.copy()
    at = int(rng.integers(len(blob) // 2, len(blob)))
    blob[at : at + 4] = rng.integers(0, 256, len(blob[at : at + 4]))
    return mended(blob)


def on_cpu(blobs: list[np.ndarray]) -> tuple[list[Any], list[Any], str]:
    """Return what the CPU decodes, in both forms, or its refusal."""
    try:
        pairs = [(decode_packed(blob, name=str(n), threads=1), decode(blob, threads=1)) for n, blob in enumerate(blobs)]
    except FormatError as error:
        return [], [], str(error)
    return [packed for packed, _ in pairs], [plain for _, plain in pairs], ""


def solved(asked: dict[str, Any]) -> dict[str, Any]:
    """Decode on both; return how many integers differ, whether both refuse the same matrix, and what was seen."""
    rng = np.random.default_rng(asked["seed"])
    with mock.patch.object(layout, "CHUNK_SYMBOLS", asked["chunk"]):
        blobs = [encode(contents(*each, rng)) for each in zip(asked["kinds"], asked["shapes"], strict=True)]
        if asked["damaged"]:
            blobs[-1] = damaged(blobs[-1], rng)
        packed, plain, refused = on_cpu(blobs)
        limit = 1 if asked["launches"] > 1 else on_device.MAX_BATCH_BYTES
        batches = mock.patch.object(on_device, "MAX_BATCH_BYTES", limit)
        with (
            pretended() as gpu,
            interpreted(),
            batches,
            mock.patch.dict(on_device.DECODERS, {"pretend": on_device.DECODERS["cuda"]}),
        ):
            names = [on_device.Blob(torch.from_numpy(blob), str(n)) for n, blob in enumerate(blobs)]
            try:
                found = list(on_device.decoded(names, torch.device("pretend:0")))
            except FormatError as error:
                return {
                    "refused": refused,
                    "refused_alike": str(error)[0] == refused[:1],
                    "decoding": 0,
                    "wrong": 0,
                    "seen": [],
                }
            launches, wrong, seen = gpu.of("coding/decode_triton.py decode").launches, 0, set()
            for one, runtime, whole in zip(found, packed, plain, strict=True):
                form = one.packed()
                wrong += int((one.codes().cpu().numpy() != whole.codes).sum())
                wrong += int((form.codes.cpu().numpy() != runtime.codes).sum()) + (form.groups != runtime.groups)
                wrong += sum(not np.array_equal(attrgetter(name)(form), attrgetter(name)(runtime)) for name in FIELDS)
                pairs = one.layout.groups.pairs
                seen |= {"pairs"} if pairs.any() else set()
                seen |= (
                    {"packed bytes"}
                    if any(g.nibbles and not p for g, p in zip(form.groups, pairs, strict=True))
                    else set()
                )
                seen |= {"bytes"} if not all(group.nibbles for group in form.groups) else set()
                seen |= {"patches"} if len(form.patches.delta) else set()
                seen |= {"several chunks"} if len(layout.chunk_edges(one.layout.total)) > 2 else set()
    return {
        "refused": refused,
        "refused_alike": not refused,
        "decoding": launches,
        "wrong": wrong,
        "seen": sorted(seen),
    }
