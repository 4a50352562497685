"""Windows of a mix of texts, which alternate by weight; `text_files.py` reads the names and weights. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice
from typing import TYPE_CHECKING

from nearplane.calibration.text_files import WeightedText
from nearplane.errors import CalibrationError
from nearplane.record.record import Source

if TYPE_CHECKING:
    from torch import Tensor


def check_shares(texts: Sequence[WeightedText], samples: int) -> None:
    """Refuse a mix that gives a text no calibration window.

    Raises:
        CalibrationError: A text gets none of `samples` windows.
    """
    order = [*islice(turns([each.weight for each in texts]), samples)]
    for number, each in enumerate(texts):
        if number not in order:
            raise CalibrationError(
                f"--calibration: {each.name} gets none of the {samples} calibration windows. Use a larger weight for it, "
                f"or more --samples."
            )


def turns(weights: Sequence[Fraction]) -> Iterator[int]:
    """Yield, without end, the number of the text that gives the next window.

    After k windows each text has given its share of k, rounded up or down.

    Tijdeman, The chairman assignment problem, 1980.
    """
    shares = [weight / sum(weights) for weight in weights]
    given, slack = [0] * len(shares), Fraction(1, max(1, 2 * len(shares) - 2))
    for windows in count(1):
        due = (n for n, share in enumerate(shares) if share * windows - given[n] >= slack)
        turn = min(due, key=lambda n: (given[n] + 1 - slack) / shares[n])  # its deadline
        given[turn] += 1
        yield turn


def order_of_windows(weights: Sequence[Fraction], samples: int, extra: int) -> Iterator[int]:
    """Yield the number of the text of each window: `samples` calibration windows, extra windows, and all later ones.

    Extra windows are sorted by text, at least one of each.
    """
    order = turns(weights)
    yield from islice(order, samples)
    yield from sorted([*range(len(weights)), *islice(turns(weights), extra - len(weights))])
    yield from order


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A mix of texts with the windows of a run.

    Args:
        texts: The texts with their weights.
        samples, extra: Numbers of calibration windows and of extra windows, which follow them.
    """

    texts: tuple[WeightedText, ...]
    samples: int
    extra: int

    @classmethod
    def of(cls, texts: tuple[WeightedText, ...], samples: int, extra: int) -> Mix:
        """Return the mix of some texts with so many calibration windows, and at least one extra window of each text.

        Raises:
            CalibrationError: A text gets no calibration window.
        """
        check_shares(texts, samples)
        return cls(texts=texts, samples=samples, extra=max(extra, len(texts)))

    def order(self, count: int) -> list[int]:
        """Return the number of the text of each of the first `count` windows."""
        weights = [each.weight for each in self.texts]
        return [*islice(order_of_windows(weights, self.samples, self.extra), count)]

    def windows(self, read: Callable[..., Iterable[Tensor]], count: int) -> list[Tensor]:
        """Return the first `count` windows, or only those before the first one for which its text is too short.

        Args:
            read: Function from a text and the keyword `samples` to its windows, see `reader_of`.
            count: Number of windows.

        Raises:
            CalibrationError: A text is missing, malformed, or shorter than one window.
        """
        order = self.order(count)
        windows: list[Tensor] = []
        of_texts = {
            number: iter(read(each.name, samples=order.count(number)))
            for number, each in enumerate(self.texts)
            if number in order
        }
        for number in order:
            if (window := next(of_texts[number], None)) is None:
                break
            windows.append(window)
        return windows

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
