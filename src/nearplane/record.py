"""What a run measured, as frozen data: `nearplane.json` in every checkpoint. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nearplane.errors import FormatError
from nearplane.recipe import Recipe

NAME = "nearplane.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One quantized layer. Losses are means over out * in, see `lattice/bounds.py`; they refer to the quantized target.

    Args:
        name: Full name of the layer.
        out_features, in_features: Shape of the weight.
        loss: Exact loss under the undamped Hessian.
        relative_loss: The same over the energy of the weights under that Hessian.
        nearest_loss: Loss of rounding the same target to nearest on the same grid; None for entropy-coded weights.
        damped_loss: Loss under the damped Hessian, which the next two refer to.
        worst_case: Babai's bound on it; holds for rows that do not clip. None, as the next two, for codes rounded to nearest.
        expected: A third of the bound.
        gamma: The error is at most gamma times the least possible, for rows that do not clip; None if all do.
        clipped, clipped_rows: Fraction of codes, of rows, whose target lay outside the grid.
        correction: How far the target went from the weights to the full correction, 0 to 1.
        damp: Damping used, relative to the mean of the Hessian's diagonal.
        sweep_damp: The same in the sweep of entropy-coded weights, which damped_loss then refers to.
        dead: Inputs that were always 0.
        tokens: Rows that the Hessian was averaged over.
        order: In which columns were rounded.
        bits, group_size, symmetric: Of the grid; None for entropy-coded weights, whose codes have no limits.
        asked: Bits per weight that the entropy-coded matrix was to take.
        entropy: Bits per weight of the codes under the tables that the file stores, side information not counted.
        limit: Bits per weight below which no code reaches this loss on Gaussian rows under the same Hessian, rows weighted as their
            exponents say; see `lattice/bounds.py`. None for more than 4096 inputs.
        seconds: To solve and measure it; a factor that layers share is counted at the first of them, calibration at none.
        bytes: Of the layer's tensors in the file.
    """

    name: str
    out_features: int
    in_features: int
    loss: float
    relative_loss: float
    damped_loss: float
    correction: float
    damp: float
    dead: int
    tokens: int
    order: str
    seconds: float
    nearest_loss: float | None = None
    worst_case: float | None = None
    expected: float | None = None
    gamma: float | None = None
    clipped: float = 0.0
    clipped_rows: float = 0.0
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    sweep_damp: float | None = None
    asked: float | None = None
    entropy: float | None = None
    limit: float | None = None
    bytes: int = 0

    @property
    def rate(self) -> float:
        """Bits per weight in the file."""
        return 8 * self.bytes / (self.out_features * self.in_features)

    @property
    def above_limit(self) -> float | None:
        """Bits per weight in the file above the limit."""
        return None if self.limit is None else self.rate - self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run.

    Args:
        recipe: What it was told.
        source: The model as the user named it.
        versions: Of the packages that computed it.
        device: That it ran on.
        windows, seqlen, tokens: Calibration windows, their length, and their product.
        layers: In the order they were quantized.
        skipped: (name, reason) of weights that were left as they are although the recipe did not ask for it.
        seconds: Of the whole run.
        bytes: Of all weight files together.
        folder: Bytes of all files of the checkpoint, this record among them.
    """

    recipe: Recipe
    source: str
    versions: dict[str, str]
    device: str
    windows: int
    seqlen: int
    tokens: int
    layers: tuple[LayerRecord, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    folder: int = 0
    version: int = field(default=1)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=1)

    def in_folder(self, others: int) -> RunRecord:
        """Return the record with the bytes of its folder, in which it lies beside `others` bytes."""
        record = replace(self, folder=others)
        for _ in range(3):  # until the number has as many digits as were counted
            record = replace(record, folder=others + len(record.to_json().encode()))
        return record

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read what `to_json` wrote.

        Raises:
            FormatError: it is not a record of this version.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            recipe = Recipe.from_json(json.dumps(data.pop("recipe")))
            layers = tuple(LayerRecord(**layer) for layer in data.pop("layers"))
            if data.get("version") != 1:
                raise ValueError(f"version {data.get('version')}, expected 1")
            skipped = tuple((name, reason) for name, reason in data.pop("skipped"))
            return cls(recipe=recipe, layers=layers, skipped=skipped, **data)
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{NAME} is not a record that this version of nearplane reads ({error}).") from error

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
        """Bits per quantized weight above the limit; None on fixed grids."""
        return self._mean([layer.above_limit for layer in self.layers])

    @property
    def overhead(self) -> int:
        """Bytes of the weight files that are not the quantized layers' tensors: embeddings, norms, headers."""
        return self.bytes - sum(layer.bytes for layer in self.layers)

    @property
    def missed(self) -> str | None:
        """A sentence if the rate or size asked for was missed by more than 0.5 %."""
        asked = self.recipe.rate
        wanted, found, unit = (
            (asked.rate, self.rate, "bits per weight") if asked.rate else (asked.bytes(), self.folder, "bytes")
        )
        if wanted is None or abs(found / wanted - 1) <= 0.005:
            return None
        return (
            f"{wanted:,g} {unit} asked for, {found:,.6g} found: some layers cannot have the rate that they were given, "
            f"see `nearplane inspect`."
        )

    def _mean(self, values: list[float | None]) -> float | None:
        """Return the mean over weights of a figure of the layers; None if a layer has none."""
        sizes = [layer.out_features * layer.in_features for layer in self.layers]
        known = [value for value in values if value is not None]
        if not sizes or len(known) < len(values):
            return None
        return sum(value * size for value, size in zip(known, sizes, strict=True)) / sum(sizes)


def read_record(folder: Path) -> RunRecord:
    """Read the record of the checkpoint in a folder.

    Raises:
        FormatError: there is none, or it cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        raise FormatError(f"{folder} holds no {NAME}: expected a folder that nearplane quantize wrote and finished.")
    return RunRecord.from_json(path.read_text())
