"""Nodes of a Slurm cluster: a script for sbatch that a person can read, keep and submit again.

A fixed number of machines is one job of so many nodes: they begin together, reach the time limit together and are
queued again together, and none waits for another on an idle node. A range is an array of jobs of one node each: the run
begins with the least number, takes in the others as the queue lets them, and each that is preempted is queued again
alone. A node that fails ends its job, and Slurm queues the job again: the others of a fixed number could only wait.
"""

from __future__ import annotations

import builtins
import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, Mistake
from packtrain.fleet.fleet import Fleet, Machine, Python, Start, Started, Tell, Word, node_arguments, passed_on, silent
from packtrain.job.job import Job
from packtrain.job.kinds import FleetKind
from packtrain.job.part import Argument, Location, Ordinal, Seconds
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.run.run import Run
from packtrain.store import Store, open_store

NOTICE_SECONDS = 120
_LEAST_SECONDS = 300
_ASK_SECONDS = 30.0
_OVER = (EXIT_DONE, EXIT_FAILED, EXIT_STOPPED)
_BUSY = {"RUNNING", "CONFIGURING", "SUSPENDED"}
_FOR_NOW = "node configuration is not available"  # also where nodes are only drained or down

_SCRIPT = """#!/bin/bash
# {run}: one agent on each machine; they settle the rest through the store.
# Submit it by hand with:  sbatch {keep}
{header}

# {notice} s before the time limit Slurm sends SIGUSR1: agents commit and leave, and the job is queued again.
export {variable}={notice}
noticed=no
trap 'noticed=yes; kill -USR1 "$agents" 2>/dev/null' USR1
trap 'kill -TERM "$agents" 2>/dev/null' TERM

srun --export=ALL --kill-on-bad-exit=0 --ntasks-per-node=1 --cpu-bind=none \\
  {command} &
agents=$!
while kill -0 "$agents" 2>/dev/null; do wait "$agents"; done # a signal ends the waiting, and not the agents
wait "$agents"
code=$?

# srun has the highest code of all agents, so one that was killed may hide that the others only left.
case "$noticed $code" in
  {over}) ;; # the run is over
  "yes "*)
    # By its place in the array: one of the jobs has the number of the whole array, which would be queued again with it.
    scontrol requeue "${{SLURM_ARRAY_TASK_ID:+${{SLURM_ARRAY_JOB_ID}}_}}${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}}" ;;
esac
exit "$code"
"""


class SlurmSettings(FleetKind):
    """Nodes of a Slurm cluster. `time` is the limit of one job, which is queued again; `gpus` are per machine."""

    partition: Word | None = None
    account: Word | None = None
    time: Seconds | None = None
    gpus: Ordinal | None = None
    python: Python | None = None
    interface: Word | None = None
    options: tuple[Argument, ...] = ()

    def faults(self) -> Iterator[tuple[Location, str]]:
        for number, option in enumerate(self.options):
            if not option.startswith("--") or "\n" in option:
                yield ("options", number), "must be one long option of sbatch, such as --constraint=a100"
        if self.time is not None and self.time.value < _LEAST_SECONDS:
            yield (
                ("time",),
                f"must be at least {_LEAST_SECONDS // 60} min: two of them are kept for the last checkpoint",
            )

    def build(self) -> Fleet:
        return SlurmFleet(self)


@dataclass(frozen=True)
class Queued:
    """A job as squeue shows it."""

    job: str
    state: str
    reason: str
    nodes: str
    name: str = ""
    comment: str = ""

    @property
    def waits(self) -> bool:
        return "PENDING" in self.state.split()

    @property
    def runs(self) -> bool:
        """Also one that is completing and says no more: it may be about to be queued again."""
        states = set(self.state.split())
        return bool(states & _BUSY) or states == {"COMPLETING"}


