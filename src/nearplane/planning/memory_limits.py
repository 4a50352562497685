"""Settings of a run that keep its memory within limits, and what is said where none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from nearplane.calibration.one_forward import MemorySetting
from nearplane.planning.memory_bound import Bound, Place, waits
from nearplane.planning.shapes import Shapes
from nearplane.system.sizes import Limits, enough, size_text


def choose(
    candidates: Iterable[Sequence[Bound]], limits: Mapping[Place, float]
) -> tuple[Sequence[Bound], Bound | None]:
    """Return the first bounds that are all within the limit of their place, and None.

    If there are none, return those that exceed a limit least, and the one that exceeds it most.
    """

    def excess(each: Bound) -> float:
        return each.bytes / limits[each.place]

    tried = list(candidates)
    fitting = [bounds for bounds in tried if all(excess(each) <= 1 for each in bounds)]
    if fitting:
        return fitting[0], None
    least = min(tried, key=lambda bounds: max(map(excess, bounds)))
    return least, max(least, key=excess)


def settings(shapes: Shapes, first: MemorySetting, *, batches: bool) -> Iterator[MemorySetting]:
    """Yield settings from `first` on in the order in which they are tried, each of which needs less memory.

    First, passes are repeated instead of paused, stage by stage. Then hidden states move from a GPU to its host, and to disk. With
    `batches`, fewer windows run at a time, which is the only step that changes the bytes of the checkpoint.
    """
    rooms = {needed - 1 for kind in shapes.blocks for needed in waits(shapes, kind, first)}
    for room in (first.room, *sorted(rooms, reverse=True), 0):
        yield (setting := replace(first, room=room))
    if not first.device.on_cpu:
        yield replace(setting, states="host")
    yield (setting := replace(setting, states="disk"))
    while batches and setting.batch > 1:
        yield (setting := replace(setting, batch=setting.batch // 2))


def too_small(exceeding: Bound, limits: Limits, allowed: float) -> str:
    """Return the message that even the most economical settings exceed a limit."""
    device, place = exceeding.setting.device, exceeding.place
    option, given = ("--memory", limits.host) if place == "host" else ("--device-memory", limits.device)
    needs = f"the most economical settings need {size_text(exceeding.bytes)} (while {exceeding.while_})"
    if given is not None and given <= allowed:
        return f"{option} {size_text(given)} is too small: {needs}. Use {option} {enough(exceeding.bytes)} or fewer --samples."
    where = f"on {device}" if place == "device" else "on the host"
    other = " or --device cpu" if place == "device" else ""
    return (
        f"{size_text(int(allowed))} of memory are free {where}, which is too little: {needs}. Use fewer --samples or a shorter "
        f"--seqlen,{other} or end other programs that use this memory."
    )
