"""The demonstration: quantize the small model in this folder in several ways and measure what each is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearplane.demo import CALIBRATION, CALIBRATION_WINDOWS, EVALUATION_WINDOWS, HELD_OUT, MODEL, SEQLEN
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.recipe.scheme import Format, Solver
from nearplane.recipe.schemes import GridScheme, RateScheme
from nearplane.system.progress import silent
from nearplane.system.safetensors_files import ShardReader
from nearplane.verbs.evaluate import Evaluation, evaluate
from nearplane.verbs.quantize_model import quantize

SOLVERS: tuple[Solver, ...] = ("round-to-nearest", "nearest-plane")
RATES = (3.0, 2.0)  # bits per weight, entropy-coded
GRIDS: tuple[tuple[int, int, bool, Format], ...] = (  # bits, group size, symmetric, format
    (4, 128, True, "compressed-tensors"),
    (3, 128, False, "gptq_v2"),
    (2, 64, False, "gptq_v2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the demonstration's table.

    Args:
        grid: In words.
        solver: how codes were found; "-" for the original.
        rate: Bits per quantized weight in the file.
        bytes: Of the weight files.
        perplexity: On held-out text.
        excess: Negative log-likelihood above the original's, nats per token.
        kl: KL to the original, nats per token.
        seconds: To quantize.
        folder: The checkpoint; None for the original.
    """

    grid: str
    solver: str
    rate: float
    bytes: int
    perplexity: float
    excess: float
    kl: float
    seconds: float
    folder: Path | None = None


def run(out: Path, progress: Callable[[Iterable[Any], str, int], Iterable[Any]] = silent) -> Iterator[Row]:
    """Quantize the demo model on grids and entropy-coded into folders below `out` and yield what each is worth."""
    original = _measure(MODEL, progress)
    assert original.perplexity is not None, "a language model"
    assert original.nll is not None, "as well"
    size = sum(path.stat().st_size for path in MODEL.glob("*.safetensors"))
    dtype = ShardReader(MODEL).dtype("model.norm.weight").lower()
    yield Row(
        grid=f"original ({dtype})",
        solver="-",
        rate=16.0,
        bytes=size,
        perplexity=original.perplexity,
        excess=0.0,
        kl=0.0,
        seconds=0.0,
    )
    for label, solver, recipe in recipes():
        folder = out / f"{label} {solver}".replace(" ", "-")
        record = quantize(MODEL, folder, recipe, overwrite=True, progress=progress)
        result = _measure(folder, progress)
        assert result.perplexity is not None, "of the same kind"
        assert result.nll is not None, "as well"
        yield Row(
            grid=label,
            solver=solver,
            rate=record.rate,
            bytes=record.bytes,
            perplexity=result.perplexity,
            excess=result.nll - original.nll,
            kl=result.kl or 0.0,
            seconds=record.seconds,
            folder=folder,
        )


def recipes() -> Iterator[tuple[str, Solver, Recipe]]:
    """Yield (grid in words, solver, recipe) of every line of the demonstration but the original's."""
    tokens = Calibration(calibration=str(CALIBRATION), samples=CALIBRATION_WINDOWS, seqlen=SEQLEN)
    for bits, group_size, symmetric, format in GRIDS:
        for solver in SOLVERS:
            scheme = GridScheme(bits=bits, group_size=group_size, symmetric=symmetric, solver=solver)
            label = f"{bits}-bit {'sym' if symmetric else 'asym'} g{group_size}"
            yield label, solver, Recipe(scheme=scheme, calibration=tokens, format=format)
    for rate in RATES:
        yield f"{rate:g} bits entropy-coded", "k-best", Recipe(scheme=RateScheme(rate=rate), calibration=tokens)


def _measure(model: Path, progress: Callable[[Iterable[Any], str, int], Iterable[Any]]) -> Evaluation:
    against = None if model == MODEL else MODEL
    return evaluate(model, HELD_OUT, seqlen=SEQLEN, samples=EVALUATION_WINDOWS, against=against, progress=progress)
