"""verify(): checks a checkpoint against its run record, from its files alone or with the original model and text.

With the original, the main path runs again without the solver: both streams pass through the network, the codes of each
layer come from the files, and its certificate is measured again and compared with the record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nearplane.calibration.folding import changing
from nearplane.calibration.given import Given
from nearplane.calibration.windows import Windows, calibration_windows
from nearplane.errors import CalibrationError, FormatError, ModelError, RecipeError
from nearplane.formats.beside import Beside
from nearplane.formats.layer_format import (
    NO_FILE,
    QUANTIZATION,
    WEIGHTS,
    config_text,
    read_config,
    rope_for_mlx,
)
from nearplane.formats.stored import Stored
from nearplane.models.model import Model
from nearplane.models.pretrained import TOKENIZER
from nearplane.models.two_tokenizers import check_same_tokens
from nearplane.planning.request import open_recorded, quantization_config, recorded
from nearplane.planning.run import bytes_of_tensors
from nearplane.recipe.layer_plan import Plan
from nearplane.record.record import RunRecord, Source
from nearplane.record.tuning_record import Tuning
from nearplane.system.arguments import takes
from nearplane.system.device import Device, without_number
from nearplane.system.files import sha256
from nearplane.system.matmul_library import recorded_library
from nearplane.system.memory import return_large_blocks
from nearplane.system.paths import CONFIG, GPTQ_CONFIG, INDEX, RECORD, TIED
from nearplane.system.progress import Progress
from nearplane.system.ranks import Ranks
from nearplane.tuning.checkpoint import Checkpoint, norms_stored
from nearplane.verbs.checkpoint_requests import VerifyRequest
from nearplane.verbs.follow import Follower, on_all_ranks, run_on_rank_0
from nearplane.verbs.verify_files import Fault, names, shard, sound_files
from nearplane.verbs.verify_losses import MAX_NAMED, Agreement, losses_again, tuned_norms

MAX_CHANGED_SHARE = 0.5  # of the tensors; if more differ from the original, it is another model
QUANTIZATIONS = ("quantization_config", QUANTIZATION)  # entries of config.json
VERSIONS = {"written_by", "meta"}  # entries of quantization_config that name the program which wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of `verify`.

    Args:
        record: The run record of the checkpoint.
        faults: All faults; empty if the checkpoint is sound.
        files, layers: Numbers of checked files and layers.
        asked: Whether the losses were to be measured again.
        measured: Whether all losses were measured again.
        agreement: How closely the losses were to agree.
    """

    record: RunRecord
    faults: tuple[Fault, ...]
    files: int
    layers: int
    asked: bool
    measured: bool
    agreement: Agreement

    def summary(self) -> str:
        """Return the result in one sentence."""
        checked = f"{self.files} files and {self.layers} layers checked"
        if self.measured:
            measured = "every loss was measured again"
        elif self.asked:
            measured = "some losses could not be measured again"
        else:
            measured = "losses were not measured (this needs --against)"
        faults = f"{len(self.faults) or 'no'} fault{'' if len(self.faults) == 1 else 's'}"
        return f"{checked}: {faults}; {measured}{self.agreement}"


@takes(VerifyRequest)
def verify(request: VerifyRequest) -> Verified:
    """Check a checkpoint against its run record.

    Raises:
        NearplaneError: There is no run record, or the original or the text cannot be read.
    """
    with on_all_ranks() as ranks:
        record = request.check()
        measured_on = _device(record, request.device, ranks)
        trust = request.trust_remote_code
        opened = partial(open_recorded, str(request.against), record, trust_remote_code=trust)
        verified = partial(_verified, record, request, measured_on)
        return run_on_rank_0(verified, Follower(opened, measured_on), {"record": record.text})


