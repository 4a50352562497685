"""compressed-tensors, which transformers, vLLM and SGLang load without further packages of ours: two packings of a layer.

`pack-quantized`, integers:

    NAME.weight_packed  (out, ceil(in*bits/32)) int32    codes + 2^(bits-1), a dense bit stream along the inputs
    NAME.weight_scale   (out, groups)           model's  groups of neighbours; 1 group where group_size is None
    NAME.weight_shape   (2,)                    int64    out, in

Reading knows also `NAME.weight_zero_point` (ceil(out*bits/32), groups) int32, packed along the outputs, and
`NAME.weight_g_idx` (in,).

`mxfp4-pack-quantized`, four-bit floats in groups of 32 whose steps are powers of two:

    NAME.weight_packed  (out, in/2)   uint8  two codes a byte, the first in the lower half: sign << 3 | magnitude
    NAME.weight_scale   (out, in/32)  uint8  b of the step 2^(b - 127)

Magnitudes are numbers of {0, .5, 1, 1.5, 2, 3, 4, 6}. What is written is what transformers 5.23.0 with compressed-tensors 0.20.0
loads; it decodes these to bfloat16, and a model in float32 only with `CompressedTensorsConfig(dequantize=True)`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearplane.coding.packed_words import pack, unpack, words_of
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.container import Format
from nearplane.formats.integers import Integers, consecutive, expect, group_size_of, matches, object_of, of_kind
from nearplane.formats.layer_format import ConfigFile, GridFormat, Quantized
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.number_formats import MXFP4, NumberFormat, integers

MIXED = "mixed-precision"  # what the config says where layers are packed in several ways
SCALES = {torch.float16, torch.bfloat16, torch.float32}
ZERO = len(MXFP4.levels or ()) // 2  # code of the level 0
BIAS = 127


class Packing(GridFormat):
    """One of the ways in which compressed-tensors packs a layer: its tensors, and the fields of the config that say so.

    Attributes:
        FORMAT: its name in config.json.
        TYPE: what config.json calls its numbers.
        LEVELS: of the number formats that it holds; None: integers.
        WORDS: dtype of `weight_packed`.
        DECODED: dtype to which transformers decodes it, whatever the network's; None: the network's.
    """

    KEY = "weight_packed"
    FORMAT: ClassVar[str]
    TYPE: ClassVar[str]
    LEVELS: ClassVar[tuple[float, ...] | None] = None
    WORDS: ClassVar[torch.dtype]
    DECODED: ClassVar[torch.dtype | None] = None

    def weights(self, format: NumberFormat, order: str) -> dict[str, Any]:
        """Return what the config says of weights in a number format that were rounded in this order."""
        return {
            "num_bits": format.bits,
            "type": self.TYPE,
            "symmetric": format.symmetric,
            "strategy": "group" if format.group else "channel",
            "group_size": format.group,
            "actorder": None if order == "natural" else "static",
            "dynamic": False,
        }

    @abstractmethod
    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return the number format that a config says.

        Raises:
            FormatError: it says something that is not understood.
        """

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse what transformers does not load: anything but Linear layers of whole groups."""
        if kind not in ("Linear", "Expert"):
            raise RecipeError(
                f"{name} is a {kind}; compressed-tensors is loaded for Linear layers only. "
                f"Use --format gptq for Conv1D, or leave it as it is with --ignore."
            )
        if format.group is not None and shape[1] % format.group:
            raise RecipeError(
                f"{name} has {shape[1]} inputs, not a multiple of the group size {format.group}, which compressed-tensors "
                f"requires. Use another --group-size (none for one step a row), or leave it as it is with --ignore."
            )

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the model's: readers multiply in it."""
        return model_dtype if model_dtype in SCALES else torch.float32


