"""A GGUF as other programs read it: the gguf package, and transformers, which turn names and rows back by rules of their own."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import nearplane
from families import FAMILIES, LLAMA, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import FormatError, ModelError, RecipeError
from nearplane.cli.app import app, main
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.formats.find_record import embedded_record
from nearplane.formats.gguf.gguf_header import FILE, METADATA, read_header
from nearplane.formats.gguf.gguf_reader import GGUFReader
from nearplane.formats.gguf.tokenizer import vocabulary
from nearplane.formats.stored import read_dense
from nearplane.loading.dense_network import dense_network
from nearplane.record.record_file import parsed_record, read_record
from nightly import daily
from tokenizers_of_kinds import save_sentencepiece

PHI3 = LLAMA | dict(head_dim=8, num_key_value_heads=4)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "mistral": {},
    "qwen2": LLAMA,
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "phi3": PHI3,
    "gpt2": {},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "beta_fast": 16.0,
    "original_max_position_embeddings": 32,
}
SOLVED = ("llama", "qwen3", "gpt2")  # the others are rounded to nearest: their shapes in the file are what counts
SHAPED = ("qwen3", "gpt2")  # transformers 5.23 does not read all of their shape: size of heads, positions
WORDS: dict[str, Any] = {"format": "gguf", "bits": 4, "group_size": 32, "samples": 4, "seqlen": 32}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:4000])
    return str(path)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from a family to the folder of a tiny random model with the demo model's tokenizer."""

    def folder_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        folder = (
            tmp_path_factory.mktemp("models") / "model"
        )  # transformers looks for names of makers in that of the folder
        one_block = {"n_layer" if name == "gpt2" else "num_hidden_layers": 1}
        known = FAMILIES.get(name, {}) | SHAPES.get(name, {}) | one_block | changes
        random_model(config_of(name, **(known | {"vocab_size": TEXT_VOCABULARY}))).to(dtype).save_pretrained(folder)
        add_tokenizer(folder)
        if name == "qwen2":  # transformers splits text as Qwen does, whatever tokenizer.json says
            path, made = folder / "tokenizer.json", AutoTokenizer.from_pretrained(folder).backend_tokenizer
            splits = {part: json.loads(made.to_str())[part] for part in ("normalizer", "pre_tokenizer")}
            path.write_text(json.dumps(json.loads(path.read_text()) | splits))
        return folder

    return folder_of


@pytest.fixture(scope="module")
def out_of(
    tmp_path_factory: pytest.TempPathFactory, model_of: Callable[..., Path], text: str
) -> Callable[[str], tuple[Path, Path]]:
    """Return a function from a family to (folder of a GGUF, original); do not change them."""
    made: dict[str, tuple[Path, Path]] = {}

    def folders_of(name: str) -> tuple[Path, Path]:
        if name not in made:
            source, out = model_of(name), tmp_path_factory.mktemp("out") / name
            solver = {} if name in SOLVED else {"solver": "round-to-nearest"}
            nearplane.quantize(source, out, calibration=text, **WORDS, **solver)
            made[name] = out, source
        return made[name]

    return folders_of


@pytest.mark.parametrize("name", daily(SHAPES, [name for name in SHAPES if name not in ("mistral", "gemma2")]))
def test_transformers_reads_what_we_read(name: str, out_of: Callable[[str], tuple[Path, Path]]) -> None:
    """It has rules of its own for names, halves of heads in turns, norms less one and transposed matrices."""
    out, source = out_of(name)
    ours = dense_network(out).state_dict()
    shape = {"config": AutoConfig.from_pretrained(source)} if name in SHAPED else {}
    theirs = AutoModelForCausalLM.from_pretrained(out, gguf_file=FILE, dtype=torch.float32, **shape).state_dict()
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        assert torch.equal(values, theirs[key]), key


@pytest.mark.parametrize("name", daily(SHAPES, [name for name in SHAPES if name not in ("mistral", "gemma2")]))
def test_a_gguf_holds_what_its_record_says(name: str, out_of: Callable[[str], tuple[Path, Path]], text: str) -> None:
    out, source = out_of(name)
    found = nearplane.verify(out, against=source, calibration=text)
    assert found.measured
    assert not found.faults


@pytest.mark.parametrize("name", daily(SHAPES, [name for name in SHAPES if name not in ("mistral", "gemma2")]))
def test_room_for_the_record_is_foretold(name: str, out_of: Callable[[str], tuple[Path, Path]]) -> None:
    """Whatever its figures become, it fits; and not much of a small file is empty."""
    out, _ = out_of(name)
    kept = read_header(out / FILE).fields["nearplane.record"]
    assert kept.rstrip() == read_record(out).embedded().to_json()
    assert len(kept) < 2 * len(kept.rstrip())


