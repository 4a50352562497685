"""The way to quantize that `auto` takes for a memory, a size, a number of bits, or a program: a single format, or a mix of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from platform import machine
from typing import Any

import torch

from nearplane.errors import RecipeError
from nearplane.planning.modes import flags
from nearplane.recipe.format_mix import DEFAULTS
from nearplane.recipe.readers import Weights, packing
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.runtimes import Runtime
from nearplane.recipe.scheme import DEFAULT_GROUP_SIZES
from nearplane.system.sizes import bytes_in, size_text
from nearplane.verbs.auto_request import AutoRequest
from nearplane.verbs.suggest import Suggestion, Suggestions, suggest

ANY = "1000TB"  # memory in which all fits
USUAL = (  # where nothing is asked: what most people run in each program
    "--bits 4", "--bits 4 --format gptq", "--grid q4_k_m", "--bits 4 --group-size 64 --format mlx", "--rate 3.125",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to quantize: its options, its name in folders, and words on why it was chosen and what comes out."""

    options: Mapping[str, Any]
    name: str
    words: str
    why: str
    size: str


def way_of(request: AutoRequest) -> Way:
    """Return the way that suits the memory, the size or the bits.

    Raises:
        RecipeError: Nothing fits, or the runtime does not take the model.
    """
    runtime = request.runtime
    if request.size is not None and runtime in (None, "nearplane", "llama.cpp"):
        return _of_size(request.size, runtime)
    if runtime is None and request.memory is None and request.size is None:
        runtime = _runtime_here()
    if request.bits is not None and runtime == "nearplane":
        rate = float(request.bits)
        why = "entropy-coded, which nearplane alone reads"
        return Way(
            options={"rate": rate},
            name=f"rate{rate:g}",
            words=f"--rate {rate:g}",
            why=why,
            size=f"{rate:g} bits a weight",
        )
    found = suggest(
        request.model,
        request.memory or ANY,
        context=request.context,
        runtime=runtime,
        trust_remote_code=request.trust_remote_code,
    )
    rows = found.fitting
    if not rows:
        raise RecipeError(found.remedy)
    if request.memory is not None and runtime is not None:
        mix = _of_memory(str(request.memory), found, runtime)
        if mix is not None:
            return mix
    if request.size is not None and runtime is not None:
        limit, least = bytes_in(request.size), min(each.weights or 0 for each in rows)
        if least > limit:
            raise RecipeError(
                f"--size {request.size}: for {runtime}, the smallest has {size_text(least)} of weights. Use more."
            )
        fitting = [each for each in rows if (each.weights or 0) <= limit]
        if fitting[0] is not rows[0] and _mixes(fitting, runtime, {"size": request.size}, packed=False):
            return _of_size(request.size, runtime)
        row = fitting[0]
        why = f"which loses least of what has at most {request.size} of weights for {runtime}"
    elif request.memory is not None:
        row, why = rows[0], f"which loses least of what fits in {size_text(found.limit)}"
    elif request.bits is not None:
        row, why = _of_bits(rows, request.bits, runtime), f"{request.bits} bits as {runtime} reads them"
    else:
        usual = [each for each in rows if each.options.removesuffix(f" --runtime {runtime}") in USUAL]
        row, why = (usual or rows)[0], f"the usual way for {runtime}" if usual else f"which loses least for {runtime}"
    memory = f", {size_text(row.memory or 0)} in memory with {found.context:,} tokens" if found.cache else ""
    size = f"{size_text(row.weights or 0)} of weights{memory}; expected KL {row.loss.nats()} nats per token"
    size += f" ({row.note})" if row.note else ""
    return Way(options=row.mode.options, name=row.mode.name, words=row.options, why=why, size=size)


def _of_size(size: str, runtime: Runtime | None) -> Way:
    """Return the way to a folder of at most a size: layers get rates, types of llama.cpp, or formats that the program loads."""
    named, options = size, dict[str, Any]()
    if runtime == "llama.cpp":
        named, options = f"{size}-gguf", {"format": "gguf"}
    elif runtime not in (None, "nearplane"):
        named = f"{size}-{runtime}"
    what = "rates" if named == size else "types" if options else "formats"
    return Way(
        options={"size": size} | options,
        name=named,
        words=f"--size {size}{' --format gguf' if options else ''}",
        why=f"for {runtime or 'nearplane'}: {what} of layers are measured so that the whole folder fits",
        size=f"at most {size}",
    )


def _mixes(fitting: list[Suggestion], runtime: Runtime, options: Mapping[str, Any], *, packed: bool) -> bool:
    """Return whether a mix of the formats of a program is possible where these single ones fit.

    Args:
        fitting: The ways that fit.
        runtime: The program.
        options: Options of `quantize` that ask for the mix.
        packed: Whether the program has to keep all formats packed, as others take more memory than is counted.
    """
    if runtime not in DEFAULTS:
        return False
    recipe = Recipe.from_spellings(**options, runtime=runtime)
    assert recipe.mix is not None, "these options ask for a mix"
    schemes = [offer.scheme for offer in recipe.mix.grouped(DEFAULT_GROUP_SIZES[:1]).offers if offer.scheme is not None]
    formats = [Weights(scheme.number_format, expert=False) for scheme in schemes]
    least = min(each.format.bits for each in formats)
    kept = not packed or all(runtime in packing(recipe.format, each) for each in formats)
    return kept and any(row.mode.bits >= least for row in fitting)


def _of_memory(memory: str, found: Suggestions, runtime: Runtime) -> Way | None:
    """Return the way that fills a memory with the formats that a program keeps packed; None if a single one loses as little."""
    options = {"served_memory": memory, "context": found.context}
    if found.cache is None or found.fitting[0] is found.rows[0]:
        return None
    if not _mixes(found.fitting, runtime, options, packed=True):
        return None
    return Way(
        options=options,
        name=f"{memory}-{runtime}",
        words=flags(options),
        why=f"for {runtime}: formats of layers are measured so that weights and cache fit, as {found.fitting[0].options} does",
        size=f"at most {size_text(found.limit)} of weights and cache in memory with {found.context:,} tokens",
    )


def _runtime_here() -> Runtime:
    """Return the program that people run on a machine like this."""
    if torch.cuda.is_available():
        return "vllm"
    return "mlx" if sys.platform == "darwin" and machine() == "arm64" else "llama.cpp"


def _of_bits(rows: list[Suggestion], bits: int, runtime: Runtime | None) -> Suggestion:
    """Return the way with so many bits: integers before floats, and of these the one that loses least.

    Raises:
        RecipeError: There is none; the message names those that there are.
    """
    having = [row for row in rows if row.mode.bits == bits]
    if not having:
        others = ", ".join(sorted({str(row.mode.bits) for row in rows}))
        raise RecipeError(f"--bits {bits} is no way for {runtime} and this model. Use one of {others}.")
    return min(having, key=lambda row: ("bits" not in row.mode.options, row.loss.mean))
