"""How a run keeps within a limit of memory: what it has to do is read off the model, and the fastest way that fits is taken."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from nearplane.budget.plan import foreseen_probe
from nearplane.errors import RecipeError
from nearplane.foreseen import Blocks, Foreseen, Group, Way, Work, foresee, ways
from nearplane.headless import Taken, taken_by
from nearplane.memory import release, resident
from nearplane.models.calibrate import FirstLook
from nearplane.models.experts import by_expert
from nearplane.models.model import Model
from nearplane.models.staged import never_pauses, room_for_pauses
from nearplane.models.trial import kinds
from nearplane.pace import Pace
from nearplane.recipe import Recipe
from nearplane.sizes import size_text
from nearplane.speed import Speed, measured
from nearplane.tokens import Windows
from nearplane.walk import batch_of

log = logging.getLogger(__name__)

MARGIN = 1.25  # that runs may take more than is foreseen; measured: up to 1.21


def paced(
    model: Model,
    recipe: Recipe,
    windows: Windows,
    looks: Mapping[str, FirstLook],
    device: torch.device,
    limit: int | None,
    batch: int | None = None,
) -> Pace | None:
    """Say what a run on the CPU will take; return how it keeps within a limit, None where there is none.

    Args:
        model: to be quantized.
        recipe, windows: of the run.
        looks: how one window ran through one block of each kind, by its name.
        device: where to compute.
        limit: bytes that the run may take.
        batch: windows that pass at a time, as sums depend on that, where it is settled already; None: it may choose.

    Raises:
        RecipeError: it takes more, however it goes; says what the least is. Or that cannot be foreseen.
    """
    work = work_of(model, recipe, windows, looks) if looks and device.type == "cpu" else None
    if work is None:
        if limit is not None:
            raise RecipeError(f"--memory: {_unforeseen(device)} Leave it out.")
        return None
    speed = measured(recipe.scheme.solver, work.beam, coded=work.coded, threads=torch.get_num_threads())
    release()
    base = resident() or 0
    way = Way(batch=batch or batch_of(windows.seqlen), room=room_for_pauses(device))
    foreseen = foresee(work, way, speed, base)
    if limit is not None:
        way, foreseen = _within(work, ways(work, way, batches=batch is None), speed, base, limit)
    log.info(foreseen.sentence())
    if limit is None:
        return None
    return Pace(limit=limit, foreseen=foreseen.peak, batch=way.batch, room=way.room, disk=way.disk)


def _within(work: Work, tried: Sequence[Way], speed: Speed, base: int, limit: int) -> tuple[Way, Foreseen]:
    """Return the fastest of some ways that keeps within a limit, and what is foreseen of it.

    Raises:
        RecipeError: none does; says what the least is that works.
    """
    found = [(each, foresee(work, each, speed, base)) for each in tried]
    fitting = [each for each in found if MARGIN * each[1].peak <= limit]
    if not fitting:
        least = min((foreseen for _, foreseen in found), key=lambda foreseen: foreseen.peak)
        raise RecipeError(
            f"--memory {size_text(limit)} is too little: going about it with the least memory, quantizing takes "
            f"{size_text(least.peak)} while {least.worst.name}. Give it --memory {least_limit(least)}, or "
            f"{'fewer tokens by --samples' if least.worst.activations > least.peak / 4 else 'a machine that has as much'}."
        )
    return min(fitting, key=lambda each: each[1].seconds)


def least_limit(foreseen: Foreseen) -> str:
    """Return the limit, as text, with which a run of which this is foreseen is not refused."""
    return f"{math.ceil(MARGIN * foreseen.peak / 1e7) / 100:.2f}GB"


def work_of(model: Model, recipe: Recipe, windows: Windows, looks: Mapping[str, FirstLook]) -> Work | None:
    """Return what a run has to do; None where nothing is known of it: no window
    reached all layers of some block, or it takes images or sound.

    Args:
        model, recipe, windows, looks: see `paced`.
    """
    scheme, found = recipe.scheme, []
    if taken_by(model.network) is not Taken.TEXT:  # whose rows of hidden states nobody has counted
        return None
    for blocks in kinds(model):
        look = looks.get(blocks[0].name)
        if look is None and blocks[0].layers:
            return None
        groups = () if look is None else tuple(_group(look, index) for index in range(len(look.groups)))
        weights = sum(parameter.numel() for parameter in blocks[0].empty.parameters())
        pauses = (
            look is not None and not never_pauses(look, correct=scheme.correct) and recipe.calibration.true_sequential
        )
        found.append(Blocks(count=len(blocks), weights=weights, groups=groups, pauses=pauses))
    embeddings = model.network.get_input_embeddings().weight
    head = getattr(model.network.get_output_embeddings(), "weight", None)
    assert windows.fitted is not None, "it was looked at"
    probe, backward = foreseen_probe(model, recipe, windows.fitted)
    return Work(
        blocks=tuple(found),
        windows=windows.count,
        extra=windows.extra_count,
        seqlen=windows.seqlen,
        hidden=embeddings.shape[-1],
        vocabulary=0 if head is None else len(head),
        around=embeddings.numel(),
        ends=sum(model.reader.nbytes(name) for name in model.rest()),
        streams=2 if scheme.correct else 1,
        beam=scheme.beam or 1,
        descents=(getattr(scheme, "rounds", None) or 0) + (getattr(scheme, "polish", None) or 0),
        coded=scheme.coding is not None,
        probe=probe,
        backward=backward,
        again=scheme.asked is not None and scheme.asked[1] == "bytes",
    )


def _group(look: FirstLook, index: int) -> Group:
    """Return layers that share an input; of experts those of the first one."""
    group = look.groups[index]
    experts = by_expert(group) if group[0].routed else {0: group}
    layers = next(iter(experts.values()))
    alone = len(layers) == 1 and layers[0].shape[0] <= layers[0].shape[1]
    return Group(
        layers=tuple(layer.shape for layer in layers),
        alive=look.entered[group[0].name][0].alive,
        lost=tuple(layer.shape for layer in layers if layer.adds or alone),
        experts=len(experts),
    )


def _unforeseen(device: torch.device) -> str:
    if device.type != "cpu":
        return f"it is of the memory of the CPU, and this run computes on {device}."
    return (
        "what quantizing takes cannot be foreseen, as its first window does not reach all layers, it takes images or sound, or "
        "nothing is calibrated."
    )
