"""Every type of model: what is written loads and computes what our decoded weights do, or is refused before work starts.

No third outcome. Plain transformers loads fixed grids, `nearplane.load` rates, which plain transformers must not load.
`make nightly` runs all of `types.py`, every other run a few. With -s each test prints a line of the table in
docs/results/model-types.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    GPTQConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import nearplane
from model_types import SURVEYED, VOCABULARY, save_type
from nearplane.errors import NearplaneError
from nearplane.formats.stored import Stored
from nearplane.loading.rounded_layers import round_inputs, rounded_layers
from nearplane.planning.gptq_rules import GPTQMODEL_ONLY_TYPES

WINDOWS = torch.randint(3, VOCABULARY, (16, 32), generator=torch.Generator().manual_seed(1))
TOKENS = WINDOWS[:2, :12]
FUSED = r"\.(?:([qkv]_proj)|(gate_proj|up_proj)|(w1|w3)|(q_a_proj|kv_a_proj_with_mqa))\.weight_global_scale$"  # by vLLM
PACKED = 1e-5  # of the logits, in float32: packed layers sum in another order
REFUSED = ("gemma3n_text", "gpt2", "inkling2_loop_text", "openai-gpt", "xlm", "xlnet")  # whatever is left out
ATTEMPTS = 6  # of doing what a refusal offers


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of a tiny random model of the type that the test is for."""
    return save_type(tmp_path / "source", request.param)


def written(source: Path, out: Path, **how: Any) -> nearplane.record.record.RunRecord | None:
    """Quantize; None where that is refused, and nothing that the refusal offers with --ignore is left to try.

    A refusal names a part of the model, and comes before anything is there; what it offers is taken up.
    """
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    ignore: list[str] = []
    for _ in range(ATTEMPTS):
        try:
            return nearplane.quantize(
                source, out, calibration=WINDOWS, allocate="uniform", device="cpu", ignore=ignore, **how
            )
        except NearplaneError as error:
            said = str(error)
        named = [name for name, _ in network.named_modules() if "." in name and name in said]
        assert named or type(network).__name__ in said, said
        assert [path.name for path in out.parent.iterdir()] == ["source"], "something was written before it was refused"
        print(f"| {network.config.model_type} | {_how(how)} | refused: {said} |")
        offered = re.findall(r"'([^']+)'", said.partition("--ignore ")[2])
        if not offered:
            return None
        ignore += offered
    raise AssertionError(f"what refusals offer does not help: {ignore}")


def logits(model: PreTrainedModel) -> Tensor:
    """Return what a model computes, its weights row by row in memory of their own: where they lie decides the order of sums."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def decoded(out: Path) -> Tensor:
    """Return the logits of our own decoded weights in a plain float32 model."""
    return logits(_dense(out))


def _dense(out: Path) -> PreTrainedModel:
    nearplane.export(out, out.parent / "dense", dtype="float32")
    return AutoModelForCausalLM.from_pretrained(out.parent / "dense", dtype=torch.float32)


@pytest.mark.parametrize("source", SURVEYED, indirect=True)
def test_four_bits_load_in_plain_transformers_or_are_refused(source: Path, tmp_path: Path) -> None:
    """Bit by bit: in float32 the reader multiplies scale and code as we do, and the same modules compute."""
    record = written(source, tmp_path / "out", bits=4, group_size=16)
    if record is not None:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        assert torch.equal(logits(loaded), decoded(tmp_path / "out"))
        print(f"| {loaded.config.model_type} | compressed-tensors | equal, {_layers(record)} |")


@pytest.mark.parametrize("source", SURVEYED, indirect=True)
def test_four_bits_for_nearplane_load_or_are_refused(source: Path, tmp_path: Path) -> None:
    """What transformers would not load, nearplane.load does."""
    record = written(source, tmp_path / "out", bits=4, group_size=16, runtime="nearplane")
    assert (record is None) == (AutoConfig.from_pretrained(source).model_type in REFUSED)
    if record is not None:
        loaded = nearplane.load(tmp_path / "out", dtype="float32", packed=False)
        assert isinstance(loaded, PreTrainedModel)
        assert torch.equal(logits(loaded), decoded(tmp_path / "out"))
        print(f"| {loaded.config.model_type} | nearplane | equal, {_layers(record)} |")


@pytest.mark.parametrize("source", SURVEYED, indirect=True)
def test_nvfp4_loads_and_layers_that_runtimes_fuse_have_one_global_scale_or_it_is_refused(
    source: Path, tmp_path: Path
) -> None:
    """Readers round decoded weights to bfloat16 in a model of any dtype."""
    record = written(source, tmp_path / "out", grid="nvfp4")
    if record is None:
        return
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    dense = _dense(tmp_path / "out")
    for layer in record.layers:
        weight = dense.get_parameter(f"{layer.name}.weight").data
        weight.copy_(weight.bfloat16())
    assert torch.equal(logits(loaded), logits(dense))
    scales: dict[tuple[str, int | None], set[float]] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if (fused := re.search(FUSED, name)) is not None:
                scales.setdefault((name[: fused.start()], fused.lastindex), set()).add(float(tensor))
    assert all(len(each) == 1 for each in scales.values()), scales
    print(f"| {loaded.config.model_type} | nvfp4 | equal, {_layers(record)}, {len(scales)} fused sets |")


@pytest.mark.parametrize("source", SURVEYED, indirect=True)
def test_int8_with_rounded_activations_computes_as_transformers_simulates_it_or_is_refused(
    source: Path, tmp_path: Path
) -> None:
    """Bit by bit in float32: transformers rounds the inputs of int8 layers, and multiplies decoded weights."""
    record = written(source, tmp_path / "out", grid="int8", activations="int8")
    if record is None:
        return
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    dense = _dense(tmp_path / "out")
    layers = {layer: partial(_of_tokens, change) for layer, change in rounded_layers(dense, tmp_path / "out").items()}
    assert {layer.name for layer in layers} == {layer.name for layer in record.layers}
    weights_alone = logits(dense)
    with round_inputs(layers, dense):
        computed = logits(dense)
    assert torch.equal(logits(loaded), computed)
    assert not torch.equal(computed, weights_alone)
    print(f"| {loaded.config.model_type} | int8 | equal, {_layers(record)} |")


def _of_tokens(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Round as the simulation in compressed-tensors: a step for every index of the first two dimensions; for a matrix one."""
    return change(x.flatten(2) if x.dim() > 2 else x.reshape(1, -1)).view_as(x)


