"""The compressed-tensors format, which transformers, vLLM and SGLang load without nearplane.

Packings of layers are in `packed_integers.py`, `int8_packed.py`, `fp4_packed.py` and `fp8_packed.py`; `PACKINGS` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.fp4_packed import MXFP4Packed, NVFP4Packed
from nearplane.formats.compressed_tensors.fp8_packed import FP8BlockPacked, FP8Packed, MXFP8Packed
from nearplane.formats.compressed_tensors.int8_packed import Int8Packed
from nearplane.formats.compressed_tensors.packed_integers import PackQuantized
from nearplane.formats.compressed_tensors.packing import Packing, check_inputs, inputs_object, refuse_unknown
from nearplane.formats.container import Format
from nearplane.formats.integers import expect, object_of, of_kind
from nearplane.formats.layer_format import INPUT_SCALE, GridFormat, Quantized, matches
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.number_formats import InputRounding, NumberFormat
from nearplane.recipe.readers import Weights, readers_of

EVERY_LAYER = "Linear"  # class of modules, as the target of a group without names
CACHE: dict[str, Any] = {  # kv_cache_scheme of keys and values in E4M3 with a scale each for a layer
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "group_size": None, "dynamic": False,
}  # fmt: skip
CACHE_TENSORS = re.compile(r"\.[qkv]_(?:scale|zero_point)$")  # beside the weights, of a cache
MIXED_FORMAT = "mixed-precision"  # `format` of a config whose layers have several packings
WITH_INPUTS = Int8Packed()  # of integers whose inputs are rounded, too
PACKINGS: tuple[Packing, ...] = (
    PackQuantized(), MXFP4Packed(), NVFP4Packed(), FP8Packed(), FP8BlockPacked(), MXFP8Packed(), WITH_INPUTS
)  # fmt: skip


def packing_of(format: NumberFormat | Grid, *, rounds_inputs: bool = False) -> Packing:
    """Return the packing that stores a number format or the codes of a grid; the one of integers if none does."""
    if format.levels is None:
        return WITH_INPUTS if rounds_inputs else PACKINGS[0]
    return next((each for each in PACKINGS if each.HOLDS is not None and _held(format, each.HOLDS)), PACKINGS[0])


def _held(format: NumberFormat | Grid, by: NumberFormat) -> bool:
    """Return whether a number format, or a grid of one, has the levels of another and stores its steps alike."""
    levels = tuple(format.levels.tolist()) if isinstance(format.levels, Tensor) else format.levels
    return (levels, format.fit) == (by.levels, by.fit)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors(GridFormat):
    """Storage of a layer in the packing of its number format.

    Args:
        rounds_inputs: Whether runtimes round the inputs of some layers.
        rounded: Their names and patterns, as `targets` in the config.
    """

    rounds_inputs: bool = False
    rounded: tuple[str, ...] = field(default=(), compare=False)

    KEY = Packing.KEY
    SUFFIXES = tuple(dict.fromkeys(suffix for each in PACKINGS for suffix in each.SUFFIXES))

    def configured(self, config: Mapping[str, Any]) -> Self:
        """Return the format with rounded inputs of the layers for which the config asks it."""
        groups = object_of("compressed-tensors: config_groups", config.get("config_groups")).values()
        rounding = [each for each in groups if isinstance(each, Mapping) and each.get("input_activations")]
        if len(rounding) == len(groups):
            return replace(self, rounds_inputs=bool(rounding), rounded=(EVERY_LAYER,))
        return replace(self, rounds_inputs=bool(rounding), rounded=tuple(t for g in rounding for t in _targets(g)))

    def _rounds(self, name: str) -> bool:
        """Return whether runtimes round the inputs of a layer in a config that `describe` made."""
        exact = name in self.rounded or EVERY_LAYER in self.rounded
        return exact or any(each.startswith("re:") and matches(each[3:], name) for each in self.rounded)

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse layers that no packing stores or that no program loads; see `recipe/runtimes.py` for what each loads."""
        readers_of("compressed-tensors", "nearplane").check(name, Weights(format))
        packing_of(format).check(name, shape, kind, format)

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of steps for number formats that do not fix it."""
        return PACKINGS[0].scale_dtype(model_dtype)

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        return packing_of(matrix.grid, rounds_inputs=self._rounds(name)).pack(name, matrix, dtype)

    def packs_on_device(self, matrix: QuantizedMatrix[Any]) -> bool:
        """Return whether the packing of a matrix computes where the matrix is."""
        return packing_of(matrix.grid).ON_DEVICE  # of both packings of integers, too

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        rounded = self._rounds(name)
        tensors = packing_of(format, rounds_inputs=rounded).empty(name, shape, format, dtype)
        if rounded and format.inputs is not None and format.inputs.global_scale:
            tensors[f"{name}.{INPUT_SCALE}"] = torch.empty(1, dtype=torch.float32, device="meta")
        return tensors

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of the tensors of every quantized layer; refuse codes without steps."""
        existing = dict.fromkeys(names)
        for name in existing:
            if (
                name.endswith(f".{Packing.WORDS_IN}")
                and (steps := name.removesuffix(Packing.WORDS_IN) + self.KEY) not in existing
            ):
                raise FormatError(f"{steps} is missing beside {name}: the file is damaged. Fetch it again.")
        return super(CompressedTensors, self).parts(existing)

    def is_beside(self, name: str) -> bool:
        """Return whether a tensor is a scale of a server's cache."""
        return CACHE_TENSORS.search(name) is not None

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the packing with this dtype of words."""
        suffix = next((each.WORDS_IN for each in PACKINGS if f"{name}.{each.WORDS_IN}" in tensors), Packing.WORDS_IN)
        candidates = [each for each in PACKINGS if suffix == each.WORDS_IN]
        words = expect(name, tensors, suffix, (None, None), {each.WORDS for each in candidates})
        return next(each for each in candidates if words.dtype == each.WORDS).shape_of(name, tensors)

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        as_they_are = f"{name}.{WITH_INPUTS.WORDS_IN}" in tensors
        return packing_of(format, rounds_inputs=as_they_are).unpack(name, tensors, format)

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return a config with a group of layers for each grid.

        transformers drops the unpacked tensors of modules that it assembles from `network.experts`, unless a group that
        names experts has 8-bit floats. Such a group is therefore added; it applies to nothing, as `ignore` has the same
        names. Quantized experts are named by a pattern: the first group with one gives the scheme of all experts.
        """
        usual = network.scheme.number_format, bool(network.rounded)
        targets: dict[tuple[NumberFormat, bool], dict[str, None]] = {usual: {EVERY_LAYER: None}}
        kinds = {name: (grid, name in network.rounded) for name, grid in network.grids.items()}
        if kinds:
            in_order = sorted({*kinds.values()}, key=_place)
            targets = {kind: {} for kind in in_order}
        alike = len({kinds[name] for name in network.routed if name in kinds}) < 2
        for name, kind_of_layer in kinds.items():
            of_all = _pattern_of_all if alike else _pattern_of_a_block
            targets[kind_of_layer][of_all(name) if name in network.routed else name] = None
        groups = []
        for (kind, rounded), names in targets.items():
            inputs = kind.inputs if rounded else None
            packing = packing_of(kind, rounds_inputs=inputs is not None)
            weights = packing.weights(kind, network.scheme.order)
            groups.append(_group_of(list(names), weights, packing.FORMAT, inputs))
        formats = {group["format"] for group in groups}
        if network.experts:
            floats = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
            groups.append(_group_of([_module_pattern(name) for name in network.experts], floats, "float-quantized"))
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else MIXED_FORMAT,
            "quantization_status": "compressed",
            "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
            "ignore": list(network.ignore),
            "kv_cache_scheme": dict(CACHE) if network.kv_cache else None,
            "global_compression_ratio": None,
        }

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the number format of a layer's group."""
        scheme = _group(config, name)
        weights = object_of("compressed-tensors: weights", scheme.get("weights"))
        format = config.get("format")
        if format == MIXED_FORMAT:
            format = scheme.get("format")
        refuse_unknown(
            {
                "format": (format, {each.FORMAT for each in PACKINGS}),
                "quantization_status": (config.get("quantization_status"), {"compressed"}),
                "output_activations": (scheme.get("output_activations"), {None}),
            }
        )
        check_cache_scheme(config.get("kv_cache_scheme"))
        candidates = [each for each in PACKINGS if format == each.FORMAT]
        strategy = weights.get("strategy")
        packing = next((each for each in candidates if strategy == each.STRATEGY), candidates[0])
        number_format = packing.number_format(weights)
        check_inputs(scheme.get("input_activations"), number_format.inputs)
        return number_format

    def inputs_of(self, config: Mapping[str, Any], name: str) -> InputRounding | None:
        """Return how runtimes round the inputs of a layer."""
        return check_inputs(_group(config, name).get("input_activations"), self.grid_of(config, name).inputs)


