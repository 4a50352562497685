"""suggest(): the ways to quantize a model that fit in a given memory, from its config.json alone, with what each loses."""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nearplane.calibration.hub_texts import hub_fault
from nearplane.calibration.text_files import SELF
from nearplane.errors import RecipeError
from nearplane.models.described import open_described
from nearplane.models.kinds import continues_text
from nearplane.models.model import Model
from nearplane.planning.cache_size import DEFAULT_CONTEXT, cache_bytes
from nearplane.planning.folder_size import tensor_bytes
from nearplane.planning.modes import ENERGY, MODES, Loss, Mode
from nearplane.planning.rehearsal import check_readers
from nearplane.planning.request import check_request, resolved, types_of_blocks
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.runtimes import Runtime
from nearplane.record.uses import typed
from nearplane.system.arguments import takes
from nearplane.system.sizes import SIZE_UNITS, size_text
from nearplane.verbs.suggest_request import SuggestRequest

GOOD_LOSS = 1.05  # KL as a multiple of that of 4 bits
SHORT = 128  # a shorter context is not advised


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One way to quantize a model.

    Args:
        mode: The way, with its options as arguments of `nearplane.quantize`.
        options: The same as options of `nearplane quantize`.
        command: The whole command.
        runtimes: Programs that keep such weights packed.
        loss: KL as a multiple of that of 4 bits, see `Loss`.
        weights: Bytes of the tensors in the file; None if `refused`.
        memory: Bytes of weights and cache in memory; without the cache where that is not known.
        fits: Whether `memory` is within the limit.
        refused: Reason why `quantize` refuses this; empty if it does not.
        note: What is written otherwise than the options say, on which `loss` is estimated; empty if nothing is.
    """

    mode: Mode
    options: str
    command: str
    runtimes: tuple[str, ...]
    loss: Loss
    weights: int | None = None
    memory: int | None = None
    fits: bool = False
    refused: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """Ways to quantize a model, those with the least loss first.

    Args:
        parameters: Number of weights of the model.
        limit: Bytes of memory that were given.
        context: Number of tokens that the cache is for.
        cache: Bytes of the cache of keys and values, or of states; None if it is not known.
        rows: The ways.
        remedy: One sentence on what would fit if nothing does; else empty.
    """

    parameters: int
    limit: int
    context: int
    cache: int | None
    rows: tuple[Suggestion, ...]
    remedy: str

    @property
    def fitting(self) -> list[Suggestion]:
        """The ways that fit."""
        return [row for row in self.rows if row.fits]

    def fields(self) -> dict[str, Any]:
        """Return all values for JSON."""
        rows = [asdict(row) | {"loss": row.loss._asdict()} for row in self.rows]
        return asdict(self) | {"rows": [{name: row[name] for name in row if name != "mode"} for row in rows]}


@takes(SuggestRequest)
def suggest(request: SuggestRequest) -> Suggestions:
    """Return the ways to quantize a model, with their sizes, and whether they fit in a memory. No weights are needed.

    Counted are the weights and the cache of one sequence; what a runtime needs besides is not.

    Raises:
        RecipeError: `memory` is no size, or `context` is longer than the model's maximum length.
        ModelError: config.json is missing, or transformers cannot build a network from it.
    """
    limit, model, context = request.check(), request.model, request.context
    described = open_described(str(model), trust_remote_code=request.trust_remote_code)
    positions = described.positions
    if context is not None and positions is not None and context > positions:
        raise RecipeError(
            f"--context is {context:,}, but the maximum length of {model} is {positions:,} tokens. Use at most that many."
        )
    context = context or min(DEFAULT_CONTEXT, positions or DEFAULT_CONTEXT)
    cache = cache_bytes(described, context)
    runtime = request.runtime
    sizes = _Sizes(
        name=str(model), variants={(False, False): described}, cache=cache or 0, limit=limit, runtime=runtime
    )
    rows = [sizes.row(mode) for mode in MODES if runtime is None or runtime in mode.runtimes()]
    rows.sort(key=lambda row: (row.loss.mean, row.memory or 0))
    return Suggestions(
        parameters=sum(math.prod(described.reader.shape(name)) for name in described.reader.names()),
        limit=limit,
        context=context,
        cache=cache,
        rows=tuple(rows),
        remedy=""
        if any(row.fits for row in rows)
        else _remedy(described, rows, sizes.whole(), limit, context, cache or 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The model and the memory that it shall fit in.

    Args:
        name: The model as the user wrote it.
        variants: The model by whether its embeddings and its head are quantized; missing ones are added.
        cache: Bytes of the cache.
        limit: Bytes of memory.
        runtime: Program that shall run it; None: any.
    """

    name: str
    variants: dict[tuple[bool, bool], Model]
    cache: int
    limit: int
    runtime: Runtime | None

    def row(self, mode: Mode) -> Suggestion:
        """Return what a mode takes."""
        mode = mode.for_runtime(self.runtime)
        asked = Recipe.from_spellings(**mode.options)
        described = self._variant(asked.scheme.ends)
        experts = any(layer.routed for layer in described.layers)
        runtimes = mode.runtimes(experts=experts)
        if experts and runtimes:
            mode = mode.for_experts(self.runtime)
            asked = Recipe.from_spellings(**mode.options)
        row = partial(Suggestion, mode=mode, options=mode.words, command=self._command(mode), runtimes=runtimes)
        if not runtimes or self.runtime not in (None, *runtimes):
            who = f"{self.runtime} does not keep" if self.runtime else "no program keeps"
            return row(refused=f"{who} experts packed in {mode.weights().format.name}.", loss=mode.loss)
        sample = described if asked.files.one_file else _one_of_each(described)
        try:
            plan = resolved(sample, asked)
            check_request(sample, plan)
            check_readers(sample, plan)
            weights = tensor_bytes(described, plan if sample is described else resolved(described, asked))
        except RecipeError as error:
            return row(refused=str(error), loss=mode.loss)
        memory = weights + self.cache
        loss, note = _by_types(described, plan, mode.loss) if asked.files.one_file else (mode.loss, "")
        if mode.options.get("runtime") == "vllm" and not getattr(asked.scheme, "symmetric", True):
            note = "measured without zero points"
        if mode.packed_bits is not None and asked.scheme.asked is not None:
            wide = 8 * described.dtype.itemsize  # experts are decoded
            bits = sum(
                math.prod(layer.shape) * ((wide if layer.routed else mode.packed_bits) - asked.scheme.asked[0])
                for layer in described.layers
            )
            memory += math.ceil(bits / 8)
        return row(weights=weights, memory=memory, fits=memory <= self.limit, loss=loss, note=note)

    def whole(self) -> Suggestion:
        """Return what a rate takes if embeddings and head are quantized, too."""
        mode = next(mode for mode in MODES if "rate" in mode.options)
        return self.row(replace(mode, options={**mode.options, "include_embeddings": True, "include_head": True}))

    def _variant(self, ends: tuple[bool, bool]) -> Model:
        """Return the model with embeddings and head quantized or not."""
        plain = self.variants[False, False]
        if ends not in self.variants:
            trusted = plain.trust_remote_code
            self.variants[ends] = Model(plain.folder, plain.network, plain.reader, ends=ends, trust_remote_code=trusted)
        return self.variants[ends]

    def _command(self, mode: Mode) -> str:
        trusted = " --trust-remote-code" if self.variants[False, False].trust_remote_code else ""
        out = typed(f"{Path(self.name).name}-{mode.name}")
        return f"nearplane quantize {typed(self.name)} {out} {mode.words}{self.text}{trusted}"

    @property
    def text(self) -> str:
        """The option that names a text, where the default text cannot be read."""
        if not hub_fault():
            return ""
        return f" --calibration {SELF if continues_text(self.variants[False, False].network) else 'TEXT'}"


