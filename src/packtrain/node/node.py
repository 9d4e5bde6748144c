"""The node, `packtrain node`: one process per machine that takes part in generations until the run has a result.

    renew the lease (in a thread); then, every second or two, look at the store:
        the run has a result            leave
        a newer generation was proposed end the workers of the older one; start workers if this node is a member
        the workers have exited         write the result, or say in the lease how they ended
        another node is lost, is preempted or wants to join
                                        have the workers commit and exit, and propose the next generation
        stop request, deadline, preemption notice
                                        have the workers commit and exit, and leave

No node is special. Proposals are put-if-absent: the first one wins, and all nodes follow it.
"""

from __future__ import annotations

import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from packtrain.backoff import Backoff
from packtrain.errors import Mistake
from packtrain.node.address import check_private
from packtrain.node.assembly import QUIET, Assembly, LostNode
from packtrain.node.causes import COUNTED, lost_machine, why_not_started
from packtrain.node.deadline import Deadline, left_at_start, used_up
from packtrain.node.directory import NodeDirectory, NodeSlot, take_over_leftovers
from packtrain.node.launcher import ForkServer, free_port
from packtrain.node.lease import LeaseRenewer, hurried
from packtrain.node.metrics import ProgramMetrics
from packtrain.node.mirror_process import MirrorProcess
from packtrain.node.output import OutputEcho
from packtrain.node.preemption import (
    STOP_GRACE_SECONDS,
    Leaving,
    NoticeSource,
    PreemptionWatch,
    complain,
    exit_immediately,
    run_all,
)
from packtrain.node.program import ProgramCheckpoints
from packtrain.node.telemetry import TelemetrySampler, machine_facts
from packtrain.node.workers import WorkerGroup, WorkerStop
from packtrain.node.workspace import Workspace
from packtrain.process import Task, say
from packtrain.run.checkpoint import Superseded, last_step, remove_uncommitted
from packtrain.run.chunks import Flusher
from packtrain.run.outputs import newest_list, remove_unlisted
from packtrain.run.records import Cause, Event, EventKind, Generation, Lease, LogLine, NodeReport, Result, Status
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.store.records import MAX_RECORD_BYTES, DamagedRecord
from packtrain.system import machine_id
from packtrain.units import counted

LOOK_SECONDS = 2.0  # between two looks at the store while workers run ...
IDLE_SECONDS = 1.0  # ... and while there are none
_TICK_SECONDS = 0.2  # between two looks at this machine
_RESULT_LOOKS = 5  # running workers mean that there is no result: the store is asked less often
_END_SECONDS = 20.0  # for the last records, after the deadline or if the store is away
LAST_KILL_SECONDS = 3.0  # for workers to die, at the end of the time after a signal
STORE_HOURS = 24  # without an answer of the store, until the node gives up
_CLEAN_UP_SECONDS = 3600.0  # in which a store that is away may come back, to clean up there
_TAKEOVER_SECONDS = 10.0  # to finish taking over from dead nodes, before this one leaves


