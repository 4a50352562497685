"""Every public function names an argument of a wrong type and says what to pass, before it does anything."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any, Literal

import pytest
import torch

import nearplane
from nearplane import GridScheme, NearplaneError, Recipe, RecipeError
from nearplane.demo import HELD_OUT, MODEL
from nearplane.system.arguments import OPEN, check_type

WRONG = {
    "None": None,
    "5": 5,
    "nan": math.nan,
    "bytes": b"x",
    "object": object(),
    "generator": iter("ab"),
    "list": [None],
}
FUNCTIONS = ("quantize", "evaluate", "tune", "verify", "export", "load", "compare", "generate", "write_report")
CHECKED_LATER = ("model", "calibration", "text", "against")  # where objects are taken beside paths


@pytest.mark.parametrize("called", FUNCTIONS)
def test_an_argument_of_a_wrong_type_is_named(called: str) -> None:
    """They ended in a TypeError of pathlib, of a comparison, or of torch."""
    function = getattr(nearplane, called)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or parameter.default is OPEN or name in CHECKED_LATER:
            continue
        refused = 0
        for value in WRONG.values():
            with pytest.raises((NearplaneError, TypeError)) as raised:
                function(**{name: value})
            fits = isinstance(raised.value, TypeError)  # then what was not passed is missed
            assert re.match(r".* missing \d required" if fits else rf"{name}\b", str(raised.value))
            refused += not fits
        assert refused, name


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: nearplane.quantize(MODEL, None), "out is None; expected a path"),
        (lambda: nearplane.quantize(MODEL, ""), "out: '' is empty. Pass the path"),
        (lambda: nearplane.quantize(MODEL, "a\0b"), "null character"),
        (lambda: nearplane.quantize(MODEL, "o", tokenizer="gpt2"), "tokenizer is 'gpt2'; expected a PreTrainedTokenizer"),
        (lambda: nearplane.quantize(MODEL, "o", dataset=iter("ab")), "dataset is a str_.*iterator .*expected a path, a list"),
        (lambda: nearplane.quantize(MODEL, "o", ignore=True), "ignore is True, which has the wrong type"),
        (lambda: nearplane.quantize(MODEL, "o", samples=1.5), "samples is 1.5; expected a positive number"),
        (lambda: nearplane.quantize(MODEL, "o", format=[]), "format is a list; expected one of"),
        (lambda: nearplane.evaluate(MODEL, HELD_OUT, samples=1.5), "samples is 1.5; expected a whole number or None"),
        (lambda: nearplane.evaluate(MODEL, iter("ab")), "text is a str_.*iterator .*expected a path, a list of texts"),
        (lambda: nearplane.evaluate(MODEL, None), "text is None; expected a path, a list of texts"),
        (lambda: nearplane.evaluate(MODEL, HELD_OUT, against=5), "model is a int; expected a folder, a hub id"),
        (lambda: nearplane.evaluate(MODEL, "A text.\n" * 9000), r"72,000 letters .*texts are passed as a list: \[text\]"),
        (lambda: nearplane.compare(MODEL, [4.0, "3"], text=HELD_OUT), r"bits\[1\] is '3'; expected a finite number"),
        (lambda: nearplane.compare(MODEL, 4.0, text=HELD_OUT), "bits is 4.0; expected a list"),
        (lambda: nearplane.verify(MODEL, tolerance=math.inf), "tolerance is inf; expected a finite number"),
        (lambda: GridScheme(rounds=torch.ones(2)), "rounds is a Tensor; expected a whole number from 0 to 1000"),
        (lambda: GridScheme(group_size=torch.ones(2)), "group_size is a Tensor; expected a positive number"),
        (lambda: Recipe(scheme="W4A16"), "scheme is 'W4A16'; expected a GridScheme"),
        (lambda: Recipe(ignore=("",)), "ignore is ''; expected a regular expression"),
        (lambda: Recipe(layers=[5]), r"layers\[0\] is 5; expected a LayerScheme"),
    ],
)  # fmt: skip
def test_what_to_pass_is_said(call: Any, said: str) -> None:
    with pytest.raises(NearplaneError, match=said):
        call()


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, int), (3, float), (None, int | None), ("a", Literal["a"] | None), ([1, 2.5], list), ((), tuple[int, ...])],
    ids=str,
)
def test_what_fits_passes(value: Any, kind: Any) -> None:
    check_type("value", value, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, int), (True, float), (1.0, int), (math.nan, float), ("b", Literal["a"]), ([1], tuple[int, ...]), (1, bool)],
    ids=str,
)
def test_what_does_not_fit_is_refused(value: Any, kind: Any) -> None:
    with pytest.raises(RecipeError, match=r"value is .*; expected"):
        check_type("value", value, kind)
