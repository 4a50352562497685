"""Search for the blocks of a network, the matrices in them that can be quantized, and the parts that stay unquantized.

Unquantized parts are those that transformers does not build (multi-token prediction), and those outside the stack of
blocks (the vision tower of a multimodal model). Both are copied into the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from nearplane.errors import ModelError
from nearplane.models.expert_names import Names
from nearplane.models.experts import refuse_parts, stacked_layers
from nearplane.models.kinds import has_two_stacks, towers
from nearplane.models.layers import EmbeddingLayer, Layer, as_layer, is_stack
from nearplane.system.patterns import has_match

IGNORED_REASON = "ignored"
NOT_HANDLED = "is of no type that is handled"
MAX_GATE_OUTPUTS, MIN_INPUTS_BY_OUTPUT = 63, 32  # of a gate: the most outputs, and the fewest inputs for each of them
MATRICES = (nn.Linear, Conv1D, nn.Conv2d)
NOT_BUILT = "transformers does not build it"


def is_norm(module: nn.Module) -> bool:
    """Return whether a module has a weight, and all its parameters are vectors."""
    parameters = dict(module.named_parameters(recurse=False))
    return "weight" in parameters and all(each.dim() == 1 and each.is_floating_point() for each in parameters.values())


def find_layers(
    block: nn.Module, prefix: str, ignore: Sequence[str] = (), names: Callable[[str, int, int], Names] | None = None
) -> tuple[list[Layer], list[tuple[str, str]]]:
    """Find the matrices of a block.

    Args:
        block: The block.
        prefix: Name of the block in the whole model.
        ignore: Regular expressions; a module whose full name contains a match (`re.search`) stays unquantized.
        names: Function for the names of the matrices in a stacked parameter, see `stacked_names`; None: experts in
            stacked parameters are not supported.

    Returns:
        The layers in module order, and (name, reason) of every other module with a floating-point weight of two or more
        dimensions of its own: the reason is its type, `gate_reason`, or `IGNORED_REASON`.

    Raises:
        RecipeError: `ignore` matches some, but not all, of the matrices in one parameter.
    """
    layers: list[Layer] = []
    skipped: list[tuple[str, str]] = []
    for path, module in block.named_modules():
        name = f"{prefix}.{path}" if path else prefix
        matrices = [p for p in module.parameters(recurse=False) if p.dim() >= 2 and p.is_floating_point()]
        if not matrices:
            continue
        layer = as_layer(name, module)
        if any(has_match(pattern, name) for pattern in ignore):
            skipped.append((name, IGNORED_REASON))
        elif names is not None and is_stack(module):
            stacked = [*stacked_layers(name, module, names)]
            kept = [layer for layer in stacked if not any(has_match(pattern, layer.name) for pattern in ignore)]
            refuse_parts(stacked, kept)
            layers += kept
            skipped += [(layer.name, IGNORED_REASON) for layer in stacked if layer not in kept]
            skipped += [(name, IGNORED_REASON)] if not kept else []
        elif layer is None:
            shapes = ", ".join("x".join(map(str, p.shape)) for p in matrices)
            skipped.append((name, f"{type(module).__name__} ({shapes}) {NOT_HANDLED}"))
        elif reason := gate_reason(*layer.shape):
            skipped.append((name, reason))
        else:
            layers.append(layer)
    return layers, skipped


def gate_reason(outputs: int, inputs: int) -> str:
    """Return why a layer of these numbers of outputs and inputs stays unquantized as a gate; empty if it is none.

    Gates, such as in_proj_a and in_proj_b of linear attention, multiply all that a head computes, and have so few weights that
    nothing is gained by quantizing them.

    >>> gate_reason(32, 2048)
    '32 outputs of 2048 inputs: a gate'
    >>> gate_reason(64, 2048), gate_reason(32, 512)
    ('', '')
    """
    if outputs > 1 and (outputs > MAX_GATE_OUTPUTS or inputs < MIN_INPUTS_BY_OUTPUT * outputs):
        return ""
    return f"{outputs} output{'s' * (outputs > 1)} of {inputs} inputs: a gate"


def find_ends(
    network: PreTrainedModel, ignore: Sequence[str] = (), *, embeddings: bool, head: bool
) -> tuple[Layer | None, Layer | None, list[tuple[str, str]]]:
    """Find the matrices before and after the blocks: the input embeddings and the head.

    Args:
        network: The network.
        ignore: Regular expressions as in `find_layers`; tied embeddings are ignored if either name matches.
        embeddings, head: Whether each is requested. If they are tied, they are one matrix, returned as the embeddings.

    Returns:
        Embeddings, head, and (name, reason) of those that are requested and stay unquantized.
    """
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    names = {module: name for name, module in network.named_modules()}
    tied = outputs is not None and inputs.weight is outputs.weight
    ends: list[Layer | None] = []
    skipped: list[tuple[str, str]] = []
    requests = ((inputs, embeddings or (tied and head)), (outputs, head and outputs is not None and not tied))
    for module, requested in requests:
        name = names.get(module, "")
        layer: Layer | None = None
        matched_names = (name, names[outputs]) if tied else (name,)
        if requested and any(has_match(pattern, each) for pattern in ignore for each in matched_names):
            skipped.append((name, IGNORED_REASON))
        elif requested and isinstance(module, nn.Embedding):  # subclasses scale the rows
            layer = EmbeddingLayer(name=name, shape=(module.num_embeddings, module.embedding_dim), module=module)
        elif requested and (module is None or (layer := as_layer(name, module)) is None):
            skipped.append((name or "head", f"{type(module).__name__} {NOT_HANDLED}"))
        ends.append(layer)
    return ends[0], ends[1], skipped


def find_stacks(network: PreTrainedModel) -> list[tuple[str, nn.ModuleList]]:
    """Find the lists of blocks of a network in the order they run: one, or those of an encoder and of a decoder.

    Raises:
        ModelError: The network, its encoder or its decoder has no list of blocks.
    """
    if not has_two_stacks(network):
        return [find_blocks(network)]
    names = {part: name for name, part in network.named_modules()}
    stacks = ((part, *find_blocks(part)) for part in (network.get_encoder(), network.get_decoder()))
    return [(f"{names[part]}.{inner}", blocks) for part, inner, blocks in stacks]


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the list of blocks that make up the depth of a network.

    It is the outermost ModuleList of transformers' GradientCheckpointingLayers, the largest one if there are several;
    without any, the ModuleList with the most parameters among those whose every member holds a matrix. The towers of a
    language model for images or sound are not searched.

    Raises:
        ModelError: There is no such list.
    """
    tower_prefixes = tuple(f"{tower}." for tower in towers(model)) if isinstance(model, PreTrainedModel) else ()
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    lists = [(name, part) for name, part in lists if not name.startswith(tower_prefixes)]
    marked: list[tuple[str, nn.ModuleList]] = []
    for name, module in lists:  # named_modules yields outer modules first
        inside = any(name.startswith(f"{outer}.") for outer, _ in marked)
        if not inside and all(isinstance(member, GradientCheckpointingLayer) for member in module):
            marked.append((name, module))
    candidates = marked or [
        (name, module) for name, module in lists if all(find_layers(member, "")[0] for member in module)
    ]
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} has no list of modules that all contain a Linear, Conv1D or Conv2d, so no blocks were found. "
            f"nearplane quantizes models made of a stack of blocks."
        )
    return max(candidates, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))


