"""verify(): what was written holds, and no single alteration passes, crude or with every hash made to fit."""

import gc
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import forgery
import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane import FormatError, GridScheme, NearplaneError, RecipeError
from nearplane.demo import CALIBRATION
from nearplane.errors import printable
from nearplane.formats.beside import Beside
from nearplane.formats.stored import Stored, read_matrices
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.matrix import on_grid
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.scheme import Scheme
from nearplane.record.record_file import read_record
from nearplane.system.paths import RECORD
from nearplane.verbs import quantize_request
from nearplane.verbs.verify import Verified, verify
from nightly import daily

WAYS = {  # every format; grids of every kind, and every way to solve, at least once; two blocks once
    "compressed-tensors": ("llama of one block", {"bits": 4, "group_size": 32}),
    "compressed-tensors, mixed widths": ("llama of one block", {"bits": 2.5, "group_size": 16}),
    "compressed-tensors, rounded to nearest": ("llama of one block", {"bits": 3, "group_size": None, "solver": "round-to-nearest"}),
    "gptq, Conv1D": ("gpt2", {"bits": 4, "group_size": 32, "format": "gptq", "solver": "k-best"}),
    "gptq_v2": ("llama of one block", {"bits": 4, "symmetric": False, "group_size": 16, "format": "gptq_v2"}),
    "gptq_v2, names without a prefix": (
        "gpt2 renamed", {"bits": 2, "group_size": 16, "symmetric": False, "format": "gptq_v2"},
    ),
    "mlx, mixed widths and ends": (
        "llama of one block", {"bits": 3.5, "group_size": 32, "format": "mlx", "include_embeddings": True, "include_head": True},
    ),
    "nearplane": ("llama", {"rate": 3.0}),
    "nearplane, tied ends": ("qwen3", {"rate": 3.0, "include_embeddings": True, "include_head": True}),
    "nearplane, ends": ("llama of one block", {"rate": 3.0, "include_embeddings": True, "include_head": True}),
    "nearplane, Conv1D": ("gpt2 renamed", {"rate": 3.0, "solver": "nearest-plane", "true_sequential": False}),
    "nearplane, rounded to nearest": ("qwen3", {"rate": 3.0, "solver": "round-to-nearest"}),
}  # fmt: skip
DAILY = (  # of `make test`
    "compressed-tensors",
    "compressed-tensors, mixed widths",
    "gptq, Conv1D",
    "gptq_v2",
    "nearplane",
    "nearplane, tied ends",
    "nearplane, Conv1D",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:4000])
    return path


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return a function from a family's name to the folder of a tiny random model with the demo model's tokenizer."""
    folders = {}

    def folder_of(name):
        if name in folders:
            return folders[name]
        folder = folders[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
        blocks = "n_layer" if name.startswith("gpt2") else "num_hidden_layers"
        family = name.removesuffix(" renamed").removesuffix(" of one block")
        config = config_of(family, vocab_size=TEXT_VOCABULARY, **{blocks: 2 if name == "llama" else 1})
        random_model(config).float().save_pretrained(folder)
        add_tokenizer(folder)
        if name.endswith(" renamed"):
            tensors = load_file(folder / "model.safetensors")
            tensors = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return folder_of


@pytest.fixture(scope="module")
def checkpoint_of(model_of, text, tmp_path_factory):
    """Return a function from a key of WAYS to (checkpoint, original); do not change it."""
    made = {}

    def folders_of(way):
        if way not in made:
            family, words = WAYS[way]
            out = tmp_path_factory.mktemp("out") / "checkpoint"
            nearplane.quantize(model_of(family), out, calibration=str(text), samples=6, seqlen=40, **words)
            made[way] = (out, str(model_of(family)))
        return made[way]

    return folders_of


@pytest.fixture
def copy_of(checkpoint_of, tmp_path):
    """Return a function from a key of WAYS to (copy of the checkpoint that may be changed, original)."""

    def folders_of(way):
        folder, original = checkpoint_of(way)
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return Path(shutil.copytree(folder, tmp_path / "copy")), original

    return folders_of


def said(found):
    """Return all faults as the command prints them."""
    assert isinstance(found, Verified)
    return [f"{fault.where}: {fault.what}" for fault in found.faults]


def outcome(folder, **words):
    """Return all faults, or the one sentence with which the folder was refused."""
    try:
        return said(verify(folder, **words))
    except NearplaneError as error:
        return [str(error)]


@pytest.mark.parametrize("way", daily(WAYS, DAILY))
def test_what_was_written_holds(checkpoint_of, way):
    folder, original = checkpoint_of(way)
    alone, measured = verify(folder), verify(folder, against=original)
    assert said(alone) == said(measured) == []
    assert not alone.measured
    assert measured.measured
    assert measured.layers == len(measured.record.layers) == len(dict(read_matrices(folder)))
    assert measured.files == sum(path.is_file() for path in folder.rglob("*")) - 1  # users may change the card


def test_the_summary_is_one_sentence(checkpoint_of):
    folder, original = checkpoint_of("compressed-tensors")
    files = sum(path.is_file() for path in folder.iterdir()) - 1  # users may change the card
    assert verify(folder).summary() == (
        f"{files} files and 7 layers checked: no faults; losses were not measured (this needs --against)"
    )
    assert verify(folder, against=original).summary() == (
        f"{files} files and 7 layers checked: no faults; every loss was measured again"
    )


@pytest.mark.parametrize("why", ["another text", "another model", "one layer unreadable", "one layer gone meanwhile"])
def test_the_summary_says_that_losses_were_not_measured_though_they_were_to_be(copy_of, model_of, tmp_path, why):
    folder, original = copy_of("compressed-tensors")
    words = {}
    if why == "another text":
        words["calibration"] = tmp_path / "other.txt"
        words["calibration"].write_text(CALIBRATION.read_text()[100:4100])
    elif why == "another model":
        original = str(model_of("gpt2"))
    elif why == "one layer unreadable":
        stored = Stored(folder)
        name = f"{stored.names()[5]}.weight_packed"
        forgery.rewrite(folder, stored.reader.file(name), {name: torch.zeros(3, dtype=torch.int32)})
    else:
        last = Stored(folder).reader.file(f"{read_record(folder).layers[-1].stored}.weight_packed")

        def gone(items, label, total):
            for item in items:
                if label == "measuring":
                    last.unlink(missing_ok=True)
                yield item

        words["progress"] = gone
    found = verify(folder, against=original, **words)
    assert found.faults
    assert not found.measured
    count = len(found.faults)
    assert found.summary().endswith(
        f"7 layers checked: {count} fault{'s' * (count > 1)}; some losses could not be measured again"
    )


@pytest.mark.parametrize("way", ["compressed-tensors", "nearplane, tied ends"])
def test_progress_counts_layers_and_one_matrix_is_in_memory_at_a_time(checkpoint_of, way):
    """Codes take four bytes a weight: those of all layers are more than the model."""
    folder, original = checkpoint_of(way)
    gc.freeze()  # what earlier tests left is not gone through again for every layer
    before, seen = matrices_alive(), []

    def progress(items, label, total):
        for count, item in enumerate(items, 1):
            seen.append((label, count, total, matrices_alive() - before))
            yield item

    found = verify(folder, against=original, progress=progress)
    assert found.measured
    totals = {"hashing files": found.files - 1, "checking layers": found.layers}
    totals |= {"reading the calibration text": 1, "measuring": found.layers}
    expected = [(label, index + 1, total) for label, total in totals.items() for index in range(total)]
    assert [place[:3] for place in seen] == expected
    assert max(alive for *_, alive in seen) <= 1


def matrices_alive():
    gc.collect()
    return sum(type(each) is QuantizedMatrix for each in gc.get_objects())


@pytest.mark.parametrize("way", daily(WAYS, DAILY))
def test_hashes_of_what_was_not_altered_are_those_that_it_has(copy_of, checkpoint_of, way):
    """Else forgeries would not be what they claim to be."""
    folder, _ = copy_of(way)
    forgery.rehash(folder)
    for path in checkpoint_of(way)[0].rglob("*"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


@pytest.mark.parametrize("seed", daily(range(9), range(3)))
@pytest.mark.parametrize("kind", forgery.CRUDE)
def test_crude_alterations_are_found_from_the_files_alone(copy_of, kind, seed):
    folder, _ = copy_of(("compressed-tensors", "gptq, Conv1D", "nearplane, tied ends")[seed % 3])
    altered = forgery.CRUDE[kind](folder, random.Random(f"{kind} {seed}"))
    assert any(altered.where in line for line in outcome(folder)), altered


def forgeries():
    """Yield every kind of alteration of every checkpoint; `make test` runs the half that differs by more than its seed."""
    one_of_each_format = ("compressed-tensors", "gptq, Conv1D", "nearplane, tied ends")
    for way in WAYS:
        for kind in forgery.FORGED:
            for seed in range(1 if kind == "tensor" else 2):
                usual = seed == 0 and (way in one_of_each_format or (way == "gptq_v2" and kind in ("code", "scale")))
                yield pytest.param(way, kind, seed, marks=() if usual else pytest.mark.nightly)


@pytest.mark.parametrize(("way", "kind", "seed"), forgeries())
def test_forged_alterations_are_found_with_the_data(copy_of, way, kind, seed):
    """Of the files alone no hash gives them away."""
    folder, original = copy_of(way)
    altered = forgery.FORGED[kind](folder, random.Random(f"{way} {kind} {seed}"))
    alone = outcome(folder)
    assert not any("SHA-256" in line or "digest" in line for line in alone if altered.what != "checksum"), altered
    assert alone == [] or kind == "certificate", altered
    found = outcome(folder, against=original)
    assert any(altered.where in line for line in found), altered


HIDDEN = (  # docs/certificates.md, "What no data can show"
    r"seconds|peak_memory|asked|^source|versions|device|solver|beam|rounds|scale$|polish|rate$|rows$|allocate|seed|"
    r"calibration\.calibration"
)


@pytest.mark.parametrize("seed", daily(range(60), range(3)))
def test_any_value_of_a_record_with_its_digest_made_to_fit_is_found_with_the_data(copy_of, seed):
    folder, original = copy_of(("compressed-tensors", "gptq, Conv1D", "nearplane")[seed % 3])
    altered = forgery.change_value(folder, random.Random(seed), HIDDEN)
    assert not any("digest" in line for line in outcome(folder)), altered
    assert outcome(folder, against=original), altered


def test_records_of_two_checkpoints_in_each_others_place_are_found_with_the_data(checkpoint_of, text, tmp_path):
    """Of one model on one grid, calibrated on five windows and on six; every hash is made to fit."""
    six, original = checkpoint_of("compressed-tensors")
    five = tmp_path / "five"
    nearplane.quantize(original, five, calibration=str(text), samples=5, seqlen=40, **WAYS["compressed-tensors"][1])
    for folder, donor in ((six, five), (five, six)):
        copy = Path(shutil.copytree(folder, tmp_path / f"copy of {folder.name}"))
        forgery.take_record(copy, donor)
        assert outcome(copy) == []
        assert any("loss is" in line for line in outcome(copy, against=original))


@pytest.mark.parametrize(
    "way",
    [
        "nearplane",
        *(pytest.param(way, marks=pytest.mark.nightly) for way in ("compressed-tensors", "gptq_v2", "nearplane, ends")),
    ],
)
def test_every_field_of_a_certificate_is_measured_again(copy_of, way):
    """All but what it is called, what was asked for and how long it took. What files alone do not betray is changed one a layer."""
    folder, original = copy_of(way)
    record, hidden = read_record(folder), []
    entries = {layer.name: layer for layer in record.layers}
    for name in forgery.measured(record.layers[0]):
        forgery.forge_layer(folder, record.layers[0].name, name, random.Random(name))
        found = outcome(folder)
        assert all(line.startswith(f"{record.layers[0].name}: ") for line in found)
        hidden += [] if found else [name]
        forgery.sign(folder, record)
    assert len(hidden) >= 9
    places = len(record.layers)
    for begin in range(0, len(hidden), places):
        forged = {layer.name: name for layer, name in zip(record.layers, hidden[begin : begin + places], strict=False)}
        for layer, name in forged.items():
            forgery.forge_layer(folder, layer, name, random.Random(name))
        found = {fault.where: fault.what for fault in verify(folder, against=original).faults}
        assert found.keys() == forged.keys()
        for layer, name in forged.items():
            # bounds come from the step that was swept, and losses are weighed by the positions of the record, if it had some
            weighed = "loss" if entries[layer].positions else "positions"
            shows = {"base": "damped_loss", "positions": weighed}.get(name, name)
            assert f"{shows} is " in found[layer]
        forgery.sign(folder, record)


@pytest.mark.parametrize(
    "words", [{"bits": 3, "group_size": 32}, {"grid": "mxfp4", "format": "gguf", "embeddings": "f32"}], ids=str
)
def test_rows_that_an_older_version_solved_together_are_verified(model_of, text, tmp_path, monkeypatch, words):
    """Versions before 0.3 recorded no bounds for them; the recipe of a GGUF does not say why."""
    original, out, names = str(model_of("llama")), tmp_path / "out", ("int3-g32", "mxfp4")
    with monkeypatch.context() as older:
        older.setattr(Scheme, "rows_compensate", property(lambda self: self.number_format.name in names))
        for module in (on_grid, quantize_request):
            older.setattr(module, "check_apart", lambda scheme: None)
        record = nearplane.quantize(original, out, calibration=str(text), samples=6, seqlen=40, **words)
    assert {layer.worst_case for layer in record.layers if ".layers." in layer.name} == {None}
    if "bits" in words:
        scheme = replace(record.recipe.scheme, two_sided=True)
        forgery.sign(out, replace(record, recipe=replace(record.recipe, scheme=scheme)))
    assert said(verify(out, against=original, calibration=str(text))) == []
    if "bits" not in words:
        nearplane.export(out, tmp_path / "moved", format="compressed-tensors")
        assert said(verify(tmp_path / "moved", against=original, calibration=str(text))) == []


@pytest.mark.parametrize(
    "asked", [{"scheme": GridScheme(two_sided=True)}, {"layers": {"down": {"two_sided": True}}}], ids=str
)
def test_runs_refuse_rows_that_compensate_each_other(model_of, text, tmp_path, asked):
    recipe = Recipe(scheme=asked["scheme"]) if "scheme" in asked else Recipe.from_spellings(**asked)
    with pytest.raises(RecipeError, match="rows no longer compensate each other's errors"):
        nearplane.quantize(model_of("llama"), tmp_path / "out", recipe=recipe)


def test_the_fault_says_what_was_found_and_what_was_expected(copy_of):
    folder, original = copy_of("nearplane")
    layer = read_record(folder).layers[3]
    forgery.forge_layer(folder, layer.name, "limit", random.Random(0))
    found = said(verify(folder, against=original))
    forged = read_record(folder).layers[3].limit
    assert found == [f"{layer.name}: limit is {layer.limit:.9g}, the record has {forged:.9g}"]


def test_a_code_moved_by_one_shows_in_the_losses_of_its_rows(copy_of):
    folder, original = copy_of("compressed-tensors")
    altered = forgery.move_code(folder, random.Random(1))
    found = [line for line in said(verify(folder, against=original)) if line.startswith(f"{altered.where}:")]
    assert len(found) == 1
    for name in ("loss is", "row_losses is", "relative_loss is", "damped_loss is"):
        assert name in found[0]


def test_layers_before_an_altered_one_still_hold(copy_of):
    """Those after it see other inputs than they were quantized with, and are named too."""
    folder, original = copy_of("compressed-tensors")
    names = [layer.name for layer in read_record(folder).layers]
    altered = names[4]
    code = int(dict(read_matrices(folder))[altered].codes[0, 0])
    forgery.move_one(folder, altered, 0, 0, 1 if code < 7 else -1)
    wrong = {fault.where for fault in verify(folder, against=original).faults}
    assert wrong >= {altered, names[-1]}
    assert not wrong & set(names[:4])


# ── what one alteration more than those of forgery.py would be ──


def sign(folder, **changes):
    forgery.sign(folder, replace(read_record(folder), **changes))


def test_a_tensor_that_was_left_out_or_put_in_is_missed(copy_of):
    for change in ("out", "in"):
        folder, original = copy_of("compressed-tensors")
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = "model.norm.weight" if change == "out" else "model.extra.weight"
        if change == "out":
            del tensors[name]
        else:
            tensors[name] = torch.ones(3)
        save_file(tensors, path, {"format": "pt"})
        forgery.rehash(folder)
        assert said(verify(folder)) == []
        assert [fault.where for fault in verify(folder, against=original).faults] == [name]


def test_what_lies_beside_the_weights_is_that_of_the_original(copy_of):
    changes = {
        "tokenizer.json": lambda text: text.replace("the", "teh", 1),
        "config.json": lambda text: text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'),
        "modeling_llama.py": lambda text: "import os",
    }
    for name, change in changes.items():
        folder, original = copy_of("compressed-tensors")
        before = (folder / name).read_text() if (folder / name).exists() else ""
        (folder / name).write_text(change(before))
        assert (folder / name).read_text() != before
        forgery.rehash(folder)
        assert said(verify(folder)) == []
        faults = [fault.where for fault in verify(folder, against=original).faults]
        assert faults == [name] * (2 if name == "tokenizer.json" else 1)  # the file, and what it makes of text


def test_every_file_beside_the_weights_is_missed(copy_of):
    folder, original = copy_of("compressed-tensors")
    names = Beside(source=folder).names()
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(names)
    for name in names:
        (folder / name).unlink()
    forgery.sign(folder, read_record(folder))
    assert said(verify(folder)) == []
    assert {fault.where for fault in verify(folder, against=original).faults} == set(names)


def test_code_of_the_original_may_be_left_out_or_there(model_of, tmp_path):
    """Whether it was to be trusted is not in the record; if it is there it is the original's."""
    model = shutil.copytree(model_of("llama"), tmp_path / "model")
    (model / "modeling_own.py").write_text("import os\n")
    for trusted in (False, True):
        nearplane.quantize(
            model, tmp_path / "out", bits=4, group_size=32, solver="round-to-nearest", trust_remote_code=trusted,
            overwrite=True,
        )  # fmt: skip
        assert (tmp_path / "out" / "modeling_own.py").exists() == trusted
        assert said(verify(tmp_path / "out", against=str(model))) == []


