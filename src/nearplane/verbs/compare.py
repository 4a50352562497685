"""compare(): a table of several methods that quantize the same models to the same bits; `compare_figure.py` draws it.

A row is one run of `quantize` and one of `evaluate`. No format holds Huffman codes: their rows take one walk through the
network in memory (`hptq.py`). All methods, which `compare_recipes.py` describes, use the same calibration tokens. Every row
has the true rate, from all bytes of the layers' tensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from nearplane.calibration.text_files import texts_of
from nearplane.calibration.windows import calibration_windows, check_tokens
from nearplane.errors import FormatError, NearplaneError, RecipeError
from nearplane.formats.find_record import sound_record
from nearplane.formats.journal_pages import run_inputs
from nearplane.loading.from_pretrained import load
from nearplane.loading.source_folder import source_folder
from nearplane.models.model import Model, open_model
from nearplane.models.pretrained import tokenizer_of
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.record.record import RunRecord, versions
from nearplane.record.remarks import missed
from nearplane.system.arguments import takes
from nearplane.system.device import Device
from nearplane.system.files import check_writable, exclusive_lock, read_object, sha256, write_whole
from nearplane.system.paths import refuse_unfinished
from nearplane.system.sizes import three_places
from nearplane.verbs.compare_recipes import HUFFMAN, Recipes, recipes_for
from nearplane.verbs.compare_request import CompareRequest
from nearplane.verbs.evaluate import evaluate
from nearplane.verbs.generate import check_prompt, continued
from nearplane.verbs.hptq import huffman_coded
from nearplane.verbs.next_choices import NextChoice, next_choices
from nearplane.verbs.quantize import quantize

ORIGINAL_METHOD = "original"
ROWS_FILE, LOCK_FILE = "rows.json", "rows.json.lock"  # inputs of a comparison and its rows; held while they are written
PROMPT_TOKENS = 100  # that are written behind a prompt
SHOWN = 60  # letters of a text in a log line
MAX_RATE_ERROR = 0.005  # relative deviation from the requested bits that needs no note
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one number of bits on one model.

    Args:
        model: Name of the model as the user wrote it.
        method: One of `WAYS`, or "original".
        asked: Requested bits per weight; None for the original.
        rate: Bits per quantized weight in the file, from all bytes of the layers' tensors; for the original, its dtype's.
        bytes: Size of all weight files, or of the tensors they would hold if none were written.
        perplexity: Perplexity on the text.
        kl: KL(original || quantized) in nats per token.
        seconds: Time of quantization in seconds.
        note: Deviations from the request, or the reason why nothing was measured and figures are None.
        folder: Folder of the checkpoint if it was kept; for the original, of the model.
        written: Text that it writes behind the prompt; None if no prompt was given.
        token_ids: Ids of the tokens of that text.
        choices: What it would write next at each place of the original's text; empty for the original.
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
    written: str | None = None
    token_ids: tuple[int, ...] = ()
    choices: tuple[NextChoice, ...] = ()

    @property
    def title(self) -> str:
        """The method with its bits."""
        return self.method if self.asked is None else f"{self.method} at {self.asked:g} bits"

    @property
    def failed(self) -> bool:
        """Whether nothing was measured; `note` is then the reason."""
        return self.perplexity is None


@takes(CompareRequest)
def compare(request: CompareRequest) -> Iterator[Row]:
    """Quantize models by every method to every number of bits, and yield a row as soon as it is measured.

    The meaning of bits on fixed grids is at the top of `compare_recipes.py`. Checkpoints are kept in MODEL/METHOD-BITS, if
    they are; Huffman methods write none. The texts behind a prompt have up to 100 tokens, see `Row.written`.

    Returns:
        For each model the row of the original, then one for every method and number of bits. The row of a method that
        failed has a note with the reason.

    Raises:
        RecipeError: A method cannot have these bits on a model; nothing was measured. With the first row: another
            comparison writes `keep`.
        CalibrationError: A file has too few calibration tokens; nothing was measured.
        NearplaneError: A model or text cannot be read.
    """
    request.check()
    models, keep, trust = request.several, request.keep, request.trust_remote_code
    names = [Path(model).name for model in models]
    if keep is not None and len(set(names)) < len(names):
        raise RecipeError(f"{keep} has one folder per model ({', '.join(names)}); expected different names.")
    calibration = request.calibration or Calibration()
    opened = {str(model): open_model(str(model), trust_remote_code=trust) for model in models}
    recipes = recipes_for(opened, request.methods, request.bits, calibration)
    for name, network in opened.items():
        _check_calibration(network, recipes[name], calibration, Device.named(request.device))
        if request.prompt is not None:
            check_prompt(network, request.prompt)
    request = replace(request, calibration=calibration, seqlen=request.seqlen or calibration.seqlen)
    inputs: dict[str, Any] = {}
    if keep is not None:
        inputs = _run_inputs(request, {name: each.folder for name, each in zip(names, opened.values(), strict=True)})
        _earlier(Path(keep), inputs)
        check_writable(Path(keep))
    return _rows(opened, recipes, request, inputs)


def _check_calibration(model: Model, recipes: Recipes, calibration: Calibration, device: Device) -> None:
    """Refuse files with too few calibration tokens before a method that needs none has run."""
    text = calibration.calibration
    if text is not None and Path(text).exists():
        for recipe in [recipe for recipe, _ in recipes.values() if recipe.scheme.calibrated][:1]:
            check_tokens(model, recipe, calibration_windows(model, recipe, None, device))


def _run_inputs(request: CompareRequest, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return all that rows depend on except their method and bits; `folders` are those of the models."""
    calibration = request.calibration or Calibration()
    settings: dict[str, Any] = {
        "calibration": asdict(calibration),
        "samples": request.samples,
        "seqlen": request.seqlen,
    }
    if request.prompt is not None:
        settings["prompt"] = request.prompt
    given = calibration.calibration
    texts = [request.text, *([each.name for each in texts_of(given)] or filter(None, [given]))]
    digest = " ".join(content_of(Path(text)) for text in texts)
    return run_inputs(settings, folders, digest, versions(), Device.named(request.device)).values


