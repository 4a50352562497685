"""Forwards that pause at every stage show, bit for bit, what a pass for every stage shows; and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from alive import living, paused
from bare_blocks import Convolution, Experts, Tables, bare, both
from families import LLAMA, VOCABULARY, config_of, random_model
from nearplane.calibration.activations import Dealt, Stream, skeleton
from nearplane.calibration.one_forward import BlockForward, paused_stages
from nearplane.calibration.second_moments import sum_moments
from nearplane.calibration.stages import first_look
from nearplane.errors import CalibrationError
from nearplane.lattice.moments import Moments
from nearplane.models.model import Block, open_model
from nearplane.system.ranks import ONE_PROCESS
from nightly import daily, daily_of_several

MUCH, NOTHING = 1 << 40, 0  # bytes that paused activations may take
REPEATED = {  # why some families repeat passes
    "gptj": "the output of transformer.h.0.attn.out_proj is added to a tensor that is computed later",
    "gpt_neox": "the output of gpt_neox.layers.0.attention.dense is added to a tensor that is computed later",
}
GPTJ = dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, vocab_size=VOCABULARY)
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gpt2", "opt", "mixtral", "gptj", "gpt_neox", "deepseek_v3")
CHANGES = {
    "gptj": GPTJ,
    "wide": dict(intermediate_size=320),
    "deepseek_v3": LLAMA
    | dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16)
    | dict(
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        head_dim=4,
        num_key_value_heads=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}


@dataclass
class Seen:
    """What a way through blocks showed."""

    moments: dict[str, Moments] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)  # by block


def coarse(W: Tensor, moments: Moments) -> Tensor:
    """Return weights that depend on all that was seen, to the bit."""
    lost = 0 if moments.lost is None else moments.lost.mean()
    C = 0 if moments.C is None else moments.C.mean()
    return (W * 8).round() / 8 + (1e-3 * (moments.H.mean() + C + lost)).to(W)


def through(blocks: Iterable[Block], stream: Stream, room: int, dtype: torch.dtype = torch.float64) -> Seen:
    seen = Seen()
    for block in blocks:
        with block.on("cpu", dtype, original=stream.original is not None):
            pass_through(block, stream, room, seen)
    seen.states = [*stream.quantized, *(stream.original or [])]
    return seen


def pass_through(block: Block, stream: Stream, room: int, seen: Seen) -> None:
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    for module in (block.quantized, block.original):
        if module is not None:
            module.register_forward_pre_hook(count)
    with closing(BlockForward(block, stream, sequential=True, room=room)) as passage:
        for groups, shown in passage:
            for observed in sum_moments(groups, shown, stream):
                seen.moments |= observed.moments
                for layer in observed.layers:
                    layer.write(coarse(layer.read(), observed.moments[layer.name]))
                    seen.weights[layer.name] = layer.read()
        seen.repeated.append(passage.repeated)
    seen.forwards.append(forwards)


def equal(a: Seen, b: Seen) -> None:
    assert a.weights.keys() == b.weights.keys()
    assert all(torch.equal(W, b.weights[name]) for name, W in a.weights.items())
    assert all(torch.equal(x, y) for x, y in zip(a.states, b.states, strict=True))
    for name, moments in a.moments.items():
        for one, other in ((moments, b.moments[name]), (moments.held_out, b.moments[name].held_out)):
            for key in ("H", "C", "lost", "alive"):
                x, y = getattr(one, key, None), getattr(other, key, None)
                assert (x is None and y is None) or torch.equal(x, y), (name, key)
        x, y = moments.extra, b.moments[name].extra
        assert (x is None and y is None) or torch.equal(x.X_hat, y.X_hat)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to the folder of a model of two blocks."""
    folders: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            config = config_of(
                "llama" if family == "wide" else family, **CHANGES.get(family, {}) | dict(num_hidden_layers=2)
            )
            random_model(config).save_pretrained(folders[family])
        return folders[family]

    return of


def way(folder: Path, tokens: Tensor, room: int, *, correct: bool = True, dtype: torch.dtype = torch.float64) -> Seen:
    model = open_model(str(folder))
    stream = skeleton(model, tokens.split(2), device="cpu", dtype=dtype)
    stream.dealt = Dealt.among(
        ONE_PROCESS, stream.sizes[:2], stream.sizes[2:], []
    )  # two batches, and one window of its own that enters no sum
    if correct:
        both(stream)
    return through(model.blocks, stream, room, dtype)