@pytest.mark.parametrize(
    ("way", "key", "value"),
    [
        ("compressed-tensors", "ignore", []),
        ("compressed-tensors, mixed widths", "ignore", ["model.layers.0.mlp.up_proj"]),
        ("gptq, Conv1D", "lm_head", True),
        ("nearplane, tied ends", "modules", ["model.layers.0.mlp.up_proj"]),
    ],
)
def test_what_config_json_says_of_the_weights_is_what_the_recipe_makes_of_the_model(copy_of, way, key, value):
    """Else other programs load something else."""
    folder, original = copy_of(way)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if way.startswith("gptq"):
        forgery.rehash(folder)
        assert [fault.where for fault in verify(folder).faults] == ["quantize_config.json"]
        (folder / "quantize_config.json").write_text(json.dumps(config["quantization_config"], indent=2) + "\n")
    forgery.rehash(folder)
    assert said(verify(folder)) == []
    assert [fault.where for fault in verify(folder, against=original).faults] == ["config.json"]


@pytest.mark.parametrize(
    ("value", "there", "fault"),
    [
        ("no such file, as these weights are coded by nearplane", False, False),  # of versions before
        ("no such file, as these weights are others", True, True),
        ("no such file, as " + 300 * "x", False, False),  # longer than the name of a file can be
        ("other.safetensors", False, True),
    ],
)
def test_config_json_names_no_file_of_weights(copy_of, value, there, fault):
    """transformers would read it."""
    folder, original = copy_of("nearplane")
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = value
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if there:
        (folder / value).write_bytes(b"")
    forgery.rehash(folder)
    found = [each for each in outcome(folder, against=original) if "transformers_weights names a file" in each]
    assert bool(found) == fault


