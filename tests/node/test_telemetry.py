from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from packtrain.identity import identity
from packtrain.node.lease import LeaseRenewer
from packtrain.node.telemetry import (
    GpuSampler,
    TelemetrySampler,
    gpus_of_workers,
    machine_facts,
    network_cards,
    visible_gpus,
)
from packtrain.run.records import Gpu, GpuModel, TelemetrySample
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.system import usable_cores
from parts.runs import a_lease, write_files
from parts.sandbox import wait_until

LAUNCHER = """
import os, subprocess, sys, time
worker = (
    "import time; y = bytearray(90_000_000); del y; x = bytearray(30_000_000);"
    " print('ready', flush=True); time.sleep(600)"
)
for rank in ("4", "5"):
    child = subprocess.Popen([sys.executable, "-c", worker], env={**os.environ, "RANK": rank}, stdout=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
time.sleep(600)
"""


def fake_nvml(count: int, parts: int = 0) -> ModuleType:
    """As much of NVIDIA's library as is asked for: there is no such card here. The last GPU may have parts."""
    module = ModuleType("pynvml")

    class NVMLError(Exception): ...

    def power(handle: int) -> int:
        if handle == 1:
            raise NVMLError("not supported")
        return 123_400

    def part(handle: int, index: int) -> str:
        if index == 1:
            raise NVMLError("not found")  # places may be empty
        return f"MIG-{handle}-{index}"

    module.__dict__.update(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: b"Tesla V100",
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=87, memory=20),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=11_000, total=16_000),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetTemperature=lambda *_: 61,
        nvmlDeviceGetUUID=lambda handle: handle if isinstance(handle, str) else f"GPU-{handle}".encode(),
        nvmlDeviceGetMigMode=lambda handle: (int(parts > 0 and handle == count - 1), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda _: parts,
        nvmlDeviceGetMigDeviceHandleByIndex=part,
    )
    return module


def test_a_gpu_without_a_power_meter_reports_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(2))
    assert GpuSampler().sample() == (
        Gpu("Tesla V100", 0.87, 11_000, 16_000, 123.4, 61.0),
        Gpu("Tesla V100", 0.87, 11_000, 16_000, 0.0, 61.0),
    )


def test_without_the_driver_or_its_library_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake_nvml(0)

    def refuse() -> None:
        raise broken.NVMLError("driver not loaded")

    broken.__dict__["nvmlInit"] = refuse
    for module in (broken, None):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert gpus_of_workers({}) == []


def test_a_divided_gpu_counts_as_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(2, parts=3))
    assert gpus_of_workers({}) == ["GPU-0", "MIG-1-0", "MIG-1-2"]
    assert gpus_of_workers({"CUDA_VISIBLE_DEVICES": "MIG-1-2,GPU-0"}) == ["MIG-1-2", "GPU-0"]


@pytest.mark.parametrize(
    ("given", "visible"),
    [
        (None, ["GPU-a1", "GPU-a2", "GPU-b1"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-b1", "GPU-a1"]),
        (" 1 , GPU-b", ["GPU-a2", "GPU-b1"]),
        ("0,GPU-a,1", ["GPU-a1"]),  # ambiguous, and so the end of the list
        ("0,3,1", ["GPU-a1"]),
    ],
)
def test_visible_gpus_follow_cudas_variable(given: str | None, visible: list[str]) -> None:
    assert visible_gpus(given, ["GPU-a1", "GPU-a2", "GPU-b1"]) == visible


def test_a_machine_says_what_it_is_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(2))
    write_files(tmp_path, {"torch/__init__.py": b"1 / 0", "torch/version.py": b"cuda: Optional[str] = '12.8'\n"})
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    facts = machine_facts()
    assert facts.gpus == (GpuModel("Tesla V100", 16_000),) * 2
    assert facts.cores == usable_cores() and facts.memory_bytes == psutil.virtual_memory().total
    assert (facts.versions["cuda"], facts.versions["driver"]) == ("12.8", "570.1")
    assert (facts.versions["packtrain"], facts.versions["torch"]) == (identity(), version("torch"))


@pytest.mark.usefixtures("processes")
def test_each_worker_is_measured(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE)
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        sampler = TelemetrySampler(tmp_path)
        assert sampler.sample().workers == ()
        sampler.watch_workers_of(launcher.pid)
        workers = sampler.sample().workers
        assert [use.rank for use in workers] == [4, 5]
        assert all(30_000_000 < use.memory_bytes < 90_000_000 < use.peak_memory_bytes for use in workers)
    finally:
        for child in subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True, check=False
        ).stdout.split():
            os.kill(int(child), 9)
        launcher.kill()
        launcher.wait()
    sampler.watch_workers_of(launcher.pid)
    assert sampler.sample().workers == ()


