"""Alterations of a checkpoint: crude ones, that its hashes give away, and forged ones, after which every hash fits again.

Each is made in place, drawn with a `random.Random`; copy the folder before. `nearplane verify` is to find them all.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nearplane.coding.scales import stored_base
from nearplane.formats.beside import Beside
from nearplane.formats.container import written
from nearplane.formats.stored import Stored
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.product_grid import ProductGrid
from nearplane.number_formats import find_format
from nearplane.recipe.scheme import Order
from nearplane.record.record import LayerRecord, RunRecord, digest_of, one_line
from nearplane.record.record_file import read_record
from nearplane.system.files import sha256
from nearplane.system.paths import CARD, INDEX, RECORD
from nearplane.system.safetensors_files import checksum, index_text

CIRCUMSTANCES = {
    "name",
    "stored",
    "seconds",
    "asked",
}  # of a layer: how it is called, what was asked for, how long it took
NUMBER = re.compile(r"(?<=[\s\[:])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?=[,\]\s}])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """What was done.

    Args:
        kind: a key of `CRUDE` or `FORGED`.
        where: the layer, the tensor or the file that a fault should name.
        what: in words.
    """

    kind: str
    where: str
    what: str


Alter = Callable[[Path, random.Random], Alteration]


# ── crude: hashes stay as they are ──


def flip_byte(folder: Path, rng: random.Random) -> Alteration:
    """Change one byte of one file, whatever it is."""
    path = _some_file(folder, rng)
    content = bytearray(path.read_bytes())
    place, mask = rng.randrange(len(content)), rng.randrange(1, 256)
    content[place] ^= mask
    path.write_bytes(content)
    return Alteration(kind="byte", where=path.name, what=f"byte {place} xor {mask}")


def truncate(folder: Path, rng: random.Random) -> Alteration:
    """Cut the last byte off a file."""
    path = _some_file(folder, rng)
    path.write_bytes(path.read_bytes()[:-1])
    return Alteration(kind="truncated", where=path.name, what="its last byte is gone")


def delete(folder: Path, rng: random.Random) -> Alteration:
    """Delete a file; without the record there is nothing to verify, which is refused."""
    path = _some_file(folder, rng)
    path.unlink()
    return Alteration(kind="deleted", where=path.name, what="deleted")


def add_file(folder: Path, rng: random.Random) -> Alteration:
    """Add a file that loaders might read: weights, code, a template."""
    path = folder / rng.choice(
        ("consolidated.safetensors", "modeling_llama.py", "pytorch_model.bin", "chat_template.jinja")
    )
    if path.suffix == ".safetensors":
        save_file({"weight": torch.zeros(3)}, path)
    else:
        path.write_text("import os\n")
    return Alteration(kind="added", where=path.name, what="added")


def swap_shards(folder: Path, rng: random.Random) -> Alteration:
    """Exchange the names of two weight files, or of the only one and config.json."""
    files = sorted(folder.glob("*.safetensors"))
    one, other = rng.sample(files if len(files) > 1 else [*files, folder / "config.json"], 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return Alteration(kind="swapped", where=one.name, what=f"with {other.name}")


def change_number(folder: Path, rng: random.Random) -> Alteration:
    """Change one number in the text of the record by 1 %."""
    path = folder / RECORD
    text = path.read_text()
    found = rng.choice(list(NUMBER.finditer(text)))
    before = json.loads(found[0])
    path.write_text(text[: found.start()] + json.dumps(other(before, rng)) + text[found.end() :])
    return Alteration(kind="number", where=RECORD, what=f"character {found.start()}: {before} by 1 %")


CRUDE: Mapping[str, Alter] = {
    "byte": flip_byte, "truncated": truncate, "deleted": delete, "added": add_file, "swapped": swap_shards,
    "number": change_number,
}  # fmt: skip


def _some_file(folder: Path, rng: random.Random) -> Path:
    paths = (path for path in folder.rglob("*") if path.name != CARD)  # which users may change
    return rng.choice(sorted(path for path in paths if path.is_file() and path.stat().st_size))


# ── forged: every hash is made to fit ──


def move_code(folder: Path, rng: random.Random) -> Alteration:
    """Move one code of one layer by one, within the range of its grid."""
    stored, name = _some_layer(folder, rng)
    matrix = stored.matrix(name, stored.tensors(name))
    row, column = (rng.randrange(size) for size in matrix.codes.shape)
    before, step = int(matrix.codes[row, column]), rng.choice((-1, 1))
    low, high = getattr(matrix.grid, "low", None), getattr(matrix.grid, "high", None)
    if low is not None and high is not None and not low <= before + step <= high:
        step = -step
    what = move_one(folder, name, row, column, step)
    return Alteration(kind="code", where=_called(folder, name), what=what)


def move_one(folder: Path, name: str, row: int, column: int, step: int) -> str:
    """Add `step` to one code of the layer whose tensors have this name; return that in words."""
    stored = Stored(folder)
    tensors = stored.tensors(name)
    matrix = stored.matrix(name, tensors)
    codes = matrix.codes.clone()
    codes[row, column] += step
    _pack(folder, stored, name, tensors, replace(matrix, codes=codes))
    return f"code [{row}, {column}] from {int(matrix.codes[row, column])} to {int(codes[row, column])}"


def move_scale(folder: Path, rng: random.Random) -> Alteration:
    """Change one step by 1 %, a zero-point by one, an exponent by one rung, or the step of a whole matrix by 1 %."""
    stored, name = _some_layer(folder, rng)
    tensors = stored.tensors(name)
    matrix = stored.matrix(name, tensors)
    grid, what = _rescaled(matrix, stored.layers.KEY, tensors, rng)
    _pack(folder, stored, name, tensors, replace(matrix, grid=grid))
    return Alteration(kind="scale", where=_called(folder, name), what=what)


def _rescaled(matrix: QuantizedMatrix, key: str, tensors: Mapping[str, Tensor], rng: random.Random) -> tuple[Any, str]:
    grid = matrix.grid
    if isinstance(grid, ProductGrid):
        part, step = rng.choice(("base", "columns", "rows")), rng.choice((-1, 1))
        if part == "base":
            return replace(grid, base=stored_base(grid.base * 1.01**step)), f"base times 1.01^{step}"
        exponents = getattr(grid, part).clone()
        index = rng.randrange(len(exponents))
        exponents[index] += step
        return replace(grid, **{part: exponents}), f"exponent {index} of {part} by {step}"
    row, group = (rng.randrange(size) for size in grid.scale.shape)
    if grid.low == 0 and "zero" in grid.parts and rng.random() < 0.5:
        zero = grid.zero.clone()
        zero[row, group] += 1 if zero[row, group] < (grid.high or 0) else -1
        return replace(grid, zero=zero), f"zero [{row}, {group}] by one"
    name = "d" if "d" in grid.parts else "scale"
    scale = grid.parts[name].clone()
    scale[row, group] = (scale[row, group] * 1.01).to(_storage(key, tensors)).to(scale.dtype)
    assert scale[row, group] != grid.parts[name][row, group], (
        "1 % is more than half a unit of every dtype that steps have"
    )
    return grid.with_parts({name: scale}), f"step [{row}, {group}] by 1 %"


def change_tensor(folder: Path, rng: random.Random) -> Alteration:
    """Flip one bit of one element of a tensor that is not quantized."""
    stored = Stored(folder)
    name = rng.choice(stored.rest())
    changed = stored.reader.read([name])[name]
    content = changed.reshape(-1).view(torch.uint8)
    place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
    content[place] ^= bit
    rewrite(folder, stored.reader.file(name), {name: changed})
    rehash(folder)
    return Alteration(kind="tensor", where=name, what=f"byte {place} xor {bit}")


def change_certificate(folder: Path, rng: random.Random) -> Alteration:
    """Change one measured field of one layer's record by 1 %."""
    record = read_record(folder)
    layer = rng.choice(record.layers)
    name = rng.choice(measured(layer))
    forge_layer(folder, layer.name, name, rng)
    return Alteration(kind="certificate", where=layer.name, what=name)


