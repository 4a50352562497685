"""Scripts that import triton in a process of their own, because its interpreter is chosen when it is imported."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
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
