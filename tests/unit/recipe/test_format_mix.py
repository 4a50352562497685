"""What is asked of a mix of number formats: its words, its limit, and what contradicts it."""

import pytest

from nearplane import Recipe, RecipeError


def asked(**options):
    return Recipe.from_spellings(**options)


def words(**options):
    mix = asked(**options).mix
    return None if mix is None else mix.words


def test_a_format_has_rounded_inputs_as_runtimes_compute_it_and_weights_alone_by_its_end():
    recipe = asked(mix="nvfp4,fp8a16,w8a8,int8,int4-g32,bf16", bits_per_weight=5.5)
    found = {
        offer.word: (offer.scheme and offer.scheme.grouped([64]).number_format.name, offer.activations)
        for offer in recipe.mix.offers
    }
    assert found == {
        "nvfp4": ("nvfp4", "fp4"),
        "fp8a16": ("fp8", "none"),
        "w8a8": ("int8-row", "int8"),
        "int8": ("int8-g64", "none"),
        "int4-g32": ("int4-g32", "none"),
        "bf16": (None, "none"),
    }
    assert recipe.scheme == recipe.mix.first.scheme
    assert recipe.activations == "fp4"
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize("format", ["mlx", "gguf"])
def test_files_that_hold_no_rounded_inputs_get_weights_alone(format):
    mix = asked(
        mix="mxfp4,q8_0" if format == "gguf" else "mxfp4,int4",
        size="1GB",
        format=format,
        group_size=None if format == "gguf" else 32,
    ).mix
    assert {offer.activations for offer in mix.offers} == {"none"}


def test_a_size_alone_stays_entropy_coded_and_one_for_a_program_is_a_mix():
    assert words(size="1GB") is None
    assert words(size="1GB", runtime="nearplane") is None
    assert words(size="1GB", format="gguf") is None  # llama.cpp's types have a choice of their own
    assert words(size="1GB", runtime="vllm") == ("int4", "int8", "bf16")
    assert words(size="1GB", format="mlx")[0] == "int2"
    assert words(bits_per_weight=4) == words(bits_per_weight=4, runtime="transformers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mix="int3,int4"), "one limit of --size"),
        (dict(mix="int3,int4", size="1GB", bits_per_weight=4), "found --size and --bits-per-weight"),
        (dict(mix="int4", size="1GB"), "one format, so that nothing is chosen"),
        (dict(mix="int4,int4", size="1GB"), "twice"),
        (dict(mix="int4,x", size="1GB"), "'x'; expected bf16"),
        (dict(mix="int4a16,int3", size="1GB"), "'int4a16'; expected"),
        (dict(mix=["int4", 3], size="1GB"), "expected names such as"),
        (dict(mix="q4_k,fp8", size="1GB"), "types of llama.cpp"),
        (dict(mix="int3,int4", bits_per_weight=4, bits=4), "beside a mix"),
        (dict(mix="int3,int4", bits_per_weight=4, rate=4), "beside a mix"),
        (dict(mix="nvfp4,fp8", bits_per_weight=5, activations="fp4"), "activations is 'fp4' beside a mix"),
        (dict(mix="int3,int4", bits_per_weight=4, solver="round-to-nearest"), "measures on text"),
        (dict(mix="int3,int4", bits_per_weight=4, allocate="slope"), "Leave out --allocate slope"),
        (dict(mix="int3,int4", bits_per_weight=4, tune="network"), "does not go with --tune"),
        (dict(mix="int3,int4", bits_per_weight=40), "bits_per_weight is 40"),
        (dict(mix="int3,int4", bits_per_weight=4, context=10), "--context counts in"),
        (dict(mix="int3,int4", bits_per_weight=4, cost="bytes-per-token"), "Use --size"),
        (dict(mix="int3,int4", size="much"), "--size"),
        (dict(bits_per_weight=4, format="awq"), "no usual mix"),
    ],
)
def test_what_contradicts_a_mix_is_refused_in_a_sentence(options, message):
    with pytest.raises(RecipeError) as refused:
        asked(**options)
    assert message in str(refused.value)
