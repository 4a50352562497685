"""Experts in MLX: every matrix of all experts of a block is one stacked tensor, which has a name of MLX's own.

    BLOCK.mlp.switch_mlp.gate_proj.{weight,scales,biases}  (experts, out, ...)

The rest of nearplane sees single experts, under the names of the original checkpoint.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearplane.errors import FormatError
from nearplane.formats.container import Folder
from nearplane.formats.layer_format import read_config
from nearplane.system.safetensors_files import ShardReader

USUAL_MODULE, MODULES = "switch_mlp", {"dots1": "experts"}  # module of the stacks; in models of these types another one
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # MLX's names of the matrices, and those of Mixtral
WORDS = {word: word for word in MIXTRAL} | {word: name for name, word in MIXTRAL.items()}
EXPERT = re.compile(rf"(.+)\.experts\.(\d+)\.({'|'.join(WORDS)})")
STACK = re.compile(rf"(.+)\.(?:{USUAL_MODULE}|experts)\.({'|'.join(MIXTRAL)})\.(weight|scales|biases)")
MAX_EXPERTS = 4096  # in one tensor; a damaged header may say more


def stack_of(name: str, module: str = USUAL_MODULE) -> str:
    """Return MLX's name of the matrix that holds an expert; the name itself where it is not that of an expert.

    >>> stack_of("model.layers.0.block_sparse_moe.experts.7.w3")
    'model.layers.0.block_sparse_moe.switch_mlp.up_proj'
    """
    expert = EXPERT.fullmatch(name)
    return name if expert is None else f"{expert[1]}.{module}.{WORDS[expert[3]]}"


def stacked(tensors: Mapping[str, Tensor], module: str = USUAL_MODULE) -> dict[str, Tensor]:
    """Return the tensors of a block with one for each matrix of all quantized experts."""
    quantized = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    others, stacks = dict(tensors), defaultdict[str, dict[int, Tensor]](dict)
    for name in tensors:
        layer, _, part = name.rpartition(".")
        if layer in quantized and (expert := EXPERT.fullmatch(layer)) is not None:
            stacks[f"{stack_of(layer, module)}.{part}"][int(expert[2])] = others.pop(name)
    return others | {name: torch.stack([each[i] for i in sorted(each)]) for name, each in stacks.items()}


class MLXFolder(Folder):
    """A folder for MLX: quantized experts are stacked when their block is written."""

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write one part."""
        module = MODULES.get(str(read_config(self.place.source).get("model_type")), USUAL_MODULE)
        return super().write(stacked(tensors, module))


class MLXReader(ShardReader):
    """Reader of a folder for MLX, which gives every expert of a stack under its name in the original checkpoint.

    Args:
        folder: Folder of the files.
        unfinished: Whether the folder may be marked as incomplete.

    Raises:
        ModelError: The folder holds no safetensors files, or one is truncated or unreadable.
        FormatError: A tensor has more experts than any model, or the steps of a layer have a global scale.
    """

    def __init__(self, folder: Path, *, unfinished: bool = False) -> None:
        super().__init__(folder, unfinished=unfinished)
        self._stacks: dict[str, tuple[str, int]] = {}  # {name of an expert's tensor: stack, index}
        for name, info in [*self.infos.items()]:
            if (layer := name.removesuffix(".global_scale")) != name and f"{layer}.scales" in self.infos:
                raise FormatError(
                    f"{info.file}: {name} scales the steps of nvfp4, which nearplane does not read from MLX. Convert the "
                    f"original model without global scales."
                )
            stack = STACK.fullmatch(name)
            if stack is None or len(info.shape) != 3:
                continue
            experts, *shape = info.shape
            if not 0 < experts <= MAX_EXPERTS:
                raise FormatError(
                    f"{info.file}: {name} has {experts} experts, expected 1 to {MAX_EXPERTS}. Fetch the file again."
                )
            module, word, part = stack.groups()
            if module.endswith("block_sparse_moe") and f"{module}.gate.weight" in self.infos:  # Mixtral's router
                word = MIXTRAL[word]
            del self.infos[name]
            one = info._replace(shape=tuple(shape), nbytes=info.nbytes // experts)
            for index in range(experts):
                expert = f"{module}.experts.{index}.{word}.{part}"
                self.infos[expert], self._stacks[expert] = one, (name, index)

    def tensor(self, file: Any, name: str) -> Tensor:
        """Return a copy of one tensor, or of one expert in a stack, of an open file."""
        stack, index = self._stacks.get(name, (name, None))
        return super().tensor(file, name) if index is None else file.get_slice(stack)[index].clone()
