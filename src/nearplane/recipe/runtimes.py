"""Programs that run checkpoints: what each loads of every file format, and from what this is known. Needs no torch.

`readers.py` answers questions by this table; tools/runtimes_page.py writes it into docs/serving.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nearplane.number_formats import GGUF_TYPES
from nearplane.recipe.file_formats import Format

Runtime = Literal["vllm", "sglang", "transformers", "gptqmodel", "llama.cpp", "mlx", "nearplane"]
Integers = Literal["symmetric", "zero points", "minima"]
Known = Literal["run", "loader run, kernel replaced", "read in its source", "said by its documentation"]
RUN: Known = "run"
# a kernel that processors lack: weights were decoded from the program's own tensors
REPLACED: Known = "loader run, kernel replaced"
SOURCE: Known = "read in its source"
SAID: Known = "said by its documentation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Weights that a program loads from files of one format, and from what this is known.

    Args:
        grids: Names of number formats.
        bits: Widths of integers, beside or in place of these.
        integers: Whether the integers have no zero points, a zero point, or a real-valued minimum of each group.
        groups: Sizes of their groups; empty: any, and one step a row.
        rounded: Whether inputs are rounded, too; None: they may be or not.
        dense, experts: From what it is known that layers, and the matrices of experts, load; None: they do not.
    """

    grids: tuple[str, ...] = ()
    bits: tuple[int, ...] = ()
    integers: Integers = "symmetric"
    groups: tuple[int, ...] = ()
    rounded: bool | None = False
    dense: Known | None = None
    experts: Known | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that runs checkpoints.

    Args:
        title: Its name.
        version: The version that was tried or read; empty: none.
        loads: What it loads by format, its usual format first.
        packed: Formats whose weights stay packed in memory on every device; empty: all.
        joins: Whether it joins layers of a module, which must then have one number format.
        one_grid: Formats of whose layers all must have one number format.
        one_grid_for_experts: Formats of which all experts of a network must have one number format, not only those of a block.
        all_experts: Whether the experts of a block are one tensor, so that all of them are quantized, or none.
        model_types: Types of models that it was tried with; empty: what transformers knows.
    """

    title: str
    version: str
    loads: Mapping[Format, tuple[Form, ...]]
    packed: tuple[Format, ...] = ()
    joins: bool = False
    one_grid: tuple[Format, ...] = ()
    one_grid_for_experts: tuple[Format, ...] = ()
    all_experts: bool = False
    model_types: tuple[str, ...] = ()


COMPRESSED_TENSORS_BITS = (2, 3, 4, 5, 6, 7, 8)
GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = 4
MLX_BITS, MLX_GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
MLX_MODEL_TYPES = (  # that it computes as transformers does, see tests/journeys/test_mlx.py
    "cohere", "dots1", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_bigcode", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "internlm3", "iquestcoder", "laguna", "llama", "ministral3", "mistral", "mixtral", "nemotron", "olmo2",
    "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
FLOATS = ("mxfp4", "nvfp4", "fp8", "fp8-block", "mxfp8")
MLX_FLOATS = ("mxfp4", "nvfp4", "mxfp8")


def _gptq(known: Known, *, experts: Known | None) -> dict[Format, tuple[Form, ...]]:
    """Return what loads all that GPTQ and AWQ store; version 1 of GPTQ stores zero points less 1, which leaves them unclear."""
    symmetric = Form(bits=GPTQ_BITS, dense=known, experts=experts)
    asymmetric = Form(bits=GPTQ_BITS, integers="zero points", dense=known, experts=experts)
    awq = Form(bits=(4,), integers="zero points", dense=known)
    return {"gptq": (symmetric,), "gptq_v2": (symmetric, asymmetric), "awq": (awq,)}


def _gptq_of_servers(four: Known, eight: Known) -> dict[Format, tuple[Form, ...]]:
    """Return what servers load of GPTQ and AWQ: 4 and 8 bits without zero points."""
    gptq = (Form(bits=(4,), dense=four, experts=eight), Form(bits=(8,), dense=eight, experts=eight))
    return {"gptq": gptq, "gptq_v2": gptq, "awq": (Form(bits=(4,), integers="zero points", dense=four),)}


MLX = (
    Form(bits=MLX_BITS, integers="minima", groups=MLX_GROUP_SIZES, dense=RUN, experts=RUN),
    Form(grids=MLX_FLOATS, dense=RUN, experts=RUN),
)
GGUF = (
    Form(grids=tuple(GGUF_TYPES), dense=RUN, experts=RUN),
    Form(bits=(4, 5, 8), groups=(32,), dense=RUN, experts=RUN),
)
RUNTIMES: Mapping[Runtime, Program] = {
    "vllm": Program(
        title="vLLM",
        version="0.32.0",
        loads={
            "compressed-tensors": (
                Form(bits=COMPRESSED_TENSORS_BITS, dense=REPLACED, experts=REPLACED),
                Form(bits=COMPRESSED_TENSORS_BITS, integers="zero points", dense=REPLACED, experts=REPLACED),
                Form(grids=("int8-row",), rounded=True, dense=REPLACED, experts=REPLACED),
                Form(grids=("fp8",), dense=REPLACED),  # fp8-block: an assertion of its scheme fails
                Form(grids=("fp8", "fp8-block"), rounded=True, dense=RUN, experts=REPLACED),
                Form(grids=("nvfp4",), rounded=None, dense=REPLACED, experts=REPLACED),
                Form(grids=("mxfp4", "mxfp8"), dense=REPLACED, experts=REPLACED),
                Form(grids=("mxfp4", "mxfp8"), rounded=True, dense=REPLACED, experts=SOURCE),
            ),
            **_gptq_of_servers(REPLACED, SOURCE),
            "nearplane": (
                Form(grids=("coded",), dense=RUN),
            ),  # by the plugin in plugins/vllm, which no GPU has run yet
        },
        packed=("compressed-tensors", "gptq", "gptq_v2", "awq"),
        joins=True,
    ),
    "sglang": Program(
        title="SGLang",
        version="",
        loads={  # nvfp4 of weights alone: its pull request 10851 was closed; nobody tried experts in nvfp4, or in int8 with int8
            "compressed-tensors": (
                Form(bits=(4, 8), dense=SAID, experts=SAID),
                Form(grids=("int8-row",), rounded=True, dense=SAID),
                Form(grids=("mxfp4", "fp8", "fp8-block", "mxfp8"), rounded=None, dense=SAID, experts=SAID),
                Form(grids=("nvfp4",), rounded=True, dense=SAID),
            ),
            **_gptq_of_servers(SAID, SAID),
        },
        joins=True,
        one_grid_for_experts=("compressed-tensors",),
    ),
    "transformers": Program(
        title="transformers",
        version="5.24.0",
        loads={
            "compressed-tensors": (
                Form(bits=COMPRESSED_TENSORS_BITS, dense=RUN, experts=RUN),
                Form(grids=("int8-row",), rounded=True, dense=RUN),  # experts: it does not merge them
                Form(grids=("mxfp4", "fp8", "fp8-block"), rounded=None, dense=RUN, experts=RUN),
                # experts: it decodes those in nvfp4 without their global scale, and does not merge those in mxfp8
                Form(grids=("nvfp4", "mxfp8"), rounded=None, dense=RUN),
            ),
            **_gptq(RUN, experts=None),
        },
        packed=("gptq", "gptq_v2", "awq"),
        one_grid=("gptq", "gptq_v2"),
        one_grid_for_experts=("compressed-tensors",),
    ),
    "gptqmodel": Program(title="GPTQModel", version="7.6.0", loads=_gptq(RUN, experts=RUN)),
    "llama.cpp": Program(
        title="llama.cpp", version="of llama-cpp-python 0.3.36 and xllamacpp 2026.10.11549", loads={"gguf": GGUF}
    ),
    "mlx": Program(
        title="mlx_lm",
        version="0.32.2",
        loads={"mlx": MLX},
        one_grid_for_experts=("mlx",),
        all_experts=True,
        model_types=MLX_MODEL_TYPES,
    ),
    "nearplane": Program(
        title="nearplane",
        version="",
        loads={
            "compressed-tensors": (
                Form(bits=COMPRESSED_TENSORS_BITS, dense=RUN, experts=RUN),
                Form(bits=COMPRESSED_TENSORS_BITS, integers="zero points", dense=RUN, experts=RUN),
                Form(grids=("int8-row", *FLOATS), rounded=None, dense=RUN, experts=RUN),
            ),
            **_gptq(RUN, experts=RUN),
            "mlx": MLX,
            "gguf": GGUF,
            "nearplane": (Form(grids=("coded",), dense=RUN, experts=RUN),),
        },
        packed=("nearplane",),
    ),
}
# usual readers of each format; a run without a runtime keeps the rules of the last
USUAL: Mapping[Format, tuple[Runtime, ...]] = {
    "compressed-tensors": ("vllm", "transformers"),
    "gptq": ("vllm", "transformers", "gptqmodel"),
    "gptq_v2": ("vllm", "transformers", "gptqmodel"),
    "awq": ("vllm", "transformers"),
    "mlx": ("mlx",),
    "gguf": ("llama.cpp",),
    "nearplane": ("nearplane",),
}
