"""transformers loads native checkpoints, packed, as they were written; whatever is not as it was written does not load."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as of_transformers

import nearplane
from checkpoints import save_part_of_the_demo
from native_checkpoints import product_matrix, save_tiny, write_native
from nearplane.cli import app as cli
from nearplane.errors import FormatError, ModelError, NearplaneError, RecipeError
from nearplane.formats.layer_format import READ_WITH
from nearplane.formats.native import Native
from nearplane.formats.stored import read_dense
from nearplane.loading.coded_linear import CodedLinear
from nearplane.loading.dense_network import stored_transposed
from nearplane.loading.product_cpu import BLOCK
from nearplane.system.paths import INDEX
from nearplane.system.safetensors_files import checksum
from nearplane.verbs.evaluate import load_dense
from nightly import daily

CASES = {  # family, its changes, whether embeddings are quantized
    "llama": ("llama", {}, False),
    "llama-embeddings": ("llama", {"num_hidden_layers": 1}, True),
    "gpt2": ("gpt2", {}, False),
    "opt": ("opt", {"num_hidden_layers": 1}, False),
    "tied": ("qwen3", {"num_hidden_layers": 1}, False),
    "tied-embeddings": ("qwen3", {}, True),
    "moe": ("qwen3_moe", {"num_hidden_layers": 1}, False),
}
TOKENS = torch.tensor([[5, 9, 11, 40, 7, 3, 80, 22], [5, 6, 7, 8, 9, 10, 11, 12]])
Q = "model.layers.0.self_attn.q_proj"

nearplane.register()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the native checkpoint of a case; it is not to be changed."""
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            family, changes, embeddings = CASES[case]
            place = tmp_path_factory.mktemp(case)
            save_tiny(place / "source", family, **changes)
            write_native(place / "out", place / "source", embeddings=embeddings)
            made[case] = place / "out"
        return made[case]

    return make


