"""A mix of number formats: what is chosen keeps to the limit, is written as if it had been asked for, and is read back."""

import json
import math
import re
import shutil
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import nearplane
from families import MOE, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import stopped_behind
from model_types import save_type
from nearplane import RecipeError
from nearplane.demo import CALIBRATION
from nearplane.formats.stored import read_matrices
from nearplane.planning import forecast, format_mix
from nearplane.planning.cache_size import cache_bytes
from nearplane.planning.mix_size import cache_of, constant_of
from nearplane.planning.request import joined_in, open_original
from nearplane.recipe.recipe import Recipe
from nearplane.record.mix_summary import mix_table
from nearplane.system.safetensors_files import ShardReader
from nearplane.verbs.evaluate import load_dense

FAST = {"calibration": str(CALIBRATION), "samples": 16, "seqlen": 48, "group_size": 16}
CPU = torch.device("cpu")
ENDS = dict(format="mlx", group_size=32, include_embeddings=True, ignore=["layers"])


def saved(folder, family, **fields):
    config = config_of(
        family, vocab_size=TEXT_VOCABULARY, **{"num_hidden_layers": 3, "tie_word_embeddings": False} | fields
    )
    random_model(config).to(torch.bfloat16).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "mixtral", "mixtral", num_hidden_layers=2)


def bits_of(record):
    """Return the bits per weight of the layers of a record."""
    weights = sum(layer.out_features * layer.in_features for layer in record.layers)
    return 8 * sum(layer.bytes for layer in record.layers) / weights


def formats_by(record, key):
    found = defaultdict(set)
    for layer in record.layers:
        found[key(layer.name)].add(layer.format)
    return found


