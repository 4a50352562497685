"""Answers of the original, token by token through both networks; and what cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

import nearplane
from checkpoints import save_part_of_the_demo
from families import add_tokenizer
from nearplane import CalibrationError, ModelError, NearplaneError, RecipeError
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION
from nearplane.verbs import evaluate_chat as program
from nearplane.verbs.evaluate import load_dense

TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}# assistant\n{% endif %}"
)
ROWS = [
    {"messages": [{"role": "user", "content": "The function"}, {"role": "assistant", "content": "not read"},
                  {"role": "user", "content": "returns a list"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "class Message"}]},
]  # fmt: skip
TOKENS = 12


def saved(rows: list[object], path: Path) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_part_of_the_demo(tmp_path_factory.mktemp("models") / "model", blocks=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def coarse(model: Path) -> Path:
    out = model.parent / "coarse"
    nearplane.quantize(model, out, calibration=str(CALIBRATION), samples=32, seqlen=64, bits=2)
    return out


def test_every_token_of_the_originals_answers_is_compared(model: Path, coarse: Path, tmp_path: Path) -> None:
    """By the definition: prompt by prompt, with the original's own answers before it."""
    chat = saved([*ROWS, ""], tmp_path / "chat.jsonl")
    found = nearplane.evaluate_chat(coarse, chat, against=model, answer_tokens=TOKENS)
    tokenizer, (ours, _), (theirs, _) = (
        AutoTokenizer.from_pretrained(model),
        *(load_dense(each, torch.device("cpu")) for each in (coarse, model)),
    )
    kl, same, turns = [], [], {1: 0, 2: 0}
    for row in ROWS:
        history = []
        for turn, message in enumerate([each for each in row["messages"] if each["role"] != "assistant"]):
            history.append(message)
            if message["role"] == "system":
                continue
            text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
            prompt, answer = tokenizer(text, add_special_tokens=False)["input_ids"], []
            for _ in range(TOKENS):
                ids = torch.tensor([prompt + answer])
                with torch.no_grad():
                    p, q = (network(ids).logits[0, -1].double().log_softmax(-1) for network in (theirs, ours))
                kl.append(float((p.exp() * (p - q)).sum()))
                same.append(int(p.argmax()) == int(q.argmax()))
                answer.append(int(p.argmax()))
                turns[1 if history[0]["role"] == "system" else turn + 1] += 1
                if answer[-1] == tokenizer.eos_token_id:
                    break
            history.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=False)})
    assert (found.conversations, found.answers, found.tokens) == (2, 3, len(kl))
    assert found.statistics.kl is not None
    assert found.statistics.kl.value == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert found.statistics.same_top is not None
    assert found.statistics.same_top.value == pytest.approx(sum(same) / len(same))
    assert {turn.number: turn.tokens for turn in found.turns} == turns
    assert [turn.answers for turn in found.turns] == [2, 1]
    assert found.statistics.by_position[0].tokens == 3  # the first token of each answer
    lines = str(found).splitlines()
    assert "2 conversations, 3 answers of the original" in lines[0]
    assert "(no interval: few conversations) nats per token" in lines[1]
    assert lines[-1].startswith("KL by token of the answer: 1: ")
    alone = nearplane.evaluate_chat(model, chat, against=model, answer_tokens=2, samples=1)
    assert (alone.conversations, alone.statistics.kl.value, alone.statistics.same_top.value) == (1, 0.0, 1.0)