def unbuilt_parts(unused: Iterable[str], used: Iterable[str]) -> Counter[str]:
    """Return {part: number of its tensors} of the parts that the network does not use.

    A part is as large as possible without used tensors: "model.layers.61", not its modules.

    Args:
        unused: Names of unused tensors with two or more dimensions.
        used: Names of all other tensors.
    """
    used_prefixes = {name[:end] for name in used for end in dots(name)}
    parts: Counter[str] = Counter()
    for name in unused:
        ends = [end for end in dots(name) if name[:end] not in used_prefixes]
        parts[name[: ends[0]] if ends else name] += 1
    return parts


def kept_parts(unbuilt: Counter[str], network: PreTrainedModel, stacks: Collection[str]) -> list[tuple[str, str]]:
    """Return (part, reason) of parts with matrices that are not built or lie outside the stack of blocks.

    Args:
        unbuilt: {unbuilt part: number of its matrices}.
        network: The whole network; its input embeddings and head are not listed.
        stacks: Names of the lists of blocks.
    """
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    end_names = {name for name, module in network.named_modules() if module in ends}
    blocks = tuple(f"{stack}." for stack in stacks)
    names = [name for name, module in network.named_modules() if isinstance(module, MATRICES)]
    outside = [f"{name}." for name in names if not name.startswith(blocks) and name not in end_names]
    outer_parts = unbuilt_parts(outside, [*blocks, *(f"{name}." for name in end_names)])
    return [
        (part, f"{why}, {count:,} {'matrix' if count == 1 else 'matrices'}")
        for why, parts in (("outside the stack of blocks", outer_parts), (NOT_BUILT, unbuilt))
        for part, count in parts.items()
    ]


def dots(name: str) -> list[int]:
    """Return the positions of the dots in a name."""
    return [place for place, letter in enumerate(name) if letter == "."]
