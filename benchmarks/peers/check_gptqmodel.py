"""Does gptqmodel's own reader decode our GPTQ and AWQ checkpoints to exactly the weights that we decode?

    make FOLDER     a random Llama, rounded to nearest and written by nearplane        (nearplane's environment)
    export FOLDER   the weights that nearplane decodes, to FOLDER.decoded.safetensors  (nearplane's environment)
    compare FOLDER  gptqmodel's reader and dequantization against that file            (gptqmodel's environment)

`export` and `compare` take any GPTQ or AWQ folder. See README.md for the environments.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def make(
    folder: Path, *, format: str, bits: int, group_size: int | None, symmetric: bool, order: str, dtype: str
) -> None:
    """Write a random Llama of two blocks; with order "activation" groups follow a random order, as act-order's do."""
    import tempfile

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from nearplane.formats.container import Place
    from nearplane.formats.layer_format import Quantized
    from nearplane.formats.table import FORMATS, open_container
    from nearplane.lattice.grid import Grid, QuantizedMatrix
    from nearplane.recipe.schemes import GridScheme

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    chosen, state = FORMATS[format], model.state_dict()
    linear = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"]
    scheme = GridScheme(bits=bits, group_size=group_size, symmetric=symmetric, order=order)
    made = chosen.layers.describe(Quantized(scheme=scheme, quantized=linear, ignore=["lm_head"], version="0"))
    made |= {"desc_act": order != "natural" and group_size is not None}
    scales = chosen.layers.scale_dtype(model.dtype)
    with tempfile.TemporaryDirectory() as source:
        model.save_pretrained(source)
        _tokenizer(config.vocab_size).save_pretrained(source)
        place = Place(out=folder, source=Path(source), overwrite=True)
        with open_container(place, made, dtype=model.dtype, shards=1) as writer:
            for name in linear:
                W = state.pop(f"{name}.weight").float()
                columns = W.shape[1]
                size = group_size or columns
                group = torch.arange(columns) // size
                if order != "natural" and group_size:
                    group = group[torch.randperm(columns)]
                low = -(2 ** (bits - 1)) if symmetric else 0
                parts = W[:, group.argsort(stable=True)].reshape(len(W), -1, size)
                least, most = parts.amin(-1), parts.amax(-1)
                width = 2 * torch.maximum(-least, most) if symmetric else most - least
                scale = (width / (2**bits - 1)).to(scales).float()
                zero = torch.zeros_like(scale) if symmetric else (-least / scale).round().clamp(0, 2**bits - 1)
                if not symmetric:
                    zero[0, 0], zero[1, 0] = 0, 2**bits - 1  # the extremes, too
                grid = Grid(scale=scale, zero=zero, group=group, low=low, high=low + 2**bits - 1)
                codes = grid.round(W, slice(None))[0].to(torch.int32)
                writer.add(name, QuantizedMatrix(codes=codes, grid=grid), state.pop(f"{name}.bias", None))
            writer.close_block(state)
            writer.record_json = '{"files": {}}'


def _tokenizer(size: int):
    """A tokenizer of `size` words, which gptqmodel wants to see in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(size - 3))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def export(folder: Path) -> None:
    """Save the float32 values of every quantized layer, as nearplane decodes them."""
    from safetensors.torch import save_file

    from nearplane.formats.stored import read_matrices

    save_file({name: matrix.decode() for name, matrix in read_matrices(folder)}, _decoded(folder))


def compare(folder: Path) -> int:
    """Load the folder with gptqmodel, dequantize every layer with its own code, and count weights unequal to ours.

    It is loaded in float16, the dtype of the scales: loaded in bfloat16, gptqmodel rounds the scales to it as well. Our
    float32 products are rounded to float16 once, as its own are.
    """
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear
    from safetensors.torch import load_file

    ours = load_file(_decoded(folder))
    awq = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    model = GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=torch.float16)
    unequal = total = 0
    layers = {name: module for name, module in model.model.named_modules() if isinstance(module, BaseQuantLinear)}
    for name, module in layers.items():
        with torch.no_grad():
            if awq:  # its kernel has no other way to the weights than a product
                module.bias = None
                theirs = module(torch.eye(module.in_features, dtype=torch.float16)).T
            else:
                theirs = module.dequantize_weight().T  # (out, in)
        unequal += int((theirs != ours[name].to(theirs.dtype)).sum())
        total += theirs.numel()
    if missing := ours.keys() - layers.keys():
        print(f"not quantized to gptqmodel: {', '.join(sorted(missing))}")
    logits = model.model(torch.arange(16)[None]).logits
    print(f"{folder.name}: {len(layers)} layers, {theirs.dtype}, logits finite: {bool(logits.isfinite().all())}")
    print(f"unequal weights: {unequal} of {total}")
    return 1 if unequal or missing or not total else 0


def _decoded(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.decoded.safetensors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "export", "compare"])
    parser.add_argument("folder", type=Path)
    made = parser.add_argument_group("make")
    made.add_argument("--format", choices=["gptq", "gptq_v2"], default="gptq")
    made.add_argument("--bits", type=int, default=4)
    made.add_argument("--group-size", type=lambda text: None if text == "none" else int(text), default=128)
    made.add_argument("--asymmetric", action="store_true")
    made.add_argument("--order", choices=["natural", "activation"], default="natural")
    made.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    if args.step == "make":
        make(
            args.folder,
            format=args.format,
            bits=args.bits,
            group_size=args.group_size,
            symmetric=not args.asymmetric,
            order=args.order,
            dtype=args.dtype,
        )
    elif args.step == "export":
        export(args.folder)
    else:
        return compare(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
