"""The model card of a checkpoint, README.md for a model hub: metadata as YAML, then text, from its run record.

The last line of a card has the SHA-256 of the text before it, by which a card that a user changed is told from one that
nearplane may replace. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from nearplane.number_formats import BlockFormat, NumberFormat
from nearplane.recipe.recipe import Recipe
from nearplane.record.evaluation_table import evaluation_tables
from nearplane.record.record import RunRecord
from nearplane.record.uses import Named, pipeline_tag, uses, uses_of_dense
from nearplane.record.words import (
    as_computed,
    by_source,
    calibrated,
    degenerate,
    divergence,
    exceeding,
    few_tokens,
    for_one_program,
    left,
    losses,
    rounded_inputs,
)
from nearplane.system.sizes import counted, size_text

TAKEN = ("license", "license_name", "license_link", "language", "datasets", "tags")  # from the original's card
KEYS = ("base_model", "base_model_relation", "library_name", "pipeline_tag", *TAKEN)  # all keys, in this order
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FRONT_MATTER = re.compile(r"---\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
SEAL = "<!-- Written by nearplane. SHA-256 of the text above: {} -->\n"
SEALED = re.compile(r"(.*)<!-- Written by nearplane\. SHA-256 of the text above: ([0-9a-f]{64}) -->\n", re.DOTALL)
MAX_VALUES, MAX_LETTERS = 100, 300  # of a key that is taken over
LOCAL_FOLDER = re.compile(r"\A(?:[A-Za-z]:)?[./~\\].*[/\\]")  # before the name of a text, which alone is told
FOLDER = "FOLDER"  # in commands, as a card does not know where it lies


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a card tells of the original model besides the run record.

    Args:
        config: config.json of the original or of the checkpoint.
        metadata: Metadata of the original's card, as `front_matter` reads it.
        base: Hub id of the original; None: as `hub_id` knows it.
        chat: Whether its tokenizer has a chat template.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    chat: bool = False


def model_card(
    record: RunRecord, origin: Origin, *, dense: str | None = None, evaluations: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the card of a checkpoint. It tells no times and no sizes of other files, so that equal runs have equal cards.

    Args:
        record: The run record; its files, sizes of folders and times may be missing.
        origin: The original model.
        dense: Dtype of the weights, for a folder of decoded weights without run record; None: a checkpoint.
        evaluations: Results as `nearplane evaluate --json` prints them.
    """
    origin = replace(origin, base=origin.base or hub_id(record, origin.config))
    metadata = yaml.safe_dump(_metadata(record, origin, dense), sort_keys=False, allow_unicode=True)
    text = "\n".join(_text(record, origin, dense, evaluations))
    above = f"---\n{metadata}---\n\n{text}\n"
    return above + SEAL.format(hashlib.sha256(above.encode()).hexdigest())


def is_unchanged(card: str) -> bool:
    """Return whether a card is as nearplane wrote it."""
    parts = SEALED.fullmatch(card)
    return parts is not None and hashlib.sha256(parts[1].encode()).hexdigest() == parts[2]


def front_matter(card: str) -> dict[str, Any]:
    """Return the metadata of a card; empty if it has none.

    Raises:
        ValueError: They are not YAML, or no mapping.
    """
    if (found := FRONT_MATTER.match(card.lstrip("\ufeff"))) is None:
        return {}
    try:
        metadata = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(metadata, dict | None):
        raise ValueError("they are no mapping")
    return metadata or {}


def hub_id(record: RunRecord, config: Mapping[str, Any]) -> str | None:
    """Return the hub id of the original: as the user named it, or as the config of a local folder does; else None."""
    for name in (record.source, config.get("_name_or_path")):
        if isinstance(name, str) and HUB_ID.fullmatch(name) and not Path(name).exists():
            return name
    return None


