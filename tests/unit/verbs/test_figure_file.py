"""Files of figures are refused before the work that they would show."""

import sys

import pytest

from nearplane import RecipeError
from nearplane.verbs.figure_file import check_plot


def test_a_figure_that_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"figure\.jpg"):
        check_plot(tmp_path / "figure.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RecipeError, match='Run pip install "matplotlib'):
        check_plot(tmp_path / "figure.svg")
