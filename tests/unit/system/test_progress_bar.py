"""Functions show a bar where somebody sees it, nothing for False, and what they are given."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import nearplane
from checkpoints import save_part_of_the_demo
from nearplane.errors import RecipeError
from nearplane.system.progress import silent
from nearplane.system.progress_bar import bar, display

CODE = """
import sys
import nearplane
nearplane.quantize(sys.argv[1], sys.argv[2], bits=4, solver="round-to-nearest", device="cpu", progress={})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a part of the demo's model."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small")


def seen(model: Path, out: Path, progress: str) -> str:
    """Return what a Python program shows on a terminal while it quantizes."""
    leader, follower = pty.openpty()
    words = [sys.executable, "-c", CODE.format(progress), str(model), str(out)]
    with subprocess.Popen(words, stderr=follower, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as program:
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the program has ended
                break
            if not part:
                break
            parts.append(part)
    os.close(leader)
    assert program.returncode == 0
    return b"".join(parts).decode(errors="replace")


def test_a_program_on_a_terminal_shows_the_bar_unless_told_otherwise(model: Path, tmp_path: Path) -> None:
    """By default, and not for False."""
    assert "quantizing" in seen(model, tmp_path / "one", "None")
    assert "quantizing" not in seen(model, tmp_path / "two", "False")


def test_elsewhere_nothing_is_shown(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nearplane.quantize(model, tmp_path / "out", bits=4, solver="round-to-nearest", device="cpu")
    assert "quantizing" not in capfd.readouterr().err


def test_a_given_display_is_used(model: Path, tmp_path: Path) -> None:
    labels = []

    def mine(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
        labels.append(label)
        return items

    nearplane.quantize(model, tmp_path / "out", bits=4, solver="round-to-nearest", device="cpu", progress=mine)
    assert labels[-1] == "quantizing"
    assert (display(None), display(False), display(mine)) == (bar, silent, mine)
    with pytest.raises(RecipeError, match="progress is 3"):
        nearplane.quantize(model, tmp_path / "out", bits=4, progress=3)  # type: ignore[arg-type]
