"""Nodes that live in the test and look at the store when they are told to; their workers exit when the test says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from packtrain.node.node import Node
from packtrain.node.preemption import PreemptionNotice
from packtrain.run.records import Telemetry
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.control import Control, WorkerError


class FakeLauncher:
    """Workers that exit when the test says so."""

    server_pid = 0

    def __init__(self) -> None:
        self.code: int | None = None
        self.terminated = 0
        self.workers = True

    def poll(self) -> int | None:
        return self.code

    def wait(self, seconds: float) -> int | None:
        time.sleep(seconds)
        return self.code

    def has_workers(self) -> bool:
        return self.workers and self.code is None

    def terminate(self) -> None:
        self.terminated += 1

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code


class FakeForkServer:
    """Starts no process."""

    def start_launcher(self, *_: object) -> FakeLauncher:
        return FakeLauncher()

    def prepare(self) -> None: ...

    def close(self) -> None: ...


class FakeSampler:
    """Measures nothing."""

    def watch_workers_of(self, launcher: int | None) -> None: ...

    def sample(self) -> Telemetry:
        return Telemetry(memory_bytes=1)


def fake_node(run: Run, name: str | None = None, **options: Any) -> Node:
    """A node without processes and threads."""
    fakes: Any = {"fork_server": FakeForkServer(), "sampler": FakeSampler()}
    return Node(run, "127.0.0.1", 1, {}, background=False, name=name, **fakes, **options)


def look_until_settled(node: Node) -> None:
    """Look once, and again after each task that the look started."""
    node.look()
    while (group := node.group) is not None:
        if group.committing is not None:
            group.committing.wait()
        waiting = group.closing or group.restoring
        if waiting is None:
            return
        waiting.wait()
        node.look()


@dataclass
class Cluster:
    """The nodes of one run, with one clock that only the test moves."""

    run: Run
    now: float = 1000.0
    nodes: list[Node] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def add(
        self, store: Store | None = None, clock: Callable[[], float] | None = None, machine: str | None = None
    ) -> Node:
        run = Run(store, self.run.name) if store is not None else self.run
        node = fake_node(run, f"m{len(self.nodes):04d}", clock=clock or (lambda: self.now), machine=machine)
        self.nodes.append(node)
        return node

    def there(self) -> list[Node]:
        return [node for node in self.nodes if node.name not in self.gone]

    def wait(self, seconds: float) -> None:
        """Every second each node looks at the store, and every other second it renews its lease."""
        for second in range(int(seconds)):
            self.now += 1.0
            for node in self.there():
                if second % 2 == 0 or node.lease.has_news:
                    node.lease.renew()
                look_until_settled(node)
                if node.is_over:
                    self.leave(node)

    def leave(self, node: Node) -> None:
        node.end_workers()
        node.lease.leave()
        self.gone.add(node.name)

    def kill(self, node: Node) -> None:
        """As a power cut: the node leaves nothing behind."""
        self.gone.add(node.name)

    def end_workers(self, code: int, *nodes: Node) -> None:
        for node in nodes or self.there():
            if node.group is not None and node.group.launcher is not None:
                node.group.launcher.code = code  # type: ignore[attr-defined]

    def fail(self, node: Node, text: str = "it broke", **error: Any) -> None:
        """A worker of this node fails, and the workers of all others lose the connection to it."""
        assert node.group is not None
        for one in self.there():
            if one.group is not None:
                told = WorkerError(0, "Connection closed by peer", False, 2.0)
                if one is node:
                    told = replace(told, text=text, time=3.0, **error)
                Control(one.group.directories.control).report_error(told)
        self.end_workers(1)

    def preempt(self, node: Node, seconds: float | None = None) -> None:
        node.preemption.post(PreemptionNotice("the cloud wants it back", seconds))

    def members(self) -> list[int]:
        """The members of the latest generation, by the order in which they were added."""
        latest = self.run.latest_generation()
        names = [node.name for node in self.nodes]
        return [names.index(member.node) for member in latest.members] if latest else []

    def causes(self) -> list[str]:
        return [generation.cause for generation in self.run.generations()]


Make = Callable[..., Cluster]
"""How many machines a run may have, how many there are, and what else is in its job."""


@contextmanager
def cluster_of(run: Run, monkeypatch: pytest.MonkeyPatch, cache: str) -> Iterator[Cluster]:
    monkeypatch.setenv("PACKTRAIN_CACHE", cache)
    cluster = Cluster(run)
    yield cluster
    for node in cluster.nodes:
        node.release()
