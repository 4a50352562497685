"""A GGUF by --like: header and unquantized tensors of a file by llama.cpp's converter, and nearplane's codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

import nearplane
from converted import converted, write_gguf
from families import LLAMA, MOE, TEXT_VOCABULARY, add_tokenizer, random_model
from killing import contents, stopped_behind
from nearplane import ModelError, RecipeError, verify
from nearplane.demo import CALIBRATION
from nearplane.formats.gguf.gguf_header import FILE, TENSORS, read_header
from nearplane.loading.dense_network import dense_network
from nearplane.record.record_file import read_record
from nearplane.record.summary import summary

SMALL = LLAMA | dict(hidden_size=64, head_dim=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
SMALL |= dict(vocab_size=TEXT_VOCABULARY, bos_token_id=0, eos_token_id=1, pad_token_id=2)
LATENT = SMALL | MOE | dict(num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
LATENT |= dict(q_lora_rank=32, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=16, head_dim=16)
LATENT |= dict(topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, moe_intermediate_size=32)
MODELS = {"llama": ("llama", SMALL | dict(attention_bias=True)), "deepseek": ("deepseek_v2", LATENT)}
TOKENS = dict(samples=8, seqlen=40)
Made = tuple[Path, Path, PreTrainedModel]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a function from a key of MODELS to the folder of a model, the file to be like, and the network."""
    folders: dict[str, Made] = {}

    def made_of(name: str) -> Made:
        if name not in folders:
            family, shape = MODELS[name]
            folder = tmp_path_factory.mktemp("models") / name
            network = random_model(CONFIG_MAPPING[family](**shape)).to(torch.bfloat16)
            network.save_pretrained(folder)
            add_tokenizer(folder)
            folders[name] = folder, write_gguf(folder.with_suffix(".gguf"), converted(network)), network
        return folders[name]

    return made_of


def quantize(made: Made, out: Path, **options: Any) -> None:
    options = dict(grid="q4_0", calibration=str(CALIBRATION), like=str(made[1])) | TOKENS | options
    nearplane.quantize(made[0], out, **options)


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    return {each.name: (each.tensor_type.name, each.data.tobytes()) for each in gguf.GGUFReader(path).tensors}


