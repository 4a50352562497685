"""Options that all schemes share, and what other rooms ask of a scheme. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import gcd
from typing import Any, ClassVar, Literal, Self

from nearplane.errors import RecipeError
from nearplane.number_formats import ENTROPY_CODED_FORMAT, NumberFormat, find_format, integers
from nearplane.recipe.file_formats import FileFormat, Format
from nearplane.system.arguments import check_fields, whole, within
from nearplane.system.sizes import bytes_in

Order = Literal["natural", "activation", "pivoted"]
Solver = Literal["nearest-plane", "round-to-nearest", "k-best"]
Allocation = Literal["uniform", "slope"]
Activations = Literal["none", "int8", "fp8", "fp4"]
CacheNumbers = Literal["none", "fp8"]  # of a server's keys and values

BEAM = 8  # candidates of a row; docs/log.md has the measurements behind this and the defaults of `schemes.py`
DEFAULT_GROUP_SIZES = (128, 64, 32, 16)  # default group sizes to try; kernels take no smaller ones
DEFAULT_POLISH = 1  # sweeps of coordinate descent over codes, on fixed grids
DEFAULT_ROUNDS = 3  # passes over steps and codes, on fixed grids
SWEEP_DAMP = 0.1  # default of `sweep_damp` where targets are corrected
# solvers that need no inputs; see `lattice/solvers.py`
UNCALIBRATED_SOLVERS: tuple[Solver, ...] = ("round-to-nearest",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Options of all schemes: correction of targets, and rounding.

    Args:
        order, solver, beam, damp, correct: See `quantize`.
        sweep_damp: Damping of the sweep. Default: 0.1 with corrected targets, because later layers compensate errors along the
            dominant input directions; otherwise equal to --damp.
    """

    order: Order = "activation"
    solver: Solver | None = None
    beam: int | None = None
    damp: float | Literal["auto"] = 0.01
    sweep_damp: float | None = None
    correct: bool = True

    FORMATS: ClassVar[tuple[Format, ...]] = ()  # formats that hold such weights, the default first
    default_solver: ClassVar[Solver] = "nearest-plane"
    entropy_coded: ClassVar[bool] = False  # whether codes have variable length in the file; else each has the same bits

    def __post_init__(self) -> None:
        check_fields(self, "order", "solver", "correct")
        if self.solver is None:
            object.__setattr__(self, "solver", self.default_solver)
        if self.beam is None and self.solver == "k-best":
            object.__setattr__(self, "beam", BEAM)
        if self.beam is not None and self.solver != "k-best":
            raise RecipeError(f"beam is {self.beam}, but only solver 'k-best' has a beam, not {self.solver!r}.")
        whole("beam", self.beam, 1, 1000)
        numeric = isinstance(self.damp, int | float) and 0 <= self.damp < 10
        within("damp", self.damp, self.damp == "auto" or numeric, "auto or a number from 0 to 10")
        damp = self.sweep_damp
        within("sweep_damp", damp, damp is None or (isinstance(damp, int | float) and 0 <= damp < 10), "0 to 10")
        if self.size is not None:
            object.__setattr__(self, "size", str(self.size))
            bytes_in(self.size)
        if not self.calibrated and damp is not None:
            raise RecipeError(f"sweep_damp needs calibration, but solver {self.solver!r} uses none.")

    @property
    def calibrated(self) -> bool:
        """Whether the solver uses the inputs of layers."""
        return self.solver not in UNCALIBRATED_SOLVERS

    @property
    def title(self) -> str:
        """Storage of the weights, as a phrase for the summary."""
        return "entropy-coded" if self.entropy_coded else "on fixed grids"

    @property
    def measured(self) -> bool:
        """Whether the number format of every layer is chosen by measuring."""
        return False

    @property
    def average(self) -> float | None:
        """Bits that codes of all layers take on average; None where the number format determines them, or a size."""
        return getattr(self, "rate", None)

    @property
    def default_allocation(self) -> Allocation:
        """Distribution of bits over layers if the recipe leaves it open: slope where layers are measured on calibration text."""
        return "slope" if self.measured or (self.entropy_coded and self.calibrated) else "uniform"

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether input embeddings and head are quantized too."""
        return getattr(self, "include_embeddings", False), getattr(self, "include_head", False)

    @property
    def dense_ends(self) -> str | None:
        """Type in a GGUF of embeddings and head that are not quantized; None: their own type, or they are quantized."""
        return None

    @property
    def number_format(self) -> NumberFormat:
        """Number format of layers that have none of their own."""
        return ENTROPY_CODED_FORMAT

    @property
    def weighs_rows(self) -> bool:
        """Whether rows to whose errors the network is more sensitive get finer steps."""
        return getattr(self, "rows", "equal") == "sensitivity"

    @property
    def rows_compensate(self) -> bool:
        """Whether rows compensated each other's errors, as versions before 0.3 could have them do; no bound holds then."""
        return bool(getattr(self, "two_sided", False))

    def check_allocation(self, allocate: Allocation | None, files: FileFormat) -> None:
        """Refuse a distribution of bits over layers that such weights cannot have in files of this format."""

    def unfit(self, format: str) -> str:
        """Return the error message for a format that cannot hold such weights, with the alternatives."""
        raise NotImplementedError

    def _unfit(self, format: str, contents: str, conflict: str, instead: str) -> str:
        other = f"use --format {self.FORMATS[0]}"
        return f"--format {format} is for {contents}, but {conflict}. {instead} with this format, or {other}."

    def stored_in(self, format: NumberFormat) -> Self:
        """Return the scheme of a layer that is stored in this format, as far as layers may differ."""
        return self

    def grouped(self, inputs: Iterable[int]) -> Self:
        """Return the scheme with group size "auto" resolved for layers with these numbers of inputs."""
        return self

    @property
    def size(self) -> str | None:
        """Size of the whole checkpoint folder as it was asked for."""
        return None

    @property
    def limit(self) -> int | None:
        """Bytes of the whole checkpoint folder that were asked for; None if there is no such limit."""
        return None if self.size is None else bytes_in(self.size)

    @property
    def asked(self) -> tuple[float, str] | None:
        """Size that was asked for, in bits per weight or bytes; None where the grid determines the size."""
        if (rate := getattr(self, "rate", None)) is not None:
            return rate, "bits per weight"
        return None if self.limit is None else (float(self.limit), "bytes")

    @property
    def descents(self) -> int:
        """Number of passes of coordinate descent over the codes."""
        return sum(getattr(self, name, None) or 0 for name in ("rounds", "polish"))

    def damp_of_the_sweep(self, corrected: bool) -> float | Literal["auto"]:
        """Return the damping of the sweep, for targets that are corrected or not."""
        if not self.calibrated:
            return self.damp
        if self.sweep_damp is not None:
            return self.sweep_damp
        return SWEEP_DAMP if self.correct and corrected else self.damp


