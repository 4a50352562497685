"""Number formats are asked for by name."""

from dataclasses import replace

import pytest

from nearplane import Recipe, RecipeError
from nearplane.cli.quantize_command import options_of_layers
from nearplane.number_formats import number_format
from nearplane.recipe.schemes import scheme_of


@pytest.mark.parametrize("name", ["int4-g128", "int8-row", "int2-g64-asym", "int3-row-asym"])
def test_a_number_format_is_asked_for_by_its_name(name):
    scheme = scheme_of(grid=name, order="natural")
    assert scheme.number_format == number_format(name)
    assert scheme.number_format.name == name
    own = Recipe.from_spellings(bits=4, group_size=64, layers={"down_proj": {"grid": name}})
    assert own.scheme_of("mlp.down_proj").number_format.name == name
    other = Recipe.from_spellings(grid=name, layers={"down_proj": {"bits": 5}})
    assert other.scheme_of("mlp.down_proj").number_format.name == f"int5{name[4:]}"
    assert Recipe.from_json(other.to_json()) == other
    both = Recipe.from_spellings(grid="int5-g32", layers={"down_proj": {"grid": name}})
    assert both.scheme_of("mlp.down_proj").number_format.name == name
    changed = Recipe.from_spellings(layers=options_of_layers([f"down_proj=grid:{name}"]))
    assert changed.layers[0].scheme == replace(scheme, order="activation")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": "int4-g128", "bits": 3}, "bits is 3, but --grid int4-g128 determines how weights are stored"),
        ({"grid": "int4-g128", "group_size": 64}, "group_size is 64, but --grid int4-g128 determines"),
        ({"grid": "int9-g128"}, "grid is 'int9-g128'; expected one of q4_0, .* or integers as int8, int4-g128"),
        ({"grid": "int4-g0"}, "grid is 'int4-g0'; expected one of"),
        (
            {"grid": "int4-g128", "rate": 3},
            "grid is 'int4-g128' and rate 3, but entropy-coded weights have no fixed grid",
        ),
    ],
)
def test_a_name_and_options_that_contradict_it_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        scheme_of(**options)
