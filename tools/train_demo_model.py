"""Train the demo model that nearplane carries: the text, the tokenizer, the network, the training loop.

The text is what every Python installation holds (docstrings and comments of the standard library, the topics of
`help()`), so the tool needs no network: `python tools/train_demo_model.py`, about 15 minutes on two idle cores. At the
end it prints the figures that the model card, `README.md` in the folder, gives.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import math
import platform
import random
import re
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "ensurepip", "encodings", "pydoc_data"}
FOREIGN = re.compile(r"permission notice|redistribut|copyright message|altered source versions", re.IGNORECASE)
LEGAL = re.compile(r"copyright|licen[sc]e|rights reserved", re.IGNORECASE)
BOS, EOS = "<s>", "</s>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """What decides the result, besides the Python version whose library is read."""

    seed: int = 0
    vocabulary: int = 2048
    hidden: int = 256
    intermediate: int = 768
    layers: int = 5
    heads: int = 8
    key_value_heads: int = 4
    window: int = 256
    batch: int = 8
    steps: int = 2047
    warm_up: int = 200
    peak_rate: float = 2e-3
    final_rate: float = 2e-5
    weight_decay: float = 0.1
    dropout: float = 0.15  # of the embeddings and of what each layer adds to the residual stream
    held_out_bytes: int = 200_000
    validation_bytes: int = 80_000
    largest_bytes: int = 20_000  # larger documents only train, so that no single one dominates the other texts


def entries(source: str, module: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of every docstring in a module's source, then of its comment blocks."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield f"{name}.{child.name}", ast.get_docstring(child) or ""
                yield from visit(child, f"{name}.{child.name}")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}.{child.name}({ast.unparse(child.args)})", ast.get_docstring(child) or ""
            elif not isinstance(child, ast.expr):
                yield from visit(child, name)

    tree = ast.parse(source)
    yield module, ast.get_docstring(tree) or ""
    yield from visit(tree, module)
    blocks = [match[0] for match in re.finditer(r"(?m)(^[ \t]*#.*\n)+", source) if len(match[0]) >= 120]
    comments = [inspect.cleandoc(re.sub(r"(?m)^[ \t]*# ?", "", block)) for block in blocks]
    yield f"{module}, comments", "\n\n".join(comments)


def has_own_licence(source: str) -> bool:
    """Tell whether a module carries conditions of its own beside the PSF licence."""
    prose = re.sub(r"[\s#]+", " ", source)
    return FOREIGN.search(prose) is not None and "Licensed to PSF under a Contributor Agreement" not in prose


def read_documents() -> dict[str, str]:
    """Read the library as one document per module and per topic; a paragraph that was seen before is left out."""
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()

    def unseen(text: str) -> str:
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(paragraph.split())
            if not LEGAL.search(key) and key not in seen and re.search(r"\w", key):
                kept.append(paragraph.rstrip())
                if len(key) >= 40:
                    seen.add(key)
        return "\n\n".join(kept)

    def assemble(pairs: Iterator[tuple[str, str]]) -> str:
        texts = ((heading, unseen(text)) for heading, text in pairs)
        return "".join(f"{heading}\n\n{text}\n\n" for heading, text in texts if text)

    documents = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not SKIPPED.isdisjoint(parts) or parts[0].startswith("_sysconfigdata"):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if not has_own_licence(source):
            module = ".".join(part for part in parts if part != "__init__")
            documents[module] = assemble(entries(source, module))
    topics = ast.literal_eval(ast.parse((library / "pydoc_data/topics.py").read_text(encoding="utf-8")).body[-1].value)
    for topic, text in sorted(topics.items()):
        documents[f"help({topic!r})"] = assemble(iter([(f"help({topic!r})", text)]))
    return {name: text for name, text in documents.items() if text}


def split_documents(documents: dict[str, str], hyper: Hyper) -> dict[str, list[str]]:
    """Split whole documents, shuffled, into held-out, validation and training; calibration is a part of training."""
    names = sorted(documents)
    random.Random(hyper.seed).shuffle(names)

    def take(wanted: int) -> list[str]:
        taken, size = [], 0
        for name in names:
            length = len(documents[name].encode())
            if length <= hyper.largest_bytes and size + length <= wanted:
                taken.append(name)
                size += length
        return taken

    parts = {}
    for part, wanted in ("held-out", hyper.held_out_bytes), ("validation", hyper.validation_bytes):
        parts[part] = take(wanted)
        names = [name for name in names if name not in parts[part]]
    parts |= {"training": names, "calibration": take(hyper.held_out_bytes)}
    return {part: [documents[name] for name in members] for part, members in parts.items()}


def train_tokenizer(texts: list[str], hyper: Hyper) -> PreTrainedTokenizerFast:
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
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=512,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(hyper: Hyper, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained network, with dropout hooked into the residual stream (Llama has none of its own)."""
    config = LlamaConfig(
        vocab_size=hyper.vocabulary, hidden_size=hyper.hidden, intermediate_size=hyper.intermediate,
        num_hidden_layers=hyper.layers, num_attention_heads=hyper.heads, num_key_value_heads=hyper.key_value_heads,
        max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    added = [module for layer in model.model.layers for module in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    for module in [model.model.embed_tokens, *added]:
        module.register_forward_hook(
            lambda module, _, output: torch.nn.functional.dropout(output, hyper.dropout, module.training)
        )
    return model


def draw_batch(tokens: Tensor, step: int, hyper: Hyper) -> Tensor:
    """Draw the windows of a step: each epoch is a seeded permutation of windows that start at a seeded offset."""
    epoch, index = divmod(step, (len(tokens) // hyper.window - 1) // hyper.batch)
    generator = torch.Generator().manual_seed(hyper.seed + epoch)
    offset = int(torch.randint(hyper.window, (), generator=generator))
    order = torch.randperm(len(tokens) // hyper.window - 1, generator=generator)
    starts = offset + hyper.window * order[index * hyper.batch : (index + 1) * hyper.batch]
    return tokens[starts[:, None] + torch.arange(hyper.window)]


@torch.no_grad()
def measure_loss(model: LlamaForCausalLM, tokens: Tensor, window: int) -> float:
    """Measure the mean loss in nats per token over whole windows; the first token of a window is not scored."""
    model.eval()
    windows = tokens[: len(tokens) // window * window].view(-1, window)
    total = sum(model(input_ids=rows, labels=rows).loss.item() * len(rows) for rows in windows.split(16))
    return total / len(windows)


def train(
    model: LlamaForCausalLM, tokens: Tensor, validation: Tensor, hyper: Hyper, work: Path, folder: Path, minutes: float
) -> str:
    """Train, keep in `folder` the model that was best on validation, and return a sentence about the course.

    An interrupted run goes on from `work`. Where `minutes` run out first, the schedule is compressed to fit.
    """
    run = asdict(hyper) | {"python": platform.python_version()}
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": hyper.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=hyper.peak_rate, betas=(0.9, 0.95))
    step, seconds, best, best_step, progress = 0, 0.0, math.inf, 0, 0.0
    kept = folder / "model.safetensors"
    if work.exists() and kept.exists() and (state := torch.load(work))["run"] == run:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seconds, best, best_step, progress = state["place"]
    began = time.monotonic() - seconds
    while progress < 1:
        torch.manual_seed(hyper.seed + step)
        progress = max((step + 1) / hyper.steps, (time.monotonic() - began) / (60 * minutes))
        cosine = (1 + math.cos(math.pi * min(progress, 1))) / 2
        rate = hyper.final_rate + (hyper.peak_rate - hyper.final_rate) * cosine
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / hyper.warm_up)
        rows = draw_batch(tokens, step, hyper)
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        seconds = time.monotonic() - began
        if step % 50 == 0:
            left = seconds / progress * (1 - progress)
            print(f"step {step}  loss {loss.item():.3f}  {seconds / 60:.1f} min, {left / 60:.1f} to go", flush=True)
        if step % 250 == 0 or progress >= 1:
            current = measure_loss(model, validation, hyper.window)
            print(f"step {step}  validation {current:.4f}", flush=True)
            if current < best:
                best, best_step = current, step
                copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
            place = (step, seconds, best, best_step, progress)
            state = {"run": run, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "place": place}
            torch.save(state, work)
    epochs = step * hyper.batch * hyper.window / len(tokens)
    return f"{step} steps ({epochs:.1f} epochs); kept is step {best_step}, the best on the validation documents"


def main() -> None:
    """Make the folder of the demo model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("src/nearplane/demo"))
    parser.add_argument("--steps", type=int, default=Hyper().steps)
    parser.add_argument("--minutes", type=float, default=math.inf, help="compress the schedule to this time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "nearplane-demo-training.pt")
    options = parser.parse_args()
    hyper = Hyper(steps=options.steps)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(hyper.seed)

    parts = split_documents(read_documents(), hyper)
    tokenizer = train_tokenizer(parts["training"], hyper)
    folder = options.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    for part, name in ("calibration", "calibration.txt"), ("held-out", "heldout.txt"):
        (options.out / name).write_bytes("".join(parts[part]).encode())
    ids = {part: torch.tensor(tokenizer("".join(texts))["input_ids"]) for part, texts in parts.items()}
    marked = "".join(f"{BOS}{text}{EOS}" for text in parts["training"])
    tokens = torch.tensor(tokenizer(marked)["input_ids"])

    model = build_model(hyper, tokenizer)
    print(f"{model.num_parameters()} parameters, {len(tokens)} tokens", flush=True)
    course = train(model, tokens, ids["validation"], hyper, options.work, folder, options.minutes)
    kept = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(f"Python {platform.python_version()}, {course}. For the table in {options.out / 'README.md'}:")
    for part, texts in parts.items():
        loss = measure_loss(kept, ids[part], hyper.window)
        size = len("".join(texts).encode())
        print(f"| {part} | {len(texts)} | {size:,} | {len(ids[part]):,} | {loss:.3f} | {math.exp(loss):.2f} |")
    options.work.unlink()


if __name__ == "__main__":
    main()
