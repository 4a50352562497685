"""What of a network can be quantized: its blocks, by structure, and the matrices in them; and which parts stay as they are.

These are parts of the checkpoint that transformers does not build (multi-token prediction), and parts of the network outside the
stack of blocks (the vision tower of a multimodal model). Both are copied.

Knows modules; not where their weights come from, nor what becomes of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from nearplane.errors import ModelError, RecipeError
from nearplane.models.conversion import Names
from nearplane.models.experts import is_stack, stacked_layers
from nearplane.models.kinds import has_two_stacks, towers
from nearplane.models.layers import EmbeddingLayer, Layer, as_layer

IGNORED = "ignored"
NOT_HANDLED = "is of no type that is handled"
GATE = "one output: a gate"
MATRICES = (nn.Linear, Conv1D, nn.Conv2d)
NOT_BUILT = "transformers does not build it"


def find_layers(
    block: nn.Module, prefix: str, ignore: Sequence[str] = (), names: Callable[[str, int, int], Names] | None = None
) -> tuple[list[Layer], list[tuple[str, str]]]:
    """Find the matrices of a block.

    Args:
        block: the module to look into.
        prefix: its name in the whole model.
        ignore: regular expressions; what one of them is found in (`re.search`, on the full name) stays as it is.
        names: of the matrices in a stacked parameter, see `Weights.stacked`; without it experts in such parameters are not handled.

    Returns:
        The layers in module order, and (name, reason) of every other module with a floating-point weight of two or more
        dimensions of its own: the reason is its type, `GATE`, or `IGNORED`.

    Raises:
        RecipeError: some of the matrices in one parameter are to stay as they are.
    """
    layers: list[Layer] = []
    skipped: list[tuple[str, str]] = []
    for path, module in block.named_modules():
        name = f"{prefix}.{path}" if path else prefix
        own = [p for p in module.parameters(recurse=False) if p.dim() >= 2 and p.is_floating_point()]
        if not own:
            continue
        layer = as_layer(name, module)
        if any(re.search(pattern, name) for pattern in ignore):
            skipped.append((name, IGNORED))
        elif names is not None and is_stack(module):
            stacked = [*stacked_layers(name, module, names)]
            kept = [layer for layer in stacked if not any(re.search(pattern, layer.name) for pattern in ignore)]
            refuse_parts(stacked, kept)
            layers += kept
            skipped += [(layer.name, IGNORED) for layer in stacked if layer not in kept]
            skipped += [(name, IGNORED)] if not kept else []
        elif layer is None:
            shapes = ", ".join("x".join(map(str, p.shape)) for p in own)
            skipped.append((name, f"{type(module).__name__} ({shapes}) {NOT_HANDLED}"))
        elif layer.shape[0] == 1:
            skipped.append((name, GATE))
        else:
            layers.append(layer)
    return layers, skipped


def refuse_parts(stacked: Sequence[Layer], kept: Sequence[Layer]) -> None:
    """Refuse to leave out some of the matrices that lie in one parameter.

    Args:
        stacked: all of a module.
        kept: those that are to be quantized.

    Raises:
        RecipeError: names the parameter.
    """
    whole, here = (Counter(layer.parameter for layer in some) for some in (stacked, kept))
    for parameter, count in here.items():
        if count < whole[parameter]:
            raise RecipeError(
                f"--ignore leaves out {whole[parameter] - count} of the {whole[parameter]} matrices that lie in "
                f"{parameter}: they are quantized all or not at all. Leave them all out with --ignore "
                f"'{re.escape(parameter.rpartition('.')[0])}'."
            )


def find_ends(
    network: PreTrainedModel, ignore: Sequence[str] = (), *, embeddings: bool, head: bool
) -> tuple[Layer | None, Layer | None, list[tuple[str, str]]]:
    """Find the matrices before and behind the blocks: input embeddings, of which rows are looked up, and the head.

    Args:
        network: to look into.
        ignore: as for `find_layers`; of tied embeddings, the name of either leaves both out.
        embeddings, head: which are wanted. Where they are tied both are one matrix, which is found as the embeddings.

    Returns:
        Embeddings, head, and (name, reason) of what is wanted and not handled.
    """
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    names = {module: name for name, module in network.named_modules()}
    tied = outputs is not None and inputs.weight is outputs.weight
    found: list[Layer | None] = []
    left: list[tuple[str, str]] = []
    wanted = ((inputs, embeddings or (tied and head)), (outputs, head and outputs is not None and not tied))
    for module, asked in wanted:
        name = names.get(module, "")
        layer: Layer | None = None
        called = (name, names[outputs]) if tied else (name,)
        if asked and any(re.search(pattern, each) for pattern in ignore for each in called):
            left.append((name, IGNORED))
        elif asked and isinstance(module, nn.Embedding):  # subclasses scale what was looked up
            layer = EmbeddingLayer(name=name, shape=(module.num_embeddings, module.embedding_dim), module=module)
        elif asked and (module is None or (layer := as_layer(name, module)) is None):
            left.append((name or "head", f"{type(module).__name__} {NOT_HANDLED}"))
        found.append(layer)
    return found[0], found[1], left


def find_stacks(network: PreTrainedModel) -> list[tuple[str, nn.ModuleList]]:
    """Find the lists of blocks of a network in the order they run: one, or those of an encoder and of a decoder.

    Raises:
        ModelError: there is none, or one of two.
    """
    if not has_two_stacks(network):
        return [find_blocks(network)]
    names = {part: name for name, part in network.named_modules()}
    found = ((part, *find_blocks(part)) for part in (network.get_encoder(), network.get_decoder()))
    return [(f"{names[part]}.{inner}", blocks) for part, inner, blocks in found]


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the list of blocks that make up the depth of a network.

    It is the outermost ModuleList of transformers' GradientCheckpointingLayers, the largest one if there are several;
    without any, the ModuleList with the most parameters among those whose every member holds a matrix. Of a network that is
    given text, no part that sees or hears is looked into.

    Raises:
        ModelError: there is no such list.
    """
    apart = tuple(f"{tower}." for tower in towers(model)) if isinstance(model, PreTrainedModel) else ()
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    lists = [(name, part) for name, part in lists if not name.startswith(apart)]
    marked: list[tuple[str, nn.ModuleList]] = []
    for name, module in lists:  # named_modules goes from the outside in
        inside = any(name.startswith(f"{outer}.") for outer, _ in marked)
        if not inside and all(isinstance(member, GradientCheckpointingLayer) for member in module):
            marked.append((name, module))
    found = marked or [(name, module) for name, module in lists if all(find_layers(member, "")[0] for member in module)]
    if not found:
        raise ModelError(
            f"no blocks found in {type(model).__name__}: it has no list of modules that all hold a Linear, Conv1D or "
            f"Conv2d. nearplane quantizes models made of a stack of blocks."
        )
    return max(found, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))


