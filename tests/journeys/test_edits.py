"""Whatever somebody writes into the text files of a checkpoint: one sentence, the right result, or `nearplane verify` names it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from edits import BAIT, GOOD, WAYS, calls, copied, edit, made, outcomes, results, watched

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
EDITS = 300 if NIGHTLY else 4
LONGEST = 30.0  # seconds of the processor that a call may take


class Checkpoints:
    """Checkpoints, what every call gives of them, and a place for a copy."""

    def __init__(self, place: Path) -> None:
        self.folders, text, original = made(place)
        self.copy, self.ours = place / "copy", (text, original)
        self.read: Mapping[str, Callable[[Path], Any]] = calls(text, original)
        if not NIGHTLY:
            self.read = {name: call for name, call in self.read.items() if "original" not in name}
        self.expected = {way: results(copied(folder, self.copy), self.read) for way, folder in self.folders.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("edits"))


@pytest.mark.parametrize("seed", range(EDITS))
def test_every_call_on_an_edited_folder_ends_well(checkpoints: Checkpoints, seed: int) -> None:
    """Tracebacks, minutes of building and files outside the folder were to be had by a few letters."""
    way = list(WAYS)[seed % len(WAYS)]
    folder = copied(checkpoints.folders[way], checkpoints.copy)
    done = edit(folder, random.Random(seed))
    found = outcomes(folder, checkpoints.read, checkpoints.expected[way], checkpoints.ours)
    assert {name: outcome for name, outcome in found.items() if not outcome.good} == {}, done
    assert {name: outcome for name, outcome in found.items() if outcome.seconds > LONGEST} == {}, done


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_is_not_edited_is_as_before(checkpoints: Checkpoints, way: str) -> None:
    found = outcomes(
        copied(checkpoints.folders[way], checkpoints.copy),
        checkpoints.read,
        checkpoints.expected[way],
        checkpoints.ours,
    )
    assert {outcome.kind for outcome in found.values()} == {GOOD[1]}


def test_files_outside_are_seen_whoever_opens_them(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Without this the tests above would say nothing: safetensors opens files where Python does not see it."""
    from safetensors import safe_open

    folder = copied(checkpoints.folders["nearplane"], tmp_path / "copy")
    bait = folder.with_name(BAIT) / "model.safetensors"
    with watched(folder, ()) as opened:
        (folder / "config.json").read_text()
    assert str(folder / "config.json") in opened
    with watched(folder, (folder,)) as opened:
        (folder / "config.json").read_text()
    assert not opened
    with watched(folder, (folder,)) as opened:
        bait.read_bytes()
    assert str(bait) in opened
    if os.path.exists("/proc/sys/fs/inotify"):
        with watched(folder, (folder,)) as opened, safe_open(bait, "pt"):
            pass
        assert str(bait) in opened
