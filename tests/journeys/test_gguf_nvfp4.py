"""NVFP4 in a GGUF: what is in the file, what reads it, the way to compressed-tensors and back, and what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import nearplane
from families import LLAMA, MOE, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import RecipeError, verify
from nearplane.demo import CALIBRATION
from nearplane.formats.gguf.gguf_header import DIVISORS, FILE, FOUR_BITS, MARKED, SUMS, read_header
from nearplane.formats.gguf.lone_file import folder_of_file
from nearplane.formats.stored import Stored
from nearplane.loading.dense_network import dense_network
from nearplane.record.record_file import read_record

SHAPE = LLAMA | dict(hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=2)
EXPERTS = SHAPE | MOE | dict(moe_intermediate_size=64, tie_word_embeddings=False)
ASKED: dict[str, Any] = dict(grid="nvfp4", calibration=str(CALIBRATION), samples=16, seqlen=32)
QUICK = ASKED | dict(solver="round-to-nearest")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def folder_of(family: str = "llama", shape: dict[str, Any] = SHAPE, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("models") / "model"
        config = config_of(family, **(shape | dict(vocab_size=TEXT_VOCABULARY) | changes))
        random_model(config).float().save_pretrained(folder)
        add_tokenizer(folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def made(model_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama, and its checkpoint."""
    model, out = model_of(), tmp_path_factory.mktemp("out") / "out"
    nearplane.quantize(model, out, format="gguf", **ASKED)
    return model, out


def values(folder: Path) -> dict[str, torch.Tensor]:
    stored = Stored(folder)
    return {name: stored.matrix(name, stored.tensors(name)).decode() for name in stored.names()}


