"""Our quantizer beside its peers: the same model, tokens and grid, one core, in turn; a table of costs and of what is left.

    make bench-peers [PEERS=build/peers] [ASSETS=...] [ROUNDS=3]

Each tool runs by its defaults in a process and an environment of its own (`worker.py`). CPU and wall time are those of loading,
quantizing and writing, the medians over the rounds; imports and a first run on one block, which compiles what is compiled, come
before and stand beside. Perplexity and KL to the original are measured by `nearplane evaluate` on held-out text, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nearplane import evaluate
from nearplane.calibration.texts import Frame, read_windows
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.models.pretrained import tokenizer_of
from nearplane.verbs.evaluation_result import Evaluation

HERE = Path(__file__).parent
TOOLS = ("nearplane", "gptqmodel", "llmcompressor", "auto-round")
ITERATIONS = 200  # of auto-round, a block
GRIDS = ((4, True), (3, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is quantized.

    Args:
        folder, calibration, held_out: the model and its texts; no held-out text: only costs are measured.
        samples, seqlen: windows of calibration, and their tokens.
        group_size: of the grids.
        tools: the tools that quantize it.
    """

    folder: Path
    calibration: Path
    held_out: Path | None
    samples: int
    seqlen: int
    group_size: int
    tools: tuple[str, ...] = TOOLS


def subjects(place: Path, assets: Path) -> dict[str, Subject]:
    """Return the models by name; a random one of Qwen3-0.6B's block shapes is made in `place`."""
    stories, wide = assets / "text", random_qwen(place / "qwen", blocks=4)

    def random_blocks(samples: int, seqlen: int, *tools: str) -> Subject:
        return Subject(
            folder=wide,
            calibration=CALIBRATION,
            held_out=None,
            samples=samples,
            seqlen=seqlen,
            group_size=128,
            tools=tools,
        )

    return {
        "demo": Subject(
            folder=MODEL, calibration=CALIBRATION, held_out=HELD_OUT, samples=128, seqlen=256, group_size=128
        ),
        "babyllama105": Subject(
            folder=assets / "models/babyllama105", calibration=stories / "tinystories_train_2m.txt",
            held_out=stories / "tinystories_valid.txt", samples=128, seqlen=256, group_size=32,
        ),
        "four blocks of Qwen3-0.6B": random_blocks(128, 256, *TOOLS[:3]),  # AutoRound would train for hours
        "the same, nearplane's default tokens": random_blocks(300, 512, "nearplane"),
        "the same, 512 windows (llm-compressor's default) of 384": random_blocks(512, 384, "llmcompressor"),
    }  # fmt: skip