def _earlier(folder: Path, inputs: Mapping[str, Any]) -> dict[tuple[str, str, float | None], Row]:
    """Return the rows, by model, method and bits, that a comparison with the same inputs has left in a folder, if any.

    Rows of other bits and methods are added to them; a row of a method that failed is kept with its reason, and is measured
    anew by the next command.

    Raises:
        RecipeError: The folder holds other files, or rows with other inputs; the message names the difference.
        FormatError: The rows cannot be read.
    """
    path = folder / ROWS_FILE
    if not path.is_file():
        if folder.is_dir() and any(each.name != LOCK_FILE for each in folder.iterdir()):
            raise RecipeError(
                f"{folder} has files but no {ROWS_FILE}; expected a new or empty folder, or one of a comparison."
            )
        return {}
    expected = f"Delete {folder} with the checkpoints in it, or choose another folder with --keep"
    saved = read_object(path, expected=expected)
    old = saved.get("told")
    if not isinstance(old, dict):
        raise FormatError(f"{path} is not what was written. {expected}.")
    if differing := [name for name in {**old, **inputs} if old.get(name) != inputs.get(name)]:
        raise RecipeError(
            f"{path} has rows of another comparison: {', '.join(differing[:3])} differ. Repeat the command of that comparison "
            f"to resume it, or choose another folder."
        )
    try:
        rows = [_row(each) for each in saved["rows"]]
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path} is not what was written ({error!r}). {expected}.") from error
    return {(row.model, row.method, row.asked): row for row in rows}


def _row(saved: dict[str, Any]) -> Row:
    """Return the row of a JSON object."""
    choices, folder = tuple(NextChoice(*each) for each in saved.get("choices", ())), saved["folder"]
    return Row(
        **saved
        | {"folder": folder and Path(folder), "token_ids": tuple(saved.get("token_ids", ())), "choices": choices}
    )


@dataclass(frozen=True, slots=True)
class _Measure:
    """What is measured for every row of a comparison: figures on a text, and what is written behind a prompt."""

    request: CompareRequest

    @property
    def options(self) -> dict[str, Any]:
        """Options of both `quantize` and `evaluate`."""
        return {name: getattr(self.request, name) for name in ("device", "trust_remote_code", "progress")}

    def original(self, model: str, opened: Model) -> Row:
        """Return the row of the original model."""
        size, folder = sum(path.stat().st_size for path in opened.folder.glob("*.safetensors")), opened.folder
        row = Row(model=model, method=ORIGINAL_METHOD, rate=8.0 * opened.dtype.itemsize, bytes=size, folder=folder)
        return replace(self._measured(row, model), kl=0.0)

    def quantized(
        self, row: Row, recipe: Recipe, note: str, opened: Model, out: Path, kept: RunRecord | None, original: Row
    ) -> Row:
        """Quantize the model of a row in memory, or into `out` unless it was kept there, and complete the row."""
        if row.method in HUFFMAN:
            made = huffman_coded(row.model, opened, recipe, **self.options)
            row = replace(row, rate=made.rate, bytes=made.bytes, seconds=made.seconds, note=_rate_note(row, made.rate))
            return self._measured(row, made.network, original, against=row.model, tokenizer=made.tokenizer)
        record = kept or quantize(row.model, out, recipe, **self.options)
        notes = "; ".join(filter(None, (note, missed(record) or _rate_note(row, record.rate))))
        row = replace(row, rate=record.rate, bytes=record.bytes, seconds=record.seconds, folder=out, note=notes)
        return self._measured(row, out, original, against=row.model)

    def _measured(
        self, row: Row, model: str | Path | PreTrainedModel, original: Row | None = None, **given: Any
    ) -> Row:
        """Return a row with the figures and the text of a model; `given` are additional options of `evaluate`."""
        request = self.request
        figures = evaluate(model, request.text, samples=request.samples, seqlen=request.seqlen, **self.options, **given)
        row = replace(row, perplexity=figures.perplexity, kl=figures.kl)
        if request.prompt is None:
            return row
        if isinstance(model, PreTrainedModel):
            network, tokenizer = model, given["tokenizer"]
        else:
            trust = request.trust_remote_code
            folder = source_folder(model, trust_remote_code=trust)
            place = Device.named(request.device, in_float64=False).place
            network, tokenizer = (
                load(folder, device=place, trust_remote_code=trust),
                tokenizer_of(folder, trust_remote_code=trust),
            )
        text = continued(network, tokenizer, request.prompt, PROMPT_TOKENS)
        row = replace(row, written=str(text), token_ids=text.token_ids)
        if original is None:
            return row
        choices = next_choices(network, tokenizer, request.prompt, original.token_ids)
        return replace(row, choices=tuple(choices))


