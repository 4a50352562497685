"""A rotated model is the same network, an ordinary folder, and is quantized like any other; others are refused by name."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import nearplane
from checkpoints import save_part_of_the_demo
from families import LLAMA, MOE, config_of
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.errors import ModelError, NearplaneError, RecipeError
from nearplane.models.rotation import cosines, rotated
from nearplane.verbs import rotate as module

PERMIT = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "granite", "smollm3", "phi3"]


def saved(kind: str, folder: Path, **more: object) -> Path:
    """Save a random network, with norms and biases that are not 1 and 0."""
    torch.manual_seed(0)
    config = config_of(kind, **(LLAMA | MOE | dict(tie_word_embeddings=False, attention_bias=True) | more))
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    network.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return network(torch.arange(40)[None] % network.config.vocab_size).logits


@pytest.mark.parametrize("n", [1, 2, 9, 32, 96, 576])
def test_the_matrix_is_orthogonal_and_spreads_every_channel(n: int) -> None:
    R = rotated(torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(R @ R.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(R.abs().max()) <= math.sqrt(2 / n) + 1e-12
    torch.testing.assert_close(cosines(n) @ cosines(n).T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", PERMIT)
def test_the_network_is_the_same(kind: str, tmp_path: Path) -> None:
    """To rounding in float32; no weight of it is."""
    model = saved(kind, tmp_path / "model")
    nearplane.rotate(model, tmp_path / "out")
    before, after = logits(model), logits(tmp_path / "out")
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * float(before.abs().max()))
    one, other = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (model, tmp_path / "out"))
    changed = [name for name in one if not torch.equal(one[name], other[name])]
    stays = ("_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias", "up_proj.bias", "gate_proj.bias")
    assert all(name in changed or name.endswith(stays) for name in one)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "olmo2", "cohere", "gpt_neox"])
def test_architectures_that_a_rotation_changes_are_refused(kind: str, tmp_path: Path) -> None:
    more = {"tie_word_embeddings": False}
    with pytest.raises(ModelError, match=r"rotat.* Quantize the model as it is"):
        nearplane.rotate(saved(kind, tmp_path / "model", **more), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_norms_that_add_one_to_their_weights_are_found_by_running(tmp_path: Path) -> None:
    """The names are those of Llama."""
    with pytest.raises(ModelError, match=r"A rotation changes GemmaForCausalLM: logits of a small one differ by"):
        nearplane.rotate(saved("gemma", tmp_path / "model"), tmp_path / "out")


def test_a_head_that_the_files_untie_is_untied_in_the_config(tmp_path: Path) -> None:
    """After a rotation the head has the last norm in it, too. Old files have the frequencies of positions besides."""
    model = saved("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    state = torch.get_rng_state()
    nearplane.rotate(model, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), state)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    (model / "config.json").write_text(json.dumps(config))
    before, after = logits(model), logits(tmp_path / "out")
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * float(before.abs().max()))


def test_a_folder_that_could_not_be_finished_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved("llama", tmp_path / "model")

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "json_text", full)
        with pytest.raises(NearplaneError, match="No space left"):
            nearplane.rotate(model, tmp_path / "out")
    nearplane.rotate(model, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    "kinds", [["sliding_attention", "full_attention"] * 3, ["sliding_attention"] * 5 + ["full_attention"]]
)
def test_every_kind_of_block_is_tried(kinds: list[str]) -> None:
    config = config_of("qwen3", **(LLAMA | dict(num_hidden_layers=6, layer_types=kinds, sliding_window=8)))
    assert {*module._small(config).config.layer_types} == {*kinds}


def test_a_wrong_role_is_found_by_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the names promise is tried on a small network: here no norm is moved."""
    monkeypatch.setattr("nearplane.models.rotation.torch.ones_like", lambda tensor: tensor)
    with pytest.raises(ModelError, match=r"A rotation changes LlamaForCausalLM: logits of a small one differ by"):
        nearplane.rotate(saved("llama", tmp_path / "model"), tmp_path / "out")


def test_tied_heads_and_folders_in_use_are_refused(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"The head of .*tied is a copy of its embeddings"):
        nearplane.rotate(model, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(RecipeError, match="out exists and is not empty"):
        nearplane.rotate(model, tmp_path / "out")


def test_it_is_quantized_and_compared_with_the_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, with its tokenizer; in bfloat16 the rotated model is nearly the original."""
    model = save_part_of_the_demo(tmp_path / "model")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    network.config.tie_word_embeddings = False
    network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.detach().clone())
    network.save_pretrained(model)
    app(["rotate", str(model), str(tmp_path / "rotated")], exit_on_error=False, result_action="return_value")
    assert "nearplane quantize" in capsys.readouterr().out
    text = dict(samples=4, seqlen=64)
    same = nearplane.evaluate(tmp_path / "rotated", HELD_OUT, against=model, **text)
    nearplane.quantize(tmp_path / "rotated", tmp_path / "out", bits=4, calibration=CALIBRATION, samples=8, seqlen=64)
    lost = nearplane.evaluate(tmp_path / "out", HELD_OUT, against=model, **text)
    assert same.kl is not None
    assert lost.kl is not None
    assert same.kl < 0.02 * lost.kl
    assert nearplane.verify(tmp_path / "out", against=str(tmp_path / "rotated")).faults == ()


def test_the_small_network_has_no_usual_weight() -> None:
    network = module._small(config_of("llama", **LLAMA))
    assert all(float(each.std()) > 0 for each in network.parameters())
