"""A run that is killed at any moment goes on when the same command is given again, and ends with the same bytes."""

import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import (
    StoppedError,
    check_goes_on,
    check_goes_on_after_a_full_disk,
    check_goes_on_with_a_file_cut_short,
    contents,
    stopped_behind,
)
from nearplane import FormatError, RecipeError
from nearplane.demo import CALIBRATION
from nearplane.formats import journal_pages
from nearplane.formats.gguf.gguf_header import read_header
from nearplane.record.record_file import read_record
from nearplane.system.device import Device
from nearplane.system.files import HashedFiles, sha256
from nearplane.system.output_folder import Unfinished
from nearplane.system.shard_writer import ShardWriter
from nightly import daily
from threads import threads_of_torch

BLOCKS = 3
WAYS = {
    "grid": dict(bits=4, group_size=16),
    "widths by slope": dict(bits=3, group_size=16, allocate="slope", symmetric=False, format="gptq_v2"),
    "rate, embeddings and head": dict(rate=3.0, include_embeddings=True, include_head=True),
    "size": dict(size="270kB"),
    "blocks of llama.cpp, embeddings too": dict(grid="q4_0"),
    "MLX, widths by slope, embeddings and head": dict(
        bits=3.5, group_size=32, format="mlx", include_embeddings=True, include_head=True
    ),
    "rounded to nearest": dict(bits=4, group_size=16, solver="round-to-nearest"),
    "a mix of formats": dict(mix="int3,int4,bf16", bits_per_weight=6, group_size=16),
}
EXPERT_WAYS = {
    "grid": dict(bits=4, group_size=16),
    "rate": dict(rate=3.0),
    "GGUF": dict(grid="q4_0"),
}
TEXT = dict(samples=10, seqlen=32, device="cpu")


def save_model(folder, blocks):
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=blocks, tie_word_embeddings=False)
    random_model(config).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "llama", BLOCKS)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:20000])
    return path


@pytest.fixture(autouse=True)
def every_block(monkeypatch):
    """Keep every block, however quick it is."""
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)


@pytest.fixture(scope="module")
def whole(model, text, tmp_path_factory):
    """Return a function from a key of WAYS to the folder of a run that nobody stopped."""
    folders = {}

    def folder_of(way):
        if way not in folders:
            folders[way] = tmp_path_factory.mktemp("whole") / "out"
            nearplane.quantize(model, folders[way], calibration=str(text), **WAYS[way], **TEXT)
        return folders[way]

    return folder_of


@pytest.fixture(scope="module")
def stop(model, text, tmp_path_factory):
    """Return a function that leaves beside a path what a run leaves there that was stopped behind so many blocks."""
    folders = {}

    def stopped(blocks, way, out):
        if (blocks, way) not in folders:
            folders[blocks, way] = tmp_path_factory.mktemp("stopped") / "out"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)
                stopped_behind(blocks, model, folders[blocks, way], patch, calibration=str(text), **WAYS[way], **TEXT)
        shutil.copytree(f"{folders[blocks, way]}.unfinished", f"{out}.unfinished")

    return stopped