def test_what_is_chosen_keeps_to_the_limit_and_is_written_as_if_asked_for(model, tmp_path):
    out = tmp_path / "out"
    record = nearplane.quantize(model, out, mix="int3,int4,int8", bits_per_weight=5.5, **FAST)
    assert bits_of(record) == pytest.approx(record.mix.spent)
    assert 5.0 < record.mix.spent <= 5.5
    assert len({layer.format for layer in record.layers}) > 1
    assert record.recipe.mix is None
    stage = formats_by(
        record, lambda name: name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_", "gate_")
    )
    assert all(len(formats) == 1 for formats in stage.values()), "what vLLM joins is alike"
    again = nearplane.quantize(model, tmp_path / "again", recipe=record.recipe)
    assert [layer.checksum for layer in again.layers] == [layer.checksum for layer in record.layers]
    assert nearplane.verify(out, against=str(model)).faults == ()
    network, _ = load_dense(out, CPU)
    for name, matrix in read_matrices(out):
        assert torch.equal(network.get_submodule(name).weight.float(), matrix.decode().float())
    tokens = torch.arange(20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.allclose(loaded(tokens).logits, network.float()(tokens).logits, atol=1e-5)


def test_a_larger_limit_is_predicted_and_measured_to_cost_less(model, tmp_path):
    records = [
        nearplane.frontier(model, tmp_path / "none", mix="int2,int3,int4,int8", bits_per_weight=bits, **FAST).mix
        for bits in (3.6, 6)
    ]
    assert records[0].predicted > records[1].predicted > 0
    assert records[0].measured > records[1].measured > 0
    assert not (tmp_path / "none").exists()


def test_floats_have_their_own_rounding_of_inputs_and_some_layers_none(model, tmp_path):
    out = tmp_path / "out"
    record = nearplane.quantize(model, out, mix="nvfp4,fp8,bf16", bits_per_weight=9, **FAST | {"group_size": "auto"})
    kinds = {layer.name: layer.format for layer in record.layers}
    assert set(kinds.values()) == {"nvfp4", "fp8"}
    inputs = {name: record.recipe.inputs_of(name).name for name in kinds}
    assert inputs == {name: {"nvfp4": "fp4", "fp8": "fp8"}[format] for name, format in kinds.items()}
    assert {name for name, _ in read_matrices(out)} == kinds.keys()
    model = open_original(str(model), Recipe(), trust_remote_code=False)
    left = [layer.name for layer in model.layers if layer.name not in kinds]
    assert left
    assert all(record.recipe.ignores(name) for name in left)
    assert nearplane.verify(out, against=str(model.folder)).faults == ()
    tokens = torch.arange(20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.inference_mode():
        assert torch.isfinite(loaded(tokens).logits).all()


@pytest.mark.parametrize(("runtime", "sets"), [("vllm", 2), (None, 1)])
def test_experts_are_alike_in_a_block_or_in_the_network(experts, tmp_path, runtime, sets):
    found = nearplane.frontier(
        experts, tmp_path / "out", mix="int3,int4,int8", bits_per_weight=5, runtime=runtime, **FAST
    )
    routed = defaultdict(set)
    for name, format in found.formats.items():
        if "experts" in name:
            routed[name.split("experts")[0] if sets == 2 else "all"].add(format)
    assert len(routed) == sets
    assert all(len(formats) == 1 for formats in routed.values())


def test_experts_count_by_the_tokens_that_reach_them(experts, tmp_path):
    """So that sizes between the smallest and the largest are other ones, and so are the choices."""
    stored, active = (
        nearplane.frontier(
            experts, tmp_path / "out", mix="int3,int4,int8", bits_per_weight=4.6, runtime="vllm", weigh=weigh, **FAST
        )
        for weigh in ("stored", "active")
    )
    assert stored.mix.spent <= 4.6
    assert active.mix.spent <= 4.6
    assert stored.sizes != active.sizes


def test_in_a_dense_model_active_weights_change_nothing_and_it_is_said(model, tmp_path, caplog):
    both = [
        nearplane.frontier(model, tmp_path / "out", mix="int3,int4", bits_per_weight=4.5, weigh=weigh, **FAST)
        for weigh in ("stored", "active")
    ]
    assert both[0].formats == both[1].formats
    assert "changes nothing" in caplog.text


def bytes_read(out, share):
    """Return the bytes that a decode step reads of a checkpoint, counted from its file: of embeddings a row."""
    reader, total = ShardReader(out), 0.0
    for name in reader.names():
        size = reader.nbytes(name)
        total += (
            size * share if ".experts." in name else size / reader.shape(name)[0] if "embed_tokens" in name else size
        )
    return total


def test_bytes_of_a_token_are_those_of_the_written_file(experts, tmp_path):
    model = open_original(str(experts), Recipe(), trust_remote_code=False)
    dense = Recipe.from_spellings(mix="int3,int8", size="1GB", cost="bytes-per-token", context=64)
    least = constant_of(model, dense, dense.mix, {layer.name for layer in model.layers}, {})
    record = nearplane.quantize(
        experts,
        tmp_path / "out",
        mix="int3,int4,int8",
        size=str(round(least * 1.8)),
        cost="bytes-per-token",
        context=64,
        runtime="vllm",
        **FAST,
    )
    config = model.config
    cache = (
        2
        * 2
        * 64
        * config.num_hidden_layers
        * config.num_key_value_heads
        * (config.hidden_size // config.num_attention_heads)
    )
    found = bytes_read(tmp_path / "out", config.num_experts_per_tok / config.num_local_experts) + cache
    assert found == pytest.approx(record.mix.spent, rel=0.01)
    assert record.mix.spent <= record.mix.limit


@pytest.mark.parametrize(
    ("size", "asked"),
    [(120_000, {}), (150_000, {}), (180_000, {"format": "mlx", "group_size": 32, "include_head": True})],
)
def test_a_folder_is_at_most_as_large_as_asked_for(model, tmp_path, size, asked):
    asked = FAST | asked
    smallest = nearplane.quantize(model, tmp_path / "least", mix="int2,int3", bits_per_weight=4.1, **asked).folder
    record = nearplane.quantize(
        model, tmp_path / "out", mix="int2,int3,int4,int5,int6,int8", size=str(smallest + size // 10), **asked
    )
    assert record.folder == sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert record.folder <= smallest + size // 10
    assert record.folder <= record.mix.spent <= 1.02 * record.folder


def test_a_memory_holds_weights_and_cache(model, tmp_path):
    mine = open_original(str(model), Recipe(), trust_remote_code=False)
    recipe = Recipe.from_spellings(mix="int3,int8", served_memory="1GB", context=32)
    constant = constant_of(mine, recipe, recipe.mix, {layer.name for layer in mine.layers}, {})
    limit = constant + sum(layer.shape[0] * layer.shape[1] for layer in mine.layers) * 6 // 8
    found = nearplane.frontier(
        model, tmp_path / "out", mix="int3,int4,int8", served_memory=str(limit), context=32, **FAST
    ).mix
    assert 0.9 * limit < found.spent <= limit
    assert found.context == 32
    half = replace(recipe, kv_cache="fp8")
    assert cache_of(mine, recipe) == 2 * cache_of(mine, half)
    assert constant_of(mine, half, half.mix, {}, {}) == constant_of(mine, recipe, recipe.mix, {}, {}) - cache_of(
        mine, half
    )


def on_disk(planned):
    """Return a choice of memory settings with hidden states on disk, where a model as small as these has no need of it."""
    return planned._replace(
        bounds=[replace(each, setting=replace(each.setting, states="disk")) for each in planned.bounds]
    )


def test_a_mix_keeps_within_a_limit_of_memory_and_is_the_same(model, tmp_path, monkeypatch):
    """A limit that is too small is refused before anything is measured, with one that suffices for choice and run."""
    asked = dict(mix="int3,int4,int8", bits_per_weight=5, **FAST)
    free = nearplane.quantize(model, tmp_path / "free", **asked)
    with monkeypatch.context() as before:
        before.setattr(format_mix, "sensitivity", None)
        with pytest.raises(RecipeError) as refused:
            nearplane.quantize(model, tmp_path / "out", memory="100KB", **asked)
    least = re.search(r"--memory 100 KB is too small: .* Use --memory (\S+) or fewer --samples", str(refused.value))
    choose = format_mix.within_limits
    monkeypatch.setattr(format_mix, "within_limits", lambda *args: on_disk(choose(*args)))
    resident, before = forecast.resident, []

    def grown():
        """The process is larger once something was measured."""
        before.append(resident())
        return before[0] + (len(before) - 1) * 2**30

    monkeypatch.setattr(forecast, "resident", grown)
    limited = nearplane.quantize(model, tmp_path / "out", memory=least[1], **asked)
    assert [layer.checksum for layer in limited.layers] == [layer.checksum for layer in free.layers]
    assert limited.mix == free.mix


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mix="int4-g32,int8-g32", bits_per_weight=5), "group_size is 16, but --grid int4-g32 determines"),
        (
            dict(mix="int4-g16,int4-g32", bits_per_weight=5, format="awq", group_size=None),
            "Name formats as int4-g128-asym.",
        ),
        (dict(bits_per_weight=5, format="nearplane"), "a mix of fixed grids, which --format nearplane does not hold"),
        (dict(bits_per_weight=5, embeddings="q6_k"), "only types of llama.cpp have this option; use --format gguf"),
        (dict(bits_per_weight=3), "below the smallest possible choice: 4.098 bits per weight"),
        (dict(size="1KB"), "below the smallest possible choice"),
        (dict(served_memory="1KB", context=16), "below the smallest possible choice"),
        (dict(mix="nvfp4,int4", size="1GB", format="gptq", runtime="gptqmodel"), "gptq does not store nvfp4"),
        (dict(mix="fp8,int4", size="1GB", format="awq"), "awq"),
        (dict(bits_per_weight=4.5, layers={"q_proj": {"bits": 8}}), "which programs load as one"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_what_can(model, tmp_path, options, message, monkeypatch):
    """Before anything is measured."""
    monkeypatch.setattr(format_mix, "sensitivity", None)
    with pytest.raises(RecipeError) as refused:
        nearplane.quantize(model, tmp_path / "out", **{"mix": "int3,int4,int8"} | FAST | options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("arcee", dict(format="mlx", group_size=32), "mlx_lm was not tried with models of type arcee"),
        ("falcon", {}, "transformers would not load this falcon"),
        ("olmo2", dict(mix="q4_0,q8_0", format="gguf", group_size=None), "nearplane writes a GGUF of llama, "),
        (
            "llama",
            ENDS,
            "Bits are chosen for layers in blocks, by measuring, but --ignore leaves out all",
        ),
        ("llama", dict(format="gptq", runtime="transformers"), "Layers would have different grids"),
    ],
)
def test_what_would_not_load_is_refused_before_anything_is_measured(tmp_path, kind, options, message, monkeypatch):
    monkeypatch.setattr(format_mix, "calibration_windows", None)
    save_type(tmp_path / "model", kind, torch.float32, vocab_size=TEXT_VOCABULARY)
    add_tokenizer(tmp_path / "model")
    with pytest.raises(RecipeError, match=message):
        nearplane.quantize(
            tmp_path / "model", tmp_path / "out", **{"mix": "int4,int8", "bits_per_weight": 5} | FAST | options
        )


@pytest.mark.parametrize("asked", [dict(bits=4, layers={"down_proj": {"bits": 8}}), dict(bits=3.5)])
def test_grids_of_gptq_that_differ_are_refused_for_transformers_alone(model, tmp_path, asked, caplog):
    with pytest.raises(RecipeError, match=r"transformers loads gptq of one grid only\. Use --bits with a whole number"):
        nearplane.quantize(model, tmp_path / "out", format="gptq", runtime="transformers", **FAST | asked)
    if "layers" in asked:
        nearplane.quantize(model, tmp_path / "out", format="gptq", **FAST | asked | {"group_size": 32})
        assert "transformers alone does not" in caplog.text


@pytest.mark.parametrize(
    "asked", [dict(bits=3.5), dict(mix="int4,int8", bits_per_weight=6.5), dict(mix="int4,bf16", bits_per_weight=9)]
)
def test_experts_for_mlx_are_alike_in_the_whole_network(tmp_path, asked):
    """mlx_lm takes one grid for all of them."""
    folder = saved(tmp_path / "model", "mixtral", **MOE)
    record = nearplane.quantize(folder, tmp_path / "out", format="mlx", **FAST | asked | {"group_size": 32})
    assert len({layer.format for layer in record.layers if "experts" in layer.name}) <= 1
    assert nearplane.verify(tmp_path / "out").faults == ()


@pytest.mark.parametrize("limit", [dict(bits_per_weight=16), dict(size="390KB")])
def test_layers_that_are_fixed_are_quantized_where_the_limit_has_room_for_the_original(model, tmp_path, limit):
    """Those that are chosen for stay unquantized."""
    record = nearplane.quantize(
        model, tmp_path / "out", mix="int4,bf16", layers={"down_proj": {"bits": 4}}, **FAST | limit
    )
    assert {layer.name.rpartition(".")[2] for layer in record.layers} == {"down_proj"}
    assert "size" not in limit or record.folder <= record.mix.spent <= 1.01 * record.folder


def test_layers_of_a_gguf_that_stay_as_they_are_count_as_its_file_holds_them(tmp_path):
    """With 16 bits, also where the original has 32."""
    save_type(tmp_path / "model", "llama", torch.float32, vocab_size=TEXT_VOCABULARY)
    add_tokenizer(tmp_path / "model")
    words = dict(mix="q4_0,bf16", format="gguf", bits_per_weight=17)
    fixed = {"down_proj": {"grid": "q8_0"}}
    record = nearplane.quantize(
        tmp_path / "model", tmp_path / "out", layers=fixed, **FAST | words | {"group_size": None}
    )
    assert record.mix.spent == 16


def read_of_gguf(out):
    """Return the bytes of the tensors of a GGUF, and those of the embeddings among them."""
    from gguf import GGUFReader

    sizes = {tensor.name: tensor.n_bytes for tensor in GGUFReader(next(out.glob("*.gguf"))).tensors}
    return sum(int(size) for size in sizes.values()), int(sizes["token_embd.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_of_a_gguf_count_in_the_type_that_they_get(tmp_path, tied):
    folder = saved(tmp_path / "model", "llama", hidden_size=256, intermediate_size=256, tie_word_embeddings=tied)
    asked = FAST | dict(mix="q4_k,q8_0", context=32, group_size=None)
    memory = nearplane.quantize(folder, tmp_path / "memory", served_memory="1.2MB", **asked)
    token = nearplane.quantize(folder, tmp_path / "token", size="1.2MB", cost="bytes-per-token", **asked)
    cache = cache_bytes(open_original(str(folder), Recipe(), trust_remote_code=False), 32)
    every, _ = read_of_gguf(tmp_path / "memory")
    assert every + cache == memory.mix.spent
    every, embeddings = read_of_gguf(tmp_path / "token")
    row = 0 if tied else embeddings - embeddings // TEXT_VOCABULARY
    assert every - row + cache == pytest.approx(token.mix.spent, abs=1)


def test_embeddings_for_mlx_count_once_and_a_row_of_them_for_a_token(tmp_path):
    folder = saved(tmp_path / "model", "llama", tie_word_embeddings=False)
    asked = FAST | dict(
        mix="int4,int8", format="mlx", group_size=32, context=64, include_embeddings=True, include_head=True
    )
    fixed = nearplane.quantize(
        folder, tmp_path / "out", served_memory="1MB", layers={"embed_tokens|lm_head": {"bits": 4}}, **asked
    )
    tensors = sum(map(ShardReader(tmp_path / "out").nbytes, ShardReader(tmp_path / "out").names()))
    cache = cache_bytes(open_original(str(folder), Recipe(), trust_remote_code=False), 64)
    assert fixed.mix.spent == tensors + cache
    one, other = (
        nearplane.frontier(
            folder, tmp_path / "none", size="1MB", cost="bytes-per-token", **asked | {"include_embeddings": each}
        )
        for each in (True, False)
    )
    assert abs(one.mix.spent - other.mix.spent) < 200


@pytest.mark.parametrize("apart", [dict(layers={r"\.experts\.": {"bits": 4}}), dict(ignore=[r"\.experts\."])])
def test_experts_that_are_not_chosen_for_count_by_the_tokens_that_reach_them(experts, tmp_path, apart):
    asked = FAST | dict(mix="int4,int8", size="1GB", cost="bytes-per-token", context=64, runtime="vllm") | apart
    record = nearplane.quantize(experts, tmp_path / "out", **asked)
    model = open_original(str(experts), Recipe(), trust_remote_code=False)
    found = bytes_read(tmp_path / "out", model.config.num_experts_per_tok / model.config.num_local_experts)
    assert found + cache_bytes(model, 64) == pytest.approx(record.mix.spent, rel=0.01)


def test_a_limit_above_the_largest_choice_is_said(model, tmp_path, caplog):
    found = nearplane.frontier(model, tmp_path / "out", mix="int3,int4", bits_per_weight=16, **FAST)
    assert set(found.formats.values()) == {"int4"}
    assert "above the largest possible choice" in caplog.text


def test_a_layer_with_a_scheme_of_its_own_is_not_chosen_for(model, tmp_path):
    record = nearplane.quantize(
        model, tmp_path / "out", mix="int3,int4", bits_per_weight=4.5, layers={"down_proj": {"bits": 8}}, **FAST
    )
    formats = formats_by(record, lambda name: "down_proj" in name)
    assert formats[True] == {"int8-g16"}
    assert formats[False] <= {"int3-g16", "int4-g16"}


@pytest.mark.parametrize("ignored", ["model.layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj", "layers.0[.]"])
def test_blocks_of_one_kind_may_have_other_layers(model, tmp_path, ignored):
    found = nearplane.frontier(
        model, tmp_path / "out", mix="int3,int4,int8", bits_per_weight=5, ignore=[ignored], **FAST
    )
    assert not any(re.search(ignored, name) for name in found.formats)
    assert len(found.formats) == (14 if ignored.endswith("]") else 20)


def test_layers_that_no_format_fits_stay_unquantized_and_are_named(tmp_path, caplog):
    folder = saved(tmp_path / "odd", "llama", intermediate_size=88)
    record = nearplane.quantize(
        folder, tmp_path / "out", mix="nvfp4a16,mxfp4a16", bits_per_weight=4.5, **FAST | {"group_size": "auto"}
    )
    assert record.mix.unfit == tuple(f"model.layers.{number}.mlp.down_proj" for number in range(3))
    assert not any("down_proj" in layer.name for layer in record.layers)
    assert "stay unquantized" in caplog.text
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_resumed_run_has_the_mix_of_its_own_command(model, tmp_path, monkeypatch):
    """Which may choose the same formats as the one that was stopped, within another limit."""
    monkeypatch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)
    ways = FAST | dict(mix="int4,int8")
    stopped_behind(1, model, tmp_path / "out", monkeypatch, bits_per_weight=15, **ways)
    whole = nearplane.quantize(model, tmp_path / "whole", size="1MB", **ways)
    record = nearplane.quantize(model, tmp_path / "out", size="1MB", **ways)
    assert record.mix == whole.mix
    assert [layer.checksum for layer in record.layers] == [layer.checksum for layer in whole.layers]


@pytest.mark.parametrize("mix", ["q4_0,q8_0", "q4_0,q5_0,q8_0"])
def test_a_gguf_is_filled_to_its_size_and_what_it_takes_is_told(model, tmp_path, mix):
    asked = FAST | dict(mix=mix, format="gguf", group_size=None)
    sizes = [nearplane.quantize(model, tmp_path / name, grid=name, **FAST | {"group_size": None}).folder
             for name in ("q4_0", "q8_0")]  # fmt: skip
    limit = sum(sizes) // 2
    record = nearplane.quantize(model, tmp_path / "out", size=str(limit), **asked)
    assert record.folder <= record.mix.spent <= limit
    assert record.mix.spent < 1.02 * record.folder
    larger = nearplane.quantize(model, tmp_path / "larger", size=str(round(1.05 * max(sizes))), **asked)
    assert larger.folder > 0.98 * max(sizes)


def test_the_smallest_size_in_the_table_suffices(model, tmp_path):
    found = nearplane.frontier(model, tmp_path / "out", mix="int3,int4,int8", bits_per_weight=5, **FAST)
    _, rows = mix_table(found)
    least = float(rows[0][0])
    assert least >= found.sizes[0].bits
    nearplane.frontier(model, tmp_path / "out", mix="int3,int4,int8", bits_per_weight=least, **FAST)


def test_what_was_measured_is_kept_for_other_limits_and_refused_for_other_text(model, tmp_path, monkeypatch):
    file, ways = tmp_path / "plan.json", dict(mix="int3,int4,int8", **FAST)
    first = nearplane.frontier(model, tmp_path / "out", bits_per_weight=5, plan_file=file, **ways)
    plain = nearplane.frontier(model, tmp_path / "out", bits_per_weight=5, **ways)
    assert first == plain

    def not_again(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(format_mix, "estimated", not_again)
    monkeypatch.setattr(format_mix, "sensitivity", not_again)
    nearplane.frontier(model, tmp_path / "out", bits_per_weight=6, plan_file=file, **ways)
    monkeypatch.setattr(format_mix, "divergences", not_again)
    assert nearplane.frontier(model, tmp_path / "out", bits_per_weight=5, plan_file=file, **ways) == first
    copied = shutil.copyfile(CALIBRATION, tmp_path / "the same text.txt")
    moved = ways | {"calibration": str(copied)}
    assert nearplane.frontier(model, tmp_path / "out", bits_per_weight=5, plan_file=file, **moved) == first
    with pytest.raises(
        RecipeError, match=r'correct was true, is false, mix\.offers was \.\..*": true.*, is \.\..*": false'
    ):
        nearplane.frontier(model, tmp_path / "out", bits_per_weight=5, plan_file=file, correct=False, **ways)
    with pytest.raises(RecipeError, match=r"lies in .*inside, which must be empty when the run begins"):
        nearplane.frontier(
            model, tmp_path / "inside", bits_per_weight=5, plan_file=tmp_path / "inside/plan.json", **ways
        )
    with pytest.raises(RecipeError, match="calibration text was"):
        nearplane.frontier(model, tmp_path / "out", bits_per_weight=5, plan_file=file, **ways | {"samples": 12})
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"measured": {}}))
    with pytest.raises(nearplane.FormatError, match="damaged"):
        nearplane.frontier(model, tmp_path / "out", bits_per_weight=5, plan_file=file, **ways)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (dict(format="mlx", mix="int3,int4,int8", group_size=32), "int"),
        (dict(format="gguf", mix="q4_0,q5_0,q8_0"), "q"),
    ],
)
def test_files_of_other_programs_have_mixes_of_their_formats(model, tmp_path, options, kind):
    record = nearplane.quantize(model, tmp_path / "out", bits_per_weight=6, **FAST | {"group_size": None} | options)
    assert len({layer.format for layer in record.layers}) > 1
    assert all(layer.format.startswith(kind) for layer in record.layers)
    chosen = [layer for layer in record.layers if ".layers." in layer.name]
    assert 8 * sum(layer.bytes for layer in chosen) <= 6 * sum(
        layer.out_features * layer.in_features for layer in chosen
    )
    assert nearplane.verify(tmp_path / "out").faults == ()


