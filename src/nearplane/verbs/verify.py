"""verify(): does a checkpoint hold what its record says? From the files alone, and from the original and its text all over again.

With the original the main path runs once more, but for the solver: both streams pass through the network, each layer's codes are
those of the files, and its certificate is measured anew. Nothing is trusted but the record's numbers, which are what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.given import Given, with_text
from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.walk import walk
from nearplane.calibration.windows import Windows, calibration_windows
from nearplane.errors import CalibrationError, FormatError, ModelError, NumericalError, RecipeError, first_few
from nearplane.formats.beside import CONFIG, GPTQ_CONFIG, names_copied
from nearplane.formats.config_file import EXPERTS_WITH, READ_WITH, WEIGHTS
from nearplane.formats.folder import read_config
from nearplane.formats.stored import Stored
from nearplane.matrix.inputs import Inputs
from nearplane.matrix.measure_again import Known, measured_again
from nearplane.models.layers import Layer
from nearplane.models.model import Model
from nearplane.planning.plan import moments_of_embeddings
from nearplane.planning.request import open_original, quantization_config, settled, with_types
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import LayerRecord, RunRecord, read_record
from nearplane.record.tuning_record import Tuning
from nearplane.system.device import Device
from nearplane.system.json_file import unordered
from nearplane.system.matmul_library import repeated
from nearplane.system.memory import give_back_large
from nearplane.system.paths import RECORD
from nearplane.system.progress import Progress, counted, logged, silent
from nearplane.system.safetensors_files import INDEX, sha256
from nearplane.tuning.checkpoint import Checkpoint, norms_stored
from nearplane.verbs import verify_files as checked_files
from nearplane.verbs.verify_faults import Fault, Verified
from nearplane.verbs.verify_tuning import held_out_again, of_the_files, tuned_norms

NAMED = 4  # figures that one fault spells out
MOST = 0.5  # share of tensors: where more are not those of the original, it is another model
TOLERANCE = 1e-6  # relative, of losses measured again; the same machine repeats them to the last digit
EXACT = 1e-12  # of figures of integers
VERSIONS = {"written_by", "meta"}  # of quantization_config: which program wrote it
ASKED = {"name", "stored", "seconds", "asked", "bytes", "checksum", "entropy"}  # no data can measure these


def verify(
    out: str | Path,
    *,
    against: str | Path | None = None,
    calibration: str | Path | Sequence[str] | Tensor | tuple[Tensor, Tensor] | None = None,
    tolerance: float = TOLERANCE,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Verified:
    """Check a checkpoint against its record.

    Args:
        out: folder that `quantize` wrote.
        against: the original, to measure every loss again.
        calibration: the text that it was calibrated on, or what `quantize` was given; None: where the recipe says.
        tolerance: relative, of figures measured again.
        device: where to compute.
        trust_remote_code: run model code that comes with the original.
        progress: wraps the iterators over files, layers as they are read, and layers as they are measured.

    Raises:
        NearplaneError: there is no record, or the original or the text cannot be read.
    """
    if calibration is not None and against is None:
        raise RecipeError(
            "--calibration without --against: losses are measured with the original and the text, or not at all."
        )
    if not 0 <= tolerance < 1:
        raise RecipeError(f"--tolerance is {tolerance}; expected a number from 0 to 1.")
    folder, given = Path(out), Given.of(calibration)
    record = read_record(folder)
    shown = partial(_shown, progress)
    faults = [
        *checked_files.files(folder, record, shown),
        *checked_files.inside(folder, record),
        *checked_files.sums(folder, record),
    ]
    stored = checked_files.opened(folder, faults)
    sound: set[str] = set()
    if stored is not None:
        faults += [*checked_files.layers(stored, record, sound, shown), *of_the_files(stored, record)]
    measured = False
    if against is not None and stored is not None and len(sound) == len(record.layers):
        give_back_large()
        model = open_original(against, record.recipe, trust_remote_code=trust_remote_code)
        unlike, same = _unlike(folder, record, stored, model)
        faults += unlike
        if same:
            model.tuned = tuned_norms(stored, model, record.tuning)
            vary = record.recipe.scheme.types_vary
            formats = {layer.name: layer.format for layer in record.layers if vary}
            recipe = with_types(model, settled(model, record.recipe), formats)
            faults += _beside(folder, record, recipe, model)
            run = _Again(
                record=record,
                recipe=with_text(recipe, calibration),
                given=given,
                stored=stored,
                model=model,
                device=Device.named(device),
                tolerance=tolerance,
            )
            measured = _measured(run, progress, faults)
    return Verified(
        record=record,
        faults=tuple(faults),
        files=len(record.files) + 1,
        layers=len(record.layers),
        asked=against is not None,
        measured=measured,
    )


def _unlike(folder: Path, record: RunRecord, stored: Stored, model: Model) -> tuple[list[Fault], bool]:
    """Compare the original with what is not quantized; return what differs, and whether it is the original at all."""
    if (other := _another(record, model)) is not None:
        return [other], False
    untouched, compared = _untouched(stored, model, record.tuning)
    if len(untouched) <= MOST * compared or len(untouched) <= NAMED:
        return untouched, True
    what = f"another model: of the {compared} tensors that are not quantized {len(untouched)} are others in {folder}"
    return [Fault(where=str(model.folder), what=what)], False


def _another(record: RunRecord, model: Model) -> Fault | None:
    """Return what says that the original has other layers than the record, if it has."""
    here = {layer.name: layer.shape for layer in model.layers}
    there = {layer.name: (layer.out_features, layer.in_features) for layer in record.layers}
    if here == there:
        return None
    unlike = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    named = ", ".join(
        f"{name} ({_size(here.get(name))}, the record says {_size(there.get(name))})" for name in unlike[:3]
    )
    return Fault(where=str(model.folder), what=f"another model: {len(unlike)} layers are others, as {named}")


def _size(shape: tuple[int, int] | None) -> str:
    return "none" if shape is None else f"{shape[0]} x {shape[1]}"


def _untouched(stored: Stored, model: Model, tuning: Tuning | None) -> tuple[list[Fault], int]:
    """Compare the tensors that are not quantized with the original, norms that were tuned only by name; return their number too."""
    faults: list[Fault] = []
    said = set() if tuning is None else set(tuning.norms)
    tuned = said & set(norms_stored(model).values())
    for name in sorted(said - tuned):
        faults.append(Fault(where=name, what="the record says that this norm was tuned; the original has no such norm"))
    blocks = (model.block_names(index) for index in range(len(model.blocks)))
    wanted = {name for names in (*blocks, model.rest()) for name in names} - model.quantized_names
    for name in sorted(wanted - set(stored.rest())):
        if stored.reader.kept(name, model.reader.read([name])[name]) is None:
            continue  # of which such files hold nothing
        faults.append(Fault(where=name, what="the original has this tensor, and it is not quantized; it is missing"))
    for name in stored.rest():
        if name not in wanted:
            faults.append(Fault(where=name, what="a tensor that the original does not have, or that is quantized"))
            continue
        try:
            here = stored.reader.read([name])[name]
            there = stored.reader.kept(name, model.reader.read([name])[name])
        except (FormatError, ModelError) as error:
            faults.append(Fault(where=name, what=str(error)))
            continue
        if (
            there is None
            or here.dtype != there.dtype
            or here.shape != there.shape
            or not (
                name in tuned or torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8))
            )
        ):
            faults.append(Fault(where=name, what="it is not quantized, and not what it is in the original"))
    return faults, len(wanted)


def _beside(folder: Path, record: RunRecord, recipe: Recipe, model: Model) -> Iterator[Fault]:
    """Compare what lies beside the weights with the original: what config.json says of the model, tokenizer, templates."""
    ours = {RECORD, INDEX, CONFIG, GPTQ_CONFIG}
    copied = set(names_copied(model.folder, trust_remote_code=True))
    for name in sorted((record.files.keys() & checked_files.names(folder)) - ours):
        if checked_files.shard(name):
            continue
        if name not in copied or sha256(folder / name) != sha256(model.folder / name):
            yield Fault(
                where=name, what="not the file that the original has" if name in copied else "a file of no original"
            )
    for name in names_copied(model.folder, trust_remote_code=False):  # nobody has to take the code
        if name not in record.files:
            yield Fault(where=name, what="the original has this file, the record does not")
    here, there = (read_config(where) for where in (folder, model.folder))
    if unlike := sorted(
        key
        for key in (here.keys() | there.keys()) - {"quantization_config", WEIGHTS}
        if here.get(key) != there.get(key)
    ):
        yield Fault(where=CONFIG, what=f"{', '.join(unlike)} are not what the original's says")
    if here.get(WEIGHTS) not in (None, READ_WITH, EXPERTS_WITH):
        yield Fault(where=CONFIG, what=f"{WEIGHTS} names a file, which nearplane never does")
    own = {layer.name: layer.number_format.bits for layer in record.layers}  # by name in the network
    wanted = quantization_config(model, recipe, own if recipe.allocate == "slope" else None)
    config = here["quantization_config"]
    for key in sorted((config.keys() | wanted.keys()) - VERSIONS):
        if unordered(config.get(key)) != unordered(wanted.get(key)):
            yield Fault(where=CONFIG, what=f"{key} in quantization_config is not what the recipe makes of this model")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """What a run is measured again with.

    Args:
        record, recipe, given: what it says; the recipe with the text where it is now, or what was given in its place.
        stored: its layers, each of which is read when its turn comes.
        model: the original.
        device, tolerance: see `verify`.
    """

    record: RunRecord
    recipe: Recipe
    given: Given | None
    stored: Stored
    model: Model
    device: Device
    tolerance: float


def _measured(run: _Again, progress: Progress, faults: list[Fault]) -> bool:
    """Measure every layer again, if model and text are those of the record; adds to `faults`, returns whether all could be."""
    record, model = run.record, run.model
    if tuple(model.skipped) != record.skipped:
        what = f"{len(record.skipped)} skipped layers, the model has {len(model.skipped)}, or others"
        faults.append(Fault(where=RECORD, what=what))
    try:
        windows = calibration_windows(model, run.recipe, run.given)
    except CalibrationError as error:
        raise CalibrationError(f"{error} (The text is the record's, if --calibration names no other.)") from error
    found = (windows.digest(), windows.seqlen, windows.count, windows.extra_count)
    if found != (record.text, record.seqlen, record.windows, record.extra_windows):
        where = str(run.recipe.calibration.calibration or "calibration")
        faults.append(Fault(where=where, what="its tokens are not those that the record was made with"))
        return False
    with repeated(record.products, run.device):
        if not all(_layers(run, windows, progress, faults)):
            return False
        there = Checkpoint(
            record=record, stored=run.stored, model=model, recipe=run.recipe, given=run.given, device=run.device
        )
        faults += held_out_again(there, run.tolerance)
    return True


def _shown(progress: Progress, items: Sequence[Any], label: str) -> Iterable[Any]:
    """Pass items through and show how far they are."""
    return progress(logged(items, label, len(items), short=False), label, len(items))


def _layers(run: _Again, windows: Windows, progress: Progress, faults: list[Fault]) -> list[bool]:
    """Pass the windows through both networks; return for every layer whether it could be measured."""
    model, told = run.model, {layer.name: layer for layer in run.record.layers}
    moments = moments_of_embeddings(model, run.recipe.scheme, windows.fitted, run.device)
    setting = MemorySetting.usual(windows.seqlen, run.device, run.record.batch)
    could: list[bool] = []
    with (
        walk(model, run.recipe, windows, device=run.device, setting=setting, moments=moments) as stages,
        counted(progress, "measuring", len(told), blocks=model.layers_by_block) as count,
    ):
        for stage in stages:
            there = zip(stage.layers, stage.inputs, strict=True)
            values = [_layer(run, layer, inputs, told[layer.name], faults) for layer, inputs in there]
            stage.write(values)
            could += [each is not None for each in values]
            count(len(values))
            del values
    return could


def _layer(run: _Again, layer: Layer, inputs: Inputs, told: LayerRecord, faults: list[Fault]) -> Tensor | None:
    """Measure the codes of the file on inputs; returns their values, or None where that could not be done."""
    scheme = run.recipe.scheme_of(layer.name)
    tuned = run.record.tuning is not None
    try:
        matrix = run.stored.matrix(told.stored, run.stored.tensors(told.stored)).to(layer.weight.device)
        known = Known(matrix=matrix, told=told, tuned=tuned)
        again = measured_again(layer.name, layer.read(), inputs.used_once(), scheme, known)
    except (FormatError, ModelError, NumericalError) as error:
        faults.append(Fault(where=layer.name, what=str(error)))
        return None
    faults += _compare(layer.name, again, told, run.tolerance)
    values, dead = matrix.decode(), inputs.damped_for_the_correction(scheme).dead
    if bool(values[:, dead].any()) and not tuned:  # which no loss shows; other text may have moved these codes
        faults.append(Fault(where=layer.name, what="weights of inputs that were always 0 are not 0"))
    return values


def _compare(where: str, again: Any, told: Any, tolerance: float) -> Iterator[Fault]:
    """Yield one fault that names the first fields that differ, if any do."""
    wrong = []
    for field in fields(again):
        if field.name in ASKED:
            continue
        new, old = getattr(again, field.name), getattr(told, field.name)
        if not _same(new, old, tolerance):
            wrong.append(f"{field.name} is {_short(new)}, the record says {_short(old)}")
    new, old = (getattr(each, "entropy", None) for each in (again, told))
    if not _same(new, old, EXACT):
        wrong.append(f"entropy is {_short(new)}, the record says {_short(old)}")
    if wrong:
        yield Fault(where=where, what=first_few(wrong, NAMED, "; "))


def _same(new: Any, old: Any, tolerance: float) -> bool:
    if isinstance(new, tuple) and isinstance(old, tuple):
        return len(new) == len(old) and all(_same(a, b, tolerance) for a, b in zip(new, old, strict=True))
    if isinstance(new, float) and isinstance(old, int | float):
        return _close(new, old, tolerance)
    return bool(new == old)


def _close(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-300)


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_short(x) for x in value[:3])}{', ..' if len(value) > 3 else ''})"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
