"""`load` and `generate` on a device without float64, such as MPS and XPU: the pretended one refuses it here."""

import pytest
import torch

import nearplane
from device_runs import RUNS, TOKENS, quantized, save_model
from nearplane.errors import RecipeError
from nightly import daily
from pretended import Pretend, pretended

FORMATS = ("grid", "rate", "gguf", "nvfp4", "inputs")


@pytest.fixture
def without_float64(monkeypatch):
    """Let the pretended device refuse float64 as MPS does."""
    make = Pretend.__new__

    def refusing(cls, held, index, requires_grad=False):
        if held.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return make(cls, held, index, requires_grad)

    monkeypatch.setattr(Pretend, "__new__", refusing)


@pytest.mark.parametrize("run", daily(FORMATS, ("rate", "nvfp4")))
def test_checkpoints_load_and_generate(run, tmp_path, without_float64):
    model = save_model(run, tmp_path / "model")
    quantized(run, model, tmp_path / "out", "cpu")
    expected = nearplane.load(tmp_path / "out", device="cpu")(TOKENS[:2]).logits
    with pretended():
        loaded = nearplane.load(tmp_path / "out", device="pretend:0", activations="activations" in RUNS[run][2])
        logits = loaded(TOKENS[:2].to("pretend:0")).logits.cpu()
        text = nearplane.generate(tmp_path / "out", "once upon", tokens=3, temperature=1.0, device="pretend:0")
    assert text
    if "activations" not in RUNS[run][2]:
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_fixture_refuses_float64(without_float64):
    with pretended(), pytest.raises(TypeError, match="float64"):
        torch.zeros(2).to("pretend:0").double()


def test_a_network_in_float64_is_refused_there(tmp_path, monkeypatch):
    monkeypatch.setattr("nearplane.loading.from_pretrained.WITHOUT_FLOAT64", ("pretend",))
    model = save_model("grid", tmp_path / "model", torch.float64)
    for dtype in ("auto", torch.float64):
        with pretended(), pytest.raises(RecipeError, match=r"^dtype is float64, which pretend:0 does not have\."):
            nearplane.load(model, dtype=dtype, device="pretend:0")
