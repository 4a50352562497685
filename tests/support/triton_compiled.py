"""The Triton kernels compiled for several cards, none of which needs to be there: `python triton_compiled.py`.

It prints a line of JSON for each kernel, kind of grid and card: the card's compute capability, registers of a thread,
bytes that it spills, and bytes of shared memory of a program.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nearplane.coding import decode_triton
from nearplane.coding.tans import LANES
from nearplane.lattice import beam_triton, kernels_triton, superblocks_triton, superfit_triton
from nearplane.loading import product_triton
from nearplane.number_formats import number_format

CARDS = (80, 89, 90, 100, 120)
LEVELS = {"integers": 0, "E2M1": 15, "E4M3": 253}  # codes of the table
COUNTS = {"last", "out", "b", "n", "size", "candidates", "beam", "groups", "lines"}
COUNTS |= {"a", "width", "start", "stop", "columns"}
TYPES = {"group": "*i64", "codes": "*i32", "outside": "*i32", "best": "*i64", "before": "*i32", "ancestor": "*i64"}
TYPES["moved"] = "*u8"
SEARCHED = {"sc": "*i32", "m": "*i32"}  # of the search of blocks; their fit has them in floating point
BEAM = 8  # candidates of a row
BLOCKS = {name: number_format(name) for name in ("q4_0", "q4_1", "q3_k", "q4_k", "q6_k", "int4-g128-min")}
PACKED_CODES = (  # kernel, types of its arguments, constants, warps
    (decode_triton._decode, "*i32 i32 *i64 *i64 *i64 *i32 *u8 *i32 *i32 *i32 *i32", {"LANES": LANES}, 1),
    (decode_triton._pack, "*u8 *i64 *u8", {"B": decode_triton.BYTES}, 4),
    (decode_triton._unpack, "*u8 *i64 *i64 *i32 i32 i32", {"R": decode_triton.ROWS, "C": decode_triton.COLUMNS}, 4),
    (product_triton._scale, "*bf16 *i32 *fp32 *fp32 i32", {"B": product_triton.SCALED}, 4),
    (
        product_triton._product,
        "*fp32 *u8 *i64 i32 *i32 *fp32 *i32 *i32 *i64 *bf16 *bf16 i32 i32",
        {"biased": True, "R": product_triton.PRODUCT_ROWS, "K": product_triton.PRODUCT_BYTES},
        4,
    ),
    (
        product_triton._values,
        "*u8 *i32 *fp32 *i64 *fp32 *i32 *i32 *i64 *i32 *bf16 i32 i32",
        {"R": product_triton.VALUE_ROWS, "C": product_triton.VALUE_COLUMNS},
        4,
    ),
)
NUMBERS = {"low", "high", "least", "largest", "sc_low", "sc_high", "m_limit"}


def compiled(
    kernel: Any, card: int, constants: dict[str, Any], warps: int, types: dict[str, str] = TYPES, **options: Any
) -> dict[str, Any]:
    """Compile a kernel for float32 and read what ptxas says of it."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in COUNTS or name.endswith("_stride"):
            return "i32"
        return "fp32" if name in NUMBERS else types.get(name, "*fp32")

    signature = {name: kind(name) for name in kernel.arg_names}
    return usage(kernel, card, signature, constants, warps, **options)


def usage(
    kernel: Any, card: int, signature: dict[str, str], constants: dict[str, Any], warps: int, **options: Any
) -> dict[str, Any]:
    """Compile a kernel for arguments of these types and read what ptxas says of it."""
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options |= {"num_warps": warps, "enable_fp_fusion": False}
    return usage_of(triton.compile(source, target=GPUTarget("cuda", card, 32), options=options))


def usage_of(made: Any) -> dict[str, Any]:
    """Read what ptxas says of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return {"registers": int(found[1]), "spilled": int(found[2]), "shared": made.metadata.shared}


def table() -> Iterator[dict[str, Any]]:
    """Yield what every kernel needs on every card."""
    block = {"moves": False, "counts": True, "B": 128, "R": kernels_triton.ROWS}
    groups = {"G": kernels_triton.GROUPS, "K": kernels_triton.CHUNK}
    beam = {"R": beam_triton.CANDIDATES // BEAM, "K": BEAM, "T": beam_triton.TILE}
    kernels = (
        (kernels_triton._sweep, block, kernels_triton.WARPS),
        (kernels_triton._search, groups, kernels_triton.WARPS),
        (beam_triton._beam, beam, beam_triton.CANDIDATES // 32),
    )
    for card in CARDS:
        for kernel, constants, warps in kernels:
            for grid, levels in LEVELS.items():
                used = compiled(kernel, card, constants | {"BITS": max(levels - 1, 0).bit_length()}, warps)
                yield {"kernel": kernel.__name__.strip("_"), "grid": grid, "card": card} | used
        for grid, kind in BLOCKS.items():
            row, storage = {"grid": grid, "card": card}, torch.bfloat16 if kind.minimum else torch.float16
            constants, warps = superblocks_triton.constants(kind, storage)
            yield (
                row
                | {"kernel": "blocks"}
                | compiled(superblocks_triton._search, card, constants, warps, TYPES | SEARCHED)
            )
            fixed, stages = superfit_triton.constants(kind, 256), {"num_stages": 1}
            steps = fixed | superfit_triton.stepwise(kind, storage)
            used = compiled(superfit_triton._fit_steps, card, steps, superfit_triton.WARPS, **stages)
            yield row | {"kernel": "fit of steps"} | used
            if not kind.single:
                used = compiled(superfit_triton._fit_integers, card, fixed, superfit_triton.WARPS, **stages)
                yield row | {"kernel": "fit of integers"} | used


def of_packed_codes() -> Iterator[dict[str, Any]]:
    """Yield what every kernel of coded and packed matrices needs on every card."""
    for card in CARDS:
        for kernel, types, constants, warps in PACKED_CODES:
            signature = dict(zip(kernel.arg_names, types.split(), strict=False)) | dict.fromkeys(constants, "constexpr")
            used = usage(kernel, card, signature, constants, warps)
            yield {"kernel": kernel.__name__.strip("_"), "grid": "", "card": card} | used


if __name__ == "__main__":
    for row in chain(table(), of_packed_codes()):
        print(json.dumps(row))