def test_a_certificate_less_or_twice_is_a_fault(copy_of):
    folder, original = copy_of("nearplane")
    layers = read_record(folder).layers
    sign(folder, layers=layers[1:])
    assert layers[0].name in said(verify(folder))[0]
    sign(folder, layers=(*layers, layers[2]))
    found = verify(folder, against=original)
    assert [fault.where for fault in found.faults] == [layers[2].name]
    assert not found.measured


def test_the_recipe_is_that_of_the_files(copy_of):
    """Of its fields, those that say what the codes are; how they were found leaves no trace."""
    for way, changed in (
        ("compressed-tensors", {"format": "gptq"}),
        ("compressed-tensors", {"scheme": GridScheme(bits=5, group_size=32)}),
        ("compressed-tensors", {"scheme": GridScheme(bits=4, group_size=16)}),
        ("compressed-tensors", {"scheme": GridScheme(bits=4, group_size=32, symmetric=False)}),
        ("compressed-tensors", {"scheme": GridScheme(bits=4, group_size=32, order="pivoted")}),
    ):
        folder, _ = copy_of(way)
        sign(folder, recipe=replace(read_record(folder).recipe, **changed))
        assert said(verify(folder)) != [], changed


@pytest.mark.parametrize(
    "changed",
    [{"damp": 0.0101}, {"sweep_damp": 0.101}, {"correct": False}, {"two_sided": True}],
    ids=str,
)
def test_what_the_recipe_says_of_the_problem_is_measured_again(copy_of, changed):
    """The target, the damping, and whether a theorem holds for the codes."""
    folder, original = copy_of("compressed-tensors")
    recipe = read_record(folder).recipe
    sign(folder, recipe=replace(recipe, scheme=replace(recipe.scheme, **changed)))
    assert said(verify(folder)) == []
    assert said(verify(folder, against=original)) != []


