"""Files beside the weights: which a checkpoint gets, and that nothing comes from outside the model's folder."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nearplane.errors import ModelError
from nearplane.formats.beside import Beside, origin_of

COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "source.spm", "qwen.tiktoken", "tokenizer.model.v3"),
    *("chat_template.jinja", "additional_chat_templates/tool.jinja", "qformer_tokenizer/vocab.txt"),
    *("generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("LICENSE", "MODEL_LICENSE.txt", "NOTICE", "USE_POLICY.md"),
)
LEFT_OUT = (
    *("notes.txt", "trainer_state.json", "adapter_config.json", "onnx/tokenizer.json", "runs/log.txt"),
    *("additional_chat_templates/notes.txt", "qformer_tokenizer/model.safetensors", ".env", ".git/config"),
    *("README.md", "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "config.json"),
    *("modeling_own.py", "code/layers.py", "weird.voc"),
)


def write(folder: Path, *names: str) -> Path:
    """Write files whose contents are their names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", *COPIED, *LEFT_OUT)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return write(tmp_path / "outside", "secret", "tool.jinja")


def test_only_what_is_on_the_list_is_copied(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All else but weights was: notes, logs, states of a trainer."""
    Beside(source=model).copy(tmp_path / "out")
    assert names(tmp_path / "out") == set(COPIED)
    assert sorted(Beside(source=model).names()) == sorted(COPIED)
    assert Beside(source=model).size() == sum(len(name) for name in COPIED)
    with caplog.at_level(logging.WARNING):
        Beside(source=model).log_left_out(Path("OUT"))
    assert caplog.messages == [
        f"Not copied from {model} to OUT, and perhaps not needed: additional_chat_templates/notes.txt, code/, notes.txt, "
        f"onnx/, runs/, trainer_state.json, weird.voc."
    ]


def test_trusted_code_is_copied_with_what_it_names(model: Path, tmp_path: Path) -> None:
    """Modules in folders too, which `auto_map` may name; they were left out."""
    (model / "code" / "layers.py").write_text('open("weird.voc"); open("model.safetensors"); open("README.md")')
    Beside(source=model, trust_remote_code=True).copy(tmp_path / "out")
    assert names(tmp_path / "out") == {*COPIED, "modeling_own.py", "code/layers.py", "weird.voc"}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    ("name", "make", "fault"),
    [
        ("vocab.json", lambda path, outside: path.symlink_to(outside / "secret"), "a link out of the folder"),
        ("vocab.json", lambda path, outside: path.symlink_to("nowhere"), "a broken link"),
        ("vocab.json", lambda path, outside: path.symlink_to(path.name), "a broken link"),
        ("vocab.json", lambda path, outside: path.symlink_to(".env"), "a link to a hidden file or to weights"),
        ("vocab.json", lambda path, outside: path.symlink_to("pytorch_model.bin"), "a link to a hidden file"),
        ("vocab.json", lambda path, outside: os.mkfifo(path), "no regular file"),
        ("vocab.json", lambda path, outside: path.mkdir(), "a folder"),
        ("b_tokenizer", lambda path, outside: path.symlink_to(outside), "a link to a folder"),
        ("a_tokenizer", lambda path, outside: path.symlink_to("."), "a link to a folder"),
        ("additional_chat_templates/a.jinja", lambda path, outside: path.symlink_to(outside / "secret"), "a link out"),
    ],
)
def test_what_is_needed_but_is_no_file_of_the_folder_is_refused(
    model: Path,
    outside: Path,
    tmp_path: Path,
    name: str,
    make: Callable[[Path, Path], object],
    fault: str,
    trusted: bool,
) -> None:
    """Links were followed, and what they lead to was copied; a pipe was waited for."""
    make(model / name, outside)
    beside = Beside(source=model, trust_remote_code=trusted)
    for call in (beside.check, lambda: beside.copy(tmp_path / "out")):
        with pytest.raises(ModelError, match=f"{name} \\({fault}"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["vocab.json", "additional_chat_templates"])
def test_the_remedy_works(tmp_path: Path, outside: Path, name: str) -> None:
    model = write(tmp_path / "a model", "tokenizer.json")
    (model / name).symlink_to(outside / "secret" if "." in name else outside)
    with pytest.raises(ModelError) as caught:
        Beside(source=model).check()
    subprocess.run(str(caught.value).rpartition("lead to: ")[2], shell=True, cwd=model, check=True)
    Beside(source=model).check()
    assert (name if "." in name else f"{name}/tool.jinja") in Beside(source=model).names()


def test_a_link_that_only_trusted_code_may_need_is_refused_with_it(model: Path, outside: Path) -> None:
    for name, target in (("modeling_two.py", outside / "secret"), ("more", outside)):
        (model / name).symlink_to(target)
        Beside(source=model).check()
        with pytest.raises(ModelError, match=name):
            Beside(source=model, trust_remote_code=True).check()
        (model / name).unlink()


def test_other_links_are_left_out_and_named(
    model: Path, outside: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A licence that lies elsewhere is no reason to stop; what it leads to is not copied."""
    (model / "LICENSE").unlink()
    for name, target in (("LICENSE", outside / "secret"), ("all", model), ("loop", "loop"), ("log.txt", "/dev/zero")):
        (model / name).symlink_to(target)
    Beside(source=model).copy(tmp_path / "out")
    assert names(tmp_path / "out") == {*COPIED} - {"LICENSE"}
    with caplog.at_level(logging.WARNING):
        Beside(source=model).log_left_out(Path("OUT"))
    assert "LICENSE (a link out of the folder)" in caplog.text
    assert "all (a link to a folder)" in caplog.text


def test_links_within_the_folder_are_copied_as_files(model: Path, tmp_path: Path) -> None:
    (model / "vocab.json").symlink_to("onnx/tokenizer.json")
    (tmp_path / "by").symlink_to(model)
    Beside(source=tmp_path / "by").copy(tmp_path / "out")
    assert names(tmp_path / "out") == {*COPIED, "vocab.json"}
    assert not (tmp_path / "out" / "vocab.json").is_symlink()


def test_links_into_the_blobs_of_the_same_model_in_the_cache_are_copied(model: Path, tmp_path: Path) -> None:
    """Those of another model in the cache, and of a folder that is no cache, lead out."""
    for repository, sound in (("models--owner--model", True), ("models--owner--other", False), ("folder", False)):
        root = tmp_path / "hub" / repository
        snapshot, blobs = (
            root / "snapshots" / "revision",
            tmp_path / "hub" / repository.replace("other", "model") / "blobs",
        )
        blobs.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "additional_chat_templates/tool.jinja", "LICENSE", "README.md"):
            (blobs / name.replace("/", "")).write_bytes((model / name).read_bytes())
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(os.path.relpath(blobs / name.replace("/", ""), (snapshot / name).parent))
        if sound:
            Beside(source=snapshot).copy(tmp_path / "out")
            assert names(tmp_path / "out") == {"tokenizer.json", "additional_chat_templates/tool.jinja", "LICENSE"}
        else:
            with pytest.raises(ModelError, match="a link out of the folder"):
                Beside(source=snapshot).check()


def test_no_license_is_taken_from_a_card_outside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, text = write(tmp_path / "model", "tokenizer.json"), "---\nlicense: mit\n---\n"
    (tmp_path / "notes.md").write_text(text)
    (model / "README.md").symlink_to(tmp_path / "notes.md")
    assert origin_of(model).metadata == {}
    assert "README.md is a link out of the folder, so that no license is taken from it" in caplog.text
    (model / "README.md").unlink()
    (model / "README.md").write_text(text)
    assert origin_of(model).metadata == {"license": "mit"}


def test_files_that_are_added_during_a_run_are_not_copied(model: Path, tmp_path: Path) -> None:
    beside = Beside(source=model)
    beside = replace(beside, known=beside.names())
    write(model, "vocab.json", "COPYING")
    (model / "NOTICE").unlink()
    beside.copy(tmp_path / "out")
    assert names(tmp_path / "out") == {*COPIED} - {"NOTICE"}
