"""Parts of a folder of safetensors are joined to the files that `save_file` would write, and what changed is refused."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from nearplane.errors import FormatError
from nearplane.system import shard_writer
from nearplane.system.paths import INDEX, WEIGHTS_FILE
from nearplane.system.safetensors_files import ShardReader
from nearplane.system.shard_writer import ShardWriter, file_names

DTYPES = "int64 float64 float32 int32 bfloat16 float16 int16 float8_e4m3fn float8_e5m2 int8 uint8 bool uint16 uint32"
BLOCKS = [
    {f"{block}.{dtype}": torch.randn(3, 1 + block).to(getattr(torch, dtype)) for dtype in DTYPES.split()}
    | {f"{block}.empty": torch.ones(0), f"{block}.number": torch.tensor(2.5)}
    for block in range(4)
]
ALL = {name: tensor for block in BLOCKS for name, tensor in block.items()}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(shard_writer, "PIECE", 7)


def writer_of(folder, blocks=BLOCKS, **options):
    writer = ShardWriter(folder, len(BLOCKS), **options)
    for block in blocks:
        writer.write(block)
    return writer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kinds_of(block):
    """Return dtype, shape and bytes of tensors, as `size_with` takes them."""
    header = json.loads((data := save(block))[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: (header[name]["dtype"], tuple(each.shape), each.nbytes) for name, each in block.items()}


@pytest.mark.parametrize("kind", ["pt", "mlx"])
def test_a_joined_file_is_what_save_file_writes(tmp_path, kind):
    writer = writer_of(tmp_path, kind=kind)
    assert names(tmp_path) == ["INCOMPLETE", *(f"part-{n:05d}.safetensors" for n in (1, 2, 3, 4))]
    writer.finish()
    assert names(tmp_path) == [WEIGHTS_FILE]
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == save(ALL, {"format": kind})


def test_files_are_as_large_as_allowed_and_are_hashed_as_they_are_joined(tmp_path, monkeypatch):
    """A block above the size is divided, and a tensor above it stands alone."""
    blocks = [
        {"a": torch.ones(30)},
        {"b": torch.ones(20)},
        {"c": torch.ones(40), "d": torch.ones(20)},
        {"e": torch.ones(51)},
    ]
    monkeypatch.setattr(shard_writer, "MAX_FILE", 200)
    writer = writer_of(tmp_path, blocks[:-1])
    expected = writer.size_with(kinds_of(blocks[-1]))
    writer.write(blocks[-1])
    size, digests = writer.join(), writer.digests()
    writer.finish()
    held = [{"a", "b"}, {"c"}, {"d"}, {"e"}]
    files = dict(zip(file_names(4), held, strict=True))
    assert {path.name: set(load_file(path)) for path in tmp_path.glob("*.safetensors")} == files
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 4 * 161},
        "weight_map": {name: file for file, tensors in files.items() for name in sorted(tensors)},
    }
    assert digests == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert (
        size + (tmp_path / INDEX).stat().st_size == sum(path.stat().st_size for path in tmp_path.iterdir()) == expected
    )


@pytest.mark.parametrize("checksums", [False, True])
def test_the_size_is_known_before_the_last_block(tmp_path, checksums):
    """The index, which has checksums, stands beside a single file too."""
    writer = writer_of(tmp_path, BLOCKS[:2], checksums=checksums)
    expected = writer.size_with(*map(kinds_of, BLOCKS[2:]))
    for block in BLOCKS[2:]:
        writer.write(block)
    writer.finish()
    assert names(tmp_path) == [WEIGHTS_FILE, INDEX][: 1 + checksums]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == expected
    assert {name: tensor.nbytes for name, tensor in ALL.items()} == {
        name: ShardReader(tmp_path).nbytes(name) for name in ShardReader(tmp_path).names()
    }


class KilledError(BaseException):
    """What ends a join in these tests."""


@pytest.mark.parametrize("limit", [10**9, 400])
def test_a_join_that_is_killed_at_any_change_of_a_file_goes_on(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(shard_writer, "MAX_FILE", limit)
    writer_of(tmp_path / "whole").finish()
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len(whole) == (1 if limit > 400 else 5)
    moment, ended = 0, False
    while not ended:
        out = tmp_path / str(moment)
        state = json.loads(json.dumps((writer := writer_of(out)).state()))
        with monkeypatch.context() as patch:
            left = iter(range(moment))

            def counted(function, left=left):
                return lambda *args, **words: (next(left, None) is None and kill()) or function(*args, **words)

            for owner, name in (
                (shard_writer.os, "replace"),
                (Path, "unlink"),
                (Path, "rename"),
                (shard_writer, "flush"),
            ):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                writer.join()
                ended = True
            except KilledError:
                (out / "model.safetensors.part").write_bytes(b"half")  # what a process leaves that cannot clean up
        again = ShardWriter(out, len(BLOCKS))
        again.resume(state)
        again.finish()
        assert {path.name: path.read_bytes() for path in out.iterdir()} == whole, f"killed at moment {moment}"
        moment += 1
    assert moment > (8 if limit > 400 else 12)


def kill():
    raise KilledError


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def altered(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


def swapped(path):
    shutil.copyfile(path.with_name("part-00001.safetensors"), path)


@pytest.mark.parametrize("change", [Path.unlink, cut, altered, swapped], ids=lambda change: change.__name__)
def test_a_part_that_changed_is_refused_where_it_is_noticed(tmp_path, change):
    """It was hashed only in the end, as it was then: the run succeeded."""
    writer = writer_of(tmp_path, BLOCKS[:3])
    change(tmp_path / "part-00003.safetensors")
    said = r"part-00003\.safetensors (is missing|has changed).*Repeat the command, which makes it again\.$"
    for work in (lambda: writer.write(BLOCKS[3]), writer.state):
        with pytest.raises(FormatError, match=said):
            work()


@pytest.mark.parametrize("change", [Path.unlink, cut, altered, swapped], ids=lambda change: change.__name__)
def test_a_part_that_changed_while_others_were_joined_is_refused(tmp_path, change):
    writer = writer_of(tmp_path)
    writer.state()
    change(tmp_path / "part-00003.safetensors")
    with pytest.raises(FormatError, match=r"part-00003\.safetensors .*Start again with --overwrite\.$"):
        writer.join()
    rest = [n for n in (1, 2, 3, 4) if n != 3 or change != Path.unlink]
    assert names(tmp_path) == ["INCOMPLETE", *(f"part-{n:05d}.safetensors" for n in rest)]


def test_a_mark_that_is_deleted_in_mid_run_is_no_reason_to_stop(tmp_path):
    """It was a traceback after hours."""
    writer = writer_of(tmp_path, BLOCKS[:3])
    (tmp_path / "INCOMPLETE").unlink()
    writer.write(BLOCKS[3])
    writer.finish()
    assert names(tmp_path) == ["model.safetensors"]


def test_a_part_with_a_new_date_has_not_changed(tmp_path):
    writer = writer_of(tmp_path)
    (tmp_path / "part-00002.safetensors").touch()
    writer.state()
    writer.finish()
    assert names(tmp_path) == [WEIGHTS_FILE]


def test_a_file_that_changed_after_it_was_joined_is_refused(tmp_path):
    writer = writer_of(tmp_path)
    state = writer.state()
    writer.join()
    altered(tmp_path / WEIGHTS_FILE)
    with pytest.raises(FormatError, match=r"model\.safetensors has changed .*--overwrite"):
        ShardWriter(tmp_path, len(BLOCKS)).resume(state)


def test_a_disk_that_is_full_while_parts_are_joined_is_a_sentence(tmp_path, monkeypatch):
    def full(one, other):
        raise OSError(28, "No space left on device")

    writer = writer_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shard_writer.os, "replace", full)
        with pytest.raises(FormatError, match=r"model\.safetensors could not be written .*No space left"):
            writer.join()
    assert names(tmp_path) == ["INCOMPLETE", *(f"part-{n:05d}.safetensors" for n in (1, 2, 3, 4))]
