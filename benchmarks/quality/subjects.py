"""Models with their texts: windows for calibration, those held out, and how each window begins.

Calibration k takes windows k * samples, k * samples + 1, ... of the calibration text, from the beginning again after its end; of
several kinds of text in turns. The published models are those of tools/published_models.py.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from nearplane.calibration.texts import frame_of, read_windows
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.models.pretrained import tokenizer_of
from nearplane.recipe.recipe import FirstToken

MIXES = ("q4_k_m", "q3_k_m", "q2_k")
SEPARATOR = "<|endoftext|>"  # between documents
PUBLISHED = ("smollm2", "gemma3", "smollm2-noise")  # folders that tools/published_models.py makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A kind of text.

    Args:
        kind: Its name.
        calibration, held_out: Files; no calibration: it is only measured on.
        first: Bytes of `calibration` that are used; None: all.
        last: Bytes at the end of `held_out` that are used, from the first separator in them; None: all.
        separator: What stands between documents, which are joined by the end-of-sequence token instead; None: nothing.
    """

    kind: str
    calibration: Path | None
    held_out: Path
    first: int | None = None
    last: int | None = None
    separator: str | None = None

    def read(self, *, held_out: bool) -> list[str]:
        """Return the documents of one of the two texts; none if it is not there."""
        file = self.held_out if held_out else self.calibration
        if file is None:
            return []
        content = file.read_bytes()
        if not held_out:
            content = content[: self.first]
        elif self.last is not None:
            content = content[content.index(SEPARATOR.encode(), -self.last) :]  # a cut document may be trained on
        text = content.decode("utf-8", errors="ignore")
        return (
            [text]
            if self.separator is None
            else [each.strip("\n") for each in text.split(self.separator) if each.strip()]
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and its texts.

    Args:
        name, folder: The model.
        texts: Kinds of text, of which all windows have equal shares: those for calibration, and those held out.
        samples, windows: Windows for calibration, and held out.
        seqlen: Tokens per window.
        group_size: Of grids.
        trained: Number of calibrations of tools that train.
        first_token: How each window begins, see `nearplane.quantize`.
    """

    name: str
    folder: Path
    texts: tuple[Text, ...]
    samples: int
    windows: int
    seqlen: int
    group_size: int
    trained: int
    first_token: FirstToken = "none"

    @cached_property
    def sha(self) -> str:
        """First digits of the SHA-256 of its weights."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.glob("*.safetensors")):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:12]

    @cached_property
    def streams(self) -> dict[bool, dict[str, Tensor]]:
        """All windows (windows, seqlen) by kind of text, for calibration (False) and held out (True)."""
        tokenizer = tokenizer_of(self.folder, trust_remote_code=False)
        frame = frame_of(tokenizer, self.first_token, encoder=False)
        return {
            held: {
                text.kind: read_windows(tokenizer, documents, samples=sys.maxsize, seqlen=self.seqlen, frame=frame)
                for text in self.texts
                if (documents := text.read(held_out=held))
            }
            for held in (False, True)
        }

    @cached_property
    def held_out(self) -> dict[str, Tensor]:
        """Held-out windows by kind of text."""
        return {kind: windows[: self.windows // len(self.texts)] for kind, windows in self.streams[True].items()}

    def calibration(self, number: int, times: int = 1) -> Tensor:
        """Return windows (samples, seqlen) of a calibration, or so many times as many, of which they are the first."""
        if times > 1:
            return torch.cat([self.calibration(number + each) for each in range(times)])
        count = self.samples // len(self.streams[False])
        places = torch.arange(number * count, (number + 1) * count)
        parts = [windows[places % len(windows)] for windows in self.streams[False].values()]
        return torch.stack(parts, 1).flatten(0, 1).contiguous()

    @cached_property
    def calibrations(self) -> int:
        """Number of calibrations that share no window."""
        return min(map(len, self.streams[False].values())) // (self.samples // len(self.streams[False]))

    def digest(self, number: int) -> str:
        """Return first digits of the SHA-256 of a calibration and the held-out windows."""
        tensors = [self.calibration(number), *self.held_out.values()]
        return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()[:8]

    @cached_property
    def mixes(self) -> tuple[str, ...]:
        """GGUF's mixes, if blocks of 256 fit the layers; llama.cpp falls back to other types where they do not."""
        return MIXES if AutoConfig.from_pretrained(self.folder).hidden_size % 256 == 0 else ()


def subjects(assets: Path, study: Path, mixture: Path | None) -> dict[str, Subject]:
    """Return the models by name; the mixture of experts, which tools/train_model.py makes, only if its folder is given."""
    stories, valid = (assets / "text" / f"tinystories_{name}.txt" for name in ("train_2m", "valid"))
    web = assets / "text" / "c4_train_128.txt"
    python = Text(kind="python", calibration=CALIBRATION, held_out=HELD_OUT)
    mix = (
        python,
        Text(kind="stories", calibration=stories, held_out=valid, separator=SEPARATOR),
        Text(kind="web", calibration=web, held_out=web, first=800_000, last=240_000, separator=SEPARATOR),
    )
    raw = (Text(kind="stories", calibration=stories, held_out=valid),)
    short = {"samples": 64, "windows": 96, "seqlen": 256}
    long = {"samples": 48, "windows": 48, "seqlen": 512}
    baby = assets / "models" / "babyllama105"
    known = [
        Subject(name="study", folder=study, texts=mix, group_size=128, trained=3, **long),
        Subject(name="demo", folder=MODEL, texts=(python,), group_size=128, trained=3, **short),
        Subject(name="babyllama105", folder=baby, texts=raw, group_size=32, trained=1, **short),
    ]
    if mixture is not None:
        known.append(Subject(name="mixture", folder=mixture, texts=(python,), group_size=32, trained=1, **short))
    return {each.name: each for each in known if (each.folder / "config.json").exists()}


def published_subjects(folder: Path, assets: Path) -> dict[str, Subject]:
    """Return the models that tools/published_models.py made in a folder, by name."""
    known = [published_subject(folder / name, assets) for name in PUBLISHED]
    return {each.name: each for each in known if (each.folder / "config.json").exists()}


def published_subject(folder: Path, assets: Path) -> Subject:
    """Return a model with text for calibration from the beginning of C4; held out are WikiText-2 and the end of C4."""
    web, wiki = assets / "text" / "c4_train_128.txt", assets / "text" / "wikitext2_test.txt"
    texts = (
        Text(kind="wikitext2", calibration=None, held_out=wiki),
        Text(kind="c4", calibration=web, held_out=web, first=870_000, last=165_000, separator=SEPARATOR),
    )
    sizes = {"samples": 64, "windows": 128, "seqlen": 512, "group_size": 64, "trained": 0}
    return Subject(name=folder.name, folder=folder, texts=texts, first_token="auto", **sizes)
