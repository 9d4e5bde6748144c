"""This machine as `packtrain doctor` describes it: what it has, and what it lacks for which fleet.

Nothing is started, imported or asked over the network for it, and no credential is read: only whether there are some.
"""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil

from packtrain.errors import Mistake, PacktrainError
from packtrain.identity import identity, install_command
from packtrain.job.kinds import FLEETS, FleetKind, kind_class
from packtrain.node.telemetry import GpuSampler
from packtrain.store import open_store
from packtrain.system import cache_directory, check_shared_memory, is_scratch, state_directory, usable_cores
from packtrain.units import counted, show_bytes

_CUDA = re.compile(r"^cuda[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b([0-9]+\.[0-9]+(?:\.[0-9]+)?)\b")
LEAST_DISK_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Found:
    """One thing about this machine. `fix` is empty unless a run on this machine lacks it; `note` is worth knowing."""

    name: str
    detail: str
    fix: str = ""
    note: str = ""


@dataclass(frozen=True)
class Here:
    """This machine. `missing` has for each fleet what it lacks, with how to get it."""

    found: tuple[Found, ...]
    missing: Mapping[str, Mapping[str, str]]

    @property
    def can_train(self) -> bool:
        return not any(one.fix for one in self.found)


def describe(store: str, create_store: bool) -> Here:
    """Describe this machine, and its view of the store."""
    gpus = GpuSampler().sample()
    names = {
        name: [gpu.memory_bytes for gpu in gpus if gpu.name == name] for name in dict.fromkeys(g.name for g in gpus)
    }
    in_words = [f"{len(sizes)} x {name}, {show_bytes(max(sizes))} each" for name, sizes in names.items()]
    memory = psutil.virtual_memory()
    found = (
        Found("machine", socket.gethostname()),
        Found("python", f"{'.'.join(map(str, sys.version_info[:3]))}  {sys.executable}"),
        Found("packtrain", identity()),
        _torch(has_gpus=bool(gpus)),
        Found("GPUs", "; ".join(in_words) or "none") if gpus or not _DRIVER.exists() else _unreadable_gpus(),
        Found("driver", _driver()),
        Found("cores", counted(usable_cores(), "core")),
        Found("memory", f"{show_bytes(memory.total)}, {show_bytes(memory.available)} available"),
        *_shared_memory(),
        _disk(),
        _store(store, create_store),
    )
    kinds: dict[str, type[FleetKind]] = {word: kind_class(FLEETS, word) for word in FLEETS}
    return Here(found, {word: kind.missing_here() for word, kind in kinds.items()})


def _torch(has_gpus: bool) -> Found:
    """Return torch's version and CUDA, from its files: importing it takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return Found("torch", "not installed", f"run `{install_command('train')}`")
    try:
        installed = version("torch")
        built = _CUDA.search(Path(spec.origin).with_name("version.py").read_text("utf-8"))
    except (PackageNotFoundError, OSError):
        return Found("torch", "damaged", f"run `{install_command('train')}` again")
    note = "install a build of torch with CUDA to use the GPUs" if has_gpus and built is None else ""
    return Found("torch", f"{installed}, {f'CUDA {built[1]}' if built else 'no CUDA'}", note=note)


def _unreadable_gpus() -> Found:
    return Found("GPUs", "unknown", note=f"a driver is loaded, but cannot be asked; run `{install_command('train')}`")


def _driver() -> str:
    """Return the version of NVIDIA's driver, from the kernel: its library may be missing."""
    try:
        number = _DRIVER_VERSION.search(_DRIVER.read_text("utf-8"))
    except OSError:
        return "none from NVIDIA"
    return f"NVIDIA {number[1]}" if number else "NVIDIA"


def _shared_memory() -> Iterator[Found]:
    try:
        check_shared_memory()
    except Mistake as mistake:
        fault, _, advice = str(mistake).partition("; ")
        yield Found("shared", fault, advice)


def _disk() -> Found:
    try:
        cache, state = cache_directory(), state_directory()
    except Mistake as mistake:
        fault, _, advice = str(mistake).rpartition("; ")
        return Found("disk", fault, advice)
    free = shutil.disk_usage(cache).free
    fix = "" if free >= LEAST_DISK_BYTES else "free some space, or set PACKTRAIN_CACHE to a larger disk"
    is_temporary = is_scratch(cache) or is_scratch(state)
    note = "cannot write to the home directory; set HOME, or PACKTRAIN_CACHE and XDG_STATE_HOME" if is_temporary else ""
    return Found("disk", f"{show_bytes(free)} free  {cache}", fix, note)


def _store(location: str, create: bool) -> Found:
    try:
        found = open_store(location, create=create, outage_seconds=10.0, answer_seconds=5.0)
        if not create and found.is_directory and not Path(found.url).exists():
            return Found("store", f"none yet  {location}", note="`packtrain run` and `packtrain pack` create it")
        found.folders("runs/")
        is_atomic = found.supports_put_if_absent()
    except PacktrainError as error:
        fault, _, advice = str(error).partition("; ")
        return Found("store", fault, advice or "check its address and your access to it")
    note = "" if is_atomic else "it has no atomic create; use another store to run on more than one machine"
    return Found("store", f"reachable  {found.url}", note=note)
