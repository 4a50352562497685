"""Parts of a run on a GPU: `benchmarks/gpu.py` measures them, `gpu_model.py` computes their times without a card.

A part is a set of functions of the package. `Sections` says what a run spends in each: seconds, or launches and copies.
`work` gives the multiplications and bytes of each part of a block by formula, from the shapes of the layers alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import torch

from nearplane.calibration.one_forward import BATCH_TOKENS
from nearplane.calibration.windows import extra_windows
from nearplane.recipe.thresholds import MAX_CERTIFIED_INPUTS

ROOT = Path(__file__).resolve().parents[2]
MODES: dict[str, dict[str, Any]] = {"4 bits": {"bits": 4, "group_size": 128}, "rate 3": {"rate": 3.0}}
BEAM = 8  # candidates of a row at a rate
CANDIDATES, CANDIDATE_FLOP = 80, 12  # of the search for steps; operations a weight and candidate
RESIDENT_ROWS = 8448  # of a loop over columns on a card at a time: 2 strips of 32 rows on each of 132 processors
PACKED, CODED = 11e-9, 3e-9  # seconds of a thread of the host for a weight: packed and read back; coded for its size
HASHED = 1.6e9  # bytes of a file that one thread hashes in a second
CODE_BYTES = 4  # of a code on its way to the host
PACKING_BYTES = 60  # read and written on the card for a weight: joined to words of int32, taken apart again, compared
REST = "rest"
FUNCTIONS = {  # part: its functions; what one calls that belongs to another part counts for that part
    "reading": ("models.model:Block.read",),
    "sending": ("models.conversion:Weights.fill",),
    "forwards": (
        "calibration.one_forward:BlockForward._continue",
        "calibration.separate_passes:rows_by_batch",
        "calibration.stages:first_look",
    ),
    "moments": ("calibration.second_moments:_Sums.add", "calibration.second_moments:_Sums.observed"),
    "factor": ("lattice.factor:factorize",),
    "target": ("matrix.inputs:corrected",),
    "search of steps": ("lattice.scale:Steps.grid", "lattice.superblock_fit:fit_blocks"),
    "sweep": ("lattice.solvers:sweep_planes",),
    "descent": ("lattice.polish:descend",),
    "k-best": ("lattice.beam:k_best",),
    "certificate": ("matrix.certificate:measured_rows", "matrix.certificate:record_of", "matrix.to_rate:scaled"),
    "coding": ("coding.blob:encode", "coding.blob:size"),
    "packing": ("formats.container:Container.add",),
    "writing": ("formats.container:Container.close_block", "formats.container:Container.seal"),
    "backward pass": ("calibration.sensitivity:sensitivity",),
    "probe": ("planning.estimates:estimated",),
}
Flop = dict[str, float]
WHOLE = ("probe", "backward pass")  # with everything that they call
PARTS = (*FUNCTIONS, REST)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model with blocks of one kind.

    Args:
        hidden, intermediate: Sizes of hidden states and of the hidden layer of the MLP, or of one expert.
        heads, keys, head: Attention heads, heads of keys, size of a head.
        blocks: Number of blocks.
        experts, active: Experts of a block, and those that a token reaches; 1: no experts.
    """

    hidden: int
    intermediate: int
    heads: int
    keys: int
    head: int
    blocks: int
    experts: int = 1
    active: int = 1

    @property
    def groups(self) -> list[Group]:
        """Layers of a block that share an input, in order of execution."""
        attention, key = self.heads * self.head, self.keys * self.head
        share = self.active / self.experts
        return [
            Group(self.hidden, (attention, key, key)),
            Group(attention, (self.hidden,), adds=True),
            Group(self.hidden, (self.intermediate, self.intermediate), experts=self.experts, share=share),
            Group(self.intermediate, (self.hidden,), adds=self.experts == 1, experts=self.experts, share=share),
        ]

    @property
    def weights(self) -> int:
        """Weights of all layers of a block."""
        return sum(group.experts * group.weights for group in self.groups)

    @property
    def multiplied(self) -> float:
        """Weights that a token is multiplied with."""
        return sum(group.experts * group.share * group.weights for group in self.groups)


