"""Forecast of a run's memory and time before its first layer, measurement after its first block, and limits of memory.

Reads shapes from the model and measures two inputs of `memory_bound.py`: resident memory at the start, and the time of one
matrix product.
"""

from __future__ import annotations

import logging
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import NamedTuple

import torch

from nearplane.calibration.one_forward import PAUSED_DIVISOR, MemorySetting, never_pauses
from nearplane.calibration.sensitivity import predicted_at_once
from nearplane.calibration.stages import FirstLook, blocks_by_kind
from nearplane.calibration.windows import Windows, extra_windows
from nearplane.errors import RecipeError
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.kernels import kernels_of
from nearplane.lattice.product_grid import ProductGrid
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.matrix.on_grid import check_rows, joined, solve_rows
from nearplane.matrix.to_rate import coded_rate
from nearplane.models.experts import by_expert
from nearplane.models.kinds import InputKind, input_kind
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.memory_bound import Bound, Place, bound
from nearplane.planning.memory_limits import choose, settings, too_small
from nearplane.planning.plan import expected_work, weighs_positions
from nearplane.planning.request import rehearse
from nearplane.planning.shapes import Blocks, Group, Shapes, multiplications, of_a_block
from nearplane.recipe.layer_plan import Plan
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import GridScheme
from nearplane.recipe.thresholds import ADVISED_TOKENS_PER_INPUT
from nearplane.system.device import Device
from nearplane.system.memory import release_all, resident
from nearplane.system.progress import duration
from nearplane.system.sizes import Limits, size_text

