"""generate(): text from any folder, piece by piece; the likeliest tokens are those of the network itself."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
import weakref
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import nearplane
from children import Child, command
from families import config_of, random_model
from nearplane import ModelError, NearplaneError, RecipeError
from nearplane.cli.app import app, main
from nearplane.cli.generate_command import first_difference
from nearplane.demo import CALIBRATION, MODEL
from nearplane.models.pretrained import tokenizer_of
from nearplane.verbs import generate as module
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.generate import UNFINISHED, continued
from tokenizers_of_kinds import of_pieces, saved
from translating import BART, KINDS, save_translating

PROMPT = "Return the number of"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}Return{% endif %}"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "gguf"
    words = {"samples": 1, "seqlen": 16, "solver": "round-to-nearest", "format": "gguf", "bits": 8, "group_size": 32}
    nearplane.quantize(MODEL, folder, calibration=str(CALIBRATION), **words)
    return folder


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """Return the demo model with a chat template."""
    folder = shutil.copytree(MODEL, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def likeliest(folder: Path, tokens: int, prompt: str = PROMPT) -> str:
    """Return what follows the prompt, one whole forward a token."""
    network, tokenizer = load_dense(folder, torch.device("cpu"))
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    begin = ids.shape[1]
    with torch.inference_mode():
        for _ in range(tokens):
            ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], 1)
    return str(tokenizer.decode(ids[0, begin:]))


def test_the_likeliest_tokens_come_piece_by_piece(out: Path) -> None:
    pieces: list[str] = []
    text = nearplane.generate(out, PROMPT, tokens=12, say=pieces.append)
    assert text == "".join(pieces) == likeliest(out, 12)
    assert len(pieces) > 2


def test_an_error_of_the_callback_is_no_fault_of_the_model() -> None:
    def say(piece: str) -> None:
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        nearplane.generate(MODEL, PROMPT, tokens=2, say=say)


def test_a_seed_that_torch_cannot_take_is_no_fault_of_the_model() -> None:
    with pytest.raises(
        RecipeError, match=r"seed is 18446744073709551616; expected a whole number from 0 to 18446744073709551615"
    ):
        nearplane.generate(MODEL, PROMPT, seed=2**64)


def test_two_models_are_loaded_without_a_bar_between_their_texts() -> None:
    code, printed, said = command("generate", MODEL, PROMPT, "--tokens", 2, "--compare", MODEL).ended()
    assert code == 0, said
    assert printed.count(PROMPT) == 2
    assert not re.search("Loading|it/s|%", printed + said)


def test_a_space_behind_the_prompt_is_said(tmp_path: Path) -> None:
    """Tokenizers like SentencePiece's drop it from text that begins with it."""
    random_model(config_of("llama", vocab_size=1100)).float().save_pretrained(tmp_path)
    saved(of_pieces(space=True), tmp_path)
    network, tokenizer = load_dense(tmp_path, torch.device("cpu"))
    ids = torch.tensor([tokenizer("The")["input_ids"]])
    for seed in range(40, 60):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            drawn = network.generate(ids, max_new_tokens=12, do_sample=True, temperature=50.0, top_k=0)[0]
        whole = tokenizer.decode(drawn, skip_special_tokens=True)
        if UNFINISHED in whole:  # bytes that are no text, which later ones may change
            continue
        found = nearplane.generate(tmp_path, "The", tokens=12, temperature=50.0, seed=seed)
        assert "The" + found == whole
        if found.startswith(" "):
            return
    raise AssertionError("no draw began with a space")


