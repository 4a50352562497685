"""Models, texts and questions that take the place of Qwen3's, so that every line of the tables runs without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from methods import Subject, Task

from nearplane.demo import CALIBRATION, HELD_OUT, MODEL, SEQLEN
from nearplane.recipe.recipe import Calibration

sys.path.append(str(Path(__file__).parents[1] / "quality"))
from continuations import TASK, documents
from subjects import published_subject

STUDY = Path(__file__).parents[1] / "models" / "study"
WINDOWS = 8  # of calibration and of each text
QUESTIONS, PASSAGE = 32, 300  # of a task, and letters of a question
HELD_OUT_BYTES = 240_000  # at the end of c4_train_128.txt, with which no model here was trained


def offline_subjects(
    keep: Path, assets: Path | None, measures: Sequence[str], tasks: Mapping[str, Task]
) -> list[Subject]:
    """Return the models of the repository and of `assets` in the places of Qwen3's, by size.

    Args:
        keep: Folder for the texts and questions that are made here.
        assets: Folder with models/babyllama105, models/stories260K and text/, or None.
        measures: Names of two texts; each gets a different part of held-out text.
        tasks: Tasks whose number of shots is taken over; the questions are made from held-out text.
    """
    parts = halves(HELD_OUT.read_text(), keep / "heldout", measures)
    calibration = CALIBRATION
    if assets is not None:
        corpus = (assets / "text" / "c4_train_128.txt").read_bytes()[-HELD_OUT_BYTES:].decode(errors="ignore")
        (keep / "c4.txt").write_text(corpus.partition("<|endoftext|>")[2])  # the first document is cut
        parts = dict(zip(measures, (assets / "text" / "wikitext2_test.txt", keep / "c4.txt"), strict=True))
    local = questions(HELD_OUT.read_text(), keep / "tasks", tasks)
    subjects = [_subject("demo", "Qwen/Qwen3-8B", MODEL, calibration, parts, local)]
    if STUDY.is_dir():
        subjects.append(_subject("study", "Qwen/Qwen3-14B", STUDY, calibration, parts, local))
    if assets is not None:
        stories = assets / "text" / "tinystories_valid.txt"
        parts = halves(stories.read_text(), keep / "stories", measures)
        calibration = assets / "text" / "tinystories_train_2m.txt"
        for name, paper in (("babyllama105", "Qwen/Qwen3-1.7B"), ("stories260K", "Qwen/Qwen3-0.6B")):
            subjects.append(_subject(name, paper, assets / "models" / name, calibration, parts, local))
    return subjects


def local_subjects(
    keep: Path, models: Sequence[Path], assets: Path, measures: Sequence[str], samples: int, windows: int | None
) -> list[Subject]:
    """Return models of folders, with texts of `assets` in the places of those from the hub.

    Calibration has the first windows of C4 that the tables of quality have, and held-out text is what they measure on.

    Args:
        keep: Folder for the parts of C4 that are made here, documents on lines of their own.
        models: Folders of models.
        assets: Folder with text/.
        measures: Names of WikiText-2 and C4.
        samples: Number of windows for calibration.
        windows: Number of windows of each text; None: those of the tables of quality.
    """
    subjects = []
    for folder in models:
        known = published_subject(folder, assets)
        parts = {held: keep / f"c4-{'held-out' if held else 'calibration'}.jsonl" for held in (False, True)}
        for held, path in parts.items():
            text = next(text for text in known.texts if text.kind == "c4")
            path.write_text("".join(f"{json.dumps({'text': each})}\n" for each in text.read(held_out=held)))
        wiki = assets / "text" / "wikitext2_test.txt"
        calibration = Calibration(calibration=str(parts[False]), samples=samples, seqlen=known.seqlen)
        subjects.append(
            Subject(
                name=folder.name, paper=folder.name, source=str(folder), calibration=calibration, tasks={},
                texts=dict(zip(measures, (wiki, parts[True]), strict=True)), windows=windows or known.windows // 2,
            )
        )  # fmt: skip
    return subjects


def _subject(
    name: str, paper: str, source: Path, calibration: Path, texts: Mapping[str, Path], tasks: Mapping[str, Task]
) -> Subject:
    return Subject(
        name=name, paper=paper, source=str(source), texts=texts, tasks=tasks, windows=WINDOWS,
        calibration=Calibration(calibration=str(calibration), samples=WINDOWS, seqlen=SEQLEN, first_token="none"),
    )  # fmt: skip


def halves(text: str, folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Write equal parts of a text as files, and return {name: file}."""
    folder.mkdir(parents=True, exist_ok=True)
    size, paths = len(text) // len(names), {}
    for number, name in enumerate(names):
        paths[name] = folder / f"part-{number + 1}.txt"
        paths[name].write_text(text[number * size : (number + 1) * size])
    return paths


def questions(text: str, folder: Path, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Write a task of lm-eval in the place of each task: which of four continuations follows a passage of the text?"""
    folder.mkdir(parents=True, exist_ok=True)
    local = {}
    for seed, (measure, task) in enumerate(tasks.items()):
        name = f"continuations_{measure}"
        rows = folder.resolve() / f"{name}.jsonl"
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in documents(text, QUESTIONS, PASSAGE, seed)))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=json.dumps(str(rows))))
        local[measure] = Task(name=name, shots=task.shots, folder=folder)
    return local
