"""Servers on loopback: a port for each, and the moment from which it answers."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

PATIENCE_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def wait_for_port(port: int, servers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when `port` accepts connections; an error if one of `servers` ends before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for server in servers:
            if server.poll() is not None:
                raise RuntimeError(f"{server.args!r} ended with {server.returncode}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing answers on port {port}")


@contextmanager
def served(command: Callable[[int], Sequence[str]]) -> Iterator[str]:
    """The address of a server that runs as long as the block; `command` takes its port."""
    server, port = _started(command)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _started(command: Callable[[int], Sequence[str]]) -> tuple[subprocess.Popen[bytes], int]:
    """Between our finding a free port and the server's taking it, another process may: then try again."""
    for tries_left in (2, 1, 0):
        port = free_port()
        server = subprocess.Popen(command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for_port(port, [server])
            break
        except BaseException as error:
            server.kill()
            server.wait()
            if not tries_left or not isinstance(error, RuntimeError):
                raise
    return server, port
