"""The file of --plan-file: what formats of a mix cost, as it was measured, for later runs of the same model, text and options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nearplane.calibration.positions import PositionWeights
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.journal_pages import differing_inputs
from nearplane.planning.estimates import Costs, Losses
from nearplane.system.files import read_object, write_whole

KIND = "nearplane plan 2"
UNMEASURED = (
    "size",
    "bits_per_weight",
    "served_memory",
    "context",
    "weigh",
    "cost",
    "calibration.calibration",
)  # with which nothing measured changes; the text is known by its hash
EXPECTED = "Expected a file that --plan-file wrote; delete it, or name another"


class PlanFile:
    """What was measured for a choice of formats, on disk as soon as it is known.

    Args:
        path: The file; it may be missing.
        inputs: All that the figures depend on, as `RunInputs.values`.

    Attributes:
        losses: What formats cost, as `estimated` returns it; empty: not known yet.
        positions: Weights of positions by layer.

    Raises:
        FormatError: The file is damaged.
        RecipeError: It was made with other inputs; the message names them.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        self._path = path
        told = {name: each for name, each in inputs.items() if name.removeprefix("mix.") not in UNMEASURED}
        self._inputs = json.loads(json.dumps(told))
        self.losses: Losses = {}
        self.positions: dict[str, PositionWeights] = {}
        self._measured: dict[str, list[float]] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        state = read_object(self._path, expected=EXPECTED)
        if state.get("kind") != KIND or state.get("digest") != _digest(state):
            raise FormatError(f"{self._path} is damaged, or no plan of this version. {EXPECTED}.")
        if differing := differing_inputs(state["inputs"], self._inputs):
            raise RecipeError(
                f"{self._path} was made with other inputs: {differing}. Name another --plan-file, or delete this one."
            )
        self.losses = {
            name: Costs(first, tuple(losses), tuple(rates)) for name, (first, losses, rates) in state["losses"].items()
        }
        self.positions = {
            name: PositionWeights(length, tuple(octaves)) for name, (length, octaves) in state["positions"].items()
        }
        self._measured = dict(state["measured"])

    def keep(self, losses: Losses, positions: Mapping[str, PositionWeights]) -> None:
        """Write estimates, with the weights of positions by which they were made."""
        self.losses, self.positions = losses, dict(positions)
        self._write()

    def measured(self, formats: Mapping[str, str], measure: Callable[[], list[float]]) -> list[float]:
        """Return what is measured of a choice, from the file if it is there.

        Args:
            formats: Format of each layer.
            measure: Function that measures it.
        """
        key = hashlib.sha256(json.dumps(dict(sorted(formats.items()))).encode()).hexdigest()[:32]
        if key not in self._measured:
            self._measured[key] = measure()
            self._write()
        return self._measured[key]

    def _write(self) -> None:
        state: dict[str, Any] = {
            "kind": KIND,
            "inputs": self._inputs,
            "losses": self.losses,
            "positions": self.positions,
            "measured": self._measured,
        }
        state["digest"] = _digest(json.loads(json.dumps(state)))
        write_whole(self._path, json.dumps(state).encode())


def _digest(state: Mapping[str, Any]) -> str:
    told = {name: value for name, value in state.items() if name != "digest"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
