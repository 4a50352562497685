"""Recipe of a run as frozen data: the command's flags, the JSON in the run record and the Python keywords in one place.

Needs no torch. `schemes.py` says how matrices are quantized; `spellings.py` translates the option names of other tools.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from nearplane.errors import RecipeError
from nearplane.number_formats import FLOATS, InputRounding
from nearplane.recipe.file_formats import FILE_FORMATS, FileFormat, Format
from nearplane.recipe.scheme import Activations, Allocation, names_of, spelled_out
from nearplane.recipe.schemes import AnyScheme, BlockScheme, GridScheme, RateScheme, scheme_of
from nearplane.recipe.spellings import translated
from nearplane.system.arguments import MAX_SEED, check_fields, described, whole, within
from nearplane.system.patterns import fault_of, has_match

Rare = Literal["mean", "error"]
FirstToken = Literal["auto", "none"]
Way = Literal["rtn-mse", "gptq-mse", "rtn-huffman", "gptq-huffman", "nearplane-grid", "nearplane"]  # see compare.py
Tune = Literal["none", "network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Calibration text and its windows.

    Args:
        calibration: Calibration text: a .txt or .jsonl file, a folder of such files, wikitext2, c4, or a data set as
            name:config:split. A mix is a list with weights: chats.jsonl:2,c4:1. Default: FineWeb-Edu sample-10BT.
        samples: Number of calibration windows. Default: 50 tokens per input of the widest layer, at most 524,288 tokens.
        seqlen: Length of a calibration window in tokens. Default: 2048, or the model's maximum length if that is shorter.
        first_token: How each window begins. auto: with the token that the tokenizer sets before a text, if it sets one, as
            the model was trained; it counts in the length. none: without it.
        seed: Random seed of the order of a data set.
        true_sequential: Whether each layer of a block sees the quantized layers before it.
        rare_experts: Treatment of experts that fewer than four tokens per input reach. error: stop the run.
            mean: report them, and fill their Hessians up to one token per input with the mean over the block's experts.
    """

    calibration: str | None = None
    samples: int | None = None
    seqlen: int | None = None
    first_token: FirstToken = "auto"
    seed: int = 0
    true_sequential: bool = True
    rare_experts: Rare = "mean"

    def __post_init__(self) -> None:
        if isinstance(self.calibration, os.PathLike):
            object.__setattr__(self, "calibration", os.fspath(self.calibration))
        if not isinstance(self.calibration, str | None):
            kind = type(self.calibration).__name__
            raise RecipeError(
                f"calibration is a {kind}; expected a file, a folder or the name of a data set. Pass texts or tokens to quantize()."
            )
        check_fields(self, "first_token", "seed", "true_sequential", "rare_experts")
        whole("seed", self.seed, 0, MAX_SEED)
        count, length = self.samples, self.seqlen
        within("samples", count, count is None or (isinstance(count, int) and count > 0), "a positive number")
        within("seqlen", length, length is None or (isinstance(length, int) and length > 1), "at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScheme:
    """A different scheme for some layers.

    Args:
        pattern: Regular expression; the scheme is for layers whose full name it matches anywhere (`re.search`).
        scheme: A scheme of the same kind as the recipe's.
    """

    pattern: str
    scheme: AnyScheme

    def __post_init__(self) -> None:
        check_pattern("layers", self.pattern)
        check_fields(self, "scheme")

    def check(self, others: AnyScheme) -> None:
        """Refuse a scheme that cannot be combined with the scheme of the other layers.

        Raises:
            RecipeError: The schemes contradict each other; the message says where.
        """
        scheme, title = self.scheme, f"layers {self.pattern!r}"
        if type(scheme) is not type(others):
            raise RecipeError(
                f"{title} are {scheme.title}, but the other layers are {others.title}. No format stores both. Use --bits, --grid "
                f"or --rate for all layers."
            )
        if isinstance(getattr(others, "bits", None), float):
            raise RecipeError(
                f"{title} have a scheme of their own, but a fraction of bits chooses the bits of every layer by measuring. Use "
                f"a whole number of bits, or remove the scheme of these layers."
            )
        if getattr(others, "size", None) is not None and getattr(scheme, "rate", None) is not None:
            raise RecipeError(
                f"{title} have a rate of their own, but --size is distributed over all layers. Use --rate instead of --size, or "
                f"remove the rate of these layers."
            )
        for name in ("order", "correct", "include_head", "include_embeddings", "embeddings", "rows"):
            if getattr(scheme, name, None) != getattr(others, name, None):
                raise RecipeError(f"{title} have another {name}, which must be the same in the whole run. Remove it.")
        if scheme.calibrated and not others.calibrated:
            raise RecipeError(
                f"{title} use the solver {scheme.solver}, which needs calibration; the other layers are not "
                f"calibrated. Use {scheme.solver} for the recipe, and {others.solver} for the other layers."
            )
        if isinstance(bits := getattr(scheme, "bits", None), float):
            raise RecipeError(f"{title} have {bits} bits, but the bits of one layer must be a whole number.")
        if (size := getattr(scheme, "size", None)) != getattr(others, "size", None):
            raise RecipeError(
                f"{title} have the size {size}, but a size is for a whole checkpoint. Use a rate in bits per weight."
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All options of a run.

    Args:
        scheme: The way matrices are quantized.
        calibration: The calibration text and its windows.
        layers: Different schemes for layers that match a pattern; the first match counts.
        format: Format of the checkpoint. Default: nearplane with a rate or size, gguf with a grid of llama.cpp, else
            compressed-tensors.
        activations: Numbers to which runtimes round the inputs of the quantized layers; targets then take this into account. int8
            goes with --grid int8, fp8 with --grid fp8, and fp4 with --grid nvfp4 and mxfp4. none: inputs are not rounded.
        ignore: Regular expressions; layers in whose full name one of them is found are not quantized.
        allocate: Distribution of bits over layers. uniform: the same for all. slope: more for layers where a pass
            before the quantization measures a larger effect. Default: slope with a fraction of bits or measured types of
            llama.cpp, and for entropy-coded weights if calibrated.
        max_loss: Upper limit of the relative loss of every layer, for example 0.05. Entropy-coded layers get more bits until they
            comply. Layers on fixed grids that exceed it are named, and the command exits with code 4.
        tune: Training after the solve. network: train steps, norms and, at 2 and 3 bits, codes on the KL divergence from the
            original model's predictions; see `nearplane tune`. Entropy-coded weights keep their size.
        pre: Name of the pre-tokenizer in llama.cpp, for a GGUF. Default: derived from the structure of the tokenizer.
        like: Path of an unquantized GGUF of the same model by llama.cpp's converter. The new GGUF takes its header,
            tokenizer, names and unquantized tensors, so that any architecture can be written.
    """

    scheme: AnyScheme = field(default_factory=GridScheme)
    calibration: Calibration = field(default_factory=Calibration)
    layers: tuple[LayerScheme, ...] = ()
    format: Format | None = None
    activations: Activations = "none"
    ignore: tuple[str, ...] = ()
    allocate: Allocation | None = None
    max_loss: float | None = None
    tune: Tune = "none"
    pre: str | None = None
    like: str | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "ignore"):
            if isinstance(several := getattr(self, name), list):
                object.__setattr__(self, name, tuple(several))
        check_fields(
            self,
            "scheme",
            "calibration",
            "layers",
            "format",
            "ignore",
            "allocate",
            "tune",
            "pre",
            "like",
            "activations",
        )
        if self.format is None:
            minimum = getattr(self.scheme, "minimum", False)
            object.__setattr__(self, "format", "mlx" if minimum else self.scheme.FORMATS[0])
        if self.format not in self.scheme.FORMATS:
            raise RecipeError(_unfit(str(self.format), self.scheme))
        for each in self.layers:
            each.check(self.scheme)
        self._check_minima()
        loss = self.max_loss
        within("max_loss", loss, loss is None or (isinstance(loss, int | float) and 0 < loss < 1), "between 0 and 1")
        if self.pre is not None and not self.files.one_file:
            raise RecipeError(
                f"--pre is {self.pre!r}, but the format is {self.format}: only a GGUF has a pre-tokenizer. Leave out --pre."
            )
        if self.like is not None:
            self._check_like()
        if self.allocate is None:
            object.__setattr__(self, "allocate", self.scheme.default_allocation)
        if isinstance(self.scheme, BlockScheme):
            self._check_blocks(self.scheme)
        elif isinstance(self.scheme, GridScheme) and self.files.block_types and self.allocate == "slope":
            raise RecipeError(
                f"bits is {self.scheme.bits} with --allocate slope, but layers of a GGUF get types of llama.cpp. Use "
                f"BlockScheme({self.scheme.bits})."
            )
        if self.allocate == "uniform" and isinstance(bits := getattr(self.scheme, "bits", 4), float):
            raise RecipeError(
                f"bits is {bits}, but every layer needs a whole number of bits with --allocate uniform. Use --allocate slope."
            )
        for pattern in self.ignore:
            check_pattern("ignore", pattern)
        if self.activations != "none":
            self._check_activations()

    @property
    def files(self) -> FileFormat:
        """Properties of the format of the files."""
        return FILE_FORMATS[self.format]

    def _check_like(self) -> None:
        """Refuse options that contradict a file whose header is taken.

        Raises:
            RecipeError: The message names them.
        """
        if not self.files.one_file:
            raise RecipeError(
                f"--like is for a GGUF, but the format is {self.format}. Use --format gguf, or leave out --like."
            )
        if self.pre is not None:
            raise RecipeError(
                f"--pre is {self.pre!r}, but --like takes the tokenizer of {self.like}. Leave out one of them."
            )
        if self.tune != "none":
            raise RecipeError(
                "--tune does not go with --like, whose file keeps the norms of the original. Leave out one of them."
            )

    def _check_minima(self) -> None:
        """Refuse minima in formats other than MLX and grids without minima in MLX, and likewise embeddings and head.

        Raises:
            RecipeError: The format cannot hold the weights of a scheme; the message names a format that can.
        """
        for scheme in self.schemes:
            if getattr(scheme, "minimum", False) == self.files.minimum:
                continue
            if self.files.minimum:
                grid = getattr(scheme, "grid", None) or "without a minimum"
                raise RecipeError(
                    f"--format mlx stores integers with a minimum of every group, but the grid is {grid}. Use --bits, or "
                    f"GridScheme(minimum=True), with this format."
                )
            raise RecipeError(f"Only --format mlx stores minima, found --format {self.format}. Use --format mlx.")
        if isinstance(self.scheme, GridScheme) and any(self.scheme.ends) and not self.files.minimum:
            raise RecipeError(
                f"Readers of {self.format} expect embeddings and head unquantized. Leave out --include-embeddings and "
                f"--include-head, or use --rate or --format mlx."
            )

    @property
    def input_rounding(self) -> InputRounding | None:
        """How runtimes round the inputs of all quantized layers; None if they do not."""
        return None if self.activations == "none" else self.scheme.number_format.inputs

    def _check_activations(self) -> None:
        """Refuse activations that no reader multiplies such weights with.

        Raises:
            RecipeError: The weights, the format or another option do not go with them; the message says what does.
        """
        given = f"--activations {self.activations}"
        if not self.files.rounds_inputs:
            raise RecipeError(
                f"{given} is for compressed-tensors, but the format is {self.format}. Leave out one of them."
            )
        names = ["int8"] if self.activations == "int8" else []
        names += [each.name for each in FLOATS if each.inputs is not None and each.inputs.name == self.activations]
        for scheme in self.schemes:
            if getattr(scheme, "group_size", None) == "auto" or self.allocate == "slope":
                found, inputs = "other integers", None
            else:
                found, inputs = scheme.number_format.name, scheme.number_format.inputs
            if inputs is None or inputs.name != self.activations:
                advice = "none" if inputs is None else inputs.name
                raise RecipeError(
                    f"{given} is for --grid {' or '.join(names)}, but weights are {found}, and no reader multiplies these two. Use "
                    f"such a grid, or --activations {advice}."
                )
            if inputs != self.scheme.number_format.inputs:
                raise RecipeError(
                    f"{given} rounds the inputs of {found} otherwise than those of {self.scheme.number_format.name}. Use one "
                    f"--grid for all layers, or --activations none."
                )
            if inputs.global_scale and not scheme.calibrated:
                raise RecipeError(
                    f"{given} with {found} needs calibration, which measures the largest input of each layer, but solver "
                    f"{scheme.solver!r} uses none."
                )

    def _check_blocks(self, scheme: BlockScheme) -> None:
        """Refuse a grid together with a size, and an allocation that does not fit the scheme.

        Raises:
            RecipeError: Two options contradict each other; the message names them.
        """
        if scheme.grid is not None and scheme.size is not None:
            raise RecipeError(
                f"Found both grid {scheme.grid!r} and size {scheme.size!r}. Leave out one: a size chooses types by measuring."
            )
        if self.allocate != scheme.default_allocation:
            given = "--size" if scheme.grid is None else f"--grid {scheme.grid}"
            raise RecipeError(
                f"allocate is {self.allocate} with {given}. Types are measured (slope) with --size, or where --grid is a number of "
                f"bits per weight, as --grid 4.5; all other grids are uniform."
            )

    @property
    def schemes(self) -> tuple[AnyScheme, ...]:
        """The scheme of the recipe, and those of some layers."""
        return self.scheme, *(each.scheme for each in self.layers)

    def ignores(self, name: str) -> bool:
        """Return whether the layer with this full name is left unquantized."""
        return any(has_match(pattern, name) for pattern in self.ignore)

    def scheme_of(self, name: str) -> AnyScheme:
        """Return the scheme of the layer with this full name, which `ignores` has not excluded."""
        return next((each.scheme for each in self.layers if has_match(each.pattern, name)), self.scheme)

    def grouped(self, inputs: Iterable[int]) -> Recipe:
        """Return the recipe with group size "auto" resolved for layers with these numbers of inputs."""
        counts = tuple(inputs)
        layers = tuple(replace(each, scheme=each.scheme.grouped(counts)) for each in self.layers)
        return replace(self, scheme=self.scheme.grouped(counts), layers=layers)

    def to_json(self) -> str:
        """Return the recipe as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read the JSON of `to_json`."""
        options = json.loads(text)
        format = options.get("format")
        layers = tuple(
            LayerScheme(pattern=each["pattern"], scheme=scheme_of(into=format, **each["scheme"]))
            for each in options.pop("layers")
        )
        return cls(
            scheme=scheme_of(into=format, **options.pop("scheme")),
            calibration=Calibration(**options.pop("calibration")),
            layers=layers,
            ignore=tuple(options.pop("ignore")),
            **options,
        )

    @classmethod
    def from_spellings(cls, **spellings: Any) -> Recipe:
        """Build a recipe from flat keywords: field names of nearplane, GPTQModel, llm-compressor, auto-round or GPTQ.

        Raises:
            RecipeError: A keyword is unknown, is given twice under two names, or has an unsupported value.
        """
        options = translated_options(spellings)
        layers = {} if options.get("layers") is None else options["layers"]
        options.pop("layers", None)
        if not isinstance(layers, Mapping) or not all(isinstance(changes, Mapping) for changes in layers.values()):
            raise RecipeError(
                f"layers is {str(layers)[:60]!r}; expected a dict from patterns to options: {{'down_proj': {{'bits': 4}}}}. Only "
                f"Recipe() takes LayerScheme objects."
            )
        flat = {name: options.pop(name) for name in RECIPE_FIELDS & options.keys()}
        tokens = {name: options.pop(name) for name in names_of(Calibration) & options.keys()}
        other = tuple(
            LayerScheme(
                pattern=pattern,
                scheme=scheme_of(into=flat.get("format"), **merged_options(options, translated_options(changes))),
            )
            for pattern, changes in layers.items()
        )
        scheme = scheme_of(into=flat.get("format"), spread=flat.get("allocate"), **options)
        return cls(scheme=scheme, calibration=Calibration(**tokens), layers=other, **flat)


def _unfit(format: str, scheme: AnyScheme) -> str:
    """Return the error message for a format that cannot hold the weights of a scheme, with the alternatives."""
    if isinstance(scheme, RateScheme):
        given = f"--rate {scheme.rate:g}" if scheme.size is None else f"--size {scheme.size}"
        contents, conflict = "fixed grids", f"{given} is for entropy-coded weights"
        instead = "Use --bits, --grid, or --size without --rate" if FILE_FORMATS[format].block_types else "Use --bits"
    elif isinstance(scheme, BlockScheme):
        given = f"--size {scheme.size}" if scheme.grid is None else f"--grid {scheme.grid}"
        contents, conflict, instead = "other grids", f"{given} is for llama.cpp", "Use --bits"
    else:
        given = f"--bits {scheme.bits}" if scheme.grid is None else f"--grid {scheme.grid}"
        contents, conflict = "entropy-coded weights", f"{given} is for fixed grids"
        instead = f"Use --rate {scheme.bits} or --size"
    return f"--format {format} is for {contents}, but {conflict}. {instead} with this format, or use --format {scheme.FORMATS[0]}."


def merged_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of layers that change some of them; a different solver drops the options of the general solver.

    Raises:
        RecipeError: These layers are entropy-coded and the others are on a grid.
    """
    has_grid = changes.get("grid") is not None
    options, changes = spelled_out(options), spelled_out(changes)
    coded, changes_coded = (any(of.get(name) is not None for name in ("rate", "size")) for of in (options, changes))
    if changes_coded and not coded:
        raise RecipeError(
            f"Some layers have a rate ({changes.get('rate', changes.get('size'))}), the others have bits, but no format stores "
            f"both. Use --bits or --rate for all layers."
        )
    dropped = {"beam", "polish", "rounds", "sweep_damp"} if "solver" in changes else set()
    dropped |= {"size"} if changes.get("rate") is not None else set()
    dropped |= {"grid", "bits", "group_size", "symmetric", "minimum"} if has_grid else set()
    return {name: value for name, value in options.items() if name not in dropped} | dict(changes)


# plain fields of a recipe, not dataclasses
RECIPE_FIELDS = {
    "format",
    "ignore",
    "allocate",
    "max_loss",
    "tune",
    "pre",
    "like",
    "activations",
}


def translated_options(spellings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nearplane's names and values for keywords in any supported spelling.

    Raises:
        RecipeError: A keyword is unknown, or contradicts another.
    """
    known = RECIPE_FIELDS.union({"layers"}, *map(names_of, (GridScheme, BlockScheme, RateScheme, Calibration)))
    options: dict[str, Any] = {}
    for word, value in spellings.items():
        for name, meaning in translated(word, value, known).items():
            if name in options and options[name] != meaning:
                raise RecipeError(
                    f"{word}={value!r} contradicts another keyword that already set {name}={options[name]!r}."
                )
            options[name] = meaning
    return options


def check_pattern(option: str, pattern: str) -> None:
    """Refuse an empty text, which every name contains, and one that is not a regular expression."""
    if not isinstance(pattern, str) or not pattern:
        raise RecipeError(f"{option} is {described(pattern)}; expected a regular expression, for example 'down_proj'.")
    if (fault := fault_of(pattern)) is not None:
        raise RecipeError(f"{option}: {pattern[:60]!r} {fault}.")
