"""tune(): a finished checkpoint with its steps, norms and codes trained on KL(original || quantized); a verb like export.

The solve looks at one layer after the other. Here all are looked at together, through the network's own predictions. What is
trained is in `tuning/parameters.py` and `tuning/ladders.py`; how, and the guard, in `tuning/loop.py`: windows held out decide what
is kept. Then the new folder is written as `quantize` writes one, read back, and every layer's certificate is measured again along
the tuned network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from nearplane.calibration.given import Given, with_text
from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.texts import DEFAULT_DATASET
from nearplane.calibration.walk import unquantized, walk
from nearplane.calibration.windows import Windows, calibration_windows, digest_of
from nearplane.errors import CalibrationError, FormatError
from nearplane.formats.container import Container, Place, written
from nearplane.formats.stored import Stored
from nearplane.formats.table import open_container
from nearplane.matrix.inputs import Inputs
from nearplane.matrix.measure_again import Known, measured_again
from nearplane.matrix.on_grid import with_tensors
from nearplane.matrix.to_rate import TOLERANCE
from nearplane.models.layers import Layer
from nearplane.models.model import Block
from nearplane.planning.plan import moments_of_embeddings
from nearplane.planning.record_size import most_bytes
from nearplane.planning.request import open_original, settled
from nearplane.record.record import LayerRecord, RunRecord, read_record, versions
from nearplane.record.tuning_record import APART, Solved, Tuning
from nearplane.system.device import Device
from nearplane.system.journal_pages import told
from nearplane.system.matmul_library import repeated
from nearplane.system.progress import Progress, counted, logged, silent
from nearplane.tuning.checkpoint import Checkpoint, mean_unit, norms_stored, trains_codes
from nearplane.tuning.checks import check_checkpoint, check_model, check_place, fits
from nearplane.tuning.ladders import TunedLadders
from nearplane.tuning.loop import Outcome, mean_kl, train
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.parameters import Tuned, TunedLayer, TunedVector
from nearplane.tuning.pressure import Pressure
from nearplane.tuning.settings import Split, split
from nearplane.tuning.snapshots import Snapshots


def tune(
    source: str | Path,
    out: str | Path,
    *,
    against: str | Path,
    calibration: str | Path | Sequence[str] | Tensor | None = None,
    samples: int | None = None,
    seqlen: int | None = None,
    steps: int | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> RunRecord:
    """Train steps, norms and, at 2 and 3 bits, codes of a quantized checkpoint on its divergence from the original.

    Nothing changes for readers: format, widths and groups stay. A fifth of the windows is held out; the state that is best on them
    is written, and that may be the start.

    Args:
        source: a folder that `quantize` wrote with bits, grid or rate; not with a size, nor with coded embeddings or head.
        out: folder to write.
        against: the original.
        calibration: the text that `source` was calibrated on, or what `quantize` was given; None: where its recipe says.
        samples: windows of it to take; None: five times those that the run was calibrated on, if the text has as many.
        seqlen: tokens of a window; None: as in the run.
        steps: of the optimizer; None: as many as take every window that is trained on once; of a text with fewer they are seen
            several times.
        device: where to compute, in float32.
        overwrite: replace what is in `out`, once the new checkpoint is whole.
        trust_remote_code: run model code that comes with the original.
        progress: wraps the iterators over steps and layers.

    A run that was stopped goes on behind the last step that was kept when the same is asked again: see `tuning/snapshots.py`.

    Returns:
        The record of the new checkpoint; `record.tuning` says what was gained.

    Raises:
        NearplaneError: of the kind that names the cause; before any work where the checkpoint, the text or `out` will not do.
    """
    began, folder, where, given = time.perf_counter(), Path(source), Device.named(device), Given.of(calibration)
    record = read_record(folder)
    check_checkpoint(folder, record)
    stored = Stored(folder)
    model = open_original(against, record.recipe, trust_remote_code=trust_remote_code)
    check_model(model, record, stored)
    place = Place(
        out=Path(out),
        source=model.folder,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        network=model.config.to_dict(),
        tokenizer=model.tokenizer_folder() if record.recipe.files.for_llama_cpp else None,
        resumes=True,
    )
    check_place(place.out, folder)
    container = open_container(place, stored.config, dtype=model.dtype, shards=len(model.blocks) + 1)
    recipe = with_text(settled(model, record.recipe), calibration)
    solved = Checkpoint(record=record, stored=stored, model=model, recipe=recipe, given=given, device=where)
    windows = _windows_of_the_run(solved)
    cut = split(solved.windows, record, samples=samples, seqlen=seqlen, steps=steps)
    trained = sum(layer.out_features * layer.in_features for layer in solved.of_blocks() if trains_codes(layer))
    hold = fits(model, cut, trained, where)
    matrices = solved.matrices(codes=True)
    with container, repeated(record.products, where) as products:
        asked = {"recipe": asdict(record.recipe), "--samples": cut.samples, "--steps": cut.schedule.steps}
        files, text = {"original": model.folder, "checkpoint": folder}, digest_of(cut.windows)
        kept = Snapshots(container, told(asked, files, text, versions(), where), began)
        if container.whole:  # but for its place
            return read_record(container.folder)
        tuning, layers = _tuned(solved, matrices, cut, container, hold=hold, kept=kept, progress=progress)
        read = Stored(container.folder, unfinished=container.config)
        model.tuned = {
            name: read.reader.read([file])[file] for name, file in norms_stored(model).items() if file in tuning.norms
        }
        made = replace(solved, record=replace(record, layers=layers), stored=read)
        record = replace(record, layers=_measured(made, windows, progress), tuning=tuning)
        record = replace(record, versions=versions(), device=str(where), products=products)
        record = container.seal(record, lambda told: _timed(told, tuning, kept.seconds))
    return record


def _timed(record: RunRecord, tuning: Tuning, seconds: float) -> RunRecord:
    """Return the record of a tuned checkpoint with what tuning took, beside what the solve did."""
    return replace(record, tuning=replace(tuning, seconds=seconds), seconds=record.seconds + seconds)


def _windows_of_the_run(solved: Checkpoint) -> Windows:
    """Return the windows that losses were and will be measured on.

    Raises:
        CalibrationError: they are not those of the record.
    """
    record, recipe = solved.record, solved.recipe
    windows = calibration_windows(solved.model, recipe, solved.given)
    if windows.digest() != record.text:
        raise CalibrationError(
            f"{recipe.calibration.calibration}: its first tokens are not those that the checkpoint was calibrated on. Losses are "
            f"measured again on these: pass the same text with --calibration; tuning goes on where they end."
        )
    return windows


def _tuned(
    solved: Checkpoint,
    matrices: Mapping[str, TunedLayer],
    cut: Split,
    container: Container,
    *,
    hold: bool,
    kept: Snapshots,
    progress: Progress,
) -> tuple[Tuning, tuple[LayerRecord, ...]]:
    """Train, write blocks, read them back; the layers' records say what their tensors are now."""
    model, stored, record = solved.model, solved.stored, solved.record
    vectors, norms = solved.vectors(mean_unit(matrices.values())), norms_stored(model)
    coded = {name: each for name, each in matrices.items() if isinstance(each, TunedLadders)}
    most = _most(record) if coded else None
    network = TunedNetwork(
        model,
        matrices,
        vectors,
        cut.windows,
        batch=cut.batch,
        device=solved.device.place,
        ends=solved.ends(),
        hold=hold,
    )
    training, held = cut.batches()
    with network.ready():
        outcome = train(
            network,
            [*matrices.values(), *vectors.values()],
            cut.schedule,
            training=training,
            held=held,
            pressed=lambda kl: None if most is None else Pressure(coded, most, stored.layers, kl),
            kept=kept,
            progress=lambda items, total, there: progress(logged(items, "tuning", total, there=there), "tuning", total),
        )
        tuned: list[Tuned] = [*matrices.values(), *vectors.values()]
        kinds = {kind for each in tuned for kind in each.trained()}
        tuning = Tuning(
            calibration=str(solved.recipe.calibration.calibration or DEFAULT_DATASET),
            samples=cut.samples,
            windows=cut.training,
            held_windows=cut.held,
            found=cut.found,
            seqlen=cut.windows.shape[1],
            text=digest_of(cut.windows),
            steps=outcome.steps,
            batch=cut.batch,
            rates={kind: rate for kind, rate in cut.schedule.rates.items() if kind in kinds},
            codes=0,
            curve=outcome.curve,
            kept=outcome.kept,
            held_out=outcome.curve[-1].held_out,
            most=most,
            norms=dict.fromkeys(norms.values(), 64 * "0"),
            solved=tuple(_solved(layer) for layer in record.layers),
        )
        container.room = most_bytes(replace(record, tuning=tuning))
        layers = _write(solved, container, matrices, {norms[name]: each for name, each in vectors.items()})
        read = Stored(container.folder, unfinished=container.config)
        moved = 0
        for layer in solved.of_blocks():
            there = read.matrix(layer.stored, read.tensors(layer.stored))
            if trains_codes(layer):
                before = stored.matrix(layer.stored, stored.tensors(layer.stored))
                moved += int((there.codes != before.codes).sum())
            matrices[layer.name].load(there)
        for name, file in norms.items():
            vectors[name].load(read.reader.read([file])[file])
        by_files = mean_kl(network, held)
    _agree(outcome, by_files)
    changed = {}
    for name, file in norms.items():
        tensor = vectors[name].tensor().cpu()
        if not torch.equal(tensor, stored.reader.read([file])[file]):
            changed[file] = written({file: tensor}).checksum
    tuning = replace(tuning, codes=moved, held_out=by_files, norms=changed)
    return tuning, layers


