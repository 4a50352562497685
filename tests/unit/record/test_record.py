"""The record survives JSON, and adds up."""

import hashlib
import json
import math
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace

import pytest

from nearplane import FormatError, GridScheme, ModelError, RateScheme, Recipe
from nearplane.record.fold import Fold
from nearplane.record.mix_record import MixRecord
from nearplane.record.record import LEFT_OUT_OF_LAYERS, LayerRecord, RunRecord, Source, digest_of, row_groups
from nearplane.record.record_file import parsed_record, read_record
from nearplane.record.remarks import missed
from nearplane.system.matmul_choice import Products
from nearplane.system.paths import RECORD, folder_named

LAYER = LayerRecord(
    name="model.layers.0.mlp.up_proj", out_features=8, in_features=16, loss=0.5, row_losses=(0.5, 1e-07), sweep_damp=0.1,
    relative_loss=0.01, nearest_loss=0.9,
    damped_loss=0.6, worst_case=2.0, expected=2 / 3, gamma=3.5, clipped=0.0, clipped_rows=0.0, correction=0.7, damp=0.01, dead=0,
    tokens=512, order="activation", format="int3-row", seconds=0.1, bytes=64, checksum=64 * "a",
)  # fmt: skip
RUN = RunRecord(
    recipe=Recipe(scheme=GridScheme(bits=3), ignore=("head",)), source="somewhere", versions={"torch": "2"},
    device="cpu", windows=2,
    products=Products(library="onednn", errors={"default": 3e-7, "onednn": 5e-7}),
    seqlen=256, tokens=512, text=64 * "b", layers=(LAYER, LAYER), files={"config.json": 64 * "c"},
    skipped=(("router", "Router"),), seconds=1.5, bytes=4096,
)  # fmt: skip


DEGENERATE = replace(
    LAYER,
    degenerate="all its weights are 0",
    limit=1.0,
    extra_by_source=(0.5, None),
    extra_own_loss=0.125,
    positions=(4, 1, 0, -1),
)
SOURCES = tuple(Source(name=name, weight=1.0, windows=1, extra_windows=1) for name in ("a.txt", "b.jsonl"))
LAYERS = (replace(LAYER, extra_by_source=(0.02, 0.04)), DEGENERATE)
MIXED = replace(
    RUN,
    card=2048,
    extra_kl=0.25,
    headroom=4.0,
    folds=(Fold.of("model.layers.0.norm", ("model.layers.0.a.weight",), [-12, 0, 1, 12]),),
    cache_scales={"model.layers.0.self_attn": (0.01, 0.25)},
    mix=MixRecord(
        formats=("int4", "bf16"),
        option="size",
        limit=1e6,
        unit="bytes",
        weigh="stored",
        cost="file",
        context=0,
        spent=9e5,
        units=2,
        unfit=("model.layers.0.a",),
        estimated=0.5,
        predicted=0.25,
        measured=0.25,
    ),
    original_bytes=8192,
    sources=SOURCES,
    layers=LAYERS,
    device="cuda:1, NVIDIA H100",
    compute_dtype="bfloat16",
)


def test_a_record_survives_json():
    assert parsed_record(RUN.to_json()) == RUN
    assert parsed_record(MIXED.to_json()) == MIXED


def test_a_record_is_printed_in_a_few_lines():
    """In a notebook, too, where the fields of all layers would fill pages."""
    assert str(MIXED).splitlines() == [
        "somewhere: 2 layers at 4.000 bits per weight, 4.10 KB of weight files (original 8.19 KB)",
        "KL 0.25 nats per token from the original's predictions, on 0 extra windows",
        f"largest loss by itself: 1 % of the output of {LAYER.name}",
    ]
    assert len(str(RUN).splitlines()) == 2
    shown = []
    MIXED._repr_pretty_(SimpleNamespace(text=shown.append), cycle=False)
    assert shown == [str(MIXED)]


