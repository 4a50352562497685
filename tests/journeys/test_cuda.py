"""What runs on a real CUDA device, where there is one: kernels, and runs beside those on the CPU."""

import numpy as np
import pytest
import torch

import nearplane
from device_runs import RUNS, TOKENS, quantized, save_model, stored
from nearplane.record.record_file import read_record
from triton_processes import results

VERIFIED = ("grid", "rate", "experts", "k-quants")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_kernels_do_the_arithmetic_of_the_torch_forms():
    """As in the unit tests of the interpreter; a race between threads can be seen here alone."""
    found = results("problems_on_cuda.py", 21)
    assert len(found) == 5 * 21
    for each in found:
        for kind in ("", "sweep_", "descent_"):
            assert each.get(f"{kind}wrong_values", 0) == each.get(f"{kind}far", 0) == 0, each
            assert each.get(f"{kind}loss", 0) <= 1e-6, each
        exact = ("unexcused", "missing", "targets_written", "unstored", "steps", "descent_wrong_steps", "unlike_sums")
        assert not any(each.get(name) for name in exact), each
        assert each.get("excess", 0) <= 1e-5, each


@pytest.mark.parametrize("run", RUNS)
def test_runs_repeat_to_the_byte_and_lose_what_they_lose_on_the_cpu(run, tmp_path):
    model, made = save_model(run, tmp_path / "model"), {}
    for name, device in (("cpu", "cpu"), ("first", "cuda"), ("second", "cuda")):
        quantized(run, model, tmp_path / name, device)
        made[name] = stored(tmp_path / name)
    assert made["first"] == made["second"]
    bytes_of = [
        np.frombuffer(b"".join(made[name][tensor] for tensor in made["cpu"]), np.uint8) for name in ("cpu", "first")
    ]
    assert (bytes_of[0] != bytes_of[1]).mean() <= 0.06  # float32 sums in another order decide some codes
    losses = [sum(layer.loss or 0 for layer in read_record(tmp_path / name).layers) for name in ("cpu", "first")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    for name, device in (("cpu", "cuda"), ("first", "cuda"), ("first", "cpu")) if run in VERIFIED else ():
        verified = nearplane.verify(tmp_path / name, against=model, calibration=TOKENS, device=device)
        assert (verified.faults, verified.measured) == ((), True)
