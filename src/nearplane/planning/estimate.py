"""Memory and time of a run about, from shapes alone, before any weight is read. `forecast.py` bounds both once a run starts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.self_written import BATCH, LENGTH, batches_of_texts
from nearplane.calibration.text_files import is_self_written
from nearplane.calibration.windows import Windows, default_seqlen, extra_windows, samples_of
from nearplane.models.experts import by_expert
from nearplane.models.layers import Layer
from nearplane.models.model import Block, Model
from nearplane.planning.cache_size import cache_bytes
from nearplane.planning.forecast import seconds_of_a_multiplication, shapes_with
from nearplane.planning.memory_bound import bound
from nearplane.planning.shapes import Blocks, Group, Shapes, multiplications
from nearplane.recipe.layer_plan import Plan
from nearplane.system.device import Device
from nearplane.system.memory import resident

# of a network that writes text (SmolLM2, one thread): time of a multiplication over that in a large product, and memory over that
# of its keys and values, which grow with every token
WRITING_TIME, WRITING_MEMORY = 3.1, 1.5
ALIVE = 8  # rows as wide as the widest layer that a forward pass has in memory at a time


class Estimate(NamedTuple):
    """What a run takes about.

    Args:
        tokens: Number of calibration tokens.
        bytes: Memory where it computes.
        seconds: Least time, that of multiplications; None on a GPU.
    """

    tokens: int
    bytes: int
    seconds: float | None


def estimated(model: Model, plan: Plan, device: Device) -> Estimate:
    """Return what a calibrated run takes about.

    Args:
        model: The model; its shapes suffice.
        plan: What is decided of its layers.
        device: Device of the computation.
    """
    options = plan.recipe.calibration
    seqlen, count = default_seqlen(model, options), samples_of(model, options)
    shapes = estimated_shapes(model, plan, device, windows=count, extra=extra_windows(count, seqlen), seqlen=seqlen)
    start = (resident() or 0) if device.on_cpu else 0
    most = bound(shapes, MemorySetting.usual(seqlen, device), start, "host" if device.on_cpu else "device")
    tokens, work, memory = shapes.all_windows * seqlen, multiplications(shapes), most.bytes
    seconds = work * seconds_of_a_multiplication() if device.on_cpu else None
    if is_self_written(options.calibration):
        length = min(seqlen, LENGTH)
        before, needed = writing(model, batches_of_texts(tokens, length) * length * BATCH, seqlen, device)
        seconds, memory = None if seconds is None else seconds + (before or 0.0), max(memory, needed)
    return Estimate(tokens, memory, seconds)


def estimated_shapes(model: Model, plan: Plan, device: Device, *, windows: int, extra: int, seqlen: int) -> Shapes:
    """Return the shapes that determine time and memory of a calibrated run, those of blocks estimated without running any.

    Args:
        model, plan, device: See `estimated`.
        windows, extra, seqlen: Numbers of fitted and of extra windows, and tokens per window.
    """
    fitted, more = (torch.zeros(number, seqlen, dtype=torch.int64) for number in (windows, extra))
    number = device.compute_dtype(model.dtype).itemsize
    blocks = [_of(block, seqlen, number) for block in model.blocks]
    return shapes_with(model, plan, Windows(seqlen=seqlen, fitted=fitted, extra=more), blocks, device)


def writing(model: Model, tokens: int, seqlen: int, device: Device) -> tuple[float | None, int]:
    """Return about how long a network writes so many tokens for windows of a length, in seconds, None on a GPU, and the bytes.

    The bytes are those of the process or the device.
    """
    start, length = (resident() or 0) if device.on_cpu else 0, min(seqlen, LENGTH)
    weights = sum(parameter.numel() for parameter in model.network.parameters())
    multiplied = weights - _idle(model)
    kept = BATCH * (cache_bytes(model, length) or 0) / 2  # numbers: they have 2 bytes each there
    most = start + round(device.compute_dtype(model.dtype).itemsize * (weights + WRITING_MEMORY * kept))
    return WRITING_TIME * tokens * multiplied * seconds_of_a_multiplication() if device.on_cpu else None, most


def _idle(model: Model) -> int:
    """Return the number of weights of experts that a token does not reach, on average; 0 where it is not known."""
    if (reached := model.reached_experts) is None:
        return 0
    idle = 0.0
    for block in model.blocks:
        routed = [layer for layer in block.layers if layer.routed]
        share = min(1.0, reached / max(1, len(by_expert(routed))))
        idle += (1 - share) * sum(math.prod(layer.shape) for layer in routed)
    return round(idle)


def _of(block: Block, seqlen: int, number: int) -> Blocks:
    """Return the shapes of a block: layers of one module that have the same number of inputs are taken to share them."""
    groups: dict[tuple[str, int], list[Layer]] = {}
    for layer in block.layers:
        module = layer.name.rpartition(".")[0]
        groups.setdefault((module.rpartition(".")[0] if layer.routed else module, layer.shape[1]), []).append(layer)
    alive = ALIVE * number * seqlen * max((max(layer.shape) for layer in block.layers), default=0)
    found = []
    for layers in groups.values():
        experts = len({layer.name.rpartition(".")[0] for layer in layers}) if layers[0].routed else 1
        shapes = tuple(layer.shape for layer in layers[: len(layers) // experts])
        found.append(Group(layers=shapes, alive=alive, held=alive, experts=experts))
    weights = sum(parameter.numel() for parameter in block.empty.parameters())
    return Blocks(count=1, weights=weights, groups=tuple(found), pauses=False)
