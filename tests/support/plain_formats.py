"""Read folders of safetensors with plain NumPy, as their formats say: packed integers, GPTQ, MLX, 4-bit floats, fp8, and dense.

An independent reader for files that nobody signed: whatever their bytes are, this is what they decode to. It imports nothing of
nearplane, checks little, and raises any error at all where a file makes no sense.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

INDEX, ONLY = "model.safetensors.index.json", "model.safetensors"
TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
    "BOOL": "?", "U16": "<u2", "U32": "<u4", "U64": "<u8", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1",
}  # fmt: skip
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FLOATS4 = np.concatenate([LEVELS, -LEVELS])


def _eight(byte: int) -> float:
    """Return a float8 e4m3fn: a sign, four bits of exponent less 7, three of fraction; no infinity."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = fraction * 2.0**-9 if not exponent else (8 + fraction) * 2.0 ** (exponent - 10)
    return math.nan if byte & 127 == 127 else -size if byte & 128 else size


EIGHTS = np.array([_eight(byte) for byte in range(256)], np.float32)
CODED = (".weight_packed", ".qweight", ".scales")
STACK = re.compile(r"((.+)\.(?:switch_mlp|experts)\.((?:gate|up|down)_proj))\.(weight|scales|biases)")  # of MLX
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class UnsureError(Exception):
    """A config says something that this reader does not know."""


class Raw(NamedTuple):
    """A tensor as its file has it: the name of its dtype, its values, those of bfloat16 and float8 as integers."""

    dtype: str
    values: NDArray[Any]

    def floats(self) -> NDArray[np.float32]:
        if self.dtype == "BF16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        if self.dtype.startswith("F8") and self.dtype != "F8_E4M3":
            raise UnsureError(self.dtype)
        return EIGHTS[self.values] if self.dtype == "F8_E4M3" else self.values.astype(np.float32)


