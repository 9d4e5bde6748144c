"""Servers on loopback: free ports, and waiting until a server answers."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

START_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def wait_for_port(port: int, servers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when `port` accepts connections; raise if one of `servers` ends before."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        for server in servers:
            if server.poll() is not None:
                raise RuntimeError(f"{server.args!r} ended with {server.returncode}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing answers on port {port}")


@contextmanager
def served(command: Callable[[int], Sequence[str]], extra: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server for the block and give its URL; `command` takes the port, `extra` are variables of its own."""
    server, port = _started(command, {**os.environ, **(extra or {})})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _started(
    command: Callable[[int], Sequence[str]], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server on a free port; try again if another process takes that port first."""
    for tries_left in (2, 1, 0):
        port = free_port()
        server = subprocess.Popen(command(port), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for_port(port, [server])
            break
        except BaseException as error:
            server.kill()
            server.wait()
            if not tries_left or not isinstance(error, RuntimeError):
                raise
    return server, port
