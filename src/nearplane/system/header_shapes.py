"""Shapes of the matrices in the blocks of a language model, from its files, for refusals before torch is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nearplane.errors import ModelError, NearplaneError
from nearplane.system.files import read_object
from nearplane.system.paths import INDEX, WEIGHTS_FILE

UNREAD = "Fetch the folder again"  # of messages that nobody reads here
IN_BLOCKS = re.compile(r"(.*\.)?layers\.\d+\..*")
# all matrices of the blocks of the usual families; those with experts, GPT-2 and encoders have others
MATRICES = re.compile(
    r"(model\.)?(language_model\.)?(model\.)?layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight"
)


def matrices_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Return {name: (out, in)} of all matrices in the blocks of an unquantized model of one of the usual families.

    Empty for other models, and where a file cannot be read: whoever opens the model says what is wrong with it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        config = read_object(folder / "config.json", expected=UNREAD, error=ModelError)
        if {"quantization_config", "quantization"} & config.keys():
            return {}
        for path in _files(folder):
            with safe_open(path, "np") as file:
                names = [name for name in file.keys() if IN_BLOCKS.fullmatch(name)]  # noqa: SIM118  it is no mapping
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError, NearplaneError):
        return {}
    found = {name: shape for name, shape in shapes.items() if len(shape) != 1}
    matrices = {
        name: (shape[0], shape[1]) for name, shape in found.items() if MATRICES.fullmatch(name) and len(shape) == 2
    }
    return matrices if len(matrices) == len(found) else {}


def _files(folder: Path) -> list[Path]:
    """Return the files that a model is read from; none if one of them is no file, as a pipe, which would never end."""
    names = {WEIGHTS_FILE}
    if (folder / INDEX).is_file():
        shards = read_object(folder / INDEX, expected=UNREAD, error=ModelError).get("weight_map")
        names = {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
    paths = [folder / name for name in sorted(names)]
    return paths if all(path.is_file() for path in paths) else []
