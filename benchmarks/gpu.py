"""How fast is a run on this GPU, beside what the card can do? Prints one markdown table to paste.

    python benchmarks/gpu.py [--only card codes blocks demo serve peers] [--models Llama-3.1-8B] [--peers FOLDER]

1. card: the card's own rates: products of matrices, memory, copies from the host, the start of an operation, the disk.
2. codes: random layers quantized on the card and on the CPU: 99.9 % of the codes must be equal, losses within 1e-4.
3. blocks: one random block of the shapes of known models, at 4 bits and at a rate. For each part of the run: seconds,
   and the least that the card needs for its multiplications and bytes at its own rates. Last the peak of memory beside
   the bound that the run states.
4. demo: the recipes of `nearplane demo`, with their divergence from the original.
5. serve: one matrix of the MLP at rates 1.5 and 3: decoding it, and products of 1 and 16 rows beside bfloat16.
6. peers: GPTQModel and llm-compressor on the first block, if they are installed here, or below FOLDER as `make
   bench-peers` installs them.

Parts have the names of `benchmarks/speed/gpu_model.py`, which computes the same seconds without a card. What fails is a
line of the table. `--tiny` runs all but serve and peers in seconds on a card that is only pretended; its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "speed"))

from gpu_parts import MODELS, MODES, PARTS, TINY, Sections, Shape, Text, Work, build, tokens_of, work  # noqa: E402
from gpu_serve import served  # noqa: E402

import nearplane  # noqa: E402
from nearplane.demo import EVALUATION_WINDOWS, HELD_OUT, MODEL, SEQLEN  # noqa: E402
from nearplane.demo.demo_recipes import recipes  # noqa: E402
from nearplane.lattice.grid import QuantizedMatrix  # noqa: E402
from nearplane.matrix.quantize_matrix import (  # noqa: E402
    quantize_matrix,
    quantize_matrix_to_rate,
)
from nearplane.models.model import open_model  # noqa: E402
from nearplane.planning.forecast import forecast  # noqa: E402
from nearplane.recipe.block_scheme import BlockScheme  # noqa: E402
from nearplane.recipe.rate_scheme import RateScheme  # noqa: E402
from nearplane.recipe.schemes import GridScheme  # noqa: E402
from nearplane.record.record import LayerRecord  # noqa: E402

EQUAL, LOSS = 0.999, 1e-4  # share of equal codes, and relative difference of losses, that are asked for
SCHEMES = {
    "4 bits": GridScheme(bits=4, group_size=32),
    "3 bits, asymmetric": GridScheme(bits=3, group_size=32, symmetric=False),
    "nvfp4": GridScheme(grid="nvfp4"),
    "q4_k": BlockScheme(grid="q4_k"),
    "rate 3": RateScheme(rate=3.0),
}
PEERS = {"gptqmodel": "gptqmodel", "llmcompressor": "llmcompressor"}  # folder of its environment: module
HEADS = ("part", "of", "measured", "beside", "times", "note")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Args:
        part, of: What is measured, on what.
        measured, beside: Two figures with the same unit, the second what the first is compared with.
        unit: Their unit.
        note: What is to be said of them.
    """

    part: str
    of: str
    measured: float | None = None
    beside: float | None = None
    unit: str = "s"
    note: str = ""

    def __str__(self) -> str:
        figures = ["" if each is None else f"{each:.4g} {self.unit}" for each in (self.measured, self.beside)]
        times = f"{self.measured / self.beside:.2f}" if self.measured and self.beside else ""
        return f"| {' | '.join((self.part, self.of, *figures, times, self.note))} |"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured.

    Args:
        place: The card.
        shapes: Models by name.
        text: Calibration windows of blocks.
        side: Rows and columns of the matrices of codes; of those whose product is timed, four times as many.
        copied: Bytes of a copy that is timed.
        peers: Folder of the peers' environments.
        tiny: Whether the card is pretended.
        rates: What the card does in a second, as far as it is measured; `card` fills it.
    """

    place: torch.device
    shapes: dict[str, Shape]
    text: Text
    side: int
    copied: int
    peers: Path | None
    tiny: bool
    rates: dict[str, float]

    def wait(self) -> None:
        """Wait for the card."""
        torch.get_device_module(self.place).synchronize()

    def seconds(self, call: Callable[[], object], least: float = 0.2) -> float:
        """Return the seconds of one call among as many as take `least` seconds, after one that is not counted."""
        call()
        self.wait()
        began, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - began < least:
            call()
            self.wait()
            calls += 1
            if self.tiny:
                break
        return (time.perf_counter() - began) / calls

    def limit(self, asked: Work) -> float | None:
        """Return the seconds that the card needs at least for some work, at its own rates; None: not measured."""
        counts = {**asked.flop, "memory": asked.bytes, "host to card": asked.sent, "disk": asked.disk}
        counts["float32"] = counts.get("float32", 0) + counts.pop("vector", 0)
        needed = {kind: count for kind, count in counts.items() if count}
        if not needed or needed.keys() - self.rates.keys():
            return None
        return sum(count / self.rates[kind] for kind, count in needed.items())


def card(asked: Asked) -> Iterator[Row]:
    """Measure the rates of the card."""
    place, side = asked.place, 4 * asked.side
    for kind, n in (("bfloat16", 2 * side), ("float32", side), ("float64", side)):
        A = torch.randn(n, n, device=place).to(getattr(torch, kind))
        rate = asked.rates[kind] = 2 * n**3 / asked.seconds(partial(torch.mm, A, A))
        yield Row(part="card", of=f"product of {n} x {n}, {kind}", measured=rate / 1e12, unit="TFLOP/s")
    source = torch.ones(asked.copied, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    rate = asked.rates["memory"] = 2 * asked.copied / asked.seconds(lambda: target.copy_(source))
    yield Row(part="card", of="copy on the card, read and written", measured=rate / 1e9, unit="GB/s")
    pinned = torch.ones(asked.copied, dtype=torch.uint8).pin_memory()
    rate = asked.rates["host to card"] = asked.copied / asked.seconds(lambda: source.copy_(pinned))
    yield Row(part="card", of="copy from pinned memory", measured=rate / 1e9, unit="GB/s")
    rate = asked.copied / asked.seconds(lambda: pinned.copy_(source))
    yield Row(part="card", of="copy to pinned memory", measured=rate / 1e9, unit="GB/s")
    one, count = torch.zeros(1, device=place), 10 if asked.tiny else 1000
    started = asked.seconds(lambda: [one.add_(1) for _ in range(count)]) / count
    yield Row(part="card", of="start of an operation", measured=1e6 * started, unit="us")
    waited = asked.seconds(lambda: [one.item() for _ in range(count)]) / count
    yield Row(part="card", of="wait for a value", measured=1e6 * waited, unit="us")
    asked.rates["disk"] = _disk(asked.copied)
    yield Row(part="card", of="file read again", measured=asked.rates["disk"] / 1e9, unit="GB/s")


def _forget(file: int) -> None:
    """Tell the system to forget what it has read of a file, which was written already."""
    os.fsync(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _reading(model: Path) -> float:
    """Return the seconds in which all blocks of a model are read from disk into pinned memory."""
    blocks = open_model(str(model)).blocks
    for path in model.glob("*.safetensors"):
        with path.open("r+b") as file:
            _forget(file.fileno())
    began = time.perf_counter()
    for block in blocks:
        block.read()
    return time.perf_counter() - began


def _disk(size: int) -> float:
    """Return the bytes a second at which a file is read that the system was told to forget."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(size))
        file.flush()
        _forget(file.fileno())
        began = time.perf_counter()
        file.seek(0)
        file.read()
        return size / (time.perf_counter() - began)


