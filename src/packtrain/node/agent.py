"""The agent on each machine: it takes part in generations until the run has a result.

    register and renew a lease; then, once a second:
        the run has a result: leave
        a generation that names this machine has begun: start its workers, ending those of an older one
        the workers ended: write the result, or propose the next generation
        a machine of the generation is lost, or there is no generation: propose one
        a stop, the deadline or SIGTERM: let the workers commit and leave

No agent is special. Proposals are put-if-absent: the first one holds, and all others follow it.
"""

from __future__ import annotations

import shutil
import signal
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from packtrain.checkpoint import Superseded, committed
from packtrain.chunks import Flusher
from packtrain.code import unpack
from packtrain.control import Control, cache_directory
from packtrain.node.generations import FAILURE, LeaseWatch, failures_in_a_row, proposal
from packtrain.node.launch import Directories, Launch, launcher_arguments, worker_environment
from packtrain.node.lease import Lease
from packtrain.node.logs import LogShipper
from packtrain.node.program import ProgramCheckpoints
from packtrain.runs import Event, Generation, Node, Result, Run, Status
from packtrain.store import StoreError
from packtrain.units import show_seconds

TICK_SECONDS = 0.5
STOP_GRACE_SECONDS = 600.0  # a large checkpoint over a slow network takes minutes
_NOTICE = "this machine is to leave (SIGTERM)"


