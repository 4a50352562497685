"""Random edits of the text files of a checkpoint, as a careless or hostile hand makes them, and what every command then says.

Each edit is made in place, drawn with a `random.Random`; copy the folder before. Every call is to end in one sentence, in the
result of the folder that was not edited, or in another one where `nearplane verify` names the edit; and no file outside is opened.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import json
import os
import random
import shutil
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer
from native_checkpoints import save_tiny
from nearplane import NearplaneError
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION
from nearplane.system.paths import INDEX, RECORD

FILES = ("config.json", RECORD, INDEX, "tokenizer.json", "tokenizer_config.json")
DEEP = 200_000
BAIT = "bait"  # a folder beside the checkpoint, with a file that the edits try to have opened
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1.5, 1e308, float("nan"), float("inf"), 3 * 10**4, 10**7, 10**12, 2**63, 10**400, "", "a",
    "10",    "\x1b[2J\x1b[31mred", "\u202egnp.exe", "line\nline", "a\0b", "\ud800", "x" * 100_000, "/etc/passwd",
    f"../{BAIT}/model.safetensors",
    "../../../../etc/passwd", "(", [], {}, [1], ["a"], [[]], {"a": 1}, [None] * 3, {"": {}}, list(range(2000)),
)  # fmt: skip
WAYS: Mapping[str, Mapping[str, Any]] = {
    "compressed-tensors": {"bits": 3.5, "group_size": 16},
    "gptq_v2": {"bits": 3.5, "group_size": 16, "format": "gptq_v2", "ignore": "q_proj"},
    "nearplane": {"rate": 3.0},
}
KEYS = (
    "quantization_config",
    "auto_map",
    "dtype",
    "num_hidden_layers",
    "\x1b[31m",
    "",
    "a" * 1000,
    "rope_parameters",
    "name",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What was done to which file."""

    file: str
    what: str


# ── edits of the text ──


def _cut(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text))]


def _flipped(text: bytes, rng: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice((1, 1, 5, 50))):
        changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
    return bytes(changed)


def _other(text: bytes, rng: random.Random) -> bytes:
    del text
    whole = (
        "",
        "null",
        "[]",
        "{}",
        "3",
        '"a"',
        "true",
        "[[{}]]",
        "{'a': 1}",
        "\ufeff{}",
        "\0",
        "NaN",
        "9" * 5000,
        "version https://git-lfs",
    )
    return rng.choice(whole).encode()


def _nested(text: bytes, rng: random.Random) -> bytes:
    left, right = rng.choice((("[", "]"), ('{"a":', "}")))
    levels, closed = rng.choice((100, 900, DEEP)), rng.random() < 0.5
    deep = left * levels + ("1" + right * levels if closed else "")
    return deep.encode() if rng.random() < 0.3 else text.rstrip()[:-1] + f', "deep": {deep}}}'.encode()


TEXT: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": _cut, "bytes flipped": _flipped, "another text": _other, "nested": _nested,
}  # fmt: skip


# ── edits of one place ──


def _at(data: Any, path: Sequence[Any]) -> Any:
    for key in path:
        data = data[key]
    return data


def _some_place(data: Any, rng: random.Random) -> tuple[Any, ...]:
    """Return a place, found by going down at random: a vocabulary of thousands does not hide what is beside it."""
    place: tuple[Any, ...] = ()
    while isinstance(data, dict | list) and data:
        key = rng.choice(list(data)) if isinstance(data, dict) else rng.randrange(len(data))
        place, data = (*place, key), data[key]
        if rng.random() < 0.35:
            break
    return place


