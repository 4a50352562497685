"""Tiny random models that write down what they hear, and what they are calibrated on."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForSpeechSeq2Seq, PreTrainedModel

VOCABULARY, START = 96, 1
SMALL = dict(vocab_size=VOCABULARY, decoder_start_token_id=START, pad_token_id=0, eos_token_id=2, bos_token_id=0)
STACKS = SMALL | dict(
    encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64
)  # fmt: skip
MOONSHINE = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4).items()
}
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # with the shape of the sound of a window
    "whisper": (
        STACKS | dict(d_model=32, num_mel_bins=16, max_source_positions=20, max_target_positions=32)
        | dict(suppress_tokens=None, begin_suppress_tokens=None),
        (16, 40),
    ),
    "speech_to_text": (STACKS | dict(d_model=32, conv_channels=32, input_feat_per_channel=16), (40, 16)),
    "moonshine": (SMALL | MOONSHINE | dict(hidden_size=32, intermediate_size=64), (4000,)),
    "speecht5": (
        STACKS | dict(hidden_size=32, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3))
        | dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4),
        (600,),
    ),
}  # fmt: skip


def save_hearing(folder: Path, kind: str) -> Path:
    """Write a random model of a type in which every parameter matters."""
    torch.manual_seed(0)
    model = AutoModelForSpeechSeq2Seq.from_config(CONFIG_MAPPING[kind](**deepcopy(KINDS[kind][0]))).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def heard(kind: str, windows: int = 40, seqlen: int = 12) -> tuple[Tensor, Tensor]:
    """Return sound of as many windows, and what is said in it."""
    generator = torch.Generator().manual_seed(1)
    sound = torch.randn(windows, *KINDS[kind][1], generator=generator)
    return sound, torch.randint(3, VOCABULARY, (windows, seqlen), generator=generator)


@torch.no_grad()
def predicted(model: PreTrainedModel, sound: Tensor, tokens: Tensor) -> Tensor:
    """Return logits of each token behind those before it, as transformers computes them for labels."""
    return model.eval()(sound, labels=tokens).logits