@pytest.mark.parametrize(
    ("way", "changed"),
    [
        (
            "compressed-tensors",
            {
                "scheme": {"solver": "k-best", "beam": 3, "polish": 5, "rounds": 7, "scale": "minmax"}, "calibration": {"seed": 9},
                "max_loss": 0.5, "ignore": ("nothing",),
            },
        ),
        ("compressed-tensors, mixed widths", {"scheme": {"bits": 2.75}}),
        (
            "compressed-tensors, rounded to nearest",
            {"scheme": {"scale": "minmax", "correct": False}, "calibration": {"samples": 9, "true_sequential": False}},
        ),
        (
            "nearplane",
            {
                "scheme": {"solver": "nearest-plane", "beam": None, "rate": None, "size": "1MB", "rows": "equal"},
                "allocate": "uniform", "max_loss": 0.5,
            },
        ),
    ],
)  # fmt: skip
def test_what_no_data_can_show_is_what_the_documentation_says(copy_of, way, changed):
    """docs/certificates.md lists it: who reads a record is to know what it cannot prove."""
    folder, original = copy_of(way)
    recipe = read_record(folder).recipe
    parts = {
        name: replace(getattr(recipe, name), **new) if isinstance(new, dict) else new for name, new in changed.items()
    }
    sign(folder, recipe=replace(recipe, **parts))
    assert read_record(folder).recipe != recipe
    assert said(verify(folder, against=original)) == []
    page = (Path(__file__).parents[2] / "docs" / "certificates.md").read_text().partition("## What no data can show")[2]
    names = {word for name, new in changed.items() for word in (new if isinstance(new, dict) else {name})}
    assert {name for name in names if f"`{name}`" not in page} <= {"true_sequential"}  # all of a calibration


