"""What a run should do, as frozen data: the command's flags, the JSON in the record and the Python keywords are all this.

Needs no torch. Other tools' spellings are in `spellings.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import gcd
from typing import Any, Literal

from nearplane.errors import RecipeError
from nearplane.patterns import fault_of
from nearplane.removed import refuse_removed
from nearplane.sizes import bytes_in
from nearplane.spellings import translated

Order = Literal["natural", "activation", "pivoted", "reversed"]
Solver = Literal["nearest-plane", "round-to-nearest", "k-best", "obq"]
Factorization = Literal["cholesky", "qr"]
Scale = Literal["minmax", "mse", "hessian"]
Groups = Literal["static", "current"]
Format = Literal["compressed-tensors", "gptq", "gptq_v2", "nearplane"]
Method = Literal["waterfill", "hptq"]
Coder = Literal["tans", "huffman"]
Gains = Literal["none", "rows", "columns", "both"]
Rows = Literal["sensitivity", "equal"]
Allocation = Literal["uniform", "slope"]
Device = Literal["auto", "cpu", "cuda"]
Way = Literal["rtn-mse", "gptq-mse", "rtn-huffman", "gptq-huffman", "nearplane-grid", "nearplane"]  # see compare.py

BEAM = 8  # candidates of a row; these three as docs/log.md found them worth what they cost
FITTING = (128, 64, 32, 16)  # weights that share a step by default: the first of these that fits; kernels take no fewer
POLISH = 2  # sweeps, on fixed grids
ROUNDS = 2  # of steps by least squares, on fixed grids


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one matrix is quantized.

    Args:
        bits: Bits of a code, 2 to 8; a fraction (3.5) is what layers get on average, each a whole number of its own.
        group_size: Weights that share a step, or none for one step a row. auto is 128, or the largest of 64, 32 and 16 that
            divides the inputs of all layers.
        symmetric: Whether grids have no zero-point.
        order: Which column is rounded first.
        solver: nearest-plane is Babai's algorithm (GPTQ); round-to-nearest needs no calibration and loses more; k-best keeps
            several candidates of every row; obq chooses the order of every row greedily (slow, up to 4,096 inputs). Default: k-best
            for entropy-coded weights (waterfill), else nearest-plane.
        beam: Candidates of k-best. Default: 8.
        polish: Sweeps of coordinate descent over the codes once they are solved. Default: 2 on fixed grids, else 0.
        rounds: How often steps are fitted to the codes by least squares and the codes solved again; the best round of every row is
            kept. Default: 2 on fixed grids.
        factor: cholesky of the Hessian, or qr of the inputs themselves, which loses half as many digits.
        scale: How steps are found: range of the weights, p-norm error search, or errors weighted by the Hessian.
        groups: Fit steps before the sweep (static) or to the current weights when it reaches a group.
        damp: Damping relative to the mean of the Hessian's diagonal, or auto: the least of 1e-4, 1e-3, ... that factors.
        sweep_damp: The same in the sweep. Default: 0.1 where targets are corrected, as later layers make up best for errors in
            strong directions; else, and with hptq, as --damp.
        correct: Whether targets make up for what the layers before lost.
    """

    bits: float = (
        4  # a whole number is an int: not `int | float`, of which command lines would take the first that fits
    )
    group_size: int | Literal["auto"] | None = "auto"
    symmetric: bool = True
    order: Order = "activation"
    solver: Solver | None = None
    beam: int | None = None
    polish: int | None = None
    rounds: int | None = None
    factor: Factorization = "cholesky"
    scale: Scale = "mse"
    groups: Groups = "static"
    damp: float | Literal["auto"] = 0.01
    sweep_damp: float | None = None
    correct: bool = True

    def __post_init__(self) -> None:
        if self.group_size == -1:  # how other tools write it
            object.__setattr__(self, "group_size", None)
        _within("bits", self.bits, isinstance(self.bits, int | float) and 2 <= self.bits <= 8, "a number from 2 to 8")
        if self.bits == int(self.bits):
            object.__setattr__(self, "bits", int(self.bits))
        size = self.group_size
        known = size in (None, "auto") or (isinstance(size, int) and size > 0)
        _within("group_size", size, known, "a positive number, auto or none")
        numeric = isinstance(self.damp, int | float) and 0 <= self.damp < 10
        _within("damp", self.damp, self.damp == "auto" or numeric, "auto or a number from 0 to 10")
        damp = self.sweep_damp
        _within("sweep_damp", damp, damp is None or (isinstance(damp, int | float) and 0 <= damp < 10), "0 to 10")
        for name, least in (("beam", 1), ("polish", 0), ("rounds", 0)):
            value = getattr(self, name)
            whole = value is None or (isinstance(value, int) and least <= value <= 1000)
            _within(name, value, whole, f"a whole number from {least} to 1000")
        for name in ("symmetric", "correct"):
            if not isinstance(getattr(self, name), bool):
                raise RecipeError(f"{name} is {getattr(self, name)!r}; expected true or false.")
        _one_of("order", self.order, Order)
        if self.solver is not None:
            _one_of("solver", self.solver, Solver)
        _one_of("factor", self.factor, Factorization)
        _one_of("scale", self.scale, Scale)
        _one_of("groups", self.groups, Groups)
        if self.beam is not None and self.solver not in (None, "k-best"):
            raise RecipeError(f"beam is {self.beam}, but only solver 'k-best' has one, not {self.solver!r}.")
        if self.groups == "current" and self.solver in ("k-best", "obq"):
            raise RecipeError(f"groups 'current' goes with solver 'nearest-plane', not {self.solver!r}.")
        if self.solver == "round-to-nearest":
            for name in ("polish", "rounds", "factor", "sweep_damp"):
                if getattr(self, name) not in (None, 0, "cholesky"):
                    raise RecipeError(f"{name} needs calibration, which solver 'round-to-nearest' does without.")
            if self.scale == "hessian":
                raise RecipeError(
                    "scale 'hessian' needs calibration, which solver 'round-to-nearest' does without; use 'mse'."
                )

    def resolved(self, rate: Rate | None) -> Rule:
        """Return the rule with the defaults that differ between fixed grids (None) and weights coded as `rate` says."""
        best: Solver = "k-best" if rate is not None and rate.method == "waterfill" else "nearest-plane"
        solver = self.solver or best
        refined = rate is None and solver != "round-to-nearest"
        return replace(
            self,
            solver=solver,
            beam=BEAM if self.beam is None and solver == "k-best" else self.beam,
            polish=(POLISH if refined else 0) if self.polish is None else self.polish,
            rounds=ROUNDS if self.rounds is None and refined else self.rounds,
        )

    def grouped(self, inputs: Iterable[int]) -> Rule:
        """Return the rule with the group size that auto stands for where layers have so many inputs."""
        return self if self.group_size != "auto" else replace(self, group_size=fitting_group(inputs))

    @property
    def grid_bits(self) -> float:
        """Bits per weight of codes, 16-bit steps and zero-points; one step a row counts as nothing, auto as groups of 128."""
        side = 16 + (0 if self.symmetric else self.bits)
        size = FITTING[0] if self.group_size == "auto" else self.group_size
        return self.bits + (side / size if size else 0.0)


