"""The number format of every layer in a mix: what each costs is estimated, the best choice for a limit is made, and measured.

Layers that a program must load alike are a unit. What each unit costs in each format is estimated by gradients, and
`allocate.choose` minimizes the sum. The network is then measured with all units rounded together, and with those of one kind
or depth, on other windows. This corrects the estimates, and the choice is made again, and measured on windows that it was not
made by. The result is a recipe with --layer and --ignore for every unit, and no mix.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from nearplane.calibration.folding import fold
from nearplane.calibration.positions import PositionWeights
from nearplane.calibration.sensitivity import sensitivity
from nearplane.calibration.windows import Windows, calibration_windows, check_tokens
from nearplane.errors import RecipeError, first_few
from nearplane.planning.allocate import choose, scaled_to_sums
from nearplane.planning.folder_size import files_beside
from nearplane.planning.mix_probe import Losses, divergences, estimated
from nearplane.planning.mix_recipe import formats_of_ends, offers_by_layer, recipe_of
from nearplane.planning.mix_size import constant_of, context_of, folder_bytes
from nearplane.planning.mix_units import Unit, misfits, units_of
from nearplane.planning.mixing import Mixing, Parts
from nearplane.planning.plan_file import PlanFile
from nearplane.planning.request import open_for_mix, open_resolved
from nearplane.planning.run import Job, Options, bytes_of_tensors
from nearplane.recipe.format_mix import UNQUANTIZED, FormatMix, Offer
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.record.mix_record import MixRecord
from nearplane.record.mix_summary import Size
from nearplane.system.matmul_library import chosen_library
from nearplane.system.progress import phase

log = logging.getLogger("nearplane")
KINDS, DEPTHS = 6, 4  # sets of layers that a choice is measured by, beside all of them
POINTS = 9  # of a frontier
EXAMPLE = 0.00012345678901234567  # placeholder of a figure, in full length
TRIES = 12  # of choices whose folder is sized exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A choice of formats.

    Args:
        recipe: The recipe that names the format of every layer, without a mix.
        mix: How it was chosen.
        formats: Format of every layer as in --mix, by name in the order of the network.
        frontier: Choices of other sizes, from the smallest to the largest.
    """

    recipe: Recipe
    mix: MixRecord
    formats: dict[str, str]
    frontier: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class _Reopened:
    """The choice of rank 0, by which another rank opens the model again."""

    folder: str
    recipe: Recipe
    trust_remote_code: bool

    def __call__(self, follower: Any) -> None:
        follower.turn_to(open_resolved(self.folder, self.recipe, trust_remote_code=self.trust_remote_code)[0])


def with_mix(folder: str, recipe: Recipe, options: Options) -> tuple[Recipe, Options, Windows]:
    """Choose the format of every layer of a recipe with a mix.

    Returns:
        The recipe that names them, options with the record of the choice, and the windows of the run.

    Raises:
        NearplaneError: The text cannot be read, or no choice is within the limit; the message says what is possible.
    """
    chosen, windows = consider(folder, recipe, options)
    if options.device.ranks.others:
        options.device.ranks.start(_Reopened(folder, chosen.recipe, options.trust_remote_code))
    return chosen.recipe, replace(options, mix=chosen.mix), windows


def consider(folder: str, recipe: Recipe, options: Options) -> tuple[Chosen, Windows]:
    """Choose the format of every layer, and write nothing but the file of --plan-file; see `with_mix`."""
    with phase(options.progress, "opening the model"):
        model, settled = open_for_mix(folder, recipe, trust_remote_code=options.trust_remote_code)
    windows = calibration_windows(model, settled, options.given, options.device, options.progress)
    check_tokens(model, settled, windows)
    plan = Plan(recipe=settled, layers={})  # nothing is decided of layers yet
    job = Job(model=model, asked=settled, plan=plan, windows=windows, options=options)
    file = None
    if options.plan_file is not None:
        with phase(options.progress, "reading the model's files"):
            file = PlanFile(options.plan_file, job.run_inputs().values)
    shapes = [layer.shape for layer in model.layers]
    with chosen_library(shapes, windows.count * windows.seqlen, options.device):
        mixing = Mixing(folder=folder, job=job, file=file)
        fold(model, windows, options.device, lambda _: mixing.mix.coarsest_inputs, options.progress)
        return chosen_mix(mixing), windows


