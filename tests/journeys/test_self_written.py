"""A model is calibrated on text that its original network writes itself; verified, tuned, and refused where it cannot be."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import CalibrationError, RecipeError
from nearplane.calibration import self_written as module
from nearplane.calibration.self_written import BATCH, MAX_TURN, Text, conversation, self_written
from nearplane.calibration.windows import digest_of
from nearplane.models.model import open_model
from nearplane.system.device import Device
from nearplane.system.progress import silent

CPU = Device.named("cpu")
FAST = {"bits": 3, "group_size": 16, "samples": 18, "seqlen": 32, "device": "cpu"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random Llama whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("model")
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2, hidden_size=32, intermediate_size=96)
    network = random_model(config).float()
    network.lm_head.weight.data *= 8  # else all tokens are as likely
    network.save_pretrained(folder)
    add_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let each test keep texts in a folder of its own, which is returned."""
    monkeypatch.setenv("NEARPLANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_tokens_are_drawn_from_the_networks_own_predictions(model: Path) -> None:
    """The mean of -log p of drawn tokens is the mean entropy of the predictions, within four of its standard errors."""
    network, ends = AutoModelForCausalLM.from_pretrained(model), frozenset[int]()
    texts = [Text(iter([[number + 3]]), (), ends) for number in range(40)]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor(module.written(network, texts, 60, TEXT_VOCABULARY, generator, lambda count: None))
    assert tokens.shape == (40, 60)
    assert tokens[:, 0].tolist() == [*range(3, 43)]
    with torch.no_grad():
        chances = network(tokens).logits[:, :-1].double().log_softmax(-1)
    surprise = -chances.gather(-1, tokens[:, 1:, None])[..., 0] + (chances.exp() * chances).sum(-1)
    assert float((chances.exp() * chances).sum(-1).mean()) < -0.5  # there is something to draw
    assert abs(float(surprise.mean())) < 4 * float(surprise.std()) / surprise.numel() ** 0.5


def test_a_text_that_ends_is_followed_by_another_opening() -> None:
    """Forced tokens come before drawn ones; the token that ends a text stays in it."""
    text = Text(iter([[7], [8, 9]]), (), frozenset([2]))
    text.begin()
    assert [text.next(token) for token in (0, 11, 2, 0, 0, 12)] == [7, 11, 2, 8, 9, 12]


def test_in_a_conversation_the_answer_follows_the_users_turn() -> None:
    """The user's turn ends at an end token or when it is too long; then come the template's words and the answer."""
    text = Text(iter([[1, 5], [1, 5]]), [2, 6], frozenset([2, 3]))
    text.begin()
    drawn = (0, 0, 11, 3, 0, 12, 2, 0, 0, *([13] * MAX_TURN), 0)
    told = [text.next(token) for token in drawn]
    assert told == [1, 5, 11, 2, 6, 12, 2, 1, 5, *([13] * (MAX_TURN - 1)), 2, 6]


def test_conversations_are_cut_out_of_the_chat_template(model: Path) -> None:
    """The words of the template around a user's turn are the tokens before it and between it and the answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = conversation(tokenizer)
    assert found is not None
    assert [tokenizer.decode(part) for part in found] == [
        tokenizer.decode(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in ("<user> ", "\n<bot> ")
    ]
    tokenizer.chat_template = "{{ raise_exception('no user') }}"
    assert conversation(tokenizer) is None
    tokenizer.chat_template = None
    assert conversation(tokenizer) is None


def test_fewer_windows_are_the_first_of_more(model: Path) -> None:
    """The text depends on the model and the seed alone."""
    opened = open_model(str(model))
    many, few = (self_written(opened, count, 32, 0, CPU, silent) for count in (BATCH + 10, 7))
    assert many.shape == (BATCH + 10, 32)
    assert torch.equal(many[:7], few)
    assert not torch.equal(self_written(opened, 7, 32, 1, CPU, silent), few)


def test_windows_begin_with_the_first_token_only_where_that_is_asked(model: Path, tmp_path: Path) -> None:
    """The text is the same; a tokenizer that begins texts with a token begins windows with it, unless told otherwise."""
    folder = Path(shutil.copytree(model, tmp_path / "with-bos"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="a $A", special_tokens=[("a", 5)])
    tokenizer.save_pretrained(folder)
    opened = open_model(str(folder))
    begun, bare = (self_written(opened, 6, 32, 0, CPU, silent, first) for first in ("auto", "none"))
    assert begun[:, 0].tolist() == [5] * 6
    assert torch.equal(begun[:, 1:].flatten()[:60], bare.flatten()[:60])


def test_a_model_is_measured_on_other_text_of_its_original(model: Path, tmp_path: Path) -> None:
    """16 windows by default; without the original there is nobody to write them."""
    nearplane.quantize(model, tmp_path / "out", solver="round-to-nearest", **FAST)
    found = nearplane.evaluate(tmp_path / "out", "self", against=model, seqlen=32)
    windows = self_written(open_model(str(model)), 16, 32, 1, CPU, silent)
    assert (found.windows, found.text) == (16, "self")
    assert found.kl == nearplane.evaluate(tmp_path / "out", windows, against=model).kl
    with pytest.raises(RecipeError, match="--text self is text that the original writes: pass it with --against"):
        nearplane.evaluate(tmp_path / "out", "self")


def test_the_text_is_kept_for_the_next_run(model: Path, own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second call of the same kind takes the kept tokens, until a file of the model changes."""
    caplog.set_level(logging.INFO)
    opened = open_model(str(model))
    first = self_written(opened, 5, 32, 0, CPU, silent)
    assert "the network writes" in caplog.text
    assert len([*own_cache.rglob("*.safetensors")]) == 1
    caplog.clear()
    assert torch.equal(self_written(opened, 5, 32, 0, CPU, silent), first)
    assert "wrote before" in caplog.text
    assert "the network writes" not in caplog.text
    (model / "generation_config.json").touch()
    caplog.clear()
    assert torch.equal(self_written(opened, 5, 32, 0, CPU, silent), first)
    assert "the network writes" in caplog.text
    own_cache.joinpath("self").chmod(0o755)
    for file in own_cache.rglob("*.safetensors"):
        file.write_bytes(b"damaged")
    assert torch.equal(self_written(opened, 5, 32, 0, CPU, silent), first)


def test_a_run_is_verified_and_tuned_on_the_same_text(model: Path, tmp_path: Path) -> None:
    """The record names the text `self`; verify and tune find it again, also after what was kept is gone."""
    record = nearplane.quantize(model, tmp_path / "out", calibration="self", **FAST)
    opened = open_model(str(model))
    windows = self_written(opened, record.windows + record.extra_windows, 32, 0, CPU, silent)
    assert record.text == digest_of(windows)
    assert record.recipe.calibration.calibration == "self"
    assert nearplane.verify(tmp_path / "out", against=str(model)).faults == ()
    for file in (tmp_path / "cache").rglob("*.safetensors"):
        file.unlink()
    checked = nearplane.verify(tmp_path / "out", against=str(model))
    assert checked.faults == ()
    assert checked.measured
    tuned = nearplane.tune(tmp_path / "out", tmp_path / "tuned", against=str(model), samples=30, steps=4)
    assert tuned.tuning is not None
    assert tuned.tuning.calibration == "self"
    assert nearplane.verify(tmp_path / "tuned", against=str(model)).faults == ()


def test_it_can_be_part_of_a_mix(model: Path, tmp_path: Path) -> None:
    """`self:2,text.txt:1` alternates between both."""
    record = nearplane.quantize(model, tmp_path / "out", calibration=f"self:2,{nearplane.demo.HELD_OUT}:1", **FAST)
    assert [(source.name, source.windows) for source in record.sources] == [
        ("self", 12),
        (str(nearplane.demo.HELD_OUT), 6),
    ]


def test_a_file_of_that_name_counts_instead(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the other names, a folder `self` is a text of the user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self").mkdir()
    with pytest.raises(CalibrationError, match=r"The folder self contains no \.txt or \.jsonl file"):
        nearplane.quantize(model, tmp_path / "out", calibration="self", **FAST)


def test_models_that_do_not_continue_text_are_refused(tmp_path: Path) -> None:
    """An encoder predicts no next token."""
    AutoModel.from_config(config_of("bert", vocab_size=TEXT_VOCABULARY)).save_pretrained(tmp_path / "bert")
    add_tokenizer(tmp_path / "bert")
    with pytest.raises(
        CalibrationError, match=r"--calibration self needs a network that continues text, which Bert\w+ does not"
    ):
        nearplane.quantize(tmp_path / "bert", tmp_path / "out", calibration="self", **FAST)


def test_a_network_that_does_not_fit_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in memory as a whole while it writes."""
    monkeypatch.setattr(Device, "free", lambda self: 1000)
    with pytest.raises(
        CalibrationError, match=r"holds the whole network in memory, \d+ KB on cpu, where 1\.00 KB are free"
    ):
        nearplane.quantize(model, tmp_path / "out", calibration="self", **FAST)