@pytest.mark.parametrize(
    ("way", "many"),
    [
        ("grid", 1),
        *(pytest.param(way, 12, marks=pytest.mark.nightly) for way in WAYS),
    ],
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_bytes(model, text, whole, tmp_path, way, many):
    options = dict(calibration=str(text), **WAYS[way], **TEXT)
    check_goes_on(lambda out: nearplane.quantize(model, out, **options), contents(whole(way)), tmp_path, many)


@pytest.mark.nightly
@pytest.mark.parametrize("way", EXPERT_WAYS)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_on_experts_that_is_killed_or_cut_short_ends_with_the_same_bytes(text, tmp_path, way):
    source = tmp_path / "experts"
    config = config_of(
        "qwen3_moe", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2, moe_intermediate_size=32, norm_topk_prob=True
    )
    random_model(config).float().save_pretrained(source)
    add_tokenizer(source)

    def run(out, **more):
        nearplane.quantize(source, out, calibration=str(text), **EXPERT_WAYS[way], **TEXT, **more)

    run(tmp_path / "whole")
    for name in ("killed", "short"):
        (tmp_path / name).mkdir()
    check_goes_on(run, contents(tmp_path / "whole"), tmp_path / "killed", 8)
    check_goes_on_with_a_file_cut_short(run, contents(tmp_path / "whole"), tmp_path / "short", 4)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_full_disk_or_a_newest_file_cut_short_at_any_moment(model, text, whole, tmp_path, way):
    def run(out, **more):
        nearplane.quantize(model, out, calibration=str(text), **WAYS[way], **TEXT, **more)

    (tmp_path / "full").mkdir()
    (tmp_path / "short").mkdir()
    check_goes_on_after_a_full_disk(run, contents(whole(way)), tmp_path / "full", 8)
    check_goes_on_with_a_file_cut_short(run, contents(whole(way)), tmp_path / "short", 8)


@pytest.mark.parametrize(
    "way", daily(["widths by slope", "size", "rounded to nearest"], ["size", "rounded to nearest"])
)
def test_no_finished_block_is_solved_again(model, text, stop, whole, tmp_path, monkeypatch, caplog, way):
    options, wanted = dict(calibration=str(text), **WAYS[way], **TEXT), contents(whole(way))
    stop(2, way, tmp_path / "out")
    solved = []
    program = importlib.import_module("nearplane.planning.solve_stage")
    solve = program.solve_layer
    monkeypatch.setattr(program, "solve_layer", lambda *task: (solved.append(task[0]), solve(*task))[1])
    monkeypatch.setattr("nearplane.planning.run.plan", None)
    with caplog.at_level("INFO", "nearplane"):
        nearplane.quantize(model, tmp_path / "out", **options)
    assert {name.split(".")[2] for name in solved} == {"2"}
    assert "resuming: 2 blocks kept of a run that was stopped after" in caplog.text
    assert contents(tmp_path / "out") == wanted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_default_number_of_windows_is_the_same_after_a_stop(text, tmp_path, monkeypatch):
    """Stopped before the first block and gone on with by 2 threads, or behind it and by 1: the bytes of one run by 1 thread."""
    options = dict(calibration=str(text), seqlen=40, device="cpu", **WAYS["grid"])
    model, killed, stopped, whole = (tmp_path / name for name in ("model", "killed", "stopped", "whole"))
    save_model(model, blocks=2)
    with threads_of_torch(1):
        child = os.fork()
        if not child:  # ends before its first layer
            program = importlib.import_module("nearplane.planning.solve_stage")
            program.solve_layer = lambda *task: os.kill(os.getpid(), signal.SIGKILL)
            nearplane.quantize(model, killed, **options)
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it was killed"
        nearplane.quantize(model, whole, **options)
        stopped_behind(1, model, stopped, monkeypatch, **options)
    record = read_record(whole)
    assert record.windows == record.recipe.calibration.samples == 80  # 50 tokens for each of 64 inputs
    for left, threads in ((killed, 2), (stopped, 1)):
        out = tmp_path / f"{left.name}, gone on with by {threads}"
        shutil.copytree(f"{left}.unfinished", f"{out}.unfinished")
        with threads_of_torch(threads):
            nearplane.quantize(model, out, **options)
        assert contents(out) == contents(whole), out.name


def test_a_run_that_is_killed_when_all_is_written_is_put_in_place(model, text, whole, tmp_path, monkeypatch):
    options, rename, wanted = dict(calibration=str(text), **WAYS["grid"], **TEXT), Path.rename, contents(whole("grid"))

    def stopped(self, place):
        if self.name == "out.unfinished":
            raise StoppedError
        return rename(self, place)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopped)
        with pytest.raises(StoppedError):
            nearplane.quantize(model, tmp_path / "out", **options)
    assert (tmp_path / "out.unfinished" / "journal" / "state.json").is_file()
    monkeypatch.setattr(importlib.import_module("nearplane.verbs.quantize"), "walk", None)
    shard = tmp_path / "out.unfinished" / "model.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(FormatError, match=shard.name):
        nearplane.quantize(model, tmp_path / "out", **options)
    shard.write_bytes(content)
    nearplane.quantize(model, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == wanted


def test_a_joined_file_that_is_damaged_is_written_anew_with_overwrite(model, text, whole, tmp_path, monkeypatch):
    options, join = dict(calibration=str(text), **WAYS["grid"], **TEXT), ShardWriter.join

    def stopped(self):
        join(self)
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "join", stopped)
        with pytest.raises(StoppedError):
            nearplane.quantize(model, tmp_path / "out", **options)
    shard = tmp_path / "out.unfinished" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"model\.safetensors has changed .*--overwrite"):
        nearplane.quantize(model, tmp_path / "out", **options)
    nearplane.quantize(model, tmp_path / "out", **options, overwrite=True)
    assert contents(tmp_path / "out") == contents(whole("grid"))


