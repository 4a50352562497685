"""The folder: whole or not loadable, never in the way of another, and read back as it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from checkpoints import random_matrix, write_folder
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.beside import changed_card
from nearplane.formats.container import Container
from nearplane.formats.stored import quantization_of, read_dense, read_matrices
from nearplane.record.model_card import SEAL
from opened import GRID, finish, writer

FORMAT_NAMES = ("compressed-tensors", "gptq", "gptq_v2")


@pytest.mark.parametrize(
    ("format", "symmetric"), [("compressed-tensors", True), ("gptq", True), ("gptq_v2", True), ("gptq_v2", False)]
)
def test_a_folder_reads_back_as_it_was_written(
    tmp_path: Path, source: Callable[..., Path], format: str, symmetric: bool
) -> None:
    model, out = source(torch.bfloat16), tmp_path / "new" / "out"
    written = write_folder(out, model, format, bits=3, group_size=32, symmetric=symmetric)
    read = dict(read_matrices(out))
    assert read.keys() == written.keys()
    for name, matrix in written.items():
        assert torch.equal(read[name].codes, matrix.codes)
        assert torch.equal(read[name].decode(), matrix.decode())
    dense, original = dict(read_dense(out)), LlamaForCausalLM.from_pretrained(model).state_dict()
    assert dense.keys() == original.keys()
    for name, tensor in original.items():
        layer = name.removesuffix(".weight")
        assert torch.equal(dense[name], written[layer].decode() if layer in written else tensor)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_everything_beside_the_weights_comes_along(tmp_path: Path, source: Callable[..., Path], format: str) -> None:
    model, out = source(torch.bfloat16), tmp_path / "out"
    write_folder(out, model, format, bits=4, group_size=32)
    names = {path.name for path in out.iterdir()}
    copied = {"tokenizer.json", "chat_template.jinja", "generation_config.json"}
    gptq = {"quantize_config.json"} if format != "compressed-tensors" else set()
    assert names == {"model.safetensors"} | copied | gptq | {"config.json", "nearplane.json"}
    assert (out / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    was, now = (json.loads((place / "config.json").read_text()) for place in (model, out))
    quantization = now.pop("quantization_config")
    assert now == was
    assert quantization == quantization_of(out)
    if gptq:
        assert json.loads((out / "quantize_config.json").read_text()) == quantization


def test_code_of_the_model_is_copied_only_when_trusted(tmp_path: Path, plain: Path) -> None:
    (plain / "modeling_own.py").write_text("")
    (plain / "additional_chat_templates").mkdir()
    (plain / "additional_chat_templates" / "tool.jinja").write_text("tool")
    (plain / "onnx").mkdir()
    for trusted in (False, True):
        out = tmp_path / f"out{trusted}"
        finish(writer(out, plain, trust_remote_code=trusted))
        assert (out / "modeling_own.py").exists() is trusted
        assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "tool"
        assert not (out / "onnx").exists()


def fail(opened: Container) -> None:
    raise KeyboardInterrupt


def unfinished(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


def is_unfinished(out: Path) -> bool:
    folder = unfinished(out)
    return (folder / "INCOMPLETE").exists() and not (folder / "config.json").exists()


def test_a_run_that_fails_leaves_nothing_that_loads_and_what_was_there_before(
    tmp_path: Path, source: Callable[..., Path]
) -> None:
    """With --overwrite the old checkpoint stays until the new one is whole."""
    model, out = source(torch.bfloat16), tmp_path / "out"
    write_folder(out, model, "compressed-tensors", bits=4, group_size=32)
    before = contents(out)
    with pytest.raises(KeyboardInterrupt):
        finish(writer(out, model, "compressed-tensors", shards=2, overwrite=True), shards=2, during=fail)
    assert contents(out) == before
    assert AutoModelForCausalLM.from_pretrained(out)
    assert is_unfinished(out)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(unfinished(out))
    (unfinished(out) / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="incomplete"):
        list(read_dense(unfinished(out)))


def test_missing_shards_a_missing_record_and_forgotten_layers_are_failures_too(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(FormatError, match="1 shards were written, expected 2"):
        finish(writer(tmp_path / "a", plain, shards=2))
    with pytest.raises(FormatError, match="no record"), writer(tmp_path / "b", plain) as w:
        w.close_block({"x": torch.ones(2)})
    with pytest.raises(FormatError, match="without a shard"), writer(tmp_path / "c", plain) as w:
        w.add("a", random_matrix(32, 64, **GRID))
    assert all(is_unfinished(tmp_path / name) for name in "ab")
    assert not any((tmp_path / name).exists() for name in "abc")


def test_a_full_folder_is_left_alone_without_overwrite(tmp_path: Path, plain: Path) -> None:
    finish(writer(tmp_path / "out", plain))
    before = contents(tmp_path / "out")
    with pytest.raises(RecipeError, match="--overwrite"):
        writer(tmp_path / "out", plain)
    writer(tmp_path / "out", plain, overwrite=True)  # not entered: no work has started
    assert contents(tmp_path / "out") == before
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"file is a file\. Choose another folder"):
        writer(tmp_path / "file", plain)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_overwrite_replaces_a_finished_and_an_unfinished_checkpoint(tmp_path: Path, plain: Path) -> None:
    out = tmp_path / "out"
    finish(writer(out, plain, shards=3), shards=3)
    (out / "notes.md").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        finish(writer(out, plain, overwrite=True), during=fail)
    assert unfinished(out).exists() is False  # nothing was written
    finish(writer(out, plain, "compressed-tensors", overwrite=True))
    assert {path.name for path in out.iterdir()} == {
        "config.json", "nearplane.json", "notes.md", "model.safetensors"
    }  # fmt: skip
    assert dict(read_dense(out)).keys() == {"x0"}


def test_a_card_may_be_replaced_that_is_missing_or_as_nearplane_wrote_it(tmp_path: Path) -> None:
    assert not changed_card(tmp_path)
    for text, changed in (("# By a user", True), (above := "# By nearplane\n", True), (above + seal(above), False)):
        (tmp_path / "README.md").write_text(text)
        assert changed_card(tmp_path) is changed
    (tmp_path / "README.md").write_bytes(b"\xff")
    assert changed_card(tmp_path)


def seal(above: str) -> str:
    return SEAL.format(hashlib.sha256(above.encode()).hexdigest())


def test_overwrite_spares_folders_that_are_not_ours(tmp_path: Path, plain: Path) -> None:
    """A mistyped --out must not cost a model."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_text("somebody's weights")
    with pytest.raises(RecipeError, match="nearplane did not write it"):
        writer(other, plain, overwrite=True)
    assert contents(other) == {"model.safetensors": b"somebody's weights"}


