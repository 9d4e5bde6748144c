"""This machine, its GPUs and its workers: what they are, and how busy."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from packtrain.identity import identity
from packtrain.run.records import Gpu, GpuModel, MachineFacts, Telemetry, WorkerUse
from packtrain.system import text_or_nothing, usable_cores
from packtrain.train.control import GENERATION_VARIABLE, VISIBLE_GPUS_VARIABLE, WORKER_NAME

_LOOPBACK = re.compile("lo[0-9]*")
_PEAK = re.compile(r"^VmHWM:\s*([0-9]+) kB$", re.MULTILINE)
_PROCESSOR = re.compile(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", re.MULTILINE)
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def machine_facts() -> MachineFacts:
    """Return what this machine is, and the versions of what trains on it."""
    gpus = GpuSampler()
    processor = _PROCESSOR.search(text_or_nothing(Path("/proc/cpuinfo")))
    versions = {"packtrain": identity(), "python": platform.python_version()}
    with suppress(PackageNotFoundError):
        versions["torch"] = version("torch")
    torch = find_spec("torch")  # not imported, which would take seconds
    if torch is not None and torch.origin is not None:
        cuda = _CUDA.search(text_or_nothing(Path(torch.origin).with_name("version.py")))
        versions["cuda"] = cuda[1] if cuda else ""
    versions["driver"] = gpus.driver()
    return MachineFacts(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}"[:200],
        processor=(processor[1].strip() if processor else platform.processor())[:200],
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=tuple(GpuModel(gpu.name[:200], gpu.memory_bytes) for gpu in gpus.sample()),
        versions={name: text[:200] for name, text in versions.items() if text},
    )


class TelemetrySampler:
    """Rates and fractions are of the time between two calls of `sample`."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        psutil.cpu_percent()  # the first call only sets the start of the next one's interval
        self._traffic, self._when = _traffic(), time.monotonic()
        self._gpus = GpuSampler()
        self._launcher: int | None = None
        self._workers: dict[int, tuple[int, psutil.Process]] = {}

    def watch_workers_of(self, launcher: int | None) -> None:
        self._launcher, self._workers = launcher, {}

    def sample(self) -> Telemetry:
        memory, traffic, time_now = psutil.virtual_memory(), _traffic(), time.monotonic()
        seconds = max(1e-3, time_now - self._when)
        # A disk or an interface that was removed takes its count along.
        sent, received, read, written = (
            max(0, count - before) / seconds for count, before in zip(traffic, self._traffic, strict=True)
        )
        self._traffic, self._when = traffic, time_now
        return Telemetry(
            cpu_fraction=psutil.cpu_percent() / 100,
            memory_fraction=memory.percent / 100,
            memory_bytes=memory.total,
            disk_free_bytes=psutil.disk_usage(str(self._disk)).free,
            sent_bytes_per_second=sent,
            received_bytes_per_second=received,
            gpus=self._gpus.sample(),
            workers=self._worker_uses(),
            disk_read_bytes_per_second=read,
            disk_written_bytes_per_second=written,
        )

    def _worker_uses(self) -> tuple[WorkerUse, ...]:
        launcher = self._launcher
        if launcher is None:
            return ()
        try:
            family = psutil.Process(launcher).children(recursive=True)
        except psutil.Error:
            return ()
        workers = self._workers
        sums: dict[int, tuple[float, int, int]] = {}
        for process in family:
            try:
                # The process object is kept: its CPU time is measured from the previous call.
                if process.pid not in workers:
                    if (rank := rank_of(process)) is None:  # or not yet: it has only just started
                        continue
                    workers[process.pid] = (rank, process)
                rank, worker = workers[process.pid]
                cpu, resident = worker.cpu_percent() / 100, worker.memory_info().rss
                peak = max(resident, _peak_bytes(process.pid))
            except (psutil.Error, OSError, ValueError):
                continue
            before = sums.get(rank, (0.0, 0, 0))
            sums[rank] = (before[0] + cpu, before[1] + resident, before[2] + peak)
        return tuple(WorkerUse(rank, *use) for rank, use in sorted(sums.items()))


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank of a worker or of what it started: forked ones have it in their name, others in a variable.

    A single worker of a program may have no rank, but it has the variables of its run, unlike the launcher.
    """
    name = process.name()
    if name.startswith(WORKER_NAME):
        rank = name.removeprefix(WORKER_NAME)
    else:
        environment = process.environ()
        rank = environment.get("RANK", "0" if GENERATION_VARIABLE in environment else "")
    return int(rank) if rank.isdecimal() else None


def _traffic() -> tuple[int, int, int, int]:
    """Return the bytes that this machine has sent, received, read and written; 0 where the system does not count."""
    counts = psutil.net_io_counters(pernic=True)
    cards, disk = [counts[name] for name in network_cards(counts)], psutil.disk_io_counters()
    sent, received = sum(card.bytes_sent for card in cards), sum(card.bytes_recv for card in cards)
    return sent, received, *((disk.read_bytes, disk.write_bytes) if disk else (0, 0))  # None in some containers


def network_cards(names: Iterable[str], devices: Path = Path("/sys/class/net")) -> list[str]:
    """Return the interfaces through which bytes leave this machine, each byte through one of them.

    Loopback leaves nothing. What passes a bridge, a bond, a tunnel or the pair of a container passes a card, too. In a
    container there is no card, but one end of such a pair.
    """
    leaving = [name for name in names if not _LOOPBACK.fullmatch(name)]
    cards = [name for name in leaving if (devices / name / "device").exists()]
    # Azure shows a fast card twice: the second one counts what the first one has counted.
    cards = [name for name in cards if (devices / name / "master").resolve().name not in cards]
    return cards or [name for name in leaving if not any((devices / name).glob("lower_*"))]


def _peak_bytes(process: int) -> int:
    """Return the most memory that a process has had: workers grow and shrink between two samples. 0 if unknown."""
    try:
        status = Path(f"/proc/{process}/status").read_text("utf-8")  # Linux only
    except OSError:
        return 0
    peak = _PEAK.search(status)
    return int(peak[1]) << 10 if peak else 0


class GpuSampler:
    """Reads the GPUs from NVIDIA's driver; none if there is no driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
        except ImportError:
            return
        except pynvml.NVMLError:  # no driver, or no GPU
            return

    def identifiers(self) -> list[str]:
        """Return the UUIDs of all GPUs; of one that is divided, those of its parts."""
        return [name for handle in self._handles for name in self._part_uuids(handle) or [self._uuid(handle)]]

    def _part_uuids(self, handle: Any) -> list[str]:
        nvml = self._nvml
        uuids = []
        if self._ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0):
            for index in range(self._ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0)):
                device = self._ask(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index), None)
                if device is not None:
                    uuids.append(self._uuid(device))
        return uuids

    def _uuid(self, handle: Any) -> str:
        return self._ask_text(lambda: self._nvml.nvmlDeviceGetUUID(handle))

    def sample(self) -> tuple[Gpu, ...]:
        return tuple(self._sample_of(handle) for handle in self._handles)

    def driver(self) -> str:
        """Return the version of the driver; "" if there is none."""
        return "" if self._nvml is None else self._ask_text(self._nvml.nvmlSystemGetDriverVersion)

    def _sample_of(self, handle: Any) -> Gpu:
        nvml = self._nvml
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
        return Gpu(
            self._ask_text(lambda: nvml.nvmlDeviceGetName(handle)),
            self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 0) / 100,
            int(memory.used) if memory else 0,
            int(memory.total) if memory else 0,
            self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle), 0) / 1000,
            float(self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), 0)),
        )

    def _ask(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """Return the answer, or `otherwise`: some GPUs have no power meter, and some fall off the bus."""
        try:
            return question()
        except self._nvml.NVMLError:
            return otherwise

    def _ask_text(self, question: Callable[[], Any]) -> str:
        text = self._ask(question, "")
        return text.decode() if isinstance(text, bytes) else str(text)


def visible_gpus(setting: str | None, present: Sequence[str]) -> list[str]:
    """Return the GPUs that workers may use, by CUDA_VISIBLE_DEVICES: numbers or UUIDs, up to the first that is none."""
    if setting is None:
        return list(present)
    visible = []
    for word in (word.strip() for word in setting.split(",")):
        matches = [identifier for identifier in present if word and identifier.startswith(word)]
        if word.isdecimal() and int(word) < len(present):
            matches = [present[int(word)]]
        if len(matches) != 1:
            break
        visible.append(matches[0])
    return visible


def gpus_of_workers(environment: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the GPUs, or of their parts (MIG), that this machine has for workers."""
    return visible_gpus(environment.get(VISIBLE_GPUS_VARIABLE), GpuSampler().identifiers())
