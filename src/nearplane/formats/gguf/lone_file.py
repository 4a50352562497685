"""A GGUF without a folder: its metadata are written as config.json and tokenizer into a temporary folder that links to it.

Files of other programs are read, too, if nearplane writes their architecture and types; their tensors have no hashes.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from nearplane.errors import ModelError
from nearplane.formats.gguf.gguf_header import BLOCKS, FILE, KEY_PREFIX, LONE, Header, check_metadata, read_header
from nearplane.formats.gguf.gguf_layers import FORMAT_VERSION, METHOD
from nearplane.formats.gguf.names import checkpoint_names
from nearplane.formats.gguf.network_config import config_of
from nearplane.formats.gguf.tokenizer_files import tokenizer_files
from nearplane.system.paths import CONFIG


def folder_of_file(path: Path) -> Path:
    """Return a temporary folder with a link to a GGUF, config.json and tokenizer; it is deleted when the process ends.

    Raises:
        ModelError: The file is damaged, or of an architecture, with a type or with a tokenizer that nearplane does not write.
    """
    about = path.resolve().stat()
    return Path(_folder(path.resolve(), about.st_mtime_ns, about.st_size).name)


@cache
def _folder(path: Path, modified: int, size: int) -> tempfile.TemporaryDirectory[str]:
    header = read_header(path, lists=True)
    check_metadata(path, header)
    contents = {CONFIG: json.dumps(config_of(path, header) | {"quantization_config": _quantization(path, header)})}
    contents |= tokenizer_files(path, header.fields)
    folder = tempfile.TemporaryDirectory(prefix=LONE)
    for name, text in contents.items():
        (Path(folder.name) / name).write_text(text, encoding="utf-8")
    try:
        os.symlink(path, Path(folder.name) / FILE)
    except OSError:  # not allowed on this operating system
        os.link(path, Path(folder.name) / FILE)
    return folder


def _quantization(path: Path, header: Header) -> dict[str, Any]:
    """Return the quantization_config: of nearplane, or made from the types of the tensors.

    Raises:
        ModelError: The entry of nearplane cannot be read.
    """
    text = header.fields.get(f"{KEY_PREFIX}quantization_config")
    if text is not None:
        try:
            config = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ModelError(
                f"{path}: {KEY_PREFIX}quantization_config is no JSON ({error}). Fetch it again."
            ) from error
        return config if isinstance(config, dict) else {}
    types: dict[str, str] = {}
    for info, name in zip(header.tensors, checkpoint_names(path, header), strict=True):
        if name and info.type in BLOCKS:
            for expert in range(info.shape[0]) if len(info.shape) > 2 else (0,):
                types[name.replace("*", str(expert)).removesuffix(".weight")] = BLOCKS[info.type].name
    return {"quant_method": METHOD, "format_version": FORMAT_VERSION, "file": FILE, "types": types}
