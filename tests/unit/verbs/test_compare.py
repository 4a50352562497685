"""Comparing methods on a model: every row is a real run, says what it is, and what could not be run says why."""

import importlib
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nearplane
from checkpoints import save_part_of_the_demo
from nearplane import Calibration, CalibrationError, FormatError, RecipeError
from nearplane.cli import app as cli
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.formats.stored import read_matrices
from nearplane.record.record_file import read_record
from nearplane.verbs.compare import ORIGINAL_METHOD, Row
from nearplane.verbs.compare_figure import draw
from nearplane.verbs.compare_request import WAYS
from nearplane.verbs.figure_file import check_plot

TOKENS = Calibration(calibration=str(CALIBRATION), samples=10, seqlen=64)
BITS = (3.125, 2.125)
DAILY = BITS[:1]
GRIDS = ("rtn-mse", "gptq-mse", "nearplane-grid")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One block of the demo model: real weights and a real tokenizer."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small", blocks=1, neurons=128)


@pytest.fixture(scope="module")
def rows(small, tmp_path_factory):
    keep = tmp_path_factory.mktemp("kept")
    return list(nearplane.compare(small, DAILY, text=HELD_OUT, calibration=TOKENS, samples=8, keep=keep))


def test_the_original_comes_first_and_then_every_method_at_every_number_of_bits(rows):
    assert [(row.method, row.asked) for row in rows] == [
        (ORIGINAL_METHOD, None),
        *((m, b) for b in DAILY for m in WAYS),
    ]


def test_the_original_is_what_evaluate_says_of_it(rows, small):
    assert rows[0].perplexity == nearplane.evaluate(small, HELD_OUT, seqlen=64, samples=8).perplexity
    assert rows[0].bytes == (small / "model.safetensors").stat().st_size
    assert (rows[0].rate, rows[0].kl) == (16.0, 0.0)


def test_bits_bytes_and_perplexity_are_those_of_the_checkpoint(rows, small):
    for row in (row for row in rows[1:] if row.folder):
        record = read_record(row.folder)
        assert (row.rate, row.bytes, row.seconds) == (record.rate, record.bytes, record.seconds)
    measured = nearplane.evaluate(row.folder, HELD_OUT, seqlen=64, samples=8, against=small)
    assert (row.perplexity, row.kl) == (measured.perplexity, measured.kl)


def test_rates_are_met_by_every_entropy_coded_method(rows):
    coded = [row for row in rows[1:] if row.method not in GRIDS]
    assert len(coded) == 3
    for row in coded:
        assert row.rate == pytest.approx(row.asked, rel=0.005)


def test_a_row_whose_true_bits_differ_says_so(rows, small):
    """One step a row is not free on narrow layers."""
    assert all("asked for" not in row.note for row in rows[1:] if row.folder and row.asked == 3.125)
    _, row = nearplane.compare(small, [3], text=HELD_OUT, calibration=TOKENS, methods=["rtn-mse"], samples=1)
    assert row.rate > 3.02
    assert row.note.startswith("one step a row; 3.125 bits are groups of 128")
    assert row.note.endswith(f"{row.rate:.3f} bits per weight, 3 asked for")


