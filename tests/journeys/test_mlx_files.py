"""A run for MLX, read back by plain NumPy: mixed widths, embeddings and head; then loaded, verified, exported, tuned.

MLX itself reads such files in test_mlx.py.
"""

import json
import shutil

import pytest
import torch

import nearplane
from checkpoints import save_part_of_the_demo
from nearplane.demo import CALIBRATION
from nearplane.loading.dense_network import dense_network
from nearplane.record.summary import summary
from plain_formats import decoded

WORDS = {
    "format": "mlx",
    "bits": 3,
    "group_size": 64,
    "include_embeddings": True,
    "include_head": True,
    "samples": 8,
    "seqlen": 64,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a model of one block with its own head, text, and the checkpoint with other bits for one layer."""
    folder = tmp_path_factory.mktemp("mlx")
    save_part_of_the_demo(folder / "model", blocks=1, own_head=True)
    (folder / "text.txt").write_text(CALIBRATION.read_text()[:20000])
    layers = {"down_proj": {"bits": 5, "group_size": 32}}
    record = nearplane.quantize(
        folder / "model", folder / "out", calibration=str(folder / "text.txt"), layers=layers, **WORDS
    )
    return folder, record


def test_values_are_those_of_the_file_and_every_command_reads_it(folders, tmp_path):
    folder, record = folders
    out, text = folder / "out", str(folder / "text.txt")
    plain, network = decoded(out), dense_network(out)
    assert {layer.format for layer in record.layers} == {"int3-g64-min", "int5-g32-min"}
    assert {"model.embed_tokens", "lm_head"} < {layer.name for layer in record.layers}
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, torch.from_numpy(plain[name].floats())), name
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 64,
        "bits": 3,
        "mode": "affine",
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 5},
    }
    assert nearplane.verify(out, against=folder / "model", calibration=text).faults == ()
    loaded = nearplane.load(out, dtype="float32", packed=False)
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(loaded(tokens).logits, network(tokens).logits)
    nearplane.export(out, tmp_path / "dense", dtype="float32")
    assert torch.equal(nearplane.load(tmp_path / "dense")(tokens).logits, network(tokens).logits)
    assert "quantization" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    lines = " ".join(summary(record, out))
    assert f"mlx_lm.generate --model {out}" in lines


def test_verify_finds_another_entry_for_mlx(folders, tmp_path):
    """MLX reads `quantization`, not `quantization_config`."""
    folder, _ = folders
    shutil.copytree(folder / "out", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization"]["bits"] = 4
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    faults = nearplane.verify(tmp_path / "out").faults
    assert any("weight is" in fault.what and "expected" in fault.what for fault in faults)


@pytest.mark.nightly
def test_solved_loses_less_than_rounded(folders, tmp_path):
    folder, _ = folders
    text, kl = str(folder / "text.txt"), {}
    for solver, calibration in (("nearest-plane", {"calibration": text}), ("round-to-nearest", {})):
        words = WORDS | {"include_embeddings": False, "include_head": False, "solver": solver, "samples": 32}
        nearplane.quantize(folder / "model", tmp_path / solver, **words, **calibration)
        kl[solver] = nearplane.evaluate(tmp_path / solver, against=folder / "model", text=text, seqlen=64).kl
    assert kl["nearest-plane"] < 0.6 * kl["round-to-nearest"]
