"""The real client: mlx_lm loads our files, and MLX decodes and computes what our values say.

Needs mlx and mlx-lm, which run on Linux too; skipped without them. Written for mlx 0.32.4 and mlx-lm 0.32.2. In float32 MLX
decodes `step * code + minimum` as we do. In 16 bits it rounds the product, and then the sum, so values differ from ours
by up to two roundings to 16 bits: there we compare with what these two roundings make of our numbers. Its modes of floats
decode to equal values in float32 and bfloat16; float16 rounds those below 2^-14.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nearplane
from families import VOCABULARY
from model_types import save_type
from nearplane.demo import CALIBRATION, MODEL
from nearplane.formats.stored import Stored, read_matrices
from nearplane.lattice.superblock import SuperGrid
from nearplane.loading.dense_network import dense_network
from nearplane.number_formats import number_format
from nearplane.recipe.runtimes import MLX_BITS, MLX_FLOATS, MLX_GROUP_SIZES, MLX_MODEL_TYPES

mx = pytest.importorskip("mlx.core", reason="needs mlx")
mlx_lm = pytest.importorskip("mlx_lm.utils", reason="needs mlx-lm")
pytestmark = pytest.mark.nightly
SAME = 1e-5  # relative to the largest logit, in float32: two programs sum in other orders
OTHER_GELU = {"gemma": 1e-3, "gpt_bigcode": 1e-3, "starcoder2": 1e-3}  # mlx_lm computes another approximation of GELU
EXPERTS = ("dots1", "granitemoe", "laguna", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
MORE_FIELDS: dict[str, dict[str, Any]] = {  # of config.json, without which mlx_lm does not load what transformers saves
    "qwen3_moe": {"num_experts": 4, "head_dim": 16}
}
TOKENS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def logits(folder: Path, tokens: Tensor = TOKENS) -> Tensor:
    """Return float32 logits of a folder, loaded by mlx_lm."""
    network, _ = mlx_lm.load_model(folder)
    return numbers(network(mx.array(tokens.numpy())))


def numbers(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array.astype(mx.float32)))


def dense_copy(folder: Path, out: Path) -> Path:
    """Export float32 values, with the rope fields that mlx_lm reads."""
    nearplane.export(folder, out, dtype="float32")
    ours, dense = (json.loads((each / "config.json").read_text()) for each in (folder, out))
    rope = {name: value for name, value in ours.items() if name not in dense and name.startswith(("rope", "partial"))}
    (out / "config.json").write_text(json.dumps(dense | rope))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", MLX_BITS)
def test_mlx_decodes_our_values(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    save_type(tmp_path / "model", "llama", dtype, hidden_size=128, intermediate_size=256, head_dim=32)
    for group in MLX_GROUP_SIZES:
        out = tmp_path / f"g{group}"
        nearplane.quantize(
            tmp_path / "model", out, format="mlx", bits=bits, group_size=group, solver="round-to-nearest"
        )
        stored = Stored(out)
        for name, matrix in read_matrices(out):
            weight, scales, biases = (
                mx.load(str(stored.file(name)))[f"{name}.{part}"] for part in ("weight", "scales", "biases")
            )
            theirs = numbers(mx.dequantize(weight, scales, biases, group_size=group, bits=bits))
            grid = matrix.grid
            assert isinstance(grid, SuperGrid)
            assert grid.offset is not None
            twice = (grid.scale[:, grid.group] * matrix.codes).to(dtype).float() - grid.offset[:, grid.group]
            assert torch.equal(theirs, twice.to(dtype).float())
            if dtype == torch.float32:
                assert torch.equal(theirs, matrix.decode())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MLX_FLOATS)
def test_mlx_decodes_our_floats(mode: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_type(tmp_path / "model", "llama", dtype, hidden_size=128, intermediate_size=256, head_dim=32)
    out, format = tmp_path / "out", number_format(mode)
    nearplane.quantize(tmp_path / "model", out, format="mlx", grid=mode, solver="round-to-nearest")
    stored, how = Stored(out), {"group_size": format.group, "bits": format.bits, "mode": mode}
    for name, matrix in read_matrices(out):
        tensors = mx.load(str(stored.file(name)))
        weight, scales = (tensors[f"{name}.{part}"] for part in ("weight", "scales"))
        theirs = mx.dequantize(weight, scales, **how, dtype=getattr(mx, str(dtype).removeprefix("torch.")))
        assert torch.equal(numbers(theirs), matrix.decode().to(dtype).float())
        assert dtype == torch.float16 or torch.equal(numbers(theirs), matrix.decode())


@pytest.mark.parametrize("kind", ["llama", "gemma2", *EXPERTS])
@pytest.mark.parametrize("mode", MLX_FLOATS)
def test_networks_in_floats_compute_what_our_values_say(mode: str, kind: str, tmp_path: Path) -> None:
    """With embeddings and head, which mlx_lm looks up in bfloat16 and computes with in float32, and some layers in integers."""
    save_type(tmp_path / "model", kind)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MORE_FIELDS.get(kind, {})))
    words: dict[str, Any] = dict(format="mlx", grid=mode, layers={"v_proj": {"grid": "int5-g32-min"}})
    ends = dict(include_embeddings=True, include_head=True)
    record = nearplane.quantize(tmp_path / "model", tmp_path / "out", solver="round-to-nearest", **words, **ends)
    assert {layer.format for layer in record.layers} == {mode, "int5-g32-min"}
    theirs, dense = logits(tmp_path / "out"), logits(dense_copy(tmp_path / "out", tmp_path / "dense"))
    assert float((theirs - dense).abs().max() / dense.abs().max()) < SAME
    ours = dense_network(tmp_path / "out")(TOKENS).logits.detach()
    assert float((theirs - ours).abs().max() / ours.abs().max()) < SAME


@pytest.mark.parametrize("kind", MLX_MODEL_TYPES)
def test_types_of_models_compute_what_our_values_say(kind: str, tmp_path: Path) -> None:
    """In float32: as MLX's dense network with these values, and as transformers'; experts have other bits than the rest."""
    layers = {"num_hidden_layers": 7} if kind == "gemma3_text" else {}  # mlx_lm needs a layer of full attention
    save_type(tmp_path / "model", kind, **layers)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MORE_FIELDS.get(kind, {})))
    words: dict[str, Any] = dict(format="mlx", bits=4, group_size=32, solver="round-to-nearest")
    if kind in EXPERTS:
        words["layers"] = {"experts": {"bits": 3}}
    record = nearplane.quantize(tmp_path / "model", tmp_path / "out", **words)
    assert (kind in EXPERTS) == any(".experts." in layer.name for layer in record.layers)
    theirs, dense = logits(tmp_path / "out"), logits(dense_copy(tmp_path / "out", tmp_path / "dense"))
    assert torch.equal(theirs, dense)
    ours = dense_network(tmp_path / "out")(TOKENS).logits.detach()
    assert float((theirs - ours).abs().max() / ours.abs().max()) < OTHER_GELU.get(kind, SAME)


@pytest.mark.parametrize("tied", [False, True])
def test_mixed_widths_embeddings_and_head_load(tied: bool, tmp_path: Path) -> None:
    save_type(tmp_path / "model", "qwen3", tie_word_embeddings=tied)
    layers = {"down_proj": {"bits": 5, "group_size": 32}, "v_proj": {"bits": 8}}
    ends = dict(include_embeddings=True, include_head=True)
    words: dict[str, Any] = dict(format="mlx", bits=3, group_size=64, solver="round-to-nearest")
    nearplane.quantize(tmp_path / "model", tmp_path / "out", layers=layers, **ends, **words)
    theirs, dense = logits(tmp_path / "out"), logits(dense_copy(tmp_path / "out", tmp_path / "dense"))
    assert torch.equal(theirs, dense)
    ours = dense_network(tmp_path / "out")(TOKENS).logits.detach()
    assert float((theirs - ours).abs().max() / ours.abs().max()) < SAME


def test_a_mix_that_was_chosen_loads(tmp_path: Path) -> None:
    save_type(tmp_path / "model", "qwen3")
    text = torch.randint(3, VOCABULARY, (16, 48), generator=torch.Generator().manual_seed(2))
    ways: dict[str, Any] = dict(mix="int3,int4,int8,bf16", bits_per_weight=6.5, format="mlx", group_size=64)
    record = nearplane.quantize(tmp_path / "model", tmp_path / "out", calibration=text, **ways)
    assert len({layer.format for layer in record.layers}) > 1
    theirs, ours = logits(tmp_path / "out"), dense_network(tmp_path / "out")(TOKENS).logits.detach()
    assert float((theirs - ours).abs().max() / ours.abs().max()) < SAME


@pytest.mark.parametrize("kind", EXPERTS)
def test_types_with_experts_load_with_all_of_them_dense(kind: str, tmp_path: Path) -> None:
    save_type(tmp_path / "model", kind)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MORE_FIELDS.get(kind, {})))
    words: dict[str, Any] = dict(format="mlx", bits=4, group_size=32, solver="round-to-nearest")
    nearplane.quantize(tmp_path / "model", tmp_path / "out", ignore=["experts"], **words)
    theirs, ours = logits(tmp_path / "out"), dense_network(tmp_path / "out")(TOKENS).logits.detach()
    assert float((theirs - ours).abs().max() / ours.abs().max()) < SAME


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_conversions_of_mlx_lm_are_read(kind: str, tmp_path: Path) -> None:
    """Its own folder, with embeddings quantized and layers of other bits, gives the logits of MLX."""
    from mlx_lm.convert import convert

    save_type(tmp_path / "model", kind)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"]} | MORE_FIELDS.get(kind, {})
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def bits_of(path: str, module: Any) -> bool | dict[str, int]:
        return {"group_size": 32, "bits": 6} if "down_proj" in path else True

    convert(
        str(tmp_path / "model"),
        str(tmp_path / "out"),
        quantize=True,
        q_bits=4,
        q_group_size=64,
        quant_predicate=bits_of,
    )
    ours, theirs = nearplane.load(tmp_path / "out", dtype="float32")(TOKENS).logits.detach(), logits(tmp_path / "out")
    assert float((theirs - ours).abs().max() / ours.abs().max()) < SAME


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("mode", MLX_FLOATS)
def test_conversions_of_mlx_lm_to_floats_are_read(mode: str, kind: str, tmp_path: Path) -> None:
    """Embeddings are floats, too; layers with an entry of their own are integers, as the entry has no mode."""
    from mlx_lm.convert import convert

    save_type(tmp_path / "model", kind)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"]} | MORE_FIELDS.get(kind, {})
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def mode_of(path: str, module: Any) -> bool | dict[str, int]:
        return {"group_size": 32, "bits": 6} if "down_proj" in path else True

    model, out = str(tmp_path / "model"), str(tmp_path / "out")
    convert(model, out, quantize=True, q_mode=mode, quant_predicate=mode_of)
    ours, theirs = nearplane.load(tmp_path / "out", dtype="float32")(TOKENS).logits.detach(), logits(tmp_path / "out")
    assert float((theirs - ours).abs().max() / ours.abs().max()) < SAME


def test_solved_loses_a_third_of_mlx_lms_conversion(tmp_path: Path) -> None:
    """At equal bits and groups, the same layers quantized, on the demo's text."""
    from mlx_lm.convert import convert

    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION.read_text()[-60000:])
    words: dict[str, Any] = dict(calibration=str(CALIBRATION), samples=8, seqlen=256)
    nearplane.quantize(MODEL, tmp_path / "ours", format="mlx", bits=3, group_size=64, **words)
    convert(
        str(MODEL), str(tmp_path / "theirs"), quantize=True, q_bits=3, q_group_size=64,
        quant_predicate=lambda path, _: "embed" not in path,
    )  # fmt: skip
    kl = [
        nearplane.evaluate(tmp_path / each, against=MODEL, text=str(text), seqlen=256).kl for each in ("ours", "theirs")
    ]
    assert kl[0] < 0.35 * kl[1]
