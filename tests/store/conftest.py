from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture
def metadata_looks(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """How long each look for a metadata service may take, in seconds. Nothing else connects by Python's sockets."""
    looks: list[float | None] = []
    connect = socket.create_connection

    def look(address: Any, timeout: float | None = None) -> socket.socket:
        looks.append(timeout)
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", look)
    return looks