def _by_types(model: Model, plan: Plan, loss: Loss) -> tuple[Loss, str]:
    """Return the loss of a GGUF by the types that are written, and a sentence on those that are not the ones asked for.

    A loss was measured on models whose rows are whole numbers of blocks. Other types lose other shares of the energy of
    the weights, and KL is taken to be in proportion to that.
    """
    asked = types_of_blocks(model, Plan.of(plan.recipe, list(plan.layers)), fallbacks=False)
    changed, lost = Counter[str](), [0.0, 0.0]
    for layer in model.layers:
        weights, wanted, written = math.prod(layer.shape), asked[layer.name].name, plan.layers[layer.name].number_format
        lost[0] += weights * ENERGY[wanted]
        lost[1] += weights * ENERGY[written.name]
        if written.name != wanted:
            changed[f"{written.name} instead of {wanted}"] += weights
    instead, every = sum(changed.values()), sum(math.prod(layer.shape) for layer in model.layers)
    if not instead:
        return loss, ""
    mean, low, high = (value * lost[1] / lost[0] for value in loss[:3])
    names = ", ".join(name for name, _ in changed.most_common())
    note = f"{100 * instead / every:.0f} % of the weights are in rows that blocks of 256 do not divide: {names}"
    return Loss(mean, low, high, loss.models), note


def _one_of_each(model: Model) -> Model:
    """Return a model with one layer of each shape and kind, as far as layers of a recipe are treated alike."""
    seen, blocks = set(), []
    for block in model.blocks:
        layers = []
        for layer in block.layers:
            kind = (layer.name.rpartition(".")[2], layer.shape, layer.kind, layer.routed)
            if kind not in seen:
                seen.add(kind)
                layers.append(layer)
        if layers:
            blocks.append(copy(block))
            blocks[-1].layers = layers
    sample = copy(model)
    sample.blocks = blocks
    return sample


def _remedy(model: Model, rows: list[Suggestion], whole: Suggestion, limit: int, context: int, cache: int) -> str:
    """Return a sentence on what would fit where nothing does."""
    possible = [row for row in rows if row.memory is not None]
    if not possible:
        return f"None of these {len(rows)} ways is possible for this model: {rows[0].refused}"
    least = min(possible, key=lambda row: row.memory or 0)
    good = min((row for row in possible if row.loss.mean <= GOOD_LOSS), key=lambda row: row.memory or 0, default=least)
    needed = good.memory or 0
    power = max(1, min(len(SIZE_UNITS) - 1, (len(str(needed)) - 1) // 3))  # of 1000
    enough = f"--memory {math.ceil(100 * needed / 1000**power) / 100:.2f}{SIZE_UNITS[power]}"
    shorter = _longest(model, limit - (needed - cache), context)
    smallest = f"the smallest, {least.options}, takes {size_text(least.memory or 0)}"
    if cache:
        smallest += f" ({size_text(cache)} of it for keys and values of {context:,} tokens)"
    if good is not least:
        smallest += (
            f" and loses {least.loss.mean / good.loss.mean:.2g} times as much as {good.options}, {size_text(needed)}"
        )
    if shorter >= SHORT:
        enough += f", --context {shorter}"
    if whole.fits:
        enough += f", or {whole.options}, {size_text(whole.memory or 0)},"
    return f"Nothing fits in {size_text(limit)}: {smallest}. Use {enough} or a smaller model."


def _longest(model: Model, room: int, context: int) -> int:
    """Return the largest number of tokens below `context` whose cache has at most `room` bytes; 0 if there is none."""
    low, high = 0, context  # the cache of `low` fits, that of `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (cache_bytes(model, middle) or 0) <= room else (low, middle)
    return low
