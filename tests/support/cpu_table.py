"""`pytest --cpu`: CPU seconds of every file, of its dearest tests and fixtures, subprocesses with them.

It needs nothing of the package, so that it measures other checkouts, too: PYTHONPATH=<its folder> pytest -p cpu_table.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILES, TESTS, FIXTURES = Counter[str](), Counter[str](), Counter[str]()
SHOWN = 40  # tests and fixtures: the file of --cpu-file has all


def cpu_seconds() -> float:
    """Return what this process and those that it waited for took so far."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="print tables of CPU seconds by file, test and fixture")
    parser.addoption("--cpu-file", metavar="FILE", help="write the CPU seconds of all of them as JSON")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Add up by file and by test; what a fixture makes for many tests counts where it is made."""
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        taken = cpu_seconds() - before
        FILES[item.location[0]] += taken
        TESTS[item.nodeid] += taken


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[object]:
    """Add up by fixture, without the fixtures that it asks for: those are made before."""
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        FIXTURES[f"{fixturedef.baseid}::{fixturedef.argname}"] += cpu_seconds() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    total = cpu_seconds()
    tables = {"files": FILES, "tests": TESTS, "fixtures": FIXTURES}
    if config.getoption("--cpu-file"):
        found = {name: dict(table.most_common()) for name, table in tables.items()}
        text = json.dumps({"total": total, "imports and collection": total - FILES.total(), **found}, indent=1)
        Path(config.getoption("--cpu-file")).write_text(text)
    if not config.getoption("--cpu"):
        return
    for name, table in tables.items():
        terminalreporter.section(f"CPU seconds of {name}")
        for key, seconds in table.most_common(None if table is FILES else SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  {key}")
    terminalreporter.section("CPU seconds")
    terminalreporter.write_line(f"{total - FILES.total():8.1f}  imports and collection")
    terminalreporter.write_line(f"{total:8.1f}  in all")
