"""A GPU in place of the CPU, which is pretended here: every command ends, and models in float32 get the same codes."""

import gc
import json
import math
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch

import nearplane
from device_runs import COMMAND, COUNTED, RUNS, TABLE, TOKENS, quantized, save_model, stored, table_of
from nearplane.record.record_file import read_record
from nearplane.tuning import loop
from nightly import daily
from pretended import pretended
from pretended_kernels import compiled
from unordered import Unordered

DEVICES = ("cpu", "pretend:0")
TORCH_FORMS = (
    "k-quants",
)  # run with the kernels of a device that has none; the others with the CPU's, and at night with those


class Made:
    """A model of RUNS quantized on both devices, and what the GPU counted."""

    def __init__(self, run, place, kernels=compiled):
        self.model = save_model(run, place / "model")
        self.folders = {device: place / device.partition(":")[0] for device in DEVICES}
        self.cpu, self.gpu = self.folders.values()
        quantized(run, self.model, self.cpu, "cpu")
        with pretended() as gpu, kernels(), Unordered() as seen:
            quantized(run, self.model, self.gpu, "pretend:0")
        gc.collect()
        self.left, self.traffic, self.unordered = gpu.cards[0].live, gpu.traffic, seen.found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function from a key of RUNS to what was made of it, once."""
    kernels = dict.fromkeys(TORCH_FORMS, nullcontext)
    return cache(lambda run: Made(run, tmp_path_factory.mktemp(run), kernels.get(run, compiled)))


def check_alike(run):
    """Assert that both devices wrote the same, that nothing stays on the GPU, and that it added in a fixed order."""
    there, here = stored(run.gpu), stored(run.cpu)
    assert there.keys() == here.keys()
    assert [name for name in here if there[name] != here[name]] == []
    assert read_record(run.gpu).device.startswith("pretend")
    assert run.left == 0, "bytes that stay on the GPU"
    assert run.unordered == set(), "CUDA adds in no fixed order"


@pytest.mark.parametrize("run", daily(RUNS, COUNTED))
def test_a_gpu_writes_the_codes_of_the_cpu(made, run):
    check_alike(made(run))


@pytest.mark.nightly
@pytest.mark.parametrize("run", [run for run in RUNS if run not in TORCH_FORMS])
def test_a_gpu_without_kernels_of_its_own_writes_the_codes_of_the_cpu(run, tmp_path):
    check_alike(Made(run, tmp_path, nullcontext))


@pytest.mark.parametrize("run", COUNTED)
def test_functions_wait_and_copy_as_often_as_the_table_says(made, run):
    """More is what this test is for; fewer fails as well, so that the table is written again and what was won is kept."""
    counts, expected = table_of(made(run).traffic), json.loads(TABLE.read_text())["functions"][run]
    for kind in ("synchronizations", "to_device", "to_host"):
        assert sum(row.get(kind, 0) for row in expected.values()) > 0
    places = sorted(counts.keys() | expected.keys())
    changed = [
        f"{place}: {counts.get(place)}, in the table {expected.get(place)}"
        for place in places
        if counts.get(place) != expected.get(place)
    ]
    assert not changed, f"If every change is meant, write the table again with `{COMMAND}`.\n" + "\n".join(changed)


def test_both_devices_verify_evaluate_load_and_continue_texts_alike(made):
    run, found = made("grid"), []
    with pretended(), compiled():
        for device in DEVICES:
            verified = nearplane.verify(run.cpu, against=run.model, calibration=TOKENS, device=device)
            assert (verified.faults, bool(verified.measured)) == ((), True)
            evaluation = nearplane.evaluate(run.cpu, TOKENS, against=run.model, device=device)
            with torch.no_grad():
                logits = nearplane.load(run.cpu, device=device)(TOKENS[:2].to(device)).logits.cpu()
            found.append(
                (
                    evaluation.perplexity,
                    evaluation.kl,
                    logits,
                    nearplane.generate(run.cpu, "It", tokens=8, device=device),
                )
            )
    (perplexity, kl, logits, text), (perplexity_2, kl_2, logits_2, text_2) = found
    assert (perplexity, kl, text) == (perplexity_2, kl_2, text_2)
    assert torch.equal(logits, logits_2)


@pytest.mark.nightly
@pytest.mark.parametrize("run", ["grid", "rate", "experts"])
def test_a_model_in_bfloat16_is_quantized_and_verified(run, tmp_path):
    """A GPU computes in it; the CPU computes in float32, so that its codes are others."""
    model = save_model(run, tmp_path / "model", torch.bfloat16)
    with pretended(), compiled():
        quantized(run, model, tmp_path / "out", "pretend:0")
        verified = nearplane.verify(tmp_path / "out", against=model, calibration=TOKENS, device="pretend:0")
    assert (verified.faults, verified.measured) == ((), True)


def test_what_is_entropy_coded_is_loaded_packed_and_computes_the_same(made):
    folder, found = made("rate").cpu, []
    with pretended(), torch.no_grad():
        for device in DEVICES:
            model = nearplane.load(folder, device=device)
            found.append([model(TOKENS[:2, :length].to(device)).logits.cpu() for length in (1, 32)])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=5e-5) for a, b in zip(*found, strict=True))


class StoppedError(Exception):
    """What ends a run in these tests."""


@pytest.mark.parametrize("run", daily(("grid", "rate"), ("grid",)))
def test_tuning_that_is_stopped_goes_on_and_ends_as_on_the_cpu(made, run, tmp_path, monkeypatch):
    """The same bytes as without the stop; other steps than on the CPU differ by rounding alone."""
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)  # keep every step
    step, start, options = loop._Run.step, tmp_path / "start", RUNS[run][2]
    nearplane.quantize(made(run).model, start, calibration=TOKENS, device="cpu", positions="equal", **options)

    def tune(out, device):
        record = nearplane.tune(start, out, against=made(run).model, calibration=TOKENS, steps=4, device=device)
        assert record.tuning.kept > 0
        return stored(out)

    def stopped(self, batches):
        if self.done == 2:
            raise StoppedError
        step(self, batches)

    expected = tune(tmp_path / "cpu", "cpu")
    with pretended(), compiled(), Unordered() as seen:
        whole = tune(tmp_path / "whole", "pretend:0")
        with monkeypatch.context() as patch:
            patch.setattr(loop._Run, "step", stopped)
            with pytest.raises(StoppedError):
                tune(tmp_path / "out", "pretend:0")
        assert tune(tmp_path / "out", "pretend:0") == whole
    assert whole.keys() == expected.keys()
    assert seen.found == set()
    for name in expected:
        if name.endswith("scale"):
            there, here = (np.frombuffer(tensors[name], np.float32) for tensors in (whole, expected))
            assert np.allclose(there, here, rtol=1e-6, atol=0)
        else:
            assert whole[name] == expected[name], name
