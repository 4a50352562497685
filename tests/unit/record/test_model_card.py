"""A model card says what its record says, in metadata that the hub's own reader takes, and shows if it was changed."""

import json
import re
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

from checkpoints import save_part_of_the_demo
from nearplane import Calibration, RateScheme, Recipe
from nearplane.errors import FormatError
from nearplane.record.evaluation_table import read_evaluation
from nearplane.record.model_card import KEYS, Origin, front_matter, hub_id, is_unchanged, model_card
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.record.tuning_record import Point, Tuning
from nearplane.record.uses import Named, uses_of_dense

DOCUMENTED = {  # github.com/huggingface/hub-docs, modelcard.md, and huggingface.co/docs/hub/model-cards
    "language", "license", "license_name", "license_link", "library_name", "tags", "datasets", "metrics", "base_model",
    "base_model_relation", "pipeline_tag", "model-index", "thumbnail", "new_version",
}  # fmt: skip
LIBRARIES = {
    "transformers",
    "llama-cpp-python",
    "mlx",
}  # of the hub's model-libraries.ts, those that nearplane writes for
LAYER = LayerRecord(
    name="model.layers.0.mlp.up_proj", stored="model.layers.0.mlp.up_proj", out_features=8, in_features=16, loss=0.25,
    row_losses=(0.25,), relative_loss=0.01, nearest_loss=0.75, damped_loss=0.5, correction=0.7, damp=0.01,
    sweep_damp=0.1, dead=0, tokens=512, order="activation", format="int4-g16", seconds=0.1, bytes=80, extra_loss=0.5,
    extra_relative_loss=0.02, extra_nearest_loss=1.0,
)  # fmt: skip
TUNING = Tuning(
    calibration="t", samples=4, windows=3, held_windows=1, found=4, seqlen=8, text="", steps=2, batch=1, rates={},
    codes=5, curve=(Point(step=0, held_out=0.5, training=None), Point(step=2, held_out=0.25, training=None)), kept=2,
    held_out=0.25, norms={"model.norm.weight": "0"}, seconds=9.0,
)  # fmt: skip


def run(recipe, **changes) -> RunRecord:
    """Return the record of a run whose layers all are of one kind."""
    return RunRecord(
        recipe=replace(recipe, calibration=Calibration(samples=2)), source="owner/net", versions={"nearplane": "1"},
        device="cpu", windows=2, seqlen=256, tokens=512, extra_windows=1, layers=(replace(LAYER, **changes),),
        skipped=(("model.layers.0.mlp.router", "Router"),), seconds=1.5, bytes=1_250_000, folder=1_500_000,
    )  # fmt: skip


