"""The same job on a Slurm cluster: submitted, finished, and requeued without losing progress."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fleet.jobs import (
    COUNTING,
    left_on,
    newest,
    packtrain_on,
    wait_until_all_left,
    write_job,
    write_program,
)
from packtrain.backoff import Backoff
from packtrain.errors import Mistake
from packtrain.fleet import states_of
from packtrain.fleet.fleet import run_to_check
from packtrain.fleet.host import is_node
from packtrain.fleet.slurm import (
    NOTICE_SECONDS,
    QueuedJob,
    SlurmFleet,
    SlurmSettings,
    cpus_per_gpu,
    script,
    should_requeue,
    slurm_time,
    with_cpus,
)
from packtrain.launch.start import start
from packtrain.run.checkpoint import commit, committed
from packtrain.run.records import Result
from packtrain.run.run import Run
from packtrain.store import Store, StoreError, open_store
from packtrain.store.directory import DirectoryStore
from parts import slurm
from parts.hosts import Network
from parts.runs import new_run, program_job, write_files
from parts.sandbox import kill, wait_until
from parts.slurm import Cluster


@pytest.fixture(scope="module")
def cluster(needs_slurm: None, network: Network) -> Iterator[Cluster]:
    with slurm.slurm(network) as cluster:
        yield cluster


def script_of(run: Run, **settings: Any) -> str:
    return script(run, run.job, SlurmSettings.model_validate(settings))


def header(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_fixed_number_of_machines_is_one_job(directory_store: Store) -> None:
    run = new_run(directory_store, program_job(budget={"hours": 1.5}))
    lines = header(script_of(run, machines=3, partition="gpu", gpus=4, options=["--constraint=a100"]))
    for option in (
        "--nodes=3", "--requeue", "--signal=B:USR1@120", "--time=0-01:30:00", "--partition=gpu", "--gres=gpu:4",
        "--constraint=a100", "--open-mode=append",
    ):  # fmt: skip
        assert option in lines
    assert not any(line.startswith("--array") for line in lines)


def test_a_range_of_machines_is_an_array_of_jobs(directory_store: Store) -> None:
    run = new_run(directory_store)
    lines = header(script_of(run, machines="2..4", time="4 h"))
    assert {"--nodes=1", "--array=1-4", "--time=0-04:00:00"} <= set(lines)


@pytest.mark.parametrize(
    ("settings", "whole"), [({}, True), ({"gpus": 1}, False), ({"options": ["--cpus-per-task=8"]}, False)]
)
def test_a_machine_is_a_whole_node_unless_the_job_asks_for_a_part(
    directory_store: Store, settings: dict[str, Any], whole: bool
) -> None:
    lines = header(script_of(new_run(directory_store), **settings))
    assert ("--exclusive" in lines) == whole


NODES = """
NodeName=a Arch=x86_64 CPUAlloc=0 CPUEfctv=62 CPUTot=64 Gres=gpu:a100:8(S:0-1) Partitions=gpu,all State=IDLE
NodeName=b CPUTot=48 Gres=gpu:2,gpu:h100:2,shard:8 Partitions=all State=DOWN+DRAIN Reason=no disk [root@2026]
NodeName=c CPUTot=8 Gres=gpu:1 Partitions=all
NodeName=d CPUTot=128 Gres=(null) Partitions=all
"""


@pytest.mark.parametrize(
    ("gpus", "partition", "cpus"),
    [(8, "gpu", 7), (4, None, 7), (1, "all", 7), (2, "b", None), (16, None, None)],
)
def test_a_gpu_comes_with_its_share_of_a_nodes_cores(gpus: int, partition: str | None, cpus: int | None) -> None:
    assert cpus_per_gpu(NODES, gpus, partition) == cpus


def test_cores_are_the_jobs_own_word_or_the_nodes(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.fleet.slurm.ask", lambda *_: NODES)
    run = new_run(directory_store)

    def cores(**settings: Any) -> list[str]:
        [plan] = SlurmFleet(SlurmSettings.model_validate(settings)).plan(run)
        assert plan.script is not None
        return [line for line in header(plan.script) if line.startswith("--cpus")]

    assert cores(gpus=4, partition="gpu") == ["--cpus-per-task=28"]
    assert cores(gpus=4, cpus_per_gpu=3) == ["--cpus-per-task=12"]
    assert cores(gpus=4, options=["--cpus-per-gpu=5"]) == ["--cpus-per-gpu=5"]
    assert cores(gpus=4, options=["--exclusive"]) == []
    assert cores(gpus=64) == []
    assert cores() == []


def test_a_cluster_that_does_not_say_what_it_has_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise Mistake("scontrol: timed out")

    monkeypatch.setattr("packtrain.fleet.slurm.ask", refuse)
    settings = SlurmSettings.model_validate({"gpus": 2})
    assert with_cpus(settings) == settings
    assert settings.needs_cpus


def test_the_script_is_valid_and_holds_no_secret(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "canary-of-the-test")
    run = new_run(s3_store, program_job(environment=["SECRET"]))
    [start] = SlurmFleet(SlurmSettings()).plan(run)
    assert start.script is not None
    assert subprocess.run(["bash", "-n"], input=start.script, text=True).returncode == 0
    assert "SECRET" in start.arguments[-1]
    assert "canary-of-the-test" not in repr(start)
    assert "secret-of-moto" not in repr(start)


@pytest.mark.parametrize(("seconds", "shown"), [(1, "0-00:01:00"), (5400, "0-01:30:00"), (86400 + 61, "1-00:02:00")])
def test_time_limits_are_whole_minutes(seconds: float, shown: str) -> None:
    assert slurm_time(seconds) == shown


def queued(state: str, reason: str = "") -> QueuedJob:
    return QueuedJob("7", state, reason, "", "", "", 0)


def test_the_states_of_a_queue_are_counted() -> None:
    jobs = [queued("RUNNING"), queued("RUNNING"), queued("PENDING", "Resources")]
    assert states_of([job.machine for job in jobs]) == "2 RUNNING, 1 PENDING (Resources)"
    assert states_of([]) == ""


@pytest.mark.parametrize(
    ("state", "over"),
    [
        ("RUNNING", False), ("COMPLETING", False), ("PENDING NODE_FAIL", False), ("COMPLETED COMPLETING", True),
        ("TIMEOUT", True),
    ],
)  # fmt: skip
def test_a_job_that_is_requeued_is_not_over(state: str, over: bool) -> None:
    assert queued(state).machine.is_over == over


# Runs until it gets SIGUSR1, and then exits with $CODE.
SRUN = """#!/bin/bash
echo "$PACKTRAIN_NOTICE_SECONDS" > "$PLACE/seconds"
trap 'kill %1; exit '"$CODE" USR1
sleep 60 & touch "$PLACE/up"; wait
"""


def stand_in(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("code", "again"), [(101, True), (137, True), (2, True), (0, False), (100, False), (103, False)]
)
def test_after_a_preemption_notice_the_job_is_requeued_unless_the_run_is_over(
    code: int, again: bool, directory_store: Store, tmp_path: Path
) -> None:
    """srun exits with the highest code of all nodes: 137 is one that was killed among others that left."""
    stand_in(tmp_path / "bin", "srun", SRUN)
    stand_in(tmp_path / "bin", "scontrol", '#!/bin/bash\necho "$*" >> "$PLACE/requeued"\n')
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PLACE": str(tmp_path), "CODE": str(code), "SLURM_JOB_ID": "7"}
    (tmp_path / "job.sh").write_text(script_of(new_run(directory_store)))
    job = subprocess.Popen(["bash", str(tmp_path / "job.sh")], env=path)
    wait_until((tmp_path / "up").exists, "srun")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == code
    assert (tmp_path / "requeued").exists() == again
    assert (tmp_path / "seconds").read_text().strip() == str(NOTICE_SECONDS)


def ended_job(run: Run, place: Path, srun: str, scontrol: str = "true") -> tuple[int, bool]:
    """Run the script of a job with these lines of shell; return its exit code and True if it was requeued."""
    stand_in(place / "bin", "srun", f"#!/bin/bash\n{srun}\n")
    stand_in(place / "bin", "scontrol", f'#!/bin/bash\n{scontrol} || exit 1\necho "$*" >> "$PLACE/requeued"\n')
    path = {"PATH": f"{place / 'bin'}:/usr/bin:/bin", "PLACE": str(place), "SLURM_JOB_ID": "7"}
    (place / "requeued").unlink(missing_ok=True)
    done = subprocess.run(["bash"], input=script_of(run), text=True, env=path, timeout=60)
    return done.returncode, (place / "requeued").exists()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("code", [0, 1, 2, 100, 101, 102, 103, 126, 127, 137])
def test_without_a_notice_the_job_is_requeued_while_the_run_has_no_result(
    code: int, directory_store: Store, tmp_path: Path
) -> None:
    """srun kills all nodes (137) when it loses touch with one, also if that one is back right away."""
    run = new_run(directory_store)
    hopeless = code in (0, 2, 102, 126, 127)  # finished; mistakes, a deleted run, and a program that is missing
    assert ended_job(run, tmp_path, f"exit {code}") == (code, not hopeless)
    run.finish(Result("failed", "it failed", 3, 4.0))
    assert ended_job(run, tmp_path, f"exit {code}") == (code, False)


def test_a_job_that_keeps_failing_is_requeued_a_few_times_for_each_commit(
    directory_store: Store, tmp_path: Path
) -> None:
    run = new_run(directory_store, program_job(fleet={"failures": 2, "slurm": {"machines": 2}}))
    assert [should_requeue(run, "7", 137, restarts) for restarts in range(4)] == [True, True, False, False]
    assert should_requeue(run, "8", 137, 0), "each job of an array counts for itself"
    commit(run, 1, 1, None, write_files(tmp_path, {"count": b"1"}))
    assert [should_requeue(run, "7", 137, restarts) for restarts in range(4, 7)] == [True, True, False]
    assert "Slurm job 7 ended with code 137 without a result; it is requeued" in told(run)
    assert any("2 requeues brought no new commit" in text for text in told(run))
    run.store.put(run.key("requeues/7.json"), b"damaged")
    assert should_requeue(run, "7", 137, 7)


def test_a_job_whose_store_does_not_answer_is_requeued_a_limited_number_of_times(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store)

    def away(key: str, limit: int = 0) -> bytes | None:
        raise StoreError(f"no answer to {key}", temporary=True)

    monkeypatch.setattr(run.store, "find", away)
    assert should_requeue(run, "7", 137, 0)
    assert not should_requeue(run, "7", 137, 1000)


@pytest.mark.usefixtures("processes")
def test_a_cancelled_or_stopped_job_is_not_requeued(directory_store: Store, tmp_path: Path) -> None:
    """Slurm would requeue a cancelled job if it were asked to."""
    run = new_run(directory_store)
    cancel = "trap 'exit 101' TERM; sleep 0.5; kill -TERM $PPID; sleep 30 & wait"
    assert ended_job(run, tmp_path, cancel) == (101, False)
    notice = f"trap : USR1; kill -USR1 $PPID; {cancel}; wait"
    assert ended_job(run, tmp_path, notice) == (101, False), "within the notice, too"
    late = "(sleep 0.2; kill -TERM $PPID) & exit 137"
    assert ended_job(run, tmp_path, late) == (137, False), "and while the store is asked"
    run.request_stop("a person asked for it")
    assert ended_job(run, tmp_path, "exit 137") == (137, False)


@pytest.mark.usefixtures("processes")
def test_a_requeue_is_tried_again_until_the_controller_answers(directory_store: Store, tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "sleep", "#!/bin/bash\n")
    second = '{ [ -e "$PLACE/tried" ] || ! touch "$PLACE/tried"; }'
    assert ended_job(new_run(directory_store), tmp_path, "exit 137", second) == (137, True)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_store_with_odd_characters_in_its_path_is_quoted(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "my store's #1 50%"), create=True)
    lines = header(script_of(new_run(store)))
    assert not any(line.startswith("--no-kill") for line in lines), "a job that lost a node must be requeued"
    [output] = [words for line in lines if "--output" in line for words in [shlex.split(line)]]
    assert output == [f"--output={store.url.replace('%', '%%')}/runs/job-1/slurm-%j.out"]


@pytest.mark.parametrize("name", ["line\nscancel --me", "carriage\rreturn", "escape\x1b[2J", "back\\slash"])
def test_a_store_whose_path_slurm_would_misread_is_refused(name: str, tmp_path: Path) -> None:
    run = Run(DirectoryStore(tmp_path / name), "job-1", b"", b"")
    with pytest.raises(Mistake, match="Slurm takes neither control characters nor backslashes"):
        script(run, program_job(), SlurmSettings())


@pytest.mark.parametrize(
    "option", ["nodes", "-N2", "--constraint=a\n#SBATCH --wrap=id", "--job-name=mine", "--comment", "--export=ALL"]
)
def test_options_that_hide_a_job_or_are_more_than_one_are_refused(option: str) -> None:
    with pytest.raises(ValidationError):
        SlurmSettings.model_validate({"options": [option]})


def test_an_option_stays_one_option(directory_store: Store) -> None:
    lines = header(script_of(new_run(directory_store), options=["--constraint=a --comment=b"]))
    assert shlex.split(lines[-1]) == ["--constraint=a --comment=b"]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins: squeue shows a file; sbatch and scancel write down their arguments."""
    place = tmp_path / "slurm"
    stand_in(place, "squeue", f'#!/bin/sh\ncat "{place}/queue.json"\n')
    stand_in(place, "sbatch", f'#!/bin/sh\necho "$*" >> "{place}/submitted"; cat > "{place}/script"; echo 7\n')
    stand_in(place, "scancel", f'#!/bin/sh\necho "$*" >> "{place}/cancelled"\n')
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    show_queue(place)
    return place


