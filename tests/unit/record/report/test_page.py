"""The report says what the record holds, in a page that needs nothing else; looked at in a real browser."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from browser import chromium, on_screen
from nearplane import GridScheme, RateScheme
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.record.record import RunRecord
from nearplane.record.report.drawing import PLOT_HEIGHT, TIMES
from nearplane.record.report.figures import kinds
from nearplane.record.report.page import facts, findings, render
from nearplane.system.sizes import size_text
from nearplane.verbs.report import write_report
from reported import CODED, GRID, RUN, SHAPES, entropy_coded, on_a_grid, run_of, saved

HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">&amp;'


LARGE = run_of(80, entropy_coded, recipe=Recipe(scheme=RateScheme(rate=2.2)))
RECORDS = {
    "grid": GRID,
    "coded": CODED,
    "large": LARGE,
    "large-grid": run_of(80, on_a_grid),
    "hostile": replace(
        GRID,
        source=HOSTILE,
        layers=(replace(GRID.layers[0], name=HOSTILE), *GRID.layers[1:]),
        skipped=((HOSTILE, HOSTILE),),
    ),
}


def test_the_same_record_gives_the_same_bytes(tmp_path):
    first, second = (write_report(saved(CODED, tmp_path / "out"), tmp_path / name) for name in ("a.html", "b.html"))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_text(encoding="utf-8") == render(CODED)


def test_neither_torch_nor_a_drawing_library_is_imported(tmp_path):
    out = saved(GRID, tmp_path / "out")
    program = "import sys, pathlib, nearplane.verbs.report as r; r.write_report(pathlib.Path(sys.argv[1])); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program, out], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"torch", "numpy", "matplotlib", "transformers"} & set(loaded)


def test_a_page_names_no_other_address():
    for record in RECORDS.values():
        page = render(record)
        assert not re.search(r'\b(src|href|action)="(?!#|data:)', page)
        assert not re.search(r"https?:|url\(|@import|fetch\(", page)
    assert len(render(LARGE).encode()) < 1_000_000


def test_what_is_wrong_is_said_in_words():
    layers = list(GRID.layers)
    layers[3] = replace(layers[3], dead=7)
    layers[4] = replace(layers[4], nearest_loss=layers[4].loss / 2)
    layers[6] = replace(layers[6], damped_loss=2 * layers[6].worst_case)
    wrong = replace(
        GRID,
        layers=tuple(layers),
        windows=3,
        skipped=(("block.0.router", "odd"), ("block.1.router", "odd")),
        recipe=Recipe(scheme=RateScheme(rate=2.0), calibration=Calibration(samples=8)),
    )
    said = " ".join(findings(wrong))
    for words in (
        "2 bits per weight requested, 4.5 reached",
        "The calibration text has 3 windows of",
        "Too few tokens to trust the losses",
        f"{layers[3].name} (7 of 128)",
        f"nearest would have had a lower loss on the calibration text in 1 layer: {layers[4].name}",
        f"The worst case of unclipped rows is exceeded in 1 layer: {layers[6].name}",
    ):
        assert words in said
    assert findings(replace(CODED, tokens=20 * 11_264)) == []
    assert "nothing is unusual" in render(replace(CODED, tokens=20 * 11_264))


def test_what_is_usual_for_a_format_is_no_finding():
    """Rows clip on every grid of few values, and some weights are never quantized."""
    record = replace(GRID, skipped=(("block.0.router", "odd"), ("block.1.router", "odd")))
    said = " ".join(facts(record))
    assert "Rows clip in 14 of 35 layers" in said
    assert "Not quantized: block.*.router, 2 of them (odd)" in said
    assert not findings(record)
    assert "<summary>Good to know</summary>" in render(record)
    assert "<summary>Good to know</summary>" not in render(replace(CODED, tokens=20 * 11_264))


def test_the_kl_is_the_first_figure_and_a_large_one_a_finding():
    near, far = (replace(GRID, extra_windows=2, extra_kl=kl) for kl in (0.0123, 0.234))
    cards = [re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd><dd>(.*?)</dd>", render(record)) for record in (near, far)]
    assert [each[0] for each in cards] == [
        ("KL to the original", "0.0123", "nats per token: small"),
        (
            "KL to the original",
            "0.234",
            "nats per token: large; more --samples, more bits or nearplane tune make it smaller",
        ),
    ]
    assert (findings(near), len(findings(far))) == ([], 1)
    assert "0.234 nats per token" in findings(far)[0]
    assert "<dt>KL to the original</dt>" not in render(GRID)


def test_layers_that_lose_much_more_than_was_fitted_are_a_finding():
    layers = list(GRID.layers)
    layers[3] = replace(layers[3], relative_loss=0.007, extra_relative_loss=0.4, extra_own_loss=0.32)
    layers[5] = replace(layers[5], relative_loss=0.001, extra_relative_loss=0.4, extra_own_loss=0.009)  # not much
    (found,) = findings(replace(GRID, layers=tuple(layers), extra_windows=2))
    assert found.startswith("1 layer by itself lost more than 3 times as much on the extra windows")
    assert f"{layers[3].name} (32 %, fitted 0.7 %)" in found
    assert "<dt>worst alone on extra windows</dt><dd>32" in render(replace(GRID, layers=tuple(layers), extra_windows=2))


def test_missing_figures_limits_and_columns_are_explained():
    assert "Without a mark: 5 layers of more than 4096 inputs, for which no limit is computed." in render(CODED)
    bare = [
        replace(layer, limit=None, worst_case=None, expected=None, nearest_loss=None, gamma=None)
        for layer in CODED.layers
    ]
    page = render(replace(CODED, layers=tuple(bare)))
    for said in (
        "<b>Bits above the limit</b>: not drawn: 5 layers of more than 4096 inputs",
        "for which no limit is computed and 30 layers without a limit in the record.",
        "<b>Share of the worst case</b>: not drawn, as the record holds no worst case.",
        "No layer has a value for: alone on extra windows, relative loss on extra windows, nearest / this, "
        "nearest / this on extra windows, "
        "worst case / this, gamma, clipped codes %, clipped rows %, bits above limit.",
        "The record holds no loss of rounding to nearest.",
    ):
        assert said in page
    assert page.count('class="points') == 3


def test_the_headline_says_what_the_record_does():
    page = render(CODED)
    worst = max(CODED.layers, key=lambda layer: layer.relative_loss)
    known = [layer for layer in CODED.layers if layer.limit is not None]
    sizes = [layer.out_features * layer.in_features for layer in known]
    above = sum(layer.above_limit * size for layer, size in zip(known, sizes, strict=True)) / sum(sizes)
    cards = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd><dd>(.*?)</dd>", page)
    found = {what: value for what, value, _ in cards}
    assert found["bits per weight"] == f"{CODED.rate:.3f}"
    assert found["checkpoint folder"] == size_text(CODED.folder)
    assert found["quantized layers"] == "35"
    assert float(found["worst relative loss"].split()[0]) == pytest.approx(100 * worst.relative_loss, rel=0.005)
    assert float(found["bits above the limit"]) == pytest.approx(above, abs=0.0005)
    assert worst.name in [more.replace("<wbr>", "") for _, _, more in cards]


def test_losses_on_extra_windows_stand_beside_those_on_what_was_fitted():
    layers = [
        replace(
            layer,
            extra_loss=3 * layer.loss,
            extra_relative_loss=4 * layer.relative_loss,
            extra_nearest_loss=6 * layer.loss,
        )
        for layer in CODED.layers
    ]
    page = render(replace(CODED, layers=tuple(layers), extra_windows=7))
    worst = max(layers, key=lambda layer: layer.relative_loss)
    cards = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd><dd>(.*?)</dd>", page)
    found = {what: (value, more.replace("<wbr>", "")) for what, value, more in cards}
    assert float(found["worst on extra windows"][0].split()[0]) == pytest.approx(400 * worst.relative_loss, rel=0.005)
    assert found["worst on extra windows"][1] == f"{worst.name}, 7 windows to which nothing was fitted"
    assert f"2.00 {TIMES} on extra windows" in found["rounding to nearest"][1]
    assert "measured on 7 extra windows" in page
    assert page.count(">relative loss on extra windows<") == page.count(">nearest / this on extra windows<") == 1
    assert "relative loss on extra windows<" not in render(CODED).split("No layer has")[0]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan, 1e-300, 1e300])
def test_numbers_without_a_place_on_the_axes_do_no_harm(value):
    changed = replace(
        CODED.layers[0],
        loss=value,
        damped_loss=value,
        relative_loss=value,
        limit=value,
        worst_case=value,
        nearest_loss=value,
    )
    page = render(replace(CODED, layers=(changed, *CODED.layers[1:])))
    assert not re.search(r'(x|y|x1|y1|x2|y2)="[^"]*(nan|inf)', page)
    render(replace(CODED, layers=(changed,)))
    render(replace(CODED, layers=()))


def test_kinds_have_the_shortest_names_that_tell_them_apart():
    assert [name for name, _ in kinds(GRID)] == [name.split(".")[1] for name in SHAPES]
    names = ["h.0.mlp.experts.0.up", "h.0.mlp.experts.1.up", "h.0.mlp.shared.up", "h.1.mlp.experts.0.up", "head"]
    found = kinds(replace(GRID, layers=tuple(replace(GRID.layers[0], name=name) for name in names)))
    assert found == [("experts.up", [0, 1, 3]), ("shared.up", [2]), ("head", [4])]
    many = kinds(replace(GRID, layers=tuple(replace(GRID.layers[0], name=f"h.kind{n}") for n in range(20))))
    assert sorted(layer for _, members in many for layer in members) == list(range(20))
    assert len(many) == 12
    assert many[-1][0] == "other"


# In the browser: every layer has its mark, where its number says


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the address of the page of every record."""
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_report(saved(record, folder / name)).as_uri() for name, record in RECORDS.items()}


