"""The tokens that a run looks at: the windows that are fitted, those that are not, and whether they are enough.

Knows texts, models' tokenizers and widths; nothing of what is computed from the tokens.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from nearplane.enough import LEAST, shortage
from nearplane.errors import CalibrationError, RecipeError
from nearplane.headless import is_framed, takes_images
from nearplane.lattice.solvers import SOLVERS
from nearplane.models.activations import skeleton
from nearplane.models.data import around, read_windows
from nearplane.models.given import Given, refuse_lost
from nearplane.models.model import Model
from nearplane.pretrained import in_a_sentence
from nearplane.recipe import Recipe
from nearplane.schemes import GridScheme

DEFAULT_SEQLEN = 2048
EXTRA = 8  # windows that are fitted for every one that follows them and is not, at least
EXTRA_TOKENS, EXTRA_WINDOWS = 1024, 4  # that many in so many windows tell enough: no more are read
RUN = 8  # tokens in a row: text that says something new repeats few runs of so many
VARIED = 0.25  # share of runs that differ: less, and fewer than the widest layer has inputs, is no text to learn from
logger = logging.getLogger("nearplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The calibration text in windows.

    Args:
        seqlen: tokens of a window.
        fitted: (windows, seqlen) what every sum is made of; None where nothing looks at the network.
        extra: (windows, seqlen) what follows them in the text and enters no sum: what the losses are measured on besides. None
            where there are none.
        extra_rows: how many of their rows count, evenly spread, where a layer sees more; None: all.
    """

    seqlen: int
    fitted: Tensor | None = None
    extra: Tensor | None = None
    extra_rows: int | None = EXTRA_TOKENS

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
        return self.fitted if self.extra is None else torch.cat([self.fitted, self.extra])

    def digest(self) -> str:
        """Return the SHA-256 of all token ids as little-endian int64; empty where there are none."""
        return "" if self.fitted is None else digest_of(self.tokens())


def digest_of(tokens: Tensor) -> str:
    """Return the SHA-256 of token ids as little-endian int64, of pixel values as float32."""
    if tokens.is_floating_point():
        return hashlib.sha256(tokens.contiguous().numpy().astype("<f4").tobytes()).hexdigest()
    ids = tokens.to("cpu", torch.int64).contiguous().numpy().astype("<i8")
    return hashlib.sha256(ids.tobytes()).hexdigest()


def calibration_windows(
    model: Model, recipe: Recipe, given: Given | None = None, *, extra: int | None = None
) -> Windows:
    """Read the calibration text: `samples` windows that are fitted, and some that follow them, see `extra_windows`.

    Where the text is shorter, the last ninth of its windows, at least one and no more than would follow, are the extra ones; of a
    single window there are none.

    Args:
        model: whose tokenizer reads the text.
        recipe: names it.
        given: texts or tokens in place of what the recipe names.
        extra: how many windows follow at most, to repeat what a record says; None: `extra_windows`.

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
    if takes_images(model.network):
        seqlen = _places(model, recipe, given)
    elif given is not None and given.tokens is not None and given.tokens.is_floating_point():
        raise CalibrationError(f"{type(model.network).__name__} takes text, and pixel values were given; pass text.")
    following = extra_windows(wanted.samples, seqlen) if extra is None else extra
    if given is not None and given.tokens is not None:
        windows = given.tokens
    else:
        texts = wanted.calibration if given is None else given.texts
        refuse_lost(texts)
        samples = wanted.samples + following
        tokenizer = model.tokenizer()
        edges = around(tokenizer) if is_framed(model.network) else ()
        windows = read_windows(tokenizer, texts, samples=samples, seqlen=seqlen, seed=wanted.seed, between=edges)
    if not following or len(windows) == 1:
        return Windows(seqlen=seqlen, fitted=windows)
    fitted = min(wanted.samples, len(windows) - max(1, min(following, len(windows) // (EXTRA + 1))))
    return Windows(seqlen=seqlen, fitted=windows[:fitted], extra=windows[fitted:])


def _places(model: Model, recipe: Recipe, given: Given | None) -> int:
    """Return how many hidden states a network that takes images has of each: patches, and what stands before them.

    Raises:
        CalibrationError: no images were given, or of another size than the network's.
        RecipeError: bits of layers are to be measured on them.
    """
    kind = type(model.network).__name__
    if given is None:
        refuse_lost(recipe.calibration.calibration)
    if given is None or given.tokens is None or not given.tokens.is_floating_point():
        raise CalibrationError(
            f"{kind} takes images: quantize from Python with calibration=pixel_values (images, channels, height, width), as its "
            f"image processor makes them."
        )
    if recipe.allocate == "slope" or not isinstance(recipe.scheme, GridScheme):
        raise RecipeError(
            f"{kind} takes images, on which bits of layers are not measured yet: use --bits with whole numbers and --allocate "
            f"uniform."
        )
    with in_a_sentence(f"{kind} does not take images {tuple(given.tokens.shape[1:])}, (channels, height, width)"):
        one = skeleton(model, given.tokens[:1], device="cpu", dtype=torch.float32, two_streams=False)
    return one.quantized[0].shape[1]


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
    different, runs = (0, 0) if takes_images(model.network) else distinct_runs(tokens)
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
