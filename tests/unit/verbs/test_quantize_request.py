"""Options of quantize are fields with help."""

import re
from dataclasses import fields

from nearplane import BlockScheme, GridScheme, RateScheme, Recipe
from nearplane.cli.quantize_command import FLAGS
from nearplane.recipe.format_mix import MIX_OPTIONS
from nearplane.recipe.recipe import Calibration
from nearplane.recipe.scheme import names_of
from nearplane.system.arguments import OPEN
from nearplane.verbs.quantize_request import QuantizeRequest


def test_every_flag_is_a_field_and_every_option_one_of_a_scheme_or_recipe():
    parts = (GridScheme, BlockScheme, RateScheme, Calibration, Recipe)
    options = {each.name for each in fields(QuantizeRequest) if each.default is OPEN}
    of_parts = set().union(*map(names_of, parts)) - {"scheme", "calibration", "mix"}
    assert of_parts | set(MIX_OPTIONS) == options - {"calibration"} | {"two_sided"}  # which only records have
    assert set(FLAGS) <= names_of(QuantizeRequest)


def test_every_field_is_explained():
    text = QuantizeRequest.__doc__.split("Args:")[1]
    explained = re.findall(r"^        ([a-z_, ]+): ", text, re.MULTILINE)
    assert {name for names in explained for name in names.split(", ")} == names_of(QuantizeRequest)
