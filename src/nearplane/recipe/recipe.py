"""Recipe of a run as frozen data: the command's flags, the JSON in the run record and the Python keywords in one place.

Needs no torch. `schemes.py` says how matrices are quantized; `layer_scheme.py` how some of them are quantized otherwise;
`spellings.py` translates the option names of other tools.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from nearplane.errors import RecipeError
from nearplane.number_formats import InputRounding
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.file_formats import FILE_FORMATS, FileFormat, Format
from nearplane.recipe.format_mix import MIX_OPTIONS, FormatMix, mix_of
from nearplane.recipe.layer_scheme import LayerScheme, check_pattern, layer_schemes
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.readers import Readers, readers_of, usual_format
from nearplane.recipe.refusals import budget_of, check_activations, check_kv_cache, check_like
from nearplane.recipe.runtimes import MLX_FLOATS, Runtime
from nearplane.recipe.scheme import Activations, Allocation, CacheNumbers, names_of
from nearplane.recipe.schemes import AnyScheme, GridScheme, scheme_of
from nearplane.recipe.spellings import translated_options
from nearplane.system.arguments import MAX_SEED, check_fields, whole, within
from nearplane.system.patterns import has_match

Rare = Literal["mean", "error"]
FirstToken = Literal["auto", "none"]
Positions = Literal["sensitivity", "equal"]
Way = Literal["rtn-mse", "gptq-mse", "rtn-huffman", "gptq-huffman", "nearplane-grid", "nearplane"]  # see compare.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Calibration text and its windows.

    Args:
        calibration, samples, seqlen, first_token, rare_experts: See `quantize`.
        seed: Random seed of the order of a data set.
        positions: How much errors at each position in a window count. sensitivity (default with corrected targets): more
            where predictions depend more on them, measured by a backward pass on some windows. equal: alike, as in GPTQ.
        true_sequential: Whether each layer of a block sees the quantized layers before it.
    """

    calibration: str | None = None
    samples: int | None = None
    seqlen: int | None = None
    first_token: FirstToken = "auto"
    positions: Positions | None = None
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
        check_fields(self, "first_token", "positions", "seed", "true_sequential", "rare_experts")
        whole("seed", self.seed, 0, MAX_SEED)
        count, length = self.samples, self.seqlen
        within("samples", count, count is None or (isinstance(count, int) and count > 0), "a positive number")
        within("seqlen", length, length is None or (isinstance(length, int) and length > 1), "at least 2")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All options of a run.

    Args:
        scheme: The way matrices are quantized.
        calibration: The calibration text and its windows.
        layers: Different schemes for layers that match a pattern; the first match counts.
        format: Format of the checkpoint. Default: nearplane with a rate or size, gguf with a grid of llama.cpp, else
            compressed-tensors, or what the runtime reads.
        mix: Number formats to choose from for every layer; `scheme` and `activations` are then those of the first.
            None, and in every record: each layer has the format that the other fields say.
        runtime, activations, kv_cache, ignore, max_loss, tune, pre, like: See `quantize`.
        allocate: Distribution of bits over layers. uniform: the same for all. slope: more for layers where
            errors are estimated to cost more. Default: slope with a fraction of bits or measured types of
            llama.cpp, and for entropy-coded weights if calibrated.
    """

    scheme: AnyScheme = field(default_factory=GridScheme)
    calibration: Calibration = field(default_factory=Calibration)
    layers: tuple[LayerScheme, ...] = ()
    format: Format | None = None
    runtime: Runtime | None = None
    activations: Activations = "none"
    kv_cache: CacheNumbers = "none"
    ignore: tuple[str, ...] = ()
    allocate: Allocation | None = None
    max_loss: float | None = None
    tune: str = "none"
    pre: str | None = None
    like: str | None = None
    mix: FormatMix | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "ignore"):
            if isinstance(several := getattr(self, name), list):
                object.__setattr__(self, name, tuple(several))
        check_fields(self, *(each.name for each in fields(self) if each.name != "max_loss"))
        if self.format is None:
            minimum = getattr(self.scheme, "minimum", False)
            usual: Format = "mlx" if minimum else self.scheme.FORMATS[0]
            object.__setattr__(self, "format", usual_format(self.runtime) or usual)
        if self.format not in self.scheme.FORMATS:
            elsewhere = f" and leave out --runtime {self.runtime}" if self.runtime is not None else ""
            raise RecipeError(f"{self.scheme.unfit(str(self.format)).removesuffix('.')}{elsewhere}.")
        readers_of(self.format, self.runtime)  # refused if the runtime does not read it
        budget_of(self.tune)
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
            check_like(self.like, self.format, self.pre, self.tune)
        if self.allocate is None:
            object.__setattr__(self, "allocate", self.scheme.default_allocation)
        self.scheme.check_allocation(self.allocate, self.files)
        if self.calibration.positions == "sensitivity" and not self.scheme.calibrated:
            raise RecipeError(
                f"positions is 'sensitivity', but solver {self.scheme.solver!r} uses no calibration. Leave it out."
            )
        for pattern in self.ignore:
            check_pattern("ignore", pattern)
        for scheme, activations in self.rounded:
            check_activations(activations, scheme, self.format, self.allocate)
        if self.mix is not None:
            self._check_mix(self.mix)
        if self.kv_cache != "none":
            check_kv_cache(self.kv_cache, self.scheme, self.files, str(self.format))

    def _check_mix(self, mix: FormatMix) -> None:
        """Refuse formats that cannot be in the files, and options that do not go with a choice by measuring.

        Raises:
            RecipeError: The message names the option.
        """
        for offer in mix.offers:
            if offer.scheme is None:
                continue
            if type(offer.scheme) is not type(self.scheme) or self.format not in offer.scheme.FORMATS:
                raise RecipeError(offer.scheme.unfit(str(self.format)))
            if offer.activations != "none":
                check_activations(offer.activations, offer.scheme, self.format, self.allocate)
        if not self.scheme.calibrated:
            raise RecipeError(
                f"--mix measures on text what each format costs, but solver {self.scheme.solver!r} uses none. Use the default "
                f"solver."
            )
        if self.allocate == "slope":
            raise RecipeError("--mix chooses the format of every layer. Leave out --allocate slope.")
        if self.tune != "none" or self.like is not None:
            other = "--like" if self.tune == "none" else "--tune"
            raise RecipeError(
                f"--mix does not go with {other}. Leave out one of them; a checkpoint with --bits-per-weight can be tuned "
                f"afterwards."
            )

    @property
    def given_mix(self) -> FormatMix:
        """The mix of a recipe that has one."""
        assert self.mix is not None, "a recipe with a mix"
        return self.mix

    @property
    def weighs_positions(self) -> bool:
        """Whether errors count by their position in a window: by default where targets are corrected."""
        positions = self.calibration.positions
        return self.scheme.calibrated and (positions == "sensitivity" or (positions is None and self.scheme.correct))

    @property
    def files(self) -> FileFormat:
        """Properties of the format of the files."""
        return FILE_FORMATS[self.format]

    @property
    def readers(self) -> Readers:
        """The programs that are to load the files: all usual ones, or the runtime."""
        return readers_of(self.format, self.runtime)

    def _check_minima(self) -> None:
        """Refuse minima in formats other than MLX and integers without minima in MLX, and likewise embeddings and head.

        Which named grids a format holds is checked with its readers.

        Raises:
            RecipeError: The format cannot hold the weights of a scheme; the message names a format that can.
        """
        for scheme in self.schemes:
            named = isinstance(scheme, GridScheme) and scheme.grid is not None
            if named or getattr(scheme, "minimum", False) == self.files.minimum:
                continue
            if self.files.minimum:
                raise RecipeError(
                    f"--format mlx stores integers with a minimum of every group, but the grid is without one. Use --bits, "
                    f"GridScheme(minimum=True), or --grid {', '.join(MLX_FLOATS[:-1])} or {MLX_FLOATS[-1]}."
                )
            raise RecipeError(f"Only --format mlx stores minima, found --format {self.format}. Use --format mlx.")
        if isinstance(self.scheme, GridScheme) and any(self.scheme.ends) and not self.files.minimum:
            raise RecipeError(
                f"Readers of {self.format} expect embeddings and head unquantized. Leave out --include-embeddings and "
                f"--include-head, or use --rate or --format mlx."
            )

    @property
    def rounded(self) -> list[tuple[AnyScheme, Activations]]:
        """The schemes of layers whose inputs runtimes round, with the numbers to which they do."""
        own = ((each.scheme, each.activations or self.activations) for each in self.layers)
        return [each for each in ((self.scheme, self.activations), *own) if each[1] != "none"]

    def inputs_of(self, name: str) -> InputRounding | None:
        """Return how runtimes round the inputs of the layer with this full name; None if they do not."""
        own = self._own(name)
        scheme, activations = (self.scheme, None) if own is None else (own.scheme, own.activations)
        return None if (activations or self.activations) == "none" else scheme.number_format.inputs

    @property
    def schemes(self) -> tuple[AnyScheme, ...]:
        """The scheme of the recipe, and those of some layers."""
        return self.scheme, *(each.scheme for each in self.layers)

    @property
    def scales_inputs(self) -> bool:
        """Whether rounded inputs have global scales, which are measured."""
        inputs = (scheme.number_format.inputs for scheme, _ in self.rounded)
        return any(each is not None and each.global_scale for each in inputs)

    def ignores(self, name: str) -> bool:
        """Return whether the layer with this full name is left unquantized."""
        return any(has_match(pattern, name) for pattern in self.ignore)

    def scheme_of(self, name: str) -> AnyScheme:
        """Return the scheme of the layer with this full name, which `ignores` has not excluded."""
        own = self._own(name)
        return self.scheme if own is None else own.scheme

    def pattern_of(self, name: str) -> str | None:
        """Return the pattern by which the layer with this full name has a scheme of its own; None if it has none."""
        own = self._own(name)
        return None if own is None else own.pattern

    def _own(self, name: str) -> LayerScheme | None:
        return next((each for each in self.layers if has_match(each.pattern, name)), None)

    def grouped(self, inputs: Iterable[int]) -> Recipe:
        """Return the recipe with group size "auto" resolved for layers with these numbers of inputs."""
        counts = tuple(inputs)
        layers = tuple(replace(each, scheme=each.scheme.grouped(counts)) for each in self.layers)
        mix = None if self.mix is None else self.mix.grouped(counts)
        return replace(self, scheme=self.scheme.grouped(counts), layers=layers, mix=mix)

    def to_json(self) -> str:
        """Return the recipe as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read the JSON of `to_json`."""
        options = json.loads(text)
        format = options.get("format")
        layers = tuple(
            LayerScheme(
                pattern=each["pattern"],
                scheme=scheme_of(into=format, **each["scheme"]),
                activations=each.get("activations"),
            )
            for each in options.pop("layers")
        )
        return cls(
            scheme=scheme_of(into=format, **options.pop("scheme")),
            calibration=Calibration(**options.pop("calibration")),
            layers=layers,
            ignore=tuple(options.pop("ignore")),
            mix=FormatMix.of(options.pop("mix", None), format),
            **options,
        )

    @classmethod
    def from_spellings(cls, **spellings: Any) -> Recipe:
        """Build a recipe from flat keywords: field names of nearplane, GPTQModel, llm-compressor, auto-round or GPTQ.

        Raises:
            RecipeError: A keyword is unknown, is given twice under two names, or has an unsupported value.
        """
        fields_of_run = names_of(cls) - {"scheme", "calibration", "layers", "mix"}
        schemes = map(names_of, (GridScheme, BlockScheme, RateScheme, Calibration))
        known = fields_of_run.union({"layers"}, MIX_OPTIONS, *schemes)
        options = translated_options(spellings, known)
        layers = options.pop("layers", None)
        flat = {name: options.pop(name) for name in fields_of_run & options.keys()}
        if flat.get("format") is None and (usual := usual_format(flat.get("runtime"))) is not None:
            flat["format"] = usual
        tokens = {name: options.pop(name) for name in names_of(Calibration) & options.keys()}
        place = {"into": flat.get("format"), "runtime": flat.get("runtime")}
        mix, options = mix_of(options, flat)
        if mix is not None:
            flat |= {"mix": mix, "activations": mix.first.activations}
        other = () if layers is None else layer_schemes(layers, options, known, **place)
        if mix is None:
            scheme = scheme_of(**place, spread=flat.get("allocate"), **options)
        else:
            assert mix.first.scheme is not None, "the first format that is quantized"
            scheme = mix.first.scheme
            other = tuple(each if each.activations else replace(each, activations="none") for each in other)
        return cls(scheme=scheme, calibration=Calibration(**tokens), layers=other, **flat)