@dataclass(frozen=True)
class Group:
    """Layers that share an input.

    Args:
        inputs: Number of inputs.
        outs: Number of outputs of each layer.
        adds: Whether outputs are added to a residual stream, so that `lost` is summed instead of C.
        experts: Number of such groups in a block.
        share: Share of the tokens that reaches one of them.
    """

    inputs: int
    outs: tuple[int, ...]
    adds: bool = False
    experts: int = 1
    share: float = 1.0

    @property
    def weights(self) -> int:
        """Weights of all layers."""
        return self.inputs * sum(self.outs)

    @property
    def lost(self) -> bool:
        """Whether `lost` is summed: see `_lost_outputs` in `calibration/second_moments.py`."""
        return self.adds or (len(self.outs) == 1 and self.outs[0] <= self.inputs)


MODELS = {
    "Qwen3-0.6B": Shape(hidden=1024, intermediate=3072, heads=16, keys=8, head=128, blocks=28),
    "Llama-3.1-8B": Shape(hidden=4096, intermediate=14336, heads=32, keys=8, head=128, blocks=32),
    "Llama-3.1-70B": Shape(hidden=8192, intermediate=28672, heads=64, keys=8, head=128, blocks=80),
    "Qwen3-30B-A3B": Shape(hidden=2048, intermediate=768, heads=32, keys=4, head=128, blocks=48, experts=128, active=8),
}
TINY = Shape(hidden=64, intermediate=64, heads=2, keys=1, head=32, blocks=2)


