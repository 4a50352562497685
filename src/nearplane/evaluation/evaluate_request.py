"""What is asked of `evaluate`: the names of its protocols. Needs no torch."""

from __future__ import annotations

from typing import Literal

Protocol = Literal["nearplane", "papers", "llama.cpp", "lm-eval"]
PLAIN_WINDOWS: tuple[Protocol, ...] = ("nearplane", "papers")  # protocols of windows that do not depend on one another