def settle_refits(scheme: Scheme) -> None:
    """Fill in and check `polish` and `rounds`, which are 0 without calibration."""
    for name, default in (("polish", DEFAULT_POLISH), ("rounds", DEFAULT_ROUNDS)):
        whole(name, asked := getattr(scheme, name), 0, 1000)
        if asked and not scheme.calibrated:
            raise RecipeError(f"{name} needs calibration, but solver {scheme.solver!r} uses none.")
        if asked is None:
            object.__setattr__(scheme, name, default if scheme.calibrated else 0)


def names_of(part: type) -> set[str]:
    """Return the names of the fields of a dataclass."""
    return {f.name for f in fields(part)}


def options_of(format: NumberFormat) -> dict[str, Any]:
    """Return the options that a number format implies."""
    return {"bits": format.bits, "group_size": format.group, "symmetric": format.symmetric, "minimum": format.minimum}


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a grid of integers replaced by the bits, group size and symmetry that its name implies.

    Raises:
        RecipeError: One of these options is given too, with another value.
    """
    format = find_format(str(options.get("grid")).lower())
    if format is None or format.only_in_gguf:
        return dict(options)
    implied, others = options_of(format), {name: value for name, value in options.items() if name != "grid"}
    for name in implied:
        if options.get(name) not in (None, implied[name]):
            raise RecipeError(contradiction(name, options[name], format))
    return others | (implied if is_integer(format) else {"grid": format.name})


def is_integer(format: NumberFormat) -> bool:
    """Return whether a number format is one of integers, which bits, group size, symmetry and minimum describe."""
    return format == integers(format.bits, format.group, symmetric=format.symmetric, minimum=format.minimum)


def check_apart(scheme: Scheme) -> None:
    """Refuse to solve by a scheme whose rows are to compensate each other's errors, which only records still say.

    Raises:
        RecipeError: They are to.
    """
    if scheme.rows_compensate:
        raise RecipeError(
            "two_sided is true, but rows no longer compensate each other's errors: on published networks it gained nothing. "
            "Leave it out; for the recipe of an old record, use dataclasses.replace(scheme, two_sided=False)."
        )


def check_group(format: NumberFormat, name: str, inputs: int, every: Iterable[int]) -> None:
    """Refuse a layer whose inputs the groups of a format do not divide.

    Args:
        format: Number format of the layer.
        name: Its name.
        inputs: Number of its inputs.
        every: Numbers of inputs of all layers.

    Raises:
        RecipeError: They do not; the message names groups that divide the inputs of all layers.
    """
    if format.group is None or inputs % format.group == 0:
        return
    fits = gcd(*every)
    usual = fits & -fits  # the largest power of 2 that divides it
    remedy = f"--group-size {usual}, none, or a divisor of {fits}" if is_integer(format) else "another --grid"
    raise RecipeError(
        f"{name} has {inputs} inputs, not a multiple of the group size {format.group}. Use {remedy}, or leave it unquantized "
        f"with --ignore."
    )


def contradiction(name: str, value: object, format: NumberFormat) -> str:
    """Return the error message for an option that contradicts a grid."""
    return f"{name} is {value!r}, but --grid {format.name} determines how weights are stored. Leave out one of them."
