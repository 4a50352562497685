"""Spellings of other tools."""

from pathlib import Path

import pytest

from nearplane import Recipe


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ({"sym": False, "desc_act": True}, {"symmetric": False, "order": "activation"}),
        ({"desc_act": False}, {"order": "natural"}),
        ({"actorder": "group"}, {"order": "activation"}),
        ({"actorder": "static"}, {"order": "activation"}),
        ({"group_size": -1}, {"group_size": None}),
        ({"dataset": Path("x.txt")}, {"calibration": "x.txt"}),
        ({"damp_percent": 0.05}, {"damp": 0.05}),
        ({"dampening_frac": 0.02}, {"damp": 0.02}),
        ({"percdamp": 0.03}, {"damp": 0.03}),
        ({"wbits": 3}, {"bits": 3}),
        ({"scheme": "W3A16"}, {"bits": 3, "symmetric": True}),
        ({"scheme": "W4A16_ASYM"}, {"bits": 4, "symmetric": False}),
        ({"scheme": "W8A8"}, {"bits": 8, "group_size": None, "symmetric": True, "activations": "int8"}),
        ({"scheme": "INT8"}, {"bits": 8, "group_size": None, "symmetric": True, "activations": "int8"}),
        ({"scheme": "FP8_DYNAMIC"}, {"grid": "fp8", "activations": "fp8"}),
        ({"scheme": "fp8_block"}, {"grid": "fp8-block", "activations": "fp8"}),
        ({"scheme": "NVFP4"}, {"grid": "nvfp4", "activations": "fp4"}),
        ({"scheme": "NVFP4A16"}, {"grid": "nvfp4", "activations": "none"}),
        ({"scheme": "MXFP4"}, {"grid": "mxfp4", "activations": "fp4"}),
        ({"scheme": "MXFP4A16"}, {"grid": "mxfp4", "activations": "none"}),
        ({"scheme": "MXFP8"}, {"grid": "mxfp8", "activations": "fp8"}),
        ({"scheme": "MXFP8A16"}, {"grid": "mxfp8", "activations": "none"}),
        ({"strategy": "channel"}, {"group_size": None}),
        ({"mse": True}, {"scale": "mse"}),
        ({"observer": "minmax"}, {"scale": "minmax"}),
        ({"static_groups": True}, {}),
        ({"nsamples": 7, "dataset": "x.txt"}, {"samples": 7, "calibration": "x.txt"}),
        ({"num_calibration_samples": 9, "max_seq_length": 64}, {"samples": 9, "seqlen": 64}),
        ({"ignore": ["re:.*head", "mlp"]}, {"ignore": (".*head", "mlp")}),
        ({"dynamic": {"-:down": {}}}, {"ignore": ("down",)}),
        ({"true_sequential": False}, {"true_sequential": False}),
        ({"checkpoint_format": "gptq_v2"}, {"format": "gptq_v2"}),
    ],
)
def test_other_tools_spellings_are_understood(words, fields):
    recipe = Recipe.from_spellings(**words)
    found = {
        name: getattr(part, name)
        for part in (recipe, recipe.scheme, recipe.calibration)
        for name in fields
        if hasattr(part, name)
    }
    assert found == fields
