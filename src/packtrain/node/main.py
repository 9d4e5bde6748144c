"""The life of a node, from the command that a fleet runs on a machine to its exit code.

wait for the store             a machine may start before its mounts
check version and code         they have to be those of the client that started this node
take this machine's slot       a machine has one node of a run
work                           in node.py, until the run has a result or the machine has to leave it
write the report               if the run has a result
shut the machine down          if the fleet says so, and nothing is left to do for it
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass

from packtrain.backoff import Backoff
from packtrain.errors import EXIT_DONE, AlreadyJoined, Mistake, NotFound, RunFailed
from packtrain.identity import identity
from packtrain.node.address import check_own, choose_address
from packtrain.node.directory import NodeSlot
from packtrain.node.lease import hurried
from packtrain.node.node import Node
from packtrain.node.preemption import NoticeSource, run_all, switch_off
from packtrain.node.telemetry import gpus_of_workers
from packtrain.process import OwnLog, say
from packtrain.run.liveness import EXIT_CODES
from packtrain.run.records import Event
from packtrain.run.run import Run
from packtrain.run.trust import Accept, require_trust
from packtrain.store import StoreAway, StoreError
from packtrain.system import check_shared_memory
from packtrain.train.control import VISIBLE_GPUS_VARIABLE

_MOUNT_SECONDS = 60.0
_KNOWN_ADDRESSES = 3  # a new machine asks for the addresses of this many others; all would be many requests


@dataclass(frozen=True)
class NodeOptions:
    """The options of the command that starts a node. `code` and `identity` are what its client expects here."""

    address: str | None
    interface: str | None
    workers: int | None
    power_off: bool
    code: str | None
    identity: str | None


def take_part(
    run: Run,
    options: NodeOptions,
    accept: Accept,
    notices: Callable[[], Sequence[NoticeSource]],
    show_steps: Callable[[Run, Node], AbstractContextManager[object]],
    write_report: Callable[[Run], object],
) -> int:
    """Take part in a run on this machine, and return the exit code of the process.

    `accept` decides about code that no client has sent this node to; `notices` are the fleet's sources of preemption
    notices; `show_steps` prints progress while the node works.
    """
    log, ending = OwnLog(), _Ending(options.power_off)
    with _machine_off_after(run, log, ending):
        _wait_for_store(run)
        if run.result() is not None:  # whoever starts nodes until one succeeds need not start another
            log.remove()
            return EXIT_DONE
        if options.identity is not None and identity() != options.identity:  # workers might compute something else
            versions = f"this machine has packtrain {identity()}, the client has {options.identity}"
            raise Mistake(f"{versions}; build the image again")
        if options.code is None:  # no client has started this node: ask the person
            require_trust(run, accept)
        elif run.code_digest != options.code:
            # Not a Mistake: nobody is at this machine to correct it, and a rented one has to shut down.
            fault = f"job or code in {run.store.url} are not those that its client started"
            raise RunFailed(f"{run.name}: {fault}; not run")
        ending.power_off = options.power_off or run.job.fleet.kind.power_off
        ending.slot = NodeSlot(run)
        node = ending.node = _create(run, options, notices(), ending.slot)
        with show_steps(run, node):
            node.work()
        result = None
        ending.is_over = node.has_done_its_part
        if ending.is_over:
            result = run.result()
        else:  # a machine that is taken away does not wait for its store
            with suppress(StoreError):
                result = hurried(run).result()
        if result is not None:
            ending.is_over = True
            write_report(run)
            node.mirror.finish()
            if result.status != "failed":
                log.remove()
    return EXIT_CODES["interrupted" if result is None else result.status]


@dataclass
class _Ending:
    """The end of this machine. `is_over`: nothing is left to do for it, so that it may shut down."""

    power_off: bool
    is_over: bool = True  # even if the node crashes: nothing would start another one here
    slot: NodeSlot | None = None
    node: Node | None = None


@contextmanager
def _machine_off_after(run: Run, log: OwnLog, ending: _Ending) -> Iterator[None]:
    """Shut the machine down in the end if it is to, and if nothing is left to do for it, whatever is raised."""
    try:
        yield
    except KeyboardInterrupt:
        ending.is_over = False
        raise
    except AlreadyJoined:  # the other node does this machine's part
        ending.is_over = False
        log.remove()
        raise
    except Mistake:
        # Before the node joined, a person has to fix the mistake, and may be logged in on this machine to do so.
        ending.is_over = ending.node is not None
        raise
    except NotFound:  # no such run: it may have been deleted, and then this machine is no longer needed
        raise
    except Exception as error:
        if ending.is_over and not isinstance(error, StoreAway):
            # Its machine may soon be unreachable. A new writer: the node's own may be what crashed, and a writer's name
            # is used only once.
            machine = socket.gethostname()
            writer = hurried(run).event_writer(f"{machine.lower()[:40]}-{uuid.uuid4().hex[:8]}")
            text = f"the node on {machine} crashed: {type(error).__name__}: {error}"
            writer.append(Event(time.time(), "failure", text))
            run_all(writer.flush)
        raise
    finally:
        with ExitStack() as last:
            last.callback(switch_off, ending.power_off and ending.is_over)
            if ending.slot is not None:
                last.callback(ending.slot.close)  # from here on, another node may take this machine's part
            if ending.node is not None:
                ending.node.mirror.end()


def _wait_for_store(run: Run) -> None:
    """Read the job as soon as the store is there: a machine may start before its mounts, or while one is away.

    A bucket's own client waits just as long.
    """
    backoff = Backoff(0.2, 5.0, limit_seconds=_MOUNT_SECONDS)
    has_said = False
    while True:
        try:
            run.job  # noqa: B018 - reads it
            return
        except StoreAway as error:
            if not has_said:
                say(f"waiting up to {_MOUNT_SECONDS:.0f} s for the store: {error}")
                has_said = True
            if not backoff.wait():
                raise


def _create(run: Run, options: NodeOptions, notices: Sequence[NoticeSource], slot: NodeSlot) -> Node:
    fleet = run.job.fleet
    if run.job.recipe is not None:  # a program decides for itself what it needs
        check_shared_memory()
    is_alone = fleet.kind.machines.most == 1
    address = choose_address(options.address, options.interface, is_alone, run.store.endpoint, _some_addresses(run))
    check_own(address, fleet.public_address)
    gpus = gpus_of_workers(os.environ)
    # By name: a process sees only the first part of a divided GPU, unless it is told which one is its own.
    named = {VISIBLE_GPUS_VARIABLE: ",".join(gpus)} if any(gpu.startswith("MIG-") for gpu in gpus) else {}
    workers = options.workers or fleet.workers or len(gpus) or 1
    return Node(run, address, workers, {**os.environ, **named}, notices, slot=slot)


def _some_addresses(run: Run) -> list[str]:
    """Return addresses of a few machines of the run: the route to them shows which interface to use.

    Machines from before the run moved are none of them: theirs may mean another machine here, as 127.0.0.1 does.
    """
    latest = run.latest_generation()
    if latest is not None and latest.job == run.job_digest:
        return [member.address for member in latest.members[:_KNOWN_ADDRESSES]]
    names = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in run.store.list(run.key("nodes/"))]
    leases = map(run.lease, names[:_KNOWN_ADDRESSES])
    return [lease.address for lease in leases if lease is not None and lease.job == run.job_digest]
