"""A small trained model, text to calibrate it and text to measure it, all in this package; `README.md` is the model's card."""

from importlib.resources import files
from pathlib import Path

HERE = Path(str(files(__name__)))
MODEL, CALIBRATION, HELD_OUT = HERE / "model", HERE / "calibration.txt", HERE / "heldout.txt"
SEQLEN, CALIBRATION_WINDOWS, EVALUATION_WINDOWS = 256, 128, 96