CAUSAL, ENCODER = ({"architectures": [name]} for name in ("LlamaForCausalLM", "BertModel"))
GRID = run(Recipe.from_spellings(bits=4, group_size=16))
KINDS = {  # record, config, library, task, lines of code in the card, and those that it must not have
    "grid": (GRID, CAUSAL, "transformers", "text-generation",
             ["vllm serve FOLDER", "AutoModelForCausalLM", "**transformers** (needs compressed-tensors)"], ["**vLLM** (needs"]),
    "narrow": (run(Recipe.from_spellings(bits=3), format="int3-g16"), CAUSAL, "transformers", "text-generation",
               ["vllm serve FOLDER"], []),
    "gptq": (run(Recipe.from_spellings(bits=4, format="gptq")), CAUSAL, "transformers", "text-generation",
             ["vllm serve FOLDER", "(needs gptqmodel and optimum)", 'GPTQModel.load("FOLDER")'], []),
    "gptq in 3 bits": (run(Recipe.from_spellings(bits=3, format="gptq"), format="int3-g16"), CAUSAL, "transformers",
                       "text-generation", ['GPTQModel.load("FOLDER")'], ["vllm", "vLLM"]),
    "experts in gptq": (run(Recipe.from_spellings(bits=4, format="gptq"), blended=0, alike=1.0), CAUSAL, "transformers",
                        "text-generation", ['GPTQModel.load("FOLDER")'], ["from_pretrained"]),
    "blocks": (run(Recipe.from_spellings(grid="q4_k_m"), format="q4_k"), CAUSAL, "llama-cpp-python", "text-generation",
               ["llama-cli -m FOLDER/model.gguf", 'gguf_file="model.gguf"'], ["vllm"]),
    "coded": (run(Recipe(scheme=RateScheme(rate=3.0)), format="coded", entropy=2.5, base=0.1), CAUSAL, "nearplane",
              "text-generation", ['nearplane.load("FOLDER")', "nearplane.register()", "nearplane export FOLDER"], ["vllm"]),
    "tuned": (replace(GRID, tuning=TUNING), CAUSAL, "transformers", "text-generation",
              ["Tuned: KL on 1 held-out window of 8 tokens 0.50000 -> 0.25000", "tuning trained norms"], [" 9.0 s"]),
    "encoder": (GRID, ENCODER, "transformers", "feature-extraction", ["import AutoModel\n"], ["vllm"]),
}  # fmt: skip
SOURCE = {"license": "other", "license_name": "own", "license_link": "LICENSE", "language": [False, "en"],
          "datasets": ["a/b"], "tags": ["chat"], "model-index": [{"name": "net"}], "base_model": "else/where"}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_tells_what_the_record_does_and_how_its_readers_are_called(kind):
    record, config, library, task, said, unsaid = KINDS[kind]
    card = model_card(record, Origin(config=config, metadata=SOURCE))
    data = ModelCard(card, ignore_metadata_errors=False).data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("owner/net", "quantized")
    assert (data["library_name"], data["pipeline_tag"]) == (library, task)
    assert library in LIBRARIES | {"nearplane"}
    assert data["tags"] == ["chat", "nearplane"] + [record.recipe.format] * (library != "nearplane")
    for text in said:
        assert text in card
    for text in unsaid:
        assert text not in card
    layer = record.layers[0]
    assert re.search(rf"^\| {re.escape(layer.format)} \| [^|]+ \| 1 \| 128 \| 5\.000 \|$", card, re.MULTILINE)
    assert "\n\n- Not quantized: model.layers.0.mlp.router (Router)\n" in card
    assert "2 % in the median layer" in card
    assert "512 tokens (2 windows of 256), measured on 1 extra window" in card
    assert "1.25 MB" in card
    assert "Versions: nearplane 1." in card


@pytest.mark.parametrize(
    ("format", "meaning"),
    [
        ("int4-g16", "4-bit integers, groups of 16 with a step"),
        ("int8-row", "8-bit integers, a step for every row"),
        ("int3-g64-asym", "3-bit integers, groups of 64 with a step and a zero point"),
        ("int3-g64-min", "3-bit integers, groups of 64 with a step and a minimum"),
        ("nvfp4", "4-bit floats, groups of 16 with a step"),
        ("fp8-block", "8-bit floats, tiles of 128 x 128 with a step"),
        ("q4_k", "4-bit integers, groups of 32 with a step and a minimum, in blocks of llama.cpp"),
        ("coded", "integers with a step for every row and column, entropy-coded"),
    ],
)
def test_number_formats_are_explained(format, meaning):
    assert f"| {format} | {meaning} | 1 | 128 |" in model_card(run(GRID.recipe, format=format), Origin(config=CAUSAL))


def test_options_are_those_that_differ_from_the_defaults_of_such_a_scheme():
    def options(**spellings):
        text = model_card(run(Recipe.from_spellings(**spellings)), Origin())
        return json.loads(text.partition("```json\n")[2].partition("```")[0]) | {"calibration": None}

    given = {"calibration": None}
    assert options(bits=4) == given | {"scheme": {"bits": 4}}
    assert options(grid="nvfp4") == given | {"scheme": {"grid": "nvfp4", "bits": 4}}
    assert options(rate=3.0) == given | {"scheme": {"rate": 3.0}}
    assert options(bits=3, damp=0.1, format="gptq") == given | {"scheme": {"bits": 3, "damp": 0.1}, "format": "gptq"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/me/a.txt", "a.txt"),
        ("../texts/a.txt:2,~/b.txt:1", "a.txt:2,b.txt:1"),
        (r"C:\texts\a.txt", "a.txt"),
        ("owner.x/set:config:train", "owner.x/set:config:train"),
        ("wikitext2", "wikitext2"),
    ],
)
def test_a_card_does_not_tell_where_local_texts_lay(text, told):
    record = replace(GRID, recipe=replace(GRID.recipe, calibration=Calibration(calibration=text)))
    given = json.loads(model_card(record, Origin()).partition("```json\n")[2].partition("```")[0])
    assert given["calibration"] == {"calibration": told}