@pytest.fixture
def copied(folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of the Llama checkpoint that may be damaged."""
    shutil.copytree(folder("llama"), tmp_path / "copy")
    return tmp_path / "copy"


def decoded(out: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a plain model with the weights that our own reader decodes."""
    config = AutoConfig.from_pretrained(out)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = dict(read_dense(out, transposed=stored_transposed(model)))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= set(model.all_tied_weights_keys)
    return model.eval()


def rewrite(out: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of every shard, and the index and its checksums with them."""
    index = json.loads((out / INDEX).read_text())
    index |= {"weight_map": {}, "checksums": {}}
    for shard in sorted(out.glob("*.safetensors")):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, shard.name)
        index["checksums"] |= {name: checksum(tensor) for name, tensor in tensors.items()}
    (out / INDEX).write_text(json.dumps(index))


def reconfigure(out: Path, **changes: Any) -> None:
    """Change config.json; a change that is a mapping is merged."""
    config = json.loads((out / "config.json").read_text())
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, Mapping) else value
    (out / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", daily(CASES, ["llama-embeddings", "gpt2", "tied", "moe"]))
def test_from_pretrained_computes_what_the_decoded_weights_do(folder: Callable[[str], Path], case: str) -> None:
    """In float64 to its last digits, in float32 as closely as another order of sums; experts run in float32 only."""
    out = folder(case)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        if case == "moe" and dtype == torch.float64:
            continue
        model, expected = AutoModelForCausalLM.from_pretrained(out, dtype=dtype), decoded(out, dtype)
        with torch.no_grad():
            ours, theirs = model(TOKENS).logits, expected(TOKENS).logits
        assert ours.dtype == dtype
        assert (ours - theirs).norm() < tolerance * theirs.norm()
    packed = [name for name, module in model.named_modules() if isinstance(module, CodedLinear)]
    assert len(packed) == len(model.config.quantization_config.modules) - ("embeddings" in case)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_generation_is_that_of_the_decoded_weights(folder: Callable[[str], Path], case: str) -> None:
    model, expected = nearplane.load(folder(case), dtype=torch.float32), decoded(folder(case))
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(TOKENS, **options), expected.generate(TOKENS, **options))
    assert model.generate(TOKENS[:1, :1], **options).shape[1] > 1


def test_weights_stay_packed(folder: Callable[[str], Path]) -> None:
    model = nearplane.load(folder("llama"))
    layer = model.get_submodule(Q)
    assert isinstance(layer, CodedLinear)
    assert not any("weight_coded" in name for name in model.state_dict())
    assert 4 * layer.words.numel() <= layer.in_features * BLOCK, "outputs fill one block"


@pytest.mark.parametrize("case", ["llama", "gpt2", "tied-embeddings"])
def test_unpacked_is_what_evaluation_decodes(folder: Callable[[str], Path], case: str) -> None:
    model, expected = nearplane.load(folder(case), dtype="float32", packed=False), decoded(folder(case))
    assert type(model) is type(expected)
    assert [type(module) for module in model.modules()] == [type(module) for module in expected.modules()]
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_bfloat16_loses_what_bfloat16_weights_lose(folder: Callable[[str], Path]) -> None:
    exact = decoded(folder("llama"))
    model, dense = nearplane.load(folder("llama"), dtype=torch.bfloat16), decoded(folder("llama"), torch.bfloat16)
    assert model.dtype == model.get_submodule(Q).bias.dtype == torch.bfloat16
    with torch.no_grad():
        wanted = exact(TOKENS).logits
        ours, theirs = ((part(TOKENS).logits - wanted).norm() for part in (model, dense))
    assert ours < 1.2 * theirs


def test_the_base_model_loads_too(folder: Callable[[str], Path]) -> None:
    model, whole = AutoModel.from_pretrained(folder("llama")), decoded(folder("llama"))
    with torch.no_grad():
        states = model(TOKENS).last_hidden_state
        torch.testing.assert_close(whole.lm_head(states), whole(TOKENS).logits, rtol=1e-5, atol=3e-5)


def test_names_without_the_prefix_of_the_base_model_load(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The original GPT-2 spells them so; config.json names modules of the model in any case."""
    shutil.copytree(folder("gpt2"), out := tmp_path / "out")

    def strip(tensors: dict[str, Tensor]) -> None:
        short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(short)

    rewrite(out, strip)
    expected = decoded(folder("gpt2")).state_dict()
    read = nearplane.load(out, packed=False).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    nearplane.export(out, tmp_path / "dense", dtype="float32")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def without_stops(out: Path) -> None:
    """Make a folder what folders were before one of their layers had a weight without elements."""
    dropped: list[str] = []

    def drop(tensors: dict[str, Tensor]) -> None:
        dropped.extend(name for name, tensor in tensors.items() if not tensor.numel())
        for name in dropped:
            tensors.pop(name, None)

    rewrite(out, drop)
    assert len(dropped) == 1


@pytest.mark.parametrize("case", CASES)
def test_transformers_without_the_registration_stops(
    folder: Callable[[str], Path],
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It skips quantization of a kind that it does not know, and would fill what it does not find with random numbers.

    Its error ends with what to do; where a config.json does not say it, as of folders of before, sizes do not match.
    """
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "nearplane")
    old = shutil.copytree(folder(case), tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    assert config.pop("transformers_weights") == READ_WITH
    (old / "config.json").write_text(json.dumps(config))
    for auto in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match=r"before from_pretrained: import nearplane; nearplane\.register\(\)$"):
            auto.from_pretrained(folder(case))
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            auto.from_pretrained(old)
    assert "Unknown quantization type, got nearplane" in caplog.text


@pytest.mark.parametrize("case", ["llama", "llama-embeddings", "tied-embeddings", "gpt2"])
def test_the_weight_without_elements_changes_nothing_for_readers(
    folder: Callable[[str], Path], case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Folders of before have none and load as ever; what has one loads without a warning."""
    old = shutil.copytree(folder(case), tmp_path / "old")
    without_stops(old)
    one, other = (AutoModelForCausalLM.from_pretrained(out).state_dict() for out in (folder(case), old))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "UNEXPECTED" not in caplog.text
    transposed = stored_transposed(decoded(old))
    one, other = (dict(read_dense(out, transposed=transposed)) for out in (folder(case), old))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert one.keys() == other.keys()


def test_a_weight_beside_its_codes_is_refused(copied: Path) -> None:
    """Two readers would load two models."""
    rewrite(
        copied, lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(32, 32)} if f"{Q}.weight" in tensors else {})
    )
    for read in (AutoModelForCausalLM.from_pretrained, nearplane.load, lambda out: dict(read_dense(out))):
        with pytest.raises(FormatError, match=r"q_proj\.weight"):
            read(copied)


@pytest.mark.parametrize("case", ["llama", "gpt2", "tied-embeddings"])
def test_a_packed_model_does_not_save_and_a_dequantized_one_does(
    folder: Callable[[str], Path], case: str, tmp_path: Path
) -> None:
    model = nearplane.load(folder(case), dtype=torch.float32)
    with pytest.raises(ValueError, match="nearplane and is not serializable"):
        model.save_pretrained(tmp_path / "packed")
    model.dequantize().save_pretrained(tmp_path / "dense")
    read, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), decoded(folder(case))
    assert not hasattr(read.config, "quantization_config")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "tied-embeddings"])
