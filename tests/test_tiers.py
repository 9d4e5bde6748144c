"""The tiers of the tests: a test's own follows from its fixtures, and a quick test starts nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("processes")

TESTS = """
import os, socket, subprocess, sys
import pytest

@pytest.fixture
def server(processes):
    pass

@pytest.fixture(params=["file", pytest.param("server", marks=pytest.mark.local)])
def store(request):
    return request.getfixturevalue(request.param) if request.param == "server" else None

def test_computes():
    pass

def test_serves(server):
    socket.create_server(("127.0.0.1", 0)).close()

def test_stores(store):
    pass

@pytest.mark.usefixtures("training")
def test_trains():
    pass

def test_needs_what_is_not_there(needs_nothing_like_it):
    pass

def test_hides_a_process():
    try:
        subprocess.run([sys.executable, "-c", ""])
    except RuntimeError:
        pass

def test_hides_a_fork():
    try:
        os._exit(0) if os.fork() == 0 else os.wait()
    except RuntimeError:
        pass

def test_hides_a_server():
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except RuntimeError:
        pass
"""
CONFTEST = """
from parts.tiers import _part
part = _part("nothing_like_it", lambda: "there is no such thing")
"""


def outcomes(folder: Path, *words: str) -> tuple[dict[str, set[str]], str]:
    """Run the tests above; return their names by outcome, and the last line."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "conftest.py").write_text(CONFTEST)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Other plugins take longer to import than all of these tests take.
    environment = {**outside, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-p", "parts.tiers", "-p", "xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-rA", *plugins, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    names: dict[str, set[str]] = {}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) test_some.py::test_(\w+\b\S*)", done.stdout, re.MULTILINE):
        names.setdefault(outcome, set()).add(name)
    return names, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("processes_of_xdist", [(), ("-n", "2")], ids=["one", "xdist"])
def test_a_quick_test_that_starts_something_fails_even_if_it_hides_it(
    tmp_path: Path, processes_of_xdist: tuple[str, ...]
) -> None:
    names, _ = outcomes(tmp_path, "-m", "quick", *processes_of_xdist)
    assert names["ERROR"] == {"hides_a_process", "hides_a_fork", "hides_a_server"}
    assert names["PASSED"] - names["ERROR"] == {"computes", "stores[file]"}
    assert names.keys() == {"PASSED", "ERROR"}


def test_the_tier_follows_from_fixtures_and_from_the_marks_of_parameters(tmp_path: Path) -> None:
    names, _ = outcomes(tmp_path, "-m", "local")
    assert names == {"PASSED": {"serves", "stores[server]", "trains"}}


def test_a_part_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    names, _ = outcomes(tmp_path, "-m", "system")
    assert names == {"ERROR": {"needs_what_is_not_there"}}


@pytest.mark.parametrize("processes_of_xdist", [(), ("-n", "2")], ids=["one", "xdist"])
def test_the_last_line_says_what_did_not_run_and_how_to_run_it(
    tmp_path: Path, processes_of_xdist: tuple[str, ...]
) -> None:
    _, last = outcomes(tmp_path, "-m", "not system", *processes_of_xdist)
    assert last == "1 system test did not run: make test-system, as root"