def unbuilt_parts(unused: Iterable[str], used: Iterable[str]) -> Counter[str]:
    """Return the parts of a checkpoint that the network has no place for, and how many tensors each holds.

    Args:
        unused: names of tensors of two or more dimensions without a place.
        used: names of all others. A part is as large as it can be without one of them: "model.layers.61", not its modules.
    """
    taken = {name[:end] for name in used for end in dots(name)}
    parts: Counter[str] = Counter()
    for name in unused:
        ends = [end for end in dots(name) if name[:end] not in taken]
        parts[name[: ends[0]] if ends else name] += 1
    return parts


def kept_parts(unbuilt: Counter[str], network: PreTrainedModel, stacks: Collection[str]) -> list[tuple[str, str]]:
    """Return (part, why it stays as it is) of parts with matrices that are not built, or lie outside the stack of blocks.

    Args:
        unbuilt: how many matrices each of the first holds.
        network: the whole of it.
        stacks: names of the lists of blocks. Input embeddings and head are no part.
    """
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    apart = {name for name, module in network.named_modules() if module in ends}
    blocks = tuple(f"{stack}." for stack in stacks)
    names = [name for name, module in network.named_modules() if isinstance(module, MATRICES)]
    outside = [f"{name}." for name in names if not name.startswith(blocks) and name not in apart]
    found = unbuilt_parts(outside, [*blocks, *(f"{name}." for name in apart)])
    return [
        (part, f"{why}, {count:,} {'matrix' if count == 1 else 'matrices'}")
        for why, parts in (("outside the stack of blocks", found), (NOT_BUILT, unbuilt))
        for part, count in parts.items()
    ]


def dots(name: str) -> list[int]:
    """Return where the dots of a name are."""
    return [place for place, letter in enumerate(name) if letter == "."]
