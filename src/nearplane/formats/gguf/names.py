"""What becomes of the tensors of a checkpoint in a GGUF: what llama.cpp calls them, and how it wants their values.

Knows names and tensors; not what the numbers of a config mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import RecipeError
from nearplane.formats.gguf.architecture import Config, architecture_of
from nearplane.formats.gguf.gguf_header import STAR
from nearplane.formats.gguf.mixes import blocks_of

DROPPED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What becomes of a tensor's values on their way into the file, and back.

    Args:
        heads: whose rows are put in turns; 0: none.
        shift: that is added.
        transposed: whether the checkpoint has (in, out).
        row: whether the checkpoint has one row of what is (in,) in the file.
    """

    heads: int = 0
    shift: float = 0.0
    transposed: bool = False
    row: bool = False

    def into(self, tensor: Tensor) -> Tensor:
        """Return what the file holds of a tensor of the checkpoint."""
        if self.row:
            return tensor[0]
        if self.heads:
            tensor = _in_turns(tensor, self.heads, 2)
        if self.shift:
            tensor = tensor.to(torch.float32) + self.shift
        return tensor.T.contiguous() if self.transposed else tensor

    def back(self, tensor: Tensor) -> Tensor:
        """Return what the file holds as the checkpoint has it."""
        if self.row:
            return tensor[None]
        tensor = tensor.T.contiguous() if self.transposed else tensor
        if self.heads:
            tensor = _in_turns(tensor, self.heads, len(tensor) // self.heads // 2)
        return tensor - self.shift if self.shift else tensor


def _in_turns(tensor: Tensor, heads: int, parts: int) -> Tensor:
    """Return rows with those of the `parts` of every head in turns: of two halves the first of each, then the second."""
    rest = tensor.shape[1:]
    return tensor.reshape(heads, parts, -1, *rest).transpose(1, 2).reshape(tensor.shape)


def rule_of(name: str, fields: Mapping[str, Any], *, dims: int) -> Rule:
    """Return what becomes of a tensor that the checkpoint stores, by its name in the file.

    Args:
        name: "blk.0.attn_q.weight".
        fields: metadata of the file.
        dims: of the tensor; 1 of blocks, which are (out, in) whatever the checkpoint has.
    """
    architecture = fields["general.architecture"]
    part = name.rsplit(".", 2)[-2]
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        return Rule(heads=int(fields[f"llama.attention.head_count{'_kv' if part == 'attn_k' else ''}"]))
    if architecture.startswith("gemma") and part.endswith("norm"):
        return Rule(shift=1.0)
    return reshaping(name, architecture, dims=dims)


def reshaping(name: str, architecture: str, *, dims: int) -> Rule:
    """Return what becomes of the sizes of a tensor; see `rule_of`."""
    part = name.rsplit(".", 2)[-2]
    turned = architecture == "gpt2" and dims == 2 and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return Rule(transposed=turned, row=part == "ffn_gate_inp_shexp")


def together(name: str) -> str:
    """Return the name under which a tensor of a checkpoint lies in the file: of one expert's matrix with a star for its number."""
    return re.sub(r"\.experts\.\d+\.", f".experts.{STAR}.", name)


def unused(name: str, config: Config) -> bool:
    """Return whether llama.cpp has no use for a tensor of a checkpoint: masks, frequencies, a head that is the embeddings."""
    return name.endswith(DROPPED) or (name == "lm_head.weight" and bool(config.get("tie_word_embeddings", True)))


def called(names: Iterable[str], config: Config) -> dict[str, str]:
    """Return what llama.cpp calls tensors of a checkpoint, by their names there; without what it has no use for.

    The matrices of all experts of a block are one tensor, see `together`: they are called alike.

    Raises:
        RecipeError: it has no name for one.
    """
    import gguf

    architecture = architecture_of(config)
    number = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[architecture.name]
    table = gguf.get_tensor_name_map(number, blocks_of(config))
    found = {}
    for name in names:
        if unused(name, config):
            continue
        whole = together(name)
        new = table.get_name(whole.replace(f"experts.{STAR}", "experts"), try_suffixes=(".weight", ".bias"))
        if new is None and ".experts." in name and STAR not in whole:
            raise RecipeError(
                f"{name} holds all experts of a block; a GGUF is made of checkpoints that hold the matrices of each by "
                f"themselves. Save the model by save_pretrained without save_original_format=False, or use another --format."
            )
        if new is None:
            raise RecipeError(
                f"{name}: llama.cpp knows no such tensor in a {config['model_type']}. Use another --format, or take it out of the "
                f"checkpoint."
            )
        found[name] = new
    return found