def codes(asked: Asked) -> Iterator[Row]:
    """Quantize random layers on both devices."""
    g, side = torch.Generator().manual_seed(0), asked.side
    for name, scheme in SCHEMES.items():
        out, columns = (side, 256) if asked.tiny and name == "q4_k" else (side, side)
        W = torch.randn(out, columns, generator=g)
        X = torch.randn(4 * columns, columns, generator=g) @ torch.randn(columns, columns, generator=g) / columns**0.5
        H = X.T.double() @ X.double() / len(X)
        yield from _guarded("codes", f"{name}, {out} x {columns}", _compared, asked.place, W, H, scheme)


def _compared(of: str, place: torch.device, W: Tensor, H: Tensor, scheme: Any) -> Iterator[Row]:
    """Quantize one layer on both devices."""
    (there, there_record), (here, here_record) = (_solved(W.to(each), H.to(each), scheme) for each in (place, "cpu"))
    equal = float((there.codes.cpu() == here.codes).double().mean())
    off = abs(there_record.loss / here_record.loss - 1)
    verdict = "ok" if equal >= EQUAL and off <= LOSS else "FAILED"
    note = f"{verdict}: at least {100 * EQUAL} % equal, losses differ by {off:.1e}, at most {LOSS:g}"
    yield Row(part="codes", of=of, measured=100 * equal, beside=100.0, unit="%", note=note)


def _solved(W: Tensor, H: Tensor, scheme: Any) -> tuple[QuantizedMatrix, LayerRecord]:
    return (quantize_matrix_to_rate if scheme.entropy_coded else quantize_matrix)(W, H, scheme)


def blocks(asked: Asked) -> Iterator[Row]:
    """Quantize a random block of each model in each mode."""
    for name, shape in asked.shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            many = shape.blocks if asked.tiny else 1
            for mode in MODES:
                yield from _guarded("blocks", f"{name}, {mode}", _block, asked, model, shape, mode, many)