@dataclass
class Attempt:
    """The workers of one generation on this machine."""

    generation: Generation
    rank: int
    launch: Launch
    control: Control
    shipper: LogShipper
    asked_to_stop: bool = False
    asked_at: float = 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class Agent:
    def __init__(self, run: Run, address: str, workers: int, inherited: dict[str, str]) -> None:
        self._run, self._job, self._inherited = run, run.job, inherited
        self._machines = run.job.fleet.kind.machines
        self.name = f"{socket.gethostname().lower()[:40]}-{uuid.uuid4().hex[:8]}"
        self._home = cache_directory() / "nodes" / f"{run.name}-{self.name}"
        self._home.mkdir(parents=True)
        self._events, self._logs = run.event_writer(self.name), run.log_writer(self.name)
        others = run.nodes()
        node = Node(
            self.name,
            socket.gethostname(),
            address,
            free_port(),
            workers,
            joined=1 + max((other.joined for other in others), default=0),
            renewal=0,
            used_seconds=max((other.used_seconds for other in others), default=0.0),
        )
        self._lease = Lease(run, node, self._home)
        self._watch = LeaseWatch()
        self._attempt: Attempt | None = None
        self._program = ProgramCheckpoints(run, self._home / "checkpoints", run.job.checkpoint, self._tell)
        self._last_tried = 0
        self._wanted: str | None = None  # why the generation that was last tried needs a next one
        self._signalled = False
        self._over = False

    def _tell(self, kind: str, text: str) -> None:
        print(f"{kind}: {text}", flush=True)
        generation = self._attempt.generation.number if self._attempt else 0
        self._events.append(Event(time.time(), kind, text, generation))

    def work(self) -> None:
        """Returns when the run has a result, or when this machine is to leave it."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        flusher = Flusher([self._events, self._logs], lambda error: print(f"warning: {error}", flush=True))
        try:
            (self._home / "code").mkdir()
            unpack(self._run.store.get(self._run.key("code.tar.zst")), self._home / "code")
            self._tell("node", f"{self.name} has joined with {self._lease.node.workers} workers")
            while not self._over:
                try:
                    self._tick()
                except StoreError as error:
                    if not error.temporary:
                        raise
                    print(f"warning: {error}", flush=True)
                time.sleep(TICK_SECONDS)
        finally:
            self._end_attempt()
            self._tell("node", f"{self.name} leaves")
            flusher.close()
            self._lease.leave()
            shutil.rmtree(self._home, ignore_errors=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signalled = True

    # One look at the world.

    def _tick(self) -> None:
        if self._run.result() is not None:
            self._over = True
            return
        latest = self._run.latest_generation()
        attempt = self._attempt
        if attempt is not None:
            attempt.shipper.ship()
            if latest is not None and latest.number > attempt.generation.number:
                self._tell("superseded", f"generation {latest.number} has begun: {latest.reason}")
                self._end_attempt()
            elif (code := attempt.launch.poll()) is not None:
                self._after(attempt, code)
            else:
                self._look_after(attempt)
        elif self._leaving() is not None:
            self._finish_stopped(latest)
        elif latest is not None and latest.rank_of(self.name) is not None and not self._has_tried(latest):
            self._start(latest)
        else:
            self._watch_and_propose(latest)

    def _has_tried(self, generation: Generation) -> bool:
        return self._last_tried >= generation.number

    def _leaving(self) -> str | None:
        """Why the run is to end before its goal."""
        stop = self._run.stop_request()
        if stop is not None:
            return stop.reason
        hours = self._job.budget.hours
        if hours is not None and self._lease.used_seconds() >= hours * 3600:
            return f"the budget of {hours:g} hours is used up"
        return _NOTICE if self._signalled else None

    # Attempts.

    def _start(self, generation: Generation) -> None:
        rank = generation.rank_of(self.name)
        assert rank is not None
        if self._job.program is not None:
            self._program.restore()
        self._last_tried, self._wanted = generation.number, None
        home = self._home / f"{generation.number:06d}"
        directories = Directories(home / "logs", home / "control", self._home / "code", self._home / "checkpoints")
        directories.logs.mkdir(parents=True)
        first_rank = sum(member.workers for member in generation.members[:rank])
        self._attempt = Attempt(
            generation,
            rank,
            Launch(
                launcher_arguments(generation, rank, self._job.program, directories.logs),
                worker_environment(self._run, generation, rank, directories, self._inherited),
                directories,
            ),
            Control(directories.control),
            LogShipper(directories.logs, self._logs, self.name, generation.number, first_rank),
        )
        workers = sum(member.workers for member in generation.members)
        self._tell("generation", f"{generation.number} begins with {workers} workers ({generation.reason})")

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.launch.kill()
            self._attempt.shipper.ship(all_of_it=True)
            self._attempt = None
            self._lease.offer_port(free_port())

    def _look_after(self, attempt: Attempt) -> None:
        """While the workers work."""
        if self._job.program is not None and attempt.is_first:
            with suppress(Superseded):  # the next look at the world ends the attempt
                self._program.commit_if_due(attempt.generation.number)
        reason = self._leaving()
        if reason is not None and not attempt.asked_to_stop:
            attempt.asked_to_stop, attempt.asked_at = True, time.monotonic()
            self._tell("stopping", reason)
            attempt.control.ask_to_stop()
            if self._job.program is not None:
                attempt.launch.terminate()
        elif attempt.asked_to_stop and time.monotonic() - attempt.asked_at > STOP_GRACE_SECONDS:
            self._tell(
                "warning", f"the workers did not stop within {show_seconds(STOP_GRACE_SECONDS)}: they are killed"
            )
            attempt.launch.kill()
        elif len(attempt.generation.members) > 1:
            self._watch_members(attempt)

    def _watch_members(self, attempt: Attempt) -> None:
        """The first machine watches all others, and they watch the first."""
        now = time.monotonic()
        self._watch.observe(self._run.nodes(), now)
        members = attempt.generation.members
        watched = members[1:] if attempt.is_first else members[:1]
        for member in watched:
            if self._watch.lost(member.node, now) and self._run.result() is None:
                self._tell("lost", f"{member.node} does not renew its lease")
                self._end_attempt()
                self._want(attempt.generation, f"{FAILURE}machine {member.node} is lost")
                return

    def _after(self, attempt: Attempt, code: int) -> None:
        """When the workers have ended, one way or another. The attempt stays until the store knows about it."""
        errors = attempt.control.errors()
        program_done = self._job.program is not None and code == 0
        if attempt.is_first and self._job.program is not None:
            try:
                self._program.commit(attempt.generation.number)
            except Superseded:
                program_done = False
        attempt.launch.kill()
        leaving = self._leaving()
        if self._run.result() is not None:
            self._over = True
        elif attempt.is_first and program_done and not attempt.asked_to_stop:
            self._conclude("finished", "the program ended with exit code 0")
        elif leaving is not None:
            self._finish_stopped(attempt.generation)
        elif code == 0 and attempt.is_first:
            self._want(attempt.generation, "the workers ended before the goal")
        elif code == 0:
            pass  # the first machine has the result or goes on; the others wait for it
        elif errors and errors[0].hopeless:
            self._conclude("failed", errors[0].text)
        else:
            text = (
                errors[0].text if errors else f"a worker ended with exit code {code}; `packtrain logs` has its output"
            )
            self._retry(attempt.generation, text)
        self._end_attempt()

    def _retry(self, failed: Generation, text: str) -> None:
        # Other machines may have proposed the next one already: theirs is not one more failure.
        tried = [generation for generation in self._run.generations() if generation.number <= failed.number]
        if failures_in_a_row(tried) >= self._job.fleet.failures:
            self._conclude("failed", f"{text} (after {self._job.fleet.failures} more attempts)")
        else:
            self._want(failed, f"{FAILURE}{text}")
            self._tell("failure", text)

    # Proposals.

    def _watch_and_propose(self, latest: Generation | None) -> None:
        """Without workers of its own: wait, or take over when nobody of the latest generation is left."""
        now = time.monotonic()
        self._watch.observe(self._run.nodes(), now)
        if latest is None:
            self._propose(latest, "start")
        elif self._wanted is not None and latest.number == self._last_tried:
            self._propose(latest, self._wanted)
        elif all(self._watch.lost(member.node, now) or member.node == self.name for member in latest.members):
            self._propose(latest, "resumed")

    def _want(self, ended: Generation, reason: str) -> None:
        """Proposes the generation after `ended`: now, or as soon as there are enough machines."""
        self._wanted = reason
        self._propose(ended, reason)

    def _propose(self, latest: Generation | None, reason: str) -> None:
        now = time.monotonic()
        nodes = self._run.nodes()
        self._watch.observe(nodes, now)
        # Its own lease as it is now: the one in the store may still offer the port of the last generation.
        others = [node for node in nodes if node.node != self.name and self._watch.alive(node.node, now)]
        alive = [self._lease.node, *others]
        generation = proposal(latest, alive, self._machines, reason, self._committed_step())
        if generation is not None:
            self._run.propose(generation)

    # Endings.

    def _finish_stopped(self, latest: Generation | None) -> None:
        """A person's stop and the budget end the run; a machine that has to go only leaves it."""
        reason = self._leaving()
        if reason not in (None, _NOTICE) and self._speaks_for(latest):
            self._conclude("stopped", reason)
        self._over = self._over or self._signalled

    def _speaks_for(self, latest: Generation | None) -> bool:
        """The first machine has the last checkpoint, so it says that the run is over; another if it is lost."""
        if latest is None or latest.members[0].node == self.name:
            return True
        now = time.monotonic()
        self._watch.observe(self._run.nodes(), now)
        return self._watch.lost(latest.members[0].node, now)

    def _conclude(self, status: Status, reason: str) -> None:
        if self._run.finish(Result(status, reason, self._committed_step(), self._lease.used_seconds())):
            self._tell(status, reason)
        self._over = True

    def _committed_step(self) -> int:
        return max((checkpoint.step for checkpoint in committed(self._run)), default=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
