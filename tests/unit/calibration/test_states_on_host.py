"""Hidden states on the host are a list of tensors of a GPU, which are sent one ahead and never wait."""

import pytest
import torch

from nearplane.calibration.states_on_host import StatesOnHost
from pretended import pretended

GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture
def gpu():
    with pretended() as card:
        yield card


def made(count, size=6):
    return [torch.randn(2, size, generator=GENERATOR).to("pretend:0") for _ in range(count)]


def same(states, expected):
    return len(states) == len(expected) and all(
        a.device == b.device and torch.equal(a, b) for a, b in zip(states, expected, strict=True)
    )


def test_it_behaves_as_a_list(gpu):
    states, expected = made(4), []
    on_host = StatesOnHost(states[:3])
    expected = states[:3]
    assert same(on_host, expected)
    for change in (
        lambda each: each.append(states[3]),
        lambda each: each.__setitem__(1, states[3]),
        lambda each: each.__setitem__(-1, states[0]),
        lambda each: each.insert(0, states[2]),
        lambda each: each.pop(1),
        lambda each: each.__delitem__(0),
    ):
        change(on_host)
        change(expected)
        assert same(on_host, expected)
    with pytest.raises(IndexError):
        on_host[len(expected)]


def test_an_item_that_is_on_its_way_and_changes_is_sent_again(gpu):
    old, new = made(2), made(1)[0]
    on_host = StatesOnHost(old)
    assert torch.equal(on_host[0], old[0])  # the next one is on its way
    on_host[1] = new
    assert torch.equal(on_host[1], new)


def test_what_is_read_belongs_to_the_reader(gpu):
    (state,) = made(1)
    on_host = StatesOnHost([state])
    on_host[0].zero_()
    assert torch.equal(on_host[0], state)


def test_a_pass_sends_every_item_once_and_waits_for_none(gpu):
    """It is read in order, and each item is replaced behind the reader."""
    states = made(5)
    on_host = StatesOnHost(states)
    gpu.forget()
    for index, state in enumerate(on_host):
        on_host[index] = state + 1
    moved = gpu.total
    assert (moved.to_device, moved.to_host, moved.waiting) == (5, 5, 0)
    assert moved.pinned == 0  # items keep their memory
    assert same(on_host, [state + 1 for state in states])


def test_two_items_at_most_are_on_the_device(gpu):
    on_host = StatesOnHost(made(6, 1000))
    before = gpu.cards[0].live
    gpu.forget()
    for index in 3 * [*range(len(on_host))]:
        on_host[index]
    assert gpu.peak - before == 2 * 2 * 1000 * 4