def _verified(record: RunRecord, request: VerifyRequest, where: Device) -> Verified:
    """Check a checkpoint on a device; see `verify`."""
    folder, against, trust_remote_code = Path(request.out), request.against, request.trust_remote_code
    progress = request.progress
    given, faults = Given.of(request.calibration), list[Fault]()
    stored, measured = sound_files(folder, record, progress, faults), False
    agreement = Agreement()
    if against is not None and stored is not None:
        return_large_blocks()
        model = open_recorded(against, record, trust_remote_code=trust_remote_code)
        agreement = Agreement.on(where, record, model.dtype, request.tolerance)
        differing, same = _unlike(folder, record, stored, model)
        faults += differing
        if same:
            model.tuned = tuned_norms(stored, model, record.tuning)
            plan = recorded(record, request.calibration)
            faults += _beside(folder, record, plan, model)
            if record.original_bytes not in (0, size := bytes_of_tensors(model)):
                what = f"the original's tensors have {size:,} bytes, the record has {record.original_bytes:,}"
                faults.append(Fault(RECORD, what))
            try:
                folders = {str(folder): folder, str(against): model.folder}
                check_same_tokens(folders, trust_remote_code=trust_remote_code)
            except ModelError as error:
                faults.append(Fault(TOKENIZER, str(error)))
            saved = Checkpoint(record=record, stored=stored, model=model, plan=plan, given=given, device=where)
            windows = _windows(saved, faults, progress)
            if windows is not None:
                with recorded_library(record.products, saved.device):
                    for norm in changing(model, windows, saved.device) if record.folds else ():
                        faults.append(Fault(norm, "the scales that the record folds from it change the network"))
                    measured = losses_again(saved, windows, agreement, progress, faults)
    return Verified(
        record=record,
        faults=tuple(faults),
        files=len(record.files) + 1,
        layers=len(record.layers),
        asked=against is not None,
        measured=measured,
        agreement=agreement,
    )


def _device(record: RunRecord, asked: str, ranks: Ranks) -> Device:
    """Return the device to measure on, in the dtype of the run; auto: one like that of the run, if there is one.

    Raises:
        RecipeError: This machine does not have the device that was asked for.
    """
    ran_on = without_number(record.device).partition(",")[0]
    dtype = "float32" if record.compute_dtype == "auto" and ran_on == "cpu" else record.compute_dtype
    if asked == "auto":
        with suppress(RecipeError):
            return Device.named(ran_on, dtype, ranks=ranks)
    return Device.named(asked, dtype, ranks=ranks)


def _unlike(folder: Path, record: RunRecord, stored: Stored, model: Model) -> tuple[list[Fault], bool]:
    """Compare unquantized tensors with the original; return the faults, and whether it is the original model at all."""
    if (other := _another(record, model)) is not None:
        return [other], False
    untouched, compared = _untouched(stored, model, record.tuning)
    if len(untouched) <= MAX_CHANGED_SHARE * compared or len(untouched) <= MAX_NAMED:
        return untouched, True
    what = f"another model: {len(untouched)} of the {compared} tensors that are not quantized differ in {folder}"
    return [Fault(str(model.folder), what)], False


def _another(record: RunRecord, model: Model) -> Fault | None:
    """Return a fault if the original has other layers than the record, else None."""
    shapes = {layer.name: layer.shape for layer in model.layers}
    recorded_shapes = {layer.name: (layer.out_features, layer.in_features) for layer in record.layers}
    if shapes == recorded_shapes:
        return None
    unlike = [name for name in sorted({*shapes, *recorded_shapes}) if shapes.get(name) != recorded_shapes.get(name)]
    named = ", ".join(
        f"{name} ({_size(shapes.get(name))}, the record has {_size(recorded_shapes.get(name))})" for name in unlike[:3]
    )
    return Fault(str(model.folder), f"another model: {len(unlike)} layers differ, for example {named}")


def _size(shape: tuple[int, int] | None) -> str:
    return "none" if shape is None else f"{shape[0]} x {shape[1]}"


def _untouched(stored: Stored, model: Model, tuning: Tuning | None) -> tuple[list[Fault], int]:
    """Compare unquantized tensors with the original, tuned norms only by name; return faults and number of tensors."""
    faults: list[Fault] = []
    recorded = set() if tuning is None else set(tuning.norms)
    tuned = recorded & set(norms_stored(model).values())
    for name in sorted(recorded - tuned):
        faults.append(Fault(name, "the record lists this norm as tuned, but the original has no such norm"))
    blocks = (model.block_names(index) for index in range(len(model.blocks)))
    expected = {name for names in (*blocks, model.rest()) for name in names} - model.quantized_names
    for name in sorted(expected - set(stored.rest())):
        if stored.reader.kept(name, model.reader.read([name])[name]) is None:
            continue  # files of this format leave it out
        faults.append(Fault(name, "this unquantized tensor of the original is missing"))
    for name in stored.rest():
        if name not in expected:
            faults.append(Fault(name, "the original does not have this tensor, or it is quantized"))
            continue
        try:
            here = stored.reader.read([name])[name]
            there = stored.reader.kept(name, model.reader.read([name])[name])
        except (FormatError, ModelError) as error:
            faults.append(Fault(name, str(error)))
            continue
        if (
            there is None
            or here.dtype != there.dtype
            or here.shape != there.shape
            or not (
                name in tuned or torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8))
            )
        ):
            faults.append(Fault(name, "this unquantized tensor differs from the original"))
    return faults, len(expected)


