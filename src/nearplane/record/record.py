"""What a run measured, as frozen data: `nearplane.json` in every checkpoint. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nearplane.errors import FormatError, printable
from nearplane.lattice.number_formats import NumberFormat, number_format
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import BlockScheme
from nearplane.record.from_json import annotated
from nearplane.record.tuning_record import Tuning
from nearplane.system.matmul_choice import Products
from nearplane.system.paths import RECORD, left_behind

VERSION = 5  # of the record; no other is read
MAX_CERTIFIED_INPUTS = 4096  # inputs above which the limit is left out: it would take longer than the solve


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One quantized layer and its certificate. Losses are means over out * in, see `lattice/bounds.py`; they refer to the
    quantized target. `nearplane verify` measures all of it again but `seconds`.

    Args:
        name: Full name of the layer.
        stored: Name of its tensors in the file; the same for most models.
        out_features, in_features: Shape of the weight.
        loss: Exact loss under the undamped Hessian.
        row_losses: The same of groups of neighbouring rows, `row_groups` of them, to 9 digits: one changed code shows in its group.
        relative_loss: The loss over the energy of the weights under that Hessian.
        nearest_loss: Loss of rounding the same target to nearest on the same grid.
        extra_loss: How far outputs are from those of the original network on the extra windows, to which nothing was fitted, or on
            some 1,024 tokens of them, evenly spread: what the layers before lost is in it. Where targets are not corrected the
            original network does not run: then it is that of this layer alone. This and the next two are None where no row of extra
            windows reached the layer.
        extra_relative_loss: The same over the energy of the original network's outputs.
        extra_nearest_loss: The same of rounding the target to nearest on the same grid.
        damped_loss: Loss of the sweep under the Hessian damped with `sweep_damp`, which the next three refer to.
        worst_case: Babai's bound, mean over all rows: no damped_loss is more if clipped_rows is 0. It holds row by row where a row
            does not clip, so that the sum over those rows is at most the sum of their own bounds; of this mean no row's bound
            can be told, and where some rows clip it bounds neither a row nor damped_loss. None, as the next two, for codes that
            no sweep made.
        expected: A third of the bound.
        gamma: The error of a row that does not clip is at most gamma times the least possible, in length: the largest over these
            rows alone, None if there are none.
        clipped, clipped_rows: Fraction of codes that the sweep would have put outside the grid, of rows with one: the bounds say
            nothing of these rows, the losses are theirs too.
        correction: How far the target went from the weights to the full correction, 0 to 1.
        damp: Damping of the correction, relative to the mean of the Hessian's diagonal.
        sweep_damp: The same in the sweep.
        dead: Inputs that were always 0.
        pruned: How many of these were not always 0 in the original network: quantizing what they come from made them so. None if
            targets are not corrected, as the original network does not run then.
        tokens: Rows that the Hessian was averaged over; of an expert, those that reached it.
        alike: Of an expert, the share of these rows whose tokens the original network sends to it as well: for the
            others nothing is corrected. None of other layers, and where targets are not corrected.
        blended: Of an expert that few tokens reached, for how many tokens the mean Hessian over the experts of its block
            stands in its own; 0 where it has enough. None of other layers.
        order: In which columns were rounded.
        format: Name of the number format: int4-g128, q4_k; coded for entropy-coded weights, whose codes have no limits.
        asked: Bits per weight that the entropy-coded matrix was to take.
        base: Step of exponent 0 in the sweep of entropy-coded weights; that in the file is scaled to keep the target's energy.
        entropy: Bits per weight of the codes under the tables that the file stores, side information not counted.
        limit: Bits per weight below which no code reaches this loss on Gaussian rows under the same Hessian, rows weighted as their
            exponents say; see `lattice/bounds.py`. None for more than 4096 inputs, and where nothing at all was lost.
        seconds: To solve and measure it; a factor that layers share is counted at the first of them, calibration at none.
        bytes: Of the layer's tensors in the file.
        checksum: SHA-256 of these tensors: of a line "RECORD DTYPE SIZE SIZE ..." and the bytes of each, sorted by name.
    """

    name: str
    out_features: int
    in_features: int
    loss: float
    relative_loss: float
    row_losses: tuple[float, ...]
    damped_loss: float
    correction: float
    damp: float
    sweep_damp: float
    dead: int
    tokens: int
    order: str
    format: str
    seconds: float
    nearest_loss: float | None = None
    worst_case: float | None = None
    expected: float | None = None
    gamma: float | None = None
    clipped: float = 0.0
    clipped_rows: float = 0.0
    extra_loss: float | None = None
    extra_relative_loss: float | None = None
    extra_nearest_loss: float | None = None
    pruned: int | None = None
    asked: float | None = None
    base: float | None = None
    entropy: float | None = None
    limit: float | None = None
    alike: float | None = None
    blended: int | None = None
    bytes: int = 0
    stored: str = ""
    checksum: str = ""

    def __post_init__(self) -> None:
        if self.out_features < 1 or self.in_features < 1:
            raise FormatError(f"{self.name} is {self.out_features} x {self.in_features}; a matrix is at least 1 x 1.")
        if self.limit == math.inf:  # which JSON does not have
            object.__setattr__(self, "limit", None)
        assert self.number_format, "refuses names of none"

    @property
    def number_format(self) -> NumberFormat:
        """How the weights are stored.

        Raises:
            RecipeError: there is no format of this name.
        """
        return number_format(self.format)

    @property
    def rate(self) -> float:
        """Bits per weight in the file."""
        return 8 * self.bytes / (self.out_features * self.in_features)

    @property
    def above_limit(self) -> float | None:
        """Bits per weight in the file above the limit."""
        return None if self.limit is None else self.rate - self.limit


