"""Input embeddings and head in rate mode: tied and untied, counted in every budget, and read by every reader."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import nearplane
from checkpoints import save_part_of_the_demo
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import NearplaneError
from nearplane.calibration.texts import read_windows
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.formats.stored import read_dense, read_matrices
from nearplane.system.safetensors_files import ShardReader
from nearplane.verbs.evaluate import load_dense
from nightly import daily

FAST = {
    "calibration": str(CALIBRATION), "samples": 8, "seqlen": 64, "allocate": "uniform", "solver": "nearest-plane",
}  # fmt: skip
EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
BOTH = {"include_head": True, "include_embeddings": True}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=daily(["tied", "untied"], ["untied"]))
def small(request, tmp_path_factory):
    """A part of the demo model; untied, its head is stored apart and a little different."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return save_part_of_the_demo(folder, blocks=1, neurons=128, own_head=request.param == "untied")


@pytest.fixture(scope="module")
def untied(small):
    if small.name != "untied":
        pytest.skip("of a model with a head of its own")
    return small


@pytest.fixture(scope="module")
def coded(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "coded"
    return out, nearplane.quantize(small, out, rate=3.0, **BOTH, **FAST)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(96).reshape(2, 48)).logits.float()


def test_every_matrix_is_coded_once_and_counted(coded, small):
    out, record = coded
    ends = {EMBEDDINGS} if small.name == "tied" else {EMBEDDINGS, HEAD}
    names = [layer.name for layer in record.layers]
    assert len(names) == 7 + len(ends)
    assert names[0] == EMBEDDINGS
    assert set(names) >= ends
    assert set(json.loads((out / "config.json").read_text())["quantization_config"]["modules"]) == set(names)
    reader = ShardReader(out)
    assert {name for name in reader.names() if name.endswith(".weight_coded")} == {f"{n}.weight_coded" for n in names}
    dense = [name for name in reader.names() if name.endswith(".weight") and reader.shape(name) != (0,)]
    assert not any(name.startswith(tuple(ends)) for name in dense)
    assert dict(read_dense(out)).keys() == set(ShardReader(small).names())
    size = sum(reader.shape(f"{name}.weight_coded")[0] for name in names)
    weights = sum(layer.out_features * layer.in_features for layer in record.layers)
    assert 8 * size / weights == pytest.approx(3.0, rel=0.005)
    assert record.rate == pytest.approx(8 * size / weights, rel=1e-12)
    for layer in record.layers:
        assert 0 < layer.relative_loss < 0.1
        assert layer.limit < layer.rate


@pytest.mark.nightly
def test_a_size_counts_what_is_included(untied, tmp_path):
    record = nearplane.quantize(untied, tmp_path / "out", size="450kB", **BOTH, **FAST | {"allocate": "slope"})
    assert record.bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert record.folder == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert record.folder == pytest.approx(450_000, rel=0.005)


def test_all_readers_agree(coded, small):
    out, _ = coded
    dense, _ = load_dense(out, CPU)
    expected = logits(dense)
    torch.testing.assert_close(logits(nearplane.load(out, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)
    model = nearplane.load(out, dtype=torch.float32, packed=False)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    nearplane.register()
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    rows = dict(read_matrices(out))[EMBEDDINGS].decode()
    for each in (dense, model, loaded):
        assert torch.equal(each.get_input_embeddings().weight, rows)
        if small.name == "tied":
            assert each.get_output_embeddings().weight is each.get_input_embeddings().weight
    assert loaded.generate(torch.arange(8)[None], max_new_tokens=4, do_sample=False).shape == (1, 12)


def test_an_export_has_them_densely(coded, small, tmp_path):
    out, _ = coded
    nearplane.export(out, tmp_path / "dense", dtype="float32")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert torch.equal(logits(exported), logits(load_dense(out, CPU)[0]))
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == (small.name == "tied")


def test_the_network_still_predicts(coded, small):
    out, _ = coded
    found = nearplane.evaluate(out, HELD_OUT, seqlen=64, samples=16, against=small)
    assert found.kl < 0.1


def test_blocks_are_calibrated_on_quantized_embeddings_and_the_head_on_quantized_blocks(untied, tmp_path):
    """Recorded losses can be computed from the checkpoint and the text alone."""
    words = FAST | BOTH | {"rate": 3.0, "correct": False, "ignore": ["mlp"]}
    record = nearplane.quantize(untied, tmp_path / "out", **words)
    tokens = read_windows(AutoTokenizer.from_pretrained(untied), CALIBRATION, samples=8, seqlen=64)
    original = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    model, _ = load_dense(tmp_path / "out", CPU)
    names = ["model.layers.0.self_attn.q_proj", HEAD]
    seen: dict[str, torch.Tensor] = {}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].flatten(0, 1).double()}))
    with torch.no_grad():
        model(tokens)
    for name in names:
        error = original.get_submodule(name).weight.double() - model.get_submodule(name).weight.double()
        expected = float((seen[name] @ error.detach().T).square().mean()) / error.shape[1]
        layer = next(layer for layer in record.layers if layer.name == name)
        assert layer.loss == pytest.approx(expected, rel=1e-4), name
        assert layer.tokens == tokens.numel()