def _beside(folder: Path, record: RunRecord, plan: Plan, model: Model) -> Iterator[Fault]:
    """Compare the other files with the original: config.json without its quantization, tokenizer, templates."""
    run_files = {RECORD, INDEX, CONFIG, GPTQ_CONFIG}
    for name in sorted((record.files.keys() & names(folder)) - run_files):
        if shard(name):
            continue
        original = model.folder / name  # with files that older versions copied, and code that was trusted
        if not original.is_file() or sha256(folder / name) != sha256(original):
            what = "differs from the original file" if original.is_file() else "the original has no such file"
            yield Fault(name, what)
    for name in Beside(source=model.folder, vocabulary=model.vocabulary).names():  # code need not be copied
        if name not in record.files:
            yield Fault(name, "the original has this file, but the record does not")
    expected = quantization_config(model, plan)
    config_json = read_config(folder)
    original_json = json.loads(config_text(model.folder, expected, model.config.to_dict()))
    config_json.setdefault(TIED, original_json.get(TIED))  # older versions left it out where the original did
    # the fields stay where weights for MLX are exported to others
    config_json = rope_for_mlx(config_json) | config_json
    original_json = rope_for_mlx(original_json) | original_json
    if unlike := sorted(
        key
        for key in (config_json.keys() | original_json.keys()) - {*QUANTIZATIONS, WEIGHTS}
        if config_json.get(key) != original_json.get(key)
    ):
        yield Fault(CONFIG, f"these entries differ from the original: {', '.join(unlike)}")
    file = str(config_json.get(WEIGHTS) or NO_FILE)
    if not file.startswith(NO_FILE) or os.path.exists(folder / file):  # of any length, unlike Path.exists
        yield Fault(CONFIG, f"{WEIGHTS} names a file, which nearplane never writes")
    for entry in QUANTIZATIONS:
        config, expected = config_json.get(entry, {}), original_json.get(entry, {})
        for key in sorted((config.keys() | expected.keys()) - VERSIONS):
            if _unordered(config.get(key)) != _unordered(expected.get(key)):
                yield Fault(CONFIG, f"{key} in {entry} differs from the recipe for this model")


def _unordered(value: Any) -> Any:
    """Return JSON with its lists sorted, for comparisons that ignore order."""
    if isinstance(value, dict):
        return {key: _unordered(part) for key, part in value.items()}
    return sorted((_unordered(part) for part in value), key=str) if isinstance(value, list) else value


def _windows(saved: Checkpoint, faults: list[Fault], progress: Progress) -> Windows | None:
    """Return the calibration windows, or None if they are not those of the record; adds to `faults`.

    Raises:
        CalibrationError: The text cannot be read.
    """
    record, model = saved.record, saved.model
    if tuple(model.skipped) != tuple(entry for entry in record.skipped if entry[0] not in model.ignored):  # by --like
        what = f"it lists {len(record.skipped)} skipped layers; the model has {len(model.skipped)}, or others"
        faults.append(Fault(RECORD, what))
    try:
        windows = calibration_windows(model, saved.plan.recipe, saved.given, saved.device, progress)
    except CalibrationError as error:
        raise CalibrationError(f"{error} (Without --calibration, the text is that of the record.)") from error
    figures = (windows.digest(), windows.seqlen, windows.count, windows.extra_count, _shares(windows.sources))
    if figures != (record.text, record.seqlen, record.windows, record.extra_windows, _shares(record.sources)):
        where = str(saved.plan.recipe.calibration.calibration or "calibration")
        faults.append(Fault(where, "its tokens differ from those of the record"))
        return None
    return windows


def _shares(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Return the numbers of windows of the texts of a mix, whose files may have other names now."""
    return [(each.windows, each.extra_windows) for each in sources]
