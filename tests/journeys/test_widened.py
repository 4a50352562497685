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
from nearplane.models.model import open_model
from nearplane.record.record_file import read_record
from nearplane.system.fp8_mxfp4 import FOUR_BITS, eight_bits, four_bits
from nearplane.system.source_storage import source_reader

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
    for change, said in ((tensors[name][:-1], "or one for every block"), (None, "is missing")):
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
    with pytest.raises(
        ModelError, match=r"has factors, but is stored as F8_E4M3FNUZ; nearplane reads F8_E4M3 and F8_E5M2\."
    ):
        nearplane.evaluate(broken, HELD_OUT, samples=1, seqlen=40)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def packed_by_others(strategy):
    """Return a quantization_config of llm-compressor."""
    group = {"targets": ["Linear"], "weights": FLOAT8 | {"strategy": strategy}, "input_activations": INPUTS}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


FORMS = {  # by maker: what config.json says, the codes, and the shape of the factors of a matrix (out, in)
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, torch.float8_e4m3fn, lambda out: ()),
    "AutoFP8 in E5M2": ({"quant_method": "fp8", "fmt": "e5m2"}, torch.float8_e5m2, lambda out: (1,)),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, torch.float8_e4m3fn, lambda out: (out, 1)),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, torch.float8_e4m3fn, lambda out: ()),
    "ModelOpt by rows": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, torch.float8_e4m3fn, lambda out: (out,)
    ),
    "llm-compressor": (packed_by_others("channel"), torch.float8_e4m3fn, lambda out: (out, 1)),
    "llm-compressor, one step": (packed_by_others("tensor"), torch.float8_e4m3fn, lambda out: (1,)),
}  # fmt: skip


def save_in_a_form(wide, folder, section, codes, shape):
    """Save a model in 8 bits in `folder`, and its decoded values beside it; return both folders."""
    shutil.copytree(wide, folder)
    tensors, short, decoded = load_file(wide / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        short[name] = decoded[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        size = shape(len(tensor))
        largest = tensor.float().abs().amax(1 if max(size, default=1) > 1 else (0, 1)).reshape(size)
        factors = largest / torch.finfo(codes).max
        spread = factors.reshape(-1, 1)
        short[name] = (tensor.float() / spread).to(codes)
        decoded[name] = (short[name].float() * spread).bfloat16()
        short |= {f"{name}_scale": factors, f"{name.removesuffix('weight')}input_scale": torch.tensor(0.5)}
    short["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    save_file(short, folder / "model.safetensors", {"format": "pt"})
    shutil.copytree(wide, folder.with_name("decoded"))
    save_file(decoded, folder.with_name("decoded") / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, folder.with_name("decoded")


@pytest.mark.parametrize("form", FORMS)
def test_one_step_a_matrix_or_a_row_is_read_whatever_it_is_called(folders, tmp_path, form):
    """They were refused: "already quantized", or "fetch the model again"."""
    short, wide = save_in_a_form(folders[1], tmp_path / "short", *FORMS[form])
    model, expected = open_model(str(short)), load_file(wide / "model.safetensors")
    assert (model.stored, {*model.reader.names()}) == ("fp8", expected.keys())
    assert all(torch.equal(values, expected[name]) for name, values in model.reader.read(expected).items())
    loaded = nearplane.load(short, device="cpu").state_dict()
    assert all(torch.equal(loaded[name], values) for name, values in expected.items())


def test_factors_under_both_names_are_refused(folders, tmp_path):
    short, _ = save_in_a_form(folders[1], tmp_path / "short", *FORMS["ModelOpt"])
    tensors = load_file(short / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".weight_scale"))
    save_file(tensors | {f"{name}_inv": 1 / tensors[name]}, short / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"two tensors of factors, {name}_inv and {name}, of which"):
        open_model(str(short))


def test_a_model_in_eight_bits_by_modelopt_alone_is_read(folders, tmp_path):
    """Older versions describe the weights in a file of their own, and config.json says nothing."""
    short, wide = save_in_a_form(folders[1], tmp_path / "short", *FORMS["ModelOpt"])
    config = json.loads((short / "config.json").read_text())
    section = config.pop("quantization_config")
    (short / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"is stored as F8_E4M3 with factors .*_scale, but config.json has no quantization_c"
    ):
        nearplane.load(short)
    (short / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    found, expected = (nearplane.load(folder, device="cpu").state_dict() for folder in (short, wide))
    assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            r"already quantized with modelopt NVFP4\. Pass the original",
        ),
        (
            packed_by_others("tensor") | {"transform_config": {"R1": {}}},
            "already quantized with compressed-tensors float-quant",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            r"modelopt FP8 with .*\.pre_quant_scale, by which runtimes multiply",
        ),
    ],
    ids=["nvfp4", "rotated", "factors of inputs"],
)
def test_other_forms_are_named(folders, tmp_path, section, said):
    short, _ = save_in_a_form(folders[1], tmp_path / "short", section, *FORMS["ModelOpt"][1:])
    tensors = load_file(short / "model.safetensors") | {"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(64)}
    save_file(tensors, short / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said):
        open_model(str(short))


@pytest.mark.parametrize("method", ["fp8", "gptq", "compressed-tensors"])
def test_weights_that_are_dense_again_are_not_taken_for_quantized(folders, tmp_path, method):
    """`quantize` asked for the original, and read `fp8` without a word."""
    folder = shutil.copytree(folders[1], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    for read in (open_model, nearplane.load):
        with pytest.raises(ModelError, match=rf"says {method}, but every tensor is stored as BF16.* delete that entry"):
            read(str(folder))


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
    reader = source_reader(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
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
        source_reader(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})


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
