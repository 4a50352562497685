"""Windows begin as the tokenizer begins a text; what older versions wrote is repeated without that token."""

import json

import pytest
import torch
from transformers import AutoTokenizer

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.calibration.windows import digest_of
from nearplane.demo import CALIBRATION
from nearplane.planning.request import open_original
from nearplane.record.record_file import read_record
from nearplane.system.device import Device
from nearplane.system.paths import RECORD
from nearplane.tuning.checkpoint import windows_of

BOS = 5
OPTIONS = dict(bits=4, group_size=32, samples=24, seqlen=40, device="cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:8000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose tokenizer sets a token before every text."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    random_model(config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=1)).float().save_pretrained(folder)
    add_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (token,) = (name for name, number in tokenizer["model"]["vocab"].items() if number == BOS)
    parts = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [BOS], "tokens": [token]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def windows_by_hand(model, text, first):
    """Return the 27 windows of 40 tokens of a run, of which three are extra windows."""
    ids = AutoTokenizer.from_pretrained(model)(text.read_text(), add_special_tokens=False)["input_ids"]
    length = 40 - len(first)
    return torch.tensor([[*first, *ids[length * n : length * (n + 1)]] for n in range(27)])


def test_windows_of_a_run_begin_with_the_token_and_verify_repeats_them(model, text, tmp_path):
    record = nearplane.quantize(model, tmp_path / "out", calibration=str(text), **OPTIONS)
    assert record.text == digest_of(windows_by_hand(model, text, [BOS]))
    assert (record.recipe.calibration.first_token, record.windows, record.extra_windows) == ("auto", 24, 3)
    assert nearplane.verify(tmp_path / "out", against=str(model)).faults == ()


def test_a_record_of_before_the_option_means_windows_without_the_token(model, text, tmp_path):
    options = dict(calibration=str(text), first_token="none", **OPTIONS)
    record = nearplane.quantize(model, tmp_path / "out", **options)
    assert record.text == digest_of(windows_by_hand(model, text, []))
    assert "first_token" not in (tmp_path / "out" / RECORD).read_text()
    read = read_record(tmp_path / "out")
    assert read.recipe.calibration.first_token == "none"
    assert nearplane.verify(tmp_path / "out", against=str(model)).faults == ()
    tuned_on = windows_of(
        open_original(str(model), read.recipe, trust_remote_code=False), read.recipe, None, Device.named("cpu"), 27, 40
    )
    assert torch.equal(tuned_on, windows_by_hand(model, text, []))
