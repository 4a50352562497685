"""Models of many families on disk, sharded, in float64; and a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from families import VOCABULARY, config_of, random_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to the folder of its model, in several shards."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            random_model(config_of(family)).save_pretrained(folders[family], max_shard_size="100KB")
        return folders[family]

    return folder_of


@pytest.fixture(scope="session")
def loaded(saved: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    """Return a function from a family's name to its model as transformers loads it. Do not change it."""
    found: dict[str, PreTrainedModel] = {}

    def model_of(family: str) -> PreTrainedModel:
        if family not in found:
            found[family] = AutoModelForCausalLM.from_pretrained(saved(family), dtype=torch.float64).eval()
        return found[family]

    return model_of


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """Return (5, 12) random tokens: with a batch of 2 the last batch is smaller."""
    return torch.randint(3, VOCABULARY, (5, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes with one special token, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>", model_max_length=16)
    made.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    return made