def test_a_figure_that_was_taken_out_is_missed(copy_of):
    """Each out of a layer of its own."""
    folder, original = copy_of("nearplane")
    fields, layers = (
        ("row_losses", "limit", "entropy", "gamma", "worst_case", "nearest_loss"),
        read_record(folder).layers,
    )
    without = [
        replace(layer, **{field: () if field == "row_losses" else None})
        for field, layer in zip(fields, layers, strict=False)
    ]
    sign(folder, layers=(*without, *layers[len(fields) :]))
    wrong = {fault.where for fault in verify(folder, against=original).faults}
    assert wrong == {layer.name for layer in without}


def test_what_the_whole_run_was_calibrated_on_is_checked(copy_of):
    folder, original = copy_of("compressed-tensors")
    record = read_record(folder)
    for changes in ({"windows": 7}, {"seqlen": 41}, {"tokens": 241}, {"text": 64 * "0"}, {"skipped": (("x", "y"),)}):
        sign(folder, **changes)
        assert said(verify(folder, against=original)) != [], changes
        forgery.sign(folder, record)
    assert said(verify(folder, against=original)) == []


def test_steps_and_codes_outside_their_range_are_found_from_the_files_alone(copy_of):
    """Of a step that is not a positive number, and of a zero-point outside its grid, no reader makes the same."""
    folder, _ = copy_of("gptq_v2")
    stored = Stored(folder)
    name = stored.names()[0]
    scales = stored.tensors(name)[f"{name}.scales"]
    scales[0, 0] = float("inf")
    forgery.rewrite(folder, stored.reader.file(f"{name}.scales"), {f"{name}.scales": scales})
    forgery.rehash(folder)
    assert said(verify(folder)) == [
        f"{name}: {name} has steps or offsets that are NaN or Inf: the file is damaged. Fetch the folder again."
    ]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bits": 4, "group_size": 32}, marks=pytest.mark.nightly),
        pytest.param({"rate": 3.0}, marks=pytest.mark.nightly),
        {"grid": "q4_1"},
    ],
    ids=["grid", "coded", "grid without 0"],
)
def test_weights_of_dead_inputs_are_zero(model_of, text, tmp_path, options):
    """Which no loss shows: a code of theirs costs nothing under the Hessian."""
    model = tmp_path / "model"
    shutil.copytree(model_of("llama"), model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][5] = 0
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    words = {"calibration": str(text), "samples": 6, "seqlen": 40}
    folder = tmp_path / "out"
    nearplane.quantize(model, folder, **options, **words)
    assert said(verify(folder, against=str(model))) == []
    if "grid" in options:  # whose value nearest to 0 is no fault
        return
    name = "model.layers.1.self_attn.q_proj"
    forgery.move_one(folder, name, 3, 5, 1)
    assert f"{name}: weights of inputs that were always 0 are not 0" in said(verify(folder, against=str(model)))