class SlurmFleet(Fleet):
    not_tied = "a Slurm job cannot be tied to this command: leave --foreground out, `packtrain stop` ends it"

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings

    def plan(self, run: Run) -> builtins.list[Start]:
        names = passed_on(run.job)
        arguments = ("sbatch", "--parsable", f"--export={','.join([*_PLAIN, *names])}")
        return [Start("slurm", arguments, names, run.store.url, script(run, self._settings))]

    def check(self, job: Job, store: Store, tell: Tell = silent) -> None:
        """Lets Slurm try the script without submitting it. What the nodes see is known only when they run."""
        try:
            ask(("sbatch", "--test-only"), script_of(Run(store, _FIRST_RUN.format(job.name[:56])), job, self._settings))
        except Mistake as mistake:
            if _FOR_NOW not in str(mistake):
                raise
            tell(f"{mistake}; it may have to wait for nodes that are away")

    def start(self, starts: Sequence[Start], tied: bool, tell: Tell = silent) -> builtins.list[Started]:
        """What waits in the queue already is not submitted again."""
        if tied:
            raise Mistake(self.not_tied)
        for start in starts:
            assert start.script is not None
            run = _run_of(start)
            queue = _queued_for(run)
            if waiting := [queued.job for queued in queue if queued.waits]:
                tell(f"Slurm job {waiting[0]} waits in the queue for it already; nothing is submitted")
                continue
            if running := [queued.job for queued in queue if queued.runs]:
                raise Mistake(f"Slurm job {running[0]} still runs for it: wait for its end, or `scancel {running[0]}`")
            run.store.put(run.key("slurm.sh"), start.script.encode())
            job = ask(start.arguments, start.script).strip().partition(";")[0]
            run.store.put(run.key("slurm.json"), json.dumps([*_jobs(run), job]).encode())
            tell(f"submitted as Slurm job {job}; squeue --job {job} shows it")
        return []  # they may wait for days

    def list(self, run: Run) -> builtins.list[Machine]:
        return [Machine(queued.nodes or queued.job, queued.state, queued.reason) for queued in _queued_for(run)]

    def end(self, run: Run) -> None:
        """Slurm sends SIGTERM, and agents commit; KillWait of the cluster says how long they may take."""
        jobs = {queued.job: None for queued in _queued_for(run) if queued.waits or queued.runs}
        if jobs:
            ask(("scancel", "--quiet", *jobs))

    def withdraw(self, run: Run) -> None:
        jobs = {queued.job: None for queued in _queued_for(run) if queued.waits}
        if jobs:
            ask(("scancel", "--quiet", "--state=PENDING", *jobs))

    def queue(self, run: Run) -> str | None:
        if shutil.which("squeue") is None:
            return None
        try:
            return summed_up(self.list(run))
        except Mistake:
            return None  # the cluster does not answer; the store still does

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        jobs = [queued for queued in _queued_for(run) if queued.runs]
        if not jobs:
            raise Mistake(f"{run.name} has no running Slurm job to open a shell in")
        where = () if machine is None else ("--nodelist", machine)
        return ("srun", "--jobid", jobs[0].job, "--overlap", "--nodes=1", "--ntasks=1", *where, "--pty", "bash", "-l")


# What every program needs; the rest of this machine's environment stays here.
_PLAIN = ("HOME", "PATH", "USER", "LANG", "PACKTRAIN_CACHE")
_FIRST_RUN = "{}-1"


def script(run: Run, settings: SlurmSettings) -> str:
    """What sbatch gets. It has names of variables in it, never their values."""
    return script_of(run, run.job, settings)


def script_of(run: Run, job: Job, settings: SlurmSettings) -> str:
    """The same for a run that is yet to be made."""
    command = node_arguments(run, settings.python or sys.executable, settings, settings.interface)
    return _SCRIPT.format(
        run=run.name,
        keep="slurm.sh",
        header=header(run, job, settings),
        command=shlex.join(command),
        notice=NOTICE_SECONDS,
        variable=SECONDS_VARIABLE,
        over=" | ".join(f'"yes {code}"' for code in _OVER),
    )


def header(run: Run, job: Job, settings: SlurmSettings) -> str:
    """The lines that sbatch reads."""
    hours = job.budget.hours
    seconds = settings.time.value if settings.time is not None else None if hours is None else hours * 3600
    machines = settings.machines
    size = [f"--nodes={machines.least}"] if machines.is_fixed else ["--nodes=1", f"--array=1-{machines.most}"]
    options = [
        f"--job-name={_job_name(run)}",
        shlex.quote(f"--comment={run.store.url}"),  # with the name it says which run this is
        *size,
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        shlex.quote(f"--output={_output(run)}"),
        f"--signal=B:USR1@{NOTICE_SECONDS}",
        *([f"--time={slurm_time(seconds)}"] if seconds is not None else []),
        *([f"--partition={settings.partition}"] if settings.partition else []),
        *([f"--account={settings.account}"] if settings.account else []),
        *([f"--gres=gpu:{settings.gpus}"] if settings.gpus else []),
        *(["--exclusive"] if _whole(settings) else []),
        *settings.options,
    ]
    return "\n".join(f"#SBATCH {option}" for option in options)


