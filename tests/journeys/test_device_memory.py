"""What fits on a GPU is known before work: states move to the host, blocks are streamed, too little is refused."""

from __future__ import annotations

import gc
import re

import pytest
import torch

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import contents
from nearplane import RecipeError
from pretended import pretended
from pretended_cards import Card
from pretended_kernels import compiled

GRID = dict(bits=4, group_size=16, rounds=0, polish=0)
TOKENS = torch.randint(96, (128, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = config_of("llama", num_hidden_layers=1, tie_word_embeddings=False, vocab_size=TEXT_VOCABULARY)
    random_model(config).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def test_hidden_states_on_the_host_leave_the_bytes_as_they_are(model, tmp_path, caplog):
    nearplane.quantize(model, tmp_path / "cpu", calibration=TOKENS, device="cpu", positions="equal", **GRID)
    with pretended() as gpu, compiled(), caplog.at_level("INFO", "nearplane"):
        nearplane.quantize(
            model,
            tmp_path / "gpu",
            calibration=TOKENS,
            device="pretend:0",
            device_memory="1.3MB",
            positions="equal",
            **GRID,
        )
    assert "hidden states between blocks lie on the host" in caplog.messages
    kept, sent = gpu.of("calibration/states_on_host.py"), gpu.of("system/device.py")
    within = gpu.of("calibration/rows.py")  # where batches are sent while a pass is watched
    assert sent.to_device + within.to_device >= 2 * 4 * len(TOKENS) // 8  # batches of both networks at four stages
    assert kept.to_host >= 2 * len(TOKENS) // 8
    assert kept.waiting == sent.waiting == 0
    assert gpu.peak < 1_300_000
    weights = [name for name in contents(tmp_path / "cpu") if name.endswith(".safetensors")]
    assert weights
    assert all((tmp_path / "gpu" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes() for name in weights)


def test_a_limit_that_is_too_small_is_refused_with_one_that_is_enough(model, tmp_path):
    with (
        pretended() as gpu,
        compiled(),
        pytest.raises(RecipeError, match="the most economical settings need") as refused,
    ):
        nearplane.quantize(
            model, tmp_path / "out", calibration=TOKENS, device="pretend:0", device_memory="200KB", **GRID
        )
    assert not (tmp_path / "out").exists()
    assert "lattice/" not in str(gpu.traffic)  # nothing was solved
    assert re.search(r"^--device-memory 200 KB is too small.*Use --device-memory 0\.01GB or fewer", str(refused.value))


def test_a_card_that_is_too_small_is_refused(model, tmp_path):
    with (
        pretended(memory=600_000),
        compiled(),
        pytest.raises(RecipeError, match=r"^\d+ KB of memory are free on pretend:0, which"),
    ):
        nearplane.quantize(model, tmp_path / "out", calibration=TOKENS, device="pretend:0", **GRID)


def test_the_memory_of_a_gpu_cannot_be_limited_on_the_cpu(model, tmp_path):
    with pytest.raises(RecipeError, match="--device-memory limits the memory on a GPU, but this run computes on cpu"):
        nearplane.quantize(model, tmp_path / "out", calibration=TOKENS, device="cpu", device_memory="1GB", **GRID)


def test_evaluate_streams_blocks_where_the_network_does_not_fit(tmp_path):
    model = tmp_path / "deep"
    random_model(config_of("llama", num_hidden_layers=24)).float().save_pretrained(model)
    size = 4 * sum(each.numel() for each in nearplane.load(model, device="cpu").parameters())
    windows = TOKENS[:4]
    expected = nearplane.evaluate(model, windows, device="cpu")
    with pretended(memory=size) as gpu, compiled():
        found = nearplane.evaluate(model, windows, device="pretend:0")
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-6)
    assert gpu.peak < size / 2


def on_the_host() -> dict[int, int]:
    """Return the bytes of all tensors on the CPU, by address."""
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return {each.data_ptr(): each.nbytes for each in found if each.device.type == "cpu"}


def test_a_network_is_never_whole_on_the_host_when_it_is_loaded_to_a_gpu(model, monkeypatch):
    """When its first weight is sent, few others have been read."""
    expected = dict(nearplane.load(model, device="cpu").named_parameters())
    size, hold = sum(4 * each.numel() for each in expected.values()), Card.hold
    before, read = on_the_host(), []

    def noted(card, tensor):
        hold(card, tensor)
        if not read:
            read.append(sum(size for address, size in on_the_host().items() if address not in before))

    monkeypatch.setattr(Card, "hold", noted)
    with pretended() as gpu, compiled():
        network = nearplane.load(model, device="pretend:0")
        assert {str(each.device) for each in network.parameters()} == {"pretend:0"}
        assert all(torch.equal(each.cpu(), expected[name]) for name, each in network.named_parameters())
        assert size <= gpu.peak < 1.1 * size
    assert read[0] < size / 2
