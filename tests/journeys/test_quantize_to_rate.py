"""Rate mode through the main path: the size asked for, on disk; what is loaded is what was solved; clear refusals."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import nearplane
from checkpoints import save_part_of_the_demo
from families import add_tokenizer
from nearplane import NearplaneError, Recipe, RecipeError
from nearplane.calibration.texts import read_windows
from nearplane.cli.app import app
from nearplane.coding.blob import shape_of
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.formats.container import Container
from nearplane.formats.stored import read_dense, read_matrices
from nearplane.models.model import open_model
from nearplane.planning.size_budget import predict_overhead
from nearplane.record.record import digest_of
from nearplane.record.record_file import read_record
from nearplane.record.remarks import missed
from nearplane.system.paths import RECORD
from nearplane.system.safetensors_files import ShardReader

FAST = {"calibration": str(CALIBRATION), "samples": 12, "seqlen": 64}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two blocks of the demo model: real weights, a real tokenizer, seconds to quantize."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def solved(small, tmp_path_factory):
    """One run: (folder, record, the weights that the solver handed over by the name of their layer)."""
    weights, add = {}, Container.add
    out = tmp_path_factory.mktemp("out") / "coded"

    def seen(self, name, matrix, *more, **options):
        weights[name] = matrix.decode()
        return add(self, name, matrix, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Container, "add", seen)
        record = nearplane.quantize(small, out, rate=2.7, **FAST)
    return out, record, weights


@pytest.fixture(scope="module")
def coded(solved):
    return solved[:2]


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 0.8, "solver": "nearest-plane"},
        pytest.param({"rate": 3.3, "allocate": "uniform"}, marks=pytest.mark.nightly),
        pytest.param({"rate": 5.5, "solver": "round-to-nearest", "allocate": "uniform"}, marks=pytest.mark.nightly),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_bytes_on_disk_are_what_was_asked_for(small, tmp_path, options):
    record = nearplane.quantize(small, tmp_path / "out", ignore=[r"\.1\."], **options, **FAST)
    reader = ShardReader(tmp_path / "out")
    coded = [name for name in reader.names() if name.endswith(".weight_coded")]
    size = sum(reader.shape(name)[0] for name in coded)
    weights = sum(layer.out_features * layer.in_features for layer in record.layers)
    assert len(coded) == len(record.layers) == 7
    assert 8 * size / weights == pytest.approx(options["rate"], rel=0.005)
    assert record.rate == pytest.approx(8 * size / weights, rel=1e-12)
    assert missed(record) is None


def bytes_of(folder, pattern="*"):
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def test_a_size_is_met_in_bytes_of_all_files(small, tmp_path):
    """Not only of the weights: the tokenizer counts, too."""
    asked = round(0.7 * bytes_of(small))
    record = nearplane.quantize(
        small, tmp_path / "out", size=str(asked), allocate="uniform", solver="nearest-plane", ignore=[r"\.1\."], **FAST
    )
    assert bytes_of(tmp_path / "out", "*.safetensors") == record.bytes
    assert bytes_of(tmp_path / "out") == record.folder
    assert 0.995 * asked <= record.folder <= asked
    assert missed(record) is None


@pytest.mark.nightly
def test_what_is_not_weights_is_foretold(small, tmp_path):
    """Within a thousandth, templates, code and tensors of unusual types included."""
    folder = tmp_path / "model"
    shutil.copytree(small, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"f8": torch.ones(777).to(torch.float8_e4m3fn), "u16": torch.ones(3, 5, dtype=torch.uint16)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x" * 30_000)
    (folder / "LICENSE").write_text("y" * 20_000)
    (folder / "pytorch_model.bin").write_text("z" * 50_000)  # not copied
    (folder / "modeling.py").write_text("# z" * 9_000)  # not copied
    recipe = Recipe.from_spellings(rate=3.0, allocate="uniform", solver="nearest-plane", ignore=[r"\.1\."], **FAST)
    record = nearplane.quantize(folder, tmp_path / "out", recipe)
    found = bytes_of(tmp_path / "out")
    assert record.folder == found
    rest = found - sum(layer.bytes for layer in record.layers)
    assert bytes_of(folder) - bytes_of(small) > 120_000
    told = predict_overhead(open_model(str(folder), ignore=recipe.ignore), recipe).total()
    assert told == pytest.approx(rest, abs=0.002 * found)


def test_slope_spends_more_where_the_network_needs_it(coded):
    _, record = coded
    asked = [layer.asked for layer in record.layers]
    assert max(asked) - min(asked) > 0.3
    assert record.rate == pytest.approx(2.7, rel=0.005)


def test_what_is_read_is_what_the_solver_decoded(solved):
    """Bit for bit: so perplexity after saving and loading is that in memory."""
    out, _, weights = solved
    dense = dict(read_dense(out))
    assert len(weights) == 14
    for name, values in weights.items():
        assert torch.equal(dense[f"{name}.weight"], values)


def test_perplexity_of_the_folder_is_that_of_the_model_in_memory(coded, small):
    out, _ = coded
    model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    for name, matrix in read_matrices(out):
        model.get_submodule(name).weight.data.copy_(matrix.decode())
    tokenizer = AutoTokenizer.from_pretrained(small)
    ids = torch.tensor(tokenizer(HELD_OUT.read_text(), add_special_tokens=False)["input_ids"][: 8 * 64]).view(8, 64)
    with torch.no_grad():
        predicted = model(ids).logits[:, :-1].log_softmax(-1)
    nll = -float(predicted.gather(-1, ids[:, 1:, None]).double().mean())
    found = nearplane.evaluate(out, HELD_OUT, seqlen=64, samples=8)
    assert found.nll == pytest.approx(nll, abs=1e-6)


def test_a_loaded_model_predicts_as_evaluated_and_generates(coded, small):
    out, _ = coded
    nearplane.register()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("The list is", return_tensors="pt").input_ids
    dense = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    for name, matrix in read_matrices(out):
        dense.get_submodule(name).weight.data.copy_(matrix.decode())
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)
    made = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(made, dense.generate(ids, max_new_tokens=8, do_sample=False))


def test_the_record_says_what_each_layer_took(coded):
    out, record = coded
    assert read_record(out) == record
    reader = ShardReader(out)
    for layer in record.layers:
        name = f"{layer.name}.weight_coded"
        assert layer.bytes == reader.shape(name)[0]
        assert shape_of(reader.read([name])[name].numpy()) == (layer.out_features, layer.in_features)
        assert 0 < layer.entropy < layer.rate
        assert layer.limit < layer.rate
        assert layer.format == "coded"
    assert record.overhead == record.bytes - sum(layer.bytes for layer in record.layers)


def test_inspect_shows_rates_and_totals(coded, capsys):
    app(["inspect", str(coded[0])], result_action="return_value")
    shown = capsys.readouterr().out
    assert "above the limit" in shown
    assert "model.layers.1.mlp.down_proj" in shown
    assert f"total: {coded[1].rate:.3f} bits" in shown


def test_the_reader_of_a_table_may_stop_reading(coded):
    """`nearplane inspect out | head -1` ends without a traceback."""
    words = [sys.executable, "-m", "nearplane", "inspect", str(coded[0])]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.wait()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": 0.3}, "0.5 to 7"),
        ({"rate": 7.5}, "0.5 to 7"),
        ({"rate": 2, "size": "1GB"}, "found both"),
        ({"size": "3 apples"}, "3.1GB"),
        ({"size": "1kB"}, "not quantized"),
        ({"size": "3GB"}, "0.5 to 7 bits"),
        ({"rate": 2, "format": "gptq"}, "--format gptq is for fixed grids, but --rate 2 is for entropy-coded weights"),
        ({"bits": 4, "format": "nearplane"}, "--format nearplane is for entropy-coded weights, but --bits 4"),
        ({"rate": 2, "coder": "zip"}, "coder"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_met_is_refused_before_anything_is_written(small, tmp_path, options, says):
    with pytest.raises(RecipeError, match=says):
        nearplane.quantize(small, tmp_path / "out", **options, **FAST)
    assert not (tmp_path / "out").exists()


def test_a_rate_below_the_side_information_says_the_least(tmp_path):
    """Of matrices as small as this, headers and exponents alone take more than half a bit a weight."""
    from checkpoints import tiny_llama

    tiny_llama(hidden=16, intermediate=16).save_pretrained(tmp_path / "tiny")
    add_tokenizer(tmp_path / "tiny")
    with pytest.raises(RecipeError, match=r"take [0-9.]+\. Use a larger --rate"):
        nearplane.quantize(tmp_path / "tiny", tmp_path / "out", rate=0.5, **FAST)


def test_a_checkpoint_from_the_future_is_not_read(coded, tmp_path):
    import shutil

    shutil.copytree(coded[0], tmp_path / "future")
    path = tmp_path / "future" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["format_version"] = 99
    path.write_text(json.dumps(config))
    (tmp_path / "future" / RECORD).unlink()  # which would name the change
    with pytest.raises(NearplaneError, match="99"):
        nearplane.evaluate(tmp_path / "future", HELD_OUT, seqlen=64, samples=1)


# ── --max-loss ──


@pytest.fixture(scope="module")
def limited(small, tmp_path_factory):
    """One run at a rate, and one with the same rate that may lose half as much as the worst layer of the first."""
    words = FAST | {"rate": 2.0, "allocate": "uniform", "solver": "nearest-plane"}
    free = nearplane.quantize(small, tmp_path_factory.mktemp("free") / "out", **words)
    most = max(layer.relative_loss for layer in free.layers) / 2
    bound = nearplane.quantize(small, tmp_path_factory.mktemp("bound") / "out", max_loss=most, **words)
    return free, bound, most


@pytest.mark.nightly
def test_what_is_left_is_settled_between_blocks_and_not_within_them(limited):
    free, _, _ = limited
    blocks = [{layer.asked for layer in free.layers if f"layers.{index}." in layer.name} for index in (0, 1)]
    assert blocks[0] == {2.0}
    assert len(blocks[1]) == 1
    assert blocks[1] != blocks[0]
    assert free.rate == pytest.approx(2.0, rel=0.002)


@pytest.mark.nightly
def test_no_layer_loses_more_than_it_may(limited):
    free, bound, most = limited
    assert any(layer.relative_loss > most for layer in free.layers)
    assert all(layer.relative_loss <= most for layer in bound.layers)
    assert bound.exceeding == ()


@pytest.mark.nightly
def test_layers_that_would_lose_more_get_more_bits_and_no_others(limited):
    free, bound, most = limited
    for before, after in zip(free.layers, bound.layers, strict=True):
        if before.relative_loss > 1.1 * most:  # targets differ a little, as layers before lost less
            assert after.rate > before.rate + 0.05
            assert after.asked > 2.04  # what others left over moves a layer by 2 % at most
            assert after.rate == pytest.approx(after.asked, rel=0.01)
        elif before.relative_loss < 0.9 * most:
            assert after.asked <= 2.04


@pytest.mark.nightly
def test_bits_are_raised_no_further_than_the_loss_asks_for(limited):
    """6 dB a bit: what a layer is within is at most half a bit's worth below the limit."""
    _, bound, most = limited
    raised = [layer for layer in bound.layers if layer.asked > 2.04]
    assert raised
    assert all(layer.relative_loss > most / 2 for layer in raised)


