"""Cost of control: requests and bytes per node and second, and the time to form a generation.

    python benchmarks/scale.py [--json] [--rounds 5] [--nodes 2 8 32 128 512 1000] [--store directory s3]

The nodes are real but without torch: their workers do nothing. They share a clock that stops while they poll the store,
so that the counts do not depend on how many nodes fit on this machine; the time that the store takes is measured.

req/node/s, B/node/s: while a generation trains. form: from the first node's start to the last node's workers, by the
nodes' clock (s), in requests and bytes per node, and the time that the store took on this machine (store s). busy: the
time that the store takes per second of all nodes. look: the first member reads all leases once.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeVar

import bench
from packtrain.job import Job
from packtrain.node.node import IDLE_SECONDS, LOOK_SECONDS, Node
from packtrain.run.code import archive
from packtrain.run.liveness import LEASE_SECONDS
from packtrain.run.records import Telemetry
from packtrain.run.run import Run, add_run
from packtrain.store import RECORD_BYTES, Entry, Store, open_store

Answer = TypeVar("Answer")
_AT_ONCE = 16
_ENTRY_BYTES = 300  # per object in the response to a listing
# Amazon's limits for one prefix of a bucket.
_S3_WRITES_PER_SECOND, _S3_READS_PER_SECOND = 3500.0, 5500.0


class CountingStore(Store):
    """A store that counts requests and bytes."""

    def __init__(self, inner: Store) -> None:
        self._inner, self.url, self.is_directory = inner, inner.url, inner.is_directory
        self._lock = Lock()
        self.reset()

    def reset(self) -> None:
        self.reads = self.writes = self.bytes = 0

    def _count(self, write: bool, size: int) -> None:
        with self._lock:
            self.writes, self.reads = self.writes + write, self.reads + (not write)
            self.bytes += size

    def put(self, key: str, data: bytes) -> None:
        self._count(True, len(data))
        self._inner.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._count(True, len(data))
        return self._inner.put_if_absent(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self._count(True, path.stat().st_size)
        self._inner.put_file(key, path)

    def copy(self, key: str, target: str) -> None:
        self._count(True, 0)
        self._inner.copy(key, target)

    def find(self, key: str, limit: int = RECORD_BYTES) -> bytes | None:
        data = self._inner.find(key, limit)
        self._count(False, len(data or b""))
        return data

    def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
        self._inner.get_file(key, path, limit)
        self._count(False, path.stat().st_size)

    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        entries = self._inner.list(prefix, after)
        self._count(False, _ENTRY_BYTES * len(entries))
        return entries

    def folders(self, prefix: str) -> builtins.list[str]:
        names = self._inner.folders(prefix)
        self._count(False, _ENTRY_BYTES * len(names))
        return names

    def entry(self, key: str) -> Entry | None:
        self._count(False, 0)
        return self._inner.entry(key)

    def remove_unfinished(self, prefix: str, is_dead: Callable[[str], bool] = lambda _: True) -> None:
        self._count(True, 0)
        self._inner.remove_unfinished(prefix, is_dead)

    def delete(self, key: str) -> None:
        self._count(True, 0)
        self._inner.delete(key)


class NoWorkers:
    """A launcher whose workers never end."""

    server_pid = 0

    def poll(self) -> int | None:
        return None

    def has_workers(self) -> bool:
        return False

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class NoForkServer:
    def start_launcher(self, *_: object) -> NoWorkers:
        return NoWorkers()

    def prepare(self) -> None: ...

    def close(self) -> None: ...


class NoTelemetry:
    def watch_workers_of(self, launcher: int | None) -> None: ...

    def sample(self) -> Telemetry:
        return Telemetry(0.5, 0.5, 1 << 34, 1 << 40, 1e6, 1e6)


class Fleet:
    """Nodes that share a clock and poll the real store."""

    def __init__(self, store: CountingStore, count: int) -> None:
        fleet = {"local": {"machines": count}, "workers": 1}
        job = Job.model_validate({"name": "scale", "recipe": "translate", "fleet": fleet, **_RECIPE})
        self.store, self.now = store, 1000.0
        self.run = add_run(store, job, archive({}), None)
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self.nodes = list(self._pool.map(lambda _: self._node(), range(count)))

    def _node(self) -> Node:
        run, fakes = Run(self.store, self.run.name), {"fork_server": NoForkServer(), "sampler": NoTelemetry()}
        return Node(run, "127.0.0.1", 1, {}, clock=lambda: self.now, background=False, **fakes)  # type: ignore[arg-type]

    def step(self, seconds: float) -> float:
        """Advance the clock; every node renews its lease and polls once. Return the real seconds."""
        self.now += seconds
        started = time.perf_counter()
        list(self._pool.map(lambda node: node.lease.renew(), self.nodes))
        list(self._pool.map(lambda node: node.look(), self.nodes))
        return time.perf_counter() - started

    def form(self) -> tuple[float, float]:
        """Wait until every member has started; return the seconds by the nodes' clock and by the store."""
        began, taken = self.now, 0.0
        while not all(node.group is not None for node in self.nodes):
            taken += self.step(IDLE_SECONDS)
            if self.now - began > 600:
                raise SystemExit("the nodes did not form a generation within 600 s")
        return self.now - began, taken

    def first_look_seconds(self) -> float:
        """Return the seconds that the first member takes to read every lease."""
        latest = self.run.latest_generation()
        first = next(node for node in self.nodes if latest and node.name == latest.members[0].node)
        started = time.perf_counter()
        first.look()
        return time.perf_counter() - started

    def close(self) -> None:
        self._pool.shutdown()
        for node in self.nodes:
            node.release()


