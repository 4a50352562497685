"""Folders of safetensors files: read tensors by name, write them shard by shard, mark what is not finished.

Memory stays small: a reader opens a file only while it copies tensors out of it, a writer writes a shard as soon as it is
given one. Knows tensors and names; not what they mean.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nearplane.errors import FormatError, ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INCOMPLETE = "INCOMPLETE"


class ShardReader:
    """The tensors of a folder of safetensors files, by name.

    Raises:
        ModelError: the folder holds no safetensors files, or one is truncated or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INCOMPLETE).exists():
            raise ModelError(f"{folder} is incomplete: a run that wrote it did not finish. Delete it and run again.")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} holds no .safetensors file. Convert the checkpoint with save_pretrained first.")
        if (folder / INDEX).exists():
            try:
                files = sorted(
                    {folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()}
                )
            except (ValueError, KeyError, AttributeError) as error:
                raise ModelError(f"{folder / INDEX} is not an index of shards ({error!r}). Fetch it again.") from error
        elif folder / SINGLE in files:
            files = [
                folder / SINGLE
            ]  # others beside it (adapters, another layout of the same weights) are not the model
        self._file: dict[str, Path] = {}
        self._about: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (a safe_open handle is no mapping)
                    view = file.get_slice(name)
                    self._file[name] = path
                    self._about[name] = (view.get_dtype(), tuple(view.get_shape()))

    def names(self) -> list[str]:
        """Return the names of all tensors, in file order."""
        return list(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._about[name][1]

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor ("BF16", "F32", ...) without reading it."""
        return self._about[name][0]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors into memory of their own; the files are closed again."""
        wanted: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            wanted[self._file[name]].append(name)
        tensors: dict[str, Tensor] = {}
        for path, group in wanted.items():
            with _opened(path) as file:
                for name in group:
                    try:
                        tensors[name] = file.get_tensor(name).clone()  # a clone: the map is given back with the file
                    except SafetensorError as error:
                        raise ModelError(
                            f"{path}: tensor {name} cannot be read ({error}). Fetch the file again."
                        ) from error
        return tensors


class _opened:  # noqa: N801  (a context manager used like a function)
    """`safe_open` with an error that names the file."""

    def __init__(self, path: Path) -> None:
        try:
            self.file = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}). Fetch it again.") from error

    def __enter__(self) -> safe_open:
        return self.file.__enter__()

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)


class ShardWriter:
    """Writes a folder of `total` safetensors shards and their index; marked incomplete until `finish`.

    Raises:
        FormatError: a shard cannot be written, for example because the disk is full.
    """

    def __init__(self, folder: Path, total: int) -> None:
        self.folder, self.total = folder, total
        self.weight_map: dict[str, str] = {}
        self.size = 0
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INCOMPLETE).write_text(
            "This checkpoint is not finished: the run that writes it is under way or died.\n"
        )

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write one shard and return its size in bytes."""
        self._count += 1
        name = f"model-{self._count:05d}-of-{self.total:05d}.safetensors"
        path = self.folder / name
        try:
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path, {"format": "pt"}
            )
        except (SafetensorError, OSError) as error:
            raise FormatError(
                f"{path} could not be written ({error}). Free some space and run again with --overwrite; "
                f"what is there is marked {INCOMPLETE} and does not load."
            ) from error
        path.chmod((self.folder / INCOMPLETE).stat().st_mode)  # safetensors makes files that only their owner may read
        self.weight_map |= dict.fromkeys(tensors, name)
        self.size += sum(value.nbytes for value in tensors.values())
        return path.stat().st_size

    def finish(self) -> None:
        """Write the index and take the mark away. Call it last, when every other file of the folder is there."""
        if self._count != self.total:
            raise FormatError(f"{self.folder}: {self._count} shards were written where {self.total} were announced.")
        index = {"metadata": {"total_size": self.size}, "weight_map": dict(sorted(self.weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (self.folder / INCOMPLETE).unlink()
