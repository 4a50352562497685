"""What is left of the bits is settled once a block: the plan is kept on the whole, and layers of a block do not wait."""

import pytest

from nearplane.planning.ledger import MAX_CARRYOVER, Budget

LAYERS = [str(index) for index in range(6)]


def planned(rate=2.0):
    return Budget(dict.fromkeys(LAYERS, rate), dict.fromkeys(LAYERS, 16 * 64))


def test_layers_of_a_block_are_asked_for_what_was_planned_whatever_those_before_them_took():
    plan = planned()
    plan.settle()
    for layer in LAYERS[:3]:
        assert plan.rate(layer) == 2.0
        plan.spend(layer, 260)  # 4 bytes more than 2 bits a weight
    plan.settle()
    assert plan.rate(LAYERS[3]) == pytest.approx(2.0 - 3 * 4 * 8 / (3 * 1024))


def test_the_last_block_absorbs_all_that_is_left():
    plan = planned()
    for layer, size in zip(LAYERS[:5], (257, 252, 259, 255, 257), strict=True):
        plan.settle()
        plan.spend(layer, size)
    plan.settle()
    assert plan.rate(LAYERS[5]) * 1024 / 8 == pytest.approx(6 * 256 - (257 + 252 + 259 + 255 + 257))


def test_what_is_left_moves_no_layer_far():
    plan = planned()
    plan.spend(LAYERS[0], 1000)
    plan.settle()
    assert plan.rate(LAYERS[1]) == 2.0 * (1 - MAX_CARRYOVER)
