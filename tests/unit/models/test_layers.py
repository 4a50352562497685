"""Layers view a matrix however it is stored; blocks are found by structure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from families import config_of
from nearplane.models.layers import as_layer
from nearplane.models.structure import IGNORED_REASON, find_layers


def modules() -> list[tuple[nn.Module, Tensor]]:
    """Return every kind of module with an input for it, in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = [
        (nn.Linear(6, 4), normal(2, 3, 6)),
        (nn.Linear(6, 4, bias=False), normal(5, 6)),
        (Conv1D(4, 6), normal(2, 3, 6)),
        (nn.Conv2d(3, 4, 2), normal(2, 3, 5, 6)),
        (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), normal(2, 3, 7, 6)),
    ]
    return [(module.double(), x) for module, x in made]


@pytest.mark.parametrize("index", range(5))
def test_rows_times_the_weights_is_what_the_module_computes(index: int) -> None:
    module, x = modules()[index]
    layer = as_layer("some.name", module)
    product = layer.rows(x) @ layer.read().T
    if module.bias is not None:
        product += module.bias
    expected = module(x)
    if layer.kind == "Conv2d":
        expected = expected.permute(0, 2, 3, 1)  # (images, height, width, out)
    torch.testing.assert_close(product, expected.reshape(product.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("index", range(5))
def test_what_is_written_is_read_back_and_kept_in_the_modules_dtype(index: int, generator: torch.Generator) -> None:
    module, _ = modules()[index]
    layer = as_layer("some.name", module.bfloat16())
    values = torch.randint(-8, 8, layer.shape, generator=generator).float()
    layer.write(values)
    assert torch.equal(layer.read(), values)
    assert layer.read().dtype == torch.float32
    assert module.weight.dtype == torch.bfloat16
    assert layer.shape == layer.read().shape


def test_reading_gives_memory_of_its_own() -> None:
    layer = as_layer("some.name", nn.Linear(3, 2))
    before = layer.read()
    layer.read().zero_()
    assert torch.equal(layer.read(), before)


class Seeded(nn.Linear):
    """A Linear that begins otherwise."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.bias.data.zero_()


class Router(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).softmax(-1)


class SeededRouter(Router):
    """Changes nothing of what is no Linear."""


def test_subclasses_of_linear_are_layers_where_they_compute_what_it_computes() -> None:
    """Those that override nothing but how they begin, and Falcon's, whose forward is known."""
    for module in (Seeded(3, 2), FalconLinear(3, 2), FalconLinear(3, 2, bias=False)):
        layer = as_layer("name", module)
        assert layer is not None
        assert layer.kind == "Linear"
        x = torch.randn(5, 3)
        bias = 0 if module.bias is None else module.bias
        torch.testing.assert_close(module(x), layer.rows(x) @ layer.read().T + bias, rtol=1e-5, atol=1e-6)
    parametrized = nn.utils.parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Tanh())
    for other in (Router(3, 2), SeededRouter(3, 2), parametrized, nn.MultiheadAttention(4, 2).out_proj):
        assert as_layer("name", other) is None


def test_what_computes_something_else_is_no_layer() -> None:
    refused = [nn.Embedding(3, 2), nn.Conv1d(3, 2, 1), nn.LayerNorm(3)]
    refused += [nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 3, padding="same")]
    refused += [nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")]
    assert [as_layer("name", module) for module in refused] == [None] * len(refused)


def test_ignored_layers_are_found_by_search_in_the_full_name() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama"))
    layers, skipped = find_layers(model.model.layers[1], "model.layers.1", [r"\.1\.self_attn", "down"])
    assert [layer.name for layer in layers] == ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    assert all(reason == IGNORED_REASON for _, reason in skipped)
    assert len(skipped) == 5
