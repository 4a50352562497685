"""Schemes of some layers, by a pattern of their names, beside that of the others. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nearplane.errors import RecipeError
from nearplane.recipe.scheme import Activations, spelled_out
from nearplane.recipe.schemes import AnyScheme, scheme_of
from nearplane.recipe.spellings import translated_options
from nearplane.system.arguments import check_fields, described
from nearplane.system.patterns import fault_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScheme:
    """A different scheme for some layers.

    Args:
        pattern: Regular expression; the scheme is for layers whose full name it matches anywhere (`re.search`).
        scheme: A scheme of the same kind as the recipe's.
        activations: Numbers to which runtimes round the inputs of these layers; None: as those of the other layers.
    """

    pattern: str
    scheme: AnyScheme
    activations: Activations | None = None

    def __post_init__(self) -> None:
        check_pattern("layers", self.pattern)
        check_fields(self, "scheme", "activations")

    def check(self, others: AnyScheme) -> None:
        """Refuse a scheme that cannot be combined with the scheme of the other layers.

        Raises:
            RecipeError: The schemes contradict each other; the message says where.
        """
        scheme, title = self.scheme, f"layers {self.pattern!r}"
        if type(scheme) is not type(others):
            raise RecipeError(
                f"{title} are {scheme.title}, but the other layers are {others.title}. No format stores both. Use --bits, --grid "
                f"or --rate for all layers."
            )
        if isinstance(getattr(others, "bits", None), float):
            raise RecipeError(
                f"{title} have a scheme of their own, but a fraction of bits chooses the bits of every layer by measuring. Use "
                f"a whole number of bits, or remove the scheme of these layers."
            )
        if getattr(others, "size", None) is not None and getattr(scheme, "rate", None) is not None:
            raise RecipeError(
                f"{title} have a rate of their own, but --size is distributed over all layers. Use --rate instead of --size, or "
                f"remove the rate of these layers."
            )
        for name in ("order", "correct", "include_head", "include_embeddings", "embeddings", "rows"):
            if getattr(scheme, name, None) != getattr(others, name, None):
                raise RecipeError(f"{title} have another {name}, which must be the same in the whole run. Remove it.")
        if scheme.calibrated and not others.calibrated:
            raise RecipeError(
                f"{title} use the solver {scheme.solver}, which needs calibration; the other layers are not "
                f"calibrated. Use {scheme.solver} for the recipe, and {others.solver} for the other layers."
            )
        if isinstance(bits := getattr(scheme, "bits", None), float):
            raise RecipeError(f"{title} have {bits} bits, but the bits of one layer must be a whole number.")
        if (size := getattr(scheme, "size", None)) != getattr(others, "size", None):
            raise RecipeError(
                f"{title} have the size {size}, but a size is for a whole checkpoint. Use a rate in bits per weight."
            )


def merged_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of layers that change some of them; a different solver drops the options of the general solver.

    Raises:
        RecipeError: These layers are entropy-coded and the others are on a grid.
    """
    has_grid = changes.get("grid") is not None
    options, changes = spelled_out(options), spelled_out(changes)
    coded, changes_coded = (any(of.get(name) is not None for name in ("rate", "size")) for of in (options, changes))
    if changes_coded and not coded:
        raise RecipeError(
            f"Some layers have a rate ({changes.get('rate', changes.get('size'))}), the others have bits, but no format stores "
            f"both. Use --bits or --rate for all layers."
        )
    dropped = {"beam", "polish", "rounds", "sweep_damp"} if "solver" in changes else set()
    dropped |= {"size"} if changes.get("rate") is not None else set()
    dropped |= {"grid", "bits", "group_size", "symmetric", "minimum"} if has_grid else set()
    return {name: value for name, value in options.items() if name not in dropped} | dict(changes)


def check_pattern(option: str, pattern: str) -> None:
    """Refuse an empty text, which every name contains, and one that is not a regular expression."""
    if not isinstance(pattern, str) or not pattern:
        raise RecipeError(f"{option} is {described(pattern)}; expected a regular expression, for example 'down_proj'.")
    if (fault := fault_of(pattern)) is not None:
        raise RecipeError(f"{option}: {pattern[:60]!r} {fault}.")


def layer_schemes(
    layers: object, options: Mapping[str, Any], known: Collection[str], into: str | None, runtime: object = None
) -> tuple[LayerScheme, ...]:
    """Return the schemes of some layers.

    Args:
        layers: The options of these layers that differ from those of the others, by pattern.
        options: The options of the other layers.
        known: Names of all options.
        into: Format of the checkpoint; None if it is left open.
        runtime: Program that must load it; None if it is left open.

    Raises:
        RecipeError: An option is unknown, or does not go with the others.
    """
    if not isinstance(layers, Mapping) or not all(isinstance(changes, Mapping) for changes in layers.values()):
        raise RecipeError(
            f"layers is {str(layers)[:60]!r}; expected a dict from patterns to options: {{'down_proj': {{'bits': 4}}}}. Only "
            f"Recipe() takes LayerScheme objects."
        )
    schemes: list[LayerScheme] = []
    for pattern, changes in layers.items():
        own = translated_options(changes, known)
        rounded: Any = None
        if "activations" in own:
            rounded = own.pop("activations") or "none"  # commands pass None for the word none
        scheme = scheme_of(into=into, runtime=runtime, **merged_options(options, own))
        schemes.append(LayerScheme(pattern=pattern, scheme=scheme, activations=rounded))
    return tuple(schemes)