def test_a_run_that_is_told_something_else_does_not_go_on(model, text, stop, tmp_path):
    out, options = tmp_path / "out", dict(calibration=str(text), **WAYS["grid"], **TEXT)
    stop(1, "grid", out)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[5000:])
    wider = shutil.copytree(model, tmp_path / "wider")
    path = wider / "model.safetensors"
    tensors = {name: 1.01 * tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    for said, run in (
        ("bits was 4, is 3", dict(bits=3)),
        ("calibration text was ", dict(calibration=str(other))),
        ("the model's model.safetensors was ", dict(model=wider)),
    ):
        words = {"model": model, **options, **run}
        with pytest.raises(RecipeError, match=said):
            nearplane.quantize(words.pop("model"), out, **words)
    nearplane.quantize(model, out, overwrite=True, **{**options, "bits": 3})
    assert read_record(out).recipe.scheme.bits == 3


@pytest.mark.parametrize("name", ["part-00002.safetensors", "journal/behind-00002.0.pt", "journal/state.json"])
def test_a_file_that_is_cut_short_is_named_and_may_be_replaced(model, text, stop, whole, tmp_path, name):
    out, options = tmp_path / "out", dict(calibration=str(text), **WAYS["grid"], **TEXT)
    stop(2, "grid", out)
    path = Path(f"{out}.unfinished") / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match=f"{path.name}.*--overwrite"):
        nearplane.quantize(model, out, **options)
    if name == "journal/state.json":  # the others are replaced in the same way
        nearplane.quantize(model, out, overwrite=True, **options)
        assert contents(out) == contents(whole("grid"))


def test_what_a_run_of_another_version_left_is_refused_by_name_and_may_be_replaced(model, text, stop, whole, tmp_path):
    out, options = tmp_path / "out", dict(calibration=str(text), **WAYS["grid"], **TEXT)
    stop(1, "grid", out)
    path = Path(f"{out}.unfinished") / "journal" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"version": 3, "told": state["told"] | {"version of nearplane": "0.1.0"}}))
    said = r"out\.unfinished belongs to a run of nearplane 0\.1\.0, .*found journal version 3.*--overwrite, or resume it with"
    with pytest.raises(FormatError, match=said):
        nearplane.quantize(model, out, **options)
    nearplane.quantize(model, out, overwrite=True, **options)
    assert contents(out) == contents(whole("grid"))


@pytest.mark.parametrize(("way", "page"), [("grid", "behind-00002.0.pt"), ("size", "plan.pt")])
def test_one_bit_of_a_page_that_is_wrong_is_noticed(model, text, stop, tmp_path, way, page):
    out, options = tmp_path / "out", dict(calibration=str(text), **WAYS[way], **TEXT)
    stop(2, way, out)
    path = Path(f"{out}.unfinished") / "journal" / page
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=f"{page} has changed since it was written.*--overwrite"):
        nearplane.quantize(model, out, **options)