def remove_file(folder: Path, rng: random.Random) -> Alteration:
    """Delete a file that was copied from the original, and its entry in the record."""
    name = rng.choice(Beside(source=folder).names())
    (folder / name).unlink()
    sign(folder, read_record(folder))
    return Alteration(kind="removed", where=name, what="deleted, and nowhere in the record")


def change_value(folder: Path, rng: random.Random, hidden: str) -> Alteration:
    """Change one value of the record, except where a pattern is found in its dotted name, and the digest after it."""
    record = json.loads((folder / RECORD).read_text())
    places = {".".join(map(str, place)): place for place in _places(record)}
    called = rng.choice([name for name in places if not re.search(rf"^digest$|{hidden}", name)])
    place = places[called]
    inside = record
    for key in place[:-1]:
        inside = inside[key]
    before = inside[place[-1]]
    inside[place[-1]] = other(before, rng)
    text = one_line(json.dumps(record, indent=1))
    (folder / RECORD).write_text(text.replace(record["digest"], digest_of(text)))
    return Alteration(kind="value", where=RECORD, what=f"{called} from {before} to {inside[place[-1]]}")


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values in JSON that are not null; of a list of layers, those of the first and the last."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _places(part, (*place, key))
    elif isinstance(value, list):
        for index in {0, len(value) - 1} if value else ():
            yield from _places(value[index], (*place, index))
    elif value is not None:
        yield place


