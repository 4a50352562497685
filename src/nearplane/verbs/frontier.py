"""frontier(): the best choices of number formats for every size, measured before any checkpoint is written."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nearplane.errors import RecipeError
from nearplane.planning.estimate import estimated
from nearplane.planning.format_mix import consider
from nearplane.planning.request import open_resolved
from nearplane.planning.run import Options
from nearplane.recipe.recipe import Recipe
from nearplane.record.mix_summary import Frontier
from nearplane.system.arguments import takes
from nearplane.verbs.follow import on_all_ranks
from nearplane.verbs.quantize import on_folder
from nearplane.verbs.quantize_request import QuantizeRequest


@takes(QuantizeRequest, tokenizer=PreTrainedTokenizerBase | None)
def frontier(request: QuantizeRequest) -> Frontier:
    """Measure what the formats of a mix cost, and choose for the limit that is asked for and for other sizes.

    Takes the arguments of `quantize`. Nothing is written but `plan_file`.

    Returns:
        The choices, with their predicted KL.

    Raises:
        NearplaneError: As `quantize`; a RecipeError without a mix.
    """
    if request.asked().mix is None:
        raise RecipeError("There is no mix to choose from. Use mix= with size=, bits_per_weight= or served_memory=.")
    with on_all_ranks() as ranks:
        return on_folder(request, ranks, _considered)


def _considered(folder: str, out: Path, recipe: Recipe, options: Options) -> Frontier:
    """Return the choices for a model in a folder."""
    chosen, _ = consider(folder, out, recipe, options)
    model, plan = open_resolved(folder, chosen.recipe, trust_remote_code=options.trust_remote_code)
    seconds = estimated(model, plan, options.device).seconds  # which formats differ little in
    return Frontier(mix=chosen.mix, formats=chosen.formats, sizes=chosen.frontier, seconds=seconds)