def _metadata(record: RunRecord, origin: Origin, dense: str | None) -> dict[str, Any]:
    """Return the metadata by key, without those that are unknown."""
    given = origin.metadata
    taken = {key: _plain(given.get(key)) for key in TAKEN}
    taken["license"] = taken["license"] or _plain(origin.config.get("license"))
    own = ["nearplane"] if dense else ["nearplane", str(record.recipe.format)]
    tags = taken["tags"]
    taken["tags"] = list(dict.fromkeys([*(tags if isinstance(tags, list) else [tags] if tags else []), *own]))
    metadata = {
        "base_model": origin.base,
        "base_model_relation": origin.base and "quantized",  # without it the hub lists a fine-tune
        "library_name": "transformers" if dense else _library(record),
        "pipeline_tag": _plain(given.get("pipeline_tag")) or pipeline_tag(origin.config),
        **taken,
    }
    return {key: metadata[key] for key in KEYS if metadata[key]}


def _library(record: RunRecord) -> str:
    """Return the hub's name of the library that loads a checkpoint; of one made for another program, this program."""
    library, readers = record.recipe.files.library, record.recipe.readers
    return readers.runtimes[-1] if library == "transformers" and not readers.by_transformers else library


def _plain(value: object) -> str | list[str] | None:
    """Return a text or a list of texts from another card; all else is None. YAML reads the language "no" as false."""
    if isinstance(value, list):
        return [each for each in map(_plain, value[:MAX_VALUES]) if isinstance(each, str)] or None
    if value is False:
        return "no"
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_LETTERS else None


