"""Thresholds of a run that no option changes: tokens of a layer, and the size of those with a limit. Needs no torch."""

from __future__ import annotations

# calibration tokens for each input of a layer: a run with fewer than the first for the widest is refused, and an expert with
# fewer gets the mean of the others added; with fewer than the second, losses are too small to be trusted, which is said, and
# --rare-experts error ends the run; the default number of windows for experts follows from the second, too
MIN_TOKENS_PER_INPUT, ADVISED_TOKENS_PER_INPUT = 1, 4
USEFUL_TOKENS_PER_INPUT = (
    20  # KL of SmolLM2 at 4 bits: 0.164 with 2.7 tokens for each input, 0.114 with 21 (real-models.jsonl)
)
MAX_CERTIFIED_INPUTS = 4096  # no limit is computed for wider layers, as it would take longer than the solve