def _most(record: RunRecord) -> int:
    """Return the bytes that entropy-coded layers may take: what was asked for, as nearly as the solve does, or what there are."""
    there = sum(layer.bytes for layer in record.layers)
    asked = [
        None if layer.asked is None else layer.asked * layer.out_features * layer.in_features / 8
        for layer in record.layers
    ]
    wanted = [each for each in asked if each is not None]
    return there if len(wanted) < len(asked) else max(there, math.floor((1 + TOLERANCE) * sum(wanted)))


def _write(
    solved: Checkpoint,
    container: Container,
    matrices: Mapping[str, TunedLayer],
    vectors: Mapping[str, TunedVector],
) -> tuple[LayerRecord, ...]:
    """Write the blocks of the new checkpoint, norms by the names of their tensors; return the layers' records, losses as told."""
    model, read = solved.model, solved.stored.reader.read
    told, there = {layer.name: layer for layer in solved.record.layers}, set(solved.stored.reader.names())
    layers: list[LayerRecord] = []

    def rest(names: Sequence[str]) -> dict[str, Tensor]:
        own = {name: vectors[name].tensor().cpu() for name in names if name in vectors}
        return read([name for name in names if name not in own and holds(name)]) | own

    def holds(name: str) -> bool:
        """Whether the files hold a tensor of the original; GGUF drop what llama.cpp has no use for."""
        return name in there or solved.stored.reader.kept(name, model.reader.read([name])[name]) is not None

    def add(part: Block | None) -> None:
        for layer in () if part is None else part.layers:
            stored, trained = told[layer.name].stored, matrices.get(layer.name)
            read = solved.stored
            matrix = read.matrix(stored, read.tensors(stored)) if trained is None else trained.matrix()
            tensors = container.add(stored, matrix)
            layers.append(with_tensors(told[layer.name], stored, tensors.bytes, tensors.checksum))

    add(model.embeddings)
    for index, block in enumerate(model.blocks):
        add(block)
        container.close_block(rest(unquantized(model, model.block_names(index))))
    add(model.head)
    container.close_block(rest(unquantized(model, model.rest())))
    return tuple(layers)


