"""Experts in stacked parameters: their matrices as layers, their rows, and a forward that computes what transformers' does."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bare_blocks import both
from model_types import save_type, tiny_config
from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.expert_rows import RoutedRows
from nearplane.calibration.second_moments import Observed, sum_moments
from nearplane.calibration.separate_passes import observe
from nearplane.errors import CalibrationError, RecipeError
from nearplane.models.experts import ExpertLayer, Routed, by_expert, make_observable
from nearplane.models.layers import is_stack
from nearplane.models.model import Model, open_model

KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "nemotron_h", "granitemoe", "deepseek_v3", "llama4_text")
TOKENS = torch.randint(3, 96, (6, 16), generator=torch.Generator().manual_seed(2))


def network(kind: str) -> PreTrainedModel:
    """Return a tiny random model of a type whose every parameter matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.requires_grad_(False)


@pytest.fixture(params=["qwen3_moe", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return open_model(str(save_type(tmp_path, request.param)))


def stacks(module: nn.Module) -> Iterator[Any]:
    yield from (part for part in module.modules() if is_stack(part))


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_computes_what_transformers_own_does_and_other_copies_keep_theirs(kind: str) -> None:
    whole = network(kind)
    whole.set_experts_implementation("eager")
    expected = whole(TOKENS, use_cache=False).logits
    copied = deepcopy(whole)
    make_observable(copied)
    found = copied(TOKENS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    shown: list[Routed] = []
    for stack in stacks(copied):
        for side in ("up", "down"):
            stack.watched[side] = {0: shown.append}
    assert torch.equal(copied(TOKENS, use_cache=False).logits, found)
    assert len(shown) == 2 * sum(1 for _ in stacks(copied)) > 0
    assert torch.equal(whole(TOKENS, use_cache=False).logits, expected)


def test_rows_times_a_matrix_is_what_the_expert_computes_and_writing_changes_it_alone(model: Model) -> None:
    """Gate and up one behind the other, or in turns and transposed, with biases."""
    with model.blocks[0].on("cpu", torch.float64, original=False) as block:
        layers = [layer for layer in block.quantized_layers() if layer.routed]
        assert all(isinstance(layer, ExpertLayer) for layer in layers)
        assert len({layer.name for layer in layers}) == len(layers) == 12
        (stack,) = stacks(block.quantized)
        x = torch.randn(20, 64, dtype=torch.float64)
        chosen = torch.stack([torch.randperm(4)[:2] for _ in range(20)])
        for layer in layers:
            rows: list[Tensor] = []
            outputs: list[Tensor] = []
            handles = [
                layer.before(lambda each, routed, rows=rows: rows.append(each.rows(routed))),
                layer.after(lambda each, output, outputs=outputs: outputs.append(each.outputs_of(output))),
            ]
            stack(x, chosen, torch.rand(20, 2, dtype=torch.float64))
            for handle in handles:
                handle.remove()
            holder = layer.parameter.rpartition(".")[2]
            bias = getattr(stack, f"{holder}_bias", None)
            b = 0 if bias is None else bias[layer.expert][layer.outputs]
            torch.testing.assert_close(outputs[0], rows[0] @ layer.read().T + b, rtol=1e-12, atol=1e-12)
        before = [layer.read() for layer in layers]
        for index, layer in enumerate(layers):
            layer.write(torch.full(layer.shape, float(index)))
        for index, (layer, old) in enumerate(zip(layers, before, strict=True)):
            assert bool((layer.read() == index).all())
            assert layer.read().shape == old.shape == layer.shape


def test_names_are_those_of_the_file_where_it_holds_experts_apart(tmp_path: Path) -> None:
    """Mixtral's modules and files have other names; gpt-oss' files hold all experts in one tensor."""
    mixtral = open_model(str(save_type(tmp_path / "mixtral", "mixtral")))
    layer = next(layer for layer in mixtral.layers if layer.routed and layer.expert == 3)
    assert layer.name == "model.layers.0.mlp.experts.3.w1"
    assert layer.written(mixtral.weights) == "model.layers.0.block_sparse_moe.experts.3.w1"
    assert layer.copies(mixtral.weights) == ["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    fused = open_model(str(save_type(tmp_path / "gpt_oss", "gpt_oss")))
    layer = next(layer for layer in fused.layers if layer.routed and layer.expert == 3)
    assert layer.name == layer.written(fused.weights) == "model.layers.0.mlp.experts.3.gate_proj"
    assert layer.copies(fused.weights) == ["model.layers.0.mlp.experts.gate_up_proj"]


def test_experts_that_are_stored_in_one_tensor_of_another_order_are_read(tmp_path: Path) -> None:
    """Inkling 2 stores gate and up in turns, which its reader takes apart: matrices are named as where nothing is converted."""
    model = open_model(str(save_type(tmp_path, "inkling2_text")))
    up = next(layer for layer in model.layers if layer.name == "model.layers.0.mlp.experts.1.up_proj")
    assert up.copies(model.weights) == ["model.llm.layers.0.mlp.experts.w13_weight"]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with model.blocks[0].on("cpu", torch.float32, original=False) as block:
        (found,) = (layer.read() for layer in block.quantized_layers() if layer.name == up.name)
    assert torch.equal(found, whole.model.layers[0].mlp.experts.gate_up_proj[1, 128:])


def test_some_experts_of_a_block_cannot_be_left_out_alone(tmp_path: Path) -> None:
    folder = str(save_type(tmp_path, "qwen3_moe"))
    with pytest.raises(RecipeError, match=r"leaves out 2 of the 8 matrices in model\.layers\.0\.mlp\.experts\."):
        open_model(folder, ignore=[r"experts\.2\."])
    assert not any(layer.routed for layer in open_model(folder, ignore=["experts"]).layers)
    assert len([layer for layer in open_model(folder, ignore=["down_proj"]).layers if layer.routed]) == 16


def test_rows_are_paired_where_both_networks_send_a_token_to_the_expert() -> None:
    """Of the others nothing is known to be lost."""
    x_hat, x = torch.randn(5, 3), torch.randn(5, 3)
    token, expert = torch.tensor([0, 2, 3, 1, 4]), torch.tensor([0, 0, 0, 1, 1])
    quantized = Routed(x=x_hat, token=token, expert=expert, ends=(3, 5, 5), tokens=5, apart=False)
    token, expert = torch.tensor([2, 3, 4, 0, 1]), torch.tensor([0, 0, 0, 1, 2])
    original = Routed(x=x, token=token, expert=expert, ends=(3, 4, 5), tokens=5, apart=False)
    rows = RoutedRows(quantized=quantized, original=original).of(0)
    assert torch.equal(rows.X_hat, x_hat[[0, 2, 3]])
    assert torch.equal(rows.X, torch.stack([x_hat[0], x[2], x[3]]))
    assert (rows.alike, rows.before(Fraction(3, 5)), rows.before(Fraction(1, 5))) == (2, 2, 1)
    others = RoutedRows(quantized=quantized, original=original)
    assert (others.of(1).alike, others.of(2).alike, len(others.of(2).X_hat)) == (0, 0, 0)
    nothing = Routed(x=x[:0], token=token[:0], expert=token[:0], ends=(0, 0, 0), tokens=5, apart=True)
    unmet = RoutedRows(quantized=quantized, original=nothing).of(0)
    assert torch.equal(unmet.X, unmet.X_hat)
    assert unmet.alike == 0


def test_moments_of_an_expert_are_those_of_the_tokens_that_reach_it(model: Model) -> None:
    """All experts are one stage before gate and up, and one before down; the sums of each are formed apart."""
    stream = both(skeleton(model, TOKENS.split(2), device="cpu", dtype=torch.float64))
    stream.quantized = [x + 0.1 * torch.randn_like(x) for x in stream.quantized]
    with model.blocks[0].on("cpu", torch.float64) as block:
        layers = [layer for layer in block.quantized_layers() if layer.routed]
        groups = [tuple(layer for layer in layers if layer.side == side) for side in ("up", "down")]
        seen: dict[tuple[str, str], list[Routed]] = {}
        for which in ("original", "quantized"):
            (stack,) = stacks(getattr(block, which))
            for side in ("up", "down"):
                stack.watched[side] = {0: seen.setdefault((which, side), []).append}
            for batch, hidden in enumerate(getattr(stream, which)):
                stream.forward(block, getattr(block, which), batch, hidden)
            stack.watched.clear()
        found = observe(block, groups, stream)
    assert [[layer.expert for layer in each.layers] for each in found] == [[e] * 2 for e in range(4)] + [
        [e] for e in range(4)
    ]
    tokens = 0
    for each in found:
        first, own = each.layers[0], each.moments[each.layers[0].name]
        rows = {e: torch.cat([r.rows(e) for r in seen["quantized", first.side]]) for e in range(4)}
        X_hat, everything = rows[first.expert], torch.cat([*rows.values()])
        few = max(0, first.shape[1] - len(X_hat))
        assert own.blended == pytest.approx(few, abs=1)
        assert own.tokens == len(X_hat) + own.blended
        mean = everything.T @ everything / len(everything)
        expected = (X_hat.T @ X_hat + few * mean) / (len(X_hat) + few)
        torch.testing.assert_close(own.H, expected, rtol=3e-2, atol=1e-12)
        assert own.corrects
        assert own.held_out is not None
        assert 0 < own.alike < 1
        tokens += len(X_hat)
    assert tokens == 2 * 2 * TOKENS.numel()
    assert by_expert(groups[1]).keys() == {0, 1, 2, 3}


def routed(rows: Tensor, *counts: int) -> RoutedRows:
    """Return rows of experts, so many of each, one after the other, in both networks alike."""
    ends = tuple(torch.tensor(counts).cumsum(0).tolist())
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    one = Routed(x=rows, token=torch.arange(len(rows)), expert=expert, ends=ends, tokens=len(rows), apart=True)
    return RoutedRows(quantized=one, original=one)


def seen_by(rows: Tensor, *counts: int, inputs: int, rare: Any) -> list[Observed]:
    """Return what is observed of experts with one matrix each, in one batch of as many windows as rows."""
    layers = tuple(
        ExpertLayer(
            name=f"block.experts.{e}.down_proj", shape=(3, inputs), module=nn.Identity(), stored="", sources=(),
            holder="block.experts.down_proj", expert=e, outputs=slice(None), transposed=False,
        )
        for e in range(len(counts))
    )  # fmt: skip
    stream = both(Stream([rows[:, None]], {}))
    return [*sum_moments([layers], iter([[routed(rows, *counts)]]), stream, rare=rare)]


def test_an_expert_with_enough_tokens_has_its_own_moments_alone(generator: torch.Generator) -> None:
    rows = torch.randn(40, 2, dtype=torch.float64, generator=generator)
    found = seen_by(rows, 30, 0, 10, inputs=2, rare="mean")
    moments = [each.moments[each.layers[0].name] for each in found]
    assert [each.blended for each in moments] == [0, pytest.approx(2, abs=1), 0]
    torch.testing.assert_close(moments[0].H, rows[:30].T @ rows[:30] / 30, rtol=1e-12, atol=0)
    torch.testing.assert_close(moments[1].H, rows.T @ rows / 40, rtol=1e-12, atol=0)
    torch.testing.assert_close(moments[2].H, rows[30:].T @ rows[30:] / 10, rtol=1e-12, atol=0)


def test_a_rare_expert_is_an_error_where_it_is_asked_to_be(generator: torch.Generator) -> None:
    rows = torch.randn(40, 2, dtype=torch.float64, generator=generator)
    with pytest.raises(
        CalibrationError, match=r"^4 calibration tokens reach block\.experts\.1\.down_proj, fewer than 4 for each of"
    ):
        seen_by(rows, 36, 4, inputs=2, rare="error")
    assert len(seen_by(rows, 32, 8, inputs=2, rare="error")) == 2


def test_names_of_experts_are_names_where_transformers_has_patterns(tmp_path: Path) -> None:
    """DeepSeek V4's rule for its experts is written with escaped dots."""
    model = open_model(str(save_type(tmp_path / "model", "deepseek_v4")))
    experts = [layer for layer in model.layers if layer.routed]
    assert experts[0].name == "model.layers.0.mlp.experts.0.w1"
    assert {layer.written(model.weights) + ".weight" for layer in experts} <= {*model.reader.names()}
