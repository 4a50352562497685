"""The losses on extra windows: of text that follows what was fitted, measured against the outputs of the original network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.calibration.texts import read_windows
from nearplane.calibration.windows import calibration_windows
from nearplane.demo import CALIBRATION
from nearplane.models.model import open_model
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.record.summary import summary
from nearplane.system.device import Device
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.verify import verify

DOWN = "model.layers.0.mlp.down_proj"
FAST = {
    "calibration": str(CALIBRATION), "samples": 12, "seqlen": 32, "group_size": 16, "bits": 3, "positions": "equal",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tiny random Llama with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=1, hidden_size=32, intermediate_size=96)
    random_model(config).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "checkpoint"
    return out, nearplane.quantize(model, out, **FAST)


def windows_of(model: Path, **words: object) -> tuple[int, int]:
    recipe = Recipe(calibration=Calibration(**{"calibration": str(CALIBRATION), "seqlen": 32} | words))
    found = calibration_windows(open_model(str(model)), recipe, None, Device.named("cpu"))
    return found.count, found.extra_count


def cut(model: Path, folder: Path, windows: int) -> str:
    """Write a text of so many windows of 32 tokens and a few tokens more."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(CALIBRATION.read_text()[:20_000], add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(ids[: 32 * windows + 7])
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) // 32 == windows
    path = folder / f"{windows}.txt"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("samples", "split"), [(1, (1, 1)), (7, (7, 1)), (16, (16, 2)), (31, (31, 3)), (64, (64, 8))])
def test_an_eighth_more_windows_are_read_at_least_one(model, samples, split):
    assert windows_of(model, samples=samples) == split


@pytest.mark.parametrize(
    ("windows", "split"), [(1, (1, 0)), (2, (1, 1)), (9, (8, 1)), (16, (15, 1)), (17, (16, 1)), (18, (16, 2)), (20, (16, 2))]
)  # fmt: skip
def test_of_a_shorter_text_the_last_ninth_is_extra_and_a_single_window_is_fitted(model, tmp_path, windows, split):
    assert windows_of(model, samples=16, calibration=cut(model, tmp_path, windows)) == split


def test_the_weights_do_not_depend_on_what_the_extra_windows_say(model, quantized, tmp_path):
    """Another text behind the fitted windows: the same tensors, other losses there."""
    _, record = quantized
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(CALIBRATION.read_text()[:20_000], add_special_tokens=False)["input_ids"]
    text = tmp_path / "text.txt"
    text.write_text(tokenizer.decode(ids[: 12 * 32]) + "\n" + CALIBRATION.read_text()[50_000:60_000])
    assert torch.equal(
        read_windows(tokenizer, text, samples=12, seqlen=32),
        read_windows(tokenizer, CALIBRATION, samples=12, seqlen=32),
    )
    other = nearplane.quantize(model, tmp_path / "other", **FAST | {"calibration": str(text)})
    assert (other.windows, other.extra_windows) == (record.windows, record.extra_windows) == (12, 1)
    assert other.text != record.text
    for a, b in zip(record.layers, other.layers, strict=True):
        assert (a.checksum, a.loss, a.nearest_loss) == (b.checksum, b.loss, b.nearest_loss)
        assert a.extra_loss != b.extra_loss


def test_they_are_the_errors_of_outputs_against_the_original_network(model, quantized):
    """Both networks run whole on the extra windows, with hooks on every layer."""
    out, record = quantized
    windows = read_windows(AutoTokenizer.from_pretrained(model), CALIBRATION, samples=13, seqlen=32)[12:]
    outputs = [of_layers(load_dense(folder, torch.device("cpu"))[0], windows, record) for folder in (model, out)]
    for layer in record.layers:
        y, y_hat = (each[layer.name] for each in outputs)
        lost = float((y - y_hat).square().mean()) / layer.in_features
        assert layer.extra_loss == pytest.approx(lost, rel=1e-4)
        assert layer.extra_relative_loss == pytest.approx(lost * layer.in_features / float(y.square().mean()), rel=1e-4)
        assert layer.extra_nearest_loss != layer.extra_loss


def of_layers(network: torch.nn.Module, windows: torch.Tensor, record: RunRecord) -> dict[str, torch.Tensor]:
    """Return the outputs of all quantized layers by name, without their biases."""
    seen: dict[str, torch.Tensor] = {}

    def after(name: str, module: torch.nn.Linear, output: torch.Tensor) -> None:
        seen[name] = output.double() - (0 if module.bias is None else module.bias.double())

    for layer in record.layers:
        module = network.get_submodule(layer.name)
        module.register_forward_hook(lambda module, args, output, name=layer.name: after(name, module, output))
    with torch.no_grad():
        network(windows)
    return seen


def test_with_few_tokens_they_say_what_the_losses_on_what_was_fitted_hide(model, quantized, tmp_path):
    """One token for each input: a small loss where it was fitted, a large one elsewhere; and nearest looks bad there alone."""
    few = nearplane.quantize(model, tmp_path / "out", **FAST | {"samples": 3})

    def mean(record: RunRecord, value: str) -> float:
        return sum(getattr(layer, value) for layer in record.layers) / len(record.layers)

    def times(layer: LayerRecord) -> tuple[float, float]:
        return layer.nearest_loss / layer.loss, layer.extra_nearest_loss / layer.extra_loss

    enough = quantized[1]
    assert mean(few, "relative_loss") < mean(enough, "relative_loss")
    assert mean(few, "extra_relative_loss") > mean(enough, "extra_relative_loss")
    assert sum(fitted > extra for fitted, extra in map(times, few.layers)) >= 7


def test_verify_measures_them_again(model, quantized):
    out, record = quantized
    assert all(layer.extra_loss is not None for layer in record.layers)
    found = verify(out, against=str(model))
    assert found.faults == ()
    assert found.measured


def test_of_a_single_window_they_are_none_and_the_summary_says_so(model, tmp_path):
    text = {"calibration": cut(model, tmp_path, 2), "samples": 1, "seqlen": 64, "ignore": ["down_proj"]}
    record = nearplane.quantize(model, tmp_path / "out", **FAST | text)
    assert (record.windows, record.extra_windows) == (1, 0)
    assert all(
        layer.extra_loss is layer.extra_relative_loss is layer.extra_nearest_loss is None for layer in record.layers
    )
    assert any("as the text has no further windows" in line for line in summary(record, tmp_path))
    assert verify(tmp_path / "out", against=str(model)).faults == ()


def test_pruned_neurons_are_told_from_inputs_that_the_original_never_uses(model, tmp_path):
    """Rows of up that are so small that a low rate rounds all of them to 0, and rows that are 0 in the original."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    up = tensors[DOWN.replace("down", "up") + ".weight"]
    up[:5] *= 1e-4
    up[5:7] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    words = {key: value for key, value in FAST.items() if key not in ("bits", "group_size")} | {
        "rate": 2.0,
        "allocate": "uniform",
    }
    record = nearplane.quantize(folder, tmp_path / "out", **words, rows="equal")
    down = next(layer for layer in record.layers if layer.name == DOWN)
    assert (down.dead, down.pruned) == (7, 5)
    said = list(summary(record, tmp_path))
    assert (
        "5 neurons were pruned: quantization made their outputs 0 for every calibration token, and "
        "the weights for them were set to 0: "
        f"{DOWN} (5 of 96)"
    ) in said
    assert (
        "2 inputs were 0 for every calibration token, also in the original model; the weights for them were set to 0: "
        f"{DOWN} (2 of 96)"
    ) in said
    assert verify(tmp_path / "out", against=str(folder)).faults == ()
