"""Options in a TOML file, and what commands print as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import save_part_of_the_demo
from nearplane.cli.app import app, main
from nearplane.demo import CALIBRATION
from nearplane.record.record_file import read_record


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a part of the demo's model."""
    return save_part_of_the_demo(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(autouse=True)
def no_config() -> Iterator[None]:
    """Leave no file behind for other tests."""
    yield
    app.config = ()


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run a command line in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["nearplane", *map(str, words)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_table_of_a_command_decides_what_the_line_leaves_open(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line counts before the file; tables of other commands do not matter."""
    (tmp_path / "run.toml").write_text(
        f'[quantize]\nbits = 3\nsamples = 8\nseqlen = 64\ncalibration = "{CALIBRATION}"\nignore = ["down_proj"]\n\n[verify]\n'
        f"tolerance = 0.5\n"
    )
    words = ("quantize", model, tmp_path / "out", "--config", tmp_path / "run.toml", "--bits", 4, "--device", "cpu")
    assert run(monkeypatch, *words) == 0
    record = read_record(tmp_path / "out")
    assert {layer.number_format.bits for layer in record.layers} == {4}
    assert record.windows == 8
    assert record.recipe.ignore == ("down_proj",)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("[quantize]\nbitz = 3\n", 2, 'Unknown option: "[bitz]" from'),
        ("bits = 3\n", 1, "has bits; expected tables named after commands, for example [quantize]"),
        ("[quantise]\nbits = 3\n", 1, "has quantise; expected tables"),
        ("[quantize\n", 1, "cannot be read as TOML"),
        ('[quantize]\nbits = "four"\n', 2, "Invalid value for [bits]"),
        (None, 1, "cannot be read as TOML ([Errno 2]"),
    ],
)
def test_files_that_say_nothing_are_refused(
    text: str | None,
    code: int,
    said: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the name of the file."""
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text)
    assert run(monkeypatch, "quantize", model, tmp_path / "out", f"--config={file}") == code
    assert said in capsys.readouterr().err
    assert run(monkeypatch, "quantize", model, tmp_path / "out", "--config") == 1
    assert "--config needs one file, found none" in capsys.readouterr().err


def test_commands_print_json(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each one object, whose paths exist."""
    out = tmp_path / "out"
    assert run(monkeypatch, "quantize", model, out, "--bits", 4, "--solver", "round-to-nearest") == 0
    capsys.readouterr()

    def printed(*words: object) -> dict[str, object]:
        assert run(monkeypatch, *words, "--json") == 0
        return json.loads(capsys.readouterr().out)

    assert Path(str(printed("report", out)["page"])).is_file()
    assert Path(str(printed("card", out)["card"])).is_file()
    exported = printed("export", out, tmp_path / "dense")
    assert Path(str(exported["folder"])).is_dir()
    files = sum(file.stat().st_size for file in (tmp_path / "dense").glob("*.safetensors"))
    assert 0 < files - int(str(exported["bytes"])) < 10_000  # the header
    pictures = printed("geometry", tmp_path / "pictures")["pictures"]
    assert isinstance(pictures, list)
    assert all(Path(path).is_file() for path in pictures)
    (said,) = printed("generate", out, "Once", "--tokens", 3)  # type: ignore[misc]
    assert said["model"] == str(out)
    assert said["text"]
    assert said["weight_bytes"] > 0
