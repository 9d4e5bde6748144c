"""A run on simulated hosts, with its store in a shared directory or in a bucket on their network."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.run.checkpoint import committed
from packtrain.run.run import Run
from parts.hosts import Host, Network
from parts.s3 import S3Server, moto_command
from parts.sandbox import PACE, make_sandbox, set_pace, wait_until

_BUCKET_PORT = 5000
_CACHE = "/root/cache"  # in a host's home, which outlives a power cut


@dataclass
class HostRun:
    """A run and its hosts; `nodes` has the nodes that were started, by host."""

    network: Network
    run: Run
    environment: dict[str, str]
    nodes: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    """Every checkpoint that was committed while the test waited, and its generation."""

    def pace(self, seconds: float) -> None:
        """Make each step take that much longer from now on."""
        set_pace(self.network.shared / PACE, seconds)

    def start(self, host: Host, **extra: str) -> None:
        command = [sys.executable, "-m", "packtrain", "node", self.run.name, "--store", self.run.store.url]
        command += ["--code", self.run.code_digest]  # as a fleet would
        with (self.network.scratch / f"{host.name}-{time.monotonic_ns()}.txt").open("wb") as log:
            self.nodes[host.name] = host.popen(
                [*command, "--interface", "eth0"],
                {**self.environment, **extra},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_for_commit(self, step: int, generation: int = 1) -> None:
        def reached() -> bool:
            found = committed(self.run)
            self.seen |= {one.name: one.generation for one in found}
            return any(one.step >= step and one.generation >= generation for one in found)

        wait_until(reached, f"a checkpoint of step {step} in generation {generation}")

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> bool:
            self.seen |= {one.name: one.generation for one in committed(self.run)}
            return bool(condition())

        wait_until(holds, what)

    def wait_for_result(self) -> str:
        self.wait_for(self.run.result, "the end of the run")
        result = self.run.result()
        assert result is not None
        return result.status

    def members(self) -> list[str]:
        """Return the hosts of the latest generation."""
        latest = self.run.latest_generation()
        return [member.node.rpartition("-")[0] for member in latest.members] if latest else []

    def causes(self) -> list[str]:
        return [generation.cause for generation in self.run.generations()]

    def culprits(self) -> list[str | None]:
        """Return the host that ended each generation before the next."""
        nodes = [generation.culprit for generation in self.run.generations()]
        return [node and node.rpartition("-")[0] for node in nodes]

    def told(self, kind: str) -> list[str]:
        return [event.text for event in self.run.events().read() if event.kind == kind]

    def assert_nodes_ended_well(self) -> None:
        for name, node in self.nodes.items():
            assert node.wait(60) == 0, name

    def assert_nothing_left(self) -> None:
        def is_idle(host: Host) -> bool:
            return not host.processes()

        for host in self.network:
            wait_until(partial(is_idle, host), f"all processes of {host.name} to end", 60)
            assert list((host.home / "cache" / "nodes").iterdir()) == [], host.name


def make_host_run(network: Network, store: str, settings: list[str], environment: Mapping[str, str]) -> HostRun:
    """Create a run of the job that all fault tests share, as its client would; no node works on it yet."""
    directory = network.scratch / "client"
    directory.mkdir(exist_ok=True)
    make_sandbox(directory, store)
    run = create(check(load(directory / "job.yaml", settings), PlainProgress(lambda _: None)))
    own = {"PACKTRAIN_CACHE": _CACHE, "OMP_NUM_THREADS": "1", "PACE": str(network.shared / PACE)}
    made = HostRun(network, run, {**own, **environment})
    made.pace(0)
    return made


@contextmanager
def bucket_on(network: Network, port: int = _BUCKET_PORT) -> Iterator[S3Server]:
    """Serve a bucket on the hosts' bridge: a host that is cut off from the network is cut off from it too."""
    server = subprocess.Popen(moto_command(network.gateway, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(network.gateway, port), "the bucket's server", 60)
        made = S3Server(f"http://{network.gateway}:{port}", "AKMOTO", "secret-of-moto")
        made.create_bucket()
        yield made
    finally:
        server.kill()
        server.wait()


def _answers(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def wrong_clock(hours: float, directory: Path) -> dict[str, str]:
    """Return variables that move only a process's wall clock; libfaketime would make Python's sleep fail."""
    source, library = directory / "clock.c", directory / "clock.so"
    source.write_text(_CLOCK.replace("SECONDS", f"{hours * 3600:.0f}"))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += SECONDS;
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int status = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return status;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
"""