@pytest.mark.parametrize("name", daily(["llama", "gemma3_text", "gpt2"], ["gemma3_text", "gpt2"]))
def test_embeddings_and_head_are_blocks_too(
    name: str, model_of: Callable[..., Path], text: str, tmp_path: Path
) -> None:
    """Of a mix, in types that rows of 32 have; Gemma's embeddings are scaled when they are looked up, GPT-2's are the head."""
    source, out = model_of(name, attention_bias=False), tmp_path / "out"
    nearplane.quantize(source, out, grid="q4_k_m", calibration=text, samples=8, seqlen=32)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out / FILE).tensors}
    ends = {"token_embd.weight": "Q5_0" if name == "llama" else "Q8_0"} | (
        {"output.weight": "Q8_0"} if name == "llama" else {}
    )
    assert {key: types[key] for key in ends} == ends
    shape = {"config": AutoConfig.from_pretrained(source)}
    theirs = AutoModelForCausalLM.from_pretrained(out, gguf_file=FILE, dtype=torch.float32, **shape).state_dict()
    for key, values in dense_network(out).state_dict().items():
        assert torch.equal(values, theirs[key]), key
    found = nearplane.verify(out, against=source, calibration=text)
    assert found.measured
    assert not found.faults


def test_every_command_reads_the_folder(
    out_of: Callable[[str], tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, source = out_of("qwen3")
    for words in (
        ["inspect", out],
        ["report", out, tmp_path / "page.html"],
        ["export", out, tmp_path / "dense", "--dtype", "float32"],
        ["evaluate", out, "--text", HELD_OUT, "--seqlen", "32", "--samples", "2", "--against", source],
    ):
        with pytest.raises(SystemExit) as ended:
            app([str(word) for word in words])
        assert ended.value.code in (0, None), capsys.readouterr()
    ours = dense_network(out).state_dict()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").state_dict()
    loaded = nearplane.load(out, dtype="float32").state_dict()
    for key, values in ours.items():
        assert torch.equal(values, exported[key])
        assert torch.equal(values, loaded[key])


def test_a_file_in_place_of_a_folder_is_one_sentence(out_of: Callable[[str], tuple[Path, Path]]) -> None:
    out, _ = out_of("qwen3")
    with pytest.raises(FormatError, match="is a file, but this command compares several files: expected the folder"):
        nearplane.verify(out / FILE)
    with pytest.raises(ModelError, match=r"is a file\. Pass the folder"):
        nearplane.quantize(out / FILE, out.parent / "again", calibration=HELD_OUT)


def test_the_gguf_package_reads_types_shapes_and_values(out_of: Callable[[str], tuple[Path, Path]]) -> None:
    out, source = out_of("qwen3")  # whose rows are not put in turns
    reader = gguf.GGUFReader(out / FILE)
    values = dict(read_dense(out))
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == len(load_file(source / "model.safetensors"))
    for name, new in (
        ("model.layers.0.self_attn.q_proj", "blk.0.attn_q"),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down"),
    ):
        tensor = found[f"{new}.weight"]
        assert tensor.tensor_type.name == "Q4_0"
        decoded = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(decoded, values[f"{name}.weight"])
    assert found["blk.0.attn_q_norm.weight"].tensor_type.name == "F32"
    assert found["token_embd.weight"].tensor_type.name == "F32"  # as it is in the model


def test_bfloat16_stays_as_it_is(model_of: Callable[..., Path], text: str, tmp_path: Path) -> None:
    source, out = model_of("llama", torch.bfloat16, attention_bias=False), tmp_path / "out"
    nearplane.quantize(source, out, calibration=text, ignore=("down_proj",), **WORDS)
    read, original = dict(read_dense(out)), load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        assert torch.equal(read[name].float(), original[name].float())
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out / FILE).tensors}
    assert types["token_embd.weight"] == types["blk.0.ffn_down.weight"] == "BF16"
    assert types["output_norm.weight"] == "F32"


