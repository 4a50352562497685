"""What the fuzz reads: tiny models in every format, a record, a stopped run, texts, coded matrices; and what may come of each.

A checkpoint with our record gives a sentence or exactly the right weights. A file that nobody signed has no checksum: it gives a
sentence, or what its bytes decode to by `plain_formats.py`, which is written from the formats alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

import edits
import mutations
import nearplane
import plain_reader
from coded_matrices import mended
from mutations import Mutation
from nearplane.calibration.texts import read_windows
from nearplane.cli.app import app
from nearplane.coding.blob import decode
from nearplane.demo import MODEL
from nearplane.formats import journal_pages
from nearplane.record.record_file import read_record
from nearplane.system.paths import RECORD

REFUSED, RIGHT, AS_BYTES_SAY, NAMED, UNSURE = "refused", "right", "as the bytes say", "named by verify", "not compared"
GOOD = (REFUSED, RIGHT, AS_BYTES_SAY, NAMED, UNSURE)
WINDOWS = torch.arange(64).reshape(4, 16)

Weights = dict[str, Tensor]


def same(one: Any, other: Any) -> bool:
    """Return whether two results are the same; NaN is NaN, and bytes of truth values count as they are understood."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        if one.dtype == torch.bool:
            one, other = one.view(torch.uint8) != 0, other.view(torch.uint8) != 0
        if one.is_floating_point() and one.element_size() > 1:
            return bool(((one == other) | (one.isnan() & other.isnan())).all())
        return torch.equal(bytes_of(one), bytes_of(other))
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
        )
    return bool(one == other)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


class Subject(ABC):
    """Something that nearplane reads.

    Args:
        name: format, a row of the table.
        folder: the files as they were written; they are copied before each mutation.
    """

    BYTES = 2  # of memory that each byte of the files may take
    WEIGHT = 1.0  # in the draw

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.expected: dict[str, Any] = {}

    def room(self, folder: Path) -> int:
        """Return the bytes that reading a copy may take beside those of reading the files as they were."""
        sizes = [
            sum(path.stat().st_size for path in each.rglob("*") if path.is_file()) for each in (self.folder, folder)
        ]
        return self.BYTES * max(sizes)

    @abstractmethod
    def readers(self) -> dict[str, Callable[[Path], Any]]:
        """Return all that reads a folder, by name."""

    def drawn(self, rng: random.Random) -> list[str]:
        """Return the names of the readers of one mutation; of slow ones, one is drawn."""
        return list(self.readers())

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        return mutations.mutate(folder, rng)

    @abstractmethod
    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        """Return an entry of `GOOD` for the result of a reader, or what is wrong with it."""

    def counts(self, reader: str) -> bool:
        """Return whether the outcome of a reader is that of the mutation; others only add faults."""
        return True

    def prepare(self, reader: str) -> None:
        """Read the files as they were written."""
        if reader not in self.expected:
            self.expected[reader] = self.readers()[reader](self.folder)


# ── what readers share ──


