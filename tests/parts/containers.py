"""podman and buildah with a store of their own, a base image with Python, and a registry on loopback.

The base image is made once with debootstrap, and layers are kept between runs of the tests: both are in
~/.cache/packtrain-tests. Needs root and the Debian packages of tests/parts/install.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parts.loopback import served

CACHE = Path.home() / ".cache" / "packtrain-tests"
BASE = "localhost/packtrain-tests-base:bookworm"
_PROGRAMS = ("podman", "buildah", "runc", "docker-registry", "debootstrap")
_MIRROR = "http://deb.debian.org/debian"
# No process of this computer may raise its limits, and containers share its network.
_CONTAINERS = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
netns = "host"
cgroups = "enabled"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def missing() -> str | None:
    """Return why there can be no containers here, or None."""
    if os.geteuid() != 0:
        return "containers need root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"containers need {', '.join(absent)}: run tests/parts/install" if absent else None


@dataclass(frozen=True)
class Containers:
    """The variables that podman and buildah need, and the address of the registry."""

    environment: dict[str, str]
    registry: str

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **self.environment})
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done


@contextmanager
def containers(scratch: Path) -> Iterator[Containers]:
    """Start a registry, and give the base image its name."""
    CACHE.mkdir(parents=True, exist_ok=True)
    files = {
        "containers.conf": _CONTAINERS,
        "auth.json": "{}",
        "storage.conf": f'[storage]\ndriver = "overlay"\nrunroot = "{CACHE}/run"\ngraphroot = "{CACHE}/graph"\n',
    }
    for name, text in files.items():
        (scratch / name).write_text(text)

    def command(port: int) -> list[str]:
        place = scratch / "registry.yml"
        place.write_text(
            f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {scratch}/registry}}}}\n"
            f"http: {{addr: '127.0.0.1:{port}'}}\n"
        )
        return ["docker-registry", "serve", str(place)]

    with served(command) as url:
        registry = url.removeprefix("http://")
        insecure = f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n'
        (scratch / "registries.conf").write_text(f"unqualified-search-registries = []\n{insecure}")
        own = {
            "CONTAINERS_CONF": str(scratch / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(scratch / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(scratch / "registries.conf"),
            "REGISTRY_AUTH_FILE": str(scratch / "auth.json"),
        }
        made = Containers(own, registry)
        _make_base(made)
        yield made


def _make_base(made: Containers) -> None:
    with (CACHE / "base.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.run("podman", "image", "exists", BASE, check=False).returncode == 0:
            return
        root = CACHE / "base"
        shutil.rmtree(root, ignore_errors=True)
        made.run("debootstrap", "--variant=minbase", "--include=python3", "bookworm", str(root), _MIRROR)
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        archive = CACHE / "base.tar"
        made.run("tar", "-C", str(root), "-cf", str(archive), ".")
        made.run("podman", "import", "--quiet", str(archive), BASE)
        archive.unlink()
        shutil.rmtree(root, ignore_errors=True)
