"""Reads the tensors of a GGUF that nearplane wrote, one by one, under the names that the checkpoint had."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from nearplane.errors import FormatError, ModelError
from nearplane.formats.gguf.gguf_header import BLOCKS, EVERY, FILE, LONG, SUMS, TENSORS, Info, apart, read_header
from nearplane.formats.gguf.names import Rule, rule_of, unused
from nearplane.system.files import read_object
from nearplane.system.safetensors_files import NAMES, TensorInfo, TensorReader, refuse_unfinished

DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # types that hold values as they are


class GGUFReader(TensorReader):
    """The tensors of `model.gguf` in a folder, by the names that the original checkpoint has.

    A quantized one is `NAME.weight_TYPE`: (out, bytes of a row) uint8. What is read is checked against the SHA-256 in the file.

    Args:
        folder: that holds it.
        unfinished: whether it may be one that is being written.

    Raises:
        ModelError: there is none, it is damaged, or another program wrote it.
    """

    def __init__(self, folder: Path, *, unfinished: bool = False) -> None:
        self.folder, self.path = folder, folder / FILE
        if not unfinished:
            refuse_unfinished(folder)
        if not self.path.is_file():
            raise ModelError(f"{folder} holds no {FILE}, although its config.json says so. Fetch it again.")
        header = self.header = read_header(self.path)
        names, sums = (_texts(header.fields.get(key), len(header.tensors)) for key in (TENSORS, SUMS))
        if names is None or sums is None:
            raise ModelError(
                f"{self.path} was not written by nearplane: it has no key {TENSORS} that names its tensors. nearplane reads GGUF "
                f"files of its own."
            )
        if (size := self.path.stat().st_size) != header.size:
            raise ModelError(
                f"{self.path} has {size:,} bytes, its header describes {header.size:,}: it is cut off or damaged. Fetch it again."
            )
        self.infos = {}
        self._infos: dict[str, Info] = {}
        self._sums: dict[str, str] = {}
        for info, name, found in zip(header.tensors, names, sums, strict=True):
            if not name:  # made of the config: factors of rotary frequencies
                continue
            self._check(info, name, found)
            for index, (one, place) in enumerate(apart(info, name).items()):
                called = one if info.type in DENSE else f"{one}_{BLOCKS[info.type].name}"
                if called in self._infos:
                    raise ModelError(f"{self.path}: {one} is there twice. Fetch it again.")
                self._infos[called] = place
                dtype = NAMES[DENSE.get(place.type, torch.uint8)]
                self.infos[called] = TensorInfo(dtype, self._shape(place), place.size, self.path)
                if not unfinished:
                    self._sums[called] = found[LONG * index : LONG * (index + 1)]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors as the checkpoint has them: rows in its order.

        Raises:
            FormatError: the data of one is not what was written.
        """
        tensors = {}
        with self.path.open("rb") as file:
            for name in names:
                info = self._infos[name]
                file.seek(info.begin)
                data = bytearray(file.read(info.size))
                if len(data) != info.size:
                    raise ModelError(f"{self.path}: tensor {name} is cut off. Fetch the file again.")
                if name in self._sums and (found := hashlib.sha256(data).hexdigest()) != self._sums[name]:
                    raise FormatError(
                        f"{self.path}: the data of {name} has the SHA-256 {found[:16]}.., the file says "
                        f"{self._sums[name][:16]}..: it is damaged. Fetch the folder again."
                    )
                tensors[name] = self._rule(info).back(_tensor(data, info))
        return tensors

    def kept(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what the file holds of a tensor of the original, after it is read back; None if it needs none of it."""
        config = read_object(self.folder / "config.json", expected="Fetch it again")
        tied = all(info.name != "output.weight" for info in self.header.tensors)
        if unused(name, {"tie_word_embeddings": tied} | config):  # which may leave out what is the default of its type
            return None
        info = self._infos.get(name)
        if info is None or info.type not in DENSE:
            return tensor  # nothing is like it
        rule = self._rule(info)
        return rule.back(rule.into(tensor).to(DENSE[info.type]))

    def _check(self, info: Info, name: str, sums: str) -> None:
        """Refuse a tensor that the metadata do not fit: the name in the checkpoint, with the SHA-256 of it or of every expert."""
        try:
            rule = self._rule(info)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self.path}: what it says of {info.name} is not complete ({error!r}). Fetch it again."
            ) from error
        if not all(info.shape) or rule.heads < 0 or (rule.heads and info.shape[0] % (2 * rule.heads)):
            raise ModelError(
                f"{self.path}: {info.name} has the sizes {info.shape}, for {rule.heads} heads. The two do not belong together; "
                f"fetch the file again."
            )
        dims = len(info.shape)
        stacked = dims == 3 and rule == Rule()  # nothing becomes of the values of experts
        if dims > 2 + stacked or stacked != (EVERY in name) or len(sums) != LONG * (info.shape[0] if stacked else 1):
            raise ModelError(
                f"{self.path}: {info.name} has the sizes {info.shape} and {len(sums)} letters of SHA-256, for {name}. They do not "
                f"belong together; fetch the file again."
            )

    def _shape(self, info: Info) -> tuple[int, ...]:
        """Return the shape of a tensor: of blocks (out, bytes of a row)."""
        if info.type in DENSE:
            return tuple(self._rule(info).back(torch.empty(info.shape, device="meta")).shape)
        return info.shape[0], info.size // info.shape[0]

    def _rule(self, info: Info) -> Rule:
        return rule_of(info.name, self.header.fields, dims=len(info.shape) if info.type in DENSE else 1)


def _tensor(data: bytearray, info: Info) -> Tensor:
    values = torch.frombuffer(data, dtype=DENSE.get(info.type, torch.uint8))
    return values.reshape(info.shape if info.type in DENSE else (info.shape[0], -1))


def _texts(found: object, count: int) -> list[str] | None:
    """Return a list of so many texts, None if it is something else."""
    good = isinstance(found, list) and len(found) == count and all(isinstance(each, str) for each in found)
    return found if isinstance(found, list) and good else None
