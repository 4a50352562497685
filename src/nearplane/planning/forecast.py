"""What a run will take, in one sentence before its first layer and one after its first block, and how it keeps to --memory.

Reads the shapes off the model and measures what `memory_bound.py` computes with: the memory that is resident at the start, and the
time of one matrix product.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nearplane.calibration.memory_setting import MemorySetting
from nearplane.calibration.one_forward import never_pauses
from nearplane.calibration.stages import FirstLook
from nearplane.calibration.trial import kinds
from nearplane.calibration.windows import Windows
from nearplane.coding.blob import Contents, size
from nearplane.errors import RecipeError
from nearplane.lattice.bounds import certify
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import ProductGrid
from nearplane.lattice.number_formats import integers
from nearplane.lattice.polish import polish
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import SOLVERS, Problem
from nearplane.models.experts import by_expert
from nearplane.models.kinds import Taken, taken_by
from nearplane.models.model import Model
from nearplane.planning.memory_bound import Blocks, Bound, Group, Shapes, bound, choose, multiplications, settings
from nearplane.planning.plan import foreseen_probe
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.sizes import size_text
from nearplane.system.device import Device
from nearplane.system.memory import release, resident
from nearplane.system.progress import duration, peak_memory

log = logging.getLogger(__name__)
ROWS, COLUMNS, SIDE = 128, 512, 1024  # of the layer that loads the libraries, of the matrices of the timed product
RESERVE = 1.05  # of the limit that a refusal asks for: what is resident at the start differs from run to run
REPEATS = 3  # of that product, of which the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How a run spares memory, and the most bytes that it takes; None where that is not known."""

    setting: MemorySetting
    bytes: int | None = None

    def measured(self, seconds: float, left: int) -> None:
        """Log what the first block took.

        Args:
            seconds: since the walk began.
            left: blocks to come.
        """
        most = f" of at most {size_text(self.bytes)}" if self.bytes else ""
        rest = f"; the {left:,} to come take about {duration(left * seconds)}" if left else ""
        log.info(f"measured: the first block took {size_text(peak_memory())}{most} and {duration(seconds)}{rest}")


def forecast(
    model: Model,
    recipe: Recipe,
    windows: Windows,
    looks: Mapping[str, FirstLook],
    device: Device,
    limit: int | None,
    batch: int | None = None,
) -> Forecast:
    """Say what a run on the CPU will take at the most; choose how it keeps within a limit.

    Args:
        model: to be quantized.
        recipe, windows: of the run.
        looks: how one window ran through one block of each kind, by its name.
        device: where to compute.
        limit: bytes that the run may take; None: any.
        batch: windows at a time of a run that goes on, as sums depend on that; None: it may choose.

    Raises:
        RecipeError: the most economical settings need more than the limit, or nothing is known of the run's memory.
    """
    usual = MemorySetting.usual(windows.seqlen, device, batch)
    shapes = shapes_of(model, recipe, windows, looks) if looks and device.on_cpu else None
    if shapes is None:
        if limit is not None:
            raise RecipeError(f"--memory: {_unknown(device)} Leave it out.")
        return Forecast(setting=usual)
    load_libraries(recipe.scheme.solver, shapes.beam, coded=recipe.scheme.entropy_coded)
    release()
    start, chosen = resident() or 0, usual
    most = bound(shapes, usual, start)
    if limit is not None:
        tried = (bound(shapes, each, start) for each in settings(shapes, usual, batches=batch is None))
        most, fits = choose(tried, limit)
        if not fits:
            raise _too_small(limit, most)
        chosen = most.setting
    count = multiplications(shapes)
    log.info(
        f"quantizing takes at most {size_text(most.bytes)} of memory (while {most.while_}) and at least "
        f"{duration(count * seconds_of_a_multiplication())} for {shapes.all_windows * shapes.seqlen:,} tokens "
        f"({count:.1e} multiplications)"
    )
    return Forecast(setting=chosen, bytes=most.bytes)