def test_out_may_not_be_in_hold_or_lie_in_the_source(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "link").symlink_to(plain)
    for out in (plain, plain / "out", tmp_path, tmp_path / "link", tmp_path / "x" / ".." / "source"):
        with pytest.raises(RecipeError, match="Choose another folder"):
            writer(out, plain, overwrite=True)
    writer(tmp_path / "source-w4", plain)  # a name that begins alike is fine


def test_a_config_that_does_not_describe_the_layer_is_refused(tmp_path: Path, plain: Path) -> None:
    """What is added is read back as a reader would: other bits or groups than announced never reach the disk."""
    right = random_matrix(32, 64, **GRID)
    wrong = {
        "bits": random_matrix(32, 64, **(GRID | {"bits": 8})),
        "group size": random_matrix(32, 64, **(GRID | {"group_size": 16})),
        "symmetry": random_matrix(32, 64, **(GRID | {"symmetric": False})),
        "permuted": random_matrix(32, 64, permuted=True, **GRID),
    }
    for format in FORMAT_NAMES:
        with writer(tmp_path / format, plain, format) as w:
            for what, matrix in wrong.items():
                with pytest.raises(FormatError, match="a"):
                    w.add(f"a.{what}", matrix)
            w.add("a", right)
            w.close_block({})
            w.record_json = "{}"
        assert [name for name, _ in read_matrices(tmp_path / format)] == ["a"]


def test_sizes_are_those_of_the_files(tmp_path: Path, plain: Path) -> None:
    """Rates in the record are made of them: here 4-bit codes, a 16-bit scale and a 4-bit zero a group, and g_idx."""
    bias = torch.randn(64)
    with writer(tmp_path / "out", plain) as w:
        size = w.add("a", random_matrix(64, 96, **GRID), bias).bytes
        shard = w.close_block({"b": torch.ones(3)})
        w.record_json = "{}"
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    assert shard == path.stat().st_size == w.size
    assert size == 64 * 96 // 2 + 64 * 3 * 2 + 64 * 3 // 2 + 4 * 96
    assert size == sum(tensor.nbytes for name, tensor in tensors.items() if name not in ("b", "a.bias"))
    assert torch.equal(tensors["a.bias"], bias)


def test_a_tensor_given_twice_is_refused(tmp_path: Path, plain: Path) -> None:
    def twice(w: Container) -> None:
        w.add("a", random_matrix(32, 64, **GRID), torch.ones(32))
        w.close_block({"a.bias": torch.ones(32)})

    with pytest.raises(FormatError, match=r"a\.bias"):
        finish(writer(tmp_path / "out", plain), during=twice)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("name", ["tokenizer.json", "nearplane.json", "config.json", "quantize_config.json"])
def test_a_full_disk_is_a_sentence_and_leaves_nothing_that_loads(tmp_path: Path, plain: Path, name: str) -> None:
    (plain / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    with pytest.raises(FormatError, match="No space left on device"):
        finish(writer(out, plain), during=lambda w: (unfinished(out) / name).symlink_to("/dev/full"))
    assert is_unfinished(out)


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="is not a folder that can be written"):
        finish(writer(tmp_path / "file" / "out", plain))
