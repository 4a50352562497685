"""The figure of a comparison: what does not lie within it, and what there is nothing to draw of."""

import pytest

from nearplane import RecipeError
from nearplane.verbs.compare import ORIGINAL_METHOD, Row
from nearplane.verbs.compare_figure import draw


def test_values_beyond_the_figure_are_written_in_its_legend(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [Row(model="m", method=ORIGINAL_METHOD, rate=16.0, perplexity=10.0, bytes=10)]
    rows += [
        Row(model="m", method="rtn-mse", asked=b, rate=b, perplexity=p, bytes=5) for b, p in ((2, 2e10), (3, 12.0))
    ]
    draw(rows, tmp_path / "figure.svg")
    assert "<!-- rtn-mse (above: 2e+10) -->" in (tmp_path / "figure.svg").read_text()


def test_a_figure_of_the_original_alone_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(RecipeError, match="nothing to draw"):
        draw([Row(model="m", method=ORIGINAL_METHOD, perplexity=10.0)], tmp_path / "figure.svg")
