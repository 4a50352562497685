"""Encoders with a decoder go the whole way: both calibrated on the same text, read back by transformers and by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, CompressedTensorsConfig

import nearplane
from nearplane.errors import NearplaneError
from nightly import daily
from translating import KINDS, RATES_ALONE, VOCABULARY, predicted, save_translating

WINDOWS = torch.randint(3, VOCABULARY, (32, 24), generator=torch.Generator().manual_seed(1))
GRID, RATE = dict(bits=4, group_size=16, allocate="uniform"), dict(rate=3, allocate="uniform")
FEW = ["bart", "t5"]  # of `make test`


def solved(source: Path, **how: Any) -> nearplane.record.record.RunRecord:
    return nearplane.quantize(source, source.parent / "out", calibration=WINDOWS, device="cpu", **how)


def decoded(source: Path) -> Any:
    """Return our own decoded weights in a plain float32 model."""
    if not (source.parent / "dense").exists():
        nearplane.export(source.parent / "out", source.parent / "dense", dtype="float32")
    return AutoModelForSeq2SeqLM.from_pretrained(source.parent / "dense", dtype=torch.float32)


@pytest.mark.parametrize("kind", daily([kind for kind in KINDS if kind not in RATES_ALONE], FEW))
def test_four_bits_load_in_plain_transformers(kind: str, tmp_path: Path) -> None:
    source, out = save_translating(tmp_path / "source", kind), tmp_path / "out"
    record = solved(source, **GRID)
    assert len(record.layers) == 1 * 6 + 2 * 10
    loaded = AutoModelForSeq2SeqLM.from_pretrained(out, dtype=torch.float32)
    expected = predicted(decoded(source), WINDOWS[:2])
    assert torch.equal(predicted(loaded, WINDOWS[:2]), expected)
    assert not torch.equal(predicted(AutoModelForSeq2SeqLM.from_pretrained(source), WINDOWS[:2]), expected)
    ways = (
        nearplane.load(out, dtype="float32", device="cpu"),
        AutoModelForSeq2SeqLM.from_pretrained(out, quantization_config=CompressedTensorsConfig(dequantize=True)),
    )  # generating calls the encoder alone, where compressed-tensors does not decode what it holds packed
    texts = [model.generate(WINDOWS[:1], max_new_tokens=6, do_sample=False) for model in (decoded(source), *ways)]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_rates_load_in_nearplane_and_every_loss_is_measured_again(kind: str, tmp_path: Path) -> None:
    source, out = save_translating(tmp_path / "source", kind), tmp_path / "out"
    solved(source, **RATE)
    dense = decoded(source)
    plain = nearplane.load(out, dtype="float32", device="cpu", packed=False)
    assert torch.equal(predicted(plain, WINDOWS[:2]), predicted(dense, WINDOWS[:2]))
    found = nearplane.verify(out, against=source, calibration=WINDOWS)
    assert (found.faults, found.measured) == ((), True)
    measured = nearplane.evaluate(out, WINDOWS[:4], against=source, device="cpu")
    a, b = (
        predicted(model, WINDOWS[:4])[:, 1:].log_softmax(-1)
        for model in (AutoModelForSeq2SeqLM.from_pretrained(source), dense)
    )
    assert measured.kl == pytest.approx(float((a.exp() * (a - b)).sum(-1).mean()), rel=1e-3)
    assert measured.nll == pytest.approx(-float(b.gather(-1, WINDOWS[:4, 1:, None]).mean()), rel=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.evaluation.predictions.MAX_MEMORY_SHARE", 0.0)
        streamed = nearplane.evaluate(out, WINDOWS[:4], against=source, device="cpu")
    assert streamed.kl == pytest.approx(measured.kl, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "how", "match"),
    [
        ("t5", GRID, r"^encoder\.block\.0\.layer\.0\.SelfAttention\.q: transformers would not load .*, --rate 4, or"),
        (
            "bart",
            GRID | {"format": "gptq"},
            r"readers of gptq accept only one stack of blocks\. Use --format compressed-tensors",
        ),
        ("bart", GRID | {"tune": "network"}, r"has an encoder and a decoder, but tuning supports one stack"),
        ("bart", RATE | {"include_head": True}, r"embeddings and head cannot be quantized yet"),
    ],
)
def test_what_they_cannot_have_is_refused(kind: str, how: dict[str, Any], match: str, tmp_path: Path) -> None:
    source = save_translating(tmp_path / "source", kind)
    with pytest.raises(NearplaneError, match=match):
        solved(source, **how)
    assert not (tmp_path / "out").exists()
