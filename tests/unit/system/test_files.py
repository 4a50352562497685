"""Files are whole or as they were, and are hashed once unless they change."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nearplane.errors import FormatError, ModelError, RecipeError
from nearplane.system.files import HashedFiles, check_output, check_writable, exclusive_lock, sha256, write_whole


def test_a_file_is_written_where_no_folder_is_and_replaced(tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        write_whole(tmp_path / "new" / "file", content)
        assert [path.read_bytes() for path in (tmp_path / "new").iterdir()] == [content]


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit on file sizes as Linux has it")
def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    program = "import sys, pathlib, nearplane.system.files as w; w.write_whole(pathlib.Path(sys.argv[1]), bytes(2000))"
    words = [sys.executable, "-c", program, tmp_path / "file"]
    result = subprocess.run(words, preexec_fn=limit, capture_output=True, text=True)
    assert f"FormatError: {tmp_path / 'file'} could not be written" in result.stderr
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A pipe, for one, or a device."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a file"):
        write_whole(tmp_path / "pipe", b"x")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "folder").mkdir()
    with pytest.raises(FormatError, match="could not be written"):
        write_whole(tmp_path / "folder", b"x")


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(RecipeError, match="not a folder that can be written"):
            check_writable(folder)


def test_a_lock_in_a_folder_that_cannot_be_written_is_not_taken_for_a_lock_that_is_held() -> None:
    with (
        pytest.raises(RecipeError, match=r"/proc/self is not a folder that can be written"),
        exclusive_lock(Path("/proc/self/out.lock"), "another run holds it"),
    ):
        raise AssertionError("a file was written to /proc")


def test_a_command_writes_where_nothing_or_only_its_output_is(tmp_path: Path) -> None:
    check_output(tmp_path / "new", ["4-bit"], "nearplane demo")
    for name in ("4-bit.unfinished", "4-bit-report.html"):
        (tmp_path / "new" / name).mkdir()
    check_output(tmp_path / "new", ["3-bit", "4-bit"], "nearplane demo")
    (tmp_path / "new" / "config.json").write_text("{}")
    with pytest.raises(
        RecipeError, match=r"new has files that nearplane demo did not write: config\.json\. Choose a new"
    ):
        check_output(tmp_path / "new", ["3-bit", "4-bit"], "nearplane demo")


@pytest.fixture
def files(tmp_path):
    paths = {f"the model's {name}": tmp_path / name for name in ("a", "b")}
    for name, path in paths.items():
        path.write_text(name)
    return HashedFiles(paths)


def test_only_files_of_another_size_or_date_are_hashed_again(files, tmp_path, monkeypatch):
    assert files.hashes == {f"the model's {name}": sha256(tmp_path / name) for name in "ab"}
    hashed = []
    monkeypatch.setattr("nearplane.system.files.sha256", lambda path: (hashed.append(path.name), sha256(path))[1])
    files.check()
    shutil.copy(tmp_path / "a", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "a")  # equal bytes, and a new date
    os.utime(tmp_path / "a", ns=(5, 5))
    for _ in range(2):
        files.check()
    assert hashed == ["a"]


@pytest.mark.parametrize("content", ["another text", "the model's c", None])
def test_a_file_that_changed_or_is_gone_is_named(files, tmp_path, content):
    (tmp_path / "b").unlink()
    if content is not None:
        (tmp_path / "b").write_text(content)
        os.utime(tmp_path / "b", ns=(5, 5))
    said = (
        r"b is missing or cannot be read: it was"
        if content is None
        else r"b has the SHA-256 \w{16}\.\., at the start it had \w{16}\.\.: it was"
    )
    with pytest.raises(
        ModelError, match=rf"{said} changed while this run read it\. Restore it and repeat the command, or"
    ):
        files.check()


def test_other_bytes_under_the_old_date_are_noticed(files, tmp_path):
    """As of programs that synchronize folders in place."""
    before = (tmp_path / "a").stat()
    (tmp_path / "a").write_text("the model's c")
    os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ModelError, match="it was changed while this run read it"):
        files.check()
