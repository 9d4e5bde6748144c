"""What the source asks of the operating system: hashes of files, the cache directory, output, the end of a parent."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(text: str) -> None:
    """A line for the log of this process. A log that cannot be written, on a full disk, is no reason to end."""
    with suppress(OSError):
        print(text, flush=True)


def end_with_parent(number: signal.Signals) -> None:
    """From now on this process gets the signal when its parent ends, however that ends. Linux alone can promise it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def cache_directory() -> Path:
    """Where this machine keeps what it can fetch again."""
    given = os.environ.get("PACKTRAIN_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "packtrain"


def nodes_directory() -> Path:
    """Where the nodes of this machine have their directories."""
    return cache_directory() / "nodes"
