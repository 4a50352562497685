"""Language models with a vision tower go the whole way: calibrated on text, read back with images, the tower as it was.

Plain transformers loads fixed grids as the model that was there, `nearplane.load` rates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM

import nearplane
from nearplane.errors import NearplaneError, RecipeError
from nearplane.models.model import open_model
from nightly import daily
from seeing import HEARING, KINDS, WITH_IMAGES, logits, save_seeing, seen

WINDOWS = torch.randint(3, 85, (16, 32), generator=torch.Generator().manual_seed(1))
TOKENS = {"input_ids": WINDOWS[:2, :12]}
GRID, RATE = dict(bits=4, group_size=16, allocate="uniform"), dict(rate=3, allocate="uniform")
FEW = ["llava", "qwen2_vl"]  # of `make test`
LLAMA4 = pytest.mark.xfail(
    transformers.__version__ == "5.24.0",
    raises=AttributeError,
    strict=True,
    reason="its forward pass in transformers 5.24.0 reads image_outputs of a result that has none, whoever calls it",
)
OTHERS = [kind for kind in KINDS if kind not in ("llama4", "mllama", "qwen3_vl_moe", "kimi_k25")]
LOADED = [*daily(OTHERS, FEW), pytest.param("llama4", marks=[pytest.mark.nightly, LLAMA4])]


def dense(out: Path) -> Any:
    """Return our own decoded weights in a plain float32 model."""
    if not (out.parent / "dense").exists():
        nearplane.export(out, out.parent / "dense", dtype="float32")
    return AutoModelForImageTextToText.from_pretrained(out.parent / "dense", dtype=torch.float32)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("kind", LOADED)
def test_four_bits_load_in_plain_transformers(kind: str, tmp_path: Path) -> None:
    """With a vision tower of more blocks than the language model has, which stays as it is bit for bit."""
    source, out = save_seeing(tmp_path / "source", kind), tmp_path / "out"
    record = nearplane.quantize(source, out, calibration=WINDOWS, device="cpu", **GRID)
    loaded, expected = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32), dense(out)
    original = AutoModelForImageTextToText.from_pretrained(source)
    assert type(loaded) is type(original)
    (stack,) = open_model(str(source)).stacks
    assert {layer.name.rpartition(".")[0].startswith(f"{stack}.") for layer in record.layers} == {True}
    for given in (TOKENS, *([seen(kind)] if kind in WITH_IMAGES else [])):
        assert torch.equal(logits(loaded, given), logits(expected, given))
        assert not torch.equal(logits(loaded, given), logits(original, given))
    left = [name for name, reason in record.skipped if reason.startswith("outside the stack of blocks")]
    assert any("visi" in name or "visual" in name for name in left), left
    before, after = tensors(source), tensors(out)
    kept = before.keys() & after.keys()
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert {name for name in before if "visi" in name or "visual" in name} <= kept
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert second.pop("quantization_config")
    assert first == second


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*OTHERS, pytest.param("llama4", marks=LLAMA4)])
def test_rates_load_in_nearplane(kind: str, tmp_path: Path) -> None:
    source, out = save_seeing(tmp_path / "source", kind), tmp_path / "out"
    nearplane.quantize(source, out, calibration=WINDOWS, device="cpu", **RATE)
    expected = dense(out)
    plain = nearplane.load(out, dtype="float32", device="cpu", packed=False)
    packed = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    for given in (TOKENS, *([seen(kind)] if kind in WITH_IMAGES else [])):
        wanted = logits(expected, given)
        assert torch.equal(logits(plain, given), wanted)
        assert (logits(packed, given) - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.nightly
def test_experts_beside_a_tower_that_transformers_merges_are_for_other_programs(tmp_path: Path) -> None:
    """It splits the tower's joined matrices, and decodes all that it converts or none of it."""
    source, out = save_seeing(tmp_path / "source", "kimi_k25"), tmp_path / "out"
    with pytest.raises(RecipeError, match=r"makes model\.vision_tower.* of.*--ignore 'mlp.*--runtime nearplane"):
        nearplane.quantize(source, out, calibration=WINDOWS, device="cpu", **GRID)
    record = nearplane.quantize(source, out, calibration=WINDOWS, device="cpu", runtime="nearplane", **GRID)
    assert any("experts" in layer.name for layer in record.layers)
    loaded = nearplane.load(out, dtype="float32", device="cpu", packed=False)
    given = {"input_ids": WINDOWS[:2]}
    assert torch.equal(logits(loaded, given), logits(dense(out), given))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(HEARING))
