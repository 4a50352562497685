"""A model object, texts and tokens are taken as the paths of the same things are."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer
from native_checkpoints import save_tiny
from nearplane import Calibration, CalibrationError, GridScheme, ModelError, Recipe, RecipeError
from nearplane.calibration.given import Given
from nearplane.calibration.text_files import TEXTS, TOKENS
from nearplane.demo import CALIBRATION, HELD_OUT
from nearplane.models.model_objects import as_folder

GRID: dict[str, Any] = {"bits": 4, "group_size": 16, "samples": 4, "seqlen": 32, "order": "natural"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the tokenizer of the demo model."""
    folder = tmp_path_factory.mktemp("source") / "model"
    save_tiny(folder, "llama", torch.float32, vocab_size=TEXT_VOCABULARY, num_hidden_layers=1)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(source: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(source)


@pytest.fixture
def model(source: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(source).train()


@pytest.fixture(scope="module")
def text() -> str:
    return CALIBRATION.read_text()[:3000]


@pytest.fixture(scope="module")
def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[: 5 * 32]).view(5, 32)  # four that are fitted, and an extra one


@pytest.fixture(scope="module")
def expected(source: Path, text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What quantize makes of the folder and a text file."""
    place = tmp_path_factory.mktemp("expected")
    (place / "text.txt").write_text(text)
    nearplane.quantize(source, place / "out", calibration=place / "text.txt", **GRID)
    return place / "out"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def same(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_an_object_and_tokens_give_the_checkpoint_that_paths_give(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: torch.Tensor,
    text: str,
    expected: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every peer takes them; they ended in a TypeError."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    own = {name: value for name, value in GRID.items() if name not in ("samples", "seqlen")}
    given: dict[str, Any] = {"texts": [text], "tokens": tokens, "lists": tokens.tolist(), "array": tokens.numpy()}
    for name, calibration in given.items():
        options = GRID if name == "texts" else own
        record = nearplane.quantize(model, tmp_path / name, tokenizer=tokenizer, calibration=calibration, **options)
        assert same(tmp_path / name, expected), name
        assert record.recipe.calibration.calibration == (TEXTS if name == "texts" else TOKENS)
        assert (record.windows, record.seqlen, record.tokens) == (4, 32, 128)
        assert record.text == json.loads((expected / "nearplane.json").read_text())["text"]
        assert record.source.endswith("model") or "given in Python" in record.source
        assert AutoTokenizer.from_pretrained(tmp_path / name)("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert not list((tmp_path / "temporary").iterdir())
    assert model.training, "left as it was"


@pytest.mark.parametrize("form", ["right", "left", "ragged", "rows", "list"])
def test_masked_positions_are_no_tokens(
    form: str, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """They counted as text."""
    texts = ["one two three four", "five", "six seven eight nine ten eleven"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    known = copy.deepcopy(tokenizer)
    known.pad_token, known.padding_side = known.eos_token, "left" if form == "left" else "right"
    longest = max(map(len, rows))
    value: Any = known(texts, padding=True, return_tensors="pt") if form in ("right", "left") else known(texts)
    if form in ("rows", "list"):
        value = [known(text, return_tensors="pt" if form == "rows" else None) for text in texts]
    given = Given.of(value)
    assert given is not None
    assert given.tokens is not None
    assert given.packed
    flat = [*chain(*rows)]
    assert given.tokens.tolist() == torch.tensor(flat[: len(flat) // longest * longest]).view(-1, longest).tolist()
    masked = 0 if form in ("ragged", "rows", "list") else 3 * longest - len(flat)
    assert caplog.messages == [
        f"calibration: {masked} masked positions are left out, and the other {len(flat)} tokens of 3 rows are packed into "
        f"{len(flat) // longest} windows of {longest}."
    ]


def test_rows_without_padding_are_windows(tokens: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    for value in (
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "token_type_ids": torch.zeros_like(tokens)},
        [{"input_ids": row} for row in tokens.tolist()],
        {"input_ids": tuple(map(tuple, tokens.tolist()))},
    ):
        given = Given.of(value)
        assert given is not None
        assert given.tokens is not None
        assert not given.packed
        assert torch.equal(given.tokens, tokens)
    assert caplog.messages == []


def test_all_verbs_take_masked_tokens(source: Path, tokens: torch.Tensor, tmp_path: Path) -> None:
    """The same as without the padding."""
    padded = torch.nn.functional.pad(tokens, (0, 32), value=1)
    masked = {"input_ids": padded, "attention_mask": torch.arange(64).expand(5, -1) < 32}
    record = nearplane.quantize(source, tmp_path / "out", calibration=masked, bits=4, group_size=16)
    assert (record.windows, record.extra_windows, record.seqlen) == (1, 1, 64)
    assert nearplane.verify(tmp_path / "out", against=source, calibration=masked).faults == ()
    packed = tokens.flatten()[:128].view(2, 64)
    assert nearplane.evaluate(source, masked) == nearplane.evaluate(source, packed)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"pixel_values": [[1, 2]]}, "has the entries pixel_values; expected input_ids and their attention_mask"),
        ({"input_ids": [[1, 2]], "pixel_values": []}, "Pass it with input_ids, and without pixel_values"),
        ({"input_ids": [[1, 2]], "attention_mask": [1]}, "its attention_mask has another shape than its input_ids"),
        ([{"input_ids": [1, 2]}, {"ids": [1]}], r"calibration\[1\] has the entries ids"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "its attention_mask leaves out all tokens"),
        (
            {"input_ids": [[1, 2]], "attention_mask": [[0.0, -math.inf]]},
            "has values other than 0 and 1. Pass 1 for text",
        ),
        ({"input_ids": [[1, 2]], "attention_mask": [[1.0, math.nan]]}, "has values other than 0 and 1"),
        ({"input_ids": [[[1, 2]]], "attention_mask": [[[1, 1]]]}, "has values other than 0 and 1"),
        ({"input_ids": 7}, r"calibration is float64 \(1, 0\)"),
    ],
)
def test_other_dicts_are_refused(value: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        Given.of(value)


def test_other_tools_names_and_a_recipe_go_with_tokens(
    source: Path, tokens: torch.Tensor, expected: Path, tmp_path: Path
) -> None:
    nearplane.quantize(source, tmp_path / "named", dataset=tokens, bits=4, group_size=16, order="natural")
    recipe = Recipe(
        scheme=GridScheme(bits=4, group_size=16, order="natural"), calibration=Calibration(samples=5, seqlen=32)
    )
    nearplane.quantize(source, tmp_path / "recipe", recipe, calibration=tokens)
    assert same(tmp_path / "named", expected)
    assert same(tmp_path / "recipe", expected)


def test_without_a_tokenizer_the_folder_has_none(
    model: PreTrainedModel, tokens: torch.Tensor, text: str, tmp_path: Path
) -> None:
    nearplane.quantize(model, tmp_path / "out", calibration=tokens, bits=4, group_size=16)
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert nearplane.evaluate(tmp_path / "out", tokens).tokens == 5 * 31
    with pytest.raises(RecipeError, match=r"pass tokenizer=.* as calibration"):
        nearplane.quantize(model, tmp_path / "texts", calibration=[text], **GRID)


def test_verify_measures_again_on_what_was_given(source: Path, tokens: torch.Tensor, text: str, tmp_path: Path) -> None:
    """The record holds the SHA-256 of the tokens, not the tokens."""
    for calibration, kind in ((tokens, TOKENS), ([text], TEXTS)):
        out = tmp_path / kind
        options = GRID if kind == TEXTS else {"bits": 4, "group_size": 16}
        nearplane.quantize(source, out, calibration=calibration, **options)
        found = nearplane.verify(out, against=source, calibration=calibration)
        assert found.measured
        assert not found.faults
        with pytest.raises(
            CalibrationError, match=rf"calibration was {kind}; the run record contains only their SHA-256. Pass"
        ):
            nearplane.verify(out, against=source)
    assert [
        fault.what for fault in nearplane.verify(tmp_path / TOKENS, against=source, calibration=tokens[:2]).faults
    ] == ["its tokens differ from those of the record"]
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert nearplane.verify(tmp_path / TEXTS, against=source, calibration=tmp_path / "text.jsonl").measured


def test_objects_are_evaluated_as_they_are(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path, expected: Path
) -> None:
    wanted = nearplane.evaluate(expected, HELD_OUT, seqlen=16, samples=4, against=source)
    ids = tokenizer(HELD_OUT.read_text()[:2000], add_special_tokens=False, verbose=False)["input_ids"][: 4 * 16]
    tokens = torch.tensor(ids).view(4, 16)
    quantized = nearplane.load(expected, dtype=torch.float32)
    for found in (
        nearplane.evaluate(quantized, HELD_OUT, tokenizer=tokenizer, seqlen=16, samples=4, against=model),
        nearplane.evaluate(
            quantized, [HELD_OUT.read_text()], tokenizer=tokenizer, seqlen=16, samples=4, against=source
        ),
        nearplane.evaluate(quantized, tokens, against=model),
        nearplane.evaluate(expected, tokens.tolist(), against=model),
        nearplane.evaluate(expected, tokens, against=source),
    ):
        assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-5)
        assert found.kl == pytest.approx(wanted.kl, rel=1e-3)
        assert found.tokens == 4 * 15
    assert model.training, "left as it was"


@pytest.mark.parametrize(
    ("calibration", "said"),
    [
        ([], r"calibration is float32|calibration is float64 \(0,\)"),
        ([1, 2, 3], r"int64 \(3,\); expected a path, a list of texts, token ids \(windows, seqlen\)"),
        ([[1, 2], [3]], "a list that cannot be converted to a tensor"),
        (["a", 1], "expected a path, a list of texts"),
        ([{"ids": [1, 2]}], "expected input_ids and their attention_mask"),
        (torch.zeros(2, 4), r"float32 \(2, 4\)"),
        (torch.zeros(2, 4, dtype=torch.bool), r"bool \(2, 4\)"),
        (torch.arange(8).view(2, 4).to_sparse(), "a Tensor that cannot be converted to a tensor of values"),
        (
            torch.zeros(2, 4, dtype=torch.int64, device="meta"),
            "a Tensor that cannot be converted to a tensor of values",
        ),
        (torch.zeros(2, 1, dtype=torch.int64), "at least one window of two"),
        (torch.full((2, 4), -100), "token id -100; expected 0 or more"),
        (torch.arange(5000, 5128).view(4, 32), f"vocabulary has {TEXT_VOCABULARY}"),
        (torch.zeros(2, 9000, dtype=torch.int64), "maximum length"),
        (3, r"int64 \(\)"),
        (["a b"], "The list of 1 texts has"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_neither_text_nor_tokens_is_one_sentence(
    source: Path, tmp_path: Path, calibration: object, said: str
) -> None:
    with pytest.raises(CalibrationError, match=said):
        nearplane.quantize(source, tmp_path / "out", calibration=calibration, group_size=16)


@pytest.mark.parametrize("sizes", [{"samples": 3}, {"seqlen": 8}])
def test_sizes_beside_tokens_that_have_others_are_refused(
    source: Path, tokens: torch.Tensor, tmp_path: Path, sizes: dict[str, int]
) -> None:
    with pytest.raises(RecipeError, match="5 windows of 32 tokens"):
        nearplane.quantize(source, tmp_path / "out", calibration=tokens, group_size=16, **sizes)
    with pytest.raises(RecipeError, match="Leave out seqlen"):
        nearplane.evaluate(source, tokens, seqlen=8)


def sampling(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.temperature = 0.6
    return model


def compiled(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


def parametrized(model: PreTrainedModel) -> PreTrainedModel:
    layer = model.model.layers[0].mlp.up_proj
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    return model


def pruned(model: PreTrainedModel) -> PreTrainedModel:
    prune.identity(model.model.layers[0].mlp.up_proj, "weight")
    return model


def without_generation(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config = None
    return model


@pytest.mark.parametrize("change", [sampling, compiled, parametrized, pruned, without_generation])
def test_a_model_that_computes_the_same_is_quantized_to_the_same_files(
    change: Any, model: PreTrainedModel, tokens: torch.Tensor, expected: Path, tmp_path: Path
) -> None:
    """Transformers could not save it, or could not find its weights again; the advice was another temporary folder."""
    before = change(model).config.to_dict()
    nearplane.quantize(model, tmp_path / "out", calibration=tokens, bits=4, group_size=16, order="natural")
    assert same(tmp_path / "out", expected)
    assert model.config.to_dict() == before
    settings = tmp_path / "out" / "generation_config.json"
    assert settings.exists() == (change is not without_generation)
    if change is sampling:
        assert json.loads(settings.read_text())["temperature"] == 0.6


def test_weights_that_share_memory_are_saved_apart(model: PreTrainedModel) -> None:
    """Transformers refuses them, or leaves out the head of a network whose config does not tie it."""
    network = model.model
    attention = network.layers[0].self_attn
    attention.v_proj.weight = attention.k_proj.weight
    model.lm_head.weight = network.embed_tokens.weight
    with as_folder(model) as folder:
        found = load_file(Path(folder) / "model.safetensors")
    assert torch.equal(found["model.layers.0.self_attn.v_proj.weight"], attention.k_proj.weight)
    assert torch.equal(found["lm_head.weight"], network.embed_tokens.weight)


class Adapted(torch.nn.Module):
    """A layer with an adapter as peft makes them, whose weight is that of the layer alone."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora_A = base_layer, torch.nn.Linear(base_layer.in_features, 2)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight


def adapted(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def extended(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.lora_A = torch.nn.Parameter(torch.zeros(2, 2))


def replaced(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = torch.nn.Identity()


def widened(model: PreTrainedModel) -> None:
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 7)


def in_integers(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)


def damaged(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = math.inf


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            adapted,
            r"adapters of peft that are not merged, first in model\.layers\.0\.self_attn\.q_proj\. .*merge_and_unload",
        ),
        (extended, r"model\.layers\.0\.mlp\.up_proj\.lora_A is not part of its class\. Merge or remove"),
        (replaced, r"it lacks model\.layers\.0\.mlp\.gate_proj\.weight; .* and 1 more\. Merge or remove"),
        (widened, r"lm_head\.weight is \(7, "),
        (in_integers, r"already quantized, first model\.layers\.0\.mlp\.up_proj\.weight"),
        (damaged, r"has NaN or Inf in model\.layers\.0\.mlp\.up_proj\.weight\. Load it again"),
    ],
)
def test_a_model_that_is_not_what_its_config_describes_is_named(
    change: Any, said: str, model: PreTrainedModel, tokens: torch.Tensor, tmp_path: Path
) -> None:
    """The weight files of a temporary folder lacked tensors, and it was to be fetched again; or adapters were lost."""
    change(model)
    with pytest.raises(ModelError, match=said):
        nearplane.quantize(model, tmp_path / "out", calibration=tokens, group_size=16)


def test_what_is_no_model_to_start_from_is_one_sentence(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    expected: Path,
    tokens: torch.Tensor,
    tmp_path: Path,
) -> None:
    given: list[tuple[Any, str]] = [
        (torch.nn.Linear(2, 2), "model is a Linear; expected a folder, a hub id or a PreTrainedModel"),
        (3, "model is a int"),
        (nearplane.load(expected), "already quantized"),
        (model.to("meta"), "on the meta device"),
    ]
    for wrong, said in given:
        with pytest.raises(ModelError, match=said):
            nearplane.quantize(wrong, tmp_path / "out", calibration=tokens, group_size=16)
    with pytest.raises(ModelError, match="model is a int"):
        nearplane.evaluate(3, tokens)
    with pytest.raises(RecipeError, match="tokenizer= is for model objects"):
        nearplane.quantize(source, tmp_path / "out", tokenizer=tokenizer, calibration=tokens)
    with pytest.raises(RecipeError, match="pass tokenizer="):
        nearplane.evaluate(model, HELD_OUT)
    assert not (tmp_path / "out").exists()