def _rate_note(row: Row, rate: float) -> str:
    """Return a note on the true bits if they deviate from the requested ones by more than `MAX_RATE_ERROR`."""
    asked = row.asked or 0.0
    return "" if abs(rate / asked - 1) <= MAX_RATE_ERROR else f"{rate:.3f} bits per weight, {asked:g} asked for"


def _rows(
    opened: Mapping[str, Model], recipes: Mapping[str, Recipes], request: CompareRequest, inputs: Mapping[str, Any]
) -> Iterator[Row]:
    keep, measure = None if request.keep is None else Path(request.keep), _Measure(request)
    busy = f"{keep} is being written by another comparison. Wait for it, or choose another folder with --keep."
    locked = nullcontext() if keep is None else exclusive_lock(keep / LOCK_FILE, busy)
    with locked, tempfile.TemporaryDirectory(prefix="nearplane-") as temporary:
        rows = {} if keep is None else _earlier(keep, inputs)  # again: a comparison may have ended since

        def add(row: Row) -> Row:
            log.info("%s: %s", row.title, row.note if row.failed else _figures(row))
            rows[row.model, row.method, row.asked] = row
            if keep is not None:
                fields = [asdict(each) | {"folder": each.folder and str(each.folder)} for each in rows.values()]
                write_whole(keep / ROWS_FILE, json.dumps({"told": inputs, "rows": fields}, indent=1).encode())
            return row

        for model, network in opened.items():
            first = rows.get((model, ORIGINAL_METHOD, None))
            if first is None or first.failed:
                first = add(measure.original(model, network))
            yield first
            for (asked, method), (recipe, note) in recipes[model].items():
                row = Row(model=model, method=method, asked=asked)
                out = Path(keep or temporary) / Path(model).name / f"{method}-{asked:g}"
                try:
                    kept = _quantized_before(out, recipe)
                    if not (earlier := rows.get((model, method, asked), row)).failed:
                        yield earlier
                        continue
                    log.info("%s of %s", row.title, Path(model).name)
                    row = measure.quantized(row, recipe, note, network, out, kept, first)
                except KeyboardInterrupt as stopped:
                    stopped.__notes__ = []  # they name files in the temporary folder
                    if keep is not None:
                        stopped.add_note(f"The finished rows are in {keep}. Repeat the command to resume.")
                    raise
                except NearplaneError as error:  # e.g. the folder is in use, or a matrix cannot be quantized
                    row = replace(row, note=str(error))
                if keep is None:
                    shutil.rmtree(out, ignore_errors=True)
                    row = replace(row, folder=None)
                yield add(row)


def _quantized_before(out: Path, recipe: Recipe) -> RunRecord | None:
    """Return the record of a checkpoint that a comparison kept, or None.

    Raises:
        FormatError: The checkpoint was changed since then.
    """
    if not out.is_dir() or not any(out.iterdir()):
        return None
    try:
        refuse_unfinished(out)
        record = sound_record(out)
    except NearplaneError as error:
        raise FormatError(f"{error} Or delete {out} and repeat the command.") from error
    return record if record.recipe == recipe else None


def _figures(row: Row) -> str:
    """Return what was measured of a row, in one line."""
    kl = "" if row.kl is None else f", KL {row.kl:.3g} nats per token"
    written = "" if row.written is None else f"; it writes {' '.join(row.written.split())[:SHOWN]!r}"
    return f"perplexity {row.perplexity:.4g}{kl}, {three_places(row.rate)} bits per weight{written}"


def content_of(text: Path) -> str:
    """Return the SHA-256 of a text file or of all files in a folder; for a data set, its name."""
    if text.is_file():
        return sha256(text)
    if not text.is_dir():
        return str(text)
    return hashlib.sha256("".join(sha256(p) for p in sorted(text.rglob("*")) if p.is_file()).encode()).hexdigest()
