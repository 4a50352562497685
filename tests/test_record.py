"""The record survives JSON, and adds up."""

import pytest

from nearplane import FormatError, Recipe, Rule
from nearplane.record import LayerRecord, RunRecord, read_record

LAYER = LayerRecord(
    name="model.layers.0.mlp.up_proj", out_features=8, in_features=16, loss=0.5, relative_loss=0.01, nearest_loss=0.9,
    damped_loss=0.6, worst_case=2.0, expected=2 / 3, gamma=3.5, clipped=0.0, clipped_rows=0.0, correction=0.7, damp=0.01, dead=0,
    tokens=512, order="activation", bits=3, group_size=None, symmetric=True, seconds=0.1, bytes=64,
)  # fmt: skip
RUN = RunRecord(
    recipe=Recipe(rule=Rule(bits=3), ignore=("head",)), source="somewhere", versions={"torch": "2"}, device="cpu", windows=2,
    seqlen=256, tokens=512, layers=(LAYER, LAYER), skipped=(("router", "Router"),), seconds=1.5, bytes=4096,
)  # fmt: skip


def test_a_record_survives_json():
    assert RunRecord.from_json(RUN.to_json()) == RUN


def test_rate_counts_every_byte_of_the_layers():
    assert LAYER.rate == 8 * 64 / 128
    assert RUN.rate == 4.0


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"recipe": {}}', RUN.to_json().replace('"loss"', '"lose"')])
def test_what_is_no_record_is_refused(text, tmp_path):
    (tmp_path / "nearplane.json").write_text(text)
    with pytest.raises(FormatError, match=r"nearplane\.json"):
        read_record(tmp_path)
