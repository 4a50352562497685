"""Layers of vLLM whose matrices arrive entropy-coded: decoded one by one as they arrive, and multiplied as packed integers.

A layer of vLLM may join several matrices, such as q, k and v; each stays a matrix of its own. With tensor parallelism every rank
decodes all of them and keeps its rows or columns. Embeddings and heads stay packed on CPUs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from nearplane.coding.blob import decode_packed
from nearplane.coding.on_device import Blob, decode_all, decoder_of
from nearplane.coding.packed_matrix import PackedMatrix, part
from nearplane.errors import FormatError
from nearplane.loading.coded_linear import CodedLinear
from nearplane.loading.packed_linear import PackedLinear

CODED, STOP = "weight_coded", "weight"  # ends of names in the files; the latter is empty, beside the first layer only
SHARDS = {"q": 0, "k": 1, "v": 2}

FUSED = ("qkv_proj", "gate_up_proj", "c_attn")  # matrices that files join in the order in which vLLM does


class Products(nn.Module):
    """The matrices of a layer, in the order in which vLLM joins their outputs.

    Args:
        count: Their number.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity() for _ in range(count)])
        self.missing = set(range(count))

    def fill(self, number: int, layer: nn.Module) -> None:
        """Put a decoded matrix in its place."""
        self.parts[number] = layer
        self.missing.discard(number)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (..., out) of all matrices."""
        outputs = [part(x) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def products(x: Tensor, layer: str, outputs: int) -> Tensor:
    """Return the outputs (..., outputs) of a layer: one operation for torch.compile, which does not look into it."""
    del outputs
    result: Tensor = get_forward_context().no_compile_layers[layer].products(x)
    return result


def rows(tokens: Tensor, layer: str, width: int, dtype: torch.dtype) -> Tensor:
    """Return the embeddings (..., width) of tokens: one operation, as `products`."""
    table = get_forward_context().no_compile_layers[layer].products.parts[0]
    result: Tensor = table.rows(tokens.reshape(-1)).to(dtype).reshape(*tokens.shape, width)
    return result


def _shape_of_products(x: Tensor, layer: str, outputs: int) -> Tensor:
    del layer
    return x.new_empty(*x.shape[:-1], outputs)


def _shape_of_rows(tokens: Tensor, layer: str, width: int, dtype: torch.dtype) -> Tensor:
    del layer
    return tokens.new_empty(*tokens.shape, width, dtype=dtype)


LIBRARY = torch.library.Library("nearplane", "FRAGMENT")  # operators of torch.library.custom_op take longer to call
LIBRARY.define("products(Tensor x, str layer, int outputs) -> Tensor")
LIBRARY.define("rows(Tensor tokens, str layer, int width, ScalarType dtype) -> Tensor")
for work, fake in ((products, _shape_of_products), (rows, _shape_of_rows)):
    # else torch looks at each function that is called within, which takes longer than small products
    undisturbed = torch.compiler.disable(work)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(work.__name__, undisturbed, key)
    torch.library.register_fake(f"nearplane::{work.__name__}", fake, lib=LIBRARY)


class CodedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """How vLLM loads and computes a linear layer.

    Args:
        names: Names of its matrices in the files.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Give the layer places for the bytes of its matrices, see `LinearMethodBase.create_weights`."""
        del output_size, attributes
        parts, last = len(output_partition_sizes), self.names[0].rpartition(".")[2]
        if len(self.names) != parts and not (len(self.names) == 1 and last in FUSED):
            raise ValueError(
                f"{self.names[0]}: vLLM makes {parts} parts of {len(self.names)} matrices, in a way that is not known here. "
                f"Leave these layers out with --ignore {last}, or export the folder: nearplane export OUT dense."
            )
        layer.products, layer.outputs = Products(len(self.names)), sum(output_partition_sizes)
        _make_known(layer, self.names[0])
        device = torch.get_default_device()

        def load(_: nn.Parameter, coded: Tensor, shard: str | int | None = None) -> None:
            number = 0 if shard is None else SHARDS.get(str(shard), shard)
            assert isinstance(number, int), shard
            sizes = output_partition_sizes if shard is None else output_partition_sizes[number : number + 1]
            matrix = decoded(coded, f"{self.names[number]}.{CODED}", device)
            rows = own_rows(matrix.shape[0], sizes, layer, self.names[number])
            columns = own_columns(matrix.shape[1], input_size, input_size_per_partition, layer, self.names[number])
            layer.products.fill(number, packed_layer(part(matrix, rows, columns), params_dtype, device))

        _add_places(layer, load)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that all matrices have arrived; the empty weight stays, as adapters ask for its device."""
        for number in layer.products.missing:
            raise FormatError(f"{self.names[number]}.{CODED} is missing. Fetch the folder again.")
        delattr(layer, CODED)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the outputs (..., out) of the layer."""
        y: Tensor = torch.ops.nearplane.products(x, layer.handle, layer.outputs)
        return y if bias is None else y + bias


class DecodedEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """How vLLM loads embeddings, or a head, whose matrix is entropy-coded, where rows cannot be looked up in packed integers.

    Args:
        name: Name of the matrix in the files.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.missing = name, True

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """Give the layer its weight, and a place for the bytes, see `QuantizeMethodBase.create_weights`."""
        super().create_weights(layer, *sizes, **attributes)
        weight = layer.weight

        def load(_: nn.Parameter, coded: Tensor, shard: str | int | None = None) -> None:
            del shard
            values = own_embeddings(coded, layer, self.name).weight
            weight.data.zero_()
            weight.data[: len(values)].copy_(values)
            self.missing = False

        _add_places(layer, load)
        layer.register_parameter(STOP, weight)
        usual = weight.weight_loader
        weight.weight_loader = lambda place, loaded: usual(place, loaded) if loaded.numel() else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that the matrix has arrived, and go on as for other embeddings."""
        if self.missing:
            raise FormatError(f"{self.name}.{CODED} is missing. Fetch the folder again.")
        delattr(layer, CODED)
        super().process_weights_after_loading(layer)


class PackedEmbeddingMethod(QuantizeMethodBase):  # type: ignore[misc]
    """How vLLM loads and computes embeddings, or a head, on CPUs: integers stay packed, rows are decoded as they are looked up.

    Args:
        name: Name of the matrix in the files.
        tied: Whether this is a head that has the matrix of the embeddings.
    """

    def __init__(self, name: str, *, tied: bool = False) -> None:
        self.name, self.tied = name, tied

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """Give the layer a place for the bytes, see `QuantizeMethodBase.create_weights`."""
        del sizes, attributes
        layer.products = Products(1)
        _make_known(layer, self.name)

        def load(_: nn.Parameter, coded: Tensor, shard: str | int | None = None) -> None:
            del shard
            layer.products.fill(0, own_embeddings(coded, layer, self.name))

        _add_places(layer, load)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that the matrix has arrived."""
        if layer.products.missing:
            raise FormatError(f"{self.name}.{CODED} is missing. Fetch the folder again.")
        if not self.tied:
            delattr(layer, CODED)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the embeddings (..., width) of tokens."""
        values: Tensor = torch.ops.nearplane.rows(input_, layer.handle, layer.embedding_dim, layer.params_dtype)
        return values

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits (..., tokens), 0 where the vocabulary is filled up; vLLM does not compile this."""
        y = layer.products(x)
        y = nn.functional.pad(y, (0, layer.num_embeddings_per_partition - y.shape[-1]))
        return y if bias is None else y + bias


class HeadMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """How vLLM computes a head that is not entropy-coded, unless it is tied to embeddings that are."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Make the head compute with the matrix of the embeddings."""
        method = embed_tokens.quant_method
        if isinstance(method, PackedEmbeddingMethod):
            layer.products, layer.quant_method = embed_tokens.products, PackedEmbeddingMethod(method.name, tied=True)
        return super().tie_weights(layer, embed_tokens)


def embedding_method(name: str, device: torch.device) -> DecodedEmbeddingMethod | PackedEmbeddingMethod:
    """Return how vLLM loads coded embeddings, or a head, on a device: rows are looked up in packed integers on CPUs."""
    return PackedEmbeddingMethod(name) if device.type == "cpu" else DecodedEmbeddingMethod(name)


def own_embeddings(coded: Tensor, layer: Any, name: str) -> CodedLinear:
    """Return the embeddings of this rank's tokens.

    Args:
        coded: Bytes of the matrix.
        layer: The layer, with `shard_indices`.
        name: Name of the matrix in the files.

    Raises:
        FormatError: The bytes are damaged, or the matrix has another shape.
    """
    matrix = decoded(coded, f"{name}.{CODED}", torch.device("cpu"))
    if matrix.shape != (expected := (layer.org_vocab_size, layer.embedding_dim)):
        raise FormatError(_unlike(name, matrix.shape, expected))
    rows = np.arange(layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)
    return CodedLinear(part(matrix, rows, np.arange(matrix.shape[1])), layer.params_dtype)