def take_record(folder: Path, donor: Path) -> None:
    """Give a folder the record of another, with every hash and size made to fit."""
    (folder / RECORD).write_text((donor / RECORD).read_text())
    rehash(folder)


FORGED: Mapping[str, Alter] = {
    "code": move_code, "scale": move_scale, "tensor": change_tensor, "certificate": change_certificate,
    "removed": remove_file,
}  # fmt: skip


def measured(layer: LayerRecord) -> list[str]:
    """Return the fields of a layer's record that data measure, those without a value left out."""
    names = [field.name for field in fields(layer)]
    return [name for name in names if name not in CIRCUMSTANCES and getattr(layer, name) not in (None, ())]


def forge_layer(folder: Path, layer: str, name: str, rng: random.Random) -> None:
    """Change one field of a layer's record by 1 %, and the digest after it."""
    record = read_record(folder)
    sign(
        folder,
        replace(
            record,
            layers=tuple(
                replace(each, **{name: other(getattr(each, name), rng)}) if each.name == layer else each
                for each in record.layers
            ),
        ),
    )


def other(value: Any, rng: random.Random) -> Any:
    """Return a value 1 % away, whole numbers at least one; another order or word, and of several numbers one changed."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + max(1, round(abs(value) / 100))
    if isinstance(value, float):
        return value * rng.choice((0.99, 1.01)) if value and math.isfinite(value) else 0.01
    if value == ():
        return (1,)
    if isinstance(value, tuple):
        index = rng.randrange(len(value))
        return (*value[:index], other(value[index], rng), *value[index + 1 :])
    if isinstance(value, str) and find_format(value) is not None:
        return "int3-row" if value != "int3-row" else "coded"
    if value in get_args(Order):
        return rng.choice([order for order in get_args(Order) if order != value])
    return f"{'1' if value[:1] == '0' else '0'}{value[1:]}"  # of a hash


def _called(folder: Path, stored: str) -> str:
    """Return the name of the layer whose tensors have this one."""
    return next(layer.name for layer in read_record(folder).layers if layer.stored == stored)


def _some_layer(folder: Path, rng: random.Random) -> tuple[Stored, str]:
    stored = Stored(folder)
    return stored, rng.choice(stored.names())


def _storage(key: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of stored steps; the native format has none."""
    return next((t.dtype for name, t in tensors.items() if name.endswith(("weight_scale", ".scales"))), torch.float32)


def _pack(folder: Path, stored: Stored, name: str, tensors: Mapping[str, Tensor], matrix: QuantizedMatrix) -> None:
    """Put a matrix in the place of a layer, as its format would have written it."""
    packed = stored.layers.pack(name, matrix, _storage(stored.layers.KEY, tensors))
    packed |= {part: tensor for part, tensor in tensors.items() if not tensor.numel()}  # what stops other readers
    assert packed.keys() == tensors.keys()
    assert any(not torch.equal(packed[part], tensors[part]) for part in packed), "nothing was altered"
    rewrite(folder, stored.reader.file(next(iter(tensors))), packed)
    rehash(folder)


def rewrite(folder: Path, file: Path, changed: Mapping[str, Tensor]) -> None:
    """Write a weight file with some tensors changed."""
    save_file(load_file(file) | dict(changed), file, {"format": "pt"})


def rehash(folder: Path) -> None:
    """Make every checksum, size and hash fit the files: of tensors, layers, files and the record."""
    path = folder / INDEX
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    if path.is_file():
        index = json.loads(path.read_text())
        sums = {name: checksum(tensor) for name, tensor in tensors.items()} if "checksums" in index else None
        path.write_text(index_text(index["weight_map"], sums, sum(tensor.nbytes for tensor in tensors.values())))
    stored, record = Stored(folder), read_record(folder)
    layers = []
    for layer in record.layers:
        found = written(stored.tensors(layer.stored))
        layers.append(replace(layer, bytes=found.bytes, checksum=found.checksum))
    sign(folder, replace(record, layers=tuple(layers)))


def sign(folder: Path, record: RunRecord) -> None:
    """Write the record of a folder with the hashes and sizes of its files as they are now, and its digest."""
    names = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (RECORD, CARD)
    ]
    others = sum((folder / name).stat().st_size for name in names) + record.card
    record = replace(
        record,
        files={name: sha256(folder / name) for name in sorted(names)},
        bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    )
    (folder / RECORD).write_text(record.in_folder(others).to_json())
