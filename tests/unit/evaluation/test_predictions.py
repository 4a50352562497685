"""What networks predict is the same whether they are in memory or pass block by block from disk."""

import logging
from pathlib import Path

import pytest
import torch

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.demo import HELD_OUT
from nearplane.evaluation import predictions as predictions
from nearplane.formats.stored import DecodedReader
from nightly import daily

WAYS = {
    "llama": {"bits": 4},
    "gpt2": {"bits": 3, "format": "gptq"},
    "gemma2": {"rate": 3.0},
    "gpt_neox": {"rate": 3.0, "include_head": True},  # whose head has another name in files
    "qwen3_moe": {"bits": 4, "group_size": 16},
}
TEXT = dict(seqlen=24, samples=7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function from a family to an original and its quantized folder."""

    def made(family):
        place = tmp_path_factory.mktemp(family)
        random_model(config_of(family, vocab_size=TEXT_VOCABULARY, num_hidden_layers=2)).float().save_pretrained(
            place / "model"
        )
        add_tokenizer(place / "model")
        words = {"group_size": 16} if "bits" in WAYS[family] else {}
        nearplane.quantize(
            place / "model", place / "out", solver="round-to-nearest", device="cpu", **{**words, **WAYS[family]}
        )
        return str(place / "model"), str(place / "out")

    return made


@pytest.mark.parametrize("family", daily(WAYS, ["llama", "qwen3_moe"]))
def test_block_by_block_is_the_same_to_the_last_digits(folders, family, monkeypatch, caplog):
    """In chunks of one batch of two windows, the last of one."""
    original, out = folders(family)
    monkeypatch.setattr(predictions, "BATCH_TOKENS", 48)
    held = nearplane.evaluate(out, HELD_OUT, against=original, device="cpu", **TEXT)
    assert "block by block" not in caplog.text
    monkeypatch.setattr(predictions, "MAX_MEMORY_SHARE", 0.0)
    monkeypatch.setattr(predictions, "STATES", 0.0)
    passes = []
    monkeypatch.setattr(
        predictions, "skeleton", lambda *a, **w: (passes.append(sum(map(len, a[1]))), skeleton(*a, **w))[1]
    )
    with caplog.at_level(logging.INFO, "nearplane"):
        streamed = nearplane.evaluate(out, HELD_OUT, against=original, device="cpu", **TEXT)
    assert passes == [1, 1, 2, 2, 2, 2, 2, 2, 1, 1]  # the first two tell whether it runs block by block
    assert caplog.text.count("runs block by block") == 2
    for name in ("nll", "kl", "original"):
        assert getattr(streamed, name) == pytest.approx(getattr(held, name), rel=1e-6, abs=1e-9)
    assert streamed.agreement == held.agreement


skeleton = predictions.skeleton


@pytest.mark.parametrize("step", ["open_model", "skeleton"])
def test_what_does_not_run_block_by_block_is_held_and_that_is_said(folders, monkeypatch, caplog, step):
    def apart(*args, **words):
        raise nearplane.ModelError("No blocks are found.")

    original, _ = folders("llama")
    monkeypatch.setattr(predictions, "MAX_MEMORY_SHARE", 0.0)
    monkeypatch.setattr(predictions, step, apart)
    found = nearplane.evaluate(original, HELD_OUT, device="cpu", **TEXT)
    assert torch.isfinite(torch.tensor(found.nll))
    assert "is loaded as a whole, because it cannot run block by block: No blocks are found." in caplog.text


def test_a_layer_that_is_larger_than_all_of_the_network_is_refused(folders):
    _, out = folders("llama")
    with pytest.raises(nearplane.FormatError, match=r"config\.json describes no weight of more than 6"):
        DecodedReader(Path(out), {"norm.weight": (2, 3)}, (), {})


def test_a_layer_that_config_json_makes_huge_is_refused_before_memory_is_taken(folders):
    """A parameter of 80 GB was asked for first, and the error was that of the allocator."""
    _, out = folders("llama")
    weight = "model.layers.0.mlp.up_proj.weight"
    reader = DecodedReader(Path(out), {weight: (10**12, 32)}, (), {})
    with pytest.raises(
        nearplane.FormatError, match=r"up_proj is 64 x 32, but config\.json describes 1000000000000 x 32"
    ):
        reader.read([weight])
