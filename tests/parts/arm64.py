"""An arm64 machine: a Debian made by tests/parts/arm64-build, whose programs qemu runs. Needs root."""

from __future__ import annotations

import compileall
import io
import os
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packtrain.fleet.wheels import own_wheel

_BUILD = Path(__file__).with_name("arm64-build")
_PYTHON = ("/usr/bin/qemu-aarch64-static", "/usr/bin/python3")
# Mounts are seen by this process and its children alone, and end with it.
_ENTER = r"""
set -eu
root=$1 work=$2 packages=$3 processors=$4; shift 4
for path in proc sys dev; do mount --rbind "/$path" "$root/$path"; done
mount -t tmpfs tmpfs "$root/tmp"
printf '%s' "$processors" >"$root/tmp/cpuinfo"
mount --bind "$root/tmp/cpuinfo" "$root/proc/cpuinfo"
mount --bind "$work" "$root/work"
mount --bind -o ro "$packages" "$root/packtrain"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8 PYTHONPATH=/packtrain PYTHONDONTWRITEBYTECODE=1 \
  OMP_NUM_THREADS=2 chroot "$root" "$@"
"""

# qemu shows the file of the computer below. A runtime that asks it for an Arm processor finds none, and ends.
_PROCESSOR = """processor\t: {}
BogoMIPS\t: 62.50
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd42
CPU revision\t: 1

"""


def root() -> Path:
    return Path(subprocess.run(["bash", _BUILD, "--where"], capture_output=True, text=True, check=True).stdout.strip())


def missing() -> str | None:
    """Return why there is no such machine here, or None."""
    if os.geteuid() != 0:
        return "an emulated arm64 machine needs root"
    return None if root().is_dir() else f"there is no {root()}: run `make arm64`"


def install(place: Path) -> None:
    """Unpack the wheel of this packtrain, for `python_on_arm64`."""
    with zipfile.ZipFile(io.BytesIO(own_wheel()[1])) as wheel:
        wheel.extractall(place)
    compileall.compile_dir(place, quiet=1)  # of use there if this Python is a 3.11, too


def python_on_arm64(words: Sequence[str], work: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    """Run the Python of that machine, which sees `work` as /work, with more packages."""
    enter = ["unshare", "--mount", "--propagation", "private", "bash", "-c", _ENTER, "enter"]
    processors = "".join(_PROCESSOR.format(number) for number in range(os.cpu_count() or 1))
    places = [str(root()), str(work), str(packages), processors]
    return subprocess.run([*enter, *places, *_PYTHON, *words], capture_output=True, text=True, timeout=280)
