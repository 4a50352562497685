"""The limit of a mix of number formats: what choices take, to the byte, and the best choice within it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from nearplane.errors import RecipeError
from nearplane.planning.allocate import choose
from nearplane.planning.folder_size import files_beside
from nearplane.planning.mix_recipe import formats_of_ends, recipe_of
from nearplane.planning.mix_size import cache_of, constant_of, context_of, folder_bytes, gguf_bytes, one_file_bytes
from nearplane.planning.mix_units import Unit
from nearplane.planning.mixing import Mixing
from nearplane.planning.request import open_resolved
from nearplane.planning.run import bytes_of_tensors, container_for
from nearplane.recipe.format_mix import FormatMix
from nearplane.record.mix_record import MixRecord
from nearplane.record.mix_summary import at_least

log = logging.getLogger("nearplane")
EXAMPLE = 0.00012345678901234567  # placeholder of a figure, in full length
TRIES = 12  # of choices whose folder is sized exactly


class Spending:
    """What choices of formats take of the limit of a mix, in its unit.

    Args:
        mixing: The mix.
        units: Units of layers that are chosen for.
        unfit: Layers that no format fits.

    Raises:
        RecipeError: The limit is below the smallest possible choice. Where it is above the largest, that is said.
    """

    def __init__(self, mixing: Mixing, units: Sequence[Unit], unfit: Sequence[str]) -> None:
        self._mixing, self.units, self.unfit = mixing, units, unfit
        mix, model = mixing.mix, mixing.model
        limit, _ = mix.limit
        self._costs = [[round(unit.share * each) for each in unit.bytes] for unit in units]
        self._cached = 0  # bytes of the cache beside choices that are sized as files
        # in a GGUF, the types of embeddings and head follow from the choice
        self._exact = mix.bits_per_weight is None and (not mix.counts_cache or mixing.recipe.files.block_types)
        self._constant, self._per_unit = 0, 1.0
        weights = sum(unit.share * unit.weights for unit in units)
        if mix.bits_per_weight is not None:
            self._budget, self._per_unit = math.floor(limit * weights / 8), 8 / weights
        else:
            if not self._exact:
                chosen_for = {name for unit in units for name in unit.layers}
                ends = formats_of_ends(model, mixing.recipe)
                self._constant = constant_of(model, mixing.recipe, mix, chosen_for, ends)
            else:
                self._cached = cache_of(model, mixing.recipe)
            self._budget = int(limit) - self._constant
        self._smallest = self.total([0] * len(units))
        largest = self.total(
            [len(row) - 1 for row in self._costs]
        )  # the options of a unit are in the order of their bytes
        if limit < self._smallest:
            raise RecipeError(
                f"{mix.asked} is below the smallest possible choice: {_amount(self._smallest, mix)}. Use at least that much, or "
                f"add a smaller format to --mix."
            )
        if limit > largest:
            log.warning("%s is above the largest possible choice, which takes %s", mix.asked, _amount(largest, mix))

    def total(self, picks: Sequence[int]) -> float:
        """Return what a choice takes, given the number of the option of each unit."""
        mixing, model, units = self._mixing, self._mixing.model, self.units
        if not self._exact:
            spent = sum(row[pick] for row, pick in zip(self._costs, picks, strict=True))
            return self._per_unit * float(self._constant + spent)
        if not quantizes(mixing, units, picks):  # as in the original; nothing is written then
            return float(bytes_of_tensors(model) + self._cached + files_beside(model).size())
        example = record_of(mixing, units, self.unfit, EXAMPLE, EXAMPLE, EXAMPLE, EXAMPLE)
        options = replace(mixing.job.options, mix=example)
        asked = recipe_of(model, mixing.recipe, units, picks, self.unfit)
        other, plan = open_resolved(mixing.folder, asked, trust_remote_code=options.trust_remote_code)
        if mixing.mix.counts_cache:
            return float(self._cached + gguf_bytes(other, plan, by_token=mixing.mix.cost != "file"))
        job = replace(mixing.job, model=other, asked=asked, plan=plan, options=options)
        record = replace(job.record(), folds=model.folds)
        if not plan.recipe.files.one_file:
            return float(folder_bytes(other, plan, record))  # perhaps fewer in the end
        with TemporaryDirectory() as place:
            out, trust = Path(place) / "out", options.trust_remote_code
            container = container_for(other, plan, out, overwrite=False, trust_remote_code=trust)
            return float(one_file_bytes(other, plan, record, container))

    def best(self, losses: Sequence[Sequence[float]]) -> tuple[list[int], float]:
        """Return the option of each unit with the least sum of losses within the limit, and what they take.

        Args:
            losses: Of the options of each unit.
        """
        costs = self._costs
        if not self._exact:
            picks = choose(costs, losses, self._budget)
            return picks, self.total(picks)
        limit = self._budget
        # entries in headers, config and record differ a little by choice
        beside = self._smallest - sum(row[0] for row in costs)
        best, found = [0] * len(costs), self._smallest
        for _ in range(TRIES):
            picks = choose(costs, losses, max(math.floor(limit - beside), sum(map(min, costs))))
            size = self.total(picks)
            best, found = (picks, size) if found <= size <= limit else (best, found)
            before, beside = beside, size - sum(row[pick] for row, pick in zip(costs, picks, strict=True))
            if beside <= before:
                break
        return self._filled(best, found, losses)

    def _filled(self, picks: Sequence[int], size: float, losses: Sequence[Sequence[float]]) -> tuple[list[int], float]:
        """Return a choice with single units enlarged, those first that gain most for a byte, as long as it is within the limit."""
        now, costs, limit = list(picks), self._costs, self._budget
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
            if (found := self.total(changed)) <= limit:
                now, size = changed, found
            if tried == TRIES:
                break
        return now, size


def quantizes(mixing: Mixing, units: Sequence[Unit], picks: Sequence[int]) -> bool:
    """Return whether a choice, or --layer, quantizes a layer."""
    offers, recipe = mixing.mix.offers, mixing.recipe
    chosen = any(offers[unit.offers[pick]].scheme is not None for unit, pick in zip(units, picks, strict=True))
    return chosen or any(recipe.pattern_of(layer.name) is not None for layer in mixing.model.layers)


def record_of(
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


def _amount(value: float, mix: FormatMix) -> str:
    if mix.bits_per_weight is None:
        return f"{math.ceil(value):,} bytes"
    return f"{at_least(value)} bits per weight"
