"""The GPTQ format, which gptqmodel, transformers, vLLM and SGLang load; versions 1 and 2 store zero points differently.

    NAME.qweight  (ceil(in*bits/32), out)      int32  codes, + 2^(bits-1) if symmetric; a bit stream along the inputs
    NAME.qzeros   (groups, ceil(out*bits/32))  int32  zero points, packed along the outputs; version 1 stores zero - 1
    NAME.scales   (groups, out)                fp16
    NAME.g_idx    (in,)                        int32  group of every input

Version 1 would store a zero point of 0 as -1, which its readers interpret differently. Therefore asymmetric matrices
are written in version 2, and a version 1 file that may hold such a zero point is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from nearplane.coding.packed_words import pack, unpack, words_of
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.container import Format
from nearplane.formats.integers import Integers, consecutive, expect, group_size_of, object_of, of_kind
from nearplane.formats.layer_format import GridFormat, Quantized, check_groups, check_kind, json_text, matches
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import NumberFormat, integers
from nearplane.recipe.readers import Weights, readers_of
from nearplane.recipe.runtimes import GPTQ_BITS
from nearplane.system.paths import GPTQ_CONFIG

FUSED_NAMES = {  # names under which vLLM and SGLang look up the scheme of layers that they load as one
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
BLOCKS_FOUND = (  # lists of blocks that optimum recognizes; it takes the first that is a prefix of a module's name
    "transformer.h",
    "model.decoder.layers",
    "gpt_neox.layers",
    "model.layers",
    "model.language_model.layers",
)
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # group sizes of gptqmodel's kernels, besides one step per row


@dataclass(frozen=True, slots=True)
class GPTQ(GridFormat):
    """The tensors of a layer in one version of the format, and their config; quantize_config.json holds the same object.

    Args:
        less: The number subtracted from a zero point when it is stored.
        permuted: Whether groups may hold any columns; otherwise they are runs of neighbours.
    """

    less: int
    permuted: bool = False

    KEY = "qweight"
    SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
    ON_DEVICE = True

    @property
    def version(self) -> str:
        """Name of the version in config.json."""
        return "gptq" if self.less else "gptq_v2"

    def configured(self, config: Mapping[str, Any]) -> Self:
        """Return the format with `permuted` as the config sets it."""
        return replace(self, permuted=bool(config.get("desc_act")))

    def check(self, name: str, shape: tuple[int, int], kind: str, format: NumberFormat) -> None:
        """Refuse layers that gptqmodel's kernels do not support, and asymmetric weights in version 1."""
        bits, group_size = format.bits, format.group
        check_kind(name, kind, ("Linear", "Conv1D", "Expert"), "GPTQ stores Linear and Conv1D layers only")
        readers_of(self.version, "nearplane").check(name, Weights(format))
        if group_size is not None and group_size not in GROUP_SIZES and group_size != shape[1]:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise RecipeError(f"{name} has groups of {group_size}; readers of GPTQ need --group-size {sizes} or none.")
        check_groups(name, shape[1], format, " (none: one step per row)")
        for size, side in zip(shape, ("outputs", "inputs"), strict=True):
            if bits == 3 and size % 32:
                raise RecipeError(
                    f"{name} has {size} {side}; readers of GPTQ need a multiple of 32 for 3-bit codes. Use 2, 4 or 8 bits, or "
                    f"leave the layer unquantized with --ignore."
                )

    def pack(self, name: str, matrix: QuantizedMatrix[Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer."""
        stored = Integers.of(name, matrix, dtype)
        bits = stored.format.bits
        if bits not in GPTQ_BITS or dtype != torch.float16:
            raise FormatError(f"{name}: {bits} bits, {dtype} scales; GPTQ stores 2, 3, 4 or 8 bits and float16 scales.")
        if self.less and not stored.format.symmetric:
            raise FormatError(f"{name} is asymmetric; nearplane writes version 1 of GPTQ for symmetric matrices only.")
        return {
            f"{name}.qweight": pack(stored.codes, bits).T.contiguous(),
            f"{name}.qzeros": pack((stored.zeros - self.less).T, bits),
            f"{name}.scales": stored.scale.T.contiguous(),
            f"{name}.g_idx": stored.group.to(torch.int32),
        }

    def empty(self, name: str, shape: tuple[int, int], format: NumberFormat, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer without contents."""
        out, columns = shape
        bits, groups = format.bits, format.groups(columns)
        return {
            f"{name}.qweight": torch.empty(words_of(columns, bits), out, dtype=torch.int32, device="meta"),
            f"{name}.qzeros": torch.empty(groups, words_of(out, bits), dtype=torch.int32, device="meta"),
            f"{name}.scales": torch.empty(groups, out, dtype=self.scale_dtype(dtype), device="meta"),
            f"{name}.g_idx": torch.empty(columns, dtype=torch.int32, device="meta"),
        }

    def shape_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (out, in) from the shapes of g_idx and qweight."""
        columns = len(expect(name, tensors, "g_idx", (None,), {torch.int32, torch.int64}))
        return expect(name, tensors, "qweight", (None, None), {torch.int32}).shape[1], columns

    def unpack(self, name: str, tensors: Mapping[str, Tensor], format: NumberFormat) -> QuantizedMatrix:
        """Return the matrix of one layer."""
        bits, group_size = format.bits, format.group
        group = expect(name, tensors, "g_idx", (None,), {torch.int32, torch.int64}).to(torch.int64)
        columns = len(group)
        groups = format.groups(columns)
        words = expect(name, tensors, "qweight", (words_of(columns, bits), None), {torch.int32})
        out = words.shape[1]
        scale = expect(name, tensors, "scales", (groups, out), {torch.float16, torch.bfloat16, torch.float32})
        packed = expect(name, tensors, "qzeros", (groups, words_of(out, bits)), {torch.int32})
        zeros = unpack(packed, bits, out)
        if self.less and bool((zeros == 2**bits - 1).any()):
            raise FormatError(
                f"{name}.qzeros contains {2**bits - 1}, which some readers of version 1 of GPTQ read as a zero point of 0 and "
                f"others as {2**bits}. Convert the checkpoint to gptq_v2 with the program that wrote it."
            )
        if bool(((group < 0) | (group >= groups)).any()):
            raise FormatError(f"{name}.g_idx refers to groups outside 0 to {groups - 1}. Fetch the file again.")
        if not self.permuted and not torch.equal(group, consecutive(columns, group_size, group.device)):
            raise FormatError(
                f"{name}.g_idx permutes groups of {group_size} although desc_act is false; readers differ in this."
            )
        codes, zeros = unpack(words.T.contiguous(), bits, columns), (zeros + self.less).T
        return Integers(codes=codes, zeros=zeros, scale=scale.T, group=group, format=format).matrix()

    def describe(self, network: Quantized) -> dict[str, Any]:
        """Return a config with the most frequent grid as the default and the other grids in `dynamic`.

        `desc_act` is false, as groups are runs of neighbours whatever the order of the solve.
        """
        grids, usual = network.grids, network.scheme.number_format
        if grids:
            usual = Counter(grids.values()).most_common(1)[0][0]
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "checkpoint_format": self.version,
            "format": self.version,
            **_fields(usual),
            "desc_act": False,
            "lm_head": False,
            "pack_dtype": "int32",
            "meta": {
                "quantizer": [f"nearplane:{network.version}"],
                "order": network.scheme.order,
                "damp": network.scheme.damp,
            },
        }
        if network.routed:  # transformers has no modules for them and would skip them silently, see config_text
            config["meta"]["experts"] = True
        blocks = {_list_of(name) for name in network.quantized}
        skipped = [name for name in network.ignore if not name.startswith("re:") and _list_of(name) in blocks]
        parts = [name.removeprefix("re:") for name in network.ignore if name.startswith("re:")]
        exceptions = {name: grid for name, grid in _with_fused(grids).items() if grid != usual}
        if skipped or parts or exceptions:  # gptqmodel, vLLM and SGLang take the first match
            config["dynamic"] = {f"-:{pattern}": {} for pattern in (*(f"^{re.escape(n)}$" for n in skipped), *parts)}
            for name, grid in exceptions.items():
                fields = {field: value for field, value in _fields(grid).items() if value != config[field]}
                config["dynamic"][f"+:^{re.escape(name)}$"] = fields
        if blocks - {*BLOCKS_FOUND}:
            config["block_name_to_quantize"] = sorted(blocks)[0]
        if skipped:
            config["modules_in_block_to_quantize"] = [list(network.quantized)]  # transformers, through optimum
        return config

    def files(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return quantize_config.json."""
        return {GPTQ_CONFIG: json_text(config)}

    def grid_of(self, config: Mapping[str, Any], name: str) -> NumberFormat:
        """Return the number format of the config, or that of the first entry of `dynamic` that matches the layer."""
        entry = _dynamic(config, name)
        bits, group_size = entry.get("bits", config.get("bits")), entry.get("group_size", config.get("group_size", 128))
        if type(bits) is not int or bits not in GPTQ_BITS:
            raise FormatError(f"GPTQ: bits is {bits!r}, expected {', '.join(map(str, GPTQ_BITS))}.")
        if str(config.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
            raise FormatError(f"GPTQ: pack_dtype is {config['pack_dtype']!r}, expected int32.")
        if config.get("rotation"):
            raise FormatError(f"GPTQ: rotation is {config['rotation']!r}; nearplane does not read rotated weights.")
        symmetric = of_kind("GPTQ: sym", entry.get("sym", config.get("sym", True)), bool, "true or false")
        size = group_size_of("GPTQ: group_size", group_size, (-1, None))
        return integers(bits, size, symmetric=symmetric)


FORMAT = Format(GPTQ(less=1))
FORMAT_V2 = Format(GPTQ(less=0))


def _list_of(name: str) -> str:
    """Return the module list of a module's block: "model.layers" for "model.layers.3.mlp.up_proj"."""
    return re.split(r"\.\d+(?:\.|$)", name)[0]


def _fields(format: NumberFormat) -> dict[str, Any]:
    """Return the fields of the config for a number format."""
    return {"bits": format.bits, "group_size": format.group or -1, "sym": format.symmetric}


def _with_fused(grids: Mapping[str, NumberFormat]) -> dict[str, NumberFormat]:
    """Add the names under which readers look up fused layers, where all fused layers have the same grid."""
    fused: dict[str, set[NumberFormat]] = {}
    for name, grid in grids.items():
        path, _, last = name.rpartition(".")
        if last in FUSED_NAMES:
            fused.setdefault(f"{path}.{FUSED_NAMES[last]}", set()).add(grid)
    return dict(grids) | {name: next(iter(g)) for name, g in fused.items() if name not in grids and len(g) == 1}


def _dynamic(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the entry of `dynamic` for one layer."""
    for key, entry in object_of("GPTQ: dynamic", config.get("dynamic")).items():
        if not matches(key.removeprefix("+:").removeprefix("-:"), name):
            continue
        if key.startswith("-:"):
            raise FormatError(f"GPTQ: {name} is quantized, although dynamic {key!r} excludes it.")
        if not isinstance(entry, Mapping) or (unknown := entry.keys() - {"bits", "group_size", "sym"}):
            fault = ", ".join(sorted(unknown)) if isinstance(entry, Mapping) else repr(entry)
            raise FormatError(f"GPTQ: dynamic {key!r} sets {fault}, expected only bits, group_size and sym.")
        return entry
    return {}
