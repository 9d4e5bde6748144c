"""The HTTP service of a model, in a thread of the test, on a free port of loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from packtrain.export.serve import ModelServer
from packtrain.export.service import ServedModel, Service, ServiceSettings


@dataclass
class RunningService:
    url: str
    server: ModelServer
    log: list[str] = field(default_factory=list)

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        """Return the value of a line of /metrics."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.005)


@contextmanager
def running(
    model: ServedModel, settings: ServiceSettings | None = None, token: str | None = None, wait: bool = True
) -> Iterator[RunningService]:
    """Serve until the end of the block; `wait` until the model is ready."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    log: list[str] = []
    server = ModelServer(Service(model, settings or ServiceSettings()), listener, token, log.append)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server has started")
        if wait:
            wait_until(lambda: server.service.state != "loading", "the model is loaded")
        yield RunningService(url, server, log)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(30)
        assert not thread.is_alive()
