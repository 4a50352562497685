"""Methods of the tables: each makes a network in memory from a model, and each measure is one number of such a network.

The rows of Chen et al. are those of `nearplane compare`. Added are the orders of its section on tr(D):

    gptq-huffman    natural order, as `compare` has it
    act-order       the same with the columns of largest diag(H) first
    min-pivot       the same with the smallest remaining pivot at each step, Algorithm 4 of the paper

and those of lectures on quantization, with one step a parameter tensor or a row:

    absmax, zero-point    every parameter, embeddings too, by its largest magnitude, or by its range
    rtn-rows, gptq-rows   the layers on asymmetric grids over the range of each row, rounded to nearest or by GPTQ
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane import evaluate, evaluate_tasks, quantize
from nearplane.calibration.windows import samples_of
from nearplane.lattice.factor import Order
from nearplane.models.model import open_model
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.recipe.scheme import Solver
from nearplane.recipe.schemes import GridScheme
from nearplane.record.remarks import missed
from nearplane.system.device import Device
from nearplane.theory.vectors import absmax_codes, zero_point_codes
from nearplane.verbs.compare import ORIGINAL_METHOD
from nearplane.verbs.compare_recipes import HUFFMAN, recipe_for
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.hptq import hptq_recipe, huffman_coded

sys.path.append(str(Path(__file__).parents[1] / "studies"))
from orders import Case, entry, observations

ORDERS: dict[str, Order] = {"gptq-huffman": "natural", "act-order": "activation", "min-pivot": "pivoted"}
ROWS: dict[str, Solver] = {"rtn-rows": "round-to-nearest", "gptq-rows": "nearest-plane"}
TRACE = "trace"
DAMP = 0.01  # of the mean diagonal of H, as GPTQ has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of lm-eval.

    Args:
        name: Name of the task.
        shots: Number of examples before the question.
        folder: Folder with the task's files; None: lm-eval knows the task, and fetches its data.
        limit: Number of questions; None: all.
    """

    name: str
    shots: int
    folder: Path | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with its texts.

    Args:
        name: Name in the tables.
        paper: The model of the paper that this one is, or whose place it takes.
        source: Folder or hub id.
        calibration: Settings of calibration.
        texts: {measure: text}, as `evaluate` takes it.
        tasks: {measure: task}.
        windows: Number of windows of each text; None: all.
        seqlen: Tokens per window; None: as in calibration.
    """

    name: str
    paper: str
    source: str
    calibration: Calibration
    texts: Mapping[str, str | Path]
    tasks: Mapping[str, Task]
    windows: int | None = None
    seqlen: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A network in memory with the bits and bytes that it would have on disk."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rate: float
    bytes: int
    seconds: float = 0.0
    note: str = ""


def quantized(subject: Subject, method: str, bits: float | None, folder: Path, device: str) -> Quantized:
    """Quantize a model by a method, and load the result; "original" loads it as it is.

    Args:
        subject: The model and its texts.
        method: "original", a method of `compare`, or one of those above.
        bits: Bits per weight; None for the original.
        folder: Folder for the checkpoint of a method that writes one. A run that was stopped is resumed there.
        device: Device to compute on.
    """
    began, place = time.perf_counter(), Device.named(device).place
    opened = open_model(subject.source)
    if method == ORIGINAL_METHOD or bits is None:
        network, tokenizer = load_dense(subject.source, place)
        size = sum(path.stat().st_size for path in opened.folder.glob("*.safetensors"))
        return Quantized(network=network, tokenizer=tokenizer, rate=8.0 * opened.dtype.itemsize, bytes=size)
    if method in ("absmax", "zero-point"):
        network, tokenizer = load_dense(subject.source, place)
        size = round_parameters(network, method, int(bits))
        return Quantized(network=network, tokenizer=tokenizer, rate=float(bits), bytes=size)
    recipe, note = recipe_of(method, bits, opened.layers, subject.calibration)
    if method in (*HUFFMAN, *ORDERS):
        coded = huffman_coded(subject.source, opened, recipe, device=device)
        seconds = time.perf_counter() - began
        return Quantized(
            network=coded.network, tokenizer=coded.tokenizer, rate=coded.rate, bytes=coded.bytes, seconds=seconds
        )
    record = quantize(subject.source, folder, recipe, device=device)
    network, tokenizer = load_dense(folder, place)
    shutil.rmtree(folder)
    return Quantized(
        network=network, tokenizer=tokenizer, rate=record.rate, bytes=record.bytes, seconds=record.seconds,
        note="; ".join(filter(None, (note, missed(record)))),
    )  # fmt: skip


def recipe_of(method: str, bits: float, layers: Any, calibration: Calibration) -> tuple[Recipe, str]:
    """Return the recipe of a method and a note on any deviation; see `quantized`."""
    if method in ROWS:
        scheme = GridScheme(
            bits=bits, group_size=None, symmetric=False, scale="minmax", order="natural", solver=ROWS[method],
            correct=False, polish=0, rounds=0,
        )  # fmt: skip
        return Recipe(scheme=scheme, format="gptq_v2", allocate="uniform", calibration=calibration), ""
    if method not in ORDERS:
        return recipe_for(method, bits, layers, calibration)  # type: ignore[arg-type]
    recipe = hptq_recipe(bits, calibration)
    return replace(recipe, scheme=replace(recipe.scheme, order=ORDERS[method])), ""


@torch.no_grad()
def round_parameters(network: PreTrainedModel, method: str, bits: int) -> int:
    """Round every parameter of a network to the grid of its tensor, and return the bytes of all codes and steps."""
    size = 0
    for parameter in network.parameters():
        if method == "absmax":
            codes, scale = absmax_codes(parameter, bits)
            values = codes * scale
        else:
            codes, scale, zero = zero_point_codes(parameter, bits)
            values = (codes - zero) * scale
        parameter.copy_(values)
        size += bits * parameter.numel() // 8 + 4
    return size


def measured(subject: Subject, quantized: Quantized, measure: str, device: str) -> tuple[float, float | None]:
    """Return a perplexity, or the accuracy in a task in percent, and its standard error if it has one."""
    if (task := subject.tasks.get(measure)) is not None:
        return accuracy(quantized, task)
    evaluation = evaluate(
        quantized.network, subject.texts[measure], tokenizer=quantized.tokenizer, samples=subject.windows,
        seqlen=subject.seqlen or subject.calibration.seqlen, device=device,
        protocol="papers",
    )  # fmt: skip
    assert evaluation.perplexity is not None, "these models predict tokens"
    return evaluation.perplexity, None


def accuracy(quantized: Quantized, task: Task) -> tuple[float, float | None]:
    """Return the accuracy in a task and its standard error, in percent."""
    found = evaluate_tasks(
        quantized.network, [task.name], tokenizer=quantized.tokenizer, fewshot=task.shots, limit=task.limit,
        task_path=task.folder,
    )  # fmt: skip
    score = next(score for score in found if score.metric == "acc")
    return 100 * score.value, None if score.error is None else 100 * score.error


def trace_ratios(subject: Subject) -> dict[str, float]:
    """Return for each order the mean over layers of tr(D) relative to the natural order, with the inputs of the original.

    D is the diagonal of `H[p][:, p] = U D U^T`; the bound of the paper's error is `1/4 s^2 tr(D)` for one step `s`.
    """
    opened, calibration = open_model(subject.source), subject.calibration
    text: Any = calibration.calibration  # None: the default data set
    case = Case(folder=opened.folder, calibration=text, held_out=Path(), scored=(0, 0), tuning=(0, 0), group_size=None)
    entries = [
        entry(observed, DAMP)
        for observed in observations(case, samples_of(opened, calibration), calibration.seqlen or seqlen_of(subject))
    ]
    layers = [each for each in entries for _ in range(each.layers)]
    return {
        name: fmean(each.traces[order] / each.traces["natural"] for each in layers) for name, order in ORDERS.items()
    }


def seqlen_of(subject: Subject) -> int:
    """Return the length of windows where none is given: 2,048, or the model's positions if fewer."""
    return min(2048, open_model(subject.source).positions or 2048)
