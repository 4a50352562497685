"""What the user has no right to read or write is named in one sentence, before any work."""

import os
import shutil

import pytest

import nearplane
from checkpoints import save_part_of_the_demo
from children import without_rights
from nearplane.demo import CALIBRATION, HELD_OUT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="rights of files as Windows does not have them")
TOKENS = ("--calibration", CALIBRATION, "--samples", "2", "--seqlen", "32")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a model and of a checkpoint of it."""
    place = tmp_path_factory.mktemp("made")
    save_part_of_the_demo(place / "model", blocks=1, neurons=32)
    nearplane.quantize(place / "model", place / "out", bits=4, solver="round-to-nearest")
    return place


@pytest.fixture
def place(made, tmp_path):
    """Return a copy of these folders, whose rights are given back in the end."""
    folder = tmp_path / "place"
    shutil.copytree(made, folder)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700)


CASES = {  # (path, its rights, command, the message after the path)
    "weights": ("model/model.safetensors", 0, ["quantize", "model", "new", *TOKENS], "cannot be read: Permission denied."),
    "folder not listed": ("model", 0o300, ["quantize", "model", "new", *TOKENS], "cannot be read: Permission denied."),
    "record": ("out/nearplane.json", 0, ["inspect", "out"], "cannot be read or written: Permission denied."),
    "shard to verify": (
        "out/model.safetensors", 0, ["verify", "out"], "cannot be read or written: Permission denied.",
    ),
    "shard to decode": (
        "out/model.safetensors", 0, ["evaluate", "out", "--text", HELD_OUT],
        "cannot be read: Permission denied.",
    ),
    "empty folder": ("empty", 0o500, ["quantize", "model", "empty", *TOKENS], "cannot be written: Permission denied."),
    "checkpoint to replace": (
        "out", 0o500, ["quantize", "model", "out", "--overwrite", *TOKENS], "cannot be written: Permission denied.",
    ),
    "unfinished folder": (
        "new.unfinished", 0o500, ["quantize", "model", "new", *TOKENS], "cannot be written: Permission denied.",
    ),
    "texts": ("texts", 0o300, ["quantize", "model", "new", "--calibration", "texts"],
              "cannot be read or written: Permission denied."),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_missing_right_is_one_sentence_and_nothing_is_written(place, case):
    """Some of these ran to the end, and left what was no checkpoint; others were a traceback."""
    name, rights, words, message = CASES[case]
    path = place / name
    if not path.exists():
        path.mkdir()
    if case == "unfinished folder":
        (path / "INCOMPLETE").touch()
    before = sorted(place.rglob("*"))
    path.chmod(rights)
    paths = [place / word if isinstance(word, str) and (place / word).exists() else word for word in words]
    code, _, said = without_rights(*(place / "new" if word == "new" else word for word in paths)).ended()
    path.chmod(0o700)
    assert code == 1
    sentence = said.splitlines()[-1]
    assert sentence.startswith(f"nearplane: {path} {message}"), said
    assert "Traceback" not in said
    assert sorted(place.rglob("*")) == before


def test_what_is_read_only_is_read(place):
    for path in sorted((place / "out").rglob("*")):
        path.chmod(0o400)
    (place / "out").chmod(0o500)
    for words in (("verify", place / "out"), ("inspect", place / "out"), ("export", place / "out", place / "new")):
        code, _, said = without_rights(*words).ended()
        assert code == 0, said
    assert (place / "out").stat().st_mode & 0o777 == 0o500