def test_a_folder_for_vllm_is_of_a_size_and_may_leave_layers_unquantized(model, tmp_path):
    least = nearplane.quantize(
        model, tmp_path / "least", mix="int4,int8", bits_per_weight=5.4, runtime="vllm", **FAST
    ).folder
    record = nearplane.quantize(model, tmp_path / "out", size=str(least + 5_000), runtime="vllm", **FAST)
    assert record.mix.formats == ("int4", "int8", "bf16")
    assert record.folder <= least + 5_000
    with pytest.raises(RecipeError, match="room for the original"):
        nearplane.frontier(model, tmp_path / "none", mix="int4,bf16", bits_per_weight=16, **FAST)


def test_layers_that_a_program_joins_are_known_by_their_module_also_where_their_inputs_differ():
    """A decoder's attention to the encoder: queries multiply the decoder's states, keys and values the encoder's."""
    q, k, own = (
        f"model.decoder.layers.0.{name}" for name in ("encoder_attn.q_proj", "encoder_attn.k_proj", "self_attn.k_proj")
    )
    assert joined_in(q)[:2] == joined_in(k)[:2] != joined_in(own)[:2]
    assert joined_in("model.layers.0.mlp.down_proj") is None
    experts = [
        joined_in(f"model.layers.0.mlp.experts.{number}.{name}")[:2]
        for number, name in ((0, "up_proj"), (3, "down_proj"))
    ]
    assert experts[0] == experts[1]


