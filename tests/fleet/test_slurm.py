"""The same job on a Slurm cluster: submitted, run to its goal, and queued again without losing its place."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from fleet.places import (
    COUNTING,
    left_on,
    newest,
    packtrain_on,
    wait_until,
    wait_until_all_left,
    write_job,
    write_program,
)
from packtrain.fleet.fleet import Machine
from packtrain.fleet.slurm import SlurmFleet, script, slurm_time, summed_up
from packtrain.places import Slurm
from packtrain.runs import Run
from packtrain.store import Store
from parts import hosts, slurm
from parts.presence import need
from parts.runs import new_run, program_job
from parts.slurm import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need(hosts.missing() is None, str(hosts.missing()))
    need(slurm.missing() is None, str(slurm.missing()))
    with hosts.hosts(tmp_path_factory.mktemp("hosts"), 2) as network, slurm.slurm(network) as cluster:
        yield cluster


def header(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


# What is submitted is a value.


def test_a_fixed_number_of_machines_is_one_job(directory_store: Store) -> None:
    run = new_run(directory_store, program_job(budget={"hours": 1.5}))
    settings = Slurm.model_validate({"machines": 3, "partition": "gpu", "gpus": 4, "options": ["--constraint=a100"]})
    lines = header(script(run, settings))
    for wanted in (
        "--nodes=3", "--requeue", "--signal=B:USR1@120", "--time=0-01:30:00", "--partition=gpu", "--gres=gpu:4",
        "--constraint=a100", "--open-mode=append",
    ):  # fmt: skip
        assert wanted in lines
    assert not any(line.startswith("--array") for line in lines)


def test_a_range_of_machines_is_an_array_of_jobs(directory_store: Store) -> None:
    run = new_run(directory_store)
    lines = header(script(run, Slurm.model_validate({"machines": "2..4", "time": "4 h"})))
    assert {"--nodes=1", "--array=1-4", "--time=0-04:00:00"} <= set(lines)


@pytest.mark.parametrize(
    ("settings", "whole"), [({}, True), ({"gpus": 1}, False), ({"options": ["--cpus-per-task=8"]}, False)]
)
def test_a_machine_is_a_whole_node_unless_a_part_is_asked_for(
    directory_store: Store, settings: dict[str, Any], whole: bool
) -> None:
    lines = header(script(new_run(directory_store), Slurm.model_validate(settings)))
    assert ("--exclusive" in lines) == whole


def test_the_script_is_sound_and_holds_no_value(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "canary-of-the-test")
    run = new_run(s3_store, program_job(environment=["SECRET"]))
    [start] = SlurmFleet(Slurm()).plan(run)
    assert start.script is not None
    assert subprocess.run(["bash", "-n"], input=start.script, text=True).returncode == 0
    assert "SECRET" in start.arguments[-1]
    assert "canary-of-the-test" not in repr(start)
    assert "secret-of-moto" not in repr(start)


@pytest.mark.parametrize(("seconds", "shown"), [(1, "0-00:01:00"), (5400, "0-01:30:00"), (86400 + 61, "1-00:02:00")])
def test_times_are_whole_minutes(seconds: float, shown: str) -> None:
    assert slurm_time(seconds) == shown


def test_a_queue_is_summed_up() -> None:
    machines = [Machine("a", "RUNNING"), Machine("b", "RUNNING"), Machine("c", "PENDING", "Resources")]
    assert summed_up(machines) == "2 RUNNING, 1 PENDING (Resources)"
    assert summed_up([]) == ""


# On a cluster.


def submitted(cluster: Cluster, name: str, fleet: str, script: str) -> Run:
    place = cluster.login.place.parent / "shared"
    job = write_program(place / f"{name}-job", place / name, fleet, script, "environment: [SECRET]")
    done = packtrain_on(cluster.login, "run", job, "--detach", SECRET="canary")
    assert done.returncode == 0, done.stderr + done.stdout
    return newest(place / name)


def said(run: Run) -> list[str]:
    lines = sorted(run.log_lines().read(), key=lambda line: line.time)
    return [line.text for line in lines if line.rank is not None and line.text.startswith("rank")]


def test_two_nodes_reach_the_goal_and_ls_shows_the_queue(cluster: Cluster) -> None:
    cluster.command("scontrol", "update", "PartitionName=main", "State=DOWN")
    run = submitted(cluster, "two", "{slurm: {machines: 2}, workers: 1}", COUNTING.replace("LAST", "2"))
    listed = packtrain_on(cluster.login, "ls", "--json", "--store", run.store.url)
    assert json.loads(listed.stdout)[0]["queue"].startswith("1 PENDING"), listed.stderr
    cluster.command("scontrol", "update", "PartitionName=main", "State=UP")
    wait_until_all_left(run)
    result = run.result()
    assert result is not None
    assert result.status == "finished", (result, cluster.logs())
    assert sorted(said(run)) == ["rank 0 of 2 from 0 canary", "rank 1 of 2 from 0 canary"]
    kept = run.store.get(run.key("slurm.sh")).decode()
    assert "srun" in kept
    assert "canary" not in kept
    wait_until(lambda: settled(cluster), "an empty queue")


def test_one_of_an_array_is_queued_again_alone(cluster: Cluster) -> None:
    """It is the one whose job has the number of the whole array. The other goes on without it."""
    run = submitted(cluster, "array", "{slurm: {machines: 1..2}, workers: 1}", COUNTING.replace("LAST", "100000"))
    wait_until(lambda: len(said(run)) == 2, "both workers")
    [array] = json.loads(run.store.get(run.key("slurm.json")))
    listed = [line.split() for line in cluster.command("squeue", "-h", "-r", "-j", array, "-o", "%i %A").splitlines()]
    [noticed] = [place for place, job in listed if job == array]
    [other] = [place for place, job in listed if job != array]
    cluster.command("scancel", "--batch", "--signal=USR1", noticed)
    wait_until(lambda: "Restarts=1" in shown(cluster, noticed), "the requeue")
    wait_until_all_left(run)
    assert "Restarts=0" in shown(cluster, other)
    assert [generation.cause for generation in run.generations()] == ["start", "notice"]
    assert "rank 0 of 1" in said(run)[-1]
    assert "from 0" not in said(run)[-1]
    # It comes too late, and leaves at once.
    cluster.command("scontrol", "update", f"JobId={noticed}", "StartTime=now+3")
    wait_until(lambda: settled(cluster), "an empty queue")
    assert left_on(cluster.nodes) == []


def shown(cluster: Cluster, job: str) -> str:
    return cluster.command("scontrol", "show", "job", job)


def test_what_slurm_would_refuse_is_refused_before_the_data_is_packed(cluster: Cluster) -> None:
    place = cluster.login.place.parent / "shared"
    job = write_job(place, place / "refused", "{slurm: {machines: 2, partition: gpu}, workers: 1}")
    done = packtrain_on(cluster.login, "run", job, "--detach")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "sbatch: invalid partition specified: gpu" in done.stderr
    assert list((place / "refused").rglob("*.json")) == []


def settled(cluster: Cluster) -> bool:
    return cluster.command("squeue", "-h", "-t", "PENDING,RUNNING,COMPLETING") == ""


def test_a_notice_before_the_time_limit_queues_the_run_again_where_it_was(cluster: Cluster) -> None:
    run = submitted(cluster, "again", "{slurm: {machines: 2}, workers: 1}", COUNTING.replace("LAST", "100000"))
    wait_until(lambda: len(said(run)) == 2, "both workers")
    [job] = json.loads(run.store.get(run.key("slurm.json")))
    # What Slurm does two minutes before the limit: to the script, and to nothing else.
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: cluster.command("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING", "the requeue")
    assert run.result() is None
    # Slurm would wait for two minutes; within the second of the requeue its nodes still refuse the job's credential.
    cluster.command("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    wait_until_all_left(run)
    result = run.result()
    assert result is not None
    assert result.status == "finished", (result, cluster.logs())
    later = said(run)[2:]
    assert len(later) == 2
    assert all("from 0" not in line for line in later), later
    assert json.loads(run.store.get(run.key("slurm.json"))) == [job]
    wait_until(lambda: settled(cluster), "an empty queue")
    assert left_on(cluster.nodes) == []
