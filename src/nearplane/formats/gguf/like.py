"""Comparison of a GGUF by llama.cpp's own converter with the checkpoint that it was made from, by value.

Every tensor of the file is found in the checkpoint: the same values after rounding to the file's dtype, with rows of
one or of several tensors in any order. So nothing is known here of architectures and names. Rows are found by 64-bit
sums; then all values are compared.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearplane.errors import RecipeError
from nearplane.formats.gguf.architecture import rope_factors
from nearplane.formats.gguf.contents import CHANGES, Content, Part, Strided, is_vector, strided
from nearplane.formats.gguf.gguf_header import NUMBER, Header, Info, read_header
from nearplane.formats.gguf.gguf_reader import DENSE
from nearplane.formats.gguf.names import ROTARY
from nearplane.number_formats import TYPES

Q8_0 = TYPES["q8_0"]
CHUNK = 1 << 22  # values whose sums are computed at once
SHARDS = "split.count"  # key of a file that is one of several
REMEDY = "Convert this model with llama.cpp's convert_hf_to_gguf.py --outtype bf16, or leave out --like"


class Source(NamedTuple):
    """A tensor of the checkpoint.

    Args:
        shape: Its shape, of a layer (out, in).
        read: Function that reads it in this shape.
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """A GGUF of the original model whose header and unquantized tensors another file takes.

    Args:
        path: Path of the file.
        header: Its header.
        contents: What its tensors hold, in file order.
        placed: Names of the weights of layers that consist of whole rows of tensors which hold nothing else.
        left: Names of the weights of all other layers, and why they are not quantized.
        turned: Names of weights that lie along another axis in the file.
        reasons: Pairs of the name of such a layer in the network, and why it is not quantized.
    """

    path: Path
    header: Header
    contents: tuple[Content, ...]
    placed: frozenset[str]
    left: Mapping[str, str]
    turned: frozenset[str]
    reasons: tuple[tuple[str, str], ...] = ()

    def quantized(self, content: Content) -> bool:
        """Return whether a tensor consists of layers that are quantized."""
        return bool(content.parts) and all(part.name in self.placed for part in content.parts)

    def in_q8_0(self, info: Info, content: Content) -> bool:
        """Return whether a tensor is written as Q8_0: of 16 bits, with rows of a weight along another axis."""
        turned = any(part.name in self.turned for part in content.parts)
        return turned and info.type != NUMBER["F32"] and info.shape[-1] % Q8_0.columns == 0


def open_like(path: Path) -> Header:
    """Return the header of a GGUF with unquantized tensors.

    Raises:
        RecipeError, ModelError: The file is damaged, one of several, or quantized.
    """
    header = read_header(path)
    if int(header.fields.get(SHARDS) or 1) > 1:
        raise RecipeError(
            f"--like {path} is one of {header.fields[SHARDS]} files. Join them with llama-gguf-split --merge."
        )
    for info in header.tensors:
        if info.type not in DENSE:
            raise RecipeError(f"--like {path}: {info.name} is quantized; expected F32, F16 or BF16. {REMEDY}.")
    if path.stat().st_size != header.size:
        raise RecipeError(f"--like {path} has {path.stat().st_size:,} bytes, expected {header.size:,}. {REMEDY}.")
    return header


def compare(
    path: Path, sources: Mapping[str, Source], layers: Collection[str], config: Mapping[str, Any], model: str
) -> Like:
    """Find every tensor of a file in a checkpoint.

    Args:
        path: The file.
        sources: Tensors of the checkpoint by name.
        layers: Names of the weights of layers that are to be quantized.
        config: config.json as transformers completes it, from which converters compute rotary factors.
        model: Name of the model in errors.

    Raises:
        RecipeError: A tensor of the file is not in the checkpoint, or the head of the checkpoint is not in the file.
    """
    header = open_like(path)
    own_head = config.get("tie_word_embeddings") is False and any(name.endswith("lm_head.weight") for name in sources)
    if own_head and not any(info.name == "output.weight" for info in header.tensors):
        raise RecipeError(
            f"--like {path} has no output.weight, but the head of {model} is not its embeddings. Convert {model} with "
            f"tie_word_embeddings false in config.json."
        )
    found: dict[str, Content] = {}
    for turned in (False, True):
        waiting = [info for info in header.tensors if not is_vector(info.shape) and info.name not in found]
        index = _Rows(sources, {_key(info, turned) for info in waiting}, layers)
        for info in waiting:
            parts = index.parts(_key(info, turned), _sums(_rows(path, info, turned))) or []
            if parts and (not turned or len(parts) == 1):
                found[info.name] = Content(parts=tuple(parts), turned=turned)
    vectors = _Vectors(sources)
    factors = rope_factors(config) if any(info.name in ROTARY for info in header.tensors) else {}
    for info in header.tensors:
        if not is_vector(info.shape):
            content = found.get(info.name) or _changed(_tensor(path, info), sources)
            found |= {} if content is None else {info.name: content}
        elif (factor := factors.get(info.name)) is not None and torch.allclose(_tensor(path, info), factor, rtol=1e-4):
            found[info.name] = Content()
        elif (content := vectors.content(info, _tensor(path, info).reshape(-1))) is not None:
            found[info.name] = content
        if info.name not in found or not _same(path, info, found[info.name], sources):
            raise RecipeError(
                f"--like {path}: the values of {info.name} are in no tensors of {model}, in any order of rows. "
                f"{REMEDY}."
            )
    contents = tuple(found[info.name] for info in header.tensors)
    left = _left(contents, {name: sources[name] for name in layers})
    left = {name: f"{path.name} {why}" for name, why in left.items()}
    return Like(
        path=path,
        header=header,
        contents=contents,
        placed=frozenset(layers) - left.keys(),
        left=left,
        turned=frozenset(part.name for content in contents if content.turned for part in content.parts),
    )


