"""Quantize language models by the lattice mathematics behind GPTQ.

    import nearplane
    record = nearplane.quantize("path/to/model", "out", bits=4, group_size=128, calibration="text.txt")
    print(nearplane.evaluate("out", "heldout.txt", against="path/to/model"))

Importing does nothing: torch and transformers are imported when something is called.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from nearplane.errors import CalibrationError, FormatError, ModelError, NearplaneError, NumericalError, RecipeError
from nearplane.recipe.recipe import Calibration, LayerScheme, Recipe
from nearplane.recipe.schemes import BlockScheme, GridScheme, RateScheme

if TYPE_CHECKING:
    from nearplane.loading.from_pretrained import load, register
    from nearplane.matrix.on_grid import quantize_matrix
    from nearplane.matrix.to_rate import quantize_matrix_to_rate
    from nearplane.verbs.compare import compare
    from nearplane.verbs.evaluate import evaluate
    from nearplane.verbs.export import export
    from nearplane.verbs.generate import generate
    from nearplane.verbs.quantize_model import quantize
    from nearplane.verbs.report import write_report
    from nearplane.verbs.tune import tune
    from nearplane.verbs.verify import verify

__all__ = [
    "BlockScheme",
    "Calibration",
    "CalibrationError",
    "FormatError",
    "GridScheme",
    "LayerScheme",
    "ModelError",
    "NearplaneError",
    "NumericalError",
    "RateScheme",
    "Recipe",
    "RecipeError",
    "compare",
    "evaluate",
    "export",
    "generate",
    "load",
    "quantize",
    "quantize_matrix",
    "quantize_matrix_to_rate",
    "register",
    "tune",
    "verify",
    "write_report",
]


HOMES = {
    "quantize": "nearplane.verbs.quantize_model",
    "compare": "nearplane.verbs.compare",
    "evaluate": "nearplane.verbs.evaluate",
    "export": "nearplane.verbs.export",
    "generate": "nearplane.verbs.generate",
    "load": "nearplane.loading.from_pretrained",
    "quantize_matrix": "nearplane.matrix.on_grid",
    "quantize_matrix_to_rate": "nearplane.matrix.to_rate",
    "register": "nearplane.loading.from_pretrained",
    "tune": "nearplane.verbs.tune",
    "verify": "nearplane.verbs.verify",
    "write_report": "nearplane.verbs.report",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("nearplane")
    if name not in HOMES:
        raise AttributeError(f"module 'nearplane' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