def show_queue(place: Path, *jobs: dict[str, Any]) -> None:
    (place / "queue.json").write_text(json.dumps({"jobs": jobs}))


def job_of(run: Run, state: str, **fields: Any) -> dict[str, Any]:
    """A job of this user as squeue shows it."""
    comment = f"{run.name} in {run.store.url} ({run.store.identity})"
    own = {"name": f"packtrain-{run.name}", "comment": comment, "user_id": os.getuid()}
    return {"job_id": 7, "job_state": [state], **own, **fields}


def submissions(place: Path) -> int:
    file = place / "submitted"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.usefixtures("processes")
def test_a_run_that_is_already_queued_is_not_submitted_again(directory_store: Store, queue: Path) -> None:
    run = new_run(directory_store, program_job(fleet={"slurm": {"machines": 2}}))
    told: list[str] = []
    start(run, False, told.append)
    show_queue(queue, job_of(run, "PENDING"))
    assert start(run, False, told.append) == []
    assert submissions(queue) == 1
    assert "is already queued for this run" in told[-1]
    for state in ("RUNNING", "COMPLETING"):  # the latter may still be requeued
        show_queue(queue, job_of(run, state))
        with pytest.raises(Mistake, match="Slurm job 7 of this run is still running"):
            start(run, False, told.append)
    show_queue(queue, job_of(run, "COMPLETED"), job_of(run, "PENDING", comment="/another/store"))
    start(run, False, told.append)
    assert submissions(queue) == 2


