"""Reader of a GGUF; it gives single tensors under their names in the original checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nearplane.errors import FormatError, ModelError
from nearplane.formats.gguf.gguf_header import (
    BLOCKS,
    DIVISORS,
    FILE,
    GLOBAL_SCALE,
    LONE,
    SHA_SIZE,
    STAR,
    SUMS,
    Header,
    Info,
    check_metadata,
    parts_of,
    read_header,
)
from nearplane.formats.gguf.names import Rule, checkpoint_names, rule_of, unused
from nearplane.formats.gguf.network_config import check_network
from nearplane.system.files import read_object
from nearplane.system.paths import refuse_unfinished
from nearplane.system.safetensors_files import DTYPE_NAMES, TensorInfo, TensorReader

DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # types without blocks


def path_in(folder: Path) -> Path:
    """Return the path of the file of a folder; of a temporary folder the user's file."""
    return (folder / FILE).resolve() if folder.name.startswith(LONE) else folder / FILE


class GGUFReader(TensorReader):
    """Reader of the tensors of `model.gguf` in a folder, by their names in the original checkpoint.

    A quantized tensor is `NAME.weight_TYPE`: (out, bytes of a row) uint8. `read` checks the SHA-256 of the data, which
    files of other programs do not have.

    Args:
        folder: The folder of the GGUF.
        unfinished: Whether the file may be incomplete; then no SHA-256 is checked.

    Raises:
        ModelError: The file is missing or damaged, or has tensors that nearplane does not write.
    """

    def __init__(self, folder: Path, *, unfinished: bool = False) -> None:
        self.folder, self.path = folder, path_in(folder)
        if not unfinished:
            refuse_unfinished(folder)
        if not self.path.is_file():
            raise ModelError(f"{folder} has no {FILE}, which its config.json names. Fetch the folder again.")
        header = self.header = read_header(self.path)
        if not unfinished:
            check_metadata(self.path, header)
        self.infos = {}
        self._fill(unfinished)

    def _fill(self, unfinished: bool) -> None:
        """Describe the tensors by their names in the checkpoint, with their places in the file and their SHA-256."""
        header = self.header
        names = checkpoint_names(self.path, header)
        sums = header.texts(self.path, SUMS) if header.own else [""] * len(names)
        self._infos: dict[str, Info] = {}
        self._sums: dict[str, str] = {}
        for info, name, digests in zip(header.tensors, names, sums, strict=True):
            if not name:  # rotary factors, made from the config
                continue
            self._check(info, name, digests)
            for index, (part, entry) in enumerate(parts_of(info, name).items()):
                stored_name = part if info.type in DENSE else f"{part}_{BLOCKS[info.type].name}"
                if stored_name in self._infos:
                    raise ModelError(f"{self.path}: tensor {part} occurs twice. Fetch the file again.")
                self._infos[stored_name] = entry
                dtype = DTYPE_NAMES[DENSE.get(entry.type, torch.uint8)]
                self.infos[stored_name] = TensorInfo(dtype, self._shape(entry), entry.size, self.path)
                if header.own and not unfinished:
                    self._sums[stored_name] = digests[SHA_SIZE * index : SHA_SIZE * (index + 1)]
        self._divisors = divisors_of(self.path, header, self._infos)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors in the form of the checkpoint, with rows in its order.

        Raises:
            FormatError: The data of a tensor do not match their SHA-256.
        """
        tensors = {}
        with self.path.open("rb") as file:
            for name in names:
                info = self._infos[name]
                raw = self._raw(file, name, info, self._sums.get(name))
                tensors[name] = self._rule(info).back(_tensor(raw, info))
                if (divisor := self._divisors.get(name)) is not None:
                    tensors[name] = self._exact(name, tensors[name], divisor)
        return tensors

    def _exact(self, name: str, back: Tensor, divisor: float) -> Tensor:
        """Return a global scale of the list in place of that which its reciprocal gives back.

        Raises:
            FormatError: They are not the same number but for the rounding.
        """
        exact = torch.full_like(back, divisor)
        if not torch.equal(exact.reciprocal(), back.reciprocal()):
            raise FormatError(
                f"{self.path}: {name} is {divisor:g} in {DIVISORS}, but {float(back):g} by its tensor. Fetch the file again."
            )
        return exact

    def kept(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return a tensor of the original model as the file stores it, rounded; None if llama.cpp does not need it."""
        config = read_object(self.folder / "config.json", expected="Fetch config.json again")
        tied = all(info.name != "output.weight" for info in self.header.tensors)
        if unused(name, {"tie_word_embeddings": tied} | config):  # config.json may omit defaults of its type
            return None
        info = self._infos.get(name)
        if info is None or info.type not in DENSE:
            return tensor  # the file has no such dense tensor
        rule = self._rule(info)
        return rule.back(rule.into(tensor).to(DENSE[info.type]))

    def check_network(self, config: Mapping[str, Any]) -> None:
        """Refuse metadata that contradict config.json, which transformers has completed."""
        check_network(self.path, self.header, config)

    def _check(self, info: Info, name: str, sums: str) -> None:
        """Refuse a tensor that contradicts the metadata: its name in the checkpoint and its SHA-256, one per expert."""
        try:
            rule = self._rule(info)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self.path}: the metadata of {info.name} are incomplete ({error!r}). Fetch the file again."
            ) from error
        if not all(info.shape) or rule.heads < 0 or (rule.heads and info.shape[0] % (2 * rule.heads)):
            raise ModelError(
                f"{self.path}: {info.name} has the shape {info.shape}, which does not fit {rule.heads} heads. Fetch "
                f"the file again."
            )
        dims = len(info.shape)
        # values of experts are stored unchanged
        stacked = STAR in name if rule.reciprocal else dims == 3 and rule == Rule()
        size = SHA_SIZE * (info.shape[0] if stacked else 1) if self.header.own else 0
        if dims > (1 if rule.reciprocal else 2 + stacked) or stacked != (STAR in name) or len(sums) != size:
            raise ModelError(
                f"{self.path}: {info.name} has the shape {info.shape} and {len(sums)} letters of SHA-256, which do not "
                f"fit {name}. Fetch the file again."
            )

    def _raw(self, file: BinaryIO, name: str, info: Info, digest: str | None) -> bytearray:
        """Read the bytes of a tensor or of a part of it, and compare their SHA-256.

        Raises:
            FormatError, ModelError: They are damaged or truncated.
        """
        file.seek(info.begin)
        raw = bytearray(file.read(info.size))
        if len(raw) != info.size:
            raise ModelError(f"{self.path}: tensor {name} is truncated. Fetch the file again.")
        if digest is not None and (actual := hashlib.sha256(raw).hexdigest()) != digest:
            raise FormatError(
                f"{self.path}: {name} is damaged: its SHA-256 is {actual[:16]}.., expected {digest[:16]}... Fetch the "
                f"folder again."
            )
        return raw

    def _shape(self, info: Info) -> tuple[int, ...]:
        """Return the shape of a tensor; blocks are (out, bytes of a row)."""
        if info.type in DENSE:
            return tuple(self._rule(info).back(torch.empty(info.shape, device="meta")).shape)
        return info.shape[0], info.size // info.shape[0]

    def _rule(self, info: Info) -> Rule:
        return rule_of(info.name, self.header.fields, dims=len(info.shape) if info.type in DENSE else 1)


def divisors_of(path: Path, header: Header, names: Iterable[str]) -> dict[str, float]:
    """Return the global scales in nearplane's list by name in the checkpoint; none in files of other programs.

    Args:
        path: Path of the file, for the error.
        header: Its header.
        names: Names of all tensors in the checkpoint, in file order.

    Raises:
        ModelError: The list does not fit.
    """
    scaled, listed = [name for name in names if name.endswith(f".{GLOBAL_SCALE}")], header.fields.get(DIVISORS, [])
    if not header.own:
        return {}
    if (
        not isinstance(listed, list)
        or len(listed) != len(scaled)
        or not all(isinstance(each, float) for each in listed)
    ):
        raise ModelError(f"{path} has no valid key {DIVISORS} for {len(scaled)} global scales. Fetch the file again.")
    return dict(zip(scaled, listed, strict=True))


def _tensor(raw: bytearray, info: Info) -> Tensor:
    values = torch.frombuffer(raw, dtype=DENSE.get(info.type, torch.uint8))
    return values.reshape(info.shape if info.type in DENSE else (info.shape[0], -1))
