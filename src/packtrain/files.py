"""Files: their digests, and locks on them that end with their process."""

from __future__ import annotations

import fcntl
import hashlib
import os
from contextlib import suppress
from pathlib import Path


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileLock:
    """A lock on a file, held until it is closed or the process ends, for whatever reason.

    An exclusive lock creates the file if needed; a shared one needs a file that exists and can be read.
    """

    _descriptor = -1

    def __init__(self, path: Path, *, shared: bool = False, wait: bool = True) -> None:
        """Raise BlockingIOError if another process holds the lock and `wait` is false."""
        # flock on network mounts needs a descriptor that may write for an exclusive lock. A link in place of the file
        # could lead anywhere: it is an error.
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT)
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:  # until the locked file is the one that has the name
            self._descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.flock(self._descriptor, kind)
                # The previous holder may have removed or renamed the file: this lock would then exclude nobody.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(self._descriptor), path.lstat()):
                        return
            except BaseException:
                self.close()
                raise
            self.close()

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:  # a lock that is dropped without `close` must not stay held
        self.close()


def is_free(lock: Path) -> bool:
    """True if a lock that a process has made is held by none; False if it cannot be seen."""
    try:
        FileLock(lock, shared=True, wait=False).close()
        return True
    except OSError:
        return False
