"""What transformers reads: a checkpoint that is not its config's is refused fast, in one sentence, whatever transformers says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

import nearplane
from checkpoints import write_folder
from families import TEXT_VOCABULARY, add_tokenizer
from hub import served
from native_checkpoints import save_tiny, write_native
from nearplane import FormatError, ModelError, NearplaneError, RecipeError
from nearplane.demo import HELD_OUT
from nearplane.formats.beside import Beside
from nearplane.models import config_checks
from nearplane.models.pretrained import empty_network, find_folder, tokenizer_of, vocabulary_of
from nearplane.verbs.evaluate import load_dense
from tokenizers_of_kinds import save_marian

TOKENS = torch.tensor([[5, 9, 11, 40, 7, 3, 80, 22]])
WRITERS: dict[str, Callable[[Path, Path], Any]] = {
    "compressed-tensors": lambda out, source: write_folder(out, source, "compressed-tensors", bits=4, group_size=16),
    "gptq": lambda out, source: write_folder(out, source, "gptq", bits=4, group_size=16),
    "nearplane": write_native,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Llama with the tokenizer of the demo model, dense and in three formats."""
    place = tmp_path_factory.mktemp("checkpoints")
    sizes = dict(num_hidden_layers=2, vocab_size=TEXT_VOCABULARY, hidden_size=64, intermediate_size=64)
    save_tiny(place / "dense", "llama", torch.bfloat16, **sizes)
    add_tokenizer(place / "dense")
    for name, write in WRITERS.items():
        write(place / name, place / "dense")
    return {name: place / name for name in ("dense", *WRITERS)}


