"""Learning rates step by step, where training falls, measures and returns, and when twice as many steps gain little."""

import pytest

from nearplane.tuning.schedule import (
    CONSTANT_RATE,
    FALL_SHARE,
    FIRST_STEPS,
    SHORTEST_STEPS,
    FixedSteps,
    OpenEnded,
    gains_little,
)


def test_a_given_number_of_steps_rises_and_falls_to_nothing():
    known = FixedSteps(100)
    rates = [known.rate(done) for done in range(100)]
    assert rates.index(max(rates)) == 10
    assert rates[0] < 0.1
    assert rates[-1] < 0.001
    assert [done for done in range(101) if known.looks(done)] == [50, 100]
    assert not any(known.falls(done) for done in range(101))


@pytest.mark.parametrize("most", [SHORTEST_STEPS, 200, 260, 1000, 4321])
def test_each_measurement_comes_after_twice_as_many_steps_and_a_fall(most):
    schedule = OpenEnded(most)
    assert 0.75 * most <= schedule.steps <= most or most < 2 * SHORTEST_STEPS
    kept, before = 0, 0
    for number, (falls, measured) in enumerate(schedule.places):
        last = number == len(schedule.places) - 1
        constant, fall = falls - before, measured - falls
        assert constant == (kept or FIRST_STEPS) or (last and constant < kept)
        kept += constant
        assert fall == pytest.approx(FALL_SHARE * kept, abs=1)
        falling = [schedule.rate(before + constant + step) for step in range(fall)]
        assert falling == sorted(falling, reverse=True)
        assert 0 < falling[-1] < 1 / fall
        assert schedule.falls(before + constant)
        assert schedule.rate(before + constant - 1) == CONSTANT_RATE
        before += constant + fall
        assert schedule.looks(before)
    assert before == schedule.steps
    assert sum(map(schedule.looks, range(before + 1))) == sum(map(schedule.falls, range(before + 1))) == number + 1


def test_little_is_less_than_two_percent_with_its_error():
    before = [1.0, 2.0, 3.0]
    assert gains_little(before, [0.99, 1.98, 2.97])
    assert not gains_little(before, [0.97, 1.94, 2.91])
    assert not gains_little(before, [1.0, 2.0, 2.9])  # 1.7 +- 1.7 %
    assert gains_little(before, [1.1, 2.1, 3.1])
    assert gains_little([1.0], [0.99])
