"""How long would a block take on a GPU? A model of time from counted launches and bytes, for cards that are not there.

    python benchmarks/speed/gpu_model.py > docs/results/gpu-model.md      # some minutes on one core, no GPU

Counted on the pretended GPU of the tests, with the package as it is: operations that start on the card, waits of the
CPU for a value, and bytes between host and card, for every part of a run. Layers and blocks are small there:

    a layer:  a sixteenth of its inputs and outputs, with the sizes of the package's own blocks and strips divided alike
    loops over columns (sweep, descent, k-best): a + b inputs, through two sizes; k-best once a part of the rows
    a block:  a + b batches, and for the moments b = c + d (inputs of all layers)

Multiplications and bytes on the card are computed from the shapes (`gpu_parts.work`). Then, for each part,

    seconds = max(launches x start, multiplications / rate + bytes / bandwidth + columns x step)
              + waits x wait + bytes sent / PCIe + disk + host

with the constants of `CARDS`, which are assumptions: the first card that `benchmarks/gpu.py` measures corrects them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import torch
from gpu_memory import GPU, NARROW, looks_of, open_zeros
from gpu_memory import MODELS as FOLDERS
from gpu_parts import BEAM, MODELS, MODES, PARTS, ROOT, Sections, Shape, Text, Work, build, tokens_of, work
from torch import Tensor

import nearplane
from nearplane.calibration.one_forward import BATCH_TOKENS, PAUSED_DIVISOR, MemorySetting, default_batch
from nearplane.calibration.windows import Windows
from nearplane.lattice import bounds, factor, kernels
from nearplane.lattice.kernels import KERNELS, torch_kernels
from nearplane.lattice.moments import Extra, Moments
from nearplane.lattice.scale import StepStorage
from nearplane.matrix import certificate, to_rate
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.matrix.on_grid import joined
from nearplane.planning.forecast import shapes_of
from nearplane.planning.memory_bound import bound, waits
from nearplane.planning.memory_limits import choose, settings
from nearplane.planning.request import resolved
from nearplane.planning.shapes import multiplications
from nearplane.planning.solve_stage import solve_layer
from nearplane.recipe.layer_plan import LayerPlan
from nearplane.recipe.recipe import Recipe

sys.path.insert(0, str(ROOT / "tests" / "support"))

from pretended import Pretend, pretended
from pretended_cards import KIND, Gpu
from pretended_kernels import compiled, interpreted

LOOPS = ("search of steps", "sweep", "descent", "k-best")  # whose kernels differ between states
SCALE = 16  # by which layers are smaller that are counted
SIDES = {  # sizes of the package that are divided by it, and those that are divided by its square
    factor: ("ROWS_AT_ONCE",),
    bounds: ("MEASURED_ROWS", "BLOCK_COLUMNS"),
    certificate: ("MAX_CERTIFIED_INPUTS",),
    to_rate: ("MEASURED_ROWS", "SEARCHED_ROWS"),
}
AREAS = {to_rate: ("MAX_PREDICTED_WEIGHTS",)}
NARROWS, STRIP = (256, 512), 32  # inputs and outputs of layers whose loops are counted
HIDDEN, SAMPLES, SEQLEN = (256, 512), (33, 49), 16  # of blocks that are counted: batches of 8 windows after one of 1
COUNTED = 6  # batches of the first of these texts, with that of the extra windows
PROBED = 4096  # tokens of a batch of the probe
Counts = np.ndarray  # launches, waits, bytes sent


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card does in a second, and what a call costs.

    Args:
        rates: Operations of matrix products as achieved by cuBLAS and by kernels of Triton, by what is multiplied.
        memory, link, disk: Bytes a second of its memory, of PCIe, and of the machine's disk.
        start, wait: Seconds to start an operation from Python, and to wait for a value.
        step: Seconds of one column in a kernel whose columns wait for each other.
        size: Bytes of its memory.
    """

    rates: dict[str, float]
    memory: float
    link: float
    size: int
    disk: float = 3e9
    start: float = 6e-6
    wait: float = 15e-6
    step: float = 0.35e-6