@pytest.fixture
def copy_of(checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function to a copy of a checkpoint that may be damaged."""
    return lambda name: shutil.copytree(checkpoints[name], tmp_path / name)


def reconfigure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def calls_of(folder: Path) -> dict[str, Callable[[], object]]:
    """Return what reads a checkpoint."""
    out = folder.with_name("dense-again")
    return {
        "load": lambda: nearplane.load(folder),
        "evaluate": lambda: nearplane.evaluate(folder, HELD_OUT, seqlen=8, samples=1),
        "export": lambda: nearplane.export(folder, out),
        "quantize": lambda: nearplane.quantize(folder, out, solver="round-to-nearest", group_size=16),
    }


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_loads_and_computes_what_the_decoded_weights_do(checkpoints: dict[str, Path], name: str) -> None:
    """GPTQ wanted optimum, and compressed-tensors its package; packed layers add products in another order."""
    expected = load_dense(checkpoints[name], torch.device("cpu"))[0]
    model = nearplane.load(checkpoints[name], dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected(TOKENS).logits, rtol=1e-5, atol=3e-5)
    assert nearplane.load(checkpoints[name]).dtype == torch.bfloat16, "that of config.json"
    assert not model.training


def test_an_unknown_dtype_is_named(checkpoints: dict[str, Path]) -> None:
    for name in ("gptq", "nearplane", "dense"):
        for dtype in ("int3", "int32", "Tensor", "nothing"):
            with pytest.raises(RecipeError, match=dtype):
                nearplane.load(checkpoints[name], dtype=dtype)


def test_an_empty_network_is_as_if_never_quantized(checkpoints: dict[str, Path]) -> None:
    network = empty_network(checkpoints["gptq"])
    assert all(parameter.is_meta for parameter in network.parameters())
    assert not hasattr(network.config, "quantization_config")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers is 10,000,000, but the weight files have"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1,000,000,000,000, but the weight"),
        ({"num_hidden_layers": 10**4000}, "num_hidden_layers is a number of 4001 digits"),
        ({"num_labels": 10**9}, "num_labels is 1,000,000,000, but the weight"),
        ({"num_experts": 4, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 4 experts"),
        ({"text_config": {"n_routed_experts": 8, "num_experts_per_tok": 9}}, "9, but there are 8 experts"),
        pytest.param({"num_hidden_layers": 90_000}, "many more layers than the", marks=pytest.mark.nightly),
        pytest.param(
            {"num_hidden_layers": 300},
            "many more layers|weights that are not in the weight files",
            marks=pytest.mark.nightly,
        ),
        ({"num_hidden_layers": 4}, "lack|do not belong together"),
        ({"vocab_size": 10**9}, r"is \(768, 64\), but config.json describes \(1000000000, 64\)"),
        ({"vocab_size": 10**30}, "cannot build a language model from"),
        ({"head_dim": 10**9}, "These files do not|tables of|correct the"),
        ({"hidden_size": "64"}, "cannot build a language model from"),
        ({"num_attention_heads": 0}, "cannot build a language model from"),
        ({"num_hidden_layers": "2"}, "cannot build a language model from"),
        ({"hidden_act": {"a": 1}}, "cannot build a language model from"),
        ({"rope_parameters": [3]}, "cannot build a language model from"),
        ({"model_type": ["llama"]}, "cannot build a language model from"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_is_not_the_checkpoints_is_refused_before_it_costs_anything(
    copy_of: Callable[[str], Path], change: dict[str, Any], said: str
) -> None:
    """Ten million blocks took minutes to build, tables of 10^9 numbers all memory, and a block too many was random numbers."""
    for name, calls in (("gptq", ["evaluate"]), ("nearplane", ["load", "export"]), ("dense", ["quantize", "load"])):
        folder = copy_of(name)
        reconfigure(folder, **change)
        for what in calls:
            if (what, change) == ("export", {"num_hidden_layers": 4}):
                continue  # what the files hold is written, and what is missing stays missing
            with pytest.raises(NearplaneError, match=said) as caught:
                calls_of(folder)[what]()
            assert len(str(caught.value)) < 700


def test_building_a_network_of_too_many_layers_ends_early(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_checks, "CALLS", (5_000, 20))  # a tenth: the real ones take seconds
    folder = copy_of("dense")
    reconfigure(folder, num_hidden_layers=20_000)
    with pytest.raises(ModelError, match="many more layers than the"):
        nearplane.load(folder)


@pytest.mark.parametrize("name", ["dense", *WRITERS])
@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "null",
        '"text"',
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"a":' * 100 + "{}" + "}" * 100,
        "",
        "\x00",
        "{'a': 1}",
        '{"model_type": "llama"',
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_config_is_refused_by_all_that_read_it(copy_of: Callable[[str], Path], name: str, text: str) -> None:
    folder = copy_of(name)
    (folder / "config.json").write_text(text)
    for call in calls_of(folder).values():
        with pytest.raises(NearplaneError, match=r"config\.json"):
            call()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "value", ["gptq", [], [1], 3, True, {"quant_method": ["gptq"]}, {"quant_method": {}}, {}], ids=str
)
def test_a_quantization_config_of_another_type_is_refused(
    copy_of: Callable[[str], Path], name: str, value: object
) -> None:
    folder = copy_of(name)
    reconfigure(folder, quantization_config=value)
    for call in calls_of(folder).values():
        with pytest.raises(NearplaneError):
            call()


@pytest.mark.parametrize("name", ["dense", *WRITERS])
def test_a_weight_that_is_missing_is_no_random_number(copy_of: Callable[[str], Path], name: str) -> None:
    """transformers warns and goes on."""
    folder = copy_of(name)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("model.norm.weight", None)
        save_file(tensors, path, {"format": "pt"})
    for path in folder.glob("*.index.json"):
        index = json.loads(path.read_text())
        for part in index.values():
            part.pop("model.norm.weight", None)
        path.write_text(json.dumps(index))
    for call in (lambda: nearplane.load(folder), lambda: nearplane.evaluate(folder, HELD_OUT, seqlen=8, samples=1)):
        with pytest.raises(ModelError, match=r"lack 1 of the weights .* first model\.norm\.weight"):
            call()


@pytest.mark.parametrize("call", ["load", "evaluate", "quantize"])
def test_a_weight_of_integers_is_named_by_its_dtype(copy_of: Callable[[str], Path], call: str) -> None:
    """The network computed with truncated weights, or stopped in its third block."""
    (file,) = (folder := copy_of("dense")).glob("*.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file((tensors := load_file(file)) | {name: tensors[name].int()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} is stored as I32, but weights are floating-point"):
        calls_of(folder)[call]()


def test_weights_of_integers_that_others_quantized_are_left_to_their_readers(copy_of: Callable[[str], Path]) -> None:
    """bitsandbytes stores 8-bit codes under the name of the weight."""
    (file,) = (folder := copy_of("dense")).glob("*.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file((tensors := load_file(file)) | {name: tensors[name].char()}, file, {"format": "pt"})
    reconfigure(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert empty_network(folder).get_parameter(name).is_meta


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", "[" * 200_000, '{"version": "1.0"}', '{"model": {"type": "BPE", "vocab": 3}}', "\ud800"],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_tokenizer_files_are_one_sentence(copy_of: Callable[[str], Path], name: str, text: str) -> None:
    folder = copy_of("dense")
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    if name == "tokenizer_config.json" and text.endswith("}"):  # an object: what it lacks has defaults
        tokenizer_of(folder)
        return
    with pytest.raises(ModelError, match="has no tokenizer that transformers can load"):
        nearplane.evaluate(folder, HELD_OUT, seqlen=8, samples=1)
    with pytest.raises(ModelError, match="has no tokenizer that transformers can load"):
        nearplane.quantize(folder, folder.with_name("out"), group_size=16, calibration=str(HELD_OUT), seqlen=8)
    nearplane.load(folder)


def test_a_tokenizer_with_dropout_cuts_a_text_always_alike(copy_of: Callable[[str], Path]) -> None:
    """Every call drew other tokens: no stopped run could go on, verify found faults, evaluate had another perplexity."""
    folder, text = copy_of("dense"), HELD_OUT.read_text()[:500]
    expected = tokenizer_of(folder)(text)["input_ids"]
    contents = json.loads((folder / "tokenizer.json").read_text())
    contents["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    assert tokenizer_of(folder)(text)["input_ids"] == expected


@pytest.mark.parametrize("text", ['{"eos_token_id":', "[]"])
def test_a_damaged_generation_config_is_refused_before_work(copy_of: Callable[[str], Path], text: str) -> None:
    """It was copied, so that the checkpoint did not load."""
    folder = copy_of("dense")
    (folder / "generation_config.json").write_text(text)
    for name in ("load", "evaluate", "quantize"):
        with pytest.raises(ModelError, match=r"generation_config\.json, which you may correct or remove"):
            calls_of(folder)[name]()


def test_a_weight_file_of_another_name_is_loaded_as_it_is_quantized(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dense")
    expected = nearplane.load(folder)(TOKENS).logits
    (folder / "model.safetensors").rename(folder / "weights v2.safetensors")
    assert torch.equal(nearplane.load(folder)(TOKENS).logits, expected)


def test_a_config_that_asks_for_outputs_without_names_is_evaluated(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dense")
    reconfigure(folder, return_dict=False)
    assert nearplane.evaluate(folder, HELD_OUT, seqlen=8, samples=1).perplexity > 1


def test_a_position_that_is_true_is_no_number(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dense")
    for value in (True, 1):
        reconfigure(folder, max_position_embeddings=value)
        with pytest.raises(NearplaneError):
            nearplane.evaluate(folder, HELD_OUT)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """What a process of its own prints that loads two models which are not there; and what it asked a hub that knows none.

    Then the hub is gone, and it opens a third. Before and behind all that it prints whether transformers knows nearplane, which
    it registers twice.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/gone":
                server.server_close()
                threading.Thread(target=server.shutdown).start()
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place, address = tmp_path_factory.mktemp("fresh"), f"http://127.0.0.1:{server.server_port}"
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(place)}
    program = (
        "import os, sys; before = dict(os.environ)\n"
        "from contextlib import suppress\n"
        "from urllib.request import urlopen\n"
        "import nearplane\n"
        "from nearplane.models.model import open_model\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers\n"
        "print('nearplane' in quantizers)\n"
        "for source in ('nonexistent', 'nobody/nothing'):\n"
        "    try:\n"
        "        nearplane.load(source)\n"
        "    except nearplane.ModelError as error:\n"
        "        print(error)\n"
        "with suppress(OSError): urlopen(os.environ['HF_ENDPOINT'] + '/gone')\n"
        "try: open_model('some-owner/some-model')\n"
        "except nearplane.ModelError as error: print(error)\n"
        "print({n: v for n, v in os.environ.items() if n[:3] == 'HF_'} == {n: v for n, v in before.items() if n[:3] == 'HF_'})\n"
        "nearplane.register(); nearplane.register()\n"
        "print('nearplane' in quantizers)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], env=environment, cwd=place, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines(), asked


@pytest.mark.nightly
def test_importing_registers_nothing_and_registering_twice_is_harmless(fresh: tuple[list[str], list[str]]) -> None:
    printed, _ = fresh
    assert (printed[0], printed[-1]) == ("False", "True")


@pytest.mark.nightly
def test_the_hub_is_asked_once_at_most(fresh: tuple[list[str], list[str]]) -> None:
    """It was asked six times."""
    (_, first, second, *_), asked = fresh
    assert "nonexistent does not exist" in first
    assert "nobody/nothing is neither a local folder nor a model on the hub" in second
    assert [path for path in asked if path.startswith("/api/models/") or "resolve" in path] == [
        "/api/models/nobody/nothing/revision/main"
    ]


@pytest.mark.nightly
def test_an_unreachable_hub_is_one_sentence_and_the_environment_is_left_alone(
    fresh: tuple[list[str], list[str]],
) -> None:
    *_, said, unchanged, _ = fresh[0]
    assert said.startswith("some-owner/some-model is not a local folder, and the hub could not be reached")
    assert unchanged == "True"


@pytest.mark.parametrize(("name", "key"), [("compressed-tensors", "ignore"), ("gptq", "dynamic")])
def test_patterns_that_are_none_are_named(copy_of: Callable[[str], Path], name: str, key: str) -> None:
    """Before transformers, which matches the first, ends in a traceback."""
    folder = copy_of(name)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config[key] = ["re:("] if key == "ignore" else {"+:(": {"bits": 4}}
    reconfigure(folder, quantization_config=config)
    for what in ("load", "evaluate", "export"):
        with pytest.raises(ModelError, match="is not a regular expression"):
            calls_of(folder)[what]()


def test_a_method_of_others_names_what_transformers_needs(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gptq")
    reconfigure(folder, quantization_config={"quant_method": "aqlm", "nbits_per_codebook": 16})
    for call in list(calls_of(folder).values())[:3]:
        with pytest.raises((ModelError, FormatError), match=r"(?i)aqlm"):
            call()


def test_plain_transformers_loads_what_is_loaded_here(checkpoints: dict[str, Path]) -> None:
    theirs, ours = AutoModelForCausalLM.from_pretrained(checkpoints["dense"]), nearplane.load(checkpoints["dense"])
    assert theirs.dtype == ours.dtype
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in theirs.state_dict().items())


def test_a_tokenizer_on_the_hub_works_as_in_a_folder(tmp_path: Path) -> None:
    """That of a Marian was fetched without source.spm and target.spm, and data of trusted code never."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_marian(folder)
    for name in ("NOTICE", "USE_POLICY.md", "weird.voc", "notes.md"):
        (folder / name).write_text(name)
    (folder / "code").mkdir()
    (folder / "code" / "reader.py").write_text("open('weird.voc')")
    with served(folder, tmp_path / "cache") as source:
        fetched = find_folder(source)
        assert tokenizer_of(fetched)("the old dog").input_ids == tokenizer_of(folder)("the old dog").input_ids
        assert Beside(source=fetched).names() == Beside(source=folder).names()
        assert {"source.spm", "target.spm", "NOTICE", "USE_POLICY.md"} <= {*Beside(source=fetched).names()}
        assert not (fetched / "weird.voc").exists()
        trusted = find_folder(source, trust_remote_code=True)
        assert (
            Beside(source=trusted, trust_remote_code=True).names()
            == Beside(source=folder, trust_remote_code=True).names()
        )
        assert (trusted / "weird.voc").is_symlink()
        assert not (trusted / "notes.md").exists()


def test_the_files_of_the_class_of_a_tokenizer_are_known_without_loading_it(tmp_path: Path) -> None:
    """Also those of a class that only this program, or a later transformers, has."""

    class Own(PreTrainedTokenizerFast):
        vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "own.voc"}

    assert vocabulary_of(tmp_path) == ()
    for text, expected in (
        ("{", ()),
        ('{"tokenizer_class": "Nowhere"}', ()),
        ('{"tokenizer_class": "Own"}', ("own.voc",)),
    ):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(REGISTERED_TOKENIZER_CLASSES, "Own", Own)
            assert vocabulary_of(tmp_path) == expected
    (tmp_path / "own.voc").write_text("")
    assert "own.voc" in Beside(source=tmp_path, vocabulary=expected).names()
    assert "own.voc" not in Beside(source=tmp_path).names()
