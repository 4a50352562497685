"""What forwards and moments of calibration take, in CPU time: forwards that pause at every stage, against a pass for every stage.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/speed/forwards.py [--hidden H] [--intermediate I] [--blocks N] [--windows N]

A random Llama passes its windows of 512 tokens through all blocks, corrected and true-sequentially; nothing is solved, but every
layer is written. Both ways are run in turns, after a short run of each that does not count.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nearplane import Recipe
from nearplane.calibration.activations import skeleton
from nearplane.calibration.walk import observations
from nearplane.models.model import Model, open_model

WAYS = {"a pass for every stage": 0, "one forward": 1 << 50}  # bytes that paused activations may take
SEQLEN, VOCABULARY = 512, 512


def random_llama(folder: str, hidden: int, intermediate: int, blocks: int) -> Model:
    """Write a random Llama and open it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return open_model(folder)


def seconds(model: Model, windows: int, room: int) -> float:
    """Return the CPU time of all blocks: forwards of both networks, and the moments."""
    tokens = torch.randint(2, VOCABULARY, (windows, SEQLEN), generator=torch.Generator().manual_seed(1))
    stream, recipe = skeleton(model, tokens.split(8), device="cpu", dtype=torch.float32), Recipe()
    stream.original = list(stream.quantized)
    spent = 0.0
    for block in model.blocks:
        with block.on("cpu", torch.float32):
            began = time.process_time()
            for observed in observations(block, stream, recipe, room):
                for layer in observed.layers:
                    layer.write(layer.read() * 1.01)
            spent += time.process_time() - began
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = random_llama(folder, asked.hidden, asked.intermediate, asked.blocks)
        for room in WAYS.values():
            seconds(model, 8, room)
        found = {way: [] for way in WAYS}
        for _ in range(asked.rounds):
            for way, room in WAYS.items():
                found[way].append(seconds(model, asked.windows, room))
    for way, times in found.items():
        print(f"{way}: {', '.join(f'{each:.1f}' for each in times)} s of CPU time")
    often, once = (min(times) for times in found.values())
    print(f"ratio of the least: {often / once:.2f}")


if __name__ == "__main__":
    main()
