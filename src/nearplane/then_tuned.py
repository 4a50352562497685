"""Quantize, then tune, as `--tune` does: what is solved lies beside OUT until OUT holds what tuning made of it.

    OUT.untuned           what was solved, a whole checkpoint; where tuning fails or is stopped, the same command goes on with it
    OUT.untuned.json      the hashes of the model's files that it was solved for
    OUT.untuned.lock      locked by the run that does all this

Once OUT is whole, OUT.untuned is deleted; where a run is stopped before it has done that, the next one does.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nearplane.alone import alone
from nearplane.beginning import Options
from nearplane.errors import NearplaneError, RecipeError
from nearplane.formats.container import check_apart
from nearplane.formats.unfinished import Unfinished
from nearplane.jsonfile import read_object
from nearplane.notebook import told
from nearplane.places import UNFINISHED
from nearplane.pretrained import find_folder
from nearplane.recipe import Recipe
from nearplane.record import RunRecord, read_record, versions
from nearplane.shards import INCOMPLETE, refuse_unfinished
from nearplane.tune import tune
from nearplane.wholefile import write_whole

DONE = "This checkpoint was tuned, and is being deleted.\n"  # what is marked so may be deleted
NAMED = 3  # differences that a refusal spells out

log = logging.getLogger(__name__)


def then_tuned(
    quantize: Callable[[str, Path, Recipe, Options], RunRecord],
    folder: str,
    out: Path,
    recipe: Recipe,
    options: Options,
) -> RunRecord:
    """Quantize into OUT.untuned, tune that into `out`, and delete it; where tuning fails it stays, and the same command tunes it.

    Args:
        quantize: writes what is solved; told the model, the folder to write, the recipe and the options.
        folder: the model: a folder, or its name on the hub.
        out: folder to write.
        recipe: that asks for tuning.
        options: what the run is told besides.

    Raises:
        RecipeError: OUT.untuned is something else already: nobody named it, so nothing in it is replaced.
        NearplaneError: of the kind that names the cause.
    """
    solved, given = Path(f"{out.resolve()}.untuned"), options.given
    refusal = f"{out} is being written by another run. Wait until it has ended, or choose another folder."
    with alone(Path(f"{solved}.lock"), refusal):
        if _is_done(solved, out):
            _delete(solved)
        place = Unfinished(out, overwrite=options.overwrite)  # refuses now what tuning would refuse when all is solved
        model = find_folder(folder, trust_remote_code=options.trust_remote_code)
        for written in (out, place.folder):
            check_apart(written, model)
        files = told({}, {"model": model}, "", {}, options.device)
        if not _holds_something(solved):
            _solve(quantize, folder, solved, recipe, options, files)
        elif reason := _other(solved, recipe, options, files):
            raise RecipeError(
                f"{solved} is there, where the run would keep what it solves until that is tuned, and this command did not leave "
                f"it: {reason.removesuffix('.')}. Move it away or delete it, or tune it with nearplane tune."
            )
        else:
            log.info("going on with tuning: a run that was stopped left %s", solved)
        left = f"What was solved is in {solved}; the same command, or nearplane tune, goes on from there."
        try:
            record = tune(
                solved,
                out,
                against=folder,
                calibration=None if given is None else given.tokens if given.texts is None else given.texts,
                device="cuda" if options.device.type == "cuda" else "cpu",
                overwrite=options.overwrite,
                trust_remote_code=options.trust_remote_code,
                progress=options.progress,
            )
        except NearplaneError as error:
            raise type(error)(f"{error} {left}") from error
        except BaseException as error:  # stopped from outside, or out of memory
            error.add_note(left)
            raise
        _delete(solved)
    return record


def _beside(solved: Path) -> Path:
    """Return the file that says what a folder was solved for."""
    return Path(f"{solved}.json")


def _holds_something(solved: Path) -> bool:
    """Whether there is something at the place that is not an empty folder."""
    if solved.is_dir() and not solved.is_symlink():
        return any(solved.iterdir())
    return solved.is_symlink() or solved.exists()


def _solve(
    quantize: Callable[[str, Path, Recipe, Options], RunRecord],
    folder: str,
    solved: Path,
    recipe: Recipe,
    options: Options,
    files: dict[str, Any],
) -> None:
    """Quantize into `solved`, beside which lies what it is solved for; nothing lies there where nothing was written.

    With --overwrite, what a run left that was stopped and told something else is deleted.
    """
    write_whole(_beside(solved), json.dumps(files).encode())
    try:
        quantize(folder, solved, recipe, options)
    finally:
        if not solved.exists() and not Path(f"{solved}{UNFINISHED}").exists():
            _beside(solved).unlink(missing_ok=True)


def _other(solved: Path, recipe: Recipe, options: Options, files: dict[str, Any]) -> str:
    """Return why a folder is not what a run with the same model, recipe and versions solved; empty if it is."""
    try:
        refuse_unfinished(solved)
        record = read_record(solved)
        then = read_object(_beside(solved), expected="It says which model was solved")
    except NearplaneError as error:
        return str(error)
    if record.tuning is not None:
        return "it is tuned already"
    now = files | _asked(recipe, options.name, versions(), options)
    then |= _asked(record.recipe, record.source, record.versions, options) | {"device": record.device}
    if names := [name for name in {**then, **now} if then.get(name) != now.get(name)]:
        more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return f"it was solved with another value of {', '.join(names[:NAMED])}{more}"
    return ""


def _asked(recipe: Recipe, source: str, of: Any, options: Options) -> dict[str, Any]:
    kind = {"the name of the model": source, "the kind of scheme": type(recipe.scheme).__name__}
    return told(asdict(recipe), {}, "", of, options.device) | kind


def _is_done(solved: Path, out: Path) -> bool:
    """Whether a run that was stopped had nothing left to do but to delete what it solved."""
    if solved.is_symlink() or not solved.is_dir():
        return False
    with suppress(OSError, UnicodeDecodeError):
        if (solved / INCOMPLETE).read_text() == DONE:
            return True
    with suppress(NearplaneError):
        if _beside(solved).is_file():
            before, after = read_record(solved), read_record(out)
            tuning = after.tuning
            if tuning is not None and after.seconds == before.seconds + tuning.seconds:  # no other run's are
                return [layer.checksum for layer in before.layers] == [layer.checksum for layer in tuning.solved]
    return False


def _delete(solved: Path) -> None:
    """Delete what was solved, with what lies beside it; whatever is left at any moment is known by its mark."""
    try:
        write_whole(solved / INCOMPLETE, DONE.encode())
        for path in solved.iterdir():
            if path.name != INCOMPLETE:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        _beside(solved).unlink(missing_ok=True)
        shutil.rmtree(solved)
    except (OSError, NearplaneError) as error:
        log.warning("%s was tuned, and could not be deleted (%s). Delete it.", solved, error)