@pytest.mark.parametrize("family", daily(FAMILIES, ["llama", "mixtral", "gptj"]))
def test_pausing_and_repeating_show_the_same_to_the_bit(
    family: str, folder_of: Callable[[str], Path], tokens: Tensor
) -> None:
    """Moments, weights made of them, and what enters the next block; also which blocks repeat, and what it costs."""
    dtype = torch.float32 if family in ("mixtral", "deepseek_v3") else torch.float64
    once, often = (way(folder_of(family), tokens, room, dtype=dtype) for room in (MUCH, NOTHING))
    equal(once, often)
    assert once.repeated[0] == REPEATED.get(family, "")
    if family not in REPEATED:
        assert once.repeated == ["", ""]
        assert once.forwards == [2 * 3 + 1] * 2  # three batches of each stream; one more finds the stages
    assert all(why.startswith("forward passes paused at ") for why in often.repeated) or family in REPEATED


@pytest.mark.parametrize(
    ("correct", "dtype"),
    daily_of_several(
        product([True, False], [torch.float32, torch.bfloat16]), [(True, torch.bfloat16), (False, torch.float32)]
    ),
)
def test_so_they_do_in_other_dtypes_and_without_correction(
    correct: bool, dtype: torch.dtype, folder_of: Callable[[str], Path], tokens: Tensor
) -> None:
    once, often = (way(folder_of("llama"), tokens, room, correct=correct, dtype=dtype) for room in (MUCH, NOTHING))
    equal(once, often)
    assert once.forwards == [(1 + correct) * 3 + 1] * 2


@pytest.mark.parametrize("module", [Convolution, Experts])
def test_so_they_do_on_convolutions_and_lists_of_experts(module: type[nn.Module]) -> None:
    """Experts that see some of the tokens repeat passes."""
    found, made = [], module()
    for room in (MUCH, NOTHING):
        block, stream = bare(made, *((2, 5, 5) if module is Convolution else (6, 4)))
        found.append(Seen())
        pass_through(block, stream, room, found[-1])
    equal(*found)
    assert found[0].repeated == ["block.experts.0.up receives only some of the tokens" if module is Experts else ""]
    assert not any(stream.calls)


class Gains(nn.Module):
    """A block with a parameter as large as the hidden states of one window, and what is computed of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.gains = nn.Parameter(torch.ones(6, 4, dtype=torch.float64), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * self.gains.exp().log()
        return self.second(self.first(hidden)) + hidden


class Stacked(nn.Module):
    """A block that multiplies the rows of some tokens by matrices of one parameter, as many times as the tokens ask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.experts = nn.Parameter(torch.ones(2, 4, 4, dtype=torch.float64) / 8, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for index, weight in enumerate(self.experts):
            chosen = (hidden[..., 0] > 0) == index
            out[chosen] = hidden[chosen] @ weight
        hidden = hidden + out
        return self.second(self.first(hidden)) + hidden


def test_what_is_computed_of_parameters_alone_is_not_taken_for_hidden_states() -> None:
    """It has as many elements as the hidden states of the first batch, a window, and not as those of the others."""
    found, made = [], Gains()
    for room in (MUCH, NOTHING):
        block, stream = bare(made, 6, 4)
        stream.quantized[0], stream.original[0] = stream.quantized[0][:1], stream.original[0][:1]
        stream.sizes[0] = 1
        found.append(Seen())
        pass_through(block, stream, room, found[-1])
    equal(*found)
    assert found[0].repeated == [""]


def test_blocks_whose_functions_depend_on_the_tokens_repeat_passes() -> None:
    """All tokens of the first batch go to one expert, those of the other to both: more results there have their size."""
    found, made = [], Stacked()
    for room in (MUCH, NOTHING):
        block, stream = bare(made, 6, 4)
        for states in (stream.quantized, stream.original):
            states[0] = states[0].clone()
            states[0][..., 0] = 1
        found.append(Seen())
        pass_through(block, stream, room, found[-1])
    equal(*found)
    assert found[0].repeated == ["block runs experts inside one module, depending on the tokens"]


def test_stages_that_fit_pause_and_the_others_repeat(folder_of: Callable[[str], Path], tokens: Tensor) -> None:
    """With less and less room fewer stages pause, and down is the first that does not."""
    model = open_model(str(folder_of("wide")))
    often = way(folder_of("wide"), tokens, NOTHING)
    stream = both(skeleton(model, tokens.split(2), device="cpu", dtype=torch.float64))
    with model.blocks[0].on("cpu", torch.float64) as block:
        look = first_look(block, stream)
    plans = {
        plan[0]: (room, plan[1]) for room in range(0, 1 << 19, 1 << 9) for plan in [paused_stages(look, stream, room)]
    }
    assert {0, 3, 4} <= plans.keys()
    assert plans[4][1] == ""
    assert plans[3][1].startswith("forward passes paused at model.layers.0.mlp.down_proj would need ")
    some = way(folder_of("wide"), tokens, plans[3][0])
    equal(some, often)
    assert some.repeated[0] == plans[3][1]


def test_what_pauses_takes_what_was_foretold(folder_of: Callable[[str], Path]) -> None:
    """Of every stage but the last, where the original's forwards go on."""
    tokens = torch.randint(3, VOCABULARY, (16, 48), generator=torch.Generator().manual_seed(1))
    model = open_model(str(folder_of("llama")))
    stream = both(skeleton(model, tokens.split(2), device="cpu", dtype=torch.float64))
    with model.blocks[0].on("cpu", torch.float64) as block:
        look = first_look(block, stream)
        foretold = [look.entered[group[0].name][0].needed * 8 * 2 for group in look.groups]
        held = [x.untyped_storage() for x in living(Tensor)]  # so that nothing takes their memory
        before = {storage.data_ptr() for storage in held}
        found = []
        with closing(BlockForward(block, stream, sequential=True, room=MUCH)) as passage:
            for _, shown in passage:
                for rows in shown:
                    del rows
                storages = {s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, living(Tensor))}
                found.append(sum(size for place, size in storages.items() if place not in before))
    for expected, measured in list(zip(foretold, found, strict=True))[:-1]:
        assert 0.85 < measured / expected <= 1.01  # what else is in memory moves it by some per cent


