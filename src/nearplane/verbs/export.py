"""export(): a quantized checkpoint as a dense one, which any program reads, or with the same integers in another format.

Dense weights are decoded one tensor at a time. Integers are moved by `export_integers.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nearplane.errors import FormatError, RecipeError
from nearplane.formats.beside import Beside, origin_of
from nearplane.formats.layer_format import QUANTIZATION, WEIGHTS, as_tensors_are, json_text, read_config
from nearplane.formats.stored import Stored, quantization_of, reader_of
from nearplane.loading.dense_network import decoded_tensors, stacks_of
from nearplane.models.config_checks import PACKED_NAMES
from nearplane.models.conversion import as_saved
from nearplane.models.pretrained import empty_network, vocabulary_of
from nearplane.record.model_card import model_card
from nearplane.system.arguments import takes
from nearplane.system.files import write_whole
from nearplane.system.output_folder import Unfinished, readable_errors
from nearplane.system.paths import CARD, CONFIG
from nearplane.system.progress import phase
from nearplane.system.recorded_hashes import check_hashes
from nearplane.system.safetensors_files import TensorReader
from nearplane.system.shard_writer import ShardWriter, in_portions
from nearplane.system.sizes import check_room
from nearplane.verbs.checkpoint_requests import DENSE, ExportRequest
from nearplane.verbs.export_integers import move_integers, record_of

log = logging.getLogger("nearplane")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@takes(ExportRequest)
def export(request: ExportRequest) -> int:
    """Write a quantized checkpoint in another format, with every weight decoded or with equal integers.

    The tokenizer and other files are copied. Integers and steps are never rounded: if a layer would change, or readers of
    the format would not load it, nothing is written. Losses stay what they were, so the run record, if there is one, is
    kept, with the sizes and checksums of the new files.

    A checkpoint of nearplane gets a model card too; for those of other programs nothing is known to write into one.

    Returns:
        Size of the weights in bytes.

    Raises:
        RecipeError: `out` is in use, an option is unknown, or the format cannot hold a layer exactly.
        FormatError, ModelError: The checkpoint cannot be read, or `out` cannot be written.
    """
    source, out = Path(request.source).expanduser(), Path(request.out).expanduser()
    replace(request, source=source, out=out).check()
    trust_remote_code = request.trust_remote_code
    beside = Beside(source=source, trust_remote_code=trust_remote_code, vocabulary=vocabulary_of(source))
    beside.check()
    if quantization_of(source) is None:
        check_hashes(source, weights=False)  # config.json may have lost its entry
        if packed := next((name for name in reader_of(source).names() if PACKED_NAMES.search(name)), None):
            raise FormatError(
                f"{source / CONFIG} has no quantization_config, but {packed} is packed. Fetch the file again."
            )
        raise RecipeError(f"{source} is not quantized: its weights are dense already. Copy the folder instead.")
    if request.format != DENSE:
        return move_integers(
            source,
            out,
            request.format,
            request.runtime,
            trust_remote_code=trust_remote_code,
            progress=request.progress,
        )
    stored, place = Stored(source), Unfinished(out, sources=[source])
    kept = set(stored.rest()) if request.dtype is None else set()
    dtype = request.dtype or "bfloat16"
    network = empty_network(source, trust_remote_code=trust_remote_code, reader=stored.reader)
    size = _dense_bytes(network, stored.reader, DTYPES[dtype], kept)
    check_room(out, size, joined=size)
    tensors = _with_names_of_files(network, decoded_tensors(source, network))
    with readable_errors(out), place:
        writer = ShardWriter(place.folder, None)
        with phase(request.progress, "decoding weights"):
            for shard in in_portions(_converted(tensors, DTYPES[dtype], kept)):
                writer.write(shard)
        beside.log_left_out(out)
        beside.copy(place.folder)
        if (record := record_of(source, "The export has no model card, because %s")) is not None:
            write_whole(place.folder / CARD, model_card(record, origin_of(source), dense=dtype).encode())
        try:
            config = as_tensors_are(read_config(source), network.config.to_dict())
            (place.folder / CONFIG).write_text(json_text(_dense(config, dtype)))
            writer.finish()
        except BaseException:
            (place.folder / CONFIG).unlink(missing_ok=True)
            raise
    return writer.size


def _dense_bytes(network: PreTrainedModel, reader: TensorReader, dtype: torch.dtype, kept: Collection[str]) -> int:
    """Return the bytes of all weights of a network, decoded to a dtype except those that are `kept` as they are."""
    decoded = sum(parameter.numel() for parameter in network.parameters())
    decoded -= sum(math.prod(reader.shape(name)) for name in kept)
    size: int = dtype.itemsize * max(0, decoded)
    return size + sum(map(reader.nbytes, kept))


def _with_names_of_files(
    network: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with stacks of experts as the files of this type of model name them, where the network differs."""
    stacks = stacks_of(network)
    for name, tensor in tensors:
        saved = as_saved(network, {name: tensor}) if name in stacks else {name: tensor}
        yield from saved.items()


def _converted(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, kept: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, floating-point ones in `dtype` unless they are `kept`."""
    for name, tensor in tensors:
        if tensor.is_floating_point():
            if not bool(torch.isfinite(tensor).all()):
                raise FormatError(
                    f"{name} has values that are NaN or Inf: the file is damaged. Fetch the folder again."
                )
            tensor = tensor if name in kept else tensor.to(dtype)
            if dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
                raise FormatError(f"{name} has values outside the range of float16. Export to bfloat16 or float32.")
        yield name, tensor


def _dense(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json without its entries about quantization, and with `dtype` where it names a dtype."""
    dropped = ("quantization_config", "torch_dtype", QUANTIZATION, WEIGHTS)
    entries = {name: value for name, value in config.items() if name not in dropped}
    entries = {name: _dense(value, dtype) if isinstance(value, dict) else value for name, value in entries.items()}
    return entries | ({"dtype": dtype} if {"dtype", "torch_dtype", "architectures"} & config.keys() else {})
