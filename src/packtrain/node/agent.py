"""The agent on each machine: it takes part in generations until the run has a result.

    register and renew a lease; then, every second or two:
        the run has a result: leave
        a generation that names this machine has begun: start its workers, ending those of an older one
        the workers ended: write the result, or say in the lease how they ended
        a machine of the generation is lost, is to leave, or wants to join: have the workers commit, propose the next
        a stop, the deadline or a notice: let the workers commit and leave

No agent is special. Proposals are put-if-absent: the first one holds, and all others follow it.
"""

from __future__ import annotations

import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from packtrain.backoff import Backoff
from packtrain.errors import Mistake
from packtrain.node.assembly import QUIET, Assembly, Lost, watch_others
from packtrain.node.attempt import STOP_GRACE_SECONDS, Asked, Attempt, Task, begin
from packtrain.node.causes import why_not_started
from packtrain.node.deadline import Deadline, in_words, left_at_start
from packtrain.node.directory import Home, remove_orphans, sweep
from packtrain.node.launch import Launchers, free_port
from packtrain.node.lease import LeaseRenewer, hurried
from packtrain.node.preemption import Leaving, NoticeBoard, Notices, complain, end_at_once, go_through
from packtrain.node.program import ProgramCheckpoints
from packtrain.run.checkpoint import Superseded, committed
from packtrain.run.chunks import Flusher
from packtrain.run.code import unpack
from packtrain.run.records import Cause, Event, EventKind, Generation, Lease, NodeReport, Result, Status
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.system import say
from packtrain.units import counted

LOOK_SECONDS = 2.0  # between two looks at the store, while workers work ...
IDLE_SECONDS = 1.0  # ... and while there are none
_TICK_SECONDS = 0.2  # between two looks at what is on this machine
_RESULT_LOOKS = 5  # workers that work are themselves a sign that there is no result
_END_SECONDS = 20.0  # for the last words after the deadline
_SWEEP_SECONDS = 10.0  # to wait for what is taken over of dead nodes, before this one leaves


