"""The runs that the dashboard reads, within a limit of memory, and what tells a page that there is something new."""

from __future__ import annotations

import threading
from collections import OrderedDict

from packtrain.errors import PacktrainError
from packtrain.observe.follower import RunFollower
from packtrain.run.run import Run
from packtrain.store import StoreError

MAX_READERS = 256
MAX_BYTES = 1 << 30
"""Of all readers together: what was looked at longest ago is forgotten, and read again if it is asked for."""


class RunReader(RunFollower):
    """A run that pages look at."""

    num_checkpoints = 0

    def look(self, seconds: float) -> dict[str, str]:
        """Read what is new and say which parts have changed."""
        with self.lock:
            self.read(seconds)
            self.read_log_keys()
            self.num_checkpoints = len(self.run.store.folders(self.run.key("checkpoints/")))
            return self.versions

    @property
    def versions(self) -> dict[str, str]:
        """Words that change when a page has something new to ask for."""
        rows = ".".join(str(table.rows) for table in self.history.tables.values())
        return {
            "points": f"{self.history.edition}.{rows}", "events": str(self.num_events),
            "machines": str(self.num_telemetry), "logs": str(len(self.log_keys)),
            "samples": str(len(self.history.sample_chunks)), "checkpoints": str(self.num_checkpoints),
        }  # fmt: skip


class Readers:
    """The readers of the runs that were looked at last, within a limit of memory."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: Run) -> RunReader:
        with self._lock:
            reader = self._readers.get(run.name)
            if reader is None:
                reader = self._readers[run.name] = RunReader(run)
            self._readers.move_to_end(run.name)
            while len(self._readers) > 1 and (
                len(self._readers) > MAX_READERS
                or sum(reader.num_bytes for reader in self._readers.values()) > MAX_BYTES
            ):
                self._readers.popitem(last=False)
            return reader

    def forget(self, name: str) -> None:
        with self._lock:
            self._readers.pop(name, None)


def is_away(error: PacktrainError) -> bool:
    """True if the store cannot be reached now: that concerns all runs."""
    return isinstance(error, StoreError) and error.temporary
