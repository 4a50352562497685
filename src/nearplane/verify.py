"""verify(): does a checkpoint hold what its record says? From the files alone, and from the original and its text all over again.

With the original the main path runs once more, but for the solver: both streams pass through the network, each layer's codes are
those of the files, and its certificate is measured anew. Nothing is trusted but the record's numbers, which are what is compared.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from nearplane.certificate import measure
from nearplane.errors import FormatError, ModelError, NumericalError, RecipeError
from nearplane.formats.beside import CONFIG, GPTQ_CONFIG, names_copied
from nearplane.formats.folder import FORMATS, Stored, json_text, written
from nearplane.inputs import corrected
from nearplane.lattice.grid import ProductGrid, QuantizedMatrix
from nearplane.models.stream import Model, device_of, open_model
from nearplane.plan import Plan, Progress, look
from nearplane.quantize import (
    calibration_windows,
    digest_of_tokens,
    parts,
    profiles_of,
    quantization_config,
    shared_inputs,
    silent,
)
from nearplane.recipe import Device, Recipe
from nearplane.record import NAME, LayerRecord, RunRecord, digest_of, read_record
from nearplane.shards import INDEX, sha256

TOLERANCE = 1e-6  # relative, of losses measured again; the same machine repeats them to the last digit
EXACT = 1e-12  # of figures of integers
LENGTHS = 1.1e-5  # of numbers that are written down to 6 digits, the last of which may be rounded either way
VERSIONS = {"written_by", "meta"}  # of quantization_config: which program wrote it
IGNORED = ("README", "LICENSE", "LICENCE", ".")  # beginnings of files that repositories add
ASKED = {"name", "stored", "seconds", "asked", "bytes", "checksum", "entropy"}  # no data can measure these


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that does not hold.

    Args:
        where: a layer, a file or a tensor.
        what: what was found and what was expected.
    """

    where: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What `verify` found.

    Args:
        record: of the checkpoint.
        faults: what does not hold; empty if everything does.
        files, layers: how many were checked.
        measured: whether the losses were measured again.
    """

    record: RunRecord
    faults: tuple[Fault, ...]
    files: int
    layers: int
    measured: bool

    def summary(self) -> str:
        """Return one sentence."""
        checked = f"{self.files} files and {self.layers} layers checked"
        measured = (
            "every loss measured again"
            if self.measured
            else "losses not measured: that takes --against and --calibration"
        )
        return f"{checked}, {measured}: {len(self.faults) or 'no'} fault{'' if len(self.faults) == 1 else 's'}"


def verify(
    out: str | Path,
    *,
    against: str | None = None,
    calibration: str | Path | None = None,
    tolerance: float = TOLERANCE,
    device: Device = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Verified:
    """Check a checkpoint against its record.

    Args:
        out: folder that `quantize` wrote.
        against: the original, to measure every loss again.
        calibration: the text that it was calibrated on; None: where the recipe says.
        tolerance: relative, of figures measured again.
        device: where to compute.
        trust_remote_code: run model code that comes with the original.
        progress: wraps the iterator over layers.

    Raises:
        NearplaneError: there is no record, or the original or the text cannot be read.
    """
    if calibration is not None and against is None:
        raise RecipeError(
            "--calibration without --against: losses are measured with the original and the text, or not at all."
        )
    folder = Path(out)
    try:
        record = read_record(folder)
    except UnicodeDecodeError as error:
        raise FormatError(f"{folder / NAME} is not text ({error}). Fetch it again.") from error
    faults = [*_files(folder, record), *_sums(folder, record)]
    stored = _opened(folder, faults)
    matrices: dict[str, QuantizedMatrix] = {}
    if stored is not None:
        faults += _stored(stored, record, matrices)
    measured = False
    if against is not None and stored is not None and len(matrices) == len(record.layers):
        measured = True
        model = open_model(
            against, trust_remote_code=trust_remote_code, ignore=record.recipe.ignore,
            embeddings=record.recipe.rate.include_embeddings, head=record.recipe.rate.include_head,
        )  # fmt: skip
        faults += _untouched(stored, model)
        faults += _beside(folder, record, model)
        faults += progress(
            _measured(model, record, matrices, calibration, device_of(device), tolerance),
            "measuring",
            len(record.layers),
        )
    return Verified(
        record=record, faults=tuple(fault for fault in faults if fault.what), files=len(record.files) + 1,
        layers=len(record.layers), measured=measured,
    )  # fmt: skip


def _files(folder: Path, record: RunRecord) -> Iterator[Fault]:
    """Compare every file with its hash."""
    if (has := digest_of((folder / NAME).read_text())) != record.digest:
        yield Fault(where=NAME, what=f"it has the digest {has[:16]}.., and says {record.digest[:16]}..")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {NAME}
    for name in sorted(found - record.files.keys()):
        if not name.startswith(IGNORED):
            yield Fault(where=name, what="the record does not know this file")
    for name, wanted in record.files.items():
        if name not in found:
            yield Fault(where=name, what="the file is missing")
        elif (has := sha256(folder / name)) != wanted:
            yield Fault(where=name, what=f"it has the SHA-256 {has[:16]}.., the record says {wanted[:16]}..")


def _sums(folder: Path, record: RunRecord) -> Iterator[Fault]:
    """Add up what the record says in two places."""
    shards = sum((folder / name).stat().st_size for name in record.files if (folder / name).is_file() and _shard(name))
    if shards != record.bytes:
        yield Fault(where=NAME, what=f"the weight files have {shards:,} bytes, the record says {record.bytes:,}")
    known = [folder / name for name in (*record.files, NAME)]
    size = sum(path.stat().st_size for path in known if path.is_file())
    if size != record.folder:
        yield Fault(where=NAME, what=f"the files have {size:,} bytes, the record says {record.folder:,}")
    if record.tokens != record.windows * record.seqlen:
        yield Fault(where=NAME, what=f"{record.windows} windows of {record.seqlen} are not {record.tokens:,} tokens")
    for name, count in Counter(layer.name for layer in record.layers).items():
        if count > 1:
            yield Fault(where=name, what=f"the record has {count} certificates of it")
    for layer in record.layers:
        for what in _contradictions(layer, record.recipe):
            yield Fault(where=layer.name, what=what)


def _shard(name: str) -> bool:
    return name.endswith(".safetensors")


def _contradictions(layer: LayerRecord, recipe: Recipe) -> Iterator[str]:
    """Yield what cannot be true of a certificate, whatever the data."""
    if not all(isinstance(size, int) and size > 0 for size in (layer.out_features, layer.in_features)):
        yield f"it is {layer.out_features} x {layer.in_features}"
        return
    size, larger = divmod(
        layer.out_features, max(1, len(layer.row_losses))
    )  # rows of a group; of the first ones one more
    rows = (size + (index < larger) for index in range(len(layer.row_losses)))
    loss = sum(group * count for group, count in zip(layer.row_losses, rows, strict=True)) / layer.out_features
    if not _close(loss, layer.loss, 1e-8):
        yield f"row_losses average {loss:.9g}, loss is {layer.loss:.9g}"
    if layer.worst_case is not None and not _close((layer.expected or 0.0) * 3, layer.worst_case, EXACT):
        yield f"expected is {layer.expected}, a third of worst_case is {layer.worst_case / 3}"
    rule, own = recipe.rule, (layer.bits, layer.group_size, layer.symmetric, layer.order)
    bits = rule.bits if recipe.allocate == "uniform" else layer.bits
    wanted = (None, None, None) if recipe.rate.wanted else (bits, rule.group_size, rule.symmetric)
    if own != (*wanted, rule.order):
        yield f"bits, group size, symmetry and order are {own}, the recipe says {(*wanted, rule.order)}"
    if not 0 <= layer.clipped <= layer.clipped_rows <= 1:
        yield f"clipped is {layer.clipped}, clipped_rows {layer.clipped_rows}"
    if layer.worst_case is not None and layer.clipped_rows == 0 and layer.damped_loss > layer.worst_case * (1 + 1e-9):
        yield f"damped_loss {layer.damped_loss:.6g} is more than worst_case {layer.worst_case:.6g} though nothing clips"


def _opened(folder: Path, faults: list[Fault]) -> Stored | None:
    try:
        return Stored(folder)
    except (FormatError, ModelError) as error:
        faults.append(Fault(where=str(folder), what=str(error)))
        return None


def _stored(stored: Stored, record: RunRecord, matrices: dict[str, QuantizedMatrix]) -> Iterator[Fault]:
    """Compare the tensors of every layer with the record; fills `matrices` with those that can be read."""
    recipe, known = record.recipe, {layer.stored: layer for layer in record.layers}
    layout = FORMATS[recipe.format]
    if recipe.rate.wanted:
        layout = replace(layout, coder=recipe.rate.coder, classes=recipe.rate.classes)
    if stored.layout != layout:
        yield Fault(where=CONFIG, what=f"its quantization_config is not that of {recipe.format} as the recipe has it")
    again = stored.reader.folder / GPTQ_CONFIG  # read first by some programs
    if again.is_file() and again.read_bytes() != json_text(stored.config).encode():
        yield Fault(where=GPTQ_CONFIG, what=f"it is not the quantization_config of {CONFIG}")
    for name in stored.names():
        if name not in known:
            yield Fault(where=name, what=f"a quantized layer that {NAME} does not know")
    for layer in record.layers:
        if layer.stored not in stored.names():
            yield Fault(where=layer.name, what=f"no tensors named {layer.stored} in the weight files")
            continue
        try:
            tensors = stored.tensors(layer.stored)
            matrix = stored.matrix(layer.stored, tensors)
        except (FormatError, ModelError) as error:
            yield Fault(where=layer.name, what=str(error))
            continue
        found = written(tensors)
        if found.checksum != layer.checksum:
            yield Fault(
                where=layer.name,
                what=f"its tensors have the SHA-256 {found.checksum[:16]}.., the record says {layer.checksum[:16]}..",
            )
        if found.bytes != layer.bytes:
            yield Fault(
                where=layer.name, what=f"its tensors have {found.bytes:,} bytes, the record says {layer.bytes:,}"
            )
        faults = list(_of_the_grid(matrix, layer))
        yield from (Fault(where=layer.name, what=what) for what in faults)
        if not faults:
            matrices[layer.name] = matrix


def _of_the_grid(matrix: QuantizedMatrix, layer: LayerRecord) -> Iterator[str]:
    """Yield what is wrong with codes and grid of a layer by themselves."""
    shape, grid = tuple(matrix.codes.shape), matrix.grid
    if shape != (layer.out_features, layer.in_features):
        yield f"the matrix is {shape[0]} x {shape[1]}, the record says {layer.out_features} x {layer.in_features}"
        return
    if isinstance(grid, ProductGrid):
        if layer.bits is not None or layer.base is None:
            yield f"it is entropy-coded, the record says {layer.bits} bits"
        if not (math.isfinite(grid.base) and grid.base > 0):
            yield f"its step is {grid.base}"
        return
    if layer.bits is None or grid.low is None or grid.high is None:
        yield "it is on a fixed grid, the record says that it is entropy-coded"
        return
    groups = shape[1] // (layer.group_size or shape[1])
    if (grid.high - grid.low + 1, grid.scale.shape[1], grid.low < 0) != (2**layer.bits, groups, layer.symmetric):
        yield (
            f"its codes are {grid.low} to {grid.high} in {grid.scale.shape[1]} groups; the record says {layer.bits} bits, groups "
            f"of {layer.group_size or 'a row'}, {'' if layer.symmetric else 'not '}symmetric"
        )
    if not bool(torch.isfinite(grid.scale).all() and (grid.scale > 0).all()):
        yield "a step is not a positive number"
    for what, values in (("code", matrix.codes), ("zero", grid.zero)):
        low, high = (float(x) for x in values.aminmax())
        if (what == "code" and (low < grid.low or high > grid.high)) or not math.isfinite(high - low):
            yield f"a {what} is {low:g} or {high:g}, the grid is {grid.low} to {grid.high}"


def _untouched(stored: Stored, model: Model) -> Iterator[Fault]:
    """Compare the tensors that are not quantized with the original."""
    quantized = {name for layer in model.layers for name in model.copies(layer)}
    blocks = (model.block_names(index) for index in range(len(model.blocks)))
    wanted = {name for names in (*blocks, model.rest()) for name in names} - quantized
    for name in sorted(wanted - set(stored.rest())):
        yield Fault(where=name, what="the original has this tensor, and it is not quantized; it is missing")
    for name in stored.rest():
        if name not in wanted:
            yield Fault(where=name, what="a tensor that the original does not have, or that is quantized")
            continue
        try:
            here, there = stored.reader.read([name])[name], model.reader.read([name])[name]
        except (FormatError, ModelError) as error:
            yield Fault(where=name, what=str(error))
            continue
        if here.dtype != there.dtype or here.shape != there.shape or not torch.equal(
            here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8)
        ):  # fmt: skip
            yield Fault(where=name, what="it is not quantized, and not what it is in the original")


def _beside(folder: Path, record: RunRecord, model: Model) -> Iterator[Fault]:
    """Compare what lies beside the weights with the original: what config.json says of the model, tokenizer, templates."""
    ours = {NAME, INDEX, CONFIG, GPTQ_CONFIG}
    copied = set(names_copied(model.folder, trust_remote_code=True))
    for name in record.files.keys() - ours:
        if _shard(name) or not (folder / name).is_file():
            continue
        if name not in copied or sha256(folder / name) != sha256(model.folder / name):
            yield Fault(
                where=name, what="not the file that the original has" if name in copied else "a file of no original"
            )
    for name in names_copied(model.folder, trust_remote_code=False):  # nobody has to take the code
        if name not in record.files:
            yield Fault(where=name, what="the original has this file, the record does not")
    here, there = (json.loads((where / CONFIG).read_text()) for where in (folder, model.folder))
    if unlike := sorted(
        key for key in here.keys() | there.keys() if here.get(key) != there.get(key) and key != "quantization_config"
    ):
        yield Fault(where=CONFIG, what=f"{', '.join(unlike)} are not what the original's says")
    recipe = record.recipe
    own = {layer.name: layer.bits for layer in record.layers if layer.bits is not None}  # by name in the network
    wanted = quantization_config(model, recipe, own if own and recipe.allocate == "slope" else None)
    config = here["quantization_config"]
    for key in sorted((config.keys() | wanted.keys()) - VERSIONS):
        if _unordered(config.get(key)) != _unordered(wanted.get(key)):
            yield Fault(where=CONFIG, what=f"{key} in quantization_config is not what the recipe makes of this model")


def _unordered(value: Any) -> Any:
    """Return JSON with its lists sorted."""
    if isinstance(value, dict):
        return {key: _unordered(part) for key, part in value.items()}
    return sorted((_unordered(part) for part in value), key=str) if isinstance(value, list) else value


def _measured(
    model: Model, record: RunRecord, matrices: Mapping[str, QuantizedMatrix], calibration: str | Path | None, place: torch.device,
    tolerance: float,
) -> Iterator[Fault]:  # fmt: skip
    """Measure every layer again; yields a fault or an empty one for each."""
    recipe = record.recipe
    if calibration is not None:
        recipe = replace(recipe, calibration=replace(recipe.calibration, calibration=str(calibration)))
    shapes = {(layer.name, layer.shape) for layer in model.layers}
    if unlike := shapes ^ {(name, tuple(matrix.codes.shape)) for name, matrix in matrices.items()}:
        named = ", ".join(f"{name} ({rows} x {columns})" for name, (rows, columns) in sorted(unlike)[:4])
        yield Fault(
            where=str(model.folder), what=f"another model: {len(unlike)} layers are in one of the two only, as {named}"
        )
        return
    if tuple(model.skipped) != record.skipped:
        yield Fault(
            where=NAME, what=f"{len(record.skipped)} skipped layers, the model has {len(model.skipped)}, or others"
        )
    seqlen, tokens = calibration_windows(model, recipe)
    found = "" if tokens is None else digest_of_tokens(tokens)
    if (found, seqlen, 0 if tokens is None else len(tokens)) != (record.text, record.seqlen, record.windows):
        yield Fault(
            where=str(recipe.calibration.calibration or "calibration"),
            what="its tokens are not those that the record was made with",
        )
        return
    planned = Plan()
    if model.embeddings is not None and tokens is not None:
        look(planned, model, recipe, tokens, place)
    said = {layer.name: layer for layer in record.layers}
    profiles = {(profile.layer, profile.order): profile for profile in record.profiles}
    for part in parts(model, recipe, tokens, place, planned.moments):
        for observed in part.stages:
            if part.chosen:
                for new in profiles_of(observed, recipe):
                    yield from _compare(
                        f"{new.layer}, {new.order} order", new, profiles.pop((new.layer, new.order), None), tolerance
                    )
            for layer, inputs in shared_inputs(observed):
                matrix, told = matrices[layer.name], said[layer.name]
                W = layer.read()
                matrix = QuantizedMatrix(codes=matrix.codes.to(W.device), grid=matrix.grid.to(W.device))
                rule = recipe.for_layer(layer.name)
                assert rule is not None, "ignored layers are not observed"
                try:
                    target, rho = corrected(W, inputs, rule)
                    again = measure(
                        layer.name, W, target, matrix, inputs, replace(rule, bits=told.bits or rule.bits),
                        recipe.rate if recipe.rate.wanted else None, correction=rho, base=told.base,
                    )  # fmt: skip
                except NumericalError as error:
                    yield Fault(where=layer.name, what=str(error))
                    continue
                yield from _compare(layer.name, again, told, tolerance)
                values, dead = matrix.decode(), inputs.factor(rule.order, rule.damp).dead
                if bool(values[:, dead].any()):  # which no loss shows
                    yield Fault(where=layer.name, what="weights of inputs that were always 0 are not 0")
                layer.write(values)
    for layer, order in profiles:
        yield Fault(where=f"{layer}, {order} order", what="a profile that was not measured")


def _compare(where: str, again: Any, told: Any, tolerance: float) -> Iterator[Fault]:
    """Yield one fault that names all fields that differ, or an empty one."""
    if told is None:
        yield Fault(where=where, what="the record has no profile of it")
        return
    wrong = []
    for field in fields(again):
        if field.name in ASKED:
            continue
        new, old = getattr(again, field.name), getattr(told, field.name)
        digits = LENGTHS if field.name == "lengths" else 0.0
        if not _same(new, old, max(tolerance, digits)):
            wrong.append(f"{field.name} is {_short(new)}, the record says {_short(old)}")
    new, old = (getattr(each, "entropy", None) for each in (again, told))
    if not _same(new, old, EXACT):
        wrong.append(f"entropy is {_short(new)}, the record says {_short(old)}")
    yield Fault(where=where, what="; ".join(wrong))


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
