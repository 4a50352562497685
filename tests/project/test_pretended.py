"""The pretended GPU of the tests refuses what CUDA refuses, counts what it says, and computes what the CPU computes."""

import copy
import io
import os
from dataclasses import asdict
from threading import Thread

import pytest
import torch

from nearplane import RecipeError
from nearplane.system.device import Device
from pretended import Gpu, Pretend, pretended
from traffic import ELSEWHERE, PACKAGE, Traffic


@pytest.fixture
def gpu():
    with pretended() as opened:
        yield opened


def on_gpu(*values, dtype=torch.float32):
    """Return values on the card, nothing of it counted."""
    return Pretend(torch.tensor(values, dtype=dtype), 0)


def check(gpu: Gpu, **counts: int) -> None:
    """Compare all counts: those that are not named are 0."""
    assert {name: number for name, number in asdict(gpu.total).items() if number} == counts


def of_the_package(source: str, name: str):
    """Return a function as if it stood in the package's `lattice/made_up.py`."""
    scope = {"torch": torch}
    exec(compile(source, PACKAGE + "lattice/made_up.py", "exec"), scope)
    return scope[name]


def test_a_tensor_says_that_it_lies_on_the_card(gpu):
    x = torch.zeros(3, device="pretend")
    assert (str(x.device), x.is_cuda, x.is_meta) == ("pretend:0", False, False)
    assert str((x + 1)[1:].device) == str(torch.ones_like(x).device) == "pretend:0"
    assert str(x.cpu().device) == str(torch.zeros_like(x, device="cpu").device) == "cpu"


def test_the_commands_take_it_as_a_device_while_it_is_present(gpu):
    device = Device.named("pretend:0")
    assert device.free() == 80 << 30
    assert not device.on_cpu
    assert device.model() == "pretend:0, Pretended GPU"
    with pytest.raises(RecipeError, match="this machine has no such device"):
        Device.named("pretend:1")


def test_without_it_nothing_can_be_made_on_it():
    with pretended():
        place = torch.device("pretend:0")
    with pytest.raises(RecipeError, match="this machine has no such device"):
        Device.named("pretend:0")
    with pytest.raises(RuntimeError, match="No pretended GPU is present"):
        torch.zeros(1).to(place)
    assert not torch.accelerator.is_available()


@pytest.mark.parametrize(
    "mix",
    [
        lambda mine, cpu: mine + cpu,
        lambda mine, cpu: cpu.add_(mine),
        lambda mine, cpu: torch.zeros(()).add_(mine.sum()),
        lambda mine, cpu: mine @ cpu,
        lambda mine, cpu: torch.where(mine > 0, mine, cpu),
        lambda mine, cpu: torch.cat([mine, cpu]),
        lambda mine, cpu: cpu[mine.long()],
        lambda mine, cpu: mine.index_put_((mine.long(),), cpu),
        lambda mine, cpu: mine.gather(0, cpu.long()),
        lambda mine, cpu: torch.nn.Linear(3, 1)(mine),
        lambda mine, cpu: mine * mine.to("pretend:1"),
    ],
)
def test_two_devices_in_one_operation_are_refused(mix):
    with (
        pretended(cards=2),
        pytest.raises(RuntimeError, match="to be on the same device, but found at least two devices"),
    ):
        mix(on_gpu(0, 1, 2), torch.ones(3))


def test_a_generator_of_the_cpu_and_numpy_are_refused(gpu):
    with pytest.raises(RuntimeError, match="Expected a 'pretend' device type for generator but found 'cpu'"):
        torch.randn(3, device="pretend:0", generator=torch.Generator())
    with pytest.raises(TypeError, match="can't convert pretend:0 device type tensor to numpy"):
        on_gpu(1).numpy()
    with pytest.raises(TypeError, match="can't convert pretend:0 device type tensor to numpy"):
        torch.from_numpy(memoryview(on_gpu(1).__array__()))


def test_numbers_of_the_cpu_beside_tensors_are_taken_and_cost_nothing(gpu):
    assert (on_gpu(1, 2) * torch.tensor(3)).cpu().tolist() == [3, 6]
    check(gpu, launches=1, to_host=1, to_host_bytes=8, waiting=1)


def test_launches_are_operations_that_compute(gpu):
    x = torch.empty(4, device="pretend:0").zero_()
    (x.view(2, 2).t().unsqueeze_(0) + 1).exp_()
    check(gpu, launches=3)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0]),
        lambda x: x.tolist(),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.unique_consecutive(),
        lambda x: x.long().bincount(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.linalg.cholesky(x.diag()),
        lambda x: torch.linalg.eigh(x.diag()),
        lambda x: torch.linalg.cholesky_ex(x.diag(), check_errors=True),
        lambda x: torch.get_device_module(x.device).synchronize(),
    ],
)
def test_waiting_for_values_is_counted_as_a_synchronization(gpu, wait):
    wait(on_gpu(1, 2, 3))
    assert gpu.total.synchronizations == 1
    gpu.forget()
    with torch.inference_mode():
        wait(on_gpu(1, 2, 3))
    assert gpu.total.synchronizations == 1
    assert not gpu.total.to_host