def test_a_format_that_some_layers_cannot_have_is_said(tmp_path, caplog):
    folder = saved(tmp_path / "odd", "llama", intermediate_size=88)
    with pytest.raises(RecipeError, match="below the smallest"):
        nearplane.frontier(folder, tmp_path / "out", mix="nvfp4a16,int8", bits_per_weight=4, **FAST | {"group_size": 8})
    assert "nvfp4a16 is not possible for 3 layers: model.layers.0.mlp.down_proj has" in caplog.text


def test_rows_that_blocks_of_llama_cpp_do_not_divide_get_the_types_that_it_uses_instead(model, tmp_path):
    record = nearplane.quantize(
        model, tmp_path / "out", mix="q3_k,q4_k,q6_k", bits_per_weight=6, format="gguf", **FAST | {"group_size": None}
    )
    formats = {layer.format for layer in record.layers if ".layers." in layer.name}
    assert formats <= {"q4_0", "q5_0", "q8_0"}
    assert len(formats) > 1


def test_a_part_of_what_a_program_joins_is_refused_before_anything_is_measured(model, tmp_path, monkeypatch):
    def not_yet(*_, **__):
        raise AssertionError("measured before it was refused")

    monkeypatch.setattr(format_mix, "sensitivity", not_yet)
    with pytest.raises(RecipeError, match="fuse these"):
        nearplane.frontier(
            model, tmp_path / "out", mix="int3,int4", bits_per_weight=4.5, runtime="vllm", ignore=["k_proj"], **FAST
        )
