"""tune(): never worse on held-out windows, what is stored is what was trained, and verify holds the new folder to it."""

import importlib
import json
import random
import re
import shutil
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import forgery
import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import CalibrationError, FormatError, NearplaneError, RecipeError
from nearplane.cli import app as cli
from nearplane.demo import CALIBRATION
from nearplane.errors import SystemLimitError
from nearplane.formats.find_record import embedded_record
from nearplane.formats.gguf.gguf_header import read_header
from nearplane.formats.stored import Stored, read_matrices
from nearplane.record.record_file import parsed_record, read_record
from nearplane.record.report.page import render
from nearplane.system.device import Device
from nearplane.system.paths import CARD, INDEX, RECORD
from nearplane.tuning.memory import ALLOCATOR_FACTOR, CODE_BYTES, STEP_BYTES, needed
from nearplane.verbs.verify import verify
from nightly import daily

WAYS = {
    "compressed-tensors": ("llama", {"bits": 4, "group_size": 32}),
    "compressed-tensors, mixed widths": ("qwen3", {"bits": 2.5, "group_size": 16}),
    "compressed-tensors, rounded to nearest": ("llama", {"bits": 3, "group_size": None, "solver": "round-to-nearest"}),
    "gptq, Conv1D": ("gpt2", {"bits": 2, "group_size": 32, "format": "gptq"}),
    "gptq_v2": (
        "llama of two blocks",
        {"bits": 2, "group_size": 16, "symmetric": False, "format": "gptq_v2", "correct": False},
    ),
    "compressed-tensors, four-bit floats": ("llama", {"grid": "mxfp4"}),
    "compressed-tensors, four-bit floats and a global scale": ("llama", {"grid": "nvfp4"}),
    "compressed-tensors, four-bit floats and inputs": ("llama", {"grid": "nvfp4", "activations": "fp4"}),
    "compressed-tensors, powers of two and inputs": ("llama", {"grid": "mxfp4", "activations": "fp4"}),
    "compressed-tensors, eight-bit floats": ("llama", {"grid": "fp8"}),
    "compressed-tensors, eight-bit floats and inputs": ("llama", {"grid": "fp8", "activations": "fp8"}),
    "compressed-tensors, integers and inputs": ("llama", {"grid": "int8", "activations": "int8"}),
    "mlx": ("llama", {"bits": 2, "group_size": 32, "format": "mlx", "include_embeddings": True}),
    "mlx, four-bit floats": ("llama", {"grid": "nvfp4", "format": "mlx"}),
    "llama.cpp": ("llama", {"grid": "q4_0", "embeddings": "f32"}),
    "llama.cpp, embeddings and head": ("llama", {"grid": "q4_0"}),
    "llama.cpp, one matrix for both": ("qwen3", {"grid": "q4_0", "embeddings": "q8_0"}),
    "entropy-coded": ("llama", {"rate": 2.0}),
    "entropy-coded, Conv1D": ("gpt2", {"rate": 1.5, "allocate": "uniform"}),
}
DAILY = (  # of `make test`: of each format one, of every grid and of codes
    "compressed-tensors",
    "compressed-tensors, four-bit floats and inputs",
    "gptq_v2",
    "llama.cpp, embeddings and head",
    "entropy-coded",
)
TEXT = dict(samples=12, seqlen=40)
STEPS = 12  # a third of the default, which "gptq_v2" keeps
BEFORE = ("opening", "reading")  # beginnings of labels of what is done before a run is checked


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:20000])
    return path


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return a function from a family's name to the folder of a tiny random model with the demo model's tokenizer."""
    folders = {}

    def folder_of(name):
        if name not in folders:
            folder = folders[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
            blocks = "n_layer" if name == "gpt2" else "num_hidden_layers"
            family = name.removesuffix(" of two blocks")
            model = random_model(
                config_of(family, vocab_size=TEXT_VOCABULARY, **{blocks: 1 if family == name else 2})
            ).float()
            model.to(torch.bfloat16 if name == "qwen3" else torch.float32).save_pretrained(folder)
            add_tokenizer(folder)
        return str(folders[name])

    return folder_of


@pytest.fixture(scope="module")
def tuned_of(model_of, text, tmp_path_factory):
    """Return a function from a key of WAYS to (solved, tuned, original); do not change them."""
    made = {}

    def folders_of(way):
        if way not in made:
            family, words = WAYS[way]
            place = tmp_path_factory.mktemp("out")
            original, solved, tuned = model_of(family), place / "solved", place / "tuned"
            nearplane.quantize(original, solved, calibration=str(text), **TEXT, **words)
            steps = None if way == "gptq_v2" else STEPS
            nearplane.tune(solved, tuned, against=original, calibration=text, steps=steps)
            made[way] = (solved, tuned, original)
        return made[way]

    return folders_of


@pytest.mark.parametrize("way", daily(WAYS, DAILY))
def test_held_out_kl_ends_at_most_at_the_start_and_is_that_of_the_files(tuned_of, way, text):
    solved, tuned, original = tuned_of(way)
    tuning = read_record(tuned).tuning
    assert tuning.held_out < tuning.start
    assert tuning.kept
    model = nearplane.models.model.open_model(original)
    tokens = nearplane.calibration.texts.read_windows(
        model.tokenizer(), text, samples=tuning.samples, seqlen=tuning.seqlen
    )
    held = tokens[len(tokens) - tuning.held_windows :]
    as_computed = "activations" in WAYS[way][1]
    found = [nearplane.evaluate(folder, held, against=original, activations=as_computed) for folder in (solved, tuned)]
    before, after = (each.computed.kl if as_computed else each.kl for each in found)
    assert before == pytest.approx(tuning.start, rel=1e-4)
    assert after == pytest.approx(tuning.held_out, rel=1e-4)


@pytest.mark.nightly
def test_inputs_of_experts_are_rounded_as_evaluate_does(model_of, text, tmp_path):
    """Few steps on random experts gain nothing, so only the start is compared."""
    original, solved, tuned = model_of("qwen3_moe"), tmp_path / "solved", tmp_path / "tuned"
    words = {"grid": "nvfp4", "activations": "fp4", "runtime": "vllm"}
    nearplane.quantize(original, solved, calibration=str(text), **TEXT, **words)
    tuning = nearplane.tune(solved, tuned, against=original, calibration=text, steps=1).tuning
    model = nearplane.models.model.open_model(original)
    tokens = nearplane.calibration.texts.read_windows(
        model.tokenizer(), text, samples=tuning.samples, seqlen=tuning.seqlen
    )
    found = nearplane.evaluate(solved, tokens[-tuning.held_windows :], against=original, activations=True)
    assert found.computed.kl == pytest.approx(tuning.start, rel=1e-4)
    assert found.computed.kl != pytest.approx(found.kl, rel=0.1)


def test_what_llama_cpp_has_no_use_for_is_in_no_tuned_gguf(model_of, text, tmp_path):
    """GPT-2's checkpoint on the hub has masks as tensors."""
    original = shutil.copytree(model_of("gpt2"), tmp_path / "gpt2")
    tensors = load_file(original / "model.safetensors")
    tensors |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(tensors, original / "model.safetensors", {"format": "pt"})
    words = dict(grid="q4_0", embeddings="f32", solver="round-to-nearest")
    nearplane.quantize(original, tmp_path / "out", calibration=str(text), **(TEXT | words))
    record = nearplane.tune(tmp_path / "out", tmp_path / "tuned", against=original, calibration=text, steps=1)
    assert record.tuning.steps == 1
    assert not verify(tmp_path / "tuned").faults


