"""Open MPI, for hosts that reach each other by ssh."""

from __future__ import annotations

import shutil


def missing() -> str | None:
    return None if shutil.which("mpirun") else "mpirun is not installed: run tests/parts/install"
