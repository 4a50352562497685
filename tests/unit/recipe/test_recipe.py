"""A recipe is data: it survives JSON, refuses nonsense, and understands other tools' words."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nearplane
from nearplane import Calibration, GridScheme, LayerScheme, RateScheme, Recipe, RecipeError

grids = st.builds(
    GridScheme,
    bits=st.integers(2, 8) | st.floats(2, 8),
    group_size=st.none() | st.just("auto") | st.integers(1, 4096),
    symmetric=st.booleans(),
    order=st.sampled_from(["natural", "activation", "pivoted"]),
    solver=st.sampled_from([None, "nearest-plane", "round-to-nearest", "k-best"]),
    damp=st.just("auto") | st.floats(0, 1),
    correct=st.booleans(),
)
rates = st.builds(
    RateScheme,
    rate=st.floats(0.5, 7),
    include_head=st.booleans(),
    damp=st.just("auto") | st.floats(0, 1),
)


@given(grids | rates, st.lists(st.sampled_from(["lm_head", r"layers\.0\.", "mlp$"]), max_size=2), st.booleans())
def test_a_recipe_survives_json(scheme, ignore, more):
    layers = (LayerScheme(pattern="down", scheme=replace(scheme, damp=0.5)),) if more else ()
    layers = layers if isinstance(getattr(scheme, "bits", 4), int) else ()
    tokens = Calibration(calibration="a.txt")
    recipe = Recipe(scheme=scheme, layers=layers, calibration=tokens, ignore=tuple(ignore))
    assert Recipe.from_json(recipe.to_json()) == recipe
    json.loads(recipe.to_json())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"bits": 9}, "from 2 to 8"),
        ({"bits": 1}, "from 2 to 8"),
        ({"bitz": 4}, "bitz is not a keyword"),
        ({"bits": 4, "scheme": "W3A16"}, "contradicts"),
        ({"scheme": "FP8"}, "one step for a whole matrix, .* Use FP8_DYNAMIC"),
        ({"scheme": "W4A8"}, "expected W8A8, INT8, FP8_DYNAMIC, .* or with zero points"),
        ({"scheme": "NVFP4", "activations": "fp8"}, "contradicts another keyword"),
        ({"scheme": "NVFP4", "bits": 8}, "bits is 8, but --grid nvfp4 determines"),
        ({"order": "random"}, "expected one of natural"),
        ({"group_size": -5}, "positive number, auto or none"),
        ({"damp": -1.0}, "auto or a number"),
        ({"samples": 0}, "positive"),
        ({"actorder": "banana"}, "not supported"),
        ({"bits": "4"}, "number from 2 to 8"),
        ({"bits": float("nan")}, "number from 2 to 8"),
        ({"bits": 3.5, "allocate": "uniform"}, "every layer needs a whole number"),
        ({"allocate": "greedy"}, "expected one of uniform, slope"),
        ({"grid": "fp8", "allocate": "slope"}, "--allocate slope chooses widths of integers, but grid is 'fp8'"),
        ({"correct": "false"}, "true or false"),
        ({"seqlen": 1}, "at least 2"),
        ({"ignore": ["("]}, "not a regular expression"),
        ({"format": "exl2"}, "expected one of compressed-tensors"),
        ({"dynamic": {"+:x": {"bits": 8}}}, "only '-:regex'"),
        ({"static_groups": False}, "not supported: steps are fitted before the sweep"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(words, said):
    with pytest.raises(RecipeError, match=said):
        Recipe.from_spellings(**words)


def test_layers_are_ignored_by_pattern():
    recipe = Recipe(ignore=(r"layers\.0\.", "down"))
    assert recipe.ignores("model.layers.0.self_attn.q_proj")
    assert recipe.ignores("model.layers.1.mlp.down_proj")
    assert not recipe.ignores("model.layers.10.self_attn.q_proj")
    assert recipe.scheme_of("model.layers.10.self_attn.q_proj") == recipe.scheme


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
    assert '"bits": 3,' in Recipe(scheme=GridScheme(bits=3.0)).to_json()
    assert '"bits": 3.5,' in Recipe(scheme=GridScheme(bits=3.5)).to_json()


def test_importing_nearplane_imports_no_torch():
    """`--help` has to answer at once."""
    code = (
        "import nearplane, nearplane.recipe, nearplane.record, nearplane.cli.app, sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_function_is_not_hidden_by_the_module_of_its_name():
    for name in ("evaluate", "quantize"):
        importlib.import_module(f"nearplane.verbs.{name}")
        assert callable(getattr(nearplane, name))


def test_rates_survive_json_and_choose_the_format():
    recipe = Recipe.from_spellings(target_bpw=2.7, allocate="uniform")
    assert recipe.format == "nearplane"
    assert recipe.scheme.rate == 2.7
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert RateScheme(size="3.1GB").limit == 3_100_000_000
    assert RateScheme(size="2 MiB").limit == 2 << 20
    assert RateScheme(size="3KiB").limit == RateScheme(size="3kiB").limit == 3 << 10
    assert RateScheme(size="3KB").limit == RateScheme(size="3 kB").limit == 3000
    assert Recipe().format == "compressed-tensors"


def test_rounding_to_nearest_is_not_measured_unless_asked_for():
    nearest = RateScheme(rate=3, solver="round-to-nearest")
    assert Recipe(scheme=nearest).allocate == "uniform"
    assert Recipe(scheme=RateScheme(rate=3)).allocate == "slope"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"grid": "int8", "activations": "fp8"},
            "--activations fp8 is for --grid fp8 or fp8-block or mxfp8, but weights are int8-row, .* int8",
        ),
        ({"grid": "fp8", "activations": "int8"}, "--activations int8 is for --grid int8, but weights are fp8, .* fp8"),
        ({"grid": "fp8", "activations": "fp4"}, "fp4 is for --grid mxfp4 or nvfp4, but weights are fp8"),
        ({"bits": 8, "activations": "int8"}, "but weights are other integers.*--activations none"),
        ({"bits": 7.5, "group_size": None, "activations": "int8"}, "but weights are other integers"),
        (
            {"rate": 4, "activations": "int8"},
            "--activations int8 is for compressed-tensors, but the format is nearplane",
        ),
        ({"grid": "int8", "format": "gptq", "activations": "int8"}, "but the format is gptq"),
        ({"grid": "nvfp4", "layers": {"a": {"grid": "fp8"}}, "activations": "fp4"}, "weights are fp8, and no reader"),
        ({"layers": {"a": {"activations": "fp8"}}}, "--activations fp8 is for --grid fp8 or fp8-block or mxfp8, but"),
        ({"layers": {"a": {"grid": "fp8", "activations": "fp9"}}}, "activations is 'fp9'"),
        ({"grid": "nvfp4", "solver": "round-to-nearest", "activations": "fp4"}, "with nvfp4 needs calibration"),
        ({"grid": "int8", "activations": "int4"}, "activations"),
    ],
)
def test_activations_that_no_reader_multiplies_with_the_weights_are_refused(options, said):
    with pytest.raises(RecipeError, match=said):
        Recipe.from_spellings(**options)


@pytest.mark.parametrize(
    ("grid", "activations"), [("int8", "int8"), ("fp8", "fp8"), ("nvfp4", "fp4"), ("mxfp4", "fp4")]
)
def test_activations_stay_in_the_json_of_a_recipe(grid, activations):
    recipe = Recipe.from_spellings(grid=grid, activations=activations)
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert recipe.inputs_of("any").name == activations
    assert Recipe.from_spellings(grid=grid).inputs_of("any") is None


def test_some_layers_have_activations_of_their_own():
    """Those that name none have those of the others."""
    recipe = Recipe.from_spellings(
        grid="nvfp4",
        activations="fp4",
        layers={
            "attn": {"grid": "fp8", "activations": "fp8"},
            "down": {"activations": "none"},
            "up": {"polish": 2},
        },
    )
    assert Recipe.from_json(recipe.to_json()) == recipe
    found = {name: recipe.inputs_of(name) for name in ("attn.q", "down", "up", "gate")}
    assert {name: each and each.name for name, each in found.items()} == {
        "attn.q": "fp8", "down": None, "up": "fp4", "gate": "fp4"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "symmetric"),
    [
        ({"runtime": "vllm"}, False),
        ({"runtime": "vllm", "bits": 2}, False),
        ({"runtime": "vllm", "bits": 3.5}, False),
        ({"runtime": "vllm", "bits": 5}, True),
        ({"runtime": "vllm", "symmetric": True}, True),
        ({"runtime": "vllm", "grid": "int4-g64"}, True),
        ({"runtime": "vllm", "format": "gptq"}, True),
        ({"runtime": "sglang"}, True),
        ({}, True),
    ],
)
def test_integers_of_few_bits_have_zero_points_where_vllm_alone_reads_them(options, symmetric):
    assert Recipe.from_spellings(**options).scheme.symmetric is symmetric


def test_each_layer_has_zero_points_by_its_own_bits():
    few = Recipe.from_spellings(runtime="vllm", bits=4, layers={"down": {"bits": 8}})
    assert (few.scheme.symmetric, few.layers[0].scheme.symmetric) == (False, True)
    many = Recipe.from_spellings(runtime="vllm", bits=8, layers={"down": {"bits": 4}})
    assert (many.scheme.symmetric, many.layers[0].scheme.symmetric) == (True, False)
