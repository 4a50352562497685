"""Paths and sizes of the demonstration: a small trained model, calibration text and held-out text; see `README.md`."""

from importlib.resources import files
from pathlib import Path

DEMO_FOLDER = Path(str(files(__name__)))
MODEL, CALIBRATION, HELD_OUT = DEMO_FOLDER / "model", DEMO_FOLDER / "calibration.txt", DEMO_FOLDER / "heldout.txt"
SEQLEN, CALIBRATION_WINDOWS, EVALUATION_WINDOWS = 256, 16, 20
