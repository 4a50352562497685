"""How matrices are quantized, as frozen data: on a grid of a fixed number of bits, or entropy-coded at any rate.

Two kinds of scheme, each with only its own options. Needs no torch; what the options lead to is in `matrix/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any, ClassVar, Literal, NamedTuple, Self

from nearplane.block_types import TYPES, BlockType
from nearplane.errors import RecipeError
from nearplane.removed import refuse_removed
from nearplane.sizes import bytes_in

Order = Literal["natural", "activation", "pivoted"]
Solver = Literal["nearest-plane", "round-to-nearest", "k-best", "obq"]
Factorization = Literal["cholesky", "qr"]
Scale = Literal["minmax", "mse"]
Format = Literal["compressed-tensors", "gptq", "gptq_v2", "gguf", "nearplane"]
GridName = Literal[  # of llama.cpp: types of blocks, and its mixes of them
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "q2_k_m",
    "q3_k_m",
    "q4_k_m",
    "q5_k_m",
]
Method = Literal["waterfill", "hptq"]
Coder = Literal["tans", "huffman"]
Rows = Literal["sensitivity", "equal"]
Allocation = Literal["uniform", "slope"]
Device = Literal["auto", "cpu", "cuda"]

BEAM = 8  # candidates of a row; these three as docs/log.md found them worth what they cost
POLISH = 1  # sweeps, on fixed grids
ROUNDS = 3  # over steps and codes, on fixed grids
FITTING = (128, 64, 32, 16)  # weights that share a step by default: the first of these that fits; kernels take no fewer
SWEEP_DAMP = 0.1  # where targets are corrected
UNCALIBRATED: tuple[Solver, ...] = ("round-to-nearest",)  # which need no inputs, as `lattice/solvers.py` says


class LayerGrid(NamedTuple):
    """A layer's grid as config files and records show it.

    Args:
        bits: of a code; a mean over all layers may be fractional; None where codes have no fixed width.
        group_size: columns that share a step; None: one step a row.
        symmetric: whether codes are around 0; None where there is no grid.
        permuted: whether groups may be of any columns; else they are runs of neighbours.
        blocks: name of the type of blocks in a GGUF; None: grids of other files.
    """

    bits: Any  # int | float | None
    group_size: Any  # int | "auto" | None
    symmetric: bool | None
    permuted: bool = False
    blocks: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What both kinds of scheme have: how targets are made and rounded.

    Args:
        order: Which column is rounded first.
        solver: nearest-plane is Babai's algorithm (GPTQ); round-to-nearest needs no calibration and loses more; k-best keeps
            several candidates of every row. Default: nearest-plane on grids, k-best for entropy-coded weights. From Python also
            obq, which chooses the order of every row greedily (slow, up to 4,096 inputs).
        beam: Candidates of k-best. Default: 8.
        damp: Damping relative to the mean of the Hessian's diagonal, or auto: the least of 1e-4, 1e-3, ... that factors. Raise it
            if a Hessian is not positive definite.
        sweep_damp: The same in the sweep. Default: 0.1 where targets are corrected, as later layers make up best for errors in
            strong directions; else as --damp.
        correct: Whether targets make up for what the layers before lost.
        factor: cholesky of the Hessian, or qr of the inputs themselves, which loses half as many digits.
    """

    order: Order = "activation"
    solver: Solver | None = None
    beam: int | None = None
    damp: float | Literal["auto"] = 0.01
    sweep_damp: float | None = None
    correct: bool = True
    factor: Factorization = "cholesky"

    FORMATS: ClassVar[tuple[Format, ...]] = ()  # that hold such weights, the default first

    def __post_init__(self) -> None:
        one_of("order", self.order, Order)
        if self.solver is None:
            object.__setattr__(self, "solver", self.default_solver)
        one_of("solver", self.solver, Solver)
        one_of("factor", self.factor, Factorization)
        if self.beam is None and self.solver == "k-best":
            object.__setattr__(self, "beam", BEAM)
        if self.beam is not None and self.solver != "k-best":
            raise RecipeError(f"beam is {self.beam}, but only solver 'k-best' has one, not {self.solver!r}.")
        whole("beam", self.beam, 1)
        numeric = isinstance(self.damp, int | float) and 0 <= self.damp < 10
        within("damp", self.damp, self.damp == "auto" or numeric, "auto or a number from 0 to 10")
        damp = self.sweep_damp
        within("sweep_damp", damp, damp is None or (isinstance(damp, int | float) and 0 <= damp < 10), "0 to 10")
        true_or_false("correct", self.correct)
        if not self.calibrated and (self.factor != "cholesky" or damp is not None):
            name = "sweep_damp" if damp is not None else "factor"
            raise RecipeError(f"{name} needs calibration, which solver {self.solver!r} does without.")

    @property
    def default_solver(self) -> Solver:
        """The solver where none is asked for."""
        return "nearest-plane"

    @property
    def calibrated(self) -> bool:
        """Whether the solver looks at the inputs of layers."""
        return self.solver not in UNCALIBRATED

    @property
    def title(self) -> str:
        """How weights are stored, in words."""
        return "on fixed grids"

    @property
    def default_allocation(self) -> Allocation:
        """How bits are spread over layers where the recipe does not say."""
        return "uniform"

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether input embeddings and head are quantized too."""
        return False, False

    @property
    def dense_ends(self) -> str | None:
        """The type of a GGUF in which embeddings and head stay as they are; None: their own, or they are quantized."""
        return None

    @property
    def layer_grid(self) -> LayerGrid:
        """The grid that layers get; of nothing where codes have no limits."""
        return LayerGrid(None, None, None)

    @property
    def coding(self) -> tuple[Coder, bool] | None:
        """How codes are entropy-coded: by which coder, and whether rows and columns have tables of their own; None: not."""
        return None

    @property
    def weighs_rows(self) -> bool:
        """Whether rows whose errors the network minds more get finer steps."""
        return False

    @property
    def joins_rows(self) -> bool:
        """Whether rows make up for each other's errors, so that none is rounded as if it were alone."""
        return False

    def with_bits(self, bits: int | None) -> Self:
        """Return the scheme of a layer whose codes have so many bits; None, or where codes have no limits: the scheme itself."""
        del bits
        return self

    def with_blocks(self, blocks: str | None) -> Self:
        """Return the scheme of a layer whose blocks have this type; None, or where there are no blocks: the scheme itself."""
        del blocks
        return self

    def grouped(self, inputs: Iterable[int]) -> Self:
        """Return the scheme with the group size that auto stands for where layers have so many inputs."""
        del inputs
        return self

    @property
    def asked(self) -> tuple[float, str] | None:
        """How much the checkpoint was to take, in bits per weight or bytes; None where the grid says it."""
        return None

    def damp_of_the_sweep(self, corrected: bool) -> float | Literal["auto"]:
        """Return the damping of the sweep, of targets that are corrected or not."""
        if not self.calibrated:
            return self.damp
        if self.sweep_damp is not None:
            return self.sweep_damp
        return SWEEP_DAMP if self.correct and corrected else self.damp


