"""One run alone writes a checkpoint; a crash at any moment leaves a whole one; nothing foreign is deleted."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nearplane.errors import FormatError, RecipeError
from nearplane.system.output_folder import Unfinished

HOLDER = """
import sys, time
from pathlib import Path
from nearplane.system.output_folder import Unfinished
with Unfinished(Path(sys.argv[1])) as place:
    (place.folder / "part").write_text("of a run that is killed")
    print("held", flush=True)
    time.sleep(600)
"""

CRASHES = """
import os, sys
from pathlib import Path
from nearplane.system import output_folder
from nearplane.system.output_folder import Unfinished

root = Path(sys.argv[1])
if sys.argv[2] == "two renames":
    output_folder.swap = lambda *_: False
EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "open", "shutil.rmtree")

def write(folder, text):
    for name in ("nearplane.json", "config.json", "model.safetensors"):
        (folder / name).write_text(text)

def run(out, crash):
    place = Unfinished(out, overwrite=True)
    with place:
        write(place.folder, "new")
        (place.folder / "INCOMPLETE").unlink()
        left = crash
        def hook(event, words):
            nonlocal left
            if event in EVENTS:
                left -= 1
                if left < 0:
                    os._exit(9)
        sys.addaudithook(hook)

number = 0
while True:
    out = root / str(number) / "out"
    out.mkdir(parents=True)
    write(out, "old")
    (out / "notes.md").write_text("mine")
    child = os.fork()
    if not child:
        run(out, number)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
    number += 1
print(number)
"""


def finish(out: Path, text: str = "new", *, overwrite: bool = False) -> None:
    """Write a checkpoint as far as a folder is concerned."""
    with Unfinished(out, overwrite=overwrite) as place:
        for name in ("nearplane.json", "model.safetensors"):
            (place.folder / name).write_text(text)
        (place.folder / "INCOMPLETE").unlink()


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def again(out: Path) -> str:
    """What another run does to what a crash left: it replaces it, or refuses to delete a whole checkpoint in out.unfinished."""
    try:
        finish(out, "newer", overwrite=True)
    except RecipeError as error:
        return "refused" if "is a complete checkpoint" in str(error) else str(error)
    return "written"


@pytest.fixture
def held(tmp_path: Path):
    """Another process that writes `tmp_path / "out"`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "out"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with Unfinished(out) as place:
        (place.folder / "nearplane.json").write_text("new")
        assert not out.exists()
        assert (place.folder / "INCOMPLETE").exists()
        (place.folder / "INCOMPLETE").unlink()
    assert contents(tmp_path) == {"new/out/nearplane.json": "new"}


def test_a_second_run_is_refused_and_told_who_writes(tmp_path: Path, held: subprocess.Popen[str]) -> None:
    before = contents(tmp_path)
    said = rf"being written by another run: process {held.pid} on .+, since 20.*Wait for it, or choose"
    for overwrite in (False, True):
        with pytest.raises(RecipeError, match=said), Unfinished(tmp_path / "out", overwrite=overwrite):
            pass
    assert contents(tmp_path) == before


def test_a_second_run_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with Unfinished(tmp_path / "out"):
        with pytest.raises(RecipeError, match=f"another run: process {os.getpid()}"), Unfinished(tmp_path / "out"):
            pass
        with Unfinished(tmp_path / "other"):
            pass