@pytest.mark.usefixtures("processes")
def test_a_stop_cancels_queued_jobs(directory_store: Store, queue: Path) -> None:
    run = new_run(directory_store, program_job(fleet={"slurm": {"machines": "1..2"}}))
    fleet = SlurmFleet(SlurmSettings())
    fleet.cancel_queued(run)
    assert not (queue / "cancelled").exists()
    show_queue(queue, job_of(run, "RUNNING", array_job_id=5), job_of(run, "PENDING", array_job_id=5))
    fleet.cancel_queued(run)
    fleet.end(run)
    assert (queue / "cancelled").read_text().splitlines() == ["--quiet --state=PENDING 5", "--quiet 5"]


@pytest.mark.usefixtures("processes")
def test_down_returns_when_the_jobs_are_gone(
    directory_store: Store, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fleet = new_run(directory_store), SlurmFleet(SlurmSettings())
    show_queue(queue, job_of(run, "RUNNING", nodes="c1"))
    waits: list[str] = []

    def wait(_: Backoff) -> bool:  # meanwhile the job ends
        waits.append((queue / "cancelled").read_text().strip())
        show_queue(queue, job_of(run, "COMPLETING" if len(waits) < 2 else "CANCELLED"))
        return True

    monkeypatch.setattr(Backoff, "wait", wait)
    assert fleet.down(run) == ["c1"]
    assert waits == ["--quiet 7"] * 2
    show_queue(queue, job_of(run, "RUNNING", user_id=4242))
    with pytest.raises(Mistake, match="Slurm job 7 of job-1 is of user 4242, who has to cancel it"):
        fleet.down(run)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "other",
    [
        {"name": "thesis", "comment": None},
        {"name": "thesis"},
        {"comment": "job-1 in /another/store"},
        {"user_id": 4242},
    ],
)
def test_a_stop_cancels_no_other_job_whatever_the_store_says(
    other: dict[str, Any], directory_store: Store, queue: Path
) -> None:
    """Whoever can write to the store could list the number of any job in it."""
    run, fleet = new_run(directory_store), SlurmFleet(SlurmSettings())
    run.store.put(run.key("slurm.json"), b'["7"]')
    for state in ("PENDING", "RUNNING"):
        show_queue(queue, job_of(run, state, **other))
        fleet.cancel_queued(run)
        fleet.end(run)
        with pytest.raises(Mistake, match="no running Slurm job"):
            fleet.shell(run, None)
    assert not (queue / "cancelled").exists()


