"""The tokens that a run looks at: the windows that are fitted, those that are not, and whether they are enough.

Knows texts, models' tokenizers and widths; nothing of what is computed from the tokens.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from nearplane.calibration.activations import places
from nearplane.calibration.given import Given, refuse_lost
from nearplane.calibration.texts import around, check_start, check_vocabulary, read_windows
from nearplane.errors import CalibrationError, RecipeError
from nearplane.lattice.solvers import SOLVERS
from nearplane.models.kinds import Spoken, Taken, is_framed, joined, taken_by
from nearplane.models.model import Model
from nearplane.models.pretrained import in_a_sentence
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.schemes import GridScheme
from nearplane.record.words import LEAST, shortage

DEFAULT_SEQLEN = 2048
EXTRA = 8  # windows that are fitted for every one that follows them and is not, at least
EXTRA_TOKENS, EXTRA_WINDOWS = 1024, 4  # that many in so many windows tell enough: no more are read
RUN = 8  # tokens in a row: text that says something new repeats few runs of so many
VARIED = 0.25  # share of runs that differ: less, and fewer than the widest layer has inputs, is no text to learn from
WAYS = {
    Taken.TEXT: "takes text, and something else was given; pass text.",
    Taken.IMAGES: (
        "takes images: from Python, pass calibration=pixel_values (images, channels, height, width), as its image "
        "processor makes them."
    ),
    Taken.SOUND: (
        "takes sound: from Python, pass calibration=(input_features, token_ids), sound as its feature extractor makes it "
        "and (windows, seqlen) what is said in each, as for labels=."
    ),
}
logger = logging.getLogger("nearplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The calibration text in windows.

    Args:
        seqlen: tokens of a window.
        fitted: (windows, seqlen) what every sum is made of, with its sound where the network hears; None where nothing looks at it.
        extra: (windows, seqlen) what follows them in the text and enters no sum: what the losses are measured on besides. None
            where there are none.
    """

    seqlen: int
    fitted: Tensor | None = None
    extra: Tensor | None = None

    @property
    def count(self) -> int:
        """How many are fitted."""
        return 0 if self.fitted is None else len(self.fitted)

    @property
    def extra_count(self) -> int:
        """How many follow them."""
        return 0 if self.extra is None else len(self.extra)

    def tokens(self) -> Tensor:
        """Return (windows, seqlen) all of them, extra ones last."""
        assert self.fitted is not None, "nothing looks at the network"
        return self.fitted if self.extra is None else joined([self.fitted, self.extra])

    def batches(self, size: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the fitted windows in batches, the first alone where there are others, and the extra ones in theirs."""
        assert self.fitted is not None, "nothing looks at the network"
        others = self.fitted[1:].split(size) if self.count > 1 else ()
        return [self.fitted[:1], *others], [] if self.extra is None else [*self.extra.split(size)]

    def digest(self) -> str:
        """Return the `digest_of` all; empty where there are none."""
        return "" if self.fitted is None else digest_of(self.tokens())


def digest_of(tokens: Tensor) -> str:
    """Return the SHA-256 of token ids as little-endian int64, of pixel values as float32; of token ids and then their sound."""
    found = hashlib.sha256()
    for part in (tokens, tokens.sound) if isinstance(tokens, Spoken) else (tokens,):
        found.update(part.cpu().contiguous().numpy().astype("<f4" if part.is_floating_point() else "<i8").tobytes())
    return found.hexdigest()


def calibration_windows(model: Model, recipe: Recipe, given: Given | None = None) -> Windows:
    """Read the calibration text: `samples` windows that are fitted, and some that follow them, see `extra_windows`.

    Where the text is shorter, the last ninth of its windows, at least one and no more than would follow, are the extra ones; of a
    single window there are none.

    Args:
        model: whose tokenizer reads the text.
        recipe: names it.
        given: texts or tokens in place of what the recipe names.

    Raises:
        CalibrationError: the text cannot be read, or windows are longer than the model has positions.
    """
    wanted, positions = recipe.calibration, model.positions
    if wanted.seqlen is not None and positions is not None and wanted.seqlen > positions:
        raise CalibrationError(
            f"--seqlen {wanted.seqlen} is more than the {positions} positions of the model; pass at most {positions}."
        )
    seqlen = wanted.seqlen or min(DEFAULT_SEQLEN, positions or DEFAULT_SEQLEN)
    if not SOLVERS[recipe.scheme.solver].needs_inputs and recipe.allocate != "slope":
        return Windows(seqlen=seqlen)
    takes = taken_by(model.network)
    if takes is not (Taken.TEXT if given is None else given.kind):
        if given is None:
            refuse_lost(wanted.calibration)
        raise CalibrationError(f"{type(model.network).__name__} {WAYS[takes]}")
    windows = None if given is None else given.tokens
    if windows is not None and takes is Taken.IMAGES:
        seqlen = _images(model, recipe, windows)
    elif isinstance(windows, Spoken):
        _check_spoken(model, windows)
    following = extra_windows(wanted.samples, seqlen)
    if windows is None:
        texts = wanted.calibration if given is None else given.texts
        refuse_lost(texts)
        samples, tokenizer = wanted.samples + following, model.tokenizer()
        edges = around(tokenizer) if is_framed(model.network) else ()
        windows = read_windows(tokenizer, texts, samples=samples, seqlen=seqlen, seed=wanted.seed, between=edges)
    if len(windows) == 1:
        return Windows(seqlen=seqlen, fitted=windows)
    fitted = min(wanted.samples, len(windows) - max(1, min(following, len(windows) // (EXTRA + 1))))
    return Windows(seqlen=seqlen, fitted=windows[:fitted], extra=windows[fitted:])


def _images(model: Model, recipe: Recipe, images: Tensor) -> int:
    """Return how many hidden states a network has of each image: of patches, and of what stands before them.

    Raises:
        ModelError: they are of another size than the network's.
        RecipeError: bits of layers are to be measured on them.
    """
    kind = type(model.network).__name__
    if recipe.allocate == "slope" or not isinstance(recipe.scheme, GridScheme):
        raise RecipeError(
            f"{kind} takes images, on which bits of layers are not measured yet: use --bits with whole numbers and --allocate "
            f"uniform."
        )
    with in_a_sentence(f"{kind} does not take images {tuple(images.shape[1:])}, (channels, height, width)"):
        return places(model, images)


def _check_spoken(model: Model, windows: Spoken) -> None:
    """Refuse sound, or what is said in it, that a network does not take.

    Raises:
        ModelError: the sound is of another size than the network's.
        CalibrationError: token ids are not in the vocabulary, or have the start token.
    """
    kind = type(model.network).__name__
    check_vocabulary(windows, len(model.network.get_input_embeddings().weight))
    check_start(windows, model.config.decoder_start_token_id, kind)
    with in_a_sentence(f"{kind} does not take sound {tuple(windows.sound.shape[1:])} with {windows.shape[1]} tokens"):
        places(model, windows)


def extra_windows(samples: int, seqlen: int) -> int:
    """Return how many windows of `seqlen` tokens follow `samples` fitted ones: an eighth, up to what tells enough, at least one."""
    enough = max(EXTRA_WINDOWS, -(-EXTRA_TOKENS // seqlen))
    return max(1, min(samples // EXTRA, enough))


def check_tokens(model: Model, recipe: Recipe, found: Windows) -> None:
    """Warn of few calibration tokens; refuse too few, and text that says the same again and again.

    Raises:
        CalibrationError: there is less than one token, or less than one that is new, for each input of the widest layer.
    """
    layers = [layer for layer in model.layers if layer.kind != "Embedding"]  # which no token multiplies
    tokens = found.fitted
    if tokens is None or not layers or not SOLVERS[recipe.scheme.solver].needs_inputs:
        return
    widest = max(layers, key=lambda layer: layer.shape[1])
    inputs, seqlen = widest.shape[1], found.seqlen
    said = shortage(found.count, seqlen, recipe.calibration.samples, widest.name, inputs)
    if said is not None and found.count * seqlen < LEAST * inputs:
        raise CalibrationError(said)
    different, runs = (0, 0) if taken_by(model.network) is Taken.IMAGES else distinct_runs(tokens)
    if different < min(LEAST * inputs, VARIED * runs):
        raise CalibrationError(
            f"The calibration text says the same again and again: of {runs:,} runs of {min(RUN, seqlen)} tokens {different:,} "
            f"differ, fewer than the {inputs:,} inputs of {widest.name}. Pass text like what the model is for with --calibration."
        )
    if said is not None:
        logger.warning(said)


def distinct_runs(tokens: Tensor) -> tuple[int, int]:
    """Return how many runs of `RUN` neighbouring tokens in windows (windows, seqlen) differ, and how many there are."""
    length = min(RUN, tokens.shape[1])
    runs = tokens.unfold(1, length, 1).reshape(-1, length)  # (runs, length)
    weights = 1_000_003 ** torch.arange(length)  # a hash: what overflows wraps round
    return int((runs * weights).sum(1).unique().numel()), len(runs)
