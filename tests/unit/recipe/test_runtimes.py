"""What a named program reads: the usual format, refusals that name others, and weights that only some load."""

from __future__ import annotations

import re
from itertools import product
from typing import Any, get_args

import pytest

from nearplane.errors import RecipeError
from nearplane.number_formats import BY_NAME, FP8, FP8_BLOCK, NVFP4, integers
from nearplane.recipe.file_formats import Format
from nearplane.recipe.readers import Weights, readers_of
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.runtimes import RUNTIMES, USUAL, Runtime


@pytest.mark.parametrize(
    ("runtime", "format"),
    [
        ("vllm", "compressed-tensors"),
        ("sglang", "compressed-tensors"),
        ("transformers", "compressed-tensors"),
        ("gptqmodel", "gptq"),
        ("llama.cpp", "gguf"),
        ("mlx", "mlx"),
        ("nearplane", "compressed-tensors"),
    ],
)
def test_a_runtime_has_a_usual_format(runtime: Runtime, format: Format) -> None:
    recipe = Recipe.from_spellings(bits=4, group_size=32, runtime=runtime)
    assert (recipe.format, recipe.runtime) == (format, runtime)
    assert recipe.readers.runtimes == (runtime,)
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_every_runtime_is_in_the_table_and_every_format_has_one() -> None:
    assert set(RUNTIMES) == set(get_args(Runtime))
    for format in get_args(Format):
        assert all(format in RUNTIMES[name].loads for name in USUAL[format])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"runtime": "mlx", "format": "gptq"},
            "--runtime mlx writes --format mlx, found --format gptq.*--runtime vllm or sglang or",
        ),
        ({"runtime": "llama.cpp", "rate": 3.0}, "--format gguf"),
        (
            {"runtime": "sglang", "rate": 3.0},
            "--runtime sglang writes --format compressed-tensors, gptq, gptq_v2 or awq, found --format nearplane",
        ),
        ({"runtime": "ollama"}, "runtime is 'ollama'; expected"),
    ],
)
def test_what_a_program_does_not_read_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Recipe.from_spellings(**options)


@pytest.mark.parametrize("bits", range(2, 9))
def test_zero_points_in_compressed_tensors_are_for_vllm(bits: int) -> None:
    """transformers does not load them, and so nobody gets them who did not say so."""
    for runtime, allowed in (
        ("vllm", True),
        ("sglang", False),
        ("nearplane", True),
        ("transformers", False),
        (None, False),
    ):
        recipe = Recipe.from_spellings(bits=bits, group_size=128, symmetric=False, runtime=runtime)
        fault = recipe.readers.fault(Weights(recipe.scheme.number_format))
        assert (fault is None) == allowed, runtime


def test_servers_load_less_of_gptq_than_gptqmodel() -> None:
    three = Weights(Recipe.from_spellings(bits=3, format="gptq", group_size=128).scheme.number_format)
    assert readers_of("gptq", "gptqmodel").fault(three) is None
    assert "not load int3-g128 from gptq. Use --bits 4 or 8, or" in str(readers_of("gptq", "vllm").fault(three))


def test_weights_in_nvfp4_are_for_sglang_with_rounded_inputs_alone() -> None:
    files = readers_of("compressed-tensors", "sglang")
    assert "--activations fp4" in str(files.fault(Weights(NVFP4)))
    assert files.fault(Weights(NVFP4, rounded=True)) is None
    assert "SGLang is not known to load experts in nvfp4 with fp4 inputs" in str(
        files.fault(Weights(NVFP4, True, True))
    )


def test_experts_in_nvfp4_are_for_servers_and_those_in_8_bit_floats_for_servers_with_rounded_inputs() -> None:
    usual, vllm, ours = (readers_of("compressed-tensors", each) for each in (None, "vllm", "nearplane"))
    assert "does not load experts in nvfp4" in str(usual.fault(Weights(NVFP4, expert=True)))
    assert usual.fault(Weights(NVFP4)) is None
    assert vllm.fault(Weights(NVFP4, expert=True)) is None
    for format in (FP8, FP8_BLOCK):
        assert "--activations fp8" in str(vllm.fault(Weights(format, expert=True)))
        assert vllm.fault(Weights(format, rounded=True, expert=True)) is None
        assert (vllm.fault(Weights(format)) is None) == (format == FP8)  # of blocks an assertion of vLLM fails
        assert usual.fault(Weights(format, expert=True)) is None
        assert ours.fault(Weights(format, expert=True)) is None


def test_every_way_that_a_refusal_names_takes_the_weights() -> None:
    """Programs, formats and rounded inputs; what a program is not asked for is not named with it."""
    formats = [*(each for each in BY_NAME.values() if each.bits), *(integers(bits, 32) for bits in range(2, 9))]
    formats += [integers(bits, 32, symmetric=False) for bits in range(2, 9)]
    refused = 0
    for runtime, program in RUNTIMES.items():
        for files, format, rounded, expert in product(program.loads, formats, (False, True), (False, True)):
            weights = Weights(format, rounded, expert)
            if (fault := readers_of(files, runtime).fault(weights)) is None:
                continue
            refused += 1
            for name in re.findall(r"--runtime ([\w., ]+?)(?:, or|\.$)", fault):
                assert all(readers_of(files, each).takes(weights) for each in re.split(", | or ", name)), fault
            for name in re.findall(r"--format ([\w\-, ]+?)(?:, or|\.$)", fault):
                for each in re.split(", | or ", name):
                    asked = None if runtime == "nearplane" else runtime
                    assert readers_of(each, asked).takes(weights), fault
            assert "Use " in fault
    assert refused > 100
