"""A GGUF without its folder, of nearplane or of another program, is the network that its metadata describe, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import nearplane
from families import FAMILIES, LLAMA, MOE, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import ModelError
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.formats.find_record import find_record
from nearplane.formats.gguf import network_config
from nearplane.formats.gguf.gguf_header import FILE, METADATA, metadata_digest, read_header
from nearplane.formats.gguf.names import rule_of
from nearplane.loading.source_folder import source_folder
from nearplane.system.paths import RECORD
from nightly import daily

PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
LONG = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.1, 2.2, 2.3],
    "original_max_position_embeddings": 32,
}
EXPERTS = LLAMA | MOE | {"moe_intermediate_size": 32, "tie_word_embeddings": False}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "rms_norm_eps": 1e-5} | PLAIN),
    "llama 3": ("llama", {"attention_bias": False, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", LLAMA),
    "qwen3 linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 8}),
    "phi3": ("phi3", LLAMA | dict(head_dim=8, num_key_value_heads=4)),
    "phi3 long": (
        "phi3",
        LLAMA | dict(head_dim=8, num_key_value_heads=4, max_position_embeddings=64, original_max_position_embeddings=32)
        | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG}},
    ),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2_moe": ("qwen2_moe", EXPERTS | dict(shared_expert_intermediate_size=64)),
    "qwen3_moe": ("qwen3_moe", EXPERTS | dict(norm_topk_prob=True)),
    "olmoe": ("olmoe", EXPERTS | dict(num_key_value_heads=4)),
}  # fmt: skip
DAILY = ("llama", "llama 3", "gemma3", "phi3 long", "gpt2", "mixtral", "qwen3 yarn")
SETTINGS: dict[str, Any] = {"format": "gguf", "bits": 4, "group_size": 32, "samples": 8, "seqlen": 32}


@pytest.fixture(scope="module")
def out_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a shape to the folder of its GGUF; do not change it."""
    folders: dict[str, Path] = {}

    def folder_of(shape: str) -> Path:
        if shape not in folders:
            family, changes = SHAPES[shape]
            model, folders[shape] = tmp_path_factory.mktemp("models") / "model", tmp_path_factory.mktemp("out") / "out"
            known = {"n_layer" if family == "gpt2" else "num_hidden_layers": 7 if shape == "gemma3" else 2}
            config = config_of(family, **(FAMILIES.get(family, {}) | known | changes | {"vocab_size": TEXT_VOCABULARY}))
            random_model(config).float().save_pretrained(model)
            add_tokenizer(model)
            # transformers splits the text of this class so, whatever tokenizer.json says
            pre = "qwen2" if shape == "qwen2" else None
            nearplane.quantize(
                model, folders[shape], calibration=str(CALIBRATION), solver="round-to-nearest", pre=pre, **SETTINGS
            )
        return folders[shape]

    return folder_of