@dataclass(frozen=True, slots=True, kw_only=True)
class GridScheme(Scheme):
    """Codes of a fixed number of bits on a grid of steps, which existing runtimes load.

    Args:
        bits: Bits of a code, 2 to 8; a fraction (3.5) is what layers get on average, each a whole number of its own.
        group_size: Weights that share a step, or none for one step a row. auto is 128, or the largest of 64, 32 and 16 that
            divides the inputs of all layers, or none where 16 does not.
        symmetric: Whether grids have no zero-point.
        scale: How steps are found: range of the weights, or p-norm error search.
        polish: Sweeps of coordinate descent over the codes at the end. Default: 1.
        rounds: Passes of coordinate descent over steps, by least squares, and codes together; then codes are solved once more on
            the fitted steps, and the better ones of every row are kept. Default: 3.
        two_sided: Whether rows make up for each other's errors too, as the network's gradients say, not only columns. Takes a
            backward pass; no bound of a sweep holds for such codes.
    """

    bits: float = 4  # an int where it is whole; not `int | float`, of which command lines take the first that fits
    group_size: int | Literal["auto"] | None = "auto"
    symmetric: bool = True
    scale: Scale = "mse"
    polish: int | None = None
    rounds: int | None = None
    two_sided: bool = False

    FORMATS: ClassVar[tuple[Format, ...]] = ("compressed-tensors", "gptq", "gptq_v2", "gguf")

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        if self.group_size == -1:  # how other tools write it
            object.__setattr__(self, "group_size", None)
        within("bits", self.bits, isinstance(self.bits, int | float) and 2 <= self.bits <= 8, "a number from 2 to 8")
        if self.bits == int(self.bits):
            object.__setattr__(self, "bits", int(self.bits))
        size = self.group_size
        known = size in (None, "auto") or (isinstance(size, int) and size > 0)
        within("group_size", size, known, "a positive number, auto or none")
        true_or_false("symmetric", self.symmetric)
        one_of("scale", self.scale, Scale)
        true_or_false("two_sided", self.two_sided)
        if self.two_sided and not self.calibrated:
            raise RecipeError(f"two_sided needs calibration, which solver {self.solver!r} does without.")
        _settle_refits(self)

    @property
    def joins_rows(self) -> bool:
        """Whether rows make up for each other's errors."""
        return self.two_sided

    @property
    def default_allocation(self) -> Allocation:
        """A fraction of bits is what layers get on average."""
        return "uniform" if isinstance(self.bits, int) else "slope"

    @property
    def grid_bits(self) -> float:
        """Bits per weight of codes, 16-bit steps and zero-points; one step a row counts as nothing."""
        side = 16 + (0 if self.symmetric else self.bits)
        return self.bits + (side / self.group_size if isinstance(self.group_size, int) else 0.0)

    @property
    def layer_grid(self) -> LayerGrid:
        """The grid that layers get."""
        return LayerGrid(self.bits, self.group_size, self.symmetric)

    def with_bits(self, bits: int | None) -> Self:
        """Return the scheme of a layer whose codes have so many bits."""
        return self if bits is None else replace(self, bits=bits)

    def grouped(self, inputs: Iterable[int]) -> Self:
        """Return the scheme with the group size that auto stands for where layers have so many inputs."""
        if self.group_size != "auto":
            return self
        columns = list(inputs)
        fitting = fitting_group(columns)
        return replace(self, group_size=None if any(n % fitting for n in columns) else fitting)