def _block(of: str, asked: Asked, model: Path, shape: Shape, mode: str, many: int) -> Iterator[Row]:
    """Quantize one model in a mode, once to compile kernels on little text, and once to measure."""
    if not model.exists():
        build(model, shape, many, asked.text.seqlen)
    runtime, forecasts = torch.get_device_module(asked.place), []

    def noted(*args: Any) -> Any:
        forecasts.append(forecast(*args))
        return forecasts[-1]

    def clock() -> np.ndarray:
        asked.wait()
        return np.array([time.perf_counter()])

    options = dict(device=str(asked.place), overwrite=True, **_mode(mode, shape))
    if not asked.tiny:
        few = Text(samples=max(8, 16 * shape.hidden // asked.text.seqlen), seqlen=asked.text.seqlen)
        nearplane.quantize(model, model.with_name("first"), calibration=tokens_of(few), **options)
    runtime.empty_cache()
    runtime.reset_peak_memory_stats(asked.place)
    text, needed = asked.text, work(shape, mode, asked.text)
    with mock.patch("nearplane.planning.run.forecast", noted), Sections(clock) as sections:
        nearplane.quantize(model, model.with_name("out"), calibration=tokens_of(text), **options)
    total = sum(float(each[0]) for each in sections.spent.values())
    least, note = asked.limit(needed["reading"].times(many)), "by a thread beside the others, not part of the whole"
    yield Row(part="reading", of=of, measured=_reading(model), beside=least, note=note)
    for part in PARTS:
        if part in sections.spent:
            least = asked.limit(needed[part].times(many))
            yield Row(part=part, of=of, measured=float(sections.spent[part][0]), beside=least, note=_says(needed[part]))
    yield Row(part="whole run", of=of, measured=total, note=f"{many} blocks" if many > 1 else "one block")
    peak, bound = runtime.max_memory_allocated(asked.place), forecasts[0].bytes if forecasts else None
    beside = None if bound is None else bound / 1e9
    note = "" if bound is None else "ok" if peak <= bound else "FAILED: above its bound"
    yield Row(part="peak of memory", of=of, measured=peak / 1e9, beside=beside, unit="GB", note=note)


def _mode(mode: str, shape: Shape) -> dict[str, Any]:
    """Return the options of a mode; groups are as large as the shape allows."""
    options = {**MODES[mode]}
    if "group_size" in options:
        options["group_size"] = min(128, shape.hidden // 4, shape.intermediate)
    return options


def _says(asked: Work) -> str:
    """Return what the second figure counts."""
    flop = [f"{count / 1e12:.3g} T {kind}" for kind, count in asked.flop.items() if count]
    counts = {"on the card": asked.bytes, "sent": asked.sent, "disk": asked.disk}
    return ", ".join([*flop, *(f"{count / 1e9:.3g} GB {kind}" for kind, count in counts.items() if count)])


def demo(asked: Asked) -> Iterator[Row]:
    """Quantize the demo model by all recipes of the demonstration, and measure the results."""
    with tempfile.TemporaryDirectory() as folder:
        for label, solver, recipe in list(recipes())[: 1 if asked.tiny else None]:
            of = f"{label}, {solver}"
            yield from _guarded("demo", of, _demonstrated, asked, Path(folder) / label / solver, recipe)


def _demonstrated(of: str, asked: Asked, out: Path, recipe: Any) -> Iterator[Row]:
    out.parent.mkdir(exist_ok=True)
    began, device = time.perf_counter(), str(asked.place)
    nearplane.quantize(MODEL, out, recipe, device=device)
    seconds = time.perf_counter() - began
    note = "not evaluated"
    if not asked.tiny:
        score = nearplane.evaluate(
            out, HELD_OUT, seqlen=SEQLEN, samples=EVALUATION_WINDOWS, against=MODEL, device=device
        )
        note = f"KL {score.kl:.4f}, perplexity {score.perplexity:.3f}"
    yield Row(part="demo", of=of, measured=seconds, note=note)


def serve(asked: Asked) -> Iterator[Row]:
    """Decode and multiply a coded matrix."""
    name, shape = next(iter(asked.shapes.items()))
    yield from _guarded("serve", name, _served, asked, shape)


def _served(of: str, asked: Asked, shape: Shape) -> Iterator[Row]:
    for each in served(asked.place, shape, asked.seconds, asked.rates.get("memory")):
        yield Row(part="serve", of=f"{of}, {each.of}", measured=each.measured, beside=each.beside, note=each.note)


def peers(asked: Asked) -> Iterator[Row]:
    """Let other tools quantize the first block at 4 bits in groups of 128."""
    name, shape = next(iter(asked.shapes.items()))
    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder) / "model", asked.text
        build(model, shape, 1, text.seqlen)
        for tool, module in PEERS.items():
            own = asked.peers / tool / "bin" / "python" if asked.peers else None
            if own is None and importlib.util.find_spec(module) is None:
                note = "not measured: it is not installed here; or pass --peers FOLDER, see benchmarks/peers/README.md"
                yield Row(part="peers", of=tool, note=note)
                continue
            python = str(own or sys.executable)
            yield from _guarded("peers", f"{tool}, {name}, 4 bits", _peer, tool, python, model, text, str(asked.place))


def _peer(of: str, tool: str, python: str, model: Path, text: Text, device: str) -> Iterator[Row]:
    """Run one tool in its environment by `benchmarks/peers/worker.py`."""
    from safetensors.torch import save_file

    folder = model.parent
    save_file({"windows": tokens_of(text)[: text.samples].clone()}, folder / "tokens.safetensors")
    task = dict(
        model=str(model), warm=str(model), tokens=str(folder / "tokens.safetensors"), out=str(folder / tool), bits=4,
        group_size=128, symmetric=True, search=False, device=device, dtype="bfloat16",
    )  # fmt: skip
    (folder / "tasks.json").write_text(json.dumps([task]))
    command = [python, str(ROOT / "benchmarks" / "peers" / "worker.py"), tool, str(folder / "tasks.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"imports"', '{"error"'))]
    if not said or "error" in said[0]:
        raise RuntimeError(said[0]["error"] if said else f"{python} ended with {done.returncode}: {done.stderr[-300:]}")
    yield Row(part="peers", of=of, measured=said[0]["wall"], note="loading, quantizing and writing, after a first run")


MEASURES: dict[str, Callable[[Asked], Iterator[Row]]] = {
    "card": card, "codes": codes, "blocks": blocks, "demo": demo, "serve": serve, "peers": peers,
}  # fmt: skip


def _guarded(part: str, of: str, measure: Callable[..., Iterator[Row]], *args: Any) -> Iterator[Row]:
    """Yield the lines of a measure; what fails is a line, too."""
    try:
        yield from measure(of, *args)
    except Exception as error:  # the table goes on, whatever a card or a tool raises
        traceback.print_exc()
        said = " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())
        yield Row(part=part, of=of, note=f"FAILED: {said[:400]}")


def header(asked: Asked) -> Iterator[Row]:
    """Say what is measured where."""
    runtime = torch.get_device_module(asked.place)
    yield Row(part="card", of="name", note=runtime.get_device_name(asked.place))
    if asked.place.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,power.limit", "--format=csv,noheader"]
        yield Row(part="card", of="driver, memory, limit of power", note=_printed(query))
    for module in ("torch", "triton", "transformers", "nearplane"):
        found = importlib.util.find_spec(module) is not None
        yield Row(part="version", of=module, note=importlib.metadata.version(module) if found else "not installed")
    yield Row(
        part="version",
        of="CUDA, Python, system",
        note=f"{torch.version.cuda}, {platform.python_version()}, {platform.platform()}",
    )
    yield Row(part="version", of="commit", note=_printed(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]))
    yield Row(part="version", of="text of blocks", note=f"{asked.text.samples} windows of {asked.text.seqlen} tokens")


def _printed(command: list[str]) -> str:
    """Return what a command prints, or why it does not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"


def table(asked: Asked, names: list[str]) -> Iterator[str]:
    """Yield the lines of the table as they are measured."""
    yield f"| {' | '.join(HEADS)} |"
    yield f"|{'---|' * len(HEADS)}"
    for name, measure in {"header": header, **{name: MEASURES[name] for name in names}}.items():
        for row in _guarded(name, "", lambda _, measure=measure: measure(asked)):
            yield str(row)


def main(words: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="NAME")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--tiny", action="store_true")
    told = parser.parse_args(words)
    with ExitStack() as ends:
        if told.tiny:
            sys.path.insert(0, str(ROOT / "tests" / "support"))
            from pretended import pretended
            from pretended_kernels import compiled

            ends.enter_context(pretended())
            ends.enter_context(compiled())
            told.device, text, shapes = "pretend:0", Text(samples=12, seqlen=32), {"tiny": TINY}
        else:
            text, shapes = Text(samples=told.samples, seqlen=told.seqlen), {name: MODELS[name] for name in told.models}
        asked = Asked(
            place=torch.device(told.device), shapes=shapes, text=text, side=64 if told.tiny else 1024,
            copied=1 << 20 if told.tiny else 1 << 29, peers=told.peers, tiny=told.tiny, rates={},
        )  # fmt: skip
        for line in table(asked, [name for name in told.only if not (told.tiny and name in ("serve", "peers"))]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
