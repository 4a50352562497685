"""Integers in another format: equal values by an independent decoder for every pair, and what would change is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import nearplane
import plain_formats
from checkpoints import random_matrix, tiny_llama, write_folder
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.container import Folder
from nearplane.formats.stored import Stored
from nearplane.formats.table import FORMATS
from nearplane.number_formats import integers
from plain_formats import Raw, decoded

SHAPE = 32, 512
# (format, bits, group size, symmetric) of a checkpoint, and (format, grid) of its export
PAIRS = [
    *((("compressed-tensors", bits, 32, True), ("gptq", f"int{bits}-g32")) for bits in (2, 3, 4, 8)),
    (("compressed-tensors", 4, None, True), ("gptq_v2", "int4-row")),
    (("compressed-tensors", 4, 64, True), ("awq", "int4-g64-asym")),
    *((("gptq", bits, 128, True), ("compressed-tensors", f"int{bits}-g128")) for bits in (2, 3, 4, 8)),
    (("gptq_v2", 4, 32, True), ("compressed-tensors", "int4-g32")),
    (("gptq", 4, 32, True), ("gptq_v2", "int4-g32")),
    (("gptq_v2", 4, 32, False), ("awq", "int4-g32-asym")),
    (("awq", 4, None, False), ("gptq_v2", "int4-row-asym")),
    (("compressed-tensors", 4, 128, True), ("gguf", "q4_0")),
    (("gptq", 4, None, True), ("gguf", "q4_0")),
    (("compressed-tensors", 5, 32, True), ("gguf", "q5_0")),
    (("compressed-tensors", 8, 64, True), ("gguf", "q8_0")),
    (("compressed-tensors", 6, 256, True), ("gguf", "q6_k")),
    (("gptq", 3, None, True), ("gguf", "q3_k")),
    (("gptq_v2", 2, 256, False), ("gguf", "q2_k")),
    (("gptq_v2", 4, 256, False), ("gguf", "q4_k")),
    (("awq", 4, None, False), ("gguf", "q4_k")),
    *((("compressed-tensors", bits, 64, True), ("mlx", f"int{bits}-g64-min")) for bits in (2, 3, 4, 5, 6, 8)),
    (("gptq_v2", 4, 128, False), ("mlx", "int4-g128-min")),
    (("gguf", 4, 32, True), ("gptq", "int4-g32")),
    (("gguf", 8, 32, True), ("compressed-tensors", "int8-g32")),
]


def by_others(format, grid, tensors):
    """Decode the tensors of a layer named "a" with code that is not nearplane's."""
    if format == "gguf":
        (blocks,) = tensors.values()
        return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[grid.upper()]))
    parts = {
        name.removeprefix("a."): Raw({torch.float16: "F16", torch.float32: "F32"}.get(each.dtype, "I"), each.numpy())
        for name, each in tensors.items()
        if each.dtype != torch.uint32
    }
    if format == "awq":
        return torch.from_numpy(plain_formats._awq(parts))
    how = {"bits": int(grid[3]), "checkpoint_format": format, "num_bits": int(grid[3]), "type": "int"}
    if format == "mlx":
        parts["weight"] = Raw("U32", tensors["a.weight"].view(torch.int32).numpy().view(np.uint32))
        return torch.from_numpy(
            plain_formats._mlx(parts, {"bits": int(grid[3]), "group_size": int(grid.split("-")[1][1:])})
        )
    size = grid.split("-")[1].removeprefix("g")
    how |= {"strategy": "channel"} if size == "row" else {"strategy": "group", "group_size": int(size)}
    decode = plain_formats._gptq if format.startswith("gptq") else plain_formats._compressed
    return torch.from_numpy(decode(parts, how))


@pytest.mark.parametrize(("stored", "moved"), PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_a_layer_has_equal_values_in_the_other_format(stored, moved):
    (source, bits, group_size, symmetric), (target, name) = stored, moved
    matrix = random_matrix(*SHAPE, bits=bits, group_size=group_size, symmetric=symmetric)
    old, new = FORMATS[source].layers, FORMATS[target].layers
    kind = integers(bits, group_size, symmetric=symmetric)
    held = old.held(matrix, kind)
    there = old.unpack("a", old.pack("a", held.matrix, torch.float16), held.format)
    held = new.held(there, held.format)
    assert held.format.name == name
    new.check("a", SHAPE, "Linear", held.format)
    assert list(held.matrix.grid.differences_from(held.format, held.matrix.codes)) == []
    dtype = torch.float32 if target == "mlx" else torch.float16  # its minima are products of steps and zeros
    tensors = new.pack("a", held.matrix, dtype)
    assert held.matrix.same_as(new.unpack("a", tensors, held.format))
    assert torch.equal(by_others(target, name, tensors), matrix.decode())


@pytest.fixture
def made(tmp_path: Path, source: Callable[[torch.dtype], Path]) -> Callable[..., Path]:
    """Return a function that writes a tiny Llama on grids as another program would, without a run record."""

    def make(format: str, *, dtype: torch.dtype = torch.bfloat16, **options) -> Path:
        write_folder(tmp_path / "out", source(dtype), format, **options)
        (tmp_path / "out" / "nearplane.json").unlink()
        return tmp_path / "out"

    return make


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """Return the folder of a tiny Llama in a dtype."""
    folders: dict[torch.dtype, Path] = {}

    def make(dtype: torch.dtype) -> Path:
        if dtype not in folders:
            folders[dtype] = tmp_path_factory.mktemp("source") / "model"
            tiny_llama().to(dtype).save_pretrained(folders[dtype])
        return folders[dtype]

    return make


def test_a_gptq_of_another_program_becomes_compressed_tensors(made, tmp_path, caplog):
    """transformers reads it; steps that bfloat16 does not hold stay in float16, and that is said."""
    out = made("gptq", bits=3, group_size=32)
    nearplane.export(out, tmp_path / "new", format="compressed-tensors")
    assert "Steps are stored in float16, because bfloat16, the dtype of the other weights" in caplog.text
    assert not (tmp_path / "new" / "nearplane.json").exists()
    before, after = decoded(out), decoded(tmp_path / "new")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.values.tobytes()) == (after[name].dtype, after[name].values.tobytes()), name
    tokens = torch.arange(12)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    ours = nearplane.load(out, dtype="float32", packed=False)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


