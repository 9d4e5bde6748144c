"""What tests of stores share: listings, noise to store, and Python code in a process of its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys

from packtrain.store import Store

MEGABYTE = 1 << 20


def keys(store: Store, prefix: str = "", after: str | None = None) -> list[str]:
    return [entry.key for entry in store.list(prefix, after)]


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)  # noqa: S311


def python(code: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.strip()
