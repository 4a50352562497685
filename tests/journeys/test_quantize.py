"""The main path on real (tiny) models: what is written is what was solved, other programs load it, and nothing is lost."""

import hashlib
import json
import resource
import shutil
import signal
import sys
from dataclasses import asdict

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import nearplane
from checkpoints import save_part_of_the_demo
from nearplane import Calibration, GridScheme, NearplaneError, Recipe, RecipeError
from nearplane.cli import app as cli
from nearplane.cli.printing import as_json
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.formats.stored import read_dense, read_matrices
from nearplane.record.record import digest_of
from nearplane.record.record_file import read_record

FAST = {"calibration": str(CALIBRATION), "samples": 12, "seqlen": 64, "group_size": 64}
GRIDS = [
    ("compressed-tensors", 4, True),
    pytest.param(("compressed-tensors", 3, True), marks=pytest.mark.nightly),
    pytest.param(("gptq", 4, True), marks=pytest.mark.nightly),
    ("gptq_v2", 2, False),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two blocks of the demo model: real weights, a real tokenizer, seconds to quantize."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    """One block of it, with a card."""
    folder = save_part_of_the_demo(tmp_path_factory.mktemp("models") / "block", blocks=1)
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: en\nbase_model: else/where\n---\n# The original\n")
    return folder


@pytest.fixture(scope="module", params=GRIDS, ids=lambda grid: f"{grid[0]}-{grid[1]}")
def quantized(request, block, tmp_path_factory):
    format, bits, symmetric = request.param
    out = tmp_path_factory.mktemp("out") / "checkpoint"
    record = nearplane.quantize(block, out, bits=bits, symmetric=symmetric, format=format, **FAST)
    return out, record


def test_the_checkpoint_holds_every_layer_and_everything_else_unchanged(quantized, block):
    out, record = quantized
    matrices, dense = dict(read_matrices(out)), dict(read_dense(out))
    original = load_file(block / "model.safetensors")
    assert {layer.name for layer in record.layers} == matrices.keys()
    assert len(record.layers) == len(matrices) == 7
    assert dense.keys() == original.keys()
    for name, tensor in original.items():
        if name.removesuffix(".weight") not in matrices:
            assert torch.equal(dense[name], tensor)


def test_the_record_in_the_folder_is_the_record_returned(quantized):
    out, record = quantized
    assert read_record(out) == record
    assert record.bytes == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert 0 < record.rate < 5.1
    assert (
        50e6
        < record.peak_memory
        <= (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


def test_evaluation_computes_with_the_decoded_weights(quantized, block):
    """Against a model that is given the decoded weights by hand."""
    out, _ = quantized
    reference = AutoModelForCausalLM.from_pretrained(block, dtype=torch.float32)
    reference.load_state_dict({name: tensor.float() for name, tensor in read_dense(out)}, strict=False)
    from nearplane.verbs.evaluate import load_dense

    model, _ = load_dense(out, torch.device("cpu"))
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_from_pretrained_gives_the_logits_of_the_decoded_weights(small, tmp_path):
    """compressed-tensors, through nothing but transformers."""
    nearplane.quantize(small, tmp_path / "out", bits=4, solver="round-to-nearest", group_size=64)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16)
    reference.load_state_dict(dict(read_dense(tmp_path / "out")), strict=False)
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, reference(tokens).logits)


def test_the_same_run_writes_the_same_bytes(small, tmp_path):
    for out in ("a", "b"):
        nearplane.quantize(small, tmp_path / out, bits=3, ignore=[r"\.1\.", "mlp"], **FAST)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        if name != "nearplane.json":  # holds seconds
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_recorded_losses_are_those_of_the_files(small, tmp_path):
    """The first layers see the original inputs: their loss can be computed from the model and the text alone."""
    record = nearplane.quantize(small, tmp_path / "out", bits=3, ignore=[r"\.1\.", "mlp"], **FAST)
    exponents = record.layers[0].positions
    assert any(exponents)
    from transformers import AutoTokenizer

    from nearplane.calibration.texts import read_windows

    tokens = read_windows(AutoTokenizer.from_pretrained(small), CALIBRATION, samples=12, seqlen=64)
    model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1).double()))
    with torch.no_grad():
        model(tokens)
    values = dict(read_matrices(tmp_path / "out"))["model.layers.0.self_attn.q_proj"].decode().double()
    errors = (seen[0] @ (layer.weight.detach().double() - values).T).square().mean(1).view(12, 64)
    ends = [0, 1, 2, 4, 8, 16, 32, 64]
    weighed = (4.0**e * errors[:, a:b].sum() for e, a, b in zip(exponents, ends, ends[1:], strict=False))
    lost = sum(weighed) / errors.numel() / values.shape[1]
    assert record.layers[0].loss == pytest.approx(float(lost), rel=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("whole", "samples", "seqlen"),
    [pytest.param(False, 32, 64, id="a part"), pytest.param(True, 64, 256, id="the whole")],
)
def test_nearest_plane_keeps_more_of_the_network_than_rounding(small, tmp_path, whole, samples, seqlen):
    """Of the demo model, on held-out text: the reason to calibrate at all."""
    kl, words = {}, {"bits": 3, "group_size": 128, "symmetric": False, "format": "gptq_v2"}
    words |= {"calibration": str(CALIBRATION), "samples": samples, "seqlen": seqlen}
    model = MODEL if whole else small
    for solver in ("nearest-plane", "round-to-nearest"):
        nearplane.quantize(model, tmp_path / solver, solver=solver, **words)
        kl[solver] = nearplane.evaluate(tmp_path / solver, HELD_OUT, seqlen=seqlen, samples=16, against=model).kl
    assert kl["nearest-plane"] < kl["round-to-nearest"] / 2


def test_rounding_to_nearest_needs_no_calibration(small, tmp_path):
    record = nearplane.quantize(small, tmp_path / "out", solver="round-to-nearest", group_size=64)
    assert record.tokens == 0
    assert all(layer.loss == layer.nearest_loss for layer in record.layers)


def test_ignored_layers_stay_and_are_named_in_the_config(small, tmp_path):
    record = nearplane.quantize(small, tmp_path / "out", ignore=["down_proj", r"layers\.0\."], **FAST)
    assert len(record.layers) == 6
    assert record.skipped == ()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"} <= set(config["ignore"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.arange(8)[None]).logits.isfinite().all()


def test_other_ways_of_solving_run_end_to_end(block, tmp_path):
    words = {"true_sequential": False, "scale": "minmax", "order": "pivoted"}
    record = nearplane.quantize(block, tmp_path / "out", bits=3, **FAST, **words)
    assert sum(layer.loss < layer.nearest_loss for layer in record.layers) >= len(record.layers) - 1 == 6


def refused(small, out, said, **words):
    with pytest.raises(NearplaneError, match=said):
        nearplane.quantize(small, out, **{**FAST, **words})


def test_bad_requests_are_refused_before_anything_is_written(small, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("Too short.")
    refused(
        small,
        out,
        r"model\.layers\.0\.\S+ has \d+ inputs.* --group-size 128, none, or a divisor of 128, or leave",
        group_size=96,
    )
    refused(small, out, "expected a path, a list of texts", calibration=3)
    refused(small, out, "list of 2 texts has 7 tokens", calibration=["a text", "another"])
    refused(small, out, "int4-g.*-asym", symmetric=False)
    refused(small, out, "compressed-tensors", bits=5, format="gptq")
    refused(small, out, "maximum length", seqlen=10_000)
    refused(small, out, "empty.txt", calibration=str(tmp_path / "empty.txt"))
    refused(small, out, "short.txt", calibration=str(tmp_path / "short.txt"))
    refused(small, out, "missing.txt", calibration=str(tmp_path / "missing.txt"))
    refused(small, out, "Nothing to quantize", ignore=["."])
    refused(tmp_path / "nowhere", out, "nowhere")
    refused(small, small, "Choose another folder")
    assert not out.exists()


def test_weights_may_be_links_but_what_is_copied_may_not_lead_out_of_the_folder(block, tmp_path):
    """Contents of files elsewhere went into a folder that people publish; every verb that copies refuses them at once."""
    model, out = shutil.copytree(block, tmp_path / "model"), tmp_path / "out"
    for name in ("model.safetensors", "config.json"):
        (model / name).rename(tmp_path / name)
        (model / name).symlink_to(tmp_path / name)
    (tmp_path / "secret").write_text("secret")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    record = nearplane.quantize(model, out, solver="round-to-nearest", group_size=64)
    assert "notes.txt" not in {path.name for path in out.iterdir()} | record.files.keys()
    assert not any(path.is_symlink() for path in out.iterdir())
    assert nearplane.verify(out, against=str(model)).faults == ()
    for folder in (model, out):
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    refusal = r"chat_template.jinja \(a link out of the folder\).* cp -RL chat_template.jinja "
    refused(model, tmp_path / "new", refusal)
    for call in (
        lambda: nearplane.export(out, tmp_path / "new"),
        lambda: nearplane.export(out, tmp_path / "new", format="gptq"),
        lambda: nearplane.tune(out, tmp_path / "new", against=model, calibration=str(CALIBRATION)),
    ):
        with pytest.raises(NearplaneError, match=refusal):
            call()
    assert not list(tmp_path.glob("new*"))


def test_a_folder_in_use_is_left_alone(small, tmp_path):
    (tmp_path / "notes.txt").write_text("precious")
    refused(small, tmp_path, "not empty")
    refused(small, tmp_path, "did not write it", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_overwrite_replaces_a_checkpoint_but_no_card_that_a_user_changed(block, tmp_path, caplog):
    """The hub's own reader takes the card; verify and load do not mind what users write into it."""
    words, out = {"solver": "round-to-nearest", "group_size": 64}, tmp_path / "out"
    card = out / "README.md"
    record = nearplane.quantize(block, out, bits=4, **words)
    first, data = card.read_bytes(), ModelCard.load(card).data.to_dict()
    assert record.card == len(first)
    assert "# The original" not in first.decode()
    assert (data["license"], data["language"], data["library_name"]) == ("mit", "en", "transformers")
    assert "base_model" not in data  # a local folder has no hub id, and that of the original's card is not the original
    nearplane.export(out, tmp_path / "dense")
    assert ModelCard.load(tmp_path / "dense" / "README.md").data.license == "mit"
    assert nearplane.card(out) == card
    assert card.read_bytes() == first
    evaluation = nearplane.evaluate(out, HELD_OUT, against=block, seqlen=64, samples=2)
    (tmp_path / "e.json").write_text(as_json(asdict(evaluation)))
    nearplane.card(out, evaluation=tmp_path / "e.json")
    assert f"| {evaluation.perplexity:.3f} | {evaluation.original:.3f} | {evaluation.kl:.5f}" in card.read_text()
    assert ModelCard.load(card).data.to_dict() == data
    card.write_text(changed := card.read_text().replace("license: mit", "license: apache-2.0"))
    assert nearplane.verify(out).faults == ()
    with pytest.raises(RecipeError, match=r"README\.md was changed since nearplane wrote it.*--overwrite"):
        nearplane.card(out)
    assert nearplane.quantize(block, out, bits=3, overwrite=True, **words).card == 0
    assert card.read_text() == changed
    assert "README.md was changed by hand and is kept as it is" in caplog.text
    assert nearplane.verify(out).faults == ()
    nearplane.card(out, overwrite=True)
    assert (ModelCard.load(card).data.license, "int3-g64" in card.read_text()) == ("apache-2.0", True)
    assert read_record(out).recipe.scheme.bits == 3
    assert nearplane.load(out)


def test_a_weight_that_is_not_finite_is_named_and_what_was_written_does_not_load(small, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in small.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    named = r"model\.layers\.1\.mlp\.up_proj\.weight"
    refused(broken, tmp_path / "none", named)  # before anything is written
    assert not (tmp_path / "none.unfinished").exists()
    refused(broken, tmp_path / "out", named, positions="equal")
    assert not (tmp_path / "out").exists()
    unfinished = tmp_path / "out.unfinished"
    assert (unfinished / "INCOMPLETE").exists()
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(unfinished)
    with pytest.raises(NearplaneError, match="incomplete"):
        nearplane.evaluate(unfinished, HELD_OUT)


def test_a_truncated_file_is_refused(small, tmp_path):
    for path in small.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, tmp_path.parent / "out-of-truncated", "model.safetensors")


def test_a_hessian_that_is_not_definite_names_layer_and_damping(block, tmp_path):
    """Barely as many tokens as inputs, some of them the same, and no damping."""
    few = {"samples": 4, "ignore": ["down_proj"]}
    refused(block, tmp_path / "out", r"q_proj.*damping 0", damp=0.0, **few)
    record = nearplane.quantize(block, tmp_path / "auto", damp="auto", **{**FAST, **few})
    assert all(layer.damp >= 1e-4 for layer in record.layers)


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit on file sizes as Linux has it")
def test_a_full_disk_is_one_sentence_and_what_was_written_does_not_load(small, tmp_path, monkeypatch, capsys):
    words = ["quantize", small, tmp_path / "out", "--solver", "round-to-nearest", "--group-size", 64]
    monkeypatch.setattr(sys, "argv", ["nearplane", *map(str, words)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ours = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ours)
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert "could not be written" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.unfinished" / "config.json").exists()


def test_a_recipe_and_keywords_together_are_refused(small, tmp_path):
    with pytest.raises(NearplaneError, match="not both"):
        nearplane.quantize(small, tmp_path / "out", Recipe(scheme=GridScheme(), calibration=Calibration()), bits=3)


def test_layers_that_lose_more_than_they_may_are_named(block, tmp_path):
    """Grids cannot have more bits than they were given: nothing else changes."""
    words = FAST | {"bits": 3, "ignore": ["up_proj"]}
    free = nearplane.quantize(block, tmp_path / "free", **words)
    losses = sorted(layer.relative_loss for layer in free.layers)
    most = (losses[-3] + losses[-2]) / 2
    record = nearplane.quantize(block, tmp_path / "out", max_loss=most, **words)
    assert [layer.relative_loss for layer in record.exceeding] == losses[:-3:-1]
    assert [layer.checksum for layer in record.layers] == [layer.checksum for layer in free.layers]
    assert free.exceeding == ()


def test_the_record_has_the_hash_of_every_layer_and_file(quantized):
    """Over a line of name, dtype and sizes, and the bytes, of every tensor in the order of their names."""
    out, record = quantized
    tensors = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    names = {torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16"}
    for layer in record.layers:
        digest, size = hashlib.sha256(), 0
        for name in sorted(name for name in tensors if name.startswith(f"{layer.stored}.")):
            tensor = tensors[name]
            digest.update(f"{name} {names[tensor.dtype]} {' '.join(map(str, tensor.shape))}\n".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
            size += tensor.nbytes
        assert (layer.checksum, layer.bytes) == (digest.hexdigest(), size)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    del files["nearplane.json"], files["README.md"]  # users may change the card
    assert record.files == files
    assert record.folder == sum(path.stat().st_size for path in out.iterdir())
    assert record.digest == digest_of((out / "nearplane.json").read_text())