def test_compressed_tensors_of_another_program_becomes_gptq(made, tmp_path):
    """Layers keep widths of their own; nothing is said about an order that nobody knows."""
    out = made("compressed-tensors", bits=4, group_size=32, width=lambda name: 8 if "down" in name else 4)
    nearplane.export(out, tmp_path / "new", format="gptq")
    old, new = Stored(out), Stored(tmp_path / "new")
    for name in old.names():
        assert torch.equal(old.matrix(name, old.tensors(name)).decode(), new.matrix(name, new.tensors(name)).decode())
    assert {new.number_format(name).bits for name in new.names()} == {4, 8}
    assert [*new.config["meta"]] == ["quantizer"]
    for name in old.rest():
        assert torch.equal(old.reader.read([name])[name], new.reader.read([name])[name])


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})


FIRST = "model.layers.0.self_attn.q_proj"
REFUSED = {
    "width": ("compressed-tensors", dict(bits=5, group_size=32), "gptq", "gptq does not store int5-g32"),
    "zeros": (
        "gptq_v2",
        dict(bits=4, group_size=32, symmetric=False),
        "compressed-tensors",
        "transformers 5.24.0 does not load int4-g32-asym",
    ),
    "group": (
        "gptq_v2",
        dict(bits=4, group_size=32, symmetric=False),
        "gguf",
        "gguf does not store int4-g32-asym",
    ),
    "outputs": ("gptq_v2", dict(bits=3, group_size=32, symmetric=False), "awq", "awq does not store int3-g32-asym"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_that_would_change_is_named_before_anything_is_written(case, made, tmp_path):
    format, options, target, why = REFUSED[case]
    out = made(format, **options)
    with pytest.raises(RecipeError, match=rf"out cannot be exported to {target} without a change\. {FIRST}: {why}"):
        nearplane.export(out, tmp_path / "new", format=target)
    assert not [*tmp_path.glob("new*")]


def test_steps_that_float16_does_not_hold_are_refused(made, tmp_path):
    """bfloat16 steps are exact in float16 from 2^-17 on: eight bits of them above its smallest number, 2^-24."""
    out = made("compressed-tensors", bits=4, group_size=32)
    exact = torch.tensor(255 / 128 * 2.0**-17, dtype=torch.bfloat16)

    def with_step(step):
        rewritten(
            out, lambda tensors: [t[:1].fill_(step) for name, t in tensors.items() if f"{FIRST}.weight_scale" in name]
        )

    with_step(exact)
    nearplane.export(out, tmp_path / "new", format="gptq")
    with_step(exact / 2)
    with pytest.raises(
        RecipeError, match=rf"{FIRST}: a scale is not exact in torch\.float16, the dtype in the file\. Use"
    ):
        nearplane.export(out, tmp_path / "other", format="gptq")


def test_groups_in_the_order_of_activations_are_refused(made, tmp_path):
    out = made("gptq", bits=4, group_size=32)
    rewritten(out, lambda tensors: [t.copy_(t.flip(0)) for name, t in tensors.items() if name.endswith("g_idx")])
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"q_proj: its groups are not runs of neighbouring inputs \(act-order\)"):
        nearplane.export(out, tmp_path / "new", format="compressed-tensors")


def test_formats_and_options_are_checked_first(made, tmp_path):
    out = made("gptq", bits=4, group_size=32)
    known = "safetensors, compressed-tensors, gptq, gptq_v2, awq, mlx, gguf"
    for options, error, message in (
        ({"format": "exl3"}, RecipeError, f"--format is 'exl3', which export does not write; expected {known}"),
        ({"format": "nearplane"}, RecipeError, "--format is 'nearplane', which export does not write"),
        ({"format": "gptq"}, RecipeError, "out has the format gptq already"),
        ({"format": "gptq_v2", "dtype": "float32"}, RecipeError, "--dtype float32 is for decoded weights"),
    ):
        with pytest.raises(error, match=message):
            nearplane.export(out, tmp_path / "new", **options)


def test_a_record_of_another_version_does_not_go_along(source, tmp_path, caplog):
    write_folder(tmp_path / "out", source(torch.float16), "gptq", bits=4, group_size=32)  # its record has version 1
    nearplane.export(tmp_path / "out", tmp_path / "new", format="gptq_v2")
    assert "The new folder has no run record" in caplog.text
    assert not (tmp_path / "new" / "nearplane.json").exists()


def test_files_that_read_back_differently_are_not_kept(made, tmp_path, monkeypatch):
    out, write = made("gptq_v2", bits=4, group_size=32), Folder.write

    def wrong(self, tensors):
        return write(
            self, {name: t ^ 1 if name.endswith("0.mlp.up_proj.weight_packed") else t for name, t in tensors.items()}
        )

    monkeypatch.setattr(Folder, "write", wrong)
    with pytest.raises(FormatError, match=r"model\.layers\.0\.mlp\.up_proj reads back differently"):
        nearplane.export(out, tmp_path / "new", format="compressed-tensors")
    assert not (tmp_path / "new").exists()
