"""The forecast of a folder's size, for which the disk must have room, is not below what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer
from native_checkpoints import save_tiny
from nearplane.planning.folder_size import forecast_bytes
from nearplane.planning.request import open_resolved
from nightly import daily

FORMATS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"bits": 4, "group_size": 16},
    "whole rows": {"bits": 8, "group_size": None},
    "gptq_v2": {"bits": 4, "group_size": 16, "symmetric": False, "format": "gptq_v2"},
    "awq": {"bits": 4, "group_size": 16, "symmetric": False, "format": "awq"},
    "mlx": {"bits": 4, "group_size": 32, "format": "mlx"},
    "nvfp4": {"grid": "nvfp4"},
    "gguf": {"bits": 8, "group_size": 32, "format": "gguf"},
}


@pytest.mark.parametrize(
    "dtype", daily([torch.float32, torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16]), ids=str
)
def test_what_is_written_is_forecast_from_above(dtype: torch.dtype, tmp_path: Path) -> None:
    """Steps of a float32 model counted as 16 bits; headers, run record and model card did not count at all."""
    save_tiny(tmp_path / "model", "llama", dtype, vocab_size=TEXT_VOCABULARY, num_hidden_layers=2)
    add_tokenizer(tmp_path / "model")
    for name, options in FORMATS.items():
        record = nearplane.quantize(tmp_path / "model", tmp_path / name, solver="round-to-nearest", **options)
        model, recipe = open_resolved(str(tmp_path / "model"), record.recipe, trust_remote_code=False)
        written = sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())
        spare = forecast_bytes(model, recipe) - written
        tokenizer = (tmp_path / "model" / "tokenizer.json").stat().st_size + 24 * TEXT_VOCABULARY
        assert 0 <= spare <= 20_000 + 1500 * len(model.layers) + (tokenizer if name == "gguf" else 0), name