def test_an_export_is_a_plain_checkpoint(
    folder: Callable[[str], Path], tmp_path: Path, case: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("nearplane.system.shard_writer"), "PORTION", 20_000)
    monkeypatch.setattr("nearplane.system.shard_writer.MAX_FILE", 50_000)
    size = nearplane.export(folder(case), tmp_path / "dense", dtype=dtype)
    shards = sorted(path.name for path in (tmp_path / "dense").glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[-1] == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    read, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), decoded(folder(case))
    assert read.dtype == getattr(torch, dtype)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor.to(read.dtype)), name
    assert size == sum(tensor.nbytes for shard in shards for tensor in load_file(tmp_path / "dense" / shard).values())
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
    assert (tmp_path / "dense" / "tokenizer.json").read_text() == '{"of": "the source"}'
    assert not (tmp_path / "dense" / "nearplane.json").exists()


def test_the_command_line_exports(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(folder("llama")), str(tmp_path / "dense"), "--format", "safetensors"]
    monkeypatch.setattr(sys, "argv", ["nearplane", *words])
    monkeypatch.delenv("PYTEST_VERSION", raising=False)
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "bfloat16" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dense").dtype == torch.bfloat16


def test_an_export_gets_in_no_ones_way(folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = folder("llama")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(RecipeError, match="used exists and is not empty"):
        nearplane.export(out, tmp_path / "used")
    with pytest.raises(RecipeError, match="overlaps with"):
        nearplane.export(out, out / "dense")
    with pytest.raises(RecipeError, match="not quantized"):
        nearplane.export(out.parent / "source", tmp_path / "dense")
    with pytest.raises(ModelError, match="does not exist"):
        nearplane.export(tmp_path / "nowhere", tmp_path / "dense")
    with pytest.raises(RecipeError, match=r"--format is 'onnx', which export does not write; expected safetensors, "):
        nearplane.export(out, tmp_path / "dense", format="onnx")
    with pytest.raises(RecipeError, match=r"cannot be exported to gguf without .* is entropy-coded"):
        nearplane.export(out, tmp_path / "dense", format="gguf")
    assert not (tmp_path / "dense").exists()


def test_an_export_that_fails_does_not_load(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(copied, lambda tensors: tensors.update({n: t[:-3] for n, t in tensors.items() if "layers.2.mlp.down" in n}))
    monkeypatch.setattr(import_module("nearplane.system.shard_writer"), "PORTION", 50_000)
    with pytest.raises(FormatError, match=r"layers\.2\.mlp\.down_proj\.weight_coded"):
        nearplane.export(copied, tmp_path / "dense")
    assert not (tmp_path / "dense").exists()
    unfinished = tmp_path / "dense.unfinished"
    assert (unfinished / "INCOMPLETE").exists()
    with pytest.raises(NearplaneError, match="incomplete"):
        nearplane.load(unfinished)
    with pytest.raises((OSError, ValueError), match="dense"):
        AutoModelForCausalLM.from_pretrained(unfinished)


def truncated(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor[:-5] for name, tensor in tensors.items() if name == f"{Q}.weight_coded"})


def extended(tensors: dict[str, Tensor]) -> None:
    tensors.update(
        {name: torch.cat([tensor, tensor]) for name, tensor in tensors.items() if name == f"{Q}.weight_coded"}
    )


def emptied(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor[:0] for name, tensor in tensors.items() if name == f"{Q}.weight_coded"})


def missing(tensors: dict[str, Tensor]) -> None:
    tensors.pop(f"{Q}.weight_coded", None)


def renamed(tensors: dict[str, Tensor]) -> None:
    if f"{Q}.weight_coded" in tensors:
        tensors[f"{Q.replace('q_proj', 'x_proj')}.weight_coded"] = tensors.pop(f"{Q}.weight_coded")


