"""Nodes of a Slurm cluster: a script for sbatch that a person can read, keep and submit again.

A fixed number of machines is one job with that many nodes: they start together, reach the time limit together and are
requeued together, and none waits for another on an idle node. A range is an array of jobs with one node each: the run
starts with the smallest number and takes in the others as the queue starts them; a preempted job is requeued alone. A
node that fails ends its job, and Slurm requeues the job: the other nodes of a fixed number could only wait.

`python -m packtrain.fleet.slurm --run RUN --store STORE --job JOB --code CODE` is what the script asks when the nodes
have ended and nothing told it why: exit code 0 means that the job is to be requeued.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from packtrain.errors import (
    EXIT_ALREADY_JOINED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MISTAKE,
    EXIT_NOT_FOUND,
    EXIT_STOPPED,
    EXIT_UNFINISHED,
    Mistake,
    quoted,
)
from packtrain.fleet.bundle import BundleFile
from packtrain.fleet.environment import create_commands
from packtrain.fleet.fleet import (
    CancelsQueued,
    Fleet,
    FleetBuilder,
    HasQueue,
    HasShell,
    HasTargets,
    LaunchPlan,
    Machine,
    Python,
    Say,
    Target,
    Word,
    missing_programs,
    node_arguments,
    passed_variables,
    run_to_check,
    silent,
    states_of,
    store_arguments,
    values_of,
)
from packtrain.fleet.host import Facts, StartedNode
from packtrain.fleet.scripts import script_text
from packtrain.fleet.wheels import own_wheel
from packtrain.job import Job
from packtrain.job.part import Argument, Count, Location, Ordinal, Seconds, StorePath, is_set, rules_in_schema
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.process import run_main
from packtrain.process import say as say_in_log
from packtrain.run.checkpoint import committed
from packtrain.run.records import Event
from packtrain.run.run import Run
from packtrain.store import Store, StoreError, open_store
from packtrain.system import expanded
from packtrain.units import counted

NOTICE_SECONDS = 120  # from Slurm's signal to the time limit
_MIN_SECONDS = 300  # a shorter job would spend most of its time on starting and on its last checkpoint
_ASK_SECONDS = 30.0
_IMMEDIATE_SECONDS = 60  # how long doctor's commands wait for free nodes
_OVER = (EXIT_DONE, EXIT_FAILED, EXIT_STOPPED)  # exit codes of a node of a run that has a result
# Exit codes that the next try would end with, too: the shell's are of a program that is missing or cannot be executed.
_HOPELESS = (EXIT_MISTAKE, EXIT_NOT_FOUND, EXIT_ALREADY_JOINED, 126, 127)
_BLIND_RESTARTS = 20  # how often a job may be requeued by Slurm's own count, if the store does not answer
# Options of sbatch by which Packtrain finds and requeues its jobs.
_OWN_OPTIONS = ("--job-name", "--comment", "--nodes", "--array", "--requeue", "--no-requeue", "--signal", "--export")
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)")  # such as gpu:8, or gpu:a100:4(S:0-1)
_CPU_OPTIONS = ("--cpus-per-task", "--cpus-per-gpu")
# Words of Slurm's job states; a requeued job has several of them.
_BUSY = {"RUNNING", "CONFIGURING", "SUSPENDED"}
_ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
_UNAVAILABLE = "node configuration is not available"  # sbatch says this even if the nodes are only drained or down
# Variables that every program needs; no others leave this machine, except for the job's and the store's.
_PLAIN_VARIABLES = ("HOME", "PATH", "USER", "LANG", "PACKTRAIN_CACHE")


class SlurmSettings(FleetBuilder):
    """Nodes of a Slurm cluster. `time` is the limit of one job, which is requeued; `gpus` are per machine.

    `cpus_per_gpu` is by default a GPU's share of the cores of the partition's nodes.
    """

    model_config = rules_in_schema(
        {"not": {"allOf": [is_set("bundle"), is_set("python")]}},
        {"if": is_set("cpus_per_gpu"), "then": is_set("gpus")},
    )

    shares_machines = True  # with `gpus`, Slurm may put several jobs of an array on one of its nodes

    partition: Word | None = None
    account: Word | None = None
    time: Seconds | None = None
    gpus: Ordinal | None = None
    cpus_per_gpu: Ordinal | None = None
    python: Python | None = None
    bundle: StorePath | None = None
    interface: Word | None = None
    options: Annotated[
        tuple[Argument, ...],
        Field(json_schema_extra={"items": {"pattern": rf"^(?!({'|'.join(_OWN_OPTIONS)})(=|$))--"}}),
    ] = ()

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.bundle is not None and self.python is not None:
            yield ("bundle",), "makes the Python environment; remove python, or this"
        if self.cpus_per_gpu is not None and self.gpus is None:
            yield ("cpus_per_gpu",), "needs gpus; without them a machine is a whole node"
        for number, option in enumerate(self.options):
            if not option.startswith("--") or "\n" in option:
                yield ("options", number), "must be one long option of sbatch, such as --constraint=a100"
            elif option.partition("=")[0] in _OWN_OPTIONS:
                yield ("options", number), f"{option.partition('=')[0]} is set by Packtrain; remove it"
        if self.time is not None and self.time.value < _MIN_SECONDS:
            yield ("time",), f"must be at least {_MIN_SECONDS // 60} min; 2 min of it are for the last checkpoint"

    def build(self) -> SlurmFleet:
        return SlurmFleet(self)

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        missing = missing_programs(**dict.fromkeys(SlurmFleet.programs, "slurm-client"))
        return dict.fromkeys(missing, "use a login node of the cluster")

    def resources(self) -> list[str]:
        """Return the options that sbatch and srun share."""
        return [
            *([f"--partition={self.partition}"] if self.partition else []),
            *([f"--account={self.account}"] if self.account else []),
            *([f"--gres=gpu:{self.gpus}"] if self.gpus else []),
            *([f"--cpus-per-task={self.gpus * self.cpus_per_gpu}"] if self.gpus and self.cpus_per_gpu else []),
        ]

    @property
    def is_whole_node(self) -> bool:
        """True unless the job asks for a part of a node."""
        return self.gpus is None and not self._mentions("--exclusive", "--oversubscribe", *_CPU_OPTIONS, "--mem")

    @property
    def needs_cpus(self) -> bool:
        """True if the job asks for GPUs and nothing says how many cores: Slurm would give its one task one core."""
        return self.gpus is not None and self.cpus_per_gpu is None and not self._mentions("--exclusive", *_CPU_OPTIONS)

    def _mentions(self, *names: str) -> bool:
        return any(option.startswith(names) for option in self.options)


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue shows it."""

    job: str
    state: str
    reason: str
    nodes: str
    name: str
    comment: str
    user: int

    @property
    def is_pending(self) -> bool:
        return "PENDING" in self.state.split()

    @property
    def is_running(self) -> bool:
        """Includes a job that is only completing: it may be about to be requeued."""
        states = set(self.state.split())
        return bool(states & _BUSY) or states == {"COMPLETING"}

    @property
    def is_over(self) -> bool:
        """False for a requeued job, whose state may have several words: `PENDING NODE_FAIL`."""
        return not self.is_pending and bool(set(self.state.split()) & _ENDED)

    @property
    def machine(self) -> Machine:
        reason = f" ({self.reason})" if self.state == "PENDING" and self.reason else ""
        return Machine(self.nodes or self.job, f"{self.state}{reason}", self.is_over)


