"""Programs that run checkpoints: which formats each reads, and which weights in them. Needs no torch.

A run without a runtime writes what all usual readers of its format load; with one, what this program loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Literal, get_args

from nearplane.errors import RecipeError
from nearplane.number_formats import FP8, FP8_BLOCK, NVFP4
from nearplane.recipe.file_formats import (
    FILE_FORMATS,
    Fault,
    FileFormat,
    Format,
    Weights,
    unstorable_in_compressed_tensors,
)

BITS_OF_SERVERS = (4, 8)  # symmetric: in GPTQ of vLLM 0.32, in compressed-tensors of SGLang
Runtime = Literal["vllm", "sglang", "transformers", "gptqmodel", "llama.cpp", "mlx", "nearplane"]


def _stored(weights: Weights) -> str | None:
    return unstorable_in_compressed_tensors(weights.format)


def _stored_for_vllm(weights: Weights) -> str | None:
    """Return what vLLM refuses, by the source of 0.32: experts in 8-bit floats whose inputs are not rounded."""
    if weights.expert and weights.format in (FP8, FP8_BLOCK) and not weights.rounded:
        return f"vLLM loads experts in {weights.format.name} with rounded inputs alone. Use --activations fp8, or --grid mxfp8."
    return _stored(weights)


def _stored_for_sglang(weights: Weights) -> str | None:
    """Return what SGLang refuses, by its source: other integers than 4 and 8 bits symmetric, and nvfp4 of weights alone."""
    format = weights.format
    if weights.expert and FILE_FORMATS["compressed-tensors"].fault(weights) is not None:
        return f"it is not known whether SGLang loads experts in {format.name}. Use --runtime vllm, which loads them."
    if format == NVFP4 and not weights.rounded:  # its pull request 10851 was closed
        return "SGLang loads nvfp4 with rounded inputs alone. Use --activations fp4, or --runtime vllm."
    if format.levels is None and not (format.symmetric and format.bits in BITS_OF_SERVERS):
        return (
            f"SGLang loads integers of 4 and 8 bits symmetric, not {format.name}. Use one of these, or --runtime vllm."
        )
    return _stored(weights)


def _gptq_for_servers(weights: Weights) -> str | None:
    format = weights.format
    if format.symmetric and format.bits in BITS_OF_SERVERS:
        return None
    return (
        f"vLLM and SGLang load GPTQ of 4 and 8 bits symmetric, not {format.name}. Use --format compressed-tensors, of which vLLM "
        f"loads 2 to 8 bits, also asymmetric."
    )


def _usual(name: Format) -> Fault:
    return FILE_FORMATS[name].fault


GPTQ: dict[Format, Fault] = {"gptq": _usual("gptq"), "gptq_v2": _usual("gptq_v2"), "awq": _usual("awq")}
SERVED: dict[Format, Fault] = {"gptq": _gptq_for_servers, "gptq_v2": _gptq_for_servers, "awq": _usual("awq")}
EVERY: dict[Format, Fault] = {name: _usual(name) for name in get_args(Format)}
# the name in `FileFormat.readers`, and what each program loads by format, the usual format first
RUNTIMES: Mapping[Runtime, tuple[str, Mapping[Format, Fault]]] = {
    "vllm": ("vLLM", {"compressed-tensors": _stored_for_vllm, **SERVED}),
    "sglang": ("SGLang", {"compressed-tensors": _stored_for_sglang, **SERVED}),
    "transformers": ("transformers", {"compressed-tensors": _usual("compressed-tensors"), **GPTQ}),
    "gptqmodel": ("GPTQModel", GPTQ),
    "llama.cpp": ("llama.cpp", {"gguf": _usual("gguf")}),
    "mlx": ("mlx_lm", {"mlx": _usual("mlx")}),
    "nearplane": ("nearplane", {**EVERY, "compressed-tensors": _stored}),
}


def needed_of_vllm(files: Format | None, weights: Weights) -> str | None:
    """Return what vLLM needs to load such weights: nothing (""), or a newer one than 0.9 (May 2025); None: it does not load them.

    Version 0.32 has all grids of compressed-tensors in its source, read 2 to 8 bits in a run, and refused asymmetric GPTQ in one.
    """
    fault = RUNTIMES["vllm"][1].get(files) if files is not None else None
    if fault is None or fault(weights) is not None:
        return None
    known = files != "compressed-tensors" or weights.format.name.startswith(("int4", "int8", "fp8", "nvfp4"))
    return "" if known else "a newer vLLM, which loads such grids"


def usual_format(runtime: object) -> Format | None:
    """Return the format of a run for a program that does not read the default one; None: the default."""
    for name, (_, formats) in RUNTIMES.items():
        if name == runtime and "compressed-tensors" not in formats:
            return next(iter(formats))
    return None


@cache
def files_for(format: Format | None, runtime: Runtime | None) -> FileFormat:
    """Return what readers of a format accept: all usual ones, or one program.

    Args:
        format: The format of the files.
        runtime: The program; None: all usual ones.

    Raises:
        RecipeError: The program does not read the format; the message names those that it reads.
    """
    if runtime is None:
        return FILE_FORMATS[format]
    name, formats = RUNTIMES[runtime]
    if format is None or format not in formats:
        others = " or ".join(other for other, (_, theirs) in RUNTIMES.items() if format in theirs)
        raise RecipeError(
            f"{name} does not read the format {format}, but {', '.join(formats)}. Use --format with one of these, or --runtime "
            f"{others}."
        )
    files = FILE_FORMATS[format]
    plain = tuple(each for each in files.plain_readers if each == name)
    alike = files.one_grid_for_experts and runtime not in ("vllm", "nearplane")  # these were tried with a grid a block
    return replace(files, fault=formats[format], readers=(name,), plain_readers=plain, one_grid_for_experts=alike)
