"""What NVIDIA's driver says about the GPUs of this machine; nothing, where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packtrain.members import Gpu


class GpuSampler:
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

    def sample(self) -> tuple[Gpu, ...]:
        return tuple(self._one(handle) for handle in self._handles)

    def _one(self, handle: Any) -> Gpu:
        nvml = self._nvml
        name = self._ask(lambda: nvml.nvmlDeviceGetName(handle), "")
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
        return Gpu(
            name.decode() if isinstance(name, bytes) else str(name),
            self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 0) / 100,
            int(memory.used) if memory else 0,
            int(memory.total) if memory else 0,
            self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle), 0) / 1000,
            float(self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), 0)),
        )

    def _ask(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """Cards do not answer every question: some have no power meter, and some fall off the bus."""
        try:
            return question()
        except self._nvml.NVMLError:
            return otherwise


def gpu_count() -> int:
    return len(GpuSampler().sample())