class Node:
    """One machine's part of a run. `work` is its loop, `look` one round of it.

    Tests pass `fork_server`, `sampler`, `name` and `machine`. Without `background` the caller renews the lease and
    calls `look`.
    """

    def __init__(
        self,
        run: Run,
        address: str,
        workers: int,
        inherited: dict[str, str],
        notices: Sequence[NoticeSource] = (),
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
        name: str | None = None,
        machine: str | None = None,
        slot: NodeSlot | None = None,
        fork_server: ForkServer | None = None,
        sampler: TelemetrySampler | None = None,
    ) -> None:
        self.run, self._job, self._clock, self._slot = run, run.job, clock, slot
        self.name = name or f"{socket.gethostname().lower()[:40]}-{uuid.uuid4().hex[:8]}"
        self.directory = NodeDirectory.create(run, self.name)
        self.fork_server = fork_server or ForkServer(run, self.directory.path, workers, inherited)
        self.events, self._logs = run.event_writer(self.name), run.log_writer(self.name)
        self._telemetry, self._echo = run.telemetry_writer(self.name), OutputEcho(run.name)
        # `joined` orders nodes by age: those from before the latest generation come before those after it.
        latest = run.latest_generation()
        joined = 1 + (latest.number if latest is not None else 0)
        if machine is None:
            machine = "" if self._job.fleet.kind.shares_machines else machine_id()
        lease = Lease(
            self.name, socket.gethostname(), address, free_port(), workers, joined, 0, 0.0, machine,
            job=run.job_digest, dollars_per_hour=self._job.fleet.dollars_per_hour or 0.0, facts=machine_facts(),
        )  # fmt: skip
        sampler = sampler or TelemetrySampler(self.directory.path)
        # A store client of its own: the node's may wait a minute for an answer, and the lease expires after 12 s.
        lease_run = hurried(run) if background else run
        self.lease = LeaseRenewer(lease_run, lease, sampler, self._telemetry, clock, background=background)
        self.assembly = Assembly(run, self.lease, clock, self._tell)
        self.preemption = PreemptionWatch(notices, clock, end=self._end_immediately)
        self.deadline = Deadline(self._near_deadline, self._past_deadline, clock)
        self._patience = Deadline(lambda: None, self._give_up_on_store, clock)
        checkpoints = self.directory.path / "checkpoints"
        self.workspace = Workspace(run, self.directory.path / "code", self._tell)
        self.metrics = ProgramMetrics(run, (checkpoints, self.directory.path / "code"), self._tell)
        self.program = ProgramCheckpoints(
            run, checkpoints, run.job.checkpoint, self._tell, self.workspace, self.metrics, clock
        )
        self.mirror = MirrorProcess(run, self.name)
        self.group: WorkerGroup | None = None  # the workers that run now, or are about to
        self._ended_group: WorkerGroup | None = None  # those that ran last
        self.is_over = False
        self._latest: Generation | None = None
        self._report: NodeReport | None = None  # how the last generation ended here
        self._ended_at = 0.0
        self._last_tried = self._looks = 0
        self._heeded_risk = False
        self._hurry = False  # look again without a pause
        self._gone = threading.Event()
        self.deadline.set(left_at_start(run, latest))

    @property
    def has_done_its_part(self) -> bool:
        """True if nothing is left to do for this machine: the run has a result, or its time is up."""
        return (self.is_over and self.preemption.notice is None) or self.deadline.is_near

    @property
    def leads(self) -> bool | None:
        """True if this node is the first one; None before the first generation."""
        return None if self._latest is None else self._latest.members[0].node == self.name

    @property
    def is_working(self) -> bool:
        return self.group is not None and self.group.launcher is not None

    def _tell(self, kind: EventKind, text: str) -> None:
        say(f"{kind} {text}" if kind == "generation" else f"{kind}: {text}")
        generation = self.group.generation.number if self.group else 0
        self.events.append(Event(time.time(), kind, text, generation))

    def work(self) -> None:
        """Return when the run has a result, or when this machine has to leave it."""
        self.preemption.listen()
        flusher = Flusher([self.events, self._logs, self.metrics], complain)
        telemetry_flusher = Flusher([self._telemetry], complain, seconds=10.0)
        # In a thread: uploading old logs may take long.
        takeover = Task(lambda: take_over_leftovers(self.run, self._tell), "takeover")
        try:
            # The launcher starts in this directory, so that a program or a user's recipe is found by its relative path.
            (self.directory.path / "code").mkdir()
            # Otherwise it stays empty: a job of Packtrain's own recipes needs no code.
            if self._job.has_own_code:
                self.workspace.prepare()
            self.fork_server.prepare()  # it imports torch while this node meets the others
            self._tell("machine", f"{self.name} has joined with {counted(self.lease.lease.workers, 'worker')}")
            retry = RetryPolicy()
            self._patience.set(STORE_HOURS * 3600.0)
            while not self.is_over:
                try:
                    self.look()
                    retry.succeeded()
                    self._patience.set(STORE_HOURS * 3600.0)
                except StoreError as error:
                    retry.failed(error)
                    self._leave_without_store()
                except (DamagedRecord, OSError) as error:
                    retry.failed(error)
                    self._patience.set(STORE_HOURS * 3600.0)  # it answers
                    self._leave_without_store()  # but a look may not come to the notice
                # Once the machine has to leave, time is short, and the workers may end at any moment.
                self._pause(retry.seconds if self.preemption.notice is None else min(retry.seconds, IDLE_SECONDS))
        finally:
            if self._slot is not None:
                self._slot.close()  # first: a client that resumes the run now needs another node here
            run_all(  # the lease is given up last: until then other nodes wait for what is still being written
                self.preemption.close,
                self.end_workers,
                self.fork_server.close,
                self._echo.close,
                lambda: takeover.wait(_TAKEOVER_SECONDS),
                lambda: self._tell("machine", f"{self.name} is leaving"),
                flusher.close,
                telemetry_flusher.close,
                self._clean_up_after_run,
                self.lease.leave,
                self.directory.remove,
                self.deadline.close,
                self._patience.close,
            )
            self._gone.set()

    def release(self) -> None:
        self._echo.close()
        self.directory.remove()
        self.deadline.close()

    def _pause(self, retry_seconds: float) -> None:
        """Wait for the next look at the store. News on this machine ends the wait early, if the store answers."""
        until = self._clock() + max(retry_seconds, LOOK_SECONDS if self.is_working else IDLE_SECONDS)
        notice = self.preemption.notice
        while self._clock() < until and not self.is_over and not self._hurry:
            group = self.group
            if group is not None and group.needs_attention and not retry_seconds:
                break
            if self.preemption.notice is not notice:
                break
            if group is not None and group.launcher is not None and group.launcher.poll() is None:
                group.launcher.wait(_TICK_SECONDS)  # no longer than until the workers have exited
            else:
                time.sleep(_TICK_SECONDS)
        self._hurry = False

    # One look at the store.

    def look(self) -> None:
        self._looks += 1
        # A result first: whatever else is in the store, the run is over.
        if (not self.is_working or self._looks % _RESULT_LOOKS == 0) and self.run.result() is not None:
            self.is_over = True
            return
        before, latest = self._latest, self.run.latest_generation(self._latest)
        if latest is not None and latest is not before:
            self._latest = latest
            if latest.number >= self.lease.lease.joined:  # the constructor has set the deadline of older ones
                self.deadline.set(latest.seconds_left)
        group = self.group
        if group is not None:
            group.shipper.ship()
            if latest is not None and latest.number > group.generation.number:  # the others have continued without us
                self._tell("superseded", f"generation {latest.number} has started: {latest.reason}")
                self.end_workers()
                self._hurry = True
            elif group.launcher is None:
                self._start_workers_or_leave(group)
            elif (code := group.launcher.poll()) is not None:
                self.after_exit(group, code)
            else:
                self._look_after(group)
        elif latest is not None and not self.assembly.is_of_this_job(latest) and self._has_moved():
            self.is_over = True
        elif (leaving := self._leaving()) is not None:
            self._finish_stopped(latest, leaving)
        elif latest is not None and latest.rank_of(self.name) is not None and latest.number > self._last_tried:
            self._start(latest)
        else:
            self._propose(latest)

    def _leaving(self, check_stop: bool = True) -> Leaving | None:
        """Return why the workers have to end early, if they do."""
        stop = self.run.stop_request() if check_stop else None
        if stop is not None:
            return Leaving("stop", stop.reason)
        if self.deadline.is_near:
            return Leaving("budget", used_up(self._job.budget))
        notice = self.preemption.notice
        if notice is None:
            return None
        self.lease.set_leaving()  # the first node sees it and has all workers commit
        return Leaving("preemption", notice.reason)

    def _propose(self, latest: Generation | None) -> None:
        """Without workers: propose the next generation, or wait for the node whose turn it is."""
        if not self.assembly.is_proposer(latest):
            return
        if self._has_moved():
            self.is_over = True
            return
        # A report of an older generation says nothing about how the latest one ended.
        report = self._report if latest is not None and self._last_tried == latest.number else None
        given_up = self.assembly.propose(latest, report, self._ended_at)
        if given_up is not None:
            self._conclude("failed", given_up)
        self._latest = self.run.latest_generation(latest)
        self._hurry = self._latest is not latest

    def _has_moved(self) -> bool:
        """True if a person has resumed the run with another job, perhaps elsewhere, while this node was cut off."""
        if self.run.store.find(self.run.key("job.json"), MAX_RECORD_BYTES) in (None, self.run.job_data):
            return False
        self._tell("machine", f"{self.name} is not part of the run anymore: it was resumed with another job")
        return True

    # Start workers.

    def _start(self, generation: Generation) -> None:
        rank = generation.rank_of(self.name)
        assert rank is not None
        self._last_tried, self._report = generation.number, None  # a node starts each generation only once
        self.lease.count_from(generation.used_seconds)
        if self.deadline.is_near:
            return
        try:
            for member in generation.members:  # whatever the store says, workers talk to private addresses only
                check_private(member.address, self._job.fleet.public_address)
        except Mistake as mistake:
            self._conclude("failed", f"generation {generation.number}: {mistake}")
            return
        try:
            group = WorkerGroup.create(
                self.run, self.name, generation, rank, self.directory.path, self._logs, self._clock(), self._hear
            )
        except OSError as error:  # a full or read-only disk
            self._cannot_start(generation, error)
            return
        self.group = group
        if self._job.program is not None:  # a recipe's workers restore by themselves
            group.restoring = self._restore(group)
        if group.is_first and generation.number > 1:  # one node cleans up for all
            Task(lambda: self._clean_up(generation.number), "clean up")
        self._start_workers(group)

    def _restore(self, group: WorkerGroup) -> Task:
        return Task(lambda: self.program.restore(group.generation.number, group.is_first), "restore")

    def _hear(self, line: LogLine) -> None:
        """Called for each line of this machine's workers."""
        self._echo.add(line)
        self.metrics.hear(line)

    def _start_workers_or_leave(self, group: WorkerGroup) -> None:
        """Start the workers, unless the node has to leave: it does not wait until a large checkpoint is restored."""
        leaving = self._leaving()
        if leaving is None:
            self._start_workers(group)
            return
        cause: Cause = "preempted" if leaving.kind == "preemption" else "ended"
        self._give_up(NodeReport(group.generation.number, cause, leaving.reason))
        self._finish_stopped(group.generation, leaving)

    def _start_workers(self, group: WorkerGroup) -> None:
        """Start the workers once the program's checkpoint is restored."""
        generation = group.generation
        if group.restoring is not None and not group.restoring.is_done:
            return
        try:
            if group.restoring is not None:
                group.restoring.result()
                group.restoring = None
                if group.is_first:
                    self.metrics.begin(
                        generation,
                        group.control,
                        lambda: group.launcher.server_pid if group.launcher else None,
                        self.program.restored,
                    )
            group.launcher = self.fork_server.start_launcher(
                generation, group.rank, group.directories, self.program.resume
            )
        except OSError as error:
            self._cannot_start(generation, error)
            return
        except Mistake as error:  # none of the checkpoints can be used
            self._conclude("failed", str(error))
            self.end_workers()
            return
        except (StoreError, DamagedRecord):
            group.restoring = self._restore(group)
            raise
        except Superseded:  # the next look sees the newer generation
            return
        self.lease.sampler.watch_workers_of(group.launcher.server_pid)
        if group.is_first:  # another node's ends by itself
            self.mirror.start()
        workers = counted(sum(member.workers for member in generation.members), "worker")
        is_failure = generation.cause in COUNTED
        # A failure has an event of its own.
        why = "" if generation.cause == "start" else " again" if is_failure else f" ({generation.reason})"
        self._tell("generation", f"{generation.number}: started {workers}{why}")

    def _cannot_start(self, generation: Generation, error: OSError) -> None:
        report = why_not_started(generation.number, error)
        self._tell("failure", report.text)
        self._give_up(report)
        self._ended_at = self._clock()

    # While workers run.

    def _look_after(self, group: WorkerGroup) -> None:
        group.oom_watch.look(self._clock())
        if self.preemption.risk is not None and not self._heeded_risk and group.is_under_way(self._clock()):
            self._heeded_risk = True
            self._tell("warning", f"{self.preemption.risk.reason}; committing a checkpoint, and continuing")
            self.program.hurry()
            group.control.request_commit()
        if self._job.program is not None and group.is_first:
            if group.control.take_commit_request():  # the program says that its files are complete
                self.program.hurry()
            group.commit_if_due(self.program, self._tell)
        # Only the first node asks the store for a stop request; the others see its lease.
        self._stop_workers(group, self._leaving(check_stop=group.is_first and group.stop is None))
        # A single fixed machine has no others to watch; with a range, some may ask to join.
        has_others = len(group.generation.members) > 1 or not self._job.fleet.kind.machines.is_fixed
        if has_others and self.group is group:
            change = self.assembly.watch_others(group)
            if isinstance(change, LostNode):
                self._lose(group, change.node)
            elif isinstance(change, NodeReport):
                self._give_up(change)
            elif change is not None:
                self._request_stop(group, change)

    def _stop_workers(self, group: WorkerGroup, leaving: Leaving | None) -> None:
        """Ask the workers to commit and exit if the node has to leave, or kill them if they were asked long ago."""
        if group.stop is not None and (warning := group.enforce_stop(self._clock())) is not None:
            self._tell("warning", warning)
        elif leaving is not None and (group.stop is None or leaving.kind == "preemption"):
            cause: Cause = "preempted" if leaving.kind == "preemption" else "ended"
            seconds_left = self.preemption.seconds_left() if leaving.kind == "preemption" else None
            # A fifth of the time until the machine is gone is kept for the last records.
            grace = STOP_GRACE_SECONDS if seconds_left is None else max(1.0, 0.8 * seconds_left)
            self._request_stop(group, WorkerStop(cause, leaving.reason, self._clock(), grace))

    def _leave_without_store(self) -> None:
        """Heed a preemption notice although looks fail: the workers have their grace, and nothing else waits."""
        notice, group = self.preemption.notice, self.group
        if notice is None:
            return
        if group is None or group.launcher is None:
            self._end_without_store(notice.reason)
            return
        self._stop_workers(group, Leaving("preemption", notice.reason))
        assert group.stop is not None
        # What a program has left is still to be committed, should the store come back in time.
        is_committed = group.closing is not None and group.closing.is_done
        waits = self._job.program is not None and group.is_first and not is_committed
        in_time = self._clock() - group.stop.at <= group.stop.grace_seconds
        if group.launcher.poll() is not None and not (waits and in_time):
            self._end_without_store(notice.reason)

    def _end_without_store(self, reason: str) -> None:
        """Leave, and do not try for minutes to put the last records into a store that is away."""
        self.is_over = True
        Task(lambda: self._exit_unless_gone(reason, power_off=False), "end")

    def _request_stop(self, group: WorkerGroup, stop: WorkerStop) -> None:
        if group.request_stop(stop):
            self._tell("stopping", stop.reason)
            self.lease.set_stopping(group.generation.number)

    def _lose(self, group: WorkerGroup, node: str) -> None:
        # A node that has finished the run is gone, too: that is not a loss.
        if self.run.result() is not None:
            self.is_over = True
            return
        number, lease = group.generation.number, self.assembly.watch.leases.get(node)
        if lease is not None and lease.leaving:
            self._give_up(NodeReport(number, "preempted", f"machine {node} was preempted"))
        else:
            self._tell("lost", f"{node} stopped renewing its lease")
            self._give_up(lost_machine(number, node))

    # After the workers.

    def end_workers(self) -> None:
        if self.group is not None:
            group = self.group
            group.kill()
            if group.stacks():  # these workers hung, and another node ended the generation
                Task(lambda: group.upload_stacks(self.run, self._tell), "stacks")
            self.lease.sampler.watch_workers_of(None)
            self.group, self._ended_group, self._ended_at = None, group, self._clock()
            self.lease.offer_port(free_port())  # the last one may stay in use for a while (TIME_WAIT)

    def _give_up(self, report: NodeReport) -> None:
        """End the workers here because of another node, once they have committed what they are committing."""
        if self.group is not None:
            self.group.wait_for_commit()
        self.end_workers()
        self._report, self._hurry = report, True
        self.lease.set_report(report)

    def after_exit(self, group: WorkerGroup, code: int) -> None:
        """Handle the exit of the workers. The group stays until the store knows how they ended."""
        # A recipe's workers write the result themselves; a program only exits with code 0.
        finished = self._job.program is not None and code == 0 and group.stop is None
        program = self.program if self._job.program is not None and group.is_first else None
        not_committed: NodeReport | None = None
        if group.closing is None and (group.stacks() or program is not None):
            group.kill()  # what the workers started may still write to the checkpoint directory
            group.closing = Task(lambda: group.close(self.run, program, self._tell), "close")
        if group.closing is not None:
            if not group.closing.is_done:
                return
            # If it raises a StoreError, `closing` stays None, and the next look starts another one.
            closing, group.closing = group.closing, None
            try:
                closing.result()
            except Superseded:  # the next generation repeats what this one did not commit
                finished = False
            except OSError as error:
                finished, not_committed = False, group.not_committed(error)
                self._tell("warning", not_committed.text)
            group.closing = closing
        report = replace(not_committed or group.report(code), restarted=program is not None and self.metrics.restarted)
        leaving = self._leaving()
        if self.run.result() is not None:
            self.is_over = True
        elif finished and group.is_first:
            self._conclude("finished", "the program exited with code 0")
        elif leaving is not None:
            self._finish_stopped(group.generation, leaving)
        elif report.fatal:
            self._conclude("failed", report.text)
        else:
            self.lease.set_report(report)
            if report.cause not in QUIET:
                self._tell("failure", report.text)
        self.end_workers()
        self._report, self._hurry = report, True

    # The end of the run.

    def _finish_stopped(self, latest: Generation | None, leaving: Leaving) -> None:
        """End the run after a stop request or at the end of its budget; a preempted node only leaves the run."""
        if leaving.kind != "preemption" and self._speaks_for(latest):
            self._conclude("stopped", leaving.reason)
        self.is_over = self.is_over or self.preemption.notice is not None

    def _speaks_for(self, latest: Generation | None) -> bool:
        """True if this node may write the result: the first one, which has the last checkpoint; any, if it is lost."""
        if latest is None or latest.members[0].node == self.name or not self.assembly.is_of_this_job(latest):
            return True
        self.assembly.look_at(latest.members[0].node)
        return self.assembly.is_lost(latest.members[0].node)

    def _conclude(self, status: Status, reason: str) -> None:
        step = last_step(self.run)
        # Several nodes may conclude at the same time: only the one whose result is stored reports it.
        if self.run.finish(Result(status, reason, step, self.lease.used_seconds())):
            self._tell(status, reason)
        self.is_over = True

    def _clean_up(self, before: int) -> None:
        """Remove what killed workers of generations before that number left in the store."""
        backoff = Backoff(1.0, 60.0, limit_seconds=_CLEAN_UP_SECONDS)
        while not self._gone.is_set():
            try:
                remove_uncommitted(self.run, before)
                return
            except StoreError as error:
                pause = backoff.next_pause() if error.temporary else None
                if pause is None:  # the next generation, or the end of the run, removes it
                    complain(error)
                    return
                self._gone.wait(pause)

    def _clean_up_after_run(self) -> None:
        """Remove what is left of unfinished uploads; only by the first node of the last generation.

        Unless its workers exited in order, a commit of theirs may still be on its way, and then needs its files.
        """
        latest, ended = self._latest, self._ended_group
        if latest is None or latest.members[0].node != self.name:
            return
        is_settled = ended is not None and ended.generation.number == latest.number and ended.has_settled

        def remove() -> None:
            try:
                if self.run.result() is not None:
                    remove_uncommitted(self.run, latest.number + is_settled)
                    outputs = newest_list(self.run) if is_settled else None
                    if outputs is not None and outputs.generation == latest.number:
                        remove_unlisted(self.run, outputs)
                    self.run.store.remove_unfinished(self.run.folder)
            except StoreError as error:
                complain(error)

        Task(remove, "clean up").wait(_TAKEOVER_SECONDS)  # the machine must not wait for a store that is away

    # Called by the deadline, in its own thread: nothing here waits for the store.

    def _near_deadline(self) -> None:
        if (group := self.group) is not None:
            group.request_stop(WorkerStop("ended", used_up(self._job.budget), self._clock()))

    def _past_deadline(self) -> None:
        self._kill_workers()
        self._exit_unless_gone(used_up(self._job.budget), self._job.fleet.kind.power_off)

    def _exit_unless_gone(self, reason: str, power_off: bool) -> None:
        """End the process after some time: `work` may be stuck in a request to the store."""
        if not self._gone.wait(_END_SECONDS):
            exit_immediately(reason, power_off)

    def _kill_workers(self) -> None:
        group = self.group
        if group is not None and group.launcher is not None:
            run_all(group.launcher.kill)

    # Called in threads of their own, too.

    def _give_up_on_store(self) -> None:
        reason = f"{self.run.store.url} has not answered for {STORE_HOURS} hours"
        self._tell("failure", f"{reason}; giving up")
        self.is_over = True
        self._kill_workers()
        self._exit_unless_gone(reason, self._job.fleet.kind.power_off)

    def _end_immediately(self, reason: str) -> None:
        # Workers in the kernel, as on a dead mount, cannot be killed now; they get SIGTERM when this process is gone.
        Task(self._kill_workers, "kill").wait(LAST_KILL_SECONDS)
        exit_immediately(reason, power_off=False)  # whoever takes the machine away ends it


class RetryPolicy:
    """Pauses of the node's loop after the store or the disk failed, or a record in the store was damaged.

    Before the first success, a failure that will not pass by itself is raised: a person has to fix it. Later, none is:
    keys are renewed, clocks set and disks freed while the workers train.
    """

    def __init__(self) -> None:
        self._succeeded = False
        self._backoff = Backoff(1.0, 30.0, jitter=0.0)
        self.seconds = 0.0  # to wait before the next try

    def succeeded(self) -> None:
        self._succeeded, self.seconds = True, 0.0
        self._backoff.reset()

    def failed(self, error: StoreError | DamagedRecord | OSError) -> None:
        temporary = isinstance(error, StoreError) and error.temporary
        if not self._succeeded and not temporary:
            raise error
        # A temporary failure may be over at any moment: look often.
        self.seconds = self._backoff.next_pause(4.0 if temporary else math.inf) or 0.0
        say(f"warning: {error}; retrying in {self.seconds:g} s")
