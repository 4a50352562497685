"""Product matrices rounded from weights, and native checkpoints of tiny models written with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from families import config_of, random_model
from nearplane.coding.scales import stored_base
from nearplane.formats.container import Place
from nearplane.formats.layer_format import Quantized
from nearplane.formats.table import FORMATS, open_container
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.recipe.rate_scheme import RateScheme


def product_matrix(W: Tensor, *, step: float = 0.05, resolution: int = 4, seed: int = 0) -> QuantizedMatrix:
    """Round (out, in) weights to nearest with steps that differ by column and row; the second column is dead."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randint(-8, 9, (W.shape[1],), generator=generator, dtype=torch.int32)
    rows = torch.randint(-2, 3, (W.shape[0],), generator=generator, dtype=torch.int32)
    grid = ProductGrid(
        base=float(stored_base(step)), columns=columns, column_resolution=resolution, rows=rows, row_resolution=2
    )
    codes = (W.double() / grid.row_scale()[:, None] / grid.column_scale()).round().to(torch.int32)
    codes[:, 1] = 0
    return QuantizedMatrix(codes=codes, grid=grid)


def config_of_rates(quantized: Sequence[str], scheme: RateScheme | None = None) -> dict[str, Any]:
    """Return the quantization_config of entropy-coded layers."""
    network = Quantized(scheme=scheme or RateScheme(rate=2), quantized=quantized, version="0")
    return FORMATS["nearplane"].layers.describe(network)


def write_native(
    out: Path,
    source: Path,
    *,
    embeddings: bool = False,
    ignore: Collection[str] = ("lm_head",),
    scheme: RateScheme | None = None,
) -> dict[str, QuantizedMatrix]:
    """Round every Linear and Conv1D of a folder, and its input embeddings if asked for; return what was written."""
    model = AutoModelForCausalLM.from_pretrained(source)
    kinds = (nn.Linear, Conv1D, *([nn.Embedding] if embeddings else []))
    chosen = {name: module for name, module in model.named_modules() if type(module) in kinds and name not in ignore}
    if embeddings and model.config.tie_word_embeddings:
        chosen.pop("lm_head", None)
    config = config_of_rates(list(chosen), scheme)
    matrices: dict[str, QuantizedMatrix] = {}
    rest = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    place = Place(out=out, source=source)
    with open_container(place, config, dtype=model.dtype, shards=2) as writer, torch.no_grad():
        for seed, (name, module) in enumerate(chosen.items()):
            weight = rest.pop(f"{name}.weight").float()
            W = weight.T if type(module) is Conv1D else weight
            matrices[name] = product_matrix(W, seed=seed)
            writer.add(name, matrices[name])
            if seed == len(chosen) // 2:
                writer.close_block({})
        writer.close_block(rest)
        writer.record_json = '{"version": 1, "files": {}}'
    return matrices


def save_tiny(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Write a tiny random model of a family."""
    model = random_model(config_of(family, **changes)).to(dtype)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"of": "the source"}')
    return model
