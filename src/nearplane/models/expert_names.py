"""Names of the matrices of experts that transformers merges into 3-D parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import core_model_loading

from nearplane.errors import ModelError
from nearplane.models.conversion import Weights

PARTS = ("gate_proj", "up_proj")  # names for the two matrices of one parameter, where the files have no names for them
STACKING_STEPS = [
    core_model_loading.MergeModulelist,
    core_model_loading.Concatenate,
]  # transformers' conversions that merge the matrices of all experts into one parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of the matrices in a 3-D parameter, by part (gate, up) and expert.

    Args:
        layers: Layer names in the network, where these matrices are not modules.
        stored: Names in a checkpoint of the quantized model.
        sources: Names of the original model's tensors that hold each matrix.
    """

    layers: tuple[tuple[str, ...], ...]
    stored: tuple[tuple[str, ...], ...]
    sources: tuple[tuple[tuple[str, ...], ...], ...]


def stacked_names(weights: Weights, parameter: str, parts: int, experts: int) -> Names:
    """Return the names of the matrices in a 3-D parameter, as usual in files of this type of model.

    If transformers has no such names, they are made from the name of the module: "mlp.experts.3.gate_proj".

    Args:
        weights: The weights of the network.
        parameter: Name of a parameter (experts, ..) of the network.
        parts: Number of matrices of each expert in the parameter.
        experts: Number of experts.
    """
    load = weights.find(parameter)
    assert load is not None, "the files have every parameter"
    names = [name for name, _ in load.sources]
    layers = names_apart(weights.conversions, parameter, parts, experts)
    if load.converter is None or not any("*" in pattern for pattern in load.converter.source_patterns):
        return Names(layers=layers, stored=layers, sources=((tuple(names),) * experts,) * parts)
    by_part = [[name for name, pattern in load.sources if pattern == p] for p in load.converter.source_patterns]
    if any(len(part) != experts for part in by_part):
        counts = " and ".join(str(len(part)) for part in by_part)
        raise ModelError(
            f"{weights.reader.folder}: {parameter} has {experts} experts, but the files have {counts} tensors for it. These "
            f"files do not belong together. Fetch the folder again."
        )
    stored = tuple(tuple(name.removesuffix(".weight") for name in part) for part in by_part)
    return Names(layers=layers, stored=stored, sources=tuple(tuple((name,) for name in part) for part in by_part))


def patterns_apart(conversions: Iterable[core_model_loading.WeightTransform], parameter: str) -> list[str] | None:
    """Return the stored names of the matrices in a 3-D parameter: "experts.*.gate_proj" for each part.

    None if transformers does not merge this parameter from several tensors.
    """
    for converter in conversions:
        if not isinstance(converter, core_model_loading.WeightConverter) or len(converter.target_patterns) != 1:
            continue
        target, sources = converter.target_patterns[0], converter.source_patterns
        plain = all(name.count("*") == 1 and name.endswith(".weight") for name in sources)
        steps = [type(step) for step in converter.operations]
        if plain and parameter.endswith(target) and steps and steps == STACKING_STEPS[: len(steps)]:
            head = parameter.removesuffix(target)
            return [head + name.removesuffix(".weight").replace("\\.", ".") for name in sources]  # regular expressions
    return None


def names_apart(
    conversions: Iterable[core_model_loading.WeightTransform], parameter: str, parts: int, experts: int
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the matrices in a 3-D parameter, by part and expert; see `stacked_names`."""
    module, _, last = parameter.rpartition(".")
    patterns = patterns_apart(conversions, parameter)
    if patterns is None or len(patterns) != parts:
        patterns = [f"{module}.*.{word}" for word in (PARTS if parts > 1 else (last,))]
    return tuple(tuple(pattern.replace("*", str(expert)) for expert in range(experts)) for pattern in patterns)