def chosen_mix(mixing: Mixing) -> Chosen:
    """Choose the format of every layer.

    Raises:
        RecipeError: No choice is within the limit; the message says what is possible.
    """
    model, recipe, mix, parts = mixing.model, mixing.recipe, mixing.mix, mixing.parts()
    for word, (count, reason) in misfits(model, recipe).items():
        log.warning("%s is not possible for %d layers: %s", word, count, reason)
    if mix.counts_cache:
        constant_of(model, recipe, mix, (), {})  # raises what is wrong with the cache before anything is measured
    losses, positions = _losses(mixing, parts)
    estimates, unfit = units_of(model, recipe, losses)
    if not estimates:
        raise RecipeError(
            f"No format of --mix {','.join(mix.words)} fits a layer that is to be chosen for: "
            f"{first_few(unfit) or 'all are fixed'}. Name other formats, or leave out --layer."
        )
    if unfit:
        log.warning("%d layers stay unquantized, as no format of the mix fits them: %s", len(unfit), first_few(unfit))
    if mix.weigh == "active" and all(unit.share == 1.0 for unit in estimates):
        log.warning("--weigh active changes nothing: the model has no experts, so that every token reads all weights.")
    first, _ = within_the_limit(mixing, estimates, unfit)
    units = corrected(mixing, estimates, first, partial(_measured, mixing, positions, parts.moments, parts.errors))
    picks, spent = within_the_limit(mixing, units, unfit, warns=True)
    if not quantizes(mixing, units, picks):
        raise RecipeError(
            f"{mix.asked} has room for the original, so that nothing would be quantized. Use less, or leave "
            f"{UNQUANTIZED} out of --mix."
        )
    offers = offers_by_layer(model, recipe, units, picks)
    (kl,) = _measured(mixing, positions, parts.moments, parts.last, offers, [offers])
    record = _record(mixing, units, unfit, spent, _sum(estimates, picks), _sum(units, picks), kl)
    words = {
        name: mix.offers[each.offers[pick]].word
        for each, pick in zip(units, picks, strict=True)
        for name in each.layers
    }
    return Chosen(
        recipe=recipe_of(model, recipe, units, picks, unfit),
        mix=record,
        formats={layer.name: words[layer.name] for layer in model.layers if layer.name in words},
        frontier=tuple(frontier(mixing, units)),
    )


def _record(
    mixing: Mixing,
    units: Sequence[Unit],
    unfit: Sequence[str],
    spent: float,
    estimate: float,
    predicted: float,
    measured: float,
) -> MixRecord:
    """Return the record of a choice."""
    mix = mixing.mix
    limit, unit = mix.limit
    return MixRecord(
        formats=mix.words,
        option=mix.option,
        limit=limit,
        unit=unit,
        weigh=mix.weigh,
        cost=mix.cost,
        context=context_of(mixing.model, mix) if mix.counts_cache else 0,
        spent=spent,
        units=len(units),
        unfit=tuple(unfit),
        estimated=estimate,
        predicted=predicted,
        measured=measured,
    )


def _losses(mixing: Mixing, parts: Parts) -> tuple[Losses, Mapping[str, PositionWeights]]:
    """Return what formats cost, and the weights of positions, from the file of --plan-file if they are there."""
    model, device, file = mixing.model, mixing.device, mixing.file
    if file is not None and file.losses:
        return file.losses, file.positions
    dtype = device.compute_dtype(model.dtype)
    effect = sensitivity(model, parts.gradients, device=device.place, dtype=dtype, progress=mixing.progress)
    if not mixing.recipe.weighs_positions:
        effect = replace(effect, positions={})
    offered = [offer for offer in mixing.mix.offers if offer.scheme is not None]
    losses = estimated(model, parts.moments, parts.errors, offered, effect, **mixing.passing())
    if file is not None:
        file.keep(losses, effect.positions)
    return losses, effect.positions


