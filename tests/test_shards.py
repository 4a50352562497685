"""Folders of safetensors: what is written is read, what is unfinished or broken is refused."""

import pytest
import torch

from nearplane.errors import FormatError, ModelError
from nearplane.shards import INCOMPLETE, ShardReader, ShardWriter

SHARDS = [{"a": torch.arange(6).view(2, 3), "b.c": torch.randn(4)}, {"d": torch.randn(3).to(torch.bfloat16)}]


@pytest.fixture
def folder(tmp_path):
    writer = ShardWriter(tmp_path, 2)
    for shard in SHARDS:
        writer.write(shard)
    writer.finish()
    return tmp_path


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
    with pytest.raises(FormatError, match="1 shards were written where 2"):
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


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        ShardReader(tmp_path)
