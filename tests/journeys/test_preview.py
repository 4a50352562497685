"""What --dry-run tells is what the run does: the same formats and sizes, the same refusals, and nothing on disk."""

import json
from pathlib import Path

import pytest

import nearplane
from checkpoints import save_part_of_the_demo
from nearplane.calibration import self_written
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION
from nearplane.errors import CalibrationError, NearplaneError, RecipeError
from nearplane.record.preview_summary import Preview

TEXT = dict(calibration=str(CALIBRATION), samples=8, seqlen=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_part_of_the_demo(tmp_path_factory.mktemp("preview") / "model")


@pytest.mark.parametrize(
    "asked",
    [
        dict(bits=4, group_size=64),
        dict(bits=3, layers={"down_proj": {"bits": 4}}),
        dict(grid="nvfp4", ignore=["o_proj"]),
        dict(grid="q4_k_m"),
        dict(bits=4, solver="round-to-nearest", calibration=None, samples=None, seqlen=None),
    ],
    ids=str,
)
def test_formats_and_sizes_are_those_of_the_run(model: Path, tmp_path: Path, asked: dict[str, object]) -> None:
    asked = TEXT | asked
    asked = {name: value for name, value in asked.items() if value is not None}
    before = nearplane.preview(model, tmp_path / "out", **asked)
    assert [*tmp_path.iterdir()] == []
    record = nearplane.quantize(model, tmp_path / "out", **asked)
    assert before.formats == {layer.name: layer.format for layer in record.layers}
    assert before.bits == pytest.approx(record.rate, rel=1e-3)
    assert record.folder <= before.folder <= 1.2 * record.folder + 400_000
    assert before.original == record.original_bytes
    assert before.tokens == record.tokens
    assert not before.measured
    assert (before.memory is None) == (record.tokens == 0)
    assert before.memory is None or before.seconds > 0


def test_what_is_chosen_by_measuring_is_said_to_be(model: Path, tmp_path: Path) -> None:
    for asked in (dict(rate=3), dict(bits=3.5, group_size=64)):
        found = nearplane.preview(model, tmp_path / "out", **TEXT, **asked)
        assert found.measured
        assert found.bits == pytest.approx(asked.get("rate", 3.75))
        assert any("chosen by measuring" in line for line in found.lines())
    found = nearplane.preview(model, tmp_path / "out", size="700000", **TEXT)
    assert (found.folder, found.bits) == (700_000, None)


def test_the_text_that_a_network_writes_is_not_written_but_its_time_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took twenty minutes on SmolLM2, as long as a part of the run."""
    monkeypatch.setattr(self_written, "_whole", None)
    for text in ("self", f"self:3,{CALIBRATION}:1"):
        found = nearplane.preview(model, tmp_path / "out", calibration=text, samples=8, seqlen=64)
        assert (found.tokens, found.memory is None) == (8 * 64, False)
        assert found.writing > 0
        assert any("the network writes its calibration text, which takes about" in line for line in found.lines())
    assert nearplane.preview(model, tmp_path / "out", **TEXT).writing is None
    nearest = nearplane.preview(model, tmp_path / "out", calibration="self", solver="round-to-nearest")
    assert nearest.writing is None
    monkeypatch.setattr(self_written, "continues_text", lambda network: False)
    with pytest.raises(CalibrationError, match="--calibration self needs a network that continues text"):
        nearplane.preview(model, tmp_path / "out", calibration="self", samples=8, seqlen=64)


def test_it_refuses_what_the_run_refuses(model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    for asked, kind in (
        (dict(TEXT, group_size=100), RecipeError),
        (dict(TEXT, calibration=str(tmp_path / "short.txt")), CalibrationError),
        (dict(TEXT, memory="10MB"), RecipeError),
        (dict(TEXT, bits=4, tune="network", kv_cache="fp8"), RecipeError),
        (dict(TEXT, bits=4, tune="network", samples=1), CalibrationError),
        (dict(TEXT, grid="4.5", format="gguf", ignore=["layers"]), RecipeError),
        (dict(TEXT, bits=3.5, format="mlx", group_size=32, include_embeddings=True, ignore=["layers"]), RecipeError),
    ):
        messages = []
        for verb in (nearplane.preview, nearplane.quantize):
            with pytest.raises(kind) as raised:
                verb(model, tmp_path / "out", **asked)
            messages.append(str(raised.value).split(" is ")[0])
        assert messages[0] == messages[1]
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(NearplaneError, match="used exists and is not empty"):
        nearplane.preview(model, tmp_path / "used", **TEXT)
    with pytest.raises(RecipeError, match=r"chosen by measuring. Use nearplane\.frontier"):
        nearplane.preview(model, tmp_path / "out", mix="int3,int4", bits_per_weight=4, **TEXT)


def test_the_command_prints_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "quantize",
        str(model),
        str(tmp_path / "out"),
        "--calibration",
        str(CALIBRATION),
        "--samples",
        "8",
        "--seqlen",
        "64",
    ]
    app([*words, "--dry-run", "--grid", "q4_k_m"], exit_on_error=False, result_action="return_value")
    printed = capsys.readouterr().out
    assert "bits per weight, steps and zero points included\n" in printed
    assert "\nmlp.down_proj: q" in printed
    assert printed.endswith("nothing was written; without --dry-run the run begins\n")
    app([*words, "--dry-run", "--json"], exit_on_error=False, result_action="return_value")
    fields = json.loads(capsys.readouterr().out)
    assert fields["tokens"] == 8 * 64
    assert Preview(**fields).fields() == fields
    assert [*tmp_path.iterdir()] == []
