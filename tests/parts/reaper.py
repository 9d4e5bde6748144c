"""Ends the processes that a failed test has left, and at the end of all tests those that any of them has left.

Processes inherit a variable that names the pytest process and the test, also those that have detached themselves. What
a fixture of a wider scope starts is not the test's own: it stays until the end.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress

import psutil
import pytest

VARIABLE = "TEST_OF_PACKTRAIN"
_FAILED = pytest.StashKey[bool]()
_ROUNDS = 20  # a process may start another one just before it ends


def pytest_sessionstart() -> None:
    os.environ[VARIABLE] = _mark()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    os.environ[VARIABLE] = _mark(item.nodeid)
    try:
        return (yield)
    finally:
        os.environ[VARIABLE] = _mark()
        if item.stash.get(_FAILED, False):  # looking at all processes takes a while, and most tests leave nothing
            end_processes(_mark(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    mark = os.environ[VARIABLE]
    if fixturedef.scope != "function":
        os.environ[VARIABLE] = _mark()
    try:
        return (yield)
    finally:
        os.environ[VARIABLE] = mark


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    end_processes(_mark())


def _mark(test: str = "") -> str:
    return f"{os.getpid()} {test}"


def end_processes(mark: str) -> None:
    """Kill the processes whose mark starts so, by their ids."""
    for _ in range(_ROUNDS):
        found = [process for process in psutil.process_iter() if _mark_of(process).startswith(mark)]
        if not found:
            return
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=10)


def _mark_of(process: psutil.Process) -> str:
    # The environment of a process is that of its start: pytest's own has no mark, or that of a pytest above it.
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(VARIABLE, "")
    except (psutil.Error, OSError):
        return ""
