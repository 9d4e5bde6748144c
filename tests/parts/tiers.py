"""The tiers of the tests, which follow from the fixtures that a test uses.

`quick`   computes, and reads and writes files. No processes, no servers, no training.
`local`   also starts processes, trains and serves, on this machine as an ordinary user.
`system`  needs root, Debian packages or other frameworks. A missing part is a failure.

A test whose fixtures include `processes`, `thorough` or `training` is local; one whose fixtures include `system`, as
all parts below do, is of the system. A parameter that stands for a fixture carries the mark itself. Whatever else is
quick, and an attempt to start a process or a server there fails the test.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from parts import arm64, azure, ceph, containers, hosts, kubernetes, mpi, slurm, sshd
from parts.browser import CHROMIUM

COMMANDS = {"quick": "make quick", "local": "make test", "system": "make test-system, as root"}
TIERS = list(COMMANDS)
_TIER_OF_FIXTURE = {"processes": "local", "thorough": "local", "training": "local", "system": "system"}
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.listen"}


# What a test may need.


@pytest.fixture(scope="session")
def processes() -> None:
    """For tests that start a process or a server."""


@pytest.fixture(scope="session")
def thorough() -> None:
    """For tests that try very many cases."""


@pytest.fixture(scope="session")
def training() -> None:
    """For tests that train, compile or export a model, if only for seconds."""


@pytest.fixture(scope="session")
def system() -> None:
    """For tests that need more than Python and an ordinary user."""


def _part(name: str, missing: Callable[[], object]) -> Any:
    """Make the fixture of tests that need a part; `missing` returns why it is not there."""

    @pytest.fixture(scope="session", name=f"needs_{name}")
    def part(system: None) -> None:
        if reason := missing():
            pytest.fail(f"{reason}; `make test-system` installs it")

    return part


def _program(name: str) -> Any:
    return _part(name.partition("-")[0], lambda: shutil.which(name) is None and f"{name} is not installed")


def _package(name: str) -> Any:
    return _part(name, lambda: importlib.util.find_spec(name) is None and f"the package {name} is not installed")


needs_root = _part("root", lambda: os.geteuid() != 0 and "this user is not root")
needs_hosts = _part("hosts", hosts.missing)
needs_kubernetes = _part("kubernetes", kubernetes.missing)
needs_slurm = _part("slurm", slurm.missing)
needs_mpi = _part("mpi", mpi.missing)
needs_ceph = _part("ceph", lambda: ", ".join(ceph.missing_programs()))
needs_azurite = _part("azurite", lambda: not azure.PROGRAM.exists() and "azurite is not installed")
needs_containers = _part("containers", containers.missing)
needs_arm64 = _part("arm64", arm64.missing)
needs_sshd = _part("sshd", lambda: sshd.program() is None and "sshd is not installed")
needs_chromium = _part("chromium", lambda: not CHROMIUM.exists() and "Chromium is not installed")
needs_buildah = _program("buildah")
needs_cc = _program("cc")
needs_faketime = _program("faketime")
needs_fish = _program("fish")
needs_systemd = _program("systemd-analyze")
needs_zsh = _program("zsh")

needs_accelerate = _package("accelerate")
needs_asyncssh = _package("asyncssh")
needs_lightning = _package("lightning")
needs_mlflow = _package("mlflow")
needs_nbclient = _package("nbclient")
needs_pandas = _package("pandas")
needs_polars = _package("polars")
needs_transformers = _package("transformers")


# Which tests run, in which order, and where.


def pytest_addoption(parser: pytest.Parser) -> None:
    shuffle = "Run the files in a random order, and draw random examples."
    parser.addoption("--shuffle", type=int, metavar="SEED", help=shuffle)


def pytest_configure(config: pytest.Config) -> None:
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: see tests/parts/tiers.py")
    # A busy machine may draw and try an example slowly. Without a seed, every run tries the same examples.
    is_random = config.getoption("shuffle") is not None or config.getoption("hypothesis_seed", None) is not None
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("tests", deadline=None, derandomize=not is_random, suppress_health_check=slow)
    hypothesis.settings.load_profile("tests")
    sys.addaudithook(_guard)
    socket.socket.listen = _listen  # type: ignore[assignment, method-assign]  # Python has no event for it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search no garbage among what the files import: it takes as long as importing it, and again in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def tier_of(item: pytest.Item) -> str:
    names = [_TIER_OF_FIXTURE[name] for name in _TIER_OF_FIXTURE if name in getattr(item, "fixturenames", ())]
    return max([*names, *(mark.name for mark in item.iter_markers() if mark.name in TIERS), "quick"], key=TIERS.index)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test with its tier, which `-m` then selects."""
    item.add_marker(tier_of(item))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Quick tests fill the gap at the end, when the processes that share the tests run out of long ones. The longest
    # part that one of them has alone comes first.
    items.sort(key=lambda item: (item.get_closest_marker("quick") is not None, not _uses_forker(item.path)))
    if (seed := config.getoption("shuffle")) is not None:
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)  # noqa: S311
        items.sort(key=lambda item: files.index(item.path))


@cache
def _uses_forker(path: Path) -> bool:
    return "forker" in path.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a file that share fixtures to one process, and any other test to the next process.

    One process also gets all tests with a forker, which takes seconds to start.
    """
    from xdist.scheduler import LoadScopeScheduling

    is_shuffled = config.getoption("shuffle") is not None  # then these tests might come last

    @cache
    def scope_of(file: str) -> str | None:
        path = config.rootpath / file
        if _uses_forker(path) and not is_shuffled:
            return "forker"
        return file if 'scope="module"' in path.read_text() else None

    class ByFixtures(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.partition("::")[0]) or nodeid

    return ByFixtures(config, log)


# The guard of quick tests.


class _Guard:
    """Refuses what a quick test must not start; `refused` is what the current test has tried."""

    def __init__(self) -> None:
        self.is_on = False
        self.refused: list[str] = []

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """Audit an event of Python. Servers of other tests may still work in threads of their own."""
        if self.is_on and event in _STARTS and threading.current_thread() is threading.main_thread():
            self.refused.append(f"{event} {arguments[1:2]}")
            raise RuntimeError(f"a quick test must not start this: {self.refused[-1]}")


_guard = _Guard()
_real_listen = socket.socket.listen


def _listen(self: socket.socket, *backlog: int) -> None:
    sys.audit("socket.listen", self, self.getsockname())
    _real_listen(self, *backlog)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _guard.refused.clear()
    _guard.is_on = item.get_closest_marker("quick") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    _guard.is_on = False  # what other tests have started and shared may end now
    if _guard.refused:
        # The code under test may have handled the error, and the test may have passed.
        pytest.fail(f"a quick test started {'; '.join(_guard.refused)}: use the fixture `processes`", pytrace=False)


# The last line: what did not run.


_unselected = Counter[str]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    _unselected.update(tier_of(item) for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["unselected"] = dict(_unselected)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count from a process of xdist; each of them collects all tests."""
    _unselected.clear()
    _unselected.update(getattr(node, "workeroutput", {}).get("unselected", {}))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    for tier, count in ({} if hasattr(config, "workerinput") else _unselected).items():
        print(f"{count} {tier} test{'s' * (count != 1)} did not run: {COMMANDS[tier]}")
