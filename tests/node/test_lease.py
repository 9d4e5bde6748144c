from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from packtrain.node import lease as lease_module
from packtrain.node.lease import LeaseRenewer, hurried
from packtrain.run.liveness import LEASE_LOST_SECONDS
from packtrain.run.records import Lease, NodeReport
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from parts.faulty import FaultyStore
from parts.runs import a_lease


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 0.05)


def stored(store: Store) -> Lease:
    [node] = Run(store, "job-1").leases()
    return node


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread; the test's own time limit ends what never comes."""
    while not condition():
        threading.Event().wait(0.01)


def test_a_lease_is_there_at_once_and_renewed_until_the_node_leaves(any_store: Store, tmp_path: Path) -> None:
    lease = LeaseRenewer(Run(any_store, "job-1"), a_lease("a"), tmp_path)
    assert stored(any_store).node == "a"
    until(lambda: stored(any_store).renewal >= 2)
    assert not stored(any_store).left
    lease.leave()
    assert stored(any_store).left
    last = stored(any_store).renewal
    threading.Event().wait(0.15)
    assert stored(any_store).renewal == last


def test_a_lease_tells_what_the_machine_is_doing(directory_store: Store, tmp_path: Path) -> None:
    lease = LeaseRenewer(Run(directory_store, "job-1"), a_lease("a"), tmp_path)
    lease.leave()
    telemetry = stored(directory_store).telemetry
    assert telemetry.memory_bytes > 0
    assert 0 < telemetry.memory_fraction < 1
    assert telemetry.disk_free_bytes > 0
    assert telemetry.sent_bytes_per_second >= 0


def test_time_is_counted_on_from_earlier_attempts(directory_store: Store, tmp_path: Path) -> None:
    lease = LeaseRenewer(Run(directory_store, "job-1"), a_lease("a", used_seconds=500.0), tmp_path)
    assert lease.used_seconds() >= 500.0
    lease.leave()
    assert 500.0 < stored(directory_store).used_seconds < 600.0


def test_a_fresh_port_is_told_with_the_next_renewal(directory_store: Store, tmp_path: Path) -> None:
    lease = LeaseRenewer(Run(directory_store, "job-1"), a_lease("a", port=1), tmp_path)
    lease.offer_port(2)
    until(lambda: stored(directory_store).port == 2)
    lease.leave()
    assert lease.node.port == 2


def test_what_others_must_know_is_told_at_once(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 60.0)
    lease = LeaseRenewer(Run(directory_store, "job-1"), a_lease("a"), tmp_path)
    report = NodeReport(3, "memory", "full", 7)
    lease.say_leaving()
    lease.say_stopping(3)
    lease.say_report(report)
    until(lambda: stored(directory_store).report == report)
    assert (stored(directory_store).leaving, stored(directory_store).stopping) == (True, 3)
    lease.leave()


def test_the_runs_time_is_counted_from_what_a_generation_tells(directory_store: Store, tmp_path: Path) -> None:
    clock = {"now": 100.0}
    node = a_lease("a", used_seconds=0.0)
    lease = LeaseRenewer(Run(directory_store, "job-1"), node, tmp_path, clock=lambda: clock["now"], background=False)
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


def test_one_request_without_an_answer_does_not_cost_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lease_module.OUTAGE_SECONDS + lease_module.ANSWER_SECONDS + 1 < LEASE_LOST_SECONDS
    monkeypatch.setattr(lease_module, "ANSWER_SECONDS", 0.5)
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
    lease = LeaseRenewer(hurried(run), a_lease("a"), tmp_path)
    until(lambda: len(Silent.taken) > 4)
    assert Silent.taken[2] == Silent.taken[3], "it is tried again"
    lease.leave()
    server.shutdown()
    server.server_close()


def test_whatever_a_renewal_raises_there_is_another(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = LeaseRenewer(Run(directory_store, "job-1"), a_lease("a"), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "renew", lambda *_: {}["x"])
        failed = lease.node.renewal
        until(lambda: lease.node.renewal > failed + 2)
    until(lambda: stored(directory_store).renewal > failed + 2)
    lease.leave()
    assert "warning: the lease could not be renewed: KeyError" in capsys.readouterr().out


def test_a_store_that_is_away_is_tried_again(
    directory_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FaultyStore(directory_store)
    lease = LeaseRenewer(Run(store, "job-1"), a_lease("a"), tmp_path)
    store.refuse("put")
    missed = lease.node.renewal
    until(lambda: lease.node.renewal > missed + 2)
    store.refuse()
    until(lambda: stored(directory_store).renewal > missed + 2)
    lease.leave()
    assert "warning: the lease could not be renewed: the store is away" in capsys.readouterr().out
