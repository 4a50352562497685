"""Codes step within the backward pass, by gradients relative to those of their row and column."""

import pytest
import torch

from nearplane.tuning.code_steps import CodeSteps


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-16])
def test_a_first_step_is_as_large_as_the_rate_for_gradients_of_any_size(generator, size):
    leaf = torch.zeros(48, 64, requires_grad=True)
    steps = CodeSteps([leaf], lambda: 0.25)
    scale = torch.rand(48, 1, generator=generator) * torch.rand(64, generator=generator) + 0.1
    (leaf * size * scale * torch.randn(48, 64, generator=generator)).sum().backward()
    assert leaf.grad is None
    moved = leaf.detach().square()
    assert float(moved.mean().sqrt()) == pytest.approx(0.25, rel=0.2)
    steps.close()


def test_rows_and_columns_without_gradients_stay(generator):
    leaf = torch.zeros(8, 6, requires_grad=True)
    CodeSteps([leaf], lambda: 1.0)
    factor = torch.ones(8, 6)
    factor[2], factor[:, 3] = 0, 0
    (leaf * factor).sum().backward()
    still = leaf.detach() == 0
    assert torch.equal(still, factor == 0)


def test_what_is_restored_goes_on_to_the_bit_and_what_is_closed_steps_no_more(generator):
    gradients = torch.randn(6, 5, 7, generator=generator)
    whole, first, second = (torch.zeros(5, 7, requires_grad=True) for _ in range(3))
    pressed = []
    one, other = CodeSteps([whole], lambda: 0.1, pressed.append), CodeSteps([first], lambda: 0.1)
    for gradient in gradients:
        (whole * gradient).sum().backward()
    for gradient in gradients[:3]:
        (first * gradient).sum().backward()
    with torch.no_grad():
        second.copy_(first)
    resumed = CodeSteps([second], lambda: 0.1)
    resumed.restore(other.state())
    for gradient in gradients[3:]:
        (second * gradient).sum().backward()
    assert torch.equal(whole, second)
    assert pressed == [0] * 6
    one.close()
    (whole * gradients[0]).sum().backward()
    assert torch.equal(whole, second)
    assert torch.equal(whole.grad, gradients[0])
