"""Work of tuning beside that of the quantization: what makes it more, and the least that is allowed."""

from types import SimpleNamespace

import pytest
import torch

from families import config_of, random_model
from nearplane.models.model import open_model
from nearplane.planning.request import resolved
from nearplane.planning.tuning_cost import tuning_cost
from nearplane.recipe.recipe import Recipe
from nearplane.system.device import Device
from nearplane.tuning.schedule import SHORTEST_STEPS


@pytest.fixture
def cost_of(tmp_path):
    """Return a function from windows of the run, and of tuning, to the cost."""
    random_model(config_of("llama")).save_pretrained(tmp_path)
    model = open_model(str(tmp_path))
    plan = resolved(model, Recipe.from_spellings(bits=4, group_size=16))

    def cost(windows=64, samples=320, seqlen=64):
        record = SimpleNamespace(windows=windows, extra_windows=4, seqlen=seqlen)
        return tuning_cost(model, plan, record, Device(torch.device("cpu")), samples=samples, seqlen=seqlen)

    return cost


def test_a_longer_run_allows_more_steps_and_a_multiple_of_it_more_than_one(cost_of):
    assert cost_of(128).schedule(9).most > cost_of(64).schedule(9).most
    assert cost_of().schedule(20).most > cost_of().schedule(10).most
    assert cost_of().step == cost_of(samples=1000).step
    assert cost_of().around < cost_of(samples=1000).around
    assert cost_of().schedule(0.01) is None


def test_the_least_that_is_named_suffices_and_a_tenth_less_does_not(cost_of):
    cost = cost_of()
    begun = cost.schedule(cost.enough)
    assert begun is not None
    assert begun.most >= SHORTEST_STEPS
    assert cost.schedule(cost.enough - 0.1) is None
    assert f"with {SHORTEST_STEPS} steps about {cost.enough:.1f} times" in cost.least()