@pytest.mark.parametrize(
    ("bits", "methods", "said"),
    [
        (
            [3.125, 2.7],
            WAYS,
            "rtn-mse, gptq-mse, nearplane-grid at 2.7 bits: no fixed grid has 2.7 bits: expected 2 to 8",
        ),
        (
            [3.125, 9.5],
            ["nearplane", "rtn-huffman"],
            "nearplane, rtn-huffman at 9.5 bits: rate is 9.5; expected 0.5 to 7",
        ),
        ([1], ["gptq-huffman"], "gptq-huffman at 1 bits: 1.000 bits per weight are too few"),
    ],
    ids=["grid", "high", "low"],
)
def test_bits_that_a_method_cannot_have_are_refused_before_anything_is_measured(small, tmp_path, bits, methods, said):
    with pytest.raises(RecipeError, match=f"{re.escape(said)}.*; nothing was measured"):
        nearplane.compare([MODEL, small], bits, text=HELD_OUT, methods=methods, keep=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_at_equal_bits_codes_without_limits_beat_grids_and_water_filling_beats_both(rows):
    kl = {row.method: row.kl for row in rows if row.asked == 3.125}
    assert kl["rtn-huffman"] < kl["rtn-mse"]
    assert kl["nearplane"] < kl["gptq-huffman"] < min(kl[method] for method in GRIDS)


def test_rounding_to_nearest_rounds_the_original_weights(rows, small):
    weights = load_file(small / "model.safetensors")
    folder = next(row.folder for row in rows if row.method == "rtn-mse")
    for name, matrix in read_matrices(folder):
        W = weights[f"{name}.weight"].float()
        codes = (W / matrix.grid.scale.repeat_interleave(128, dim=1)).round().clamp(-4, 3)
        assert torch.equal(codes.to(torch.int32), matrix.codes)


def test_rows_with_huffman_codes_are_measured_in_memory_and_leave_no_checkpoint(rows, small):
    weights = load_file(small / "model.safetensors")
    layers = sum(2 * w.numel() for name, w in weights.items() if "proj" in name)
    dense = sum(w.nbytes for w in weights.values()) - layers
    for row in (row for row in rows if row.method.endswith("huffman")):
        assert row.folder is None
        assert row.bytes == round(row.rate * layers / 16) + dense
        assert row.seconds > 0


def test_the_paper_s_rows_are_without_what_this_package_adds(rows):
    for row in (row for row in rows[1:] if row.folder and not row.method.startswith("nearplane")):
        recipe = read_record(row.folder).recipe
        assert (recipe.scheme.correct, recipe.scheme.order, recipe.allocate) == (False, "natural", "uniform")
        assert recipe.scheme.solver == ("round-to-nearest" if row.method.startswith("rtn") else "nearest-plane")
        assert (recipe.scheme.bits, recipe.scheme.group_size, recipe.scheme.scale) == (int(row.asked), 128, "mse")


def test_checkpoints_are_deleted_as_soon_as_they_are_measured(small, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    methods = ("rtn-mse", "rtn-huffman")
    for row in nearplane.compare(small, [3.125], text=HELD_OUT, calibration=TOKENS, methods=methods, samples=1):
        assert row.method == ORIGINAL_METHOD or row.folder is None
        assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"methods": ("gptq", "rtn-mse")}, r"methods\[0\] is 'gptq'; expected one of rtn-mse, "),
        ({"bits": ()}, "at least one"),
        ({"models": [MODEL, MODEL]}, "different names"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(change, said, tmp_path):
    asked = {"models": MODEL, "bits": [3.0], "text": HELD_OUT, "keep": tmp_path / "kept"} | change
    with pytest.raises(RecipeError, match=said):
        nearplane.compare(**asked)


def test_kept_checkpoints_never_mix_with_what_is_there(tmp_path):
    (tmp_path / "something").write_text("here")
    with pytest.raises(RecipeError, match="empty folder"):
        nearplane.compare(MODEL, [3.0], text=HELD_OUT, keep=tmp_path)


@pytest.mark.nightly
def test_a_comparison_that_was_stopped_goes_on_behind_its_rows(rows, small, tmp_path, monkeypatch):
    """Stopped while it measures the second method, it goes on with that checkpoint; other bits are rows beside these."""
    words = dict(text=HELD_OUT, calibration=TOKENS, samples=8, keep=tmp_path / "kept", methods=GRIDS)
    program = importlib.import_module("nearplane.verbs.compare")
    evaluate, ran = program.evaluate, []

    def counted(model, *args, **more):
        ran.append(Path(model).name)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return evaluate(model, *args, **more)

    monkeypatch.setattr(program, "evaluate", counted)
    with pytest.raises(KeyboardInterrupt):
        list(nearplane.compare(small, BITS[:1], **words))
    quantized, quantize = [], program.quantize
    monkeypatch.setattr(
        program, "quantize", lambda model, out, *a, **w: (quantized.append(out.name), quantize(model, out, *a, **w))[1]
    )
    found = list(nearplane.compare(small, BITS[:1], **words))
    assert quantized == ["nearplane-grid-3.125"]
    assert ran == ["small", "rtn-mse-3.125", "gptq-mse-3.125", "gptq-mse-3.125", "nearplane-grid-3.125"]
    wanted = {(r.method, r.asked): (r.rate, r.bytes, r.perplexity, r.kl) for r in rows}
    assert all(wanted[r.method, r.asked] == (r.rate, r.bytes, r.perplexity, r.kl) for r in found)
    again = list(nearplane.compare(small, BITS, **words))
    assert again[:4] == found
    assert len(ran) == 8
    with pytest.raises(RecipeError, match="samples differ"):
        nearplane.compare(small, BITS[:1], **{**words, "samples": 4})
    (tmp_path / "kept" / "rows.json").write_text("{")
    with pytest.raises(FormatError, match=r"rows\.json cannot be read"):
        nearplane.compare(small, BITS[:1], **words)


def test_a_method_that_failed_is_kept_with_its_reason_and_asked_again(small, tmp_path):
    """Files that were in the way may be gone, another run may have ended: a refusal is not for ever."""
    words = dict(text=HELD_OUT, calibration=TOKENS, samples=1, keep=tmp_path, methods=["rtn-mse"])
    rows = nearplane.compare(small, [3], **words)
    next(rows)
    out = tmp_path / "small" / "rtn-mse-3"
    out.mkdir(parents=True)
    (out / "something").write_text("here")
    (refused,) = rows
    assert f"Or delete {out} and repeat the command" in refused.note
    (out / "something").unlink()
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["method"], row["note"]) for row in kept["rows"]] == [(ORIGINAL_METHOD, ""), ("rtn-mse", refused.note)]
    _, row = nearplane.compare(small, [3], **words)
    assert row.perplexity is not None, row.note