def test_a_known_architecture_has_the_bytes_of_our_own_file_and_the_header_of_the_other(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Rows of q and k, and their biases, are found in llama.cpp's order by their values."""
    quantize(made("llama"), tmp_path / "out")
    quantize(made("llama"), tmp_path / "own", like=None)
    ours, own = tensors_of(tmp_path / "out" / FILE), tensors_of(tmp_path / "own" / FILE)
    assert [*ours] == [*tensors_of(made("llama")[1])]
    assert ours == {name: own[name] for name in ours}
    fields, source = gguf.GGUFReader(tmp_path / "out" / FILE).fields, gguf.GGUFReader(made("llama")[1]).fields
    for name in ("general.architecture", "tokenizer.ggml.tokens"):
        assert fields[name].contents() == source[name].contents()
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    assert verify(tmp_path / "out", against=made("llama")[0]).faults == ()
    expected = dense_network(tmp_path / "own").state_dict()
    found = dense_network(tmp_path / "out").state_dict()
    assert all(torch.equal(values, found[name]) for name, values in expected.items())


@pytest.fixture(scope="module")
def latent(made: Callable[[str], Made], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of DeepSeek's architecture, which nearplane does not write by itself."""
    out = tmp_path_factory.mktemp("out") / "latent"
    quantize(made("deepseek"), out)
    return out


def test_weights_along_another_axis_stay_in_eight_bits_and_are_named(made: Callable[[str], Made], latent: Path) -> None:
    source, ours = tensors_of(made("deepseek")[1]), tensors_of(latent / FILE)
    assert ours.keys() == source.keys()
    types = {name: kind for name, (kind, _) in ours.items() if name.startswith("blk.1.")}
    assert {name.split(".")[2] for name, kind in types.items() if kind == "Q8_0"} == {"attn_k_b", "attn_v_b"}
    assert {types[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {"Q4_0"}
    kept = {name for name, (kind, _) in ours.items() if kind in ("F32", "BF16")}
    assert all(ours[name] == source[name] for name in kept)
    assert {name.split(".")[-2] for name in kept} == {
        "attn_norm", "ffn_norm", "output_norm", "attn_q_a_norm", "attn_kv_a_norm", "ffn_gate_inp"
    }  # fmt: skip
    record = read_record(latent)
    why = f"{made('deepseek')[1].name} has it along another axis"
    assert {(f"model.layers.{block}.self_attn.kv_b_proj", why) for block in (0, 1)} <= set(record.skipped)
    lines = summary(record, latent)
    assert any("self_attn.kv_b_proj, 2 of them" in line and why in line for line in lines)
    assert not any("from_pretrained" in line for line in lines)  # transformers does not know the architecture in a GGUF


def test_it_is_read_as_llama_cpp_reads_it(made: Callable[[str], Made], latent: Path) -> None:
    """Every value that the gguf package decodes is at its place in our network; the others are the original's."""
    assert verify(latent, against=made("deepseek")[0], calibration=str(CALIBRATION)).faults == ()
    network = dense_network(latent)
    expected = converted(network, torch.float32)
    for tensor in gguf.GGUFReader(latent / FILE).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(values.reshape(expected[tensor.name].shape), expected[tensor.name]), tensor.name
    original = made("deepseek")[2].state_dict()
    for name, values in network.state_dict().items():
        difference = float((values - original[name].float()).norm() / original[name].float().norm())
        assert difference < (0.01 if "kv_b" in name else 0.2), name
        assert (difference == 0) == ("norm" in name or name.endswith("mlp.gate.weight")), name


@pytest.mark.nightly
def test_a_stopped_run_goes_on_to_the_same_bytes(
    made: Callable[[str], Made], latent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
    folder, like, _ = made("deepseek")
    options = dict(grid="q4_0", calibration=str(CALIBRATION), like=str(like)) | TOKENS
    stopped_behind(1, folder, tmp_path / "out", monkeypatch, **options)
    nearplane.quantize(folder, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(latent)


def test_a_file_of_another_model_is_refused_before_work_starts(made: Callable[[str], Made], tmp_path: Path) -> None:
    folder, _, network = made("llama")
    tensors = converted(network)
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"].clone()
    tensors["blk.1.ffn_up.weight"][5, 7] += 1
    other = write_gguf(tmp_path / "other.gguf", tensors)
    with pytest.raises(RecipeError, match=r"other\.gguf: the values of blk\.1\.ffn_up\.weight are in no tensors of"):
        quantize(
            (folder, other, network), tmp_path / "out", calibration="does not matter.txt", solver="round-to-nearest"
        )
    assert [each.name for each in tmp_path.iterdir()] == ["other.gguf"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": None, "bits": 4}, "--like is for a GGUF, but the format is compressed-tensors"),
        ({"pre": "gpt-2"}, "--pre is 'gpt-2', but --like takes the tokenizer"),
        ({"tune": "network"}, "--tune does not go with --like"),
        ({"like": "absent.gguf"}, "--like absent.gguf is not a file"),
        ({"embeddings": "f16"}, r"--embeddings f16, but token_embd\.weight is BF16 in llama\.gguf"),
        (
            {"layers": {"experts.0": {"grid": "q8_0"}}, "name": "deepseek"},
            "would have the types q4_0 and q8_0. Use one type",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(
    options: dict[str, Any], message: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    name = options.pop("name", "llama")
    with pytest.raises(RecipeError, match=message):
        quantize(made(name), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_quantized_file_is_refused(made: Callable[[str], Made], latent: Path, tmp_path: Path) -> None:
    folder, _, network = made("deepseek")
    with pytest.raises(RecipeError, match=r"token_embd\.weight is quantized; expected F32, F16 or BF16"):
        quantize((folder, latent / FILE, network), tmp_path / "out")


def test_a_description_that_was_changed_is_refused(latent: Path, tmp_path: Path) -> None:
    """Also where the hash of the metadata is not looked at, as in a file that is still written."""
    place = read_header(latent / FILE).places[TENSORS]
    data = bytearray((latent / FILE).read_bytes())
    at = data.index(b'"turned":false', place.start)
    data[at : at + 14] = b'"turned":true '
    out = tmp_path / "out"
    out.mkdir()
    for path in latent.iterdir():
        (out / path.name).write_bytes(bytes(data) if path.name == FILE else path.read_bytes())
    with pytest.raises(ModelError, match="they were changed after nearplane wrote them"):
        dense_network(out)
