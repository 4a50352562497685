"""Architectures that cannot be quantized at all, and the sentence that says why."""

from __future__ import annotations

import re

import transformers

from nearplane.errors import RecipeError
from nearplane.models.kinds import has_head
from nearplane.models.model import Model
from nearplane.models.structure import NOT_HANDLED

HEADS = re.compile(
    r"For(?!CausalLM$|ConditionalGeneration$)[A-Z]\w+$"
)  # of classes of transformers that continue no text


def refuse_unsupported(model: Model) -> None:
    """Refuse a model with nothing to quantize, and one that was made for something else than to continue text.

    Raises:
        RecipeError: names the architecture, and the type of module that is not handled.
    """
    kind = type(model.network).__name__
    if not has_head(model.network) and getattr(model.config, "is_encoder_decoder", False):
        raise RecipeError(
            f"The architecture {kind} is not supported: it has an encoder and a decoder and no head, so it is not known what the "
            f"decoder is given. Pass it as it was saved with its head, for conditional generation."
        )
    for made in getattr(model.config, "architectures", None) or ():
        if made != kind and HEADS.search(made) and hasattr(transformers, made):
            raise RecipeError(
                f"The architecture {made} is not supported: it does not predict the next token, as nearplane expects of a model. "
                f"transformers would build {kind} of it. Pass a causal language model, or an encoder saved without a head."
            )
    if model.layers:
        return
    if left := [(name, reason) for name, reason in model.skipped if reason.endswith(NOT_HANDLED)]:
        name, reason = left[0]
        raise RecipeError(
            f"The architecture {kind} is not supported: its matrices are of the type {reason.split()[0]} (as {name}), which is not "
            f"handled; Linear, Conv1D and Conv2d are. Use another model, or another tool for this one."
        )
    raise RecipeError(
        f"Nothing to quantize: --ignore leaves out all {len(model.ignored)} matrices of {kind}. Leave out fewer."
    )
