"""Schemes of single layers, from end to end: each layer is solved, written, read back and measured again by its own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import RecipeError
from nearplane.demo import CALIBRATION
from nearplane.formats.stored import read_matrices
from nearplane.verbs.evaluate import load_dense
from nightly import daily

FAST = {"calibration": str(CALIBRATION), "samples": 8, "seqlen": 40}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    random_model(config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2)).float().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


OWN = {"down_proj": {"bits": 8}, r"layers\.0\..*v_proj": {"group_size": None, "solver": "k-best"}, "up": {"polish": 0}}


def test_grids_of_layers_are_their_own_and_hold(model, tmp_path):
    out = tmp_path / "out"
    record = nearplane.quantize(model, out, bits=4, group_size=16, layers=OWN, **FAST)
    for layer in record.layers:
        down, wide = "down_proj" in layer.name, "layers.0" in layer.name and "v_proj" in layer.name
        assert (layer.number_format.bits, layer.number_format.group) == (8 if down else 4, None if wide else 16), (
            layer.name
        )
    assert all(layer.loss < layer.nearest_loss for layer in record.layers)
    found = nearplane.verify(out, against=str(model))
    assert found.faults == ()
    assert found.measured
    network, _ = load_dense(out, CPU)
    for name, matrix in read_matrices(out):
        assert torch.equal(network.get_submodule(name).weight, matrix.decode())
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, network(tokens).logits)


def test_layers_with_a_grid_of_their_own_have_the_codes_of_a_run_with_that_grid(model, tmp_path):
    """The first layers, whose inputs are those of the original network."""
    name = "model.layers.0.self_attn.q_proj"
    mixed = nearplane.quantize(model, tmp_path / "mixed", bits=3, layers={"q_proj": {"bits": 5}}, **FAST)
    plain = nearplane.quantize(model, tmp_path / "plain", bits=5, **FAST)
    sums = [{layer.name: layer.checksum for layer in record.layers} for record in (mixed, plain)]
    assert sums[0][name] == sums[1][name]
    assert sums[0]["model.layers.0.self_attn.k_proj"] != sums[1]["model.layers.0.self_attn.k_proj"]


@pytest.mark.parametrize("allocate", daily(["uniform", "slope"], ["slope"]))
def test_rates_of_layers_are_their_own(model, tmp_path, allocate):
    out = tmp_path / "out"
    record = nearplane.quantize(
        model, out, rate=4.0, layers={"v_proj": {"rate": 6.0}}, allocate=allocate, solver="nearest-plane", **FAST
    )
    own = [layer for layer in record.layers if "v_proj" in layer.name]
    assert len(own) == 2
    assert all(layer.rate == pytest.approx(6.0, rel=0.02) for layer in own)
    assert all(layer.asked != 6.0 for layer in record.layers if layer not in own)
    assert nearplane.verify(out, against=str(model)).faults == ()


@pytest.mark.nightly
def test_the_first_pattern_counts_for_rates_too(model, tmp_path):
    layers = {r"layers\.0\..*v_proj": {"damp": 0.02}, "v_proj": {"rate": 6.0}}
    record = nearplane.quantize(
        model, tmp_path / "out", rate=3.0, layers=layers, allocate="uniform", solver="nearest-plane", **FAST
    )
    first, second = (layer.rate for layer in record.layers if "v_proj" in layer.name)
    assert first == pytest.approx(3.0, rel=0.03)
    assert second == pytest.approx(6.0, rel=0.03)


def test_rates_at_the_ends_of_what_may_be_asked_for_are_settled_beyond_them(model, tmp_path):
    """What one block leaves over goes to the next: a layer may then take a little more than 7 bits, or less than half a bit."""
    record = nearplane.quantize(model, tmp_path / "out", rate=7, solver="nearest-plane", allocate="uniform", **FAST)
    assert record.rate == pytest.approx(7, rel=0.02)


def test_layers_without_a_rate_of_their_own_are_allocated_with_all_others(model, tmp_path):
    layers = {"v_proj": {"damp": 0.1}}
    record = nearplane.quantize(model, tmp_path / "out", rate=3.0, solver="nearest-plane", layers=layers, **FAST)
    assert any(layer.asked != 3.0 for layer in record.layers if "v_proj" in layer.name)


def test_layers_that_runtimes_fuse_are_warned_of_if_their_grids_differ(model, tmp_path, caplog):
    nearplane.quantize(model, tmp_path / "out", group_size=16, layers={"q_proj": {"bits": 8}}, **FAST)
    named = "q_proj (int8-g16) and k_proj (int4-g16) and v_proj (int4-g16) of model.layers.0.self_attn and of 1 more"
    assert f"{named} have different grids or inputs" in caplog.text


@pytest.mark.parametrize("layers", [{"a": 4}, "down=bits:4", [1]])
def test_layers_of_other_types_are_refused(model, tmp_path, layers):
    with pytest.raises(RecipeError, match="expected a dict from patterns to options"):
        nearplane.quantize(model, tmp_path / "out", layers=layers, **FAST)


def test_a_group_that_does_not_divide_a_layer_of_its_own_is_refused(model, tmp_path):
    with pytest.raises(RecipeError, match=r"down_proj has 64 inputs, not a multiple of the group size 48"):
        nearplane.quantize(model, tmp_path / "out", group_size=16, layers={"down_proj": {"group_size": 48}}, **FAST)
    assert not (tmp_path / "out").exists()


def test_bits_that_a_format_does_not_have_are_refused_for_the_layer(model, tmp_path):
    with pytest.raises(RecipeError, match=r"v_proj"):
        nearplane.quantize(
            model, tmp_path / "out", group_size=16, format="gptq", layers={"v_proj": {"bits": 5}}, **FAST
        )


def test_a_pattern_that_no_layer_matches_is_refused(model, tmp_path):
    """As for --ignore: a typing error would quantize the layer like all others."""
    with pytest.raises(RecipeError, match=r"--layer dwn_proj matches no layer.*down_proj"):
        nearplane.quantize(model, tmp_path / "out", group_size=16, layers={"dwn_proj": {"bits": 8}}, **FAST)


def test_layers_rounded_to_nearest_among_calibrated_ones(model, tmp_path):
    out = tmp_path / "out"
    record = nearplane.quantize(model, out, group_size=16, layers={"v_proj": {"solver": "round-to-nearest"}}, **FAST)
    for layer in record.layers:
        assert (layer.worst_case is None) == ("v_proj" in layer.name)
    assert nearplane.verify(out, against=str(model)).faults == ()