@pytest.mark.parametrize("way", daily(WAYS, DAILY))
def test_verify_holds_what_was_written(tuned_of, way):
    _, tuned, original = tuned_of(way)
    found = verify(tuned, against=original)
    assert [f"{fault.where}: {fault.what}" for fault in (*verify(tuned).faults, *found.faults)] == []
    assert found.measured


@pytest.mark.parametrize("way", daily(WAYS, DAILY))
def test_readers_find_what_they_found_before(tuned_of, way):
    """The same files, tensors, dtypes, shapes and global scales; codes move at 2 and 3 bits and of 4-bit floats, a few."""
    solved, tuned, _ = tuned_of(way)
    names, coded = {path.name for path in solved.iterdir()}, "rate" in WAYS[way][1]
    assert {path.name for path in tuned.iterdir()} == names
    for name in names - ({RECORD, CARD, INDEX} if coded else {RECORD, CARD}):  # the index of these holds checksums
        if not name.endswith((".safetensors", ".gguf")):
            assert (solved / name).read_bytes() == (tuned / name).read_bytes()
            continue
        if name.endswith(".gguf"):
            one, other = (
                [(x.name, x.type, x.size) for x in read_header(path / name).tensors] for path in (solved, tuned)
            )
            assert one == other
            assert embedded_record(tuned / name) == read_record(tuned).embedded()
            continue
        one, other = load_file(solved / name), load_file(tuned / name)
        assert [(key, x.dtype) for key, x in one.items()] == [(key, x.dtype) for key, x in other.items()]
        if not coded:
            assert {key: x.shape for key, x in one.items()} == {key: x.shape for key, x in other.items()}
    before, after, tuning = dict(read_matrices(solved)), dict(read_matrices(tuned)), read_record(tuned).tuning
    moved = 0
    for layer in read_record(tuned).layers:
        one, other = before[layer.stored], after[layer.stored]
        moved += int((one.codes != other.codes).sum())
        floats = layer.number_format.levels is not None
        bits = layer.number_format.bits or 2
        assert bits <= 3 or (floats and bits == 4) or torch.equal(one.codes, other.codes)
        in_blocks = re.search(r"\.\d+\.", layer.name) is not None  # embeddings and head stay
        if not floats or not in_blocks:  # few steps of floats move as far as the next number
            assert coded or one.grid.same_as(other.grid) is not in_blocks
        if layer.number_format.global_scale:
            assert one.grid.divisor == other.grid.divisor
        if layer.number_format.bits and not layer.number_format.minimum:  # minima are trained
            assert torch.equal(one.grid.zero, other.grid.zero)
    assert moved == tuning.codes
    assert moved < 0.2 * sum(layer.out_features * layer.in_features for layer in read_record(tuned).layers)


