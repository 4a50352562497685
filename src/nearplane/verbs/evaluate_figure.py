"""Figure of `evaluate`: KL to the original by position in the window, and its histogram over tokens, a curve for each text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nearplane.errors import RecipeError
from nearplane.verbs.evaluate import Measured
from nearplane.verbs.figure_file import figure_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# of Okabe and Ito, for colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LEAST_KL, LARGEST_KL = 1e-9, 1e3  # in nats; tokens outside are counted there
BINS = 60


def draw(measured: Sequence[Measured], out: str | Path) -> None:
    """Draw the KL by position with its 95 % intervals where there are several ranges, and the histogram of log10 KL.

    Args:
        measured: Evaluations against an original, one for each text.
        out: File to write; its name ends in .svg, .png or .pdf.

    Raises:
        RecipeError: matplotlib is not installed, `out` has another suffix, or no predictions were compared.
    """
    compared = [each for each in measured if each.scores is not None and each.scores.kl is not None]
    with figure_file(out) as figure:
        if not compared:
            raise RecipeError("There is nothing to draw: an encoder has no predictions. Leave out --plot.")
        ranged = any(_ranges(each) > 1 for each in compared)  # llama.cpp scores positions of one range
        figure.set_size_inches(9.0 if ranged else 4.8, 3.8)
        *left, histogram = figure.subplots(1, 1 + ranged, squeeze=False)[0]
        for number, each in enumerate(compared):
            colour = COLOURS[number % len(COLOURS)]
            _histogram(histogram, each, colour)
            if left:
                _by_position(left[0], each, colour)
        if left:
            left[0].set(
                xscale="log", yscale="log", xlabel="tokens before the predicted one", ylabel="KL, nats per token"
            )
            left[0].set_title("mean KL, and its 95 % interval", fontsize=9)
        histogram.set(xlabel="log10 of the KL of a token in nats", ylabel="share of the tokens, %")
        histogram.set_title("KL of single tokens; the dashed line is their mean", fontsize=9)
        if len(compared) > 1:
            histogram.legend(frameon=False, fontsize=8)


def _ranges(measured: Measured) -> int:
    """Return how many ranges of positions were scored."""
    assert measured.evaluation.statistics is not None
    return len(measured.evaluation.statistics.by_position)


def _by_position(axes: Axes, measured: Measured, colour: str) -> None:
    """Draw the mean KL of each range of positions at its geometric middle."""
    assert measured.evaluation.statistics is not None
    ranges = measured.evaluation.statistics.by_position
    middles = [(part.first * part.last) ** 0.5 for part in ranges]
    axes.plot(middles, [part.kl.value for part in ranges], color=colour, marker="o", markersize=4)
    known = [(x, part.kl.low, part.kl.high) for x, part in zip(middles, ranges, strict=True) if part.kl.low is not None]
    if known:
        inside, low, high = zip(*known, strict=True)
        axes.fill_between(inside, low, high, color=colour, alpha=0.2, linewidth=0)


def _histogram(axes: Axes, measured: Measured, colour: str) -> None:
    """Draw the share of the tokens in each bin of log10 KL, and its mean as a line."""
    assert measured.scores is not None
    assert measured.scores.kl is not None
    values = measured.scores.kl.numpy()
    logarithms, mean = (np.log10(np.clip(each, LEAST_KL, LARGEST_KL)) for each in (values, values.mean()))
    shares = np.full(len(values), 100 / len(values))
    name = Path(measured.evaluation.text).name
    axes.hist(logarithms, bins=BINS, weights=shares, color=colour, histtype="stepfilled", alpha=0.4, label=name)
    axes.axvline(mean, color=colour, linewidth=1, linestyle=(0, (4, 3)))
