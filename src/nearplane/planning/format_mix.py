"""The number format of every layer in a mix: what each costs is estimated, the best choice for a limit is made, and measured.

Layers that a program must load alike are a unit. What each unit costs in each format is estimated by gradients, and
`allocate.choose` minimizes the sum. The network is then measured with all units rounded together: on the windows of the
estimates, by which these are scaled, and on windows that no choice was made by. The result is a recipe with --layer and
--ignore for every unit, and no mix.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nearplane.calibration.folding import fold
from nearplane.calibration.positions import PositionWeights
from nearplane.calibration.sensitivity import sensitivity
from nearplane.calibration.stages import FirstLook, first_of_inputs, try_blocks
from nearplane.calibration.windows import Windows, calibration_windows, check_tokens
from nearplane.errors import RecipeError, first_few
from nearplane.formats.container import Container
from nearplane.models.model import Model
from nearplane.planning.allocate import choose
from nearplane.planning.divergences import divergences
from nearplane.planning.estimates import Losses, estimated
from nearplane.planning.forecast import checked, within_limits
from nearplane.planning.mix_limit import Spending, quantizes, record_of
from nearplane.planning.mix_recipe import offers_by_layer, picked, recipe_of
from nearplane.planning.mix_size import cache_of
from nearplane.planning.mix_units import Unit, costed, misfits, units_of
from nearplane.planning.mixing import Mixing
from nearplane.planning.parts import Parts, parts_of
from nearplane.planning.plan_file import PlanFile
from nearplane.planning.rehearsal import check_loads
from nearplane.planning.request import open_for_mix, open_resolved, quantization_config, resolved
from nearplane.planning.roundings import offered
from nearplane.planning.run import Job, Options, container_for
from nearplane.planning.tokens_in_file import check_tokens_in_file
from nearplane.recipe.format_mix import UNQUANTIZED, Offer
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.recipe import Recipe
from nearplane.record.mix_record import MixRecord
from nearplane.record.mix_summary import Size
from nearplane.system.matmul_library import chosen_library
from nearplane.system.progress import phase

log = logging.getLogger("nearplane")
POINTS = 9  # of a frontier


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A choice of formats.

    Args:
        recipe: The recipe that names the format of every layer, without a mix.
        mix: How it was chosen.
        formats: Format of every layer as in --mix, by name in the order of the network.
        frontier: Choices of other sizes, from the smallest to the largest.
        start: Resident bytes before anything was measured, from which the limits of the run count; None: its memory is not bounded.
    """

    recipe: Recipe
    mix: MixRecord
    formats: dict[str, str]
    frontier: tuple[Size, ...]
    start: int | None


@dataclass(frozen=True, slots=True)
class _Reopened:
    """The choice of rank 0, by which another rank opens the model again."""

    folder: str
    recipe: Recipe
    trust_remote_code: bool

    def __call__(self, follower: Any) -> None:
        follower.turn_to(open_resolved(self.folder, self.recipe, trust_remote_code=self.trust_remote_code)[0])


def with_mix(folder: str, out: Path, recipe: Recipe, options: Options) -> tuple[Recipe, Options, Windows]:
    """Choose the format of every layer of a recipe with a mix, within the limits of memory, those of the run after it, too.

    Args:
        folder: Folder or hub id of the model.
        out: Folder to write; hidden states lie in a file beside it if they must.
        recipe, options: The recipe and the options of the run.

    Returns:
        The recipe that names them, options with the record of the choice, and the windows of the run.

    Raises:
        NearplaneError: The text cannot be read, or no choice is within the limit; the message says what is possible.
    """
    chosen, windows = consider(folder, out, recipe, options)
    if options.device.ranks.others:
        options.device.ranks.start(_Reopened(folder, chosen.recipe, options.trust_remote_code))
    return chosen.recipe, replace(options, mix=chosen.mix, start=chosen.start), windows


def consider(folder: str, out: Path, recipe: Recipe, options: Options) -> tuple[Chosen, Windows]:
    """Choose the format of every layer, and write nothing but the file of --plan-file; see `with_mix`."""
    with phase(options.progress, "opening the model"):
        model, settled = open_for_mix(folder, recipe, trust_remote_code=options.trust_remote_code)
        container = _container_of_first(model, settled, out, options)
    windows = calibration_windows(model, settled, options.given, options.device, options.progress)
    check_tokens(model, settled, windows)
    if container is not None and settled.files.one_file:
        check_tokens_in_file(container, model, windows)
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
        return chosen_mix(mixing, out), windows


def _container_of_first(model: Model, recipe: Recipe, out: Path, options: Options) -> Container | None:
    """Return the checkpoint with the first format of the mix alone, which is not written; None if it does not fit all layers.

    Raises:
        RecipeError: A reader would not load it, or its file cannot hold the network or the tokenizer.
    """
    first = recipe.given_mix.first
    assert first.scheme is not None, "a format of the mix is quantized"
    if first.word in misfits(model, recipe):
        return None
    plan = resolved(model, replace(recipe, scheme=first.scheme, activations=first.activations, mix=None))
    check_loads(model, plan, partial(quantization_config, model, plan))
    return container_for(model, plan, out, overwrite=options.overwrite, trust_remote_code=options.trust_remote_code)


