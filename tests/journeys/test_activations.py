"""Checkpoints whose inputs runtimes round: solved for it, verified, and computed as transformers simulates it."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import forgery
import nearplane
from families import VOCABULARY
from native_checkpoints import save_tiny
from nearplane import FormatError, RecipeError
from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.rounded_stream import HEADROOM
from nearplane.calibration.walk import walk
from nearplane.calibration.windows import Windows
from nearplane.evaluation import predictions as evaluate_networks
from nearplane.formats.stored import Stored
from nearplane.lattice.rounded_inputs import rounded
from nearplane.loading.dense_network import dense_network
from nearplane.loading.rounded_layers import round_inputs, rounded_layers
from nearplane.models.model import open_model
from nearplane.record.record_file import read_record
from nearplane.system.device import Device
from nightly import daily

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
KINDS = {("int8", "int8"): torch.float32, ("fp8", "fp8"): torch.float32, ("fp8-block", "fp8"): torch.float32}
KINDS |= {
    ("nvfp4", "fp4"): torch.bfloat16,
    ("mxfp4", "fp4"): torch.bfloat16,
    ("mxfp8", "fp8"): torch.bfloat16,
}  # transformers runs these in bfloat16 only
CPU = Device(torch.device("cpu"))


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(0))


def logits(network, tokens):
    with torch.no_grad():
        return network.eval()(tokens).logits


@pytest.mark.parametrize("kind", daily(KINDS, [("int8", "int8")]))
def test_a_checkpoint_is_verified_and_computes_as_transformers_does(tmp_path, tokens, kind, monkeypatch):
    (grid, activations), dtype = kind, KINDS[kind]
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "llama", dtype, **SIZES)
    record = nearplane.quantize(model, out, grid=grid, activations=activations, calibration=tokens)
    assert record.recipe.activations == activations
    found = nearplane.verify(out, against=model, calibration=tokens)
    assert (found.faults, found.measured) == ((), True)
    alone, computed = nearplane.load(out, packed=False), nearplane.load(out, activations=True)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(theirs, tokens), logits(computed, tokens))
    assert torch.equal(logits(alone, tokens), logits(dense_network(out, dtype=dtype), tokens))
    packed = nearplane.load(out, dtype="float32")  # whose weights are not rounded to the dtype of the model
    torch.testing.assert_close(logits(packed, tokens), logits(dense_network(out), tokens))
    assert not torch.equal(logits(alone, tokens), logits(computed, tokens))

    evaluation = nearplane.evaluate(out, tokens, against=model, activations=True)
    assert evaluation.kl == nearplane.evaluate(out, tokens, against=model).kl
    as_loaded = nearplane.load(out, dtype="float32", activations=True)
    assert evaluation.computed.kl == nearplane.evaluate(as_loaded, tokens, against=model).kl
    if dtype == torch.float32:
        assert evaluation.computed.kl == nearplane.evaluate(theirs, tokens, against=model).kl
    assert any(line.startswith("as runtimes compute") for line in str(evaluation).splitlines())
    monkeypatch.setattr(evaluate_networks, "MAX_MEMORY_SHARE", 0)  # block by block
    streamed = nearplane.evaluate(out, tokens, against=model, activations=True)
    assert streamed.computed.kl == pytest.approx(evaluation.computed.kl, rel=1e-5)


@pytest.mark.parametrize("kind", daily(KINDS, []))
def test_second_moments_are_those_of_the_inputs_that_the_finished_network_multiplies(tmp_path, tokens, kind):
    """The last stage sees all layers before it as the runtime computes them, whether forward passes pause or repeat."""
    (grid, activations), dtype = kind, torch.float32
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "llama", dtype, **SIZES | {"num_hidden_layers": 3})
    record = nearplane.quantize(model, out, grid=grid, activations=activations, calibration=tokens)
    stored, name = Stored(out), "model.layers.2.mlp.down_proj"
    inputs = []
    network = nearplane.load(out, activations=True)
    network.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0]), prepend=True)
    fitted = tokens[: record.windows]
    logits(network, fitted)
    how, scale = stored.inputs(name)
    X_hat = rounded(inputs[0].flatten(0, 1), how, scale).double()
    seen = []
    for room in (0, 1 << 40):
        setting = MemorySetting(batch=3, room=room, device=CPU)
        original = open_model(str(model))
        original.fold(record.folds)
        with walk(original, record.recipe, Windows(seqlen=40, fitted=fitted), setting) as stages:
            for stage in stages:
                for layer, each in zip(stage.layers, stage.inputs, strict=True):
                    if layer.name == name:
                        seen.append((each.moments.H.clone(), stage.input_scales.get(name)))
                stage.write(
                    stored.matrix(n, stored.tensors(n)).decode() for n in (layer.name for layer in stage.layers)
                )
    assert [each for _, each in seen] == [scale, scale]
    assert torch.equal(seen[0][0], seen[1][0])
    expected = X_hat.T @ X_hat / len(X_hat)
    torch.testing.assert_close(seen[0][0], expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.nightly
def test_layers_that_share_an_input_have_one_global_scale_and_verify_finds_another(tmp_path, tokens):
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "llama", torch.bfloat16, **SIZES | {"num_hidden_layers": 3})
    assert nearplane.quantize(model, out, grid="nvfp4", activations="fp4", calibration=tokens).headroom == HEADROOM
    files = {file: load_file(file) for file in out.glob("*.safetensors")}
    scales = {name: float(t) for tensors in files.values() for name, t in tensors.items() if "input_global" in name}
    for block in range(3):
        own = {name.split(".")[-2]: scale for name, scale in scales.items() if f".{block}." in name}
        assert own["q_proj"] == own["k_proj"] == own["v_proj"]
        assert own["gate_proj"] == own["up_proj"]
        assert len(set(own.values())) == 4
    for file, tensors in files.items():
        changed = {
            name: t * 2 for name, t in tensors.items() if name.endswith("layers.1.mlp.up_proj.input_global_scale")
        }
        save_file(tensors | changed, file, {"format": "pt"})
    faults = [f.what for f in nearplane.verify(out, against=model, calibration=tokens).faults]
    assert any("the global scale of its inputs is" in what for what in faults)
    (fault,) = (f for f in nearplane.verify(out).faults if "vLLM takes one for both" in f.what)
    assert fault.where in ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj")
    forgery.sign(out, read_record(out))
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.up_proj.* and runtimes take one for both"):
        nearplane.tune(out, tmp_path / "tuned", against=model, calibration=tokens)


@pytest.mark.nightly
@pytest.mark.parametrize("grid", ["fp8", "mxfp4"])
def test_inputs_of_experts_are_rounded_though_transformers_does_not_round_them(tmp_path, tokens, grid):
    """Kernels of runtimes round these as well; transformers decodes experts and multiplies their inputs as they are."""
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "qwen3_moe", torch.bfloat16, **SIZES | {"moe_intermediate_size": 32})
    activations = {"fp8": "fp8", "mxfp4": "fp4"}[grid]
    nearplane.quantize(model, out, grid=grid, activations=activations, calibration=tokens)
    assert nearplane.verify(out, against=model, calibration=tokens).faults == ()
    network = nearplane.load(out, packed=False)
    layers = rounded_layers(network, out)
    assert any(layer.routed for layer in layers)
    with round_inputs({layer: change for layer, change in layers.items() if not layer.routed}, network):
        ours = logits(network, tokens)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out), tokens), ours)
    assert not torch.equal(logits(nearplane.load(out, activations=True), tokens), ours)


@pytest.mark.nightly
def test_tokens_of_a_matrix_get_steps_of_their_own_though_transformers_takes_one_step_for_all(tmp_path, tokens):
    """OPT passes tokens to fc1 and fc2 as a matrix. Kernels round token by token; the simulation in transformers does not."""
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "opt", torch.float32)
    nearplane.quantize(model, out, grid="int8", activations="int8", calibration=tokens)
    theirs, network = logits(AutoModelForCausalLM.from_pretrained(out), tokens), nearplane.load(out, packed=False)
    assert not torch.equal(theirs, logits(nearplane.load(out, activations=True), tokens))

    def of_matrices(change, x):
        return change(x) if x.dim() == 3 else change(x.reshape(1, -1)).view_as(x)

    layers = {layer: partial(of_matrices, change) for layer, change in rounded_layers(network, out).items()}
    with round_inputs(layers, network):
        assert torch.equal(theirs, logits(network, tokens))


@pytest.mark.nightly
def test_experts_in_int8_are_refused_before_work_with_the_name_of_the_layer(tmp_path, tokens):
    save_tiny(tmp_path / "model", "qwen3_moe", torch.bfloat16, **SIZES | {"moe_intermediate_size": 32})
    with pytest.raises(RecipeError, match=r"experts\.0\.gate_proj: transformers .* does not load experts .* --ignore"):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", grid="int8", activations="int8", calibration=tokens)


def test_what_does_not_go_with_activations_is_refused_before_work(tmp_path, tokens):
    model, out, plain = tmp_path / "model", tmp_path / "out", tmp_path / "plain"
    save_tiny(model, "llama", torch.float32, **SIZES)
    options = {"grid": "int8", "solver": "round-to-nearest", "calibration": tokens}
    nearplane.quantize(model, out, **options, activations="int8")
    nearplane.quantize(model, plain, **options)
    formats = [json.loads((each / "config.json").read_text())["quantization_config"]["format"] for each in (out, plain)]
    assert formats == ["int-quantized", "pack-quantized"]
    with pytest.raises(RecipeError, match=r"plain says nothing of activations"):
        nearplane.evaluate(plain, tokens, activations=True)
    with pytest.raises(RecipeError, match=r"A model object runs as it is"):
        nearplane.evaluate(nearplane.load(out), tokens, activations=True)