CARDS = {
    "H100": Card(
        rates={"bfloat16": 600e12, "float32": 45e12, "tf32x3": 85e12, "float64": 35e12, "vector": 30e12},
        memory=2.8e12, link=50e9, size=80,
    ),
    "RTX 4090": Card(
        rates={"bfloat16": 140e12, "float32": 55e12, "tf32x3": 25e12, "float64": 1.2e12, "vector": 35e12},
        memory=0.9e12, link=22e9, size=24,
    ),
}  # fmt: skip
INTRODUCTION = """\
Written by `python benchmarks/speed/gpu_model.py`, which says how. **Every second on this page is modelled**;
[gpu-measured.md](gpu-measured.md) has what an H200 took, before and after changes that came later than this count.
Launches, waits and copied bytes are counted, multiplications and bytes on the card are computed from the shapes.
`python benchmarks/gpu.py` measures the same parts under the same names.

"Before" has no kernels for loops over columns, and float32 products for the moments, as at commit 54f0fdf; all else is
as in "now", which is commit {commit}. A run has 256 windows of 2,048 tokens. A thread reads blocks ahead, so that
reading counts only where it takes longer than all else. 8B and 70B are the shapes of Llama 3.1.

Parts: *forwards* run the text through the block, *moments* sum the second moments of inputs, *factor* is the Cholesky
factor of these, *sweep* the nearest-plane algorithm over the columns, *descent* refines steps and codes after it,
*k-best* keeps 8 candidates of each row instead, *probe* and *backward pass* measure which layers need more bits, and
*certificate* measures what was lost."""
ASSUMED = """\
The rates are 0.6 to 0.9 of the makers' figures for dense products; vector is float32 without fused operations. In
kernels, float32 numbers are multiplied by three products of TF32 (tf32x3). A strip of 32 rows reads 4 bytes from the
cache for 64 operations, which limits the H100 to about half of a third of its TF32. Memory has 0.85 to 0.9 of the
makers' bandwidth, PCIe 5 and 4 with 16 lanes 0.8 of theirs. Integers are packed on the card. On one thread the host
packs an entropy-coded weight, reads it back and compares it in 11 ns, codes it in 3 ns and hashes 1.6 GB a second
([speed.md](speed.md))."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A version of the package whose time is modelled.

    Args:
        kernels: Context in which the pretended card has the kernels of this state.
        compiles: Whether loops over columns run inside kernels; sweep and descent multiply there, too.
        moments: What multiplies for the moments.
    """

    kernels: Callable[[], AbstractContextManager[None]]
    compiles: bool
    moments: str


STATES = {
    "before": State(kernels=nullcontext, compiles=False, moments="float32"),
    "now": State(kernels=interpreted, compiles=True, moments="bfloat16"),
}


def clock_of(gpu: Gpu) -> Callable[[], Counts]:
    """Return a function that returns what was asked of a card so far."""

    def clock() -> Counts:
        total = gpu.total
        sent = total.to_device_bytes + total.to_host_bytes
        return np.array([total.launches, total.synchronizations + total.waiting, sent], dtype=float)

    return clock


def problem(out: int, columns: int) -> tuple[Tensor, Moments]:
    """Return random weights of a layer on the card, and moments of its inputs."""
    g = torch.Generator().manual_seed(0)
    Z = torch.randn(columns, 64, generator=g, dtype=torch.float64) / 8

    def of(noise: float, dtype: torch.dtype) -> Moments:
        H = torch.eye(columns, dtype=torch.float64) + Z @ Z.T
        C = H + noise * torch.randn(columns, 8, generator=g, dtype=torch.float64) @ Z.T[:8]
        alive = torch.ones(columns, dtype=torch.bool)
        return Moments(
            H=Pretend(H.to(dtype), 0), C=Pretend(C.to(dtype), 0), tokens=4 * columns, alive=Pretend(alive, 0)
        )

    rows = [Pretend(torch.randn(64, columns, generator=g), 0) for _ in range(2)]
    held_out = replace(of(0.01, torch.float32), tokens=columns)
    extra = Extra(X_hat=rows[0], X=rows[1])
    return Pretend(torch.randn(out, columns, generator=g), 0), replace(
        of(0.01, torch.float64), held_out=held_out, extra=extra
    )