def test_use_of_the_disk_and_of_the_network_is_measured_between_two_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counters of this machine, whose other processes write, too; where it has none, as some containers, by 0."""
    cards = {name: SimpleNamespace(bytes_sent=500, bytes_recv=0) for name in ("card0", "card1")}
    disk: SimpleNamespace | None = SimpleNamespace(read_bytes=5, write_bytes=0)
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: cards if pernic else None)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: disk)
    sampler = TelemetrySampler(tmp_path)
    cards = {"card1": SimpleNamespace(bytes_sent=500, bytes_recv=4000)}  # an interface went away
    disk = SimpleNamespace(read_bytes=5, write_bytes=8000)
    use = sampler.sample()
    assert use.sent_bytes_per_second == use.disk_read_bytes_per_second == 0
    assert use.disk_written_bytes_per_second == pytest.approx(2 * use.received_bytes_per_second)
    assert use.received_bytes_per_second > 0
    assert use.disk_free_bytes > 0
    cards, disk = {}, None
    assert sampler.sample().disk_written_bytes_per_second == 0


def test_telemetry_samples_are_kept_in_the_store(directory_store: Store, tmp_path: Path) -> None:
    run = Run(directory_store, "job-1")
    writer = run.telemetry_writer("a")
    lease = LeaseRenewer(run, a_lease("a"), TelemetrySampler(tmp_path), writer, seconds=0.02)

    def measured() -> list[TelemetrySample]:
        writer.flush()
        return run.telemetry().read()

    wait_until(lambda: len(measured()) >= 2, "two samples")
    lease.leave()
    assert {one.node for one in measured()} == {"a"}
    assert all(one.telemetry.memory_bytes > 0 for one in measured())


@pytest.mark.parametrize(
    ("interfaces", "counted"),
    [
        ({"lo": "", "eth0": "device"}, ["eth0"]),
        ({"lo": "", "eth0": "device", "docker0": "lower_veth1", "veth1": "master", "wg0": ""}, ["eth0"]),
        ({"lo": "", "ens1": "device", "ens2": "device", "bond0": "lower_ens1", "br0": "lower_bond0"}, ["ens1", "ens2"]),
        ({"lo": "", "eth0": "device", "enP1": "device master:eth0"}, ["eth0"]),
        ({"lo": "", "ens1": "device master:bond0", "bond0": "lower_ens1"}, ["ens1"]),
        ({"lo": "", "eth0": "", "eth0.7": "lower_eth0"}, ["eth0"]),  # a container
        ({"lo0": "", "en0": ""}, ["en0"]),  # no such directory on a Mac
        ({"lo": ""}, []),
    ],
)
def test_a_byte_that_leaves_the_machine_is_counted_once(
    interfaces: dict[str, str], counted: list[str], tmp_path: Path
) -> None:
    for name, links in interfaces.items():
        for link, _, target in (word.partition(":") for word in links.split()):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / link).symlink_to(tmp_path / (target or "pci"))
    (tmp_path / "pci").mkdir()
    assert network_cards(interfaces, tmp_path) == counted


@pytest.mark.usefixtures("processes")
def test_what_processes_of_a_machine_send_each_other_is_not_network_traffic(tmp_path: Path) -> None:
    start, size = time.monotonic(), 64 << 20
    sampler = TelemetrySampler(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver, ThreadPoolExecutor(1) as threads:
            sent = threads.submit(sender.sendall, bytes(size))
            left = size
            while left:
                left -= len(receiver.recv(1 << 20))
            sent.result()
    sample, seconds = sampler.sample(), time.monotonic() - start
    assert max(sample.sent_bytes_per_second, sample.received_bytes_per_second) * seconds < size / 2
