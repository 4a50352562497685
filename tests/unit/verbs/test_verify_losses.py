"""How closely losses must agree with the record: to the last digits on the device of the run, elsewhere by its dtype."""

from dataclasses import replace

import pytest
import torch

from nearplane import Recipe
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.system.device import Device
from nearplane.system.ranks import ONE_PROCESS
from nearplane.verbs.verify import _device
from nearplane.verbs.verify_losses import Agreement, _compare

CPU = Device(torch.device("cpu"))
LAYER = LayerRecord(
    name="x", out_features=4, in_features=4, loss=1.0, relative_loss=0.1, row_losses=(1.0,), damped_loss=1.1, correction=0.5,
    damp=0.01, sweep_damp=0.01, dead=0, tokens=100, order="given", format="int4-g4", seconds=1.0, nearest_loss=2.0,
    clipped=0.25, clipped_rows=0.5, gamma=1.5, pruned=1,
)  # fmt: skip


def ran_on(device: str, dtype: str = "auto") -> RunRecord:
    """Return the record of a run on a device."""
    return RunRecord(
        recipe=Recipe(), source="", versions={}, device=device, windows=1, seqlen=1, tokens=1, compute_dtype=dtype
    )


def faults(agreement: Agreement, **changes: float) -> int:
    return len([*_compare(replace(LAYER, **changes), LAYER, agreement)])


@pytest.mark.parametrize(
    ("record", "there", "expected"),
    [
        (ran_on("cpu"), "cpu", Agreement(1e-6)),
        (ran_on("cpu"), "cuda", Agreement(0.01, "cuda, H100 in float32", "cpu")),
        (ran_on("cuda:3, H100", "bfloat16"), "cuda", Agreement(1e-6)),
        (ran_on("cuda, A100", "bfloat16"), "cuda:1", Agreement(0.5, "cuda:1, H100 in bfloat16", "cuda, A100")),
        (ran_on("cuda, A100", "float32"), "cpu", Agreement(0.01, "cpu in float32", "cuda, A100")),
        (ran_on("cuda"), "cuda", Agreement(0.5, "cuda, H100 in bfloat16", "cuda")),  # no older version recorded more
        (ran_on("cuda"), "cpu", Agreement(0.01, "cpu in float32", "cuda")),
    ],
)
def test_the_tolerance_depends_on_both_devices_and_the_dtype(monkeypatch, record, there, expected):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda place: "H100")
    monkeypatch.setattr("torch.empty", lambda *size, **where: None)  # as if the device were there
    device = _device(record, there, ONE_PROCESS)
    assert Agreement.on(device, record, torch.bfloat16, None) == expected
    assert Agreement.on(device, record, torch.bfloat16, 0.2) == replace(expected, tolerance=0.2)


@pytest.mark.parametrize("device", ["cuda:7, H100", "gpu", ""])
def test_by_default_the_device_of_the_run_is_taken_where_it_is_there_and_else_that_of_this_machine(device):
    assert _device(ran_on("cpu"), "auto", ONE_PROCESS) == Device(CPU.place, torch.float32)
    if not torch.cuda.is_available():
        assert _device(ran_on(device, "bfloat16"), "auto", ONE_PROCESS) == Device(CPU.place, torch.bfloat16)


def test_elsewhere_a_loss_may_differ_by_the_tolerance_and_what_single_roundings_decide_by_anything():
    elsewhere = Agreement(0.01, "cuda, H100 in float32", "cpu")
    assert (faults(Agreement(), loss=1.001), faults(elsewhere, loss=1.001), faults(elsewhere, loss=1.02)) == (1, 0, 1)
    assert (faults(elsewhere, dead=1), faults(elsewhere, row_losses=(1.02,))) == (1, 1)
    for name in ("nearest_loss", "clipped", "clipped_rows", "gamma", "pruned", "tokens"):
        assert (faults(Agreement(), **{name: 0.75}), faults(elsewhere, **{name: 0.75})) == (1, 0)


def test_the_sentence_names_both_devices_and_the_tolerance():
    assert str(Agreement()) == ""
    assert str(Agreement(0.01, "cuda, H100 in float32", "cpu")) == (
        " on cuda, H100 in float32, not on cpu, and may differ by 1 %; numbers of clipped codes and losses of rounding to "
        "nearest were not compared"
    )
