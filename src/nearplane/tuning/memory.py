"""Memory of tuning: an upper bound from shapes alone, and what is held, kept aside or computed twice to stay within limits.

    bound = ALLOCATOR_FACTOR * (resident memory at the start + live bytes)

Live are codes of a byte or two each, and of trained codes their position and the best ones so far; steps with their gradients
and averages; embeddings, head and unquantized tensors in float32; one block with its gradients; logits; and hidden states.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from nearplane.calibration.states_on_disk import Keep, StatesOnDisk
from nearplane.calibration.states_on_host import StatesOnHost, pinned_bytes
from nearplane.errors import RecipeError
from nearplane.models.model import Model
from nearplane.recipe.layer_plan import LayerPlan
from nearplane.record.record import LayerRecord
from nearplane.system.device import Device
from nearplane.system.memory import free_memory, release_all, resident
from nearplane.system.sizes import NO_LIMITS, Limits, enough, size_text
from nearplane.tuning.network import tokens_at_once
from nearplane.tuning.settings import CODE_BITS, Split

log = logging.getLogger("nearplane")

ALLOCATOR_FACTOR = 1.15  # for memory that allocators keep between live tensors, and for buffers of libraries
ACTIVATIONS = 50  # numbers kept of a block for the backward pass, relative to its hidden states
SCORES = 3  # copies of attention's weights that a backward pass on a GPU keeps, see `repeatable_backward`
CODE_BYTES = 1  # of a code that is not trained
TRAINED_BYTES = 6  # of one that is: the code, its position, the best one so far
CODED_BYTES = 8  # of one without limits, whose code and best one take two bytes each
STEP_BYTES = 32  # of a step: as read, with its zero, exact and as stored, its gradient, two averages and the best one
KEPT_BYTES, KEPT_STEP_BYTES = 4, 12  # of a trained code and of a step, in a state that training returns to
BLOCK_BYTES = 20  # of a weight in the block that is trained: its value, rounded code, both gradients, and temporaries
LOGIT_BYTES = 24  # of a logit: of both networks, probabilities, differences and gradients
END_BYTES = 16  # of a weight of quantized embeddings or head while they are decoded and written


def trains_codes(layer: LayerRecord | LayerPlan) -> bool:
    """Return whether the codes of a layer are trained: entropy-coded codes, codes of few bits, and four-bit floats."""
    format = layer.number_format
    return format.bits <= CODE_BITS or (format.levels is not None and format.bits == 4)


def bytes_of(
    layers: Iterable[tuple[LayerRecord | LayerPlan, tuple[int, int]]],
    *,
    all_trained: bool = False,
    returns: bool = False,
) -> int:
    """Return the bytes of codes and steps of layers, each with the shape (out, in) of its matrix.

    Args:
        layers: The layers.
        all_trained: Whether codes of all of them may come to be trained.
        returns: Whether training returns to an earlier state, which is kept until then.
    """
    total = 0
    for layer, (out, columns) in layers:
        format = layer.number_format
        each = CODE_BYTES if not (all_trained or trains_codes(layer)) else TRAINED_BYTES if format.bits else CODED_BYTES
        each += KEPT_BYTES * returns * (each != CODE_BYTES)
        with_offsets = format.minimum or bool(getattr(format, "m", 0))
        steps = format.groups(columns) if format.bits else 0
        of_step = STEP_BYTES + KEPT_STEP_BYTES * returns
        total += out * (columns * each + steps * of_step * (2 if with_offsets else 1))
    return total


class Needed(NamedTuple):
    """Estimates of tuning's memory in bytes.

    Args:
        streamed: With streamed blocks, without `states`.
        held: With all blocks held, see `TunedNetwork`, without `states`.
        states: Hidden states of all windows in both networks.
        pinned: Hidden states of one batch in one network, in pinned memory of a GPU's host.
        sent: Hidden states on the device while the others lie on its host or on disk.
    """

    streamed: int
    held: int
    states: int
    pinned: int
    sent: int


class Room(NamedTuple):
    """Arguments of `TunedNetwork` that depend on memory."""

    hold: bool
    keep: Keep


def needed(model: Model, windows: Tensor, *, batch: int, trained: int, on_cpu: bool = True) -> Needed:
    """Return estimates of tuning's memory.

    Args:
        model: The original model.
        windows: (windows, seqlen) tokens.
        batch: Windows per batch.
        trained: Bytes of codes and steps, see `bytes_of`.
        on_cpu: Whether the CPU computes.
    """
    sizes = [sum(math.prod(layer.shape) for layer in block.layers) for block in model.blocks]
    inside = sum(p.numel() for block in model.blocks for p in block.empty.parameters())
    ends = sum(p.numel() for p in model.network.parameters()) - inside
    quantized = [math.prod(end.layers[0].shape) for end in (model.embeddings, model.head) if end is not None]
    (vocabulary, dim), seqlen = model.network.get_input_embeddings().weight.shape, windows.shape[1]
    heads = 0 if on_cpu else getattr(model.config.get_text_config(), "num_attention_heads", 0)
    state = 4 * batch * seqlen * dim
    kept = ACTIVATIONS * state + 4 * SCORES * heads * batch * seqlen**2
    compared = LOGIT_BYTES * min(tokens_at_once(model), batch * seqlen) * vocabulary
    small = 4 * (ends + inside - sum(sizes) + sum(quantized))  # including unquantized tensors of blocks
    written = max(4 * ends, END_BYTES * max(quantized, default=0))
    base = trained + small + state * len(sizes)
    return Needed(
        streamed=base + max(compared + BLOCK_BYTES * max(sizes) + kept, written),
        held=base + max(compared + BLOCK_BYTES * sum(sizes) + kept * len(sizes), written),
        states=8 * windows.numel() * dim,
        pinned=pinned_bytes(state),
        sent=4 * state,
    )


def fits(
    model: Model, cut: Split, trained: int, device: Device, limits: Limits = NO_LIMITS, folder: Path | None = None
) -> Room:
    """Return what to hold in memory in training, and log how much that takes.

    Where hidden states do not fit, those of a GPU lie on its host if they fit there, and others in a file.

    Args:
        model, cut, trained, device: Model, windows, bytes of codes and steps, and device.
        limits: Limits of --memory and --device-memory.
        folder: Folder for hidden states on disk; None: the system's for temporary files.

    Raises:
        RecipeError: Memory does not even suffice to stream the blocks.
    """
    release_all()
    needs, at_start = (
        needed(model, cut.windows, batch=cut.batch, trained=trained, on_cpu=device.on_cpu),
        resident() or 0,
    )
    limit, option = (limits.host, "--memory") if device.on_cpu else (limits.device, "--device-memory")
    beside = at_start if device.on_cpu else 0

    def bound(live: int) -> int:
        return round(ALLOCATOR_FACTOR * (beside + live))

    free = device.free()
    allowed = None if free is None else beside + free
    if limit is not None:
        allowed = limit if allowed is None else min(limit, allowed)
    if allowed is None:
        return Room(hold=False, keep=list)
    hold = limit is None and 2 * (needs.held + needs.states) <= allowed - beside
    aside = not hold and bound(needs.streamed + needs.states) > allowed
    size = bound((needs.held if hold else needs.streamed) + (needs.sent if aside else needs.states))
    if size > allowed:
        raise RecipeError(_too_small(size, allowed, limit, option, device))
    if not aside or device.on_cpu:
        _say(size, device, "; hidden states lie in a file" if aside else "")
        return Room(hold=hold, keep=partial(StatesOnDisk, folder) if aside else list)
    # all windows in both networks, and the held-out ones once more while they are measured
    pinned = needs.pinned * (3 * len(cut.windows) - cut.training) // cut.batch
    on_host = (free_memory(), None if limits.host is None else limits.host - at_start)
    if pinned > min((each for each in on_host if each is not None), default=pinned):
        _say(size, device, "; hidden states lie in a file")
        return Room(hold=False, keep=partial(StatesOnDisk, folder))
    _say(size, device, f" and {size_text(pinned)} of the host's for hidden states")
    return Room(hold=False, keep=StatesOnHost)


def _say(size: int, device: Device, more: str) -> None:
    log.info("training takes at most %s of memory on %s%s", size_text(size), device, more)


def _too_small(size: int, allowed: int, limit: int | None, option: str, device: Device) -> str:
    if limit is not None and limit <= allowed:
        needs = f"tuning needs up to {size_text(size)} of memory on {device}"
        return f"{option} {size_text(limit)} is too small: {needs}. Use {option} {enough(size)}, or a shorter --seqlen."
    other = "" if device.on_cpu else " or --device cpu"
    return (
        f"{size_text(allowed)} of memory on {device} are free or this program's, which is too little: tuning needs up to "
        f"{size_text(size)}. End other programs that use it, or use a shorter --seqlen{other}."
    )
