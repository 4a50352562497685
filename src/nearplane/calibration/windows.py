"""Windows of a run: the calibration windows, the extra windows after them, and checks that there are enough tokens."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearplane.calibration.activations import Dealt
from nearplane.calibration.given import Given
from nearplane.calibration.mix import Mix
from nearplane.calibration.self_written import self_written
from nearplane.calibration.text_files import is_self_written, refuse_unrecorded, text_to_calibrate_on, texts_of
from nearplane.calibration.texts import frame_of, read_windows
from nearplane.errors import CalibrationError
from nearplane.lattice.solvers import SOLVERS
from nearplane.models.experts import by_expert
from nearplane.models.kinds import InputKind, input_kind, is_framed
from nearplane.models.model import Model
from nearplane.models.spoken import Spoken
from nearplane.models.two_tokenizers import say_unlike_its_file
from nearplane.recipe.recipe import Calibration, Recipe
from nearplane.recipe.thresholds import ADVISED_TOKENS_PER_INPUT, MIN_TOKENS_PER_INPUT
from nearplane.record.record import Source
from nearplane.record.words import shortage
from nearplane.system.device import Device
from nearplane.system.progress import Progress, phase, silent
from nearplane.system.ranks import Ranks

DEFAULT_SEQLEN = 2048
DEFAULT_TOKENS_PER_INPUT = 50  # of the widest layer: the loss is then about 5 % above that of many more tokens
MAX_DEFAULT_TOKENS = 2**19
WINDOWS_PER_EXTRA = 8  # calibration windows per extra window, at least
EXTRA_TOKENS, EXTRA_WINDOWS = 1024, 4  # enough for a measurement: no more extra windows are read
EXTRA_PARTS = 4  # batches of extra windows have a fourth of the windows that the others have
RUN_TOKENS = 8  # text that is not repetitive repeats few runs of 8 neighbouring tokens
MAX_REPEATED = 0.25  # fraction of tokens in runs of at least 8 equal ones; more are padding, or one token repeated
MIN_DISTINCT_RUNS = 0.25  # fraction; text with less, and fewer than the widest layer has inputs, is refused
EXPECTED_INPUTS = {
    InputKind.TEXT: "takes text, but the calibration data is not text. Pass text.",
    InputKind.IMAGES: (
        "takes images. In Python, pass calibration=pixel_values (images, channels, height, width), as its image "
        "processor makes them."
    ),
    InputKind.SOUND: (
        "takes sound. In Python, pass calibration=(input_features, token_ids): the output of its feature extractor, and "
        "the token ids (windows, seqlen) of the transcripts, as for labels=."
    ),
}
logger = logging.getLogger("nearplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Calibration windows and extra windows.

    Args:
        seqlen: Tokens per window.
        fitted: (windows, seqlen) calibration windows, perhaps with sound, which enter all sums; None if not needed.
        extra: (windows, seqlen) extra windows, which follow in the text and enter no sum; losses are measured on them
            as well. None if there are none.
        sources: Texts of a mix, in the order of their extra windows; empty for a single text.
    """

    seqlen: int
    fitted: Tensor | None = None
    extra: Tensor | None = None
    sources: tuple[Source, ...] = ()

    @property
    def count(self) -> int:
        """Number of calibration windows."""
        return 0 if self.fitted is None else len(self.fitted)

    @property
    def extra_count(self) -> int:
        """Number of extra windows."""
        return 0 if self.extra is None else len(self.extra)

    def tokens(self) -> Tensor:
        """Return all windows (windows, seqlen), extra windows last."""
        assert self.fitted is not None, "this run has no windows"
        return self.fitted if self.extra is None else joined_windows([self.fitted, self.extra])

    def batches(self, size: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the batches of calibration windows, the first of one window, and the batches of extra windows.

        The latter are smaller, so that they even out what ranks have. Windows of two texts of a mix are never together.
        """
        assert self.fitted is not None, "this run has no windows"
        others = self.fitted[1:].split(size) if self.count > 1 else ()
        parts = [] if self.extra is None else [self.extra]
        if self.extra is not None and self.sources:
            parts = [*self.extra.split([source.extra_windows for source in self.sources])]
        return [self.fitted[:1], *others], [batch for part in parts for batch in part.split(extra_batch(size))]

    def extra_sources(self, size: int) -> list[int]:
        """Return the number of the text in a mix of each batch of extra windows; empty for a single text."""
        return [
            number for number, each in enumerate(self.sources) for _ in range(0, each.extra_windows, extra_batch(size))
        ]

    def dealt(self, size: int, ranks: Ranks) -> tuple[list[Tensor], Dealt]:
        """Return the batches of a rank, of at most `size` windows, and their place among all.

        A batch holds the same windows on any number of ranks.
        """
        fitted, extra = self.batches(size)
        place = Dealt.among(ranks, [*map(len, fitted)], [*map(len, extra)], self.extra_sources(size))
        batches = [*fitted, *extra]
        return [batches[number] for number in place.numbers], place

    def digest(self) -> str:
        """Return the `digest_of` all windows; "" if there are none."""
        return "" if self.fitted is None else digest_of(self.tokens())


def extra_batch(size: int) -> int:
    """Return the number of extra windows in a batch where calibration windows are in batches of `size`."""
    return max(1, size // EXTRA_PARTS)


def digest_of(tokens: Tensor) -> str:
    """Return the SHA-256 of token ids as little-endian int64, then sound as float32; or of pixel values as float32."""
    digest = hashlib.sha256()
    for part in (tokens, tokens.sound) if isinstance(tokens, Spoken) else (tokens,):
        digest.update(part.cpu().contiguous().numpy().astype("<f4" if part.is_floating_point() else "<i8").tobytes())
    return digest.hexdigest()


def joined_windows(parts: list[Tensor]) -> Tensor:
    """Return the windows of all parts in one tensor, with their sound if there is any."""
    ids, sounds = torch.cat(parts), [part.sound for part in parts if isinstance(part, Spoken)]
    return Spoken.of(ids, torch.cat(sounds)) if sounds else ids


def calibration_windows(
    model: Model,
    recipe: Recipe,
    given: Given | None,
    device: Device,
    progress: Progress = silent,
    *,
    unwritten: list[int] | None = None,
) -> Windows:
    """Read the calibration text: `samples_of` calibration windows, and the extra windows after them, see `extra_windows`.

    If the text is shorter, the last ninth of its windows are the extra windows, at least one and at most
    `extra_windows`; a single window is a calibration window. The texts of a mix must be long enough.

    Args:
        model: The model, whose tokenizer reads the text.
        recipe: The recipe, which names the text.
        given: Calibration data from Python that replaces the text of the recipe.
        device, progress: Where the network writes a text itself, and how that is shown; see `self_written`.
        unwritten: For a rehearsal: see `self_written`.

    Raises:
        CalibrationError: The text cannot be read, or --seqlen exceeds the positions of the model.
    """
    options, positions = recipe.calibration, model.positions
    if options.seqlen is not None and positions is not None and options.seqlen > positions:
        raise CalibrationError(
            f"--seqlen {options.seqlen} is more than the model's maximum length of {positions} tokens."
        )
    seqlen = default_seqlen(model, options)
    if not SOLVERS[recipe.scheme.solver].needs_inputs and recipe.allocate != "slope":
        return Windows(seqlen=seqlen)
    kind = input_kind(model.network)
    if given is None:
        refuse_unrecorded(options.calibration)
    if kind is not (InputKind.TEXT if given is None else given.kind):
        raise CalibrationError(f"{type(model.network).__name__} {EXPECTED_INPUTS[kind]}")
    asked, windows = samples_of(model, options), None
    if given is not None:
        windows, seqlen = given.windows(model, recipe, asked, seqlen)
    following = extra_windows(asked, seqlen)
    if windows is None:
        read = reader_of(model, options, seqlen, device, progress, unwritten)
        if given is None and (texts := texts_of(options.calibration)):
            mix = Mix.of(texts, asked, following)
            windows = torch.stack(mix.windows(read, mix.samples + mix.extra))
            sources, fitted = mix.sources(len(windows)), mix.samples
            return Windows(seqlen=seqlen, fitted=windows[:fitted], extra=windows[fitted:], sources=sources)
        windows = read(options.calibration if given is None else given.texts, samples=asked + following)
    if len(windows) == 1:
        return Windows(seqlen=seqlen, fitted=windows)
    fitted = min(asked, len(windows) - max(1, min(following, len(windows) // (WINDOWS_PER_EXTRA + 1))))
    return Windows(seqlen=seqlen, fitted=windows[:fitted], extra=windows[fitted:])


def reader_of(
    model: Model,
    options: Calibration,
    seqlen: int,
    device: Device,
    progress: Progress = silent,
    unwritten: list[int] | None = None,
) -> Callable[..., Tensor]:
    """Return the function that reads windows of a text to calibrate on: `read(text, samples=...)`.

    See `read_windows`, and `self_written` for the text that the network writes itself.
    """
    tokenizer = model.tokenizer()
    say_unlike_its_file(model.folder, tokenizer)
    frame = frame_of(tokenizer, options.first_token, encoder=is_framed(model.network))

    def read(text: Any, *, samples: int) -> Tensor:
        if is_self_written(text):
            return self_written(model, samples, seqlen, options.seed, device, progress, options.first_token, unwritten)
        text = text_to_calibrate_on(text) or text
        with phase(progress, "reading the calibration text"):
            return read_windows(tokenizer, text, samples=samples, seqlen=seqlen, seed=options.seed, frame=frame)

    return read


def default_seqlen(model: Model, options: Calibration) -> int:
    """Return the tokens per calibration window: as the recipe says, or the default."""
    return options.seqlen or min(DEFAULT_SEQLEN, model.positions or DEFAULT_SEQLEN)


def samples_of(model: Model, options: Calibration) -> int:
    """Return the number of calibration windows: as the recipe says, or the default.

    The default is `DEFAULT_TOKENS_PER_INPUT` for each input of the widest layer, `ADVISED_TOKENS_PER_INPUT` for each input of
    a layer of experts if the router spreads tokens evenly, and at most `MAX_DEFAULT_TOKENS`.
    """
    if options.samples is not None:
        return options.samples
    multiplied = [layer for layer in model.layers if layer.kind != "Embedding"]  # rows are looked up, not multiplied
    tokens = max((DEFAULT_TOKENS_PER_INPUT * layer.shape[1] for layer in multiplied if not layer.routed), default=0)
    reached = model.reached_experts or 1  # for more tokens where it is not known
    for block in model.blocks:
        routed = by_expert([layer for layer in block.layers if layer.routed])
        widest = max((layer.shape[1] for layers in routed.values() for layer in layers), default=0)
        tokens = max(tokens, ADVISED_TOKENS_PER_INPUT * widest * len(routed) // reached)
    return max(1, -(-min(tokens, MAX_DEFAULT_TOKENS) // default_seqlen(model, options)))


def extra_windows(samples: int, seqlen: int) -> int:
    """Return the number of extra windows: an eighth of `samples`, at least one, at most what a measurement needs."""
    enough = max(EXTRA_WINDOWS, -(-EXTRA_TOKENS // seqlen))
    return max(1, min(samples // WINDOWS_PER_EXTRA, enough))


def check_tokens(model: Model, recipe: Recipe, windows: Windows) -> None:
    """Warn about few calibration tokens; refuse too few tokens, repetitive text and padding.

    Raises:
        CalibrationError: There is less than one token, or less than one distinct run, per input of the widest layer, or
            the tokens are padded.
    """
    layers = [layer for layer in model.layers if layer.kind != "Embedding"]  # rows are looked up, not multiplied
    tokens = windows.fitted
    if tokens is None or not layers or not SOLVERS[recipe.scheme.solver].needs_inputs:
        return
    widest = max(layers, key=lambda layer: layer.shape[1])
    inputs, seqlen = widest.shape[1], windows.seqlen
    warning = shortage(windows.count, seqlen, samples_of(model, recipe.calibration), widest.name, inputs)
    if warning is not None and windows.count * seqlen < MIN_TOKENS_PER_INPUT * inputs:
        raise CalibrationError(warning)
    different, runs = (0, 0) if input_kind(model.network) is InputKind.IMAGES else distinct_runs(tokens)
    if different < min(MIN_TOKENS_PER_INPUT * inputs, MIN_DISTINCT_RUNS * runs):
        raise CalibrationError(
            f"The calibration text is repetitive: of {runs:,} runs of {min(RUN_TOKENS, seqlen)} tokens only "
            f"{different:,} are distinct, fewer than the {inputs:,} inputs of {widest.name}. Pass more varied text."
        )
    if input_kind(model.network) is InputKind.TEXT:
        check_padding(tokens)
    if warning is not None:
        logger.warning(warning)


def check_padding(tokens: Tensor) -> None:
    """Refuse windows (windows, seqlen) that are padded, or repeat one token: these would count as text.

    Raises:
        CalibrationError: More than `MAX_REPEATED` of the tokens are in runs of `RUN_TOKENS` or more equal ones.
    """
    if tokens.shape[1] < RUN_TOKENS:
        return
    runs = tokens.unfold(1, RUN_TOKENS, 1)  # (windows, starts, RUN_TOKENS)
    starts = (runs == runs[..., :1]).all(-1)
    repeated = torch.zeros_like(tokens, dtype=torch.bool)
    for place in range(RUN_TOKENS):
        repeated[:, place : place + starts.shape[1]] |= starts
    share = float(repeated.double().mean())
    if share > MAX_REPEATED:
        raise CalibrationError(
            f"{100 * share:.0f} % of the {tokens.numel():,} tokens stand in runs of {RUN_TOKENS} or more equal tokens, as padding "
            f"does, most often of the id {int(tokens[repeated].mode().values)}. Pass more varied text. Of padded token ids, pass "
            f"what the tokenizer returned: input_ids with their attention_mask."
        )


def distinct_runs(tokens: Tensor) -> tuple[int, int]:
    """Return how many runs of `RUN_TOKENS` neighbouring tokens in (windows, seqlen) are distinct, and the total."""
    length = min(RUN_TOKENS, tokens.shape[1])
    runs = tokens.unfold(1, length, 1).reshape(-1, length)  # (runs, length)
    weights = 1_000_003 ** torch.arange(length)  # a hash; overflow wraps around
    return int((runs * weights).sum(1).unique().numel()), len(runs)