class SlurmFleet(Fleet, HasTargets, HasQueue, CancelsQueued, HasShell):
    programs = ("sbatch", "squeue", "srun")
    no_foreground = "a Slurm job cannot be tied to this command; omit --foreground, and end it with `packtrain stop`"

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings

    def plan(self, run: Run) -> list[LaunchPlan]:
        names = passed_variables(run.job.environment, run.store.url)
        arguments = ("sbatch", "--parsable", f"--export={','.join([*_PLAIN_VARIABLES, *names])}")
        return [LaunchPlan("slurm", arguments, names, script(run, run.job, with_cpus(self._settings)))]

    def check(self, job: Job, store: Store, say: Say = silent) -> None:
        """Let Slurm validate the script without submitting it. Problems on its nodes show only when they run."""
        if self._settings.bundle is not None:
            with BundleFile(Path(self._settings.bundle)) as bundle:
                bundle.check_own(own_wheel()[1])
        settings = with_cpus(self._settings)
        if settings.needs_cpus:
            say("no node of Slurm says how many cores it has for a GPU; set fleet.slurm.cpus_per_gpu")
        try:
            ask(("sbatch", "--test-only"), script(run_to_check(job, store), job, settings))
        except Mistake as mistake:
            if _UNAVAILABLE not in str(mistake):
                raise
            say(f"{mistake}; the job may have to wait for nodes that are down")

    def start(self, run: Run, plans: Sequence[LaunchPlan], tied: bool, say: Say = silent) -> list[StartedNode]:
        """Submit the script, unless a job is already queued for the run."""
        if tied:
            raise Mistake(self.no_foreground)
        jobs = _jobs_of(run)
        # A second job for the same run would be a second set of nodes.
        if pending := [queued.job for queued in jobs if queued.is_pending]:
            say(f"Slurm job {pending[0]} is already queued for this run; nothing was submitted")
            return []
        if running := [queued.job for queued in jobs if queued.is_running]:
            raise Mistake(f"Slurm job {running[0]} of this run is still running; wait, or `scancel {running[0]}`")
        for plan in plans:
            assert plan.script is not None
            run.store.put(run.key("slurm.sh"), plan.script.encode())  # before submitting: a person can submit it again
            job = ask(plan.arguments, plan.script, variables=plan.variables).strip().partition(";")[0]
            say(f"submitted Slurm job {job}; see `squeue --job {job}`")
        return []  # nothing to watch from here: the job may wait in the queue for days

    def machines(self, run: Run) -> list[Machine]:
        return [queued.machine for queued in _jobs_of(run)]

    def end(self, run: Run) -> None:
        """Slurm sends SIGTERM, and nodes commit; the cluster's KillWait limits how long they may take."""
        _cancel(queued for queued in _own_jobs(run) if queued.is_pending or queued.is_running)

    def down(self, run: Run, say: Say = silent) -> list[str]:
        for queued in _jobs_of(run):
            if queued.user != os.getuid() and not queued.is_over:
                raise Mistake(f"Slurm job {queued.job} of {run.name} is of user {queued.user}, who has to cancel it")
        return super().down(run, say)

    def cancel_queued(self, run: Run) -> None:
        _cancel((queued for queued in _own_jobs(run) if queued.is_pending), "--state=PENDING")

    def state_in_queue(self, run: Run) -> str:
        return states_of(self.machines(run))

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        jobs = [queued for queued in _own_jobs(run) if queued.is_running]
        if not jobs:
            raise Mistake(f"{run.name}: no running Slurm job to open a shell in")
        where = () if machine is None else ("--nodelist", machine)
        return ("srun", "--jobid", jobs[0].job, "--overlap", "--nodes=1", "--ntasks=1", *where, "--pty", "bash", "-l")

    def targets(self) -> list[Target]:
        return [SlurmTarget(self._settings)]


