"""Schemes: each kind has its own options and defaults, and what is none of them is refused in one sentence."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearplane import BlockScheme, GridScheme, LayerScheme, RateScheme, Recipe, RecipeError
from nearplane.number_formats import TYPES
from nearplane.recipe.scheme import names_of
from nearplane.recipe.schemes import scheme_of

RATE = RateScheme(rate=3.0)


def test_without_a_rate_or_a_size_there_is_a_grid():
    assert scheme_of() == GridScheme()
    assert scheme_of(bits=3, rate=None, size=None) == GridScheme(bits=3)
    assert scheme_of(rate=3) == RateScheme(rate=3)
    assert scheme_of(size="1MB", beam=2) == RateScheme(size="1MB", beam=2)


def test_defaults_are_those_that_measured_best():
    grid, coded = GridScheme(), RATE
    assert (grid.bits, grid.group_size, grid.symmetric, grid.scale) == (4, "auto", True, "mse")
    assert (grid.solver, grid.beam, grid.polish, grid.rounds) == ("nearest-plane", None, 1, 3)
    assert (coded.solver, coded.beam, coded.rows) == ("k-best", 8, "sensitivity")
    for scheme in (grid, coded):
        assert (scheme.order, scheme.damp, scheme.correct) == ("activation", 0.01, True)


def test_defaults_follow_from_what_is_given():
    nearest = GridScheme(solver="round-to-nearest")
    assert (nearest.polish, nearest.rounds) == (0, 0)
    assert GridScheme(solver="k-best").beam == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"bits": 3, "rows": "equal"},
            "rows is 'equal', but only entropy-coded weights have this option; use --rate or --size",
        ),
        (
            {"rate": 3, "bits": 3},
            "bits is 3, but entropy-coded weights have no fixed grid; leave out this option, or --rate",
        ),
        ({"rate": 3, "bits": 4}, "bits is 4, but entropy-coded"),  # the default of grids: it is asked for all the same
        ({"rate": 3, "group_size": 128}, "group_size is 128, but entropy-coded"),
        ({"rate": 3, "symmetric": False}, "symmetric is False, but entropy-coded"),
        ({"size": "1MB", "scale": "minmax"}, "scale is 'minmax', but entropy-coded"),
        ({"rate": 3, "polish": 2}, "polish is 2, but entropy-coded"),
        ({"rate": 3, "rounds": 1}, "rounds is 1, but entropy-coded"),
        ({"rate": 3, "size": "1MB"}, "need either --rate or --size; found both"),
        ({"rate": 7.5}, "rate is 7.5; expected 0.5 to 7 bits"),
        ({"rate": True}, "rate is True; expected 0.5 to 7 bits"),
        ({"size": "3 apples"}, "3 apples"),
        ({"grid": "q4_m"}, "grid is 'q4_m'; expected one of q4_0, q4_1"),
        ({"grid": 2.5}, "grid is '2.5'; expected 2.625 to 8.5 bits per weight, or a type"),
        ({"grid": "nan"}, "grid is 'nan'; expected 2.625 to 8.5 bits"),
        ({"grid": 4.5, "solver": "round-to-nearest"}, "grid is 4.5, which measures layers on calibration text"),
        ({"grid": "q4_k", "bits": 4}, "bits is 4, but --grid q4_k determines how weights are stored"),
        ({"grid": "q4_k", "rate": 3}, "grid is 'q4_k' and rate 3, but entropy-coded weights have no fixed grid"),
        ({"grid": "q4_k", "rows": "equal"}, "rows is 'equal', but --grid q4_k determines"),
        ({"grid": "q4_k", "solver": "round-to-nearest", "rounds": 1}, "rounds needs calibration"),
        ({"rate": 3, "include_head": "yes"}, "include_head is 'yes'; expected true or false"),
        ({"rate": 3, "coder": "tans"}, "coder is not an option of a scheme"),
        ({"rate": 3, "rows": "some"}, "expected one of sensitivity, equal"),
        ({"solver": "beam"}, "solver is 'beam'; expected one of nearest-plane"),
        ({"beam": 4}, "beam is 4, but only solver 'k-best' has a beam, not 'nearest-plane'"),
        ({"solver": "k-best", "beam": 0}, "beam is 0; expected a whole number from 1 to 1000"),
        ({"polish": -1}, "polish is -1; expected a whole number from 0 to 1000"),
        ({"rounds": 2.5}, "rounds is 2.5; expected a whole number"),
        ({"damp": "much"}, "damp is 'much'; expected auto or a number from 0 to 10"),
        ({"sweep_damp": 11}, "sweep_damp is 11; expected 0 to 10"),
        ({"solver": "round-to-nearest", "sweep_damp": 0.1}, "sweep_damp needs calibration"),
        ({"solver": "round-to-nearest", "polish": 1}, "polish needs calibration"),
        ({"solver": "round-to-nearest", "rounds": 1}, "rounds needs calibration"),
        ({"two_sided": 1}, "two_sided is 1; expected true or false"),
        ({"order": "reversed"}, "order is 'reversed'; expected one of"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_in_one_sentence(options, said):
    with pytest.raises(RecipeError, match=said) as caught:
        scheme_of(**options)
    assert "\n" not in str(caught.value)


def test_entropy_coded_weights_need_a_rate_or_a_size():
    with pytest.raises(RecipeError, match="need either --rate or --size; found neither"):
        RateScheme()


@given(
    st.sampled_from(
        [
            GridScheme(),
            GridScheme(grid="nvfp4", two_sided=True),
            GridScheme(solver="k-best"),
            RATE,
            RateScheme(size="2MB", rows="equal"),
        ]
    )
)
def test_a_scheme_is_that_of_its_own_options(scheme):
    options = {name: getattr(scheme, name) for name in names_of(type(scheme))}
    assert scheme_of(**options) == scheme


# ── schemes of single layers ──


def test_layers_have_the_first_scheme_whose_pattern_they_match():
    wide, narrow = (GridScheme(bits=bits) for bits in (8, 2))
    layers = (LayerScheme(pattern="down_proj", scheme=wide), LayerScheme(pattern=r"layers\.0\.", scheme=narrow))
    recipe = Recipe(scheme=GridScheme(bits=3), layers=layers, ignore=("v_proj",))
    assert recipe.scheme_of("model.layers.0.mlp.down_proj") == wide
    assert recipe.scheme_of("model.layers.0.mlp.up_proj") == narrow
    assert recipe.scheme_of("model.layers.1.mlp.up_proj") == GridScheme(bits=3)
    assert recipe.ignores("model.layers.0.self_attn.v_proj")
    assert not recipe.ignores("model.layers.0.mlp.up_proj")
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_keywords_of_layers_change_those_of_all():
    recipe = Recipe.from_spellings(bits=3, group_size=64, beam=4, solver="k-best", layers={"down_proj": {"wbits": 8}})
    (own,) = recipe.layers
    assert own == LayerScheme(pattern="down_proj", scheme=replace(recipe.scheme, bits=8))
    assert own.scheme.beam == 4
    assert Recipe.from_spellings(layers={"a": {"group_size": -1}}).layers[0].scheme.group_size is None
    assert Recipe.from_spellings(rate=2, layers={"v_proj": {"bpw": 5}}).layers[0].scheme == RateScheme(rate=5)

    other = Recipe.from_spellings(solver="k-best", beam=4, layers={"a": {"solver": "nearest-plane"}}).layers[0].scheme
    assert (other.solver, other.beam) == ("nearest-plane", None)  # what belongs to the solver of all stays away


def test_groups_of_layers_are_settled_with_those_of_all():
    recipe = Recipe.from_spellings(layers={"down_proj": {"bits": 8}, "v_proj": {"group_size": 16}}).grouped([96, 256])
    assert recipe.scheme.group_size == 32
    assert [own.scheme.group_size for own in recipe.layers] == [32, 16]


@pytest.mark.parametrize(
    ("all_layers", "own", "said"),
    [
        ({}, {"rate": 3}, r"have a rate \(3\), the others have bits, but no format stores both"),
        ({"size": "1MB"}, {"rate": 5}, "have a rate of their own, but --size is distributed over all layers"),
        ({"rate": 3}, {"rows": "equal"}, "have another rows, which must be the same in the whole run"),
        ({"bits": 3.5}, {"damp": 0.1}, "a fraction of bits chooses the bits of every layer"),
        ({"rate": 3}, {"bits": 3}, "bits is 3, but entropy-coded weights have no fixed grid"),
        ({}, {"order": "pivoted"}, "have another order, which must be the same in the whole run"),
        ({}, {"correct": False}, "have another correct"),
        ({"rate": 3}, {"include_head": True}, "have another include_head"),
        ({"solver": "round-to-nearest"}, {"solver": "k-best"}, "use the solver k-best, which needs calibration"),
        ({}, {"bits": 3.5}, r"layers 'down' have 3.5 bits, but the bits of one layer must be a whole number"),
        ({"rate": 3}, {"size": "1MB", "rate": None}, "have the size 1MB, but a size is for a whole checkpoint"),
        ({}, {"bitz": 3}, "bitz is not a keyword"),
        ({}, {"samples": 3}, "samples is not an option of a scheme"),
        ({}, {"format": "gptq"}, "format is not an option of a scheme"),
    ],
    ids=str,
)
def test_schemes_of_layers_that_do_not_go_with_the_others_are_refused(all_layers, own, said):
    with pytest.raises(RecipeError, match=said):
        Recipe.from_spellings(**all_layers, layers={"down": own})


def test_layers_rounded_to_nearest_go_with_any_others():
    recipe = Recipe.from_spellings(layers={"down": {"solver": "round-to-nearest"}})
    assert recipe.layers[0].scheme.solver == "round-to-nearest"


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(RecipeError, match=r"layers: '\(' is not a regular expression"):
        LayerScheme(pattern="(", scheme=GridScheme())


def test_one_format_holds_grids_and_another_rates():
    assert Recipe(scheme=RATE).format == "nearplane"
    assert Recipe().format == "compressed-tensors"
    with pytest.raises(RecipeError, match=r"--format gptq is for fixed grids, .* Use --bits with this format"):
        Recipe(scheme=RATE, format="gptq")
    with pytest.raises(
        RecipeError, match=r"--format gguf is for fixed grids, but --rate 3 .* Use --bits, --grid, or --size"
    ):
        Recipe(scheme=RateScheme(rate=3), format="gguf")
    with pytest.raises(RecipeError, match=r"is for entropy-coded weights, but --bits 4 .* Use --rate 4 or --size"):
        Recipe(format="nearplane")


def test_a_grid_of_llama_cpp_is_a_scheme_of_its_own():
    scheme = scheme_of(grid="Q4_K", order="natural")
    assert scheme == BlockScheme("q4_k", order="natural")
    assert (scheme.polish, scheme.rounds, scheme.correct) == (1, 3, True)
    assert scheme.number_format is TYPES["q4_k"]
    mixed = BlockScheme("q2_k_m")
    assert mixed.number_format.name == "q2_k"
    assert mixed.stored_in(TYPES["q3_k"]) == BlockScheme("q3_k")
    assert Recipe(scheme=mixed).format == "gguf"
    assert Recipe.from_json(Recipe(scheme=mixed).to_json()) == Recipe(scheme=mixed)
    own = Recipe.from_spellings(grid="q4_k", layers={"down_proj": {"grid": "q6_k"}})
    assert own.scheme_of("mlp.down_proj") == BlockScheme("q6_k")
    with pytest.raises(RecipeError, match=r"--format gptq is for other grids, but --grid q2_k_m is for llama\.cpp"):
        Recipe(scheme=mixed, format="gptq")


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        ({"bits": 4.5}, BlockScheme("4.5")),
        ({"bits": 4.5, "allocate": "slope", "polish": 2}, BlockScheme("4.5", polish=2)),
        ({"bits": 4, "allocate": "slope"}, BlockScheme("4")),
        ({"allocate": "slope"}, BlockScheme("4")),
        ({"size": "350MB"}, BlockScheme(size="350MB")),
        ({"size": "350MB", "embeddings": "q4_k"}, BlockScheme(size="350MB", embeddings="q4_k")),
        ({"bits": 4, "group_size": 32}, GridScheme(group_size=32)),
    ],
    ids=str,
)
def test_sizes_and_bits_that_differ_by_layer_are_types_of_llama_cpp_in_a_gguf(words, scheme):
    recipe = Recipe.from_spellings(format="gguf", **words)
    assert recipe.scheme == scheme
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_layer_may_have_a_type_of_its_own_beside_a_size():
    recipe = Recipe.from_spellings(format="gguf", size="1GB", layers={"down": {"grid": "q6_k"}})
    assert recipe.scheme_of("down") == BlockScheme("q6_k", size="1GB")
    assert [recipe.scheme_of(name).measured for name in ("up", "down")] == [True, False]
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            {"bits": 4.5, "group_size": 32},
            r"group_size is 32, but --bits 4\.5 of a GGUF, for which types are .*, determines how weights",
        ),
        ({"size": "1GB", "symmetric": False}, "symmetric is False, but --size 1GB of a GGUF determines"),
        (
            {"size": "1GB", "grid": "q4_k"},
            "grid 'q4_k' and size '1GB'. Leave out one: a size chooses types by measuring",
        ),
        ({"size": "1GB", "rate": 3.0}, "need either --rate or --size; found both"),
        ({"size": "1GB", "allocate": "uniform"}, "allocate is uniform with --size"),
        ({"size": "1GB", "solver": "round-to-nearest"}, "size is 1GB, which measures layers on calibration text"),
        ({"size": "1 lot"}, "size is '1 lot'; expected a number of bytes"),
        ({"bits": 9.5}, "grid is '9.5'; expected 2.625 to 8.5 bits per weight"),
    ],
    ids=str,
)
def test_sizes_and_bits_of_a_gguf_that_contradict_are_refused(words, said):
    with pytest.raises(RecipeError, match=said):
        Recipe.from_spellings(format="gguf", **words)


def test_widths_by_slope_are_no_gguf():
    """Whoever builds the scheme by hand is told which one it is."""
    with pytest.raises(RecipeError, match=r"Use BlockScheme\(4\.5\)"):
        Recipe(scheme=GridScheme(bits=4.5), format="gguf")
    with pytest.raises(RecipeError, match="need --grid or --size; found neither"):
        BlockScheme()


# ── names of number formats ──
