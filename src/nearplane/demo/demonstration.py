"""The demonstration: quantize the small model in this folder in several ways and measure each result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from nearplane.demo import EVALUATION_WINDOWS, HELD_OUT, MODEL, SEQLEN
from nearplane.demo.demo_recipes import check_folder, folder_name, recipes
from nearplane.system.progress import Progress, silent
from nearplane.system.safetensors_files import ShardReader
from nearplane.system.sizes import size_text
from nearplane.verbs.evaluate import evaluate, load_dense
from nearplane.verbs.quantize_api import quantize


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the demonstration's table.

    Args:
        grid: Description of the grid, for example "4-bit sym g128".
        solver: Name of the solver; "-" for the original.
        rate: Bits per quantized weight in the file.
        bytes: Size of the weight files in bytes.
        perplexity: Perplexity on the held-out text.
        excess: Negative log-likelihood minus that of the original, in nats per token.
        kl: KL(original || quantized) in nats per token.
        seconds: Time of quantization in seconds.
        folder: Folder of the checkpoint; None for the original.
    """

    grid: str
    solver: str
    rate: float
    bytes: int
    perplexity: float
    excess: float = 0.0
    kl: float = 0.0
    seconds: float = 0.0
    folder: Path | None = None

    def __str__(self) -> str:
        """Return the row as one line of a log."""
        figures = f"perplexity {self.perplexity:.3f}, {size_text(self.bytes)}"
        if self.folder is None:
            return f"{self.grid}, {figures}"
        return f"{self.grid}, {self.solver}, {figures}, KL {self.kl:.4f} nats per token, {self.seconds:.1f} s"


def run(out: Path, progress: Progress = silent) -> Iterator[Row]:
    """Quantize the demo model on grids and entropy-coded into folders below `out`, and yield a row for each.

    Raises:
        RecipeError: `out` has files that an earlier demonstration did not write, or cannot be written.
    """
    check_folder(out)
    original, _ = load_dense(MODEL, torch.device("cpu"))  # read once, for all rows
    perplexity, original_nll, _ = _measure(MODEL, None, progress)
    size = sum(path.stat().st_size for path in MODEL.glob("*.safetensors"))
    dtype = ShardReader(MODEL).dtype("model.norm.weight").lower()
    yield Row(grid=f"original ({dtype})", solver="-", rate=16.0, bytes=size, perplexity=perplexity)
    for label, solver, recipe in recipes():
        folder = out / folder_name(label, solver)
        record = quantize(MODEL, folder, recipe, overwrite=True, progress=progress)
        perplexity, nll, kl = _measure(folder, original, progress)
        yield Row(
            grid=label,
            solver=solver,
            rate=record.rate,
            bytes=record.bytes,
            perplexity=perplexity,
            excess=nll - original_nll,
            kl=kl,
            seconds=record.seconds,
            folder=folder,
        )


def _measure(model: Path, against: PreTrainedModel | None, progress: Progress) -> tuple[float, float, float]:
    """Return the perplexity, the negative log-likelihood and the KL divergence from the original (0 without one)."""
    score = evaluate(model, HELD_OUT, seqlen=SEQLEN, samples=EVALUATION_WINDOWS, against=against, progress=progress)
    assert score.perplexity is not None, "a language model has a perplexity"
    assert score.nll is not None, "a language model has a likelihood"
    return score.perplexity, score.nll, score.kl or 0.0