class SlurmTarget(Target):
    """All nodes of the job together: srun starts a command on every one of them."""

    def __init__(self, settings: SlurmSettings) -> None:
        self.name, self._settings, self.interface = "slurm", settings, settings.interface

    def python(self) -> str | None:
        return self._settings.python or sys.executable

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:  # noqa: ARG002
        settings = with_cpus(self._settings)
        size = (f"--nodes={settings.machines.least}", "--ntasks-per-node=1")
        limits = (f"--immediate={_IMMEDIATE_SECONDS}", f"--time={max(1, round(seconds / 60))}")
        return ask(("srun", *size, *limits, *settings.resources(), *settings.options, *command), "", seconds)

    def link_options(self, rank: int, facts: Facts) -> list[str]:  # noqa: ARG002
        """Return no rank: one command runs on all nodes, and each takes its rank from Slurm and chooses its address."""
        return ["--interface", self.interface] if self.interface else []


def script(run: Run, job: Job, settings: SlurmSettings) -> str:
    """Return the script for sbatch. It contains names of variables, never their values."""
    python = settings.python or sys.executable
    # Names of variables of the script cannot be quoted as words are: the first one of each command is written apart.
    shown = shlex.quote(python) if settings.bundle is None else '"$python"'
    _, *command = node_arguments(run, python, settings, settings.interface)
    environment = ""
    if settings.bundle is not None:
        commands = create_commands(Path(settings.bundle), "srun --export=ALL --ntasks-per-node=1 --cpu-bind=none")
        environment = f"# Makes the Python environment on every machine, once.\n{commands}\n\n"
    decide = ("-P", "-m", "packtrain.fleet.slurm", "--run", run.name, *store_arguments(run))
    return script_text(
        "slurm.sh",
        run=run.name,
        header="\n".join(f"#SBATCH {option}" for option in _sbatch_options(run, job, settings)),
        command=f"{shown} {shlex.join(command)}",
        environment=environment,
        notice=NOTICE_SECONDS,
        almost=NOTICE_SECONDS - 10,  # bash counts whole seconds, and Slurm's clock is not this machine's
        variable=SECONDS_VARIABLE,
        over=" | ".join(map(str, _OVER)),
        done=EXIT_DONE,
        decide=f"{shown} {shlex.join(decide)}",
    )