def shapes_of(model: Model, recipe: Recipe, windows: Windows, looks: Mapping[str, FirstLook]) -> Shapes | None:
    """Return what the memory of a run depends on; None where it is not known: the first window did not reach all
    layers of some block, or the model takes images or sound.

    Args:
        model, recipe, windows, looks: see `forecast`.
    """
    scheme, blocks = recipe.scheme, []
    if taken_by(model.network) is not Taken.TEXT or windows.fitted is None:
        return None
    for kind in kinds(model):
        look = looks.get(kind[0].name)
        if look is None and kind[0].layers:
            return None
        groups = () if look is None else tuple(_group(look, index) for index in range(len(look.groups)))
        pauses = look is not None and not never_pauses(look, correct=scheme.correct)
        weights = sum(parameter.numel() for parameter in kind[0].empty.parameters())
        pauses = pauses and recipe.calibration.true_sequential
        blocks.append(Blocks(count=len(kind), weights=weights, groups=groups, pauses=pauses))
    embeddings = model.network.get_input_embeddings().weight
    head = getattr(model.network.get_output_embeddings(), "weight", None)
    probe, backward = foreseen_probe(model, recipe, windows.fitted)
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
        descents=(getattr(scheme, "rounds", None) or 0) + (getattr(scheme, "polish", None) or 0),
        probe=probe,
        backward=backward,
    )


def load_libraries(solver: str | None, beam: int, *, coded: bool) -> None:
    """Solve a small random layer: what compiled kernels and libraries keep is then part of what is resident."""
    made = torch.Generator().manual_seed(0)
    W, X = torch.randn(ROWS, COLUMNS, generator=made), torch.randn(2 * COLUMNS, COLUMNS, generator=made)
    H = (X.T @ X / len(X)).double()
    steps = Steps(format=integers(4, 128), search="mse", storage=torch.float16)
    factor = factorize(H, "activation", damp=0.1)
    problem = Problem(W=W, grid=steps.grid(W), factor=factor, H=H, shift=factor.shift, beam=beam)
    solution = SOLVERS[solver].round(problem)
    matrix = solution.matrix
    polish(W, matrix, H.float(), storage=torch.float16)
    certify(W, W, solution, H, factor)
    if coded:
        columns, rows = torch.zeros(COLUMNS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
        grid = ProductGrid(base=1.0, columns=columns, column_resolution=1, rows=rows, row_resolution=1)
        size(Contents.of(matrix.codes, grid))


def seconds_of_a_multiplication() -> float:
    """Time a float32 matrix product."""
    X = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        X @ X
        times.append(time.perf_counter() - began)
    return min(times) / SIDE**3


def _group(look: FirstLook, index: int) -> Group:
    """Return layers that share an input; of experts those of the first one."""
    group = look.groups[index]
    experts = by_expert(group) if group[0].routed else {0: group}
    layers = next(iter(experts.values()))
    alone = len(layers) == 1 and layers[0].shape[0] <= layers[0].shape[1]
    entered = look.entered[group[0].name][0]
    return Group(
        layers=tuple(layer.shape for layer in layers),
        alive=entered.alive,
        lost=tuple(layer.shape for layer in layers if layer.adds or alone),
        experts=len(experts),
        routed=entered.routed or (0, 0),
    )


def _too_small(limit: int, least: Bound) -> RecipeError:
    return RecipeError(
        f"--memory {size_text(limit)} is too small: the most economical settings need {size_text(least.bytes)} (while "
        f"{least.while_}). Use --memory {math.ceil(RESERVE * least.bytes / 1e7) / 100:.2f}GB or fewer --samples."
    )


def _unknown(device: Device) -> str:
    if not device.on_cpu:
        return f"it limits the memory of the CPU, and this run computes on {device}."
    return (
        "the memory of this run is not known before it, as its first window does not reach all layers, it takes images or sound, "
        "or nothing is calibrated."
    )
