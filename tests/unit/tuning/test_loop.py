"""The guard: what is kept is what was best on held-out windows, and that may be the start."""

import pytest
import torch

from nearplane import CalibrationError
from nearplane.models.divergence import Divergence
from nearplane.record.tuning_record import Point
from nearplane.tuning.loop import train
from nearplane.tuning.schedule import FixedSteps, OpenEnded
from nearplane.tuning.settings import Split


class Quadratic:
    """In place of a network: KL is the square of one leaf's distance from an aim, held-out batches have their own aim."""

    def __init__(self, leaf, aims):
        self.leaf, self.aims = leaf, aims

    def divergences(self, batches):
        return [[Divergence(kl=float((self.leaf - self.aims[i]).detach().square()), tokens=1)] for i in batches]

    def backward(self, batch):
        (self.leaf - self.aims[batch]).square().backward()
        return self.divergences([batch])[0][0]


class Leaf:
    """In place of a matrix: one number."""

    def __init__(self):
        self.leaf = torch.zeros((), requires_grad=True)

    def trained(self):
        return {"steps": self.leaf}

    def state(self):
        return {"steps": self.leaf.detach().clone()}

    def restore(self, state):
        with torch.no_grad():
            self.leaf.copy_(state["steps"])


def trained(held, rate=0.1, steps=40, schedule=None):
    it = Leaf()
    network = Quadratic(it.leaf, [1.0, 1.0, held])
    windows, rates = torch.zeros(3, 2), {"steps": rate}
    cut = Split(
        windows=windows, training=2, batch=1, samples=3, found=3, schedule=schedule or FixedSteps(steps, 8), rates=rates
    )
    found = train(network, [it], cut)
    return float(it.leaf.detach()), found


def test_what_gains_is_kept():
    value, found = trained(held=1.0)
    assert abs(value - 1) < 0.3
    assert found.kept > 0
    assert [point.step for point in found.curve] == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    assert found.curve[0] == Point(step=0, training=None, held_out=1.0)


def test_the_start_is_kept_where_nothing_is_better():
    value, found = trained(held=-1.0)
    assert value == 0.0
    assert found.kept == 0
    assert min(point.held_out for point in found.curve) == found.curve[0].held_out


def test_the_best_state_on_the_way_is_kept():
    value, found = trained(held=0.5)
    assert 0 < found.kept < 40
    best = min(found.curve, key=lambda point: point.held_out)
    assert best.step == found.kept
    assert (value - 0.5) ** 2 == pytest.approx(best.held_out, rel=1e-6)


@pytest.mark.filterwarnings("error")
def test_a_state_that_is_no_number_is_not_kept():
    value, found = trained(held=1.0, rate=float("inf"))
    assert value == 0.0
    assert found.kept == 0


@pytest.mark.parametrize("which", [lambda call: call == 3, lambda call: call > 3])
def test_looks_that_find_no_number_are_left_out_of_the_curve(monkeypatch, which):
    calls, real = [], Quadratic.divergences

    def sometimes(self, batches):
        if 2 in batches:  # held out
            calls.append(0)
            if which(len(calls)):
                return [[Divergence(kl=float("nan"), tokens=1)]]
        return real(self, batches)

    monkeypatch.setattr(Quadratic, "divergences", sometimes)
    _, found = trained(held=1.0)
    assert [point.step for point in found.curve] == [5 * n for n in range(9) if not which(n + 1)]
    assert found.kept == min(found.curve, key=lambda point: point.held_out).step
    assert found.steps == 40


@pytest.mark.parametrize("last", [3, 22])
def test_training_ends_where_gradients_end(monkeypatch, caplog, last):
    """With the best state so far; at the first step there is none."""
    calls, real = [], Quadratic.backward

    def fails(self, batch):
        if len(calls) == last:
            raise CalibrationError("Gradients are NaN.")
        calls.append(0)
        return real(self, batch)

    monkeypatch.setattr(Quadratic, "backward", fails)
    value, found = trained(held=1.0)
    assert found.steps == last
    assert found.curve[-1].step == last // 5 * 5
    best = min(found.curve, key=lambda point: point.held_out)
    assert found.kept == best.step
    assert (value - 1) ** 2 == pytest.approx(best.held_out, rel=1e-6)
    assert f"Gradients are NaN. Tuning stops after {last} of 40 steps." in caplog.text
    last = 0
    calls.clear()
    with pytest.raises(CalibrationError, match="Gradients are NaN"):
        trained(held=1.0)


class Steep(Quadratic):
    """A leaf whose held-out KL is multiplied by the next share at each measurement but the first."""

    def __init__(self, leaf, shares):
        super().__init__(leaf, [1.0, 1.0])
        self.shares, self.kl = [1.0, *shares], 1.0

    def divergences(self, batches):
        if 2 in batches:
            self.kl *= self.shares.pop(0)
            return [[Divergence(kl=self.kl, tokens=1)]]
        return super().divergences(batches)


@pytest.mark.parametrize(
    ("shares", "looks"),
    [((0.5, 0.9, 0.9), 4), ((0.5, 0.99), 3), ((0.5, 1.1, 0.5), 4), ((0.5, 1.1, 1.1), 4), ((0.5, 0.999), 3)],
)
def test_training_ends_where_twice_as_many_steps_gain_little_but_not_at_a_first_rise(shares, looks):
    it = Leaf()
    network, schedule = Steep(it.leaf, shares), OpenEnded(540)
    cut = Split(
        windows=torch.zeros(3, 2), training=2, batch=1, samples=3, found=3, schedule=schedule, rates={"steps": 1e-4}
    )
    found = train(network, [it], cut)
    assert [point.step for point in found.curve] == [0, 120, 260, 540][:looks]
    assert found.steps == found.curve[-1].step
    assert found.kept == min(found.curve, key=lambda point: point.held_out).step


def test_training_returns_to_where_rates_began_to_fall():
    """So that steps in a fall are no part of what is trained on: as many steps without them come to the same."""
    values = []

    class Watched(Leaf):
        def state(self):
            values.append(float(self.leaf.detach()))
            return super().state()

    it = Watched()
    network = Steep(it.leaf, (0.5, 0.5, 0.5))
    cut = Split(
        windows=torch.zeros(3, 2),
        training=2,
        batch=1,
        samples=3,
        found=3,
        schedule=OpenEnded(540),
        rates={"steps": 1e-4},
    )
    train(network, [it], cut)
    start, *after = values
    steps = [value - start for value in after]  # Adam's steps are as large as the rate, as the aim is far
    assert steps == pytest.approx([5e-5 * each for each in (95 + 10, 195 + 20, 395 + 40)], rel=0.01)
