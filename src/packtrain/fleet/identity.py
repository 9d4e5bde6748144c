"""Which Packtrain this is: its version and a digest of its source, so that two machines know whether they run the same.

Also prints it: `python -m packtrain.fleet.identity`.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import packtrain

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
