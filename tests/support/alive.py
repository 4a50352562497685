"""What is in memory."""

from __future__ import annotations

import gc
import warnings
from typing import TypeVar

from greenlet import getcurrent, greenlet

Kind = TypeVar("Kind")


def living(kind: type[Kind]) -> list[Kind]:
    """Return all objects of a kind that are in memory."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked what they are
        return [x for x in gc.get_objects() if issubclass(type(x), kind)]  # isinstance asks proxies of what is gone


def forget() -> None:
    """Leave what is in memory now out of later answers, which take long where much was imported."""
    gc.collect()
    gc.freeze()


def paused() -> list[greenlet]:
    return [x for x in living(greenlet) if not x.dead and x is not getcurrent()]
