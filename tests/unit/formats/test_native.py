"""The native format: every integer comes back, and what is not what was written is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from checkpoints import random_matrix
from families import config_of
from native_checkpoints import config_of_rates, product_matrix, save_tiny, write_native
from nearplane.coding.scales import Scales, stored_base
from nearplane.errors import FormatError, ModelError, RecipeError
from nearplane.formats.native import Native
from nearplane.formats.stored import quantization_of, read_dense, read_matrices
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.loading.dense_network import stored_transposed
from nearplane.system.safetensors_files import ShardReader, checksum
from nearplane.verbs.evaluate import load_dense

CORRUPTIONS = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 200
GRID = Native().grid_of({}, "a")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, QuantizedMatrix]]]:
    """Return the native checkpoint of a tiny model of a family, and its matrices."""
    made: dict[str, tuple[Path, dict[str, QuantizedMatrix]]] = {}

    def make(family: str) -> tuple[Path, dict[str, QuantizedMatrix]]:
        if family not in made:
            place = tmp_path_factory.mktemp(family)
            save_tiny(place / "source", family)
            made[family] = place / "out", write_native(place / "out", place / "source")
        return made[family]

    return make


@pytest.mark.parametrize("shape", [(1, 2), (5, 7), (64, 96)])
def test_a_matrix_reads_back_exactly(shape: tuple[int, int], generator: torch.Generator) -> None:
    matrix = product_matrix(torch.randn(shape, generator=generator))
    matrix.codes[0, 0] = 2**31 - 1
    layout = Native()
    tensors = layout.pack("a", matrix, torch.float32)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"a.weight_coded": torch.uint8}
    read = layout.unpack("a", tensors, GRID)
    assert torch.equal(read.codes, matrix.codes)
    assert torch.equal(read.decode(), matrix.decode())


def test_scales_are_the_same_to_the_solver_and_to_the_coder() -> None:
    """One is computed by torch, the other by NumPy: every mantissa that a ladder has."""
    exponents = torch.arange(-1000, 1000, dtype=torch.int32)
    for resolution in (1, 4, 64):
        grid = ProductGrid(
            base=float(stored_base(0.01)), columns=exponents, column_resolution=resolution, rows=exponents % 64,
            row_resolution=resolution,
        )  # fmt: skip
        scales = Scales(
            base=grid.base, columns=exponents.numpy(), column_resolution=resolution, rows=grid.rows.numpy(),
            row_resolution=resolution,
        )  # fmt: skip
        assert np.array_equal(scales.column_scale, grid.column_scale().numpy())
        assert np.array_equal(scales.row_scale, grid.row_scale().numpy())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_folder_reads_back_as_it_was_written(folders: Callable[..., tuple[Path, dict]], family: str) -> None:
    out, written = folders(family)
    read = dict(read_matrices(out))
    original = AutoModelForCausalLM.from_config(config_of(family))
    known = original.state_dict().keys() - original.all_tied_weights_keys.keys()
    dense = dict(read_dense(out, transposed=stored_transposed(original)))
    assert read.keys() == written.keys()
    assert dense.keys() == known
    for name, matrix in written.items():
        assert torch.equal(read[name].codes, matrix.codes)
        values = matrix.decode() if family == "llama" else matrix.decode().T
        assert torch.equal(dense[f"{name}.weight"], values)


def test_evaluation_decodes_a_folder(folders: Callable[..., tuple[Path, dict]], tmp_path: Path) -> None:
    out, written = folders("gpt2")
    shutil.copytree(out, tmp_path / "out")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "out" / "tokenizer.json"))
    model, _ = load_dense(tmp_path / "out", torch.device("cpu"))
    for name, matrix in written.items():
        assert torch.equal(model.get_submodule(name).weight, matrix.decode().T)


def test_the_index_holds_a_checksum_of_every_tensor(folders: Callable[..., tuple[Path, dict]]) -> None:
    out, _ = folders("llama")
    sums = json.loads((out / "model.safetensors.index.json").read_text())["checksums"]
    tensors = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert sums == {name: checksum(tensor) for name, tensor in tensors.items()}
    ShardReader(out).verify()


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """Flip a bit, cut, insert, blank or exchange some bytes, three times in ten in the header."""
    end = len(whole) if chance.random() < 0.7 else 8 + int.from_bytes(whole[:8], "little")
    at, to, size = chance.randrange(end), chance.randrange(end), chance.randrange(1, 65)
    match chance.choice(["flip", "flip", "flip", "cut", "insert", "blank", "exchange"]):
        case "cut":
            return whole[:at]
        case "insert":
            return whole[:at] + whole[to : to + size] + whole[at:]
        case "blank":
            return whole[:at] + bytes(len(whole[at : at + size])) + whole[at + size :]
        case "exchange":
            first, second = sorted((at, to))
            size = min(size, second - first, len(whole) - second)
            a, b = whole[first : first + size], whole[second : second + size]
            return whole[:first] + b + whole[first + size : second] + a + whole[second + size :]
    changed = bytearray(whole)
    changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def test_damage_anywhere_in_a_shard_is_refused(folders: Callable[..., tuple[Path, dict]], tmp_path: Path) -> None:
    """What leaves the tensors as they are, in the padding of a header, may pass."""
    out, _ = folders("llama")
    shutil.copytree(out, copy := tmp_path / "out")
    expected, chance, refused = dict(read_dense(out)), random.Random(0), 0
    for _ in range(CORRUPTIONS):
        shard = chance.choice(sorted(copy.glob("*.safetensors")))
        whole = shard.read_bytes()
        shard.write_bytes(damaged(whole, chance))
        try:
            read = dict(read_dense(copy))
        except (FormatError, ModelError) as error:
            refused += 1
            assert str(copy) in str(error)  # noqa: PT017  (or it is no error at all)
        else:
            assert read.keys() == expected.keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
        shard.write_bytes(whole)
    assert refused > 0.9 * CORRUPTIONS


def test_matrices_that_changed_places_are_refused(folders: Callable[..., tuple[Path, dict]], tmp_path: Path) -> None:
    """Both are whole and of the right shape: only the checksums know."""
    out, _ = folders("llama")
    shutil.copytree(out, tmp_path / "out")
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[0]
    tensors = load_file(shard)
    q, o = (f"model.layers.0.self_attn.{name}_proj.weight_coded" for name in "qo")
    save_file(tensors | {q: tensors[o], o: tensors[q]}, shard)
    with pytest.raises(FormatError, match=r"model\.safetensors: .*[qo]_proj\.weight_coded has the checksum"):
        dict(read_matrices(tmp_path / "out"))


def test_a_folder_that_lacks_a_tensor_or_its_index_is_refused(
    folders: Callable[..., tuple[Path, dict]], tmp_path: Path
) -> None:
    """An evaluation would otherwise go on with random numbers."""
    out, _ = folders("llama")
    shutil.copytree(out, copy := tmp_path / "out")
    shard = copy / "model.safetensors"
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    for read in (read_matrices, read_dense):
        with pytest.raises(FormatError, match=r"model\.norm\.weight is missing"):
            dict(read(copy))
    (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json is missing or has no checksums"):
        dict(read_dense(copy))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format_version": 2}, "format_version .* 2;.*reads 1"),
        ({"format_version": None}, "format_version .* None"),
        ({"coder": "lzma"}, "coder .* 'lzma';.*reads tans"),
    ],
)
def test_a_future_or_unknown_config_is_refused(
    folders: Callable[..., tuple[Path, dict]], tmp_path: Path, change: dict, match: str
) -> None:
    out, _ = folders("llama")
    shutil.copytree(out, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    for read in (read_matrices, read_dense):
        with pytest.raises(FormatError, match=match):
            dict(read(tmp_path / "out"))


def test_a_missing_or_damaged_tensor_is_named() -> None:
    tensors = Native().pack("a.b", product_matrix(torch.randn(8, 9)), torch.float32)
    with pytest.raises(FormatError, match=r"a\.b\.weight_coded is missing"):
        Native().unpack("a.b", {}, GRID)
    blob = tensors["a.b.weight_coded"]
    for damaged in (blob[:-1], blob[: len(blob) // 2], torch.cat([blob, blob]), blob.flip(0), blob[:0]):
        with pytest.raises(FormatError, match=r"a\.b\.weight_coded"):
            Native().unpack("a.b", {"a.b.weight_coded": damaged}, GRID)


def test_grids_and_modules_that_the_format_does_not_hold_are_refused() -> None:
    with pytest.raises(FormatError, match=r"a: .* on a Grid; .*ProductGrid"):
        Native().pack("a", random_matrix(4, 8, bits=4, group_size=None, symmetric=True), torch.float32)
    with pytest.raises(RecipeError, match=r"a is a Conv2d.*--ignore"):
        Native().check("a", (4, 8), "Conv2d", GRID)
    Native().check("a", (4, 8), "Conv1D", GRID)


def test_modules_are_listed_in_the_order_of_their_numbers(folders: Callable[..., tuple[Path, dict]]) -> None:
    names = [f"layers.{i}.q" for i in range(12)]
    assert config_of_rates(names[::-1])["modules"] == names
    out, written = folders("llama")
    assert set((quantization_of(out) or {})["modules"]) == written.keys()
