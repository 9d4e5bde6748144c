"""Mount points whose mounts are missing, as the tables of a system name them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from packtrain.store import StoreError, open_store
from packtrain.store import mounts as mounts_module
from packtrain.store.mounts import missing_mount, remember_mount
from parts.mounts import Mounts
from parts.runs import write_files

FSTAB = """# <file system> <mount point> <type> <options> <dump> <pass>
UUID=1 / ext4 errors=remount-ro 0 1
UUID=2 none swap sw 0 0
tmpfs /scratch tmpfs size=1g 0 0
server:/export /data/my\\040disk nfs4 noauto,x-systemd.automount 0 0
#server:/old /old nfs4 defaults 0 0
short
"""
UNIT = "[Mount]\nWhat=server:/models\nWhere = /models\nType=nfs\n"
ROOT = "22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"


def mount(point: str, kind: str = "nfs4", options: str = "rw") -> str:
    return f"36 22 0:51 / {point} rw,relatime shared:9 - {kind} source {options}\n"


@pytest.mark.parametrize(
    ("place", "mounted", "missing"),
    [
        ("/data/my disk/store", "", ("/data/my disk", "fstab")),
        ("/data/my disk", "", ("/data/my disk", "fstab")),
        ("/data/my disk/store", mount("/data/my\\040disk"), None),
        # The automounter has not been able to mount it.
        ("/data/my disk", mount("/data/my\\040disk", "autofs", "rw,fd=1,direct"), ("/data/my disk", "fstab")),
        ("/data/my disk", mount("/data/my\\040disk", "autofs", "rw,direct") + mount("/data/my\\040disk"), None),
        ("/data/store", "", None),
        ("/models/store", "", ("/models", "systemd/system/models.mount")),
        ("/models/store", mount("/models"), None),
        ("/masked/store", "", None),
        ("/auto/server/store", "", ("/auto", "auto.master")),
        ("/auto/server/store", mount("/auto", "autofs", "rw,fd=1,indirect"), None),
        ("/scratch/store", "", None),
        ("/old/store", "", None),
        ("/home/me/store", "", None),
    ],
)
def test_a_mount_is_missing_if_the_system_names_its_point_and_nothing_is_there(
    place: str, mounted: str, missing: tuple[str, str] | None, tmp_path: Path
) -> None:
    files = {"fstab": FSTAB, "systemd/system/models.mount": UNIT, "auto.master": "# map\n/auto /etc/auto.nfs\n/- x\n"}
    write_files(tmp_path / "etc", {name: text.encode() for name, text in files.items()})
    (tmp_path / "etc/systemd/system/masked.mount").symlink_to(os.devnull)
    (tmp_path / "mountinfo").write_text(ROOT + mounted)
    expected = None if missing is None else (Path(missing[0]), tmp_path / "etc" / missing[1])
    assert missing_mount(Path(place), tmp_path / "etc", tmp_path / "mountinfo") == expected


def test_a_link_leads_to_the_mount_that_is_missing(tmp_path: Path) -> None:
    write_files(tmp_path, {"etc/fstab": f"server:/export {tmp_path}/disk nfs4\n".encode(), "mountinfo": ROOT.encode()})
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/stores")
    found = missing_mount(tmp_path / "link/mine", tmp_path / "etc", tmp_path / "mountinfo")
    assert found == (tmp_path / "disk", tmp_path / "etc/fstab")


def test_a_system_that_does_not_say_what_is_mounted_misses_nothing(tmp_path: Path) -> None:
    write_files(tmp_path, {"etc/fstab": b"server:/export /data nfs4\n"})
    assert missing_mount(Path("/data/store"), tmp_path / "etc", tmp_path / "mountinfo") is None


@pytest.mark.parametrize(
    ("mounted", "remembered"),
    [
        ("", []),
        (mount("/home"), []),
        (mount("/data"), ["/data"]),
        (mount("/data") + mount("/data/my\\040disk", "tmpfs"), ["/data/my disk"]),
        (mount("/data") + mount("/data/my\\040disk"), ["/data/my disk"]),
    ],
)
def test_the_innermost_mount_of_a_path_is_remembered_once(
    mounted: str, remembered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    table, place = tmp_path / "mountinfo", Path("/data/my disk/store")
    table.write_text(ROOT + mounted)
    for _ in range(2):
        remember_mount(place, table)
    assert missing_mount(place, tmp_path, table) is None
    table.write_text(ROOT)
    memory = tmp_path / "packtrain" / f"mounts-{socket.gethostname()}"
    assert missing_mount(place, tmp_path, table) == next(((Path(point), memory) for point in remembered), None)
    assert (memory.read_text().count("\n") if memory.exists() else 0) == len(remembered)


def test_a_tmpfs_is_missed_until_the_next_start_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After that it would be empty anyway, and may have been mounted for once."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    table = tmp_path / "mountinfo"
    table.write_text(ROOT + mount("/ram", "tmpfs") + mount("/tmp", "tmpfs"))
    for place in ("/ram/store", "/tmp/store"):
        remember_mount(Path(place), table)
    table.write_text(ROOT)
    assert missing_mount(Path("/ram/store"), tmp_path, table) is not None
    assert missing_mount(Path("/tmp/store"), tmp_path, table) is None, "a sandbox may have its own"
    monkeypatch.setattr(mounts_module, "machine_id", lambda: "after-the-start")
    assert missing_mount(Path("/ram/store"), tmp_path, table) is None


def test_no_store_is_created_where_one_was_on_a_mount_that_is_missing(mounts: Mounts) -> None:
    """Nothing but the earlier store says that there should be a mount."""
    place = str(mounts.point / "team/store")
    mounts.mount("disk")
    open_store(place, create=True)
    mounts.unmount()
    with pytest.raises(StoreError, match=f"{mounts.point} is not mounted, but .*/mounts-.* says it should be"):
        open_store(place, create=True)
    assert list(mounts.point.iterdir()) == []
    mounts.mount("another disk")
    open_store(place, create=True)


def test_no_command_creates_a_store_while_a_mount_of_fstab_is_missing(mounts: Mounts, tmp_path: Path) -> None:
    """In a mount namespace of its own, where fstab is the test's."""
    (tmp_path / "fstab").write_text(f"{tmp_path}/disk {mounts.point} none bind,noauto 0 0\n")
    (tmp_path / "disk").mkdir()
    place = mounts.point / "team/store"
    script = f"""
mount --bind {tmp_path}/fstab /etc/fstab
{sys.executable} -m packtrain doctor --store {place} | grep "^store "
find {mounts.point} -mindepth 1
mount {mounts.point}
{sys.executable} -m packtrain doctor --store {place} | grep "^store "
"""
    command = ["unshare", "--mount", "sh", "-c", script]
    before, after = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert f"{mounts.point} is not mounted, but /etc/fstab says it should be  fix: mount it, or use another" in before
    assert "is not mounted" not in after
    assert (tmp_path / "disk/team/store/.packtrain-store").exists()
