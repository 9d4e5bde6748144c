"""A mount point, and disks that come and go there: bound directories, which keep their contents in between."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Mounts:
    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._mounted = False
        self.point = scratch / "mount"
        self.point.mkdir()

    def mount(self, disk: str) -> None:
        (self._scratch / disk).mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", self._scratch / disk, self.point], check=True)
        self._mounted = True

    def unmount(self) -> None:
        """Take the disk away, even from processes that use it."""
        if self._mounted:
            subprocess.run(["umount", "--lazy", self.point], check=True)
            self._mounted = False
