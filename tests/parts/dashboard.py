"""The dashboard of a store, in a thread of the test, on a free port of loopback; and runs to show on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from packtrain.http_server import listening
from packtrain.run.records import Point, Result, Sample
from packtrain.run.run import Run, worker_writer
from packtrain.store import Store
from packtrain.web.server import DashboardServer
from parts.runs import MEASURED, new_run, recipe_job
from parts.service import wait_until

TOKEN = "the-token-of-this-dashboard"


@dataclass
class RunningDashboard:
    url: str
    server: DashboardServer
    log: list[str] = field(default_factory=list)

    def client(self, token: str | None = TOKEN, **options: Any) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, timeout=30, headers={**headers, **options.pop("headers", {})}, **options)

    def get(self, path: str, **parameters: Any) -> Any:
        with self.client() as client:
            answer = client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @contextmanager
    def news(self, *runs: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """Yield the events of a stream, as (kind, data)."""
        with self.client() as client, client.stream("GET", "/api/stream", params={"run": list(runs)}) as answer:
            assert answer.status_code == 200
            yield _events(answer)


def _events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


@contextmanager
def dashboard(store: Store, **options: Any) -> Iterator[RunningDashboard]:
    """Serve a store until the end of the block."""
    listener = listening("127.0.0.1", 0)
    log: list[str] = []
    server = DashboardServer(store, listener, TOKEN, log.append, **options)
    scheme = "https" if options else "http"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server has started")
        yield RunningDashboard(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", server, log)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def a_step(step: int, loss: float = 1.0, generation: int = 1, **values: float) -> Point:
    measured = {**MEASURED, "loss": loss, "epoch": step / 10, "samples": 4.0, **values}
    return Point("train", generation, step, 1e9 + step, measured)


def an_evaluation(step: int, generation: int = 1, samples: Sequence[Sample] = (), **scores: float) -> Point:
    return Point("valid", generation, step, 1e9 + step, scores, tuple(samples))


def a_start(generation: int, step: int = 0) -> Point:
    return Point("start", generation, step, 1e9 + step, {})


def write_points(run: Run, *points: Point, generation: int = 1) -> Any:
    """Write points as the first rank does; returns the writer, for more."""
    writer = run.point_writer(worker_writer(generation, 0))
    for point in points:
        writer.append(point)
    writer.flush()
    return writer


def trained_run(store: Store, name: str = "job", steps: int = 20, ended: bool = True, **sections: Any) -> Run:
    """Return a run that was trained for some steps and evaluated at half of them."""
    run = new_run(store, recipe_job(name, **sections))
    points = [a_step(step, 10 / step) for step in range(1, steps + 1)]
    samples = (Sample("in", "reference", "prediction"),)
    write_points(run, a_start(1), *points, an_evaluation(steps // 2, samples=samples, bleu=12.5, loss=3.0))
    if ended:
        run.finish(Result("finished", f"reached {steps} steps", steps, float(steps), {"valid.bleu": 12.5}))
    return run
