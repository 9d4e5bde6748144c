from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from packtrain.node.lease import ANSWER_SECONDS, OUTAGE_SECONDS, LeaseRenewer, hurried
from packtrain.node.telemetry import TelemetrySampler
from packtrain.run.liveness import LEASE_LOST_SECONDS
from packtrain.run.records import Lease, NodeReport
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from parts.faulty import FaultyStore
from parts.runs import a_lease


def renewer(store: Store, disk: Path, seconds: float = 0.05, **fields: Any) -> LeaseRenewer:
    return LeaseRenewer(Run(store, "job-1"), a_lease("a", **fields), TelemetrySampler(disk), seconds=seconds)


def stored(store: Store) -> Lease:
    [lease] = Run(store, "job-1").leases()
    return lease


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread; the test's own time limit ends what never comes."""
    while not condition():
        threading.Event().wait(0.01)


def test_a_lease_exists_from_the_start_and_is_renewed_until_the_node_leaves(any_store: Store, tmp_path: Path) -> None:
    lease = renewer(any_store, tmp_path)
    assert stored(any_store).node == "a"
    until(lambda: stored(any_store).renewal >= 2)
    assert not stored(any_store).left
    lease.leave()
    assert stored(any_store).left
    last = stored(any_store).renewal
    threading.Event().wait(0.15)
    assert stored(any_store).renewal == last


def test_a_lease_carries_the_machines_telemetry(directory_store: Store, tmp_path: Path) -> None:
    lease = renewer(directory_store, tmp_path)
    lease.leave()
    telemetry = stored(directory_store).telemetry
    assert telemetry.memory_bytes > 0
    assert 0 < telemetry.memory_fraction < 1
    assert telemetry.disk_free_bytes > 0
    assert telemetry.sent_bytes_per_second >= 0


def test_used_time_includes_earlier_generations(directory_store: Store, tmp_path: Path) -> None:
    lease = renewer(directory_store, tmp_path, used_seconds=500.0)
    assert lease.used_seconds() >= 500.0
    lease.leave()
    assert 500.0 < stored(directory_store).used_seconds < 600.0


def test_the_next_renewal_offers_the_fresh_port(directory_store: Store, tmp_path: Path) -> None:
    lease = renewer(directory_store, tmp_path, port=1)
    lease.offer_port(2)
    until(lambda: stored(directory_store).port == 2)
    lease.leave()
    assert lease.lease.port == 2


def test_changes_that_other_nodes_need_are_written_without_delay(directory_store: Store, tmp_path: Path) -> None:
    lease = renewer(directory_store, tmp_path, seconds=60.0)
    report = NodeReport(3, "memory", "full", 7)
    lease.set_leaving()
    lease.set_stopping(3)
    lease.set_report(report)
    until(lambda: stored(directory_store).report == report)
    assert (stored(directory_store).leaving, stored(directory_store).stopping) == (True, 3)
    lease.leave()


def test_used_time_continues_from_the_generations_record(directory_store: Store, tmp_path: Path) -> None:
    clock = {"now": 100.0}
    run, sampler = Run(directory_store, "job-1"), TelemetrySampler(tmp_path)
    lease = LeaseRenewer(run, a_lease("a"), sampler, clock=lambda: clock["now"], background=False)
    clock["now"] += 10
    lease.count_from(500.0)
    clock["now"] += 5
    lease.renew()
    assert (stored(directory_store).used_seconds, stored(directory_store).machine_seconds) == (505.0, 15.0)


class Silent(BaseHTTPRequestHandler):
    """A server that takes every request, and never answers the third."""

    protocol_version = "HTTP/1.1"
    taken: ClassVar[list[int]] = []

    def log_message(self, *_: object) -> None: ...

    def do_PUT(self) -> None:
        node = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.taken.append(node["renewal"])
        if len(self.taken) == 3:
            threading.Event().wait(600)
        self.send_response(200)
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.usefixtures("processes")
def test_one_request_without_an_answer_does_not_cost_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert OUTAGE_SECONDS + ANSWER_SECONDS + 1 < LEASE_LOST_SECONDS
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    run = Run(open_store("s3://bucket/x"), "job-1")
    lease = LeaseRenewer(hurried(run, 0.5), a_lease("a"), TelemetrySampler(tmp_path), seconds=0.05)
    until(lambda: len(Silent.taken) > 4)
    assert Silent.taken[2] == Silent.taken[3], "it is tried again"
    lease.leave()
    server.shutdown()
    server.server_close()


def test_a_renewal_that_raises_is_followed_by_another(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = renewer(directory_store, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "renew", lambda *_: {"y": 1}["x"])
        failed = lease.lease.renewal
        until(lambda: lease.lease.renewal > failed + 2)
    until(lambda: stored(directory_store).renewal > failed + 2)
    lease.leave()
    assert "warning: cannot renew the lease: KeyError" in capsys.readouterr().out


def test_a_store_that_is_away_is_tried_again(
    directory_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FaultyStore(directory_store)
    lease = renewer(store, tmp_path)
    store.refuse("put")
    missed = lease.lease.renewal
    until(lambda: lease.lease.renewal > missed + 2)
    store.refuse()
    until(lambda: stored(directory_store).renewal > missed + 2)
    lease.leave()
    assert "warning: cannot renew the lease: the store is away" in capsys.readouterr().out
