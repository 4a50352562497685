"""The device of a verb: its name, in what is computed there, what is free."""

import pytest
import torch

from nearplane import RecipeError
from nearplane.system.device import Device
from nearplane.system.ranks import Ranks

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


@pytest.mark.parametrize("name", ["mps", "xpu", "xpu:1"])
def test_a_device_without_float64_is_refused_and_the_reason_given(name):
    with pytest.raises(
        RecipeError, match=f"^--device {name}: .* need float64, which this device does not have. Only load and generate"
    ):
        Device.named(name)
    with pytest.raises(RecipeError, match=f"^--device {name}: this machine has no such device that torch can use. Use"):
        Device.named(name, in_float64=False)


@pytest.mark.parametrize(
    ("place", "stored", "computed"),
    [
        ("cpu", torch.bfloat16, torch.float32),
        ("cpu", torch.float64, torch.float32),
        ("cuda:1", torch.bfloat16, torch.bfloat16),
        ("cuda:1", torch.float16, torch.float32),
        ("cuda:1", torch.float32, torch.float32),
    ],
)
def test_blocks_run_in_float32_and_in_bfloat16_on_a_gpu(place, stored, computed):
    assert Device(torch.device(place)).compute_dtype(stored) == computed


def test_a_dtype_that_is_asked_for_holds_on_every_device_and_is_said_where_it_rounds(caplog):
    half = Device.named("cpu", "float16")
    assert half.compute_dtype(torch.bfloat16) == torch.float16
    assert (half.asked_dtype, Device.named("cpu").asked_dtype) == ("float16", "auto")
    half.say_dtype(torch.float16)
    assert not caplog.messages
    half.say_dtype(torch.bfloat16)
    assert caplog.messages == ["--compute-dtype float16 rounds the model's weights, which are in bfloat16"]


def test_a_record_names_the_dtype_unless_it_is_float32_on_the_cpu():
    assert Device.named("cpu").recorded_dtype(torch.bfloat16) == "auto"
    assert Device.named("cpu", "float32").recorded_dtype(torch.bfloat16) == "auto"
    assert Device.named("cpu", "bfloat16").recorded_dtype(torch.bfloat16) == "bfloat16"
    assert Device(torch.device("cuda")).recorded_dtype(torch.float32) == "float32"


def test_a_record_has_the_number_of_a_gpu_and_runs_go_on_on_any_of_its_model(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda place: "NVIDIA H100")
    devices = [Device(torch.device(name)) for name in ("cuda", "cuda:0", "cuda:1")]
    assert [device.model() for device in devices] == [f"{name}, NVIDIA H100" for name in ("cuda", "cuda:0", "cuda:1")]
    assert {device.run_input() for device in devices} == {"cuda, NVIDIA H100"}
    assert Device(torch.device("cuda:1"), torch.float32).run_input() == "cuda, NVIDIA H100, float32"
    assert Device.named("cpu").run_input() == Device.named("cpu").model() == "cpu"


def test_what_is_free_is_asked_of_the_device(monkeypatch):
    monkeypatch.setattr("nearplane.system.device.free_memory", lambda: 7)
    assert Device(torch.device("cpu")).free() == 7
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda place: 5)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda place: 3)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda place: (100 * place.index, 1000))
    assert Device(torch.device("cuda", 1)).free() == 102


def test_processes_on_a_machine_share_its_memory_and_have_a_gpu_each(monkeypatch):
    several = Ranks()
    several.world, several.local, several.local_world = 4, 1, 2
    monkeypatch.setattr("nearplane.system.device.free_memory", lambda: 7)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.empty", lambda *size, **where: None)  # as if the device were there
    assert Device(torch.device("cpu"), ranks=several).free() == 3
    assert Device.named("cuda", ranks=several) == Device(torch.device("cuda:1"), ranks=several)
    with pytest.raises(RecipeError, match="several processes take a GPU each"):
        Device.named("cuda:1", ranks=several)
