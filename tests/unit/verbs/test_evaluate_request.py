"""What `evaluate` is asked is refused before torch is loaded where it makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from nearplane.errors import NearplaneError
from nearplane.verbs.evaluate_request import EvaluateRequest, TasksRequest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"seqlen": 1}, "seqlen is 1"),
        ({"protocol": "plain"}, "--protocol plain is unknown; expected nearplane or "),
        ({"protocol": "llama.cpp", "seqlen": 2}, "--seqlen 2 is too short for --protocol llama.cpp"),
        ({"protocol": "lm-eval", "text": "c4"}, "--protocol lm-eval needs running text, but c4 is read as crops"),
        ({"text": None}, "text is None; expected a path"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(NearplaneError) as caught:
        EvaluateRequest(**{"model": "somewhere/model", "text": ["A text."]} | options).check()
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"tasks": []}, "--tasks is empty"), ({"fewshot": -1}, "fewshot is -1"), ({"limit": 0}, "limit is 0")],
)
def test_tasks_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(NearplaneError) as caught:
        TasksRequest(**{"model": "somewhere/model", "tasks": ["winogrande"]} | options).check()
    assert str(caught.value).startswith(said)