def same(one: Path, other: Path) -> bool:
    first, second = values(one), values(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_file_holds_blocks_scales_and_marks_and_its_losses_are_measured_again(made: tuple[Path, Path]) -> None:
    model, out = made
    file = gguf.GGUFReader(out / FILE)
    types = {tensor.name: tensor.tensor_type.name for tensor in file.tensors}
    blocks = [name for name, kind in types.items() if kind == "NVFP4"]
    assert len(blocks) == 2 * 7
    assert {types[name.replace(".weight", ".scale")] for name in blocks} == {"F32"}
    assert types["token_embd.weight"] == types["output.weight"] == "F32"  # as in the model
    assert file.fields[MARKED].contents() == blocks
    assert file.fields[FOUR_BITS].contents() == [False] * len(blocks)
    assert file.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_NVFP4
    assert {layer.format for layer in read_record(out).layers} == {"nvfp4"}
    found = verify(out, against=model)
    assert (found.faults, found.measured) == ((), True)


def test_values_are_those_of_the_gguf_package_times_the_scale(made: tuple[Path, Path]) -> None:
    _, out = made
    file, network = gguf.GGUFReader(out / FILE), dense_network(out).state_dict()
    tensors = {tensor.name: tensor for tensor in file.tensors}
    theirs = gguf.dequantize(tensors["blk.1.ffn_up.weight"].data, gguf.GGMLQuantizationType.NVFP4)
    theirs = theirs * np.float32(tensors["blk.1.ffn_up.scale"].data[0])
    ours = network["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(torch.from_numpy(theirs), ours, rtol=2.0**-22, atol=0)


def test_it_moves_to_compressed_tensors_and_back_with_equal_weights(made: tuple[Path, Path], tmp_path: Path) -> None:
    model, out = made
    nearplane.export(out, tmp_path / "folder", format="compressed-tensors")
    nearplane.export(tmp_path / "folder", tmp_path / "again", format="gguf")
    assert same(out, tmp_path / "folder")
    files = (gguf.GGUFReader(folder / FILE).tensors for folder in (out, tmp_path / "again"))
    first, again = ({tensor.name: tensor.data for tensor in tensors} for tensors in files)
    assert first.keys() == again.keys()
    assert all(np.array_equal(again[name], data) for name, data in first.items())
    assert verify(tmp_path / "again", against=model).faults == ()


def test_the_file_alone_reads_the_same_with_and_without_our_keys(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Without the list of global scales, as in files of other programs, the reciprocal's rounding remains."""
    _, out = made
    alone = shutil.copy(out / FILE, tmp_path / "alone.gguf")
    assert same(out, folder_of_file(Path(alone)))
    theirs = tmp_path / "theirs.gguf"
    theirs.write_bytes(Path(alone).read_bytes().replace(b"nearplane.", b"otherone1."))
    first, second = values(out), values(folder_of_file(theirs))
    assert first.keys() == second.keys()
    for name, each in first.items():
        torch.testing.assert_close(second[name], each, rtol=2.0**-22, atol=0)


def test_a_global_scale_that_contradicts_its_tensor_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = made
    folder = shutil.copytree(out, tmp_path / "out")
    place = read_header(folder / FILE).places[DIVISORS]
    with (folder / FILE).open("r+b") as file:
        file.seek(place.start + 12)
        file.write(struct.pack("<f", 100.0))
    with pytest.raises(nearplane.NearplaneError, match="metadata"):
        Stored(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = Stored(folder, unfinished=config)  # without the hash of the metadata
    with pytest.raises(nearplane.FormatError, match=f"is 100 in {DIVISORS}, but .* by its tensor"):
        stored.tensors(stored.names()[0])


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.nightly)])
def test_experts_of_a_block_are_a_stack_with_a_scale_each(
    family: str, model_of: Callable[..., Path], tmp_path: Path
) -> None:
    intermediate = 64 if family == "qwen3_moe" else 128
    options = {"norm_topk_prob": True} if family == "qwen3_moe" else {}
    model = model_of(family, EXPERTS, **options)
    nearplane.quantize(model, tmp_path / "out", format="gguf", **QUICK)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / FILE).tensors}
    assert tensors["blk.0.ffn_up_exps.weight"].data.shape == (4, intermediate, 36)
    assert tensors["blk.0.ffn_up_exps.scale"].data.shape == (4,)
    header = read_header(tmp_path / "out" / FILE)
    sums = dict(zip((info.name for info in header.tensors), header.texts(tmp_path, SUMS), strict=True))
    assert len(sums["blk.0.ffn_up_exps.scale"]) == 4 * 64
    assert verify(tmp_path / "out", against=model).faults == ()
    nearplane.export(tmp_path / "out", tmp_path / "folder", format="compressed-tensors", runtime="vllm")
    nearplane.export(tmp_path / "folder", tmp_path / "again", format="gguf")
    assert same(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (
            dict(mlp_bias=True),
            {},
            r"mlp.down_proj.weight: llama.cpp does not run MLPs with both a global scale and a bias",
        ),
        (dict(intermediate_size=96), {}, "mlp.down_proj has 96 inputs, not a multiple of 64, the block size of nvfp4"),
        ({}, dict(activations="fp4"), "activations"),
    ],
    ids=["bias", "width", "inputs"],
)
def test_what_llama_cpp_would_not_compute_is_refused_before_work_starts(
    changes: dict[str, Any], options: dict[str, Any], words: str, model_of: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=words):
        nearplane.quantize(model_of(**changes), tmp_path / "out", format="gguf", **ASKED, **options)


def test_a_layer_that_64_does_not_divide_may_have_integers(model_of: Callable[..., Path], tmp_path: Path) -> None:
    model, layers = model_of(intermediate_size=96), {"down_proj": {"grid": "int4-g32"}}
    nearplane.quantize(model, tmp_path / "out", format="gguf", layers=layers, **QUICK)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out" / FILE).tensors}
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("Q4_0", "NVFP4")


def test_mlps_of_architectures_that_forget_the_scale_are_refused_but_attention_is_written(
    model_of: Callable[..., Path], tmp_path: Path
) -> None:
    model = model_of("gemma3_text", sliding_window=6, query_pre_attn_scalar=16)
    with pytest.raises(RecipeError, match="computes the MLPs of the architecture gemma3 without their global scales"):
        nearplane.quantize(model, tmp_path / "out", format="gguf", **QUICK)
    nearplane.quantize(model, tmp_path / "out", format="gguf", ignore=("mlp",), **QUICK)
    assert verify(tmp_path / "out", against=model).faults == ()