def _sbatch_options(run: Run, job: Job, settings: SlurmSettings) -> list[str]:
    hours = job.budget.hours
    seconds = settings.time.value if settings.time is not None else None if hours is None else hours * 3600
    machines = settings.machines
    size = [f"--nodes={machines.least}"] if machines.is_fixed else ["--nodes=1", f"--array=1-{machines.most}"]
    # Slurm creates no directory, and fails a job whose output has none: with a bucket, it goes to the home directory.
    # (Not to /tmp, where another user could have put a link in its place.)
    directory, file = expanded("~"), f"packtrain-{run.name}-%j.out"
    if run.store.is_directory:
        directory, file = Path(run.store.url) / run.folder, "slurm-%j.out"
    output = f"{str(directory).replace('%', '%%')}/{file}"  # it is a pattern
    options = [
        f"--job-name={_job_name(run)}",
        f"--comment={_comment(run)}",
        *size,
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",  # or a requeued job would overwrite its output
        f"--output={output}",
        f"--signal=B:USR1@{NOTICE_SECONDS}",  # B: to the script alone, which passes it on
        *([f"--time={slurm_time(seconds)}"] if seconds is not None else []),
        *settings.resources(),
        *(["--exclusive"] if settings.is_whole_node else []),  # Slurm would give the one task one core
        *settings.options,
    ]
    for option in options:
        # A line break would end the line of the script, and what follows it would be a command. Slurm drops backslashes
        # even inside quotes.
        if not option.isprintable() or "\\" in option:
            raise Mistake(f"{quoted(option)}: Slurm takes neither control characters nor backslashes; rename it")
    return [shlex.quote(option) for option in options]


def with_cpus(settings: SlurmSettings) -> SlurmSettings:
    """Return the settings with as many cores as come with the GPUs that the job asks for, if the nodes have a number.

    Otherwise the loaders of all workers would share the single core that Slurm gives to a task.
    """
    if settings.gpus is None or not settings.needs_cpus:
        return settings
    with suppress(Mistake):  # a cluster that does not answer has its own number, or none
        share = cpus_per_gpu(ask(("scontrol", "show", "nodes", "--oneliner")), settings.gpus, settings.partition)
        return settings.model_copy(update={"cpus_per_gpu": share})
    return settings


