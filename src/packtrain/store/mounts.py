"""Mount points that have nothing mounted, although the system or an earlier use of a store there says they should.

The system names them in fstab, in units of systemd and for autofs. What a person has mounted by hand is in no table: it
is remembered when a store is created or opened there; a tmpfs, which is empty afterwards, until the next start of the
machine.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.system import machine_id, state_directory

_MOUNTED = Path("/proc/self/mountinfo")  # Linux only
_OCTAL = re.compile(r"\\([0-7]{3})")  # how tables of mounts write a space
_ESCAPED = re.compile(r"[\s\\]")
_WHERE = re.compile(r"^Where\s*=\s*(/.*?)\s*$", re.MULTILINE)
_FOR_A_WHILE = "tmpfs"  # keeps nothing: after a start of the machine, a store below its mount point is no worse off
_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - sandboxes of one machine have their own


def missing_mount(path: Path, configuration: Path = Path("/etc"), mounted: Path = _MOUNTED) -> tuple[Path, Path] | None:
    """Return the mount point at or above `path` that should be mounted and is not, and the file that names it."""
    if not mounted.exists():
        return None
    place = Path(os.path.realpath(path))
    for point, file in (*_named(configuration), *_remembered()):
        real = Path(os.path.realpath(point))
        if real != Path("/") and place.is_relative_to(real) and not _is_mounted(real, mounted):
            return real, file
    return None


def remember_mount(path: Path, mounted: Path = _MOUNTED) -> None:
    """Remember the mount that a path is on, so that `missing_mount` can tell when it is missing."""
    place = Path(os.path.realpath(path))
    above = [(line[4], _kind(line)) for line in _table(mounted) if place.is_relative_to(line[4])]
    innermost, kind = max(above, key=lambda mount: len(mount[0]), default=("/", ""))
    if innermost == "/" or innermost in (point for point, _ in _remembered()):
        return
    line = [_ESCAPED.sub(lambda escaped: f"\\{ord(escaped[0]):03o}", innermost)]
    if kind == _FOR_A_WHILE:
        if innermost in _SCRATCH:
            return
        line.append(machine_id())  # another one after the next start
    with suppress(Mistake, OSError), _memory().open("a", encoding="utf-8") as file:  # a home may be read-only
        file.write(" ".join(line) + "\n")


def _memory() -> Path:
    """Return the file for this machine: several may share a home, and not their mounts."""
    return state_directory() / f"mounts-{socket.gethostname()}"


def _remembered() -> list[tuple[str, Path]]:
    with suppress(Mistake):
        return [(point, _memory()) for point, *machines in _table(_memory()) if machines in ([], [machine_id()])]
    return []


def _named(configuration: Path) -> Iterator[tuple[str, Path]]:
    """Yield every mount point that is named there, with the file that does."""
    fstab = configuration / "fstab"
    for fields in _table(fstab):
        if len(fields) >= 3 and fields[1].startswith("/") and fields[2] != _FOR_A_WHILE:
            yield fields[1], fstab
    # Only the administrator's: the system's own units may be for mounts that nobody wants.
    for unit in sorted((configuration / "systemd/system").glob("*mount")):
        text = _text(unit)
        if f"Type={_FOR_A_WHILE}" not in text:
            yield from ((point, unit) for point in _WHERE.findall(text))
    for master in (configuration / "auto.master", *sorted((configuration / "auto.master.d").glob("*.autofs"))):
        for point, *_ in _table(master):
            if point.startswith("/") and point != "/-":
                yield point, master


def _table(file: Path) -> list[list[str]]:
    lines = (line.split() for line in _text(file).splitlines() if not line.lstrip().startswith("#"))
    return [[_OCTAL.sub(lambda code: chr(int(code[1], 8)), field) for field in line] for line in lines if line]


def _text(file: Path) -> str:
    with suppress(OSError):  # it is not there, or a link that switches a unit off
        return file.read_text("utf-8", "replace")
    return ""


def _kind(mount: list[str]) -> str:
    """Return the kind of file system of a line of mountinfo; it follows a hyphen after any number of other fields."""
    return mount[mount.index("-") + 1]


def _is_mounted(point: Path, mounted: Path) -> bool:
    with suppress(OSError):
        os.scandir(point).close()  # has an automounter mount it
    for line in _table(mounted):
        # An automounter that waits for its first user, or failed, is itself a mount; below an indirect one nobody can
        # make directories.
        if line[4] == str(point) and (_kind(line) != "autofs" or "indirect" in line[-1].split(",")):
            return True
    return False
