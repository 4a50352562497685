"""verify(): does a checkpoint hold what its record says? From the files alone, and from the original and its text all over again.

With the original the main path runs once more, but for the solver: both streams pass through the network, each layer's codes are
those of the files, and its certificate is measured anew. Nothing is trusted but the record's numbers, which are what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nearplane.calibration.given import Given, with_text
from nearplane.calibration.windows import Windows, calibration_windows
from nearplane.errors import CalibrationError, FormatError, ModelError, RecipeError
from nearplane.formats.beside import CONFIG, GPTQ_CONFIG, names_copied
from nearplane.formats.layer_format import EXPERTS_WITH, READ_WITH, WEIGHTS, read_config
from nearplane.formats.stored import Stored
from nearplane.models.model import Model
from nearplane.planning.request import open_original, quantization_config, settled, with_types
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord, read_record
from nearplane.record.tuning_record import Tuning
from nearplane.system.device import Device
from nearplane.system.files import sha256, unordered
from nearplane.system.matmul_library import repeated
from nearplane.system.memory import give_back_large
from nearplane.system.paths import RECORD
from nearplane.system.progress import Progress, silent
from nearplane.system.safetensors_files import INDEX
from nearplane.tuning.checkpoint import Checkpoint, norms_stored
from nearplane.verbs.verify_files import Fault, names, shard, sound_files
from nearplane.verbs.verify_losses import NAMED, losses_again, tuned_norms

MOST = 0.5  # share of tensors: where more are not those of the original, it is another model
TOLERANCE = 1e-6  # relative, of losses measured again; the same machine repeats them to the last digit
VERSIONS = {"written_by", "meta"}  # of quantization_config: which program wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What `verify` found.

    Args:
        record: of the checkpoint.
        faults: what does not hold; empty if everything does.
        files, layers: how many were checked.
        asked: whether the losses were to be measured again.
        measured: whether all of them were.
    """

    record: RunRecord
    faults: tuple[Fault, ...]
    files: int
    layers: int
    asked: bool
    measured: bool

    def summary(self) -> str:
        """Return one sentence."""
        checked = f"{self.files} files and {self.layers} layers checked"
        if self.measured:
            measured = "every loss measured again"
        elif self.asked:
            measured = "not every loss could be measured again, as the faults say"
        else:
            measured = "losses not measured: that takes --against and --calibration"
        return f"{checked}, {measured}: {len(self.faults) or 'no'} fault{'' if len(self.faults) == 1 else 's'}"


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
    record, faults = read_record(folder), list[Fault]()
    stored, measured = sound_files(folder, record, progress, faults), False
    if against is not None and stored is not None:
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
            recipe = with_text(recipe, calibration)
            there = Checkpoint(
                record=record, stored=stored, model=model, recipe=recipe, given=given, device=Device.named(device)
            )
            windows = _windows(there, faults)
            if windows is not None:
                with repeated(record.products, there.device):
                    measured = losses_again(there, windows, tolerance, progress, faults)
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
    for name in sorted((record.files.keys() & names(folder)) - ours):
        if shard(name):
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


def _windows(there: Checkpoint, faults: list[Fault]) -> Windows | None:
    """Return the windows of calibration, or None where they are not the record's; adds to `faults`.

    Raises:
        CalibrationError: they cannot be read.
    """
    record, model = there.record, there.model
    if tuple(model.skipped) != record.skipped:
        what = f"{len(record.skipped)} skipped layers, the model has {len(model.skipped)}, or others"
        faults.append(Fault(where=RECORD, what=what))
    try:
        windows = calibration_windows(model, there.recipe, there.given)
    except CalibrationError as error:
        raise CalibrationError(f"{error} (The text is the record's, if --calibration names no other.)") from error
    found = (windows.digest(), windows.seqlen, windows.count, windows.extra_count)
    if found != (record.text, record.seqlen, record.windows, record.extra_windows):
        where = str(there.recipe.calibration.calibration or "calibration")
        faults.append(Fault(where=where, what="its tokens are not those that the record was made with"))
        return None
    return windows