@pytest.mark.usefixtures("processes")
def test_a_queue_that_cannot_be_read_is_a_mistake_in_one_line(directory_store: Store, queue: Path) -> None:
    for answer in ("not json", "[]", '{"jobs": [7]}', '{"jobs": [{"job_id": "x"}]}'):
        (queue / "queue.json").write_text(answer)
        with pytest.raises(Mistake, match="squeue: unexpected answer"):
            SlurmFleet(SlurmSettings()).end(new_run(directory_store))


@pytest.mark.usefixtures("processes")
def test_slurm_validates_the_script_that_would_be_submitted(directory_store: Store, queue: Path) -> None:
    run = new_run(directory_store, program_job(fleet={"slurm": {"machines": 2}}))
    SlurmFleet(SlurmSettings()).check(run.job, directory_store)
    assert "--test-only" in (queue / "submitted").read_text()
    checked = (queue / "script").read_text()
    assert checked.replace(run_to_check(run.job, run.store).code_digest, run.code_digest) == script_of(run)


def submitted(cluster: Cluster, name: str, fleet: str, script: str) -> Run:
    place = cluster.login.place.parent / "shared"
    more = "environment: [SECRET]\ncheckpoint: {every: 2 s}"
    job = write_program(place / f"{name}-job", json.dumps(str(place / name)), fleet, script, more)
    done = packtrain_on(cluster.login, "run", job, "--detach", SECRET="canary")
    assert done.returncode == 0, done.stderr + done.stdout
    return newest(place / name)