def test_a_card_begins_with_what_it_is_and_how_it_is_used(tmp_path):
    (tmp_path / "e.json").write_text(json.dumps(SCORE))
    card = model_card(GRID, Origin(config=CAUSAL), evaluations=[read_evaluation(tmp_path / "e.json")])
    titles = ["How to use it", "Evaluation", "What was lost", "What is quantized", "How it was made"]
    assert re.findall("^#+ (.+)$", card, re.MULTILINE) == ["net, quantized to 5.00 bits per weight", *titles]
    assert "1 layer (one weight matrix each) at 5.000 bits per weight" in card.partition("## How")[0]


def test_rounded_activations_are_told():
    sentence = "When the model runs, the inputs of these layers are rounded to fp4, too."
    card = model_card(run(Recipe.from_spellings(grid="nvfp4", activations="fp4")), Origin())
    assert sentence in card
    assert "are rounded to" not in model_card(GRID, Origin())


def test_metadata_survive_the_hubs_own_reader_and_have_documented_keys_only():
    card = model_card(GRID, Origin(config=CAUSAL, metadata=SOURCE))
    read = ModelCard(card, ignore_metadata_errors=False).data.to_dict()
    assert read == front_matter(card)
    assert set(KEYS) == read.keys() <= DOCUMENTED
    assert ModelCardData(**read).to_dict() == yaml.safe_load(ModelCardData(**read).to_yaml()) == read
    assert {key: read[key] for key in ("license", "license_name", "license_link", "datasets")} == {
        key: SOURCE[key] for key in ("license", "license_name", "license_link", "datasets")
    }
    assert read["language"] == ["no", "en"]  # YAML 1.1 reads no as false


def test_a_card_has_no_times_and_no_sizes_of_other_files():
    """So equal runs have equal cards, and the record can count the card's bytes."""
    later = replace(GRID, seconds=99.0, folder=7, card=5, files={"a": "b"}, digest="c", peak_memory=3)
    assert model_card(later, Origin()) == model_card(GRID, Origin())


@pytest.mark.parametrize(
    ("source", "named", "base"),
    [("owner/net", None, "owner/net"), ("/data/net", "owner/net", "owner/net"), ("/data/net", "/other/net", None),
     ("./net", None, None), ("/data/net", None, None)],
)  # fmt: skip
def test_a_base_model_is_a_hub_id_or_is_left_out_and_the_text_says_so(source, named, base):
    record, config = replace(GRID, source=source), {"_name_or_path": named}
    card = model_card(record, Origin(config=config))
    assert hub_id(record, config) == base == front_matter(card).get("base_model")
    assert ("base_model_relation" in front_matter(card)) == (base is not None)
    assert ("the metadata name no `base_model`" in card) == (base is None)


def test_a_local_folder_of_two_names_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "owner" / "net").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id(GRID, {}) is None


def test_a_missing_license_is_said():
    assert "No license is named" in model_card(GRID, Origin())
    assert "No license is named" not in model_card(GRID, Origin(metadata={"license": "mit"}))
    assert front_matter(model_card(GRID, Origin(config={"license": "mit"})))["license"] == "mit"


@pytest.mark.parametrize("change", [lambda x: x + "\n", lambda x: x.replace("quantized", "shrunk", 1), lambda x: "",
                                    lambda x: x.replace("\n", "\r\n")])  # fmt: skip
