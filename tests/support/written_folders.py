"""Folders that the project's own environment writes, for tests that run in a server's, where nearplane is not installed.

NEARPLANE_PYTHON is the Python of the project's environment, which the Makefile names; without it these tests are skipped. It
runs this file as a program, once for all folders of a test file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "src" / "nearplane" / "demo"
MODEL = DEMO / "model"
SMOLLM2 = ROOT / "build" / "models" / "smollm2"  # made by tools/published_models.py
PYTHON = os.environ.get("NEARPLANE_PYTHON", "")
FEW = {  # loading is tested, not quality
    "solver": "round-to-nearest",
    "calibration": str(DEMO / "calibration.txt"),
    "samples": 16,
    "seqlen": 64,
}
TOKENS = np.random.default_rng(0).integers(3, 4096, 48).tolist()
needs_project = pytest.mark.skipif(not PYTHON, reason="needs NEARPLANE_PYTHON, the Python of the project's environment")
needs_smollm2 = pytest.mark.skipif(
    not (SMOLLM2 / "config.json").is_file(), reason="needs build/models/smollm2 of tools/published_models.py"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A folder, and what nearplane says of it.

    Args:
        folder: The checkpoint.
        dense: The same with decoded weights in float32.
        predicted: Log-probabilities after each of the tokens, (tokens, vocabulary), in float32; inputs of layers are
            rounded where the folder's config says that runtimes do so, and keys and values cut where it has their scales.
    """

    folder: Path
    dense: Path
    predicted: np.ndarray

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.dense / "model.safetensors")


def written(
    forms: Mapping[str, Mapping[str, Any]], scratch: Path, *, source: Path = MODEL, tokens: Sequence[int] = TOKENS
) -> dict[str, Written]:
    """Quantize a model once for each set of options; the empty set is the model itself."""
    (scratch / "forms.json").write_text(json.dumps([list(tokens), *map(dict, forms.values())]))
    done = subprocess.run(
        [PYTHON, __file__, str(source), str(scratch)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: Written(
            folder=scratch / str(at) if options else source,
            dense=scratch / f"{at}-dense" if options else source,
            predicted=np.load(scratch / f"{at}.npy"),
        )
        for at, (name, options) in enumerate(forms.items())
    }


def main(source: str, scratch: Path) -> None:
    """Write the folders, in the project's environment."""
    import nearplane
    from nearplane.calibration.cache_scales import Passing, cache_argument, scales_by_layer
    from nearplane.formats.stored import Stored

    torch.set_num_threads(1)
    tokens, *forms = json.loads((scratch / "forms.json").read_text())
    for at, options in enumerate(forms):
        folder = scratch / str(at) if options else Path(source)
        if options:
            nearplane.quantize(source, folder, **(FEW | options))
            nearplane.export(folder, scratch / f"{at}-dense", dtype="float32")
        rounds = '"input_activations": {' in (folder / "config.json").read_text()
        network = nearplane.load(folder, dtype="float32", activations=rounds)
        scales = scales_by_layer(network, Stored(folder).beside()) if options else {}
        kept = {cache_argument(network): Passing(partial(cut, scales))} if scales else {}
        with torch.inference_mode():
            logits = network(torch.tensor([tokens]), **kept).logits[0].float()
        np.save(scratch / f"{at}.npy", logits.log_softmax(-1).numpy())


def cut(scales: Mapping[int, tuple[Tensor, Tensor]], layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as vLLM's kernel for processors keeps them in fp8: cut towards zero, and not rounded."""

    def kept(x: Tensor, scale: Tensor) -> Tensor:
        nearest = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        larger = nearest.float().abs() > (x / scale).abs()
        codes = nearest.view(torch.uint8).int() - larger.int()
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * scale

    return kept(keys, scales[layer][0]), kept(values, scales[layer][1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