def _left(contents: Collection[Content], layers: Mapping[str, Source]) -> dict[str, str]:
    """Return the layers that cannot be quantized in a file, and what is so in the file."""
    left: dict[str, str] = {}
    rows: dict[str, list[Tensor]] = defaultdict(list)
    for content in contents:
        for part in content.parts:
            rows[part.name].append(part.rows.index())
            if part.name in layers and (content.turned or content.change or is_vector(part.shape)):
                left[part.name] = "has it along another axis" if content.turned else "has it as a vector"
    for name, source in layers.items():
        times = torch.bincount(torch.cat(rows[name])) if name in rows else torch.empty(0)
        if not len(times):
            left[name] = "does not have it"
        elif len(times) < source.shape[0] or int(times.min()) < int(times.max()):
            left.setdefault(name, "has only some of its rows")
    while True:  # a tensor has one type
        names = [{part.name for part in content.parts} for content in contents]
        mixed = {
            name for each in names if each - (layers.keys() - left.keys()) for name in each & layers.keys()
        } - left.keys()
        if not mixed:
            return left
        left |= dict.fromkeys(mixed, "has it in one tensor with rows that are not quantized")


def _key(info: Info, turned: bool) -> tuple[int, int]:
    return info.type, info.shape[-2 if turned else -1]


def _tensor(path: Path, info: Info) -> Tensor:
    """Return a tensor of a file, read when it is used."""
    data: Any = np.memmap(path, np.uint8, "c", info.begin, info.size)  # writes stay in memory
    return torch.from_numpy(np.asarray(data)).view(DENSE[info.type]).view(info.shape)


def _rows(path: Path, info: Info, turned: bool) -> Tensor:
    tensor = _tensor(path, info)
    return (tensor.mT.contiguous() if turned else tensor).flatten(0, -2)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.element_size() == 4 else torch.int16)


