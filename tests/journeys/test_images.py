"""A vision model goes the whole way: calibrated on pixel values from Python, read back by transformers, compared by cosine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, ViTConfig, ViTModel

import nearplane
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.errors import CalibrationError, RecipeError

SMALL = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
)
IMAGES = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))  # of 17 hidden states each


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random model."""
    folder = tmp_path_factory.mktemp("vit") / "model"
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**SMALL)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def solved(vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same in 4 bits."""
    out = tmp_path_factory.mktemp("vit") / "out"
    record = nearplane.quantize(vit, out, calibration=IMAGES, bits=4, group_size=32, device="cpu")
    assert (record.windows, record.extra_windows, record.seqlen) == (36, 4, 17)
    assert len(record.layers) == 12
    assert max(layer.relative_loss for layer in record.layers) < 0.05
    return out


def states(model: ViTModel) -> Tensor:
    with torch.no_grad():
        return model.eval()(IMAGES[:2]).last_hidden_state


def test_four_bits_are_read_back_by_transformers_bit_by_bit(solved: Path, tmp_path: Path) -> None:
    nearplane.export(solved, tmp_path / "dense", dtype="float32")
    expected = states(AutoModel.from_pretrained(tmp_path / "dense", dtype=torch.float32))
    assert torch.equal(states(AutoModel.from_pretrained(solved, dtype=torch.float32)), expected)


def test_losses_are_measured_again_on_the_images_and_on_no_others(solved: Path, vit: Path) -> None:
    found = nearplane.verify(solved, against=vit, calibration=IMAGES)
    assert found.faults == ()
    assert found.measured
    others = nearplane.verify(solved, against=vit, calibration=IMAGES + 1)
    assert [fault.what for fault in others.faults] == ["its tokens differ from those of the record"]
    with pytest.raises(CalibrationError, match="images given in Python; the run record contains only their SHA-256"):
        nearplane.verify(solved, against=vit)


def test_embeddings_of_images_are_compared_by_cosine(solved: Path, vit: Path) -> None:
    found = nearplane.evaluate(solved, IMAGES[:9], against=vit, device="cpu")
    both = [AutoModel.from_pretrained(vit), nearplane.load(solved, dtype="float32", device="cpu")]
    with torch.no_grad():
        a, b = (model(IMAGES[:9]).last_hidden_state.mean(1) for model in both)
    assert found.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(a, b).mean()), abs=1e-6)
    assert (found.windows, found.tokens, found.perplexity) == (9, 9, None)


def test_what_is_no_image_or_of_another_size_is_refused(vit: Path, solved: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"ViTModel takes images\. In Python, pass calibration=pixel_values"):
        nearplane.quantize(vit, tmp_path / "out", calibration=str(CALIBRATION), bits=4, device="cpu")
    with pytest.raises(nearplane.NearplaneError, match=r"ViTModel does not take images \(3, 16, 32\)"):
        nearplane.quantize(vit, tmp_path / "out", calibration=IMAGES[:, :, :16], bits=4, device="cpu")
    with pytest.raises(RecipeError, match="bits of each layer are not measured yet"):
        nearplane.quantize(vit, tmp_path / "out", calibration=IMAGES, rate=3, device="cpu")
    with pytest.raises(CalibrationError, match="takes text, but the calibration data is not text"):
        nearplane.quantize(MODEL, tmp_path / "out", calibration=IMAGES, bits=4, device="cpu")
    with pytest.raises(CalibrationError, match="takes pixel values"):
        nearplane.evaluate(solved, HELD_OUT, against=vit, device="cpu")
    assert not (tmp_path / "out").exists()