CHOSEN = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")  # types that layers get by measuring, by rising rate
Dense = Literal["f32", "f16", "bf16"]
Ends = Literal[
    "auto", "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScheme(Scheme):
    """Codes on the grids of llama.cpp, whose steps are on two levels: files that it runs.

    Args:
        grid: A type of blocks of llama.cpp (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k), or one of its mixes
            (q2_k_m, q3_k_m, q4_k_m, q5_k_m), or bits per weight in blocks, steps and all (4.5): every layer gets a type of its own,
            by measuring. Rows that blocks of 256 do not divide get the type that llama.cpp takes in its place.
        embeddings: Type of embeddings and head, which are quantized too; f32, f16 or bf16 leaves them as they are, in that type.
            auto is as llama.cpp: q6_k for the head, also where it is the embeddings; for other embeddings the type of --grid.
        polish: Sweeps of coordinate descent over the codes at the end. Default: 1.
        rounds: Passes of coordinate descent over steps, by least squares, and codes together; then codes are solved once more on
            the fitted steps, and the better ones of every row are kept. Default: 3.
    """

    grid: str = field(kw_only=False)
    embeddings: Ends = "auto"
    polish: int | None = None
    rounds: int | None = None

    FORMATS: ClassVar[tuple[Format, ...]] = ("gguf",)

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        object.__setattr__(self, "grid", str(self.grid).lower())
        try:
            bits = float(self.grid)
        except ValueError:
            one_of("grid", self.grid, GridName)
        else:
            rates = [TYPES[name].rate for name in CHOSEN]
            within(
                "grid",
                self.grid,
                rates[0] <= bits <= rates[-1],
                f"{rates[0]} to {rates[-1]} bits per weight, or a type",
            )
            if not self.calibrated:
                raise RecipeError(f"grid is {self.grid}, which is measured on text; solver {self.solver!r} has none.")
        one_of("embeddings", self.embeddings, Ends)
        _settle_refits(self)

    @property
    def title(self) -> str:
        """How weights are stored, in words."""
        return f"on llama.cpp's grids ({self.grid})"

    @property
    def budget(self) -> float | None:
        """Bits per weight in blocks, where types are chosen by measuring; else None."""
        return None if self.grid[0] == "q" else float(self.grid)

    @property
    def default_allocation(self) -> Allocation:
        """Types of a budget are chosen by measuring."""
        return "uniform" if self.budget is None else "slope"

    @property
    def kind(self) -> BlockType:
        """The type of blocks; of a mix the one that most layers have, of a budget the largest that it has room for."""
        if self.budget is not None:
            return TYPES[[name for name in CHOSEN if TYPES[name].rate <= self.budget][-1]]
        return TYPES[self.grid.removesuffix("_m")]

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether input embeddings and head are quantized too."""
        return (self.dense_ends is None,) * 2

    @property
    def dense_ends(self) -> str | None:
        """The type in which embeddings and head stay as they are; None where they are quantized."""
        return self.embeddings if self.embeddings in Dense.__args__ else None  # type: ignore[attr-defined]

    @property
    def mixed(self) -> bool:
        """Whether layers have types of their own."""
        return self.grid not in TYPES

    def with_blocks(self, blocks: str | None) -> Self:
        """Return the scheme of a layer whose blocks have this type."""
        return self if blocks is None else replace(self, grid=blocks)

    @property
    def layer_grid(self) -> LayerGrid:
        """The grid that layers get, where they have none of their own."""
        kind = self.kind
        return LayerGrid(kind.bits, kind.group, kind.symmetric, blocks=kind.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateScheme(Scheme):
    """Codes without limits, entropy-coded: as many bits as they are told to take, in nearplane's own format.

    Args:
        rate: Bits per quantized weight, 0.5 to 7, every byte of the layers' tensors counted.
        size: Of the whole checkpoint folder, tokenizer and all, instead of a rate: "3.1GB", "800MiB" or a number of bytes. A
            limit that is not exceeded.
        include_head: Quantize the output embeddings too, last of all.
        include_embeddings: Quantize the input embeddings too, before the blocks, which make up for it. Where they are also the
            head (tied), it is one matrix, which either option includes. Both get the mean rate, whatever layers are allocated.
        rows: Whether rows whose errors the network minds more get finer steps (sensitivity), or all the same (equal).
        method: Steps that give every plane the same error (waterfill), or one step a matrix (hptq: GPTQ with unbounded codes).
        coder: tans, or huffman (the coder of the HPTQ paper).
    """

    rate: float | None = None
    size: str | None = None
    include_head: bool = False
    include_embeddings: bool = False
    rows: Rows = "sensitivity"
    method: Method = "waterfill"
    coder: Coder = "tans"

    FORMATS: ClassVar[tuple[Format, ...]] = ("nearplane",)

    def __post_init__(self) -> None:
        one_of("method", self.method, Method)
        Scheme.__post_init__(self)
        if (self.rate is None) == (self.size is None):
            given = "neither" if self.rate is None else "both"
            raise RecipeError(f"Entropy-coded weights take a --rate or a --size, found {given}: give one of them.")
        numeric = isinstance(self.rate, int | float)
        within("rate", self.rate, self.rate is None or (numeric and 0.5 <= float(self.rate or 0) <= 7), "0.5 to 7 bits")
        if self.size is not None:
            object.__setattr__(self, "size", str(self.size))
            self.bytes()
        true_or_false("include_head", self.include_head)
        true_or_false("include_embeddings", self.include_embeddings)
        one_of("coder", self.coder, Coder)
        one_of("rows", self.rows, Rows)
        if self.method == "hptq" and self.sweep_damp is not None:
            raise RecipeError("hptq has one step a matrix and nothing else: sweep_damp goes with waterfill.")

    @property
    def default_solver(self) -> Solver:
        """A beam, which pays where steps cannot be refitted; the HPTQ paper's is a sweep."""
        return "k-best" if self.method == "waterfill" else "nearest-plane"

    @property
    def title(self) -> str:
        """How weights are stored, in words."""
        return f"entropy-coded ({self.method}, {self.coder})"

    @property
    def default_allocation(self) -> Allocation:
        """By measured slopes, which rounding to nearest, without calibration, does not have."""
        return "slope" if self.calibrated else "uniform"

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether input embeddings and head are quantized too."""
        return self.include_embeddings, self.include_head

    @property
    def asked(self) -> tuple[float, str] | None:
        """How much the checkpoint was to take, in bits per weight or bytes."""
        return (self.rate, "bits per weight") if self.rate is not None else (float(self.bytes() or 0), "bytes")

    @property
    def classes(self) -> bool:
        """Whether rows and columns have tables of their own; the HPTQ paper's Huffman coder has one for the matrix."""
        return self.coder != "huffman"

    @property
    def coding(self) -> tuple[Coder, bool]:
        """By which coder, and whether rows and columns have tables of their own."""
        return self.coder, self.classes

    @property
    def weighs_rows(self) -> bool:
        """Whether rows whose errors the network minds more get finer steps; not where a matrix has one step."""
        return self.method == "waterfill" and self.rows == "sensitivity"

    def damp_of_the_sweep(self, corrected: bool) -> float | Literal["auto"]:
        """Return the damping of the sweep: with hptq that of everything else."""
        return self.damp if self.method == "hptq" else Scheme.damp_of_the_sweep(self, corrected)

    def bytes(self) -> int | None:
        """Return the size asked for, in bytes.

        Raises:
            RecipeError: see `bytes_in`.
        """
        return None if self.size is None else bytes_in(self.size)


AnyScheme = GridScheme | BlockScheme | RateScheme


def scheme_of(**options: Any) -> AnyScheme:
    """Return the scheme that options are of: entropy-coded with a rate or size, of llama.cpp's grids with one, else on a grid.

    Raises:
        RecipeError: an option is one that only another kind has, or none at all.
    """
    coded = options.get("rate") is not None or options.get("size") is not None
    blocks = options.get("grid") is not None
    if coded and blocks:
        name = "rate" if options.get("rate") is not None else "size"
        raise RecipeError(
            f"grid is {options['grid']!r} and {name} {options[name]!r}, but entropy-coded weights have no fixed grid: leave out "
            f"one of them."
        )
    kind: type[AnyScheme] = RateScheme if coded else BlockScheme if blocks else GridScheme
    known = {name for each in (GridScheme, BlockScheme, RateScheme) for name in names_of(each)}
    if unknown := options.keys() - known:
        raise RecipeError(
            f"{min(unknown)} is no option of how layers are quantized; expected one of {', '.join(sorted(names_of(kind)))}. What "
            f"holds for the whole run is given once."
        )
    for name in sorted(options.keys() - names_of(kind)):
        if options[name] is None:
            continue
        if coded:
            raise RecipeError(
                f"{name} is {options[name]!r}, but entropy-coded weights have no fixed grid; leave it out, or leave out --rate "
                f"and --size."
            )
        if blocks:
            raise RecipeError(
                f"{name} is {options[name]!r}, but --grid {options['grid']} says all of how weights are stored: leave out one of "
                f"them."
            )
        raise RecipeError(
            f"{name} is {options[name]!r}, but only entropy-coded weights have that; give --rate or --size, or leave it out."
        )
    return kind(**{name: value for name, value in options.items() if name in names_of(kind)})


def _settle_refits(scheme: GridScheme | BlockScheme) -> None:
    """Fill in and check what is done after a solve: nothing without calibration."""
    for name, default in (("polish", POLISH), ("rounds", ROUNDS)):
        if (asked := getattr(scheme, name)) and not scheme.calibrated:
            raise RecipeError(f"{name} needs calibration, which solver {scheme.solver!r} does without.")
        if asked is None:
            object.__setattr__(scheme, name, default if scheme.calibrated else 0)
        whole(name, getattr(scheme, name), 0)


def names_of(part: type) -> set[str]:
    """Return the names of the fields of a dataclass."""
    return {f.name for f in fields(part)}


def fitting_group(inputs: Iterable[int], most: int = FITTING[0]) -> int:
    """Return the largest group, of `most` weights or half, a quarter, ... of it, that divides all numbers of inputs.

    It is 16 where no group that kernels take does.
    """
    return max(FITTING[-1], gcd(most, *inputs))


def within(name: str, value: object, good: bool, expected: str) -> None:
    """Refuse a number that is not what is expected."""
    if isinstance(value, bool) or not good:
        raise RecipeError(f"{name} is {value!r}; expected {expected}.")


def whole(name: str, value: object, least: int) -> None:
    """Refuse what is neither None nor a whole number from `least` to 1000."""
    good = value is None or (isinstance(value, int) and least <= value <= 1000)
    within(name, value, good, f"a whole number from {least} to 1000")


def true_or_false(name: str, value: object) -> None:
    """Refuse what is neither."""
    if not isinstance(value, bool):
        raise RecipeError(f"{name} is {value!r}; expected true or false.")


def one_of(name: str, value: object, choices: Any) -> None:
    """Refuse what is none of a Literal's words."""
    refuse_removed(name, value)
    if value not in choices.__args__:
        raise RecipeError(f"{name} is {value!r}; expected one of {', '.join(choices.__args__)}.")