def widened(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.int() for name, tensor in tensors.items() if name == f"{Q}.weight_coded"})


def of_another_shape(tensors: dict[str, Tensor]) -> None:
    if f"{Q}.weight_coded" in tensors:
        tensors |= Native().pack(Q, product_matrix(torch.randn(33, 32)), torch.float32)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (truncated, r"model\.safetensors: .*layers\.0\.self_attn\.q_proj\.weight_coded"),
        (extended, r"model\.safetensors: .*layers\.0\.self_attn\.q_proj\.weight_coded"),
        (emptied, r"model\.safetensors: .*layers\.0\.self_attn\.q_proj\.weight_coded"),
        (missing, r"has 20 tensors weight_coded, but config\.json names 21"),
        (renamed, r"layers\.0\.self_attn\.q_proj\.weight_coded was not loaded"),
        (widened, r"q_proj\.weight_coded is I32 .*expected bytes"),
        (of_another_shape, r"q_proj\.weight_coded is 33 x 32, but config\.json describes 32 x 32"),
    ],
)
def test_a_file_that_is_not_what_its_config_says_does_not_load(
    copied: Path, change: Callable[[dict[str, Tensor]], None], match: str
) -> None:
    rewrite(copied, change)
    for load in (AutoModelForCausalLM.from_pretrained, nearplane.load):
        with pytest.raises(FormatError, match=match):
            load(copied)


def claiming_more(tensors: dict[str, Tensor]) -> None:
    """A header that claims 2^20 x 1024 weights, and nothing behind it that could be decoded."""
    if (name := f"{Q}.weight_coded") in tensors:
        tensors[name] = torch.cat([tensors[name][:1], torch.tensor([0x80, 0x80, 0x40, 0x80, 8], dtype=torch.uint8)])
        tensors[name] = torch.cat([tensors[name], torch.zeros(1 << 17, dtype=torch.uint8)])


def claiming_more_elsewhere(tensors: dict[str, Tensor]) -> None:
    claiming_more(tensors)
    renamed(tensors)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            of_another_shape,
            r"model\.safetensors: .*q_proj\.weight_coded is 33 x 32, .* describes 32 x 32",
        ),
        (claiming_more, r"q_proj\.weight_coded is 1048576 x 1024, but config\.json describes 32 x 32"),
        (
            claiming_more_elsewhere,
            r"x_proj\.weight_coded is 1048576 x 1024, but .* no weight of more than 3,072 elements",
        ),
    ],
)
def test_a_matrix_that_the_model_does_not_expect_is_refused_before_it_is_decoded(
    copied: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], match: str
) -> None:
    rewrite(copied, change)
    for read in (lambda: load_dense(copied, torch.device("cpu")), lambda: nearplane.export(copied, tmp_path / "dense")):
        with pytest.raises(FormatError, match=match):
            read()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"quantization_config": {"format_version": 2}}, "format_version in quantization_config is 2.*reads 1"),
        ({"quantization_config": {"coder": "lzma"}}, "coder in quantization_config is 'lzma'"),
        ({"quantization_config": {"modules": []}}, "modules is .*list of names"),
        ({"quantization_config": {"modules": [Q]}}, "names 1 modules"),
        ({"quantization_config": {"modules": [f"{Q}.{i}" for i in range(21)]}}, r"q_proj\.0.*no matrix of that name"),
        ({"hidden_size": 64}, r"embed_tokens\.weight is \(96, 32\), but config\.json describes \(96, 64\)"),
        ({"intermediate_size": 96}, "96"),
        ({"num_hidden_layers": 2}, r"layers\.2.*no matrix of that name|have 21 quantized matrices, .* has 16"),
    ],
)
def test_a_config_that_is_not_its_files_does_not_load(copied: Path, changes: dict[str, Any], match: str) -> None:
    reconfigure(copied, **changes)
    for load in (AutoModelForCausalLM.from_pretrained, nearplane.load):
        with pytest.raises((FormatError, ModelError, RuntimeError), match=match):
            load(copied)


