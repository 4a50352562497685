"""Public functions name an argument of a wrong type before they do anything, and run in the modes of a new process."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import nearplane
from native_checkpoints import save_tiny
from nearplane import GridScheme, NearplaneError, Recipe, RecipeError
from nearplane.demo import HELD_OUT, MODEL
from nearplane.system.arguments import check_type, checked

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
OPTIONS: dict[str, Any] = {"bits": 4, "group_size": 16}


@pytest.mark.parametrize("called", FUNCTIONS)
def test_an_argument_of_a_wrong_type_is_named(called: str) -> None:
    """They ended in a TypeError of pathlib, of a comparison, or of torch."""
    function = getattr(nearplane, called)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or name in CHECKED_LATER:
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


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Any] = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "no values": lambda: torch.device("meta"),
    "deterministic": deterministic,
}


def all_modes() -> AbstractContextManager[Any]:
    """Return a context of all modes at once; what fails in one of them fails in it."""
    modes = ExitStack()
    for mode in MODES.values():
        modes.enter_context(mode())
    return modes


def modes() -> tuple[Any, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@checked()
def modes_within(fails: bool = False) -> tuple[Any, ...]:
    if fails:
        raise ValueError
    return modes()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_function_runs_in_the_modes_of_a_new_process(mode: Any) -> None:
    plain = modes()
    with mode():
        before = modes()
        assert before != plain
        assert modes_within() == plain
        with pytest.raises(ValueError):  # noqa: PT011 - the function's own
            modes_within(fails=True)
        assert modes() == before
    assert modes() == plain


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_matrix_gets_the_same_codes(mode: Any) -> None:
    """Autocast rounded products to bfloat16; the meta device was refused."""
    W, X = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (6, 40))
    H = X.T @ X / len(X)
    calls = [
        lambda: nearplane.quantize_matrix(W, H, nearplane.GridScheme(bits=3, group_size=4))[0],
        lambda: nearplane.quantize_matrix_to_rate(W, H, nearplane.RateScheme(rate=3.0))[0],
    ]
    for call in calls:
        expected = call()
        with mode():
            found = call()
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.decode(), expected.decode())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    save_tiny(folder, "llama", torch.float32, num_hidden_layers=1)
    return folder


def results(source: Path, out: Path, tokens: Tensor) -> list[Any]:
    """Quantize on a grid and to a rate, verify, tune, evaluate, export and load; return the figures and the weights."""
    nearplane.quantize(source, out / "grid", calibration=tokens, **OPTIONS)
    nearplane.quantize(source, out / "rate", calibration=tokens, rate=3.0)
    found = nearplane.verify(out / "rate", against=source, calibration=tokens)
    tuned = nearplane.tune(out / "grid", out / "tuned", against=source, calibration=tokens, samples=9, steps=2)
    assert tuned.tuning is not None
    nearplane.export(out / "rate", out / "dense")
    scores = nearplane.evaluate(out / "rate", tokens, against=source)
    weights = nearplane.load(out / "tuned").state_dict()
    files = [path.read_bytes() for path in sorted(out.rglob("*.safetensors"))]
    curve = [(point.training, point.held_out) for point in tuned.tuning.curve]
    return [found.measured, len(found.faults), curve, scores.perplexity, scores.kl, files, sorted(weights)]


def test_every_verb_gives_the_same_results(source: Path, tmp_path: Path) -> None:
    """Verify and tune raised errors of torch, quantize asked for another --seqlen, and evaluate was off by 0.2 %."""
    tokens = torch.randint(96, (9, 32), generator=torch.Generator().manual_seed(0))
    expected = results(source, tmp_path / "plain", tokens)
    with torch.inference_mode():
        made_within = tokens + 0
    with all_modes():
        assert results(source, tmp_path / "modes", made_within) == expected
    assert expected[:2] == [True, 0]


def test_a_model_that_was_made_in_a_mode_is_quantized(source: Path, tmp_path: Path) -> None:
    tokens = torch.randint(96, (9, 32), generator=torch.Generator().manual_seed(0))
    nearplane.quantize(source, tmp_path / "folder", calibration=tokens, **OPTIONS)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(source)
        nearplane.quantize(model, tmp_path / "object", calibration=tokens, **OPTIONS)
    for path in (tmp_path / "folder").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "object" / path.name).read_bytes()
