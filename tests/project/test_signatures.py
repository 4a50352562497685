"""The arguments of every public name are those of tests/data/signatures.txt, which changes on purpose alone."""

from __future__ import annotations

import inspect
from pathlib import Path

import nearplane

SIGNATURES = Path(__file__).parents[1] / "data" / "signatures.txt"


def written(parameter: inspect.Parameter) -> str:
    """Return a parameter without its annotation; functions as defaults by their name."""
    default = parameter.default
    bare = parameter.replace(annotation=parameter.empty, default=parameter.empty)
    if default is parameter.empty:
        return str(bare)
    if callable(default) or type(default).__repr__ is object.__repr__:
        return f"{bare}=.."
    return f"{bare}={'..' if default is ... else repr(default)}"


def test_public_signatures_are_those_of_the_list() -> None:
    """To change one, replace its line by what this test found; positions count, the order of keywords does not."""
    found = []
    for name in sorted(nearplane.__all__):
        parameters = [*inspect.signature(getattr(nearplane, name)).parameters.values()]
        places = [written(each) for each in parameters if each.kind is not each.KEYWORD_ONLY]
        keywords = sorted(written(each) for each in parameters if each.kind is each.KEYWORD_ONLY)
        found.append(f"{name}: {', '.join(places)} | {', '.join(keywords)}".rstrip())
    assert found == SIGNATURES.read_text().splitlines()