def test_whatever_is_changed_in_a_card_shows(change):
    card = model_card(GRID, Origin())
    assert is_unchanged(card)
    assert not is_unchanged(change(card))


@pytest.mark.parametrize("metadata", ["a: [1", "- a list", "a: &a [*a, *a", "x: !!python/object:os.system {}"])
def test_metadata_that_cannot_be_read_are_refused(metadata):
    with pytest.raises(ValueError, match=r".+"):
        front_matter(f"---\n{metadata}\n---\n# Title")
    assert front_matter("# Title, without metadata") == {}


@pytest.mark.parametrize("wrong", [{"a": 1}, 5, ["x", {}], "a" * 301, "a\nb", None, True])
def test_values_of_other_kinds_are_not_taken_over(wrong):
    metadata = front_matter(model_card(GRID, Origin(metadata={"license": wrong, "tags": wrong})))
    assert metadata.get("license") in (None, ["x"])
    assert set(metadata["tags"]) <= {"x", "nearplane", "compressed-tensors"}


def test_decoded_weights_are_said_to_be_decoded():
    card = model_card(KINDS["coded"][0], Origin(config=CAUSAL), dense="bfloat16")
    assert front_matter(card)["library_name"] == "transformers"
    assert "decoded to bfloat16" in card
    assert "vllm serve FOLDER" in card
    assert "nearplane.load" not in card


SCORE = {
    "text": "/data/heldout.txt", "protocol": "papers", "tokens": 1016, "seqlen": 128, "perplexity": 12.3456,
    "original": 11.5, "agreement": 0.875, "cosine": None, "worst_cosine": None,
    "statistics": {"kl": {"value": 0.0123, "low": 0.01, "high": 0.015}},
}  # fmt: skip


def test_rounded_inputs_have_a_row_and_an_option_of_their_own(tmp_path):
    computed = SCORE | {"statistics": {"kl": {"value": 0.0456, "low": 0.04, "high": 0.05}}}
    (tmp_path / "e.json").write_text(json.dumps(SCORE | {"computed": computed}))
    record = run(Recipe.from_spellings(grid="int8", activations="int8"), format="int8-row")
    card = model_card(record, Origin(), evaluations=[read_evaluation(tmp_path / "e.json")])
    rows = [line for line in card.splitlines() if "heldout.txt" in line]
    assert ["weights alone" in rows[0], "inputs rounded" in rows[1]] == [True, True]
    assert ["0.01230" in rows[0], "0.04560" in rows[1]] == [True, True]
    assert "--against ORIGINAL --activations --text TEXT" in card
    assert "--activations" not in model_card(record, Origin(), dense="bfloat16")


def test_a_card_says_where_tokens_were_too_few_and_a_missing_evaluation_is_named(tmp_path):
    assert "Too few tokens" not in model_card(GRID, Origin())
    assert "Too few tokens" in model_card(replace(GRID, windows=2, seqlen=16, tokens=32), Origin())
    with pytest.raises(FormatError, match=r"missing\.json does not exist"):
        read_evaluation(tmp_path / "missing.json")


@pytest.mark.parametrize("chat", [False, True])
def test_the_code_for_transformers_runs_and_asks_a_chat_model_as_its_template_does(chat, tmp_path, capsys):
    folder = save_part_of_the_demo(tmp_path / "model", blocks=1)
    if chat:
        template = "{% for message in messages %}<ask>{{ message.content }}{% endfor %}<answer>"
        (folder / "chat_template.jinja").write_text(template)
    named = Named.of(folder)
    assert named.chat == chat
    (use,) = (use for use in uses_of_dense(named) if use.program == "transformers")
    exec(use.code, {})
    assert ("<ask>What is a lattice?<answer>" in capsys.readouterr().out) == chat
    assert use.code in model_card(GRID, Origin(config=named.config, chat=chat), dense="bfloat16").replace(
        "FOLDER", str(folder)
    )
    (folder / "tokenizer_config.json").write_text("[")  # damaged, which only its reader says
    assert Named.of(folder).chat == chat
