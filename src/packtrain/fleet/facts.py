"""Facts that a machine reports about itself before a run starts there: Python, torch, GPUs, disk, clock, store."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from packtrain.errors import PacktrainError
from packtrain.identity import identity
from packtrain.store import Store, open_store
from packtrain.system import nearest, readable_cache

_PROBE = b"visible"


@dataclass(frozen=True)
class Facts:
    """`store_error` is empty if the machine can read and write the store; `atomic_create` is None if untested."""

    hostname: str
    address: str
    python: str
    version: str
    identity: str
    torch: bool
    gpus: int
    free_bytes: int
    time: float
    store_error: str = ""
    atomic_create: bool | None = None


@contextmanager
def visible_object(store: Store) -> Iterator[str]:
    """Put an object for machines to see, and delete it and their answers, whose keys begin with its key."""
    key = f"scratch/visible-{uuid.uuid4().hex}"
    store.put(key, _PROBE)
    try:
        yield key
    finally:
        # Machines answer with objects of their own, even if they were too late to be read.
        for entry in store.list("scratch/"):
            if entry.key.startswith(key):
                store.delete(entry.key)


def gather(store: str, key: str) -> Facts:
    """Collect the facts. The store is tested with the object that the caller has put at `key`, if there is one."""
    store_error, atomic_create = _test_store(store, key) if key else ("", None)
    cache = readable_cache()
    return Facts(
        hostname=socket.gethostname(),
        address=_address(),
        python=sys.executable,
        version=".".join(map(str, sys.version_info[:3])),
        identity=identity(),
        torch=find_spec("torch") is not None,
        # The driver's directory, not NVML: this must answer even where the driver and its library disagree.
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        free_bytes=shutil.disk_usage(nearest(cache)).free,
        time=time.time(),
        store_error=store_error,
        atomic_create=atomic_create,
    )


def _test_store(location: str, key: str) -> tuple[str, bool | None]:
    try:
        # Impatient, unlike a node: a person waits for the answer.
        store = open_store(location, outage_seconds=10.0, answer_seconds=5.0)
        if store.find(key) != _PROBE:
            return "an object written by the client is not there", None
        store.put(f"{key}-{socket.gethostname()}-{os.getpid()}", _PROBE)  # the client deletes it with its own
        return "", store.supports_put_if_absent()
    except PacktrainError as error:
        return str(error), None


def _address() -> str:
    """Return the address as ssh reached it, or as the node would choose it."""
    from packtrain.node.address import choose_address, ssh_address

    try:
        return ssh_address(os.environ) or choose_address(None, None, False, None)
    except PacktrainError:
        return "127.0.0.1"
