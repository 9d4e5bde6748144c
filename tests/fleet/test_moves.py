"""A run moves: it starts on this machine, is stopped, continues on hosts over ssh, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.jobs import left_on, wait_until_all_left
from packtrain.pack.manifest import read_manifest
from packtrain.run.checkpoint import committed
from packtrain.run.run import Run, open_run
from packtrain.store import open_store
from parts.hosts import Network
from parts.sandbox import PACE, Sandbox, history, make_sandbox, wait_until, weights

STEPS = 120
HERE = "fleet={local: {machines: 2}, workers: 1}"


@pytest.fixture
def sandbox(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A job whose store and pace the hosts see, too; its variables are passed on to them."""
    monkeypatch.setenv("PATH", network.search_path())
    store = network.shared / tmp_path.name
    sandbox = make_sandbox(tmp_path, str(store), PACE=str(network.shared / PACE))
    text = (tmp_path / "job.yaml").read_text().replace("every: 20 steps", "every: 5 steps")
    (tmp_path / "job.yaml").write_text(f"{text}environment: [PACE, OMP_NUM_THREADS]\n")
    pace(network, 0)
    yield sandbox
    sandbox.close()


def pace(network: Network, seconds: float) -> None:
    (network.shared / f"{PACE}.part").write_text(str(seconds))
    (network.shared / f"{PACE}.part").rename(network.shared / PACE)


def the_run(sandbox: Sandbox, name: str) -> Run:
    return open_run(open_store(sandbox.store), name)


def run_until_stopped(sandbox: Sandbox, network: Network, name: str, generation: int, *command: str) -> None:
    """Start or resume a run, and stop it when that generation has committed a checkpoint."""
    pace(network, 0.3)
    started = sandbox.packtrain(*command, "--detach")
    assert started.returncode == 0, started.stderr + started.stdout
    reached = lambda: any(one.generation == generation for one in committed(the_run(sandbox, name)))  # noqa: E731
    wait_until(reached, f"a checkpoint of generation {generation}")
    stopped = sandbox.packtrain("stop", name)
    assert "stopped at step" in stopped.stdout, stopped.stderr + stopped.stdout
    pace(network, 0)


def test_a_run_that_moves_from_here_to_hosts_and_back_has_the_same_losses_and_weights(
    sandbox: Sandbox, network: Network
) -> None:
    duration = f"train.duration={STEPS} steps"
    stayed = sandbox.packtrain("run", "job.yaml", "--set", duration)
    assert stayed.returncode == 0, stayed.stderr + stayed.stdout
    run_until_stopped(sandbox, network, "faults-2", 1, "run", "job.yaml", "--set", "train.duration=400 steps")
    former = the_run(sandbox, "faults-2").code_digest
    there = "fleet={ssh: {hosts: [host1, host2]}, workers: 1, cache: {directory: /root/staged, size: 1 GB}}"
    changes = ["--set", there, "--set", "budget.hours=1", "--set", "data.stage=true"]
    run_until_stopped(sandbox, network, "faults-2", 2, "resume", "faults-2", *changes)
    # A node that is still leaving would take part again; `resume` looks for such nodes, and this test does not.
    wait_until_all_left(the_run(sandbox, "faults-2"))
    # A node of the former fleet that comes back: an autoscaler or a queue starts the command that it knows. It comes
    # when the run has been resumed already; after its end it would only leave.
    the_run(sandbox, "faults-2").clear_end()
    words = ["node", "faults-2", "--code", former, "--address", "127.0.0.1"]
    refused = sandbox.packtrain(*words)
    assert refused.returncode == 100
    assert "are not those that its client started; not run" in refused.stderr
    back = sandbox.packtrain("resume", "faults-2", "--set", HERE, "--set", "budget.hours=null", "--set", duration)
    assert back.returncode == 0, back.stderr + back.stdout
    assert "fleet: {ssh: {machines: 2, hosts: [host1, host2]}, workers: 1, cache: {directory: " in back.stdout
    moved = the_run(sandbox, "faults-2")
    wait_until_all_left(moved)
    assert history(moved) == history(the_run(sandbox, "faults-1"))
    assert weights(moved) == weights(the_run(sandbox, "faults-1"))
    told = [event.text for event in moved.events().read() if event.kind == "changed"]
    assert any(text.startswith("budget.hours: none -> 1.0 (by ") for text in told)
    staged = [event.text for event in moved.events().read() if event.kind == "data" and "staged" in event.text]
    assert {text.rpartition(" on ")[2] for text in staged if " in " in text} >= {"host1", "host2"}
    for host in network:
        files = {path.name for path in (host.home / "staged/packtrain/packs").iterdir()}
        assert {file.sha256 for file in read_manifest(moved.store, moved.pack_name()).files()} <= files
    places = [{one.address.rpartition(".")[0] for one in generation.members} for generation in moved.generations()]
    assert places == [{"127.0.0"}, {network[0].address.rpartition(".")[0]}, {"127.0.0"}]
    assert [next(iter(launch.fleet)) for launch in moved.launches()] == ["local", "ssh", "local"]
    assert left_on(network) == []