def random_qwen(folder: Path, blocks: int) -> Path:
    """Write random blocks of Qwen3-0.6B's shapes with the tokenizer of the demo, in bfloat16."""
    torch.manual_seed(0)
    shapes = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 16}
    config = AutoConfig.for_model(
        "qwen3", **shapes, num_hidden_layers=blocks, num_key_value_heads=8, vocab_size=4096, tie_word_embeddings=True,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    return _write(config, folder, MODEL)


def _write(config: Any, folder: Path, tokenizer: Path) -> Path:
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def task_of(subject: Subject, place: Path, bits: int, symmetric: bool) -> dict[str, Any]:
    """Write tokens and a model of one block for the first run; return what a worker is told, but for its output."""
    place.mkdir(parents=True)
    tokenizer = tokenizer_of(subject.folder, trust_remote_code=False)
    windows = read_windows(
        tokenizer, subject.calibration, samples=subject.samples, seqlen=subject.seqlen, frame=Frame()
    )
    save_file({"windows": windows}, place / "tokens.safetensors")
    warm = one_block(subject.folder, place / "warm")
    return {
        "model": str(subject.folder), "warm": str(warm), "tokens": str(place / "tokens.safetensors"), "bits": bits,
        "group_size": subject.group_size, "symmetric": symmetric, "iterations": ITERATIONS, "search": 0.0,
        "recipe": recipe_of(bits, subject.group_size, symmetric),
    }  # fmt: skip


def one_block(folder: Path, place: Path) -> Path:
    """Write a random model with one block of the shapes of another, for the first run of a tool."""
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return _write(config, place, folder)


def recipe_of(bits: int, group_size: int, symmetric: bool) -> dict[str, Any]:
    """Return the options of nearplane for a grid."""
    form = "compressed-tensors" if symmetric else "gptq_v2"
    return {"bits": bits, "group_size": group_size, "symmetric": symmetric, "format": form}


def run_tasks(tool: str, tasks: list[dict[str, Any]], place: Path, python: Path, core: int) -> list[dict[str, Any]]:
    """Let a tool do tasks in one process in its environment on one core; return what it spent on each, or an `error`."""
    told = place / f"{tool}.json"
    for task in tasks:
        for folder in (task["out"], f"{task['out']}-warm", f"{task['out']}-solved"):
            shutil.rmtree(folder, ignore_errors=True)
    told.write_text(json.dumps(tasks))
    alone = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    offline = {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    own = {name: value for name, value in os.environ.items() if tool.startswith("nearplane") or name != "PYTHONPATH"}
    command = ["taskset", "-c", str(core), str(python), str(HERE / "worker.py"), tool, str(told)]
    done = subprocess.run(command, env=own | alone | offline, capture_output=True, text=True, check=False)
    spent = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"imports"', '{"error"'))]
    printed = (done.stdout + done.stderr)[-3000:]
    lost = {"error": f"{python} ended with {done.returncode}", "printed": printed}
    return [each | ({"printed": printed} if "error" in each else {}) for each in spent] + [lost] * (
        len(tasks) - len(spent)
    )


def run_once(tool: str, task: dict[str, Any], place: Path, python: Path, core: int) -> dict[str, float]:
    """Run a tool once; return what it spent.

    Raises:
        SystemExit: it failed; with the end of what it printed.
    """
    spent = run_tasks(tool, [task | {"out": str(place / tool)}], place, python, core)[0]
    if "error" in spent:
        sys.exit(f"{tool}: {spent['error']}: {spent['printed']}")
    return spent


def measured(out: Path, subject: Subject) -> Evaluation | None:
    """Measure a folder that a tool wrote on 96 windows of held-out text."""
    if subject.held_out is None:
        return None
    return evaluate(out, subject.held_out, samples=96, seqlen=256, against=subject.folder, protocol="papers")


def rows(
    names: list[str], tools: list[str], rounds: int, peers: Path, assets: Path, core: int
) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table, as models and grids are done."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        known = subjects(place, assets)
        for name in names:
            subject = known[name]
            for bits, symmetric in GRIDS[: 1 if subject.held_out is None else None]:
                here = place / f"{name}-{bits}"
                task = task_of(subject, here, bits, symmetric)
                grid = f"{bits} {'symmetric' if symmetric else 'asymmetric'}, {subject.group_size}"
                taken = [tool for tool in tools if tool in subject.tools]
                spent: dict[str, list[dict[str, float]]] = {tool: [] for tool in taken}
                for index in range(rounds):
                    for tool in taken:
                        if tool == "auto-round" and index:
                            continue  # one round: it takes the longest by far, and its noise does not matter
                        python = Path(sys.executable) if tool == "nearplane" else peers / tool / "bin/python"
                        spent[tool].append(run_once(tool, task, here, python, core))
                        print(f"{name} {grid} {tool}: {spent[tool][-1]}", file=sys.stderr, flush=True)
                for tool in taken:
                    of = {key: statistics.median(each[key] for each in spent[tool]) for key in spent[tool][0]}
                    left = measured(here / tool, subject)
                    yield (
                        name, grid, tool, f"{of['cpu']:.1f}", f"{of['wall']:.1f}", f"{of['peak'] / 1e9:.2f}",
                        "-" if left is None else f"{left.perplexity:.4f}", "-" if left is None else f"{left.kl:.5f}",
                        f"{of['imports']:.1f} + {of['first']:.1f}",
                    )  # fmt: skip


def main() -> None:
    """Print a markdown table, line by line as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["demo", "babyllama105", "four blocks of Qwen3-0.6B"])
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="folder of the environments")
    parser.add_argument("--assets", type=Path, default=Path(os.environ.get("ASSETS", "../shared/assets")))
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    told = parser.parse_args()
    heads = (
        "model",
        "grid, groups",
        "tool",
        "CPU s",
        "wall s",
        "peak GB",
        "perplexity",
        "KL",
        "imports + first run, CPU s",
    )
    for line in (heads, ("---",) * len(heads)):
        print(f"| {' | '.join(line)} |", flush=True)
    for line in rows(told.models, told.tools, told.rounds, told.peers, told.assets, told.core):
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
