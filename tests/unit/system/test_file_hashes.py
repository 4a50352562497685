"""Files that a run reads: a changed one is refused, one with a new date alone is not."""

import os
import shutil

import pytest

from nearplane.errors import ModelError
from nearplane.system import file_hashes
from nearplane.system.file_hashes import HashedFiles
from nearplane.system.files import sha256


@pytest.fixture
def files(tmp_path):
    paths = {f"the model's {name}": tmp_path / name for name in ("a", "b")}
    for name, path in paths.items():
        path.write_text(name)
    return HashedFiles(paths)


def test_only_files_of_another_size_or_date_are_hashed_again(files, tmp_path, monkeypatch):
    assert files.hashes == {f"the model's {name}": sha256(tmp_path / name) for name in "ab"}
    hashed = []
    monkeypatch.setattr(file_hashes, "sha256", lambda path: (hashed.append(path.name), sha256(path))[1])
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
