"""A trace of a few steps by torch's profiler, which TensorBoard and Perfetto open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

_SKIPPED_STEPS = 3  # the first ones fill caches and choose kernels
_WARM_UP_STEPS = 2  # recorded and thrown away: the profiler's own start would be in them
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class StepProfile:
    """Records `steps` steps after the first few, writes them to `path` and calls `done`; fewer if the run ends before.

    Call `step` after every step.
    """

    def __init__(self, steps: int, device: torch.device, path: Path, done: Callable[[], None]) -> None:
        self._path, self._done, self._is_written = path, done, False
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler: profile | None = profile(
            activities=self._activities,
            schedule=schedule(skip_first=_SKIPPED_STEPS, wait=0, warmup=_WARM_UP_STEPS, active=steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self._profiler.start()

    def step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()
            if self._is_written:
                self.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing meanwhile: an evaluation has more operations than many steps."""
        profiler = self._profiler
        if profiler is None or profiler.current_action not in _RECORDING:
            yield
            return
        profiler.toggle_collection_dynamic(False, self._activities)
        try:
            yield
        finally:
            profiler.toggle_collection_dynamic(True, self._activities)

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()  # writes what was recorded, if that has not been done
        self._profiler = None  # frees what it recorded

    def _write(self, profiler: profile) -> None:
        profiler.export_chrome_trace(str(self._path))
        self._is_written = True
        self._done()
