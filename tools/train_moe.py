"""Train a small mixture of experts on the demo's text, for measuring: shaped like Qwen3-MoE, 8 experts of which a token takes 2.

python tools/train_moe.py OUT [--minutes 30] [--threads 1]      (about 8 million weights; text, tokenizer and windows of the demo)

Held-out text is the demo's, so that the tool works where the standard library is that of the demo's Python (it says so if not).
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from train_demo_model import BOS, EOS, Hyper, measure_loss, read_documents, split_documents, train
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

DEMO = Path(__file__).parents[1] / "src" / "nearplane" / "demo"


@dataclass(frozen=True)
class Shape(Hyper):
    """The demo's training with another network."""

    layers: int = 4
    steps: int = 1000
    experts: int = 8
    taken: int = 2
    expert_intermediate: int = 288
    balance: float = 0.01  # weight of the loss that keeps the experts' loads even


def build(shape: Shape) -> Qwen3MoeForCausalLM:
    """Build the untrained network, with dropout where the demo has it."""
    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        head_dim=shape.hidden // shape.heads, num_experts=shape.experts, num_experts_per_tok=shape.taken,
        moe_intermediate_size=shape.expert_intermediate, norm_topk_prob=True, decoder_sparse_step=1,
        output_router_logits=True, router_aux_loss_coef=shape.balance, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    outputs = [module for layer in model.model.layers for module in (layer.self_attn.o_proj, layer.mlp.experts)]
    for module in [model.model.embed_tokens, *outputs]:
        module.register_forward_hook(
            lambda module, _, output: torch.nn.functional.dropout(output, shape.dropout, module.training)
        )
    return model


def main() -> None:
    """Make the folder of the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=Shape().steps)
    parser.add_argument("--minutes", type=float, default=math.inf, help="compress the schedule to this time")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    shape = Shape(steps=options.steps)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(shape.seed)

    parts = split_documents(read_documents(), shape)
    for part, name in ("calibration", "calibration.txt"), ("held-out", "heldout.txt"):
        if "".join(parts[part]).encode() != (DEMO / name).read_bytes():
            sys.exit(
                f"The {part} text of this Python's library is not {DEMO / name}: use the Python of the demo's README."
            )
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(options.out)
    ids = {part: torch.tensor(tokenizer("".join(texts))["input_ids"]) for part, texts in parts.items()}
    marked = "".join(f"{BOS}{text}{EOS}" for text in parts["training"])
    tokens = torch.tensor(tokenizer(marked)["input_ids"])

    model = build(shape)
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} tokens", flush=True)
    work = options.out / "training.pt"
    course = train(model, tokens, ids["validation"], shape, work, options.out, options.minutes)
    kept = Qwen3MoeForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    kept.config.output_router_logits, kept.config.dtype = False, torch.bfloat16
    kept.config.save_pretrained(options.out)
    print(course)
    for part in ("held-out", "validation", "calibration"):
        loss = measure_loss(kept, ids[part], shape.window)
        print(f"{part}: {loss:.3f} nats a token, perplexity {math.exp(loss):.2f}")
    work.unlink()


if __name__ == "__main__":
    main()