def inspected(folder: Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app(["inspect", str(folder)], result_action="return_value", exit_on_error=False)
    return out.getvalue()


def faulty(folder: Path) -> bool:
    return bool(nearplane.verify(folder).faults)


def unchanged(one: Path, other: Path) -> bool:
    """Return whether all files of two folders are the same."""
    paths = {path.name: path for path in other.iterdir()}
    return paths.keys() == {path.name for path in one.iterdir()} and all(
        path.is_file() and not path.is_symlink() and path.read_bytes() == (one / name).read_bytes()
        for name, path in paths.items()
    )


def named(folder: Path) -> bool:
    """Return whether `verify` finds a fault, or refuses the folder."""
    try:
        return faulty(folder)
    except nearplane.NearplaneError:
        return True


# ── the record ──


class Record(Subject):
    """nearplane.json, as `inspect`, `report` and `verify` read it."""

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        def report(folder: Path) -> str:
            page = folder.with_name("page.html")
            page.unlink(missing_ok=True)
            return nearplane.write_report(folder, page).read_text()

        return {
            "record": lambda folder: read_record(folder).to_json(),
            "inspect": inspected,
            "report": report,
            "verify": faulty,
        }

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        if rng.random() < 0.5:
            return mutations.of_bytes(folder / RECORD, rng)
        done = edits.edit(folder, rng, [RECORD])
        return Mutation(kind="metadata", file=done.file, what=done.what)

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if reader == "verify":
            return NAMED if result else RIGHT if unchanged(self.folder, folder) else "verify finds nothing"
        return RIGHT if same(result, self.expected[reader]) else NAMED if named(folder) else "another record"


# ── texts, and coded matrices ──


class Texts(Subject):
    """A .txt or .jsonl file, which has no checksum: its tokens are those of the text that its bytes are."""

    BYTES = 250  # a letter may be a token, of which the tokenizer keeps the text, its place and five numbers

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        return {
            "read_windows": lambda folder: read_windows(self.tokenizer, folder / self.name, samples=10**6, seqlen=16)
        }

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        path = folder / self.name
        if self.name.endswith(".txt") or rng.random() < 0.4:
            return mutations.of_bytes(path, rng)
        lines = path.read_bytes().split(b"\n")
        place = rng.randrange(len(lines) - 1)
        row = json.loads(lines[place])
        if rng.random() < 0.3:
            kind = rng.choice(list(edits.TEXT))
            lines[place], what = edits.TEXT[kind](lines[place], rng), kind
        else:
            what = edits.edit_json(row, rng)
            lines[place] = json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        path.write_bytes(b"\n".join(lines))
        return Mutation(kind="header", file=path.name, what=f"line {place}: {what}")

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if same(result, self.expected[reader]):
            return RIGHT
        content = (folder / self.name).read_bytes().decode().replace("\r\n", "\n").replace("\r", "\n")
        texts = [content]
        if self.name.endswith(".jsonl"):
            texts = [json.loads(line)["text"] for line in content.split("\n") if line.strip()]
        ids: list[int] = []
        for text in texts:
            ids += [self.tokenizer.eos_token_id] if ids and self.tokenizer.eos_token_id is not None else []
            ids += self.tokenizer(text, add_special_tokens=False)["input_ids"]
        windows = len(ids) // 16
        return (
            AS_BYTES_SAY
            if result.tolist() == torch.tensor(ids[: 16 * windows]).view(windows, 16).tolist()
            else "other tokens"
        )


class Blob(Subject):
    """A coded matrix; half of the mutations come with checksums made right again."""

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        return {"decode": lambda folder: _values(np.fromfile(folder / "blob", np.uint8))}

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        done = mutations.of_bytes(folder / "blob", rng)
        if rng.random() < 0.5:
            return done
        mended(np.fromfile(folder / "blob", np.uint8)).tofile(folder / "blob")
        return Mutation(kind=done.kind, file="", what=f"{done.what}, checksums made right")

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if same(result, self.expected[reader]):
            return RIGHT
        if mutation.file:
            return "other codes"
        _, codes, columns, rows = plain_reader.read((folder / "blob").read_bytes())
        expected = {"codes": codes, "columns": columns, "rows": rows}
        return (
            AS_BYTES_SAY
            if all(np.array_equal(result[name].numpy(), each) for name, each in expected.items())
            else "other codes"
        )


def _values(blob: np.ndarray) -> Weights:
    found = decode(blob, name="layer 7")
    from nearplane.formats.native import matrix_of

    matrix = matrix_of(found)
    return {"codes": matrix.codes.long(), "columns": matrix.grid.column_scale(), "rows": matrix.grid.row_scale()}


# ── a stopped run ──


class Journal(Subject):
    """OUT.unfinished: the same command goes on to the same bytes, or says why not."""

    WEIGHT = 0.25  # a run takes long

    def __init__(self, name: str, folder: Path, model: Path, options: Mapping[str, Any]) -> None:
        super().__init__(name, folder)
        self.model = model
        self.options = dict(calibration=WINDOWS, solver="round-to-nearest", device="cpu", **options)

    def run(self, folder: Path) -> dict[str, bytes]:
        nearplane.quantize(self.model, folder / "out", **self.options)
        paths = [*(folder / "out").glob("*.safetensors"), *(folder / "out").glob("*.gguf")]
        return {path.name: path.read_bytes() for path in paths}

    def prepare(self, reader: str) -> None:
        """Run once without a stop."""
        if reader not in self.expected:
            with tempfile.TemporaryDirectory() as place:
                self.expected[reader] = self.run(Path(place))

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        return {"quantize": self.run}

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        unfinished = folder / "out.unfinished"
        journal = unfinished / "journal"
        paths = sorted(path for path in unfinished.rglob("*") if path.is_file() and path.stat().st_size)
        match rng.choice(("state", "state", "refitted", "any", "gone")):
            case "state":
                done = edits.edit(journal, rng, ["state.json"])
                return Mutation(kind="metadata", file=done.file, what=done.what)
            case "refitted":
                path = rng.choice(sorted(journal.glob("*.pt")))
                done = mutations.of_bytes(path, rng)
                state = json.loads((journal / "state.json").read_text())
                state["pages"][path.name] = nearplane.system.files.sha256(path)
                (journal / "state.json").write_text(json.dumps(state | {"digest": journal_pages._digest(state)}))
                return Mutation(kind=done.kind, file="", what=f"{path.name}: {done.what}, its hash made right")
            case "gone":
                path = rng.choice(paths)
                path.unlink()
                return Mutation(kind="files", file=path.name, what="missing")
        path = rng.choice(paths)
        return mutations.of_bytes(path, rng)

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if same(result, self.expected[reader]):
            return RIGHT
        return UNSURE if not mutation.file else "other weights"
