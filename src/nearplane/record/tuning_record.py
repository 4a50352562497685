"""What tuning did, as frozen data: part of the record of a tuned checkpoint. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from nearplane.errors import FormatError
from nearplane.recipe.recipe import Tune
from nearplane.recipe.sizes import counted, size_text

APART = 1e-5  # relative, of the held-out KL by the file and while training: float32 sums in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A look at the held-out windows.

    Args:
        step: How many steps of the optimizer were done; 0 at the start.
        training: Mean KL per token of the batches since the look before; None at the start.
        held_out: Mean KL per token on the held-out windows.
        bytes: That entropy-coded layers would have taken then; None on grids, which take as many whatever the codes are.
    """

    step: int
    training: float | None
    held_out: float
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What a layer had lost before tuning, as the record of that checkpoint said: no file holds these codes and steps any more.

    Args:
        name: Full name of the layer.
        loss, relative_loss, extra_relative_loss, checksum: See `LayerRecord`.
    """

    name: str
    loss: float
    relative_loss: float
    extra_relative_loss: float | None
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was trained after the solve, on what, and what came of it. KL is KL(original || quantized), nats per token.

    Args:
        mode: network: steps, norms and codes of all layers at once, on the network's own predictions.
        calibration: The text, as it was named.
        samples: Windows of it that were asked for.
        windows: Windows that were trained on.
        held_windows: Windows of the same text that were held out, to choose the state that is kept.
        found: Windows that the text gave, fewer than asked for where it is shorter. Those that are neither trained on nor held out
            are the extra ones, on which losses are measured, and those that no step takes.
        seqlen: Tokens of a window.
        text: SHA-256 of the token ids of the windows, trained on first, as little-endian int64.
        steps: Of the optimizer that were done.
        batch: Windows of a step.
        rates: First learning rate of each kind of what was trained.
        codes: Codes that differ from those solved for.
        curve: Held-out and training KL on the way; the first is the start.
        kept: The step whose state was kept, the best on the held-out windows; 0: nothing was better than the start.
        held_out: KL on the held-out windows, of what was read back from the files.
        most: Bytes that entropy-coded layers were allowed: what was asked for and 0.3 %, or what they took before if that is more;
            None on grids.
        norms: SHA-256 of the norms that are not the original's, over name, dtype, shape and content, by name of tensor.
        solved: Losses before, which `nearplane verify` cannot measure again: those in the layers' certificates are of the tuned
            codes and steps.
        seconds: Of tuning, with all that was measured again.
    """

    mode: Tune = "network"
    calibration: str
    samples: int
    windows: int
    held_windows: int
    found: int
    seqlen: int
    text: str
    steps: int
    batch: int
    rates: dict[str, float]
    codes: int
    curve: tuple[Point, ...]
    kept: int
    held_out: float
    most: int | None = None
    norms: dict[str, str] = field(default_factory=dict)
    solved: tuple[Solved, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.curve or self.curve[0].step:
            raise FormatError("tuning: its curve does not begin with the start.")

    @property
    def start(self) -> float:
        """KL on the held-out windows before."""
        return self.curve[0].held_out

    def sentence(self) -> str:
        """Return what came of it, in words."""
        on = f"KL on {counted(self.held_windows, 'held-out window')} of {self.seqlen} tokens"
        if not self.kept:
            looks = [point.held_out for point in self.curve[1:]]
            after = f"{min(looks):.5f} at best" if looks else "never a number"
            return (
                f"tuning gained nothing: {on} was {self.start:.5f} before and {after} after, so steps, norms and codes are as "
                f"solved"
            )
        moved = f", {counted(self.codes, 'code')} moved" if self.codes else ""
        size = ""
        if self.most is not None and (now := next(p.bytes for p in self.curve if p.step == self.kept)) is not None:
            size = f"; layers take {size_text(now)}, {size_text(self.curve[0].bytes or 0)} before"
        took = f" in {self.seconds:.1f} s" if self.seconds else ""
        return (
            f"tuned{took}: {on} {self.start:.5f} -> {self.held_out:.5f} (step {self.kept} of {self.steps}"
            f"{moved}, {counted(len(self.norms), 'norm')} changed{size})"
        )

    def looked_at(self) -> str:
        """Return what was trained on and held out, in words."""
        passes = self.steps * self.batch / self.windows
        said = (
            f"{counted(self.steps, 'step')} of {counted(self.batch * self.seqlen, 'token')}, "
            f"{counted(self.windows, 'window')} trained on {'once' if round(passes, 1) == 1 else f'{passes:.2g} times'} each, "
            f"{self.held_windows} held out"
        )
        if left := self.found - self.windows - self.held_windows:
            said += f", {left} left out (extra windows, on which losses are measured, and what no step takes)"
        if self.found < self.samples:
            said += (
                f"; the text holds {counted(self.found, 'window')} of {self.seqlen}, {self.samples:,} were asked for"
            )
        return said


def odd(tuning: Tuning) -> Iterator[str]:
    """Yield what cannot be true of a tuning, whatever the data."""
    fitting = [point for point in tuning.curve if tuning.most is None or (point.bytes or 0) <= tuning.most]
    best = min(fitting, key=lambda point: point.held_out, default=None)
    if best is None:
        yield f"all states of its curve take more than the {tuning.most:,} bytes that layers were allowed"
    elif best.step != tuning.kept:
        yield f"the state of step {tuning.kept} was kept, the best on the held-out windows is that of step {best.step}"
    kept = next((point.held_out for point in tuning.curve if point.step == tuning.kept), math.nan)
    if not math.isclose(kept, tuning.held_out, rel_tol=APART, abs_tol=1e-12):
        yield f"held-out KL is {tuning.held_out:.9g} by the files, and {kept:.9g} on the curve"
    if [point.step for point in tuning.curve] != sorted({point.step for point in tuning.curve}):
        yield "the steps of its curve do not ascend"
    if not tuning.kept and (tuning.norms or tuning.codes):
        yield "norms or codes are said to have changed though the start was kept"
