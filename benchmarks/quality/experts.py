"""Mixtures of experts: what quantizing costs predictions, and the peak memory of blocks as wide as a large model's.

python benchmarks/quality/experts.py quality MODEL [--only WORD]    # MODEL by train_model.py mixture; means over calibrations
python benchmarks/quality/experts.py parts MODEL [--peers FOLDER]    # experts and attention in other formats, inputs rounded
python benchmarks/quality/experts.py memory [--experts 128] [--blocks 2] [--samples 16]    # random, shaped like Qwen3-30B-A3B
"""

from __future__ import annotations

import argparse
import logging
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

import nearplane
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.demo import MODEL as DEMO
from nearplane.verbs.evaluation_result import Evaluation

sys.path.append(str(Path(__file__).parents[1] / "peers"))
from run import run_tasks

GRID = {"group_size": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"{bits} bits": {"bits": bits} | GRID for bits in (4, 3, 2)},
    **{f"{bits} bits, not corrected": {"bits": bits, "correct": False} | GRID for bits in (4, 3, 2)},
    **{f"{bits} bits, to nearest": {"bits": bits, "solver": "round-to-nearest"} | GRID for bits in (4, 3, 2)},
    "2 bits, experts alone": {"bits": 2, "ignore": ["self_attn"]} | GRID,
    "2 bits, attention alone": {"bits": 2, "ignore": ["experts"]} | GRID,
    "rate 3": {"rate": 3.0},
    "rate 2": {"rate": 2.0},
    "rate 2, not corrected": {"rate": 2.0, "correct": False},
}
EXPERTS, ATTENTION = "re:.*experts.*proj$", "re:.*self_attn.*proj$"
FP8: dict[str, Any] = {"grid": "fp8", "activations": "fp8"}
NVFP4: dict[str, Any] = {"grid": "nvfp4", "activations": "fp4"}
PARTS: dict[str, tuple[dict[str, Any], dict[str, list[str]]]] = {  # our options; schemes of llm-compressor
    "experts nvfp4, attention fp8": (
        NVFP4 | {"layers": {"self_attn": FP8}}, {"NVFP4": [EXPERTS], "FP8_DYNAMIC": [ATTENTION]}
    ),
    "all nvfp4": (NVFP4, {"NVFP4": ["Linear"]}),
}  # fmt: skip
OFFSETS, SEQLEN, WINDOWS = (0, 20_000, 40_000), 256, 48  # where calibrations begin; windows that are held out


def calibration(model: str, offset: int) -> torch.Tensor:
    """Return (64, SEQLEN) token ids of the calibration text, from an offset on."""
    tokens = torch.tensor(AutoTokenizer.from_pretrained(model)(CALIBRATION.read_text())["input_ids"])
    return tokens[offset : offset + 64 * SEQLEN].view(-1, SEQLEN)


def quality(model: str, only: str) -> None:
    """Quantize a model on several calibrations by every setting, and print means."""
    whole = nearplane.evaluate(model, HELD_OUT, seqlen=SEQLEN, samples=WINDOWS)
    print(f"| original | | {whole.perplexity:.3f} | | | |")
    for name, how in SETTINGS.items():
        if only not in name:
            continue
        found, began = [], time.process_time()
        with tempfile.TemporaryDirectory() as place:
            for offset in OFFSETS:
                out = Path(place) / str(offset)
                record = nearplane.quantize(model, out, calibration=calibration(model, offset), **how)
                found.append(nearplane.evaluate(out, HELD_OUT, seqlen=SEQLEN, samples=WINDOWS, against=model))
        seconds = (time.process_time() - began) / len(OFFSETS)
        kl = [each.kl or 0.0 for each in found]
        experts = [layer for layer in record.layers if layer.alike is not None]
        alike = sum(layer.alike or 0.0 for layer in experts) / max(1, len(experts))
        print(
            f"| {name} | {record.rate:.3f} | {sum(each.perplexity for each in found) / len(found):.3f} | "
            f"{sum(kl) / len(kl):.5f} | {min(kl):.5f} to {max(kl):.5f} | {alike:.3f} | {seconds:.0f} s |",
            flush=True,
        )