def test_draws_repeat_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    texts = [nearplane.generate(MODEL, PROMPT, tokens=12, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_command_shows_both_their_speed_and_where_they_differ(out: Path) -> None:
    code, said, beside = command("generate", out, PROMPT, "--compare", MODEL, "--tokens", 4).ended()
    first, second = likeliest(out, 4), likeliest(MODEL, 4)
    assert code == 0, (code, said, beside)
    assert said == (f"── {out}\n{PROMPT}{first}\n── {MODEL}\n{PROMPT}{second}\n{first_difference(first, second)}\n")
    speed = r"first token after \d+\.\d\d s, then \d+\.\d tokens per second; weights take {}\n"
    assert re.fullmatch(
        rf"opening .*\nof the quantized layers \d+ stay packed in 8 bits\n{speed.format('[0-9.]+ MB')}{speed.format('8.39 MB')}",
        beside,
    )


def test_the_head_may_be_rounded_but_not_that_of_llama_cpp(
    chat: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said, beside = command("generate", chat, PROMPT, "--head", "int8", "--tokens", 4).ended()
    assert (code, said.startswith(f"{PROMPT}\n\n")) == (0, True)
    assert "the head is rounded to 8 bits" in beside
    monkeypatch.setattr(module, "runs_in_llama_cpp", lambda folder: True)
    with pytest.raises(RecipeError, match=r"runs in llama\.cpp, which reads the head of the file\. Leave --head out"):
        nearplane.generate(out, PROMPT, head="int8")


def test_pieces_pass_a_pipe_before_the_text_is_finished() -> None:
    """The reader leaves after one letter, which ends the command; a whole text at the end would end it with 0."""
    reader, writer = os.pipe()

    def run() -> None:
        os.close(reader)
        os.dup2(writer, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["nearplane", "generate", str(MODEL), PROMPT, "--tokens", "400"]
        main()

    child = Child(run)
    os.close(writer)
    with open(reader, "rb") as pipe:
        begin = pipe.read(len(PROMPT) + 1)
    assert begin.decode().startswith(PROMPT)
    assert child.ended()[0] == 141


def test_one_model_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    models, alive = [], []

    def load(*given: object, **options: object) -> nn.Module:
        alive.append([model() is not None for model in models])
        model = nearplane.load(*given, **options)  # type: ignore[arg-type]
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(module, "load", load)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(SystemExit):
            app(["generate", str(MODEL), PROMPT, "--compare", str(MODEL), "--tokens", "2", "--device", "cpu"])
    finally:
        gc.enable()
    assert alive == [[], [False]]


def test_a_token_is_read_once_whatever_the_folder_says_of_the_cache(tmp_path: Path) -> None:
    """Folders saved after a training often say `use_cache: false`; a text of 200 tokens took thirteen times as long."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"use_cache": False}))
    read: list[int] = []
    hook = register_module_forward_pre_hook(
        lambda layer, inputs: read.append(inputs[0].numel()) if isinstance(layer, nn.Embedding) else None
    )
    try:
        text = nearplane.generate(folder, PROMPT, tokens=5, device="cpu")
    finally:
        hook.remove()
    assert read[1:] == [1] * 4
    assert text == likeliest(MODEL, 5)


def test_settings_that_are_no_tokens_do_not_reach_the_text(tmp_path: Path) -> None:
    """`max_time` ended a text after one token, and `stop_strings` was an error about a tokenizer."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    path, expected = folder / "generation_config.json", likeliest(MODEL, 6)
    settings = json.loads(path.read_text())
    others = {"max_time": 1e-9, "stop_strings": ["e"], "min_new_tokens": 9, "no_repeat_ngram_size": 1, "bad": 1}
    path.write_text(json.dumps(settings | others))
    assert nearplane.generate(folder, PROMPT, tokens=6, device="cpu") == expected
    model = nearplane.load(folder, device="cpu")
    text = continued(model, tokenizer_of(folder), PROMPT, 6)
    assert (text, model.generation_config.max_time) == (expected, 1e-9)
    first = tokenizer_of(folder)(f"{PROMPT}{expected}")["input_ids"][-6:]
    path.write_text(json.dumps(settings | {"suppress_tokens": first[:1]}))
    assert nearplane.generate(folder, PROMPT, tokens=6, device="cpu") != expected
    path.write_text(json.dumps(settings | {"eos_token_id": first[1]}))
    ended = nearplane.generate(folder, PROMPT, tokens=6, device="cpu")
    assert ended != expected
    assert expected.startswith(ended)


def test_the_speed_counts_tokens_after_the_first_and_weights_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nearplane.load(MODEL, device="cpu")
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    ticks = count(100, 2)
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(ticks)))
    text = nearplane.generate(MODEL, PROMPT, tokens=5, device="cpu")
    assert (text.first_token_seconds, text.tokens_per_second, text.weight_bytes) == (2.0, 0.5, weights)
    assert nearplane.generate(MODEL, PROMPT, tokens=1, device="cpu").tokens_per_second is None


def test_a_chat_model_answers_a_user(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = likeliest(MODEL, 6, f"user: {PROMPT}\nReturn")
    pieces: list[str] = []
    assert nearplane.generate(chat, PROMPT, tokens=6, say=pieces.append) == answer
    assert "".join(pieces) == f"\n\n{answer}"
    assert nearplane.generate(chat, PROMPT, tokens=6, ignore_chat_template=True) == likeliest(MODEL, 6)
    for words, said in (((), f"\n\n{answer}"), (("--ignore-chat-template",), likeliest(MODEL, 6))):
        with pytest.raises(SystemExit):
            app(["generate", str(chat), PROMPT, "--tokens", "6", *words])
        assert capsys.readouterr().out == f"{PROMPT}{said}\n"


def test_a_chat_template_that_cannot_be_applied_is_one_sentence(chat: Path) -> None:
    (chat / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    with pytest.raises(ModelError, match=r"chat template .* try --ignore-chat-template \(TemplateError: no users\)"):
        nearplane.generate(chat, PROMPT)


def test_a_model_with_an_encoder_answers_with_all_positions_of_its_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "bart", BART | dict(vocab_size=1024, eos_token_id=None))
    folder = save_translating(tmp_path, "bart")
    with pytest.raises(ModelError, match=r"has no tokenizer; expected merges\.txt or tokenizer\.json or vocab\.json\."):
        nearplane.generate(folder, PROMPT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    network, tokenizer = load_dense(folder, torch.device("cpu"))
    prompt = PROMPT * 14
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    assert 44 < ids.shape[1] < 64
    expected = network.generate(ids, max_new_tokens=20, do_sample=False)[0]
    pieces: list[str] = []
    text = nearplane.generate(folder, prompt, tokens=20, say=pieces.append)
    assert pieces[0] == "\n\n"
    assert text == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("prompt", "words", "said"),
    [
        ("word " * 1200, (), "maximum length is 1024"),
        (PROMPT, ("--tokens", "0"), "tokens is 0"),
        (PROMPT, ("--temperature", "200"), "temperature 200.0"),
        (PROMPT, ("--compare", "nowhere"), "nowhere does not exist"),
    ],
    ids=["prompt", "tokens", "temperature", "compared"],
)
def test_nothing_is_printed_before_all_checks(
    prompt: str, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NearplaneError, match=said):
        app(["generate", str(MODEL), prompt, *words])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("prompt", "words", "said"),
    [
        ("", {}, "no tokens"),
        ("word " * 1200, {}, "maximum length is 1024"),
        (PROMPT, {"tokens": 0}, "tokens is 0"),
        (PROMPT, {"temperature": -1.0}, "temperature -1.0"),
    ],
)
def test_what_cannot_be_gone_on_from_is_one_sentence(prompt: str, words: dict[str, float], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        nearplane.generate(MODEL, prompt, **words)  # type: ignore[arg-type]
