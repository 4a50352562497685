"""Whether calibration has enough tokens, in words. Needs no torch, so that the summary can say it of a record."""

from __future__ import annotations

import math

LEAST, ADVISED = 1, 4  # calibration tokens for each input of the widest layer: below the first a run is refused


def shortage(windows: int, seqlen: int, samples: int, widest: str, inputs: int) -> str | None:
    """Return a sentence if there are fewer tokens than advised, else None.

    A Hessian of fewer tokens than inputs has directions of length 0, in which any error looks free; with a few more tokens than
    inputs the losses on the tokens that were fitted are still far below those on other text.

    Args:
        windows, seqlen: those that are fitted, and tokens of each.
        samples: windows that were asked for.
        widest: name of the layer with most inputs.
        inputs: of that layer.
    """
    tokens = windows * seqlen
    if tokens >= ADVISED * inputs:
        return None
    wanted = math.ceil(ADVISED * inputs / seqlen)
    least = f"at least {LEAST} is needed, {ADVISED} or more are advised"
    short = f" The text holds no more than {windows} windows to fit: pass a longer one." if windows < samples else ""
    return (
        f"{tokens:,} calibration tokens are {tokens / inputs:.2g} for each of the {inputs:,} inputs of {widest}; {least}. "
        f"Ask for --samples {wanted} or more (windows of {seqlen} tokens).{short}"
    )
