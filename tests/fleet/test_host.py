"""Nodes as processes of a host: what is started, what survives the client, and how they are found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from packtrain.errors import PacktrainError
from packtrain.fleet.host import END_SECONDS, StartedNode, is_node, start_process, verb_command
from packtrain.launch.start import wait_until_joined
from packtrain.node.preemption import seconds_from
from packtrain.run.records import FleetLaunch
from packtrain.store import Store
from packtrain.system import this_client
from parts.runs import new_run

SLEEPER = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -m packtrain node job-1 --store /s", True),
        ("mpirun -H a:1 python -m packtrain node job-1 --store /s --interface eth0", True),
        ("python -m packtrain node job-2 --store /s", False),
        ("python -m packtrain node job-1 --store /other", False),
        ("grep node job-1 --store /s", False),
    ],
)
def test_a_node_is_recognized_by_its_command_line(words: str, expected: bool) -> None:
    assert is_node(words.split(), "job-1", "/s") == expected


@pytest.mark.usefixtures("processes")
def test_the_host_answers_without_a_word_on_standard_error(tmp_path: Path) -> None:
    """The last line of it is what the client shows if the command ends without an answer."""
    command = verb_command(sys.executable, "list", ["--run", "job-1", "--store", str(tmp_path)])
    done = subprocess.run(command, input="", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.usefixtures("processes")
def test_the_exit_code_and_the_output_of_a_node_are_kept(own_cache: Path) -> None:
    arguments = (sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    node = start_process("job-1", arguments, tied=False)
    while node.exit_code() is None:
        time.sleep(0.02)
    assert node.exit_code() == 7
    assert node.log.is_relative_to(own_cache)
    assert sorted(node.log.read_text().split()) == ["err", "out"]
    assert (node.log.stat().st_mode & 0o777, node.log.parent.stat().st_mode & 0o777) == (0o600, 0o700)


STARTER = f"""
import sys, time
from packtrain.fleet.host import start_process
for how in sys.argv[1:]:
    node = start_process("job-1", {SLEEPER!r}, tied=how == "tied")
    while "up" not in node.log.read_text():
        time.sleep(0.02)
    print(node.process.pid, flush=True)
time.sleep(600)
"""


def started(*how: str) -> tuple[Any, ...]:
    """A client and the nodes that it started."""
    client = subprocess.Popen([sys.executable, "-c", STARTER, *how], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    return client, *(psutil.Process(int(client.stdout.readline())) for _ in how)


@pytest.mark.usefixtures("processes")
def test_a_tied_node_ends_with_its_client() -> None:
    client, node = started("tied")
    assert node.is_running()
    client.kill()
    client.wait()
    gone, _ = psutil.wait_procs([node], timeout=90)
    assert gone == [node]


@pytest.mark.usefixtures("processes")
def test_an_untied_node_outlives_its_client_and_knows_how_long_it_has_after_a_signal() -> None:
    client, node, tied = started("untied", "tied")
    try:
        assert os.getsid(node.pid) == node.pid
        assert seconds_from(node.environ()) == END_SECONDS
        client.kill()
        client.wait()
        gone, _ = psutil.wait_procs([tied], timeout=90)  # the kernel would have ended both at the same time
        assert gone == [tied]
        assert node.is_running()
        assert node.status() != psutil.STATUS_ZOMBIE
    finally:
        node.kill()


@pytest.mark.usefixtures("processes")
def test_a_detached_client_waits_until_its_nodes_have_joined(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, go = new_run(directory_store), tmp_path / "go"
    slow = (
        "import time, pathlib, sys\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
        "print('machine: here has joined', flush=True); time.sleep(600)"
    )
    node = start_process("job-1", (sys.executable, "-c", slow, str(go)), tied=False)
    pause = time.sleep

    def wait(seconds: float) -> None:
        """It joins only when it is waited for."""
        go.touch()
        pause(seconds)

    monkeypatch.setattr("packtrain.launch.start.time.sleep", wait)
    assert not node.has_joined()
    try:
        wait_until_joined(run, [node])
        assert node.has_joined()
    finally:
        node.process.kill()
        node.process.wait()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("code", "joined"), [(0, True), (104, True), (2, False)])
def test_a_detached_client_says_why_a_node_could_not_start(code: int, joined: bool, directory_store: Store) -> None:
    run = new_run(directory_store)
    run.record_launch(FleetLaunch(0.0, this_client(), {}))
    node = start_process("job-1", (sys.executable, "-c", f"print('packtrain: no disk'); exit({code})"), tied=False)
    if joined:
        wait_until_joined(run, [node])
    else:
        with pytest.raises(PacktrainError, match="the node exited on start: no disk"):
            wait_until_joined(run, [node])
    result = run.result()
    assert (result is None) if joined else (result is not None and result.reason.endswith("on start: no disk"))
    node.process.wait()


@pytest.mark.usefixtures("processes")
def test_a_node_that_has_removed_its_log_meanwhile_is_watched_on(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    with subprocess.Popen(["sleep", "60"]) as process:
        node = StartedNode(process, log)
        assert not node.has_joined()
        log.write_bytes(b"machine: \xff has joined\n")
        assert node.has_joined()
        process.kill()
