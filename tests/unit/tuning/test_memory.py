"""What tuning holds, keeps aside or computes twice to stay within limits, and what is said where none suffices."""

import math
from functools import partial

import pytest
import torch

from families import config_of, random_model
from nearplane.calibration.states_on_disk import StatesOnDisk
from nearplane.calibration.states_on_host import StatesOnHost
from nearplane.errors import RecipeError
from nearplane.models.model import open_model
from nearplane.system.device import Device
from nearplane.system.sizes import Limits
from nearplane.tuning.memory import ALLOCATOR_FACTOR, Counts, fits, needed
from nearplane.tuning.settings import Split

WINDOWS = torch.ones(60, 40, dtype=torch.int64)
CUT = Split(windows=WINDOWS, training=48, batch=6, samples=60, found=60, steps=1)
NOTHING = Counts(0, 0)
START = 10**9  # resident bytes


@pytest.fixture
def model(tmp_path):
    random_model(config_of("llama")).float().save_pretrained(tmp_path)
    return open_model(str(tmp_path))


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the free bytes of the device and of the host."""
    monkeypatch.setattr("nearplane.tuning.memory.resident", lambda: START)

    def has(free, host=0):
        monkeypatch.setattr(Device, "free", lambda _: free)
        monkeypatch.setattr("nearplane.tuning.memory.free_memory", lambda: host)

    return has


def live(most):
    """Return the live bytes whose bound on a GPU is just within `most`."""
    return math.ceil(ALLOCATOR_FACTOR * most) + 1


def test_what_is_not_quantized_in_blocks_counts_and_so_do_codes_and_steps(tmp_path):
    """Layers that are ignored are held in float32, as experts in one tensor are."""
    random_model(config_of("llama")).float().save_pretrained(tmp_path)
    model = open_model(str(tmp_path), ignore=["mlp", "[qkv]_proj"])
    held = sum(p.numel() for p in model.network.parameters()) - sum(
        layer.shape[0] * layer.shape[1] for layer in model.layers
    )
    assert model.layers
    before = needed(model, WINDOWS[:1], batch=1, trained=NOTHING)
    assert 4 * held < before.streamed < before.held
    after = needed(model, WINDOWS[:1], batch=1, trained=Counts(100, 10))
    assert after.streamed - before.streamed == 100 * 4 + 10 * 32


def test_hidden_states_that_do_not_fit_on_a_gpu_lie_on_its_host(machine, model, caplog):
    needs = needed(model, WINDOWS, batch=6, trained=NOTHING)
    pinned = 22 * needs.pinned  # batches: 10 of each network, and the 2 that are measured
    assert needs.pinned == 2 ** math.ceil(math.log2(needs.sent / 4))  # as torch rounds up
    assert pinned > needs.states
    for free, host, keep in (
        (live(needs.streamed + needs.states), 0, list),
        (live(needs.streamed + needs.sent), pinned, StatesOnHost),
        (live(needs.streamed + needs.sent), pinned - 1, StatesOnDisk),
    ):
        machine(free, host)
        with caplog.at_level("INFO", "nearplane"):
            found = fits(model, CUT, NOTHING, Device(torch.device("cuda"))).keep
        assert (found.func if isinstance(found, partial) else found) is keep
        assert ("of the host's for hidden states" in caplog.messages[-1]) == (keep is StatesOnHost)
        assert ("in a file" in caplog.messages[-1]) == (keep is StatesOnDisk)
        assert caplog.messages[-1].startswith("tuning takes at most ")
    machine(needs.streamed, pinned)
    with pytest.raises(RecipeError, match="of memory are free on cuda, which is too little"):
        fits(model, CUT, NOTHING, Device(torch.device("cuda")))


def test_a_limit_moves_hidden_states_to_a_file_and_the_smallest_that_suffices_is_named(
    machine, model, caplog, tmp_path
):
    windows = WINDOWS.repeat(200, 1)
    cut = Split(windows=windows, training=11994, batch=6, samples=12000, found=12000, steps=1)
    needs, cpu = needed(model, windows, batch=6, trained=NOTHING), Device(torch.device("cpu"))
    assert needs.states > needs.streamed
    machine(2**40)
    assert fits(model, cut, NOTHING, cpu) == (True, list)
    enough = live(START + needs.streamed + needs.states)
    assert fits(model, cut, NOTHING, cpu, Limits(host=enough)) == (False, list)
    with caplog.at_level("INFO", "nearplane"):
        found = fits(model, cut, NOTHING, cpu, Limits(host=enough - 100), tmp_path)
    assert (found.keep.func, found.keep.args) == (StatesOnDisk, (tmp_path,))
    assert caplog.messages[-1].endswith("; hidden states lie in a file")
    with pytest.raises(
        RecipeError, match=r"--memory 1\.\d+ GB is too small: tuning needs .* Use --memory (1\.\d\d)GB"
    ) as caught:
        fits(model, cut, NOTHING, cpu, Limits(host=START + 1000))
    named = float(str(caught.value).rpartition("--memory ")[2].removesuffix("GB.")) * 1e9
    assert not fits(model, cut, NOTHING, cpu, Limits(host=int(named))).hold