def test_the_lock_of_a_killed_run_holds_nobody_up(
    tmp_path: Path, held: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What it wrote is deleted, and that is said."""
    held.send_signal(signal.SIGKILL)
    held.wait()
    assert set(contents(tmp_path)) == {"out.unfinished.lock", "out.unfinished/INCOMPLETE", "out.unfinished/part"}
    with caplog.at_level(logging.INFO, logger="nearplane"):
        finish(tmp_path / "out")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'out.unfinished'} is left from an unfinished run and is deleted: the work starts again."
    ]
    assert contents(tmp_path) == {"out/nearplane.json": "new", "out/model.safetensors": "new"}


def test_what_may_be_in_out_is_asked_again_under_the_lock(tmp_path: Path) -> None:
    """A run may finish between the second run's first look and its lock."""
    second = Unfinished(tmp_path / "out")
    finish(tmp_path / "out")
    with pytest.raises(RecipeError, match="not empty"), second:
        pass
    assert contents(tmp_path) == {"out/nearplane.json": "new", "out/model.safetensors": "new"}


def test_a_run_that_fails_before_it_writes_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no"), Unfinished(tmp_path / "out"):
        raise RecipeError("no")
    assert list(tmp_path.iterdir()) == []


def stop_half_way(out: Path, error: BaseException) -> None:
    with Unfinished(out, overwrite=True) as place:
        (place.folder / "part").write_text("")
        raise error


def test_a_run_that_is_stopped_says_what_is_on_disk(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt) as stopped, Unfinished(out):
        raise KeyboardInterrupt
    assert stopped.value.__notes__ == ["Nothing was written. Repeat the command."]
    finish(out, "old")
    with pytest.raises(KeyboardInterrupt) as stopped:
        stop_half_way(out, KeyboardInterrupt())
    assert stopped.value.__notes__ == [
        f"The unfinished checkpoint is in {out}.unfinished; {out} is unchanged. Repeat the command to start again."
    ]


def test_a_fault_of_the_program_is_not_told_to_go_away_by_repeating(tmp_path: Path) -> None:
    """A run that fails on a weight fails on it again."""
    out = tmp_path / "out"
    with pytest.raises(RuntimeError) as fault:
        stop_half_way(out, RuntimeError("of a library"))
    assert fault.value.__notes__ == [f"The unfinished checkpoint is in {out}.unfinished."]


@pytest.mark.parametrize("how", ["exchange", "two renames"])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="crashes children")
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint_and_what_was_not_ours(tmp_path: Path, how: str) -> None:
    """The process dies at every operation on files between the last write and the end."""
    result = subprocess.run([sys.executable, "-c", CRASHES, tmp_path, how], check=True, capture_output=True, text=True)
    moments = int(result.stdout)
    assert moments > 10
    for moment in range(moments + 1):
        found = contents(tmp_path / str(moment))
        places = {name.rpartition("/")[0] for name in found}
        whole = {
            place: text
            for place in places
            for text in ("old", "new")
            if all(
                found.get(f"{place}/{name}") == text for name in ("nearplane.json", "config.json", "model.safetensors")
            )
        }
        assert whole.get("out") == "new" or "old" in {
            whole.get(p) for p in places if p in ("out", "out.unfinished/journal/old")
        }
        assert [text for name, text in found.items() if name.endswith("notes.md")] == ["mine"]
    assert found == {f"out/{name}": "new" for name in ("nearplane.json", "config.json", "model.safetensors")} | {
        "out/notes.md": "mine"
    }
    names, kinds = ("nearplane.json", "config.json", "model.safetensors"), set()
    for moment in range(moments):  # whatever the crash left, the next run puts in order
        place = tmp_path / str(moment)
        kinds.add(kind := again(place / "out"))
        text, left = ("newer", names[::2]) if kind == "written" else ("old", names)
        assert {name: text for name, text in contents(place).items() if name.startswith("out/")} == {
            f"out/{name}": text for name in left
        } | {"out/notes.md": "mine"}
        assert not (place / "out" / "journal").exists()
    assert kinds == {"written", "refused"}


