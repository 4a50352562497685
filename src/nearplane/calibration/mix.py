"""Windows of a mix of texts, which alternate by weight; see `calibration/text_mixes.py` for names, weights and order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nearplane.calibration.named_texts import text_to_calibrate_on
from nearplane.calibration.text_mixes import WeightedText, check_shares, order_of_windows, texts_of
from nearplane.calibration.texts import Frame, read_windows
from nearplane.errors import CalibrationError
from nearplane.recipe.recipe import Calibration
from nearplane.record.record import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A mix of texts with the windows of a run.

    Args:
        texts: The texts with their weights.
        samples, extra: Numbers of calibration windows and of extra windows, which follow them.
        seed: Seed of data sets.
    """

    texts: tuple[WeightedText, ...]
    samples: int
    extra: int
    seed: int

    @classmethod
    def of(cls, options: Calibration, samples: int, extra: int) -> Mix | None:
        """Return the mix that a recipe names, with so many calibration windows, or None.

        It has at least one extra window of each text.

        Raises:
            CalibrationError: The mix is malformed, or a text gets no calibration window.
        """
        if not (texts := texts_of(options.calibration)):
            return None
        check_shares(texts, samples)
        return cls(texts=texts, samples=samples, extra=max(extra, len(texts)), seed=options.seed)

    def order(self, count: int) -> list[int]:
        """Return the number of the text of each of the first `count` windows."""
        weights = [each.weight for each in self.texts]
        return [*islice(order_of_windows(weights, self.samples, self.extra), count)]

    def windows(self, tokenizer: PreTrainedTokenizerBase, count: int, *, seqlen: int, frame: Frame) -> Tensor:
        """Return the first `count` windows, or only those before the first one for which its text is too short.

        Args:
            tokenizer: The tokenizer of the model.
            count: Number of windows.
            seqlen, frame: Arguments of `read_windows`.

        Returns:
            (windows, seqlen) int64.

        Raises:
            CalibrationError: A text is missing, malformed, or shorter than one window.
        """
        order, windows = self.order(count), list[Tensor]()
        of_texts = {
            number: iter(
                read_windows(
                    tokenizer,
                    text_to_calibrate_on(name := self.texts[number].name) or name,
                    samples=order.count(number),
                    seqlen=seqlen,
                    seed=self.seed,
                    frame=frame,
                )
            )
            for number in set(order)
        }
        for number in order:
            if (window := next(of_texts[number], None)) is None:
                break
            windows.append(window)
        return torch.stack(windows)

    def sources(self, found: int) -> tuple[Source, ...]:
        """Return the texts with their numbers of windows, for the run record.

        Args:
            found: Number of windows that `windows` returned for all calibration windows and extra windows.

        Raises:
            CalibrationError: A text is too short for its share.
        """
        order = self.order(self.samples + self.extra)
        if found < len(order):
            number = order[found]
            raise CalibrationError(
                f"--calibration: {self.texts[number].name} has {order[:found].count(number)} windows, but the mix takes "
                f"{order.count(number)} from it. Pass a longer text, a smaller weight for it, or fewer --samples."
            )
        fitted, extra = order[: self.samples], order[self.samples :]
        return tuple(
            Source(
                name=text.name,
                weight=float(text.weight),
                windows=fitted.count(number),
                extra_windows=extra.count(number),
            )
            for number, text in enumerate(self.texts)
        )
