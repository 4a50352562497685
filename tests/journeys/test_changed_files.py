"""Files that change while a run reads or writes them, and weight files that are joined when it is killed."""

import hashlib
import importlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import nearplane
from families import config_of, random_model
from killing import StoppedError, contents, stopped_behind
from nearplane import FormatError, ModelError
from nearplane.formats.gguf.gguf_header import read_header
from nearplane.planning.journal import Journal
from nearplane.record.record_file import read_record
from nearplane.system.shard_writer import ShardWriter
from nightly import daily

TOKENS = torch.randint(0, 90, (8, 24), generator=torch.Generator().manual_seed(0))
WAYS = {
    "grid": dict(bits=4, group_size=16),
    "GPTQ, widths by slope": dict(bits=3, group_size=16, allocate="slope", format="gptq_v2"),
    "rate": dict(rate=3.0, allocate="uniform"),
    "MLX": dict(bits=4, group_size=32, format="mlx"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = config_of("llama", vocab_size=90, num_hidden_layers=3, tie_word_embeddings=False)
    random_model(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def every_block(monkeypatch):
    """Keep every block, however quick it is."""
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)


def quantize(model, out, way="grid", **options):
    return nearplane.quantize(model, out, calibration=TOKENS, device="cpu", **WAYS[way], **options)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run on which nobody meddled."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize(model, out)
    return out


def meddled_behind(blocks, monkeypatch, change, quantized):
    """Run `quantized` and call `change` when so many blocks are in the journal."""
    passed = Journal.passed

    def meddled(self, behind, stream, layers):
        passed(self, behind, stream, layers)
        if behind == blocks:
            change()

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "passed", meddled)
        return quantized()


@pytest.mark.parametrize("behind", [1, 3])
def test_weights_that_are_overwritten_under_a_run_are_refused(model, whole, tmp_path, monkeypatch, behind):
    """Their layers had a loss of 0. Once the old bytes are back, the run goes on behind the last block in order."""
    source, out = shutil.copytree(model, tmp_path / model.name), tmp_path / "out"
    path = source / "model.safetensors"
    content = path.read_bytes()

    def overwrite():
        save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path, {"format": "pt"})

    with pytest.raises(
        ModelError, match=r"model\.safetensors has the SHA-256 .*: it was changed while this run read it"
    ):
        meddled_behind(behind, monkeypatch, overwrite, lambda: quantize(source, out))
    assert json.loads((tmp_path / "out.unfinished/journal/state.json").read_text())["blocks"] == behind
    path.write_bytes(content)
    quantize(source, out)
    weights = out / "model.safetensors"
    assert weights.read_bytes() == (whole / weights.name).read_bytes()


