"""Models that write down what they hear go the whole way: calibrated on sound with what is said in it, read back, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSpeechSeq2Seq, CompressedTensorsConfig, GenerationConfig

import nearplane
from hearing import KINDS, START, heard, predicted, save_hearing
from nearplane.calibration.given import Given
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION, MODEL
from nearplane.errors import NearplaneError
from nearplane.models.kinds import InputKind
from nearplane.record.record_file import read_record
from nightly import daily
from translating import save_translating

GRID, RATE = dict(bits=4, group_size=16), dict(rate=3, allocate="uniform")
SOUND, TOKENS = heard("whisper")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random Whisper, of 1 and 1 block, for sound of 16 mel bins and 40 frames."""
    return save_hearing(tmp_path_factory.mktemp("whisper") / "source", "whisper")


@pytest.fixture(scope="module")
def solved(whisper: Path) -> Path:
    """Return the folder of the same in 4 bits."""
    out = whisper.parent / "out"
    nearplane.quantize(whisper, out, calibration=(SOUND, TOKENS), device="cpu", **GRID)
    return out


def decoded(out: Path) -> Any:
    """Return our own decoded weights in a plain float32 model."""
    if not (out.parent / "dense").exists():
        nearplane.export(out, out.parent / "dense", dtype="float32")
    return AutoModelForSpeechSeq2Seq.from_pretrained(out.parent / "dense", dtype=torch.float32)


def written_down(model: Any, sound: Tensor) -> Tensor:
    """Return what a model hears, in ten tokens at most."""
    settings = GenerationConfig(
        max_new_tokens=10, do_sample=False, decoder_start_token_id=START, pad_token_id=0, eos_token_id=2
    )
    return model.generate(sound, generation_config=settings)


