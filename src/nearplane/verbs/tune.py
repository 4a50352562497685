"""tune(): trains steps, norms and codes of a finished checkpoint on KL(original || quantized), and writes a new one.

`quantize` solves one layer after the other; tuning improves all of them together, through the predictions of the network.
`tuning/parameters.py` holds the trained parameters, `tuning/loop.py` the training and the choice of the best state on held-out
windows. The new folder is written as by `quantize`, read back, and the certificates of all layers are measured again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearplane.calibration.given import Given
from nearplane.calibration.hub_texts import DEFAULT_DATASET
from nearplane.calibration.walk import Stage
from nearplane.calibration.windows import Windows, calibration_windows, digest_of
from nearplane.errors import CalibrationError, FormatError, RecipeError, first_few
from nearplane.formats.compressed_tensors.fp4_packed import apart
from nearplane.formats.container import Container, written
from nearplane.formats.find_record import sound_record
from nearplane.formats.journal_pages import run_inputs
from nearplane.formats.stored import CPU, Stored
from nearplane.matrix.certificate import SolvedMatrix
from nearplane.matrix.to_rate import TOLERANCE
from nearplane.models.model import Block
from nearplane.models.two_tokenizers import check_same_tokens
from nearplane.planning.folder_size import max_record_bytes
from nearplane.planning.request import open_recorded, recorded
from nearplane.planning.run import container_for
from nearplane.planning.tokens_in_file import check_tokens_in_file
from nearplane.planning.tuning_cost import tuning_cost
from nearplane.record.record import LayerRecord, RunRecord, versions
from nearplane.record.tuning_record import Solved, Tuning
from nearplane.system.arguments import takes
from nearplane.system.device import Device
from nearplane.system.matmul_library import recorded_library
from nearplane.system.memory import release_all
from nearplane.system.progress import Progress
from nearplane.tuning.checkpoint import (
    Checkpoint,
    check_model,
    norms_stored,
    samples_to_tune_on,
)
from nearplane.tuning.loop import Outcome, TrainingJournal, train
from nearplane.tuning.memory import Room, bytes_of, fits, trains_codes
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.parameters import Pressure, Tuned, TunedLadders, TunedLayer, TunedVector
from nearplane.tuning.schedule import FixedSteps, OpenEnded, Schedule
from nearplane.tuning.settings import Split, split
from nearplane.verbs.checkpoint_requests import TuneRequest
from nearplane.verbs.verify_losses import along_both_networks, remeasured, setting_of, tuned_norms

log = logging.getLogger("nearplane")


@takes(TuneRequest)
def tune(request: TuneRequest) -> RunRecord:
    """Train steps, norms and codes (of 2 or 3 bits, 4-bit floats, or entropy-coded) of a checkpoint on its divergence.

    The divergence is that from the original's predictions; where runtimes round inputs, they are rounded in training, too.
    Format, widths and groups stay the same, so nothing changes for readers. A fifth of the windows is held out; the state
    that is best on them is written, which may be the initial one.

    If the same call is repeated after it was stopped, it resumes at the last saved step, see `tuning/loop.py`.

    Returns:
        The run record of the new checkpoint; `record.tuning` describes the gain.

    Raises:
        NearplaneError: A subclass names the cause. Unsuitable checkpoints, texts and folders are refused before any work.
    """
    record = request.check()
    against, calibration, trust = request.against, request.calibration, request.trust_remote_code
    began, folder, given = time.perf_counter(), Path(request.source), Given.of(calibration)
    where = Device.named(request.device, request.compute_dtype)
    where.check_limit(request.device_memory)
    sound_record(folder)
    stored = Stored(folder)
    model = open_recorded(against, record, trust_remote_code=trust)
    check_model(model, record, stored)
    check_same_tokens({str(request.source): folder, str(against): model.folder}, trust_remote_code=trust)
    plan = recorded(record, calibration)
    container = container_for(
        model, plan, Path(request.out), stored.config, overwrite=request.overwrite, trust_remote_code=trust
    )
    solved = Checkpoint(record=record, stored=stored, model=model, plan=plan, given=given, device=where)
    _refuse_unlike(solved)
    windows = _windows_of_the_run(solved, request.progress)
    check_tokens_in_file(container, model, windows)
    samples = request.samples or samples_to_tune_on(model, record, request.seqlen)
    schedule = _schedule(request, solved, samples)
    cut = split(solved.windows, record, samples=samples, seqlen=request.seqlen, schedule=schedule)
    setting = replace(setting_of(solved, windows, request.limits()), folder=container.folder)
    shapes = ((layer, (layer.out_features, layer.in_features)) for layer in solved.of_blocks())
    room = fits(
        model, cut, bytes_of(shapes, returns=isinstance(schedule, OpenEnded)), where, request.limits(), container.folder
    )
    matrices = solved.matrices(codes=True)
    with container, recorded_library(record.products, where) as products:
        steps = {"--steps": cut.schedule.steps, "--budget": request.budget}
        settings = {"recipe": asdict(record.recipe), "--samples": cut.samples, **steps}
        files, text = {"original": model.folder, "checkpoint": folder}, digest_of(cut.windows)
        kept = TrainingJournal(container, run_inputs(settings, files, text, versions(), where), began)
        if (sealed := kept.completed()) is not None:  # all layers were written
            return sealed
        trained = Trained(solved, cut, matrices, solved.vectors(matrices))
        tuning, layers = _tuned(trained, container, room, kept=kept, progress=request.progress)
        del matrices, trained  # what follows takes as much memory
        release_all()
        read = Stored(container.folder, unfinished=container.config)
        model.tuned = tuned_norms(read, model, tuning)
        retuned = replace(solved, record=replace(record, layers=layers, tuning=tuning), stored=read)
        along = along_both_networks(retuned, windows, request.progress, partial(_certified, retuned), setting)
        record = replace(
            record,
            layers=tuple(along.layers),
            extra_kl=along.divergence,
            tuning=tuning,
            versions=versions(),
            products=products,
        )
        return kept.seal(replace(record, device=where.model(), compute_dtype=where.recorded_dtype(model.dtype)))


def _schedule(request: TuneRequest, solved: Checkpoint, samples: int) -> Schedule | None:
    """Return the steps that were asked for; None: those that follow from the text.

    Raises:
        RecipeError: The budget is too small.
    """
    if request.steps is not None:
        return FixedSteps(request.steps)
    if request.budget is None:
        return None
    seqlen = request.seqlen or solved.record.seqlen
    cost = tuning_cost(solved.model, solved.plan, solved.record, solved.device, samples=samples, seqlen=seqlen)
    if (schedule := cost.schedule(request.budget)) is None:
        raise RecipeError(
            f"--budget {request.budget:g} is too small: {cost.least()}. Use --budget {cost.enough:g}, or --steps."
        )
    log.info("training takes at most %d steps", schedule.steps)
    return schedule


def _windows_of_the_run(solved: Checkpoint, progress: Progress) -> Windows:
    """Return the calibration windows, on which losses were measured and will be measured again.

    Raises:
        CalibrationError: The windows are not those of the record.
    """
    record, recipe = solved.record, solved.plan.recipe
    windows = calibration_windows(solved.model, recipe, solved.given, solved.device, progress)
    if windows.digest() != record.text:
        raise CalibrationError(
            f"{recipe.calibration.calibration}: its first tokens are not those on which the checkpoint was calibrated. Losses are "
            f"measured on them again. Pass the same text with --calibration; tuning uses more of it."
        )
    return windows


def _refuse_unlike(solved: Checkpoint) -> None:
    """Refuse a checkpoint in which layers that runtimes join have several global scales of their inputs.

    Raises:
        FormatError: They have.
    """
    scales, folder = solved.input_scales(), solved.stored.reader.folder
    for name, first in apart(scales):
        raise FormatError(
            f"{folder}: the global scale of the inputs of {name} is {scales[name]:g}, but {scales[first]:g} of {first}, and "
            f"runtimes take one for both. Quantize again."
        )


class Trained(NamedTuple):
    """Trained parameters of a checkpoint.

    Args:
        solved: The checkpoint.
        cut: Windows for training and held-out windows.
        matrices: Layers of the blocks, by name.
        vectors: Norms, by name of the parameter.
    """

    solved: Checkpoint
    cut: Split
    matrices: Mapping[str, TunedLayer]
    vectors: Mapping[str, TunedVector]

    @property
    def parts(self) -> list[Tuned]:
        """All trained parameters."""
        return [*self.matrices.values(), *self.vectors.values()]


def _tuned(
    trained: Trained, container: Container, room: Room, *, kept: TrainingJournal, progress: Progress
) -> tuple[Tuning, tuple[LayerRecord, ...]]:
    """Train, write the blocks and read them back; return the record of tuning and those of the layers."""
    solved, cut, matrices, vectors = trained
    coded = {name: each for name, each in matrices.items() if isinstance(each, TunedLadders)}
    most = _byte_limit(solved.record) if coded else None
    network = TunedNetwork(
        solved.model, matrices, vectors, cut, ends=solved.ends(), inputs=solved.inputs(), **room._asdict()
    )
    with network.ready():
        outcome = train(
            network,
            trained.parts,
            cut,
            pressed=lambda kl: None if most is None else Pressure(coded, most, solved.stored.layers, kl),
            kept=kept,
            progress=progress,
        )
    del network  # the head, which is read once more for the files
    tuning = _tuning_record(trained, outcome, most)
    container.room = max_record_bytes(replace(solved.record, tuning=tuning))
    layers = _write(trained, container)
    moved = _read_back(trained, Stored(container.folder, unfinished=container.config))
    changed = {}
    for name, file in norms_stored(solved.model).items():
        tensor = vectors[name].tensor().cpu()
        if not torch.equal(tensor, solved.stored.reader.read([file])[file]):
            changed[file] = written({file: tensor}).checksum
    return replace(tuning, codes=moved, norms=changed), layers


def _tuning_record(trained: Trained, outcome: Outcome, most: int | None) -> Tuning:
    """Return the record of tuning at its greatest length, with all norms changed."""
    solved, cut, *_ = trained
    kinds = {kind for each in trained.parts for kind in each.trained()}
    before = [{each.name: getattr(layer, each.name) for each in fields(Solved)} for layer in solved.record.layers]
    return Tuning(
        calibration=str(solved.plan.recipe.calibration.calibration or DEFAULT_DATASET),
        samples=cut.samples,
        windows=cut.training,
        held_windows=cut.held,
        found=cut.found,
        seqlen=cut.windows.shape[1],
        text=digest_of(cut.windows),
        steps=outcome.steps,
        batch=cut.batch,
        rates={kind: rate for kind, rate in cut.rates.items() if kind in kinds},
        codes=0,
        curve=outcome.curve,
        kept=outcome.kept,
        held_out=next(point.held_out for point in outcome.curve if point.step == outcome.kept),
        most=most,
        norms=dict.fromkeys(norms_stored(solved.model).values(), 64 * "0"),
        solved=tuple(Solved(**each) for each in before),
    )


def _read_back(trained: Trained, read: Stored) -> int:
    """Compare the written layers and norms with the trained state; return the number of codes that differ from the solve.

    Raises:
        FormatError: The files hold something else.
    """
    solved, moved, unlike = trained.solved, 0, list[str]()
    for layer in solved.of_blocks():
        matrix = read.matrix(layer.stored, read.tensors(layer.stored))
        if not matrix.same_as(trained.matrices[layer.name].matrix().to(CPU)):
            unlike.append(layer.name)
        if trains_codes(layer):
            before = solved.stored.matrix(layer.stored, solved.stored.tensors(layer.stored))
            moved += int((matrix.codes != before.codes).sum())
    for name, file in norms_stored(solved.model).items():
        if not torch.equal(read.reader.read([file])[file], trained.vectors[name].tensor().cpu()):
            unlike.append(name)
    if unlike:
        raise FormatError(
            f"{first_few(unlike)}: the written files hold something else than was trained. This is a fault of nearplane: "
            f"please report it."
        )
    return moved


def _byte_limit(record: RunRecord) -> int:
    """Return the byte limit of the entropy-coded layers: the requested rate with its tolerance, or their size if larger."""
    used = sum(layer.bytes for layer in record.layers)
    if any(layer.asked is None for layer in record.layers):
        return used
    asked = sum((layer.asked or 0.0) * layer.out_features * layer.in_features / 8 for layer in record.layers)
    return max(used, math.floor((1 + TOLERANCE) * asked))


def _write(trained: Trained, container: Container) -> tuple[LayerRecord, ...]:
    """Write the blocks of the new checkpoint; return the records of the layers, with their old losses."""
    solved, _, matrices, vectors = trained
    model, files, read = solved.model, solved.stored, solved.stored.reader.read
    norms = {file: vectors[name] for name, file in norms_stored(model).items()}
    recorded, stored_names = {layer.name: layer for layer in solved.record.layers}, set(files.reader.names())
    layers, scales = list[LayerRecord](), solved.input_scales()

    def unquantized(names: Sequence[str]) -> dict[str, Tensor]:
        trained_norms = {name: norms[name].tensor().cpu() for name in names if name in norms}
        return read([name for name in names if name not in trained_norms and is_stored(name)]) | trained_norms

    def is_stored(name: str) -> bool:
        """Return whether the files hold a tensor of the original; a GGUF has none that llama.cpp does not use."""
        return name in stored_names or files.reader.kept(name, model.reader.read([name])[name]) is not None

    def add(part: Block | None) -> None:
        for layer in () if part is None else part.layers:
            stored, tuned = recorded[layer.name].stored, matrices.get(layer.name)
            matrix = files.matrix(stored, files.tensors(stored)) if tuned is None else tuned.matrix()
            tensors = container.add(stored, matrix, input_scale=scales.get(layer.name))
            layers.append(replace(recorded[layer.name], stored=stored, bytes=tensors.bytes, checksum=tensors.checksum))

    add(model.embeddings)
    for index, block in enumerate(model.blocks):
        add(block)
        container.close_block(unquantized(model.unquantized(index)))
    add(model.head)
    container.close_block(unquantized(model.unquantized()))
    return tuple(layers)


def _certified(retuned: Checkpoint, stage: Stage, number: int, old: LayerRecord) -> tuple[Tensor, LayerRecord]:
    """Return the values of a tuned layer from its files, and its certificate."""
    matrix = retuned.stored.matrix(old.stored, retuned.stored.tensors(old.stored))
    known = SolvedMatrix(matrix=matrix, base=matrix.grid.base, tuned=True)  # tuned codes have no other base of a sweep
    new, _ = remeasured(stage, number, retuned.plan.layers[stage.layers[number].name].scheme, known)
    kept = {name: getattr(old, name) for name in ("stored", "bytes", "checksum", "asked", "seconds")}
    return matrix.decode(), replace(new, **kept)
