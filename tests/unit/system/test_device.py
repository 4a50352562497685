"""The device of a verb: its name, in what is computed there, what is free."""

import pytest
import torch

from nearplane import RecipeError
from nearplane.system.device import Device

CUDA = torch.cuda.is_available()


def test_auto_is_the_gpu_where_there_is_one():
    assert Device.named("auto").place.type == ("cuda" if CUDA else "cpu")
    assert str(Device.named("cpu")) == str(Device.named(torch.device("cpu"))) == "cpu"


@pytest.mark.parametrize("name", ["gpu", "", "cpu:x", "meta", 7.5])
def test_a_name_that_torch_does_not_know_is_refused(name):
    with pytest.raises(
        RecipeError, match=r"^device is .*; expected auto, cpu, cuda, or one of several GPUs as cuda:1\.$"
    ):
        Device.named(name)


@pytest.mark.parametrize("name", ["cuda:99", "vulkan", "hpu", *([] if CUDA else ["cuda"])])
def test_a_device_that_is_not_there_is_refused(name):
    kind = "CUDA device" if name.startswith("cuda") else "device"
    with pytest.raises(RecipeError, match=f"^--device {name}: this machine has no such {kind} that torch can use. Use"):
        Device.named(name)


def test_blocks_run_in_float32_on_the_cpu_and_elsewhere_in_the_models_dtype():
    assert Device(torch.device("cpu")).compute_dtype(torch.bfloat16) == torch.float32
    assert Device(torch.device("cuda", 1)).compute_dtype(torch.bfloat16) == torch.bfloat16


def test_what_is_free_is_asked_of_the_device(monkeypatch):
    monkeypatch.setattr("nearplane.system.device.free_memory", lambda: 7)
    assert Device(torch.device("cpu")).free() == 7
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda place: 5)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda place: 3)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda place: (100 * place.index, 1000))
    assert Device(torch.device("cuda", 1)).free() == 102