@pytest.mark.nightly
def test_a_rate_that_the_loss_did_not_allow_is_reported_as_missed(limited):
    free, bound, _ = limited
    assert missed(free) is None
    assert bound.rate > 2.01
    assert "2 bits per weight requested" in missed(bound)
    assert "--max-loss" in missed(bound)


@pytest.mark.nightly
def test_what_not_even_seven_bits_reach_is_named(small, tmp_path):
    """A loss below that of 7 bits: what is tried ends there."""
    words = FAST | {"rate": 6.5, "allocate": "uniform", "solver": "nearest-plane", "ignore": ["mlp", "self_attn.[kvo]"]}
    record = nearplane.quantize(small, tmp_path / "out", max_loss=1e-9, **words)
    assert [layer.name for layer in record.exceeding] == [
        layer.name for layer in sorted(record.layers, key=lambda layer: -layer.relative_loss)
    ]
    assert all(layer.asked == 7.0 for layer in record.layers)


@pytest.mark.nightly
def test_a_loss_that_no_layer_exceeds_changes_nothing(limited, small, tmp_path):
    words = FAST | {"rate": 2.0, "allocate": "uniform", "solver": "nearest-plane"}
    again = nearplane.quantize(small, tmp_path / "out", max_loss=0.99, **words)
    assert [layer.checksum for layer in again.layers] == [layer.checksum for layer in limited[0].layers]