def _agree(outcome: Outcome, by_files: float) -> None:
    """Refuse files that do not hold what was trained.

    Raises:
        FormatError: their KL on the held-out windows is another.
    """
    kept = next(point.held_out for point in outcome.curve if point.step == outcome.kept)
    if not math.isclose(kept, by_files, rel_tol=APART, abs_tol=1e-12):
        raise FormatError(
            f"What was written has a KL of {by_files:.9g} on the held-out windows, what was trained {kept:.9g}: the files "
            f"do not hold it. Report this."
        )


def _solved(layer: LayerRecord) -> Solved:
    return Solved(
        name=layer.name,
        loss=layer.loss,
        relative_loss=layer.relative_loss,
        extra_relative_loss=layer.extra_relative_loss,
        checksum=layer.checksum,
    )


def _measured(made: Checkpoint, windows: Windows, progress: Progress) -> tuple[LayerRecord, ...]:
    """Walk through the tuned network; return every layer's certificate along it."""
    told, recipe = {layer.name: layer for layer in made.record.layers}, made.recipe
    moments = moments_of_embeddings(made.model, recipe.scheme, windows.fitted, made.device)
    setting = MemorySetting.usual(windows.seqlen, made.device, made.record.batch)
    layers: list[LayerRecord] = []
    with (
        walk(made.model, recipe, windows, device=made.device, setting=setting, moments=moments) as stages,
        counted(progress, "measuring", len(told)) as count,
    ):
        for stage in stages:
            there = zip(stage.layers, stage.inputs, strict=True)
            measured = [_certified(made, layer, inputs, told[layer.name]) for layer, inputs in there]
            stage.write(values for values, _ in measured)
            layers += [record for _, record in measured]
            count(len(measured))
            del measured
    return tuple(layers)


def _certified(made: Checkpoint, layer: Layer, inputs: Inputs, old: LayerRecord) -> tuple[Tensor, LayerRecord]:
    """Return the values of a tuned layer as the files hold them, and its certificate."""
    matrix = made.stored.matrix(old.stored, made.stored.tensors(old.stored))
    old = replace(old, base=matrix.grid.base)  # no sweep with another made these codes
    known = Known(matrix=matrix, told=old, tuned=True)
    new = measured_again(layer.name, layer.read(), inputs.used_once(), made.recipe.scheme_of(layer.name), known)
    new = with_tensors(new, old.stored, old.bytes, old.checksum)
    return matrix.decode(), replace(new, asked=old.asked, seconds=old.seconds)