@pytest.mark.parametrize("way", ["index", "shard", "checksums", "weights"])
def test_an_incomplete_folder_does_not_load(copied: Path, way: str) -> None:
    index = json.loads((copied / INDEX).read_text())
    match way:
        case "index":
            (copied / INDEX).unlink()
        case "shard":
            (copied / "model.safetensors").unlink()
        case "checksums":
            del index["checksums"]
            (copied / INDEX).write_text(json.dumps(index))
        case "weights":
            del index["checksums"]["model.norm.weight"]
            (copied / INDEX).write_text(json.dumps(index))
    with pytest.raises((NearplaneError, OSError)):
        AutoModelForCausalLM.from_pretrained(copied)
    with pytest.raises(NearplaneError):
        nearplane.load(copied)


def test_flipped_bits_never_make_another_model(copied: Path) -> None:
    """Of the weights and the index; a flip may leave the model as it is, in the padding of a header or a size in the index."""
    expected = AutoModelForCausalLM.from_pretrained(copied).state_dict()
    files = [*sorted(copied.glob("*.safetensors")), copied / INDEX]
    chance, refused = random.Random(1), 0
    for _ in range(40):
        file = chance.choice(files)
        whole = file.read_bytes()
        end = len(whole) if chance.random() < 0.6 or file.suffix == ".json" else 8 + int.from_bytes(whole[:8], "little")
        damaged = bytearray(whole)
        damaged[chance.randrange(end)] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        try:
            read = AutoModelForCausalLM.from_pretrained(copied).state_dict()
        except (NearplaneError, SafetensorError, OSError, ValueError, KeyError, AttributeError, TypeError):
            refused += 1
        else:
            assert read.keys() == expected.keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
        file.write_bytes(whole)
    assert refused > 30


def test_a_damaged_matrix_does_not_load_whatever_the_index_says(copied: Path) -> None:
    """Every byte of a coded matrix is under a checksum of its own."""
    chance = random.Random(2)
    for _ in range(8):
        whole = {file: file.read_bytes() for file in copied.glob("model*")}
        hit = ""

        def flip(tensors: dict[str, Tensor]) -> None:
            nonlocal hit
            coded = sorted(name for name in tensors if name.endswith("weight_coded"))
            if not hit and coded:
                hit = chance.choice(coded)
                tensors[hit][chance.randrange(len(tensors[hit]))] ^= 1 << chance.randrange(8)

        rewrite(copied, flip)
        with pytest.raises(FormatError, match=re.escape(hit)):
            AutoModelForCausalLM.from_pretrained(copied)
        for file, content in whole.items():
            file.write_bytes(content)


def test_weights_are_not_sent_to_disk_nor_taken_from_elsewhere(folder: Callable[[str], Path]) -> None:
    out = folder("llama")
    with pytest.raises(ModelError, match="disk"):
        AutoModelForCausalLM.from_pretrained(out, device_map={"model": "cpu", "lm_head": "disk"})
    plain, config = decoded(out), AutoConfig.from_pretrained(out)
    with pytest.raises(ModelError, match="state_dict"):
        type(plain).from_pretrained(None, config=config, state_dict=plain.state_dict())


def test_a_device_map_is_followed(folder: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder("llama"), device_map="cpu")
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


def test_other_checkpoints_load_as_ever_and_nothing_is_no_model(folder: Callable[[str], Path], tmp_path: Path) -> None:
    assert type(nearplane.load(folder("llama").parent / "source").get_submodule(Q)) is torch.nn.Linear
    with pytest.raises(ModelError, match="does not exist"):
        nearplane.load(tmp_path / "nowhere")


@pytest.mark.parametrize("shown", [True, False])
def test_no_bars_of_others_are_shown_and_they_are_as_before(
    shown: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers shows them where it loads weights and where it saves an object; they mix with ours."""
    folder = save_part_of_the_demo(tmp_path / "model", blocks=1)
    (of_transformers.enable_progress_bar if shown else of_transformers.disable_progress_bar)()
    hidden = are_progress_bars_disabled()
    capfd.readouterr()
    try:
        model = nearplane.load(folder, device="cpu")
        tokens = torch.randint(64, (16, 64), generator=torch.Generator().manual_seed(0))
        nearplane.quantize(model, tmp_path / "out", calibration=tokens, bits=4, progress=False)
        assert "%|" not in capfd.readouterr().err
        assert of_transformers.is_progress_bar_enabled() is shown
        assert are_progress_bars_disabled() is hidden
    finally:
        of_transformers.enable_progress_bar()
