"""The record of tuning as frozen data, part of the run record of a tuned checkpoint. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nearplane.errors import FormatError
from nearplane.system.sizes import counted, size_text

KL_TOLERANCE = 1e-5  # relative tolerance of the held-out KL from files: float32 sums in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measurement on the held-out windows during tuning.

    Args:
        step: Number of steps of the optimizer so far; 0 at the start.
        training: Mean KL per token of the batches since the last measurement; None at the start.
        held_out: Mean KL per token on the held-out windows.
        bytes: Size of the entropy-coded layers at this step; None on grids, whose size is constant.
    """

    step: int
    training: float | None
    held_out: float
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The losses of a layer before tuning, kept because no file holds these codes and steps any more.

    Args:
        name: Full name of the layer.
        loss, relative_loss, extra_relative_loss, checksum: Values of its `LayerRecord` before tuning.
    """

    name: str
    loss: float
    relative_loss: float
    extra_relative_loss: float | None
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Inputs and results of tuning after the solve. KL is KL(original || quantized) in nats per token.

    Args:
        mode: Mode of tuning; "network" trains steps, norms and codes of all layers at once on the model's predictions.
        calibration: The text as the user named it.
        samples: Number of windows requested.
        windows: Number of windows for training.
        held_windows: Number of held-out windows of the same text, which choose the state that is kept.
        found: Number of windows in the text, fewer than requested if it is short. They include the extra windows, on
            which losses are measured, and windows that no step uses.
        seqlen: Tokens per window.
        text: SHA-256 of the token ids of the windows as little-endian int64, training windows first.
        steps: Number of steps of the optimizer.
        batch: Windows per step.
        rates: First learning rate by kind of parameter.
        codes: Number of codes that differ from the solve.
        curve: Held-out and training KL at several steps, beginning with the start.
        kept: The step whose state was kept, the best on the held-out windows; 0: the start.
        held_out: KL on the held-out windows, measured from the files.
        most: Largest allowed size of the entropy-coded layers in bytes: the requested size and 0.3 %, or the size
            before if that is more; None on grids.
        norms: SHA-256 over name, dtype, shape and content of the norms that were changed, by tensor name.
        solved: Losses before tuning, which `nearplane verify` cannot measure again.
        seconds: Time of tuning, including all repeated measurements.
    """

    mode: Literal["network"] = "network"
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
            raise FormatError("The curve of tuning does not begin with step 0.")

    @property
    def start(self) -> float:
        """KL on the held-out windows before tuning."""
        return self.curve[0].held_out

    def sentence(self) -> str:
        """Return the result of tuning as a sentence."""
        on = f"KL on {counted(self.held_windows, 'held-out window')} of {self.seqlen} tokens"
        if not self.kept:
            measured = [point.held_out for point in self.curve[1:]]
            after = f"{min(measured):.5f} at best" if measured else "not finite"
            return (
                f"tuning gained nothing: {on} was {self.start:.5f} before and {after} after, so steps, norms and codes "
                f"are unchanged"
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

    def windows_sentence(self) -> str:
        """Return the windows for training and measurement in words."""
        used = self.steps * self.batch
        passes = used / self.windows
        each = f"{'once' if round(passes, 1) == 1 else f'{passes:.2g} times'} each" if passes >= 1 else f"{used:,} used"
        text = (
            f"{counted(self.steps, 'step')} of {counted(self.batch * self.seqlen, 'token')}, "
            f"{counted(self.windows, 'window')} for training, {each}, {self.held_windows} held out"
        )
        if unused := self.found - self.windows - self.held_windows:
            text += f"; {unused} more are extra windows, on which losses are measured, or unused"
        if self.found < self.samples:
            text += f"; the text has {counted(self.found, 'window')} of {self.seqlen}, {self.samples:,} were requested"
        return text