def test_fields_of_a_mix_are_in_no_other_record():
    assert "source" not in RUN.to_json().replace('"source":', "")
    assert (MIXED.lost(0), MIXED.lost(1)) == (0.02, 0.04)  # the degenerate layer is left out
    assert RUN.lost(0) is None


def test_the_dtype_of_a_run_in_float32_on_the_cpu_is_not_in_its_record():
    """Records of older versions do not have it either."""
    assert "compute_dtype" not in RUN.to_json()
    assert parsed_record(RUN.to_json()).compute_dtype == "auto"


def test_a_degenerate_layer_is_left_out_of_means():
    limited = replace(LAYER, limit=3.0)
    assert replace(RUN, layers=(limited, DEGENERATE)).above_limit == limited.above_limit
    assert replace(RUN, layers=(DEGENERATE,)).above_limit is None


def test_rate_counts_every_byte_of_the_layers():
    assert LAYER.rate == 8 * 64 / 128
    assert RUN.rate == 4.0


@pytest.mark.parametrize("others", [0, 5, 99_000, 10**6 - len(RUN.to_json()) - 5, 10**12])
def test_a_record_counts_itself(others):
    record = RUN.in_folder(others)
    assert record.folder == others + len(record.to_json().encode())


def test_a_size_is_of_the_whole_folder():
    asked = replace(RUN, recipe=Recipe(scheme=RateScheme(size="10kB")), bytes=4096, folder=10_040)
    assert missed(asked) is None
    assert "10,000 bytes requested, 10,060 reached" in missed(replace(asked, folder=10_060))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"recipe": {}}', RUN.to_json().replace('"loss"', '"lose"')])
def test_what_is_no_record_is_refused(text, tmp_path):
    (tmp_path / "nearplane.json").write_text(text)
    with pytest.raises(FormatError, match=r"nearplane\.json"):
        read_record(tmp_path)


def test_a_list_of_numbers_takes_one_line():
    text = RUN.to_json()
    assert '"row_losses": [ 0.5, 1e-07 ]' in text
    assert parsed_record(text).layers[0].row_losses == LAYER.row_losses


@pytest.mark.parametrize("others", [0, 10**6])
def test_the_digest_is_the_hash_of_the_record_without_it(others):
    """So that any program can check it: blank the 64 digits, hash the bytes."""
    text = RUN.in_folder(others).to_json()
    said = json.loads(text)["digest"]
    assert text.count(said) == 1
    assert said == digest_of(text) == hashlib.sha256(text.replace(said, "").encode()).hexdigest()


def test_whatever_is_changed_in_the_text_changes_the_digest():
    text = RUN.in_folder(0).to_json()
    said = json.loads(text)["digest"]
    place = text.index(said)
    for index, letter in enumerate(text):
        if not place <= index < place + len(said):
            assert digest_of(f"{text[:index]}{'1' if letter != '1' else '2'}{text[index + 1 :]}") != said, index


def test_a_record_knows_its_folder_and_digest_again_after_json():
    record = RUN.in_folder(5)
    assert parsed_record(record.to_json()) == record
    assert record.in_folder(5) == record


@pytest.mark.parametrize(
    ("shape", "groups"), [((1, 1), 1), ((3, 4096), 3), ((32, 32), 2), ((128, 352), 13), ((4096, 4096), 256)]
)
def test_groups_of_rows_are_a_sixteenth_of_the_root_of_the_weights(shape, groups):
    assert row_groups(*shape) == groups


def test_layers_that_lose_too_much_are_named_the_worst_first():
    layers = tuple(replace(LAYER, name=str(loss), relative_loss=loss) for loss in (0.01, 0.03, 0.02, 0.04))
    asked = replace(RUN, layers=layers, recipe=Recipe(max_loss=0.02))
    assert [layer.relative_loss for layer in asked.exceeding] == [0.04, 0.03]
    assert replace(asked, recipe=Recipe()).exceeding == ()


