"""Models whose makers store weights in 8 or 4 bits: read as what they mean, whatever is done with them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import ModelError
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.record.record import read_record
from nearplane.system.fp8_mxfp4 import FOUR_BITS, WidenedReader, eight_bits, four_bits

SIZE = 48  # of a block: 64 and 128 are no multiples of it
TEXT = dict(calibration=str(CALIBRATION), samples=12, seqlen=40)


def in_eight_bits(W):
    """Store a matrix as its maker would: (codes, factors)."""
    rows, columns = (-(-side // SIZE) for side in W.shape)
    wide = torch.nn.functional.pad(W.float(), (0, columns * SIZE - W.shape[1], 0, rows * SIZE - W.shape[0]))
    largest = wide.view(rows, SIZE, columns, SIZE).abs().amax((1, 3))
    factors = largest / 448
    spread = factors.repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)[: W.shape[0], : W.shape[1]]
    return (W.float() / spread).to(torch.float8_e4m3fn), factors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return (a model stored in 8 bits, the same in bfloat16)."""
    place = tmp_path_factory.mktemp("models")
    config = config_of(
        "llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2, hidden_size=64, intermediate_size=128, head_dim=16
    )
    random_model(config).bfloat16().save_pretrained(place / "short")
    add_tokenizer(place / "short")
    shutil.copytree(place / "short", place / "wide")
    tensors, short = load_file(place / "short" / "model.safetensors"), {}
    wide = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            short[name] = tensor
            continue
        codes, factors = in_eight_bits(tensor)
        short |= {name: codes, f"{name}_scale_inv": factors}
        for i in range(0, tensor.shape[0], SIZE):
            for j in range(0, tensor.shape[1], SIZE):
                block = codes[i : i + SIZE, j : j + SIZE].float() * factors[i // SIZE, j // SIZE]
                wide[name][i : i + SIZE, j : j + SIZE] = block.bfloat16()
    save_file(short, place / "short" / "model.safetensors", {"format": "pt"})
    save_file(wide, place / "wide" / "model.safetensors", {"format": "pt"})
    config = json.loads((place / "short" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [SIZE, SIZE]
    }  # fmt: skip
    (place / "short" / "config.json").write_text(json.dumps(config))
    return place / "short", place / "wide"


@pytest.mark.parametrize(
    "words",
    [dict(bits=4, group_size=16, ignore=["layers.1"]), pytest.param(dict(grid="q4_0"), marks=pytest.mark.nightly)],
    ids=str,
)
def test_a_model_in_eight_bits_is_quantized_as_the_same_in_sixteen(folders, tmp_path, words):
    for name, folder in zip(("short", "wide"), folders, strict=True):
        nearplane.quantize(folder, tmp_path / name, **TEXT, **words)
    for path in (tmp_path / "wide").glob("model*"):
        if path.suffix == ".safetensors":
            found, wanted = load_file(tmp_path / "short" / path.name), load_file(path)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] != "fp8"
    record = read_record(tmp_path / "short")
    assert record.stored == "fp8"
    assert record.layers[0].loss == read_record(tmp_path / "wide").layers[0].loss
    assert not nearplane.verify(tmp_path / "short", against=folders[0], calibration=CALIBRATION).faults


def test_it_is_evaluated_as_the_same_in_sixteen_bits(folders, monkeypatch):
    short, wide = (nearplane.evaluate(folder, HELD_OUT, samples=4, seqlen=40) for folder in folders)
    assert short == wide
    monkeypatch.setattr("nearplane.system.device.free_memory", lambda: 10**6)  # block by block
    assert nearplane.evaluate(folders[0], HELD_OUT, samples=4, seqlen=40, against=folders[1]).kl == 0


def test_what_does_not_belong_together_is_refused(folders, tmp_path):
    broken = shutil.copytree(folders[0], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    for change, said in ((tensors[name][:-1], "expected one factor for every block"), (None, "is missing")):
        kept = {key: value for key, value in tensors.items() if key != name} | (
            {} if change is None else {name: change}
        )
        save_file(kept, broken / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=said):
            nearplane.quantize(broken, tmp_path / "out", bits=4, group_size=16, **TEXT)
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"already quantized with awq\. Pass the original"):
        nearplane.quantize(broken, tmp_path / "out", bits=4, group_size=16, **TEXT)


def test_factors_of_another_dtype_than_float8_are_not_left_out(folders, tmp_path):
    """Such a weight was read without its factors."""
    broken = shutil.copytree(folders[0], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if f"{name}_scale_inv" in tensors)
    tensors[name] = tensors[name].view(torch.float8_e4m3fnuz)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has factors, but is stored as F8_E4M3FNUZ; nearplane reads F8_E4M3\."):
        nearplane.evaluate(broken, HELD_OUT, samples=1, seqlen=40)


def test_factors_may_be_exponents_or_one_number():
    codes = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[120, 127], [130, 126], [127, 127]], dtype=torch.uint8)
    found = eight_bits(codes, exponents, (2, 4))
    assert found[4, 6] == codes[4, 6].float()
    assert found[0, 0] == codes[0, 0].float() / 128
    assert torch.equal(eight_bits(codes, torch.tensor(0.5), (2, 4)), (codes.float() / 2).bfloat16())


