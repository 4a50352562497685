"""`pytest --cpu`: how many CPU seconds every file of tests took, its subprocesses with it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

SPENT: Counter[str] = Counter()


def cpu_seconds() -> float:
    """Return what this process and those that it waited for took so far."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="print a table of CPU seconds by file")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Add up by file; what a fixture makes for many tests counts where it is made."""
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        SPENT[item.location[0]] += cpu_seconds() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--cpu"):
        return
    terminalreporter.section("CPU seconds")
    for file, seconds in SPENT.most_common():
        terminalreporter.write_line(f"{seconds:8.1f}  {file}")
    total = cpu_seconds()
    terminalreporter.write_line(f"{total - SPENT.total():8.1f}  imports and collection")
    terminalreporter.write_line(f"{total:8.1f}  in all")
