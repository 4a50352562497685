"""What the command says of a run is in its record, and what went otherwise than asked is said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nearplane import Calibration, GridScheme, RateScheme, Recipe
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.record.summary import layer_table, summary

GOOD = LayerRecord(
    name="model.layers.0.mlp.up_proj", stored="model.layers.0.mlp.up_proj", out_features=8, in_features=16, loss=0.25,
    row_losses=(0.25,), relative_loss=0.01, nearest_loss=0.75, damped_loss=0.5, worst_case=2.0, expected=2 / 3, gamma=3.5,
    clipped=0.125, clipped_rows=0.5, correction=0.7, damp=0.01, sweep_damp=0.1, dead=0, tokens=512, order="activation",
    format="int4-g16", seconds=0.1, bytes=80, extra_loss=0.5, extra_relative_loss=0.02, extra_nearest_loss=1.0,
    pruned=0, extra_own_loss=0.015,
)  # fmt: skip
WORSE = replace(
    GOOD, name="model.layers.1.mlp.up_proj", relative_loss=0.03, extra_relative_loss=0.06, extra_own_loss=0.04, bytes=48
)
CODED = replace(GOOD, format="coded", asked=3.1, entropy=2.5, limit=2.25, base=0.1, bytes=48)
RUN = RunRecord(
    recipe=Recipe(scheme=GridScheme(group_size=16), calibration=Calibration(samples=2)), source="somewhere",
    versions={"torch": "2"},
    device="cpu", windows=2,
    seqlen=256, tokens=512, extra_windows=1, extra_kl=0.05234, layers=(GOOD, WORSE), seconds=1.5, bytes=1_250_000, folder=1_500_000,
)  # fmt: skip
RATE = replace(
    RUN, recipe=Recipe(scheme=RateScheme(rate=3.0), calibration=Calibration(samples=2)), layers=(CODED, CODED)
)
OUT = Path("out")


def test_a_run_that_went_as_asked_takes_ten_lines():
    assert list(summary(RUN, OUT)) == [
        "2 layers quantized to 4.000 bits per weight in 1.5 s: out",
        "weight files 1.25 MB, whole folder 1.50 MB; calibrated on 512 tokens (2 windows of 256), measured on 1 extra window",
        "predictions: KL 0.0523 nats per token from the original's on 1 extra window, to which nothing was fitted: noticeable; "
        "more --samples, more bits or nearplane tune make it smaller",
        "share of its output that a layer loses by itself on 1 extra window, to which nothing was fitted: 1.5 % in the "
        "median layer; no layer loses more than 5 %",
        "most is lost in model.layers.1.mlp.up_proj (4 %), model.layers.0.mlp.up_proj (1.5 %)",
        "with what the layers before it lost: 2 % in the median layer, at most 6 %",
        "rounding every weight to the nearest value of the same grids would lose 2.0 times as much (median layer)",
        "predictions on another text: nearplane evaluate out --against somewhere --text TEXT",
        "figures of every layer: nearplane inspect out",
        'use it: vllm serve out, or from_pretrained("out") in transformers (which needs compressed-tensors)',
    ]


def test_layers_that_were_left_out_are_told():
    ignoring = replace(RUN, recipe=replace(RUN.recipe, ignore=("down_proj", "lm_head")))
    assert "not quantized: all layers that match --ignore down_proj lm_head" in list(summary(ignoring, OUT))


def test_steps_of_a_model_in_float32_are_told():
    layer = replace(GOOD, in_features=64, out_features=64, bytes=64 * 32 + 64 * 4 * 4 + 16)
    said = [line for line in summary(replace(RUN, layers=(layer,)), OUT) if line.startswith("each step takes 32 bits")]
    assert len(said) == 1
    narrow = replace(layer, bytes=64 * 32 + 64 * 4 * 2 + 16)
    assert not any("each step" in line for line in summary(replace(RUN, layers=(narrow,)), OUT))


def test_bits_that_layers_have_on_average_are_called_so():
    recipe = Recipe.from_spellings(bits=4.5, format="gguf", samples=2)
    layers = tuple(replace(layer, format="q4_k") for layer in RUN.layers)
    assert "4.5 bits per weight: q4_k in 2 layers" in list(summary(replace(RUN, recipe=recipe, layers=layers), OUT))


def test_types_of_blocks_that_are_not_as_asked_are_told():
    """Rows of 64 hold no blocks of 256."""
    recipe = Recipe(scheme=BlockScheme(grid="q4_k"), calibration=Calibration(samples=2))
    layers = tuple(
        replace(layer, format=name, in_features=64) for layer, name in zip(RUN.layers, ("q5_0", "q8_0"), strict=True)
    )
    lines = list(summary(replace(RUN, recipe=recipe, layers=layers), OUT))
    assert "--grid q4_k: q5_0 in 1 layer, q8_0 in 1 layer" in lines
    assert any(line.startswith("the 64 inputs of model.layers.0.") for line in lines)
    right = tuple(replace(layer, format="q4_k") for layer in RUN.layers)
    assert not any("--grid" in line for line in summary(replace(RUN, recipe=recipe, layers=right), OUT))


def test_bits_that_are_not_codes_are_told():
    steps = tuple(
        replace(layer, bytes=layer.bytes + layer.in_features * layer.out_features // 8) for layer in RUN.layers
    )
    assert "quantized to 5.000 bits per weight (codes 4, steps 1.000) in" in next(
        summary(replace(RUN, layers=steps), OUT)
    )


def without_extra(layer):
    return replace(layer, extra_loss=None, extra_relative_loss=None, extra_nearest_loss=None, extra_own_loss=None)


def test_without_extra_windows_the_losses_are_said_to_be_on_what_was_fitted():
    layers = tuple(map(without_extra, RUN.layers))
    lines = list(summary(replace(RUN, layers=layers, extra_windows=0), OUT))
    fitted = (
        "share of its output that a layer loses by itself on the calibration tokens, as the text has no further windows"
    )
    assert f"{fitted}: 1 % in the median layer; no layer loses more than 5 %" in lines
    assert (
        "rounding every weight to the nearest value of the same grids would lose 3.0 times as much (median layer)"
        in lines
    )


def test_layers_that_no_extra_window_reaches_do_not_hide_the_others():
    """Of embeddings and of some experts no loss is known there."""
    lines = list(summary(replace(RUN, layers=(without_extra(GOOD), WORSE)), OUT))
    assert "with what the layers before it lost: 6 % in the median layer, at most 6 %" in lines
    where = (
        "to which nothing was fitted (of 1 layer on the calibration tokens): 1 % in the median layer; no layer loses"
    )
    assert any(where in line for line in lines)


def test_records_of_older_versions_have_the_loss_on_what_was_fitted():
    older = tuple(replace(layer, extra_own_loss=None) for layer in RUN.layers)
    lines = list(summary(replace(RUN, layers=older), OUT))
    assert any("by itself on the calibration tokens: 1 % in the median layer" in line for line in lines)
    beside = (
        "with what the layers before it lost, on 1 extra window, to which nothing was fitted: 2 % in the median layer"
    )
    assert any(beside in line for line in lines)


@pytest.mark.parametrize(
    ("kl", "word"),
    [
        (0.01, "close to the original"),
        (0.0101, "small"),
        (0.1, "noticeable"),
        (0.101, "large; more --samples, more bits"),
    ],
)
def test_the_divergence_is_said_in_words(kl, word):
    assert any(f"fitted: {word}" in line for line in summary(replace(RUN, extra_kl=kl), OUT))
    assert not any(line.startswith("predictions:") for line in summary(replace(RUN, extra_kl=None), OUT))


def test_few_tokens_are_told_with_the_number_that_would_help():
    """There are 16 inputs, and windows of 256 tokens."""
    few = replace(RUN, windows=1, tokens=256)
    said = [line for line in summary(few, OUT) if line.startswith("few tokens")]
    assert said == [
        "few tokens: 16 for each of the 16 inputs of model.layers.0.mlp.up_proj; predictions get closer up to 20 and more, with "
        "--samples 2 (windows of 256 tokens)"
    ]
    assert not any(line.startswith("few tokens") for line in summary(RUN, OUT))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"original_bytes": 5_000_000},
            "weight files 1.25 MB (original 5.00 MB, 4.00 times as much), whole folder 1.50 MB; calibrated on 512 tokens (2 "
            "windows of 256), measured on 1 extra window",
        ),
        (
            {"peak_memory": 2_040_000_000},
            "weight files 1.25 MB, whole folder 1.50 MB; calibrated on 512 tokens (2 windows of 256), "
            "measured on 1 extra window; peak memory 2.04 GB",
        ),
        ({"windows": 1}, "the calibration text has 1 window of 256 tokens; 2 were requested"),
        (
            {"windows": 2, "seqlen": 20, "tokens": 40},
            "too few tokens to trust the losses: 40 calibration tokens are 2.5 for each of the 16 inputs of "
            "model.layers.0.mlp.up_proj; at least 1 is needed, 4 or more are advised. Use --samples 4 or more (windows of 20 "
            "tokens).",
        ),
        ({"skipped": (("router", "Router"),)}, "not quantized: router (Router)"),
        (
            {"layers": (replace(GOOD, dead=3), WORSE)},
            "3 inputs were 0 for every calibration token, also in the original model; the weights for them were set to 0: "
            "model.layers.0.mlp.up_proj (3 of 16)",
        ),
        (
            {"layers": (replace(GOOD, dead=3, pruned=2), replace(WORSE, dead=4, pruned=4))},
            "6 neurons were pruned: quantization made their outputs 0 for every calibration token, and "
            "the weights for them were set to 0: "
            "model.layers.0.mlp.up_proj (2 of 16), model.layers.1.mlp.up_proj (4 of 16)",
        ),
        (
            {"layers": (replace(GOOD, dead=3, pruned=2), replace(WORSE, dead=4, pruned=4))},
            "1 inputs were 0 for every calibration token, also in the original model; the weights for them were set to 0: "
            "model.layers.0.mlp.up_proj (1 of 16)",
        ),
        (
            {"layers": (replace(GOOD, dead=3, pruned=None), WORSE)},
            "3 inputs were 0 for every calibration token; the weights for them were set to 0: model.layers.0.mlp.up_proj (3 of 16)",
        ),
        (
            {"recipe": Recipe(max_loss=0.02)},
            "1 layer with a relative loss above --max-loss 0.02: model.layers.1.mlp.up_proj (3.000e-02 at 3.000 bits per weight)",
        ),
        (
            {"recipe": Recipe(scheme=RateScheme(rate=4.1))},
            "4.1 bits per weight requested, 4 reached: some layers cannot reach their planned rate; see "
            "`nearplane inspect`.",
        ),
        (
            {"recipe": Recipe(scheme=RateScheme(rate=3.9), max_loss=0.03)},
            "3.9 bits per weight requested, 4 reached: some layers cannot reach their planned rate, or needed more bits to "
            "keep --max-loss; see `nearplane inspect`.",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_what_went_otherwise_is_said(changes, line):
    assert line in list(summary(replace(RUN, **changes), OUT))
    assert line not in list(summary(RUN, OUT))


def test_nothing_is_said_of_calibration_where_there_was_none():
    layers = tuple(map(without_extra, RUN.layers))
    scheme = GridScheme(solver="round-to-nearest")
    bare = replace(
        RUN, tokens=0, windows=0, extra_windows=0, extra_kl=None, layers=layers, recipe=Recipe(scheme=scheme)
    )
    assert not any("to nearest" in line or "windows" in line for line in summary(bare, OUT))


def test_how_to_load_is_said_of_the_format_that_needs_it():
    assert any('nearplane.load("out")' in line for line in summary(RATE, OUT))
    assert not any("nearplane.load" in line for line in summary(RUN, OUT))
    layers = (replace(GOOD, format="q4_k"),)
    gguf = replace(RUN, recipe=Recipe.from_spellings(bits=4.5, format="gguf", samples=2), layers=layers)
    assert any(line.startswith("use it: llama-cli -m out/model.gguf, or ") for line in summary(gguf, OUT))


@pytest.mark.parametrize(
    ("out", "typed", "written"),
    [("-out", "./-out", "-out"), ("a b", "'a b'", "a b"), ("$(x)*", "'$(x)*'", "$(x)*"), ('a"', "'a\"'", 'a\\"')],
)
def test_paths_in_commands_can_be_typed_as_they_are_printed(out, typed, written):
    lines = list(summary(replace(RATE, source=out), Path(out)))
    assert f"figures of every layer: nearplane inspect {typed}" in lines
    assert any(line.endswith(f"nearplane evaluate {typed} --against {typed} --text TEXT") for line in lines)
    assert f'use it: nearplane.load("{written}"), ' in lines[-1]
    assert lines[-1].endswith(f"nearplane export {typed} DENSE for other programs")


NEEDS = " (which needs compressed-tensors)"


@pytest.mark.parametrize(
    ("grid", "config", "said"),
    [
        ("int4-g16", {"architectures": ["LlamaForCausalLM"]},
         'vllm serve {out}, or from_pretrained("{out}") in transformers' + NEEDS),
        ("int4-g16", {"architectures": ["BertModel"]}, 'from_pretrained("{out}") in transformers' + NEEDS),
        ("int4-g16", {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
         'from_pretrained("{out}") in transformers' + NEEDS),
    ],
    ids=["served", "encoder", "two stacks"],
)  # fmt: skip
def test_vllm_is_named_only_for_what_it_serves(grid, config, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = replace(RUN, layers=tuple(replace(layer, format=grid) for layer in RUN.layers))
    assert list(summary(run, tmp_path))[-1] == "use it: " + said.format(out=tmp_path)


def test_the_table_of_grids_has_a_row_for_every_layer():
    before, columns, rows, after = layer_table(RUN)
    assert "somewhere quantized by nearest-plane, compressed-tensors, cpu, 1.5 s" in before
    first, second = (dict(zip(columns, row, strict=True)) for row in rows)
    assert first.items() >= {
        "layer": "model.layers.0.mlp.up_proj", "shape": "8 x 16", "grid": "int4-g16", "bits/weight": "5.000",
        "relative loss": "1.000e-02", "on extra": "2.000e-02", "nearest/this": "3.00", "nearest/extra": "2.00",
        "bound/this": "4.00", "clipped %": "12.50", "correction": "0.70",
    }.items()  # fmt: skip
    assert second["relative loss"] == "3.000e-02"
    explained = [line.split(":")[0] for line in after[:-1]]
    assert [name for name in columns if name not in explained] == ["layer", "grid", "shape"]
    assert after[-1] == "total: 4.000 bits per quantized weight, weight files 1.25 MB"


@pytest.mark.parametrize("run", [RUN, RATE], ids=["grid", "coded"])
def test_rows_that_clip_are_counted_once_below_the_table(run):
    """A star stood in every row of the table."""
    rows = [
        replace(layer, clipped=0.0, clipped_rows=share) for layer, share in zip(run.layers, (0.0, 0.5), strict=True)
    ]
    some, none = (layer_table(replace(run, layers=tuple(layers)))[3] for layers in (rows, rows[:1]))
    assert "the bound does not hold for rows that clip: 4 of 16, in 1 of 2 layers" in some
    assert not any("clip:" in line for line in none)


def test_the_table_of_rates_says_what_was_asked_for_and_how_far_the_limit_is():
    _, columns, rows, after = layer_table(replace(RATE, skipped=(("router", "Router"),)))
    first, _ = (dict(zip(columns, row, strict=True)) for row in rows)
    assert first.items() >= {
        "layer": "model.layers.0.mlp.up_proj", "shape": "8 x 16", "asked": "3.100", "bits/weight": "3.000", "of it codes": "2.500",
        "limit": "2.250", "above limit": "0.750", "relative loss": "1.000e-02", "bound/this": "4.00", "correction": "0.70",
    }.items()  # fmt: skip
    assert "not quantized: router (Router)" in after
    assert after[-1].startswith("of 3.000 bits: codes 2.500, above the limit 0.750; ")


@pytest.mark.parametrize("field", ["worst_case", "nearest_loss"])
def test_figures_that_a_layer_does_not_have_are_a_dash(field):
    _, columns, rows, _ = layer_table(replace(RUN, layers=(replace(GOOD, **{field: None}),)))
    row = dict(zip(columns, next(rows), strict=True))
    assert row["bound/this" if field == "worst_case" else "nearest/this"] == "-"


def test_tokens_of_experts_are_said_and_what_became_of_those_that_few_reached():
    def expert(number, tokens, blended, alike):
        name = f"model.layers.0.mlp.experts.{number}"
        own = dict(tokens=tokens, alike=alike, in_features=16)
        return (
            replace(GOOD, name=f"{name}.up_proj", blended=blended, **own),
            replace(GOOD, name=f"{name}.down_proj", blended=0, **own),
        )

    layers = (*expert(0, 400, 0, 0.75), *expert(1, 96, 0, 1.0), *expert(2, 16, 0, 0.5), *expert(3, 0, 16, 0.0))
    lines = list(summary(replace(RUN, layers=layers), OUT))
    assert (
        "78.9 % of the tokens of experts reach the same expert in the original model; only these are corrected"
    ) in lines
    assert "4 experts: each gets 0 to 400 of the 512 calibration tokens (median 96)" in lines
    assert (
        "2 experts got fewer than the advised 4 tokens for each input; about --samples 8 (4.0 times as many) would be "
        "enough for every expert that tokens reached"
    ) in lines
    assert (
        "1 expert got fewer than 1 token for each input: the mean Hessian of the experts of the block was added to theirs "
        "(--rare-experts mean)"
    ) in lines
    assert "no token was routed to model.layers.0.mlp.experts.3: more text of this kind may not help" in lines
    enough = list(summary(replace(RUN, layers=layers[:4]), OUT))
    assert not any("got fewer" in line or "no token was routed" in line for line in enough)


def test_what_differs_by_numbers_alone_is_left_in_one_line():
    skipped = (*tuple((f"model.layers.{n}.mlp.gate", "is of no type") for n in range(4)), ("lm_head", "is odd"))
    lines = list(summary(replace(RUN, skipped=skipped), OUT))
    assert "not quantized: model.layers.*.mlp.gate, 4 of them (is of no type)" in lines
    assert "not quantized: lm_head (is odd)" in lines


BROKEN = replace(
    GOOD, name="model.layers.2.mlp.up_proj", extra_relative_loss=3.57e33, degenerate="all its weights are 0"
)


def test_degenerate_layers_are_named_and_left_out():
    """Their share of almost nothing was "3.57e+33", and one of them decided the mean."""
    run = replace(RUN, layers=(GOOD, WORSE, BROKEN))
    shown = list(summary(run, OUT))
    assert shown[2:5] == list(summary(RUN, OUT))[2:5]
    told = "degenerate, so that their losses tell nothing and are left out: 1 of 3 layers: "
    assert f"{told}model.layers.2.mlp.up_proj (all its weights are 0)" in shown
    _, heads, rows, after = layer_table(run)
    cells = dict(zip(heads, list(rows)[2], strict=True))
    assert {cells[head] for head in ("relative loss", "on extra", "nearest/this", "bound/this", "above limit")} == {"-"}
    assert any(line.startswith(told) for line in after)


def test_where_all_layers_are_degenerate_no_loss_is_told():
    shown = list(summary(replace(RUN, layers=(BROKEN,)), OUT))
    assert not any("is lost" in line for line in shown)
    assert any("1 of 1 layer: " in line for line in shown)


def test_the_worst_layers_are_shown_first_and_alone():
    """By the loss of each layer by itself; the lines before say what all lost."""
    before, columns, rows, _ = layer_table(RUN, 1)
    assert [row[0] for row in rows] == [WORSE.name]
    assert any(line.startswith("predictions: KL 0.0523 nats") for line in before)
    assert before[-1] == "below: 1 of 2 layers, those that lose most by themselves first"
    assert [row[0] for row in layer_table(RUN)[2]] == [GOOD.name, WORSE.name]
    assert columns[0] == "layer"