def _text(
    record: RunRecord, origin: Origin, dense: str | None, evaluations: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the lines of the text."""
    name = (origin.base or Path(record.source).name or "model").rpartition("/")[2]
    of = f"[{origin.base}](https://huggingface.co/{origin.base})" if origin.base else f"`{_code(name)}`"
    yield f"# {_escaped(name)}, {'decoded from' if dense else 'quantized to'} {record.rate:.2f} bits per weight"
    yield ""
    size = "" if dense else f" The weight files have {size_text(record.bytes)}."
    yield (
        f"{'Decoded weights' if dense else 'A quantized version'} of {of}: {counted(len(record.layers), 'layer')} (one weight "
        f"matrix each) at {record.rate:.3f} bits per weight, quantized by the Python package nearplane"
        f"{f' and decoded to {dense}' if dense else ''}.{size}"
    )
    if origin.base is None:
        yield ""
        yield "The original was a local folder whose hub id is not known, so the metadata name no `base_model`."
    if not (_plain(origin.metadata.get("license")) or _plain(origin.config.get("license"))):
        yield ""
        yield "No license is named in the card or the config of the original that was quantized: look it up there."
    yield from _section("How to use it", _used(record, origin, dense))
    if evaluations:
        yield from _section("Evaluation", evaluation_tables(evaluations))
    yield from _section("What was lost", _lost(record, dense))
    yield from _section("What is quantized", _quantized(record, dense))
    yield from _section("How it was made", _made(record, dense))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    yield from lines


def _quantized(record: RunRecord, dense: str | None) -> Iterator[str]:
    """Yield a table of number formats, and what was not quantized."""
    yield "| number format | meaning | layers | weights | bits per weight in the file |"
    yield "|---|---|---|---|---|"
    for grid in dict.fromkeys(layer.format for layer in record.layers):
        layers = [layer for layer in record.layers if layer.format == grid]
        weights = sum(layer.out_features * layer.in_features for layer in layers)
        rate = 8 * sum(layer.bytes for layer in layers) / weights
        yield f"| {grid} | {_meaning(layers[0].number_format)} | {len(layers):,} | {weights:,} | {rate:.3f} |"
    yield ""
    if (rounded := rounded_inputs(record)) and dense is None:
        parts = " and ".join(f"of {layers} are rounded to {numbers}" for layers, numbers in rounded)
        yield f"When the model runs, the inputs {parts}, too."
        yield ""
    if record.recipe.kv_cache != "none" and dense is None:
        yield "vLLM keeps keys and values in fp8, by scales that are stored beside the weights."
        yield ""
    embeddings, head = record.recipe.scheme.ends
    kept = [*["embeddings"] * (not embeddings), *["head"] * (not head), "norms", "biases"]
    trained = ", except that tuning trained norms" if record.tuning is not None and record.tuning.norms else ""
    yield f"Not quantized: {', '.join(kept)} and all layers that are not in this table{trained}."
    if unquantized := [*left(record)]:
        yield from ("", *_bullets(unquantized))
    if dense is None:
        yield ""
        yield "Bits per weight count codes, steps, zero points and minima."


def _meaning(format: NumberFormat) -> str:
    """Return a number format in words."""
    if not format.bits:
        return "integers with a step for every row and column, entropy-coded"
    numbers = "integers" if format.levels is None else "floats"
    grouped = f"groups of {format.group}" if format.rows == 1 else f"tiles of {format.rows} x {format.group}"
    steps = "a step for every row" if format.group is None else f"{grouped} with a step"
    if isinstance(format, BlockFormat) and format.m:
        steps += " and a minimum"
    elif not format.symmetric:
        steps += " and a zero point"
    return f"{format.bits}-bit {numbers}, {steps}{', in blocks of llama.cpp' if format.only_in_gguf else ''}"


def _used(record: RunRecord, origin: Origin, dense: str | None) -> Iterator[str]:
    """Yield a block of code for every program that loads the checkpoint."""
    yield f"`{FOLDER}` stands for the folder of this card, or for its id on the hub."
    named = Named(FOLDER, origin.config, origin.chat)
    ways = uses_of_dense(named) if dense else uses(record, named)
    if dense is None and (lines := [*for_one_program(record)]):
        yield ""
        yield from _bullets(lines)
    for way in ways:
        yield from ("", f"**{way.program}**{way.needs and f' (needs {way.needs})'}:", "", f"```{way.language}")
        yield from (*way.code.splitlines(), "```")


def _lost(record: RunRecord, dense: str | None) -> Iterator[str]:
    """Yield the losses of the layers."""
    said = (divergence, losses, by_source, few_tokens, degenerate, exceeding)
    sentences = [sentence for each in said for sentence in each(record)]
    if record.tuning is not None:
        sentences = [replace(record.tuning, seconds=0.0).sentence(), record.tuning.windows_sentence(), *sentences]
    yield from _bullets(sentences)
    yield ""
    rounded = as_computed(record) if dense is None else ""
    yield (
        "This was measured while quantizing. How far predictions on another text are from the original's is measured by "
        f"`nearplane evaluate {FOLDER} --against ORIGINAL{rounded} --text TEXT`."
    )


def _bullets(sentences: Iterable[str]) -> Iterator[str]:
    """Yield sentences as a list; each begins with a capital letter."""
    yield from (f"- {_escaped(sentence[0].upper() + sentence[1:])}" for sentence in sentences)


def _made(record: RunRecord, dense: str | None) -> Iterator[str]:
    """Yield calibration, recipe and versions."""
    yield f"{calibrated(record)[0].upper()}{_escaped(calibrated(record)[1:])}. Options that differ from the defaults:"
    scheme = record.recipe.scheme
    asked = {
        name: getattr(scheme, name) for name in ("grid", "rate", "size") if getattr(scheme, name, None) is not None
    }
    given = _given(record.recipe, Recipe(scheme=type(scheme)(**asked)))
    if (text := record.recipe.calibration.calibration) is not None:
        given["calibration"]["calibration"] = ",".join(LOCAL_FOLDER.sub("", part) for part in text.split(","))
    yield from ("", "```json", *json.dumps(given, indent=1, ensure_ascii=False).splitlines(), "```", "")
    yield f"Versions: {', '.join(f'{name} {number}' for name, number in record.versions.items())}."
    if dense is None:
        yield ""
        yield (
            "`nearplane.json` has the losses, bounds and checksums of every layer, and the SHA-256 of every file. "
            f"`nearplane verify {FOLDER}` compares the files with it."
        )


def _given(part: Any, usual: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from those of another one, and the grid, width, rate and size of a scheme."""
    given: dict[str, Any] = {}
    for each in fields(part):
        value, default = getattr(part, each.name), getattr(usual, each.name)
        if is_dataclass(value) and not isinstance(value, type):
            if inner := _given(value, default):
                given[each.name] = inner
        elif value != default or (value is not None and each.name in ("grid", "bits", "rate", "size")):
            given[each.name] = [*map(_listed, value)] if isinstance(value, tuple) else value
    return given


def _listed(part: Any) -> Any:
    return asdict(part) if is_dataclass(part) and not isinstance(part, type) else part


def _escaped(text: str) -> str:
    """Return text in which Markdown finds no emphasis, code, links or HTML."""
    return re.sub(r"([\\`*<\[\]|])", r"\\\1", text)


def _code(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable() and letter != "`")