def opened(browser, page, width=1280, colours="light"):
    """Open a page on a screen of a width."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    return on_screen(browser, page, width, colours)


def column(browser, number):
    """Return the sorting values of a column, as the rows stand now."""
    script = f"""return [...document.querySelectorAll("#layers tbody tr")].map((row) => row.cells[{number}])
        .map((cell) => cell.dataset.v ?? cell.textContent)"""
    return browser.execute_script(script)


MARKS = """return [...document.querySelectorAll("svg[role=img]")].map((svg) => {
    const box = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll(".marks use, .marks polyline")].map((mark) => mark.getBoundingClientRect());
    const inside = marks.filter((m) => m.width > 0 && m.left > box.left - 8 && m.right < box.right + 8
        && m.top > box.top - 8 && m.bottom < box.bottom + 8);
    return {label: svg.getAttribute("aria-label"), width: box.width, height: box.height, marks: marks.length,
            inside: inside.length, layers: svg.querySelectorAll("[data-l]").length};
});"""


@pytest.mark.parametrize(("name", "width"), [*((name, 1280) for name in RECORDS), ("coded", 360), ("large-grid", 360)])
def test_every_figure_is_drawn_and_every_mark_lies_in_it(browser, pages, name, width):
    record, found = RECORDS[name], opened(browser, pages[name], width).execute_script(MARKS)
    many = len(record.layers)
    limited = sum(layer.limit is not None for layer in record.layers)
    expected = {"Loss of every layer": many, "Rate and distortion": many, "Bits per weight": many}
    expected |= {"Bits above the limit": limited, "Share of the worst case": many}
    for figure in found:
        assert figure["width"] > 200
        assert figure["height"] == PLOT_HEIGHT
        assert figure["inside"] == figure["marks"] > 0
        assert figure["layers"] == expected.pop(figure["label"])
    assert not expected


@pytest.mark.parametrize("name", ["coded", "large", "hostile"])
def test_no_request_leaves_the_page_and_no_script_fails(browser, pages, name):
    opened(browser, pages[name])
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert pages[name] in asked
    assert [address for address in asked if address != pages[name] and not address.startswith("data:")] == []
    assert browser.execute_script('return performance.getEntriesByType("resource").map((entry) => entry.name)') == []
    assert browser.get_log("browser") == []


def test_names_are_text_whatever_they_say(browser, pages):
    opened(browser, pages["hostile"])
    assert browser.execute_script("return window.hacked") is None
    assert browser.execute_script('return document.querySelectorAll("img").length') == 0
    assert column(browser, 0)[0] == HOSTILE


def test_the_table_sorts_numerically_both_ways_by_every_column(browser, pages):
    opened(browser, pages["coded"])
    buttons = browser.find_elements("css selector", "#layers th button")
    assert len(buttons) == 13
    states = 'return [...document.querySelectorAll("#layers th")].map((head) => head.getAttribute("aria-sort"))'
    for number, button in enumerate(buttons):
        for way in ("ascending", "descending"):
            button.click()
            assert browser.execute_script(states) == ["none"] * number + [way] + ["none"] * (12 - number)
            values = column(browser, number)
            assert len(values) == len(CODED.layers)
            known = [float(value) if number else value for value in values if value]
            assert known == sorted(known, reverse=way == "descending")
            assert values[len(known):] == [""] * (len(values) - len(known))  # fmt: skip


def test_the_table_sorts_by_the_keyboard(browser, pages):
    opened(browser, pages["grid"])
    button = browser.find_elements("css selector", "#layers th button")[4]
    browser.execute_script("arguments[0].focus()", button)
    browser.switch_to.active_element.send_keys("\ue007")  # enter
    found = [float(value) for value in column(browser, 4)]
    assert found == sorted(found) != [float(f"{layer.relative_loss:.9g}") for layer in GRID.layers]


def test_names_sort_with_their_numbers(browser, pages):
    opened(browser, pages["large"]).find_element("css selector", "#layers th button").click()
    blocks = [int(name.split(".")[2]) for name in column(browser, 0)]
    assert blocks == sorted(blocks)


def test_the_filter_picks_layers_in_table_and_figures(browser, pages):
    opened(browser, pages["coded"])
    shown = """return [document.querySelectorAll("#layers tbody tr:not([hidden])").length,
        document.querySelectorAll("figure.points")[0].querySelectorAll("[data-l]:not(.dim)").length]"""
    browser.find_element("id", "filter").send_keys("layers.3 PROJ")
    assert browser.execute_script(shown) == [7, 7]
    buttons = browser.find_elements("css selector", ".bar button")
    buttons[-1].click()
    assert browser.execute_script(shown) == [1, 1]
    assert browser.find_element("css selector", ".count").text == "1 of 35 layers"
    buttons[-1].click()
    assert browser.execute_script(shown) == [7, 7]


def test_pointing_at_a_mark_names_its_layer_in_every_figure(browser, pages):
    opened(browser, pages["grid"])
    script = """const mark = document.querySelectorAll("figure.points")[1].querySelector('[data-l="17"] use');
        mark.scrollIntoView({block: "center"}); const box = mark.getBoundingClientRect();
        const at = {bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2};
        mark.dispatchEvent(new PointerEvent("pointermove", at));
        return [...document.querySelectorAll("output")].map((output) => output.textContent)"""
    said = browser.execute_script(script)
    assert len(said) == 5
    assert all(text.startswith(f"{GRID.layers[17].name}: ") for text in said)


def test_marks_stand_where_their_numbers_are(browser, pages):
    opened(browser, pages["coded"])
    script = """const figure = document.querySelectorAll("figure.points")[2];
        return [...figure.querySelectorAll("[data-l] use")].map((u) => [u.x.baseVal.value, u.y.baseVal.value])"""
    places = browser.execute_script(script)
    across, down = zip(*places, strict=True)
    rates = [layer.rate for layer in CODED.layers]
    losses = [layer.relative_loss for layer in CODED.layers]

    def ranks(values):
        return sorted(range(len(values)), key=values.__getitem__)

    assert ranks(across) == ranks(rates)
    assert ranks(down) == ranks([-loss for loss in losses])


@pytest.mark.parametrize("name", list(RECORDS))
def test_nothing_is_wider_than_a_telephone(browser, pages, name):
    opened(browser, pages[name], 360)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 360
    box = browser.execute_script(
        'const box = document.querySelector(".box"); return [box.scrollWidth, box.clientWidth]'
    )
    assert box[0] > box[1]  # the table scrolls in its own box


def test_colours_follow_the_reader(browser, pages):
    paper = {}
    for colours in ("light", "dark"):
        opened(browser, pages["grid"], colours=colours)
        paper[colours] = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", paper["light"]))) > 700
    assert sum(map(int, re.findall(r"\d+", paper["dark"]))) < 100


def test_a_degenerate_layer_is_a_finding_and_in_no_mean():
    layers = tuple(on_a_grid(block, "mlp.up_proj", 5) for block in range(3))
    broken = replace(layers[0], name="broken", relative_loss=3.57e33, degenerate="all its weights are 0")
    run = RunRecord(recipe=Recipe(scheme=GridScheme()), source="model", layers=(*layers, broken), **RUN)
    assert any("broken (all its weights are 0)" in finding for finding in findings(run))
    assert "e33" not in render(run)
    assert "</html>" in render(replace(run, layers=(broken,)))
