"""A small provider of machines: its account is a directory, and its machines are real processes of this computer.

A run has a network there, which cannot be deleted before its machines. `on_call` is called before and after every
request, to fail, to interrupt or to kill the client at that moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet.cloud import CloudBuilder, CloudFleet, Provider, Resource, StillInUse, label_of, tags_of
from packtrain.fleet.fleet import Check, LaunchPlan, Machine, Releases, Say, node_arguments, silent
from packtrain.job.kinds import FLEETS
from packtrain.job.part import StorePath
from packtrain.run.run import Run
from packtrain.store import Store

ACCOUNT = "RENTAL_ACCOUNT"
_PRICES = {"small": 0.5, "large": 2.0}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `rental` a word of job files until the end of the test."""
    monkeypatch.setitem(FLEETS, "rental", "parts.rental:RentalSettings")


class RentalSettings(CloudBuilder):
    """`idle` machines do nothing, and start at once."""

    account: StorePath
    types: tuple[str, ...] = ("small",)
    idle: bool = False

    def build(self) -> RentalFleet:
        return RentalFleet(self)

    @property
    def rented_types(self) -> Sequence[str]:
        return self.types

    def hourly_prices(self) -> dict[str, float | None]:
        return {f"{one} in {self.account}": _PRICES.get(one) for one in self.types}

    @classmethod
    def providers(cls, places: Sequence[str]) -> Sequence[Provider]:
        named = places or [place for place in (os.environ.get(ACCOUNT),) if place]
        if not named:
            raise Mistake(f"rental: no account; set {ACCOUNT}")
        return [RentalProvider(Path(place)) for place in named]


class RentalProvider(Provider):
    on_call: Callable[[str], None] = staticmethod(lambda _: None)

    def __init__(self, account: Path) -> None:
        self.account, self.place = account, account.name

    def resources(self, label: str | None) -> list[Resource]:
        with self._call("list"):
            if not self.account.is_dir():
                raise PacktrainError(f"{self.account}: no such account; check its name")
            found = [self._resource(path) for path in sorted(self.account.glob("*.json"))]
        return [one for one in found if one is not None and label in (None, one.label)]

    def everything(self) -> list[Resource]:
        return self.resources(None)

    def delete(self, resource: Resource) -> None:
        with self._call(f"delete {resource.kind}"):
            path = self._path(resource.kind, resource.name)
            if resource.kind == "machine":
                self._ended(path, signal.SIGTERM)
            elif any(one.kind == "machine" for one in self._of(resource.label)):
                raise StillInUse(f"network {resource.name} has machines")
            else:
                path.unlink(missing_ok=True)

    def create(self, kind: str, name: str, tags: dict[str, str], command: Sequence[str] = ()) -> None:
        """Create a resource, unless there is one of that name."""
        with self._call(f"create {kind}"):
            path = self._path(kind, name)
            if path.exists():
                return
            pid = 0
            if command:
                log = path.with_suffix(".log").open("wb")
                pid = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                ).pid
            path.write_text(json.dumps({"kind": kind, "name": name, "tags": tags, "pid": pid}))

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        self.on_call(f"before {name}")
        yield
        self.on_call(f"after {name}")

    def _of(self, label: str) -> list[Resource]:
        found = [self._resource(path) for path in self.account.glob("*.json")]
        return [one for one in found if one is not None and one.label == label]

    def _path(self, kind: str, name: str) -> Path:
        return self.account / f"{kind}-{name}.json"

    def _resource(self, path: Path) -> Resource | None:
        record = json.loads(path.read_text())
        if record["pid"] and self._ended(path, 0):
            return None
        return Resource.tagged(record["kind"], record["name"], self.place, record["tags"])

    def _ended(self, path: Path, number: int) -> bool:
        """Send a machine a signal; forget it if it has ended."""
        if not path.exists():
            return True
        pid = json.loads(path.read_text())["pid"]
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                os.kill(pid, number)
                return False
        path.unlink()
        return True


class RentalFleet(CloudFleet, Releases):
    def __init__(self, settings: RentalSettings) -> None:
        self._settings = settings

    def provider(self) -> RentalProvider:
        return RentalProvider(Path(self._settings.account))

    def plan(self, run: Run) -> list[LaunchPlan]:
        node = (*node_arguments(run, sys.executable, self._settings), "--address", "127.0.0.1")
        command = ("sleep", "1000") if self._settings.idle else node
        return [LaunchPlan(f"machine {number}", command) for number in range(self._settings.machines.most)]

    def create(self, run: Run, plans: Sequence[LaunchPlan], say: Say) -> None:
        provider, tags = self.provider(), tags_of(run)
        provider.create("network", label_of(run), tags)
        for number, plan in enumerate(plans):
            provider.create("machine", f"{label_of(run)}-{number}", tags, plan.arguments)
            say(f"created {plan.machine}")

    def machines(self, run: Run) -> list[Machine]:
        found = self.provider().resources(label_of(run))
        return [Machine(one.name, "running") for one in found if one.kind == "machine"]

    def release(self, run: Run, say: Say = silent) -> None:
        """Keep the machines, unless a test replaces this by `give_back`."""

    def state_in_queue(self, run: Run) -> str | None:  # noqa: ARG002
        return None

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:  # noqa: ARG002
        raise Mistake(f"{run.name}: a rental has no shells")

    def checks(self, store: Store | None) -> Iterator[Check]:  # noqa: ARG002
        yield from ()