def test_either_option_includes_a_tied_matrix_and_only_its_own_if_untied(small, tmp_path):
    for option, name in (("include_head", HEAD), ("include_embeddings", EMBEDDINGS)):
        record = nearplane.quantize(small, tmp_path / option, rate=3.0, ignore=["layers"], **{option: True}, **FAST)
        ends = {layer.name for layer in record.layers} & {HEAD, EMBEDDINGS}
        assert ends == ({EMBEDDINGS} if small.name == "tied" else {name})


def test_ignored_ones_stay(small, tmp_path):
    record = nearplane.quantize(small, tmp_path / "out", rate=3.0, ignore=[r"^lm_head$", "mlp"], **BOTH, **FAST)
    assert ({layer.name for layer in record.layers} & {HEAD, EMBEDDINGS}) == (
        set() if small.name == "tied" else {EMBEDDINGS}
    )
    assert record.skipped == ()


@pytest.mark.parametrize(
    ("small", "words"),
    [
        pytest.param("tied", {"solver": "round-to-nearest"}, marks=pytest.mark.nightly),
        pytest.param("untied", {"rows": "equal"}, marks=pytest.mark.nightly),
        pytest.param("untied", {"true_sequential": False}, marks=pytest.mark.nightly),
    ],
    indirect=["small"],
)
def test_every_way_of_solving_takes_them(small, tmp_path, words):
    record = nearplane.quantize(small, tmp_path / "out", rate=3.0, **BOTH, **FAST | words)
    assert record.rate == pytest.approx(3.0, rel=0.005)
    assert nearplane.evaluate(tmp_path / "out", HELD_OUT, seqlen=64, samples=8, against=small).kl < 0.5


def test_rows_that_are_looked_up_more_get_finer_steps(untied, tmp_path):
    words = FAST | {"samples": 64, "seqlen": 128}
    nearplane.quantize(untied, tmp_path / "out", rate=3.0, include_embeddings=True, ignore=["layers"], **words)
    grid = dict(read_matrices(tmp_path / "out"))[EMBEDDINGS].grid
    tokens = read_windows(AutoTokenizer.from_pretrained(untied), CALIBRATION, samples=64, seqlen=128)
    often = tokens.flatten().bincount(minlength=len(grid.rows))
    assert grid.row_scale()[often > 20].mean() < grid.row_scale()[often == 0].mean() / 2


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_neox", "qwen3"])
def test_names_are_found_as_checkpoints_of_many_families_have_them(tmp_path, family):
    """GPT-2 files lack the prefix `transformer.`, Gemma scales what is looked up, GPT-NeoX renames its head."""
    blocks = "n_layer" if family == "gpt2" else "num_hidden_layers"
    random_model(config_of(family, vocab_size=TEXT_VOCABULARY, **{blocks: 1})).float().save_pretrained(
        tmp_path / family
    )
    add_tokenizer(tmp_path / family)
    stored = tmp_path / family / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(stored).items()}
    if family == "qwen3":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # tied, and stored again
    save_file(tensors, stored, {"format": "pt"})
    record = nearplane.quantize(
        tmp_path / family, tmp_path / "out", rate=3.0, ignore=[r"\.(layers|h)\."], **BOTH, **FAST
    )
    assert sum(layer.out_features == TEXT_VOCABULARY for layer in record.layers) == (2 if family == "gpt_neox" else 1)
    assert record.rate == pytest.approx(3.0, rel=0.005)
    expected = logits(load_dense(tmp_path / "out", CPU)[0])
    found = logits(nearplane.load(tmp_path / "out", dtype=torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("included", [{"include_head": True}, pytest.param({}, marks=pytest.mark.nightly)], ids=str)
def test_a_tied_matrix_that_is_stored_only_as_the_head_is_found_by_all_readers(tmp_path, included):
    folder = tmp_path / "tied"
    save_part_of_the_demo(folder, blocks=1, neurons=128)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{HEAD}.weight"] = tensors.pop(f"{EMBEDDINGS}.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    nearplane.quantize(folder, tmp_path / "out", rate=3.0, **included, **FAST)
    names = set(ShardReader(tmp_path / "out").names())
    assert (f"{EMBEDDINGS}.weight_coded" in names) == bool(included)
    assert (f"{HEAD}.weight" in names) == (not included)
    dense, _ = load_dense(tmp_path / "out", CPU)
    expected = logits(dense)
    torch.testing.assert_close(
        logits(nearplane.load(tmp_path / "out", dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4
    )
    nearplane.export(tmp_path / "out", tmp_path / "dense", dtype="float32")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), expected)
    assert nearplane.evaluate(tmp_path / "out", HELD_OUT, seqlen=64, samples=8, against=folder).kl < 0.2


def test_fixed_grids_leave_them(tmp_path):
    for option in BOTH:
        with pytest.raises(
            NearplaneError, match="Readers of compressed-tensors expect embeddings and head unquantized"
        ):
            nearplane.quantize(MODEL, tmp_path / "out", bits=4, **{option: True})
    assert not (tmp_path / "out").exists()