def told(run: Run) -> list[str]:
    return [event.text for event in run.events().read()]


def number_of(cluster: Cluster, run: Run) -> str:
    """The number of the only job of a run, or of its array."""
    [number] = set(cluster.command("squeue", "-h", "-n", f"packtrain-{run.name}", "-o", "%F").split())
    return number


def said(run: Run) -> list[str]:
    lines = sorted(run.log_lines().read(), key=lambda line: line.time)
    return [line.text for line in lines if line.rank is not None and line.text.startswith("rank")]


def test_one_job_of_an_array_is_requeued_alone(cluster: Cluster) -> None:
    """It is the one whose job has the number of the whole array. The other continues without it."""
    odd = 'it\'s #1 $(id) 50% "array"'  # a comment that Slurm must hand back unchanged
    run = submitted(cluster, odd, "{slurm: {machines: 1..2}, workers: 1}", COUNTING.replace("LAST", "100000"))
    wait_until(lambda: len(said(run)) == 2, "both workers")
    array = number_of(cluster, run)
    listed_runs = packtrain_on(cluster.login, "ls", "--json", "--store", run.store.url)
    assert json.loads(listed_runs.stdout)[0]["queue"] == "2 RUNNING", listed_runs.stderr
    listed = [line.split() for line in cluster.command("squeue", "-h", "-r", "-j", array, "-o", "%i %A").splitlines()]
    [noticed] = [place for place, job in listed if job == array]
    [other] = [place for place, job in listed if job != array]
    cluster.command("scancel", "--batch", "--signal=USR1", noticed)
    wait_until(lambda: "Restarts=1" in shown(cluster, noticed), "the requeue")
    wait_until_all_left(run)
    assert "Restarts=0" in shown(cluster, other)
    assert [generation.cause for generation in run.generations()] == ["start", "preempted"]
    assert "rank 0 of 1" in said(run)[-1]
    assert "from 0" not in said(run)[-1]
    # When it starts again the run is over, and it leaves.
    cluster.command("scontrol", "update", f"JobId={noticed}", "StartTime=now+3")
    wait_until(lambda: settled(cluster), "an empty queue")
    assert left_on(cluster.nodes) == []


