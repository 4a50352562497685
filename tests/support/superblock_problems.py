"""Random problems for the search of blocks' steps in Triton, compared with the errors that `superblocks_torch.py` states.

`interpreted_problems.py` runs them.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nearplane.lattice import superblocks_torch, superblocks_triton
from nearplane.lattice.superblocks_torch import error_of
from nearplane.number_formats import TYPES, BlockFormat, integers

FORMATS: dict[str, BlockFormat] = {name: kind for name, kind in TYPES.items() if kind.fit == "blocks"}
FORMATS["int3-g24-min"] = integers(3, 24, minimum=True)
SIZES = {"usual": 0.02, "huge": 2.0**8, "tiny": 2.0**-40, "zero": 0.0}


def problem(seed: int) -> dict[str, Any]:
    """Return the sizes and kinds of a problem."""
    draw = torch.Generator().manual_seed(seed)

    def of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    return {
        "seed": seed, "kind": list(FORMATS)[seed % len(FORMATS)], "size": of("usual", "usual", *SIZES),
        "storage": of("float16", "bfloat16", "float32"), "rows": of(1, 2), "blocks": of(1, 2),
        "ends": 18 if seed % 30 == 1 else 3,
    }  # fmt: skip


def solved(asked: dict[str, Any]) -> dict[str, Any]:
    """Search; return how often numbers differ from the torch form, and by how much errors are larger."""
    draw, kind = torch.Generator().manual_seed(asked["seed"]), FORMATS[asked["kind"]]
    storage, columns = getattr(torch, asked["storage"]), asked["blocks"] * kind.columns
    W = SIZES[asked["size"]] * (torch.randn(asked["rows"], columns, generator=draw) + 0.2)
    h = torch.rand(columns // kind.group, kind.group, generator=draw) + 0.1
    W = W.view(-1, kind.group)
    ends = tuple(1 - 0.65 * i / (asked["ends"] - 1) for i in range(asked["ends"]))  # fewer candidates take less time
    with mock.patch.object(superblocks_torch, "RANGE_FRACTIONS", ends):
        found = superblocks_triton.search(kind, W, h, storage)
        expected = superblocks_torch.search(kind, W, h, storage)
    groups = kind.columns // kind.group

    def errors(parts: dict[str, Tensor]) -> Tensor:
        """Return (blocks,) the error of every block."""
        numbers = {name: part.view(-1, groups if name in ("sc", "m") else 1) for name, part in parts.items()}
        s = (numbers["d"].double() * numbers["sc"]).flatten()
        o = (numbers["dmin"].double() * numbers["m"]).flatten() if kind.m else torch.zeros_like(s)
        rows = h.repeat(len(W) // len(h), 1)
        return error_of(kind, W, rows, s, o).view(-1, groups).sum(1)

    mine, best = errors(found), errors(expected)
    stored = [found[name].to(storage).float() == found[name] for name in ("d", "dmin") if name in found]
    return {
        "names": found.keys() == expected.keys(),
        "unlike_torch": sum(int((found[name].flatten() != part.flatten()).sum()) for name, part in expected.items()),
        "unstored": sum(int((~part).sum()) for part in stored),
        "zeros": int((found["d"] == 0).sum() + (found["sc"] == 0).sum()),
        "excess": float(((mine - best) / best.clamp(min=1e-300)).max()),
    }