@pytest.mark.parametrize("kind", daily(KINDS, ["whisper"]))
@pytest.mark.parametrize("how", [GRID, pytest.param(RATE, marks=pytest.mark.nightly)], ids=["bits", "rate"])
def test_both_halves_are_quantized_and_read_back_bit_by_bit(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    source, out, (sound, tokens) = save_hearing(tmp_path / "source", kind), tmp_path / "out", heard(kind)
    record = nearplane.quantize(source, out, calibration=(sound, tokens), device="cpu", **how)
    assert (record.windows, record.extra_windows, record.seqlen) == (36, 4, 12)
    assert len(record.layers) == (6 + 10) * (2 if kind == "moonshine" else 1)
    dense = decoded(out)
    if how is GRID:
        plain = AutoModelForSpeechSeq2Seq.from_pretrained(out, dtype=torch.float32)
        at_once = CompressedTensorsConfig(dequantize=True)  # generating calls the encoder alone
        other = AutoModelForSpeechSeq2Seq.from_pretrained(out, dtype=torch.float32, quantization_config=at_once)
    else:
        plain, other = (nearplane.load(out, dtype="float32", device="cpu", packed=packed) for packed in (False, True))
    expected = predicted(dense, sound[:2], tokens[:2])
    assert torch.equal(predicted(plain, sound[:2], tokens[:2]), expected)
    original = AutoModelForSpeechSeq2Seq.from_pretrained(source)
    assert not torch.equal(predicted(original, sound[:2], tokens[:2]), expected)
    if kind != "speecht5":  # generates by a class of its own
        texts = [written_down(model, sound[:4]) for model in (dense, plain, other)]
        assert len(texts[0].unique(dim=0)) > 1, "what is heard matters"
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(texts[0], texts[2])
    found = nearplane.verify(out, against=source, calibration=(sound, tokens))
    assert (found.faults, found.measured) == ((), True)


@pytest.mark.nightly
def test_what_the_decoder_predicts_is_compared(solved: Path, whisper: Path) -> None:
    measured = nearplane.evaluate(solved, (SOUND[:9], TOKENS[:9]), against=whisper, device="cpu")
    models = AutoModelForSpeechSeq2Seq.from_pretrained(whisper), decoded(solved)
    a, b = (predicted(model, SOUND[:9], TOKENS[:9])[:, 1:].log_softmax(-1) for model in models)
    assert measured.kl == pytest.approx(float((a.exp() * (a - b)).sum(-1).mean()), rel=1e-3)
    assert measured.nll == pytest.approx(-float(b.gather(-1, TOKENS[:9, 1:, None]).mean()), rel=1e-5)
    assert (measured.windows, measured.tokens) == (9, 9 * 11)
    half = AutoModelForSpeechSeq2Seq.from_pretrained(whisper, dtype=torch.bfloat16)
    objects = nearplane.evaluate(half, (SOUND[:9], TOKENS[:9]), against=whisper, device="cpu")
    assert objects.kl is not None
    assert 0 < objects.kl < measured.kl, "sound enters a network in the network's dtype"


@pytest.mark.nightly
def test_bits_go_where_both_halves_need_them(whisper: Path, tmp_path: Path) -> None:
    kl, arrays = {}, (SOUND.numpy(), TOKENS.numpy())
    for bits in (3, 3.5):
        record = nearplane.quantize(
            whisper, tmp_path / str(bits), calibration=arrays, bits=bits, group_size=16, device="cpu"
        )
        found = nearplane.evaluate(tmp_path / str(bits), arrays, against=whisper, device="cpu")
        assert found.kl is not None
        kl[bits] = found.kl
    for half in ("encoder", "decoder"):
        assert len({layer.number_format.bits for layer in record.layers if half in layer.name}) > 1
    assert kl[3.5] < kl[3] / 2, "half a bit more for all alike would leave half"


def test_the_record_tells_other_sound_from_that_which_was_heard(solved: Path, whisper: Path) -> None:
    assert read_record(solved).recipe.calibration.calibration == "sound given in Python"
    for other in ((SOUND + 1, TOKENS), (SOUND, TOKENS.flip(1))):
        found = nearplane.verify(solved, against=whisper, calibration=other)
        assert [fault.what for fault in found.faults] == ["its tokens differ from those of the record"]
    with pytest.raises(NearplaneError, match="sound given in Python; the run record contains only their SHA-256"):
        nearplane.verify(solved, against=whisper)


@pytest.mark.parametrize(
    ("calibration", "match"),
    [
        (TOKENS, r"WhisperForConditionalGeneration takes sound. In Python, pass calibration=\(input_features"),
        (str(CALIBRATION), "takes sound"),
        (["A text."], "takes sound"),
        (SOUND[:, None], "takes sound"),
        ((SOUND[:, :8], TOKENS), r"does not take sound \(8, 40\) with 12 tokens \(RuntimeError: .* channels"),
        ((SOUND[:, :, :30], TOKENS), r"does not take sound \(16, 30\) .* to be of length 40, but found 30"),
        ((SOUND[:39], TOKENS), r"a pair of shapes \(39, 16, 40\) and \(40, 12\); expected .* the same number of windows"),
        ((SOUND, TOKENS.float()), "calibration is a tuple that cannot be converted to a tensor"),
        ((SOUND, TOKENS[:, :, None]), r"calibration\[1\] is int64 \(40, 12, 1\); expected"),
        ((SOUND / 0, TOKENS), "contains NaN or Inf in float32"),
        ((SOUND.double() * 1e300, TOKENS), "contains NaN or Inf in float32"),
        ((SOUND, np.array([[1, 2], [3]], dtype=object)), r"calibration\[1\] is a ndarray that cannot be converted to a tensor"),
        ((SOUND, TOKENS.clone().fill_(-100)), r"calibration\[1\] contains the token id -100; .* Leave out padding"),
        ((SOUND, TOKENS + 9), "token id 104, but the model's vocabulary has 96"),
        ((SOUND, TOKENS.clone().index_fill_(1, torch.tensor(0), START)), "All token_ids begin with 1, the start token"),
        ((SOUND, TOKENS.repeat(1, 3)), "--seqlen 36 is more than the model's maximum length of 32 tokens"),
        ((SOUND[:4], TOKENS[:4]), "36 calibration tokens are 0.56 for each of the 64 inputs of model.encoder.layers.0.fc2"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_a_sentence(calibration: Any, match: str, whisper: Path, tmp_path: Path) -> None:
    with pytest.raises(NearplaneError, match=match):
        nearplane.quantize(whisper, tmp_path / "out", calibration=calibration, device="cpu", **GRID)
    assert not [*tmp_path.iterdir()]


def test_what_begins_with_the_start_token_is_not_measured_either(whisper: Path) -> None:
    started = TOKENS.clone().index_fill_(1, torch.tensor(0), START)
    with pytest.raises(NearplaneError, match="All token_ids begin with 1, the start token"):
        nearplane.evaluate(whisper, (SOUND, started), device="cpu")


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (dict(format="gptq"), "readers of gptq accept only one stack of blocks"),
        (dict(tune="network"), "has an encoder and a decoder, but tuning supports one stack"),
        (dict(memory="4GB"), "it takes images or sound"),
    ],
)
def test_what_they_cannot_have_is_refused(how: dict[str, Any], match: str, whisper: Path, tmp_path: Path) -> None:
    with pytest.raises(NearplaneError, match=match):
        nearplane.quantize(whisper, tmp_path / "out", calibration=(SOUND, TOKENS), device="cpu", **GRID, **how)
    assert not [*tmp_path.iterdir()]


def test_models_that_take_text_take_no_sound(whisper: Path, solved: Path, tmp_path: Path) -> None:
    for source in (MODEL, save_translating(tmp_path / "bart", "bart")):
        with pytest.raises(NearplaneError, match="takes text, but the calibration data is not text"):
            nearplane.quantize(source, tmp_path / "out", calibration=(SOUND, TOKENS), device="cpu", **GRID)
    with pytest.raises(NearplaneError, match=r"takes sound with its transcript .*; the input is text"):
        nearplane.evaluate(solved, TOKENS, against=whisper, device="cpu")
    with pytest.raises(NearplaneError, match=r"takes text; the input is sound"):
        nearplane.evaluate(MODEL, (SOUND, TOKENS), device="cpu")
    with pytest.raises(NearplaneError, match=r"which continues sound with its transcript"):
        nearplane.generate(solved, "A text.", device="cpu")


def test_two_images_in_a_list_are_no_pair() -> None:
    image = torch.rand(3, 8, 8)
    for pair in ([image, image], [image.numpy(), image.numpy()]):
        found = Given.of(pair)
        assert found is not None
        assert found.kind is InputKind.IMAGES


def test_the_command_line_says_how_to_do_it_from_python(whisper: Path, tmp_path: Path) -> None:
    words = ["quantize", str(whisper), str(tmp_path / "out"), "--bits", "4", "--group-size", "16"]
    with pytest.raises(NearplaneError, match=r"In Python, pass calibration=\(input_features, token_ids\)"):
        app([*words, "--calibration", str(CALIBRATION)], exit_on_error=False, result_action="return_value")
    app([*words, "--solver", "round-to-nearest"], exit_on_error=False, result_action="return_value")
    assert read_record(tmp_path / "out").windows == 0
