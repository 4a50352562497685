"""Tiny random models with an encoder and a decoder that looks at what comes out of it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

VOCABULARY = 96
SMALL = dict(
    vocab_size=VOCABULARY, d_model=32, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, bos_token_id=2
)
T5 = SMALL | dict(d_kv=8, d_ff=64, num_layers=2, num_heads=4)
BART = SMALL | dict(
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
    forced_eos_token_id=None,
)
KINDS: dict[str, dict[str, Any]] = {
    "bart": BART,
    "t5": T5,
    "marian": BART,
    "mbart": BART,
    "pegasus": BART,
    "m2m_100": BART,
    "blenderbot": BART,
    "blenderbot-small": BART,
    "mvp": BART,
    "plbart": BART,
    "mt5": T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "umt5": T5,
}
RATES_ALONE = ("t5", "mt5", "umt5")  # whose loader sets weights that would be packed


def save_translating(folder: Path, kind: str) -> Path:
    """Write a random model of a type in which every parameter matters."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[kind](**deepcopy(KINDS[kind]))).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def predicted(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return logits of each token of windows behind those before it, the encoder given all of them, as with labels."""
    shifted = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.int64), tokens[:, :-1]], 1)
    return model.eval()(input_ids=tokens, decoder_input_ids=shifted).logits
