"""What tuning gains where runtimes round inputs: KL to the original before and after, as computed and of the weights alone.

    python benchmarks/quality/tuned_inputs.py ROWS.jsonl --models study demo --grids nvfp4 mxfp4 --calibrations 0 1 2
    python benchmarks/quality/tuned_inputs.py ROWS.jsonl --show

Each row is one calibration of one model: the solve has its tokens, tuning five times as many, of which these are the first.
Cells that the file holds already are left out. Models, texts and held-out windows are those of `subjects.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from subjects import PUBLISHED, Subject, published_subject, subjects
from torch import Tensor

import nearplane

MORE = 5  # times the tokens of a calibration
INPUTS = {"nvfp4": "fp4", "mxfp4": "fp4", "fp8": "fp8", "int8": "int8"}


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def texts_of(subject: Subject, calibration: int, samples: int) -> Tensor:
    """Return (MORE * samples, seqlen) windows, of which the first are those of the calibration."""
    times = -(-MORE * samples // subject.samples)
    if (calibration + 1) * times > subject.calibrations:
        raise SystemExit(
            f"{subject.name}: the text has no calibration {calibration} that shares no window with another"
        )
    return subject.calibration(calibration * times, times)[: MORE * samples]


def measured(subject: Subject, grid: str, calibration: int, samples: int, held_out: int) -> dict:
    """Return the row of one cell."""
    tokens = texts_of(subject, calibration, samples)
    held = torch.cat([windows[: held_out // len(subject.held_out)] for windows in subject.held_out.values()])
    row: dict = {
        "model": subject.name,
        "grid": grid,
        "inputs": INPUTS[grid],
        "calibration": calibration,
        "samples": samples,
    }
    with tempfile.TemporaryDirectory() as place:
        for name in ("solved", "tuned"):
            began, out = time.process_time(), Path(place) / name
            if name == "solved":
                words = {"grid": grid, "activations": INPUTS[grid], "calibration": tokens[:samples]}
                record = nearplane.quantize(subject.folder, out, **words, progress=False)
            else:
                solved = Path(place) / "solved"
                record = nearplane.tune(
                    solved, out, against=subject.folder, calibration=tokens, samples=len(tokens), progress=False
                )
            took = time.process_time() - began
            found = nearplane.evaluate(out, held, against=subject.folder, activations=True, progress=False)
            assert found.computed is not None, "activations=True measures a second time"
            row[name] = {"computed": found.computed.kl, "weights": found.kl, "cpu": round(took)}
        assert record.tuning is not None, "tune records itself"
        row |= {"steps": record.tuning.steps, "kept": record.tuning.kept, "codes": record.tuning.codes}
    return row


def shown(rows: list[dict]) -> None:
    """Print a table with the mean over calibrations, and the standard error of the ratio."""
    print("| model | format | inputs | solved | tuned | ratio | weights alone: solved, tuned | CPU s: solve, tune |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for key in dict.fromkeys((row["model"], row["grid"], row["inputs"], row["samples"]) for row in rows):
        some = [row for row in rows if (row["model"], row["grid"], row["inputs"], row["samples"]) == key]
        means = {
            (name, what): sum(row[name][what] for row in some) / len(some)
            for name in ("solved", "tuned")
            for what in ("computed", "weights", "cpu")
        }
        ratios = torch.tensor([row["tuned"]["computed"] / row["solved"]["computed"] for row in some])
        error = f" ± {float(ratios.std() / len(some) ** 0.5):.3f}" if len(some) > 1 else ""
        print(
            f"| {' | '.join(key[:3])} | {means['solved', 'computed']:.4g} ({len(some)}) | {means['tuned', 'computed']:.4g} | "
            f"**{float(ratios.mean()):.3f}**{error} | {means['solved', 'weights']:.3g}, {means['tuned', 'weights']:.3g} | "
            f"{means['solved', 'cpu']:.0f}, {means['tuned', 'cpu']:.0f} |"
        )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("rows", type=Path)
    asked.add_argument("--models", nargs="+", default=["study", "demo"])
    asked.add_argument("--grids", nargs="+", default=["nvfp4", "mxfp4"], choices=INPUTS)
    asked.add_argument("--calibrations", nargs="+", type=int, default=[0])
    asked.add_argument("--samples", type=int, help="windows of the solve; default: those of the subject")
    asked.add_argument("--held-out", type=int, default=48)
    asked.add_argument("--assets", type=Path, default=Path("../shared/assets"))
    asked.add_argument("--study", type=Path, default=Path(__file__).parents[1] / "models" / "study")
    asked.add_argument("--published", type=Path, help="folder that tools/published_models.py made")
    asked.add_argument("--show", action="store_true")
    given = asked.parse_args()
    if given.show:
        shown(rows_of(given.rows))
        return
    for model in given.models:
        if model in PUBLISHED:
            subject = published_subject(given.published / model, given.assets)
        else:
            subject = subjects(given.assets, given.study, None)[model]
        samples = given.samples or subject.samples
        for grid in given.grids:
            for calibration in given.calibrations:
                cell = {"model": model, "grid": grid, "calibration": calibration, "samples": samples}
                if any(cell.items() <= row.items() for row in rows_of(given.rows)):
                    continue
                row = measured(subject, grid, calibration, samples, given.held_out)
                with given.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
