"""Formats of checkpoints by name: what their readers accept, and which number formats they hold. Needs no torch.

No format is written here: `formats/table.py` holds the layout of a layer's tensors in a file, under the same names. The
`check` of a layer format refuses by the same facts, and by the shape and kind of the layer besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nearplane.errors import RecipeError
from nearplane.number_formats import FP8, FP8_BLOCK, MXFP4, MXFP8, NVFP4, TYPES, NumberFormat, integers

Format = Literal["compressed-tensors", "gptq", "gptq_v2", "awq", "mlx", "gguf", "nearplane"]

GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = 4
SERVERS = frozenset({"vLLM", "SGLang"})
MLX_BITS = (2, 3, 4, 5, 6, 8)
MLX_GROUP_SIZES = (32, 64, 128)
MLX_MODEL_TYPES = (  # model types that mlx_lm 0.32.2 loads and computes as transformers does, see tests/journeys/test_mlx.py
    "cohere", "dots1", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_bigcode", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "internlm3", "iquestcoder", "laguna", "llama", "ministral3", "mistral", "mixtral", "nemotron", "olmo2",
    "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
COMPRESSED_TENSORS_BITS = (2, 3, 4, 5, 6, 7, 8)
COMPRESSED_TENSORS_FLOATS = (MXFP4, NVFP4, FP8, FP8_BLOCK, MXFP8)
GGUF_INTEGERS = {
    integers(kind.bits, kind.group): kind
    for kind in TYPES.values()
    if kind.symmetric and kind.single and kind.levels is None
}


class Weights(NamedTuple):
    """Weights of a layer as a program meets them in a file.

    Args:
        format: Their number format.
        rounded: Whether the program is to round the layer's inputs, too.
        expert: Whether the layer is a matrix of an expert.
    """

    format: NumberFormat
    rounded: bool = False
    expert: bool = False


Fault = Callable[[Weights], str | None]  # the reason why a program does not load such weights; None: it does


def unstorable_in_compressed_tensors(format: NumberFormat) -> str | None:
    """Return why no program reads weights in compressed-tensors; None if one does."""
    if format.levels is not None and format not in COMPRESSED_TENSORS_FLOATS:
        held = ", ".join(each.name for each in COMPRESSED_TENSORS_FLOATS)
        return f"compressed-tensors stores integers of 2 to 8 bits and {held}, not {format.name}. Use one of these with --grid."
    if format.bits not in COMPRESSED_TENSORS_BITS:
        return f"compressed-tensors stores integers of 2 to 8 bits, not {format.bits}."
    if format.minimum:
        return f"compressed-tensors stores zero points, but no minima as {format.name} has. Use --format mlx."
    return None


def _compressed_tensors(weights: Weights) -> str | None:
    format = weights.format
    if weights.expert and format == NVFP4:
        return (
            "transformers 5.23 and 5.24 decode experts in NVFP4 without their global scale. Use --runtime vllm, which loads them, "
            "--grid mxfp4, or leave experts unquantized with --ignore 'experts'."
        )
    if weights.expert and weights.rounded and format.levels is None:
        return (
            "transformers 5.23 and 5.24 do not merge experts in int8 with rounded inputs. Use --runtime vllm, which loads them, "
            "--grid fp8, or leave experts unquantized with --ignore 'experts'."
        )
    if not format.symmetric and format.levels is None and not format.minimum:
        return (
            "asymmetric weights in compressed-tensors do not load in transformers 5.23 and 5.24, which expect their packed zero "
            "points in another shape. Use --runtime vllm, which loads them, --format gptq_v2, or symmetric weights."
        )
    return unstorable_in_compressed_tensors(format)


def _gptq_v2(weights: Weights) -> str | None:
    format = weights.format
    if format.levels is not None:
        return f"GPTQ stores integers, not {format.name}. Use --bits instead of --grid."
    if format.bits not in GPTQ_BITS:
        return f"GPTQ stores 2, 3, 4 or 8 bits, not {format.bits}. Use --format compressed-tensors for symmetric Linear layers."
    return None


def _gptq(weights: Weights) -> str | None:
    if (fault := _gptq_v2(weights)) is None and not weights.format.symmetric:
        fault = (
            "asymmetric weights are ambiguous in version 1 of GPTQ, which stores zero points less 1, and gptqmodel refuses them. "
            "Use --format gptq_v2."
        )
    return fault


def _awq(weights: Weights) -> str | None:
    format = weights.format
    if format != integers(AWQ_BITS, format.group, symmetric=False):
        return (
            f"AWQ stores 4 bits with zero points, not {format.name}. Use --bits 4 --no-symmetric, or another --format."
        )
    return None


def _mlx(weights: Weights) -> str | None:
    format = weights.format
    if not format.minimum or format.bits not in MLX_BITS or format.group not in MLX_GROUP_SIZES:
        return (
            f"MLX stores {', '.join(map(str, MLX_BITS))} bits in groups of {', '.join(map(str, MLX_GROUP_SIZES))}, not "
            f"{format.name}. Use other --bits or --group-size."
        )
    return None


def _gguf(weights: Weights) -> str | None:
    format = weights.format
    if format.name not in TYPES and format not in GGUF_INTEGERS:
        grid = f"{format.bits} bits in {'' if format.symmetric else 'a'}symmetric groups of {format.group or 'a row'}"
        plain = ", ".join(str(each.bits) for each in GGUF_INTEGERS)
        return (
            f"a GGUF cannot store {grid if format.levels is None else format.name}. It stores {plain} bits in symmetric groups "
            f"of 32 (--group-size 32), and the types of --grid."
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """Readers of one file format, and what they accept.

    Args:
        any_network: Whether readers accept encoders and encoder-decoder models besides language models.
        readers: Names of the programs that load such files, the usual one first.
        one_grid_for_experts: Whether readers decode the experts of all blocks by one number format.
        all_experts: Whether the experts of a block are one tensor, so that all of them are quantized, or none.
        plain_readers: Those of the readers that load no experts, and only layers of one number format.
        model_types: Types of models that the first reader was tried with; empty: it loads what transformers loads.
        every_tensor: Whether readers load also the tensors that transformers leaves out.
        minimum: Whether every group has a real-valued minimum, also in embeddings and head.
        block_types: Whether layers have types of blocks.
        one_file: Whether a checkpoint is one file, with tokenizer and run record in it, whose other matrices are never float32.
        steps_of_model: Whether steps have the dtype of the model.
        entropy_coded: Whether layers are entropy-coded, as in no other format.
        library: The hub's name of the library that loads the format, for the model card.
        needs: Packages that this library needs besides itself.
        rounds_inputs: Whether files can ask runtimes to round the inputs of layers, and have a place for scales of their cache.
        bits: Widths of integers from which --allocate slope chooses, narrowest first; empty: it cannot.
        fault: Function from weights to the reason why readers do not load them in any layer; None: they do.
    """

    any_network: bool = False
    readers: tuple[str, ...] = ()
    one_grid_for_experts: bool = False
    all_experts: bool = False
    plain_readers: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    every_tensor: bool = False
    minimum: bool = False
    block_types: bool = False
    one_file: bool = False
    steps_of_model: bool = False
    entropy_coded: bool = False
    library: str = "transformers"
    needs: str = ""
    rounds_inputs: bool = False
    bits: tuple[int, ...] = ()
    fault: Fault = lambda _: None

    @property
    def fuses(self) -> bool:
        """Whether a reader fuses layers of a module, which must then have one number format."""
        return not SERVERS.isdisjoint(self.readers)

    @property
    def by_transformers(self) -> bool:
        """Whether transformers, or GPTQModel which builds on it, is among the readers."""
        return not {"transformers", "GPTQModel"}.isdisjoint(self.readers)

    def check(self, name: str, weights: Weights) -> None:
        """Refuse weights that the readers do not load; `name` is the layer, or several, in the error.

        Raises:
            RecipeError: They do not; the message says what they load.
        """
        if (fault := self.fault(weights)) is not None:
            raise RecipeError(f"{name}: {fault}")


GPTQ = FileFormat(
    readers=("vLLM", "transformers", "GPTQModel"),
    plain_readers=("transformers",),
    needs="gptqmodel and optimum",
    bits=GPTQ_BITS,
    fault=_gptq,
)
FILE_FORMATS: dict[str | None, FileFormat] = {
    "compressed-tensors": FileFormat(
        any_network=True,
        readers=("vLLM", "transformers"),
        one_grid_for_experts=True,
        steps_of_model=True,
        rounds_inputs=True,
        needs="compressed-tensors",
        bits=COMPRESSED_TENSORS_BITS,
        fault=_compressed_tensors,
    ),
    "gptq": GPTQ,
    "gptq_v2": replace(GPTQ, fault=_gptq_v2),
    "awq": FileFormat(
        readers=("vLLM", "transformers"),
        needs="gptqmodel and accelerate",
        bits=(AWQ_BITS,),
        fault=_awq,
    ),
    "mlx": FileFormat(
        readers=("mlx_lm",),
        one_grid_for_experts=True,
        all_experts=True,
        model_types=MLX_MODEL_TYPES,
        every_tensor=True,
        minimum=True,
        steps_of_model=True,
        library="mlx",
        bits=MLX_BITS,
        fault=_mlx,
    ),
    "gguf": FileFormat(
        readers=("llama.cpp",),
        every_tensor=True,
        block_types=True,
        one_file=True,
        library="llama-cpp-python",
        bits=tuple(sorted(format.bits for format in GGUF_INTEGERS)),
        fault=_gguf,
    ),
    "nearplane": FileFormat(any_network=True, readers=("nearplane",), entropy_coded=True, library="nearplane"),
    None: FileFormat(),  # not chosen yet
}
