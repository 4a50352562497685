"""Embeddings and head that config.json ties and the files do not, or the reverse: the files are believed, as by transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import ModelError, RecipeError
from nearplane.demo import CALIBRATION
from nearplane.formats.gguf.gguf_header import FILE, read_header
from nearplane.formats.layer_format import as_tensors_are
from nearplane.models.model import open_model
from nearplane.models.pretrained import empty_network

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = torch.arange(24)[None]
RUN = {"solver": "round-to-nearest", "calibration": str(CALIBRATION), "samples": 1, "seqlen": 16, "device": "cpu"}


def save(folder: Path, *, tied: bool | None, head: str) -> Path:
    """Save a model whose config.json says that embeddings and head are tied or not, and whose head is its own, equal or missing."""
    random_model(
        config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=1, attention_bias=False)
    ).float().save_pretrained(folder)
    add_tokenizer(folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if head == "missing":
        del tensors[HEAD]
    elif head == "equal":
        tensors[HEAD] = tensors[EMBEDDINGS].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | ({} if tied is None else {"tie_word_embeddings": tied})))
    return folder


def test_a_head_of_its_own_is_computed_with_and_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A GGUF left it out, and config.json for MLX said that there is none: both computed with the embeddings."""
    folder = save(tmp_path / "model", tied=True, head="own")
    expected = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
    with caplog.at_level(logging.WARNING, "nearplane"):
        assert torch.equal(nearplane.load(folder, device="cpu")(TOKENS).logits, expected)
    said = f"config.json ties {HEAD} to {EMBEDDINGS}, but the files hold other values for each"
    assert sum(said in record.message for record in caplog.records) == 1  # transformers says so, too
    model = open_model(str(folder), head=True)
    assert (model.tied, model.head is None, model.config.tie_word_embeddings) == (False, False, False)
    for words in ({"grid": "q8_0"}, {"bits": 8, "group_size": 32, "format": "mlx"}):
        out = tmp_path / str(len(words))
        nearplane.quantize(folder, out, **RUN, **words)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
        assert (nearplane.load(out, device="cpu")(TOKENS).logits - expected).abs().max() < 0.05 * expected.abs().max()
        assert not nearplane.verify(out).faults
    assert "output.weight" in [info.name for info in read_header(tmp_path / "1" / FILE).tensors]
    nearplane.export(out, tmp_path / "dense")
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_that_equals_the_embeddings_is_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = open_model(str(save(tmp_path / "model", tied=True, head="equal")))
    assert (model.tied, caplog.records) == (True, [])
    assert open_model(str(save(tmp_path / "alone", tied=True, head="missing"))).tied


@pytest.mark.parametrize("tied", [False, None])
def test_a_missing_head_that_is_not_tied_is_no_random_number(tmp_path: Path, tied: bool | None) -> None:
    folder = save(tmp_path / "model", tied=tied, head="missing")
    for read in (open_model, nearplane.load, empty_network):
        with pytest.raises(
            ModelError, match=r"lack lm_head.weight, and tie_word_embeddings of config.json is false: .* set it"
        ):
            read(folder if read is empty_network else str(folder))


def test_the_field_is_written_where_it_was_missing_and_in_the_language_model() -> None:
    """MLX takes another default than transformers for a Llama."""
    assert as_tensors_are({"a": 1}, {"tie_word_embeddings": False, "b": 2}) == {"a": 1, "tie_word_embeddings": False}
    nested = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True, "c": 3}}
    built = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}
    assert as_tensors_are(nested, built) == {
        "tie_word_embeddings": False,
        "text_config": {"tie_word_embeddings": False, "c": 3},
    }
    assert as_tensors_are(nested, {}) == nested


@pytest.mark.parametrize(
    "words", [{"grid": "q8_0"}, {"bits": 8, "group_size": 32, "format": "mlx"}], ids=["gguf", "mlx"]
)
@pytest.mark.parametrize(
    "tensor",
    [
        f"model.layers.{part}"
        for part in ("0.self_attn.q_proj.bias", "0.self_attn.q_norm.weight", "1.input_layernorm.weight")
    ],
)
def test_tensors_that_only_other_programs_would_read_are_refused(
    tmp_path: Path, words: dict[str, object], tensor: str
) -> None:
    """llama.cpp computes with the biases of a Llama, whatever attention_bias says."""
    folder = save(tmp_path / "model", tied=False, head="own")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {tensor: torch.ones(32)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=rf"{tensor} is in the files, but not in the network of config\.json"):
        nearplane.quantize(folder, tmp_path / "out", **RUN, **words)