def shown(cluster: Cluster, job: str) -> str:
    return cluster.command("scontrol", "show", "job", job)


def test_a_job_that_slurm_would_reject_is_refused_before_the_data_is_packed(cluster: Cluster) -> None:
    place = cluster.login.place.parent / "shared"
    job = write_job(place, place / "refused", "{slurm: {machines: 2, partition: gpu}, workers: 1}")
    done = packtrain_on(cluster.login, "run", job, "--detach")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "sbatch: invalid partition specified: gpu" in done.stderr
    assert list((place / "refused").rglob("*.json")) == []


def test_a_job_with_gpus_gets_the_cores_that_come_with_them(cluster: Cluster) -> None:
    """A node has two cores and one GPU; Slurm's own number is one core for the one task."""
    nodes = cluster.command("scontrol", "show", "nodes", "--oneliner")
    assert cpus_per_gpu(nodes, 1, "main") == 2
    cluster.command("scontrol", "update", "PartitionName=main", "State=DOWN")
    run = submitted(cluster, "cores", "{slurm: {gpus: 1}, workers: 1}", COUNTING)
    job = number_of(cluster, run)
    asked = shown(cluster, job)
    cluster.command("scancel", job)
    cluster.command("scontrol", "update", "PartitionName=main", "State=UP")
    assert re.findall(r"CPUs/Task=(\d+)", asked) == ["2"], asked
    wait_until(lambda: settled(cluster), "an empty queue")


def settled(cluster: Cluster) -> bool:
    return cluster.command("squeue", "-h", "-t", "PENDING,RUNNING,COMPLETING") == ""


def test_two_queued_nodes_start_and_after_a_requeue_resume_and_finish(cluster: Cluster) -> None:
    cluster.command("scontrol", "update", "PartitionName=main", "State=DOWN")
    run = submitted(cluster, "again", "{slurm: {machines: 2}, workers: 1}", COUNTING.replace("LAST", "100000"))
    listed = packtrain_on(cluster.login, "ls", "--json", "--store", run.store.url)
    assert json.loads(listed.stdout)[0]["queue"].startswith("1 PENDING"), listed.stderr
    cluster.command("scontrol", "update", "PartitionName=main", "State=UP")
    wait_until(lambda: len(said(run)) == 2, "both workers")
    assert sorted(said(run)) == ["rank 0 of 2 from 0 canary", "rank 1 of 2 from 0 canary"]
    kept = run.store.get(run.key("slurm.sh")).decode()
    assert "srun" in kept
    assert "canary" not in kept
    job = number_of(cluster, run)
    nodes = [
        process
        for host in cluster.nodes
        for process in host.processes()
        if is_node(process.cmdline(), run.name, run.store.url)
    ]
    assert {process.environ()["PACKTRAIN_NOTICE_SECONDS"] for process in nodes} == {str(NOTICE_SECONDS)}
    wait_until(lambda: committed(run), "a commit")
    # As srun does when it loses touch with a node that is back before SlurmdTimeout: it fails, and nodes are killed.
    kill([process for process in cluster.login.processes() if process.name() == "srun"][:1])
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
    assert f"Slurm job {job} ended with code 137 without a result; it is requeued" in told(run)
    wait_until(lambda: settled(cluster), "an empty queue")
    assert left_on(cluster.nodes) == []
