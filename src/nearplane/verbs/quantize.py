"""The main path of nearplane: quantize the model in a folder into a checkpoint. Read this file first.

A model is quantized one block at a time. Its weights stay on disk. Hidden states of the original and of the quantized
network pass through the block that is in memory, and each layer is written as soon as it is solved.

The public function `quantize` is in `quantize_api.py`. A run uses these files, in this order: `planning/start.py` opens
the model and plans the run, `calibration/walk.py` yields the stages, `solve_stage.py` solves their layers,
`run.py` passes it to the checkpoint, and `formats/container.py` writes the files and renames the folder to OUT.
"""

from __future__ import annotations

from pathlib import Path

from nearplane.calibration.walk import walk
from nearplane.calibration.windows import calibration_windows, check_tokens
from nearplane.planning.folder_size import check_disk
from nearplane.planning.journal import Journal
from nearplane.planning.ledger import check_limit
from nearplane.planning.run import start_run
from nearplane.planning.solve_stage import solve_stage
from nearplane.planning.start import Job, Options, container_for, open_resolved
from nearplane.planning.tokens_in_file import check_tokens_in_file
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord


def quantize_folder(folder: str, out: Path, recipe: Recipe, options: Options) -> RunRecord:
    """Quantize the model in a folder or on the hub into the checkpoint `out`, one block at a time.

    Returns:
        The run record, which is also written to `out/nearplane.json`.

    Raises:
        NearplaneError: As for `quantize`.
    """
    model, settled = open_resolved(folder, recipe, trust_remote_code=options.trust_remote_code)  # weights stay on disk
    check_disk(out, model, settled)
    remote, overwrite, like = options.trust_remote_code, options.overwrite, options.like
    with container_for(model, settled, out, overwrite=overwrite, trust_remote_code=remote, like=like) as container:
        windows = calibration_windows(model, settled.recipe, options.given)
        check_tokens(model, settled.recipe, windows)
        check_tokens_in_file(container, model, windows)
        job = Job(model=model, asked=recipe, plan=settled, windows=windows, options=options)
        journal = Journal(container, job)  # holds the progress of a stopped run of the same job
        if (record := journal.completed()) is not None:  # all layers were written
            return check_limit(record)
        with (
            start_run(job, container, journal) as run,  # the plan of the run and its layers so far
            walk(model, settled.recipe, windows, run.setting, moments=run.plan.moments, resumed=journal) as stages,
        ):
            for stage in stages:  # a stage: layers that share one input
                run.settle(stage)  # its bit budget; without effect on plain grids
                solved = None
                while solved is None:  # only the last layers under a --size may be solved again
                    solved = run.pack(stage, solve_stage(stage, run.orders(stage)))
                stage.write(each.matrix.decode() for each in solved)  # later stages see the quantized layers
                run.add(stage, solved)  # to the run record; at the end of a block also weights and journal
                del solved  # frees the codes before the next stage
        return run.finished()  # leaving the container renames its folder to OUT
