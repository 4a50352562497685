"""Train the models that quality is measured on: the demo model of the package, the study model, a mixture of experts.

    python tools/train_model.py demo --sources _sources                       # src/nearplane/demo
    python tools/train_model.py study --sources _sources --assets $ASSETS     # benchmarks/models/study
    python tools/train_model.py mixture --sources _sources                    # build/mixture; not committed

The demo model and the mixture learn Python's documentation alone, see `python_text.py`. The study model learns a part of
it, the stories of tinystories_train_2m.txt and the first 800 KB of c4_train_128.txt. At the end the tool prints the
tables of the model's card. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import platform
import random
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from python_text import read_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
PROMPTS = {
    "demo": ("The function returns", "This module"),
    "study": ("Once upon a time", "The function returns", "We offer"),
    "mixture": ("The function returns",),
}
FOLDERS = {"demo": "src/nearplane/demo/model", "study": "benchmarks/models/study", "mixture": "build/mixture"}
HELD_OUT_C4 = 240_000  # bytes at the end of c4_train_128.txt that nothing is trained on
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """What decides the result, besides the text and the number of threads.

    Args:
        model_type: "llama", "qwen3", or "qwen3_moe", whose blocks have `experts`, of which a token takes `taken`.
        intermediate: Width of the multilayer perceptron, or of one expert.
        short_window, window: Tokens of a window in the first part of training, and in the last.
        short_share: Fraction of the steps with short windows.
        batch_tokens: Tokens of a step.
        muon_rate: Peak learning rate of matrices, for Muon; 0: AdamW trains them, too.
        adam_rate: Peak learning rate of embeddings and norms, for AdamW.
        decay_share: Fraction of the steps, the last ones, in which the rates fall to 0.
        dropout: Probability for the embeddings and for what each layer adds to the residual stream.
        held_out_bytes, calibration_bytes: Sizes of the held-out and calibration texts of Python's documentation.
        largest_bytes: Largest held-out document, so that no single one dominates.
    """

    seed: int = 0
    model_type: str = "llama"
    vocabulary: int = 4096
    hidden: int = 256
    intermediate: int = 768
    experts: int = 8
    taken: int = 2
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head: int = 64
    short_window: int = 256
    window: int = 1024
    short_share: float = 0.7
    batch_tokens: int = 4096
    steps: int
    warm_up: int = 40
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    weight_decay: float = 0.05
    decay_share: float = 0.6
    dropout: float = 0.0
    held_out_bytes: int = 200_000
    calibration_bytes: int = 600_000
    largest_bytes: int = 30_000


HYPERS = {
    "demo": Hyper(steps=1500),
    "study": Hyper(model_type="qwen3", dropout=0.05, steps=2000),
    "mixture": Hyper(model_type="qwen3_moe", intermediate=256, steps=700),
}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts to train on, to calibrate with, and to measure on, each a list of documents by kind of text."""

    training: dict[str, list[str]]
    calibration: list[str]
    held_out: dict[str, list[str]]


def python_corpus(sources: Path, hyper: Hyper) -> Corpus:
    """Split Python's documentation by a seeded shuffle of whole documents; calibration is a part of training."""
    documents = read_documents(sources)
    names = sorted(documents)
    random.Random(hyper.seed).shuffle(names)

    def take(size: int) -> list[str]:
        taken, length = [], 0
        for name in names:
            own = len(documents[name].encode())
            if own <= hyper.largest_bytes and length + own <= size:
                taken.append(name)
                length += own
        return taken

    held_out = take(hyper.held_out_bytes)
    names = [name for name in names if name not in held_out]
    first = take(hyper.held_out_bytes)
    names = first + [name for name in names if name not in first]
    parts = (names, take(hyper.calibration_bytes), held_out)
    training, calibrating, measuring = ([documents[name] for name in part] for part in parts)
    return Corpus({"Python's documentation": training}, calibrating, {"Python's documentation": measuring})