def test_four_bits_are_what_transformers_makes_of_them():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 6, 2, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(100, 140, (3, 6, 2), generator=generator, dtype=torch.uint8)
    found = four_bits(codes, exponents)
    assert found.shape == (3, 64, 6)
    assert torch.equal(found, convert_moe_packed_tensors(codes, exponents))


def test_a_folder_in_four_bits_names_what_the_network_has(tmp_path):
    tensors = {
        "a.experts.down_proj_blocks": torch.zeros(2, 6, 2, 16, dtype=torch.uint8),
        "a.experts.down_proj_scales": torch.full((2, 6, 2), 127, dtype=torch.uint8),
        "a.norm.weight": torch.ones(3),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    reader = WidenedReader(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
    assert reader.names() == ["a.experts.down_proj", "a.norm.weight"]
    assert (reader.shape("a.experts.down_proj"), reader.dtype("a.experts.down_proj")) == ((2, 64, 6), "BF16")
    assert reader.nbytes("a.experts.down_proj") == reader.read(["a.experts.down_proj"])["a.experts.down_proj"].nbytes
    assert reader.nbytes("a.norm.weight") == 12


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_four_bits_that_are_no_bytes_are_refused(tmp_path, part):
    """Their bits were looked for in numbers of 8 bits, which ended in a traceback."""
    tensors = {
        f"a.down_proj_{each}": torch.zeros(2, 6, 2, 16)[..., : 16 if each == "blocks" else 1].byte()
        for each in ("blocks", "scales")
    }
    tensors["a.down_proj_scales"] = tensors["a.down_proj_scales"].flatten(2)
    tensors[f"a.down_proj_{part}"] = tensors[f"a.down_proj_{part}"].view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"a\.down_proj and its factors are \[.*'F8_E8M0'.*\], expected U8"):
        WidenedReader(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})


def in_four_bits(W):
    """Store (experts, in, out) as gpt-oss is: (codes, exponents) of the transposed."""
    table = torch.tensor(FOUR_BITS[:8])
    rows = W.float().transpose(1, 2)
    groups = rows.reshape(*rows.shape[:2], -1, 32)
    exponents = (groups.abs().amax(-1).clamp(min=1e-20) / 6).log2().ceil()
    apart = (groups / torch.exp2(exponents)[..., None]).unsqueeze(-1)
    codes = (apart.abs() - table).abs().argmin(-1).to(torch.uint8) + 8 * (apart[..., 0] < 0).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


@pytest.mark.nightly
def test_gpt_oss_in_four_bits_is_quantized_as_the_same_in_sixteen(tmp_path):
    config = config_of(
        "gpt_oss", vocab_size=TEXT_VOCABULARY, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    random_model(config).bfloat16().save_pretrained(tmp_path / "short")
    add_tokenizer(tmp_path / "short")
    tensors = load_file(tmp_path / "short" / "model.safetensors")
    shutil.copytree(tmp_path / "short", tmp_path / "wide")
    short, wide = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        codes, exponents = in_four_bits(tensors[name])
        del short[name]
        short |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
        wide[name] = four_bits(codes, exponents)
        assert (wide[name] - tensors[name]).norm() < 0.2 * tensors[name].norm()
    assert len(short) == len(wide) + 2
    save_file(short, tmp_path / "short" / "model.safetensors", {"format": "pt"})
    save_file(wide, tmp_path / "wide" / "model.safetensors", {"format": "pt"})
    said = json.loads((tmp_path / "short" / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "mxfp4"}
    }
    (tmp_path / "short" / "config.json").write_text(json.dumps(said))
    for name in ("short", "wide"):
        nearplane.quantize(tmp_path / name, tmp_path / f"{name}-3", rate=3.0, allocate="uniform", **TEXT)
    for path in (tmp_path / "wide-3").glob("*.safetensors"):
        found, wanted = load_file(tmp_path / "short-3" / path.name), load_file(path)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert read_record(tmp_path / "short-3").stored == "mxfp4"
    assert nearplane.evaluate(tmp_path / "short-3", HELD_OUT, samples=2, seqlen=40, against=tmp_path / "short").kl > 0