def _sums(rows: Tensor) -> Tensor:
    """Return a number (n,) for every row (n, columns), int64: a sum of its bits with random factors."""
    bits, columns = _bits(rows), rows.shape[1]
    factors = torch.empty(columns, dtype=torch.int64)
    factors.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(columns))
    return torch.cat([(part.long() * factors).sum(1) for part in bits.split(max(1, CHUNK // columns))])


def _matching(wanted: Tensor, given: Tensor) -> Tensor | None:
    """Return the places of all numbers of `wanted` (n,) in `given`, equal ones in order; None: some are not there."""
    order, places = wanted.argsort(stable=True), given.argsort(stable=True)
    rising, stock = wanted[order], given[places]
    rank = torch.arange(len(rising)) - torch.searchsorted(rising, rising)
    at = torch.searchsorted(stock, rising) + rank
    if len(at) and (int(at.max()) >= len(stock) or not torch.equal(stock[at], rising)):
        return None
    found = torch.empty_like(order)
    found[order] = places[at]
    return found


class _Rows:
    """The rows of all tensors of a checkpoint, rounded to the dtypes of a file.

    Args:
        keys: Pairs of a dtype of the file and a length of rows.
        first: Names of the tensors that are preferred where several have the same rows.
    """

    def __init__(
        self, sources: Mapping[str, Source], keys: Collection[tuple[int, int]], first: Collection[str]
    ) -> None:
        self._sources, self._names = sources, sorted(sources, key=lambda name: name not in first)
        self._sums: dict[tuple[int, int], dict[int, Tensor]] = defaultdict(dict)
        for number, name in enumerate(self._names):
            source = sources[name]
            types = [kind for kind, columns in keys if len(source.shape) > 1 and columns == source.shape[-1]]
            rows = source.read().reshape(-1, source.shape[-1]) if types else torch.empty(0)
            for kind in types:
                self._sums[kind, source.shape[-1]][number] = _sums(rows.to(DENSE[kind]))
        self._sorted = {key: self._of(sums) for key, sums in self._sums.items()}

    @staticmethod
    def _of(sums: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sums of all rows in rising order, and the numbers of the tensors that have them."""
        owners = torch.cat([torch.full((len(each),), number) for number, each in sums.items()])
        rising, order = torch.cat(list(sums.values())).sort(stable=True)
        return rising, owners[order]

    def parts(self, key: tuple[int, int], wanted: Tensor) -> list[Part] | None:
        """Return the rows of the checkpoint with these sums (n,); None: some are not there."""
        if key not in self._sorted:
            return None
        rising, owners = self._sorted[key]
        low, high = torch.searchsorted(rising, wanted), torch.searchsorted(rising, wanted, right=True)
        if bool((low == high).any()):
            return None
        owner = torch.where(owners[low] == owners[high - 1], owners[low], -1)
        self._settle(key, wanted, owner)
        parts = []
        for run in torch.tensor_split(torch.arange(len(owner)), (owner[1:] != owner[:-1]).nonzero()[:, 0] + 1):
            number = int(owner[run[0]])
            if number < 0 or (places := _matching(wanted[run], self._sums[key][number])) is None:
                return None
            name = self._names[number]
            parts += [Part(name=name, shape=self._sources[name].shape, rows=rows) for rows in strided(places)]
        return parts

    def _settle(self, key: tuple[int, int], wanted: Tensor, owner: Tensor) -> None:
        """Give rows that several tensors have, such as zeros, to the tensor of a row beside them, or to the first."""
        used: Counter[tuple[int, int]] = Counter()
        for step in (1, -1):
            places = range(len(owner)) if step > 0 else range(len(owner) - 1, -1, -1)
            unknown = set((owner < 0).nonzero()[:, 0].tolist())
            for place in places if unknown else ():
                if place not in unknown or not 0 <= place - step < len(owner):
                    continue
                beside, sum_of_row = int(owner[place - step]), int(wanted[place])
                if beside >= 0 and int((self._sums[key][beside] == sum_of_row).sum()) > used[beside, sum_of_row]:
                    owner[place] = beside
                    used[beside, sum_of_row] += 1
        if bool((rest := owner < 0).any()):
            whole = (number for number, sums in self._sums[key].items() if _matching(wanted[rest], sums) is not None)
            owner[rest] = next(whole, -1)


class _Vectors:
    """The vectors of a checkpoint: norms, biases, and matrices of one row."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._shapes = {name: source.shape for name, source in sources.items()}
        self._values = {name: source.read().reshape(-1) for name, source in sources.items() if is_vector(source.shape)}
        self._used: set[str] = set()

    def content(self, info: Info, wanted: Tensor) -> Content | None:
        """Return the vector of the checkpoint with these values, one of the same block where several have them."""
        for change, (into, _) in CHANGES.items():
            names = [
                name
                for name, values in self._values.items()
                if len(values) == len(wanted) and _equal(into(values).to(wanted.dtype), wanted)
            ]
            if names:
                return self._chosen(info, names, change, torch.arange(len(wanted)))
        for name, values in self._values.items():
            same = len(values) == len(wanted)
            if same and (places := _matching(_bits(wanted).long(), _bits(values.to(wanted.dtype)).long())) is not None:
                return self._chosen(info, [name], "", places)
        return None

    def _chosen(self, info: Info, names: list[str], change: str, places: Tensor) -> Content:
        numbers = re.findall(r"\d+", info.name)[:1]
        name = min(names, key=lambda name: (name in self._used, re.findall(r"\d+", name)[:1] != numbers))
        self._used.add(name)
        parts = tuple(Part(name=name, shape=self._shapes[name], rows=rows) for rows in strided(places))
        return Content(parts=parts, change=change)


def _changed(wanted: Tensor, sources: Mapping[str, Source]) -> Content | None:
    """Return the content of a matrix whose values were changed, such as decays of state-space models."""
    shape = tuple(wanted.shape)
    for name in (name for name, source in sources.items() if source.shape == shape):
        values = sources[name].read()
        for change, (into, _) in CHANGES.items():
            if _equal(into(values).to(wanted.dtype), wanted):
                rows = Strided(start=0, shape=(math.prod(shape[:-1]),), strides=(1,))
                return Content(parts=(Part(name=name, shape=shape, rows=rows),), change=change)
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _same(path: Path, info: Info, content: Content, sources: Mapping[str, Source]) -> bool:
    """Return whether a tensor of a file has the values of its content, all of them compared."""
    if not content.parts:
        return True
    begin = 0
    rows = _tensor(path, info).reshape(-1, 1) if is_vector(info.shape) else _rows(path, info, content.turned)
    for name, parts in groupby(content.parts, key=attrgetter("name")):
        values = sources[name].read()
        for part in parts:
            expected = values.reshape(part.flat)[part.rows.index()]
            expected = CHANGES[content.change][0](expected).to(rows.dtype)
            if not _equal(expected, rows[begin : begin + len(part.rows)]):
                return False
            begin += len(part.rows)
    return begin == len(rows)