def without_own_keys(path: Path, new: Path) -> Path:
    """Write a GGUF as another program has it: without nearplane's keys."""
    read, header = gguf.GGUFReader(path), read_header(path)
    writer = gguf.GGUFWriter(new, str(header.fields["general.architecture"]))
    for key, field in read.fields.items():
        if not key.startswith(("GGUF.", "nearplane.")) and key != "general.architecture":
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    content = path.read_bytes()
    for info in header.tensors:
        writer.add_tensor_info(
            info.name, info.shape, torch.empty(0).numpy().dtype, info.size, gguf.GGMLQuantizationType(info.type)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with new.open("ab") as file:
        for info in header.tensors:
            file.write(bytes(-file.tell() % 32) + content[info.begin : info.begin + info.size])
        file.write(bytes(-file.tell() % 32))
    return new


@pytest.mark.parametrize("foreign", [False, True], ids=["own", "foreign"])
@pytest.mark.parametrize("shape", daily(SHAPES, DAILY))
def test_a_file_alone_is_the_network_of_its_folder(
    shape: str, foreign: bool, out_of: Callable[[str], Path], tmp_path: Path
) -> None:
    out, alone = out_of(shape), tmp_path / "any name.gguf"
    without_own_keys(out / FILE, alone) if foreign else shutil.copy(out / FILE, alone)
    ids = torch.randint(0, TEXT_VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = (nearplane.load(source, dtype="float32")(ids).logits for source in (out, alone))
    assert torch.equal(actual, expected)


def test_a_file_alone_is_evaluated_as_its_folder(out_of: Callable[[str], Path], tmp_path: Path) -> None:
    out, alone = out_of("llama"), tmp_path / "any name.gguf"
    without_own_keys(out / FILE, alone)
    scores = [nearplane.evaluate(source, HELD_OUT, seqlen=32, samples=2).perplexity for source in (out, alone)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("foreign", [False, True], ids=["own", "foreign"])
def test_a_truncated_file_is_named_as_the_user_did(
    foreign: bool, out_of: Callable[[str], Path], tmp_path: Path
) -> None:
    alone = tmp_path / "alone.gguf"
    without_own_keys(out_of("llama") / FILE, alone) if foreign else shutil.copy(out_of("llama") / FILE, alone)
    alone.write_bytes(alone.read_bytes()[:-64])
    calls = [nearplane.load, lambda path: nearplane.generate(path, "Once", tokens=1)]
    for call in calls if foreign else [*calls, find_record]:
        with pytest.raises(ModelError, match=r"/alone\.gguf has [\d,]+ bytes, expected"):
            call(alone)


def test_a_foreign_file_may_leave_out_the_key_heads(out_of: Callable[[str], Path], tmp_path: Path) -> None:
    header = read_header(out_of("llama") / FILE)
    fields = {key: value for key, value in header.fields.items() if not key.endswith("head_count_kv")}
    assert rule_of("blk.0.attn_k.weight", fields, dims=2).heads == fields["llama.attention.head_count"]


def test_a_file_alone_generates(out_of: Callable[[str], Path], tmp_path: Path) -> None:
    out, alone = out_of("llama"), tmp_path / "alone.gguf"
    shutil.copy(out / FILE, alone)
    assert nearplane.generate(alone, "Once upon", tokens=8) == nearplane.generate(out, "Once upon", tokens=8)


def refitted(path: Path) -> None:
    """Write the hash of the metadata again, as someone who knows the format would."""
    header, content = read_header(path), bytearray(path.read_bytes())
    begin = header.places[METADATA].start + 8
    content[begin : begin + 64] = metadata_digest(path, header).encode()
    path.write_bytes(content)


CHANGES: dict[str, tuple[str, bytes, bytes, str]] = {
    "architecture": ("general.architecture", b"llama", b"qwen2", "architecture|qwen2"),
    "unknown architecture": ("general.architecture", b"llama", b"opt25", "its architecture is 'opt25', expected one of llama, "),
    "blocks": ("llama.block_count", b"\x02", b"\x01", "block_count is 1, but it has tensors of 2 blocks"),
    "rope base": ("llama.rope.freq_base", b"\x43", b"\x44", "rope_theta is .* in its metadata, but 50000.0 in config.json"),
    "eps": ("llama.attention.layer_norm_rms_epsilon", b"\x37", b"\x38", "rms_norm_eps is .* but 1e-05 in config.json"),
    "heads": ("llama.attention.head_count", b"\x04", b"\x02", "num_attention_heads is 2|does not fit|head_dim"),
}  # fmt: skip


def changed(path: Path, change: str) -> str:
    """Change one entry of the metadata in place; return the refusal that is expected."""
    key, old, new, message = CHANGES[change]
    place, content = read_header(path).places[key], bytearray(path.read_bytes())
    assert old in content[place.start : place.stop]
    content[place.start : place.stop] = content[place.start : place.stop].replace(old, new, 1)
    path.write_bytes(content)
    return message


@pytest.mark.parametrize("change", CHANGES)
def test_changed_metadata_are_refused(change: str, out_of: Callable[[str], Path], tmp_path: Path) -> None:
    """With another architecture the perplexity was 43.8 instead of 2.33; blocks and rotary base were not looked at."""
    folder, alone = tmp_path / "out", tmp_path / "alone.gguf"
    shutil.copytree(out_of("llama"), folder)
    message = changed(folder / FILE, change)
    shutil.copy(folder / FILE, alone)
    with pytest.raises(nearplane.NearplaneError, match=r"but nearplane\.json lists|its metadata have the SHA-256"):
        nearplane.evaluate(folder, HELD_OUT, seqlen=32, samples=1)
    with pytest.raises(ModelError, match=r"its metadata have the SHA-256 .* changed after nearplane wrote them"):
        nearplane.evaluate(alone, HELD_OUT, seqlen=32, samples=1)
    with pytest.raises(ModelError, match="its metadata have the SHA-256"):
        nearplane.generate(alone, "Once", tokens=1)
    (folder / RECORD).unlink()
    refitted(folder / FILE)
    with pytest.raises(ModelError, match=message):
        nearplane.load(folder)


def test_names_that_changed_places_are_refused(out_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The hashes of the tensors still fit: two matrices of one shape were loaded in each other's place."""
    content, one, other = (out_of("llama") / FILE).read_bytes(), b"self_attn.q_proj.weight", b"self_attn.o_proj.weight"
    for old, new in ((one, b"a" * len(one)), (other, one), (b"a" * len(one), other)):
        content = content.replace(b"model.layers.0." + old, b"model.layers.0." + new)
    (tmp_path / "alone.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="its metadata have the SHA-256"):
        nearplane.load(tmp_path / "alone.gguf")


def test_an_unknown_entry_is_refused(out_of: Callable[[str], Path], tmp_path: Path) -> None:
    header = read_header(out_of("llama") / FILE)
    more = replace(header, fields=header.fields | {"llama.attention.scale": 0.5})
    with pytest.raises(ModelError, match=r"entry llama\.attention\.scale, which nearplane does not know"):
        network_config.config_of(tmp_path, more)


def test_the_config_says_what_the_metadata_say(out_of: Callable[[str], Path]) -> None:
    config = json.loads((source_folder(out_of("llama") / FILE) / "config.json").read_text())
    beside = json.loads((out_of("llama") / "config.json").read_text())
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "attention_bias", "vocab_size", "head_dim"):
        assert config[name] == beside[name]
    assert config["quantization_config"] == beside["quantization_config"]


def test_inspect_lists_the_tensors_of_another_program(
    out_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = without_own_keys(out_of("llama") / FILE, tmp_path / "foreign.gguf")
    app(["inspect", str(alone), "--json"], exit_on_error=False, result_action="return_value")
    rows = {row["tensor"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["blk.0.attn_q.weight"] == {
        "tensor": "blk.0.attn_q.weight",
        "type": "q4_0",
        "shape": "32 x 32",
        "bytes": "576",
    }
    assert rows["output_norm.weight"]["type"] == "f32"