def edit_json(data: Any, rng: random.Random) -> str:
    """Change one place of JSON; return what was done."""
    if not isinstance(data, dict) or not data:
        return "nothing left"
    place = _some_place(data, rng)
    inside, key = _at(data, place[:-1]), place[-1]
    called = ".".join(map(str, place))[:60]
    match rng.choice(("delete", "value", "value", "value", "type", "key", "swap")):
        case "delete":
            del inside[key]
            return f"{called} deleted"
        case "type":
            value = inside[key]
            inside[key] = rng.choice(([value], {"a": value}, str(value), [value, value]))
            return f"{called} wrapped or spelled"
        case "key" if isinstance(inside, dict):
            new = rng.choice(KEYS)
            inside[new] = copy.deepcopy(rng.choice((inside[key], *VALUES)))
            return f"{new[:20]!r} added beside {called}"
        case "swap":
            other = _some_place(data, rng)
            first, second = copy.deepcopy(inside[key]), copy.deepcopy(_at(data, other))
            _at(data, other[:-1])[other[-1]] = first
            with contextlib.suppress(KeyError, IndexError, TypeError):
                _at(data, place[:-1])[key] = second
            return f"{called} swapped with {'.'.join(map(str, other))[:60]}"
    value = inside[key]
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    new = (
        rng.choice((value + 1, -value, value * 10**7, value + value // 100 if isinstance(value, int) else value * 1.01))
        if numeric and rng.random() < 0.4
        else rng.choice(VALUES)
    )
    inside[key] = copy.deepcopy(new)
    return f"{called} set to {str(new)[:30]!r}"


def edit(folder: Path, rng: random.Random, files: Sequence[str] = FILES) -> Edit:
    """Make one edit of one of these files as far as the folder has them, sometimes three."""
    name = rng.choice([name for name in files if (folder / name).is_file()])
    path = folder / name
    if rng.random() < 0.02:
        path.unlink()
        return Edit(file=name, what="deleted")
    if rng.random() < 0.25:
        kind = rng.choice(list(TEXT))
        path.write_bytes(TEXT[kind](path.read_bytes(), rng))
        return Edit(file=name, what=kind)
    data = json.loads(path.read_text())
    done = [edit_json(data, rng) for _ in range(rng.choice((1, 1, 1, 3)))]
    text = json.dumps(data, ensure_ascii=rng.random() < 0.5)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return Edit(file=name, what="; ".join(done))


# ── what is called, and what may come of it ──


def _said(*words: object) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app([str(word) for word in words], result_action="return_value", exit_on_error=False)
    return out.getvalue()


def _logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return nearplane.load(folder, dtype=torch.float32)(torch.arange(8).reshape(1, 8)).logits


def _exported(folder: Path) -> dict[str, torch.Tensor]:
    out = folder.with_name("dense")
    shutil.rmtree(out, ignore_errors=True)
    nearplane.export(folder, out, dtype="float32")
    return {name: tensor for path in sorted(out.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _report(folder: Path) -> str:
    page = folder.with_name("page.html")
    page.unlink(missing_ok=True)
    return nearplane.write_report(folder, page).read_text()


def calls(text: Path, original: Path) -> dict[str, Callable[[Path], Any]]:
    """Return all that reads a checkpoint: a function of the folder each."""

    def verified(folder: Path, **words: Any) -> list[str]:
        return sorted(str(fault) for fault in nearplane.verify(folder, **words).faults)

    return {
        "load": _logits,
        "evaluate": lambda folder: nearplane.evaluate(folder, text, seqlen=16, samples=2),
        "verify": verified,
        "verify, with the original": lambda folder: verified(folder, against=original, calibration=text),
        "inspect": lambda folder: _said("inspect", folder) + _said("inspect", folder, "--json"),
        "report": _report,
        "export": _exported,
    }


def results(folder: Path, read: Mapping[str, Callable[[Path], Any]]) -> dict[str, Any]:
    """Return what every call gives of a folder that is not edited."""
    return {name: call(folder) for name, call in read.items()}


def equal(one: Any, other: Any) -> bool:
    """Return whether two results are the same."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return bool(one == other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call made of an edited folder.

    Args:
        kind: "one sentence", "as before", "differs, and verify names the edit", or what must not be.
        said: the sentence, or the fault.
        seconds: of the processor, in this process.
    """

    kind: str
    said: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.kind in GOOD


GOOD = ("one sentence", "as before", "differs, and verify names the edit")


def outcomes(
    folder: Path, read: Mapping[str, Callable[[Path], Any]], expected: Mapping[str, Any], ours: Sequence[Path] = ()
) -> dict[str, Outcome]:
    """Call everything on an edited folder.

    Args:
        folder: the copy that was edited, with nothing of anybody else's beside it but `BAIT`.
        read: see `calls`.
        expected: results of the folder before.
        ours: what else may be opened: the text, the original.
    """
    found: dict[str, Outcome] = {}
    try:
        named = bool(nearplane.verify(folder).faults)
    except Exception:  # it is called again below
        named = True
    for name, call in read.items():
        began = time.process_time()
        with watched(folder, (folder.parent, *ours)) as opened:
            try:
                result = call(folder)
                same = equal(result, expected[name])
                kind, said = ("as before", "") if same else ("differs", str(result)[:200])
                if kind == "differs" and named:
                    kind = GOOD[2]
                if name.startswith(("verify", "inspect")) and not _prints(result):
                    kind = "prints what steers the terminal"
            except NearplaneError as error:
                kind, said = GOOD[0], str(error)
                if not said.isprintable() or not said or len(said) > 2000:
                    kind = "no sentence"
            except BaseException as error:  # panics of Rust are no Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                kind, said = f"traceback: {type(error).__name__}", str(error)[:300]
        if opened:
            kind, said = "opens files outside", ", ".join(sorted(opened))
        found[name] = Outcome(kind=kind, said=said, seconds=time.process_time() - began)
    return found


def _prints(result: Any) -> bool:
    lines = result.split("\n") if isinstance(result, str) else result
    return all(line.isprintable() for line in lines)


def made(place: Path) -> tuple[dict[str, Path], Path, Path]:
    """Write checkpoints of a tiny model on two grids and at a rate: {how: folder}, the text of their calibration, the original."""
    original, text = place / "original", place / "text.txt"
    text.write_text(CALIBRATION.read_text()[:4000])
    save_tiny(original, "llama", torch.float32, vocab_size=TEXT_VOCABULARY, num_hidden_layers=2)
    add_tokenizer(original)
    folders: dict[str, Path] = {}
    for way, options in WAYS.items():
        folders[way] = place / way
        nearplane.quantize(original, folders[way], calibration=text, samples=4, seqlen=32, **options)
    return folders, text, original


def copied(folder: Path, place: Path) -> Path:
    """Return a copy of a checkpoint in a folder of its own, beside `BAIT`."""
    shutil.rmtree(place, ignore_errors=True)
    (place / BAIT).mkdir(parents=True)
    shutil.copyfile(next(folder.glob("*.safetensors")), place / BAIT / "model.safetensors")
    return Path(shutil.copytree(folder, place / "checkpoint"))


# ── which files are opened ──

_watching: list[tuple[tuple[str, ...], str, set[str]]] = []
_installed: list[bool] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _watching and isinstance(args[0], str | bytes | os.PathLike):
        allowed, bait, opened = _watching[-1]
        path = os.path.abspath(os.fsdecode(args[0]))
        if not path.startswith(allowed) or path.startswith(bait):
            opened.add(path)


@contextlib.contextmanager
def watched(folder: Path, ours: Sequence[Path]) -> Iterator[set[str]]:
    """Collect the files that are opened within and lie neither in one of `ours` nor where Python and its packages are.

    What Python opens is seen by an audit hook; what Rust opens (safetensors), where it is `BAIT`, by Linux' inotify.
    """
    if not _installed:
        sys.addaudithook(_hook)
        _installed.append(True)
    python = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), Path(nearplane.__file__).parents[2]]
    bait = os.path.abspath(folder.with_name(BAIT))
    allowed = tuple(os.path.abspath(path) for path in (*python, *ours, "/proc", "/sys", "/dev/null", "/dev/shm"))
    opened: set[str] = set()
    watch = _Inotify(folder.with_name(BAIT))
    _watching.append((allowed, bait, opened))
    try:
        yield opened
    finally:
        _watching.pop()
        opened |= watch.opened()


class _Inotify:
    """Sees whether a file in a folder is opened, whoever does; sees nothing where there is no inotify."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, ctypes.CDLL(None, use_errno=True)
        self.descriptor = -1
        if hasattr(self.library, "inotify_init1"):
            self.descriptor = self.library.inotify_init1(os.O_NONBLOCK)
            self.library.inotify_add_watch(self.descriptor, os.fsencode(folder), 0x20)  # IN_OPEN

    def opened(self) -> set[str]:
        """Return the files that were opened, and stop watching."""
        if self.descriptor < 0:
            return set()
        names, data = set(), b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.descriptor, 1 << 16)
        os.close(self.descriptor)
        while data:
            length = struct.unpack_from("iIII", data)[3]
            if name := data[16 : 16 + length].rstrip(b"\0"):
                names.add(str(self.folder / os.fsdecode(name)))
            data = data[16 + length :]
        return names
