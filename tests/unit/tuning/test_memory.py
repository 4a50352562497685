"""What tuning holds, keeps aside or computes twice to stay within limits, and what is said where none suffices."""

import math
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from families import config_of, random_model
from nearplane.calibration.states_on_disk import StatesOnDisk
from nearplane.calibration.states_on_host import StatesOnHost
from nearplane.errors import RecipeError
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.scale import Steps
from nearplane.models.model import open_model
from nearplane.number_formats import number_format
from nearplane.system.device import Device
from nearplane.system.sizes import Limits
from nearplane.tuning.memory import ALLOCATOR_FACTOR, bytes_of, fits, needed
from nearplane.tuning.parameters import TunedBlocks, TunedMatrix
from nearplane.tuning.schedule import FixedSteps
from nearplane.tuning.settings import Split

WINDOWS = torch.ones(60, 40, dtype=torch.int64)
CUT = Split(windows=WINDOWS, training=48, batch=6, samples=60, found=60, schedule=FixedSteps(1))
NOTHING = 0
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
    after = needed(model, WINDOWS[:1], batch=1, trained=1000)
    assert after.streamed - before.streamed == after.held - before.held == 1000


def test_codes_and_steps_take_what_tuned_layers_hold(generator):
    """Codes with their positions and the best ones; steps with what training needs of them."""
    for name, tuned_type, of_codes in (("int3-g32", TunedMatrix, 6), ("int3-g32-min", TunedBlocks, 6)):
        format = number_format(name)
        W = torch.randn(64, 128, generator=generator)
        grid, _ = FITS[format.fit](W, torch.ones(128), Steps(format=format, search="mse", storage=torch.float16))
        matrix = QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)
        words = ("it", matrix) if tuned_type is TunedMatrix else (matrix,)
        tuned = tuned_type(*words, torch.float16, codes=True)
        held = [*vars(tuned).values(), *(getattr(tuned._grid, each.name) for each in fields(tuned._grid))]
        bytes_held = sum(each.nbytes for each in held if isinstance(each, torch.Tensor) and each.dim() > 1)
        bytes_held += sum(each.nbytes for each in tuned.state().values())  # the best state
        bytes_held += 3 * tuned.trained()["steps"].nbytes  # its gradient and two averages
        known = SimpleNamespace(number_format=format)
        counted = bytes_of([(known, (64, 128))])
        assert 0.8 * counted < bytes_held <= counted, name
        assert counted >= of_codes * W.numel()
        kept = sum(leaf.nbytes for leaf in tuned.trained().values()) + 2 * tuned.trained()["steps"].nbytes
        assert kept <= bytes_of([(known, (64, 128))], returns=True) - counted <= 2 * kept


def test_hidden_states_that_do_not_fit_on_a_gpu_lie_on_its_host(machine, model, caplog):
    needs = needed(model, WINDOWS, batch=6, trained=NOTHING, on_cpu=False)
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
        assert caplog.messages[-1].startswith("training takes at most ")
    machine(needs.streamed, pinned)
    with pytest.raises(RecipeError, match="of memory on cuda are free or this program's, which is too little"):
        fits(model, CUT, NOTHING, Device(torch.device("cuda")))


def test_a_limit_moves_hidden_states_to_a_file_and_the_smallest_that_suffices_is_named(
    machine, model, caplog, tmp_path
):
    windows = WINDOWS.repeat(200, 1)
    cut = Split(windows=windows, training=11994, batch=6, samples=12000, found=12000, schedule=FixedSteps(1))
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
        RecipeError, match=r"--memory 1\.\d+ GB is too small: tuning needs up to .* Use --memory (1\.\d\d)GB"
    ) as caught:
        fits(model, cut, NOTHING, cpu, Limits(host=START + 1000))
    named = float(str(caught.value).rpartition("--memory ")[2].partition("GB")[0]) * 1e9
    assert not fits(model, cut, NOTHING, cpu, Limits(host=int(named))).hold