def test_tables_that_serve_all_batches_are_not_dropped() -> None:
    block, stream = bare(Tables(), 5, 4)
    expected = [block.original(states) for states in stream.quantized]
    block.original.made = None
    with closing(BlockForward(block, stream, sequential=True, room=MUCH)) as passage:
        for _, shown in passage:
            for rows in shown:
                del rows
    for found in (stream.original, stream.quantized):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("stage", daily([0, 2, 3], [2]))
def test_an_error_in_a_solve_leaves_no_forward_paused(
    stage: int, folder_of: Callable[[str], Path], tokens: Tensor
) -> None:
    """While the error, and so every frame that it passed, is still held."""
    model = open_model(str(folder_of("llama")))
    stream = both(skeleton(model, tokens.split(2), device="cpu", dtype=torch.float64))
    with model.blocks[0].on("cpu", torch.float64) as block:
        error, modules = None, (block.original, block.quantized)
        try:
            with closing(BlockForward(block, stream, sequential=True, room=MUCH)) as passage:
                for index, (_, shown) in enumerate(passage):
                    list(shown)
                    assert len(paused()) == 3 * (1 if index == 3 else 2)
                    assert (block.original is None) == (index == 3)  # its stream has passed the block
                    if index == stage:
                        raise RuntimeError("in a solve")
        except RuntimeError as raised:
            error = raised
        assert str(error) == "in a solve"
        assert paused() == []
        before = [hook for module in modules for each in module.modules()
                  for hook in (*each._forward_pre_hooks, *each._forward_hooks)]  # fmt: skip
        assert before == []


class Fickle(nn.Module):
    """A block that skips a layer, or adds something else, where the tokens say so."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.which = which

    def forward(self, hidden: Tensor) -> Tensor:
        odd = float(hidden[0, 0, 0]) < 0
        more = self.first(hidden)
        if odd and self.which == "layers":
            return more
        if odd and self.which == "additions":
            return self.second(more) + 2 * hidden
        return self.second(more) + hidden


@pytest.mark.parametrize("which", ["layers", "additions"])
def test_a_block_that_does_not_do_the_same_for_all_tokens_is_refused(which: str) -> None:
    block, stream = bare(Fickle(which), 6, 4)
    for states in (stream.quantized, stream.original):
        for batch, sign in enumerate((1.0, -1.0)):
            states[batch] = states[batch].clone()
            states[batch][0, 0, 0] = sign
    with pytest.raises(
        CalibrationError, match=r"block ran different layers or additions on two batches .*true_sequential=False"
    ):
        pass_through(block, stream, MUCH, Seen())
    assert paused() == []