def test_after_a_crash_in_between_the_next_run_loses_nothing(tmp_path: Path) -> None:
    """The whole checkpoint that was not renamed yet is not deleted."""
    finish(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.unfinished")
    before = contents(tmp_path)
    with pytest.raises(RecipeError, match=r"out\.unfinished is a complete checkpoint.*Rename or delete"):
        finish(tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_not_ours_is_not_deleted(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "out.unfinished"
    if kind == "file":
        place.write_text("mine")
    else:
        folder = place if kind == "folder" else tmp_path / "elsewhere"
        folder.mkdir()
        (folder / "thesis.tex").write_text("mine")
        if kind == "link":
            (folder / "INCOMPLETE").write_text("")
            place.symlink_to(folder)
    before = contents(tmp_path)
    with pytest.raises(RecipeError, match="nearplane did not write it"):
        finish(tmp_path / "out")
    assert contents(tmp_path) == before


def test_files_that_no_run_wrote_outlive_an_overwrite(tmp_path: Path) -> None:
    """Those that the record lists do not: the new checkpoint may not have them."""
    out = tmp_path / "out"
    finish(out)
    (out / "nearplane.json").write_text(json.dumps({"files": {"LICENSE": "", "templates/a.jinja": ""}}))
    (out / "templates").mkdir()
    (out / "model.safetensors").unlink()
    for name in ("LICENSE", "templates/a.jinja", "notes.md", "eval.json"):
        (out / name).write_text("old")
    finish(out, overwrite=True)
    new = {"out/nearplane.json": "new", "out/model.safetensors": "new", "out/notes.md": "old"}
    assert contents(tmp_path) == new | {"out/eval.json": "old"}
    (out / "nearplane.json").write_text("no record")  # then by what runs write
    finish(out, overwrite=True)
    assert contents(tmp_path) == new


def test_an_empty_folder_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o750)
    finish(out)
    assert out.stat().st_mode & 0o777 == 0o750


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    for overwrite in (False, True):
        finish(tmp_path / "out", overwrite=overwrite)
        assert (tmp_path / "out").is_symlink()
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/", "mount point"),
        (".", "current folder"),
        ("a.unfinished", "another name"),
        ("loop", "output: 'loop' is a link that leads back to itself"),
        ("a" * 300, "has 300 letters and is too long for a path. Pass"),
        ("a" * 250, "too long for a path"),  # with the suffix of the unfinished folder
        ("file", "file is a file. Choose another folder"),
        ("foreign", "did not write it. Empty it"),
    ],
)
@pytest.mark.parametrize("overwrite", [True, False])
def test_what_cannot_be_replaced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str, overwrite: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("file").write_text("mine")
    Path("foreign").mkdir()
    Path("foreign/thesis.tex").write_text("mine")
    with pytest.raises(RecipeError, match=why):
        Unfinished(Path(name), overwrite=overwrite)


def test_files_that_came_into_the_unfinished_folder_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Unfinished(tmp_path / "out") as place:
        (place.folder / "nearplane.json").write_text(json.dumps({"files": {"LICENSE": ""}}))
        (place.folder / "LICENSE").write_text("copied")
        (place.folder / "thesis.tex").write_text("mine")
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{tmp_path / 'out'} has files that nearplane did not write: thesis.tex. Move them away."]
    assert contents(tmp_path)["out/thesis.tex"] == "mine"


def fill_meanwhile(out: Path) -> None:
    with Unfinished(out) as place:
        (place.folder / "model.safetensors").write_text("new")
        out.mkdir()
        (out / "thesis.tex").write_text("mine")


def test_a_folder_that_fills_while_the_run_works_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"is complete but could not be renamed .*Rename it yourself"):
        fill_meanwhile(tmp_path / "out")
    assert contents(tmp_path)["out/thesis.tex"] == "mine"
    assert contents(tmp_path)["out.unfinished/model.safetensors"] == "new"


def test_a_folder_that_has_its_name_is_whole_even_where_that_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with Unfinished(tmp_path / "out") as place:
        monkeypatch.setattr("nearplane.system.output_folder.flush", full)
        (place.folder / "part").write_text("whole")
        (place.folder / "INCOMPLETE").unlink()
    assert (tmp_path / "out" / "part").read_text() == "whole"
    assert os.listdir(tmp_path) == ["out"]
    assert "out is complete, but a power cut now could still undo its renaming" in caplog.text
