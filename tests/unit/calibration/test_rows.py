"""Additions that consume a layer's output are seen, whatever way they are written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from nearplane.calibration.recorder import Stop
from nearplane.calibration.rows import Additions, total
from nearplane.models.layers import as_layer


def in_place(out: Tensor, r: Tensor) -> Tensor:
    r = r.clone()
    r += out
    return r


def onto_output(out: Tensor, r: Tensor) -> Tensor:
    out += r
    return out


def with_questions(out: Tensor, r: Tensor) -> Tensor:
    """Ask for shapes, views and dtypes in between, as blocks do."""
    rows, _ = out.shape
    out = nn.functional.dropout(out.view(rows, -1).to(out.dtype), 0.5, training=False)
    return r.reshape(out.size()) + out.contiguous()


WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "r + out": lambda out, r: r + out,
    "out + r": lambda out, r: out + r,
    "torch.add": lambda out, r: torch.add(r, out),
    "torch.add by name": lambda out, r: torch.add(input=r, other=out),
    "out.add": lambda out, r: out.add(r),
    "r += out": in_place,
    "out += r": onto_output,
    "out.add_(r)": lambda out, r: out.add_(r),
    "in shapes": with_questions,
    "in two steps": lambda out, r: (out + r / 4) + 3 * r / 4,
}
NOT_RESIDUAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda out, r: r + 2 * out,
    "alpha": lambda out, r: torch.add(r, out, alpha=2),
    "another shape": lambda out, r: out + r[:1],
    "its own power": lambda out, r: out + torch.pow(out, 3),
    "its own power, first": lambda out, r: 0.5 * out * (1 + torch.tanh(out + r)),
    "a number": lambda out, r: out + 1.0,
    "nothing": lambda out, r: out,
}


def found(
    body: Callable[[Tensor, Tensor], Tensor], done: Callable[[], None] = lambda: None
) -> tuple[Tensor | None, Tensor]:
    """Run a body on the output of a layer and on an r; return what was seen, and the true r."""
    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    layer = as_layer("it", nn.Linear(4, 4).double())
    additions = Additions(done)
    with torch.no_grad(), additions, layer.after(additions.watch):
        with suppress(Stop):
            body(layer.module(x), r.clone()).exp()
        additions.finish()
    operands = additions.found.get("it")
    return None if operands is None else total(operands), r


@pytest.mark.parametrize("how", WRITTEN)
def test_the_other_operand_is_found(how: str) -> None:
    seen, r = found(WRITTEN[how])
    torch.testing.assert_close(seen, r, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("how", NOT_RESIDUAL)
def test_what_is_no_plain_addition_is_not_taken_for_one(how: str) -> None:
    assert found(NOT_RESIDUAL[how])[0] is None


def test_what_was_seen_does_not_change_when_the_block_goes_on_in_place() -> None:
    seen, r = found(lambda out, r: (out + r) * r.zero_())
    assert torch.equal(seen, r)


def test_a_forward_can_be_stopped_when_the_sum_is_complete() -> None:
    reached = []

    def done() -> None:
        raise Stop

    seen, r = found(lambda out, r: ((out + r).relu(), reached.append("the end"))[0], done)
    assert torch.equal(seen, r)
    assert reached == []


def test_hooks_are_removed() -> None:
    layer = as_layer("it", nn.Linear(2, 2))
    calls: list[str] = []
    before = layer.before(lambda layer, x: calls.append("before"))
    with before, layer.after(lambda layer, x: calls.append("after")):
        layer.module(torch.ones(1, 2))
    layer.module(input=torch.ones(1, 2))
    assert calls == ["before", "after"]