def test_losses_before_stay_in_the_record_and_those_after_are_their_own(tuned_of):
    solved, tuned, _ = tuned_of("gptq_v2")
    before, after = read_record(solved), read_record(tuned)
    assert [(each.name, each.loss, each.checksum) for each in after.tuning.solved] == [
        (layer.name, layer.loss, layer.checksum) for layer in before.layers
    ]
    assert all(layer.worst_case is None and layer.gamma is None for layer in after.layers)  # no sweep made these codes
    assert {layer.loss for layer in before.layers}.isdisjoint(layer.loss for layer in after.layers)
    assert parsed_record(after.to_json()) == after
    page = render(after)
    assert "Tuning" in page
    assert f"{after.tuning.held_out:.5f}" in page
    assert "Tuning" not in render(before)


def test_files_that_hold_something_else_than_was_trained_are_no_checkpoint(tuned_of, text, tmp_path, monkeypatch):
    solved, _, original = tuned_of("compressed-tensors")
    verb = importlib.import_module("nearplane.verbs.tune")

    def writes_and_moves(trained, container, write=verb._write):
        layers = write(trained, container)
        with torch.no_grad():
            trained.matrices["model.layers.0.mlp.up_proj"].trained()["steps"].add_(4.0)
        return layers

    monkeypatch.setattr(verb, "_write", writes_and_moves)
    with pytest.raises(FormatError, match=r"^model\.layers\.0\.mlp\.up_proj: the written files hold something else"):
        nearplane.tune(solved, tmp_path / "new", against=original, calibration=text, steps=1)
    assert not (tmp_path / "new").exists()


def test_tuning_twice_gives_the_same_bytes(tuned_of, text, tmp_path):
    solved, tuned, original = tuned_of("compressed-tensors")
    nearplane.tune(solved, tmp_path / "again", against=original, calibration=text, steps=STEPS)
    for path in tuned.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_limit_of_memory_changes_no_byte(tuned_of, text, tmp_path, monkeypatch, caplog):
    """With a limit blocks run twice in a step, and here hidden states lie in a file."""
    solved, tuned, original = tuned_of("compressed-tensors, four-bit floats and inputs")
    monkeypatch.setattr("nearplane.tuning.memory.needed", lambda *_, **__: needed(*_, **__)._replace(states=2**40))
    with caplog.at_level("INFO", "nearplane"):
        nearplane.tune(solved, tmp_path / "new", against=original, calibration=text, steps=STEPS, memory="20GB")
    assert any(message.endswith("hidden states lie in a file") for message in caplog.messages)
    for path in tuned.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "new" / path.name).read_bytes()
    with pytest.raises(RecipeError, match=r"--memory 100 MB is too small: .* Use --memory [0-9.]+GB"):
        nearplane.tune(solved, tmp_path / "other", against=original, calibration=text, memory="100MB")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("way", daily(["gptq_v2", "entropy-coded"], ["gptq_v2"]))
