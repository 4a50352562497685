"""Experts of MLX in their stacks: names, order and bytes, read back one by one; and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import nearplane
from model_types import save_type
from nearplane import FormatError, RecipeError
from nearplane.formats.container import Place
from nearplane.formats.layer_format import Quantized
from nearplane.formats.mlx import FORMAT
from nearplane.formats.mlx_experts import MLXFolder, MLXReader, stack_of
from nearplane.formats.stored import Stored
from nearplane.formats.table import format_of
from nearplane.loading.dense_network import dense_network
from nearplane.number_formats import integers
from nearplane.recipe.schemes import GridScheme
from nightly import daily
from plain_formats import decoded

CONFIG = {"quant_method": "mlx", "bits": 4, "group_size": 32, "mode": "affine"}
RTN = {"format": "mlx", "bits": 4, "group_size": 32, "solver": "round-to-nearest"}


def test_experts_have_the_names_of_their_stack():
    assert stack_of("model.layers.3.mlp.experts.12.gate_proj") == "model.layers.3.mlp.switch_mlp.gate_proj"
    assert stack_of("a.block_sparse_moe.experts.0.w2") == "a.block_sparse_moe.switch_mlp.down_proj"
    assert stack_of("a.mlp.experts.0.up_proj", "experts") == "a.mlp.experts.up_proj"
    for other in ("a.mlp.shared_expert.up_proj", "a.self_attn.q_proj", "a.mlp.experts.gate_proj"):
        assert stack_of(other) == other


@pytest.mark.parametrize(
    ("kind", "module", "words"),
    [
        ("qwen3_moe", "mlp.switch_mlp", {"gate_proj": "gate_proj", "down_proj": "down_proj"}),
        ("mixtral", "block_sparse_moe.switch_mlp", {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}),
        ("dots1", "mlp.experts", {"up_proj": "up_proj"}),
    ],
)
def test_a_block_is_written_stacked_and_read_back_expert_by_expert(kind, module, words, tmp_path, generator):
    """In ascending order of their numbers, whatever the order in which they are added; dense experts are left alone."""
    source, head = tmp_path / "source", f"a.{module.partition('.')[0]}"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": kind}))
    tensors = {f"{head}.gate.weight": torch.zeros(3, 4), "b.experts.0.up_proj.weight": torch.ones(2, 2)}
    for word in words:
        for expert in (10, 2, *range(2), *range(3, 10)):
            name = f"{head}.experts.{expert}.{word}"
            tensors |= {f"{name}.{part}": torch.rand(8, 4, generator=generator) for part in ("scales", "biases")}
            tensors[f"{name}.weight"] = torch.randint(1 << 20, (8, 6), dtype=torch.int32, generator=generator)
    out = tmp_path / "out"
    with MLXFolder(Place(out=out, source=source), format_of(CONFIG), CONFIG, dtype=torch.float32, shards=1) as folder:
        folder.close_block(tensors)
        folder.record_json = ""
    stored = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert len(stored) == 2 + 3 * len(words)
    for word, own in words.items():
        for part in ("weight", "scales", "biases"):
            one_by_one = [tensors[f"{head}.experts.{expert}.{word}.{part}"] for expert in range(11)]
            assert torch.equal(stored[f"a.{module}.{own}.{part}"], torch.stack(one_by_one))
    reader = MLXReader(out)
    assert set(reader.names()) == set(tensors)
    read = reader.read(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name
        assert (reader.shape(name), reader.nbytes(name)) == (tuple(tensor.shape), tensor.nbytes)


def test_config_json_has_one_entry_for_a_stack_and_every_expert_has_its_number_format():
    few, others = integers(3, 32, minimum=True), integers(4, 32, minimum=True)
    layers = {f"a.mlp.experts.{expert}.up_proj": few for expert in range(2)}
    layers |= {f"a.self_attn.{letter}_proj": others for letter in "qkv"}
    network = Quantized(scheme=GridScheme(grid=others.name), quantized=list(layers), layers=layers, version="1")
    config = FORMAT.layers.describe(network)
    assert config == CONFIG | {"a.mlp.switch_mlp.up_proj": {"group_size": 32, "bits": 3}}
    assert {name: FORMAT.layers.grid_of(config, name) for name in layers} == layers
    of_dots = CONFIG | {"a.mlp.experts.up_proj": {"group_size": 32, "bits": 3}}
    assert FORMAT.layers.grid_of(of_dots, "a.mlp.experts.1.up_proj") == few


def test_a_header_with_more_experts_than_any_model_is_refused(tmp_path):
    save_file({"a.switch_mlp.up_proj.scales": torch.zeros(5000, 1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"up_proj\.scales has 5000 experts, expected 1 to 4096"):
        MLXReader(tmp_path)


@pytest.mark.parametrize("kind", daily(["qwen3_moe", "mixtral"], ["qwen3_moe"]))
def test_a_plain_reader_finds_the_values_and_every_command_reads_them(kind, tmp_path):
    model, out = save_type(tmp_path / "model", kind), tmp_path / "out"
    nearplane.quantize(model, out, layers={"experts": {"bits": 3}}, **RTN)
    plain, stored = decoded(out), Stored(out)
    experts = [name for name in stored.names() if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for name in stored.names():
        values = stored.matrix(name, stored.tensors(name)).decode()
        assert torch.equal(values, torch.from_numpy(plain[f"{name}.weight"].floats())), name
    assert nearplane.verify(out, against=model).faults == ()
    dense = dense_network(out)
    nearplane.export(out, tmp_path / "dense", dtype="float32")
    for name, tensor in nearplane.load(tmp_path / "dense").state_dict().items():
        assert torch.equal(tensor, dense.state_dict()[name]), name


def test_experts_move_from_integers_to_mlx_with_equal_values(tmp_path):
    model = save_type(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    nearplane.quantize(model, tmp_path / "out", **RTN | {"format": "compressed-tensors"})
    nearplane.export(tmp_path / "out", tmp_path / "mlx", format="mlx")
    assert nearplane.verify(tmp_path / "mlx", against=model).faults == ()
    ours, theirs = (dense_network(tmp_path / each).state_dict() for each in ("out", "mlx"))
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())


@pytest.mark.parametrize("pattern", [r"layers\.1\.mlp\.experts", r"experts\.[0-9]+\.down_proj"])
def test_some_experts_without_the_others_are_refused(pattern, tmp_path):
    model = save_type(tmp_path / "model", "qwen3_moe")
    with pytest.raises(
        RecipeError, match=r"The experts in model\.layers\.[01]\.mlp\.experts are left unquantized, wholly"
    ):
        nearplane.quantize(model, tmp_path / "out", ignore=[pattern], **RTN)
    assert not (tmp_path / "out").exists()
