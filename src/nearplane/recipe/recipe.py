"""What a run should do, as frozen data: the command's flags, the JSON in the record and the Python keywords are all this.

Needs no torch. How matrices are quantized is in `schemes.py`, other tools' spellings are in `spellings.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from nearplane.errors import RecipeError
from nearplane.recipe.patterns import compiled, fault_of
from nearplane.recipe.scheme import FILE_FORMATS, Allocation, FileFormat, Format, names_of, one_of, spelled_out, within
from nearplane.recipe.schemes import AnyScheme, BlockScheme, GridScheme, RateScheme, scheme_of
from nearplane.recipe.spellings import translated

Rare = Literal["mean", "error"]
Way = Literal["rtn-mse", "gptq-mse", "rtn-huffman", "gptq-huffman", "nearplane-grid", "nearplane"]  # see compare.py
Tune = Literal["none", "network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Which tokens the layers are calibrated on.

    Args:
        calibration: A .txt or .jsonl file, a folder of them, or a data set as name:config:split. Default: FineWeb-Edu sample-10BT.
        samples: Windows of tokens.
        seqlen: Tokens of a window. Default: 2048, or the model's positions if fewer.
        seed: Of the shuffle of data sets.
        true_sequential: Whether each layer of a block sees the quantized ones before it.
        rare_experts: What becomes of an expert that fewer than four tokens for each of its inputs reach: mean says so, and
            fills its Hessian up to one token an input with the mean over the experts of its block; error ends the run.
    """

    calibration: str | None = None
    samples: int = 256
    seqlen: int | None = None
    seed: int = 0
    true_sequential: bool = True
    rare_experts: Rare = "mean"

    def __post_init__(self) -> None:
        if isinstance(self.calibration, os.PathLike):
            object.__setattr__(self, "calibration", os.fspath(self.calibration))
        if not isinstance(self.calibration, str | None):
            found = type(self.calibration).__name__
            raise RecipeError(
                f"calibration is a {found}; expected a file, a folder or the name of a data set. Give texts, tokens to quantize()."
            )
        one_of("rare_experts", self.rare_experts, Rare)
        within("samples", self.samples, isinstance(self.samples, int) and self.samples > 0, "a positive number")
        length = self.seqlen
        within("seqlen", length, length is None or (isinstance(length, int) and length > 1), "at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScheme:
    """Another scheme for some layers.

    Args:
        pattern: regular expression; layers whose full name it is found in have the scheme.
        scheme: of the same kind as that of the recipe.
    """

    pattern: str
    scheme: AnyScheme

    def __post_init__(self) -> None:
        check_pattern("layers", self.pattern)

    def check(self, others: AnyScheme) -> None:
        """Refuse a scheme that does not go with that of all other layers.

        Raises:
            RecipeError: with what differs.
        """
        own, called = self.scheme, f"layers {self.pattern!r}"
        if type(own) is not type(others):
            raise RecipeError(
                f"{called} have a {type(own).__name__}, the others a {type(others).__name__}: no format holds both. Give bits "
                f"for all layers, or a grid, or a rate."
            )
        if isinstance(getattr(others, "bits", None), float):
            raise RecipeError(
                f"{called} have a scheme of their own, and a fraction of bits gives every layer a width of its own: give a whole "
                f"number of bits, or leave out the layers."
            )
        if getattr(others, "size", None) is not None and getattr(own, "rate", None) is not None:
            raise RecipeError(
                f"{called} have a rate of their own, and a size is spread over all layers: give a rate in place of the size, or "
                f"leave out theirs."
            )
        for name in ("order", "correct", "include_head", "include_embeddings", "embeddings", "rows"):
            if getattr(own, name, None) != getattr(others, name, None):
                raise RecipeError(f"{called} have another {name}, which is one for a whole run. Leave it out there.")
        if own.calibrated and not others.calibrated:
            raise RecipeError(
                f"{called} are solved by {own.solver}, which needs calibration; the others do without. Give the recipe that "
                f"solver, and the other layers {others.solver}."
            )
        if isinstance(bits := getattr(own, "bits", None), float):
            raise RecipeError(f"{called} have {bits} bits, which no layer can have. Give them a whole number.")
        if (size := getattr(own, "size", None)) != getattr(others, "size", None):
            raise RecipeError(
                f"{called} have the size {size}, which is that of a whole checkpoint. Give them a rate in bits per weight."
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a run is told.

    Args:
        scheme: How every matrix is quantized.
        calibration: Tokens.
        layers: Other schemes, for layers that a pattern is found in; the first that matches counts.
        format: Of the checkpoint that is written; default: nearplane with a rate or size, gguf with a grid of llama.cpp,
            else compressed-tensors.
        ignore: Regular expressions; layers whose full name one of them is found in stay as they are.
        allocate: The same bits for every layer (uniform), or more where the network needs them (slope, measured by a pass before
            the quantization); default: slope with a fraction of bits, and with a rate unless weights are rounded to nearest.
        max_loss: Relative loss that no layer may exceed: entropy-coded layers get more bits until they do not; on fixed grids those
            that do are named, and the command ends with code 2.
        tune: What is trained after the solve: network: steps, norms and, at 2 and 3 bits, codes on the divergence of the network's
            predictions from the original's, see `nearplane tune`; entropy-coded weights keep their size.
        pre: name of the pre-tokenizer in llama.cpp, of a GGUF; default: as the structure of the tokenizer tells.
    """

    scheme: AnyScheme = field(default_factory=GridScheme)
    calibration: Calibration = field(default_factory=Calibration)
    layers: tuple[LayerScheme, ...] = ()
    format: Format | None = None
    ignore: tuple[str, ...] = ()
    allocate: Allocation | None = None
    max_loss: float | None = None
    tune: Tune = "none"
    pre: str | None = None

    def __post_init__(self) -> None:
        if self.format is None:
            object.__setattr__(self, "format", self.scheme.FORMATS[0])
        one_of("format", self.format, Format)
        if self.format not in self.scheme.FORMATS:
            raise RecipeError(_unfit(str(self.format), self.scheme))
        for each in self.layers:
            each.check(self.scheme)
        most = self.max_loss
        within("max_loss", most, most is None or (isinstance(most, int | float) and 0 < most < 1), "between 0 and 1")
        one_of("tune", self.tune, Tune)
        if self.pre is not None and not self.files.for_llama_cpp:
            raise RecipeError(
                f"--pre is {self.pre!r}, which only a GGUF says, and the format is {self.format}. Leave it out."
            )
        if self.allocate is None:
            object.__setattr__(self, "allocate", self.scheme.default_allocation)
        one_of("allocate", self.allocate, Allocation)
        if isinstance(self.scheme, BlockScheme):
            self._check_blocks(self.scheme)
        elif isinstance(self.scheme, GridScheme) and self.files.for_llama_cpp and self.allocate == "slope":
            raise RecipeError(
                f"bits is {self.scheme.bits} with --allocate slope: in a GGUF layers get types of llama.cpp. Use "
                f"BlockScheme({self.scheme.bits})."
            )
        if self.allocate == "uniform" and isinstance(bits := getattr(self.scheme, "bits", 4), float):
            raise RecipeError(
                f"bits is {bits}, which no layer can have: with --allocate slope it is the average of layers' own widths."
            )
        for pattern in self.ignore:
            check_pattern("ignore", pattern)

    @property
    def files(self) -> FileFormat:
        """What is known of the format of the files."""
        return FILE_FORMATS[self.format]

    def _check_blocks(self, scheme: BlockScheme) -> None:
        """Refuse a grid and a size, and an allocation that is not theirs.

        Raises:
            RecipeError: with what contradicts what.
        """
        if scheme.grid is not None and scheme.size is not None:
            raise RecipeError(
                f"grid is {scheme.grid!r} and size {scheme.size!r}, for which types are chosen by measuring: leave out one of them."
            )
        if self.allocate != scheme.default_allocation:
            given = "--size" if scheme.grid is None else f"--grid {scheme.grid}"
            raise RecipeError(
                f"allocate is {self.allocate} with {given}: layers get types by measuring for a size, or where --grid is a number "
                f"of bits per weight, as --grid 4.5, and only there."
            )

    @cached_property
    def _schemes(self) -> dict[str, AnyScheme]:
        """Schemes of layers that were asked for, by name: patterns may be as many as layers."""
        return {}

    def ignores(self, name: str) -> bool:
        """Return whether the layer with this full name is to stay as it is."""
        return any(compiled(pattern).search(name) for pattern in self.ignore)

    def scheme_of(self, name: str) -> AnyScheme:
        """Return the scheme of the layer with this full name, which is none of those that are to stay as they are."""
        if name not in self._schemes:
            schemes = (each.scheme for each in self.layers if compiled(each.pattern).search(name))
            self._schemes[name] = next(schemes, self.scheme)
        return self._schemes[name]

    def grouped(self, inputs: Iterable[int]) -> Recipe:
        """Return the recipe with the group size that auto stands for where layers have so many inputs."""
        counts = tuple(inputs)
        layers = tuple(replace(each, scheme=each.scheme.grouped(counts)) for each in self.layers)
        return replace(self, scheme=self.scheme.grouped(counts), layers=layers)

    def to_json(self) -> str:
        """Return the recipe as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        format = data.get("format")
        layers = tuple(
            LayerScheme(pattern=each["pattern"], scheme=scheme_of(into=format, **each["scheme"]))
            for each in data.pop("layers")
        )
        return cls(
            scheme=scheme_of(into=format, **data.pop("scheme")),
            calibration=Calibration(**data.pop("calibration")),
            layers=layers,
            ignore=tuple(data.pop("ignore")),
            **data,
        )

    @classmethod
    def from_spellings(cls, **spellings: Any) -> Recipe:
        """Build a recipe from flat keywords: our own field names, or those of GPTQModel, llm-compressor, auto-round and GPTQ.

        Raises:
            RecipeError: a keyword is unknown, given twice under two names, or has a value that means nothing here.
        """
        options = chosen(spellings)
        layers = options.pop("layers", None) or {}
        if not isinstance(layers, Mapping) or not all(isinstance(own, Mapping) for own in layers.values()):
            raise RecipeError(
                f"layers is {str(layers)[:60]!r}; expected patterns and what differs there: {{'down_proj': {{'bits': 4}}}}. A "
                f"Recipe takes LayerScheme objects."
            )
        own = {name: options.pop(name) for name in OWN & options.keys()}
        tokens = {name: options.pop(name) for name in names_of(Calibration) & options.keys()}
        other = tuple(
            LayerScheme(pattern=pattern, scheme=scheme_of(into=own.get("format"), **changed(options, chosen(changes))))
            for pattern, changes in layers.items()
        )
        scheme = scheme_of(into=own.get("format"), spread=own.get("allocate"), **options)
        return cls(scheme=scheme, calibration=Calibration(**tokens), layers=other, **own)


def _unfit(format: str, scheme: AnyScheme) -> str:
    """Return the sentence for a format that does not hold the weights of a scheme: what it holds, and the ways out."""
    if isinstance(scheme, RateScheme):
        given = f"--rate {scheme.rate:g}" if scheme.size is None else f"--size {scheme.size}"
        holds, found = "fixed grids", f"{given} is for entropy-coded weights"
        instead = (
            "give --bits, --grid, or --size without --rate" if FILE_FORMATS[format].for_llama_cpp else "give --bits"
        )
    elif isinstance(scheme, BlockScheme):
        given = f"--size {scheme.size}" if scheme.grid is None else f"--grid {scheme.grid}"
        holds, found, instead = "no grids of llama.cpp", f"{given} is for these", "give --bits"
    else:
        given = f"--bits {scheme.bits}" if scheme.grid is None else f"--grid {scheme.grid}"
        holds, found = "entropy-coded weights", f"{given} is for fixed grids"
        instead = f"give --rate {scheme.bits}, or --size"
    return (
        f"--format {format} holds {holds}, and {found}. For that format {instead}; for such weights leave out --format, and they "
        f"are written as {scheme.FORMATS[0]}."
    )


def changed(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of layers that have some of their own; with a solver of theirs, what belongs to the others' stays away.

    Raises:
        RecipeError: some are entropy-coded and the others on a grid.
    """
    named = own.get("grid") is not None
    options, own = spelled_out(options), spelled_out(own)
    coded, theirs = (any(of.get(name) is not None for name in ("rate", "size")) for of in (options, own))
    if theirs and not coded:
        raise RecipeError(
            f"Layers have a rate ({own.get('rate', own.get('size'))}), the others bits: no format holds both. Give bits for all "
            f"layers, or a rate."
        )
    away = {"beam", "polish", "rounds", "sweep_damp"} if "solver" in own else set()
    away |= {"size"} if own.get("rate") is not None else set()
    away |= {"grid", "bits", "group_size", "symmetric"} if named else set()
    return {name: value for name, value in options.items() if name not in away} | dict(own)


OWN = {"format", "ignore", "allocate", "max_loss", "tune", "pre"}  # fields of a recipe that are no parts


def chosen(spellings: Mapping[str, Any]) -> dict[str, Any]:
    """Return our own names and values for keywords in anyone's spelling.

    Raises:
        RecipeError: one is unknown, or contradicts another.
    """
    known = OWN.union({"layers"}, *map(names_of, (GridScheme, BlockScheme, RateScheme, Calibration)))
    found: dict[str, Any] = {}
    for word, value in spellings.items():
        for name, meaning in translated(word, value, known).items():
            if name in found and found[name] != meaning:
                raise RecipeError(
                    f"{word}={value!r} contradicts another keyword that already set {name}={found[name]!r}."
                )
            found[name] = meaning
    return found


def check_pattern(option: str, pattern: str) -> None:
    """Refuse what is no regular expression."""
    if (fault := fault_of(pattern)) is not None:
        raise RecipeError(f"{option}: {pattern[:60]!r} {fault}.")