def test_of_two_comparisons_in_one_folder_the_second_is_refused(small, tmp_path):
    """Else it would write its rows over those of the first; one that waited sees what the first left."""
    words = dict(text=HELD_OUT, calibration=TOKENS, samples=1, keep=tmp_path / "kept", methods=["rtn-huffman"])
    first, second, waited = (nearplane.compare(small, [3.5], **words) for _ in range(3))
    row = next(first)
    with pytest.raises(RecipeError, match=r"kept is being written by another comparison\."):
        next(second)
    first.close()
    assert next(waited) == row
    waited.close()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["rows.json"]


def several(rows):
    """Return the rows of two models of different sizes."""
    twice = [Row(model="twice", method=r.method, asked=r.asked, rate=r.rate, bytes=2 * r.bytes, perplexity=r.perplexity - 1)
             for r in rows if r.bytes]  # fmt: skip
    return [*rows, *twice]


@pytest.mark.parametrize("form", [list, pytest.param(several, marks=pytest.mark.nightly)])
def test_the_figure_names_every_method(rows, tmp_path, form):
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(form(rows), first)
    draw(form(rows), second)
    text = first.read_text()
    assert all(f"<!-- {way} -->" in text for way in WAYS)
    assert first.read_bytes() == second.read_bytes()
    draw(form(rows), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_no_line_of_a_legend_lies_among_the_curves(rows, tmp_path, monkeypatch):
    figures = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *a, **w: (figures.append(self), save(self, *a, **w))[1])
    draw(rows, tmp_path / "one.svg")
    draw(several(rows), tmp_path / "several.svg")
    one, panels = figures
    (box,) = (legend.get_window_extent() for legend in one.legends)
    assert box.x0 >= one.axes[0].get_window_extent().x1
    assert all(line.get_xdata()[-1] == 0 for axes in panels.axes for line in axes.get_legend().get_lines())


def printed(monkeypatch, capsys, words, expected=0):
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    assert code == expected
    return capsys.readouterr()


