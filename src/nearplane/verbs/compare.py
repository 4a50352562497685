"""compare(): several ways to quantize the same models to the same bits, as rows of a table; `compare_figure.py` draws them.

Every row is one run of `quantize` and one of `evaluate`; of the rows with Huffman codes, which no format holds, one walk through
the network in memory and one of `evaluate` (`theory/hptq.py`). The methods, all with the same tokens:

    rtn-mse         weights rounded to nearest, b-bit symmetric groups, steps of least p-norm error; no calibration
    gptq-mse        the same grids, GPTQ in its natural order, targets not corrected for what the layers before lost
    rtn-huffman     weights rounded to nearest with one step a matrix and no limits, codes behind one Huffman code a matrix
    gptq-huffman    the same coder, GPTQ in its natural order, targets not corrected (HPTQ)
    nearplane-grid  the grids of the first two with everything this package does by default
    nearplane       entropy-coded, all by default: steps by water-filling, a rate for each layer by equal slope

The first four are the rows of Table 1 in Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane
Algorithm" (2025). Order and damping, which it does not state for them, are GPTQ's own defaults.

There, 4.125 bits are codes of 4 bits and a 16-bit step for every 128 weights. Where groups do not fit the layers they are smaller,
and checkpoints in float32 have 32-bit steps: the true bits, all bytes of the layers' tensors counted, are in every row.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from nearplane.calibration.windows import calibration_windows, check_tokens
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.journal_pages import told
from nearplane.models.layers import Layer
from nearplane.models.model import Model, open_model
from nearplane.models.pretrained import find_folder
from nearplane.recipe.recipe import Calibration, Recipe, Way
from nearplane.recipe.scheme import Format, Solver
from nearplane.recipe.schemes import GridScheme, RateScheme, fitting_group
from nearplane.record.record import RunRecord, read_record, versions
from nearplane.system.device import Device
from nearplane.system.files import exclusive_lock, check_writable, read_object, sha256, write_whole
from nearplane.system.matmul_library import fastest
from nearplane.system.paths import RECORD
from nearplane.system.progress import Progress, logged, silent
from nearplane.system.safetensors_files import refuse_unfinished
from nearplane.theory.hptq import hptq_layers, hptq_recipe
from nearplane.verbs.evaluate import evaluate, load_dense
from nearplane.verbs.quantize_api import quantize

WAYS: tuple[Way, ...] = Way.__args__  # type: ignore[attr-defined]
ORIGINAL = "original"
HUFFMAN: tuple[Way, ...] = ("rtn-huffman", "gptq-huffman")
GROUPS = (32, 64, 128, 256, 512, 1024)  # powers of two, so that the largest one that fits is a greatest common divisor
NAME = "rows.json"
LOCK = f"{NAME}.lock"
CLOSE = 0.005  # of the bits asked for: what is not worth a note


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one number of bits on one model.

    Args:
        model: As the user named it.
        method: One of `WAYS`, or "original".
        asked: Bits per weight; None for the original.
        rate: Bits per quantized weight in the file, every byte of the layers' tensors counted; of the original, its dtype's.
        bytes: Of all weight files; where none was written, of the tensors that they would hold.
        perplexity: On the text.
        kl: KL(original || this), nats per token.
        seconds: To quantize.
        note: What differs from what was asked; or, where nothing was measured and the figures are None, why.
        folder: The checkpoint, if it was kept; of the original, its own.
    """

    model: str
    method: str
    asked: float | None = None
    rate: float | None = None
    bytes: int | None = None
    perplexity: float | None = None
    kl: float | None = None
    seconds: float = 0.0
    note: str = ""
    folder: Path | None = None


