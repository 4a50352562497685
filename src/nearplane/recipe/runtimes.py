"""Programs that run checkpoints: which formats each reads, and which weights in them. Needs no torch.

A run without a runtime writes what all usual readers of its format load; with one, what this program loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Literal, get_args

from nearplane.errors import RecipeError
from nearplane.number_formats import NVFP4, NumberFormat
from nearplane.recipe.file_formats import (
    FILE_FORMATS,
    FileFormat,
    Format,
    unstorable_in_compressed_tensors,
)

BITS_OF_SERVERS = (4, 8)  # symmetric: in GPTQ of vLLM 0.32, in compressed-tensors of SGLang
Runtime = Literal["vllm", "sglang", "transformers", "gptqmodel", "llama.cpp", "mlx", "nearplane"]
# from a number format, and whether inputs are rounded, to the reason why a program does not load such weights; None: it does
Fault = Callable[[NumberFormat, bool], str | None]


def _stored(format: NumberFormat, _: bool) -> str | None:
    return unstorable_in_compressed_tensors(format)


def _stored_for_sglang(format: NumberFormat, rounds_inputs: bool) -> str | None:
    """Return what SGLang refuses, by its source: other integers than 4 and 8 bits symmetric, and nvfp4 of weights alone."""
    if format == NVFP4 and not rounds_inputs:  # its pull request 10851 was closed
        return "SGLang loads nvfp4 with rounded inputs alone. Use --activations fp4, or --runtime vllm."
    if format.levels is None and not (format.symmetric and format.bits in BITS_OF_SERVERS):
        return (
            f"SGLang loads integers of 4 and 8 bits symmetric, not {format.name}. Use one of these, or --runtime vllm."
        )
    return unstorable_in_compressed_tensors(format)


def _gptq_for_servers(format: NumberFormat, _: bool) -> str | None:
    if format.symmetric and format.bits in BITS_OF_SERVERS:
        return None
    return (
        f"vLLM and SGLang load GPTQ of 4 and 8 bits symmetric, not {format.name}. Use --format compressed-tensors, of which vLLM "
        f"loads 2 to 8 bits, also asymmetric."
    )


def _usual(name: Format) -> Fault:
    return lambda format, _: FILE_FORMATS[name].fault(format)


GPTQ: dict[Format, Fault] = {"gptq": _usual("gptq"), "gptq_v2": _usual("gptq_v2"), "awq": _usual("awq")}
SERVED: dict[Format, Fault] = {"gptq": _gptq_for_servers, "gptq_v2": _gptq_for_servers, "awq": _usual("awq")}
EVERY: dict[Format, Fault] = {name: _usual(name) for name in get_args(Format)}
# the name in `FileFormat.readers`, and what each program loads by format, the usual format first
RUNTIMES: Mapping[Runtime, tuple[str, Mapping[Format, Fault]]] = {
    "vllm": ("vLLM", {"compressed-tensors": _stored, **SERVED}),
    "sglang": ("SGLang", {"compressed-tensors": _stored_for_sglang, **SERVED}),
    "transformers": ("transformers", {"compressed-tensors": _usual("compressed-tensors"), **GPTQ}),
    "gptqmodel": ("GPTQModel", GPTQ),
    "llama.cpp": ("llama.cpp", {"gguf": _usual("gguf")}),
    "mlx": ("mlx_lm", {"mlx": _usual("mlx")}),
    "nearplane": ("nearplane", {**EVERY, "compressed-tensors": _stored}),
}


def needed_of_vllm(files: Format | None, format: NumberFormat) -> str | None:
    """Return what vLLM needs to load such weights: nothing (""), or a newer one than 0.9 (May 2025); None: it does not load them.

    Version 0.32 has all grids of compressed-tensors in its source, read 2 to 8 bits in a run, and refused asymmetric GPTQ in one.
    """
    fault = RUNTIMES["vllm"][1].get(files) if files is not None else None
    if fault is None or fault(format, False) is not None:
        return None
    known = files != "compressed-tensors" or format.name.startswith(("int4", "int8", "fp8", "nvfp4"))
    return "" if known else "a newer vLLM, which loads such grids"


def usual_format(runtime: object) -> Format | None:
    """Return the format of a run for a program that does not read the default one; None: the default."""
    for name, (_, formats) in RUNTIMES.items():
        if name == runtime and "compressed-tensors" not in formats:
            return next(iter(formats))
    return None


@cache
def files_for(format: Format | None, runtime: Runtime | None, *, rounds_inputs: bool = False) -> FileFormat:
    """Return what readers of a format accept: all usual ones, or one program.

    Args:
        format: The format of the files.
        runtime: The program; None: all usual ones.
        rounds_inputs: Whether the program rounds the inputs of layers.

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
    fault = partial(_fault, formats[format], rounds_inputs)
    return replace(files, fault=fault, readers=(name,), plain_readers=plain)


def _fault(fault: Fault, rounds_inputs: bool, format: NumberFormat) -> str | None:
    return fault(format, rounds_inputs)
