"""What the flags of quantize say of schemes, types and layers."""

import pytest

from nearplane import BlockScheme, GridScheme, RateScheme, Recipe, RecipeError
from nearplane.cli import app as cli
from nearplane.cli.quantize_command import options_of_layers, refuse_mixed
from nearplane.recipe.schemes import scheme_of


def bound(*words):
    """Return what the command line passes to `quantize`."""
    return cli.app.parse_args(["quantize", "model", "out", *words])[1].arguments


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        ((), GridScheme()),
        (("--bits", "3", "--group-size", "none", "--no-symmetric"), GridScheme(bits=3, group_size=None, symmetric=False)),
        (("--group-size", "64"), GridScheme(group_size=64)),
        (("--solver", "k-best", "--beam", "4"), GridScheme(solver="k-best", beam=4)),
        (("--order", "pivoted", "--damp", "auto"), GridScheme(order="pivoted", damp="auto")),
        (("--polish", "0", "--rounds", "0", "--no-correct"), GridScheme(polish=0, rounds=0, correct=False)),
        (("--grid", "q4_k"), BlockScheme("q4_k")),
        (("--grid", "q4_k", "--embeddings", "bf16"), BlockScheme("q4_k", embeddings="bf16")),
        (("--grid", "q3_k_m", "--polish", "2", "--order", "natural"), BlockScheme("q3_k_m", polish=2, order="natural")),
        (("--rate", "2.5"), RateScheme(rate=2.5)),
        (("--bits", "3", "--include-head"), GridScheme(bits=3, include_head=True)),
        (("--size", "3.1GB", "--include-head", "--beam", "2"), RateScheme(size="3.1GB", include_head=True, beam=2)),
        (("--damp", "0.1", "--rate", "3", "--solver", "nearest-plane"), RateScheme(rate=3, damp=0.1, solver="nearest-plane")),
    ],
    ids=str,
)  # fmt: skip
def test_flags_are_a_scheme(words, scheme):
    assert scheme_of(**bound(*words)["request"].options()) == scheme


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        (("--size", "3.1GB"), BlockScheme(size="3.1GB")),
        (("--size", "3.1GB", "--embeddings", "q4_k"), BlockScheme(size="3.1GB", embeddings="q4_k")),
        (("--bits", "4.5"), BlockScheme("4.5")),
        (("--bits", "4", "--group-size", "32"), GridScheme(group_size=32)),
    ],
    ids=str,
)
def test_flags_of_a_gguf_are_a_scheme(words, scheme):
    assert bound(*words, "--format", "gguf")["request"].asked().scheme == scheme


def test_layers_of_a_size_have_types():
    words = ("--size", "1GB", "--format", "gguf", "--layer", "v_proj=grid:q6_k")
    (own,) = bound(*words)["request"].asked().layers
    assert own.scheme == BlockScheme("q6_k", size="1GB")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--bits", "3", "--rate", "2.5"],
            "--bits is for weights on a fixed grid, --rate is for entropy-coded weights",
        ),
        (["--rate=2.5", "--group-size=32"], "--group-size is for weights on a fixed grid, --rate"),
        (["--size", "1GB", "--no-symmetric"], "--symmetric is for weights on a fixed grid, --size"),
        (["--rate", "3", "--polish", "3"], "--polish is for weights on a fixed grid, --rate"),
        (
            ["--include-head", "--embeddings", "f16"],
            "--include-head is for weights on a fixed grid, --embeddings is for",
        ),
    ],
)
def test_flags_of_both_kinds_are_refused(words, said):
    with pytest.raises(RecipeError, match=said):
        refuse_mixed(["model", "out", *words])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("down_proj=bits:4",), [("down_proj", GridScheme(bits=4))]),
        (
            (r"layers\.[01]\.=bits:8,group_size:32", "v_proj=symmetric:false,group_size:none"),
            [
                (r"layers\.[01]\.", GridScheme(bits=8, group_size=32)),
                ("v_proj", GridScheme(bits=3, symmetric=False, group_size=None)),
            ],
        ),
        (("q=k=sym: false , wbits: 2",), [("q=k", GridScheme(bits=2, symmetric=False))]),
        (("o_proj=solver:k-best",), [("o_proj", GridScheme(bits=3, solver="k-best"))]),
    ],
)
def test_schemes_of_layers_change_what_the_flags_say(texts, expected):
    words = [word for text in texts for word in ("--layer", text)]
    layers = bound("--bits", "3", *words)["request"].asked().layers
    assert [(own.pattern, own.scheme) for own in layers] == expected


def test_layers_of_a_rate_have_rates():
    (own,) = bound("--rate", "2.5", "--beam", "4", "--layer", "v_proj=rate:5")["request"].asked().layers
    assert own.scheme == RateScheme(rate=5, beam=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("down_proj", "--layer 'down_proj' is not PATTERN=NAME:VALUE; expected for example 'down_proj=bits:4'"),
        ("=bits:4", "is not PATTERN=NAME:VALUE"),
        ("down_proj=bits", "is not PATTERN=NAME:VALUE"),
        ("down_proj=", "is not PATTERN=NAME:VALUE"),
        ("down_proj=bitz:4", "bitz is not a keyword"),
        ("down_proj=bits:four", "bits is 'four'"),
        ("down_proj=rows:equal", "rows is 'equal', but only entropy-coded weights have this option"),
        ("(=bits:4", "not a regular expression"),
        ("down_proj=samples:9", "samples is not an option of a scheme"),
        ("down_proj=bits:4,bits:5", "gives bits twice"),
        ("down_proj=bits:4,wbits:5", "contradicts another keyword"),
        ("down_proj=group_size:32.5", "group_size is 32.5; expected a positive number"),
        ("down_proj=bits:NaN", "bits is nan"),
        ("down_proj=ignore:true", "ignore is True"),
    ],
)
def test_what_is_no_scheme_for_layers_is_refused(text, said):
    with pytest.raises(RecipeError, match=said):
        Recipe.from_spellings(layers=options_of_layers((text,)))


def test_layer_may_be_given_several_times():
    layers = bound("--layer", "a=bits:3", "--layer", "b=bits:2")["request"].asked().layers
    assert [(own.pattern, own.scheme.bits) for own in layers] == [("a", 3), ("b", 2)]  # the first match counts


@pytest.mark.parametrize("second", ["a=bits:5", "a=bits:3", "a=bitz:4"])
def test_a_pattern_of_layers_is_given_once(second):
    """Of two sets of options for the same layers only one could count."""
    with pytest.raises(RecipeError, match=f"--layer gives options of 'a' twice, the second time as '{second}'"):
        options_of_layers(("a=bits:3", "b=bits:2", second))
