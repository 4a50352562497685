"""docs/extending.md is executed: every block, top to bottom, in one namespace; and the tables that it names have those names."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from transformers import PreTrainedModel

import nearplane
from families import VOCABULARY
from native_checkpoints import save_tiny
from nearplane.formats.table import FORMATS
from nearplane.lattice.solvers import SOLVERS
from nearplane.number_formats import BY_NAME
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.file_formats import FILE_FORMATS, FileFormat, Format
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.runtimes import RUN, RUNTIMES, USUAL, Form
from nearplane.recipe.scheme import UNCALIBRATED_SOLVERS, Solver
from nearplane.recipe.schemes import GridScheme
from nearplane.record.from_json import _hints
from nearplane.system.arguments import hints_of

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Return what the blocks of the page define."""
    text = PAGE.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert len(blocks) == 10
    for block in blocks:
        exec(compile("\n" * text[: block.start(1)].count("\n") + block[1], str(PAGE), "exec"), namespace)
    return namespace


def test_every_example_runs(page: dict[str, Any]) -> None:
    assert "BETTER_OF_TWO" in page


def test_tables_and_names_are_the_same() -> None:
    assert set(SOLVERS) == set(get_args(Solver))
    assert {name for name, solver in SOLVERS.items() if not solver.needs_inputs} == set(UNCALIBRATED_SOLVERS)
    formats = {*GridScheme.FORMATS, *BlockScheme.FORMATS, *RateScheme.FORMATS}
    assert {*FORMATS, "gguf"} == set(get_args(Format)) == formats == {*FILE_FORMATS} - {None}


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Records and recipes look up the names of formats once in a process; here they change."""
    for hints in (_hints, hints_of):
        hints.cache_clear()
    yield
    for hints in (_hints, hints_of):
        hints.cache_clear()


def test_the_format_of_the_page_goes_through_the_program(
    page: dict[str, Any], tmp_path: Path, forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered as the page says, and nothing else: written, verified, evaluated, exported and loaded."""
    monkeypatch.setitem(sys.modules, "nearplane.formats.packed_fp4", SimpleNamespace(FORMAT=page["FORMAT"]))
    monkeypatch.setitem(FORMATS, "fp4", ".packed_fp4:FORMAT")
    monkeypatch.setattr("nearplane.recipe.recipe.Format", Literal["fp4"])
    monkeypatch.setattr(GridScheme, "FORMATS", ("fp4",))
    monkeypatch.setitem(FILE_FORMATS, "fp4", FileFormat())
    monkeypatch.setitem(USUAL, "fp4", ("nearplane",))
    monkeypatch.setitem(RUNTIMES["nearplane"].loads, "fp4", (Form(grids=("fp4-g32",), dense=RUN),))
    monkeypatch.setitem(BY_NAME, "fp4-g32", page["FP4"])
    model, out, dense = tmp_path / "model", tmp_path / "out", tmp_path / "dense"
    save_tiny(model, "llama")
    tokens = torch.randint(VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(0))
    nearplane.quantize(model, out, grid="fp4-g32", format="fp4", calibration=tokens)
    assert not nearplane.verify(out, against=model, calibration=tokens).faults
    nearplane.export(out, dense, dtype="float32")
    measured = [nearplane.evaluate(each, tokens, against=model) for each in (out, dense)]
    assert measured[0] == measured[1]
    assert 0 < measured[0].kl < 0.1
    loaded, other = (nearplane.load(each, dtype="float32") for each in (out, dense))
    assert isinstance(loaded, PreTrainedModel)
    assert torch.equal(loaded(tokens).logits, other(tokens).logits)
