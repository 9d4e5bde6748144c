"""What the machine is doing, sampled between two calls."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from packtrain.runs import Telemetry


class TelemetrySampler:
    def __init__(self, disk: Path) -> None:
        self._disk = disk
        psutil.cpu_percent()  # the first call only sets the mark that later ones measure from
        self._network, self._when = psutil.net_io_counters(), time.monotonic()

    def sample(self) -> Telemetry:
        memory, network, now = psutil.virtual_memory(), psutil.net_io_counters(), time.monotonic()
        seconds = max(1e-3, now - self._when)
        sent = network.bytes_sent - self._network.bytes_sent
        received = network.bytes_recv - self._network.bytes_recv
        self._network, self._when = network, now
        return Telemetry(
            cpu_fraction=psutil.cpu_percent() / 100,
            memory_fraction=memory.percent / 100,
            memory_bytes=memory.total,
            disk_free_bytes=psutil.disk_usage(str(self._disk)).free,
            sent_bytes_per_second=sent / seconds,
            received_bytes_per_second=received / seconds,
        )
