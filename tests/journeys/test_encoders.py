"""Encoders, which have no vocabulary head, go the whole way: quantized, read back by transformers and by us, compared by cosine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

import nearplane
from nearplane.calibration.texts import Frame, frame_of, read_windows
from nearplane.cli import app as cli
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.errors import CalibrationError, RecipeError
from nearplane.models.model import open_model

TOKENS = torch.arange(3, 43).view(2, 20)
SMALL = dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
FAST = {"calibration": str(CALIBRATION), "samples": 24, "seqlen": 48, "device": "cpu"}


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of MiniLM's shape, saved as sentence-transformers do, with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("encoders") / "minilm"
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SMALL, max_position_embeddings=64)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    words = dict.fromkeys(CALIBRATION.read_text(encoding="utf-8").split())
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *[word for word in words if word.isalpha()][:500]]
    rules = Tokenizer(WordLevel({word: index for index, word in enumerate(known)}, unk_token="[UNK]"))
    rules.pre_tokenizer = Whitespace()
    special = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    PreTrainedTokenizerFast(tokenizer_object=rules, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def solved(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a way to quantize to the folder of the model so quantized."""
    made: dict[str, Path] = {}

    def folder_of(way: str) -> Path:
        if way not in made:
            made[way] = tmp_path_factory.mktemp("encoders") / way
            how: dict[str, Any] = {"bits": 4, "group_size": 32} if way == "grid" else {"rate": 3}
            nearplane.quantize(minilm, made[way], **FAST, **how)
        return made[way]

    return folder_of


def states(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).last_hidden_state


def decoded(folder: Path, place: Path) -> Tensor:
    nearplane.export(folder, place, dtype="float32")
    return states(AutoModel.from_pretrained(place, dtype=torch.float32))


def test_four_bits_are_read_back_by_transformers_bit_by_bit(solved: Any, minilm: Path, tmp_path: Path) -> None:
    loaded = AutoModel.from_pretrained(solved("grid"), dtype=torch.float32)
    assert type(loaded) is BertModel
    expected = decoded(solved("grid"), tmp_path / "dense")
    assert torch.equal(states(loaded), expected)
    assert torch.equal(states(nearplane.load(solved("grid"), dtype="float32", device="cpu")), expected)
    assert not torch.equal(expected, states(AutoModel.from_pretrained(minilm)))


@pytest.mark.nightly
def test_rates_are_read_back_by_nearplane(solved: Any, tmp_path: Path) -> None:
    expected = decoded(solved("rate"), tmp_path / "dense")
    plain = nearplane.load(solved("rate"), dtype="float32", device="cpu", packed=False)
    assert torch.equal(states(plain), expected)
    packed = states(nearplane.load(solved("rate"), dtype="float32", device="cpu"))
    assert (packed - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("way", ["grid", pytest.param("rate", marks=pytest.mark.nightly)])
def test_every_loss_is_measured_again(solved: Any, minilm: Path, way: str) -> None:
    found = nearplane.verify(solved(way), against=str(minilm), calibration=str(CALIBRATION))
    assert found.faults == ()
    assert found.measured


def test_embeddings_are_compared_by_cosine(solved: Any, minilm: Path) -> None:
    """As written out by hand: windows between [CLS] and [SEP], means over all tokens."""
    found = nearplane.evaluate(solved("grid"), HELD_OUT, against=minilm, samples=5, seqlen=40, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    windows = read_windows(tokenizer, HELD_OUT, samples=5, seqlen=40, frame=frame_of(tokenizer, "none", encoder=True))
    assert windows[:, [0, -1]].tolist() == [[2, 3]] * 5
    assert torch.equal(windows[:, 1:-1], read_windows(tokenizer, HELD_OUT, samples=5, seqlen=38, frame=Frame()))
    both = [nearplane.load(folder, dtype="float32", device="cpu") for folder in (minilm, solved("grid"))]
    with torch.no_grad():
        a, b = (model(windows).last_hidden_state.mean(1) for model in both)
    cosines = torch.nn.functional.cosine_similarity(a, b)
    assert found.cosine == pytest.approx(float(cosines.mean()), abs=1e-6)
    assert found.worst_cosine == pytest.approx(float(cosines.min()), abs=1e-6)
    assert found.worst_cosine < found.cosine < 1
    assert (found.perplexity, found.kl, found.windows, found.tokens) == (None, None, 5, 200)
    with pytest.raises(RecipeError, match=r"has no vocabulary head and predicts no tokens\. Pass the original"):
        nearplane.evaluate(solved("grid"), HELD_OUT, samples=5, seqlen=40, device="cpu")


def test_the_cosine_is_printed_as_such(solved: Any, minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--text", str(HELD_OUT), "--samples", "3", "--seqlen", "32", "--against", str(minilm)]
    cli.app(["evaluate", str(solved("grid")), *options], result_action="return_value")
    assert capsys.readouterr().out.startswith("cosine of mean-pooled embeddings to the original's: mean 0.9")


def test_a_figure_of_predictions_is_refused(minilm: Path, tmp_path: Path) -> None:
    options = ["--text", str(HELD_OUT), "--seqlen", "32", "--against", str(minilm), "--plot", str(tmp_path / "kl.svg")]
    with pytest.raises(RecipeError, match="--plot draws predictions, which the encoder"):
        cli.app(["evaluate", str(minilm), *options])


def test_block_by_block_the_embeddings_are_the_same(solved: Any, minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nearplane.evaluate(solved("grid"), TOKENS, against=minilm, device="cpu")
    monkeypatch.setattr("nearplane.evaluation.predictions.MAX_MEMORY_SHARE", 0.0)
    streamed = nearplane.evaluate(solved("grid"), TOKENS, against=minilm, device="cpu")
    assert streamed.cosine == pytest.approx(whole.cosine, abs=1e-7)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (
            {"bits": 4, "format": "gptq"},
            r"^BertModel is an encoder, but readers of gptq accept only language models\. Use --format",
        ),
        ({"bits": 4, "tune": "network"}, r"predicts no tokens, on which tuning trains"),
    ],
)
def test_what_encoders_cannot_have_is_refused(how: dict[str, Any], match: str, minilm: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=match):
        nearplane.quantize(minilm, tmp_path / "out", **FAST, **how)
    assert not (tmp_path / "out").exists()


def test_rows_of_other_lengths_are_not_packed_for_an_encoder(minilm: Path, tmp_path: Path) -> None:
    """Each text stands between [CLS] and [SEP]."""
    rows = {"input_ids": TOKENS, "attention_mask": TOKENS < 40}
    for run in (
        lambda: nearplane.quantize(minilm, tmp_path / "out", calibration=rows, bits=4, group_size=32),
        lambda: nearplane.evaluate(minilm, rows, against=minilm),
    ):
        with pytest.raises(
            CalibrationError, match=r"reads each text between special tokens.* Pass the texts, or rows of one"
        ):
            run()


def test_an_encoder_generates_nothing(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="an encoder, which predicts no tokens"):
        cli.app(["generate", str(minilm), "once", "--tokens", "2", "--device", "cpu"])
    assert capsys.readouterr().out == ""


def test_positions_that_padding_takes_are_not_offered(tmp_path: Path) -> None:
    """RoBERTa counts positions from that of padding on."""
    RobertaModel(RobertaConfig(**SMALL, max_position_embeddings=66)).save_pretrained(tmp_path)
    model = open_model(str(tmp_path))
    assert type(model.network) is RobertaModel
    assert model.positions == 64
