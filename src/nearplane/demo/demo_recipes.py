"""Recipes of the demonstration and the folders of their checkpoints. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nearplane.demo import CALIBRATION, CALIBRATION_WINDOWS, SEQLEN
from nearplane.recipe.file_formats import Format
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import GridScheme
from nearplane.system.files import check_output

SOLVERS: tuple[Solver, ...] = ("round-to-nearest", "nearest-plane")
RATES = (3.0, 2.0)  # bits per weight, entropy-coded
GRIDS: tuple[tuple[int, int, bool, Format], ...] = (  # bits, group size, symmetric, format
    (4, 128, True, "compressed-tensors"),
    (3, 128, False, "gptq_v2"),
    (2, 64, False, "gptq_v2"),
)
STEPS = 1 + len(GRIDS) * len(SOLVERS) + len(RATES)  # rows, of which the first is the original


def recipes() -> Iterator[tuple[str, Solver, Recipe]]:
    """Yield (description of the grid, solver, recipe) for every row except the original."""
    tokens = Calibration(calibration=str(CALIBRATION), samples=CALIBRATION_WINDOWS, seqlen=SEQLEN)
    for bits, group_size, symmetric, format in GRIDS:
        for solver in SOLVERS:
            scheme = GridScheme(bits=bits, group_size=group_size, symmetric=symmetric, solver=solver)
            label = f"{bits}-bit {'sym' if symmetric else 'asym'} g{group_size}"
            yield label, solver, Recipe(scheme=scheme, calibration=tokens, format=format)
    for rate in RATES:
        yield f"{rate:g} bits entropy-coded", "k-best", Recipe(scheme=RateScheme(rate=rate), calibration=tokens)


def folder_name(label: str, solver: Solver) -> str:
    """Return the name of the folder of a row's checkpoint."""
    return f"{label} {solver}".replace(" ", "-")


def check_folder(out: Path) -> None:
    """Make the folder of the demonstration, or refuse one in use.

    Raises:
        RecipeError: `out` has files that an earlier demonstration did not write, or cannot be written.
    """
    check_output(out, [folder_name(label, solver) for label, solver, _ in recipes()], "nearplane demo")
