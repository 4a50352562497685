"""compare(): a table of several methods that quantize the same models to the same bits; `compare_figure.py` draws it.

A row is one run of `quantize` and one of `evaluate`. No format holds Huffman codes: their rows take one walk through the
network in memory and one run of `evaluate` (`theory/hptq.py`). The methods use the same calibration tokens:

    rtn-mse         weights rounded to nearest, b-bit symmetric groups, steps of least p-norm error; no calibration
    gptq-mse        the same grids, GPTQ in its natural order, no corrected targets
    rtn-huffman     weights rounded to nearest with one step per matrix and no limits; one Huffman code per matrix
    gptq-huffman    the same coder, GPTQ in its natural order, no corrected targets (HPTQ)
    nearplane-grid  the grids of the first two, with all defaults of nearplane
    nearplane       entropy-coded, with all defaults: steps by water-filling, rates of layers by equal slope

The first four are the rows of Table 1 in Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane
Algorithm" (2025). Order and damping, which it does not state for them, are GPTQ's own defaults.

4.125 bits on a grid mean codes of 4 bits and a 16-bit step for every 128 weights. Groups that do not divide the layers are
made smaller, and models in float32 get 32-bit steps. Every row has the true rate, from all bytes of the layers' tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.text_files import texts_of
from nearplane.calibration.windows import calibration_windows, check_tokens
from nearplane.errors import FormatError, NearplaneError, RecipeError
from nearplane.formats.find_record import sound_record
from nearplane.formats.journal_pages import run_inputs
from nearplane.models.model import Model, open_model
from nearplane.models.pretrained import find_folder
from nearplane.recipe.recipe import Calibration, Recipe, Way
from nearplane.record.record import RunRecord, versions
from nearplane.system.arguments import checked
from nearplane.system.device import Device
from nearplane.system.files import check_writable, exclusive_lock, read_object, sha256, write_whole
from nearplane.system.matmul_library import chosen_library
from nearplane.system.paths import refuse_unfinished
from nearplane.system.progress import Progress, logged, silent
from nearplane.theory.hptq import hptq_layers
from nearplane.verbs.compare_recipes import HUFFMAN, WAYS, Recipes, recipes_for
from nearplane.verbs.early_checks import check_compare
from nearplane.verbs.evaluate import evaluate, load_dense
from nearplane.verbs.generate import check_prompt, continued, generate
from nearplane.verbs.quantize_api import quantize

ORIGINAL_METHOD = "original"
ROWS_FILE = "rows.json"
LOCK_FILE = f"{ROWS_FILE}.lock"
PROMPT_TOKENS = 100  # that are written behind a prompt
MAX_RATE_ERROR = 0.005  # relative deviation from the requested bits that needs no note


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

    @property
    def failed(self) -> bool:
        """Whether nothing was measured; `note` is then the reason."""
        return self.perplexity is None


class Compared:
    """Rows of a comparison on disk, written as soon as they are measured, so that `compare --keep FOLDER` can be resumed.

        FOLDER/rows.json        the inputs of the comparison and its rows
        FOLDER/rows.json.lock   lock file of the comparison that writes them

    Rows are reused only for the same models, texts, tokens and versions; rows of other bits and methods are added to them.
    A row of a method that failed is kept with its reason, and is measured anew by the next command.
    Nothing is written before `writing` is entered.

    Args:
        folder: New or empty folder, or that of a comparison with the same inputs. None: nothing is kept.
        inputs: All that the figures of a row depend on except its method and bits, as flat JSON.

    Raises:
        RecipeError: The folder holds other files, or rows with other inputs; the message names the difference.
    """

    def __init__(self, folder: Path | None, inputs: Mapping[str, Any]) -> None:
        self._folder = folder
        self._inputs: dict[str, Any] = json.loads(json.dumps(dict(inputs)))
        self._rows: dict[tuple[str, str, float | None], Row] = {}
        if folder is not None:
            self._look(folder)
            check_writable(folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the rows, so that no other comparison writes them.

        Raises:
            RecipeError: Another comparison holds the lock.
        """
        if self._folder is None:
            yield
            return
        busy = "is being written by another comparison. Wait for it, or choose another folder with --keep."
        with exclusive_lock(self._folder / LOCK_FILE, f"{self._folder} {busy}"):
            self._look(self._folder)  # again: a comparison may have ended since
            self._write()
            yield

    def _look(self, folder: Path) -> None:
        """Read the rows of the folder; refuse a folder that holds other files."""
        if (folder / ROWS_FILE).is_file():
            self._read(folder / ROWS_FILE)
        elif folder.is_dir() and any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise RecipeError(
                f"{folder} has files but no {ROWS_FILE}; expected a new or empty folder, or one of a comparison."
            )

    def _read(self, path: Path) -> None:
        expected = f"Delete {path.parent} with the checkpoints in it, or choose another folder with --keep"
        saved = read_object(path, expected=expected)
        old = saved.get("told")
        if not isinstance(old, dict):
            raise FormatError(f"{path} is not what was written. {expected}.")
        if differing := [name for name in {**old, **self._inputs} if old.get(name) != self._inputs.get(name)]:
            raise RecipeError(
                f"{path} has rows of another comparison: {', '.join(differing[:3])} differ. Repeat the command of that comparison "
                f"to resume it, or choose another folder."
            )
        try:
            for entry in saved["rows"]:
                folder = None if entry["folder"] is None else Path(entry["folder"])
                row = Row(**{**entry, "folder": folder})
                self._rows[row.model, row.method, row.asked] = row
        except (KeyError, TypeError) as error:
            raise FormatError(f"{path} is not what was written ({error!r}). {expected}.") from error

    def get(self, model: str, method: str, asked: float | None) -> Row | None:
        """Return a row that was measured before, or None."""
        row = self._rows.get((model, method, asked))
        return None if row is None or row.failed else row

    def add(self, row: Row) -> Row:
        """Keep a row and return it."""
        self._rows[row.model, row.method, row.asked] = row
        self._write()
        return row

    def _write(self) -> None:
        if self._folder is not None:
            rows = [asdict(row) | {"folder": row.folder and str(row.folder)} for row in self._rows.values()]
            content = json.dumps({"told": self._inputs, "rows": rows}, indent=1)
            write_whole(self._folder / ROWS_FILE, content.encode())