FORMAT = Format(CompressedTensors())


def check_cache_scheme(scheme: Any) -> None:
    """Refuse a `kv_cache_scheme` that vLLM does not read: others than 8-bit floats with a scale for a layer or a head.

    Raises:
        FormatError: The message names the field.
    """
    if scheme is None:
        return
    fields = object_of("compressed-tensors: kv_cache_scheme", scheme)
    known = {name: {fields_of} for name, fields_of in CACHE.items() if name in ("num_bits", "type", "symmetric")}
    known["strategy"] = {"tensor", "attn_head"}
    refuse_unknown({f"kv_cache_scheme.{name}": (fields.get(name), values) for name, values in known.items()})


def _group_of(
    targets: Sequence[str], weights: Mapping[str, Any], format: str, inputs: InputRounding | None = None
) -> dict[str, Any]:
    """Return an entry of `config_groups`."""
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None if inputs is None else inputs_object(inputs),
        "output_activations": None,
        "format": format,
    }


def _targets(group: Mapping[str, Any]) -> list[str]:
    """Return the names, patterns and classes of the layers of a group."""
    names = [] if group.get("targets") is None else group["targets"]
    return [str(name) for name in of_kind("compressed-tensors: targets", names, list, "a list")]


def _place(kind: tuple[NumberFormat, bool]) -> tuple[int, int, bool, str, bool]:
    """Return the key by which groups are ordered, the same on every machine."""
    grid, rounded = kind
    return grid.bits, grid.group or 0, grid.symmetric, grid.name, rounded


