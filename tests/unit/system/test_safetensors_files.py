"""Folders of safetensors: what is written is read, what is unfinished or broken is refused."""

import json
import os
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from nearplane.errors import FormatError, ModelError
from nearplane.system.paths import INCOMPLETE, INDEX
from nearplane.system.safetensors_files import ShardReader, checksum, kind_of, shard_size
from nearplane.system.shard_writer import ShardWriter

SHARDS = [{"a": torch.arange(6).view(2, 3), "b.c": torch.randn(4)}, {"d": torch.randn(3).to(torch.bfloat16)}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("nearplane.system.shard_writer.MAX_FILE", 64)  # two files
    writer = ShardWriter(tmp_path, 2)
    for shard in SHARDS:
        writer.write(shard)
    writer.finish()
    return tmp_path


def test_sizes_are_known_without_reading_whatever_the_dtype(tmp_path):
    tensors = {
        "f8": torch.ones(7).to(torch.float8_e5m2), "u16": torch.ones(3, 5, dtype=torch.uint16), "none": torch.ones(0),
        "u32": torch.ones(2, dtype=torch.uint32), "c64": torch.ones(3, dtype=torch.complex64), "i64": torch.tensor(5),
    }  # fmt: skip
    writer = ShardWriter(tmp_path, 1)
    writer.write(tensors)
    writer.finish()
    reader = ShardReader(tmp_path)
    assert {name: reader.nbytes(name) for name in reader.names()} == {n: t.nbytes for n, t in tensors.items()}


@given(
    st.dictionaries(
        st.text("ab.é", min_size=1),
        st.tuples(st.sampled_from(["uint8", "bfloat16", "float32", "int64"]), st.lists(st.integers(0, 40), max_size=3)),
        max_size=12,
    )
)
def test_the_size_of_a_file_is_known_before_it_is_written(described):
    tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in described.items()}
    told = {name: (kind_of(tensor).split()[0], tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()}
    assert shard_size(told) == len(save(tensors, {"format": "pt"}))


def test_what_is_written_is_read(folder):
    reader = ShardReader(folder)
    expected = SHARDS[0] | SHARDS[1]
    assert set(reader.names()) == expected.keys()
    for name, tensor in reader.read(expected).items():
        assert torch.equal(tensor, expected[name])
    assert reader.shape("a") == (2, 3)
    assert reader.dtype("d") == "BF16"


def test_an_unfinished_folder_is_refused(tmp_path):
    writer = ShardWriter(tmp_path, 2)
    writer.write(SHARDS[0])
    with pytest.raises(ModelError, match="incomplete"):
        ShardReader(tmp_path)
    with pytest.raises(FormatError, match="1 shards were written, expected 2"):
        writer.finish()
    assert (tmp_path / INCOMPLETE).exists()


def test_a_missing_shard_is_refused(folder):
    next(folder.glob("*00002-of*")).unlink()
    with pytest.raises(ModelError, match="00002"):
        ShardReader(folder)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_file_is_refused(folder, keep):
    path = next(folder.glob("*00001-of*"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="00001"):
        ShardReader(folder)


def test_a_pipe_in_the_place_of_a_shard_is_refused(folder):
    """Opening it would wait for ever, so the test holds its other end."""
    path = next(folder.glob("*00001-of*"))
    path.unlink()
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)
    with pytest.raises(ModelError, match=r"00001-of-.* is not a file\. Fetch"):
        ShardReader(folder)
    os.close(end)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        ShardReader(tmp_path)


def broken(folder):
    (folder / "model.safetensors").symlink_to("nothing")


def circular(folder):
    (folder / "model.safetensors").symlink_to("model.safetensors")


def doubtful(folder):
    for name in "ab":
        save_file(SHARDS[0], folder / f"{name}.safetensors")


def doubled(folder):
    save_file(SHARDS[0], folder / "model.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"a": "a.safetensors"}}')


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (broken, r"model\.safetensors is a broken link\. Fetch"),
        (circular, r"model\.safetensors is a broken link\. Fetch"),
        (doubtful, "holds 2 .safetensors files, but no .*index.json that says which"),
        (doubled, "holds model.safetensors and .*index.json, which names other files"),
    ],
)
def test_files_that_do_not_say_which_weights_are_the_model_are_refused(tmp_path, make, said):
    make(tmp_path)
    with pytest.raises(ModelError, match=said):
        ShardReader(tmp_path)


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes no such name")
    (folder / "model.safetensors").write_bytes(save(SHARDS[0]))
    with pytest.raises(ModelError, match=r"is not valid UTF-8\. Rename its folders"):
        ShardReader(folder)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    monkeypatch.setattr("nearplane.system.shard_writer.MAX_FILE", 64)  # two files
    writer = ShardWriter(tmp_path, 2, checksums=True)
    for shard in SHARDS:
        writer.write(shard)
    writer.finish()
    return tmp_path


def test_checksums_cover_type_sizes_and_bytes(checked):
    sums = json.loads((checked / INDEX).read_text())["checksums"]
    assert sums["a"] == f"{zlib.crc32(b'I64 2 3' + SHARDS[0]['a'].numpy().tobytes()):08x}"
    assert sums.keys() == (SHARDS[0] | SHARDS[1]).keys()
    assert len({checksum(x) for x in (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32))}) == 3
    ShardReader(checked).verify()


def test_a_changed_tensor_is_refused_by_name(checked):
    path = next(checked.glob("*00002-of*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    reader = ShardReader(checked)
    reader.read(["a"])
    for work in (reader.verify, lambda: reader.read(["d"])):
        with pytest.raises(FormatError, match=r"00002-of-00002.*tensor d has the checksum"):
            work()


@pytest.mark.parametrize(("name", "match"), [("a", "a is not in .*index"), ("e", "e is missing from")])
def test_a_tensor_too_few_or_too_many_is_refused(checked, name, match):
    index = json.loads((checked / INDEX).read_text())
    index["checksums"].pop(name) if name == "a" else index["checksums"].update({name: "00000000"})
    (checked / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=match):
        ShardReader(checked).verify()


def test_a_folder_without_checksums_is_read_but_not_verified(folder):
    with pytest.raises(FormatError, match="no checksums"):
        ShardReader(folder).verify()


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../other/model.safetensors",
        "a/../../b.safetensors",
        "C:\\b.safetensors",
        "\\\\host\\b.safetensors",
        "..",
        "",
        "model.bin",
        "a\0.safetensors",
        "\x1b[31m.safetensors",
    ],
)
def test_an_index_that_leads_out_of_the_folder_is_refused_by_the_name(folder, name):
    """Absolute paths and `..` were followed."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["a"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="stays within the folder") as caught:
        ShardReader(folder)
    assert str(caught.value).isprintable()


def test_links_as_in_the_cache_of_the_hub_are_followed(folder, tmp_path):
    """A snapshot there is a folder of links to ../../blobs."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in folder.iterdir() if path.is_file())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert ShardReader(snapshot).names() == ShardReader(folder).names()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["b"]}}',
        "[" * 200_000,
        '{"weight_map": {"a": "b.safetensors"}, "checksums": 3}',
        "\ud800",
        '{"weight_map": {"a": "b.safetensors"}, "checksums": {"a": 3}}',
        '{"a":' * 100 + "1" + "}" * 100,
        "{",
        "1" * 5000,
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_index_is_refused_in_one_sentence(folder, text):
    (folder / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match="Expected an index of shards"):
        ShardReader(folder)
