"""Calls of tools are found in every markup, and what does not parse is none."""

from __future__ import annotations

import pytest

from nearplane.evaluation.tool_calls import calls

CALL = ("get_weather", {"city": "Oslo"})


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>', [CALL]),
        ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]', [CALL]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ('{"type": "function", "function": {"name": "f", "arguments": "{}"}}', [("f", {})]),
        ('{"tool_calls": [{"id": "a", "name": "f", "arguments": {}}]}', [("f", {})]),
        ('Sure: {"name": "f", "arguments": {}} and {"name": "g", "arguments": {}}',
         [("f", {}), ("g", {})]),
        ('{{"name": "f", "arguments": {"x": {"y": 1}}}}', [("f", {"x": {"y": 1}})]),
        ('{"name": "get_weather", "arguments": {"city": "Oslo"', []),
        ('{"name": "f", "arguments": "no JSON"}', []),
        ('{"name": "f"}', []),
        ('{"city": "Oslo"}', []),
        ("no call at all", []),
        ("{" * 2000, []),
    ],
)  # fmt: skip
def test_calls_are_found_whatever_stands_around_them(answer: str, found: list[object]) -> None:
    assert calls(answer) == found