def test_what_was_missed_for_the_sake_of_the_loss_is_said():
    asked = replace(RUN, recipe=Recipe(scheme=RateScheme(rate=3.0), max_loss=0.1))
    assert "3 bits per weight requested, 4 reached" in missed(asked)
    assert "--max-loss" in missed(asked)
    assert "--max-loss" not in missed(replace(asked, recipe=Recipe(scheme=RateScheme(rate=3.0))))


WRONG = {  # JSON that is not what an annotation says
    "str": [None, 3, [], True],
    "int": [None, "3", 2.5, True, 10**30, []],
    "float": [None, "q", True, float("nan"), float("inf"), -float("inf"), 10**30, []],
    "ComputeDtype": [None, 3, "", "int8", "torch.float32", []],
    "str | None": [3, [], True, {}],
    "bool | None": ["true", 1, 0.5, {}],
    "int | None": ["3", 2.5, True, []],
    "float | None": ["x", True, float("nan"), float("inf"), {}],
    "tuple[int, ...]": [None, 1, ["a"], [None], [0.5], [[1]], {}],
    "tuple[float, ...]": [None, 0.5, ["a"], [None], [float("nan")], [[0.5]], {}],
    "Products | None": [3, [], "mkl", {}, {"library": "mkl"}, {"library": 1, "seconds": {}, "errors": {}},
                        {"seconds": {"onednn": "fast"}, "errors": {}}],
    "MixRecord | None": [3, [], "mix", {}, {"formats": ["int4"]}, {"limit": "much"}],
    "Tuning | None": [3, [], "network", {}, {"mode": "block"}, {"curve": []}],
    "tuple[float | None, ...]": [None, 0.5, ["a"], [[None]], [float("nan")], {}],
    "tuple[Source, ...]": [None, {}, [None], [[]], [{}], ["a"]],
    "tuple[Fold, ...]": [None, {}, [None], [{}], [{"norm": "a", "weights": ["b"], "exponents": "M_"}]],
    "dict[str, str]": [None, [], {"a": 1}, {"a": None}, "a"],
    "dict[str, tuple[float, float]]": [None, [], {"a": 1.0}, {"a": [1.0]}, {"a": [1.0, None]}, {"a": [float("nan"), 1.0]}],
    "tuple[tuple[str, str], ...]": [None, {}, ["ab"], [["a"]], [["a", "b", "c"]], [["a", 1]]],
    "tuple[LayerRecord, ...]": [None, {}, [None], [[]], [{}], ["a"]],
    "Recipe": [None, [], "a", {"scheme": None}, {"ignore": "ab"}, {"ignore": [1]}, {"scheme": {"bits": "3"}},
               {"scheme": {"damp": "much"}}, {"scheme": {"order": "any"}}, {"calibration": {"seed": "a"}}, {"polish": 1},
               {"scheme": {"size": f"{10**400}"}}, {"scheme": {"rate": 3, "bits": 3}}, {"scheme": {}, "layers": {}},
               {"layers": [{"pattern": "a"}]}, {"layers": [{"pattern": "(", "scheme": {}}]}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        pytest.param(kind, field.name, wrong, id=f"{kind.__name__}.{field.name}={wrong!r}"[:60])
        for kind in (RunRecord, LayerRecord)
        for field in fields(kind)
        for wrong in WRONG[field.type]
    ],
)
def test_every_field_is_of_its_type_or_the_record_is_refused_by_name(kind, field, wrong):
    """Else what reads it ends in a traceback, or takes text for a number."""
    data = json.loads(MIXED.to_json())
    place = {RunRecord: data, LayerRecord: data["layers"][1]}[kind]
    assert field in place
    place[field] = wrong
    with pytest.raises(FormatError, match=r"nearplane\.json") as caught:
        parsed_record(json.dumps(data))
    if field != "version":  # of another version nothing is read
        assert field in str(caught.value)
    if kind is not RunRecord:
        named = LAYER.name if field != "name" else "s["
        assert named in str(caught.value)


