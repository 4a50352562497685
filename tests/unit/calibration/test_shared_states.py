"""Blocks that use keys and values of earlier blocks, as Gemma 4 does: each network has its own, also after a stop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import nearplane
from bare_blocks import both
from killing import contents, stopped_behind
from model_types import VOCABULARY, save_type
from nearplane.calibration.activations import skeleton
from nearplane.calibration.network_ends import readout
from nearplane.calibration.shared_states import SharedStates
from nearplane.calibration.stages import try_blocks
from nearplane.errors import RecipeError
from nearplane.models.model import open_model
from nearplane.record.record_file import read_record
from nearplane.system.device import Device

KINDS = ["sliding_attention", "full_attention"] * 3  # blocks 2 and 3 leave keys and values, 4 and 5 use them
TOKENS = torch.randint(3, VOCABULARY, (16, 32), generator=torch.Generator().manual_seed(1))
FAST = {"calibration": TOKENS, "device": "cpu", "group_size": 16, "bits": 2, "compute_dtype": "float32"}
LAST = "model.layers.5.self_attn.o_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gemma4"
    return save_type(folder, "gemma4_text", layer_types=KINDS, num_hidden_layers=6)


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outs") / "out"
    nearplane.quantize(model, folder, **FAST)
    return folder


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def inputs_of(network: PreTrainedModel, name: str, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that reach a layer of the whole network, and what it makes of them."""
    rows: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        rows.append((args[0].flatten(0, 1), output.flatten(0, 1)))

    hook = network.get_submodule(name).register_forward_hook(keep)
    with torch.no_grad():
        network(tokens, use_cache=False)
    hook.remove()
    return rows[0]


@pytest.mark.parametrize("kind", ["gemma4_text", "glm_moe_dsa", "hy_v4", "zaya"])
def test_block_by_block_equals_the_whole_network(kind: str, tmp_path: Path) -> None:
    """Keys and values go to all later blocks; what is chosen of an index (DSA) and a router's state to the next one."""
    opened = open_model(str(save_type(tmp_path, kind)))
    stream = both(skeleton(opened, TOKENS.split(5), device="cpu", dtype=torch.float32))
    for block in opened.blocks:
        with block.on("cpu", torch.float32):
            stream.advance(block)
    with torch.no_grad(), readout(opened, stream, device="cpu", dtype=torch.float32) as logits:
        whole = loaded(tmp_path)(TOKENS, use_cache=False).logits
        for states in (stream.quantized, stream.original):
            found = [logits(part, each) for part, each in zip(TOKENS.split(5), states or [], strict=True)]
            assert (torch.cat(found) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_each_network_has_its_own(model: Path, out: Path, tmp_path: Path) -> None:
    """The loss of a layer in a block that uses others' keys is that of two whole networks, on windows that fit nothing."""
    nearplane.export(out, tmp_path / "dense", dtype="float32")
    record = nearplane.verify(out, against=model, calibration=TOKENS)
    assert record.faults == ()
    (layer,) = (each for each in read_record(out).layers if each.name == LAST)
    extra = TOKENS[-1:]
    _, expected = inputs_of(loaded(model), LAST, extra)
    _, found = inputs_of(loaded(tmp_path / "dense"), LAST, extra)
    assert layer.extra_relative_loss == pytest.approx(
        float((found - expected).square().sum() / expected.square().sum()), rel=1e-3
    )


def test_a_run_that_is_stopped_behind_them_ends_with_the_same_bytes(
    model: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)
    stopped_behind(4, model, tmp_path / "again", monkeypatch, **FAST)
    nearplane.quantize(model, tmp_path / "again", **FAST)
    assert contents(tmp_path / "again") == contents(out)


def test_what_they_take_is_counted(model: Path) -> None:
    """Of one window: inputs of every block from a table of its own, and two times two tensors of 32 tokens, 2 heads of 16 or 32."""
    looks = try_blocks(open_model(str(model)), TOKENS, Device(torch.device("cpu")))
    assert {look.beside for look in looks.values()} == {(6 * 32 * 16 * 4, 2 * 32 * 2 * (16 + 32) * 4)}


def test_they_are_copies() -> None:
    states, keys = SharedStates(), torch.ones(2)
    states["sliding_attention"] = keys, keys
    keys.fill_(torch.nan)
    assert states["sliding_attention"][0].tolist() == [1, 1]


def test_tuning_is_refused_where_gradients_would_pass_through_what_is_handed_on(tmp_path: Path) -> None:
    """Chosen tokens have no gradients; a router's states do."""
    source = save_type(tmp_path / "zaya", "zaya")
    nearplane.quantize(source, tmp_path / "out", **FAST | {"runtime": "nearplane"})
    with pytest.raises(RecipeError, match="ZayaForCausalLM cannot be tuned: its blocks hand more than hidden states"):
        nearplane.tune(tmp_path / "out", tmp_path / "tuned", against=source, calibration=TOKENS)


def test_tuning_is_refused(model: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the last 2 blocks of Gemma4ForCausalLM use keys and values of earlier"):
        nearplane.tune(out, tmp_path / "tuned", against=model, calibration=TOKENS)
    assert not (tmp_path / "tuned").exists()
