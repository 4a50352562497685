"""Number formats: the values that a stored weight can take, and how its steps are stored, as named data, without torch.

    value = step * (level - zero)

A level is the code itself, or its entry in a table. Commands and run records use the names, such as `int4-g128`,
`int3-row-asym`, `q4_k`. `fits.py` fits the steps of a format; `formats/` lays out its bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nearplane.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRounding:
    """Rounding of a layer's inputs at run time, symmetric and with steps from the range of the inputs themselves.

    Args:
        kind: Type of the numbers: int (evenly spaced) or fp (E4M3 with 8 bits, E2M1 with 4).
        bits: Bits per number.
        group: Number of neighbouring inputs of a token that share a step; None: one step per token.
        steps: Name of the torch dtype to which steps are rounded; None: they are not rounded.
    """

    kind: Literal["int", "fp"]
    bits: int
    group: int | None = None
    steps: str | None = None

    @property
    def name(self) -> str:
        """Name of the numbers in commands: int8, fp8 or fp4."""
        return f"{self.kind}{self.bits}"

    @property
    def global_scale(self) -> bool:
        """Whether steps are divided by one number for all tokens, which is measured before and stored with the layer."""
        return self.steps == "float8_e4m3fn"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """Storage of weights and steps, independent of the file format.

    Args:
        name: Name of the format in commands and run records.
        bits: Bits per code; 0 where codes have no limits.
        group: Number of neighbouring weights of a row that share a step; None: one step per row.
        rows: Number of neighbouring rows that share their steps.
        symmetric: Whether there are no zero points or minima; the codes then lie around 0.
        levels: Ascending positions of the codes 0, 1, ... in steps, from below to above 0; None: codes are positions.
        steps: Name of the torch dtype in which steps are stored; None: that of the file.
        fit: Name of the fit of the steps, an entry of `fits.FITS`.
        inputs: Rounding of inputs that runtimes multiply such weights with, if they round inputs; None: they never do.
    """

    name: str
    bits: int
    group: int | None = None
    rows: int = 1
    symmetric: bool = True
    levels: tuple[float, ...] | None = None
    steps: str | None = None
    fit: str = "plain"
    inputs: InputRounding | None = None

    @property
    def low(self) -> int:
        """Smallest code."""
        return -(1 << (self.bits - 1)) if self.symmetric and self.levels is None else 0

    @property
    def high(self) -> int:
        """Largest code."""
        return self.low + (1 << self.bits if self.levels is None else len(self.levels)) - 1

    @property
    def run(self) -> int:
        """Number of neighbouring weights stored together, a divisor of the layer's inputs."""
        return self.group or 1

    @property
    def minimum(self) -> bool:
        """Whether a group has a real-valued minimum in place of a zero point."""
        return False

    @property
    def only_in_gguf(self) -> bool:
        """Whether no file format but GGUF has it."""
        return False

    @property
    def global_scale(self) -> bool:
        """Whether all steps of a layer, and of the layers that a runtime joins with it, are divided by one number."""
        return self.fit == "shared"

    def groups(self, columns: int) -> int:
        """Return the number of steps of a row with `columns` weights."""
        return -(-columns // self.group) if self.group else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat(NumberFormat):
    """Blocks of neighbouring weights of a row, with a step and maybe a real-valued minimum for a block or on two levels.

    Args:
        columns: Number of weights of a block, a divisor of the layer's inputs.
        sc: Smallest and largest multiple of the block's step; (1, 1) where a group is a block.
        m: Largest multiple of the block's offset; 0 where there are no minima.
    """

    group: int
    fit: str = "blocks"
    columns: int
    sc: tuple[int, int] = (1, 1)
    m: int = 0

    @property
    def run(self) -> int:
        """Number of neighbouring weights stored together: those of a block."""
        return self.columns

    @property
    def single(self) -> bool:
        """Whether a block is one group with its own step and offset; offsets may then be negative."""
        return self.columns == self.group

    @property
    def minimum(self) -> bool:
        """Whether a group has a real-valued minimum of its own."""
        return self.single and self.m > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType(BlockFormat):
    """Block type of llama.cpp, a `BlockFormat` whose steps have 16 bits; those of mxfp4 are powers of two.

    Layouts: `ggml/src/ggml-common.h` of llama.cpp; `formats/gguf/gguf_layers.py` packs them.

    Args:
        number: Number of the type in files (`ggml_type`).
        bytes: Bytes of a block.
        fallback: Type for rows that this one does not divide, the same as in llama.cpp.
    """

    steps: str | None = "float16"
    number: int
    bytes: int
    fallback: str | None = None

    @property
    def only_in_gguf(self) -> bool:
        """Whether no file format but GGUF has it: not that of runtimes which round inputs."""
        return self.inputs is None

    @property
    def rate(self) -> float:
        """Bits per weight, including the steps."""
        return 8 * self.bytes / self.columns


IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # denser around 0
E2M1 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # four-bit floats, 0 once
FP4_MX = InputRounding(kind="fp", bits=4, group=32, steps="float8_e8m0fnu")
TYPES: dict[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType(name="q4_0", number=2, columns=32, bytes=18, bits=4, symmetric=True, group=32),
        BlockType(name="q4_1", number=3, columns=32, bytes=20, bits=4, symmetric=False, group=32, m=1),
        BlockType(name="q5_0", number=6, columns=32, bytes=22, bits=5, symmetric=True, group=32),
        BlockType(name="q5_1", number=7, columns=32, bytes=24, bits=5, symmetric=False, group=32, m=1),
        BlockType(name="iq4_nl", number=20, columns=32, bytes=18, bits=4, group=32, levels=IQ4_NL, fit="plain"),
        BlockType(
            name="iq4_xs", number=23, columns=256, bytes=136, bits=4, group=32, levels=IQ4_NL, sc=(-32, 31),
            fit="multiples", fallback="iq4_nl",
        ),
        BlockType(
            name="mxfp4", number=39, columns=32, bytes=17, bits=4, group=32, levels=E2M1, steps="float8_e8m0fnu",
            fit="octaves", inputs=FP4_MX,
        ),
        BlockType(name="q8_0", number=8, columns=32, bytes=34, bits=8, symmetric=True, group=32),
        BlockType(
            name="q2_k", number=10, columns=256, bytes=84, bits=2, symmetric=False, group=16, sc=(0, 15), m=15,
            fallback="q4_0",
        ),
        BlockType(
            name="q3_k", number=11, columns=256, bytes=110, bits=3, symmetric=True, group=16, sc=(-32, 31),
            fallback="q4_0",
        ),
        BlockType(
            name="q4_k", number=12, columns=256, bytes=144, bits=4, symmetric=False, group=32, sc=(0, 63), m=63,
            fallback="q5_0",
        ),
        BlockType(
            name="q5_k", number=13, columns=256, bytes=176, bits=5, symmetric=False, group=32, sc=(0, 63), m=63,
            fallback="q5_1",
        ),
        BlockType(
            name="q6_k", number=14, columns=256, bytes=210, bits=6, symmetric=True, group=16, sc=(-128, 127),
            fallback="q8_0",
        ),
    )
}  # fmt: skip