def test_quantize_tunes_what_it_solved(tuned_of, text, tmp_path, tmp_path_factory, way):
    solved, tuned, original = tuned_of(way)
    if way != "gptq_v2":  # which was tuned in as many steps as `quantize` takes
        tuned = tmp_path_factory.mktemp("default steps") / "tuned"
        nearplane.tune(solved, tuned, against=original, calibration=text)
    record = nearplane.quantize(
        original, tmp_path / "out", calibration=str(text), tune="network", **TEXT, **WAYS[way][1]
    )
    assert record.recipe.tune == "network"
    for path in tuned.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_record_says_who_tuned_and_for_how_long(tuned_of, text, tmp_path, monkeypatch):
    solved, _, original = tuned_of("compressed-tensors")
    folder, now = shutil.copytree(solved, tmp_path / "solved"), read_record(solved)
    recipe = replace(now.recipe, calibration=replace(now.recipe.calibration, calibration=None))
    forgery.sign(folder, replace(now, recipe=recipe, device="cuda", versions={"torch": "0.1"}))
    monkeypatch.setattr("nearplane.calibration.texts.DEFAULT_DATASET", str(text))
    at = []

    def looking(items, label, total):
        yield from items
        at.append((label, time.perf_counter()))

    record = nearplane.tune(folder, tmp_path / "new", against=original, device="cpu", steps=2, progress=looking)
    (_, trained), (label, measured) = (each for each in at if each[0] != "reading the calibration text")
    assert label == "measuring"
    assert record.tuning.seconds > measured - trained
    assert record.seconds == now.seconds + record.tuning.seconds
    assert (record.device, record.versions) == ("cpu", now.versions)
    assert record.tuning.calibration == "HuggingFaceFW/fineweb-edu:sample-10BT:train"


@pytest.mark.nightly
def test_tokens_given_in_python_are_tuned_on(model_of, tmp_path, generator):
    original = model_of("llama")
    tokens = torch.randint(3, TEXT_VOCABULARY, (20, 24), generator=generator)
    words = dict(bits=2, group_size=16, format="gptq_v2", symmetric=False)
    record = nearplane.quantize(original, tmp_path / "out", calibration=tokens, tune="network", **words)
    assert record.tuning.windows + record.tuning.held_windows == 20 - record.extra_windows
    assert not verify(tmp_path / "out", against=original, calibration=tokens).faults
    more = torch.cat([tokens, torch.randint(3, TEXT_VOCABULARY, (40, 24), generator=generator)])
    nearplane.quantize(original, tmp_path / "solved", calibration=tokens, **words)
    tuned = nearplane.tune(tmp_path / "solved", tmp_path / "more", against=original, calibration=more)
    assert tuned.text == record.text
    assert tuned.tuning.found == 60
    assert tuned.tuning.windows > 20
    assert not verify(tmp_path / "more", against=original, calibration=more).faults


@pytest.fixture
def copy_of(tuned_of, tmp_path):
    """Return a function from a key of WAYS to (copy of the tuned checkpoint that may be changed, original)."""

    def folders_of(way):
        _, tuned, original = tuned_of(way)
        return shutil.copytree(tuned, tmp_path / "copy", dirs_exist_ok=True), original

    return folders_of