def test_float32_that_is_left_out_is_float16(
    model_of: Callable[..., Path], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As llama.cpp's quantizer leaves it; the summary says so, `verify` holds it, and what 16 bits do not hold is refused."""
    source, out = model_of("llama", attention_bias=False), tmp_path / "out"
    words = ["--calibration", text, "--samples", "4", "--seqlen", "32", "--ignore", "down_proj"]
    grid = ["--format", "gguf", "--bits", "4", "--group-size", "32"]
    app(["quantize", str(source), str(out), *grid, *words], exit_on_error=False, result_action="return_value")
    assert "not quantized (float32 is stored as F16" in " ".join(capsys.readouterr().out.split())
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out / FILE).tensors}
    assert (types["blk.0.ffn_down.weight"], types["token_embd.weight"]) == ("F16", "F32")
    assert nearplane.verify(out, against=source, calibration=text).faults == ()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        FormatError, match=r"down_proj\.weight has values that F16 cannot represent. Remove it from --ignore"
    ):
        nearplane.quantize(source, tmp_path / "large", calibration=text, ignore=("down_proj",), **WORDS)


def test_factors_of_rotary_frequencies_are_those_that_transformers_computes(
    model_of: Callable[..., Path], text: str, tmp_path: Path
) -> None:
    rope = dict(
        rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )  # fmt: skip
    source, out = model_of("llama", attention_bias=False, rope_parameters=rope, head_dim=16), tmp_path / "out"
    nearplane.quantize(source, out, calibration=text, solver="round-to-nearest", **(WORDS | {"samples": 1}))
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(out / FILE).tensors}["rope_freqs.weight"]
    network = dense_network(out)
    plain = 1 / 500.0 ** (torch.arange(0, 16, 2) / 16)
    wanted = plain / network.model.rotary_emb.inv_freq
    assert len(set(wanted.tolist())) > 2  # some are divided by 1, some by 8, some in between
    torch.testing.assert_close(torch.from_numpy(found.data.copy()), wanted, rtol=1e-6, atol=0)


