"""An HTTP proxy in front of a real S3 server that injects faults on demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import urlsplit

PASS = "pass"
REFUSE = "refuse"  # 503 instead of asking the server
BUSY = "busy"  # 429 instead of asking the server
LOSE_ANSWER = "lose answer"  # the server acts, the client sees 503
DROP = "drop"  # the server acts, the connection is closed without an answer
HANG = "hang"  # the server acts, the answer comes after `hang_seconds`
CUT = "cut"  # the answer ends half-way


def no_fault(method: str, path: str) -> str:
    return PASS


@dataclass
class Proxy:
    """`fault` chooses, by the method and path of each request, the fault to inject."""

    url: str
    upstream: str
    fault: Callable[[str, str], str] = no_fault
    hang_seconds: float = 3.0
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def first(self, *faults: str, method: str = "") -> None:
        """Inject these faults into the next requests (of `method`), one each; the requests after them pass."""
        left = list(faults)

        def fault(asked: str, path: str) -> str:
            return left.pop(0) if left and method in ("", asked) else PASS

        self.fault = fault

    def count(self, method: str) -> int:
        return sum(asked == method for asked, _, _ in self.requests)


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.proxy.lock:
            fault = self.proxy.fault(self.command, self.path)
            self.proxy.requests.append((self.command, self.path, fault))
        if fault in (REFUSE, BUSY):
            return self._answer(503 if fault == REFUSE else 429, {}, b"")
        status, headers, answer = self.ask(body, dict(self.headers.items()))
        if fault == HANG:
            time.sleep(self.proxy.hang_seconds)
        if fault == DROP:
            self.close_connection = True
            return None
        if fault == LOSE_ANSWER:
            return self._answer(503, {}, b"")
        if fault == CUT:
            self.close_connection = True
        return self._answer(status, headers, answer, cut=fault == CUT)

    def ask(self, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Ask the server behind, and return its status, headers and body."""
        host = urlsplit(self.proxy.upstream)
        connection = HTTPConnection(host.hostname or "", host.port, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        except (OSError, HTTPException):
            return 502, {}, b""
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        dropped = {"connection", "transfer-encoding", "keep-alive", "date", "server"}
        kept = {name: value for name, value in headers.items() if name.lower() not in dropped}
        if self.command != "HEAD" and status not in (204, 304):
            kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
            kept["Content-Length"] = str(len(body))
        self.send_response(status)
        for name, value in kept.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that give up: that is part of the tests."""


@contextmanager
def proxy_before(upstream: str, handler: type[ProxyHandler] = ProxyHandler) -> Iterator[Proxy]:
    server = _Server(("127.0.0.1", 0), handler)
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}", upstream)
    server.RequestHandlerClass = type("Handler", (handler,), {"proxy": proxy})
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