def study_corpus(sources: Path, assets: Path, hyper: Hyper, documentation_bytes: int = 2_700_000) -> Corpus:
    """Return three kinds of text: a part of Python's documentation, stories, and pages of the web."""
    python = python_corpus(sources, hyper)
    (kind, documents), length, part = next(iter(python.training.items())), 0, []
    for document in documents:
        length += len(document.encode())
        if length <= documentation_bytes:
            part.append(document)
    web = (assets / "text/c4_train_128.txt").read_bytes()
    stories, told = (assets / "text" / f"tinystories_{name}.txt" for name in ("train_2m", "valid"))
    training = {kind: part, "stories": _documents(stories.read_text()), "web": _documents(web[:800_000])}
    pages = _documents(web[-HELD_OUT_C4:])[1:]  # the first one is cut, and may begin in the part to train on
    measuring = {"stories": _documents(told.read_text())[:250], "web": pages}
    return Corpus(training, python.calibration, python.held_out | measuring)


def _documents(text: str | bytes) -> list[str]:
    """Split a text at its separators; a letter that was cut in two at an end is dropped."""
    text = text if isinstance(text, str) else text.decode(errors="ignore")
    return [document.strip("\n") for document in text.split("<|endoftext|>") if document.strip()]


def train_tokenizer(texts: Iterable[str], hyper: Hyper) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which gives back every text exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=hyper.vocabulary, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=hyper.window,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(hyper: Hyper) -> PreTrainedModel:
    """Build the untrained network."""
    config = AutoConfig.for_model(
        hyper.model_type, vocab_size=hyper.vocabulary, hidden_size=hyper.hidden, intermediate_size=hyper.intermediate,
        num_hidden_layers=hyper.layers, num_attention_heads=hyper.heads, num_key_value_heads=hyper.key_value_heads,
        head_dim=hyper.head, max_position_embeddings=hyper.window, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    if hyper.model_type == "qwen3_moe":
        config.update({"num_experts": hyper.experts, "num_experts_per_tok": hyper.taken, "norm_topk_prob": True})
        config.update(
            {"moe_intermediate_size": hyper.intermediate, "output_router_logits": True}
        )  # evens the loads out
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if hyper.model_type == "qwen3_moe":
        model.set_experts_implementation("grouped_mm")
    return model


def add_dropout(model: PreTrainedModel, modules: Iterable[torch.nn.Module], probability: float) -> None:
    """Hook dropout into the embeddings and the given modules: these networks have none of their own."""
    for module in [model.get_input_embeddings(), *modules]:
        module.register_forward_hook(
            lambda module, _, output: torch.nn.functional.dropout(output, probability, module.training)
        )


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal by five Newton-Schulz steps (Jordan et al., 2024), in float32.

    torch.optim.Muon computes them in bfloat16, which CPUs without such instructions do a hundred times slower.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all matrices."""
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(momentum, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1, parameter.shape[-2] / parameter.shape[-1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrix of each in (..., rows, columns): singular values from 0.7 to 1.2."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if tall else matrix
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.775 * gram + 2.0315 * gram @ gram) @ wide
    return wide.mT if tall else wide


def optimizers_of(model: PreTrainedModel, hyper: Hyper) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for embeddings, routers and norms."""
    matrices, embeddings, norms = [], [], []
    for name, parameter in model.named_parameters():
        routed = "embed" in name or ".gate." in name
        (norms if parameter.dim() == 1 else embeddings if routed else matrices).append(parameter)
    groups = [{"params": embeddings, "weight_decay": hyper.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    if not hyper.muon_rate:
        groups.append({"params": matrices, "weight_decay": hyper.weight_decay})
    adam = torch.optim.AdamW(groups, lr=hyper.adam_rate, betas=(0.9, 0.95))
    return [adam, Muon(matrices, hyper.muon_rate, hyper.weight_decay)] if hyper.muon_rate else [adam]


def batches(tokens: Tensor, window: int, count: int, seed: int) -> Iterator[Tensor]:
    """Yield batches without end: each epoch is a seeded permutation of windows that start at a seeded offset."""
    for epoch in range(1_000_000):
        generator = torch.Generator().manual_seed(seed + epoch)
        offset = int(torch.randint(window, (), generator=generator))
        starts = offset + window * torch.randperm(len(tokens) // window - 1, generator=generator)
        for part in starts.split(count)[: len(starts) // count]:
            yield tokens[part[:, None] + torch.arange(window)]


@torch.no_grad()
def measure_loss(model: PreTrainedModel, tokens: Tensor, window: int) -> float:
    """Measure the mean loss in nats per token over whole windows; the first token of a window is not scored."""
    model.eval()
    windows = tokens[: len(tokens) // window * window].view(-1, window)
    total = sum(model(input_ids=rows, labels=rows).loss.item() * len(rows) for rows in windows.split(4))
    return total / len(windows)


def train(model: PreTrainedModel, tokens: Tensor, hyper: Hyper, work: Path) -> str:
    """Train, and return a sentence about the course. A run that was stopped goes on from the file `work`."""
    run = repr(asdict(hyper)) + hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    optimizers = optimizers_of(model, hyper)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    step, spent = 0, 0.0
    if work.exists() and (state := torch.load(work))["run"] == run:
        model.load_state_dict(state["model"])
        for optimizer, each in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        step, spent = state["step"], state["seconds"]
    windows = [hyper.short_window, hyper.window]
    streams = [batches(tokens, window, hyper.batch_tokens // window, hyper.seed) for window in windows]
    turn = int(hyper.steps * hyper.short_share)
    for stream, passed in zip(streams, (min(step, turn), max(0, step - turn)), strict=True):
        for _ in range(passed):
            next(stream)
    model.train()
    began = time.process_time() - spent
    while step < hyper.steps:
        torch.manual_seed(hyper.seed + step)
        factor = min((step + 1) / hyper.warm_up, (hyper.steps - step) / (hyper.steps * hyper.decay_share), 1)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = factor * rate
        rows = next(streams[step >= turn])
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 50 == 0 or step == hyper.steps:
            seconds = time.process_time() - began
            left = seconds / step * (hyper.steps - step)
            print(f"step {step}  loss {loss.item():.3f}  {seconds / 60:.1f} CPU min, {left / 60:.1f} to go", flush=True)
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"run": run, "model": model.state_dict(), "optimizers": states, "step": step, "seconds": seconds}
            torch.save(state, work.with_suffix(".new"))
            work.with_suffix(".new").replace(work)
    seconds, epochs = time.process_time() - began, step * hyper.batch_tokens / len(tokens)
    return f"{step:,} steps of {hyper.batch_tokens:,} tokens ({epochs:.1f} epochs), {seconds:,.0f} CPU seconds"


def card_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, window: int) -> Iterator[str]:
    """Yield lines of the card's table: every kind of text, and for scale two compressors on the held-out ones."""
    yield "| text | documents | bytes | tokens | SHA-256 | loss, nats per token | bits per byte | zlib -9 | xz -9 |"
    yield "|---|---|---|---|---|---|---|---|---|"
    named = [("calibration", corpus.calibration)]
    named += [(f"held out: {kind}", texts) for kind, texts in corpus.held_out.items()]
    named += [(f"training: {kind}", texts) for kind, texts in corpus.training.items()]
    for name, texts in named:
        text = joined(name, texts)
        content = text.encode()
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        cells = [
            name,
            f"{len(texts):,}",
            f"{len(content):,}",
            f"{len(ids):,}",
            hashlib.sha256(content).hexdigest()[:16],
        ]
        if not name.startswith("training"):
            loss = measure_loss(model, ids, window)
            sizes = len(zlib.compress(content, 9)), len(lzma.compress(content, preset=9))
            cells += [f"{loss:.4f}", f"{bits_per_byte(loss, ids, content):.4f}"]
            cells += [f"{8 * size / len(content):.3f}" for size in sizes]
        yield f"| {' | '.join(cells)} |"


def joined(name: str, documents: list[str]) -> str:
    """Join the documents of a kind of text: those of Python end in blank lines themselves."""
    return ("" if "Python" in name or name == "calibration" else "\n\n").join(documents)


def bits_per_byte(loss: float, ids: Tensor, content: bytes) -> float:
    """Return a loss in nats per token as bits per byte of the text."""
    return loss / math.log(2) * len(ids) / len(content)


def write_texts(folder: Path, corpus: Corpus) -> None:
    """Write calibration.txt and heldout.txt of Python's documentation."""
    for name, documents in ("calibration", corpus.calibration), ("heldout", corpus.held_out["Python's documentation"]):
        (folder / f"{name}.txt").write_bytes("".join(documents).encode())


def main() -> None:
    """Make the folder of one of the two models, and print the tables of its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=HYPERS)
    parser.add_argument("--sources", type=Path, required=True, help="folder _sources of Python's documentation")
    parser.add_argument("--assets", type=Path, help="folder with text/tinystories_train_2m.txt and others")
    parser.add_argument("--out", type=Path, help="default: where the repository holds the model")
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="fields of Hyper, to try others")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="models to measure on the same held-out text"
    )
    options = parser.parse_args()
    if options.name == "study" and options.assets is None:
        parser.error("study needs --assets")
    hyper = Hyper(**asdict(HYPERS[options.name]) | options.set)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(hyper.seed)
    study = options.name == "study"
    corpus = study_corpus(options.sources, options.assets, hyper) if study else python_corpus(options.sources, hyper)
    texts = [text for documents in corpus.training.values() for text in documents]
    tokenizer = train_tokenizer(texts, hyper)
    place = options.out or ROOT / FOLDERS[options.name]
    place.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(place)
    if options.name == "demo":
        write_texts(place.parent, corpus)
    tokens = torch.tensor(tokenizer("".join(f"{BOS}{text}{EOS}" for text in texts), verbose=False)["input_ids"])
    model = build_model(hyper)
    blocks = model.model.layers
    if hyper.dropout:
        add_dropout(
            model, [part for block in blocks for part in (block.self_attn.o_proj, block.mlp.down_proj)], hyper.dropout
        )
    print(f"{model.num_parameters():,} weights, {len(tokens):,} tokens", flush=True)
    work = Path(tempfile.gettempdir()) / f"nearplane-{options.name}-{options.threads}.pt"
    course = train(model, tokens, hyper, work)
    if hyper.model_type == "qwen3_moe":
        model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(place)
    kept = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    digest = hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest()
    print(f"Python {platform.python_version()}, {course}, {options.threads} threads. SHA-256 of the weights: {digest}")
    print("\n".join(card_rows(kept, tokenizer, corpus, hyper.window)))
    for other in options.beside:
        beside = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
        other_tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
        window = min(hyper.window, beside.config.max_position_embeddings)
        for kind, documents in corpus.held_out.items():
            text = joined(kind, documents)
            ids = torch.tensor(other_tokenizer(text, verbose=False)["input_ids"])
            loss = measure_loss(beside, ids, window)
            print(f"| {other.name} on held out: {kind} | {loss:.4f} | {bits_per_byte(loss, ids, text.encode()):.4f} |")
    for prompt in PROMPTS[options.name]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        torch.manual_seed(hyper.seed)
        written = kept.generate(ids, max_new_tokens=120, do_sample=True, temperature=0.7, top_p=0.9)
        print(f"\n> {tokenizer.decode(written[0])!r}")
    work.unlink()


if __name__ == "__main__":
    main()
