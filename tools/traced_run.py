"""Quantize the demo model to 4 bits and print the files of the package whose functions ran, as a JSON list.

python tools/traced_run.py      # nearplane must be importable; tools/counts.py --traced calls it for a checkout

A file counts when a function of it was called during the run, in any thread. Calls made while a module is imported do
not count, nor do compiled kernels, whose calls Python does not see.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType

import nearplane

WINDOWS, SEQLEN = 48, 64  # four calibration tokens for each input of the demo's widest layer: enough for no warning


def main() -> None:
    """Run and print."""
    quantize = nearplane.quantize
    from nearplane.demo import CALIBRATION, MODEL

    package = str(Path(str(nearplane.__file__)).parent) + os.sep
    called: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code not in called and code.co_filename.startswith(package) and not importing(frame):
            called.add(code)

    def importing(frame: FrameType | None) -> bool:
        """Return whether a frame is, or was called by, the body of a module of the package."""
        while frame is not None and not (frame.f_code.co_name == "<module>" and package in frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None

    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            out = Path(folder) / "out"
            quantize(MODEL, out, bits=4, calibration=str(CALIBRATION), samples=WINDOWS, seqlen=SEQLEN, device="cpu")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    print(json.dumps(sorted({code.co_filename.removeprefix(package).replace(os.sep, "/") for code in called})))


if __name__ == "__main__":
    main()