def decoded(coded: Tensor, name: str, device: torch.device) -> PackedMatrix:
    """Return the matrix of a tensor, decoded on a device that has a decoder, else on the CPU.

    Raises:
        FormatError: The bytes are damaged, or are no bytes.
    """
    if coded.dtype != torch.uint8 or coded.dim() != 1:
        found = f"{coded.dim()} dimensions of {str(coded.dtype).removeprefix('torch.')}"
        raise FormatError(f"{name} has {found}, expected bytes in a row. Fetch the folder again.")
    if decoder_of(device) is None:
        return decode_packed(coded.cpu().numpy(), name=name)
    (matrix,) = decode_all([Blob(coded, name)], device)
    return matrix.packed()


def packed_layer(matrix: PackedMatrix, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the layer that multiplies by a matrix."""
    if device.type == "cpu":
        return CodedLinear(matrix, dtype)
    out, width = matrix.shape
    layer = PackedLinear(width, out, bias=False, dtype=dtype, device=device)
    layer.fill(matrix, device)
    return layer


def own_rows(count: int, sizes: Sequence[int], layer: Any, name: str) -> np.ndarray:
    """Return the rows of a matrix that this rank keeps.

    Args:
        count: Number of rows of the whole matrix.
        sizes: Number of rows of this rank; several where the files join matrices that vLLM joins, too.
        layer: The layer, with `tp_rank` and `tp_size`.
        name: Name of the matrix in the files.

    Raises:
        FormatError: The matrix has another number of rows.
    """
    rank, world = layer.tp_rank, layer.tp_size
    if sum(sizes) == count:
        return np.arange(count)
    if len(sizes) > 1:
        raise FormatError(
            f"{name} holds several matrices that vLLM joins, and cannot be divided among {world} processes. Use "
            f"--tensor-parallel-size 1."
        )
    (size,) = sizes
    if not size or count % size or world % (count // size):
        raise FormatError(_unlike(name, (count,), (size * world,)))
    first = (
        rank // (world // (count // size)) * size
    )  # several ranks share the heads of keys and values if these are few
    return np.arange(first, first + size)


def own_columns(count: int, whole: int, size: int, layer: Any, name: str) -> np.ndarray:
    """Return the columns of a matrix that this rank keeps; arguments as for `own_rows`, and the inputs of the whole layer."""
    if count != whole:
        raise FormatError(_unlike(name, (count,), (whole,)))
    first = 0 if size == whole else layer.tp_rank * size
    return np.arange(first, first + size)


def _make_known(layer: Any, name: str) -> None:
    """Enter a layer in vLLM's table of those that operators find by name, `layer.handle`."""
    layer.handle = f"{name} of nearplane"
    layers = get_current_vllm_config().compilation_config.static_forward_context
    if layer.handle in layers:
        raise ValueError(f"vLLM makes two layers of {name}, which nearplane-vllm cannot tell apart.")
    layers[layer.handle] = layer


def _unlike(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    sizes = [" x ".join(map(str, each)) for each in (found, expected)]
    return (
        f"{name} is {sizes[0]}, but config.json describes {sizes[1]}. These files do not belong together. Fetch the folder "
        f"again."
    )


def _add_places(layer: Any, load: Any) -> None:
    """Give a layer parameters without elements, by whose names vLLM finds the function for the tensors of the files."""
    for name, loader in ((CODED, load), (STOP, lambda *_: None)):
        place = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
        place.weight_loader = loader  # type: ignore[attr-defined]
        layer.register_parameter(name, place)