def fitting_group(inputs: Iterable[int], most: int = FITTING[0]) -> int:
    """Return the largest group, of `most` weights or half, a quarter, ... of it, that divides all numbers of inputs.

    It is 16 where no group that kernels take does.
    """
    return max(FITTING[-1], gcd(most, *inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Which tokens the layers are calibrated on.

    Args:
        calibration: A .txt or .jsonl file, a folder of them, or a data set as name:config:split. Default: FineWeb-Edu sample-10BT.
        samples: Windows of tokens.
        seqlen: Tokens of a window. Default: 2048, or the model's positions if fewer.
        seed: Of the shuffle of data sets.
        true_sequential: Whether each layer of a block sees the quantized ones before it.
    """

    calibration: str | None = None
    samples: int = 256
    seqlen: int | None = None
    seed: int = 0
    true_sequential: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.calibration, os.PathLike):
            object.__setattr__(self, "calibration", os.fspath(self.calibration))
        if not isinstance(self.calibration, str | None):
            found = type(self.calibration).__name__
            raise RecipeError(
                f"calibration is a {found}; expected a file, a folder or the name of a data set. Give texts, tokens to quantize()."
            )
        _within("samples", self.samples, isinstance(self.samples, int) and self.samples > 0, "a positive number")
        _within(
            "seqlen",
            self.seqlen,
            self.seqlen is None or (isinstance(self.seqlen, int) and self.seqlen > 1),
            "at least 2",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How many bits entropy-coded weights may take, and how they are spent. Without rate and size, grids are fixed.

    Args:
        rate: Bits per quantized weight, 0.5 to 7, every byte of the layers' tensors counted.
        size: Most bytes that the whole checkpoint folder may have, tokenizer and all, instead of a rate: "3.1GB", "800MiB" or a
            number of bytes. It ends within 0.5 % below.
        method: Steps that give every plane the same error (waterfill), or one step a matrix (hptq: GPTQ with unbounded codes).
        coder: tans, or huffman (the coder of the HPTQ paper).
        shrink: Whether targets are shrunken for the noise that the rounding adds (waterfill only): the least loss of one
            matrix, but later layers make up for noise better than for outputs that all shrink.
        gains: Which scales are fitted again once the codes are known; with waterfill that of the whole matrix always is.
        rows: Whether rows whose errors the network minds more get finer steps (sensitivity), or all the same (equal).
        include_head: Quantize the output embeddings too, last of all.
        include_embeddings: Quantize the input embeddings too, before the blocks, which make up for it. Where they are also the
            head (tied), it is one matrix, which either option includes. Both get the mean rate, whatever layers are allocated.
    """

    rate: float | None = None
    size: str | None = None
    method: Method = "waterfill"
    coder: Coder = "tans"
    shrink: bool = False
    gains: Gains = "none"
    rows: Rows = "sensitivity"
    include_head: bool = False
    include_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and self.size is not None:
            raise RecipeError("Give --rate or --size, not both.")
        for name in ("include_head", "include_embeddings"):
            if not isinstance(included := getattr(self, name), bool):
                raise RecipeError(f"{name} is {included!r}; expected true or false.")
            if included and not self.wanted:
                raise RecipeError(
                    f"--{name.replace('_', '-')} needs --rate or --size: on fixed grids head and embeddings stay as they are."
                )
        numeric = isinstance(self.rate, int | float)
        _within("rate", self.rate, self.rate is None or (numeric and 0.5 <= float(self.rate) <= 7), "0.5 to 7 bits")
        if self.size is not None:
            object.__setattr__(self, "size", str(self.size))
            self.bytes()
        if not isinstance(self.shrink, bool):
            raise RecipeError(f"shrink is {self.shrink!r}; expected true or false.")
        _one_of("method", self.method, Method)
        _one_of("coder", self.coder, Coder)
        _one_of("gains", self.gains, Gains)
        _one_of("rows", self.rows, Rows)

    @property
    def wanted(self) -> bool:
        """Whether weights are to be entropy-coded."""
        return self.rate is not None or self.size is not None

    @property
    def classes(self) -> bool:
        """Whether rows and columns have tables of their own; the HPTQ paper's Huffman coder has one for the matrix."""
        return self.coder != "huffman"

    def bytes(self) -> int | None:
        """Return the size asked for, in bytes.

        Raises:
            RecipeError: see `bytes_in`.
        """
        if self.size is None:
            return None
        return bytes_in(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a run is told.

    Args:
        rule: How every matrix is quantized.
        calibration: Tokens.
        rate: What entropy-coded weights may take.
        format: Of the checkpoint that is written; default: nearplane with a rate or size, else compressed-tensors.
        allocate: The same bits for every layer (uniform), or more where the network needs them (slope, measured by a pass before
            the quantization); default: slope with a fraction of bits, and with a rate unless weights are rounded to nearest.
        max_loss: Relative loss that no layer may exceed: entropy-coded layers get more bits until they do not; on fixed grids those
            that do are named, and the command ends with code 2.
        ignore: Regular expressions; layers whose full name one of them is found in stay as they are.
    """

    rule: Rule = field(default_factory=Rule)
    calibration: Calibration = field(default_factory=Calibration)
    rate: Rate = field(default_factory=Rate)
    format: Format | None = None
    allocate: Allocation | None = None
    max_loss: float | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format is None:
            object.__setattr__(self, "format", "nearplane" if self.rate.wanted else "compressed-tensors")
        _one_of("format", self.format, Format)
        if self.rate.wanted and self.format != "nearplane":
            raise RecipeError(
                f"--format {self.format} does not go with a --rate or --size, which only nearplane's own format holds: leave out "
                f"--format, or use --bits."
            )
        if not self.rate.wanted and self.format == "nearplane":
            raise RecipeError(
                "--format nearplane is for entropy-coded weights, no --rate or --size is given: use --rate 2.5, not --bits."
            )
        _refuse_ignored(self)
        object.__setattr__(self, "rule", self.rule.resolved(self.rate if self.rate.wanted else None))
        most = self.max_loss
        _within("max_loss", most, most is None or (isinstance(most, int | float) and 0 < most < 1), "between 0 and 1")
        fractional = not self.rate.wanted and not isinstance(self.rule.bits, int)
        if self.allocate is None:
            measured = self.rate.wanted and self.rule.solver != "round-to-nearest"  # which needs no calibration
            object.__setattr__(self, "allocate", "slope" if measured or fractional else "uniform")
        _one_of("allocate", self.allocate, Allocation)
        if fractional and self.allocate == "uniform":
            raise RecipeError(
                f"bits is {self.rule.bits}, which no layer can have: with --allocate slope it is the average of layers' own widths."
            )
        for pattern in self.ignore:
            if (fault := fault_of(pattern)) is not None:
                raise RecipeError(f"ignore: {pattern[:60]!r} {fault}.")

    def for_layer(self, name: str) -> Rule | None:
        """Return the rule of the layer with this full name, or None if it is to stay as it is."""
        return None if any(re.search(pattern, name) for pattern in self.ignore) else self.rule

    def grouped(self, inputs: Iterable[int]) -> Recipe:
        """Return the recipe with the group size that auto stands for where layers have so many inputs, see `Rule.grouped`."""
        return self if self.rate.wanted else replace(self, rule=self.rule.grouped(inputs))

    def to_json(self) -> str:
        """Return the recipe as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        parts = {name: part(**data.pop(name)) for name, part in PARTS.items() if name in data}
        return cls(**parts, ignore=tuple(data.pop("ignore")), **data)

    @classmethod
    def from_spellings(cls, **spellings: Any) -> Recipe:
        """Build a recipe from flat keywords: our own field names, or those of GPTQModel, llm-compressor, auto-round and GPTQ.

        Raises:
            RecipeError: a keyword is unknown, given twice under two names, or has a value that means nothing here.
        """
        chosen: dict[str, Any] = {}
        known = set().union(*map(_names, PARTS.values())) | {"format", "ignore", "allocate", "max_loss"}
        for word, value in spellings.items():
            for name, meaning in translated(word, value, known).items():
                if name in chosen and chosen[name] != meaning:
                    raise RecipeError(
                        f"{word}={value!r} contradicts another keyword that already set {name}={chosen[name]!r}."
                    )
                chosen[name] = meaning
        if isinstance(ignored := chosen.get("ignore", ()), str):
            chosen["ignore"] = (ignored,)
        parts = {
            name: part(**{word: chosen.pop(word) for word in _names(part) & chosen.keys()})
            for name, part in PARTS.items()
        }
        if "ignore" in chosen:
            chosen["ignore"] = tuple(chosen["ignore"])
        return cls(**parts, **chosen)


def _refuse_ignored(recipe: Recipe) -> None:
    """Raise RecipeError if an option is set that the kind of codes asked for does not have."""
    if recipe.rate.wanted:
        part, plain, grid_only = recipe.rule, Rule(), ("bits", "group_size", "symmetric", "scale", "groups", "rounds")
        kind, way_out = "entropy-coded weights have no fixed grid", "leave it out, or leave out --rate and --size"
    else:
        part, plain, grid_only = recipe.rate, Rate(), tuple(sorted(_names(Rate) - {"rate", "size"}))  # type: ignore[assignment]
        kind, way_out = "only entropy-coded weights have that", "give --rate or --size"
    for name in grid_only:
        before = (
            FITTING[0] if name == "group_size" else None
        )  # its default when records of version 2 were first written
        if getattr(part, name) not in (getattr(plain, name), before):
            raise RecipeError(f"{name} is {getattr(part, name)!r}, but {kind}; {way_out}.")
    rate = recipe.rate
    own = recipe.rule.sweep_damp is not None or bool(recipe.rule.polish)
    if rate.wanted and rate.method == "hptq" and (rate.shrink or own or rate.gains != "none"):
        raise RecipeError(
            "hptq has one step a matrix and nothing else: shrink, sweep_damp, polish and gains go with waterfill."
        )


PARTS: Mapping[str, type[Any]] = {"rule": Rule, "calibration": Calibration, "rate": Rate}


def _names(part: type) -> set[str]:
    return {f.name for f in fields(part)}


def _within(name: str, value: object, good: bool, expected: str) -> None:
    if isinstance(value, bool) or not good:
        raise RecipeError(f"{name} is {value!r}; expected {expected}.")


def _one_of(name: str, value: object, choices: Any) -> None:
    refuse_removed(name, value)
    if value not in choices.__args__:
        raise RecipeError(f"{name} is {value!r}; expected one of {', '.join(choices.__args__)}.")
