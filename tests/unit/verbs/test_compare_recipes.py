"""What a comparison asks of every method: the grid that has so many bits, and the recipe for the layers of a model."""

import math

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from checkpoints import tiny_llama
from nearplane import Calibration, RecipeError
from nearplane.demo import CALIBRATION
from nearplane.models.model import open_model
from nearplane.verbs.compare_recipes import fixed_grid, recipe_for

TOKENS = Calibration(calibration=str(CALIBRATION), samples=10, seqlen=64)


@pytest.mark.parametrize(
    ("bits", "columns", "expected"),
    [
        (4.125, (256, 768), (4, 128)),
        (3.25, (256, 768), (3, 64)),
        (2, (256, 768), (2, None)),
        (8.5, (96, 32), (8, 32)),
        (4.125, (128, 352), (4, 32)),  # 352 = 32 x 11
        (4.125, (64,), (4, 64)),
        (4.015625, (1024, 2560), (4, 512)),
        (4.125, (64, 172), (4, None)),  # 172 = 4 x 43: smaller than any kernel takes
    ],
)
def test_groups_are_the_largest_that_divide_every_layer(bits, columns, expected):
    width, group_size, note = fixed_grid(bits, columns)
    assert (width, group_size) == expected
    asked = None if bits == width else 16 / (bits - width)
    assert (note == "") == (group_size is not None and group_size == asked)


@pytest.mark.parametrize("bits", [1.5, 9, 9.125, 2.7, 3.1, 3.0078125, math.nextafter(3.125, 4)])
def test_bits_that_no_grid_has_are_refused(bits):
    with pytest.raises(RecipeError, match="no fixed grid"):
        fixed_grid(bits, (1024,))


def test_groups_follow_the_layers_of_the_model(tmp_path):
    tiny_llama(128, 352).save_pretrained(tmp_path)
    layers = [layer for block in open_model(str(tmp_path)).blocks for layer in block.layers]
    recipe, note = recipe_for("gptq-mse", 4.125, layers, TOKENS)
    assert (recipe.scheme.group_size, note) == (32, "groups of 32: 128 does not divide 352 inputs")


def test_layers_that_are_not_linear_get_a_format_that_holds_them(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    layers = [layer for block in open_model(str(tmp_path)).blocks for layer in block.layers]
    assert recipe_for("rtn-mse", 4.125, layers, TOKENS)[0].format == "gptq"
