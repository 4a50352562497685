"""Peak memory of `evaluate` on a long window and a large vocabulary, beside that of all logits at once.

    python benchmarks/speed/evaluate_memory.py [--tokens 8192] [--vocabulary 151936] [--hidden 64]

One random Llama of one block and a second one as its original; one window. Every measurement is a process of its own.
`logits` is the size of the float32 logits of one network.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from nearplane.system.sizes import size_text

CHILD = """
import json, resource, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import nearplane

tokens, vocabulary, hidden, mode = *map(int, sys.argv[1:4]), sys.argv[4]
torch.set_num_threads(1)
networks = []
for seed in (0, 1):
    torch.manual_seed(seed)
    networks.append(LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1, num_attention_heads=2, vocab_size=vocabulary,
        max_position_embeddings=tokens)))
window = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(2))
before, start, kl = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), None
if mode == "evaluate":
    kl = nearplane.evaluate(networks[0], window, against=networks[1], device="cpu").kl
elif mode == "at once":
    with torch.no_grad():
        q, p = (network(window).logits.log_softmax(-1) for network in networks)
        kl = float((p.exp() * (p - q)).sum(-1)[:, :-1].mean())
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([1024 * before, 1024 * after, time.process_time() - start, kl]))
"""


def main() -> None:
    """Print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument(
        "--at-once", action="store_true", help="also all logits at once, which takes five times their size"
    )
    asked = parser.parse_args()
    print(
        f"{asked.tokens:,} tokens, vocabulary {asked.vocabulary:,}: logits {size_text(4 * asked.tokens * asked.vocabulary)}"
    )
    for mode in ("evaluate", *(["at once"] if asked.at_once else [])):
        words = [str(value) for value in (asked.tokens, asked.vocabulary, asked.hidden)]
        run = subprocess.run([sys.executable, "-c", CHILD, *words, mode], capture_output=True, text=True, check=True)
        before, after, seconds, kl = json.loads(run.stdout)
        print(
            f"{mode:10} peak {size_text(after)}, networks and libraries {size_text(before)}, {seconds:.0f} CPU s, KL {kl:.6f}"
        )


if __name__ == "__main__":
    main()
