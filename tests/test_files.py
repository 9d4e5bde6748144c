"""Locks on files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from packtrain.files import FileLock

HOLDER = """
import sys
from pathlib import Path
from packtrain.files import FileLock
lock = FileLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def is_free(path: Path) -> bool:
    try:
        FileLock(path, wait=False).close()
    except BlockingIOError:
        return False
    return True


def test_an_exclusive_lock_has_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path) as lock:
        assert not is_free(path)
        assert os.fstat(lock.fileno()).st_ino == path.stat().st_ino
        assert path.stat().st_mode & 0o777 == 0o600
    assert is_free(path)


def test_shared_locks_exclude_only_exclusive_ones(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(mode=0o444)
    with FileLock(path, shared=True), FileLock(path, shared=True, wait=False):
        path.chmod(0o644)  # only an exclusive lock needs to write
        assert not is_free(path)
    with FileLock(path), pytest.raises(BlockingIOError):
        FileLock(path, shared=True, wait=False)


def test_a_shared_lock_does_not_create_its_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "lock", shared=True)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_released_when_it_is_dropped(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert not is_free(tmp_path / "lock")
    del lock
    assert is_free(tmp_path / "lock")


def test_closing_twice_closes_nothing_else(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.close()
    with FileLock(tmp_path / "other"):
        lock.close()
        assert not is_free(tmp_path / "other")


@pytest.mark.usefixtures("processes")
def test_a_lock_ends_with_its_process_and_a_child_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert not is_free(path)
        holder.kill()
    assert is_free(path)

    with FileLock(path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    FileLock(path).close()  # waits: the kernel closes descriptors a moment after the child has started
    assert child.poll() is None
    child.communicate(b"\n")


def test_waiting_for_a_lock_file_that_is_removed_locks_its_replacement(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock(path)
    got: list[FileLock] = []
    waiting = threading.Thread(target=lambda: got.append(FileLock(path)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    path.unlink()
    with FileLock(path) as second:
        first.close()  # the waiter has a lock now, on a file without a name
        waiting.join(0.1)
        assert not got
        assert second.fileno() >= 0
    waiting.join(10)
    assert os.path.samestat(os.fstat(got[0].fileno()), path.stat())
    got[0].close()


def test_a_lock_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()
