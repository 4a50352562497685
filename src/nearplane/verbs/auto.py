"""auto(): chooses a way to quantize a model, quantizes, measures on held-out text, and writes card and report.

Its steps are other verbs, each with a command of its own: `suggest`, `quantize`, `evaluate`, `card` and `report`. A call that is
repeated after it was stopped goes on: `quantize` with its last block, and a complete checkpoint is measured.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nearplane.calibration.hub_texts import hub_fault
from nearplane.calibration.text_files import SELF
from nearplane.calibration.windows import default_seqlen, samples_of
from nearplane.errors import FormatError, ModelError, RecipeError
from nearplane.models.described import open_described
from nearplane.models.kinds import InputKind, continues_text, input_kind
from nearplane.models.model import Model
from nearplane.planning.estimate import estimated
from nearplane.planning.modes import flags
from nearplane.planning.request import check_request, resolved
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.runtimes import Runtime
from nearplane.record.evaluation_table import read_evaluation
from nearplane.record.record import RunRecord
from nearplane.record.record_file import read_record
from nearplane.record.uses import Named, typed, uses
from nearplane.record.words import shortage
from nearplane.system.arguments import takes
from nearplane.system.device import Device
from nearplane.system.files import write_whole
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import RECORD
from nearplane.system.progress import duration
from nearplane.system.sizes import size_text
from nearplane.verbs.auto_request import AutoRequest
from nearplane.verbs.auto_way import way_of
from nearplane.verbs.card import card
from nearplane.verbs.evaluate import evaluate
from nearplane.verbs.evaluation_result import Evaluation
from nearplane.verbs.quantize import quantize
from nearplane.verbs.report import is_report, write_report

SAMPLES, SEQLEN = 16, 512  # of the held-out text
FEWER = {"samples": 64, "seqlen": 512}
LONG_RUN = 600.0  # seconds from which it is said how a run gets shorter
# fields of a recipe that follow from the choice of a mix
CHOSEN = ("scheme", "activations", "layers", "ignore", "allocate")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What `auto` will do.

    Args:
        out: Folder to write.
        options: Options of `quantize`.
        text, seqlen: Held-out text to measure on, and tokens per window of it.
        commands: The same as commands: quantize, evaluate, card and report.
        lines: What is done and why, in sentences.
    """

    out: Path
    options: Mapping[str, Any]
    text: str
    seqlen: int
    commands: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Result of `auto`.

    Args:
        out: The checkpoint.
        record: Its run record.
        evaluation: Figures on the held-out text.
        report: The HTML page.
        serve: Command or call that uses the checkpoint.
    """

    out: Path
    record: RunRecord
    evaluation: Evaluation
    report: Path
    serve: str


@takes(AutoRequest)
def auto(request: AutoRequest) -> Done:
    """Quantize a model in the way that suits a memory, a size or a number of bits, and measure the result.

    Raises:
        NearplaneError: Nothing fits, or a step fails; the same call then goes on.
    """
    return carry_out(request, choose(request))


def choose(request: AutoRequest) -> Choice:
    """Return what `auto` will do, from the model's config.json and this machine.

    Raises:
        RecipeError: Nothing fits, the runtime does not take the model, or the folder is in use.
        ModelError: config.json is missing, or transformers cannot build a network from it.
    """
    request.check()
    described = open_described(str(request.model), trust_remote_code=request.trust_remote_code)
    found = way_of(request)
    options, why = dict(found.options), found.why
    text, texts = _texts(request, described)
    options |= {name: value for name in ("samples", "seqlen") if (value := getattr(request, name)) is not None}
    options |= {} if text is None else {"calibration": text}
    options |= {} if request.runtime is None else {"runtime": request.runtime}
    plan = resolved(described, Recipe.from_spellings(**options))
    check_request(described, plan)
    name = (
        Path(str(request.model)).resolve().name
        if Path(request.model).exists()
        else str(request.model).rpartition("/")[2]
    )
    out = Path(request.out) if request.out is not None else Path(f"{name}-{found.name}")
    _check_beside(out)
    if not is_done(out, request, options):
        Unfinished(out, sources=[Path(request.model)] if Path(request.model).exists() else [])
    device = Device.named(request.device)
    about = estimated(described, plan, device)
    time = "the first block tells the time" if about.seconds is None else f"at least {duration(about.seconds)}"
    if about.seconds is not None and about.seconds > LONG_RUN and request.samples is None:
        few = estimated(described, resolved(described, Recipe.from_spellings(**options | FEWER)), device)
        words = " ".join(f"--{option} {value}" for option, value in FEWER.items())
        time += f" ({words}: at least {duration(few.seconds or 0)}, and it loses more)"
    calibration = plan.recipe.calibration
    length, count = default_seqlen(described, calibration), samples_of(described, calibration)
    tokens = f"{about.tokens:,} tokens of {_called(text)}"
    if text == SELF and (fault := hub_fault()):
        tokens += f" ({fault})"
    widest = max(described.layers, key=lambda layer: layer.shape[1])
    if (too_few := shortage(count, length, count, widest.name, widest.shape[1])) is not None:
        tokens += f". {too_few}"
    seqlen = min(SEQLEN, length)
    return Choice(
        out=out,
        options=options,
        text=texts,
        seqlen=seqlen,
        commands=_commands(request, out, options, texts, seqlen),
        lines=(
            f"way: {found.words}, {why}",
            f"calibration: {tokens}",
            f"this run: about {size_text(about.bytes)} of memory on {device}, {time}",
            f"result: {found.size}, in {out}",
            f"then: measured on {_called(texts)}, with a model card and a report",
        ),
    )


def carry_out(request: AutoRequest, choice: Choice) -> Done:
    """Do what was chosen, step by step; a checkpoint that is complete is not made again."""
    out, trust = choice.out, request.trust_remote_code
    if is_done(out, request, choice.options):
        log.info("%s is complete; it is measured", out)
        record = read_record(out)
    else:
        record = quantize(
            request.model,
            out,
            **choice.options,
            device=request.device,
            memory=request.run_memory,
            trust_remote_code=trust,
            progress=request.progress,
        )
    evaluation = evaluate(
        out,
        choice.text,
        against=request.model,
        samples=SAMPLES,
        seqlen=choice.seqlen,
        device=request.device,
        trust_remote_code=trust,
        progress=request.progress,
    )
    figures = beside(out, "evaluation.json")
    write_whole(figures, json.dumps(asdict(evaluation), indent=1).encode())
    card(out, evaluation=figures)
    page = write_report(out)
    return Done(
        out=out, record=record, evaluation=evaluation, report=page, serve=_serving(record, out, request.runtime)
    )


def is_done(out: Path, request: AutoRequest, options: Mapping[str, Any]) -> bool:
    """Return whether a folder is what `quantize` writes with these options."""
    if not (out / RECORD).is_file():
        return False
    try:
        record = read_record(out)
    except FormatError:
        return False
    asked = Recipe.from_spellings(**options)
    samples = asked.calibration.samples or record.recipe.calibration.samples  # the default is a number in the record
    asked = replace(asked, calibration=replace(asked.calibration, samples=samples))
    made = record.recipe.grouped(layer.in_features for layer in record.layers)
    if asked.mix is not None and record.mix is not None and record.mix.is_of(asked.mix):
        asked = replace(asked, mix=None, **{name: getattr(made, name) for name in CHOSEN})
    return record.source == str(request.model) and asked.grouped(layer.in_features for layer in record.layers) == made


def _check_beside(out: Path) -> None:
    """Refuse files of somebody else where the evaluation and the report will be written, before the work.

    Raises:
        RecipeError: The message names the file.
    """
    figures, page = beside(out, "evaluation.json"), beside(out, "report.html")
    try:
        foreign = figures if figures.exists() and figures.stat().st_size and not read_evaluation(figures) else None
    except FormatError:
        foreign = figures
    if foreign is None and page.exists() and not is_report(page):
        foreign = page
    if foreign is not None:
        raise RecipeError(f"{foreign} exists and was not written by nearplane. Move it, or name another OUT.")


def beside(out: Path, name: str) -> Path:
    """Return the path of a file beside a folder: OUT-name."""
    return out.absolute().with_name(f"{out.name}-{name}")


def _texts(request: AutoRequest, model: Model) -> tuple[str | None, str]:
    """Return the calibration text (None: the default of `quantize`) and the held-out text.

    Raises:
        RecipeError: The hub cannot be read, and the network does not write text itself.
    """
    hub, network = not hub_fault(), model.network
    text, held_out = request.calibration, request.text
    if (
        not continues_text(network)
        and (text is None or held_out is None)
        and not (hub and input_kind(network) is InputKind.TEXT)
    ):
        raise RecipeError(
            f"{type(network).__name__} does not write text itself, and there is no other text by default. Pass --calibration and "
            f"--text with .txt or .jsonl files."
        )
    return (
        (None if hub else SELF) if text is None else str(text),
        ("wikitext2" if hub else SELF) if held_out is None else str(held_out),
    )


def _called(text: str | None) -> str:
    """Return how a text is called in a sentence."""
    if text is None:
        return "FineWeb-Edu from the Hugging Face hub"
    if text == SELF:
        return "text that the network writes itself"
    return text


def _commands(request: AutoRequest, out: Path, options: Mapping[str, Any], text: str, seqlen: int) -> tuple[str, ...]:
    """Return the steps as commands."""
    common = ["--device", request.device] * (request.device != "auto")
    common += ["--trust-remote-code"] * request.trust_remote_code
    limit = [] if request.run_memory is None else ["--memory", str(request.run_memory)]
    model, folder, figures = typed(str(request.model)), typed(str(out)), typed(f"{out}-evaluation.json")
    return (
        f"nearplane quantize {model} {folder} {' '.join([flags(options), *limit, *common])}",
        f"nearplane evaluate {folder} --against {model} --text {typed(text)} --samples {SAMPLES} --seqlen {seqlen} --json"
        f"{''.join(f' {word}' for word in common)} > {figures}",
        f"nearplane card {folder} --evaluation {figures}",
        f"nearplane report {folder}",
    )


def _serving(record: RunRecord, out: Path, runtime: Runtime | None) -> str:
    """Return the command or call that uses a checkpoint, for the runtime that was asked for if there is one."""
    found = uses(replace(record, recipe=replace(record.recipe, runtime=runtime)), Named.of(out))
    if not found:
        raise ModelError(f"{out}: no program is known that reads it.")
    return found[0].phrase
