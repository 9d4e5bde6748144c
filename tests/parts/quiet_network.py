"""A network of its own for a browser and the server that it talks to.

Chromium drops its connections whenever an interface of its network comes or goes, and other tests add hosts all the
time. Only root can make one; without root there are no hosts either.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class QuietNetwork:
    """`holder` is the process that keeps it; None for this computer's own network."""

    holder: int | None

    def listener(self, port: int = 0) -> socket.socket:
        """Return a socket that listens on its loopback address."""
        made: list[socket.socket] = []

        def listen() -> None:
            if self.holder is not None:
                with Path(f"/proc/{self.holder}/ns/net").open() as namespace:
                    # Of this thread alone, which ends. The socket stays where it was made.
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server(("127.0.0.1", port), backlog=512))

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        return made[0]

    def program(self, path: Path, scratch: Path) -> Path:
        """Return a program that runs the given one in this network."""
        if self.holder is None:
            return path
        script = scratch / path.name
        script.write_text(f'#!/bin/sh\nexec nsenter -t {self.holder} -n {path} "$@"\n')
        script.chmod(0o755)
        return script


@contextmanager
def quiet_network() -> Iterator[QuietNetwork]:
    if os.geteuid() != 0:
        yield QuietNetwork(None)
        return
    command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep infinity"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        yield QuietNetwork(holder.pid)
    finally:
        holder.kill()
        holder.wait()
