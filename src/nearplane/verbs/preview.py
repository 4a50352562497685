"""preview(): what `quantize` would write, and how much memory and time that takes, from shapes, the text and one window.

It makes the checks of a run in the same order, with the same refusals, and writes nothing.
"""

from __future__ import annotations

import math
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nearplane.calibration.windows import calibration_windows, check_tokens
from nearplane.errors import RecipeError
from nearplane.planning.estimate import writing
from nearplane.planning.folder_size import check_disk, forecast_bytes, layer_bytes
from nearplane.planning.forecast import forecast
from nearplane.planning.plan import allocates
from nearplane.planning.request import open_resolved, say_types
from nearplane.planning.run import Job, Options, bytes_of_tensors, container_for
from nearplane.planning.tokens_in_file import check_tokens_in_file
from nearplane.recipe.recipe import Recipe
from nearplane.record.preview_summary import Preview
from nearplane.system.arguments import takes
from nearplane.system.progress import phase
from nearplane.verbs.follow import on_all_ranks
from nearplane.verbs.quantize import on_folder
from nearplane.verbs.quantize_request import QuantizeRequest
from nearplane.verbs.then_tuned import has_time, refuse_untunable


@takes(QuantizeRequest, tokenizer=PreTrainedTokenizerBase | None)
def preview(request: QuantizeRequest) -> Preview:
    """Return what a run of `quantize` would write and take, by the checks of that run, without the run.

    Takes the arguments of `quantize`. Nothing is written. Tuning is checked, but not counted.

    Raises:
        NearplaneError: As `quantize` before its first layer; a RecipeError with a mix, which `frontier` shows.
    """
    if request.asked().mix is not None:
        raise RecipeError("The formats of a mix are chosen by measuring. Use nearplane.frontier, which does so.")
    with on_all_ranks() as ranks:
        return on_folder(request, ranks, _previewed)


def _previewed(folder: str, out: Path, recipe: Recipe, options: Options) -> Preview:
    """Return what `quantize_folder` would do."""
    with phase(options.progress, "opening the model"):
        model, settled = open_resolved(folder, recipe, trust_remote_code=options.trust_remote_code)
    check_disk(out, model, settled)
    tunes = settled.recipe.tune != "none"
    if tunes:
        refuse_untunable(model, settled, out)
    say_types(model, settled)
    remote, like = options.trust_remote_code, options.like
    container = container_for(model, settled, out, overwrite=options.overwrite, trust_remote_code=remote, like=like)
    device, unwritten = options.device, list[int]()
    windows = calibration_windows(model, settled.recipe, options.given, device, options.progress, unwritten=unwritten)
    check_tokens(model, settled.recipe, windows)
    if settled.recipe.files.one_file and not unwritten:
        check_tokens_in_file(container, model, windows)
    if tunes and not unwritten:
        has_time(Job(model=model, asked=recipe, plan=settled, windows=windows, options=options))
    with phase(options.progress, "trying one window in a block of each kind"):
        expected = forecast(model, settled, windows, device, options.limits)
    weights = {layer.name: math.prod(layer.shape) for layer in model.layers}
    schemes = {name: settled.layers[name].scheme for name in weights}
    size = sum(layer_bytes(settled.recipe, layer.shape, schemes[layer.name], model.dtype) for layer in model.layers)
    limit, memory, seconds = settled.recipe.scheme.limit, expected.bytes, None
    if unwritten:
        seconds, most = writing(model, sum(unwritten), windows.seqlen, device)
        memory = None if memory is None else max(memory, most)
    return Preview(
        formats={name: scheme.number_format.name for name, scheme in schemes.items()},
        measured=allocates(model, settled),
        weights=sum(weights.values()),
        bits=None if limit is not None else 8 * size / sum(weights.values()),
        folder=forecast_bytes(model, settled) if limit is None else limit,
        original=bytes_of_tensors(model),
        tokens=windows.count * windows.seqlen,
        memory=memory,
        seconds=expected.seconds,
        writing=seconds,
    )