log = logging.getLogger(__name__)
SIDE = 1024  # size of the timed matrices
ROWS, COLUMNS = 128, 512  # shape of the layer that loads the libraries
HOST: Place = "host"
DEVICE: Place = "device"
NO_BOUND = (
    "cannot be used: the memory of this run cannot be predicted, because its first window does not reach all layers, it takes "
    "images or sound, or nothing is calibrated. Leave out"
)
# least time of searching steps and codes, in multiplications for each weight: what these take longer than integers in
# benchmarks/speed/solver.py; of other formats it is small
SEARCHED = {"fp8": 30e3, "fp8-block": 20e3, "mxfp8": 10e3, "nvfp4": 3e3, "mxfp4": 10e3, "coded": 15e3}
LOGITS = 2.0  # times the multiplications of a head that logits and their comparison take: 2 to 2.5 on SmolLM2
LONG = 3600.0  # seconds from which it is said how a run gets shorter
FEWER = 64  # windows of such a run at least
WORTHWHILE = 0.8  # largest share of the time for which that is said
REPEATS = 3  # repetitions of the timed product, of which the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known of a run before its first layer.

    Args:
        setting: Memory settings of the run.
        bytes: Upper bound of the memory where it computes; None if that is not known.
        seconds: Least time, that of multiplications; None: not known, as on a GPU.
        before: Peak of the memory of the process until then, which an earlier run may have had.
        work: Multiplications of each block; empty if they are not known.
        after: Time behind the last block in multiplications: of comparing the predictions on the extra windows.
        samples: A smaller number of windows, with which losses can still be trusted.
        fewer: Share of the multiplications of the blocks that is left with them; 1 if there are no more than that.
    """

    setting: MemorySetting
    bytes: int | None = None
    seconds: float | None = None
    before: int = 0
    work: tuple[float, ...] = ()
    after: float = 0.0
    samples: int = 0
    fewer: float = 1.0

    def measured(self, seconds: float, number: int) -> None:
        """Log memory and time of the first block that was quantized, and what makes a long run shorter.

        Args:
            seconds: Time that the block took.
            number: Its number.
        """
        device = self.setting.device
        most = f" (at most {size_text(self.bytes)} expected)" if self.bytes else ""
        where = f"{_memory_of(device)}{' of rank 0' * (device.ranks.world > 1)}{most}"
        memory = f" and {size_text(device.peak())} of {where}" if device.peak() > self.before else ""
        log.info(f"the first block took {duration(seconds)}{memory}")
        every = seconds * sum(self.work) / self.work[number] if self.work and self.work[number] else 0.0
        if not number and every > LONG and self.fewer < WORTHWHILE:  # a resumed run keeps its windows
            log.info(
                f"all blocks take about {duration(every)}; with --samples {self.samples} they take about "
                f"{duration(every * self.fewer)}, but more is lost"
            )


def forecast(
    model: Model,
    plan: Plan,
    windows: Windows,
    device: Device,
    limits: Limits,
    batch: int | None = None,
    start: int | None = None,
) -> Forecast:
    """Rehearse a run, bound its memory, log the bound, and choose settings that keep within its limits.

    The limit of a GPU is at most what is free there. With a GPU, the host's is what is free, unless it is given.

    Args:
        model: The model to quantize.
        plan, windows: Plan and windows of the run.
        device: Device of the computation.
        limits: Memory limits of host and device in bytes.
        batch: Windows per batch of a run that is resumed, which affect the order of sums; None: chosen here.
        start: Resident bytes at the start, from which limits count; None: those of now.

    Raises:
        RecipeError: The most economical settings need more than a limit, or the memory cannot be predicted.
        NearplaneError: The rehearsal fails, see `rehearse`.
    """
    before = device.peak()
    looks = rehearse(model, plan, windows, device)
    planned = checked(within_limits(model, plan, windows, looks, device, limits, batch, start), limits)
    if planned is None:
        return Forecast(setting=MemorySetting.usual(windows.seqlen, device, batch))
    shapes, bounds, *_ = planned
    each_one = " of each process" * (device.ranks.world > 1)
    sizes = " and ".join(
        f"{size_text(each.bytes)} of {_memory_of(device, each.place)}{each_one} (while {each.while_})"
        for each in bounds
    )
    # of a GPU it is mostly not that of multiplications
    seconds = multiplications(shapes) * seconds_of_a_multiplication() if device.on_cpu else None
    time = "" if seconds is None else f" and at least {duration(seconds)}"
    extra = f" and {shapes.extra * shapes.seqlen:,} extra ones" if shapes.extra else ""
    log.info(f"quantizing takes at most {sizes}{time} for {windows.count * shapes.seqlen:,} calibration tokens{extra}")
    if (states := bounds[0].setting.states) != "device":
        log.info(f"hidden states between blocks lie {'on the host' if states == 'host' else 'on disk'}")
    widest, seqlen = max(layer.shape[1] for layer in model.layers), windows.seqlen
    samples = min(windows.count, max(FEWER, -(-ADVISED_TOKENS_PER_INPUT * widest // seqlen)))
    fewer = _work(model, replace(shapes, windows=samples, extra=extra_windows(samples, seqlen)))
    work = _work(model, shapes)
    compared = 2 * LOGITS * shapes.hidden * shapes.vocabulary  # of a token, in both networks
    if shapes.streams == 1:  # the original's blocks run afterwards
        compared += sum(kind.count * kind.weights for kind in shapes.blocks)
    return Forecast(
        setting=bounds[0].setting,
        bytes=bounds[0].bytes,
        seconds=seconds,
        before=before,
        work=work,
        after=shapes.extra * shapes.seqlen * compared,
        samples=samples,
        fewer=sum(fewer) / sum(work),
    )


def _work(model: Model, shapes: Shapes) -> tuple[float, ...]:
    """Return the multiplications of each block."""
    work = {
        block.name: of_a_block(shapes, shape)
        for kind, shape in zip(blocks_by_kind(model), shapes.blocks, strict=True)
        for block in kind
    }
    return tuple(work[block.name] for block in model.blocks)


class Planned(NamedTuple):
    """Settings of a run that were chosen by its memory.

    Args:
        shapes: Shapes of the run.
        bounds: Bounds of the chosen setting, first where the run computes.
        exceeding: The bound that exceeds its limit most; None: none does.
        allowed: The limits.
        start: Resident bytes at the start.
    """

    shapes: Shapes
    bounds: Sequence[Bound]
    exceeding: Bound | None
    allowed: Mapping[Place, float]
    start: int


def checked(planned: Planned | None, limits: Limits) -> Planned | None:
    """Return what `within_limits` chose.

    Raises:
        RecipeError: The most economical settings need more than a limit, or the memory cannot be predicted.
    """
    if planned is None and (options := " and ".join(limits.options())):
        raise RecipeError(f"{options} {NO_BOUND} {options}.")
    if planned is not None and planned.exceeding is not None:
        raise RecipeError(too_small(planned.exceeding, limits, planned.allowed[planned.exceeding.place]))
    return planned


@cache
def load_libraries(solver: Solver, beam: int | None, *, entropy_coded: bool) -> None:
    """Solve a small random layer, so that compiled kernels and libraries are part of the resident memory from now on."""
    generator, scheme = torch.Generator().manual_seed(0), GridScheme(solver=solver, beam=beam)
    W, X = torch.randn(ROWS, COLUMNS, generator=generator), torch.randn(2 * COLUMNS, COLUMNS, generator=generator)
    inputs, storage = LayerInput.of((X.T @ X / len(X)).double()), check_rows(W, scheme, torch.float16, "matrix")
    rows = solve_rows(W, slice(None), corrected(W, inputs, scheme), inputs, scheme, storage=storage)
    codes = joined([rows], inputs, scheme, name="matrix")[0].codes
    if entropy_coded:
        coded_rate(QuantizedMatrix(codes=codes, grid=ProductGrid.of_one_step(codes.shape, codes.device)))


def within_limits(
    model: Model,
    plan: Plan,
    windows: Windows,
    looks: Mapping[str, FirstLook],
    device: Device,
    limits: Limits,
    batch: int | None,
    start: int | None = None,
) -> Planned | None:
    """Choose the fastest setting of a run that keeps within its limits; without limits and on the CPU, the fastest.

    Args:
        model, plan, windows, device, limits, batch, start: Arguments of `forecast`.
        looks: Results of running one window through one block of each kind, by name.

    Returns:
        The choice; if no setting keeps within the limits, the most economical one. None if the memory cannot be predicted.
    """
    shapes = shapes_of(model, plan, windows, looks, device) if looks else None
    if shapes is None:
        return None
    scheme = plan.recipe.scheme
    load_libraries(scheme.solver, scheme.beam, entropy_coded=scheme.entropy_coded)
    kernels_of(torch.empty(0, device=device.place))  # refused before the run, not at its first layer
    release_all()
    usual = MemorySetting.usual(windows.seqlen, device, batch)
    start = (start if any(limits) else None) or resident() or 0
    allowed = {HOST: limits.host or inf}
    if not device.on_cpu:
        allowed = {
            DEVICE: min(limits.device or inf, device.free() or inf),
            HOST: limits.host or (resident() or 0) + (device.free_on_host() or inf),
        }
        usual = replace(usual, room=int(min(usual.room, allowed[DEVICE] // PAUSED_DIVISOR)))

    def bounds(setting: MemorySetting) -> list[Bound]:
        return [bound(shapes, setting, start if place == HOST else 0, place) for place in allowed]

    if device.on_cpu and limits.host is None:
        return Planned(shapes, bounds(usual), None, allowed, start)
    candidates = settings(shapes, usual, batches=batch is None and any(limits))
    return Planned(shapes, *choose(map(bounds, candidates), allowed), allowed, start)


def _memory_of(device: Device, place: Place = "device") -> str:
    """Return the name of a memory in messages."""
    return "memory" if device.on_cpu else f"memory on {device}" if place == "device" else "the host's memory"


def shapes_of(
    model: Model, plan: Plan, windows: Windows, looks: Mapping[str, FirstLook], device: Device
) -> Shapes | None:
    """Return the shapes that determine the memory of a run; None if the first window did not reach all layers of some
    block, or if the model takes images or sound.

    Args:
        model, plan, windows, device: Arguments of `forecast`.
        looks: Results of running one window through one block of each kind, by name.
    """
    recipe, scheme, blocks = plan.recipe, plan.recipe.scheme, list[Blocks]()
    if input_kind(model.network) is not InputKind.TEXT or windows.fitted is None:
        return None
    for kind in blocks_by_kind(model):
        look = looks.get(kind[0].name)
        if look is None and kind[0].layers:
            return None
        groups = () if look is None else tuple(_group(look, group) for group in look.groups)
        weights = sum(parameter.numel() for parameter in kind[0].empty.parameters())
        pauses = (
            look is not None and recipe.calibration.true_sequential and not never_pauses(look, correct=scheme.correct)
        )
        blocks.append(Blocks(count=len(kind), weights=weights, groups=groups, pauses=pauses))
    arguments, shared = next(iter(looks.values())).beside if looks else (0, 0)
    shapes = shapes_with(model, plan, windows, blocks, device)
    return replace(shapes, beside=shared + arguments // shapes.streams)  # both networks have the same arguments


def shapes_with(model: Model, plan: Plan, windows: Windows, blocks: Sequence[Blocks], device: Device) -> Shapes:
    """Return the shapes of a run with these shapes of blocks; of the windows only numbers and lengths matter."""
    assert windows.fitted is not None, "a run that is not calibrated has no shapes"
    recipe, scheme = plan.recipe, plan.recipe.scheme
    embeddings = model.network.get_input_embeddings().weight
    head = getattr(model.network.get_output_embeddings(), "weight", None)
    choosing, backward = expected_work(model, plan, windows.fitted)
    return Shapes(
        blocks=tuple(blocks),
        windows=windows.count,
        extra=windows.extra_count,
        seqlen=windows.seqlen,
        hidden=embeddings.shape[-1],
        vocabulary=0 if head is None else len(head),
        embeddings=embeddings.numel(),
        ends=sum(model.reader.nbytes(name) for name in model.rest()),
        streams=2 if scheme.correct else 1,
        beam=scheme.beam or 1,
        descents=scheme.descents,
        searched=SEARCHED.get(scheme.number_format.name, 0.0) if scheme.calibrated else 0.0,
        choosing=choosing,
        backward=backward,
        predicted=predicted_at_once(model, windows.seqlen),
        placed=weighs_positions(model, recipe),
        rounded=bool(recipe.rounded) or (recipe.mix is not None and recipe.mix.coarsest_inputs is not None),
        number=device.compute_dtype(model.dtype).itemsize,
        heads=getattr(model.config.get_text_config(), "num_attention_heads", 0),
        ranks=device.ranks.world,
    )


@cache
def seconds_of_a_multiplication() -> float:
    """Measure the time of a multiplication in a float32 matrix product, once in a process."""
    X = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    return min(timeit.repeat(lambda: X @ X, number=1, repeat=REPEATS)) / SIDE**3


def _group(look: FirstLook, group: tuple[Layer, ...]) -> Group:
    """Return the group of layers that share an input; of experts, the layers of the first one."""
    experts = by_expert(group) if group[0].routed else {0: group}
    layers = next(iter(experts.values()))
    single = len(layers) == 1 and layers[0].shape[0] <= layers[0].shape[1]
    entered = look.entered[group[0].name][0]
    return Group(
        layers=tuple(layer.shape for layer in layers),
        alive=entered.alive,
        held=entered.needed,
        lost=tuple(layer.shape for layer in layers if layer.adds or single),
        experts=len(experts),
        routed=entered.routed or (0, 0),
    )