@pytest.mark.parametrize("most", [0, 1, 2, -0.1, True, "0.1"])
def test_a_loss_that_is_no_part_of_the_whole_is_refused(most):
    with pytest.raises(RecipeError, match=r"max_loss is .*; expected between 0 and 1"):
        Recipe.from_spellings(rate=2.0, max_loss=most)


def test_inspect_and_the_files_agree_on_what_each_layer_is(coded):
    """The record's checksum is over names, dtypes, shapes and bytes, in plain Python."""
    out, record = coded
    reader = ShardReader(out)
    for layer in record.layers:
        names = [name for name in reader.names() if name.rpartition(".")[0] == layer.stored and "bias" not in name]
        digest = hashlib.sha256()
        for name, tensor in sorted(reader.read(names).items()):
            digest.update(f"{name} U8 {len(tensor)}\n".encode() + tensor.numpy().tobytes())
        assert layer.checksum == digest.hexdigest()
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.iterdir()
        if path.name not in ("nearplane.json", "README.md")
    }
    assert record.files == found
    text = (out / "nearplane.json").read_text()
    assert record.digest == digest_of(text)


def test_the_record_says_which_tokens_it_saw(coded, small):
    _, record = coded
    tokens = read_windows(AutoTokenizer.from_pretrained(small), CALIBRATION, samples=13, seqlen=64)
    assert (record.windows, record.extra_windows, record.seqlen, record.tokens) == (12, 1, 64, 768)
    assert record.text == hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