_RECIPE = {
    "model": "tiny",
    "data": {"train": [{"bitext": ["a", "b"]}]},
    "train": {"duration": "10 steps", "batch": "4 samples", "schedule": {"constant": {"rate": 0.01}}},
}


def control_of(kind: str, store: Store, count: int, rounds: int) -> dict[str, object]:
    counting = CountingStore(store)
    with contextlib.redirect_stdout(io.StringIO()):  # nodes print what they do
        fleet = Fleet(counting, count)
        try:
            forming, taken = fleet.form()
            forming_requests, forming_bytes = counting.reads + counting.writes, counting.bytes
            counting.reset()
            looks = [fleet.step(LOOK_SECONDS) for _ in range(rounds)]
            seconds = LOOK_SECONDS * rounds
            reads, writes = counting.reads / seconds, counting.writes / seconds
            first = bench.median([fleet.first_look_seconds() for _ in range(3)])
        finally:
            fleet.close()
    return {
        "store": kind,
        "nodes": count,
        "req/node/s": (reads + writes) / count,
        "B/node/s": counting.bytes / seconds / count,
        "reads/s": reads,
        "writes/s": writes,
        "form s": forming,
        "form req/node": forming_requests / count,
        "form store s": taken,
        "form B/node": forming_bytes / count,
        "busy": bench.median(looks) / LOOK_SECONDS,
        "look s": first,
    }


def notes_on(rows: list[dict[str, object]]) -> Iterator[str]:
    for kind in dict.fromkeys(str(row["store"]) for row in rows):
        mine = [row for row in rows if row["store"] == kind]
        small, large = mine[0], mine[-1]
        ratio = max(
            _number(large, column) / _number(small, column) for column in ("req/node/s", "B/node/s", "form req/node")
        )
        grows = "no faster than linearly" if ratio < 1.5 else "FASTER than linearly"
        sizes = f"from {small['nodes']} to {large['nodes']} nodes"
        yield f"{kind}: total requests and bytes grow {grows} {sizes} (per node: x {ratio:.2f})"
        yield (
            f"{kind}: every node reads the generation record, which names all members:"
            f" {_number(large, 'form B/node') / 1000:,.0f} kB per node to form one of {large['nodes']} nodes"
        )
        for column, limit, what in (
            ("busy", 1.0, "this machine cannot serve the requests fast enough"),
            ("look s", LEASE_SECONDS, "reading all leases takes longer than a lease lasts"),
        ):
            met = [row for row in mine if _number(row, column) >= limit]
            where = f"at {met[0]['nodes']} nodes" if met else f"not up to {large['nodes']} nodes"
            per_node = _number(large, column) / _number(large, "nodes")
            yield f"{kind}: {what}: {where} (extrapolated: at {limit / per_node:,.0f})"
    last = rows[-1]
    reads, writes = (_number(last, column) / _number(last, "nodes") for column in ("reads/s", "writes/s"))
    nodes = min(_S3_READS_PER_SECOND / reads, _S3_WRITES_PER_SECOND / writes)
    yield f"Amazon S3 allows 5,500 reads/s and 3,500 writes/s per prefix: reached at {nodes:,.0f} nodes"


def _number(row: dict[str, object], column: str) -> float:
    return float(row[column])  # type: ignore[arg-type]


@contextmanager
def directory() -> Iterator[Callable[[], Store]]:
    with tempfile.TemporaryDirectory() as name:
        yield lambda: open_store(tempfile.mkdtemp(dir=name), create=True)


@contextmanager
def s3() -> Iterator[Callable[[], Store]]:
    """Start moto's server in its own process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ.update(AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID="AK", AWS_SECRET_ACCESS_KEY="any")  # noqa: S106
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{url}/scale", method="PUT")).close()  # noqa: S310
                break
            time.sleep(0.1)
        numbers = iter(range(1000))
        yield lambda: open_store(f"s3://scale/{next(numbers)}")
    finally:
        server.terminate()
        server.wait()


STORES = {"directory": directory, "s3": s3}


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32, 128, 512, 1000])
    arguments.add_argument("--store", choices=STORES, nargs="+", default=list(STORES))
    return arguments


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PACKTRAIN_CACHE"] = cache
        for kind in options.store:
            with STORES[kind]() as fresh:
                rows += [control_of(kind, fresh(), count, options.rounds) for count in sorted(options.nodes)]
    return rows


def report(_: argparse.Namespace, rows: list[dict[str, object]]) -> bench.Report:
    return bench.Report("Control", rows, list(notes_on(rows)))


if __name__ == "__main__":
    bench.main(parser(), measure, report)
