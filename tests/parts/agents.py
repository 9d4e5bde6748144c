"""Agents that live in the test and look at the world when they are told to; their workers end when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from packtrain.node import agent as agent_module
from packtrain.node import lease as lease_module
from packtrain.node.agent import Agent
from packtrain.node.preemption import Notice
from packtrain.run.records import Telemetry
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.control import Control, WorkerError


class StandIn:
    """Workers that end when the test says so."""

    pid = 0

    def __init__(self) -> None:
        self.code: int | None = None
        self.asked = 0
        self.workers = True

    def poll(self) -> int | None:
        return self.code

    def has_workers(self) -> bool:
        return self.workers and self.code is None

    def terminate(self) -> None:
        self.asked += 1

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code


class StandIns:
    """Launchers that start no process."""

    def __init__(self, *_: object) -> None:
        self.is_ready = False

    def launch(self, *_: object) -> StandIn:
        self.is_ready = False
        return StandIn()

    def make_ready(self) -> None:
        self.is_ready = True

    def dismiss(self) -> None: ...


class StillMachine:
    """Measures nothing, at once."""

    def __init__(self, *_: object) -> None: ...

    def watch_workers_of(self, launcher: int | None) -> None: ...

    def sample(self) -> Telemetry:
        return Telemetry(memory_bytes=1)


def look_through(agent: Agent) -> None:
    """One look, and those that follow from what takes its time."""
    agent.look()
    while (attempt := agent._attempt) is not None:
        if attempt.committing is not None:
            attempt.committing._thread.join()
        waiting = attempt.closing or attempt.preparing
        if waiting is None:
            return
        waiting._thread.join()
        agent.look()


@dataclass
class Company:
    """The machines of one run, with one clock, which only the test moves."""

    run: Run
    now: float = 1000.0
    agents: list[Agent] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def add(self, store: Store | None = None) -> Agent:
        run = Run(store, self.run.name) if store is not None else self.run
        agent = Agent(run, "127.0.0.1", 1, {}, clock=lambda: self.now, background=False)
        self.agents.append(agent)
        return agent

    def there(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.name not in self.gone]

    def wait(self, seconds: float) -> None:
        """Every second each machine that is there looks at the world, and every other second it renews its lease."""
        for second in range(int(seconds)):
            self.now += 1.0
            for agent in self.there():
                if second % 2 == 0 or agent._lease._hurry.is_set():
                    agent._lease._hurry.clear()
                    agent._lease.renew()
                look_through(agent)
                if agent._over:
                    self.leave(agent)

    def leave(self, agent: Agent) -> None:
        agent._end_attempt()
        agent._lease.leave()
        self.gone.add(agent.name)

    def kill(self, agent: Agent) -> None:
        """As a machine does whose power is cut: without a word."""
        self.gone.add(agent.name)

    def end_workers(self, code: int, *agents: Agent) -> None:
        for agent in agents or self.there():
            if agent._attempt is not None and agent._attempt.launch is not None:
                agent._attempt.launch.code = code  # type: ignore[attr-defined]

    def fail(self, agent: Agent, text: str = "it broke", **error: Any) -> None:
        """A worker of this machine gives up, and the workers of all others lose the connection to it."""
        assert agent._attempt is not None
        for one in self.there():
            if one._attempt is not None:
                told = WorkerError(0, "Connection closed by peer", False, 2.0)
                if one is agent:
                    told = replace(told, text=text, time=3.0, **error)
                Control(one._attempt.directories.control).report_error(told)
        self.end_workers(1)

    def give_notice(self, agent: Agent, seconds: float | None = None) -> None:
        agent._board.post(Notice("the cloud wants it back", seconds))

    def members(self) -> list[int]:
        """Who takes part now, by the order in which they were added."""
        latest = self.run.latest_generation()
        names = [agent.name for agent in self.agents]
        return [names.index(member.node) for member in latest.members] if latest else []

    def causes(self) -> list[str]:
        return [generation.cause for generation in self.run.generations()]


Make = Callable[..., Company]
"""How many machines a run may have, how many there are, and what else is in its job."""


@contextmanager
def company_of(run: Run, monkeypatch: pytest.MonkeyPatch, cache: str) -> Iterator[Company]:
    monkeypatch.setenv("PACKTRAIN_CACHE", cache)
    monkeypatch.setattr(agent_module, "Launchers", StandIns)
    numbers = count()
    monkeypatch.setattr(agent_module, "new_name", lambda: f"m{next(numbers):04d}")
    monkeypatch.setattr(lease_module, "TelemetrySampler", StillMachine)
    company = Company(run)
    yield company
    for agent in company.agents:
        agent._deadline.close()
        agent._home.remove()