def test_a_damaged_file_is_refused(out_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    out, _ = out_of("qwen2")
    whole = (out / FILE).read_bytes()
    for name in ("config.json", "nearplane.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    info = GGUFReader(out)._infos["model.layers.0.mlp.up_proj.weight_q4_0"]
    damaged = bytearray(whole)
    damaged[info.begin + 5] ^= 1
    for data, error, said in (
        (bytes(damaged), FormatError, "SHA-256"),
        (whole[:-32], ModelError, "truncated|has .* bytes, expected"),
        (whole[:100], ModelError, "not a readable GGUF"),
        (b"PK" + whole[2:], ModelError, "not a GGUF"),
        (whole[:4] + b"\x02" + whole[5:], ModelError, "of version 2; nearplane reads only version 3"),
        (whole[:8] + b"\xff" * 5 + whole[13:], ModelError, "1,099,511,627,775 tensors and .* keys; expected at most"),
    ):
        (tmp_path / FILE).write_bytes(data)
        with pytest.raises(error, match=said):
            dict(read_dense(tmp_path))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Reading it would wait for ever, so the test writes to its other end."""
    os.mkfifo(tmp_path / FILE)
    end = os.open(tmp_path / FILE, os.O_RDWR)
    os.write(end, b"PK\0\0")
    with pytest.raises(ModelError, match="it is not a file"):
        read_header(tmp_path / FILE)
    os.close(end)


def test_metadata_that_do_not_fit_are_refused(out_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    out, _ = out_of("llama")
    whole = (out / FILE).read_bytes()
    for name in ("config.json", "nearplane.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    unhashed = whole.replace(METADATA.encode(), b"nearplane.metadata_sha000", 1)
    for old, new, said in (
        (b"general.architecture", b"general.architectur3", "are incomplete"),
        (b"llama.attention.head_count", b"llama.attention.head_c0unt", "are incomplete"),
        (b"nearplane.tensors", b"nearplane.tens0rs", r"knows no tensor|no valid key|letters of SHA-256"),
    ):
        assert old in whole
        (tmp_path / FILE).write_bytes(unhashed.replace(old, new, 1))
        with pytest.raises(ModelError, match=said):
            GGUFReader(tmp_path)


def test_a_gguf_alone_tells_how_it_was_made(
    out_of: Callable[[str], tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the record but times and the hashes of files, whatever the file is called."""
    out, _ = out_of("llama")
    beside, alone = read_record(out), tmp_path / "alone.gguf"
    alone.write_bytes((out / FILE).read_bytes())
    app(["inspect", str(alone), "--json"], exit_on_error=False, result_action="return_value")
    found = parsed_record(capsys.readouterr().out)
    assert [replace(layer, seconds=0.0) for layer in beside.layers] == list(found.layers)
    assert (found.recipe, found.text) == (beside.recipe, beside.text)
    assert found.folder == alone.stat().st_size
    app(["report", str(alone), str(tmp_path / "page.html")], exit_on_error=False, result_action="return_value")
    assert "model.layers.0.self_attn.q_proj" in (tmp_path / "page.html").read_text()


def test_two_runs_write_the_same_file(out_of: Callable[[str], tuple[Path, Path]], text: str, tmp_path: Path) -> None:
    """The record inside tells no times."""
    out, source = out_of("qwen3")
    nearplane.quantize(source, tmp_path / "again", calibration=text, **WORDS)
    assert (tmp_path / "again" / FILE).read_bytes() == (out / FILE).read_bytes()


def test_a_record_that_was_changed_inside_is_refused(
    out_of: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """By its digest, and where that was made to fit, by the record beside it."""
    out, _ = out_of("llama")
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / FILE
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"device": "cpu"', b'"device": "gpu"', 1))
    with pytest.raises(FormatError, match=r"nearplane\.record is damaged: its digest is"):
        embedded_record(path)
    other = replace(read_record(out), device="gpu").embedded().to_json().encode()
    begin = read_header(out / FILE).places["nearplane.record"].start + 8
    path.write_bytes(whole[:begin] + other + whole[begin + len(other) :])
    assert any("differs from nearplane.json" in fault.what for fault in nearplane.verify(tmp_path / "out").faults)


def test_a_file_without_room_for_the_record_has_none(
    model_of: Callable[..., Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is said, the rest is as always, and the file alone is refused where a record is asked for."""
    monkeypatch.setattr("nearplane.planning.run.max_record_bytes", lambda record: 1000)
    out = tmp_path / "out"
    nearplane.quantize(model_of("qwen3"), out, calibration=text, **WORDS)
    assert "bytes where 1,000 are reserved" in caplog.text
    assert nearplane.verify(out).faults == ()
    with pytest.raises(FormatError, match=r"has no run record in its key"):
        embedded_record(out / FILE)


def test_a_config_that_leaves_out_what_is_the_default_holds(
    model_of: Callable[..., Path], text: str, tmp_path: Path
) -> None:
    """Llama's heads are not tied, and config.json need not say so: the head is compared, and is there."""
    source, out = model_of("llama", attention_bias=False, tie_word_embeddings=False), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (source / "config.json").write_text(json.dumps(config))
    nearplane.quantize(source, out, calibration=text, solver="round-to-nearest", **(WORDS | {"samples": 1}))
    assert nearplane.verify(out, against=source).faults == ()


def test_any_byte_of_the_header_may_be_another(out_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """It reads the same, or is refused in a sentence."""
    out, _ = out_of("llama")
    whole, begin = (out / FILE).read_bytes(), read_header(out / FILE).tensors[0].begin
    (tmp_path / "config.json").write_bytes((out / "config.json").read_bytes())
    draw = random.Random(0)
    ours = (
        whole.index(b"nearplane.quantization_config"),
        whole.index(b"nearplane.record"),
        whole.index(b"nearplane.tensors"),
    )
    tokens = whole.index(b"tokenizer.ggml.tokens")
    places = [*range(tokens), *range(ours[0], ours[1]), *range(ours[2], begin)]  # of what is between, nothing is read
    said = []
    for place in [*draw.sample(range(tokens), 200), *draw.sample(places, 100)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        (tmp_path / FILE).write_bytes(damaged)
        try:
            reader = GGUFReader(tmp_path)
            reader.read(reader.names())
        except (FormatError, ModelError) as error:
            said.append(str(error))
    assert len(said) > 100
    assert all(str(tmp_path / FILE) in each for each in said)


def test_a_file_of_another_tool_is_refused(out_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    out, _ = out_of("qwen2")
    for name in ("config.json", "nearplane.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    writer = gguf.GGUFWriter(tmp_path / FILE, "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = nearplane.verify(tmp_path)
    assert any("have no tensors named" in fault.what for fault in found.faults)


@pytest.mark.parametrize(
    ("command", "alone", "said"),
    [
        (
            "verify",
            True,
            "is a file, but this command compares several files: expected the folder that nearplane quantize wrote",
        ),
        ("verify", False, "has no nearplane.json: expected a folder that nearplane quantize wrote"),
        ("inspect", True, "llama.attention.head_count is missing, or not a single value"),
        ("inspect", False, "has no run record in its key nearplane.record"),
        ("report", True, "has no run record in its key nearplane.record"),
        ("evaluate", True, "llama.attention.head_count is missing, or not a single value"),
    ],
)
def test_a_gguf_of_another_tool_is_one_sentence(
    command: str, alone: bool, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / FILE, "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = ["--text", str(HELD_OUT)] if command == "evaluate" else []
    monkeypatch.setattr(sys, "argv", ["nearplane", command, str(tmp_path / FILE if alone else tmp_path), *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 1
    assert said in told
    *first, last = told.splitlines()
    assert last.startswith("nearplane: ")
    assert len(first) == (command in ("evaluate", "verify") and not said.endswith("quantize wrote"))


@pytest.mark.parametrize(
    ("family", "changes", "words", "said"),
    [
        ("opt", {}, {}, "model_type is 'opt'"),
        ("llama", {"hidden_act": "gelu"}, {}, "hidden_act in config.json is 'gelu'"),
        ("qwen2", {"head_dim": 16}, {}, "head_dim in config.json is 16"),
        ("qwen3", {"attention_bias": True}, {}, "attention_bias in config.json is True"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, {}, "layer_types"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "'dynamic'"),
        ("gemma2", {"query_pre_attn_scalar": 32}, {}, "query_pre_attn_scalar"),
        ("llama", {}, {"group_size": 16}, "int4-g16"),
        ("llama", {}, {"bits": 3}, "int3-g32"),
        ("llama", {"intermediate_size": 80}, {"group_size": "auto"}, "int4-g16"),
        ("qwen2", {"rope_parameters": YARN}, {}, "beta_fast of rope_parameters in config.json is 16"),
        ("llama", {}, {"pre": "No Name"}, "--pre is 'No Name'"),
        ("llama", {"attention_bias": True}, {"symmetric": False}, "int4-g32-asym"),
    ],
)
def test_what_llama_cpp_would_not_load_is_refused_before_work_starts(
    family: str, changes: dict[str, Any], words: dict[str, Any], said: str, model_of: Callable[..., Path], text: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    source = model_of(family, **changes)
    with pytest.raises(RecipeError, match=said):
        nearplane.quantize(source, tmp_path / "out", calibration=text, **(WORDS | words))
    assert not list(tmp_path.iterdir())


def test_an_unknown_tensor_is_refused(model_of: Callable[..., Path], text: str, tmp_path: Path) -> None:
    source = model_of("qwen2")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"model.mtp.weight": torch.zeros(2)}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"model\.mtp\.weight is in the files, but not in the network"):
        nearplane.quantize(source, tmp_path / "out", calibration=text, **WORDS)


def test_a_tokenizer_model_alone_is_read_as_transformers_does(
    model_of: Callable[..., Path], text: str, tmp_path: Path
) -> None:
    """Pieces, scores and what comes first are those of the tokenizer.json that it would save."""
    source, out = model_of("llama", attention_bias=False), tmp_path / "out"
    save_sentencepiece(source, size=TEXT_VOCABULARY)
    nearplane.quantize(source, out, calibration=text, **WORDS)
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "saved")
    wanted, fields = vocabulary(tmp_path / "saved", TEXT_VOCABULARY), gguf.GGUFReader(out / FILE).fields
    assert wanted.model == fields["tokenizer.ggml.model"].contents() == "llama"
    assert list(wanted.tokens) == fields["tokenizer.ggml.tokens"].contents()
    assert list(wanted.scores) == fields["tokenizer.ggml.scores"].contents()
    assert fields["tokenizer.ggml.add_bos_token"].contents()
    assert nearplane.verify(out, against=source, calibration=text).faults == ()


@pytest.mark.parametrize("package", ["sentencepiece", "google.protobuf"])
def test_what_a_tokenizer_model_needs_is_one_sentence(
    package: str, model_of: Callable[..., Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_of("llama", attention_bias=False)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"pieces")
    with pytest.raises(ModelError, match="no tokenizer that transformers can load"):
        nearplane.quantize(source, tmp_path / "out", calibration=text, **WORDS)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"further packages. Run pip install {package.removeprefix('google.')}$"):
        nearplane.quantize(source, tmp_path / "out", calibration=text, **WORDS)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_one_sentence(
    model_of: Callable[..., Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(RecipeError, match=r'Run pip install "gguf>=[0-9.]+"\.'):
        nearplane.quantize(model_of("qwen2"), tmp_path / "out", calibration=text, **WORDS)


def test_the_file_says_what_it_was_made_of(out_of: Callable[[str], tuple[Path, Path]]) -> None:
    out, _ = out_of("llama")
    fields = gguf.GGUFReader(out / FILE).fields
    config = json.loads(fields["nearplane.quantization_config"].contents())
    assert config == json.loads((out / "config.json").read_text())["quantization_config"]
    assert set(config["types"].values()) == {"q4_0"}
    assert parsed_record(fields["nearplane.record"].contents()) == read_record(out).embedded()
    sums = {
        tensor.name: hashlib.sha256(tensor.data.tobytes()).hexdigest() for tensor in gguf.GGUFReader(out / FILE).tensors
    }
    assert fields["nearplane.sha256"].contents() == list(sums.values())
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