@checked()
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
    prompt: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Iterator[Row]:
    """Quantize models by every method to every number of bits, and yield a row as soon as it is measured.

    Args:
        models: Local folders of safetensors, or hub ids.
        bits: Bits per weight, for example 4.125, 3.125, 2.125; their meaning on fixed grids is at the top of this file.
        text: Text to measure on, see `evaluate`.
        calibration: Calibration tokens.
        methods: Methods to compare, from `WAYS`.
        samples: Number of windows, from the beginning of the text. None: all.
        seqlen: Tokens per window of the text. None: as in calibration.
        keep: Folder for the rows and for the checkpoints MODEL/METHOD-BITS, from which a stopped comparison is resumed.
            None: each checkpoint is deleted once it is measured. Huffman methods write no checkpoint.
        prompt: Text that the original and every checkpoint continue for up to 100 tokens, see `Row.written`.
        device: Device to compute on.
        trust_remote_code: Whether to run model code that comes with the checkpoints.
        progress: Display that wraps iterators over layers and windows: (items, label, total) -> items.

    Returns:
        For each model the row of the original, then one for every method and number of bits. The row of a method that
        failed has a note with the reason.

    Raises:
        RecipeError: A method cannot have these bits on a model; nothing was measured. With the first row: another
            comparison writes `keep`.
        NearplaneError: A model or text cannot be read; earlier rows were yielded.
    """
    models = [models] if isinstance(models, str | Path) else list(models)
    check_compare(models, bits, methods)
    names = [Path(model).name for model in models]
    if keep is not None and len(set(names)) < len(names):
        raise RecipeError(f"{keep} has one folder per model ({', '.join(names)}); expected different names.")
    calibration = calibration or Calibration()
    opened = {str(model): open_model(str(model), trust_remote_code=trust_remote_code) for model in models}
    recipes = recipes_for(opened, methods, bits, calibration)
    if prompt is not None:
        for network in opened.values():
            check_prompt(network, prompt)
    measure = _Measure(
        prompt=prompt,
        text=text,
        calibration=calibration,
        samples=samples,
        seqlen=seqlen or calibration.seqlen,
        keep=None if keep is None else Path(keep),
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    known = Compared(measure.keep, {} if keep is None else measure.run_inputs(models))
    return _rows(opened, recipes, measure, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """Options of `compare` that are the same for every row."""

    prompt: str | None
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
        """Options that `quantize` and `evaluate` share."""
        return {"device": self.device, "trust_remote_code": self.trust_remote_code, "progress": self.progress}

    def run_inputs(self, models: Sequence[str | Path]) -> dict[str, Any]:
        """Return all that rows depend on except their method and bits."""
        settings: dict[str, Any] = {"calibration": asdict(self.calibration)}
        settings |= {"samples": self.samples, "seqlen": self.seqlen}
        if self.prompt is not None:
            settings["prompt"] = self.prompt
        folders = {
            Path(model).name: find_folder(str(model), trust_remote_code=self.trust_remote_code) for model in models
        }
        given = self.calibration.calibration
        mix = [each.name for each in texts_of(given)]
        texts = [self.text, *(mix or filter(None, [given]))]
        digest = " ".join(content_of(Path(text)) for text in texts)
        return run_inputs(settings, folders, digest, versions(), Device.named(self.device)).values

    def measured(self, row: Row, model: str | Path | PreTrainedModel, **given: Any) -> Row:
        """Return a row with the figures and the text of a model; `given` are additional options of `evaluate`."""
        evaluation = evaluate(model, self.text, samples=self.samples, seqlen=self.seqlen, **self.options, **given)
        return replace(
            row,
            perplexity=evaluation.perplexity,
            kl=evaluation.kl,
            written=self._written(model, given.get("tokenizer")),
        )

    def _written(self, model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
        """Return the text that a model writes behind the prompt; a network in memory comes with its tokenizer."""
        if self.prompt is None:
            return None
        if isinstance(model, PreTrainedModel):
            assert tokenizer is not None, "a network in memory has no tokenizer of its own"
            return str(continued(model, tokenizer, self.prompt, PROMPT_TOKENS))
        trusted = self.trust_remote_code
        text = generate(model, self.prompt, tokens=PROMPT_TOKENS, device=self.device, trust_remote_code=trusted)
        return str(text)

    def original(self, model: str, opened: Model) -> Row:
        """Return the row of the original model."""
        size = sum(path.stat().st_size for path in opened.folder.glob("*.safetensors"))
        bits = 8.0 * opened.dtype.itemsize
        row = Row(model=model, method=ORIGINAL_METHOD, rate=bits, bytes=size, folder=opened.folder)
        return replace(self.measured(row, model), kl=0.0)

    def written(self, row: Row, recipe: Recipe, note: str, out: Path, kept: RunRecord | None) -> Row:
        """Quantize the model of a row into `out`, unless it was kept there, and complete the row."""
        record = kept or quantize(row.model, out, recipe, **self.options)
        notes = "; ".join(filter(None, (note, record.missed or _rate_note(row, record.rate))))
        row = replace(row, rate=record.rate, bytes=record.bytes, seconds=record.seconds, folder=out, note=notes)
        return self.measured(row, out, against=row.model)

    def coded(self, row: Row, recipe: Recipe, opened: Model) -> Row:
        """Quantize the model of a row with Huffman codes, in memory, and complete the row."""
        began = time.perf_counter()
        coded = huffman_coded(row.model, opened, recipe, **self.options)
        seconds = round(time.perf_counter() - began, 6)
        row = replace(row, rate=coded.rate, bytes=coded.bytes, seconds=seconds, note=_rate_note(row, coded.rate))
        return self.measured(row, coded.network, against=row.model, tokenizer=coded.tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class HuffmanCoded:
    """A network in memory whose layers have the values of their Huffman codes.

    Args:
        network: The network in float32.
        tokenizer: Its tokenizer.
        rate: Bits per quantized weight.
        bytes: Size of all tensors if they were written.
    """

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rate: float
    bytes: int


def huffman_coded(
    source: str | Path,
    opened: Model,
    recipe: Recipe,
    *,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> HuffmanCoded:
    """Quantize a model with Huffman codes in one walk through the network, in memory; see `hptq_layers`.

    Args:
        source: Folder or hub id of the model.
        opened: The same model, opened.
        recipe: Recipe of `hptq_recipe`, in any order of columns.
        device: Device to compute on.
        trust_remote_code: Whether to run model code that comes with the checkpoint.
        progress: Display that wraps the iterator over layers.
    """
    place, layers = Device.named(device), opened.layers
    windows = calibration_windows(opened, recipe)
    check_tokens(opened, recipe, windows)
    network, tokenizer = load_dense(source, place.place, trust_remote_code=trust_remote_code)
    size = 0
    with (
        chosen_library([layer.shape for layer in layers], windows.count * windows.seqlen, place),
        closing(hptq_layers(opened, recipe, windows, place)) as walked,
    ):
        for layer, coded in progress(logged(walked, "quantizing", len(layers)), "quantizing", len(layers)):
            layer.within(network, "").write(coded.matrix.decode())
            size += coded.bytes
    reader, layer_tensors = opened.reader, {name for layer in layers for name in layer.copies(opened.weights)}
    others = sum(reader.nbytes(name) for name in reader.names() if name not in layer_tensors)
    rate = 8 * size / sum(math.prod(layer.shape) for layer in layers)
    return HuffmanCoded(network=network, tokenizer=tokenizer, rate=rate, bytes=size + others)


def _rate_note(row: Row, rate: float) -> str:
    """Return a note on the true bits if they deviate from the requested ones by more than `MAX_RATE_ERROR`."""
    asked = row.asked or 0.0
    return "" if abs(rate / asked - 1) <= MAX_RATE_ERROR else f"{rate:.3f} bits per weight, {asked:g} asked for"


def _rows(
    opened: Mapping[str, Model],
    recipes: Mapping[str, Recipes],
    measure: _Measure,
    known: Compared,
) -> Iterator[Row]:
    keep = measure.keep
    with known.writing(), tempfile.TemporaryDirectory(prefix="nearplane-") as temporary:
        for model, network in opened.items():
            yield known.get(model, ORIGINAL_METHOD, None) or known.add(measure.original(model, network))
            for (asked, method), (recipe, note) in recipes[model].items():
                row = Row(model=model, method=method, asked=asked)
                out = Path(keep or temporary) / Path(model).name / f"{method}-{asked:g}"
                try:
                    kept = _quantized_before(out, recipe)
                    if (earlier := known.get(model, method, asked)) is not None:
                        yield earlier
                        continue
                    if method in HUFFMAN:
                        row = measure.coded(row, recipe, network)
                    else:
                        row = measure.written(row, recipe, note, out, kept)
                except KeyboardInterrupt as stopped:
                    rows_kept = f"The finished rows are in {keep}. Repeat the command to resume."
                    stopped.__notes__ = [] if keep is None else [rows_kept]  # others name files in the temporary folder
                    raise
                except NearplaneError as error:  # e.g. the folder is in use, or a matrix cannot be quantized
                    row = replace(row, note=str(error))
                if keep is None:
                    shutil.rmtree(out, ignore_errors=True)
                    row = replace(row, folder=None)
                yield known.add(row)


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


def content_of(text: Path) -> str:
    """Return the SHA-256 of a text file or of all files in a folder; for a data set, its name."""
    if text.is_file():
        return sha256(text)
    if not text.is_dir():
        return str(text)
    return hashlib.sha256("".join(sha256(p) for p in sorted(text.rglob("*")) if p.is_file()).encode()).hexdigest()