@pytest.mark.parametrize("how", [GRID, RATE])
def test_what_hears_is_treated_alike(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    """transformers has such models among those from one sequence to another, without a decoder behind the encoder."""
    source, out = save_seeing(tmp_path / "source", kind), tmp_path / "out"
    record = nearplane.quantize(source, out, calibration=WINDOWS, device="cpu", **how)
    nearplane.export(out, tmp_path / "dense", dtype="float32")
    loaded = nearplane.load(out, dtype="float32", device="cpu", packed=False)
    expected = logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "dense"), TOKENS)
    assert torch.equal(logits(loaded, TOKENS), expected)
    assert len(record.layers) == 14
    assert any("audio_tower" in name for name, _ in record.skipped)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model."""
    return save_seeing(tmp_path_factory.mktemp("seeing") / "llava", "llava")


@pytest.mark.nightly
def test_losses_are_measured_again_and_text_is_evaluated(llava: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    nearplane.quantize(llava, out, calibration=WINDOWS, device="cpu", bits=4, group_size=16)
    found = nearplane.verify(out, against=llava, calibration=WINDOWS)
    assert (found.faults, found.measured) == ((), True)
    measured = nearplane.evaluate(out, WINDOWS[:4], against=llava, device="cpu")
    given = {"input_ids": WINDOWS[:4]}
    both = [logits(model, given).log_softmax(-1)[:, :-1] for model in (nearplane.load(llava, device="cpu"), dense(out))]
    kl = (both[0].exp() * (both[0] - both[1])).sum(-1).mean()
    assert measured.kl == pytest.approx(float(kl), rel=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.evaluation.predictions.MAX_MEMORY_SHARE", 0.0)
        streamed = nearplane.evaluate(out, WINDOWS[:4], against=llava, device="cpu")
    assert streamed.kl == pytest.approx(measured.kl, rel=1e-4)


def test_the_tower_is_not_read_while_text_passes(llava: Path) -> None:
    model = open_model(str(llava))
    stand_ins = [torch.nn.Identity() for _ in model.blocks]
    with model.around(stand_ins, torch.device("cpu"), torch.float32) as network:
        memory = {name: tensor.untyped_storage().nbytes() for name, tensor in network.named_parameters()}
        assert memory["model.language_model.embed_tokens.weight"] == 96 * 32 * 4
        assert {size for name, size in memory.items() if name.startswith("model.vision_tower")} == {4}


@pytest.mark.nightly
def test_experts_in_one_turned_tensor_need_to_be_left_in_grids(tmp_path: Path) -> None:
    """Qwen3-VL's checkpoints have them as such, and transformers knows no others; its class reads them at rates."""
    source = save_seeing(tmp_path / "source", "qwen3_vl_moe")
    with pytest.raises(
        NearplaneError, match=r"which no file contains\. Leave .* --ignore 'mlp\\\.experts\\b', .* or use --rate"
    ):
        nearplane.quantize(source, tmp_path / "out", calibration=WINDOWS, device="cpu", **GRID)
    record = nearplane.quantize(source, tmp_path / "out", calibration=WINDOWS, device="cpu", **RATE)
    assert len(record.layers) == 2 * (4 + 3 * 4)
    loaded = nearplane.load(tmp_path / "out", dtype="float32", device="cpu", packed=False)
    assert torch.equal(logits(loaded, TOKENS), logits(dense(tmp_path / "out"), TOKENS))


def test_blocks_that_run_on_images_alone_are_refused(tmp_path: Path) -> None:
    source = save_seeing(tmp_path / "source", "mllama")
    with pytest.raises(NearplaneError, match=r"layers\.1 did not run|runs out of order"):
        nearplane.quantize(source, tmp_path / "out", calibration=WINDOWS, device="cpu", **GRID)
    assert not (tmp_path / "out").exists()


@LLAMA4
@pytest.mark.nightly
def test_buffers_keep_their_dtype_when_weights_are_decoded(tmp_path: Path) -> None:
    """Frequencies in float32 and complex ones: Llama 4's tower has such."""
    source, out = save_seeing(tmp_path / "source", "llama4"), tmp_path / "out"
    nearplane.quantize(source, out, calibration=WINDOWS, device="cpu", **RATE)
    loaded = nearplane.load(out, dtype="bfloat16", device="cpu", packed=False)
    plain = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in loaded.named_buffers()} == {
        name: tensor.dtype for name, tensor in plain.named_buffers()
    }
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