class Compared:
    """The rows of a folder, on disk as soon as they are measured: `compare --keep FOLDER` given again goes on behind the last.

        FOLDER/rows.json        what every row was measured with, and the rows
        FOLDER/rows.json.lock   locked by the comparison that writes them

    Rows count for the same models, texts, tokens and versions alone; other bits and methods are rows beside those that are there.
    Nothing is written before `writing` is entered.

    Args:
        folder: new or empty, or one that a comparison left that was told the same; None: nothing is kept.
        told: all that a row's figures depend on beside its method and bits, as flat JSON.

    Raises:
        RecipeError: the folder holds something else, or rows that were told something else; names the difference.
    """

    def __init__(self, folder: Path | None, told: Mapping[str, Any]) -> None:
        self._folder = folder
        self._told: dict[str, Any] = json.loads(json.dumps(dict(told)))
        self._rows: dict[tuple[str, str, float | None], Row] = {}
        if folder is not None:
            self._look(folder)
            check_writable(folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let no other comparison write the rows.

        Raises:
            RecipeError: another one does.
        """
        if self._folder is None:
            yield
            return
        said = "is being written by another comparison. Wait until it has ended, or choose another folder with --keep."
        with exclusive_lock(self._folder / LOCK, f"{self._folder} {said}"):
            self._look(self._folder)  # again: a comparison may have ended since
            self._write()
            yield

    def _look(self, folder: Path) -> None:
        """Read the rows that are there, or refuse what is there instead."""
        if (folder / NAME).is_file():
            self._read(folder / NAME)
        elif folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
            raise RecipeError(
                f"{folder} holds files and no {NAME}: expected a new or empty folder, or one of a comparison."
            )

    def _read(self, path: Path) -> None:
        expected = f"Delete {path.parent} with the checkpoints in it, or choose another folder with --keep"
        data = read_object(path, expected=expected)
        then = data.get("told")
        if not isinstance(then, dict):
            raise FormatError(f"{path} is not what was written. {expected}.")
        if differing := [name for name in {**then, **self._told} if then.get(name) != self._told.get(name)]:
            raise RecipeError(
                f"{path} has rows of another comparison: {', '.join(differing[:3])} differ. Give the same command again to go on "
                f"with it, or choose another folder."
            )
        try:
            for entry in data["rows"]:
                folder = None if entry["folder"] is None else Path(entry["folder"])
                row = Row(**{**entry, "folder": folder})
                if row.perplexity is not None:
                    self._rows[row.model, row.method, row.asked] = row
        except (KeyError, TypeError) as error:
            raise FormatError(f"{path} is not what was written ({error!r}). {expected}.") from error

    def get(self, model: str, method: str, asked: float | None) -> Row | None:
        """Return a row that was measured before."""
        return self._rows.get((model, method, asked))

    def add(self, row: Row) -> Row:
        """Keep a row, and return it; one without figures is not kept: what was refused costs nothing to ask again."""
        if row.perplexity is not None:
            self._rows[row.model, row.method, row.asked] = row
            self._write()
        return row

    def _write(self) -> None:
        if self._folder is not None:
            rows = [asdict(row) | {"folder": row.folder and str(row.folder)} for row in self._rows.values()]
            content = json.dumps({"told": self._told, "rows": rows}, indent=1)
            write_whole(self._folder / NAME, content.encode())


def compare(
    models: str | Path | Sequence[str | Path],
    bits: Sequence[float],
    *,
    text: str | Path,
    calibration: Calibration | None = None,
    methods: Sequence[Way] = WAYS,
    samples: int | None = None,
    seqlen: int | None = None,
    keep: str | Path | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Iterator[Row]:
    """Quantize models by every method to every number of bits, and yield what each is worth as soon as it is known.

    Args:
        models: local folders of safetensors, or hub ids.
        bits: per weight, for instance 4.125, 3.125, 2.125; see the head of this file for what they mean on fixed grids.
        text: to measure on, see `evaluate`.
        calibration: tokens to calibrate on.
        methods: of `WAYS`.
        samples: windows of the text, its first; None: all.
        seqlen: tokens of a window of the text; None: as in calibration.
        keep: folder for the checkpoints, as MODEL/METHOD-BITS, and for the rows: given again it goes on where it was stopped. None:
            checkpoints are deleted, one by one. Of Huffman codes there are none.
        device: where to compute.
        trust_remote_code: run model code that comes with the checkpoints.
        progress: wraps iterators over layers and windows: (items, label, total) -> items.

    Returns:
        Per model the original, then every method at every number of bits. A method that cannot have the bits has a row that says
        why.

    Raises:
        RecipeError: what is asked for makes no sense for any model; at once. With the first row: another comparison writes `keep`.
        NearplaneError: a model, text or calibration cannot be read, or a matrix not be quantized; rows that are known were yielded.
    """
    models = [models] if isinstance(models, str | Path) else list(models)
    if unknown := set(methods) - set(WAYS):
        raise RecipeError(f"{', '.join(sorted(unknown))} is no method to compare; expected some of {', '.join(WAYS)}.")
    if not models or not bits or not methods:
        raise RecipeError("Nothing to compare: give at least one model, one number of bits and one method.")
    names = [Path(model).name for model in models]
    if keep is not None and len(set(names)) < len(names):
        raise RecipeError(f"{keep} is to take one folder a model ({', '.join(names)}): expected different names.")
    calibration = calibration or Calibration()
    measure = _Measure(
        text=text,
        calibration=calibration,
        samples=samples,
        seqlen=seqlen or calibration.seqlen,
        keep=None if keep is None else Path(keep),
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    known = Compared(measure.keep, {} if keep is None else measure.told(models))
    return _rows(models, bits, methods, measure, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """How every row is measured: what `compare` was told and hands on unchanged."""

    text: str | Path
    calibration: Calibration
    samples: int | None
    seqlen: int | None
    keep: Path | None
    device: str
    trust_remote_code: bool
    progress: Progress

    @property
    def options(self) -> dict[str, Any]:
        """What `quantize` and `evaluate` are told alike."""
        return {"device": self.device, "trust_remote_code": self.trust_remote_code, "progress": self.progress}

    def told(self, models: Sequence[str | Path]) -> dict[str, Any]:
        """Return all that rows depend on beside their method and bits."""
        asked = {"calibration": asdict(self.calibration), "samples": self.samples, "seqlen": self.seqlen}
        folders = {
            Path(model).name: find_folder(str(model), trust_remote_code=self.trust_remote_code) for model in models
        }
        given = self.calibration.calibration
        texts = [self.text] if given is None else [self.text, given]
        digest = " ".join(content_of(Path(text)) for text in texts)
        return told(asked, folders, digest, versions(), Device.named(self.device))

    def measured(self, row: Row, model: str | Path | PreTrainedModel, **given: Any) -> Row:
        """Return a row with what a model is worth; `given` are further options of `evaluate`."""
        found = evaluate(model, self.text, samples=self.samples, seqlen=self.seqlen, **self.options, **given)
        return replace(row, perplexity=found.perplexity, kl=found.kl)

    def original(self, model: str, opened: Model) -> Row:
        """Return the row of the model itself."""
        size = sum(path.stat().st_size for path in opened.folder.glob("*.safetensors"))
        bits = 8.0 * opened.dtype.itemsize
        row = Row(model=model, method=ORIGINAL, rate=bits, bytes=size, folder=opened.folder)
        return replace(self.measured(row, model), kl=0.0)

    def written(self, row: Row, recipe: Recipe, note: str, out: Path) -> Row:
        """Quantize the model of a row into `out`, and fill in the row."""
        record = _there(out, recipe) or quantize(row.model, out, recipe, **self.options)
        notes = "; ".join(filter(None, (note, record.missed or _off(row, record.rate))))
        row = replace(row, rate=record.rate, bytes=record.bytes, seconds=record.seconds, folder=out, note=notes)
        return self.measured(row, out, against=row.model)

    def coded(self, row: Row, bits: float, opened: Model) -> Row:
        """Round the model of a row to codes behind Huffman codes, in memory, and fill in the row."""
        began, device = time.perf_counter(), Device.named(self.device)
        recipe = hptq_recipe(bits, self.calibration, calibrated=row.method == "gptq-huffman")
        windows = calibration_windows(opened, recipe)
        check_tokens(opened, recipe, windows)
        network, tokenizer = load_dense(row.model, device.place, trust_remote_code=self.trust_remote_code)
        size, layers = 0, opened.layers
        with (
            fastest([layer.shape for layer in layers], windows.count * windows.seqlen, device),
            closing(hptq_layers(opened, recipe, windows, device)) as walked,
        ):
            for layer, coded in self.progress(logged(walked, "quantizing", len(layers)), "quantizing", len(layers)):
                layer.within(network, "").write(coded.matrix.decode())
                size += coded.bytes
        seconds = round(time.perf_counter() - began, 6)
        reader, again = opened.reader, {name for layer in layers for name in layer.copies(opened.weights)}
        rest = sum(reader.nbytes(name) for name in reader.names() if name not in again)
        rate = 8 * size / sum(math.prod(layer.shape) for layer in layers)
        row = replace(row, rate=rate, bytes=size + rest, seconds=seconds, note=_off(row, rate))
        return self.measured(row, network, against=row.model, tokenizer=tokenizer)


def _off(row: Row, found: float) -> str:
    """Say the true bits where they are not, within `CLOSE`, those asked for."""
    asked = row.asked or 0.0
    return "" if abs(found / asked - 1) <= CLOSE else f"{found:.3f} bits per weight, {asked:g} asked for"


def _rows(
    models: Sequence[str | Path], bits: Sequence[float], methods: Sequence[Way], measure: _Measure, known: Compared
) -> Iterator[Row]:
    keep = measure.keep
    with known.writing(), tempfile.TemporaryDirectory(prefix="nearplane-") as temporary:
        for model in map(str, models):
            opened = open_model(model, trust_remote_code=measure.trust_remote_code)
            yield known.get(model, ORIGINAL, None) or known.add(measure.original(model, opened))
            layers = [layer for block in opened.blocks for layer in block.layers]
            for asked, method in product(bits, methods):
                if (before := known.get(model, method, asked)) is not None:
                    yield before
                    continue
                row = Row(model=model, method=method, asked=asked)
                out = Path(keep or temporary) / Path(model).name / f"{method}-{asked:g}"
                try:
                    if method in HUFFMAN:
                        row = measure.coded(row, asked, opened)
                    else:
                        row = measure.written(row, *recipe_for(method, asked, layers, measure.calibration), out)
                except KeyboardInterrupt as stopped:
                    if keep is None:
                        stopped.__notes__ = []  # they tell of files in the temporary folder
                    raise
                except RecipeError as error:  # this method does not have these bits, or not for this model, or not now
                    row = replace(row, note=str(error))
                if keep is None:
                    shutil.rmtree(out, ignore_errors=True)
                    row = replace(row, folder=None)
                yield known.add(row)


def _there(out: Path, recipe: Recipe) -> RunRecord | None:
    """Return the record of a checkpoint that a comparison made and was stopped before it was measured."""
    if not (out / RECORD).is_file():
        return None
    refuse_unfinished(out)
    record = read_record(out)
    return record if record.recipe == recipe else None


def content_of(text: Path) -> str:
    """Return the SHA-256 of a text file, or of all files of a folder; of what is neither, its name."""
    if text.is_file():
        return sha256(text)
    if not text.is_dir():
        return str(text)
    return hashlib.sha256("".join(sha256(p) for p in sorted(text.rglob("*")) if p.is_file()).encode()).hexdigest()


def recipe_for(method: Way, bits: float, layers: Iterable[Layer], calibration: Calibration) -> tuple[Recipe, str]:
    """Return the recipe of a method that writes a checkpoint at `bits` per weight, and what about it differs from what was asked.

    Raises:
        RecipeError: the method does not have these bits.
    """
    if method == "nearplane":
        return Recipe(scheme=RateScheme(rate=bits), calibration=calibration), ""
    solver: Solver = "round-to-nearest" if method.startswith("rtn") else "nearest-plane"
    layers = list(layers)
    width, group_size, note = fixed_grid(bits, [layer.shape[1] for layer in layers])
    scheme = GridScheme(bits=width, group_size=group_size)
    if method != "nearplane-grid":
        scheme = replace(scheme, order="natural", solver=solver, correct=False, polish=0, rounds=0)
    linear = all(layer.kind == "Linear" for layer in layers)
    format: Format = "compressed-tensors" if linear else "gptq"  # which holds GPT-2's Conv1D too
    return Recipe(scheme=scheme, format=format, allocate="uniform", calibration=calibration), note


def fixed_grid(bits: float, columns: Sequence[int]) -> tuple[int, int | None, str]:
    """Return width, group size and what is to be said of them for a grid of `bits` = width + 16 / group size.

    No fraction is one step a row. Groups that do not divide the layers are halved until they do, down to 16; where not even those
    fit, a step is shared by the row.

    Args:
        bits: per weight.
        columns: inputs of every layer.

    Raises:
        RecipeError: no grid has these bits.
    """
    width = math.floor(bits)
    fraction = bits - width
    group_size = round(16 / fraction) if fraction > 2**-20 else None
    if not 2 <= width <= 8 or (group_size is not None and (group_size not in GROUPS or 16 / group_size != fraction)):
        raise RecipeError(
            f"no fixed grid has {bits:g} bits: expected 2 to 8, plus 16 / group for groups of {', '.join(map(str, GROUPS))}"
        )
    if group_size is None or all(n % group_size == 0 for n in columns):
        return width, group_size, ""
    fitting = fitting_group(columns, group_size)
    unfit = next((n for n in columns if n % fitting), None)
    if unfit is not None:
        return width, None, f"one step a row: groups of {fitting} or more do not divide {unfit} inputs"
    least = next(n for n in columns if n % group_size)
    return width, fitting, f"groups of {fitting}: {group_size} does not divide {least} inputs"
