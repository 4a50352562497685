"""How much memory of a GPU and of its host does a run take, by the bound alone? Prints a table for Llama-3 of 8B and 70B.

    python benchmarks/speed/gpu_memory.py [--cards 16 24 48 80] [--samples 256] [--seqlen 2048]

Nothing is run on a GPU and no weights are needed: the folders hold files of zeros without contents (sparse files), and the
activations of a block are counted on a network that is 16 times narrower, on windows that are 16 times shorter.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from nearplane.calibration.one_forward import PAUSED_DIVISOR, MemorySetting, default_batch
from nearplane.calibration.stages import FirstLook, try_blocks
from nearplane.calibration.windows import Windows, extra_windows
from nearplane.models.model import Model, open_model
from nearplane.planning.forecast import shapes_of
from nearplane.planning.memory_bound import bound
from nearplane.planning.memory_limits import choose, settings
from nearplane.planning.request import resolved
from nearplane.recipe.recipe import Recipe
from nearplane.system.device import Device

MODELS = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 64, 80)}  # hidden, intermediate, heads, blocks
VOCABULARY, HEAD, KEYS, NARROW = 128256, 128, 8, 16
MODES = {"4 bits, groups of 128": {"bits": 4, "group_size": 128}, "rate 3": {"rate": 3.0}}
GPU = Device(torch.device("cuda"))


def open_zeros(folder: Path, hidden: int, intermediate: int, heads: int, blocks: int, narrow: int = 1) -> Model:
    """Write a folder with weights of zeros that take no room on a disk, and open it."""
    folder.mkdir()
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=hidden // narrow, intermediate_size=intermediate // narrow,
        num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=KEYS, head_dim=HEAD // narrow,
        vocab_size=VOCABULARY, max_position_embeddings=8192, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, list[int]]] = {}  # one a block: the system maps each as a whole
    for name, parameter in network.named_parameters():
        file = ".".join(name.split(".")[:3]) if ".layers." in name else "ends"
        files.setdefault(f"model-{file}.safetensors", {})[name] = list(parameter.shape)
    for file, shapes in files.items():
        write_zeros(folder / file, shapes)
    index = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return open_model(str(folder))


def write_zeros(file: Path, shapes: dict[str, list[int]]) -> None:
    """Write bfloat16 tensors of zeros as a sparse file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)


def looks_of(model: Model, narrow: Model, seqlen: int) -> dict[str, FirstLook]:
    """Return what one window through the first block shows, from a window through that of the narrow network."""
    tokens = torch.zeros(1, seqlen // NARROW, dtype=torch.int64)
    name, look = next(iter(try_blocks(narrow, tokens, Device(torch.device("cpu"))).items()))
    shape = {layer.name: layer.shape for layer in model.blocks[0].layers}
    own = {layer.name: layer for layer in model.blocks[0].layers}
    groups = tuple(
        tuple(replace(own[layer.name], adds=layer.adds, calls=layer.calls) for layer in group) for group in look.groups
    )
    larger = NARROW**2 // 2  # in width and length; bfloat16 on a GPU, float32 on the CPU
    entered = {
        layer: [replace(each, alive=each.alive * larger, needed=each.alive * larger) for each in look.entered[layer]]
        for layer in shape
    }
    return {name: replace(look, groups=groups, entered=entered)}


def rows(name: str, cards: list[int], samples: int, seqlen: int) -> None:
    """Print the lines of a model."""
    with tempfile.TemporaryDirectory() as place:
        hidden, intermediate, heads, blocks = MODELS[name]
        model = open_zeros(Path(place) / "whole", hidden, intermediate, heads, blocks)
        narrow = open_zeros(Path(place) / "narrow", hidden, intermediate, heads, 1, NARROW)
        looks = looks_of(model, narrow, seqlen)
        windows = Windows(
            seqlen=seqlen,
            fitted=torch.zeros(samples, seqlen, dtype=torch.int64),
            extra=torch.zeros(extra_windows(samples, seqlen), seqlen, dtype=torch.int64),
        )
        for mode, options in MODES.items():
            shapes = shapes_of(model, resolved(model, Recipe.from_spellings(**options)), windows, looks, GPU)
            assert shapes is not None, "the block runs all its layers"
            for card in cards:
                first = MemorySetting(batch=default_batch(seqlen), room=int(card * 1e9) // PAUSED_DIVISOR, device=GPU)
                candidates = (
                    [bound(shapes, each, 0, "device"), bound(shapes, each, 0, "host")]
                    for each in settings(shapes, first, batches=False)
                )
                (gpu, host), exceeding = choose(candidates, {"device": card * 1e9, "host": math.inf})
                fits = "yes" if exceeding is None else "**no**"
                print(
                    f"| {name}, {mode} | {card} | {fits} | {gpu.bytes / 1e9:.1f} | {gpu.while_} | {gpu.setting.states} | "
                    f"{host.bytes / 1e9:.1f} |",
                    flush=True,
                )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="+", default=[16, 24, 48, 80], help="free memory in GB")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--seqlen", type=int, default=2048)
    asked = parser.parse_args()
    print("| run | GPU GB | fits | bound GB | while | states on | host GB |\n|---|---|---|---|---|---|---|", flush=True)
    for name in MODELS:
        rows(name, asked.cards, asked.samples, asked.seqlen)


if __name__ == "__main__":
    main()
