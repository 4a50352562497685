"""Measuring the missing cells of tables, each method once, whatever fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kept_cells import Cell, Cells, Key
from methods import TRACE, Quantized, Subject, measured, quantized, trace_ratios

from nearplane.record.record import versions
from nearplane.verbs.compare import content_of


def run(subjects: Sequence[Subject], keys: Sequence[Key], cells: Cells, folder: Path, device: str) -> None:
    """Measure the missing cells. All measures of one method at some bits follow one quantization.

    A cell that cannot be measured gets the reason, whatever it is: data that is not there, too little memory.
    """
    named = {subject.name: subject for subject in subjects}
    groups: dict[tuple[str, str, float | None], list[Key]] = {}
    for key in cells.missing(list(keys)):
        method = TRACE if key.measure == TRACE else key.method
        groups.setdefault((key.model, method, key.bits), []).append(key)
    for number, ((model, method, bits), group) in enumerate(groups.items(), 1):
        print(f"[{number}/{len(groups)}] {model} {method} {'' if bits is None else f'{bits:g}'}".rstrip(), flush=True)
        subject = named[model]
        try:
            if method == TRACE:
                ratios = trace_ratios(subject)
                for key in group:
                    cells.add(Cell(key=key, value=ratios[key.method]))
                continue
            made = quantized(subject, method, bits, folder / "checkpoints" / f"{subject.name}-{method}-{bits}", device)
        except Exception as error:
            for key in group:
                cells.add(Cell(key=key, reason=reason_of(error)))
            continue
        for key in group:
            cells.add(_cell(key, subject, made, device))
        del made


def _cell(key: Key, subject: Subject, made: Quantized, device: str) -> Cell:
    """Measure one cell, or return it with the reason why it has no figure."""
    facts = {"rate": made.rate, "bytes": made.bytes, "seconds": round(made.seconds, 1), "note": made.note}
    try:
        value, error = measured(subject, made, key.measure, device)
    except Exception as failure:
        return Cell(key=key, reason=reason_of(failure), **facts)
    return Cell(key=key, value=value, error=error, **facts)


def reason_of(error: Exception) -> str:
    """Return the first line of an error, with its type where it is not ours."""
    message = str(error).strip().split("\n")[0]
    known = type(error).__module__.startswith("nearplane")
    return message if known else f"{type(error).__name__}: {message}"


def inputs_of(subjects: Sequence[Subject]) -> dict[str, object]:
    """Return all that cells depend on except their keys."""
    inputs: dict[str, object] = {"versions": versions()}
    for subject in subjects:
        paths = filter(None, [*subject.texts.values(), subject.calibration.calibration])
        inputs[subject.name] = {
            "source": subject.source, "calibration": asdict(subject.calibration), "windows": subject.windows,
            "texts": [content_of(Path(path)) for path in paths],
            "tasks": [f"{task.name} {task.shots} {task.limit}" for task in subject.tasks.values()],
        }  # fmt: skip
    return inputs
