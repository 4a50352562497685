"""Float32 products on the CPU: the library is chosen by processor and exactness, used for the run alone, repeated by `verify`."""

import importlib
import logging
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import nearplane
from nearplane.demo import CALIBRATION, MODEL
from nearplane.record.record_file import read_record
from nearplane.system import matmul_library as products
from nearplane.system.device import Device
from nearplane.system.matmul_choice import Products
from nearplane.system.matmul_library import chosen_library, exact_float32, kinds, recorded_library, trial

CPU = Device(torch.device("cpu"))
pytestmark = pytest.mark.skipif(products._switch() is None, reason="this torch has no oneDNN, or no switch for it")


def switch() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)


@pytest.fixture
def onednn(monkeypatch):
    """Whatever the processor, oneDNN is taken unless it rounds; no run is too short."""
    monkeypatch.setattr(products, "slow_for_mkl", lambda: True)
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 0)
    if not products.as_exact(trial([(64, 64)])):
        pytest.skip("this processor has matrix units for bf16: oneDNN is never taken")


def measured(error: float) -> Products:
    return Products(errors={"default": 3e-7, "onednn": error})


def test_onednn_is_taken_where_it_is_as_exact():
    """Errors of a processor without matrix units, and of one with them."""
    assert products.as_exact(measured(5e-7))
    assert not products.as_exact(measured(2.4e-3))


@pytest.mark.parametrize(
    ("machine", "vendor", "wanted"),
    [("x86_64", "AuthenticAMD", True), ("x86_64", "GenuineIntel", False), ("aarch64", "ARM", False)],
)
def test_it_is_open_where_mkl_does_not_know_the_processor(monkeypatch, machine, vendor, wanted):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", lambda self: f"vendor_id\t: {vendor}\n")
    assert products.slow_for_mkl() is wanted


def test_two_trials_choose_the_same():
    assert trial([(96, 64), (64, 256)]) == trial([(96, 64), (64, 256)])


def test_a_trial_measures_products_as_exact_as_float32():
    found = trial([(96, 64), (64, 256)])
    assert found.errors.keys() == {"default", "onednn"}
    assert 0 < found.errors["default"] < 1e-5


def test_the_shapes_with_most_weights_are_tried_and_none_is_huge():
    """Three of 64 x 64 hold more weights than one of 96 x 96."""
    assert kinds([(64, 64)] * 3 + [(96, 96), (16, 16)]) == [(64, 64), (96, 96)]
    assert kinds([(20_000, 64)]) == [(products.SIDE, 64)]


def test_a_short_run_has_none():
    before = switch()
    with chosen_library([(64, 64)], 1000, CPU) as chosen:
        assert chosen is None
        assert switch() == before


@pytest.mark.parametrize("before", ["none", "tf32", "bf16"])
def test_the_switch_is_set_inside_and_as_it_was_outside_even_after_an_error(onednn, before):
    """What a program has set for itself is not what the run computes with, and is not lost."""
    own, torch.backends.mkldnn.matmul.fp32_precision = switch(), before
    try:
        with suppress(KeyError), chosen_library([(64, 64)], 1000, CPU) as chosen:
            assert chosen is not None
            assert chosen.library == "onednn"
            assert switch() == "bf16"
            raise KeyError
        assert switch() == before
        with recorded_library(None, CPU):
            assert switch() == ("none" if before == "none" else "ieee")
        assert switch() == before
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = own


def precisions() -> list[str]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [str(switch.fp32_precision) for switch in (cuda.matmul, cudnn.conv, cudnn.rnn)]


@pytest.fixture
def restored():
    """Restore the switches that a test sets as a program would."""
    before = [(switch, switch.fp32_precision) for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]
    yield
    torch.set_float32_matmul_precision("highest")
    for switch, precision in before:
        switch.fp32_precision = precision


@pytest.mark.parametrize("program", ["highest", "high", "medium", "switch"])
@pytest.mark.parametrize(
    "context", [lambda: chosen_library([], 0, CPU), lambda: recorded_library(None, CPU), exact_float32]
)
def test_float32_is_not_rounded_to_tf32_whatever_the_program_has_allowed(restored, program, context):
    """On a GPU; and what the program has allowed holds again afterwards."""
    if program == "switch":  # by the new way alone, which torch does not let the old way ask for
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(program)
    before = precisions()
    assert "tf32" in before
    with suppress(KeyError), context():
        assert precisions() == ["ieee"] * 3
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32  # torch raises if the old way says otherwise
        assert switch() in ("ieee", "none")
        raise KeyError
    assert precisions() == before
    if program != "switch":
        assert torch.get_float32_matmul_precision() == program


def test_importing_sets_nothing():
    before = switch(), torch.get_float32_matmul_precision()
    importlib.reload(products)
    assert (switch(), torch.get_float32_matmul_precision()) == before


@pytest.mark.nightly
def test_the_choice_stands_in_the_record_and_verify_computes_the_same_by_it(onednn, tmp_path):
    """Inside the run the switch is on; `verify` finds the same losses to six digits, without a trial of its own."""
    before, seen = switch(), []

    def looking(items, label, total):
        for item in items:
            if label in ("quantizing", "measuring"):  # while files are read nothing is multiplied
                seen.append(switch())
            yield item

    small, out = tmp_path / "small", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(MODEL, num_hidden_layers=1).save_pretrained(small)
    shutil.copy(MODEL / "tokenizer.json", small)
    text = {"calibration": str(CALIBRATION), "samples": 12, "seqlen": 64}
    record = nearplane.quantize(small, out, bits=4, group_size=64, progress=looking, **text)
    assert record.products is not None
    assert record.products.library == "onednn"
    assert set(seen) == {"bf16"}
    assert read_record(out).products == record.products
    seen.clear()
    found = nearplane.verify(out, against=small, calibration=str(CALIBRATION), progress=looking)
    assert found.measured
    assert not found.faults
    assert set(seen) == {"bf16"}
    assert switch() == before


def test_where_the_machine_rounds_a_record_is_measured_again_by_the_default_and_it_is_said(monkeypatch, caplog):
    before = switch()
    monkeypatch.setattr(products, "MAX_ERROR_RATIO", 0.0)  # as if every product of oneDNN were rounded
    with caplog.at_level(logging.WARNING), recorded_library(replace(measured(0.0), library="onednn"), CPU) as used:
        assert switch() == before
        assert used is None
    assert "--tolerance" in caplog.text