def test_the_command_prints_the_rows(small, monkeypatch, capsys, tmp_path):
    words = ["nearplane", "compare", small, "--bits", 3.125, 2, "--text", HELD_OUT, "--eval-samples", 2]
    words += ["--eval-seqlen", 64, "--keep", tmp_path / "kept", "--methods", "rtn-mse"]  # not measured twice
    found = json.loads(printed(monkeypatch, capsys, [*words, "rtn-huffman", "--json"]).out)
    assert [(row["method"], row["asked"]) for row in found[1:]] == [
        (method, bits) for bits in (3.125, 2) for method in ("rtn-mse", "rtn-huffman")
    ]
    out = printed(monkeypatch, capsys, words).out
    assert f"{found[1]['perplexity']:.4g}" in out
    assert f"small, rtn-mse at 2 bits: {found[3]['note']}" in out.splitlines()


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_method_that_fails_says_why_and_the_others_are_printed(small, monkeypatch, capsys, tmp_path, form):
    """A kept checkpoint was changed since it was made."""
    words = ["nearplane", "compare", small, "--bits", 3.125, "--text", HELD_OUT, "--eval-samples", 2]
    words += ["--eval-seqlen", 64, "--keep", tmp_path / "kept", "--methods", "rtn-mse"]
    printed(monkeypatch, capsys, words)
    out = tmp_path / "kept" / "small" / "rtn-mse-3.125"
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-1])
    monkeypatch.setenv("COLUMNS", "60")  # too narrow for the whole table
    out, err = printed(monkeypatch, capsys, [*words, "rtn-huffman", *["--json"] * (form == "json")], expected=1)
    assert err.endswith("nearplane: 1 of 3 rows could not be measured; their notes say why.\n")
    if form == "json":
        failed, measured = json.loads(out)[1:]
        assert failed["perplexity"] is None
        assert measured["perplexity"] is not None
        assert "and repeat the command" in failed["note"]
    else:
        (note,) = (line for line in out.splitlines() if line.startswith("small, rtn-mse at 3.125 bits: "))
        assert "and repeat the command" in note
        assert "rtn-huffman" in out


def test_a_text_that_is_too_short_to_calibrate_on_is_refused_before_any_method_runs(small, tmp_path):
    """Also before rounding to nearest, which needs none."""
    (tmp_path / "short.txt").write_text("to be or not to be " * 20)
    calibration = Calibration(calibration=str(tmp_path / "short.txt"), seqlen=32)
    methods = ["rtn-mse", "gptq-mse"]
    with pytest.raises(CalibrationError, match="calibration tokens are"):
        nearplane.compare(small, [3.125], text=HELD_OUT, calibration=calibration, methods=methods)


def test_places_that_cannot_be_written_are_refused_before_the_work(small, tmp_path):
    """Not after hours of it."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.svg").mkdir()
    pytest.importorskip("matplotlib")
    for plot in (tmp_path / "file" / "figure.svg", tmp_path / "folder.svg", tmp_path / f"{300 * 'a'}.svg"):
        with pytest.raises(RecipeError, match="folder"):
            check_plot(plot)
    for keep in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RecipeError, match="not a folder that can be written"):
            nearplane.compare(small, BITS, text=HELD_OUT, keep=keep)


def test_a_comparison_that_is_stopped_tells_of_no_files_that_are_gone(small, tmp_path):
    """Checkpoints that nobody keeps lie in a temporary folder."""

    def stop(items, label, total):
        if label == "quantizing":
            raise KeyboardInterrupt
        yield from items

    stopped = {}
    for keep in (None, tmp_path / "kept"):
        with pytest.raises(KeyboardInterrupt) as error:
            list(
                nearplane.compare(
                    small, [3.125], text=HELD_OUT, calibration=TOKENS, samples=2, keep=keep, progress=stop
                )
            )
        stopped[keep] = error.value.__notes__
    assert stopped[None] == []
    finished = f"The finished rows are in {tmp_path / 'kept'}. Repeat the command to resume."
    assert stopped[tmp_path / "kept"] == [finished]