def one_line(text: str) -> str:
    """Return JSON with every list of numbers on one line."""
    return re.sub(r"\[[-+.\deE,\s]+\]", lambda found: " ".join(found[0].split()), text)


def row_groups(out_features: int, in_features: int) -> int:
    """Return into how many groups of neighbouring rows the loss of a matrix is split: a sixteenth of the root of its weights.

    A code moved by one changes the loss of its group by about 1 / (the group's weights), which must stay far above what
    recomputing the losses elsewhere changes.
    """
    return min(out_features, max(1, round(math.sqrt(out_features * in_features) / 16)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run.

    Args:
        recipe: What it was told.
        source: The model as the user named it.
        versions: Of the packages that computed it.
        device: That it ran on.
        stored: How the makers of the model store its weights, if in few bits: fp8, mxfp4. See `fp8_mxfp4.py`.
        products: Which library multiplied float32 matrices, from a trial at the start of the run; None: torch's default, untried.
        windows, seqlen, tokens: Calibration windows that are fitted, their length, and their product.
        extra_windows: Windows of the same text that enter no sum, on which losses are measured besides.
        text: SHA-256 of the token ids of all these windows, as little-endian int64, and behind them of their sound, as float32, if
            they have one; of images of their pixel values, as float32. Empty where there were none.
        layers: In the order they were quantized.
        skipped: (name, reason) of weights that were left as they are although the recipe did not ask for it.
        batch: Windows that passed through a block at a time, as --memory asked for fewer than usual; None: as usual.
        seconds: Of the whole run, and of tuning what it made.
        peak_memory: The most bytes that the process had in memory at a time, on the CPU; 0: not known.
        bytes: Of all weight files together.
        folder: Bytes of all files of the checkpoint, this record among them.
        files: SHA-256 of every other file of the checkpoint.
        tuning: What was trained after the solve; the certificates are then of what it left, along the tuned network,
            and `versions`, `device` and `products` are those of tuning. None: nothing.
        digest: See `digest_of`.
    """

    recipe: Recipe
    source: str
    versions: dict[str, str]
    device: str
    windows: int
    seqlen: int
    tokens: int
    products: Products | None = None
    extra_windows: int = 0
    text: str = ""
    stored: str = ""
    layers: tuple[LayerRecord, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    seconds: float = 0.0
    peak_memory: int = 0
    bytes: int = 0
    folder: int = 0
    files: dict[str, str] = field(default_factory=dict)
    tuning: Tuning | None = None
    digest: str = ""
    version: int = field(default=VERSION)

    def to_json(self) -> str:
        """Return the record as JSON, a list of numbers on one line."""
        return one_line(json.dumps(asdict(self), indent=1))

    def inside(self) -> RunRecord:
        """Return the record as a file of weights has it inside: without hashes of files, and without what no two runs share, times.

        `bytes` are then those of the file, and so is `folder`: what it is when nothing lies beside it.
        """
        bare = replace(
            self,
            layers=tuple(replace(layer, seconds=0.0) for layer in self.layers),
            tuning=None if self.tuning is None else replace(self.tuning, seconds=0.0),
            seconds=0.0,
            peak_memory=0,
            folder=self.bytes,
            files={},
            digest="",
        )
        return replace(bare, digest=digest_of(bare.to_json()))

    def in_folder(self, others: int) -> RunRecord:
        """Return the record with the bytes of its folder, in which it lies beside `others` bytes, and its digest."""
        record = replace(self, folder=0, digest="0" * 64)
        without = others + len(record.to_json().encode()) - 1  # of the one digit of 0
        folder = without
        while folder != without + len(str(folder)):  # which counts its own digits
            folder = without + len(str(folder))
        record = replace(record, folder=folder)
        return replace(record, digest=digest_of(record.to_json()))

    @classmethod
    def from_json(cls, text: str, where: str = RECORD) -> RunRecord:
        """Read what `to_json` wrote.

        Args:
            text: the JSON.
            where: the file that holds it, for messages.

        Raises:
            FormatError: it is not a record of this version, or a field is not of the type that it is declared with; the
                message names it.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("it is not an object")
            if data.get("version") != VERSION:
                raise _of_another_version(data, where)
            record: RunRecord = annotated(cls, data, "record")
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where} is not a record that this version of nearplane reads ({error}).") from error
        return record

    @property
    def rate(self) -> float:
        """Bits per quantized weight in the file, all tensors of the quantized layers counted."""
        return self._mean([layer.rate for layer in self.layers]) or 0.0

    @property
    def entropy(self) -> float | None:
        """Bits per quantized weight that are codes; None on fixed grids."""
        return self._mean([layer.entropy for layer in self.layers])

    @property
    def above_limit(self) -> float | None:
        """Bits per quantized weight above the limit; None if it is not known of some layer."""
        return self._mean([layer.above_limit for layer in self.layers])

    @property
    def overhead(self) -> int:
        """Bytes of the weight files that are not the quantized layers' tensors: embeddings, norms, headers."""
        return self.bytes - sum(layer.bytes for layer in self.layers)

    @property
    def exceeding(self) -> tuple[LayerRecord, ...]:
        """Layers whose relative loss is more than the recipe's max_loss, the worst first."""
        most = self.recipe.max_loss
        found = [layer for layer in self.layers if most is not None and layer.relative_loss > most]
        return tuple(sorted(found, key=lambda layer: -layer.relative_loss))

    @property
    def missed(self) -> str | None:
        """A sentence if the rate or size asked for was missed by more than 0.5 %, or by types of llama.cpp 2 %."""
        if self.recipe.scheme.asked is None:
            return None
        wanted, unit = self.recipe.scheme.asked
        if unit != "bytes" and self.recipe.layers:  # the rate is that of the layers without one of their own
            return None
        found = self.folder if unit == "bytes" else self.rate
        coarse = isinstance(self.recipe.scheme, BlockScheme)
        if abs(found / wanted - 1) <= (0.02 if coarse else 0.005):
            return None
        why = "some layers cannot have the rate that they were given" + (
            "" if self.recipe.max_loss is None else ", or needed more to keep --max-loss"
        )
        if coarse:
            why = "llama.cpp has no types between, or the record took less than was kept free for it"
        return f"{wanted:,g} {unit} asked for, {found:,.6g} found: {why}, see `nearplane inspect`."

    def _mean(self, values: list[float | None]) -> float | None:
        """Return the mean over weights of a figure of the layers; None if a layer has none."""
        sizes = [layer.out_features * layer.in_features for layer in self.layers]
        known = [value for value in values if value is not None]
        if not sizes or len(known) < len(values):
            return None
        return sum(value * size for value, size in zip(known, sizes, strict=True)) / sum(sizes)


def _of_another_version(data: dict[str, Any], where: str) -> FormatError:
    """Return what to raise of a record of another version: names the nearplane that wrote it, where the record does."""
    wrote = data.get("versions")
    number = wrote.get("nearplane") if isinstance(wrote, dict) else None
    by = f"nearplane {printable(number)[:20]}" if isinstance(number, str) else "another version of nearplane"
    return FormatError(
        f"{where} was written by {by}, whose records this version does not read: found record version "
        f"{json.dumps(data.get('version'))[:20]}, expected {VERSION}. Quantize again, or read it with {by}."
    )


def contradictions(record: RunRecord) -> Iterator[tuple[LayerRecord, str]]:
    """Yield what cannot be true of a certificate in a record, whatever the data."""
    recipe = record.recipe.grouped(layer.in_features for layer in record.layers)
    for layer in record.layers:
        yield from ((layer, what) for what in _contradicting(layer, record, recipe))


def _contradicting(layer: LayerRecord, record: RunRecord, recipe: Recipe) -> Iterator[str]:
    """Yield what cannot be true of the certificate of a layer, with group sizes settled in the recipe."""
    size, larger = divmod(layer.out_features, max(1, len(layer.row_losses)))  # rows of a group; of the first one more
    rows = (size + (index < larger) for index in range(len(layer.row_losses)))
    loss = sum(group * count for group, count in zip(layer.row_losses, rows, strict=True)) / layer.out_features
    if not math.isclose(loss, layer.loss, rel_tol=1e-8, abs_tol=1e-300):
        yield f"row_losses average {loss:.9g}, loss is {layer.loss:.9g}"
    third = (layer.expected or 0.0) * 3
    if layer.worst_case is not None and not math.isclose(third, layer.worst_case, rel_tol=1e-12, abs_tol=1e-300):
        yield f"expected is {layer.expected}, a third of worst_case is {layer.worst_case / 3}"
    if recipe.ignores(layer.name):
        yield "the recipe ignores it"
        return
    scheme = recipe.scheme_of(layer.name)
    if recipe.allocate == "slope" or scheme.types_vary:
        scheme = scheme.storing(layer.number_format)
    own, asked = (layer.format, layer.order), (scheme.number_format.name, scheme.order)
    if own != asked:
        yield f"number format and order are {own}, the recipe says {asked}"
    if not 0 <= layer.clipped <= layer.clipped_rows <= 1:
        yield f"clipped is {layer.clipped}, clipped_rows {layer.clipped_rows}"
    if layer.worst_case is not None and layer.clipped_rows == 0 and layer.damped_loss > layer.worst_case * (1 + 1e-9):
        yield f"damped_loss {layer.damped_loss:.6g} is more than worst_case {layer.worst_case:.6g} though nothing clips"


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute here."""
    packages = ("nearplane", "torch", "transformers", "numba", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def digest_of(text: str) -> str:
    """Return what the digest in the JSON of a record must be: the SHA-256 of the text with an empty one."""
    return hashlib.sha256(re.sub(r'"digest": "[0-9a-f]*"', '"digest": ""', text).encode()).hexdigest()


def read_record(folder: Path) -> RunRecord:
    """Read the record of the checkpoint in a folder.

    Raises:
        FormatError: there is none, or it cannot be read.
    """
    path = folder / RECORD
    if folder.is_file():
        raise FormatError(
            f"{folder} is a file: expected the folder that nearplane quantize wrote, with the record {RECORD} in it. Files of "
            f"other programs have none."
        )
    if not path.is_file():
        raise FormatError(
            f"{folder} holds no {RECORD}: expected a folder that nearplane quantize wrote and finished.{left_behind(folder)}"
        )
    try:
        return RunRecord.from_json(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not text ({error}). Fetch it again.") from error
