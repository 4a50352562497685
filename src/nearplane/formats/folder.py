"""The checkpoint folder that transformers, vLLM and SGLang load: safetensors shards, their index, config.json."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nearplane.formats.beside import CONFIG, copy_beside, names_copied, size_copied
from nearplane.formats.config_file import EXPERTS_WITH, READ_WITH, WEIGHTS, json_text
from nearplane.formats.container import Container, Kind
from nearplane.formats.native import METHOD
from nearplane.system.files import read_object, sha256
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
        beside = size_copied(self.place.source, trust_remote_code=self.place.trust_remote_code)
        texts = sum(len(text.encode()) for text in (*self._texts().values(), index))
        return self.size + sum(map(shard_size, shards)) + beside + texts

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file of the folder but the record, once all shards are written."""
        texts = self._texts() | {INDEX: self._writer.index()}
        found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        found |= self._writer.digests()
        for name in names_copied(self.place.source, trust_remote_code=self.place.trust_remote_code):
            found[name] = sha256(self.place.source / name)
        return dict(sorted(found.items()))

    def finish(self) -> None:
        """Write what belongs to the checkpoint beside its shards, config.json last."""
        copy_beside(self.place.source, self.folder, trust_remote_code=self.place.trust_remote_code)
        try:
            for name, text in self._texts().items():
                (self.folder / name).write_text(text)
            self._writer.finish()
        except BaseException:
            (self.folder / CONFIG).unlink(missing_ok=True)
            raise

    def _texts(self) -> dict[str, str]:
        """Return the files that say how weights are quantized, config.json last."""
        return self.says.files(self.config) | {CONFIG: config_text(self.place.source, self.config)}


def config_text(source: Path, config: Mapping[str, Any]) -> str:
    """Return the config.json of a folder with a quantization_config.

    Of what transformers cannot read it also says, where transformers looks for the name of a file, how it is read.
    """
    kept = {name: value for name, value in read_config(source).items() if name != WEIGHTS}
    if config.get("quant_method") == METHOD:
        kept[WEIGHTS] = READ_WITH
    elif config.get("meta", {}).get("experts"):
        kept[WEIGHTS] = EXPERTS_WITH
    return json_text(kept | {"quantization_config": dict(config)})


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        FormatError: there is none, or it is no JSON object.
    """
    return read_object(folder / CONFIG, expected="A model's folder has one that save_pretrained or quantize wrote")
