"""This machine as Packtrain uses it: its name, its cores, and the directories for its cache and state."""

from __future__ import annotations

import os
import shlex
import socket
import stat
from contextlib import suppress
from getpass import getuser
from pathlib import Path
from tempfile import gettempdir

from packtrain.errors import Mistake

COMPILED = "torchinductor"  # the folder of the cache


def this_client() -> str:
    """Return `user@host`, for people who wonder who started something."""
    try:
        user = getuser()
    except (KeyError, OSError):  # a container may run as a user that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]


def text_or_nothing(path: Path) -> str:
    """Return a text of the system; nothing if there is none."""
    with suppress(OSError):
        return path.read_text("utf-8", "replace")
    return ""


def check_shared_memory() -> None:
    """Refuse a machine whose processes cannot share locks: torch's launcher needs them, and so does packing."""
    import multiprocessing  # here: most commands do without

    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        fault = f"processes cannot share locks in /dev/shm ({error.strerror or error})"
        raise Mistake(f"{fault}; mount a tmpfs there that this user can write to") from None


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use: a container, such as a pod, may have a few of many."""
    cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1 of cgroups
        with suppress(OSError, ValueError):  # the other version; or no limit, which is the word max, or -1
            quota, period = map(int, " ".join((cgroup / name).read_text("utf-8") for name in names).split())
            if quota > 0:
                cores = min(cores, max(1, round(quota / period)))
    return cores


def machine_id() -> str:
    """Return a name that all processes of this machine share, and that no other machine has.

    Containers share the boot id of their machine but not the hostname, and cloned machines the hostname but not the
    boot id.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")  # Linux only
    return f"{socket.gethostname()}-{boot.read_text('utf-8')[:8]}" if boot.exists() else socket.gethostname()


def expanded(path: str | Path) -> Path:
    """Return a path with the home directory instead of `~`; a user of a container may have none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise Mistake(f"{path}: this user has no home directory; set HOME, or use an absolute path") from None


def in_home(name: str) -> Path:
    """Return the path of a file in the home directory; without one, it is a path that cannot be there."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path raises an error without a home directory
    return Path(home if home.startswith("/") else os.devnull) / name


def is_writable(path: Path) -> bool:
    """True if this user can write to a directory, or create it."""
    return os.access(nearest(path), os.W_OK | os.X_OK) and nearest(path).is_dir()


def nearest(path: Path) -> Path:
    """Return the directory, or the nearest one above it that exists and can be seen."""
    absolute = path.absolute()
    return next(directory for directory in (absolute, *absolute.parents) if os.path.exists(directory))  # noqa: PTH110 - Path's raises an error


def _in_home_or_temporary(name: str, variable: str) -> Path:
    """Return Packtrain's folder in a folder of the home directory; without a home, one that is private and temporary.

    Others can write to the directory for temporary files, and could have put something of theirs there before.
    """
    if is_writable(in_home(f"{name}/packtrain")):
        return in_home(f"{name}/packtrain")
    try:
        base = Path(gettempdir(), f"packtrain-{os.geteuid()}")
        with suppress(FileExistsError):
            base.mkdir(mode=0o700)
        status = base.lstat()
    except OSError as error:
        fault = f"cannot write to the home directory or the temporary directory ({error.strerror or error})"
        raise Mistake(f"{fault}; set {variable} to a directory of your own") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        fault = f"{base}: is not a directory that only this user can read"
        raise Mistake(f"{fault}; remove it, or set {variable} to a directory of your own")
    return base / name / "packtrain"


def _cache_path() -> Path:
    if cache := os.environ.get("PACKTRAIN_CACHE"):
        return Path(cache)
    parent = os.environ.get("XDG_CACHE_HOME")
    return Path(parent) / "packtrain" if parent else _in_home_or_temporary(".cache", "PACKTRAIN_CACHE")


def is_in_cache(path: Path) -> bool:
    return path.absolute().is_relative_to(_cache_path().absolute())


def is_scratch(path: Path) -> bool:
    """True if a path is in a directory that Packtrain has made where temporary files go."""
    place = Path(gettempdir()).absolute()
    above = (path.absolute(), *path.parents)
    return any(folder.parent == place and folder.name.startswith("packtrain-") for folder in above)


def keep_compiled_code() -> None:
    """Have torch keep what it compiles in the cache, not among temporary files, where nobody cleans it up.

    It creates that directory as soon as it is imported, and fails for a user without a name.
    """
    with suppress(Mistake):  # who needs the cache says so
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache_path() / COMPILED / machine_id()))


def readable_cache() -> Path:
    """Return the cache for a command that only reads it: if it cannot be created, it is not there."""
    return private_directory(_cache_path(), "PACKTRAIN_CACHE")


def cache_directory() -> Path:
    """Return the directory for everything that this machine can fetch again."""
    path = readable_cache()
    if not is_writable(path) or not path.is_dir():
        raise Mistake(f"{path}: cannot write to this directory; set PACKTRAIN_CACHE to one of your own")
    return path


def state_directory() -> Path:
    """Return the directory for what this person's machine remembers and cannot fetch again."""
    parent = os.environ.get("XDG_STATE_HOME")
    path = Path(parent) / "packtrain" if parent else _in_home_or_temporary(".local/state", "XDG_STATE_HOME")
    return private_directory(path, "XDG_STATE_HOME")


def private_directory(path: Path, variable: str) -> Path:
    """Make a directory that nobody else can read; refuse one that others can write to.

    It holds code, logs and locks, and the code that the person has accepted. `variable` is where a person can name
    another one.
    """
    advice = f"set {variable} to a directory of your own"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return path  # who reads finds nothing there; who writes fails, and tells why
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise Mistake(f"{path}: belongs to another user; {advice}")
        if status.st_mode & 0o022:
            if not status.st_mode & stat.S_ISVTX:  # otherwise it is shared on purpose, such as /tmp
                advice = f"run `chmod 700 {shlex.quote(str(path))}`, or {advice}"
            raise Mistake(f"{path}: other users can write to it; {advice}")
        if status.st_mode & 0o077:
            with suppress(OSError):  # a read-only file system
                os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def nodes_directory() -> Path:
    """Return the directory in which each node of this machine has a directory of its own."""
    return readable_cache() / "nodes"
