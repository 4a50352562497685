"""Does peak memory grow with depth? Quantizes random models of 4 and 16 blocks, each in a process of its own.

python benchmarks/speed/memory.py [--hidden 1024] [--blocks 4 16]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from nearplane.demo import MODEL
torch.manual_seed(0)
hidden, blocks = int(sys.argv[1]), int(sys.argv[2])
config = LlamaConfig(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=blocks, num_attention_heads=hidden // 64,
                     num_key_value_heads=hidden // 128, vocab_size=2048, max_position_embeddings=512, tie_word_embeddings=True)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[3], max_shard_size="200MB")
for name in ("tokenizer.json", "tokenizer_config.json"):
    open(sys.argv[3] + "/" + name, "wb").write((MODEL / name).read_bytes())
"""


def quantize(folder: str, out: str) -> None:
    """Quantize in this process and print its peak memory in MB."""
    import nearplane
    from nearplane.demo import CALIBRATION

    record = nearplane.quantize(folder, out, bits=4, calibration=str(CALIBRATION), samples=16, seqlen=256)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    blocks = len(record.layers) // 7
    print(
        f"{blocks:3d} blocks  weight files {record.bytes / 1e6:8.1f} MB  {record.seconds:6.1f} s  peak {peak:8.1f} MB"
    )


def main() -> None:
    """Build the models, quantize each in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 16])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for blocks in arguments.blocks:
            folder = Path(place) / f"model-{blocks}"
            subprocess.run([sys.executable, "-c", BUILD, str(arguments.hidden), str(blocks), str(folder)], check=True)
            subprocess.run(
                [sys.executable, __file__, "--one", str(folder), str(Path(place) / f"out-{blocks}")], check=True
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        quantize(*sys.argv[2:])
    else:
        main()