def test_a_network_with_broken_layers_is_told_and_its_record_holds(model_of, text, tmp_path):
    """Of a weight of 1e30 the record held Infinity, and no command read it any more."""
    model, folder = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model_of("llama"), model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"].zero_()
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e-25
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e30
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    words = {"calibration": str(text), "samples": 6, "seqlen": 40, "bits": 4, "group_size": 32}
    record = nearplane.quantize(model, folder, **words)
    assert {
        layer.name.removeprefix("model.layers."): layer.degenerate for layer in record.layers if layer.degenerate
    } == {
        "0.self_attn.q_proj": "all its weights are 0",
        "1.mlp.up_proj": "its outputs are too small for float32",
        "1.mlp.down_proj": "all its inputs are 0",
    }
    assert all(layer.relative_loss < 1.01 for layer in record.layers)
    assert said(verify(folder, against=str(model))) == []


# ── what is no fault, and what is refused ──


def test_what_a_hub_adds_is_no_fault(copy_of):
    folder, _ = copy_of("nearplane")
    (folder / "README.md").write_text("# A model card")
    (folder / "LICENSE").write_text("MIT")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "download.lock").write_text("")
    assert said(verify(folder)) == []


def test_another_text_is_said_in_one_sentence(checkpoint_of, tmp_path):
    folder, original = checkpoint_of("compressed-tensors")
    (tmp_path / "other.txt").write_text(CALIBRATION.read_text()[100:4100])
    assert said(verify(folder, against=original, calibration=tmp_path / "other.txt")) == [
        f"{tmp_path / 'other.txt'}: its tokens differ from those of the record"
    ]


