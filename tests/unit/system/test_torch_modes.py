"""What a program has set in torch changes no result of a public function, and is as before when it returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import nearplane
from native_checkpoints import save_tiny
from nearplane.system.arguments import checked

OPTIONS: dict[str, Any] = {"bits": 4, "group_size": 16}


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