@pytest.mark.parametrize("source", SURVEYED, indirect=True)
def test_rates_load_in_nearplane_alone_or_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = written(source, tmp_path / "out", rate=3)
    if record is None:
        return
    expected = decoded(tmp_path / "out")
    assert torch.equal(logits(nearplane.load(tmp_path / "out", dtype="float32", device="cpu", packed=False)), expected)
    loaded = nearplane.load(tmp_path / "out", dtype="float32", device="cpu")
    assert (logits(loaded) - expected).norm() <= PACKED * expected.norm()
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "nearplane")
    with pytest.raises(ValueError, match=r"before from_pretrained: import nearplane; nearplane\.register\(\)$"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    print(f"| {loaded.config.model_type} | rate | equal, {_layers(record)}; plain transformers stops |")


@pytest.mark.parametrize("source", SURVEYED, indirect=True)
def test_gptq_loads_by_rule_and_where_its_programs_are_installed(source: Path, tmp_path: Path) -> None:
    """Every weight is what we decode, rounded to the dtype of the reader, and all else as it was, bit by bit.

    Not logits: kernels of GPTQ round activations, and where two experts are as good the router then takes the other. Optimum and
    gptqmodel exclude versions of other packages, so that they are installed in environments of their own.
    """
    record = written(source, tmp_path / "out", bits=4, group_size=16, format="gptq")
    if record is None:
        return
    done, experts = "written", any(layer.blended is not None for layer in record.layers)
    assert ("transformers_weights" in json.loads((tmp_path / "out" / "config.json").read_text())) == experts
    if find_spec("gptqmodel") is not None and find_spec("optimum") is not None:
        done = "equal"
        loaded = _by_gptqmodel(tmp_path / "out", alone=experts)
        layers = {name: part for name, part in loaded.named_modules() if hasattr(part, "dequantize_weight")}
        written_as = {layer.stored if experts else layer.name: layer.stored for layer in record.layers}
        assert layers.keys() == written_as.keys()
        stored, dense = Stored(tmp_path / "out"), _dense(tmp_path / "out")
        for name, part in layers.items():
            values = stored.matrix(written_as[name], stored.tensors(written_as[name])).decode()
            found = part.dequantize_weight().T
            assert torch.equal(found, values.to(found.dtype)), name
        if experts:
            _stops_and_computes_the_same(tmp_path / "out", loaded, dense)
        others = {name: tensor for name, tensor in loaded.state_dict().items() if name.rpartition(".")[0] not in layers}
        assert all(torch.equal(tensor, dense.state_dict()[name].to(tensor.dtype)) for name, tensor in others.items())
    print(f"| {AutoConfig.from_pretrained(source).model_type} | gptq | {done}, {_layers(record)} |")


def _stops_and_computes_the_same(out: Path, loaded: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Experts are modules of their own in gptqmodel alone: transformers stops; logits are those of half precision."""
    with pytest.raises(ValueError, match=r"Load them with GPTQModel"):
        AutoModelForCausalLM.from_pretrained(out)
    found, expected = logits(loaded).float(), logits(dense)
    assert (found - expected).norm() <= 5e-3 * expected.norm()


def _by_gptqmodel(out: Path, *, alone: bool) -> PreTrainedModel:
    """Load through transformers; and where it is known not to load, with gptqmodel itself, which wants a tokenizer."""
    if not alone and AutoConfig.from_pretrained(out).model_type not in GPTQMODEL_ONLY_TYPES:
        backend = GPTQConfig(bits=4, backend="gptq_torch")
        return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=backend)
    from gptqmodel import BACKEND, GPTQModel

    words = Tokenizer(WordLevel({str(word): word for word in range(VOCABULARY)}, unk_token="3"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1").save_pretrained(out)
    return GPTQModel.load(str(out), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model


def _layers(record: nearplane.record.record.RunRecord) -> str:
    left = f" with --ignore {' '.join(record.recipe.ignore)}" if record.recipe.ignore else ""
    return f"{len(record.layers)} layers{left}"


def _how(how: dict[str, Any]) -> str:
    return "rate" if "rate" in how else how.get("grid") or how.get("format", "compressed-tensors")