def raw_tensors(folder: Path) -> dict[str, Raw]:
    """Return all tensors of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        files = [folder / name for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))]
    elif folder / ONLY in files:
        files = [folder / ONLY]
    return {name: tensor for path in files for name, tensor in _file(path).items()}


def _file(path: Path) -> dict[str, Raw]:
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, about in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            values = np.frombuffer(content[begin + first : begin + last], TYPES[about["dtype"]])
            tensors[name] = Raw(about["dtype"], values.reshape(about["shape"]))
    return tensors


def decoded(folder: Path) -> dict[str, Raw]:
    """Return what a folder's tensors stand for: dense ones as they are, decoded ones as float32 or bfloat16.

    Raises:
        UnsureError: config.json describes what this reader does not know.
    """
    config = json.loads((folder / "config.json").read_text())
    how, stored = config.get("quantization_config"), raw_tensors(folder)
    if (own := config.get("quantization")) is not None:  # the entry that MLX reads
        stored, stacks = _experts_apart(stored)
        return _layers(stored, CODED[2], lambda layer, parts: _mlx(parts, own.get(stacks.get(layer, layer), own)))
    if how is None:
        return stored
    with np.errstate(all="ignore"):
        match how.get("quant_method"):
            case "fp8":
                return _eights(stored, tuple(how.get("weight_block_size") or (128, 128)))
            case "mxfp4":
                return _gpt_oss(stored)
            case "compressed-tensors":
                dense = _layers(stored, CODED[0], lambda layer, parts: _compressed(parts, _scheme(how, layer)))
                return _in_eight_bits(dense, lambda layer: _scheme(how, layer))
            case "gptq":
                return _layers(stored, CODED[1], lambda _, parts: _gptq(parts, how))
            case "awq":
                return _layers(stored, CODED[1], lambda _, parts: _awq(parts))
    raise UnsureError(str(how.get("quant_method")))


def _experts_apart(stored: Mapping[str, Raw]) -> tuple[dict[str, Raw], dict[str, str]]:
    """Return the tensors of MLX with experts apart, by their names in the original, and the stack of every expert."""
    apart, stacks = dict[str, Raw](), dict[str, str]()
    for name, raw in stored.items():
        match = STACK.fullmatch(name)
        if match is None or raw.values.ndim != 3:
            apart[name] = raw
            continue
        stack, block, word, part = match.groups()
        if block.endswith("block_sparse_moe") and f"{block}.gate.weight" in stored:
            word = MIXTRAL[word]
        for number, values in enumerate(raw.values):
            stacks[f"{block}.experts.{number}.{word}"] = stack
            apart[f"{block}.experts.{number}.{word}.{part}"] = Raw(raw.dtype, values)
    return apart, stacks


def _layers(stored: Mapping[str, Raw], key: str, decode: Any) -> dict[str, Raw]:
    """Return the tensors with those of every layer replaced by its weight."""
    ends = {
        CODED[0]: (key, ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
        CODED[1]: (key, ".qzeros", ".scales", ".g_idx"),
        CODED[2]: (key, ".weight", ".biases"),
    }[key]
    dense = dict(stored)
    for layer in [name.removesuffix(key) for name in stored if name.endswith(key)]:
        parts = {end[1:]: dense.pop(layer + end) for end in ends if layer + end in stored}
        dense[f"{layer}.weight"] = Raw("F32", decode(layer, parts))
    return dense


def _bits(words: NDArray[Any], bits: int, count: int) -> NDArray[np.int64]:
    """Return (rows, count) integers of so many bits each from rows of words, low bits first."""
    rows = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    stream = np.unpackbits(rows, axis=1, bitorder="little")[:, : bits * count].reshape(len(words), count, bits)
    return (stream.astype(np.int64) << np.arange(bits)).sum(2)


def _scheme(how: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """Return the numbers of a layer: those of the only scheme, or of the one that names the layer."""
    schemes = list(how["config_groups"].values())
    fitting = [scheme for scheme in schemes if len(schemes) == 1 or layer in scheme["targets"]]
    if len(fitting) != 1:
        raise UnsureError(f"{len(fitting)} schemes of {layer}")
    return dict(fitting[0]["weights"])


def _compressed(parts: Mapping[str, Raw], weights: Mapping[str, Any]) -> NDArray[np.float32]:
    words, scale = parts["weight_packed"].values, parts["weight_scale"]
    if weights["type"] == "float":
        codes = np.stack([words & 15, words >> 4], 2).reshape(len(words), -1)
        steps = np.float32(2) ** (scale.values.astype(np.float32) - 127)
        return np.repeat(steps, 32, 1) * np.where(codes & 8, -1, 1).astype(np.float32) * LEVELS[codes & 7]
    bits, (out, columns) = weights["num_bits"], parts["weight_shape"].values.tolist()
    size = weights["group_size"] if weights["strategy"] == "group" else columns
    group = np.arange(columns) // size
    if "weight_g_idx" in parts:
        group = parts["weight_g_idx"].values
    zeros = np.full(scale.values.shape, 2 ** (bits - 1))
    if not weights.get("symmetric", True):
        zeros = _bits(parts["weight_zero_point"].values.T, bits, out).T
    steps, codes = scale.floats(), _bits(words, bits, columns)
    return steps[:, group] * (codes - zeros[:, group]).astype(np.float32)


def _in_eight_bits(stored: Mapping[str, Raw], scheme: Any) -> dict[str, Raw]:
    """Return the tensors with 8-bit floats and their steps, of rows, tiles or groups, replaced by weights."""
    dense = dict(stored)
    for name in [name for name, tensor in stored.items() if tensor.dtype == "F8_E4M3" and f"{name}_scale" in stored]:
        values, scale = stored[name].floats(), dense.pop(f"{name}_scale")
        weights = scheme(name.removesuffix(".weight"))
        steps = np.float32(2) ** (scale.floats() - 127) if scale.dtype == "U8" else scale.floats()
        if weights["strategy"] == "block":
            rows, columns = weights["block_structure"]
            steps = np.repeat(np.repeat(steps, rows, 0), columns, 1)
        elif weights["strategy"] == "group":
            steps = np.repeat(steps, weights["group_size"], 1)
        dense[name] = Raw("F32", values * steps)
    return dense


def _gptq(parts: Mapping[str, Raw], how: Mapping[str, Any]) -> NDArray[np.float32]:
    if how.get("dynamic"):
        raise UnsureError("dynamic")
    bits, group = how["bits"], parts["g_idx"].values
    version = how.get("checkpoint_format") or how.get("format") or "gptq"
    steps = parts["scales"].floats()  # (groups, out)
    zeros = _bits(parts["qzeros"].values, bits, steps.shape[1]) + (1 if version == "gptq" else 0)
    codes = _bits(parts["qweight"].values.T, bits, len(group))  # (out, in)
    return np.ascontiguousarray(steps[group].T * (codes.T - zeros[group]).T.astype(np.float32))


def _mlx(parts: Mapping[str, Raw], how: Mapping[str, Any]) -> NDArray[np.float32]:
    bits, size, scales = how["bits"], how["group_size"], parts["scales"]
    codes = _bits(parts["weight"].values, bits, scales.values.shape[1] * size)
    if (mode := how.get("mode", "affine")) == "affine":
        step, minimum = scales.floats(), parts["biases"].floats()
        return np.repeat(step, size, 1) * codes.astype(np.float32) + np.repeat(minimum, size, 1)
    step = EIGHTS[scales.values] if mode == "nvfp4" else np.float32(2) ** (scales.values.astype(np.float32) - 127)
    return np.repeat(step, size, 1) * (EIGHTS if bits == 8 else FLOATS4)[codes]


def _awq(parts: Mapping[str, Raw]) -> NDArray[np.float32]:
    steps = parts["scales"].floats()  # (groups, out)
    codes, zeros = (_bits(parts[part].values, 4, steps.shape[1]) for part in ("qweight", "qzeros"))
    place = (
        np.arange(steps.shape[1]).reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
    )  # of outputs in their words
    group = np.arange(len(codes)) // (len(codes) // len(steps))
    return np.ascontiguousarray((steps[group] * (codes - zeros[group])[:, place].astype(np.float32)).T)


def _eights(stored: Mapping[str, Raw], size: tuple[int, int]) -> dict[str, Raw]:
    dense = {}
    for name, tensor in stored.items():
        if tensor.dtype == "F8_E4M3":
            factors = stored[f"{name}_scale_inv"]
            steps = factors.floats()
            if factors.dtype == "U8":
                steps = np.float32(2) ** (steps - 127)
            out, columns = tensor.values.shape
            if steps.size > 1:
                steps = np.repeat(np.repeat(steps, size[0], 0)[:out], size[1], 1)[:, :columns]
            dense[name] = _short(tensor.floats() * steps)
        elif not name.endswith(("_scale_inv", ".activation_scale", ".input_scale")):
            dense[name] = tensor
    return dense


def _gpt_oss(stored: Mapping[str, Raw]) -> dict[str, Raw]:
    dense = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            stem, codes = name.removesuffix("_blocks"), tensor.values
            exponents = stored[f"{stem}_scales"].values.astype(np.int32) - 127
            values = np.ldexp(
                FLOATS4[np.stack([codes & 15, codes >> 4], -1)].reshape(*codes.shape[:-1], -1), exponents[..., None]
            )
            values = values.reshape(*codes.shape[:-2], -1)
            dense[stem] = _short(np.ascontiguousarray(np.swapaxes(values, -1, -2)))
    return dense


def _short(values: NDArray[np.float32]) -> Raw:
    """Round to bfloat16, ties to even."""
    whole = np.ascontiguousarray(values).view(np.uint32)
    rounded = (whole + 0x7FFF + (whole >> 16 & 1)) >> 16
    return Raw("BF16", np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16))