def chosen_mix(mixing: Mixing, out: Path) -> Chosen:
    """Choose the format of every layer.

    Args:
        mixing: What the choice is made of.
        out: See `with_mix`.

    Raises:
        RecipeError: No choice is within the limit, or the limits of memory are too small; the message says what is possible.
    """
    model, recipe, mix, windows = mixing.model, mixing.recipe, mixing.mix, mixing.windows
    assert windows.fitted is not None, "a mix is measured on text"
    parts = parts_of(model, windows.fitted, windows.extra)
    for word, (count, reason) in misfits(model, recipe).items():
        log.warning("%s is not possible for %d layers: %s", word, count, reason)
    cache_of(model, recipe)  # raises what is wrong with it before anything is measured
    looks = try_blocks(model, parts.moments, mixing.device)
    mixing, start = _within_limits(mixing, looks, out)
    first = first_of_inputs(model, looks)
    possible = None if first is None else _possible(mixing, first)  # refused before anything is measured
    losses, positions = _losses(mixing, parts)
    spending = possible or _possible(mixing, {name: each.first for name, each in losses.items()})
    estimates, unfit = costed(spending.units, mix, losses), spending.unfit
    picks, spent = spending.best([unit.losses for unit in estimates])
    if not quantizes(mixing, estimates, picks):
        raise RecipeError(
            f"{mix.asked} has room for the original, so that nothing would be quantized. Use less, or leave "
            f"{UNQUANTIZED} out of --mix."
        )
    estimate = _sum(estimates, picks)
    predicted, measured = _measured(mixing, positions, parts, offers_by_layer(model, recipe, estimates, picks))
    slope = predicted / estimate if estimate > 0 else 1.0
    units = [replace(unit, losses=tuple(slope * each for each in unit.losses)) for unit in estimates]
    record = record_of(mixing, units, unfit, spent, estimate, predicted, measured)
    words = {name: offer.word for name, offer in picked(mix, units, picks).items()}
    return Chosen(
        recipe=recipe_of(model, recipe, units, picks, unfit),
        mix=record,
        formats={layer.name: words[layer.name] for layer in model.layers if layer.name in words},
        frontier=tuple(frontier(mixing, units)),
        start=start,
    )


def _within_limits(mixing: Mixing, looks: Mapping[str, FirstLook], out: Path) -> tuple[Mixing, int | None]:
    """Return what a choice is made of, with hidden states where limits of memory allow it, and the resident bytes at its start.

    Raises:
        RecipeError: The choice, or the run after it, needs more than a limit, or the memory cannot be predicted.
    """
    model, device, limits = mixing.model, mixing.device, mixing.job.options.limits
    plan = Plan.of(mixing.recipe, [layer.name for layer in model.layers])
    planned = checked(within_limits(model, plan, mixing.windows, looks, device, limits, None), limits)
    if planned is None:
        return mixing, None
    disk = next(folder for folder in out.absolute().parents if folder.is_dir())
    return replace(mixing, keep=replace(planned.bounds[0].setting, folder=disk).keep), planned.start


def _possible(mixing: Mixing, first: Mapping[str, str]) -> Spending:
    """Return what choices take, given the first layer with the same input of each layer.

    Raises:
        RecipeError: None is possible, or within the limit.
    """
    model, recipe, mix = mixing.model, mixing.recipe, mixing.mix
    units, unfit = units_of(model, recipe, first)
    if not units:
        raise RecipeError(
            f"No format of --mix {','.join(mix.words)} fits a layer that is to be chosen for: "
            f"{first_few(unfit) or 'all are fixed'}. Name other formats, or leave out --layer."
        )
    if unfit:
        log.warning("%d layers stay unquantized, as no format of the mix fits them: %s", len(unfit), first_few(unfit))
    if mix.weigh == "active" and all(unit.share == 1.0 for unit in units):
        log.warning("--weigh active changes nothing: the model has no experts, so that every token reads all weights.")
    return Spending(mixing, units, unfit)


def _losses(mixing: Mixing, parts: Parts) -> tuple[Losses, Mapping[str, PositionWeights]]:
    """Return what formats cost, and the weights of positions, from the file of --plan-file if they are there."""
    model, device, file = mixing.model, mixing.device, mixing.file
    if file is not None and file.losses:
        return file.losses, file.positions
    dtype = device.compute_dtype(model.dtype)
    effect = sensitivity(model, parts.gradients, device=device.place, dtype=dtype, progress=mixing.progress)
    if not mixing.recipe.weighs_positions:
        effect = replace(effect, positions={})
    tried = [offered(offer, mixing.storage) for offer in mixing.mix.offers if offer.scheme is not None]
    losses = estimated(model, parts.moments, parts.errors, tried, effect, **mixing.passing())
    if file is not None:
        file.keep(losses, effect.positions)
    return losses, effect.positions


def _measured(
    mixing: Mixing, positions: Mapping[str, PositionWeights], parts: Parts, offers: Mapping[str, Offer]
) -> list[float]:
    """Return the KL of a choice on the windows of the estimates and on others, from the file of --plan-file if it is there."""
    roundings = {name: offered(offer, mixing.storage) for name, offer in offers.items()}
    texts = parts.errors, parts.last
    measure = partial(divergences, mixing.model, parts.moments, texts, roundings, positions, **mixing.passing())
    if mixing.file is None:
        return measure()
    return mixing.file.measured({name: offer.word or str(offer.scheme) for name, offer in offers.items()}, measure)


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
