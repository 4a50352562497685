"""The run record, `nearplane.json` in every checkpoint: all measurements as frozen data. Needs no torch."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Any

from nearplane.errors import FormatError, printable
from nearplane.number_formats import NumberFormat, number_format
from nearplane.recipe.recipe import Recipe
from nearplane.record.fold import Fold
from nearplane.record.mix_record import MixRecord
from nearplane.record.tuning_record import Tuning
from nearplane.system.arguments import ComputeDtype
from nearplane.system.files import digest_of
from nearplane.system.matmul_choice import Products
from nearplane.system.sizes import counted, size_text

installed_version = cache(version)  # parses a file of metadata
MAX_EXPONENT = 16  # of factors of rows, by their position
VERSION = 5  # of the record; records of other versions are refused
# values with which fields are not in the file: of a run, of each of its layers, of its recipe, of schemes of some layers in it,
# and of its calibration
LEFT_OUT: dict[str, object] = {
    "sources": (), "extra_kl": None, "original_bytes": 0, "card": 0, "compute_dtype": "auto", "cache_scales": {},
    "mix": None, "headroom": 1.0, "folds": (),
}  # fmt: skip
LEFT_OUT_OF_LAYERS: dict[str, object] = {
    "degenerate": "", "extra_by_source": (), "extra_own_loss": None, "positions": (),
}  # fmt: skip
LEFT_OUT_OF_RECIPE: dict[str, object] = {
    "activations": "none", "kv_cache": "none", "like": None, "runtime": None, "mix": None,
}  # fmt: skip
LEFT_OUT_OF_SCHEMES: dict[str, object] = {"activations": None}
LEFT_OUT_OF_CALIBRATION: dict[str, object] = {"first_token": "none", "positions": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One quantized layer and its certificate; `nearplane verify` measures all fields but `seconds` again.

    Losses are means over out * in against the corrected target, see `lattice/bounds.py`.

    Args:
        name: Full name of the layer.
        stored: Name of its tensors in the file; the same for most models.
        out_features, in_features: Shape of the weight.
        loss: Exact loss under the undamped Hessian.
        row_losses: Losses of `row_groups` groups of neighbouring rows, to 9 digits; a changed code shows in its group.
        relative_loss: Loss divided by the energy of the weights under that Hessian.
        nearest_loss: Loss of rounding the same target to nearest on the same grid.
        extra_loss: Loss against the original model's outputs on the extra windows, which were not used for fitting, or
            on about 1,024 evenly spaced tokens of them. It includes the losses of earlier layers. If targets are not
            corrected the original model does not run, and it is the loss of this layer alone. This and the next two are
            None if no row of extra windows reached the layer.
        extra_relative_loss: `extra_loss` divided by the energy of the original model's outputs.
        extra_nearest_loss: `extra_loss` if the target were rounded to nearest on the same grid.
        extra_own_loss: What this layer alone loses on the extra windows: the squared difference of its outputs from those of
            its target, for the inputs that it has in the quantized network, divided as `extra_relative_loss`. It is to
            other text what `relative_loss` is to the calibration text. None, and then not in the file, without rows of extra
            windows, and of older versions.
        extra_by_source: `extra_relative_loss` on the extra windows of each `Source` of a mix, None where no row of them
            reached the layer; empty, and then not in the file, for a single text.
        damped_loss: Loss of the sweep under the Hessian damped with `sweep_damp`; the next three refer to it.
        worst_case: Babai's bound, averaged over all rows; an upper bound of `damped_loss` if `clipped_rows` is 0. It
            holds for each row that does not clip, so their sum is at most the sum of their bounds. If rows clip, this
            mean bounds neither single rows nor `damped_loss`. This and the next two are None for codes not made by a
            sweep.
        expected: A third of the bound.
        gamma: Largest ratio of a row's error, as a length, to the least possible, over rows that do not clip; None if
            all rows clip.
        clipped, clipped_rows: Fraction of codes that the sweep would have put outside the grid, and of rows with such a
            code. The bounds exclude these rows, the losses include them.
        correction: Position of the target between the weights (0) and the full correction (1).
        damp: Damping of the correction, relative to the mean of the Hessian's diagonal.
        sweep_damp: Damping of the sweep, likewise.
        dead: Number of inputs that were always 0.
        pruned: Number of dead inputs that were not always 0 in the original model, so that quantization made them dead.
            None if targets are not corrected, as the original model does not run then.
        tokens: Number of rows that the Hessian was averaged over; for an expert, those that reached it.
        alike: Share of an expert's rows whose tokens the original model sends to the same expert; the targets of the
            others are not corrected. None for other layers, and if targets are not corrected.
        blended: Number of tokens for which the mean Hessian of the block's experts counts in the Hessian of an expert
            that few tokens reached; 0 if it has enough. None for other layers.
        positions: Binary exponent by which inputs were scaled, for each octave of positions in a window: a token counts
            `4^exponent` times in all losses, see `calibration/positions.py`. Empty, and then not in the file: all alike.
        order: Order in which columns were rounded.
        format: Name of the number format: int4-g128, q4_k; coded for entropy-coded weights, whose codes have no limits.
        asked: Bit budget of an entropy-coded layer, in bits per weight.
        base: Step of exponent 0 in the sweep of entropy-coded weights; the file scales it to keep the target's energy.
        entropy: Bits per weight of the codes under the tables in the file, without side information.
        limit: Bits per weight below which no code reaches this loss on Gaussian rows under the same Hessian, with rows
            weighted by their exponents, see `lattice/bounds.py`. None above 4096 inputs, and if the loss is 0.
        seconds: Time to solve and measure the layer, without calibration; a shared factor counts at its first layer.
        bytes: Size of the layer's tensors in the file.
        degenerate: Why the losses tell nothing about the layer, so that they are left out of all means; empty, and then
            not in the file, for usual layers. See `bounds.degeneracy`.
        checksum: SHA-256 of these tensors: a line "RECORD DTYPE SIZE SIZE ..." and the bytes of each, sorted by name.
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
    extra_own_loss: float | None = None
    extra_by_source: tuple[float | None, ...] = ()
    pruned: int | None = None
    asked: float | None = None
    base: float | None = None
    entropy: float | None = None
    limit: float | None = None
    alike: float | None = None
    blended: int | None = None
    positions: tuple[int, ...] = ()
    bytes: int = 0
    stored: str = ""
    degenerate: str = ""
    checksum: str = ""

    def __post_init__(self) -> None:
        if self.out_features < 1 or self.in_features < 1:
            raise FormatError(f"{self.name} is {self.out_features} x {self.in_features}; expected at least 1 x 1.")
        if any(abs(each) > MAX_EXPONENT for each in self.positions):
            raise FormatError(f"{self.name}: positions are {self.positions}; expected exponents up to {MAX_EXPONENT}.")
        if self.limit == math.inf:  # JSON has no infinity
            object.__setattr__(self, "limit", None)
        assert self.number_format, "raises for unknown names"

    @property
    def own_loss(self) -> float:
        """Share of its outputs that this layer alone loses: on the extra windows if that is known, else on what was fitted."""
        return self.relative_loss if self.extra_own_loss is None else self.extra_own_loss

    @property
    def number_format(self) -> NumberFormat:
        """Number format of the weights.

        Raises:
            RecipeError: No number format has this name.
        """
        return number_format(self.format)

    @property
    def rate(self) -> float:
        """Bits per weight in the file."""
        return 8 * self.bytes / (self.out_features * self.in_features)

    @property
    def above_limit(self) -> float | None:
        """Bits per weight in the file above the limit."""
        return None if self.limit is None or self.degenerate else self.rate - self.limit


def one_line(text: str) -> str:
    """Return JSON text with every list of numbers on one line."""
    return re.sub(r"\[[-+.\deE,\s]+\]", lambda match: " ".join(match[0].split()), text)


def row_groups(out_features: int, in_features: int) -> int:
    """Return the number of row groups for the losses of a matrix: a sixteenth of the root of its number of weights.

    A code changed by one changes the loss of its group by about 1 / (number of the group's weights). That must be much
    more than the numerical difference when another machine computes the losses again.
    """
    return min(out_features, max(1, round(math.sqrt(out_features * in_features) / 16)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One text of a mix.

    Args:
        name: The text as the user named it.
        weight: Weight of its windows.
        windows, extra_windows: Numbers of its calibration windows and of its extra windows.
    """

    name: str
    weight: float
    windows: int
    extra_windows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The record of one run.

    Args:
        recipe: The recipe of the run.
        source: The model as the user named it.
        versions: Versions of the packages that computed it.
        device: The device that computed it, with the model of a GPU, on which the last digits depend, for example
            "cuda:1, NVIDIA H100".
        compute_dtype: Dtype in which blocks ran; auto, and then not in the file, for float32 on the CPU, and where an
            older version did not record it.
        stored: Format in which the original model stores weights in few bits, fp8 or mxfp4. See `source_storage.py`.
        products: Library of float32 matrix products, chosen by a trial at the start; None: torch's default, untried.
        windows, seqlen, tokens: Number of calibration windows, tokens per window, and their product.
        extra_windows: Number of extra windows of the same text, on which losses are measured but nothing is fitted.
        extra_kl: Mean KL(original || quantized) in nats over the tokens of the extra windows but the last of each; None, and
            then not in the file, where there are no extra windows, and of older versions, also where one did not correct
            targets. The head is that of the original, also where it is quantized.
        sources: Texts of a mix; empty, and then not in the file, for a single text.
        original_bytes: Size of all tensors of the original model; 0, and then not in the file, of older versions.
        text: SHA-256 of all these windows: of the token ids as little-endian int64, then of their sound as float32, if
            any; for images of the pixel values as float32. Empty without windows.
        mix: How the number formats of layers were chosen, which the recipe then names; None, and then not in the file: they
            were asked for.
        layers: Records of the layers in the order of the solve.
        cache_scales: {name of the attention in the files: scales of its keys and of its values} for a key-value cache in 8-bit
            floats, see --kv-cache; empty, and then not in the file, without.
        headroom: Factor by which the global scales of rounded inputs allow larger ones than those of the calibration text; 1,
            and then not in the file, without such scales and of older versions.
        folds: Channel scales that were folded from norms into weights, to which the tensors of the original were compared and
            its certificates refer; empty, and then not in the file, where inputs are not rounded to four bits.
        skipped: (name, reason) of weights that were not quantized although the recipe did not exclude them.
        batch: Number of windows per forward pass, if --memory reduced it; None: the default.
        seconds: Time of the whole run, including tuning.
        peak_memory: Largest memory on the CPU, in bytes, of several processes the sum of each one's largest; 0: unknown.
        bytes: Size of all weight files together.
        card: Size of the model card as it was written, which may change later; 0, and then not in the file: none was.
        folder: Size of all files of the checkpoint, including this record and the model card, in bytes.
        files: SHA-256 of every other file of the checkpoint, except the model card.
        tuning: Record of the tuning after the solve; then the certificates are those of the tuned layers in the tuned
            network, and `versions`, `device`, `compute_dtype` and `products` are those of tuning. None: no tuning.
        digest: SHA-256 of the record, see `digest_of`.
    """

    recipe: Recipe
    source: str
    versions: dict[str, str]
    device: str
    windows: int
    seqlen: int
    tokens: int
    compute_dtype: ComputeDtype = "auto"
    products: Products | None = None
    extra_windows: int = 0
    extra_kl: float | None = None
    sources: tuple[Source, ...] = ()
    original_bytes: int = 0
    text: str = ""
    stored: str = ""
    mix: MixRecord | None = None
    layers: tuple[LayerRecord, ...] = ()
    cache_scales: dict[str, tuple[float, float]] = field(default_factory=dict)
    headroom: float = 1.0
    folds: tuple[Fold, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    seconds: float = 0.0
    peak_memory: int = 0
    bytes: int = 0
    card: int = 0
    folder: int = 0
    files: dict[str, str] = field(default_factory=dict)
    tuning: Tuning | None = None
    digest: str = ""
    version: int = field(default=VERSION)

    def __str__(self) -> str:
        """Return the most important figures in a few lines; `nearplane inspect` and `report` show all of them."""
        size = f"{size_text(self.bytes)} of weight files"
        if self.original_bytes and self.bytes:
            size += f" (original {size_text(self.original_bytes)})"
        lines = [f"{self.source}: {counted(len(self.layers), 'layer')} at {self.rate:.3f} bits per weight, {size}"]
        if self.extra_kl is not None:
            extra = counted(self.extra_windows, "extra window")
            lines.append(f"KL {self.extra_kl:.3g} nats per token from the original's predictions, on {extra}")
        if self.tuning is not None:
            lines.append(self.tuning.sentence())
        if self.measured:
            worst = max(self.measured, key=lambda layer: layer.own_loss)
            lines.append(f"largest loss by itself: {100 * worst.own_loss:.2g} % of the output of {worst.name}")
        return "\n".join(map(printable, lines))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the same in notebooks, where the record of a large model would fill pages."""
        printer.text(str(self) if not cycle else "...")

    def to_json(self) -> str:
        """Return the record as JSON, with every list of numbers on one line."""
        return one_line(json.dumps(self.fields(), indent=1))

    def fields(self) -> dict[str, Any]:
        """Return all fields as in JSON, without those that only some runs or layers have and that are `LEFT_OUT` of others."""
        fields = asdict(self)
        recipe = fields["recipe"]
        parts = [(fields, LEFT_OUT), (recipe, LEFT_OUT_OF_RECIPE), (recipe["calibration"], LEFT_OUT_OF_CALIBRATION)]
        parts += [(scheme, LEFT_OUT_OF_SCHEMES) for scheme in recipe["layers"]]
        for part, left_out in (*parts, *((layer, LEFT_OUT_OF_LAYERS) for layer in fields["layers"])):
            for name, value in left_out.items():
                if part[name] == value:
                    del part[name]
        return fields

    def embedded(self) -> RunRecord:
        """Return the record that a weight file embeds, without hashes of files and without times, which vary.

        `folder` is then equal to `bytes`, the size of the file alone.
        """
        bare = replace(
            self,
            layers=tuple(replace(layer, seconds=0.0) for layer in self.layers),
            tuning=None if self.tuning is None else replace(self.tuning, seconds=0.0),
            seconds=0.0,
            peak_memory=0,
            card=0,
            folder=self.bytes,
            files={},
            digest="",
        )
        return replace(bare, digest=digest_of(bare.to_json()))

    def in_folder(self, others: int) -> RunRecord:
        """Return the record with its digest and the bytes of its folder, whose other files have `others` bytes."""
        record = replace(self, folder=0, digest="0" * 64)
        without = others + len(record.to_json().encode()) - 1  # without the digit 0
        folder = without
        while folder != without + len(str(folder)):  # the size counts its own digits
            folder = without + len(str(folder))
        record = replace(record, folder=folder)
        return replace(record, digest=digest_of(record.to_json()))

    @property
    def rate(self) -> float:
        """Bits per quantized weight in the file, counting all tensors of the quantized layers."""
        return _mean(self.layers, lambda layer: layer.rate) or 0.0

    @property
    def entropy(self) -> float | None:
        """Bits of codes per quantized weight; None on fixed grids."""
        return _mean(self.layers, lambda layer: layer.entropy)

    @property
    def above_limit(self) -> float | None:
        """Bits per quantized weight above the limit; None if a measured layer has no limit."""
        return _mean(self.measured, lambda layer: layer.above_limit)

    @property
    def measured(self) -> tuple[LayerRecord, ...]:
        """Layers whose losses count: all that are not degenerate."""
        return tuple(layer for layer in self.layers if not layer.degenerate)

    def lost(self, source: int) -> float | None:
        """Return the mean over layers of `extra_by_source` for one text of a mix; None if no layer has it."""
        losses = [layer.extra_by_source[source] for layer in self.measured if len(layer.extra_by_source) > source]
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if known else None

    @property
    def overhead(self) -> int:
        """Bytes of the weight files outside the quantized layers' tensors: embeddings, norms, headers."""
        return self.bytes - sum(layer.bytes for layer in self.layers)

    @property
    def exceeding(self) -> tuple[LayerRecord, ...]:
        """Layers whose relative loss exceeds the recipe's max_loss, the worst first."""
        limit = self.recipe.max_loss
        above = [layer for layer in self.layers if limit is not None and layer.relative_loss > limit]
        return tuple(sorted(above, key=lambda layer: -layer.relative_loss))


def _mean(layers: Sequence[LayerRecord], value: Callable[[LayerRecord], float | None]) -> float | None:
    """Return the mean of a value of layers over all their weights; None if a layer has no value."""
    sizes = [layer.out_features * layer.in_features for layer in layers]
    known = [each for layer in layers if (each := value(layer)) is not None]
    if not sizes or len(known) < len(sizes):
        return None
    return sum(each * size for each, size in zip(known, sizes, strict=True)) / sum(sizes)


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that compute."""
    packages = ("nearplane", "torch", "transformers", "numba", "safetensors")
    return {"python": platform.python_version()} | {name: installed_version(name) for name in packages}
