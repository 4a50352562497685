"""Layers on grids that stay packed on the CPU, collected while the others of a checkpoint are decoded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nearplane.errors import ModelError, RecipeError
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.loading.grid_linear import GridLinear, grid_linear, rounded_to_8_bits
from nearplane.loading.words_linear import WordsLinear
from nearplane.models.conversion import renamed
from nearplane.models.layers import is_linear
from nearplane.system.memory import release_all, return_large_blocks
from nearplane.system.sizes import counted, size_text

SMALL_HEAD = 0.05  # of the bytes that are read for a token; halving it then gains less than the noise of a timing
logger = logging.getLogger(__name__)


class PackedGrids:
    """Collection of packed layers.

    Args:
        empty: The network without weights.
        names: Names of the quantized layers in the checkpoint.
        dtype: Dtype of the network.
    """

    def __init__(self, empty: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> None:
        tied = {*empty.all_tied_weights_keys, *empty.all_tied_weights_keys.values()}
        modules = {f"{path}.weight": path for path, module in empty.named_modules() if is_linear(module)}
        places = renamed(empty, (f"{name}.weight" for name in names))
        self._path_of = {
            name.removesuffix(".weight"): modules[place]
            for name, place in places.items()
            if place in modules and place not in tied
        }
        self._layers: dict[str, GridLinear] = {}
        self._decoded, self._dtype = 0, dtype
        return_large_blocks()  # for the rest of the process; unpacked codes take eight times as much as packed ones

    def take(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        """Return the (out, in) values of a layer of the checkpoint; without memory of their own if it stays packed."""
        path = self._path_of.get(name)
        layer = None if path is None else grid_linear(matrix, self._dtype)
        if path is None or layer is None:
            self._decoded += 1
            return matrix.decode()
        self._layers[path] = layer
        release_all()
        return torch.zeros(1, dtype=self._dtype).expand(layer.out_features, layer.in_features)

    def put_into(self, model: nn.Module) -> None:
        """Replace the linear layers of the loaded network, and log how many layers stay packed."""
        for path, layer in self._layers.items():
            replaced = model.get_submodule(path)
            assert isinstance(replaced, nn.Linear), "see `is_linear`"
            layer.bias = replaced.bias
            model.set_submodule(path, layer)
        if self._layers:  # of this object alone
            model.__dict__["save_pretrained"] = partial(_refuse_to_save, type(model).__name__, len(self._layers))
        counts = Counter(layer.bits for layer in self._layers.values())
        parts = [f"{counts[bits]} stay packed in {bits} bits" for bits in sorted(counts)]
        parts += [f"{self._decoded} are decoded"] if self._decoded or not parts else []
        logger.info("of the quantized layers %s", ", ".join(parts))


def _refuse_to_save(name: str, layers: int, *args: object, **words: object) -> None:
    """Stand in for `save_pretrained` of a network whose layers stay packed: it would write them decoded, without a word.

    Raises:
        ModelError: Always.
    """
    del args, words
    packed = f"{counted(layers, 'layer')} of this {name} {'is' if layers == 1 else 'are'} packed"
    raise ModelError(
        f"{packed}, and save_pretrained would write decoded weights, several times as large. Copy the folder from which it was "
        f"loaded; for decoded weights use nearplane export OUT FOLDER."
    )


def round_head(model: PreTrainedModel) -> None:
    """Replace the head of a network on the CPU by one in 8 bits, with a step for each token; embeddings stay.

    The log says where this gains little: where a token is multiplied with many more weights, and where embeddings, which
    shared the weight of the head, keep it.

    Raises:
        RecipeError: The network has no head in floating point, or one of a width that is no multiple of 4.
    """
    head = model.get_output_embeddings()
    if isinstance(head, WordsLinear):
        raise RecipeError(
            "head is int8, but the head is quantized in the file and stays packed as it is. Leave head out."
        )
    if type(head) is not nn.Linear or head.in_features % 4:
        found = "no head" if head is None else f"a head that is {type(head).__name__}({head.extra_repr()})"
        raise RecipeError(f"head is int8, but {type(model).__name__} has {found}. Leave head out.")
    embeddings = model.get_input_embeddings().weight
    tied, weights = embeddings is head.weight, head.weight.nbytes
    read = sum(each.nbytes for each in chain(model.parameters(), model.buffers())) - (0 if tied else embeddings.nbytes)
    packed = rounded_to_8_bits(head.weight.detach())
    packed.bias = head.bias
    model.set_output_embeddings(packed)
    model.config.get_text_config().tie_word_embeddings = False  # it is no longer the embeddings' weight
    logger.info("the head is rounded to 8 bits, with a step for each of %d tokens", head.out_features)
    if weights < SMALL_HEAD * read:
        share = 100 * weights / read
        logger.warning("head=int8 hardly makes this model faster: the head is %.1f %% of what a token reads", share)
    if tied:
        added = size_text(sum(each.nbytes for each in packed.buffers()))
        logger.info("the embeddings, which shared the weight of the head, keep it, so that memory grows by %s", added)