@pytest.mark.parametrize("changes", [{"blocks": 10**7}, {"seconds": float("nan")}, {"plan": {"types": "a"}}], ids=str)
def test_a_state_that_was_changed_is_noticed(model, text, stop, tmp_path, changes):
    """It ended in tracebacks wherever the run came to use it."""
    out, options = tmp_path / "out", dict(calibration=str(text), **WAYS["grid"], **TEXT)
    stop(1, "grid", out)
    path = Path(f"{out}.unfinished") / "journal" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(FormatError, match=r"state\.json has changed since it was written.*--overwrite"):
        nearplane.quantize(model, out, **options)


def test_a_page_that_is_no_page_is_one_sentence(model, text, stop, tmp_path):
    """Though its hash, and that of the state, were made right."""
    out, options = tmp_path / "out", dict(calibration=str(text), **WAYS["size"], **TEXT)
    stop(1, "size", out)
    journal = Path(f"{out}.unfinished") / "journal"
    with zipfile.ZipFile(journal / "plan.pt", "w") as page:
        page.writestr("plan/data.pkl", b"\x80\x02.")
        page.writestr("plan/version", b"3")
    state = json.loads((journal / "state.json").read_text())
    state["pages"]["plan.pt"] = sha256(journal / "plan.pt")
    (journal / "state.json").write_text(json.dumps(state | {"digest": journal_pages._digest(state)}))
    with pytest.raises(FormatError, match=r"plan\.pt cannot be read .*--overwrite"):
        nearplane.quantize(model, out, **options)


def test_shards_below_the_folder_and_all_tokenizers_count(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "a.json").mkdir()  # no file
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "source.spm").write_text("a tokenizer")
    (tmp_path / "notes.md").write_text("no input")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "parts/1.safetensors"}}')
    said = []
    for content in (b"one", b"other"):
        (tmp_path / "parts" / "1.safetensors").write_bytes(content)
        said.append(journal_pages.run_inputs({}, {"model": tmp_path}, "", {}, Device(torch.device("cpu"))).values)
    names = ["config.json", "model.safetensors.index.json", "parts/1.safetensors", "source.spm"]
    assert [name for name in said[0] if "the model's" in name] == [f"the model's {name}" for name in names]
    assert {name for name in said[0] if said[0][name] != said[1][name]} == {"the model's parts/1.safetensors"}


@pytest.mark.nightly
def test_a_disk_that_fills_while_pages_are_written_keeps_the_state_before(model, text, whole, tmp_path, monkeypatch):
    """Pages that no state names take no room from the run."""
    out, options, save = tmp_path / "out", dict(calibration=str(text), **WAYS["grid"], **TEXT), torch.save
    monkeypatch.setattr("nearplane.planning.journal.PAGE", 1)  # a batch of one network a page

    def full(page, path):
        if Path(path).name == "behind-00002.1.pt.part":
            raise OSError(28, "No space left on device")
        save(page, path)

    with monkeypatch.context() as patch:
        patch.setattr("nearplane.formats.journal_pages.torch.save", full)
        stopped_behind(2, model, out, patch, **options)
    there = {path.name.split(".")[0] for path in (tmp_path / "out.unfinished" / "journal").iterdir()}
    assert there == {"state", "plan", "behind-00001"}
    nearplane.quantize(model, out, **options)
    assert contents(out) == contents(whole("grid"))


@pytest.mark.nightly
def test_a_gguf_that_is_damaged_is_named_and_may_be_replaced(model, text, whole, tmp_path, monkeypatch):
    way = "blocks of llama.cpp, embeddings too"
    out, options = tmp_path / "out", dict(calibration=str(text), **WAYS[way], **TEXT)
    stopped_behind(2, model, out, monkeypatch, **options)
    path = Path(f"{out}.unfinished") / "model.gguf"
    data = bytearray(path.read_bytes())
    info = next(each for each in read_header(path).tensors if each.name == "blk.0.attn_v.weight")
    whole_file = bytes(data)
    data[info.begin] ^= 1
    for damaged, said in ((data, r"v_proj\.weight has changed"), (whole_file + b"\0\0", r"model\.gguf has changed")):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=said):
            nearplane.quantize(model, out, **options)
    nearplane.quantize(model, out, overwrite=True, **options)
    assert contents(out) == contents(whole(way))


