"""The list of files beside the weights, compared with what transformers reads."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import suppress

import pytest
import transformers
from transformers import PreTrainedTokenizerBase

from nearplane.system.model_files import FILES, NEEDED, TERMS, is_kept_back, is_listed


def classes(base: type[PreTrainedTokenizerBase]) -> Iterator[type[PreTrainedTokenizerBase]]:
    yield base
    for each in base.__subclasses__():
        yield from classes(each)


@pytest.mark.nightly  # imports all tokenizers of transformers
def test_the_files_of_all_tokenizers_of_transformers_are_on_the_list() -> None:
    for module in pkgutil.walk_packages(transformers.models.__path__, "transformers.models."):
        if ".tokenization_" in module.name:
            with suppress(ImportError, NameError):  # of packages that are not installed
                importlib.import_module(module.name)
    names = {name for each in classes(PreTrainedTokenizerBase) for name in each.vocab_files_names.values()}
    assert len(names) > 20
    assert [name for name in sorted(names) if not is_listed(name, NEEDED) or is_kept_back(name)] == []


def test_what_is_copied_is_fetched() -> None:
    assert {*NEEDED, *TERMS, "*.safetensors", "README.md"} <= {*FILES}
    for name in (
        *("source.spm", "target.spm", "bpe.codes", "vocab.bpe", "qwen.tiktoken", "tokenizer.model.v11", "tekken.json"),
        *("spiece.model", "sentencepiece.bpe.model", "dict.txt", "merges.txt", "vocab-src.json", "entity_vocab.json"),
        *("LICENSE.md", "License.txt", "LICENCE", "NOTICE", "Notice.txt", "USE_POLICY.md", "COPYING"),
        *("chat_template.json", "processor_config.json", "additional_chat_templates/rag.jinja"),
    ):
        assert is_listed(name, FILES), name
        assert not is_kept_back(name)


def test_a_star_stands_for_no_slash() -> None:
    assert not is_listed("onnx/tokenizer.json", NEEDED)
    assert not is_listed("additional_chat_templates/more/rag.jinja", NEEDED)
    assert is_listed("qformer_tokenizer/vocab.txt", NEEDED)
