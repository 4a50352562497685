"""Scripts that import triton in a process of their own, because its interpreter is chosen when it is imported."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

triton_runs_here = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="Triton has wheels for Linux on x86_64 only"
)


def results(script: str, *words: object, **environment: str) -> list[dict[str, Any]]:
    """Run a script of tests/support, and read the lines of JSON that it prints."""
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def interpreted(**counts: int) -> list[dict[str, Any]]:
    """Run that many random problems of each module, all in one process, by Triton's interpreter."""
    return results("interpreted_problems.py", *(word for module, count in counts.items() for word in (count, module)))


def problems(module: str, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Return the results of one module's random problems."""
    found = [each for each in interpreted(**counts) if each["module"] == module]
    assert len(found) == counts[module]
    return found


DAILY = {
    "beam_problems": 40, "superblock_problems": 11, "superfit_problems": 11, "passes_problems": 9, "decode_problems": 10,
    "triton_problems": 20, "packed_on_device": 2, "product_problems": 8,
}  # fmt: skip
NIGHTLY = dict.fromkeys(DAILY, 500) | {"packed_on_device": 6, "product_problems": 200}
