"""The page on which readers choose a way to quantize a well-known model that fits in their memory.

    python tools/calculator_page.py        writes docs/calculator.json, in a minute or two

The file has the sizes of `nearplane suggest`, from the shapes of each model. `site_pages.py` makes the page of it, on which
docs/calculator.js adds the cache and compares with the memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "calculator.json"
CONTEXTS = [1024 * 2**k for k in range(1, 8)]
QWEN = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960}
LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
GEMMA = {"sliding_window": 512, "head_dim": 256, "max_position_embeddings": 32768, "vocab_size": 262144}


def shape(hidden: int, intermediate: int, blocks: int, heads: int, *, tied: bool, **more: Any) -> dict[str, Any]:
    """Return the fields of a config that set the shapes of a dense model."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **more,
    }


MODELS = {  # name on the hub: type and fields of its config
    "Qwen/Qwen3-0.6B": ("qwen3", shape(1024, 3072, 28, 16, tied=True, **QWEN)),
    "google/gemma-3-1b-it": ("gemma3_text", shape(1152, 6912, 26, 4, tied=True, num_key_value_heads=1, **GEMMA)),
    "meta-llama/Llama-3.2-1B": ("llama", shape(2048, 8192, 16, 32, tied=True, head_dim=64, **LLAMA)),
    "meta-llama/Llama-3.2-3B": ("llama", shape(3072, 8192, 28, 24, tied=True, head_dim=128, **LLAMA)),
    "Qwen/Qwen3-4B": ("qwen3", shape(2560, 9728, 36, 32, tied=True, **QWEN)),
    "meta-llama/Llama-3.1-8B": ("llama", shape(4096, 14336, 32, 32, tied=False, **LLAMA)),
    "Qwen/Qwen3-8B": ("qwen3", shape(4096, 12288, 36, 32, tied=False, **QWEN)),
    "Qwen/Qwen3-14B": ("qwen3", shape(5120, 17408, 40, 40, tied=False, **QWEN)),
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        shape(
            2048,
            6144,
            48,
            32,
            tied=False,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        )
        | QWEN
        | {"num_key_value_heads": 4},
    ),
    "Qwen/Qwen3-32B": ("qwen3", shape(5120, 25600, 64, 64, tied=False, **QWEN)),
    "meta-llama/Llama-3.1-70B": ("llama", shape(8192, 28672, 80, 64, tied=False, **LLAMA)),
    "meta-llama/Llama-3.1-405B": ("llama", shape(16384, 53248, 126, 128, tied=False, **LLAMA)),
}


RUNTIMES = ("vllm", "transformers", "llama.cpp", "mlx", "nearplane")
INTRODUCTION = """# Which way fits?

Choose a model, the memory that you have, and the length of the context. Listed are the ways to quantize it that fit, those
that lose least first. For any other model, `nearplane suggest MODEL --memory 8GB` prints the same list from its config.json.
"""
EXPLANATION = """*Weights* are the bytes of all tensors in the file, *memory* is these in memory and the keys and values
of one sequence in 16 bits; what the program needs besides comes on top. The *KL ratio* is KL from the original as a
multiple of that of `--bits 4`, a mean over small models with its range: it says which way loses less, not how much a
large model loses. [Choosing bits](choosing-bits.md#what-fits-in-a-memory-a-laptop-a-gpu-a-phone) tells how the figures
are made.

## All sizes

Gigabytes of weights in the file, without the cache. `-`: `quantize` refuses this way for the model, or no program reads it.
"""


def main() -> None:
    """Write the file."""
    FILE.write_text(as_text(MODELS) + "\n")


def page() -> str:
    """Return the page in Markdown: a form that docs/calculator.js fills, and a table of all sizes for who has no script."""
    known = json.loads(FILE.read_text())
    models, modes = known["models"], known["modes"]
    form = [
        select("model", "Model", models, "meta-llama/Llama-3.1-8B"),
        '<label>Memory, GB <input id="memory" type="number" min="0.1" step="any" value="8"></label>',
        select("context", "Context, tokens", [f"{context:,}" for context in known["contexts"]], "8,192"),
        select("runtime", "Program", ["any", *RUNTIMES]),
    ]
    table = [f"| `nearplane quantize` | {' | '.join(name.rpartition('/')[2] for name in models)} |"]
    table.append("|---|" + "---:|" * len(models))
    for number, mode in enumerate(modes):
        cells = [
            "-" if (found := each["sizes"][number]) is None else f"{found[0] / 1e9:,.2f}" for each in models.values()
        ]
        table.append(f"| `{mode['options']}` | {' | '.join(cells)} |")
    return "\n".join(
        [
            INTRODUCTION,
            f'<form id="calculator">\n{"".join(form)}\n</form>\n<div id="ways"></div>\n',
            f'<script type="application/json" id="sizes">\n{json.dumps(known)}\n</script>',
            '<script src="calculator.js"></script>\n',
            EXPLANATION,
            *table,
            "",
        ]
    )


def select(name: str, label: str, options: Iterable[str], chosen: str = "") -> str:
    """Return a list to choose from, in HTML."""
    made = "".join(f"<option{' selected' * (each == chosen)}>{each}</option>" for each in options)
    return f'<label>{label} <select id="{name}">{made}</select></label>\n'


def as_text(names: Iterable[str]) -> str:
    """Return JSON with the sizes of some models, one line for each."""
    from nearplane.planning.modes import MODES

    modes = [{"options": mode.words, "loss": list(mode.loss[:3]), "runtimes": list(mode.runtimes())} for mode in MODES]
    lines = [f"  {json.dumps(name)}: {json.dumps(sizes(name))}" for name in names]
    ways = ",\n".join(f"  {json.dumps(mode)}" for mode in modes)
    return f'{{"contexts": {CONTEXTS},\n"modes": [\n{ways}\n],\n"models": {{\n' + ",\n".join(lines) + "\n}}"


def sizes(name: str) -> dict[str, Any]:
    """Return what a model takes: its weights, its cache by context, and per mode bytes in the file and in memory.

    A mode that `quantize` refuses for the model has null instead.
    """
    from transformers import AutoConfig

    import nearplane
    from nearplane.models.described import open_described
    from nearplane.planning.cache_size import cache_bytes
    from nearplane.planning.modes import MODES

    kind, fields = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(kind, **fields)
        config.save_pretrained(folder)
        described = open_described(folder)
        caches = [cache_bytes(described, context) for context in CONTEXTS if context <= (described.positions or 0)]
        found = nearplane.suggest(folder, "1000TB", context=CONTEXTS[0])
    rows = {row.options.partition(" --runtime ")[0]: row for row in found.rows}  # which experts need in some ways
    taken = [rows[mode.words] for mode in MODES]
    return {
        "parameters": found.parameters,
        "caches": caches,
        "sizes": [None if row.memory is None else [row.weights, row.memory - (found.cache or 0)] for row in taken],
    }


if __name__ == "__main__":
    main()
