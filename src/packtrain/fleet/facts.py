"""What a machine says about itself, so that whoever starts a run knows before."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import packtrain
from packtrain.errors import PacktrainError
from packtrain.store import open_store
from packtrain.system import cache_directory

PROBE = b"visible"


@dataclass(frozen=True)
class Facts:
    """`store` is empty where the store was seen, and otherwise says what is wrong."""

    hostname: str
    address: str
    python: str
    version: str
    identity: str
    torch: bool
    gpus: int
    free_bytes: int
    time: float
    store: str = ""
    put_if_absent: bool | None = None
    notes: list[str] = field(default_factory=list)


def gather(store: str, key: str) -> Facts:
    """Asks the store for what the caller has put at `key`, and answers beside it; without a key nothing is asked."""
    seen, holds = ("", None) if not key else _look(store, key)
    return Facts(
        socket.gethostname(),
        _address(),
        sys.executable,
        ".".join(map(str, sys.version_info[:3])),
        identity(),
        find_spec("torch") is not None,
        _gpus(),
        shutil.disk_usage(_existing(cache_directory())).free,
        time.time(),
        seen,
        holds,
    )


def _look(location: str, key: str) -> tuple[str, bool | None]:
    try:
        store = open_store(location, outage_seconds=10.0, answer_seconds=5.0)
        if store.find(key) != PROBE:
            return "what was written here is not there", None
        answer = answer_key(key)
        store.put(answer, PROBE)
        return "", store.supports_put_if_absent()
    except PacktrainError as error:
        return str(error), None


def answer_key(key: str) -> str:
    return f"{key}-{socket.gethostname()}-{os.getpid()}"


def _address() -> str:
    """As ssh reached it, if that is private, or as the agent would choose it."""
    from packtrain.node.address import choose_address, is_private

    parts = os.environ.get("SSH_CONNECTION", "").split()
    if len(parts) == 4 and is_private(parts[2]):
        return parts[2]
    try:
        return choose_address(None, None, False, None)
    except PacktrainError:
        return "127.0.0.1"


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _gpus() -> int:
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


# Which Packtrain this is: its version and a digest of its source, so that two machines know whether they run the same.
#
# Also prints it: `python -m packtrain.fleet.facts`.


_DIGITS = 12


@cache
def source() -> dict[str, bytes]:
    """Every file of the installed package, in one order everywhere. Read once, so that all who ask agree."""
    root = Path(packtrain.__file__).parent
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return dict(sorted((path.relative_to(root).as_posix(), path.read_bytes()) for path in files))


@cache
def identity() -> str:
    digest = hashlib.sha256()
    for name, data in source().items():
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(data).digest())
    try:
        number = version("packtrain")
    except PackageNotFoundError:
        number = "0"
    return f"{number}-{digest.hexdigest()[:_DIGITS]}"


if __name__ == "__main__":
    print(identity())