def test_another_processor_is_said(model, text, whole, tmp_path, monkeypatch, caplog):
    out, options = tmp_path / "out", dict(calibration=str(text), **WAYS["grid"], **TEXT)
    stopped_behind(2, model, out, monkeypatch, **options)
    monkeypatch.setattr("nearplane.formats.journal_pages.processor", lambda: "another")
    nearplane.quantize(model, out, **options)
    assert "used another processor" in caplog.text
    assert "than this one (another)" in caplog.text
    assert contents(out) == contents(whole("grid"))


def test_another_command_does_not_delete_what_can_be_gone_on_with(model, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped_behind(1, model, out, monkeypatch, calibration=str(text), **WAYS["grid"], **TEXT)
    there = sorted(path.name for path in Path(f"{out}.unfinished").iterdir())
    with pytest.raises(RecipeError, match="belongs to a stopped run"), Unfinished(out):
        pass
    assert sorted(path.name for path in Path(f"{out}.unfinished").iterdir()) == there
    with Unfinished(out, overwrite=True) as place:
        assert [path.name for path in place.folder.iterdir()] == ["INCOMPLETE"]


def test_a_disk_that_is_full_costs_the_journal_not_the_run(model, text, whole, tmp_path, monkeypatch, caplog):
    def full(*args, **words):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nearplane.formats.journal_pages.JournalPages._saved", full)
        nearplane.quantize(model, tmp_path / "out", calibration=str(text), **WAYS["grid"], **TEXT)
    assert "later work is lost" in caplog.text
    assert contents(tmp_path / "out") == contents(whole("grid"))
    caplog.clear()
    free = {"again.unfinished": 10}  # there is room for the checkpoint when the run begins
    monkeypatch.setattr(
        "shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 0, free.get(folder.name, 10**9))
    )
    nearplane.quantize(model, tmp_path / "again", calibration=str(text), **WAYS["grid"], **TEXT)
    assert re.search(r"[1-9][\d.]* KB of state would leave too little of 10 bytes for the checkpoint", caplog.text)


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit on file sizes as Linux has it")
def test_a_page_that_torch_cannot_write_costs_the_journal(tmp_path, caplog):
    """torch.save raises RuntimeError where a quota or a limit on the size of files ends it."""
    pages = journal_pages.JournalPages(SimpleNamespace(folder=tmp_path), journal_pages.RunInputs({}, HashedFiles({})))
    (soft, hard), before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (300, 5000):  # within the header, and within the tensor
        pages.room = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            pages.write_first("plan.pt", {"rates": torch.zeros(9000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not pages.room
        assert (
            "later work is lost: plan.pt could not be written, probably as the disk is full, or a quota" in caplog.text
        )
        assert not list((tmp_path / "journal").iterdir())
        caplog.clear()
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.nightly
def test_a_full_disk_in_the_middle_is_gone_on_with(model, text, whole, tmp_path, monkeypatch):
    options, save, written = (
        dict(calibration=str(text), **WAYS["grid"], **TEXT),
        nearplane.system.shard_writer.save_file,
        [],
    )

    def full(tensors, path, *more):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        save(tensors, path, *more)

    with monkeypatch.context() as patch:
        patch.setattr("nearplane.system.shard_writer.save_file", full)
        with pytest.raises(FormatError, match="No space left"):
            nearplane.quantize(model, tmp_path / "out", **options)
    nearplane.quantize(model, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(whole("grid"))


def test_quick_blocks_are_not_all_kept(model, text, tmp_path, monkeypatch):
    """Keeping hidden states may take a twentieth of the time: of a run of a second not more than the first is."""
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", 1e-9)
    kept = []
    write = journal_pages.JournalPages.write

    def noted(self, state, pages, **words):
        kept.append(state["blocks"])
        write(self, state, pages, **words)

    monkeypatch.setattr("nearplane.formats.journal_pages.JournalPages.write", noted)
    nearplane.quantize(model, tmp_path / "out", calibration=str(text), **WAYS["grid"], **TEXT)
    assert kept == [1]
