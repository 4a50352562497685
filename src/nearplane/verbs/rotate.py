"""rotate(): the same network in another basis of its hidden states, in which it may lose less when it is quantized.

What is written is an ordinary model in the dtypes of the original, which any program loads. That the architecture permits it is
shown on a small network of the same architecture with random weights, whose predictions have to stay the same.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from nearplane.errors import ModelError, first_line
from nearplane.formats.beside import Beside
from nearplane.formats.layer_format import as_tensors_are, json_text, read_config
from nearplane.models.model import Model, open_model
from nearplane.models.pretrained import builder_of, without_bars
from nearplane.models.rotation import roles_of, rotated_tensors
from nearplane.system.arguments import takes
from nearplane.system.memory import is_out_of_memory, is_refused
from nearplane.system.output_folder import Unfinished, readable_errors
from nearplane.system.paths import CONFIG
from nearplane.system.safetensors_files import ShardReader, TensorReader
from nearplane.system.shard_writer import ShardWriter, in_portions
from nearplane.system.sizes import check_room
from nearplane.verbs.rotate_request import RotateRequest

# a small network of the same architecture has so many heads, and at most so many of the rest
HEADS = 4
SMALL = {
    "vocab_size": 256, "intermediate_size": 64, "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "decoder_sparse_step": 2,
}  # fmt: skip
TOKENS = 16  # of which predictions are compared
TOLERANCE = 1e-4  # of the largest logit: float32 computes to about 1e-6


@takes(RotateRequest)
def rotate(request: RotateRequest) -> int:
    """Write a model whose hidden states are rotated: the same network, in which no column of weights stands out.

    The norms' weights move into the weights behind them. `evaluate --against` the original measures what the rounding of the new
    weights to their dtype costs, and later what quantizing costs.

    Returns:
        Size of the weights in bytes.

    Raises:
        RecipeError: `out` is in use.
        ModelError: The head is a copy of the embeddings, the architecture permits no rotation, or the model cannot be read.
    """
    out, trust_remote_code = Path(request.out).expanduser(), request.trust_remote_code
    replace(request, out=out).check()
    model = open_model(str(request.model), trust_remote_code=trust_remote_code)
    if model.tied:
        raise ModelError(
            f"The head of {request.model} is a copy of its embeddings, which would have to be rotated in two ways. Quantize the "
            f"model as it is."
        )
    if model.stored:
        raise ModelError(
            f"The weights of {request.model} are stored in {model.stored}, in which rotated ones would be rounded anew. Use the "
            f"model in bfloat16."
        )
    roles = roles_of(model.reader)
    check_architecture(model)
    beside = Beside(source=model.folder, trust_remote_code=trust_remote_code, vocabulary=model.vocabulary)
    beside.check()
    size = sum(map(model.reader.nbytes, roles))
    check_room(out, size, joined=size)
    with readable_errors(out), Unfinished(out, sources=[model.folder]) as place:
        writer = ShardWriter(place.folder, None)
        for shard in in_portions(rotated_tensors(model.reader, roles)):
            writer.write(shard)
        beside.log_left_out(out)
        beside.copy(place.folder)
        config = as_tensors_are(read_config(model.folder), model.config.to_dict()) | {"tie_word_embeddings": False}
        config.pop("transformers_weights", None)  # the name of a file that is not written
        try:
            (place.folder / CONFIG).write_text(json_text(config))
            writer.finish()
        except BaseException:
            (place.folder / CONFIG).unlink(missing_ok=True)
            raise
    return writer.size


@torch.no_grad()
def check_architecture(model: Model) -> None:
    """Compare the predictions of a small random network of the same architecture before and after its rotation.

    Raises:
        ModelError: They differ, or there is no such network.
    """
    kind = type(model.network).__name__
    with tempfile.TemporaryDirectory(prefix="nearplane-") as place, torch.random.fork_rng(devices=[]), without_bars():
        plain, turned = Path(place) / "plain", Path(place) / "turned"
        try:
            network = _small(model.config, trust_remote_code=model.trust_remote_code)
            network.save_pretrained(plain)
            _write(turned, ShardReader(plain))
            shutil.copyfile(plain / CONFIG, turned / CONFIG)
            tokens = torch.arange(TOKENS)[None] % network.config.vocab_size
            logits = [
                type(network).from_pretrained(each, dtype=torch.float32)(tokens).logits for each in (plain, turned)
            ]
        except (ModelError, OSError):
            raise
        except Exception as error:  # the code of a model may raise anything
            if is_out_of_memory(error) or is_refused(error):
                raise
            raise ModelError(
                f"That {kind} stays the same network could not be tried on a small one: {first_line(error)} Quantize the model "
                f"as it is."
            ) from error
    difference, largest = float((logits[0] - logits[1]).abs().max()), float(logits[0].abs().max())
    if not difference <= TOLERANCE * largest:
        raise ModelError(
            f"A rotation changes {kind}: logits of a small one differ by {difference:.2g} of {largest:.2g}. Quantize the model as "
            f"it is."
        )


def _write(folder: Path, reader: TensorReader) -> None:
    folder.mkdir()
    writer = ShardWriter(folder, None)
    writer.write(dict(rotated_tensors(reader, roles_of(reader))))
    writer.finish()


@torch.no_grad()
def _small(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a small random network of the architecture of a config in float32, with blocks of each kind.

    None of its weights has a usual value: norms are not 1, and biases not 0.
    """
    config = copy.deepcopy(config)
    heads, shared = (
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    )
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    config.num_attention_heads, config.hidden_size = HEADS, HEADS * width
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = max(1, HEADS * shared // heads)
    for name, most in SMALL.items():
        if isinstance(value := getattr(config, name, None), int) and not isinstance(value, bool):
            setattr(config, name, min(value, most))
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = [0]
    config.num_hidden_layers = 3
    if types := getattr(config, "layer_types", None):
        first = max(types.index(each) for each in set(types)) + 1
        config.num_hidden_layers = max(3, first) if len(types) >= 3 else len(types)
        config.layer_types = types[: config.num_hidden_layers]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    torch.manual_seed(0)
    build = builder_of(config).from_config
    network: PreTrainedModel = build(config, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    for parameter in network.parameters():
        if parameter.dim() == 1:
            parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return network