def _whole(settings: SlurmSettings) -> bool:
    """A machine is a whole node, unless the job asks for a part of one: Slurm would give one task one core."""
    shares = ("--exclusive", "--oversubscribe", "--cpus-per-task", "--cpus-per-gpu", "--mem")
    return settings.gpus is None and not any(option.startswith(shares) for option in settings.options)


def slurm_time(seconds: float) -> str:
    """Whole minutes, as Slurm counts them: D-HH:MM:00."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes // 1440}-{minutes % 1440 // 60:02d}:{minutes % 60:02d}:00"


def summed_up(machines: Sequence[Machine]) -> str:
    """`2 RUNNING, 1 PENDING (Resources)`."""
    counts: dict[str, int] = {}
    for machine in machines:
        reason = f" ({machine.detail})" if machine.state == "PENDING" and machine.detail else ""
        counts[f"{machine.state}{reason}"] = counts.get(f"{machine.state}{reason}", 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def squeue() -> builtins.list[Queued]:
    document = json.loads(ask(("squeue", "--json")))
    return [_queued(job) for job in document["jobs"]]


def _queued(job: Mapping[str, Any]) -> Queued:
    """Slurm's JSON differs between versions: a state is a text or a list of them, a number may be in a mapping."""
    array = _number(job.get("array_job_id"))
    state = job.get("job_state", "")
    return Queued(
        str(array or _number(job.get("job_id"))),
        " ".join(state) if isinstance(state, list) else str(state),
        str(job.get("state_reason") or ""),
        str(job.get("nodes") or ""),
        str(job.get("name") or ""),
        str(job.get("comment") or ""),
    )


def _number(value: Any) -> int:
    return int((value.get("number") if isinstance(value, Mapping) else value) or 0)


def ask(arguments: Sequence[str], text: str = "", seconds: float = _ASK_SECONDS) -> str:
    try:
        done = subprocess.run(arguments, input=text, capture_output=True, check=False, text=True, timeout=seconds)
    except FileNotFoundError:
        raise Mistake(f"{arguments[0]} is not there: start the run from a machine of the Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise Mistake(f"{arguments[0]} did not answer within {seconds:g} s: is slurmctld up?") from None
    if done.returncode != 0:
        said = [line.removeprefix(f"{arguments[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise Mistake(f"{arguments[0]}: {'; '.join(line.strip() for line in said if line.strip())}")
    return done.stdout


def _jobs(run: Run) -> builtins.list[str]:
    """The numbers of the jobs that were submitted for a run, each time that it was started."""
    data = run.store.find(run.key("slurm.json"))
    return [] if data is None else [str(job) for job in json.loads(data)]


def _queued_for(run: Run) -> builtins.list[Queued]:
    """The jobs of a run: those that its folder names, and those that name it, if nobody could write them down."""
    known = _jobs(run)

    def is_of_run(queued: Queued) -> bool:
        return queued.job in known or (queued.name, queued.comment) == (_job_name(run), run.store.url)

    return [queued for queued in squeue() if is_of_run(queued)]


def _job_name(run: Run) -> str:
    return f"packtrain-{run.name}"


def _run_of(start: Start) -> Run:
    assert start.script is not None
    name = next(line for line in start.script.splitlines() if "--job-name=" in line).partition("packtrain-")[2]
    return Run(open_store(start.store), name)


def _output(run: Run) -> str:
    """Beside the run where every machine can write; on the machine's own disk where the store is a bucket."""
    if run.store.is_directory:
        folder = str(Path(run.store.url) / run.folder).replace("%", "%%")
        return f"{folder}/slurm-%j.out"
    return f"/tmp/packtrain-{run.name}-%j.out"  # noqa: S108 - Slurm ends a job whose output has no directory
