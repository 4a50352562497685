"""The real client: the converter of CTranslate2 takes AWQ alone, and not what transformers 5 makes of its config.

Needs ctranslate2 and gptqmodel, in an environment of their own (`make test-ctranslate2`). Written for 4.8.5.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from written_folders import Written, needs_project, written

converters = pytest.importorskip("ctranslate2.converters", reason="needs ctranslate2")
pytestmark = [pytest.mark.nightly, needs_project]
FORMS = {"awq": {"format": "awq", "symmetric": False}, "gptq": {"format": "gptq"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    return written(FORMS, tmp_path_factory.mktemp("folders"))


def test_awq_fails_on_the_config_of_transformers_5(folders: dict[str, Written], tmp_path: Path) -> None:
    """Where this fails, the converter knows transformers 5, and what it makes of our folder should be compared."""
    with pytest.raises(AttributeError, match="'AwqConfig' object has no attribute 'version'"):
        converters.TransformersConverter(str(folders["awq"].folder)).convert(str(tmp_path / "out"))


def test_gptq_is_refused(folders: dict[str, Written], tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="GPTQ' is not yet implemented"):
        converters.TransformersConverter(str(folders["gptq"].folder)).convert(str(tmp_path / "out"))
