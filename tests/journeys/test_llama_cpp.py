"""The real client: llama.cpp loads our files, cuts text as the original's tokenizer, and computes what we compute.

Needs llama-cpp-python, which pip builds from source in some minutes; skipped without it. Written for 0.3.36.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import nearplane
from families import FAMILIES, LLAMA, MOE, TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.formats.gguf import nvfp4_blocks
from nearplane.formats.gguf.gguf_header import FILE, read_header
from nearplane.formats.gguf.lone_file import folder_of_file
from nearplane.formats.gguf.mixes import MIXES
from nearplane.formats.gguf.tokenizer import PRE
from nearplane.loading.dense_network import dense_network
from nearplane.models.pretrained import tokenizer_of
from nearplane.number_formats import TYPES
from nearplane.system.token_lines import DECOMPOSED
from nearplane.system.token_lines import LINES as LINES_OF_MANY_KINDS
from nearplane.verbs.evaluate import load_dense
from tokenizers_of_kinds import of_pieces, over_bytes, save_sentencepiece, saved

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
pytestmark = pytest.mark.nightly
ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))
ROPES: dict[str, dict[str, Any]] = {
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    "linear": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
    "longrope": dict(long_factor=[4.0] * 4, short_factor=[1.5] * 4, original_max_position_embeddings=32),
}
EXPERTS = LLAMA | MOE | dict(moe_intermediate_size=32, tie_word_embeddings=False)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama, tied": ("llama", LLAMA | dict(tie_word_embeddings=True)),
    "llama, biases": ("llama", LLAMA | dict(attention_bias=True, mlp_bias=True)),
    "llama, wide heads": ("llama", LLAMA | dict(head_dim=16)),
    "llama 3": ("llama", LLAMA | dict(rope_parameters=dict(rope_type="llama3", rope_theta=500.0) | ROPES["llama3"])),
    "llama, linear": (
        "llama",
        LLAMA | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4) | ROPES["linear"]),
    ),
    "qwen2, YaRN": ("qwen2", LLAMA | dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4) | ROPES["yarn"])),
    "mistral": ("mistral", LLAMA | dict(sliding_window=64)),
    "qwen2": ("qwen2", LLAMA | dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", FAMILIES["qwen3"]),
    "gemma2": ("gemma2", FAMILIES["gemma2"] | dict(query_pre_attn_scalar=8)),
    "gemma3": ("gemma3_text", FAMILIES["gemma3_text"] | dict(query_pre_attn_scalar=8, num_hidden_layers=7)),
    "phi3": ("phi3", LLAMA | dict(num_key_value_heads=4)),
    "phi3, long": (
        "phi3",
        LLAMA
        | dict(num_key_value_heads=4, original_max_position_embeddings=32)
        | dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4) | ROPES["longrope"]),
    ),
    "gpt2": ("gpt2", FAMILIES["gpt2"]),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2_moe": ("qwen2_moe", EXPERTS | dict(shared_expert_intermediate_size=64)),
    "qwen3_moe": ("qwen3_moe", EXPERTS | dict(norm_topk_prob=True)),
    "olmoe": ("olmoe", EXPERTS | dict(num_key_value_heads=4)),
}
QUICK: dict[str, Any] = {"solver": "round-to-nearest", "samples": 1, "seqlen": 16, "calibration": str(CALIBRATION)}
ODD = "  two  spaces\n\n\ttabs, I'VE 12345 + 3.14; été, Überß, 日本語, नमस्ते, 🙂🙂 \r\n end ▁ <s> </s>\u00a0x"
LINES: list[str] = []
CALLBACK = llama_cpp.llama_log_callback(lambda level, text, data: LINES.append(text.decode(errors="replace")))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    llama_cpp.llama_log_set(CALLBACK, ctypes.c_void_p(0))


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Any]:
    """Open a file with activations as exact as llama.cpp has them."""
    exact = dict(type_k=0, type_v=0, flash_attn=False, n_threads=1, n_threads_batch=1, verbose=False)
    model = llama_cpp.Llama(str(path), **exact, **options)
    try:
        yield model
    finally:
        model.close()


def converted(source: Path, out: Path, type: int, **options: Any) -> Path:
    """Let llama.cpp's own quantizer write a file."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = 1, type, True
    for name, value in options.items():
        setattr(params, name, value)
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)) == 0
    return out


