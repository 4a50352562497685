"""A tiny Llama on disk, and a folder with nothing but a config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints import tiny_llama


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """Return the folder of a tiny Llama in a dtype, with files beside the weights."""
    folders: dict[torch.dtype, Path] = {}

    def make(dtype: torch.dtype) -> Path:
        if dtype not in folders:
            folder = tmp_path_factory.mktemp("source") / "model"
            tiny_llama().to(dtype).save_pretrained(folder)
            (folder / "tokenizer.json").write_text('{"of": "the source"}')
            (folder / "chat_template.jinja").write_text("{{ messages }}")
            (folder / "README.md").write_text("the source's card")
            (folder / "modeling_own.py").write_text("print('code of the model')")
            folders[dtype] = folder
        return folders[dtype]

    return make


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A source folder with nothing but a config."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    return source
