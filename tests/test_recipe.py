"""A recipe is data: it survives JSON, refuses nonsense, and understands other tools' words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearplane import Calibration, Rate, Recipe, RecipeError, Rule

rules = st.builds(
    Rule,
    bits=st.integers(2, 8) | st.floats(2, 8),
    group_size=st.none() | st.just("auto") | st.integers(1, 4096),
    symmetric=st.booleans(),
    order=st.sampled_from(["natural", "activation", "pivoted", "reversed"]),
    groups=st.sampled_from(["static", "current"]),
    damp=st.just("auto") | st.floats(0, 1),
    correct=st.booleans(),
)


@given(rules, st.lists(st.sampled_from(["lm_head", r"layers\.0\.", "mlp$"]), max_size=2))
def test_a_recipe_survives_json(rule, ignore):
    recipe = Recipe(rule=rule, calibration=Calibration(calibration="a.txt"), format="gptq", ignore=tuple(ignore))
    assert Recipe.from_json(recipe.to_json()) == recipe
    json.loads(recipe.to_json())


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ({"sym": False, "desc_act": True}, {"symmetric": False, "order": "activation"}),
        ({"desc_act": False}, {"order": "natural"}),
        ({"actorder": "group"}, {"order": "activation", "groups": "current"}),
        ({"actorder": "static"}, {"order": "activation"}),
        ({"group_size": -1}, {"group_size": None}),
        ({"dataset": Path("x.txt")}, {"calibration": "x.txt"}),
        ({"damp_percent": 0.05}, {"damp": 0.05}),
        ({"dampening_frac": 0.02}, {"damp": 0.02}),
        ({"percdamp": 0.03}, {"damp": 0.03}),
        ({"wbits": 3}, {"bits": 3}),
        ({"scheme": "W3A16"}, {"bits": 3, "symmetric": True}),
        ({"scheme": "W4A16_ASYM"}, {"bits": 4, "symmetric": False}),
        ({"strategy": "channel"}, {"group_size": None}),
        ({"mse": True}, {"scale": "mse"}),
        ({"observer": "minmax"}, {"scale": "minmax"}),
        ({"static_groups": False}, {"groups": "current"}),
        ({"nsamples": 7, "dataset": "x.txt"}, {"samples": 7, "calibration": "x.txt"}),
        ({"num_calibration_samples": 9, "max_seq_length": 64}, {"samples": 9, "seqlen": 64}),
        ({"ignore": ["re:.*head", "mlp"]}, {"ignore": (".*head", "mlp")}),
        ({"dynamic": {"-:down": {}}}, {"ignore": ("down",)}),
        ({"true_sequential": False}, {"true_sequential": False}),
        ({"checkpoint_format": "gptq_v2"}, {"format": "gptq_v2"}),
    ],
)
def test_other_tools_spellings_are_understood(words, fields):
    recipe = Recipe.from_spellings(**words)
    found = {
        name: getattr(part, name)
        for part in (recipe, recipe.rule, recipe.calibration)
        for name in fields
        if hasattr(part, name)
    }
    assert found == fields


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"bits": 9}, "from 2 to 8"),
        ({"bits": 1}, "from 2 to 8"),
        ({"bitz": 4}, "bitz is not a keyword"),
        ({"bits": 4, "scheme": "W3A16"}, "contradicts"),
        ({"scheme": "NVFP4"}, "not offered"),
        ({"order": "random"}, "expected one of natural"),
        ({"group_size": -5}, "positive number, auto or none"),
        ({"damp": -1.0}, "auto or a number"),
        ({"samples": 0}, "positive"),
        ({"actorder": "banana"}, "not offered"),
        ({"bits": "4"}, "number from 2 to 8"),
        ({"bits": float("nan")}, "number from 2 to 8"),
        ({"bits": 3.5, "allocate": "uniform"}, "no layer can have"),
        ({"allocate": "greedy"}, "expected one of uniform, slope"),
        ({"correct": "false"}, "true or false"),
        ({"seqlen": 1}, "at least 2"),
        ({"ignore": ["("]}, "not a regular expression"),
        ({"format": "awq"}, "expected one of compressed-tensors"),
        ({"dynamic": {"+:x": {"bits": 8}}}, "only '-:regex'"),
        ({"solver": "round-to-nearest", "scale": "hessian"}, "needs calibration"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(words, said):
    with pytest.raises(RecipeError, match=said):
        Recipe.from_spellings(**words)


def test_ignored_layers_have_no_rule():
    recipe = Recipe(ignore=(r"layers\.0\.", "down"))
    assert recipe.for_layer("model.layers.0.self_attn.q_proj") is None
    assert recipe.for_layer("model.layers.1.mlp.down_proj") is None
    assert recipe.for_layer("model.layers.10.self_attn.q_proj") == recipe.rule


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"bits": 4}, "uniform"),
        ({"bits": 3.0}, "uniform"),
        ({"bits": 3.5}, "slope"),
        ({"bits": 3, "allocate": "slope"}, "slope"),
        ({"rate": 3.0}, "slope"),
        ({"rate": 3.0, "allocate": "uniform"}, "uniform"),
    ],
)
def test_layers_get_what_they_need_where_bits_are_not_a_whole_number(words, expected):
    recipe = Recipe.from_spellings(**words)
    assert recipe.allocate == expected
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_whole_numbers_of_bits_stay_whole_numbers():
    assert '"bits": 3,' in Recipe(rule=Rule(bits=3.0)).to_json()
    assert '"bits": 3.5,' in Recipe(rule=Rule(bits=3.5)).to_json()


def test_grid_bits_count_steps_and_zeros():
    assert Rule(bits=4, group_size=128).grid_bits == 4.125
    assert Rule(bits=2, group_size=32, symmetric=False).grid_bits == 2 + 18 / 32
    assert Rule(bits=4, group_size=None).grid_bits == 4


def test_importing_nearplane_imports_no_torch():
    """`--help` has to answer at once."""
    code = "import nearplane, nearplane.recipe, nearplane.record, nearplane.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_function_is_not_hidden_by_the_module_of_its_name():
    code = "import nearplane.evaluate, nearplane.quantize, nearplane as n; assert callable(n.quantize) and callable(n.evaluate)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gains": "both"}, "give --rate or --size"),
        ({"coder": "huffman"}, "only entropy-coded"),
        ({"rate": 3, "bits": 3}, "no fixed grid"),
        ({"rate": 3, "group_size": 32}, "leave out --rate"),
        ({"rate": 3, "sym": False}, "symmetric is False"),
        ({"rate": 3, "method": "hptq", "gains": "rows"}, "one step a matrix"),
        ({"rate": 3, "method": "hptq", "sweep_damp": 0.1}, "one step a matrix"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, says):
    with pytest.raises(RecipeError, match=says):
        Recipe.from_spellings(**options)


def test_a_coder_that_was_removed_is_refused_with_what_replaced_it():
    with pytest.raises(RecipeError, match=r"coder zstd was removed: use tans.*commit f3afb2a"):
        Recipe.from_spellings(rate=3, coder="zstd")


def test_rates_survive_json_and_choose_the_format():
    recipe = Recipe.from_spellings(target_bpw=2.7, coder="huffman", allocate="uniform")
    assert recipe.format == "nearplane"
    assert recipe.rate.rate == 2.7
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe(rate=Rate(size="3.1GB")).rate.bytes() == 3_100_000_000
    assert Recipe(rate=Rate(size="2 MiB")).rate.bytes() == 2 << 20
    assert Rate(size="3KiB").bytes() == Rate(size="3kiB").bytes() == 3 << 10
    assert Rate(size="3KB").bytes() == Rate(size="3 kB").bytes() == 3000
    assert Recipe().format == "compressed-tensors"


def test_rounding_to_nearest_is_not_measured_unless_asked_for():
    rule = Rule(solver="round-to-nearest")
    assert Recipe(rule=rule, rate=Rate(rate=3, method="hptq")).allocate == "uniform"
    assert Recipe(rate=Rate(rate=3)).allocate == "slope"
