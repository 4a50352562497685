"""Regular expressions of recipes and configs: those that name layers match, what is none is refused in one sentence."""

from __future__ import annotations

import re

import pytest

import nearplane
from nearplane import FormatError, RecipeError
from nearplane.errors import printable
from nearplane.formats.layer_format import matches
from nearplane.system.patterns import fault_of

NAME = "model.layers.10.self_attn.q_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        "lm_head",
        r"^model\.layers\.10\.self_attn\.q_proj$",
        ".*self_attn.*",
        r"model\.layers\.(?:1|10|11)\..*",
        "(?!.*mlp).*q_proj",
        r"layers\.[0-9]+\.(self_attn|mlp)\.(q|k|v)_proj",
        r"[*+()|]{1}x",
        r"\(a\)+",
        "(abc)+",
        "(?P<own>q_proj)$",
        "(?i)LM_HEAD",
        "[]*]a",
        "(q|k)?_proj",
        re.escape(NAME),
    ],
)
def test_what_names_layers_is_matched(pattern: str) -> None:
    assert fault_of(pattern) is None
    assert matches(pattern, NAME) == (re.match(pattern, NAME) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "[",
        "*",
        "(?P<",
        "a{9999999999999}",
        "(?<=.*)a",
    ],
)
def test_what_is_no_pattern_is_one_sentence(pattern: str) -> None:
    assert fault_of(pattern) is not None
    with pytest.raises(FormatError, match="in quantization_config"):
        matches(pattern, NAME)
    with pytest.raises(RecipeError, match="ignore: ") as caught:
        nearplane.Recipe(ignore=(pattern,))
    assert str(caught.value) == printable(str(caught.value))
