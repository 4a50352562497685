"""Quantize language models by the lattice mathematics behind GPTQ.

    import nearplane
    record = nearplane.quantize("path/to/model", "out", bits=4, group_size=128, calibration="text.txt")
    print(nearplane.evaluate("out", "heldout.txt", against="path/to/model"))

Importing does nothing: torch and transformers are imported when something is called.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

HOMES = {  # public names, as in the stub beside this file, which type checkers read
    "CalibrationError": "nearplane.errors",
    "FormatError": "nearplane.errors",
    "ModelError": "nearplane.errors",
    "NearplaneError": "nearplane.errors",
    "NumericalError": "nearplane.errors",
    "RecipeError": "nearplane.errors",
    "load": "nearplane.loading.from_pretrained",
    "register": "nearplane.loading.from_pretrained",
    "quantize_matrix": "nearplane.matrix.quantize_matrix",
    "quantize_matrix_to_rate": "nearplane.matrix.quantize_matrix",
    "BlockScheme": "nearplane.recipe.block_scheme",
    "LayerScheme": "nearplane.recipe.layer_scheme",
    "RateScheme": "nearplane.recipe.rate_scheme",
    "Calibration": "nearplane.recipe.recipe",
    "Recipe": "nearplane.recipe.recipe",
    "GridScheme": "nearplane.recipe.schemes",
    "read_record": "nearplane.record.record_file",
    "auto": "nearplane.verbs.auto",
    "card": "nearplane.verbs.card",
    "compare": "nearplane.verbs.compare",
    "evaluate": "nearplane.verbs.evaluate",
    "evaluate_chat": "nearplane.verbs.evaluate_chat",
    "evaluate_tasks": "nearplane.verbs.evaluate_tasks",
    "export": "nearplane.verbs.export",
    "frontier": "nearplane.verbs.frontier",
    "generate": "nearplane.verbs.generate",
    "preview": "nearplane.verbs.preview",
    "quantize": "nearplane.verbs.quantize",
    "write_report": "nearplane.verbs.report",
    "rotate": "nearplane.verbs.rotate",
    "suggest": "nearplane.verbs.suggest",
    "tune": "nearplane.verbs.tune",
    "verify": "nearplane.verbs.verify",
}
__all__ = [*HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # takes longer to import than all else here

        return version("nearplane")
    if name not in HOMES and find_spec(f"nearplane.{name}") is not None:
        return import_module(f"nearplane.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'nearplane' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
