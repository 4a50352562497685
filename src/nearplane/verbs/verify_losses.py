"""Losses measured again, layer by layer, along the original network and that of the files; of tuned ones held-out KL too.

What `verify` compares with the record, and what `tune` records of a network whose codes, steps and norms it has trained. Losses
from before tuning are not measured, as no file holds what they were of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from torch import Tensor

from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.walk import walk
from nearplane.calibration.windows import Windows, digest_of
from nearplane.errors import CalibrationError, FormatError, ModelError, NumericalError, first_few
from nearplane.formats.stored import Stored
from nearplane.matrix.certificate import Known, measured_again
from nearplane.matrix.inputs import Inputs
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.plan import moments_of_embeddings
from nearplane.record.record import LayerRecord
from nearplane.record.tuning_record import Tuning
from nearplane.system.paths import RECORD
from nearplane.system.progress import Progress, counted
from nearplane.tuning.checkpoint import Checkpoint, norms_stored
from nearplane.tuning.loop import mean_kl
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.settings import split
from nearplane.verbs.verify_files import Fault

NAMED = 4  # figures that one fault spells out
EXACT = 1e-12  # relative, of figures of integers
ASKED = {"name", "stored", "seconds", "asked", "bytes", "checksum", "entropy"}  # no data can measure these

Found = TypeVar("Found")


def along_both_networks(
    there: Checkpoint,
    windows: Windows,
    progress: Progress,
    measure: Callable[[Layer, Inputs, LayerRecord], tuple[Tensor | None, Found]],
) -> list[Found]:
    """Pass windows through the original and the network of the files, and return what was measured of every layer.

    Args:
        there: the checkpoint.
        windows: of calibration.
        progress: wraps the layers.
        measure: returns the values that layers behind are to see, None for those of the original, and what it measured.
    """
    model, record, told = there.model, there.record, {layer.name: layer for layer in there.record.layers}
    moments = moments_of_embeddings(model, there.recipe.scheme, windows.fitted, there.device)
    setting = MemorySetting.usual(windows.seqlen, there.device, record.batch)
    found: list[Found] = []
    with (
        walk(model, there.recipe, windows, setting, moments=moments) as stages,
        counted(progress, "measuring", len(told), blocks=model.layers_by_block) as count,
    ):
        for stage in stages:
            pairs = zip(stage.layers, stage.inputs, strict=True)
            measured = [measure(layer, inputs, told[layer.name]) for layer, inputs in pairs]
            stage.write(values for values, _ in measured)
            found += [each for _, each in measured]
            count(len(measured))
            del measured
    return found


def losses_again(
    there: Checkpoint, windows: Windows, tolerance: float, progress: Progress, faults: list[Fault]
) -> bool:
    """Measure every layer and the held-out KL, and compare; adds to `faults`, returns whether all layers could be measured."""
    tuned = there.record.tuning is not None

    def measure(layer: Layer, inputs: Inputs, told: LayerRecord) -> tuple[Tensor | None, bool]:
        scheme = there.recipe.scheme_of(layer.name)
        try:
            matrix = there.stored.matrix(told.stored, there.stored.tensors(told.stored)).to(layer.weight.device)
            known, own = Known(matrix=matrix, base=told.base, tuned=tuned), scheme.storing(told.number_format)
            again = measured_again(layer.name, layer.read(), inputs.used_once(), own, known)
        except (FormatError, ModelError, NumericalError) as error:
            faults.append(Fault(where=layer.name, what=str(error)))
            return None, False
        faults.extend(_compare(again, told, tolerance))
        values, dead = matrix.decode(), inputs.damped_for_the_correction(scheme).dead
        if bool(values[:, dead].any()) and not tuned:  # which no loss shows; other text may have moved these codes
            faults.append(Fault(where=layer.name, what="weights of inputs that were always 0 are not 0"))
        return values, True

    if not all(along_both_networks(there, windows, progress, measure)):
        return False
    faults += _held_out_again(there, tolerance)
    return True


def _compare(again: LayerRecord, told: LayerRecord, tolerance: float) -> Iterator[Fault]:
    """Yield one fault that names the first fields that differ, if any do."""
    wrong = []
    for name in [*(each.name for each in fields(told) if each.name not in ASKED), "entropy"]:
        new, old = getattr(again, name), getattr(told, name)
        if not _same(new, old, EXACT if name == "entropy" else tolerance):
            wrong.append(f"{name} is {_short(new)}, the record says {_short(old)}")
    if wrong:
        yield Fault(where=told.name, what=first_few(wrong, NAMED, "; "))


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
    """Return the norms of the files that are not the original's, by name of the parameter."""
    if tuning is None:
        return {}
    there = tuning.norms.keys() & set(stored.rest())
    return {name: stored.reader.read([file])[file] for name, file in norms_stored(model).items() if file in there}


def _held_out_again(there: Checkpoint, tolerance: float) -> Iterator[Fault]:
    """Measure KL on the held-out windows from the files, and compare."""
    record, model, tuning = there.record, there.model, there.record.tuning
    if tuning is None:
        return
    where, model.tuned = f"{RECORD}, tuning", {}  # the walk is over: blocks are the original's again
    try:
        steps = max(tuning.steps, tuning.windows // tuning.batch)  # as asked for, as far as that matters here
        cut = split(there.windows, record, samples=tuning.samples, seqlen=tuning.seqlen, steps=steps)
        if (digest_of(cut.windows), cut.training, cut.held) != (tuning.text, tuning.windows, tuning.held_windows):
            yield Fault(where=where, what="the text does not give the windows that it was tuned on")
            return
        matrices, held = there.matrices(), replace(cut, windows=cut.windows[cut.training :], training=0)
        network = TunedNetwork(model, matrices, there.vectors(matrices), held, ends=there.ends())
        with network.ready():
            found = mean_kl(network, held.batches()[1])
    except (CalibrationError, FormatError, ModelError) as error:
        yield Fault(where=where, what=str(error))
        return
    if not math.isclose(found, tuning.held_out, rel_tol=tolerance, abs_tol=1e-12):
        yield Fault(
            where=where, what=f"KL on its held-out windows is {found:.9g}, the record says {tuning.held_out:.9g}"
        )
