"""How far do answers by packed weights lie from those of the exact weights, next to what quantizing lost?

python benchmarks/quality/packed_answers.py MODEL CALIBRATION.txt HELDOUT.txt [--samples 64] [--windows 32]

The model is quantized in some formats whose layers stay packed. Divergences are means over tokens, in nats:

    checkpoint  of the float32 network of the exact weights from the original: what quantizing lost
    weights     of the float32 network of the packed weights from that of the exact ones
    packed      of the network that `nearplane.load` makes in bfloat16 from the float32 network of the exact weights
    decoded     the same of the bfloat16 network of decoded weights
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import nearplane
from nearplane.loading.dense_network import dense_network
from nearplane.loading.grid_linear import GridLinear

FORMATS: dict[str, dict[str, Any]] = {
    "compressed-tensors, 4 bits, groups of 32": {"bits": 4, "group_size": 32},
    "compressed-tensors, 4 bits, a step per row": {"bits": 4, "group_size": None},
    "compressed-tensors, 8 bits, a step per row": {"bits": 8, "group_size": None},
    "gptq, 4 bits, groups of 32": {"bits": 4, "group_size": 32, "format": "gptq"},
    "gptq_v2, 4 bits, groups of 32, asymmetric": {
        "bits": 4, "group_size": 32, "symmetric": False, "format": "gptq_v2"
    },
    "gptq_v2, 2 bits, groups of 32, asymmetric": {
        "bits": 2, "group_size": 32, "symmetric": False, "format": "gptq_v2"
    },
}  # fmt: skip


def log_probabilities(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Return (tokens, vocabulary) float64 logarithms of predictions."""
    with torch.inference_mode():
        return torch.cat([model(window[None]).logits[0].double().log_softmax(-1) for window in windows])


def divergence(reference: Tensor, other: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of `other` from `reference`, in nats."""
    return float((reference.exp() * (reference - other)).sum(-1).mean())


def main() -> None:
    """Quantize, load in four ways, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = options.heldout.read_text()[: 16 * options.windows * options.length]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = ids[: options.windows * options.length].view(options.windows, options.length)
    original = log_probabilities(dense_network(Path(options.model)), windows)
    print("checkpoint | checkpoint | weights, share | packed | decoded")
    for name, words in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            nearplane.quantize(
                options.model, out, calibration=options.calibration, samples=options.samples, seqlen=options.length,
                device="cpu", **words,
            )  # fmt: skip
            exact, packed = dense_network(out), nearplane.load(out, device="cpu", dtype=torch.bfloat16)
            decoded = dense_network(out, dtype=torch.bfloat16)
        expected = log_probabilities(exact, windows)
        lost = divergence(original, expected)
        in_bfloat16 = [divergence(expected, log_probabilities(model, windows)) for model in (packed, decoded)]
        layers = {path: module for path, module in packed.named_modules() if isinstance(module, GridLinear)}
        assert layers, "no layer stayed packed"
        for path, layer in layers.items():
            exact.set_submodule(path, layer)
        weights = divergence(expected, log_probabilities(exact, windows))
        ours, theirs = in_bfloat16
        print(f"{name} | {lost:.2e} | {weights:.1e}, {weights / lost:.2%} | {ours:.1e} | {theirs:.1e}", flush=True)


if __name__ == "__main__":
    main()
