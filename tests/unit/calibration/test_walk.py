"""The walk as a context over stages: it waits for what is written, lets go of what it held, and bounds what experts take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nearplane
from alive import forget, living, paused
from families import VOCABULARY, config_of, random_model
from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.walk import Stage, walk
from nearplane.calibration.windows import Windows
from nearplane.lattice.moments import Moments
from nearplane.matrix.inputs import LayerInput
from nearplane.models.model import open_model
from nearplane.recipe.schemes import GridScheme
from nearplane.system.device import Device
from nightly import daily
from pretended import pretended

WINDOWS = Windows(seqlen=20, fitted=torch.randint(3, VOCABULARY, (14, 20), generator=torch.Generator().manual_seed(1)))
USUAL = MemorySetting.usual(20, Device(torch.device("cpu")))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    def saved(family: str, experts: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(family)
        changes = {"num_experts": experts, "num_local_experts": experts} if experts else {}
        random_model(config_of(family, **changes)).save_pretrained(folder)
        return folder

    return saved


def test_it_refuses_to_go_on_before_a_stage_is_written(folder_of: Callable[[str], Path]) -> None:
    recipe = nearplane.Recipe.from_spellings(bits=3, group_size=16)
    with walk(open_model(str(folder_of("llama"))), recipe, WINDOWS, USUAL) as stages:
        first = next(stages)
        assert [layer.name.rpartition(".")[2] for layer in first.layers] == ["q_proj", "k_proj", "v_proj"]
        with pytest.raises(RuntimeError, match=r"q_proj.* was not written\. Call stage\.write before the next stage"):
            next(stages)


def test_the_embeddings_moments_of_a_stopped_run_are_put_on_its_device(folder_of: Callable[[str], Path]) -> None:
    """They are read from disk, on the CPU."""
    recipe = nearplane.Recipe.from_spellings(rate=3.0, include_embeddings=True)
    model = open_model(str(folder_of("llama")), embeddings=True)
    assert model.embeddings is not None
    name, shape = model.embeddings.name, model.embeddings.layers[0].shape
    moments = {name: Moments(H=torch.eye(shape[1], dtype=torch.float64), tokens=280)}
    with pretended():
        setting = MemorySetting.usual(20, Device.named("pretend:0"))
        with walk(model, recipe, WINDOWS, setting, moments=moments) as stages:
            first = next(stages)
            assert [layer.name for layer in first.layers] == [name]
            assert first.inputs[0].moments.H.device == first.layers[0].read().device == torch.device("pretend:0")


def test_writing_lets_go_of_the_inputs_and_wants_the_values_of_every_layer(folder_of: Callable[[str], Path]) -> None:
    recipe = nearplane.Recipe.from_spellings(bits=3, group_size=16)
    with walk(open_model(str(folder_of("llama"))), recipe, WINDOWS, USUAL) as stages:
        stage = next(stages)
        assert living(Moments) != []
        with pytest.raises(ValueError, match="shorter"):
            stage.write([None])
        stage.write([None, torch.ones(stage.layers[1].shape), None])
        assert living(Moments) == []
        assert stage.layers[1].read().unique().tolist() == [1.0]


@pytest.mark.parametrize("broken", ["q_proj", "o_proj", "down_proj", None])
def test_nothing_is_left_after_an_error_or_a_break(broken: str | None, folder_of: Callable[[str], Path]) -> None:
    """No hook, no paused forward, no weight of a block; `None`: the loop is left without an error."""
    recipe = nearplane.Recipe.from_spellings(bits=3, group_size=16)
    model = open_model(str(folder_of("llama")))
    error = None
    try:
        with walk(model, recipe, WINDOWS, USUAL) as stages:
            for stage in stages:
                if broken is None and stage.blocks:
                    break
                if broken is not None and stage.layers and broken in stage.layers[0].name:
                    raise OSError("in the body")
                stage.write([None for _ in stage.layers])
    except OSError as raised:
        error = raised  # and with it every frame that it passed
    assert (error is None) == (broken is None)
    assert paused() == []
    assert [name for name, module in model.network.named_modules() if hooks(module)] == []
    assert all(parameter.is_meta for parameter in model.network.parameters())
    assert all(block.original is None and block.quantized is None for block in model.blocks)


def hooks(module: torch.nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


@pytest.mark.parametrize("together", daily([1, 2], [2]))
def test_experts_take_no_more_memory_however_many_there_are(
    together: int, folder_of: Callable[[str, int], Path]
) -> None:
    """The moments that are in memory while experts are solved are those of one chunk, for 4 experts and for 16."""
    forget()
    recipe = nearplane.Recipe.from_spellings(bits=3, group_size=16, correct=False)
    most = {}
    for experts in (4, 16):
        sizes, solved = [], 0
        with walk(
            open_model(str(folder_of("qwen3_moe", experts))), recipe, WINDOWS, replace(USUAL, experts=together)
        ) as stages:
            for stage in stages:
                if stage.layers and stage.layers[0].routed:
                    solved += len(stage.layers)
                    held = {id(moments.H): moments.H.nbytes for moments in living(Moments)}
                    sizes.append(sum(held.values()))
                stage.write([None for _ in stage.layers])
        assert solved == 3 * experts * len(open_model(str(folder_of("qwen3_moe", experts))).blocks)
        most[experts] = max(sizes)
    assert most[4] == most[16]


@pytest.mark.parametrize(("family", "by_block", "by_batch"), [("llama", 6, 0), ("qwen3_moe", 13, 4)])
def test_a_gpu_is_waited_for_once_a_stage_and_for_a_batch_only_by_experts(
    family: str, by_block: int, by_batch: int, folder_of: Callable[[str, int], Path]
) -> None:
    """For a block once each for its weights and its outputs, and once for the moments of each stage or expert.

    The routing of experts is read once a batch and network, and once a side what both networks share.
    """
    model, waits = open_model(str(folder_of(family))), {}
    assert len(model.blocks) == 3
    for batches in (3, 4):
        windows = replace(WINDOWS, fitted=WINDOWS.fitted.repeat(2, 1)[: 1 + 6 * (batches - 1)])
        with pretended() as gpu:
            setting = replace(MemorySetting.usual(20, Device.named("pretend:0")), batch=6)
            recipe = nearplane.Recipe.from_spellings(bits=3, group_size=16)
            with walk(model, recipe, windows, setting) as stages:
                for stage in stages:
                    if stage.blocks == 1:
                        gpu.forget()  # what is counted are two blocks
                    if stage.blocks == 3:
                        waits[batches] = gpu.total.synchronizations + gpu.total.to_host
                        assert gpu.total.waiting == gpu.total.to_host  # weights come while the CPU goes on
                        assert gpu.total.pinned > 0
                    stage.write([None for _ in stage.layers])
    assert waits[4] - waits[3] == 2 * by_batch
    assert waits[3] <= 2 * (by_block + 3 * by_batch)


@pytest.mark.parametrize("again", [False, True])
def test_a_stage_drops_what_targets_and_measurements_leave_behind(again: bool) -> None:
    """Factors after the last layer that shares them, and moments of layers that are not solved again."""
    g = torch.Generator().manual_seed(0)
    H, C = (x @ x.T / 40 for x in torch.randn(2, 8, 40, dtype=torch.float64, generator=g))
    known = Moments(H=H, C=C, tokens=40, held_out=Moments(H=H, C=C, tokens=8))
    first = LayerInput.of(known)
    stage, scheme = Stage(inputs=[first, LayerInput.of(known, first.shared)]), GridScheme(damp=0.02)
    W, shared = torch.randn(4, 8, dtype=torch.float64, generator=g), first.shared
    for number, kept in ((0, {(0.02, False), (0.02, True), (0.1, False)}), (1, {(0.1, False)})):
        sweep = first.factor_of_the_sweep(scheme)
        stage.target(number, W, scheme, again=again)
        assert {key[1:] for key in shared.factors} == kept
        assert stage.inputs[number].moments.corrects == again
        stage.measured(number)
        assert (first.factor_of_the_sweep(scheme) is sweep) == (number == 0)
