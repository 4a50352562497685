"""What all kinds of scheme have, the words that options are given in, and how wrong ones are refused. Needs no torch.

Of formats of files it says who reads them and what these readers take, without writing one; what a layer's tensors look like in
them is in `formats/table.py`, under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from nearplane.errors import RecipeError
from nearplane.lattice.number_formats import CODED, TYPES, NumberFormat, find_format, integers

Order = Literal["natural", "activation", "pivoted"]
Solver = Literal["nearest-plane", "round-to-nearest", "k-best"]
Format = Literal["compressed-tensors", "gptq", "gptq_v2", "gguf", "nearplane"]
Allocation = Literal["uniform", "slope"]

BEAM = 8  # candidates of a row; this and those of `schemes.py` as docs/log.md found them worth what they cost
FITTING = (128, 64, 32, 16)  # weights that share a step by default: the first of these that fits; kernels take no fewer
SWEEP_DAMP = 0.1  # where targets are corrected
UNCALIBRATED: tuple[Solver, ...] = ("round-to-nearest",)  # which need no inputs, as `lattice/solvers.py` says


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """A format of files.

    Args:
        any_network: whether readers take encoders, and encoders with a decoder, besides language models.
        one_grid_for_experts: whether the experts of all blocks are decoded by one number format.
        by_gptqmodel: whether GPTQModel reads it, also what transformers alone does not.
        for_llama_cpp: whether it is one file for llama.cpp: types of blocks, the tokenizer and the record are in it.
        steps_of_model: whether steps have the dtype of the model.
        by_nearplane: whether nearplane alone reads it.
    """

    any_network: bool = False
    one_grid_for_experts: bool = False
    by_gptqmodel: bool = False
    for_llama_cpp: bool = False
    steps_of_model: bool = False
    by_nearplane: bool = False


FILE_FORMATS: dict[str | None, FileFormat] = {
    "compressed-tensors": FileFormat(any_network=True, one_grid_for_experts=True, steps_of_model=True),
    "gptq": FileFormat(by_gptqmodel=True),
    "gptq_v2": FileFormat(by_gptqmodel=True),
    "gguf": FileFormat(for_llama_cpp=True),
    "nearplane": FileFormat(any_network=True, by_nearplane=True),
    None: FileFormat(),  # not chosen yet
}


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
    default_solver: ClassVar[Solver] = "nearest-plane"  # where none is asked for
    entropy_coded: ClassVar[bool] = False  # whether codes take as many bits as they hold; else each takes the same
    types_vary: ClassVar[bool] = (
        False  # whether a layer may have another number format, where the scheme's does not fit it
    )

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
    def weighs_rows(self) -> bool:
        """Whether rows whose errors the network minds more get finer steps."""
        return False

    @property
    def joins_rows(self) -> bool:
        """Whether rows make up for each other's errors, so that none is rounded as if it were alone."""
        return False

    def with_bits(self, bits: int | None) -> Self:
        """Return the scheme of a layer whose codes have so many bits; None, or where codes have no limits: the scheme itself."""
        return self

    def storing(self, format: NumberFormat) -> Self:
        """Return the scheme of a layer that is stored in this format, as far as formats of layers may differ."""
        return self

    def grouped(self, inputs: Iterable[int]) -> Self:
        """Return the scheme with the group size that auto stands for where layers have so many inputs."""
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


def options_of(format: NumberFormat) -> dict[str, Any]:
    """Return the options that a number format stands for."""
    return {"bits": format.bits, "group_size": format.group, "symmetric": format.symmetric}


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those that a grid of integers stands for in its place.

    Raises:
        RecipeError: one is given besides, as another.
    """
    format = find_format(str(options.get("grid")).lower())
    if format is None or format.name in TYPES:
        return dict(options)
    said, rest = options_of(format), {name: value for name, value in options.items() if name != "grid"}
    for name in said:
        if options.get(name) not in (None, said[name]):
            raise RecipeError(contradiction(name, options[name], format))
    return rest | (
        said if format == integers(format.bits, format.group, symmetric=format.symmetric) else {"grid": format.name}
    )


def contradiction(name: str, value: object, format: NumberFormat) -> str:
    """Return the sentence for an option that a grid says otherwise."""
    return f"{name} is {value!r}, but --grid {format.name} says all of how weights are stored: leave out one of them."
