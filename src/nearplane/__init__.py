"""Quantize language models by the lattice mathematics behind GPTQ.

    import nearplane
    record = nearplane.quantize("path/to/model", "out", bits=4, group_size=128, calibration="text.txt")
    print(nearplane.evaluate("out", "heldout.txt", against="path/to/model"))

Importing does nothing: torch and transformers are imported when something is called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nearplane.errors import CalibrationError, FormatError, ModelError, NearplaneError, NumericalError, RecipeError
from nearplane.recipe import Calibration, LayerScheme, Recipe
from nearplane.schemes import BlockScheme, GridScheme, RateScheme

if TYPE_CHECKING:
    from nearplane.compare import compare
    from nearplane.evaluate import evaluate
    from nearplane.export import export
    from nearplane.generate import generate
    from nearplane.matrix.on_grid import quantize_matrix
    from nearplane.matrix.to_rate import quantize_matrix_to_rate
    from nearplane.quantize import quantize
    from nearplane.readers.hub import load, register
    from nearplane.report import write_report
    from nearplane.tune import tune
    from nearplane.verify import verify

__version__ = "0.1.0"
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
    "quantize": "nearplane.quantize",
    "compare": "nearplane.compare",
    "evaluate": "nearplane.evaluate",
    "export": "nearplane.export",
    "generate": "nearplane.generate",
    "load": "nearplane.readers.hub",
    "quantize_matrix": "nearplane.matrix.on_grid",
    "quantize_matrix_to_rate": "nearplane.matrix.to_rate",
    "register": "nearplane.readers.hub",
    "tune": "nearplane.tune",
    "verify": "nearplane.verify",
    "write_report": "nearplane.report",
}


class _Package(ModuleType):
    """The package itself: `nearplane.quantize` is the function, whoever imported the module of that name first."""

    def __getattr__(self, name: str) -> Any:
        if name not in HOMES:
            raise AttributeError(f"module 'nearplane' has no attribute {name!r}")
        return getattr(import_module(HOMES[name]), name)

    def __dir__(self) -> list[str]:
        return sorted({*__all__, *globals()})

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and HOMES.get(name) == value.__name__:
            value = getattr(
                value, name
            )  # the import system binds a submodule to its package: bind what it is named for
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
