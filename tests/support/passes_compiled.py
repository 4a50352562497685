"""Whole passes in Triton compiled for several cards, none of which needs to be there: `python passes_compiled.py`.

It prints lines of JSON as `triton_compiled.py` does, for a few numbers of rows, some of them no multiple of 16.
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
from triton_compiled import CARDS, LEVELS, usage_of

NUMBERS = {"low", "high", "least", "largest", "divisor"}
COUNTS = {"last", "out", "n", "count"}
TYPES = {
    "group": "*i64", "codes": "*i32", "outside": "*i32", "starts": "*i32", "spans": "*i32", "moved": "*i8"
}  # fmt: skip
SIZES = {"T": passes_triton.TILE, "OFFSET": tl.int32}
# grids, and rows of a matrix, which decide the sizes of a program
CASES = (
    ("integers", 4096),
    ("E4M3", 4096),
    ("integers", 4095),
    ("integers", 8192),
    ("integers", 14336),
    ("integers", 14335),
)
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
            ("descent pass with trials", passes_triton._descend, fits | {"MANTISSA": 0}),
            ("descent pass", passes_triton._descend, fits | {"fits": False}),
        ):
            tries = constants.get("MANTISSA") == 0
            for grid, rows in CASES[: 3 if tries else None]:
                asked = SIZES | constants | {"BITS": max(LEVELS[grid] - 1, 0).bit_length()}
                asked |= passes_triton._sizes(rows, tries)
                row = {"kernel": name, "grid": grid, "rows": rows, "card": card}
                yield row | compiled(kernel, card, asked, rows % 16 == 0)


if __name__ == "__main__":
    for row in table():
        print(json.dumps(row), flush=True)
