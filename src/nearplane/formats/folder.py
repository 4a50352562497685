"""The checkpoint folder that transformers, vLLM and SGLang load: safetensors shards, their index, config.json."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from nearplane.formats.container import Container, Kind
from nearplane.system.safetensors_files import INDEX, ShardWriter, about, shard_size


class Folder(Container):
    """A folder of safetensors: a shard for each block; without config.json and marked INCOMPLETE until it is whole."""

    _writer: ShardWriter

    def begin(self) -> None:
        """Begin the first shard."""
        self._writer = ShardWriter(self.folder, self.shards, checksums=self.layers.CHECKSUMS)

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write one shard."""
        return self._writer.write(tensors)

    def state(self) -> dict[str, Any]:
        """Return which shards were written, flushed to disk."""
        return {"size": self.size, "first": self._first, "shards": self._writer.state()}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on behind the shards of a run that was stopped."""
        self.begin()
        self._writer.go_on(state["shards"])
        self.size, self._first = int(state["size"]), str(state["first"])

    def size_with(self, *rest: Mapping[str, Kind]) -> int:
        """Return the bytes of the folder but the record, if it ended with these shards."""
        ours = {name: (about(each).split()[0], tuple(each.shape), each.nbytes) for name, each in self.pending.items()}
        blocks: Sequence[Mapping[str, Kind]] = (ours | dict(rest[0]) if rest else ours, *rest[1:])
        shards = [shard for shard in blocks if shard]
        index = self._writer.index({name: size for shard in shards for name, (_, _, size) in shard.items()})
        return self.size + sum(map(shard_size, shards)) + len(index.encode()) + self.size_beside()

    def weight_digests(self) -> dict[str, str]:
        """Return the SHA-256 of every shard and of the index, once all shards are written."""
        return self._writer.digests() | {INDEX: hashlib.sha256(self._writer.index().encode()).hexdigest()}

    def close(self) -> None:
        """Write the index."""
        self._writer.finish()
