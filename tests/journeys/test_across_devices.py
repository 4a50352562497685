"""What a GPU began it goes on with, what one device wrote another verifies, and blocks run in the dtype they should."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import nearplane
from families import TEXT_VOCABULARY, config_of, random_model
from nearplane import CalibrationError, RecipeError
from nearplane.record.record_file import read_record
from nearplane.tuning import loop
from pretended import pretended
from pretended_cards import Runtime
from pretended_kernels import compiled

WINDOWS = torch.randint(0, TEXT_VOCABULARY, (14, 24), generator=torch.Generator().manual_seed(0))
GRID = dict(bits=4, group_size=16)
SMALL = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
CODES = dict(bits=2, group_size=16, symmetric=False, format="gptq_v2")


def saved(folder, dtype):
    """Save a llama of one block, with random weights in a dtype."""
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=1, **SMALL)
    random_model(config).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "llama", torch.float32)


@pytest.fixture
def every_step(monkeypatch):
    """Keep every step and block, however quick it is."""
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)


class StoppedError(Exception):
    """What ends a run in these tests."""


def stopped(*args, **words):
    raise StoppedError


def stopped_after_a_step(run):
    """Run until one step is done."""
    step = loop._Run.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "step", lambda self, batch: stopped() if self.done else step(self, batch))
        with pytest.raises(StoppedError):
            run()


def assert_goes_on(run):
    """Stop a run into a folder on a GPU after a step of training; it goes on as one that was not stopped."""
    with pretended(), compiled():
        stopped_after_a_step(lambda: run("out"))
        record = run("out")
        assert checksums(record) == checksums(run("not stopped"))
    assert record.device == "pretend:0, Pretended GPU"


def checksums(record):
    return [layer.checksum for layer in record.layers]


@pytest.mark.nightly
def test_a_tuning_on_a_gpu_goes_on_with_the_states_on_disk(model, tmp_path, monkeypatch, every_step):
    """The best one is that after the first step, as the second step is not measured."""
    look = loop._Run.look
    monkeypatch.setattr(loop._Run, "look", lambda self: look(self) if self.done == 1 else None)
    nearplane.quantize(model, tmp_path / "solved", calibration=WINDOWS, device="cpu", **CODES)

    def run(out):
        words = dict(against=model, calibration=WINDOWS, steps=2, device="pretend:0")
        return nearplane.tune(tmp_path / "solved", tmp_path / out, **words)

    assert_goes_on(run)


@pytest.mark.nightly
@pytest.mark.parametrize("way", [GRID, CODES, dict(rate=2.0, allocate="uniform")])
def test_quantizing_and_tuning_on_a_gpu_go_on_together(model, tmp_path, every_step, way):
    """Though runs are told the name of the GPU and not only its kind."""

    def run(out):
        words = dict(calibration=WINDOWS, tune="network", device="pretend:0")
        return nearplane.quantize(model, tmp_path / out, **words, **way)

    assert_goes_on(run)


@pytest.mark.nightly
def test_a_run_that_stopped_before_its_first_block_goes_on_on_another_gpu_of_the_same_model(
    model, tmp_path, monkeypatch, every_step
):
    """The moments of the embeddings were read from disk; another model of GPU would compute other digits."""
    words = dict(rate=3.0, include_embeddings=True, include_head=True, calibration=WINDOWS)
    expected, out = nearplane.quantize(model, tmp_path / "cpu", device="cpu", **words), tmp_path / "out"
    with pretended(cards=2), compiled():
        with monkeypatch.context() as patch:
            patch.setattr("nearplane.verbs.quantize.solve_stage", stopped)
            with pytest.raises(StoppedError):
                nearplane.quantize(model, out, device="pretend:0", **words)
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "get_device_name", lambda self, device: "Other GPU")
            with pytest.raises(RecipeError, match=r"device was .*Pretended GPU.*, is .*Other GPU"):
                nearplane.quantize(model, out, device="pretend:0", **words)
        record = nearplane.quantize(model, out, device="pretend:1", **words)
    assert record.device == "pretend:0, Pretended GPU"  # where the run began
    assert checksums(record) == checksums(expected)


def test_a_checkpoint_from_the_cpu_is_verified_on_a_gpu_in_float32_to_one_percent(tmp_path):
    """Its blocks would run there in bfloat16."""
    source, out = saved(tmp_path / "model", torch.bfloat16), tmp_path / "out"
    nearplane.quantize(source, out, device="cpu", calibration=WINDOWS, **GRID)
    with pretended(), compiled():
        found = nearplane.verify(out, against=source, calibration=WINDOWS, device="pretend:0")
    assert found.faults == ()
    assert found.summary() == (
        "4 files and 7 layers checked: no faults; every loss was measured again on pretend:0, Pretended GPU in float32, "
        "not on cpu, and may differ by 1 %; numbers of clipped codes and losses of rounding to nearest were not compared"
    )
    assert (
        nearplane.verify(out, against=source, calibration=WINDOWS).summary().endswith("every loss was measured again")
    )


def test_a_checkpoint_from_a_gpu_is_verified_in_its_dtype_there_exactly_and_without_it_coarsely(tmp_path):
    source, out = saved(tmp_path / "model", torch.bfloat16), tmp_path / "out"
    with pretended(), compiled():
        record = nearplane.quantize(source, out, device="pretend:0", calibration=WINDOWS, **GRID)
        there = nearplane.verify(out, against=source, calibration=WINDOWS)
    assert (record.device, record.compute_dtype) == ("pretend:0, Pretended GPU", "bfloat16")
    assert there.faults == ()
    assert there.summary().endswith("every loss was measured again")
    elsewhere = nearplane.verify(out, against=source, calibration=WINDOWS, device="cpu")
    assert elsewhere.faults == ()
    assert "on cpu in bfloat16, not on pretend:0, Pretended GPU, and may differ by 50 %" in elsewhere.summary()


def test_a_model_in_float16_whose_activations_overflow_runs_in_float32(tmp_path, caplog):
    source = saved(tmp_path / "model", torch.float16)
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    for layer in (network.model.layers[0].mlp.gate_proj, network.model.layers[0].mlp.up_proj):
        layer.weight.data *= 2000
    network.save_pretrained(source)
    with pytest.raises(CalibrationError, match=r"NaN or Inf.* use --compute-dtype float32"):
        nearplane.quantize(
            source, tmp_path / "half", compute_dtype="float16", device="cpu", calibration=WINDOWS, **GRID
        )
    with pretended(), compiled(), caplog.at_level("INFO", "nearplane"):
        record = nearplane.quantize(source, tmp_path / "out", device="pretend:0", calibration=WINDOWS, **GRID)
    assert record.compute_dtype == read_record(tmp_path / "out").compute_dtype == "float32"
    assert "blocks run in float32, as they may overflow in float16; --compute-dtype float16 is faster" in caplog.text