class PackQuantized(Packing):
    """Integers, as a dense stream of bits."""

    SUFFIXES = (Packing.KEY, "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    BITS = (2, 3, 4, 5, 6, 7, 8)
    FORMAT = "pack-quantized"
    TYPE = "int"
    WORDS = torch.int32

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse what transformers does not load: anything but symmetric Linear layers of whole groups."""
        super().check(name, shape, kind, format)
        if not format.symmetric:
            raise RecipeError(
                f"{name}: asymmetric weights in compressed-tensors do not load in transformers 5.23.0, which expects their "
                f"packed zero-points in another shape. Use --format gptq_v2, or symmetric weights."
            )
        if format.bits not in self.BITS:
            raise RecipeError(f"{name}: {format.bits} bits asked for; compressed-tensors holds 2 to 8.")

    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return the integers that a config says."""
        _refuse_unknown(
            {
                "weights.type": (weights.get("type"), {"int"}),
                "weights.strategy": (weights.get("strategy"), {"group", "channel"}),
                "weights.num_bits": (weights.get("num_bits"), set(self.BITS)),
            }
        )
        group_size = None
        if weights["strategy"] == "group":
            group_size = group_size_of("compressed-tensors: weights.group_size", weights.get("group_size"), ())
        said = weights.get("symmetric", True)
        symmetric = of_kind("compressed-tensors: weights.symmetric", said, bool, "true or false")
        return integers(int(weights["num_bits"]), group_size, symmetric=symmetric)

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a symmetric layer."""
        stored = Integers.of(name, matrix, dtype)
        if not stored.format.symmetric:
            raise FormatError(f"{name}: an asymmetric matrix; compressed-tensors is written for symmetric ones only.")
        return {
            f"{name}.weight_packed": pack(stored.codes, stored.format.bits),
            f"{name}.weight_scale": stored.scale.contiguous(),
            f"{name}.weight_shape": torch.tensor(matrix.codes.shape, dtype=torch.int64),
        }

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        out, columns = shape
        groups = format.groups(columns)
        return {
            f"{name}.weight_packed": torch.empty(out, words_of(columns, format.bits), dtype=torch.int32, device="meta"),
            f"{name}.weight_scale": torch.empty(out, groups, dtype=self.scale_dtype(dtype), device="meta"),
            f"{name}.weight_shape": torch.empty(2, dtype=torch.int64, device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) as the layer says it."""
        out, columns = (int(n) for n in expect(name, tensors, "weight_shape", (2,), {torch.int64, torch.int32}))
        return out, columns

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer, which other programs may have written asymmetric or in activation order."""
        bits = format.bits
        out, columns = self.shape_of(name, tensors)
        groups = format.groups(columns)
        dense, padded = words_of(columns, bits), -(-columns // (32 // bits))
        found = tensors.get(f"{name}.weight_packed")
        if found is not None and found.shape[-1] == padded != dense:
            raise FormatError(
                f"{name}.weight_packed has {padded} words a row: {bits}-bit codes padded to whole words, as "
                f"compressed-tensors wrote them before it packed densely ({dense} words). Dense packing is expected: write "
                f"the checkpoint again with a newer version."
            )
        words = expect(name, tensors, "weight_packed", (out, dense), {torch.int32})
        scale = expect(name, tensors, "weight_scale", (out, groups), SCALES)
        zeros = torch.full((out, groups), 2 ** (bits - 1), dtype=torch.uint8)
        if not format.symmetric:
            packed = expect(name, tensors, "weight_zero_point", (words_of(out, bits), groups), {torch.int32})
            zeros = unpack(packed.T.contiguous(), bits, out).T
        group = consecutive(columns, format.group)
        if f"{name}.weight_g_idx" in tensors:
            group = expect(name, tensors, "weight_g_idx", (columns,), {torch.int32, torch.int64}).to(torch.int64)
            if bool(((group < 0) | (group >= groups)).any()):
                raise FormatError(f"{name}.weight_g_idx names groups outside 0 to {groups - 1}.")
        codes = unpack(words, bits, columns)
        return Integers(codes=codes, zeros=zeros, scale=scale, group=group, format=format).matrix()


class MXFP4Packed(Packing):
    """Four-bit floats with steps that are powers of two."""

    SUFFIXES = (Packing.KEY, "weight_scale")
    FORMAT = "mxfp4-pack-quantized"
    TYPE = "float"
    LEVELS = MXFP4.levels
    WORDS = torch.uint8
    DECODED = torch.bfloat16

    def weights(self, format: NumberFormat, order: str) -> dict[str, Any]:
        """Return what the config says of them."""
        return super().weights(format, order) | {"scale_dtype": "torch.uint8"}

    def number_format(self, weights: Mapping[str, Any]) -> NumberFormat:
        """Return the only one, if the config says it."""
        wanted = {name: value for name, value in self.weights(MXFP4, "natural").items() if name != "actorder"}
        _refuse_unknown({f"weights.{name}": (weights.get(name), {value}) for name, value in wanted.items()})
        return MXFP4

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer; `dtype` is not looked at."""
        grid, (out, columns) = matrix.grid, matrix.codes.shape
        step = grid.scale.expand(out, -1)
        exponent = step.log2() + BIAS
        if not bool(((2.0 ** (exponent - BIAS) == step) & (exponent >= 0) & (exponent < 255)).all()) or columns % 32:
            raise FormatError(
                f"{name}: a step is no power of two from 2^-127 to 2^127, or {columns} inputs are no groups of 32."
            )
        place = matrix.codes - ZERO
        code = place.abs() | (place < 0).int() << 3
        return {
            f"{name}.weight_packed": (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8),
            f"{name}.weight_scale": exponent.to(torch.uint8),
        }

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        (out, columns), groups = shape, format.groups(shape[1])
        return {
            f"{name}.weight_packed": torch.empty(out, columns // 2, dtype=torch.uint8, device="meta"),
            f"{name}.weight_scale": torch.empty(out, groups, dtype=torch.uint8, device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) as the packed codes tell."""
        out, half = expect(name, tensors, "weight_packed", (None, None), {torch.uint8}).shape
        return out, 2 * half

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        out, columns = self.shape_of(name, tensors)
        pairs = expect(name, tensors, "weight_packed", (out, columns // 2), {torch.uint8}).int()
        exponent = expect(name, tensors, "weight_scale", (out, format.groups(columns)), {torch.uint8})
        code = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)
        scale = 2.0 ** (exponent.to(torch.float32) - BIAS)
        grid = Grid(
            scale=scale,
            zero=torch.zeros_like(scale),
            group=consecutive(columns, format.group),
            low=format.low,
            high=format.high,
            levels=torch.tensor(format.levels, dtype=torch.float64),
        )
        return QuantizedMatrix(codes=ZERO + torch.where(code > 7, 8 - code, code), grid=grid)


PACKINGS: tuple[Packing, ...] = (PackQuantized(), MXFP4Packed())


def packing_of(format: NumberFormat | Grid) -> Packing:
    """Return the packing that holds a number format, or the codes of a grid; that of integers where none does."""
    levels = format.levels if not isinstance(format.levels, Tensor) else tuple(format.levels.tolist())
    return next((each for each in PACKINGS if levels == each.LEVELS), PACKINGS[0])


class CompressedTensors(GridFormat):
    """The tensors of a layer, packed in one of several ways, as its number format asks for."""

    KEY = Packing.KEY
    SUFFIXES = PackQuantized.SUFFIXES
    BITS = PackQuantized.BITS

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse what transformers does not load."""
        packing_of(format).check(name, shape, kind, format)

    def stays_packed(self, config: Mapping[str, Any], dtype: torch.dtype | None) -> bool:
        """Return whether what is packed is decoded to the network's dtype."""
        groups = object_of("compressed-tensors: config_groups", config.get("config_groups")).values()
        formats = [config.get("format"), *(group.get("format") for group in groups if isinstance(group, Mapping))]
        return all(each.DECODED in (None, dtype) for each in PACKINGS if each.FORMAT in formats)

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of steps, where the number format does not say it."""
        return PACKINGS[0].scale_dtype(model_dtype)

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        return packing_of(matrix.grid).pack(name, matrix, dtype)

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        return packing_of(format).empty(name, shape, format, dtype)

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) as the packing says it that has such words."""
        words = expect(name, tensors, self.KEY, (None, None), {each.WORDS for each in PACKINGS})
        return next(each for each in PACKINGS if words.dtype == each.WORDS).shape_of(name, tensors)

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        return packing_of(format).unpack(name, tensors, format)


class Config(ConfigFile):
    """The config of layers in some packings."""

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return a config with a group of layers for each grid.

        The reader drops tensors that are not packed of modules that it puts together from `network.experts`, unless a group that
        names experts is of eight-bit floats; so a group that applies to nothing says so, since all that it names is in `ignore`.
        Experts that are quantized are named by a pattern: it takes the first group that has one for the scheme of them all.
        """
        targets: dict[NumberFormat, dict[str, None]] = {network.scheme.number_format: {"Linear": None}}
        if network.grids:
            kinds = sorted(
                {*network.grids.values()}, key=lambda own: (own.bits, own.group or 0, own.symmetric, own.name)
            )
            targets = {kind: {} for kind in kinds}
        for name, own in network.grids.items():
            targets[own][_pattern_of_all(name) if name in network.routed else name] = None
        groups = []
        for kind, names in targets.items():
            packing = packing_of(kind)
            groups.append(_group_of(list(names), packing.weights(kind, network.scheme.order), packing.FORMAT))
        formats = {group["format"] for group in groups}
        if network.experts:
            floats = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
            groups.append(_group_of([_module_pattern(name) for name in network.experts], floats, "float-quantized"))
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "quantization_status": "compressed",
            "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
            "ignore": list(network.ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the number format of the group that a layer is in."""
        scheme = _group(config, name)
        weights = object_of("compressed-tensors: weights", scheme.get("weights"))
        packings = {each.FORMAT: each for each in PACKINGS}
        format = config.get("format")
        if format == MIXED:
            format = scheme.get("format")
        _refuse_unknown(
            {
                "format": (format, set(packings)),
                "quantization_status": (config.get("quantization_status"), {"compressed"}),
                "input_activations": (scheme.get("input_activations"), {None}),
                "output_activations": (scheme.get("output_activations"), {None}),
                "kv_cache_scheme": (config.get("kv_cache_scheme"), {None}),
            }
        )
        return packings[str(format)].number_format(weights)


FORMAT = Format(CompressedTensors(), Config())


def _refuse_unknown(fields: Mapping[str, tuple[Any, set[Any]]]) -> None:
    """Refuse fields of a config whose value is none of those that are understood.

    Args:
        fields: by name, the value and what is understood.

    Raises:
        FormatError: names the first.
    """
    for option, (value, understood) in fields.items():
        if isinstance(value, dict | list | float) or value not in understood:
            expected = " or ".join(sorted(map(str, understood)))
            raise FormatError(f"compressed-tensors: {option} is {value!r}, understood is {expected}.")


def _group_of(targets: Sequence[str], weights: Mapping[str, Any], format: str) -> dict[str, Any]:
    """Return what the config says of layers that are packed alike."""
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": format,
    }


def _module_pattern(name: str) -> str:
    """Return a pattern of a module alone; transformers looks for the word in it."""
    return rf"re:^{re.escape(name)}$" if "experts" in name else rf"re:^{re.escape(name)}$(?#experts)"


def _pattern_of_all(name: str) -> str:
    """Return a pattern of a layer and of those that differ from it by numbers alone; transformers looks for the word in it."""
    pattern = rf"re:^{re.sub('[0-9]+', '[0-9]+', re.escape(name))}$"
    return pattern if "experts" in name else f"{pattern}(?#experts)"


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the scheme of a layer: of several, the one that targets its name, else a pattern of it, else its class."""
    groups = object_of("compressed-tensors: config_groups", config.get("config_groups"))
    schemes: list[Mapping[str, Any]] = [*groups.values()]
    if not schemes or not all(isinstance(scheme, Mapping) for scheme in schemes):
        raise FormatError(
            f"compressed-tensors: config_groups has {len(schemes)} schemes; one or more, spelled out, are understood."
        )
    if len(schemes) == 1:
        return schemes[0]
    targets: list[tuple[str, Mapping[str, Any]]] = []
    for scheme in schemes:
        names = [] if scheme.get("targets") is None else scheme["targets"]
        targets += [(str(name), scheme) for name in of_kind("compressed-tensors: targets", names, list, "a list")]
    exact = [scheme for target, scheme in targets if target == name]
    patterns = [scheme for target, scheme in targets if target.startswith("re:") and matches(target[3:], name)]
    found = exact or patterns or [scheme for target, scheme in targets if target == "Linear"]
    if not found or any(scheme != found[0] for scheme in found):
        raise FormatError(f"{name}: {len(found)} of the {len(schemes)} schemes in config_groups name it, expected one.")
    return found[0]
