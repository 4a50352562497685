"""What all kinds of scheme have, the words that options are given in, and how wrong ones are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from nearplane.errors import RecipeError
from nearplane.lattice.number_formats import CODED, NumberFormat

Order = Literal["natural", "activation", "pivoted"]
Solver = Literal["nearest-plane", "round-to-nearest", "k-best"]
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
Rows = Literal["sensitivity", "equal"]
Allocation = Literal["uniform", "slope"]

BEAM = 8  # candidates of a row; these three as docs/log.md found them worth what they cost
POLISH = 1  # sweeps, on fixed grids
ROUNDS = 3  # over steps and codes, on fixed grids
FITTING = (128, 64, 32, 16)  # weights that share a step by default: the first of these that fits; kernels take no fewer
SWEEP_DAMP = 0.1  # where targets are corrected
UNCALIBRATED: tuple[Solver, ...] = ("round-to-nearest",)  # which need no inputs, as `lattice/solvers.py` says


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What all kinds of scheme have: how targets are made and rounded.

    Args:
        order: Which column is rounded first.
        solver: nearest-plane is Babai's algorithm (GPTQ); round-to-nearest needs no calibration and loses more; k-best keeps
            several candidates of every row. Default: nearest-plane on grids, k-best for entropy-coded weights.
        beam: Candidates of k-best. Default: 8.
        damp: Damping relative to the mean of the Hessian's diagonal, or auto: the least of 1e-4, 1e-3, ... that factors. Raise it
            if a Hessian is not positive definite.
        sweep_damp: The same in the sweep. Default: 0.1 where targets are corrected, as later layers make up best for errors in
            strong directions; else as --damp.
        correct: Whether targets make up for what the layers before lost.
    """

    order: Order = "activation"
    solver: Solver | None = None
    beam: int | None = None
    damp: float | Literal["auto"] = 0.01
    sweep_damp: float | None = None
    correct: bool = True

    FORMATS: ClassVar[tuple[Format, ...]] = ()  # that hold such weights, the default first

    def __post_init__(self) -> None:
        one_of("order", self.order, Order)
        if self.solver is None:
            object.__setattr__(self, "solver", self.default_solver)
        one_of("solver", self.solver, Solver)
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
        if not self.calibrated and damp is not None:
            raise RecipeError(f"sweep_damp needs calibration, which solver {self.solver!r} does without.")

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
    def number_format(self) -> NumberFormat:
        """The number format that layers get, where they have none of their own."""
        return CODED

    @property
    def mixed(self) -> bool:
        """Whether layers have number formats of their own."""
        return False

    @property
    def tunable(self) -> bool:
        """Whether such codes and steps can be trained after the solve."""
        return True

    @property
    def types_vary(self) -> bool:
        """Whether a layer may have another number format than the scheme says, where that does not fit it."""
        return False

    @property
    def entropy_coded(self) -> bool:
        """Whether codes take as many bits as they hold; else each takes the same."""
        return False

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

    def storing(self, format: NumberFormat) -> Self:
        """Return the scheme of a layer that is stored in this format, as far as formats of layers may differ."""
        del format
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


def names_of(part: type) -> set[str]:
    """Return the names of the fields of a dataclass."""
    return {f.name for f in fields(part)}


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
    if value not in choices.__args__:
        raise RecipeError(f"{name} is {value!r}; expected one of {', '.join(choices.__args__)}.")