@contextmanager
def divided() -> Iterator[None]:
    """Divide the sizes of the package's own blocks and strips, so that a smaller layer has as many of them."""
    with ExitStack() as ends:
        for names, by in ((SIDES, SCALE), (AREAS, SCALE**2)):
            for module, constants in names.items():
                for name in constants:
                    ends.enter_context(mock.patch.object(module, name, getattr(module, name) // by))
        host, card = kernels.CPU, kernels.GPU
        host = replace(host, cholesky=host.cholesky // SCALE)
        card = replace(
            card,
            cholesky=card.cholesky // SCALE,
            strip_rows=card.strip_rows // SCALE,
            numbers=card.numbers // SCALE**2,
        )
        ends.enter_context(mock.patch.multiple(kernels, CPU=host, GPU=card))
        yield


@cache
def of_layer(mode: str, state: str, out: int, columns: int) -> tuple[list[dict[str, Counts]], Counter[str]]:
    """Return the counts of two layers of one stage by part, and how often each part ran in the second.

    Args:
        mode: Key of `MODES`.
        state: Key of `STATES`, or "divided": with sizes divided, and kernels of the CPU for the loops over columns.
        out, columns: Shape of the layers.
    """
    found = []
    scheme = Recipe.from_spellings(**MODES[mode] | ({} if "rate" in MODES[mode] else {"group_size": "auto"})).scheme
    kernels = STATES[state].kernels if state in STATES else compiled
    with pretended() as gpu, kernels(), divided() if state == "divided" else nullcontext():
        W, statistics = problem(out, columns)
        inputs, storage = LayerInput.of(statistics), StepStorage(torch.float16)
        for _ in range(2):
            with Sections(clock_of(gpu)) as sections:
                target = corrected(W, inputs, scheme)
                rows = solve_layer("a layer", W, target, inputs, LayerPlan(scheme=scheme), storage)
                joined([rows], inputs, scheme, name="a layer")
            found.append(sections.spent)
    return found, sections.calls


def layer(mode: str, state: str, out: int, columns: int, first: bool) -> dict[str, Counts]:
    """Return the counts of a layer of any shape by part; `first` of its stage."""
    nothing = np.zeros(3)
    counted = of_layer(mode, "divided", out // SCALE, columns // SCALE)[0][not first]
    whole = np.array([1, 1, SCALE**2])
    parts = {part: nothing if part in LOOPS else counted.get(part, nothing) * whole for part in PARTS}
    small, large = (of_layer(mode, state, STRIP, n)[0][not first] for n in NARROWS)
    x = (columns - NARROWS[0]) / (NARROWS[1] - NARROWS[0])
    for part in LOOPS:
        if part in small:
            parts[part] = ((1 - x) * small[part] + x * large[part]) * np.array([1, 1, out / STRIP])
    with STATES[state].kernels():
        at_once = max(1, KERNELS.get(KIND, torch_kernels)().beam_bytes // (12 * BEAM * columns))
    parts["k-best"] = parts["k-best"] * -(-out // at_once)
    return parts


def small(hidden: int) -> Shape:
    """Return the shape of a block that is counted."""
    return Shape(hidden=hidden, intermediate=hidden, heads=2, keys=1, head=hidden // 2, blocks=1)


def inputs_of(shape: Shape) -> int:
    """Return the sum of the inputs of the groups of a block."""
    return sum(group.inputs for group in shape.groups)


@cache
def of_block(mode: str, hidden: int, samples: int) -> dict[str, Counts]:
    """Return the counts of a whole run of one small block."""
    with tempfile.TemporaryDirectory() as folder, pretended() as gpu, compiled():
        build(Path(folder) / "model", small(hidden))
        tokens = tokens_of(Text(samples=samples, seqlen=SEQLEN))
        with Sections(clock_of(gpu)) as sections:
            nearplane.quantize(
                Path(folder) / "model", Path(folder) / "out", device="pretend:0", calibration=tokens, **MODES[mode]
            )
    return sections.spent


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run decides for a card, for one block.

    Args:
        passes: Forward passes.
        probe, backward: Multiplications of the probe and of the backward pass.
        turns: Batches that pass the block for the probe.
        batches: Batches of the backward pass.
        fits: Whether the bound of its memory is below the size of the card.
    """

    passes: float
    probe: float = 0.0
    turns: float = 0.0
    backward: float = 0.0
    batches: float = 0.0
    fits: bool = True


@cache
def plan_of(name: str, mode: str, size: int) -> Plan:
    """Return what a run of a model plans on a card with `size` GB, all for one block."""
    text, shape = Text(), MODELS[f"Llama-3.1-{name}"]
    with tempfile.TemporaryDirectory() as place:
        hidden, intermediate, heads, blocks = FOLDERS[name]
        model = open_zeros(Path(place) / "whole", hidden, intermediate, heads, blocks)
        narrow = open_zeros(Path(place) / "narrow", hidden, intermediate, heads, 1, NARROW)
        looks = looks_of(model, narrow, text.seqlen)
        extra = (text.all - text.fitted) // text.seqlen
        fitted, others = (torch.zeros(count, text.seqlen, dtype=torch.int64) for count in (text.samples, extra))
        windows = Windows(seqlen=text.seqlen, fitted=fitted, extra=others)
        shapes = shapes_of(model, resolved(model, Recipe.from_spellings(**MODES[mode])), windows, looks, GPU)
    assert shapes is not None, "the block runs all its layers"
    memory = size * 10**9
    usual = MemorySetting(batch=default_batch(text.seqlen), room=memory // PAUSED_DIVISOR, device=GPU)
    tried = ([bound(shapes, each, 0, "device")] for each in settings(shapes, usual, batches=False))
    (chosen,), exceeding = choose(tried, {"device": memory})
    paused = len(waits(shapes, shapes.blocks[0], chosen.setting))
    before = np.cumsum([0] + [group.weights for group in shape.groups])[:-1] / shape.weights  # of a pass, at each stage
    passes = 2 * (1 + float(sum(before[paused:])))
    plain = multiplications(replace(shapes, choosing=None, backward=0))
    backward = multiplications(replace(shapes, choosing=None)) - plain
    probe = multiplications(replace(shapes, backward=0)) - plain
    planned = Plan(passes=passes, fits=exceeding is None, backward=backward / blocks, batches=shapes.backward / 2048)
    if (probed := shapes.choosing) is None:
        return planned
    return replace(planned, probe=probe / blocks, turns=probed.seen / PROBED)


def counts(shape: Shape, mode: str, state: str, plan: Plan) -> dict[str, Counts]:
    """Return the counts of one block by part."""
    found = dict.fromkeys(PARTS, np.zeros(3))
    for group in shape.groups:
        for number, out in enumerate(group.outs):
            for part, each in layer(mode, state, out, group.inputs, first=not number).items():
                found[part] = found[part] + group.experts * each
    one, other = (small(hidden) for hidden in HIDDEN)
    few, many, wide, wide_many = (of_block(mode, h, s) for h in HIDDEN for s in SAMPLES)
    batches = (SAMPLES[1] - SAMPLES[0]) / 8
    for part in ("forwards", "moments"):
        slope, fixed = (many[part] - few[part]) / batches, few[part] - (many[part] - few[part]) / batches * COUNTED
        if part == "moments":
            more = (wide_many[part] - wide[part]) / batches - slope
            slope = slope + more * (inputs_of(shape) - inputs_of(one)) / (inputs_of(other) - inputs_of(one))
        found[part] = (slope * Text().all / BATCH_TOKENS + fixed) * np.array([1, 1, 0])
    forward = (many["forwards"] - few["forwards"]) / batches / 2 * np.array([1, 1, 0])  # of one network
    found["forwards"] = found["forwards"] * plan.passes / 2
    for part in ("sending", "packing", "writing", "coding"):
        sent = (wide[part][2] - few[part][2]) / (other.weights - one.weights) if part in few else 0.0
        found[part] = np.array([*few.get(part, np.zeros(3))[:2], sent * shape.weights])
    if plan.turns:
        found["probe"] = forward * plan.turns
        for group in shape.groups:
            found["probe"] += 3 * len(group.outs) * layer(mode, state, group.outs[0], group.inputs, False)["sweep"] / 2
    found["backward pass"] = 3 * forward * plan.batches
    return found


def parts_of(name: str, mode: str, card: Card, state: str) -> dict[str, float]:
    """Return the modelled seconds of one block by part."""
    shape, version = MODELS[f"Llama-3.1-{name}"], STATES[state]
    plan = plan_of(name, mode, card.size)
    rate = "rate" in mode
    solves = of_layer(mode, "divided", 256, 256)[1]["k-best"] if rate else 2
    needed = work(shape, mode, Text(), solves=solves)
    needed["forwards"] = needed["forwards"].times(plan.passes / 2)
    needed["probe"] = Work(flop={"float32": 2 * plan.probe} | {"float64": 0.0})
    needed["backward pass"] = Work(flop={"bfloat16": 2 * plan.backward})
    counted = counts(shape, mode, state, plan)
    found = {}
    for part in PARTS:
        each, (launches, waiting, sent) = needed[part], counted[part]
        flop = dict(each.flop)
        if part == "moments":
            flop[version.moments] = flop.pop("bfloat16") + flop.get(version.moments, 0.0)
        if part in ("sweep", "descent") and version.compiles:
            flop["tf32x3"] = flop.pop("float32", 0.0)
        computed = sum(count / card.rates[kind] for kind, count in flop.items()) + each.bytes / card.memory
        computed += each.chain * card.step if version.compiles else 0.0
        found[part] = max(launches * card.start, computed) + waiting * card.wait
        found[part] += sent / card.link + each.disk / card.disk + each.host
    return found


def table(mode: str) -> list[str]:
    """Return the table of a mode: seconds of one block by part."""
    heads = [(name, card, state) for name in FOLDERS for card in CARDS for state in STATES]
    columns = {head: parts_of(head[0], mode, CARDS[head[1]], head[2]) for head in heads}
    lines = [f"| {mode}, one block | " + " | ".join(f"{name} {card} {state}" for name, card, state in heads) + " |"]
    lines.append("|---|" + "---:|" * len(heads))
    for part in (*PARTS, "all but reading"):
        cells = []
        for parts in columns.values():
            beside = {key: value for key, value in parts.items() if key != "reading"}  # read ahead by a thread
            seconds = sum(beside.values()) if part not in parts else parts[part]
            text = f"{seconds:.2f}" if seconds >= 0.005 else f"{seconds:.4f}" if seconds else ""
            cells.append(f"**{text}**" if part in beside and seconds == max(beside.values()) else text)
        if any(cells):
            lines.append(f"| {part} | {' | '.join(cells)} |")
    blocks = {name: FOLDERS[name][3] for name in FOLDERS}
    whole = [
        sum(v for k, v in parts.items() if k != "reading") * blocks[head[0]] / 60 for head, parts in columns.items()
    ]
    lines.append("| all blocks, minutes | " + " | ".join(f"{minutes:.1f}" for minutes in whole) + " |")
    for (name, card, state), parts in columns.items():
        if state == "now":
            largest = max((key for key in parts if key != "reading"), key=lambda key: parts[key])
            share = parts[largest] / sum(value for key, value in parts.items() if key != "reading")
            flop = work(MODELS[f"Llama-3.1-{name}"], mode, Text())[largest].flop.get("float32", 0.0)
            single = 100 * flop / CARDS[card].rates["float32"] / parts[largest]
            why = f", {single:.0f} % of it products in float32" if largest == "moments" else ""
            fits = "" if plan_of(name, mode, CARDS[card].size).fits else "; by its bound the run does not fit this card"
            lines.append(
                f"\n{name} on {card}: the largest part is {largest}, {100 * share:.0f} %{why} (modelled){fits}."
            )
    return lines


def launched(columns: int) -> list[str]:
    """Return the table of counted launches of one layer (columns x columns), by part and state."""
    lines = ["| launches of a layer | " + " | ".join(f"{mode}, {state}" for mode in MODES for state in STATES) + " |"]
    lines.append("|---|" + "---:|" * len(MODES) * len(STATES))
    found = [layer(mode, state, columns, columns, first=True) for mode in MODES for state in STATES]
    for part in PARTS:
        if any(each[part][0] for each in found):
            lines.append(f"| {part} | " + " | ".join(f"{max(0.0, each[part][0]):,.0f}" for each in found) + " |")
    lines.append("| all | " + " | ".join(f"{sum(each[0] for each in one.values()):,.0f}" for one in found) + " |")
    return lines


def constants() -> list[str]:
    """Return the table of what is assumed of each card."""
    kinds = list(CARDS["H100"].rates)
    rows = [(f"{kind}, TFLOP/s", [card.rates[kind] / 1e12 for card in CARDS.values()]) for kind in kinds]
    for name, unit, scale in (("memory", "GB/s", 1e9), ("link", "GB/s", 1e9), ("disk", "GB/s", 1e9), ("size", "GB", 1)):
        rows.append((f"{name}, {unit}", [getattr(card, name) / scale for card in CARDS.values()]))
    for name, what in (
        ("start", "start of an operation"),
        ("wait", "wait for a value"),
        ("step", "column of a kernel"),
    ):
        rows.append((f"{what}, us", [1e6 * getattr(card, name) for card in CARDS.values()]))
    lines = [f"| assumed | {' | '.join(CARDS)} |", "|---|" + "---:|" * len(CARDS)]
    return lines + [f"| {name} | {' | '.join(f'{each:g}' for each in values)} |" for name, values in rows]


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    words = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "src"]
    commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    print(f"# Modelled seconds of a block\n\n{INTRODUCTION.format(commit=commit)}\n\n## Seconds\n")
    for mode in MODES:
        print("\n".join(table(mode)), "\n", sep="", flush=True)
    print("## Launches of a layer\n\nOf 4096 x 4096 weights, the first of its stage; counted on small layers.\n")
    print("\n".join(launched(4096)))
    print("\n## Constants\n")
    print("\n".join([*constants(), "", ASSUMED]))


if __name__ == "__main__":
    main()
