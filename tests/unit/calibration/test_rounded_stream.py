"""Global scales of rounded inputs: known ones stay, measured ones leave room for larger inputs."""

import torch

from nearplane.calibration.rounded_stream import RoundedStream
from nearplane.lattice.rounded_inputs import rounded
from nearplane.models.layers import as_layer
from nearplane.number_formats import FP4_NV, INT8_TOKEN

FREE, KNOWN = (as_layer(name, torch.nn.Linear(32, 4)) for name in ("free", "known"))


def test_measured_scales_leave_room_and_end_with_the_block_while_known_ones_stay(generator):
    x = torch.randn(5, 32, generator=generator)
    peak, stream = float(x.abs().max()), RoundedStream(lambda _: FP4_NV, {"known": 7.0}, headroom=1.5)
    with stream.applied([FREE, KNOWN]):
        assert stream.measures([FREE])
        assert not stream.measures([KNOWN])
        assert torch.equal(stream.rounded("free", x), x)  # not before it is measured
        stream.measured([FREE], peak)
        assert stream.scales == {"known": 7.0, "free": float(torch.tensor(448 * 6 / (1.5 * peak)))}
        assert torch.equal(stream.rounded("free", x), rounded(x, FP4_NV, stream.scales["free"]))
    assert stream.scales == {"known": 7.0}


def test_room_of_a_power_of_two_changes_no_input_within_the_range_and_saves_larger_ones(generator):
    x = torch.randn(40, 32, generator=generator)
    peak, found = float(x.abs().max()), {}
    for headroom in (1.0, 4.0):
        stream = RoundedStream(lambda _: FP4_NV, {}, headroom)
        stream.measured([FREE], peak)
        found[headroom] = [stream.rounded("free", factor * x) for factor in (1, 3)]
    assert torch.equal(found[1.0][0], found[4.0][0])
    kept, cut = (3 * x - found[headroom][1] for headroom in (4.0, 1.0))
    assert float(kept.square().sum()) < 0.5 * float(cut.square().sum())


def test_steps_of_tokens_need_no_scale(generator):
    x, stream = torch.randn(5, 32, generator=generator), RoundedStream(lambda _: INT8_TOKEN, {}, 1.0)
    assert not stream.measures([FREE])
    assert torch.equal(stream.rounded("free", x), rounded(x, INT8_TOKEN))
