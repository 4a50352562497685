"""Pictures of lattices: files, texts and what cannot be drawn."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nearplane.errors import RecipeError
from nearplane.theory import geometry as g
from nearplane.theory.pictures import PICTURES, draw_geometry


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Return all pictures, in both formats."""
    pytest.importorskip("matplotlib")
    return tuple(draw_geometry(tmp_path_factory.mktemp("pictures") / "new" / "folder"))


@pytest.mark.nightly
def test_all_pictures_are_written_in_both_formats(files: tuple[Path, ...]) -> None:
    """As named, none of them blank."""
    from matplotlib.image import imread

    assert [path.name for path in files] == [f"{name}.{format}" for name in PICTURES for format in ("svg", "png")]
    for path in files:
        if path.suffix == ".png":
            pixels = imread(path)
            assert pixels.shape[1] >= 1000
            assert pixels[..., :3].var() > 1e-3, path.name


@pytest.mark.nightly
def test_svgs_are_the_same_every_time(files: tuple[Path, ...], tmp_path: Path) -> None:
    first = [path for path in files if path.suffix == ".svg"]
    second = [path for path in draw_geometry(tmp_path / "second") if path.suffix == ".svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.nightly
def test_svgs_are_undated_and_point_nowhere_else(files: tuple[Path, ...]) -> None:
    """So that they can be committed and shown on any page."""
    for path in files:
        if path.suffix != ".svg":
            continue
        text = path.read_text(encoding="utf-8")
        elements = list(ElementTree.fromstring(text).iter())
        assert elements[0].tag == "{http://www.w3.org/2000/svg}svg"
        assert len(elements) > 100
        references = [value for e in elements for key, value in e.attrib.items() if key.endswith("href")]
        assert references
        assert all(value.startswith("#") for value in references)
        assert set(re.findall(r"url\((.)", text)) <= {"#"}
        assert not {"image", "script", "date", "metadata"} & {e.tag.rsplit("}", 1)[-1] for e in elements}
        assert "DOCTYPE" not in text
        assert not re.search(r"\b20\d\d-\d\d-\d\d\b", text)


@pytest.mark.parametrize("name", PICTURES)
def test_texts_are_large_within_the_picture_and_apart(name: str) -> None:
    """At least 9 points; nothing cut off at the edge; no two texts over each other."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(layout="constrained")
    PICTURES[name](figure)
    FigureCanvasAgg(figure).draw()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert len(texts) > 5
    assert all(text.get_fontsize() >= 9 for text in texts)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (one, other)


def test_panels_have_equal_axes_and_say_what_was_computed() -> None:
    """The shares of the titles are those of the tilings."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    PICTURES["cells"](figure)
    H = g.hessian(g.INPUTS)
    for axes, method in zip(figure.axes, g.METHODS, strict=True):
        assert axes.get_aspect() == 1
        assert f"{100 * g.tiling(H, method).share:.3g} %" in axes.get_title()


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RecipeError, match="file is not a folder that can be written"):
        draw_geometry(tmp_path / "file")
    with pytest.raises(RecipeError, match="below is not a folder that can be written"):
        draw_geometry(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matplotlib: with the command that installs it; nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RecipeError, match='Run pip install "matplotlib'):
        draw_geometry(tmp_path / "out")
    assert not (tmp_path / "out").exists()