@pytest.mark.parametrize(
    "go_on",
    [
        lambda x: x.max(),
        lambda x: x[0],
        lambda x: x.masked_fill(x > 0, 1.0),
        lambda x: x.__setitem__(x > 0, 1.0),
        lambda x: x.repeat_interleave(2),
        lambda x: x.repeat_interleave(torch.ones_like(x).long(), output_size=3),
        lambda x: torch.linalg.cholesky_ex(x.diag()),
        lambda x: x[torch.zeros_like(x).long()],
    ],
)
def test_what_needs_no_value_is_no_synchronization(gpu, go_on):
    go_on(on_gpu(1, 2, 3))
    assert (gpu.total.synchronizations, gpu.total.waiting) == (0, 0)


def test_copies_to_the_card_are_counted_with_their_bytes(gpu):
    torch.zeros(3).to("pretend:0")
    torch.tensor([1.0], device="pretend:0")
    torch.zeros(2, device="pretend:0").copy_(torch.zeros(2, dtype=torch.float64))
    on_gpu(1, 2)[torch.tensor([0])]  # an index
    check(gpu, launches=2, to_device=4, to_device_bytes=12 + 4 + 8 + 8, waiting=4)


def test_copies_to_the_cpu_are_counted_with_their_bytes(gpu):
    on_gpu(1, 2).cpu()
    on_gpu(1, 2).to("cpu", torch.float64)
    torch.zeros(2).copy_(on_gpu(1, 2))
    torch.save(on_gpu(1), io.BytesIO())
    check(gpu, to_host=4, to_host_bytes=8 + 16 + 8 + 4, waiting=4)


def test_only_pinned_memory_is_copied_without_waiting(gpu):
    torch.zeros(3).to("pretend:0", non_blocking=True)
    assert gpu.total.waiting == 1
    pinned, made = torch.zeros(3).pin_memory(), torch.empty(3, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert made.is_pinned()
    assert pinned.pin_memory() is pinned
    assert not torch.zeros(3).is_pinned()
    assert not on_gpu(1).is_pinned()
    gpu.forget()
    assert pinned.to("pretend:0", non_blocking=True).to("cpu", non_blocking=True).is_pinned()
    made.copy_(on_gpu(1, 2, 3), non_blocking=True)
    check(gpu, to_device=1, to_device_bytes=12, to_host=2, to_host_bytes=24, pinned=1, pinned_bytes=12)
    pinned.to("pretend:0")
    assert gpu.total.waiting == 1
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        on_gpu(1).pin_memory()


def test_pinned_tensors_are_counted(gpu):
    torch.zeros(3).pin_memory()
    torch.empty(2, pin_memory=True)
    check(gpu, pinned=2, pinned_bytes=20)


def test_counts_are_kept_by_function_of_the_package(gpu):
    read = of_the_package("def read(rows):\n  return [(lambda: row.item())() for row in rows]", "read")
    read(on_gpu(1, 2, 3))
    on_gpu(1).item()
    assert gpu.traffic == {
        "lattice/made_up.py read": Traffic(synchronizations=3),
        ELSEWHERE: Traffic(synchronizations=1),
    }
    assert gpu.of("lattice/").synchronizations == 3
    gpu.forget()
    assert gpu.traffic == {}


def test_a_backward_pass_counts_for_the_function_that_asks_for_it(gpu):
    learn = of_the_package("def learn(x):\n  return (x * x).sum().backward()", "learn")
    x = on_gpu(1, 2).requires_grad_()
    learn(x)
    assert x.grad.cpu().tolist() == [2, 4]
    assert gpu.of("lattice/made_up.py learn").launches >= 5
    assert gpu.of(ELSEWHERE).launches == 0


def test_other_threads_are_counted_as_well(gpu):
    send = of_the_package(
        "def send():\n  return torch.zeros(3).pin_memory().to('pretend:0', non_blocking=True)", "send"
    )
    thread = Thread(target=send)
    thread.start()
    thread.join()
    assert gpu.of("lattice/made_up.py send") == Traffic(to_device=1, to_device_bytes=12, pinned=1, pinned_bytes=12)


def test_live_bytes_are_those_of_storages_and_their_peak_stays(gpu):
    (card,) = gpu.cards
    x = torch.zeros(100, device="pretend:0")
    view = x[10:].view(9, 10)
    assert (card.live, card.peak) == (400, 400)
    y = x + 1
    assert torch.get_device_module(x.device).memory_allocated() == card.live == 800
    del x, y
    assert (card.live, gpu.peak) == (400, 800)
    gpu.forget()
    assert gpu.peak == 400
    del view
    assert card.live == 0


def test_tensors_that_only_torch_holds_are_live(gpu):
    x = torch.zeros(100, device="pretend:0", requires_grad=True)
    y = (x.exp() * 2).sum()  # keeps exp(x) for the backward pass
    assert gpu.cards[0].live == 804
    y.backward()
    del y
    assert gpu.cards[0].live == 800
    x.grad = None
    assert gpu.cards[0].live == 400


def test_results_that_grow_are_live_with_all_their_bytes(gpu):
    x = torch.empty(0, device="pretend:0")
    torch.ones(100, device="pretend:0", out=x)
    assert (x.shape, gpu.cards[0].live) == ((100,), 400)


def test_tensors_are_made_in_inference_mode_as_well(gpu):
    x = on_gpu(1, 2, 3)
    with torch.inference_mode():
        assert x[1:].sum().item() == 5
        gpu.forget()
        made = [
            torch.arange(4, device="pretend:0"),
            torch.eye(2, device="pretend:0"),
            torch.ones(4, device="pretend:0"),
        ]
    assert [each.numel() for each in made] == [4, 4, 4]
    check(gpu, launches=3)


def test_beyond_its_memory_torchs_own_error_is_raised(gpu):
    card, runtime = gpu.cards[0], torch.get_device_module("pretend")
    card.memory = 1000
    x = torch.zeros(200, device="pretend:0")
    assert runtime.mem_get_info() == (200, 1000)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate 800 bytes.* of which 200 are free"
    ):
        x + 1
    del x
    assert torch.zeros(249, device="pretend:0").sum().item() == 0