def parts(model: str, peers: Path) -> None:
    """Quantize experts and attention to other number formats, ours and llm-compressor's, and print KL as programs compute."""
    windows = calibration(model, 0)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(model)(HELD_OUT.read_text())["input_ids"])
    held_out = tokens[: 2 * WINDOWS * SEQLEN].view(-1, SEQLEN)
    print("| | tool | KL, weights alone | KL, inputs rounded, too |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        save_file({"windows": windows}, Path(place) / "tokens.safetensors")
        for title, (ours, schemes) in PARTS.items():
            out = Path(place) / "ours"
            nearplane.quantize(model, out, calibration=windows, overwrite=True, runtime="vllm", **ours)
            print(
                _row(title, "nearplane", nearplane.evaluate(out, held_out, against=model, activations=True)), flush=True
            )
            shared = {"model": model, "warm": None, "tokens": f"{place}/tokens.safetensors", "schemes": schemes}
            tasks = [shared | {"out": f"{place}/theirs-{search}", "search": search} for search in (0, 1)]
            python = peers / "llmcompressor" / "bin" / "python"
            spent = run_tasks("llmcompressor", tasks, Path(place), python, 1)
            for task, each, tool in zip(tasks, spent, ("llm-compressor", "llm-compressor, mse"), strict=True):
                if "error" in each:
                    sys.exit(f"{each['error']}: {each['printed']}")
                folder = Path(str(task["out"])) / "packed"
                print(
                    _row(title, tool, nearplane.evaluate(folder, held_out, against=model, activations=True)), flush=True
                )


def _row(title: str, tool: str, found: Evaluation) -> str:
    computed = "none" if found.computed is None else f"{found.computed.kl:.5f}"
    return f"| {title} | {tool} | {found.kl:.5f} | {computed} |"


def memory(experts: int, blocks: int, samples: int) -> None:
    """Quantize a random model and print the peak memory of the process that does it."""
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place) / "model", Path(place) / "out"
        for words in (
            ["--build", str(folder), str(experts), str(blocks)],
            ["--run", str(folder), str(out), str(samples)],
        ):
            subprocess.run([sys.executable, __file__, *words], check=True)


def build(folder: str, experts: str, blocks: str) -> None:
    """Write a random model whose blocks are those of Qwen3-30B-A3B, but for the number of experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=int(experts), num_experts_per_tok=8,
        num_hidden_layers=int(blocks), num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=2048,
        max_position_embeddings=512, norm_topk_prob=True, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0) if "norm" in name else parameter.data.normal_(0.0, 0.02)
    model.save_pretrained(folder, max_shard_size="500MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(folder) / name).write_bytes((DEMO / name).read_bytes())


def run(folder: str, out: str, samples: str) -> None:
    """Quantize in this process and print what it took; what is foreseen of it is logged."""
    logging.basicConfig(level=logging.INFO)
    began = time.process_time()
    record = nearplane.quantize(
        folder, out, bits=4, group_size=128, calibration=str(CALIBRATION), samples=int(samples), seqlen=512
    )
    counts = [layer.tokens for layer in record.layers if layer.blended is not None]
    print(
        f"{len(record.layers):,} layers of {sum(x.out_features * x.in_features for x in record.layers) / 1e9:.2f} G weights, "
        f"{record.tokens:,} tokens, {min(counts):,} to {max(counts):,} an expert; CPU {time.process_time() - began:.0f} s, "
        f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )


def main() -> None:
    """Measure one of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "parts", "memory"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"))
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    if options.what == "memory":
        memory(options.experts, options.blocks, options.samples)
    elif options.model is None:
        parser.error(f"{options.what} needs the folder of a model")
    elif options.what == "parts":
        parts(options.model, options.peers)
    else:
        quality(options.model, options.only)


if __name__ == "__main__":
    steps = {"--build": build, "--run": run}
    steps[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in steps else main()
