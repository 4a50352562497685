"""Models and matrices that tests share: random ones on grids, a tiny Llama written in a format, and a part of the demo model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from families import TEXT_VOCABULARY, add_tokenizer
from nearplane.demo import MODEL
from nearplane.formats.container import Place
from nearplane.formats.layer_format import Quantized
from nearplane.formats.table import FORMATS, open_container
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.number_formats import NumberFormat, integers
from nearplane.recipe.schemes import GridScheme


def config_of_grids(
    format: str,
    quantized: Sequence[str],
    *,
    ignore: Sequence[str] = (),
    grids: Mapping[str, NumberFormat] | None = None,
    **scheme: Any,
) -> dict[str, Any]:
    """Return the quantization_config of layers on grids of a scheme."""
    network = Quantized(scheme=GridScheme(**scheme), quantized=quantized, ignore=ignore, grids=grids or {}, version="0")
    return FORMATS[format].layers.describe(network)


def random_matrix(
    out: int,
    columns: int,
    *,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    permuted: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> QuantizedMatrix:
    """Return random codes of the whole range on a random grid with scales that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    low = -(2 ** (bits - 1)) if symmetric else 0
    group = torch.arange(columns) // (group_size or columns)
    groups = int(group.max()) + 1
    if permuted:
        group = group[torch.randperm(columns, generator=generator)]
    zero = torch.zeros(out, groups)
    if not symmetric:
        zero = torch.randint(0, 2**bits, (out, groups), generator=generator).float()
    scale = (0.01 + torch.rand(out, groups, generator=generator)).to(dtype).float()
    codes = torch.randint(low, low + 2**bits, (out, columns), generator=generator, dtype=torch.int32)
    return QuantizedMatrix(codes=codes, grid=Grid(scale=scale, zero=zero, group=group, low=low, high=low + 2**bits - 1))


def rounded(W: Tensor, *, bits: int, group_size: int | None, symmetric: bool, dtype: torch.dtype) -> QuantizedMatrix:
    """Round (out, in) weights to nearest on the grid of their range, scales in `dtype`."""
    out, columns = W.shape
    low = -(2 ** (bits - 1)) if symmetric else 0
    groups = W.float().reshape(out, -1, group_size or columns)
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    width = 2 * torch.maximum(-least, most) if symmetric else most - least
    scale = (width / (2**bits - 1)).to(dtype).float()
    zero = torch.zeros_like(scale) if symmetric else (-least / scale).round().clamp(0, 2**bits - 1)
    group = torch.arange(columns) // (group_size or columns)
    grid = Grid(scale=scale, zero=zero, group=group, low=low, high=low + 2**bits - 1)
    return QuantizedMatrix(codes=grid.round(W.float(), slice(None))[0].to(torch.int32), grid=grid)


def tiny_llama(hidden: int = 128, intermediate: int = 352) -> LlamaForCausalLM:
    """Return a random Llama with two blocks and an untied head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def save_part_of_the_demo(folder: Path, *, blocks: int = 2, neurons: int = 128, own_head: bool = False) -> Path:
    """Write the first blocks of the demo model with a part of their neurons and tokens: real weights, a second to quantize.

    Args:
        folder: to write.
        blocks: of 4.
        neurons: of 768 in each.
        own_head: store the head apart from the embeddings, and a little different.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL, num_hidden_layers=blocks)
    model.resize_token_embeddings(TEXT_VOCABULARY)
    model.config.intermediate_size = neurons
    for block in model.model.layers:
        for layer in (block.mlp.gate_proj, block.mlp.up_proj):
            layer.weight = torch.nn.Parameter(layer.weight.detach()[:neurons].contiguous())
        block.mlp.down_proj.weight = torch.nn.Parameter(block.mlp.down_proj.weight.detach()[:, :neurons].contiguous())
    if own_head:
        model.config.tie_word_embeddings = False
        head = 1.25 * model.lm_head.weight.detach()
        model.lm_head.weight = torch.nn.Parameter(head.to(model.dtype))
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def write_folder(
    out: Path,
    source: Path,
    format: str,
    *,
    bits: int,
    group_size: int | None,
    symmetric: bool = True,
    ignore: tuple[str, ...] = ("lm_head",),
    width: Callable[[str], int] | None = None,
    **options: bool,
) -> dict[str, QuantizedMatrix]:
    """Round every linear layer of a Llama folder to nearest, write it, and return what was written.

    `width` gives layers bits of their own.
    """
    model = LlamaForCausalLM.from_pretrained(source)
    layers = FORMATS[format].layers
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n not in ignore}
    widths = {n: width(n) if width else bits for n in linear}
    config = config_of_grids(
        format,
        tuple(linear),
        ignore=ignore,
        grids={n: integers(b, group_size, symmetric=symmetric) for n, b in widths.items()} if width else None,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        order="natural",
    )
    matrices: dict[str, QuantizedMatrix] = {}
    place, shards = Place(out=out, source=source, **options), len(model.model.layers) + 1
    with open_container(place, config, dtype=model.dtype, shards=shards) as writer, torch.no_grad():
        for i, block in enumerate(model.model.layers):
            prefix = f"model.layers.{i}"
            rest = {f"{prefix}.{name}": tensor for name, tensor in block.state_dict().items()}
            for name, module in block.named_modules(prefix=prefix):
                if name in linear:
                    grid = integers(widths[name], group_size, symmetric=symmetric)
                    layers.check(name, tuple(module.weight.shape), type(module).__name__, grid)
                    dtype = layers.scale_dtype(model.dtype)
                    matrices[name] = rounded(
                        module.weight, bits=widths[name], group_size=group_size, symmetric=symmetric, dtype=dtype
                    )
                    writer.add(name, matrices[name], module.bias)
                    rest = {key: tensor for key, tensor in rest.items() if not key.startswith(f"{name}.")}
            writer.close_block(rest)
        writer.close_block({n: t for n, t in model.state_dict().items() if not n.startswith("model.layers.")})
        writer.record_json = '{"version": 1, "files": {}}'
    return matrices