def _module_pattern(name: str) -> str:
    """Return a pattern of one module; it contains "experts", for which transformers searches."""
    return rf"re:^{re.escape(name)}$" if "experts" in name else rf"re:^{re.escape(name)}$(?#experts)"


def _pattern_of_all(name: str) -> str:
    """Return a pattern of a layer and all that differ from it only in numbers; it contains "experts", too."""
    pattern = rf"re:^{re.sub('[0-9]+', '[0-9]+', re.escape(name))}$"
    return pattern if "experts" in name else f"{pattern}(?#experts)"


def _pattern_of_a_block(name: str) -> str:
    """Return a pattern of a matrix in all experts of a block: the last number that is a whole part of the name is the expert's."""
    parts = [re.escape(part) for part in name.split(".")]
    parts[max(place for place, part in enumerate(parts) if part.isdigit())] = "[0-9]+"
    return rf"re:^{re.escape('.').join(parts)}$"


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the scheme of a layer: the one that targets its name, else a pattern of it, else its class."""
    groups = object_of("compressed-tensors: config_groups", config.get("config_groups"))
    schemes: list[Mapping[str, Any]] = [*groups.values()]
    if not schemes or not all(isinstance(scheme, Mapping) for scheme in schemes):
        raise FormatError(
            f"compressed-tensors: config_groups has {len(schemes)} schemes, expected one or more objects."
        )
    if len(schemes) == 1:
        return schemes[0]
    targets: list[tuple[str, Mapping[str, Any]]] = []
    for scheme in schemes:
        targets += [(name, scheme) for name in _targets(scheme)]
    exact = [scheme for target, scheme in targets if target == name]
    patterns = [scheme for target, scheme in targets if target.startswith("re:") and matches(target[3:], name)]
    fitting = exact or patterns or [scheme for target, scheme in targets if target == EVERY_LAYER]
    if not fitting or any(scheme != fitting[0] for scheme in fitting):
        raise FormatError(f"{name}: {len(fitting)} of the {len(schemes)} schemes in config_groups apply, expected one.")
    return fitting[0]