def test_a_second_card_computes_and_has_memory_of_its_own():
    with pretended(cards=2) as gpu:
        x = torch.zeros(100).to("pretend:1") + 1
        assert ([card.peak for card in gpu.cards], str(x.device)) == ([0, 800], "pretend:1")
        gpu.forget()
        assert str(x.to("pretend:0").device) == "pretend:0"
        check(gpu, launches=1)
        x.requires_grad_().square().sum().backward()
        assert str(x.grad.device) == "pretend:1"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_are_forked_afterwards_can_still_learn():
    """Torch forbids that once it has threads of its own for a device."""
    with pretended():
        torch.ones(1, device="pretend:0", requires_grad=True).backward()
    child = os.fork()
    if not child:
        x = torch.ones(1, requires_grad=True)
        x.backward()
        os._exit(int(x.grad))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_what_another_stream_writes_is_read_only_after_waiting_for_it(gpu):
    runtime = torch.get_device_module("pretend")
    side, kept = runtime.Stream(), torch.zeros(3).pin_memory()

    def sent():
        side.wait_stream(runtime.current_stream())
        with runtime.stream(side):
            return kept.to("pretend:0", non_blocking=True)

    x = sent()
    with pytest.raises(RuntimeError, match="add reads what another stream writes"):
        x + 1
    runtime.current_stream().wait_stream(side)
    x.record_stream(runtime.current_stream())
    y = x + 1
    assert y.sum().item() == 3
    with runtime.stream(side), pytest.raises(RuntimeError, match="mul_ reads what another stream writes"):
        y.mul_(2)
    assert runtime.current_stream() is runtime.default_stream()


def test_modules_and_their_copies_are_on_the_card(gpu):
    module = torch.nn.Linear(3, 2).to("pretend:0")
    both = [module, copy.deepcopy(module)]
    for each in both:
        assert isinstance(each.weight, torch.nn.Parameter)
        assert each(on_gpu(1, 2, 3)).shape == (2,)
    module.weight.data = module.weight.data.to(torch.float64)
    assert (module.weight.dtype, module.weight.cpu().dtype, both[1].weight.dtype) == (
        torch.float64,
        torch.float64,
        torch.float32,
    )
    assert module.cpu().weight.device.type == "cpu"


def test_what_is_saved_is_loaded_on_the_cpu(gpu):
    file = io.BytesIO()
    torch.save({"x": on_gpu(1, 2)}, file)
    file.seek(0)
    assert torch.load(file)["x"].tolist() == [1, 2]


@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients_are_those_of_the_cpu_to_the_last_bit(gpu, masked):
    """Torch would take another kernel for a device that it does not know."""
    generator, found = torch.Generator().manual_seed(0), []
    given = torch.randn(3, 1, 4, 48, 32, generator=generator)
    mask = (torch.rand(48, 48, generator=generator) > 0.5) | torch.eye(48).bool()
    for place in ("cpu", "pretend:0"):
        query, key, value = (each.to(place).requires_grad_() for each in given)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask.to(place) if masked else None, is_causal=not masked
        )
        attended.square().sum().backward()
        found.append([each.detach().cpu() for each in (attended, query.grad, key.grad, value.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_optimizer_takes_the_same_step(gpu):
    found = []
    for place in ("cpu", "pretend:0"):
        x = torch.ones(3, device=place, requires_grad=True)
        optimizer = torch.optim.AdamW([x], fused=True)
        for _ in range(2):
            x.square().sum().backward()
            optimizer.step()
        found.append(x.detach().cpu())
    assert torch.equal(*found)
