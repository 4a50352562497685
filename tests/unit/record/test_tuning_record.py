"""What the record says of a tuning."""

from dataclasses import replace

import pytest

from nearplane.record.contradictions import tuning_contradictions
from nearplane.record.tuning_record import Point, Tuning

CURVE = (Point(step=0, training=None, held_out=0.5), Point(step=8, training=0.4, held_out=0.3))


TUNING = Tuning(
    calibration="text", samples=9, windows=8, held_windows=1, found=9, seqlen=32, text="", steps=8, batch=1, rates={"steps": 0.1},
    codes=3, curve=CURVE, kept=8, held_out=0.3,
)  # fmt: skip


def test_a_tuning_says_what_was_gained():
    assert "0.50000 -> 0.30000 (step 8 of 8, 3 codes moved, 0 norms changed)" in TUNING.sentence()
    assert list(tuning_contradictions(TUNING)) == []
    assert "was 0.50000 before and not finite after" in replace(TUNING, curve=CURVE[:1], kept=0).sentence()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kept": 0, "held_out": 0.5, "codes": 0}, "but step 8 is the best on the held-out windows"),
        ({"held_out": 0.29}, "0.29 from the files"),
        ({"curve": CURVE[:1], "kept": 0, "held_out": 0.5}, "although the start was kept"),
        ({"curve": (*CURVE, *CURVE)}, "do not ascend"),
    ],
)
def test_what_cannot_be_true_of_a_tuning_is_said(changes, said):
    assert any(said in what for what in tuning_contradictions(replace(TUNING, **changes)))
