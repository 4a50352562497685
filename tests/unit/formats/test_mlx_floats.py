"""Floats of MLX: bytes by hand, mixes with integers, what is refused; its own reader is in tests/journeys/test_mlx.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import nearplane
from model_types import save_type
from nearplane import FormatError, NumericalError, RecipeError
from nearplane.formats.layer_format import Quantized
from nearplane.formats.mlx import FORMAT
from nearplane.formats.mlx_experts import MLXReader
from nearplane.formats.mlx_floats import MODES
from nearplane.formats.stored import Stored
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.scale import Steps, StepStorage
from nearplane.lattice.shared_grid import UNIT_PEAK, SharedGrid, divisor_of
from nearplane.loading.dense_network import dense_network
from nearplane.matrix.quantize_matrix import quantize_matrix
from nearplane.number_formats import E2M1, MXFP4, NVFP4, NumberFormat, integers
from nearplane.recipe.schemes import GridScheme
from plain_formats import decoded

RTN: dict[str, Any] = {"format": "mlx", "solver": "round-to-nearest"}
LEVELS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
WORDS = {  # that mx.quantize of mlx 0.32.4 makes of LEVELS and 16 zeros, and its scales
    "mxfp4": ([0x76543210, 0xFEDCBA90, 0, 0], [127]),
    "nvfp4": ([0x76543210, 0xFEDCBA90, 0, 0], [0x38]),
    "mxfp8": ([0x6C686000, 0x7C787470, 0xECE8E000, 0xFCF8F4F0, 0, 0, 0, 0], [121]),
}


def matrix_of(W: Tensor, format: NumberFormat, peak: float | None = UNIT_PEAK) -> QuantizedMatrix:
    steps = Steps(format=format, search="mse", storage=torch.float32, peak=peak)
    grid, _ = FITS[format.fit](W, torch.ones(W.shape[1]), steps)
    return QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_those_of_mlx(mode: str) -> None:
    W = torch.tensor([LEVELS + [0.0] * 16])
    matrix = matrix_of(W, MODES[mode])
    if mode == "mxfp8":  # the step that mlx chooses; others hold the levels, too
        matrix = QuantizedMatrix(
            codes=torch.searchsorted(matrix.grid.levels.float(), W * 64).int(),
            grid=matrix.grid.with_parts({"scale": torch.full((1, 1), 2.0**-6), "zero": torch.zeros(1, 1)}),
        )
    tensors = FORMAT.layers.pack("a", matrix, torch.bfloat16)
    words, scales = WORDS[mode]
    assert tensors["a.weight"][0].tolist() == words
    assert tensors["a.scales"][0].tolist()[:1] == scales


@pytest.mark.parametrize("mode", MODES)
def test_all_numbers_are_read_back(mode: str, generator: torch.Generator) -> None:
    format = MODES[mode]
    matrix = matrix_of(torch.randn(24, 128, generator=generator), format)
    tensors = FORMAT.layers.pack("a", matrix, torch.float16)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "a.weight": ((24, 4 * format.bits), torch.uint32),
        "a.scales": ((24, format.groups(128)), torch.uint8),
    }
    empty = FORMAT.layers.empty("a", (24, 128), format, torch.float16)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in empty.items()
    }
    layers = FORMAT.layers.configured({"bits": 4, "group_size": 64, "a": {"mode": mode}})
    assert layers.shape_of("a", tensors) == (24, 128)
    assert layers.unpack("a", tensors, layers.grid_of(layers.config, "a")).same_as(matrix)


def test_steps_with_a_global_scale_are_refused(generator: torch.Generator) -> None:
    assert divisor_of(UNIT_PEAK, E2M1[-1]) == 1
    matrix = matrix_of(torch.randn(8, 64, generator=generator), NVFP4, peak=None)
    with pytest.raises(FormatError, match=r"a: its steps have the global scale [0-9.]+, which MLX does not store"):
        FORMAT.layers.pack("a", matrix, torch.bfloat16)


def test_global_scales_of_other_programs_are_refused(tmp_path: Path) -> None:
    """mlx_lm reads one for every expert of a stack; decoded without them, weights would be thousands of times too large."""
    tensors = {"a.switch_mlp.up_proj.global_scale": torch.ones(2), "a.switch_mlp.up_proj.scales": torch.ones(2, 1, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        FormatError, match=r"up_proj\.global_scale scales the steps of nvfp4, which nearplane does not read"
    ):
        MLXReader(tmp_path)


def test_an_entry_has_the_defaults_of_mlx_and_not_the_fields_of_the_others() -> None:
    """So reads mlx_lm: the entry of a layer, if it has one, else those of all layers."""
    four, six = integers(4, 32, minimum=True), integers(6, 64, minimum=True)
    layers = {"a.q_proj": MXFP4, "a.k_proj": MXFP4, "a.v_proj": NVFP4, "a.mlp.experts.0.up_proj": four, "a.o_proj": six}
    network = Quantized(scheme=GridScheme(grid="mxfp4"), quantized=list(layers), layers=layers, version="1")
    config = FORMAT.layers.describe(network)
    assert config == {
        "quant_method": "mlx", "group_size": 32, "bits": 4, "mode": "mxfp4",
        "a.v_proj": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        "a.mlp.switch_mlp.up_proj": {"group_size": 32, "bits": 4, "mode": "affine"},
        "a.o_proj": {"group_size": 64, "bits": 6, "mode": "affine"},
    }  # fmt: skip
    assert {name: FORMAT.layers.grid_of(config, name) for name in layers} == layers
    assert FORMAT.layers.grid_of(config | {"a.o_proj": {"bits": 6}}, "a.o_proj") == six


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"mode": "mxfp6"}, r"has mode 'mxfp6'; nearplane reads only affine, mxfp4, nvfp4, mxfp8"),
        ({"mode": ["mxfp4"]}, r"has mode \['mxfp4'\]"),
        ({"mode": "nvfp4", "group_size": 32}, "has 4 bits in groups of 32, which nvfp4 has not"),
    ],
)
def test_other_entries_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=rf"MLX: a {message}"):
        FORMAT.layers.grid_of({"bits": 4, "group_size": 64, "a": entry}, "a")


@pytest.mark.parametrize("mode", MODES)
def test_every_command_reads_a_network_with_experts_and_integers_beside_them(mode, tmp_path):
    model, out = save_type(tmp_path / "model", "qwen3_moe", torch.bfloat16), tmp_path / "out"
    layers = {"v_proj": {"grid": "int4-g32-min"}}
    record = nearplane.quantize(model, out, grid=mode, layers=layers, include_embeddings=True, include_head=True, **RTN)
    assert {layer.format for layer in record.layers} == {mode, "int4-g32-min"}
    assert {"model.embed_tokens", "lm_head"} < {layer.name for layer in record.layers}
    plain, stored = decoded(out), Stored(out)
    for name in stored.names():
        matrix = stored.matrix(name, stored.tensors(name))
        assert not isinstance(matrix.grid, SharedGrid) or matrix.grid.divisor == 1
        assert torch.equal(matrix.decode(), torch.from_numpy(plain[f"{name}.weight"].floats())), name
    config = json.loads((out / "config.json").read_text())["quantization"]
    format = MODES[mode]
    assert (config["mode"], config["bits"], config["group_size"]) == (mode, format.bits, format.group)
    assert config["model.layers.1.self_attn.v_proj"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert nearplane.verify(out, against=model).faults == ()
    tokens = torch.arange(24).view(2, 12)
    network = dense_network(out)
    assert torch.equal(nearplane.load(out, dtype="float32", packed=False)(tokens).logits, network(tokens).logits)


@pytest.mark.parametrize("mode", MODES)
def test_weights_move_to_compressed_tensors_and_back(mode, tmp_path):
    model = save_type(tmp_path / "model", "llama", torch.bfloat16)
    nearplane.quantize(model, tmp_path / "out", grid=mode, **RTN)
    nearplane.export(tmp_path / "out", tmp_path / "new", format="compressed-tensors")
    nearplane.export(tmp_path / "new", tmp_path / "back", format="mlx")
    ours = dense_network(tmp_path / "out").state_dict()
    for each in ("new", "back"):
        assert nearplane.verify(tmp_path / each, against=model).faults == ()
        theirs = dense_network(tmp_path / each).state_dict()
        assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())


def test_a_global_scale_does_not_move_to_mlx(tmp_path):
    model = save_type(tmp_path / "model", "llama", torch.bfloat16)
    nearplane.quantize(model, tmp_path / "out", grid="nvfp4", solver="round-to-nearest")
    with pytest.raises(RecipeError, match=r"cannot be exported to mlx without a change.*which MLX does not store"):
        nearplane.export(tmp_path / "out", tmp_path / "new", format="mlx")


def test_weights_too_small_for_steps_without_a_global_scale_are_refused(generator: torch.Generator) -> None:
    scheme, W, H = (
        GridScheme(grid="nvfp4", solver="round-to-nearest"),
        torch.randn(16, 64, generator=generator),
        torch.eye(64),
    )
    storage = StepStorage(torch.float32, UNIT_PEAK)
    best = quantize_matrix(W, H, scheme)[1].relative_loss
    assert quantize_matrix(W / 64, H, scheme, storage=storage)[1].relative_loss < 1.5 * best
    with pytest.raises(NumericalError, match=r"are too small for torch\.float8_e4m3fn: its steps lose .* --grid mxfp4"):
        quantize_matrix(W / 1024, H, scheme, storage=storage)
    quantize_matrix(W / 1024, H, scheme)
