"""The main path: a model in a folder becomes a quantized checkpoint. Read this file first.

A model is quantized one block at a time: its weights stay on disk, two activation streams (of the original and of the
quantized network) pass through the block that is in memory, and each layer is written as soon as it is solved.

What users call, `quantize`, is in `quantize_api.py`. Behind this file, in the order of a run: `planning/start.py` opens the
model and decides, `calibration/walk.py` yields stages, `matrix/solve_layer.py` solves one layer, `quantize_run.py` gives it to
the checkpoint, `formats/container.py` writes that and puts it in the place of OUT.
"""

from __future__ import annotations

from pathlib import Path

from nearplane.calibration.walk import Stage, walk
from nearplane.calibration.windows import calibration_windows, check_tokens
from nearplane.matrix.solve_layer import solve_layer
from nearplane.planning.ledger import Solved
from nearplane.planning.start import Job, Options, container_for, open_settled
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord, read_record
from nearplane.verbs.quantize_journal import Journal
from nearplane.verbs.quantize_run import Run, start_run


def quantize_folder(folder: str, out: Path, recipe: Recipe, options: Options) -> RunRecord:
    """Quantize a model that is a folder, or on the hub, into the checkpoint `out`, one block at a time.

    Returns:
        What was done and measured; also in `out/nearplane.json`.

    Raises:
        NearplaneError: see `quantize`.
    """
    model, settled = open_settled(folder, recipe, trust_remote_code=options.trust_remote_code)  # weights stay on disk
    remote, overwrite = options.trust_remote_code, options.overwrite
    with container_for(model, settled, out, overwrite=overwrite, trust_remote_code=remote) as container:  # any format
        windows = calibration_windows(model, settled, options.given)
        check_tokens(model, settled, windows)
        job = Job(model=model, asked=recipe, recipe=settled, windows=windows, options=options)
        journal = Journal(container, job.told())  # what a stopped run of the same job had done
        if container.whole:  # but for its place
            return read_record(container.folder)
        with (
            start_run(job, container, journal) as run,  # plan, ledger, record so far
            walk(model, run.recipe, windows, run.setting, moments=run.moments, resumed=journal) as stages,
        ):
            for stage in stages:  # layers that share one input
                run.settle(stage)  # what it may take; plain bits have nothing to settle
                solved = None
                while solved is None:  # once, but for the last layers of a --size
                    solved = run.pack(stage, solve_stage(stage, run))
                stage.write(each.matrix.decode() for each in solved)  # the next stage sees quantized layers
                run.add(stage, solved)  # record, journal; at the end of a block its shard
                del solved  # its codes, before the next stage runs
        return run.finished()  # leaving the container writes record and config.json, then renames the folder to OUT


def solve_stage(stage: Stage, run: Run) -> list[Solved]:
    """Solve the layers of a stage, each by its scheme and on what calibration saw of its inputs."""
    tasks = zip(stage.layers, run.tasks(stage), strict=True)
    return [Solved(layer, *solve_layer(task)) for layer, task in tasks]
