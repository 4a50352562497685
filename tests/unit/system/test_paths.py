"""Folders that are refused before work: with files of an adapter, which some programs add to the weights and others do not."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import transformers
from huggingface_hub import constants
from transformers import PreTrainedTokenizerBase

import nearplane
from nearplane import ModelError, NearplaneError
from nearplane.demo import MODEL
from nearplane.models.pretrained import find_folder
from nearplane.system.files import sha256
from nearplane.system.paths import FILES, NEEDED, RECORD, TERMS, is_kept_back, is_listed
from nearplane.system.recorded_hashes import check_hashes


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_a_folder_with_an_adapter_is_refused(tmp_path: Path, name: str) -> None:
    """`quantize` took the base, and `load` base and adapter: a KL of .68 without a remark."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"model holds {name}: .* Merge the adapter first, or remove these files\."):
        nearplane.load(folder)
    (folder / name).rename(folder / f"old_{name}")
    nearplane.load(folder)


def test_a_folder_of_the_cache_of_the_hub_is_named_as_such(tmp_path: Path) -> None:
    revision = tmp_path / "models--owner--name" / "snapshots" / "abc"
    shutil.copytree(MODEL, revision)
    nearplane.load(revision)
    with pytest.raises(ModelError, match=r"is a folder of the hub's cache\. Pass one of the folders in .*snapshots\."):
        nearplane.load(revision.parent.parent)


def test_a_config_that_is_a_broken_link_is_no_missing_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../../blobs/abc")
    with pytest.raises(NearplaneError, match=r"config\.json cannot be read \(it is a broken link\)"):
        nearplane.load(tmp_path)


def test_a_model_on_the_hub_with_an_adapter_is_refused_before_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is in the cache, with nothing but what is looked at."""
    cached = tmp_path / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    for name in ("config.json", "adapter_config.json"):
        (cached / "snapshots" / ("a" * 40)).mkdir(parents=True, exist_ok=True)
        (cached / "snapshots" / ("a" * 40) / name).write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match=r"owner/name holds adapter_config.json: .*\(hf download owner/name --local-dir"
    ):
        find_folder("owner/name")


def test_a_checkpoint_without_the_adapter_that_an_older_version_copied_is_whole(tmp_path: Path) -> None:
    """The message asks for its removal."""
    (tmp_path / "config.json").write_text("{}")
    hashes = f'{{"config.json": "{sha256(tmp_path / "config.json")}", "adapter_config.json": "{"0" * 64}"}}'
    (tmp_path / RECORD).write_text(f'{{"files": {hashes}}}')
    check_hashes(tmp_path)


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