def test_the_same_text_elsewhere_will_do(checkpoint_of, text, tmp_path):
    folder, original = checkpoint_of("nearplane")
    (tmp_path / "elsewhere.txt").write_bytes(text.read_bytes())
    assert said(verify(folder, against=original, calibration=tmp_path / "elsewhere.txt")) == []


@pytest.mark.parametrize("other", ["gpt2", "wider"])
def test_another_model_is_said_in_one_sentence(checkpoint_of, model_of, tmp_path, other):
    """Also one whose layers have the same names."""
    folder, _ = checkpoint_of("compressed-tensors")
    original = model_of("gpt2") if other == "gpt2" else tmp_path / "wider"
    if other == "wider":
        config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=1, intermediate_size=96)
        random_model(config).float().save_pretrained(original)
    found = said(verify(folder, against=str(original)))
    assert [line for line in found if "another model" in line] == found[-1:]
    assert str(original) in found[-1]


def test_another_training_of_the_same_model_is_said_in_one_sentence_too(checkpoint_of, tmp_path):
    folder, original = checkpoint_of("compressed-tensors")
    shutil.copytree(original, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    save_file({name: 1.01 * tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    (fault,) = verify(folder, against=str(tmp_path / "other")).faults
    assert fault.where == str(tmp_path / "other")
    assert fault.what == f"another model: 9 of the 9 tensors that are not quantized differ in {folder}"


def test_a_tolerance_may_be_wider(copy_of):
    folder, original = copy_of("compressed-tensors")
    record = read_record(folder)
    first, *others = record.layers
    sign(folder, layers=(replace(first, relative_loss=first.relative_loss * (1 + 1e-4)), *others))
    assert len(verify(folder, against=original).faults) == 1
    assert said(verify(folder, against=original, tolerance=1e-3)) == []


def test_a_text_without_the_original_is_refused(checkpoint_of, text):
    with pytest.raises(RecipeError, match="--calibration needs --against"):
        verify(checkpoint_of("compressed-tensors")[0], calibration=text)


def test_a_record_that_is_not_text_is_refused(copy_of):
    folder, _ = copy_of("compressed-tensors")
    (folder / RECORD).write_bytes(b"\xff" + (folder / RECORD).read_bytes())
    with pytest.raises(FormatError, match=RECORD):
        verify(folder)


@pytest.mark.parametrize("size", [0, -32])
def test_sizes_that_no_matrix_has_are_refused_by_all_that_read_the_record(copy_of, size, tmp_path):
    """Rates are bytes per weight: a matrix without weights divided by zero."""
    folder, _ = copy_of("compressed-tensors")
    data = json.loads((folder / RECORD).read_text())
    data["layers"][0]["in_features"] = size
    (folder / RECORD).write_text(json.dumps(data))
    for call in (verify, read_record, lambda out: nearplane.write_report(out, tmp_path / "page.html")):
        with pytest.raises(FormatError, match=rf" x {size}; expected at least 1 x 1"):
            call(folder)


def test_a_size_that_the_matrix_does_not_have_is_a_fault(copy_of):
    folder, _ = copy_of("compressed-tensors")
    first, *others = read_record(folder).layers
    sign(folder, layers=(replace(first, out_features=10**12), *others))
    assert all(line.startswith(f"{first.name}: ") for line in said(verify(folder)))
    assert said(verify(folder))


@pytest.mark.parametrize("name", ["/etc/passwd", "../elsewhere.safetensors", "x" * 5000, "a\0b", "\x1b[31mred\n"])
def test_names_of_files_in_the_record_are_not_followed_and_print_as_text(copy_of, tmp_path, name):
    """The file that a name outside the folder points to counted as one of the checkpoint's."""
    folder, _ = copy_of("compressed-tensors")
    (tmp_path / "elsewhere.safetensors").write_text("a file of somebody else")
    data = json.loads((folder / RECORD).read_text())
    data["files"][name] = "0" * 64
    (folder / RECORD).write_text(json.dumps(data))
    found = verify(folder)
    assert any(fault.where == printable(name) and fault.what == "the file is missing" for fault in found.faults)
    assert not any("weight files have" in fault.what for fault in found.faults)
    assert all(line.isprintable() for line in said(found))


def test_a_folder_that_is_not_finished_is_refused(copy_of):
    folder, _ = copy_of("compressed-tensors")
    (folder / "INCOMPLETE").write_text("")
    assert any("incomplete" in line for line in outcome(folder))


@pytest.mark.parametrize("tolerance", [-1.0, 1.0, float("nan")])
def test_a_tolerance_is_a_small_number(tmp_path: Path, tolerance: float) -> None:
    with pytest.raises(RecipeError, match=r"expected a (finite number|number from 0 to 1)"):
        verify(tmp_path, tolerance=tolerance)
