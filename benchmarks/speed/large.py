"""A model larger than memory should be: peak memory, wall and CPU time of quantizing a random Llama, and of measuring it.

    OMP_NUM_THREADS=1 python benchmarks/speed/large.py [--blocks 2 8] [--modes bits rate] [--evaluate] [--place FOLDER]

The model has hidden size 2,048, intermediate size 5,632, 16 heads for keys and a vocabulary of 32,000: 96 MB of bf16 a block, and
with 80 blocks 7.8 GB. It is written block by block into a folder below PLACE, which is deleted at the end. Each run is a process
of its own: 32 windows of 512 random tokens, 4 bits in groups of 128, then a rate of 3 bits; with --evaluate the KL of what the
first wrote, on 4 windows. Peaks are the most resident memory that the system saw.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stages import save_tokenizer, write_text

VOCABULARY = 32000
MODES = {"bits": {"bits": 4, "group_size": 128}, "rate": {"rate": 3.0}}
HEADS, SPREAD = 128, 0.02  # inputs of a head; standard deviation of weights


def build(folder: Path, hidden: int, intermediate: int, blocks: int) -> int:
    """Write the random model, one shard a block; return its bytes. No more than one shard is in memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    heads = max(2, hidden // HEADS)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=blocks,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), head_dim=hidden // heads, vocab_size=VOCABULARY,
        max_position_embeddings=2048, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    keys = hidden // heads * max(1, heads // 2)
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    made, files, size = torch.Generator().manual_seed(0), {}, 0

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=made).mul_(SPREAD).to(torch.bfloat16)

    for index in range(blocks + 1):
        if index < blocks:
            name = f"model.layers.{index}"
            tensors = {f"{name}.{layer}.weight": normal(shape) for layer, shape in shapes.items()}
            norms = [f"{name}.input_layernorm.weight", f"{name}.post_attention_layernorm.weight"]
        else:
            tensors = {name: normal((VOCABULARY, hidden)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
            norms = ["model.norm.weight"]
        tensors |= {norm: torch.ones(hidden, dtype=torch.bfloat16) for norm in norms}
        file = f"model-{index + 1:05d}-of-{blocks + 1:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    about = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(about))
    save_tokenizer(str(folder))
    return size


def measure(verb: str, keywords: str) -> None:
    """Quantize or evaluate in this process; print seconds, peak memory and what came of it as JSON, and log what is said."""
    import nearplane

    logging.basicConfig(level=logging.INFO)

    began = time.perf_counter()
    result = getattr(nearplane, verb)(**json.loads(keywords))
    said = {
        "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "wall": time.perf_counter() - began,
        "cpu": time.process_time(),
    }
    if verb == "evaluate":
        said["kl"] = result.kl
    else:
        said["bits"] = (
            8
            * sum(layer.bytes for layer in result.layers)
            / sum(layer.out_features * layer.in_features for layer in result.layers)
        )
    print(json.dumps(said))


def child(verb: str, **keywords: object) -> tuple[dict[str, float], str]:
    """Return what `measure` says in a process of its own, nothing where memory was too little; and all that is logged."""
    command = [sys.executable, __file__, "--one", verb, json.dumps(keywords)]
    environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", **os.environ}  # as the command line sets it
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode and " is too small: " not in done.stderr:
        raise RuntimeError(done.stderr)
    return {} if done.returncode else dict(json.loads(done.stdout.splitlines()[-1])), done.stderr


def row(name: str, blocks: int, size: int, said: dict[str, float], what: str) -> None:
    """Print one line of the table."""
    print(
        f"| {name} | {blocks} | {size / 1e9:.2f} | {said['peak'] / 1e9:.2f} | {said['wall']:.0f} | {said['cpu']:.0f} | {what} |",
        flush=True,
    )


def main() -> None:
    """Build each model, and measure it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--place", type=Path)
    arguments = parser.parse_args()
    print("| run | blocks | model GB | peak GB | wall s | CPU s | |\n|---|---|---|---|---|---|---|")
    for blocks in arguments.blocks:
        with tempfile.TemporaryDirectory(dir=arguments.place) as folder:
            model, text = Path(folder) / "model", Path(folder) / "text.txt"
            model.mkdir()
            size = build(model, arguments.hidden, arguments.intermediate, blocks)
            write_text(text, (arguments.samples + 8) * arguments.seqlen)
            tokens = {"samples": arguments.samples, "seqlen": arguments.seqlen, "calibration": str(text)}
            for mode in arguments.modes:
                out = f"{folder}/{mode}"
                said, _ = child("quantize", model=str(model), out=out, **MODES[mode], **tokens)
                row(mode, blocks, size, said, f"{said['bits']:.3f} bits")
                if arguments.evaluate and mode == arguments.modes[0]:
                    beside = {"text": str(text), "samples": 4, "seqlen": arguments.seqlen, "against": str(model)}
                    said, _ = child("evaluate", model=out, **beside)
                    row("evaluate --against", blocks, size, said, f"KL {said['kl']:.3g}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(*sys.argv[2:])
    else:
        main()
