"""What passes between ranks that compute on GPUs, pretended ones: the same collectives on all, sums without a copy."""

import json
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

import nearplane
from device_runs import RUNS, TOKENS, save_model, stored
from nearplane.system import process_group
from nightly import daily
from pretended import Pretend, pretended
from pretended_kernels import compiled
from several import all_well, on_ranks


class Nccl:
    """Stands in for nccl's group: takes tensors on pretended GPUs only, and passes on what they hold."""

    def __init__(self, store, ranks):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        self._group = dist.ProcessGroupGloo(store, ranks.rank, ranks.world, options)

    def broadcast(self, tensors, *options):
        return self._group.broadcast(self._held(tensors), *options)

    def allreduce(self, tensors, *options):
        return self._group.allreduce(self._held(tensors), *options)

    @staticmethod
    def _held(tensors):
        assert all(isinstance(tensor, Pretend) for tensor in tensors), "nccl takes no tensor of the CPU"
        return [tensor.held for tensor in tensors]


def recording(run, model, out):
    """Return a function that quantizes on a rank with a GPU of its own, and prints all exchanges."""

    def recorded(rank):
        exchange, seen = process_group.ProcessGroup._exchange, []

        def noted(group, collective, *words):
            tensors = [each for word in words for each in _flat(word) if isinstance(each, Tensor)]
            forms = [(str(each.device), str(each.dtype), list(each.shape)) for each in tensors]
            seen.append([type(collective.__self__).__name__, collective.__name__, *sorted(forms)])
            exchange(group, collective, *words)

        with (
            pretended(),
            compiled(),
            mock.patch.multiple(process_group, NCCL="pretend", _nccl=Nccl),
            mock.patch.multiple(process_group.ProcessGroup, _exchange=noted, gpu=0),
        ):
            nearplane.quantize(model, out, calibration=TOKENS, device="pretend:0", **RUNS[run][2])
        print(json.dumps(seen))

    return recorded


def _flat(word):
    return [each for one in word for each in _flat(one)] if isinstance(word, (list, tuple)) else [word]


@pytest.mark.parametrize("run", daily(("grid", "rate", "experts"), ("grid",)))
def test_all_ranks_exchange_the_same_and_sums_stay_on_the_gpu(run, tmp_path):
    model = save_model(run, tmp_path / "model")
    nearplane.quantize(model, tmp_path / "cpu", calibration=TOKENS, device="cpu", **RUNS[run][2])
    ended = on_ranks(2, recording(run, model, tmp_path / "out"))
    all_well(ended)
    first, second = (json.loads(printed.splitlines()[-1]) for _, printed, _ in ended)
    assert first == second
    by_nccl = [each for each in first if each[0] == "Nccl"]
    assert all(device == "pretend:0" for _, _, *forms in by_nccl for device, _, _ in forms)
    summed = [form for _, name, *forms in first if name == "allreduce" for form in forms]
    matrices = {(device, dtype) for device, dtype, shape in summed if len(shape) == 2}
    assert matrices == {("pretend:0", "torch.int64")}
    assert stored(tmp_path / "out") == stored(tmp_path / "cpu")
