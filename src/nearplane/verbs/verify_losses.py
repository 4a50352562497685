"""Repeated measurement of all losses along the original and the quantized network, and of the held-out KL after tuning.

`verify` compares these figures with the record; `tune` records them for a network with trained codes, steps and norms.
Losses from before tuning cannot be measured again, because no file holds the weights from before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from nearplane.calibration.one_forward import MemorySetting, default_batch
from nearplane.calibration.positions import PositionWeights
from nearplane.calibration.stages import try_blocks
from nearplane.calibration.walk import Stage, walk
from nearplane.calibration.windows import Windows, digest_of
from nearplane.errors import CalibrationError, FormatError, ModelError, NumericalError, first_few
from nearplane.formats.stored import Stored
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.matrix.certificate import SolvedMatrix, measured_rows, record_of
from nearplane.models.model import Model
from nearplane.number_formats import E2M1
from nearplane.planning.forecast import checked, within_limits
from nearplane.planning.plan import moments_of_embeddings
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.schemes import AnyScheme
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.record.tuning_record import Tuning
from nearplane.system.device import Device, dtype_name, without_number
from nearplane.system.paths import RECORD
from nearplane.system.progress import Progress, Tracked, in_steps
from nearplane.system.sizes import NO_LIMITS, Limits
from nearplane.tuning.checkpoint import Checkpoint, norms_stored
from nearplane.tuning.loop import mean_kl
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.schedule import FixedSteps
from nearplane.tuning.settings import split
from nearplane.verbs.verify_files import Fault

MAX_NAMED = 4  # differing figures that one fault lists
ROUNDING = 1e-12  # relative, for the entropy, which depends only on integers
UNMEASURED = {"name", "stored", "seconds", "asked", "bytes", "checksum", "entropy"}  # not measured on data

# what single roundings decide, such as the sides of clipped codes: not compared on another device than that of the run
BY_ROUNDING = {"nearest_loss", "extra_nearest_loss", "clipped", "clipped_rows", "gamma", "pruned"}
BY_ROUTING = {"tokens", "alike", "blended"}  # the same for the tokens of experts
TOLERANCE = 1e-6  # relative, of repeated losses; the same device repeats them to the last digit
TOLERANCE_ELSEWHERE = 0.01  # on another device, where blocks run in float32
# the same in 16 bits: products in another order change losses of 8-bit weights by up to 40 %, of 4-bit weights by 1 %
ROUGH_TOLERANCE_ELSEWHERE = 0.5

# relative, of the KL on extra windows as a multiple of that of losses: sums in another order changed it by 2.7e-6 on the demo,
# losses by less than 1e-6
TOLERANCE_OF_KL = 10
MAX_TOLERANCE_OF_KL = 0.5  # also on another device in 16 bits

Measured = TypeVar("Measured")


@dataclass(slots=True)
class Along(Generic[Measured]):
    """What is measured along both networks.

    Args:
        layers: The measurement of every layer.
        input_scales: {layer name: global scale of its rounded inputs}, where there are such.
        cache_scales: {name of the attention in files: scales of its keys and of its values}, where there are such.
        divergence: KL on the extra windows, see `extra_divergence`.
    """

    layers: list[Measured] = field(default_factory=list)
    input_scales: dict[str, float] = field(default_factory=dict)
    cache_scales: dict[str, tuple[float, float]] = field(default_factory=dict)
    divergence: float | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """How closely the figures that are measured again must agree with the record.

    Args:
        tolerance: Largest relative deviation.
        elsewhere: The device that measures and its dtype, where it is another device than that of the run; else empty.
        run: The device of the run.
    """

    tolerance: float = TOLERANCE
    elsewhere: str = ""
    run: str = ""

    @classmethod
    def on(cls, device: Device, record: RunRecord, dtype: torch.dtype, tolerance: float | None) -> Agreement:
        """Return the agreement for losses on a device, of a model in `dtype`; None: the usual tolerance there."""
        if without_number(device.model()) == without_number(record.device):
            return cls(TOLERANCE if tolerance is None else tolerance)
        computed = device.compute_dtype(dtype)
        usual = TOLERANCE_ELSEWHERE if computed == torch.float32 else ROUGH_TOLERANCE_ELSEWHERE
        elsewhere = f"{device.model()} in {dtype_name(computed)}"
        return cls(usual if tolerance is None else tolerance, elsewhere, record.device)

    def compared(self) -> list[str]:
        """Return the names of the figures of a layer that are compared."""
        left_out = UNMEASURED | (BY_ROUNDING | BY_ROUTING if self.elsewhere else set())
        return [each.name for each in fields(LayerRecord) if each.name not in left_out]

    def __str__(self) -> str:
        """Return the end of a sentence about the measurement."""
        if not self.elsewhere:
            return ""
        return (
            f" on {self.elsewhere}, not on {self.run}, and may differ by {100 * self.tolerance:g} %; numbers of clipped "
            f"codes and losses of rounding to nearest were not compared"
        )


def along_both_networks(
    saved: Checkpoint,
    windows: Windows,
    progress: Progress,
    measure: Callable[[Stage, int, LayerRecord], tuple[Tensor | None, Measured]],
    setting: MemorySetting,
) -> Along[Measured]:
    """Pass windows through the original and the quantized network, and return what was measured along both.

    Args:
        saved: The checkpoint to measure.
        windows: Calibration windows.
        progress: Display that wraps the iterator over layers.
        measure: Function of a layer, by its stage and number, that returns the weights that later layers see (None: the
            original's) and a measurement.
        setting: What `setting_of` returns.
    """
    model, entries = saved.model, {layer.name: layer for layer in saved.record.layers}
    moments = moments_of_embeddings(model, saved.plan.recipe.scheme, windows.fitted, saved.device)
    positions = {name: PositionWeights.recorded(entry.positions) for name, entry in entries.items() if entry.positions}
    scales = {} if saved.record.tuning is None else saved.input_scales()  # a tuned network keeps those of its start
    along = Along[Measured]()
    tracked = Tracked(range(len(entries)), "measuring", len(entries), blocks=model.layers_by_block)
    with (
        walk(
            model,
            saved.plan.recipe,
            windows,
            setting,
            moments=moments,
            positions=positions,
            input_scales=scales,
            headroom=saved.record.headroom,
        ) as stages,
        in_steps(progress, tracked) as count,
    ):
        for stage in stages:
            measured = [measure(stage, number, entries[layer.name]) for number, layer in enumerate(stage.layers)]
            stage.write(values for values, _ in measured)
            along.layers += [each for _, each in measured]
            count(len(measured))
            along.input_scales |= stage.input_scales
            along.cache_scales |= stage.cache_scales
            along.divergence = along.divergence if stage.divergence is None else stage.divergence
            del measured
    return along


def setting_of(saved: Checkpoint, windows: Windows, limits: Limits = NO_LIMITS) -> MemorySetting:
    """Return the memory settings of a walk: with a limit or on a GPU those of a solve, which takes more.

    Raises:
        RecipeError: No setting keeps within the limits.
    """
    device, batch = saved.device, saved.record.batch
    if windows.fitted is not None and (any(limits) or not device.on_cpu):
        looks = try_blocks(saved.model, windows.fitted, device)
        batch = batch or default_batch(windows.seqlen)  # not reduced, so that figures do not depend on limits
        planned = within_limits(saved.model, saved.plan, windows, looks, device, limits, batch)
        if any(limits):
            checked(planned, limits)
        if planned is not None:
            return planned.bounds[0].setting
    return MemorySetting.usual(windows.seqlen, device, batch)


def remeasured(stage: Stage, number: int, scheme: AnyScheme, known: SolvedMatrix) -> tuple[LayerRecord, Tensor]:
    """Return the record that a run would write for a layer with known codes and grid, and its inputs that are always 0.

    Raises:
        NumericalError: A Hessian cannot be factored.
    """
    layer = stage.layers[number]
    W = layer.read()
    known = replace(known, matrix=known.matrix.to(W.device))
    target = stage.target(number, W, scheme)
    rows = measured_rows(W, slice(None), target, known, stage.inputs[number], scheme)
    stage.measured(number)
    return record_of(layer.name, [rows], known.matrix, stage.inputs[number], scheme), target.dead


def losses_again(
    saved: Checkpoint, windows: Windows, agreement: Agreement, progress: Progress, faults: list[Fault]
) -> bool:
    """Measure every layer and the held-out KL again; adds to `faults`, returns whether all layers could be measured."""
    tuned = saved.record.tuning is not None

    def measure(stage: Stage, number: int, entry: LayerRecord) -> tuple[Tensor | None, bool]:
        layer = stage.layers[number]
        try:
            matrix = saved.stored.matrix(entry.stored, saved.stored.tensors(entry.stored), layer.weight.device)
            scheme = saved.plan.layers[layer.name].scheme
            # rows of mxfp4 in a GGUF compensated each other before 0.3, which its recipe cannot say: they had no bound
            joined = (
                isinstance(scheme, BlockScheme) and scheme.number_format.levels == E2M1 and entry.worst_case is None
            )
            known = SolvedMatrix(matrix=matrix, base=entry.base, tuned=tuned or joined)
            again, dead = remeasured(stage, number, scheme, known)
        except (FormatError, ModelError, NumericalError) as error:
            faults.append(Fault(layer.name, str(error)))
            return None, False
        faults.extend(_compare(again, entry, agreement))
        if not tuned and _moved(matrix, dead):  # no loss shows it; tuning on other text may move these codes
            faults.append(Fault(layer.name, "weights of inputs that were always 0 are not 0"))
        return matrix.decode(), True

    along = along_both_networks(saved, windows, progress, measure, setting_of(saved, windows))
    if not all(along.layers):
        return False
    kl, scales = saved.record.extra_kl, along.input_scales
    if kl is not None and not _same(
        along.divergence, kl, min(TOLERANCE_OF_KL * agreement.tolerance, MAX_TOLERANCE_OF_KL)
    ):
        what = f"the KL on the extra windows is {_short(along.divergence)}, the record has {_short(kl)}"
        faults.append(Fault(RECORD, what))
    for entry in saved.record.layers:
        stored = saved.stored.inputs(entry.stored)
        if stored is not None and not _same(scales.get(entry.name), stored[1], agreement.tolerance):
            what = (
                f"the global scale of its inputs is {_short(scales.get(entry.name))}, the file has {_short(stored[1])}"
            )
            faults.append(Fault(entry.name, what))
    for name in dict.fromkeys([*saved.record.cache_scales, *along.cache_scales]):
        again, old = along.cache_scales.get(name), saved.record.cache_scales.get(name)
        if not _same(again, old, agreement.tolerance):
            what = f"the scales of its keys and values are {_short(again)}, the record has {_short(old)}"
            faults.append(Fault(name, what))
    faults += _held_out_again(saved, agreement.tolerance)
    return True


def _moved(matrix: QuantizedMatrix, dead: Tensor) -> bool:
    """Return whether a weight of a dead input is not the nearest to 0 on its grid, which need not have a 0."""
    if not bool(dead.any()):
        return False
    grid = matrix.grid.of_rows(torch.arange(len(matrix.codes), device=dead.device))
    nearest, _ = grid.round(torch.zeros_like(matrix.codes, dtype=torch.float32))
    return not torch.equal(matrix.codes[:, dead].to(nearest), nearest[:, dead])


def _compare(again: LayerRecord, entry: LayerRecord, agreement: Agreement) -> Iterator[Fault]:
    """Yield one fault that names the first differing fields, if there are any."""
    wrong = []
    for name in [*agreement.compared(), "entropy"]:
        new, old = getattr(again, name), getattr(entry, name)
        if (
            old is None and name == "extra_own_loss"
        ):  # of an older version, which has it in no layer: see `contradictions`
            continue
        if not _same(new, old, ROUNDING if name == "entropy" else agreement.tolerance):
            wrong.append(f"{name} is {_short(new)}, the record has {_short(old)}")
    if wrong:
        yield Fault(entry.name, first_few(wrong, MAX_NAMED, "; "))


def _same(new: Any, old: Any, tolerance: float) -> bool:
    if isinstance(new, tuple) and isinstance(old, tuple):
        return len(new) == len(old) and all(_same(a, b, tolerance) for a, b in zip(new, old, strict=True))
    if isinstance(new, float) and isinstance(old, int | float):
        return math.isclose(new, old, rel_tol=tolerance, abs_tol=1e-300)
    return bool(new == old)


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_short(x) for x in value[:3])}{', ..' if len(value) > 3 else ''})"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def tuned_norms(stored: Stored, model: Model, tuning: Tuning | None) -> dict[str, Tensor]:
    """Return the tuned norms in the files, by name of the parameter."""
    if tuning is None:
        return {}
    names = tuning.norms.keys() & set(stored.rest())
    return {name: stored.reader.read([file])[file] for name, file in norms_stored(model).items() if file in names}


def _held_out_again(saved: Checkpoint, tolerance: float) -> Iterator[Fault]:
    """Measure the KL on the held-out windows from the files again, and compare it with the record."""
    record, model, tuning = saved.record, saved.model, saved.record.tuning
    if tuning is None:
        return
    where, model.tuned = f"{RECORD}, tuning", {}  # the walk is over: its blocks are those of the original again
    try:
        steps = max(tuning.steps, tuning.windows // tuning.batch)  # splits the text as the requested number did
        cut = split(saved.windows, record, samples=tuning.samples, seqlen=tuning.seqlen, schedule=FixedSteps(steps))
        if (digest_of(cut.windows), cut.training, cut.held) != (tuning.text, tuning.windows, tuning.held_windows):
            yield Fault(where, "the text does not give the windows of the tuning")
            return
        matrices, held = saved.matrices(), replace(cut, windows=cut.windows[cut.training :], training=0)
        network = TunedNetwork(model, matrices, saved.vectors(matrices), held, ends=saved.ends(), inputs=saved.inputs())
        with network.ready():
            kl = mean_kl(network.divergences(held.batches()[1]))
    except (CalibrationError, FormatError, ModelError) as error:
        yield Fault(where, str(error))
        return
    if not math.isclose(kl, tuning.held_out, rel_tol=tolerance, abs_tol=1e-12):
        yield Fault(where, f"the KL on its held-out windows is {kl:.9g}, the record has {tuning.held_out:.9g}")