def cpus_per_gpu(nodes: str, gpus: int, partition: str | None) -> int | None:
    """Return a GPU's share of a node's cores, on the node that has the fewest for it; None if no node has the GPUs.

    `nodes` are those of `scontrol show nodes --oneliner`. Cores that are kept for the system do not count.
    """
    shares = []
    for line in nodes.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        gpus_of_node = sum(map(int, _GPUS.findall(fields.get("Gres", ""))))
        cores = fields.get("CPUEfctv") or fields.get("CPUTot", "")
        is_usable = partition is None or partition in fields.get("Partitions", "").split(",")
        if is_usable and gpus_of_node >= gpus and cores.isdecimal():
            shares.append(max(1, int(cores) // gpus_of_node))
    return min(shares, default=None)


def slurm_time(seconds: float) -> str:
    """Round up to whole minutes, as Slurm counts them: D-HH:MM:00."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes // 1440}-{minutes % 1440 // 60:02d}:{minutes % 60:02d}:00"


def ask(arguments: Sequence[str], text: str = "", seconds: float = _ASK_SECONDS, variables: Sequence[str] = ()) -> str:
    """Run a program of Slurm and return its standard output. It passes the variables on to the job."""
    program, environment = arguments[0], {**os.environ, **values_of(variables)}
    try:
        ended = subprocess.run(
            arguments,
            input=text,
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            env=environment,
        )
    except FileNotFoundError:
        raise Mistake(f"{program} is missing; start the run from a machine of the Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise Mistake(f"{program} timed out after {seconds:g} s; check that slurmctld is up") from None
    if ended.returncode != 0:
        lines = [line.removeprefix(f"{program}: ").removeprefix("error: ") for line in ended.stderr.splitlines()]
        raise Mistake(f"{program}: {'; '.join(line.strip() for line in lines if line.strip())}")
    return ended.stdout


def _jobs_of(run: Run) -> list[QueuedJob]:
    """Return the queued jobs of a run, whoever submitted them.

    Their name and comment identify them. Numbers that somebody wrote down would not: whoever can write to the store
    could make `stop` cancel any job.
    """
    answer = ask(("squeue", "--json"))
    try:
        queue = [_queued(job) for job in json.loads(answer)["jobs"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Mistake(f"squeue: unexpected answer: {answer[:200]!r}; check that its --json works") from None
    return [queued for queued in queue if (queued.name, queued.comment) == (_job_name(run), _comment(run))]


def _own_jobs(run: Run) -> list[QueuedJob]:
    """Return those that this user submitted: others may give any name and comment to a job of theirs."""
    return [queued for queued in _jobs_of(run) if queued.user == os.getuid()]


def _cancel(jobs: Iterable[QueuedJob], *options: str) -> None:
    if numbers := dict.fromkeys(queued.job for queued in jobs):  # the jobs of an array share one
        ask(("scancel", "--quiet", *options, *numbers))


def _queued(job: Mapping[str, Any]) -> QueuedJob:
    """Read one job of squeue. Versions differ: a state is a string or a list, a number may be inside a mapping."""

    def number(name: str) -> int:
        value = job.get(name)
        return int((value.get("number") if isinstance(value, Mapping) else value) or 0)

    state = job.get("job_state", "")
    return QueuedJob(
        job=str(number("array_job_id") or number("job_id")),
        state=" ".join(state) if isinstance(state, list) else str(state),
        reason=str(job.get("state_reason") or ""),
        nodes=str(job.get("nodes") or ""),
        name=str(job.get("name") or ""),
        comment=str(job.get("comment") or ""),
        user=number("user_id"),
    )


def _job_name(run: Run) -> str:
    return f"packtrain-{run.name}"


def _comment(run: Run) -> str:
    """Return what tells the run apart from one of the same name in another store, or on another server."""
    store = run.store
    details = (store.endpoint and f"at {store.endpoint}", store.identity and f"({store.identity})")
    return " ".join((f"{run.name} in {store.url}", *filter(None, details)))


@dataclass(frozen=True)
class Requeues:
    """How often a job was requeued without a notice since this checkpoint was the newest."""

    checkpoint: str
    count: Count


def should_requeue(run: Run, job: str, code: int, restarts: int) -> bool:
    """True if a job whose nodes ended without a notice is to be requeued; then it is counted in the run's folder.

    As for other failures, the job may try `fleet.failures` times without a new commit. `restarts` is Slurm's own count,
    which includes the requeues after notices: it only matters while the store does not answer.
    """
    ending = f"Slurm job {job} ended with code {code}"
    if code in _HOPELESS:
        say_in_log(f"{ending}: another try would end the same way; not requeued")
        return False
    try:
        if run.result() is not None or run.stop_request() is not None:
            return False
        key = run.key(f"requeues/{job}.json")
        before = Requeues(next((checkpoint.name for checkpoint in reversed(committed(run))), ""), 0)
        with suppress(ValidationError):  # a damaged record is replaced
            recorded = TypeAdapter(Requeues).validate_json(run.store.find(key) or b"")
            before = recorded if recorded.checkpoint == before.checkpoint else before
        again = before.count < run.job.fleet.failures
        if again:
            run.store.put(key, json.dumps(asdict(replace(before, count=before.count + 1))).encode())
            text = f"{ending} without a result; it is requeued"
        else:
            tries = counted(before.count, "requeue")
            text = (
                f"{ending}, and {tries} brought no new commit; look at its output, then `packtrain resume {run.name}`"
            )
        events = run.event_writer(f"slurm-{job}-{restarts}")
        events.append(Event(time.time(), "warning", text))
        events.flush()
    except StoreError as error:
        # The network that failed here may be what ended the nodes.
        again = error.temporary and restarts < _BLIND_RESTARTS
        text = f"{ending}; {error}"
    say_in_log(text)
    return again


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="packtrain.fleet.slurm")
    parser.add_argument("--run", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--store-id")
    parser.add_argument("--job", required=True)
    parser.add_argument("--code", type=int, required=True)
    options = parser.parse_args(words)
    run = Run(open_store(options.store, identity=options.store_id), options.run)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return EXIT_DONE if should_requeue(run, options.job, options.code, restarts) else EXIT_UNFINISHED


if __name__ == "__main__":
    run_main(main)
