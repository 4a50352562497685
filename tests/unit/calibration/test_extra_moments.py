"""Extra windows pass through both networks and enter no sum: what is fitted is the same to the bit with and without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bare_blocks import both
from families import VOCABULARY
from nearplane.calibration.activations import Dealt, skeleton
from nearplane.calibration.separate_passes import observe
from nearplane.calibration.stages import stages
from nearplane.lattice.moments import Extra, Moments
from nearplane.models.model import Block, open_model
from nearplane.system.ranks import ONE_PROCESS

LOUDER = 1.05  # what the weights of the quantized network are multiplied by


@pytest.fixture
def extra() -> Tensor:
    """Return (3, 12) random tokens: with a batch of 2 the last batch is smaller."""
    return torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(2))


def louder(block: Block) -> None:
    for layer in block.quantized_layers():
        layer.write(layer.read() * LOUDER)


def observed(
    folder: Path, tokens: Tensor, extra: Tensor | None, *, correct: bool = True, last: bool = False
) -> dict[str, Moments]:
    """Observe the second block of a network whose first is louder."""
    model = open_model(str(folder))
    fitted = tokens.split(2)
    batches = fitted if extra is None else (*fitted, *extra.split(2))
    stream = skeleton(model, batches, device="cpu", dtype=torch.float64)
    sizes = [*map(len, batches)]
    stream.dealt = Dealt.among(ONE_PROCESS, sizes[: len(fitted)], sizes[len(fitted) :], [])
    if correct:
        both(stream)
    first, second = model.blocks[:2]
    with first.on("cpu", torch.float64):
        louder(first)
        stream.advance(first)
    with second.on("cpu", torch.float64):
        groups = stages(second, stream)
        seen = observe(second, groups, stream, last=last)
    return {name: statistics for one in seen for name, statistics in one.moments.items()}


@pytest.mark.parametrize("correct", [True, False])
def test_extra_windows_change_nothing_that_is_fitted(
    saved: Callable[[str], Path], tokens: Tensor, extra: Tensor, correct: bool
) -> None:
    without, with_them = (observed(saved("llama"), tokens, each, correct=correct) for each in (None, extra))
    for name, plain in without.items():
        again = with_them[name]
        assert plain.extra is None
        assert again.extra is not None
        assert again.tokens == plain.tokens == tokens.numel()
        for key in ("H", "C", "lost", "alive"):
            a, b = getattr(plain, key), getattr(again, key)
            assert (a is None and b is None) or torch.equal(a, b), key
        if correct:
            assert torch.equal(plain.held_out.H, again.held_out.H)
            assert again.held_out.tokens == plain.held_out.tokens


@pytest.mark.parametrize("last", [False, True])
def test_their_rows_are_those_of_two_whole_networks(
    saved: Callable[[str], Path], loaded: Callable[[str], PreTrainedModel], tokens: Tensor, extra: Tensor, last: bool
) -> None:
    found = observed(saved("llama"), tokens, extra, last=last)
    rows: dict[str, list[Tensor]] = {}
    original = loaded("llama")
    network = type(original)(original.config).double().eval()
    network.load_state_dict(original.state_dict())
    for module in network.model.layers[0].modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data *= LOUDER
    for whole in (original, network):
        handles = [
            whole.get_submodule(name).register_forward_pre_hook(
                lambda module, args, name=name: rows.setdefault(name, []).append(args[0].flatten(0, -2))
            )
            for name in found
        ]
        with torch.no_grad():
            whole(extra, use_cache=False)
        for handle in handles:
            handle.remove()
    for name, statistics in found.items():
        X, X_hat = rows[name]
        assert not torch.equal(X, X_hat)
        close(statistics.extra, X, X_hat)


def close(found: Extra, X: Tensor, X_hat: Tensor) -> None:
    for rows, expected in ((found.X_hat, X_hat), (found.X, X)):
        torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_of_many_rows_some_are_kept_evenly_spread(
    saved: Callable[[str], Path], tokens: Tensor, extra: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fourth of each batch: two windows of 12 tokens, and one."""
    every = observed(saved("llama"), tokens, extra)
    monkeypatch.setattr("nearplane.calibration.second_moments.EXTRA_TOKENS", 9)
    for name, some in observed(saved("llama"), tokens, extra).items():
        rows = every[name].extra.X_hat
        assert torch.equal(some.extra.X_hat, torch.cat([rows[:24:4], rows[24::4]]))
        assert len(some.extra.X) == len(some.extra.X_hat) == 9


def test_without_correction_the_original_network_does_not_run_on_them(
    saved: Callable[[str], Path], tokens: Tensor, extra: Tensor
) -> None:
    for statistics in observed(saved("llama"), tokens, extra, correct=False).values():
        assert (statistics.extra.X, statistics.alive) == (None, None)


def test_inputs_of_the_original_that_are_never_0_are_alive(saved: Callable[[str], Path], tokens: Tensor) -> None:
    for statistics in observed(saved("llama"), tokens, None).values():
        assert torch.equal(statistics.alive, torch.ones_like(statistics.alive))
