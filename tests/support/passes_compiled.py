"""Whole passes in Triton compiled for several cards, none of which needs to be there: `python passes_compiled.py`.

It prints lines of JSON as `triton_compiled.py` does: for numbers of rows that are multiples of 16 and for all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nearplane.lattice import passes_triton
from nearplane.lattice.kernels_triton import ROWS
from triton_compiled import CARDS, LEVELS, usage_of

NUMBERS = {"low", "high", "least", "largest", "divisor"}
COUNTS = {"last", "out", "n", "count"}
TYPES = {
    "group": "*i64", "codes": "*i32", "outside": "*i32", "starts": "*i32", "spans": "*i32", "moved": "*i8"
}  # fmt: skip
SIZES = {"T": passes_triton.TILE, "R": ROWS, "OFFSET": tl.int32}
# what odd numbers of rows make odd
ODD = {"out", "W_stride", "E_stride", "codes_stride", "scale_stride", "zero_stride"}


def compiled(kernel: Any, card: int, constants: dict[str, Any], even: bool) -> dict[str, Any]:
    """Compile a pass for float32, for an even number of columns, and read what ptxas says of it."""
    constants = constants | {name: 1 for name in ("U_column_stride", "W_column_stride") if name in kernel.arg_names}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in COUNTS or name.endswith("_stride"):
            return "i32"
        return "fp32" if name in NUMBERS else TYPES.get(name, "*fp32")

    signature = {name: kind(name) for name in kernel.arg_names}
    whole = [
        i for i, (name, type) in enumerate(signature.items())
        if type.startswith("*") or (type == "i32" and name not in ("last", "count") and (even or name not in ODD))
    ]  # fmt: skip
    attributes = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": passes_triton.WARPS, "num_stages": 1, "enable_fp_fusion": False}
    return usage_of(triton.compile(source, target=GPUTarget("cuda", card, 32), options=options))


def table() -> Iterator[dict[str, Any]]:
    """Yield what every pass needs on every card."""
    fits = {"MANTISSA": 10, "fits": True, "begins": False}
    for card in CARDS:
        for name, kernel, constants in (
            ("sweep pass", passes_triton._solve, {}),
            ("descent pass with fit", passes_triton._descend, fits),
            ("descent pass with trials", passes_triton._descend, fits | {"MANTISSA": 0, "R": passes_triton.TRIED_ROWS}),
            ("descent pass", passes_triton._descend, fits | {"fits": False}),
        ):
            for grid, even in (("integers", True), ("E4M3", True), ("integers", False)):
                asked = SIZES | constants | {"BITS": max(LEVELS[grid] - 1, 0).bit_length()}
                asked |= passes_triton._products(16 if even else 1)
                row = {"kernel": name, "grid": grid, "rows": "multiple of 16" if even else "any", "card": card}
                yield row | compiled(kernel, card, asked, even)


if __name__ == "__main__":
    for row in table():
        print(json.dumps(row), flush=True)
