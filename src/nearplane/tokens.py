"""The tokens that a run looks at: the windows that are fitted, and whether they are enough.

Knows texts, models' tokenizers and widths; nothing of what is computed from the tokens.
"""

from __future__ import annotations

import hashlib
import logging

import torch
from torch import Tensor

from nearplane.enough import LEAST, shortage
from nearplane.errors import CalibrationError
from nearplane.lattice.solvers import SOLVERS
from nearplane.models.data import read_windows
from nearplane.models.given import Given, refuse_lost
from nearplane.models.stream import Model
from nearplane.recipe import Recipe

DEFAULT_SEQLEN = 2048
RUN = 8  # tokens in a row: text that says something new repeats few runs of so many
VARIED = 0.25  # share of runs that differ: less, and fewer than the widest layer has inputs, is no text to learn from
logger = logging.getLogger("nearplane")


def calibration_windows(model: Model, recipe: Recipe, given: Given | None = None) -> tuple[int, Tensor | None]:
    """Return the length of calibration windows, and the windows (windows, seqlen), or None where nothing looks at the network.

    Args:
        given: texts or tokens in place of what the recipe names.

    Raises:
        CalibrationError: the text cannot be read, or windows are longer than the model has positions.
    """
    wanted, positions = recipe.calibration, model.positions
    if wanted.seqlen is not None and positions is not None and wanted.seqlen > positions:
        raise CalibrationError(
            f"--seqlen {wanted.seqlen} is more than the {positions} positions of the model; pass at most {positions}."
        )
    seqlen = wanted.seqlen or min(DEFAULT_SEQLEN, positions or DEFAULT_SEQLEN)
    if not SOLVERS[recipe.rule.solver].needs_inputs and recipe.allocate != "slope":
        return seqlen, None
    if given is not None and given.tokens is not None:
        return seqlen, given.tokens
    texts = wanted.calibration if given is None else given.texts
    refuse_lost(texts)
    return seqlen, read_windows(model.tokenizer(), texts, samples=wanted.samples, seqlen=seqlen, seed=wanted.seed)


def check_tokens(model: Model, recipe: Recipe, tokens: Tensor | None) -> None:
    """Warn of few calibration tokens (windows, seqlen); refuse too few, and text that says the same again and again.

    Raises:
        CalibrationError: there is less than one token, or less than one that is new, for each input of the widest layer.
    """
    layers = [layer for layer in model.layers if layer.kind != "Embedding"]  # which no token multiplies
    if tokens is None or not layers or not SOLVERS[recipe.rule.solver].needs_inputs:
        return
    widest = max(layers, key=lambda layer: layer.shape[1])
    inputs, (windows, seqlen) = widest.shape[1], tokens.shape
    said = shortage(windows, seqlen, recipe.calibration.samples, widest.name, inputs)
    if said is not None and tokens.numel() < LEAST * inputs:
        raise CalibrationError(said)
    different, runs = distinct_runs(tokens)
    if different < min(LEAST * inputs, VARIED * runs):
        raise CalibrationError(
            f"The calibration text says the same again and again: of {runs:,} runs of {min(RUN, seqlen)} tokens {different:,} "
            f"differ, fewer than the {inputs:,} inputs of {widest.name}. Pass text like what the model is for with --calibration."
        )
    if said is not None:
        logger.warning(said)


def distinct_runs(tokens: Tensor) -> tuple[int, int]:
    """Return how many runs of `RUN` neighbouring tokens in windows (windows, seqlen) differ, and how many there are."""
    length = min(RUN, tokens.shape[1])
    runs = tokens.unfold(1, length, 1).reshape(-1, length)  # (runs, length)
    weights = 1_000_003 ** torch.arange(length)  # a hash: what overflows wraps round
    return int((runs * weights).sum(1).unique().numel()), len(runs)


def digest_of_tokens(tokens: Tensor) -> str:
    """Return the SHA-256 of token ids, as little-endian int64."""
    return hashlib.sha256(tokens.to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()