def test_a_model_with_new_dates_is_the_same(model, whole, tmp_path, monkeypatch):
    """Dates change as the run goes on, and a stopped run goes on with a copy."""
    source, out = shutil.copytree(model, tmp_path / model.name), tmp_path / "out"
    meddled_behind(1, monkeypatch, (source / "model.safetensors").touch, lambda: quantize(source, out))
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    shutil.rmtree(out)
    stopped_behind(2, source, out, monkeypatch, calibration=TOKENS, device="cpu", **WAYS["grid"])
    shutil.copytree(source, copy := tmp_path / "copy" / model.name)
    os.utime(copy / "model.safetensors", ns=(5, 5))
    quantize(copy, out)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def altered(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


@pytest.mark.parametrize(("behind", "change"), [(1, Path.unlink), (3, altered)])
def test_a_shard_that_is_deleted_or_changed_under_a_run_is_refused(model, whole, tmp_path, monkeypatch, behind, change):
    """The run ended with "use it". Its blocks cannot be solved again without those before: the message says so."""
    out = tmp_path / "out"
    part = tmp_path / "out.unfinished" / "part-00001.safetensors"
    said = r"part-00001\.safetensors .*, by another program or a fault of the disk\. Start again with --overwrite\."
    with pytest.raises(FormatError, match=said):
        meddled_behind(behind, monkeypatch, lambda: change(part), lambda: quantize(model, out))
    with pytest.raises(FormatError, match=r"part-00001\.safetensors .*Start again with --overwrite"):
        quantize(model, out)
    quantize(model, out, overwrite=True)
    assert contents(out) == contents(whole)


def test_a_shard_that_the_journal_does_not_need_is_made_again(model, whole, tmp_path, monkeypatch):
    """The message says that the command is to be repeated, and then only the lost blocks are solved."""
    out, due = tmp_path / "out", iter([True, True, False, False])  # the first is that of the plan
    part = tmp_path / "out.unfinished" / "part-00002.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("nearplane.formats.journal_pages.JournalPages.due", lambda self, share=None: next(due))
        with pytest.raises(FormatError, match=r"part-00002.* is missing.*Repeat the command, which makes it again\.$"):
            meddled_behind(2, patch, part.unlink, lambda: quantize(model, out))
    quantize(model, out)
    assert contents(out) == contents(whole)


def altered_in_the_first_block(path):
    data = bytearray(path.read_bytes())
    data[next(each for each in read_header(path).tensors if each.name == "blk.0.attn_v.weight").begin] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("change", daily([Path.unlink, altered_in_the_first_block], [altered_in_the_first_block]))
def test_a_gguf_that_is_deleted_or_changed_under_a_run_is_refused(model, tmp_path, monkeypatch, change):
    path = tmp_path / "out.unfinished" / "model.gguf"
    words = dict(calibration=TOKENS, device="cpu", grid="q4_0", pre="default", ignore=["lm_head"])
    with pytest.raises(FormatError, match=r"model\.gguf.* (is missing|has changed), although .*--overwrite"):
        meddled_behind(
            2, monkeypatch, lambda: change(path), lambda: nearplane.quantize(model, tmp_path / "out", **words)
        )


@pytest.mark.parametrize("way", daily(WAYS, ["grid", "rate"]))
def test_a_run_that_is_stopped_while_files_are_joined_only_joins_the_rest(model, tmp_path, monkeypatch, way):
    """Its shards are deleted as they are joined, and with them what the journal named before."""
    monkeypatch.setattr("nearplane.system.shard_writer.MAX_FILE", 30_000)
    quantize(model, tmp_path / "whole", way)
    wanted = contents(tmp_path / "whole")
    files = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    assert len(files) > 1
    assert {name: wanted[name] for name in files}.items() <= read_record(tmp_path / "whole").files.items()
    joined, out = ShardWriter._joined, tmp_path / "out"
    for many in (0, 1, len(files)):
        left = iter(range(many))

        def stopped(self, path, parts, left=left):
            if next(left, None) is None:
                raise StoppedError
            return joined(self, path, parts)

        def stopped_last(self):
            raise StoppedError

        with monkeypatch.context() as patch:
            patch.setattr(ShardWriter, "_joined", stopped)
            patch.setattr(ShardWriter, "finish", stopped_last)
            with pytest.raises(StoppedError):
                quantize(model, out, way)
        assert len(list(Path(f"{out}.unfinished").glob("model*.safetensors"))) == many
        monkeypatch.setattr(importlib.import_module("nearplane.verbs.quantize"), "walk", None)  # no block is run again
    quantize(model, out, way)
    assert contents(out) == wanted


def test_tuning_that_is_stopped_while_files_are_joined_only_joins_the_rest(model, whole, tmp_path, monkeypatch):
    def run(out):
        return nearplane.tune(whole, out, against=model, calibration=TOKENS, samples=8, steps=2)

    monkeypatch.setattr("nearplane.system.shard_writer.MAX_FILE", 30_000)
    run(tmp_path / "whole")
    joined, left = ShardWriter._joined, iter(range(1))

    def stopped(self, path, parts):
        if next(left, None) is None:
            raise StoppedError
        return joined(self, path, parts)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_joined", stopped)
        with pytest.raises(StoppedError):
            run(tmp_path / "out")
    monkeypatch.setattr(importlib.import_module("nearplane.verbs.tune"), "_tuned", None)
    record = run(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert 0 < record.tuning.seconds < record.seconds
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out").iterdir()}
    assert record.files.items() <= digests.items()
    assert nearplane.verify(tmp_path / "out") is not None