def _measured(
    mixing: Mixing,
    positions: Mapping[str, PositionWeights],
    moments: Tensor,
    tokens: Tensor,
    offers: Mapping[str, Offer],
    sets: Sequence[Collection[str]],
) -> list[float]:
    """Return the KL of sets of layers in these formats, from the file of --plan-file if it is there; see `divergences`."""
    measure = partial(divergences, mixing.model, moments, tokens, offers, sets, positions, **mixing.passing())
    if mixing.file is None:
        return measure()
    formats = {name: offer.word or str(offer.scheme) for name, offer in offers.items()}
    return mixing.file.measured(formats, len(sets), measure)


def corrected(
    mixing: Mixing, units: Sequence[Unit], picks: Sequence[int], measure: Callable[..., list[float]]
) -> list[Unit]:
    """Return the units with losses that are corrected by measuring a choice: all of it, and its parts by depth and by kind.

    Estimates are too small where errors of several layers add up, which is so for some kinds of layers and in early blocks.

    Args:
        mixing, units, picks: The choice.
        measure: Function from formats by layer and sets of layers to the KL of each set.
    """
    offers = offers_by_layer(mixing.model, mixing.recipe, units, picks)
    blocks = {layer.name: number for number, block in enumerate(mixing.model.blocks) for layer in block.layers}
    total = len(mixing.model.blocks)
    depths = [str(min(DEPTHS, total) * blocks[unit.layers[0]] // total) for unit in units]
    kinds = [re.sub(r"[0-9]+", "", unit.layers[0]) for unit in units]
    usual = [kind for kind, _ in Counter(kinds).most_common(KINDS)]
    groups: list[list[list[int]]] = []  # two partitions of the units
    for labels in (depths, [kind if kind in usual else "" for kind in kinds]):
        groups.append([[i for i, each in enumerate(labels) if each == label] for label in dict.fromkeys(labels)])
    sets = [{name for number in numbers for name in units[number].layers} for some in groups for numbers in some]
    everything, *of_sets = measure(offers, [set(offers), *sets])
    sums: list[tuple[list[int], float]] = []
    for some in groups:
        found, of_sets = of_sets[: len(some)], of_sets[len(some) :]
        share = everything / sum(found) if sum(found) > 0 else 0.0
        sums += [(numbers, share * each) for numbers, each in zip(some, found, strict=True)]
    factors = scaled_to_sums([unit.losses[pick] for unit, pick in zip(units, picks, strict=True)], sums)
    return [
        replace(unit, losses=tuple(factor * each for each in unit.losses))
        for unit, factor in zip(units, factors, strict=True)
    ]


def _sum(units: Sequence[Unit], picks: Sequence[int]) -> float:
    return sum(unit.losses[pick] for unit, pick in zip(units, picks, strict=True))


def frontier(mixing: Mixing, units: Sequence[Unit]) -> list[Size]:
    """Return the best choices for sizes from the smallest to the largest possible one."""
    costs = [[round(unit.share * each) for each in unit.bytes] for unit in units]
    least, most = sum(map(min, costs)), sum(map(max, costs))
    weights = sum(unit.weights for unit in units)
    points: list[Size] = []
    for step in range(POINTS):
        budget = round(least * (most / least) ** (step / (POINTS - 1)))
        picks = choose(costs, [unit.losses for unit in units], max(budget, least))
        size = sum(unit.bytes[pick] for unit, pick in zip(units, picks, strict=True))
        counts: Counter[str] = Counter()
        for unit, pick in zip(units, picks, strict=True):
            counts[mixing.mix.offers[unit.offers[pick]].word] += len(unit.layers)
        point = Size(bits=8 * size / weights, bytes=size, kl=_sum(units, picks), formats=dict(counts))
        points += [point] if point not in points else []
    return points


def quantizes(mixing: Mixing, units: Sequence[Unit], picks: Sequence[int]) -> bool:
    """Return whether a choice quantizes a layer."""
    offers = mixing.mix.offers
    return any(offers[unit.offers[pick]].scheme is not None for unit, pick in zip(units, picks, strict=True))


def within_the_limit(
    mixing: Mixing, units: Sequence[Unit], unfit: Sequence[str], *, warns: bool = False
) -> tuple[list[int], float]:
    """Return the option of each unit with the least sum of losses within the limit, and what they take in its unit.

    Raises:
        RecipeError: The limit is below the smallest possible choice. Where it is above the largest, and it `warns`, that is said.
    """
    mix, model = mixing.mix, mixing.model
    limit, _ = mix.limit
    costs = [[round(unit.share * each) for each in unit.bytes] for unit in units]
    losses = [unit.losses for unit in units]
    weights = sum(unit.share * unit.weights for unit in units)
    if mix.bits_per_weight is not None:
        budget, per_unit, constant = math.floor(limit * weights / 8), 8 / weights, 0
    else:
        chosen_for = {name for unit in units for name in unit.layers}
        counted = mix.size is None or mix.cost != "file"
        ends = formats_of_ends(model, mixing.recipe)
        constant = constant_of(model, mixing.recipe, mix, chosen_for, ends) if counted else 0
        budget, per_unit = int(limit) - constant, 1.0
    exact = mix.size is not None and mix.cost == "file"

    def total(picks: Sequence[int]) -> float:
        if not exact:
            return per_unit * float(constant + sum(row[pick] for row, pick in zip(costs, picks, strict=True)))
        if not quantizes(mixing, units, picks):  # as in the original; nothing is written then
            return float(bytes_of_tensors(model) + files_beside(model).size())
        options = replace(mixing.job.options, mix=_record(mixing, units, unfit, EXAMPLE, EXAMPLE, EXAMPLE, EXAMPLE))
        asked = recipe_of(model, mixing.recipe, units, picks, unfit)
        other, plan = open_resolved(mixing.folder, asked, trust_remote_code=options.trust_remote_code)
        job = replace(mixing.job, model=other, asked=asked, plan=plan, options=options)
        return float(folder_bytes(other, plan, replace(job.record(), folds=model.folds)))  # perhaps fewer in the end

    least = [0] * len(units)
    smallest = total(least)
    largest = smallest + per_unit * sum(max(row) - min(row) for row in costs)
    if limit < smallest:
        raise RecipeError(
            f"{mix.asked} is below the smallest possible choice: {_amount(smallest, mix)}. Use at least that much, or add a "
            f"smaller format to --mix."
        )
    if limit > largest and warns:
        log.warning("%s is above the largest possible choice, which takes %s", mix.asked, _amount(largest, mix))
    if not exact:
        picks = choose(costs, losses, budget)
        return picks, total(picks)
    beside = smallest - sum(row[0] for row in costs)  # entries in headers, config and record differ a little by choice
    best, found = least, smallest
    for _ in range(TRIES):
        picks = choose(costs, losses, max(math.floor(limit - beside), sum(map(min, costs))))
        size = total(picks)
        best, found = (picks, size) if found <= size <= limit else (best, found)
        before, beside = beside, size - sum(row[pick] for row, pick in zip(costs, picks, strict=True))
        if beside <= before:
            break
    return _filled(best, found, int(limit), costs, losses, total)


def _filled(
    picks: Sequence[int],
    size: float,
    limit: int,
    costs: Sequence[Sequence[int]],
    losses: Sequence[Sequence[float]],
    total: Callable[[Sequence[int]], float],
) -> tuple[list[int], float]:
    """Return a choice with single units enlarged, those first that gain most for a byte, as long as it is within the limit."""
    now = list(picks)
    larger = [
        ((losses[unit][pick] - losses[unit][option]) / (costs[unit][option] - costs[unit][pick]), unit, option)
        for unit, pick in enumerate(picks)
        for option in range(pick + 1, len(costs[unit]))
        if costs[unit][option] > costs[unit][pick] and losses[unit][option] < losses[unit][pick]
    ]
    tried = 0
    for _, unit, option in sorted(larger, reverse=True):
        if now[unit] != picks[unit] or size + costs[unit][option] - costs[unit][now[unit]] > limit:
            continue
        changed = [*now[:unit], option, *now[unit + 1 :]]
        tried += 1
        if (found := total(changed)) <= limit:
            now, size = changed, found
        if tried == TRIES:
            break
    return now, size


def _amount(value: float, mix: FormatMix) -> str:
    if mix.bits_per_weight is None:
        return f"{math.ceil(value):,} bytes"
    return f"{math.ceil(1000 * value - 1e-6) / 1000:.3f} bits per weight"
