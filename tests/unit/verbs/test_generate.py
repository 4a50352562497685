"""generate(): text from any folder, piece by piece; the likeliest tokens are those of the network itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nearplane
from families import config_of, random_model
from nearplane import NearplaneError, RecipeError
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION, MODEL
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.generate import UNFINISHED
from tokenizers_of_kinds import of_pieces, saved

PROMPT = "Return the number of"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "gguf"
    words = {"samples": 1, "seqlen": 16, "solver": "round-to-nearest", "format": "gguf", "bits": 8, "group_size": 32}
    nearplane.quantize(MODEL, folder, calibration=str(CALIBRATION), **words)
    return folder


def likeliest(folder: Path, tokens: int) -> str:
    """Return what follows the prompt, one whole forward a token."""
    network, tokenizer = load_dense(folder, torch.device("cpu"))
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
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


def test_the_command_shows_both(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["generate", str(out), PROMPT, "--compare", str(MODEL), "--tokens", "4"])
    assert ended.value.code in (0, None)
    said = capsys.readouterr().out
    assert said == f"── {out}\n{PROMPT}{likeliest(out, 4)}\n── {MODEL}\n{PROMPT}{likeliest(MODEL, 4)}\n"


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