@dataclass(frozen=True, kw_only=True)
class Text:
    """Calibration windows of a run."""

    samples: int = 256
    seqlen: int = 2048

    @property
    def fitted(self) -> int:
        """Tokens of the windows that enter the moments."""
        return self.samples * self.seqlen

    @property
    def all(self) -> int:
        """Tokens of these windows and of the extra ones."""
        return self.fitted + extra_windows(self.samples, self.seqlen) * self.seqlen

    @property
    def batches(self) -> int:
        """Batches of the windows that enter the moments."""
        return -(-self.fitted // max(BATCH_TOKENS, self.seqlen))


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a part of one block asks of a card.

    Args:
        flop: Operations of products by what is multiplied: bfloat16, float32, float64, and vector for what is no
            product. A multiplication with its addition is two.
        bytes: Bytes read and written in the memory of the card, at least.
        sent: Bytes between host and card.
        disk: Bytes read from or written to the disk.
        chain: Columns one after another in kernels that loop over them, as often as rows do not fit the card at a time;
            a column of a beam is four.
        host: Seconds of one thread on the host.
    """

    flop: Flop = field(default_factory=dict)
    bytes: float = 0.0
    sent: float = 0.0
    disk: float = 0.0
    chain: float = 0.0
    host: float = 0.0

    def __add__(self, other: Work) -> Work:
        names = ("bytes", "sent", "disk", "chain", "host")
        return Work(
            flop=added(self.flop, other.flop), **{name: getattr(self, name) + getattr(other, name) for name in names}
        )

    def times(self, number: float) -> Work:
        """Return the work of so many times this one."""
        flop = {kind: number * each for kind, each in self.flop.items()}
        names = ("bytes", "sent", "disk", "chain", "host")
        return Work(flop=flop, **{name: number * getattr(self, name) for name in names})


def added(one: Flop, other: Flop) -> Flop:
    """Return the sums of two counts by kind."""
    return {kind: one.get(kind, 0.0) + other.get(kind, 0.0) for kind in (one | other)}


def work(shape: Shape, mode: str, text: Text, *, solves: float = 2.0, descents: float = 4.0) -> dict[str, Work]:
    """Return the work of each part of a block by formula.

    Args:
        shape: Model.
        mode: Key of `MODES`.
        text: Calibration windows.
        solves: Sweeps of a layer on a grid, attempts of k-best of a layer at a rate.
        descents: Passes of coordinate descent of a layer on a grid.
    """
    parts: dict[str, Work] = dict.fromkeys(PARTS, Work())
    rate = mode.startswith("rate")
    attention = shape.heads * shape.head
    activations = 2 * text.all * 2 * (16 * shape.hidden + 6 * shape.intermediate * shape.active + 4 * attention)
    passes = dict(bfloat16=2 * 2 * text.all * (shape.multiplied + text.seqlen * attention))
    parts["reading"] = Work(disk=2 * shape.weights)
    parts["sending"] = Work(sent=2 * shape.weights, bytes=10 * shape.weights)
    parts["forwards"] = Work(flop=passes, bytes=activations)
    for group in shape.groups:
        for part, each in _of_group(group, text, rate, solves, descents).items():
            parts[part] = parts[part] + each.times(group.experts)
    written = shape.weights * (3 / 8 if rate else 0.52)
    parts["writing"] = Work(disk=written, host=written / HASHED)
    if rate:
        forward = passes["bfloat16"] / 2
        probed = 3 * max(shape.hidden, shape.intermediate) + 4 * text.seqlen  # see planning/parts.py
        parts["probe"] = Work(flop=dict(float32=forward * probed / text.all))
        parts["backward pass"] = Work(flop=dict(bfloat16=3 * forward / text.all * min(text.all, 8 * text.seqlen)))
    return parts


def _of_group(group: Group, text: Text, rate: bool, solves: float, descents: float) -> dict[str, Work]:
    """Return the work of one group: sums over its inputs, one factor for all layers, and the layers themselves."""
    n, tokens = group.inputs, group.share * text.fitted
    square, cube = n * n, n**3
    batches, out = max(1, text.batches), sum(group.outs)
    lost = out if group.lost else 0
    crossed = square * (len(group.outs) > bool(lost))
    moments = Work(
        flop=dict(bfloat16=tokens * (square + 2 * crossed), float32=4 * tokens * n * lost),
        bytes=batches * 24 * (square / 2 + crossed + n * lost) + 4 * tokens * n,  # a float32 product, added in float64
    )
    factor = Work(flop=dict(float64=cube / 3, float32=2 * cube / 3), bytes=24 * square)
    weighed = 2 * square * out  # operations of a product of all weights with a square matrix
    target = Work(flop=dict(float32=weighed + weighed * (not lost)), bytes=20 * n * out)
    single = dict(float64=weighed / 2 * (1 + rate) + 2 * weighed * rate, float32=weighed)
    limit = dict(float64=cube / 3, float32=len(group.outs) * cube / 3) if n <= MAX_CERTIFIED_INPUTS else dict()
    certificate = Work(flop=added(single, limit), bytes=110 * n * out)
    layers = len(group.outs)
    steps = n * sum(-(-each // RESIDENT_ROWS) for each in group.outs)
    found = {"moments": moments, "factor": factor, "target": target, "certificate": certificate}
    if rate:
        estimates = 6 * 512 / max(512, out / layers)  # sweeps of some rows, and one of all
        swept = 1 + min(1.0, estimates)
        found["sweep"] = Work(
            flop=dict(float32=swept * weighed / 2), bytes=swept * 16 * n * out, chain=n * layers + steps
        )
        beams = dict(float32=solves * BEAM * weighed / 2, vector=solves * BEAM * n * out * 60)
        found["k-best"] = Work(flop=beams, bytes=solves * BEAM * n * out * (n / 8 + 24), chain=4 * solves * steps)
        found["coding"] = Work(host=(1 + solves) * CODED * n * out, sent=(3 + solves) * CODE_BYTES * n * out)
        found["packing"] = Work(sent=CODE_BYTES * n * out, host=PACKED * n * out)
        return found
    found["search of steps"] = Work(flop=dict(vector=CANDIDATES * CANDIDATE_FLOP * n * out), bytes=4 * n * out)
    found["sweep"] = Work(
        flop=dict(float32=solves * weighed / 2),
        bytes=solves * (16 * n * out + 4 * layers * square),
        chain=solves * steps,
    )
    found["descent"] = Work(
        flop=dict(float32=descents * (weighed + 2 * 256 * n * out)),
        bytes=descents * (16 * n * out + 4 * layers * square),
        chain=descents * steps,
    )
    found["packing"] = Work(bytes=PACKING_BYTES * n * out, sent=0.52 * n * out)
    return found


class Sections:
    """What a run spends in each part: `with Sections(clock) as sections: ...` then `sections.spent`.

    Args:
        clock: Function that returns what was spent so far, for example seconds: an array of any length.

    Attributes:
        spent: What each part spent, without the parts that it calls.
        calls: How often functions of each part were called.
    """

    def __init__(self, clock: Callable[[], np.ndarray]) -> None:
        self._clock, self._ends, self._thread = clock, ExitStack(), threading.get_ident()
        self._part, self._open = REST, False
        self.spent: dict[str, np.ndarray] = {}
        self.calls = Counter[str]()

    def __enter__(self) -> Self:
        for part, places in FUNCTIONS.items():
            for place in places:
                self._replace(part, *place.split(":"))
        self._last, self._open = self._clock(), True
        return self

    def __exit__(self, *_: object) -> None:
        self._to("")
        self._open = False
        self._ends.close()

    def _replace(self, part: str, module: str, path: str) -> None:
        """Put a function that counts in place of one of the package, wherever it is known by name."""
        owner: Any = importlib.import_module(f"nearplane.{module}")
        *classes, name = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        function = getattr(owner, name)
        counting = self._counting(part, function)
        owners = [owner] if classes else [each for key, each in sys.modules.items() if key.startswith("nearplane")]
        for place in owners:
            for known in [known for known, value in vars(place).items() if value is function]:
                self._ends.enter_context(mock.patch.object(place, known, counting))

    def _counting(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def aside() -> bool:
            return not self._open or self._part in WHOLE or threading.get_ident() != self._thread

        def call(*args: Any, **keywords: Any) -> Any:
            if aside():
                return function(*args, **keywords)
            self.calls[part] += 1
            before = self._to(part)
            try:
                return function(*args, **keywords)
            finally:
                self._to(before)

        def each(*args: Any, **keywords: Any) -> Iterator[Any]:
            values = function(*args, **keywords)
            following = self._counting(part, functools.partial(next, values, REST))
            try:
                while (value := following()) is not REST:
                    yield value
            finally:
                values.close()

        return each if inspect.isgeneratorfunction(function) else call

    def _to(self, part: str) -> str:
        """Begin another part; return the one that was."""
        if part == self._part:
            return part
        now = self._clock()
        self.spent[self._part] = self.spent.get(self._part, 0.0) + now - self._last
        before, self._part = self._part, part
        self._last = self._clock()
        return before


def build(folder: Path, shape: Shape, blocks: int = 1, seqlen: int = 2048) -> None:
    """Write a random model with `blocks` blocks of a shape, in bfloat16, whose tokens are those of `stages.py`."""
    from stages import LETTERS, save_tokenizer
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    torch.manual_seed(0)
    common: dict[str, Any] = dict(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=blocks, head_dim=shape.head,
        num_attention_heads=shape.heads, num_key_value_heads=shape.keys, vocab_size=LETTERS, tie_word_embeddings=True,
        max_position_embeddings=max(seqlen, 512), dtype="bfloat16",
    )  # fmt: skip
    if shape.experts > 1:
        routed = dict(num_experts=shape.experts, num_experts_per_tok=shape.active)
        config: Any = Qwen3MoeConfig(**common, **routed, moe_intermediate_size=shape.intermediate)
    else:
        config = LlamaConfig(**common)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    save_tokenizer(str(folder))


def tokens_of(text: Text) -> torch.Tensor:
    """Return (windows, seqlen) random tokens, with those of the extra windows."""
    from stages import LETTERS

    windows = text.samples + extra_windows(text.samples, text.seqlen)
    return torch.randint(0, LETTERS, (windows, text.seqlen), generator=torch.Generator().manual_seed(0))