def decoded_folder(demo: Path, scratch: Path) -> Path:
    """Return the folder with values decoded by llama.cpp, whose quantizer keeps our keys: they describe another file."""
    plain = shutil.copytree(demo, scratch / "plain")
    file = converted(demo / FILE, scratch / "decoded.gguf", 0)
    own = [key for key in read_header(file).fields if key.startswith("nearplane.")]
    removed = [word for key in own for word in ("--remove-metadata", key)]
    command = [
        str(Path(sys.executable).with_name("gguf-new-metadata")),
        str(file),
        str(plain / FILE),
        "--force",
        *removed,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (plain / "nearplane.json").unlink(missing_ok=True)
    return plain


def divergence(path: Path, windows: Tensor, expected: Tensor) -> float:
    """Return the mean KL(expected || llama.cpp) per token, in nats."""
    total, length = 0.0, windows.shape[1]
    with opened(path, logits_all=True, n_ctx=length, n_batch=length, n_ubatch=length) as model:
        for window, wanted in zip(windows, expected, strict=True):
            model.reset()
            model.eval(window.tolist())
            logits = torch.from_numpy(np.array(model.scores[: length - 1], np.float64))
            total += float((wanted.exp() * (wanted - logits.log_softmax(-1))).sum())
    return total / len(windows) / (length - 1)


def both(out: Path, windows: Tensor, scratch: Path) -> tuple[float, float]:
    """Return KL from our own evaluation of a folder to llama.cpp: with all weights decoded to F32 by it, and as they are."""
    network = dense_network(out)
    with torch.inference_mode():
        expected = network(windows).logits[:, :-1].double().log_softmax(-1)
    decoded = converted(out / FILE, scratch / "decoded.gguf", 0)
    return divergence(decoded, windows, expected), divergence(out / FILE, windows, expected)


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from a key of SHAPES to the folder of a tiny random model with the demo's tokenizer."""

    def folder_of(name: str, **changes: Any) -> Path:
        family, shape = SHAPES[name]
        folder = tmp_path_factory.mktemp("models") / "model"
        random_model(config_of(family, **(shape | {"vocab_size": TEXT_VOCABULARY} | changes))).float().save_pretrained(
            folder
        )
        add_tokenizer(folder)
        return folder

    return folder_of


@pytest.mark.parametrize("name", SHAPES)
def test_llama_cpp_computes_what_transformers_computes(
    name: str, source_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Windows of 48 tokens are longer than those of attention (6), and than the positions before they are scaled.

    transformers 5.24 cuts text for qwen2 as Qwen's tokenizer does, whatever tokenizer.json says, and the demo's is another.
    """
    source, out = source_of(name), tmp_path / "out"
    windows = torch.randint(0, TEXT_VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(0))
    words = {"embeddings": "f32", **QUICK}
    if name.startswith("qwen2") and name != "qwen2_moe":
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (source / file).unlink()
        words |= {"calibration": windows, "samples": None, "seqlen": None}
    nearplane.quantize(source, out, grid="q8_0", **words)
    decoded, native = both(out, windows, tmp_path)
    assert decoded < (
        1e-5 if name.startswith("gemma") else 1e-6
    )  # llama.cpp looks GELU up in a table of 16-bit numbers
    assert decoded < native < 0.1  # of random networks, which mind every rounding


WIDE = dict(hidden_size=64, head_dim=16, intermediate_size=128, moe_intermediate_size=64, query_pre_attn_scalar=16)
WIDE_GPT2 = dict(n_embd=64)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_llama_cpp_multiplies_products_with_the_global_scales_of_nvfp4(
    name: str, source_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Of experts there is one for each. Decoding by llama.cpp leaves the scales where they are."""
    nearplane.quantize(source_of(name, **WIDE), tmp_path / "out", grid="nvfp4", format="gguf", **QUICK)
    windows = torch.randint(0, TEXT_VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0))
    decoded, native = both(tmp_path / "out", windows, tmp_path)
    assert decoded < 1e-6
    assert decoded < native < 0.1


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt2", "olmoe"])
def test_elsewhere_it_does_so_in_attention_but_not_in_mlps_which_is_why_these_are_refused(
    name: str, source_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(name, **(WIDE_GPT2 if name == "gpt2" else WIDE))
    windows = torch.randint(0, TEXT_VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0))
    nearplane.quantize(source, tmp_path / "part", grid="nvfp4", format="gguf", ignore=("mlp",), **QUICK)
    decoded, _ = both(tmp_path / "part", windows, tmp_path)
    assert decoded < (1e-5 if name.startswith("gemma") else 1e-6)
    with pytest.raises(nearplane.RecipeError, match="without their global scales"):
        nearplane.quantize(source, tmp_path / "out", grid="nvfp4", format="gguf", **QUICK)
    monkeypatch.setattr(nvfp4_blocks, "check_scaled", lambda *_: None)
    nearplane.quantize(source, tmp_path / "out", grid="nvfp4", format="gguf", **QUICK)
    decoded, _ = both(tmp_path / "out", windows, tmp_path)
    assert not decoded < 1e-2  # it may be NaN


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "out"
    nearplane.quantize(MODEL, out, grid="q4_k_m", calibration=str(CALIBRATION), samples=32, seqlen=128)
    return out


def test_a_file_without_a_tokenizer_runs(source_of: Callable[..., Path], tmp_path: Path) -> None:
    source = source_of("llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).unlink()
    windows = torch.randint(0, TEXT_VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
    nearplane.quantize(source, tmp_path / "out", grid="q8_0", calibration=windows, solver="round-to-nearest")
    decoded, _ = both(tmp_path / "out", windows, tmp_path)
    assert decoded < 1e-6


def test_the_demo_runs_as_it_is_evaluated(demo: Path, tmp_path: Path) -> None:
    ids = tokenizer_of(MODEL)(HELD_OUT.read_text(), add_special_tokens=False)["input_ids"]
    windows = torch.tensor(ids[: 16 * 128]).view(16, 128)
    decoded, native = both(demo, windows, tmp_path)
    assert decoded < 1e-6
    assert native == pytest.approx(of_rounded_inputs(demo, windows), rel=0.05), (
        "nothing but inputs in 8 bits is another"
    )


def of_rounded_inputs(out: Path, windows: Tensor) -> float:
    """Return the mean KL, nats per token, by inputs of layers in 8 bits with a step for each 256, as llama.cpp has them."""
    network = dense_network(out)

    def rounded(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        blocks = given[0].reshape(-1, min(256, given[0].shape[-1]))
        steps = blocks.abs().amax(1, keepdim=True) / 127
        return (((blocks / steps).round() * steps).nan_to_num().view_as(given[0]),)

    with torch.inference_mode():
        exact = network(windows).logits[:, :-1].double().log_softmax(-1)
        for module in network.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(rounded)
        found = network(windows).logits[:, :-1].double().log_softmax(-1)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_the_demo_says_in_llama_cpp_what_it_says_in_transformers(demo: Path, tmp_path: Path) -> None:
    """Of the decoded values: as the file is, rounding of activations may decide between two tokens that are as likely."""
    plain = decoded_folder(demo, tmp_path)
    network, tokenizer = load_dense(demo, torch.device("cpu"))
    prompt = "Return the number of"
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    wanted = tokenizer.decode(network.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :])
    pieces: list[str] = []
    assert nearplane.generate(plain, prompt, tokens=16, say=pieces.append) == "".join(pieces) == wanted


def test_a_chat_is_answered_in_llama_cpp_as_in_transformers(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = decoded_folder(demo, tmp_path)
    own = shutil.copytree(demo, tmp_path / "own")
    for folder in (plain, own):
        template = "{{ bos_token }}{% for m in messages %}Return {{ m.content }}{% endfor %}"
        (folder / "chat_template.jinja").write_text(template)
    answer = nearplane.generate(plain, "the number of", tokens=16)
    assert answer.weight_bytes > 0
    monkeypatch.setattr("nearplane.verbs.generate.runs_in_llama_cpp", lambda folder: False)
    assert nearplane.generate(own, "the number of", tokens=16) == answer


def tokens_agree(source: Path, text: str, scratch: Path, **words: Any) -> int:
    """Compare the tokens of a text by the file with those of the original's tokenizer; return how many there are.

    Also those of many lines with the tokenizer that is made again from the file.
    """
    nearplane.quantize(source, scratch / "out", grid="q8_0", embeddings="f16", **(QUICK | words))
    tokenizer = tokenizer_of(source)
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    begun = tokenizer(text[:50])["input_ids"]
    again = tokenizer_of(folder_of_file(scratch / "out" / FILE))  # with which every run compares tokens before work
    with opened(scratch / "out" / FILE, vocab_only=True) as model:
        for line in (*LINES_OF_MANY_KINDS, DECOMPOSED, *filter(str.strip, text.splitlines()[:200])):
            ours = again(line, add_special_tokens=False)["input_ids"]
            assert model.tokenize(line.encode(), add_bos=False, special=False) == ours, line
        assert model.tokenize(text.encode(), add_bos=False, special=False) == wanted
        assert model.tokenize(text[:50].encode(), add_bos=True, special=False) == begun
    return len(wanted)


def test_the_demo_has_its_tokens(tmp_path: Path) -> None:
    assert tokens_agree(MODEL, HELD_OUT.read_text() + ODD.replace("<s> </s>", ""), tmp_path) > 20_000


@pytest.mark.skipif(not ASSETS.is_dir(), reason="needs the measuring models in $ASSETS")
@pytest.mark.parametrize("name", ["babyllama105", "stories260K"])
def test_trained_models_have_their_tokens(name: str, tmp_path: Path) -> None:
    """One of single characters, one of pieces with bytes for the rest."""
    text = (ASSETS / "text" / "tinystories_valid.txt").read_text()[:100_000]
    assert tokens_agree(ASSETS / "models" / name, text, tmp_path, ignore=("down_proj",)) > 20_000


@pytest.mark.parametrize("name", [*PRE.values(), "pieces", "pieces, a space before text", "tokenizer.model"])
def test_tokenizers_of_every_kind_have_their_tokens(name: str, source_of: Callable[..., Path], tmp_path: Path) -> None:
    source = source_of("llama", vocab_size=1100)
    if name == "tokenizer.model":
        save_sentencepiece(source)
    else:
        saved(of_pieces(space="space" in name) if name.startswith("pieces") else over_bytes(name), source)
    text = HELD_OUT.read_text()[:90_000] + ODD.replace("<s> </s>", "")
    assert tokens_agree(source, text, tmp_path) > 20_000


FILE_TYPES = {  # of llama.cpp
    "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q6_k": 18,
    "q2_k_m": 10, "q3_k_m": 12, "q4_k_m": 15, "q5_k_m": 17,
}  # fmt: skip
PURE = {
    "iq4_nl": 25,
    "iq4_xs": 30,
    "mxfp4": 38,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 14,
    "q5_k": 16,
}  # of one type but for what the others mix in


def types_of(path: Path) -> dict[str, tuple[str, int]]:
    """Return type and bytes of every matrix by its name."""
    return {
        each.name: (each.tensor_type.name, int(each.n_bytes))
        for each in gguf.GGUFReader(path).tensors
        if len(each.shape) > 1
    }


@pytest.mark.parametrize(("kind", "experts"), [("qwen3_moe", 4), ("qwen3_moe", 8), ("mixtral", 8)])
def test_mixes_of_experts_are_those_of_llama_cpp_own_quantizer(
    kind: str, experts: int, source_of: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_hidden_layers=9)
    source = source_of(kind, num_experts=experts, num_local_experts=experts, **sizes)
    nearplane.quantize(source, tmp_path / "base", grid="q8_0", embeddings="f32", **QUICK)
    plain = converted(tmp_path / "base" / FILE, tmp_path / "plain.gguf", 0)
    for grid in MIXES:
        nearplane.quantize(source, tmp_path / grid, grid=grid, **QUICK)
        theirs = converted(plain, tmp_path / "theirs.gguf", FILE_TYPES[grid])
        ours, wanted = types_of(tmp_path / grid / FILE), types_of(theirs)
        assert {k: v for k, v in ours.items() if v != wanted[k]} == {}, grid
        assert ours.keys() == wanted.keys()


@pytest.mark.parametrize("shape", ["256, tied", "256", "96"])
def test_types_and_sizes_are_those_of_llama_cpp_own_quantizer(
    shape: str, source_of: Callable[..., Path], tmp_path: Path
) -> None:
    """96 inputs are no multiple of the 256 of k-quants: other types take their places."""
    assert {*FILE_TYPES, *PURE} == {*TYPES, *MIXES}
    width = int(shape.split(",")[0])
    sizes = dict(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=9, tie_word_embeddings="tied" in shape
    )
    source = source_of("llama", **sizes)
    nearplane.quantize(source, tmp_path / "base", grid="q8_0", embeddings="f32", **QUICK)
    plain = converted(tmp_path / "base" / FILE, tmp_path / "plain.gguf", 0)
    for grid, number in (FILE_TYPES | PURE).items():
        nearplane.quantize(source, tmp_path / grid, grid=grid, format="gguf", **QUICK)
        theirs = converted(plain, tmp_path / "theirs.gguf", number, pure=grid in PURE)
        ours, wanted = types_of(tmp_path / grid / FILE), types_of(theirs)
        if grid in PURE:  # embeddings and head have that one type there, too
            ours, wanted = ({k: v for k, v in each.items() if k.startswith("blk.")} for each in (ours, wanted))
        assert ours == wanted, grid
