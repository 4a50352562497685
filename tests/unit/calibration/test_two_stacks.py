"""Encoder and decoder pass block by block as one stream: what is seen there is what the whole network does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from bare_blocks import both
from nearplane.calibration.activations import skeleton
from nearplane.calibration.network_ends import readout
from nearplane.calibration.one_forward import BlockForward
from nearplane.calibration.rows import Rows
from nearplane.calibration.separate_passes import rows_by_batch
from nearplane.calibration.stages import stages
from nearplane.calibration.two_stacks import joined_stacks
from nearplane.errors import ModelError
from nearplane.models.model import open_model
from translating import VOCABULARY, predicted, save_translating

TOKENS = torch.randint(3, VOCABULARY, (5, 12), generator=torch.Generator().manual_seed(1))
HERE = {"device": torch.device("cpu"), "dtype": torch.float32}
CROSS = {
    "t5": ("encoder.block.0.layer.1.DenseReluDense.wo", "decoder.block.0.layer.1.EncDecAttention.k"),
    "bart": ("model.encoder.layers.0.fc2", "model.decoder.layers.0.encoder_attn.k_proj"),
}  # fmt: skip


@pytest.fixture(params=sorted(CROSS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_comes_out_behind_all_blocks_is_what_the_network_predicts(kind: str, tmp_path: Path) -> None:
    """T5's first blocks make the bias of positions for all, and its encoder ends in a norm; BART has neither."""
    model = open_model(str(save_translating(tmp_path, kind)))
    assert len(model.stacks) == 2
    stream = skeleton(model, TOKENS.split(2), **HERE)
    for block in model.blocks:
        with block.on(**HERE, original=False):
            stream.advance(block)
    expected = predicted(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), TOKENS)
    with readout(model, stream, **HERE) as logits, torch.no_grad():
        found = torch.cat([logits(p, x) for p, x in zip(TOKENS.split(2), stream.quantized, strict=True)])
    torch.testing.assert_close(found, expected.roll(-1, 1), rtol=1e-4, atol=1e-5)


def test_cross_attention_sees_the_encoder_of_its_own_network(kind: str, tmp_path: Path) -> None:
    """A layer of the encoder is written; what keys of the decoder see changes in one network, and not in the other."""
    changed, keys = CROSS[kind]
    model = open_model(str(save_translating(tmp_path, kind)))
    stream = both(skeleton(model, TOKENS.split(2), **HERE))
    for block in model.blocks:
        with block.on(**HERE):
            for layer in block.quantized_layers():
                if layer.name == changed:
                    layer.write(layer.read() * 0.5)
            groups = [group for group in stages(block, stream) if keys in {layer.name for layer in group}]
            if groups:
                assert len(groups[0]) == 2, "keys and values see the same"
                shown = [rows for (rows,) in rows_by_batch(block, groups, stream)]
                break
            stream.advance(block)
    assert all(isinstance(rows, Rows) for rows in shown)
    network = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    entered: list[torch.Tensor] = []
    network.get_submodule(keys).register_forward_pre_hook(lambda _, args: entered.append(args[0].flatten(0, 1)))
    predicted(network, TOKENS)
    network.get_submodule(changed).weight.data *= 0.5
    predicted(network, TOKENS)
    original, quantized = entered
    for found, expected in (([rows.X for rows in shown], original), ([rows.X_hat for rows in shown], quantized)):
        torch.testing.assert_close(torch.cat(found).float(), expected, rtol=1e-4, atol=1e-5)
    assert (original - quantized).norm() > 0.01 * original.norm()


def test_a_bias_of_positions_is_no_hidden_state_where_it_is_as_large(tmp_path: Path) -> None:
    """Of windows as long as hidden states are wide, and as many as there are heads, T5's has the shape of theirs."""
    model = open_model(str(save_translating(tmp_path, "t5")))
    tokens = torch.randint(3, VOCABULARY, (5, 32), generator=torch.Generator().manual_seed(1))
    stream = both(skeleton(model, (tokens[:1], tokens[1:]), **HERE))
    with (
        model.blocks[0].on(**HERE) as block,
        closing(BlockForward(block, stream, sequential=True, room=1 << 40)) as passage,
    ):
        assert [len([*rows]) for _, rows in passage] == [2, 2, 2, 2]
        assert not passage.repeated


def test_stacks_of_two_widths_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^The hidden states of decoder\.0 have width 6, those of the encoder 4"):
        joined_stacks(torch.zeros(1, 2, 4), torch.zeros(1, 2, 6), "decoder.0")