@pytest.mark.parametrize("name", ["model.layers.0.input_layernorm.weight", "model.norm.weight"])
def test_a_norm_that_is_not_the_tuned_one_is_found(copy_of, name):
    """By its hash; where that is made to fit, by what comes of it."""
    folder, original = copy_of("compressed-tensors")
    reader = Stored(folder).reader
    forgery.rewrite(folder, reader.file(name), {name: 1.01 * reader.read([name])[name]})
    forgery.rehash(folder)
    assert name in {fault.where for fault in verify(folder).faults}
    record = read_record(folder)
    right = forgery.written({name: Stored(folder).reader.read([name])[name]}).checksum
    forgery.sign(folder, replace(record, tuning=replace(record.tuning, norms=record.tuning.norms | {name: right})))
    assert verify(folder).faults == ()
    assert verify(folder, against=original).faults


def test_only_norms_may_differ_from_the_original(copy_of):
    """Whatever else the record calls a tuned norm, with the right hash of what is there."""
    folder, original = copy_of("compressed-tensors")
    name = "model.embed_tokens.weight"
    reader = Stored(folder).reader
    forgery.rewrite(folder, reader.file(name), {name: 1.5 * reader.read([name])[name]})
    forgery.rehash(folder)
    record, there = read_record(folder), forgery.written({name: Stored(folder).reader.read([name])[name]}).checksum
    forgery.sign(folder, replace(record, tuning=replace(record.tuning, norms=record.tuning.norms | {name: there})))
    assert verify(folder).faults == ()
    said = [fault.what for fault in verify(folder, against=original).faults if fault.where == name]
    assert said[0].endswith("the original has no such norm")
    assert "this unquantized tensor differs from the original" in said


@pytest.mark.parametrize("kind", ["code", "scale", "certificate"])
def test_forged_alterations_are_found_with_the_data(copy_of, kind):
    folder, original = copy_of("gptq_v2")
    altered = forgery.FORGED[kind](folder, random.Random(kind))
    assert any(altered.where in fault.where for fault in verify(folder, against=original).faults), altered


HIDDEN = (  # docs/certificates.md, "Checkpoints that were tuned" and "What no data can show"
    r"seconds|peak_memory|asked|^source|versions|device|rounds|scale$|polish|rate$|rows$|allocate|seed|calibration\.calibration|"
    r"^tuning\.(calibration|solved|curve|rates|found|steps|batch|codes)"
)


@pytest.mark.parametrize("seed", daily(range(40), range(2)))
def test_any_value_of_a_tuned_record_with_its_digest_made_to_fit_is_found_with_the_data(copy_of, text, seed):
    folder, original = copy_of(("compressed-tensors", "entropy-coded")[seed % 2])
    altered = forgery.change_value(folder, random.Random(seed), HIDDEN)
    try:
        found = verify(folder, against=original, calibration=text).faults
    except NearplaneError as error:
        found = (error,)
    assert found, altered
    assert "digest" not in str(found[0]), altered


@pytest.mark.parametrize("way", ["compressed-tensors", pytest.param("entropy-coded", marks=pytest.mark.nightly)])
def test_the_record_from_before_tuning_is_found_with_the_data(tuned_of, way, text, tmp_path):
    """And that of the tuned checkpoint on the files from before: every hash is made to fit."""
    solved, tuned, original = tuned_of(way)
    for folder, donor in ((tuned, solved), (solved, tuned)):
        copy = shutil.copytree(folder, tmp_path / folder.name)
        forgery.take_record(copy, donor)
        assert verify(copy, against=original, calibration=text).faults


def test_a_norm_that_was_not_tuned_is_that_of_the_original(copy_of):
    folder, original = copy_of("compressed-tensors")
    record = read_record(folder)
    name = next(iter(record.tuning.norms))
    norms = {key: value for key, value in record.tuning.norms.items() if key != name}
    forgery.sign(folder, replace(record, tuning=replace(record.tuning, norms=norms)))
    assert verify(folder).faults == ()
    assert name in {fault.where for fault in verify(folder, against=original).faults}


def test_held_out_kl_is_measured_again(copy_of):
    folder, original = copy_of("compressed-tensors")
    record = read_record(folder)
    better = 0.99 * record.tuning.held_out
    curve = (*record.tuning.curve[:-1], replace(record.tuning.curve[-1], held_out=better))
    kept = replace(record.tuning, curve=curve, held_out=better, kept=curve[-1].step)
    forgery.sign(folder, replace(record, tuning=kept))
    assert verify(folder).faults == ()
    assert [fault.where for fault in verify(folder, against=original).faults] == [f"{RECORD}, tuning"]