class Agent:
    """`background`: renews its lease by itself; otherwise whoever made it does, and decides when it looks."""

    def __init__(
        self,
        run: Run,
        address: str,
        workers: int,
        inherited: dict[str, str],
        notices: Sequence[Notices] = (),
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        self._run, self._job, self._clock = run, run.job, clock
        self.name = new_name()
        self._home = Home.make(run, self.name)
        self._launchers = Launchers(run, self._home.path, inherited)
        self._events, self._logs = run.event_writer(self.name), run.log_writer(self.name)
        self._telemetry = run.telemetry_writer(self.name)
        # Those who were there before a generation come before those who came after it.
        latest = run.latest_generation()
        joined = 1 + (latest.number if latest is not None else 0)
        node = Lease(self.name, socket.gethostname(), address, free_port(), workers, joined, 0, 0.0)
        self._lease = LeaseRenewer(
            hurried(run) if background else run, node, self._home.path, self._telemetry, clock, background
        )
        self._assembly = Assembly(run, self._lease, clock, self._tell)
        self._board = NoticeBoard(notices, clock)
        self._deadline = Deadline(self._near_deadline, self._out_of_time, clock)
        self._program = ProgramCheckpoints(run, self._home.path / "checkpoints", run.job.checkpoint, self._tell)
        self._latest: Generation | None = None
        self._attempt: Attempt | None = None
        self._report: NodeReport | None = None  # how the generation that was last tried ended here
        self._ended_at = 0.0
        self._last_tried = self._looks = 0
        self._over = self._hurry = False
        self._gone = threading.Event()
        self._deadline.hold(left_at_start(run, latest))

    @property
    def has_done_its_part(self) -> bool:
        """Whether nothing is left for this machine to do: the run has a result, or its time is up."""
        return (self._over and self._board.notice is None) or self._deadline.is_near

    def _tell(self, kind: EventKind, text: str) -> None:
        say(f"{kind}: {text}")
        generation = self._attempt.generation.number if self._attempt else 0
        self._events.append(Event(time.time(), kind, text, generation))

    def work(self) -> None:
        """Returns when the run has a result, or when this machine is to leave it."""
        self._board.listen()
        flusher = Flusher([self._events, self._logs], complain)
        history = Flusher([self._telemetry], complain, seconds=10.0)
        sweeping = Task(lambda: sweep(self._run, self._tell), "sweep")
        try:
            (self._home.path / "code").mkdir()
            unpack(self._run.store.get(self._run.key("code.tar.zst")), self._home.path / "code")
            self._tell("machine", f"{self.name} has joined with {counted(self._lease.node.workers, 'worker')}")
            trouble = Trouble()
            while not self._over:
                try:
                    self.look()
                    trouble.over()
                except (StoreError, OSError) as error:
                    trouble.count(error)
                self._pause(trouble.seconds)
        finally:
            go_through(
                self._board.close,
                self._end_attempt,
                self._launchers.dismiss,
                lambda: sweeping.wait(_SWEEP_SECONDS),
                lambda: self._tell("machine", f"{self.name} leaves"),
                flusher.close,
                history.close,
                self._lease.leave,
                self._home.remove,
                self._deadline.close,
            )
            self._gone.set()

    def _pause(self, trouble_seconds: float) -> None:
        """Until the next look at the store; what happens on this machine cuts it short, unless the store is away."""
        until = self._clock() + max(trouble_seconds, LOOK_SECONDS if self._is_working() else IDLE_SECONDS)
        notice = self._board.notice
        while self._clock() < until and not self._over and not self._hurry:
            attempt = self._attempt
            wanted = attempt is not None and attempt.wants_a_look and not trouble_seconds
            if wanted or self._board.notice is not notice:
                break
            time.sleep(_TICK_SECONDS)
        self._hurry = False

    def _is_working(self) -> bool:
        return self._attempt is not None and self._attempt.launch is not None

    # One look at the world.

    def look(self) -> None:
        self._looks += 1
        if (not self._is_working() or self._looks % _RESULT_LOOKS == 0) and self._run.result() is not None:
            self._over = True
            return
        known, latest = self._latest, self._run.latest_generation(self._latest)
        if latest is not None and latest is not known:
            self._latest = latest
            if latest.number >= self._lease.node.joined:  # how much is left of an older one is held already
                self._deadline.hold(latest.seconds_left)
        attempt = self._attempt
        if attempt is not None:
            attempt.shipper.ship()
            if latest is not None and latest.number > attempt.generation.number:
                self._tell("superseded", f"generation {latest.number} has begun: {latest.reason}")
                self._end_attempt()
                self._hurry = True
            elif attempt.launch is None:
                self._launch_or_leave(attempt)
            elif (code := attempt.launch.poll()) is not None:
                self._after(attempt, code)
            else:
                self._look_after(attempt)
        elif (leaving := self._leaving()) is not None:
            self._finish_stopped(latest, leaving)
        elif latest is not None and latest.rank_of(self.name) is not None and latest.number > self._last_tried:
            self._start(latest)
        else:
            self._between(latest)

    def _leaving(self, stop_too: bool = True) -> Leaving | None:
        """Why the workers are to end before their goal. A stop is asked for in the store: not everybody has to look."""
        stop = self._run.stop_request() if stop_too else None
        if stop is not None:
            return Leaving("stop", stop.reason)
        if self._deadline.is_near:
            return Leaving("budget", in_words(self._job.budget))
        notice = self._board.notice
        if notice is None:
            return None
        self._lease.say_leaving()
        return Leaving("notice", notice.reason)

    # Attempts.

    def _start(self, generation: Generation) -> None:
        rank = generation.rank_of(self.name)
        assert rank is not None
        self._last_tried, self._report = generation.number, None
        self._lease.count_from(generation.used_seconds)
        if self._deadline.is_near:
            return
        try:
            attempt = begin(self._run, self.name, generation, rank, self._home.path, self._logs, self._clock())
        except OSError as error:
            self._cannot_start(generation, error)
            return
        self._attempt = attempt
        if self._job.program is not None:
            attempt.preparing = Task(self._program.restore, "restore")
        if attempt.is_first and generation.number > 1:
            Task(lambda: remove_orphans(self._run, generation.number, complain), "orphans")
        self._launch(attempt)

    def _launch_or_leave(self, attempt: Attempt) -> None:
        """Bringing back a large checkpoint takes long, and whoever has to go does not wait for it."""
        leaving = self._leaving()
        if leaving is None:
            self._launch(attempt)
            return
        cause: Cause = "preempted" if leaving.kind == "notice" else "ended"
        self._give_up(NodeReport(attempt.generation.number, cause, leaving.reason))
        self._finish_stopped(attempt.generation, leaving)

    def _launch(self, attempt: Attempt) -> None:
        """Starts the workers, once what they need is there."""
        generation = attempt.generation
        if attempt.preparing is not None and not attempt.preparing.is_done:
            return
        try:
            if attempt.preparing is not None:
                attempt.preparing.result()
                attempt.preparing = None
            attempt.launch = self._launchers.launch(generation, attempt.rank, attempt.directories)
        except OSError as error:
            self._cannot_start(generation, error)
            return
        except Mistake as error:  # no checkpoint of those that are there can be used
            self._conclude("failed", str(error))
            self._end_attempt()
            return
        except StoreError:
            attempt.preparing = Task(self._program.restore, "restore again")
            raise
        self._lease.sampler.watch_workers_of(attempt.launch.pid)
        workers = sum(member.workers for member in generation.members)
        self._tell("generation", f"{generation.number} begins with {counted(workers, 'worker')} ({generation.reason})")

    def _cannot_start(self, generation: Generation, error: OSError) -> None:
        report = why_not_started(generation.number, error)
        self._tell("failure", report.text)
        self._give_up(report)
        self._ended_at = self._clock()

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            attempt = self._attempt
            attempt.kill()
            if attempt.stacks():  # of workers that hung, and whose generation another machine ended
                Task(lambda: attempt.keep_stacks(self._run, self._tell), "stacks")
            self._lease.sampler.watch_workers_of(None)
            self._attempt, self._ended_at = None, self._clock()
            self._lease.offer_port(free_port())

    def _look_after(self, attempt: Attempt) -> None:
        """While the workers work."""
        if attempt.is_under_way(self._clock()):
            self._launchers.make_ready()
        if self._job.program is not None and attempt.is_first:
            attempt.commit_if_due(self._program, self._tell)
        several = len(attempt.generation.members) > 1 or not self._job.fleet.kind.machines.is_fixed
        leaving = self._leaving(stop_too=attempt.is_first and attempt.asked is None)
        if attempt.asked is not None and (warning := attempt.hold_to_grace(self._clock())) is not None:
            self._tell("warning", warning)
        elif leaving is not None and (attempt.asked is None or leaving.kind == "notice"):
            cause = "preempted" if leaving.kind == "notice" else "ended"
            left = self._board.seconds_left() if leaving.kind == "notice" else None
            grace = STOP_GRACE_SECONDS if left is None else max(1.0, 0.8 * left)
            self._ask_to_stop(attempt, Asked(cause, leaving.reason, self._clock(), grace))  # type: ignore[arg-type]
        if several and self._attempt is attempt:
            self._watch_members(attempt)

    def _ask_to_stop(self, attempt: Attempt, asked: Asked) -> None:
        if attempt.ask_to_stop(asked):
            self._tell("stopping", asked.reason)
            self._lease.say_stopping(attempt.generation.number)

    def _watch_members(self, attempt: Attempt) -> None:
        seen = watch_others(self._assembly, attempt, self._clock())
        if isinstance(seen, Lost):
            self._lose(attempt, seen.node)
        elif isinstance(seen, NodeReport):
            self._give_up(seen)
        elif seen is not None:
            self._ask_to_stop(attempt, seen)

    def _lose(self, attempt: Attempt, node: str) -> None:
        if self._run.result() is not None:
            self._over = True
            return
        number, lease = attempt.generation.number, self._assembly.watch.leases.get(node)
        if lease is not None and lease.leaving:
            self._give_up(NodeReport(number, "preempted", f"machine {node} had to leave"))
        else:
            self._tell("lost", f"{node} does not renew its lease")
            self._give_up(NodeReport(number, "machine", f"machine {node} is lost"))

    def _give_up(self, report: NodeReport) -> None:
        """Ends the workers of this machine because of another one."""
        self._end_attempt()
        self._report, self._hurry = report, True
        self._lease.say_report(report)

    def _after(self, attempt: Attempt, code: int) -> None:
        """When the workers have ended, one way or another. The attempt stays until the store knows about it."""
        finished = self._job.program is not None and code == 0 and attempt.asked is None
        program = self._program if self._job.program is not None and attempt.is_first else None
        unsaved: NodeReport | None = None
        if attempt.closing is None and (attempt.stacks() or program is not None):
            attempt.kill()
            attempt.closing = Task(lambda: attempt.close(self._run, program, self._tell), "close")
        if attempt.closing is not None:
            if not attempt.closing.is_done:
                return
            closing, attempt.closing = attempt.closing, None
            try:
                closing.result()
            except Superseded:
                finished = False
            except OSError as error:
                finished, unsaved = False, attempt.uncommitted(error)
                self._tell("warning", unsaved.text)
            attempt.closing = closing
        report = unsaved or attempt.report(code)
        leaving = self._leaving()
        if self._run.result() is not None:
            self._over = True
        elif finished and attempt.is_first:
            self._conclude("finished", "the program ended with exit code 0")
        elif leaving is not None:
            self._finish_stopped(attempt.generation, leaving)
        elif report.fatal:
            self._conclude("failed", report.text)
        else:
            self._lease.say_report(report)
            if report.cause not in QUIET:
                self._tell("failure", report.text)
        self._end_attempt()
        self._report, self._hurry = report, True

    def _between(self, latest: Generation | None) -> None:
        """Without workers: wait for whoever is to propose the next generation, or propose it."""
        if not self._assembly.is_caller(latest):
            return
        own = self._report if latest is not None and self._last_tried == latest.number else None
        given_up = self._assembly.call(latest, own, self._ended_at)
        if given_up is not None:
            self._conclude("failed", given_up)
        self._latest = self._run.latest_generation(latest)
        self._hurry = self._latest is not latest

    # Endings.

    def _finish_stopped(self, latest: Generation | None, leaving: Leaving) -> None:
        """A person's stop and the budget end the run; a machine that has to go only leaves it."""
        if leaving.kind != "notice" and self._speaks_for(latest):
            self._conclude("stopped", leaving.reason)
        self._over = self._over or self._board.notice is not None

    def _speaks_for(self, latest: Generation | None) -> bool:
        """The first machine has the last checkpoint, so it says that the run is over; another if it is lost."""
        if latest is None or latest.members[0].node == self.name:
            return True
        self._assembly.look_at(latest.members[0].node)
        return self._assembly.is_lost(latest.members[0].node)

    def _conclude(self, status: Status, reason: str) -> None:
        step = max((checkpoint.step for checkpoint in committed(self._run)), default=0)
        if self._run.finish(Result(status, reason, step, self._lease.used_seconds())):
            self._tell(status, reason)
        self._over = True

    # The deadline, from a thread of its own: nothing here waits for the store.

    def _near_deadline(self) -> None:
        if (attempt := self._attempt) is not None:
            attempt.ask_to_stop(Asked("ended", in_words(self._job.budget), self._clock()))

    def _out_of_time(self) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.launch is not None:
            go_through(attempt.launch.kill)
        if not self._gone.wait(_END_SECONDS):
            end_at_once(in_words(self._job.budget), self._job.fleet.kind.power_off)


def new_name() -> str:
    return f"{socket.gethostname().lower()[:40]}-{uuid.uuid4().hex[:8]}"


class Trouble:
    """Pauses of the agent's loop after a store or a disk refused.

    Before the first success, a failure that will not pass by itself is raised: a person has to fix it. Later
    nothing is worth ending workers for: keys are renewed, clocks set and disks freed while they train.
    """

    def __init__(self) -> None:
        self._succeeded = False
        self._backoff = Backoff(1.0, 30.0, jitter=0.0)
        self.seconds = 0.0  # to wait before the next try

    def over(self) -> None:
        self._succeeded, self.seconds = True, 0.0
        self._backoff.reset()

    def count(self, error: StoreError | OSError) -> None:
        temporary = isinstance(error, StoreError) and error.temporary
        if not self._succeeded and not temporary:
            raise error
        # A temporary failure may be over at any moment: look often.
        self.seconds = self._backoff.next_pause(4.0 if temporary else math.inf) or 0.0
        say(f"warning: {error}; the agent tries again in {self.seconds:g} s")