@pytest.mark.parametrize("kind", [RunRecord, LayerRecord])
def test_fields_that_are_unknown_or_missing_are_named(kind):
    for field in fields(kind):
        data = json.loads(MIXED.to_json())
        place = {RunRecord: data, LayerRecord: data["layers"][1]}[kind]
        value = place.pop(field.name)
        if field.default is field.default_factory is MISSING:
            with pytest.raises(FormatError, match=rf"\b{field.name}\b.*missing"):
                parsed_record(json.dumps(data))
        place[field.name] = value
        place["other"] = 1
        with pytest.raises(FormatError, match="other"):
            parsed_record(json.dumps(data))


@pytest.mark.parametrize("name", [field.name for field in fields(LayerRecord) if field.type.endswith("| None")])
def test_null_stands_for_a_figure_that_a_layer_does_not_have(name):
    record = replace(RUN, layers=(replace(LAYER, **{name: None}),))
    assert parsed_record(record.to_json()) == record


def test_whole_numbers_may_stand_for_others():
    text = RUN.to_json().replace('"loss": 0.5', '"loss": 1')
    assert parsed_record(text).layers[0].loss == 1


def test_the_message_says_what_was_found_and_expected():
    text = RUN.to_json().replace('"loss": 0.5', '"loss": null', 1)
    with pytest.raises(FormatError, match=r"loss of model\.layers\.0\.mlp\.up_proj is null, expected a finite number"):
        parsed_record(text)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": 5, "tokens": ' + "9" * 5000 + "}", '{"version": 5.5}'])
def test_json_that_no_record_has_is_refused(text):
    with pytest.raises(FormatError):
        parsed_record(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"version": 4, "versions": {"nearplane": "0.1.0"}},
            r"was written by nearplane 0\.1\.0, .*found record version 4",
        ),
        ({"version": None}, "was written by another version of nearplane.*found record version null"),
        ({"version": 99, "versions": []}, "found record version 99"),
        ({"version": [[1] * 99]}, "found record version "),
    ],
)
def test_records_of_other_versions_are_refused_by_name(tmp_path, changes, said):
    """Fields are not looked at: which version wrote it is what helps."""
    (tmp_path / RECORD).write_text(json.dumps(json.loads(RUN.to_json()) | changes))
    with pytest.raises(FormatError, match=said) as caught:
        read_record(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / RECORD))
    assert "Quantize again, or read it with" in str(caught.value)


def test_where_nothing_is_lost_no_rate_is_the_least():
    """JSON has no infinity."""
    record = replace(RUN, layers=(replace(LAYER, loss=0.0, limit=math.inf),))
    assert record.layers[0].limit is None
    assert parsed_record(record.to_json()) == record


@pytest.mark.parametrize("name", [field.name for field in fields(LayerRecord)])
def test_no_field_of_a_certificate_is_left_out_of_the_file(name):
    """But that records of usual layers are as they were before there was a name for others."""
    usual, other = json.loads(replace(RUN, layers=(LAYER, DEGENERATE)).to_json())["layers"]
    assert name in other
    assert (name in usual) == (name not in LEFT_OUT_OF_LAYERS)


def test_a_folder_that_a_run_has_not_finished_is_told_as_such(tmp_path):
    (tmp_path / "INCOMPLETE").write_text("")
    with pytest.raises(FormatError, match="is incomplete: its run has not finished"):
        read_record(tmp_path)


def test_a_folder_that_a_run_was_to_make_is_told_of_what_it_left(tmp_path):
    (tmp_path / "out.unfinished").mkdir()
    with pytest.raises(FormatError, match=r"A stopped run left .*out\.unfinished\. Repeat the command"):
        read_record(tmp_path / "out")
    with pytest.raises(ModelError, match=r"does not exist.*left .*out\.unfinished"):
        folder_named(tmp_path / "out")
