"""The record survives JSON, and adds up."""

from dataclasses import replace

import pytest

from nearplane import FormatError, Rate, Recipe, Rule
from nearplane.record import LayerRecord, RunRecord, read_record

LAYER = LayerRecord(
    name="model.layers.0.mlp.up_proj", out_features=8, in_features=16, loss=0.5, row_losses=(0.5, 1e-07), sweep_damp=0.1,
    relative_loss=0.01, nearest_loss=0.9,
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


@pytest.mark.parametrize("others", [0, 5, 99_000, 10**6 - len(RUN.to_json()) - 5, 10**12])
def test_a_record_counts_itself(others):
    record = RUN.in_folder(others)
    assert record.folder == others + len(record.to_json().encode())


def test_a_size_is_of_the_whole_folder():
    asked = replace(RUN, recipe=Recipe(rate=Rate(size="10kB")), bytes=4096, folder=10_040)
    assert asked.missed is None
    assert "10,000 bytes asked for, 10,060 found" in replace(asked, folder=10_060).missed


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"recipe": {}}', RUN.to_json().replace('"loss"', '"lose"')])
def test_what_is_no_record_is_refused(text, tmp_path):
    (tmp_path / "nearplane.json").write_text(text)
    with pytest.raises(FormatError, match=r"nearplane\.json"):
        read_record(tmp_path)
