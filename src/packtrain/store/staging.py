"""Files that appear whole: written under a temporary name in the same directory, synced, then renamed."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from packtrain.store.base import TEMPORARY
from packtrain.store.errors import explain_system

CHUNK_BYTES = 8 << 20


def stage(folder: Path, chunks: Iterable[bytes]) -> Path:
    """A new synced file in `folder` under a temporary name, which the caller renames or removes."""
    path = folder / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        # Not tempfile: its mode 0600 would keep others on a shared mount from reading.
        with path.open("xb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def replace(staged: Path, target: Path) -> None:
    """Give a staged file its name, for good."""
    try:
        staged.replace(target)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync(target.parent)


def claim(staged: Path, target: Path) -> bool:
    """Give a staged file its name if nothing has that name yet; False if something has."""
    try:
        os.link(staged, target)
    except FileExistsError:
        # Over NFS the answer to a successful link can get lost and the repeated request then fails:
        # the second name of our own file proves that it was ours.
        if staged.stat().st_nlink < 2:
            return False
    finally:
        staged.unlink(missing_ok=True)
    sync(target.parent)
    return True


def make_folder(folder: Path) -> None:
    """Make a directory and the missing ones above it, so that they survive a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    sync(folder.parent)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory; they are as safe as they get.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


@contextmanager
def explained(where: Path) -> Iterator[None]:
    """Failures of the system inside the block become `StoreError`s about `where`."""
    try:
        yield
    except OSError as error:
        raise explain_system(error, str(where)) from error
