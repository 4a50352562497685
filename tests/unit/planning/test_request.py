"""What is said of a request before any work: layers that runtimes fuse, and whose grids differ."""

from pathlib import Path
from typing import Any

import pytest

from families import DEEPSEEK, config_of, random_model
from nearplane.planning.request import open_resolved
from nearplane.recipe.layer_scheme import LayerScheme
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import GridScheme

FOUR, EIGHT = GridScheme(bits=4, group_size=16), GridScheme(bits=8, group_size=16)
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family, options in (("llama", {}), ("mixtral", {}), ("deepseek_v3", DEEPSEEK)):
        found[family] = tmp_path_factory.mktemp("models") / family
        random_model(config_of(family, **options | {"num_hidden_layers": 2})).float().save_pretrained(found[family])
    return found


def warnings_of(folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    options = {"scheme": FOUR, "format": "gptq"} | options
    open_resolved(str(folder), Recipe(**options), trust_remote_code=False)
    return [
        record.getMessage().partition(" have different grids or inputs. vLLM and SGLang fuse these")[0]
        for record in caplog.records
    ]


Q, GATE = "q_proj (unquantized)", "up_proj (int4-g16) and gate_proj (unquantized)"


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("llama", {}, []),
        ("llama", {"ignore": ("self_attn", r"0\.mlp")}, []),
        ("llama", {"ignore": (r"0\.self_attn\.q_proj",)}, [f"k_proj (int4-g16) and v_proj (int4-g16) and {Q} of {ATTENTION}"]),
        ("llama", {"ignore": ("gate_proj",)}, [f"{GATE} of {MLP} and of 1 more"]),
        ("llama", {"ignore": ("gate_proj",), "format": "gguf", "scheme": GridScheme(bits=4, group_size=32)}, []),
        (
            "llama",
            {"layers": (LayerScheme(pattern="k_proj|1.*up_proj", scheme=EIGHT),)},
            [
                f"q_proj (int4-g16) and k_proj (int8-g16) and v_proj (int4-g16) of {ATTENTION} and of 1 more",
                "gate_proj (int4-g16) and up_proj (int8-g16) of model.layers.1.mlp",
            ],
        ),
        ("deepseek_v3", {"ignore": ("q_a_proj",)}, ["kv_a_proj_with_mqa (int4-g16) and q_a_proj (unquantized)"]),
        (
            "mixtral",
            {"ignore": (r"experts\.[0-9]+\.(w2|down_proj)",)},
            ["w1 (int4-g16) and w3 (int4-g16) and w2 (unquantized) of model.layers.0.mlp.experts and of 1 more"],
        ),
    ],
)  # fmt: skip
def test_layers_that_runtimes_fuse_are_named_in_every_module_where_they_differ(
    family: str,
    options: dict[str, Any],
    said: list[str],
    folders: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = warnings_of(folders[family], caplog, **options)
    assert len(found) == len(said), found
    assert all(text.startswith(part) for part, text in zip(said, found, strict=True)), found
