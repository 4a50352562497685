"""Records of before: JSON whose recipe has a `rule` and a `rate` is made to say the same with a `scheme`. Needs no torch.

And what runs of before quantized that is left as it is now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nearplane.removed import REMOVED
from nearplane.schemes import GridScheme, RateScheme, names_of

REPLACED = {"scale": "mse", "order": "activation", "coder": "tans"}  # what stands where a value of before was removed
NOTHING: dict[str, tuple[Any, ...]] = {  # options that are no more: the values that asked for nothing
    "groups": ("static",),
    "shrink": (False,),
    "gains": ("none",),
    "polish": (None, 0),
    "rounds": (None, 0),
}


def translated_record(data: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a record in today's form; today's own as it is.

    What was asked for and is offered no more goes to `removed`, by name, as text.

    Args:
        data: JSON of a record, of which nothing is checked yet.

    Raises:
        ValueError: the rule or the rate of its recipe is no object.
    """
    recipe = data.get("recipe")
    if not isinstance(recipe, dict) or not {"rule", "rate"} & recipe.keys():
        return data
    for name in ("rule", "rate"):
        if not isinstance(recipe.get(name, {}), dict):
            raise ValueError(f"{name} of recipe is {json.dumps(recipe[name])[:40]}, expected an object")
    options = recipe.get("rule", {}) | recipe.get("rate", {})
    coded = options.get("rate") is not None or options.get("size") is not None
    kind, other = (RateScheme, GridScheme) if coded else (GridScheme, RateScheme)
    scheme, removed = {}, data.get("removed", {})
    if not isinstance(removed, dict):
        raise ValueError(f"removed is {str(removed)[:40]}, expected an object")
    removed = dict(removed)
    for name, value in options.items():
        if isinstance(value, str) and (name, value) in REMOVED:
            scheme[name], removed[name] = REPLACED[name], value
        elif name in names_of(kind):
            scheme[name] = value
        elif name in NOTHING:
            if value not in NOTHING[name]:
                removed[name] = value if isinstance(value, str) else json.dumps(value)
        elif name not in names_of(other):
            scheme[name] = value  # which no one knows: refused by its name
    rest = {name: value for name, value in recipe.items() if name not in ("rule", "rate")}
    return data | {"recipe": {"scheme": scheme} | rest, "removed": removed}


def of_before(outputs: Mapping[str, int]) -> str:
    """Return a sentence where layers that differ from a model's are what runs of before quantized, else nothing.

    Args:
        outputs: how many outputs the record says that layers have which the model has not, by name.
    """
    if not outputs or set(outputs.values()) != {1}:
        return ""
    return (
        f"A nearplane of before quantized gates of one output, as {min(outputs)}, which now stay as they are: quantize anew to "
        f"measure or to tune, or check the files alone, without --against."
    )
