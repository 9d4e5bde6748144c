"""The version of Packtrain and a digest of its source, so that two machines can tell whether they run the same code.

`python -m packtrain.identity` prints it. The module imports only the standard library and is outside of every package:
it must work in an environment that is only half installed, and must be fast, because ssh asks several Pythons in turn.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@cache
def source() -> dict[str, bytes]:
    """Return every file of the installed package, in the same order everywhere. Read once, so that callers agree."""
    root = Path(__file__).parent
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return dict(sorted((path.relative_to(root).as_posix(), path.read_bytes()) for path in files))


@cache
def identity() -> str:
    digest = hashlib.sha256()
    for name, data in source().items():
        # The name ends with a NUL, so that no two sets of files give the same bytes.
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(data).digest())
    try:
        number = version("packtrain")
    except PackageNotFoundError:
        number = "0"
    return f"{number}-{digest.hexdigest()[:12]}"


if __name__ == "__main__":
    print(identity())
