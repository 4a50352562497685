"""The real client: vLLM serves entropy-coded folders by the plugin, which plain pip has installed beside it (`make test-vllm`).

Engines run in processes of their own, as in a server: vLLM 0.32 cannot start a worker where numba is imported already, see
`findings/vllm-cpu-numba-first.sh`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from vllm_engine import distance, engine
from written_folders import MODEL, Written, needs_project, written

vllm = pytest.importorskip("vllm", reason="needs vLLM")
plugin = pytest.importorskip("nearplane_vllm.serving.vllm_plugin", reason="needs nearplane-vllm")
pytestmark = [pytest.mark.nightly, needs_project]
CODED: dict[str, dict[str, Any]] = {
    "rate 3": {"rate": 3.0, "solver": "nearest-plane"},
    "rate 3, embeddings too": {"rate": 3.0, "solver": "nearest-plane", "include_embeddings": True},
    "size": {"size": "2.9MB", "solver": "nearest-plane"},
}
LOADER = Path(__file__).parents[1] / "support" / "vllm_loader.py"
CLOSE = 1e-4  # nats, of log-probabilities in float32
START = (
    "import vllm, sys\nif __name__ == '__main__':\n    vllm.LLM(sys.argv[1], enforce_eager=True, max_model_len=128)\n"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    return written(CODED, tmp_path_factory.mktemp("coded"))


@pytest.fixture(autouse=True)
def _cache_of_one_gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture
def changed(folders: dict[str, Written], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a folder with other entries in its quantization_config."""

    def copy(**entries: Any) -> Path:
        there = shutil.copytree(folders["rate 3"].folder, tmp_path / "changed")
        config = json.loads((there / "config.json").read_text())
        config["quantization_config"] |= entries
        (there / "config.json").write_text(json.dumps(config))
        return there

    return copy


def said_by(folder: Path, tmp_path: Path) -> str:
    """Return what a process prints that starts an engine and fails."""
    script = tmp_path / "start.py"
    script.write_text(START)
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode
    return done.stdout + done.stderr


@pytest.mark.parametrize("form", CODED)
def test_it_predicts_what_nearplane_predicts(form: str, folders: dict[str, Written]) -> None:
    with engine(folders[form].folder) as made:
        assert distance(made, folders[form].predicted) < CLOSE


@pytest.mark.parametrize("form", ["rate 3", "rate 3, embeddings too"])
def test_so_it_does_compiled(form: str, folders: dict[str, Written]) -> None:
    with engine(folders[form].folder, enforce_eager=False) as made:
        assert distance(made, folders[form].predicted) < CLOSE


def test_embeddings_are_decoded_where_they_do_not_stay_packed(
    folders: dict[str, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = pytest.importorskip("nearplane_vllm.serving.vllm_layers")
    monkeypatch.setattr(layers, "embedding_method", lambda name, _: layers.DecodedEmbeddingMethod(name))
    with engine(folders["rate 3, embeddings too"].folder) as made:
        assert distance(made, folders["rate 3, embeddings too"].predicted) < CLOSE


@pytest.mark.parametrize("form", ["rate 3", "rate 3, embeddings too"])
def test_so_do_two_processes(form: str, folders: dict[str, Written], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with engine(folders[form].folder, tensor_parallel_size=2) as made:
        assert distance(made, folders[form].predicted) < CLOSE


def test_damaged_bytes_are_refused_by_name(folders: dict[str, Written], tmp_path: Path) -> None:
    there = shutil.copytree(folders["rate 3"].folder, tmp_path / "damaged")
    name = "model.layers.1.mlp.up_proj.weight_coded"
    for file in there.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][len(tensors[name]) // 2] ^= 1
            save_file(tensors, file, {"format": "pt"})
    assert name in said_by(there, tmp_path)


def test_two_hundred_changes_of_a_file_are_refused_or_change_nothing(folders: dict[str, Written]) -> None:
    command = [sys.executable, LOADER, folders["rate 3"].folder, "200"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    found = [
        json.loads(line.removeprefix("OUTCOME ")) for line in done.stdout.splitlines() if line.startswith("OUTCOME")
    ]
    assert len(found) == 200
    refused = [each for each in found if re.match(r"FormatError: model\.layers\.\d.*\.$", each["became"])]
    assert [each for each in found if each["became"] != "right" and each not in refused] == []
    assert len(refused) > 150
    assert {path for each in found for path in each["read"]} == set(), "Python opens no file outside of the folder"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"format_version": 2}, "format_version in quantization_config is 2; this version of nearplane-vllm reads 1"),
        ({"coder": "other"}, "coder in quantization_config is 'other'; this version of nearplane-vllm reads tans"),
        ({"modules": ["model.layers.0.mlp.experts.0.up_proj"]}, "is an expert: vLLM multiplies all experts"),
        ({"modules": None}, "serves folders of --rate and --size in nearplane's own format"),
        ({"modules": ["model.layers.0.self_attn.q_proj"]}, "is entropy-coded and .* is not, but vLLM joins them"),
    ],
    ids=["version", "coder", "experts", "other format", "joined"],
)
def test_other_folders_are_refused_in_a_sentence(
    entries: dict[str, Any], said: str, changed: Callable[..., Path], tmp_path: Path
) -> None:
    assert re.search(said, said_by(changed(**entries), tmp_path))


def test_without_the_plugin_vllm_says_so_itself(
    folders: dict[str, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    assert "Unknown quantization method: nearplane" in said_by(folders["rate 3"].folder, tmp_path)


def test_other_models_start_with_the_plugin() -> None:
    plugin.register()
    plugin.register()
    with engine(MODEL) as made:
        assert made.generate([{"prompt_token_ids": [5, 6, 7]}], vllm.SamplingParams(max_tokens=2), use_tqdm=False)


def test_the_entry_point_raises_nothing_whatever_vllm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.quantization", None)  # an import error
    plugin.register()


@pytest.mark.parametrize(
    ("count", "size", "world", "first"),
    [(128, 64, 2, [0, 64]), (128, 128, 2, [0, 0]), (128, 64, 4, [0, 0, 64, 64]), (96, 24, 4, [0, 24, 48, 72])],
    ids=["halves", "all", "shared heads", "quarters"],
)
def test_every_process_keeps_its_rows(count: int, size: int, world: int, first: list[int]) -> None:
    layers = pytest.importorskip("nearplane_vllm.serving.vllm_layers")
    for rank in range(world):
        rows = layers.own_rows(count, [size], SimpleNamespace(tp_rank=rank, tp_size=world), "a")
        assert rows.tolist() == list(range(first[rank], first[rank] + size))


@pytest.mark.parametrize(("count", "sizes"), [(96, [64]), (100, [24]), (96, [24, 24])])
def test_a_matrix_of_other_rows_is_refused(count: int, sizes: list[int]) -> None:
    layers = pytest.importorskip("nearplane_vllm.serving.vllm_layers")
    with pytest.raises(Exception, match=r"^a (is|holds) "):
        layers.own_rows(count, sizes, SimpleNamespace(tp_rank=0, tp_size=2), "a")


def test_the_wheel_asks_for_nothing_that_vllm_excludes() -> None:
    assert {each.partition(">")[0] for each in requires("nearplane-vllm") or ()} == {"torch", "numpy", "numba"}
    (entry,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "nearplane")
    assert entry.load() is plugin.register