def test_calls_of_tools_are_counted_where_the_original_makes_one(
    model: Path, coarse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The networks here know no tools, so what they write is given."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    good, other, broken, none = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {}}', '{"name": "f"', "Hi"
    pairs = iter([(good, good), (good, other), (good, broken), (none, good)])
    said: list[str] = []

    def written(self: object, network: object, prompt: object) -> list[int]:
        if not said:
            said.extend(next(pairs))
        text = said.pop(0)
        if text == none:
            said.clear()
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    monkeypatch.setattr(program._Chatting, "_written", written)
    row = {
        "messages": [{"role": "user", "content": "Do it."}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    found = nearplane.evaluate_chat(coarse, saved([row] * 4, tmp_path / "chat.jsonl"), against=model)
    assert (found.with_tools, found.calls, found.calls_kept, found.calls_equal) == (4, 3, 2, 1)
    of_calls = (
        "calls of tools: 3 of 4 answers of the original; of these 2 are calls that parse in the model's own answer"
    )
    assert f"{of_calls}, 1 the same" in str(found)


def test_the_command_prints_it_beside_texts_or_alone(
    model: Path, coarse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = saved(ROWS, tmp_path / "chat.jsonl")
    words = ["evaluate", coarse, "--against", model, "--chat", chat, "--answer-tokens", 3, "--conversations", 1]
    app([*map(str, words)], exit_on_error=False, result_action="return_value")
    assert "1 conversation, 2 answers of the original, 6 tokens" in capsys.readouterr().out
    app([*map(str, words), "--json"], exit_on_error=False, result_action="return_value")
    found = json.loads(capsys.readouterr().out)
    assert (found["texts"], found["tasks"], found["chat"]["answers"]) == ([], [], 2)


WRONG = [
    ([], CalibrationError, "is empty; expected lines such as"),
    (["{"], CalibrationError, "line 1 is no JSON"),
    ([ROWS[0], {"text": "a"}], CalibrationError, "line 2 has no list of messages"),
    ([{"messages": [{"role": "assistant", "content": "a"}]}], CalibrationError, "line 1 has no message to answer"),
]


@pytest.mark.parametrize(("rows", "error", "said"), WRONG)
def test_what_is_no_conversation_is_refused(
    rows: list[object], error: type[NearplaneError], said: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        nearplane.evaluate_chat(model, saved(rows, tmp_path / "chat.jsonl"), against=model)


def test_who_cannot_chat_is_refused_before_weights_are_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = saved(ROWS, tmp_path / "chat.jsonl")
    monkeypatch.setattr(program, "load_dense", None)
    with pytest.raises(RecipeError, match="is no file; expected a"):
        nearplane.evaluate_chat(model, tmp_path / "none.jsonl", against=model)
    with pytest.raises(RecipeError, match="Pass the original with --against"):
        app(["evaluate", str(model), "--chat", str(chat)], exit_on_error=False, result_action="return_value")
    with pytest.raises(RecipeError, match="belong to --chat"):
        app(
            ["evaluate", str(model), "--against", str(model), "--conversations", "1"],
            exit_on_error=False,
            result_action="return_value",
        )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, vocab_size=768)).save_pretrained(tmp_path / "bert")
    add_tokenizer(tmp_path / "bert")
    with pytest.raises(ModelError, match="contains a BertModel, which does not continue text"):
        nearplane.evaluate_chat(tmp_path / "bert", chat, against=tmp_path / "bert")
    monkeypatch.setattr("nearplane.system.device.Device.free", lambda _: 1000)
    with pytest.raises(RecipeError, match="holds both networks in float32 in memory"):
        nearplane.evaluate_chat(model, chat, against=model)


def test_a_model_without_a_chat_template_and_a_template_that_fails_are_named(model: Path, tmp_path: Path) -> None:
    chat = saved(ROWS, tmp_path / "chat.jsonl")
    bare = save_part_of_the_demo(tmp_path / "bare", blocks=1)
    with pytest.raises(ModelError, match="has no chat template, by which conversations become prompts"):
        nearplane.evaluate_chat(bare, chat, against=bare)
    (bare / "chat_template.jinja").write_text("{{ raise_exception('only users') }}")
    with pytest.raises(CalibrationError, match="conversation 1: the chat template cannot be applied"):
        nearplane.evaluate_chat(bare, chat, against=bare)


def test_conversations_end_where_the_positions_do(model: Path, tmp_path: Path) -> None:
    short = save_part_of_the_demo(tmp_path / "short", blocks=1)
    (short / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 48}))
    chat = saved(ROWS[1:], tmp_path / "chat.jsonl")
    found = nearplane.evaluate_chat(short, chat, against=model, answer_tokens=1000)
    assert 0 < found.tokens < 48
    long = saved([{"messages": [{"role": "user", "content": "word " * 60}]}], tmp_path / "long.jsonl")
    with pytest.raises(CalibrationError, match=r"conversation 1 has \d+ tokens before an answer; the models take 48"):
        nearplane.evaluate_chat(short, long, against=model)


def test_objects_are_measured_without_dropout_and_left_as_they_were(model: Path, tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model, attention_dropout=0.5).train()
    chat = saved(ROWS[1:], tmp_path / "chat.jsonl")
    found = nearplane.evaluate_chat(
        network, chat, against=network, tokenizer=AutoTokenizer.from_pretrained(model), answer_tokens=4
    )
    assert found.statistics.kl is not None
    assert found.statistics.kl.value == 0
    assert network.training