INT8 = "int8-row"
# description of these formats in messages
INTEGERS = "integers as int8, int4-g128, int8-row, int3-g64-asym, int3-g64-min"
ENTROPY_CODED_FORMAT = NumberFormat(name="coded", bits=0)  # codes without limits, entropy-coded
FP4_NV = InputRounding(kind="fp", bits=4, group=16, steps="float8_e4m3fn")
FP8_GROUP = InputRounding(kind="fp", bits=8, group=128)
FP8_MX = InputRounding(kind="fp", bits=8, group=32, steps="float8_e8m0fnu")
FP8_TOKEN, INT8_TOKEN = InputRounding(kind="fp", bits=8), InputRounding(kind="int", bits=8)
MXFP4 = TYPES["mxfp4"]  # also in compressed-tensors
NVFP4 = NumberFormat(name="nvfp4", bits=4, group=16, levels=E2M1, steps="float8_e4m3fn", fit="shared", inputs=FP4_NV)
GGUF_TYPES = TYPES | {  # also the type of a GGUF whose blocks are multiplied with one number for the whole matrix
    NVFP4.name: BlockType(
        name="nvfp4", number=40, columns=64, bytes=36, bits=4, group=16, levels=E2M1, steps="float8_e4m3fn",
        fit="shared", inputs=FP4_NV,
    ),
}  # fmt: skip
_HALF = [m / 8 * 2**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][1:-1]
E4M3 = (*(-level for level in reversed(_HALF)), 0.0, *_HALF)  # eight-bit floats to 448, without not-a-number, 0 once
FP8 = NumberFormat(name="fp8", bits=8, levels=E4M3, inputs=FP8_TOKEN)
FP8_BLOCK = NumberFormat(name="fp8-block", bits=8, group=128, rows=128, levels=E4M3, fit="tiles", inputs=FP8_GROUP)
MXFP8 = NumberFormat(name="mxfp8", bits=8, group=32, levels=E4M3, steps="float8_e8m0fnu", fit="octaves", inputs=FP8_MX)
FLOATS: tuple[NumberFormat, ...] = (MXFP4, NVFP4, FP8, FP8_BLOCK, MXFP8)  # formats with tables of levels
BY_NAME: dict[str, NumberFormat] = {each.name: each for each in (*TYPES.values(), *FLOATS, ENTROPY_CODED_FORMAT)}


def integers(bits: int, group: int | None, *, symmetric: bool = True, minimum: bool = False) -> NumberFormat:
    """Return the format of integer codes, with a step for every group or row, and maybe a zero point or a minimum.

    Raises:
        RecipeError: Rows have no groups, but `minimum` needs them.
    """
    kind = "-min" if minimum else "" if symmetric else "-asym"
    name = f"int{bits}-{'row' if group is None else f'g{group}'}{kind}"
    if not minimum:
        inputs = INT8_TOKEN if name == INT8 else None
        return NumberFormat(name=name, bits=bits, group=group, symmetric=symmetric, inputs=inputs)
    if group is None:
        raise RecipeError(f"{name}: only groups have a minimum. Use --group-size 32, 64 or 128.")
    return BlockFormat(name=name, bits=bits, group=group, columns=group, m=1, symmetric=False)


def number_format(name: str) -> NumberFormat:
    """Return the format of this name.

    Raises:
        RecipeError: No format has this name.
    """
    if (format := find_format(name)) is None:
        raise RecipeError(f"{name!r} is not a number format; expected {INTEGERS}, or one of {', '.join(BY_NAME)}.")
    return format


def find_format(name: str) -> NumberFormat | None:
    """Return the format of this name, or None; "int8" is the one that runtimes multiply with inputs in 8 bits."""
    name = INT8 if name == "int8" else name
    if (parts := re.fullmatch(r"int([2-8])-(?:row|g([1-9][0-9]{0,8}))(-asym|-min)?", name)) is not None:
        group, minimum = int(parts[2]) if parts[2] else None, parts[3] == "-min"
        if group is not None or not minimum:
            return integers(int(parts[1]), group, symmetric=parts[3] is None, minimum=minimum)
    return BY_NAME.get(name)