def test_an_original_that_has_changed_since_is_refused(tuned_of, tmp_path):
    solved, _, original = tuned_of("compressed-tensors")
    changed = shutil.copytree(original, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    save_file({name: 1.01 * each for name, each in tensors.items()}, changed / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"or has changed since then: its tensor .* differs from the checkpoint"):
        nearplane.tune(solved, tmp_path / "new", against=changed)


def test_what_cannot_be_tuned_is_refused_in_a_sentence(tuned_of, model_of, text, tmp_path):
    solved, tuned, original = tuned_of("compressed-tensors")
    other = tmp_path / "other.txt"
    other.write_text(CALIBRATION.read_text()[100:9000])
    cases = [
        ((tuned, "new"), {}, RecipeError, "is tuned already"),
        (
            (solved, "new"),
            {"calibration": other},
            CalibrationError,
            "are not those on which the checkpoint was calibrated",
        ),
        ((solved, "new"), {"against": model_of("gpt2")}, RecipeError, "is not the model that was quantized"),
        ((solved, "new"), {"samples": 1}, RecipeError, "samples is 1"),
        ((solved, "new"), {"seqlen": 4000}, CalibrationError, "more than the model's maximum length of 64"),
        ((solved, solved), {"overwrite": True}, RecipeError, "overlaps with"),
        ((tmp_path, "new"), {}, NearplaneError, "has no nearplane.json"),
    ]
    for (source, out), words, error, said in cases:
        with pytest.raises(error) as caught:
            nearplane.tune(source, tmp_path / out, **({"against": original, "calibration": text} | words))
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()
    ends = tmp_path / "ends"
    nearplane.quantize(original, ends, bits=4, format="mlx", group_size=32, include_embeddings=True, ignore=["layers"],
                       calibration=str(text), **TEXT)  # fmt: skip
    with pytest.raises(RecipeError, match="no layer in its blocks is quantized"):
        nearplane.tune(ends, tmp_path / "new", against=original)
    shutil.rmtree(ends)
    limited = nearplane.quantize(
        original, ends, mix="int4,int8", size="300KB", group_size=16, calibration=str(text), **TEXT
    )
    assert limited.mix.option == "size"
    with pytest.raises(RecipeError, match="makes the run record longer"):
        nearplane.tune(ends, tmp_path / "new", against=original)
    shutil.rmtree(ends)
    words = dict(calibration=str(text), tune="network", **TEXT)
    for asked, said in (
        ({"rate": 2.0, "include_head": True}, "embeddings or head are entropy-coded"),
        ({"size": "1MB"}, "--size"),
        ({"bits": 4, "kv_cache": "fp8"}, "it has scales of keys and values"),
    ):
        with pytest.raises(RecipeError, match=said):
            nearplane.quantize(original, tmp_path / "new", **asked, **words)
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


def test_no_checkpoint_is_written_over_the_one_that_is_tuned(tuned_of, tmp_path):
    """Of a run that was killed when all was written, OUT.unfinished is whole, and would be deleted to begin OUT anew."""
    solved, _, original = tuned_of("compressed-tensors")
    whole = shutil.copytree(solved, tmp_path / "out.unfinished")
    within = shutil.copytree(solved, tmp_path / "holds" / "within")
    shutil.copy(solved / RECORD, tmp_path / "holds" / RECORD)
    before = sorted(tmp_path.rglob("*"))
    for source, out in ((whole, tmp_path / "out"), (whole, whole / "new"), (within, tmp_path / "holds")):
        with pytest.raises(RecipeError, match=r"overlaps with"):
            nearplane.tune(source, out, against=original, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("way", daily(["entropy-coded", "entropy-coded, Conv1D"], DAILY))
def test_entropy_coded_layers_take_no_more_than_was_asked(tuned_of, way):
    solved, tuned, _ = tuned_of(way)
    before, after = read_record(solved), read_record(tuned)
    there = sum(layer.bytes for layer in before.layers)
    asked = sum(layer.asked * layer.out_features * layer.in_features for layer in before.layers) / 8
    assert after.tuning.most == max(there, int(1.003 * asked))
    assert sum(layer.bytes for layer in after.layers) <= after.tuning.most
    assert {point.bytes for point in after.tuning.curve if point.step == 0} == {there}
    assert [layer.asked for layer in after.layers] == [layer.asked for layer in before.layers]


def test_what_does_not_fit_in_memory_is_refused(tuned_of, text, tmp_path, monkeypatch):
    solved, _, original = tuned_of("compressed-tensors")
    monkeypatch.setattr(Device, "free", lambda device: 10**5)
    with pytest.raises(
        RecipeError, match=r"of memory on cpu are free or this program's, which is too little: tuning needs up to"
    ):
        nearplane.tune(solved, tmp_path / "new", against=original, calibration=text, device="cpu")


def test_what_cannot_be_tuned_is_refused_before_the_solve(model_of, tmp_path, monkeypatch, text, generator):
    def solves(items, label, total):
        assert label.startswith(BEFORE), "too late"
        return items

    words = dict(bits=4, group_size=16, device="cpu", tune="network", progress=solves)
    tokens = torch.randint(3, TEXT_VOCABULARY, (2, 64), generator=generator)
    with pytest.raises(CalibrationError, match="needs at least 2, one of them held out"):
        nearplane.quantize(model_of("llama"), tmp_path / "out", calibration=tokens, **words)
    monkeypatch.setattr(Device, "free", lambda device: 10**5)
    with pytest.raises(
        RecipeError, match=r"of memory on cpu are free or this program's, which is too little: tuning needs up to"
    ):
        nearplane.quantize(model_of("llama"), tmp_path / "out", calibration=str(text), **TEXT, **words)
    assert not list(tmp_path.iterdir())


def test_layers_whose_codes_may_come_to_be_trained_count_before_the_solve(model_of, tmp_path, monkeypatch, text):
    """With widths by slope any layer may get 3 bits: memory for codes that move must be there, which 4 bits do without."""

    class BeganError(Exception):
        pass

    def solves(items, label, total):
        if not label.startswith(BEFORE):
            raise BeganError
        return items

    original, words = model_of("llama"), dict(group_size=16, device="cpu", tune="network", progress=solves)
    model = nearplane.models.model.open_model(original)
    tokens = nearplane.calibration.texts.read_windows(model.tokenizer(), text, samples=400, seqlen=40)
    weights = sum(layer.shape[0] * layer.shape[1] for layer in model.layers)
    needs = needed(model, tokens, batch=6, trained=CODE_BYTES * weights + STEP_BYTES * weights // 16)
    monkeypatch.setattr("nearplane.tuning.memory.resident", lambda: 0)
    monkeypatch.setattr(Device, "free", lambda device: int(ALLOCATOR_FACTOR * (needs.streamed + needs.sent)) + 1)
    for asked, error in (
        ({"bits": 4}, BeganError),
        ({"bits": 3.5}, RecipeError),
        ({"rate": 3.0}, RecipeError),
        ({"grid": "mxfp4"}, RecipeError),
    ):
        own = {key: value for key, value in words.items() if key != "group_size" or "bits" in asked}
        with pytest.raises(error):
            nearplane.quantize(original, tmp_path / "out", calibration=str(text), **TEXT, **asked, **own)


def test_what_tuning_looked_at_adds_up(tuned_of, text, tmp_path):
    """A text that ends before --samples is said, and so are windows that are left out."""
    solved, _, original = tuned_of("compressed-tensors")
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[:4000])
    tuning = nearplane.tune(solved, tmp_path / "new", against=original, calibration=short, steps=3).tuning
    assert tuning.found < tuning.samples == 400  # five times 50 tokens for each of 64 inputs
    assert f"the text has {tuning.found} windows of 40, 400 were requested" in tuning.windows_sentence()
    left = tuning.found - tuning.windows - tuning.held_windows
    assert left > 0
    assert tuning.windows == 3 * tuning.batch
    assert not verify(tmp_path / "new", against=original, calibration=short).faults
    assert f"{left} more are extra windows" in tuning.windows_sentence()
    assert "were requested" not in replace(tuning, samples=tuning.found).windows_sentence()


@pytest.mark.nightly
def test_what_was_solved_is_not_lost_where_tuning_fails(model_of, text, tmp_path, monkeypatch):
    def fails(*args, **words):
        raise CalibrationError("Gradients are NaN.")

    monkeypatch.setattr("nearplane.tuning.loop.mean_kl", fails)
    words = dict(bits=4, group_size=16, solver="round-to-nearest", calibration=str(text), device="cpu", **TEXT)
    with pytest.raises(
        CalibrationError,
        match=r"The quantized checkpoint is in .*out\.untuned\. Repeat the command to tune it",
    ):
        nearplane.quantize(model_of("llama"), tmp_path / "out", tune="network", **words)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    nearplane.tune(tmp_path / "out.untuned", tmp_path / "by hand", against=model_of("llama"))
    assert not verify(tmp_path / "by hand").faults
    monkeypatch.setattr(importlib.import_module("nearplane.planning.solve_stage"), "solve_layer", fails)
    nearplane.quantize(model_of("llama"), tmp_path / "out", tune="network", **words)
    for path in (tmp_path / "by hand").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert not (tmp_path / "out.untuned").exists()


def test_a_folder_that_nobody_named_is_not_replaced(model_of, tuned_of, text, tmp_path):
    solved, _, _ = tuned_of("compressed-tensors")
    there = shutil.copytree(solved, tmp_path / "out.untuned")
    words = dict(bits=4, group_size=32, calibration=str(text), **TEXT)
    with pytest.raises(RecipeError, match=r"out\.untuned, where .*, is not from this command"):
        nearplane.quantize(model_of("llama"), tmp_path / "out", tune="network", overwrite=True, **words)
    for path in solved.iterdir():
        assert path.read_bytes() == (there / path.name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out.untuned"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_who_stops_tuning_is_told_what_is_left(model_of, text, tmp_path, monkeypatch, kind):
    def stopped(*args, **words):
        raise kind

    monkeypatch.setattr("nearplane.tuning.loop.mean_kl", stopped)
    words = dict(bits=4, group_size=32, solver="round-to-nearest", calibration=str(text), **TEXT)
    with pytest.raises(SystemLimitError if kind is MemoryError else kind) as caught:
        nearplane.quantize(model_of("llama"), tmp_path / "out", tune="network", **words)
    said = str(caught.value) if kind is MemoryError else caught.value.__notes__[-1]
    assert f"The quantized checkpoint is in {tmp_path / 'out.untuned'}" in said
    assert read_record(tmp_path / "out.untuned").tuning is None


@pytest.mark.nightly
def test_streamed_blocks_give_the_same_bytes_as_held_ones(tuned_of, text, tmp_path, monkeypatch):
    solved, tuned, original = tuned_of("gptq_v2")
    monkeypatch.setattr(Device, "free", lambda device: None)  # then nothing is held
    nearplane.tune(solved, tmp_path / "streamed", against=original, calibration=text)
    for path in tuned.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "streamed" / path.name).read_bytes()


def test_the_commands_work(tuned_of, text, tmp_path, capsys, monkeypatch):
    solved, _, original = tuned_of("gptq_v2")
    words = [
        "tune",
        str(solved),
        str(tmp_path / "new"),
        "--against",
        original,
        "--calibration",
        str(text),
        "--samples",
        "60",
        "--steps",
        "2",
    ]
    for more in (("--memory", "20.5GB"), ("--json", "--overwrite")):
        monkeypatch.setattr("sys.argv", ["nearplane", *words, *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    said = capsys.readouterr().out
    assert "held-out windows of 40 tokens" in said
    assert json.loads(said[said.index("{\n") :])["tuning"]["samples"] == 60


def test_layers_above_max_loss_are_named_and_the_command_ends_with_4(tuned_of, text, tmp_path, capsys, monkeypatch):
    solved, _, original = tuned_of("gptq_v2")
    folder, record = shutil.copytree(solved, tmp_path / "solved"), read_record(solved)
    forgery.sign(folder, replace(record, recipe=replace(record.recipe, max_loss=1e-6)))
    words = ["tune", str(folder), str(tmp_path / "new"), "--against", original, "--calibration", str(text), "--steps=1"]
    monkeypatch.setattr("sys.argv", ["nearplane", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 4
    said = capsys.readouterr().out
    assert f"{len(record.layers)} layers with a relative loss above --max-loss 1e-06" in said
    assert read_record(folder).exceeding[0].name in said
