"""The lease: a record that a thread renews as long as the agent lives, with what the machine is doing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.node.telemetry import TelemetrySampler
from packtrain.run.chunks import ChunkWriter
from packtrain.run.liveness import LEASE_SECONDS
from packtrain.run.records import Lease, NodeReport, Telemetry, TelemetrySample
from packtrain.run.run import Run
from packtrain.store import StoreError, open_store
from packtrain.system import say

ANSWER_SECONDS = 3.0  # a request that is not answered is repeated, twice ...
OUTAGE_SECONDS = 6.0  # ... before others take the machine for lost


def hurried(run: Run) -> Run:
    """The run by a store of its own that gives up soon: one request without an answer must not cost the lease."""
    if run.store.is_directory:
        return run
    store = open_store(run.store.url, outage_seconds=OUTAGE_SECONDS, answer_seconds=ANSWER_SECONDS)
    return Run(store, run.name)


class LeaseRenewer:
    """Renews `node` every few seconds; a store that is away is tried again at the next renewal.

    The machine is measured in a thread of its own: `history` has no gap where the store is slow. Without a
    `background` nothing happens by itself, and whoever made the lease calls `renew`.
    """

    def __init__(
        self,
        run: Run,
        node: Lease,
        disk: Path,
        history: ChunkWriter[TelemetrySample] | None = None,
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        self._run, self._node, self._history, self._clock = run, node, history, clock
        self.sampler = TelemetrySampler(disk)
        self._telemetry = Telemetry()
        self._started = self._counted_from = clock()
        self._used_before = node.used_seconds
        self._over, self._hurry, self._writing = threading.Event(), threading.Event(), threading.Lock()
        run.renew(node)
        self._threads = [
            threading.Thread(target=self._work, name="lease", daemon=True),
            threading.Thread(target=self._measure, name="telemetry", daemon=True),
        ]
        for thread in self._threads if background else ():
            thread.start()

    @property
    def node(self) -> Lease:
        return self._node

    def used_seconds(self) -> float:
        """How long the run has had a machine, earlier attempts included."""
        return self._used_before + self._clock() - self._counted_from

    def count_from(self, used_seconds: float) -> None:
        """The run's time so far, as a generation's record tells it."""
        self._used_before, self._counted_from = used_seconds, self._clock()

    def offer_port(self, port: int) -> None:
        """A fresh port, on which this node could host the next generation."""
        self._change(port=port)

    def say_leaving(self) -> None:
        if not self._node.leaving:
            self._change(leaving=True)

    def say_stopping(self, generation: int) -> None:
        self._change(stopping=generation)

    def say_report(self, report: NodeReport) -> None:
        self._change(report=report)

    def _change(self, **fields: Any) -> None:
        """Others hear of it with the next renewal, which comes at once."""
        with self._writing:
            self._node = replace(self._node, **fields)
        self._hurry.set()

    def leave(self) -> None:
        self._over.set()
        self._hurry.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.renew(left=True)

    def _work(self) -> None:
        while not self._over.is_set():
            self._hurry.wait(LEASE_SECONDS)
            if self._over.is_set():
                return
            self._hurry.clear()
            try:
                self.renew()
            except Exception as error:  # without this thread the others take the machine for lost
                say(f"warning: the lease could not be renewed: {type(error).__name__}: {error}")

    def _measure(self) -> None:
        while not self._over.wait(LEASE_SECONDS):
            try:
                self._sample()
            except Exception as error:
                say(f"warning: this machine could not be measured: {type(error).__name__}: {error}")

    def _sample(self) -> None:
        self._telemetry = self.sampler.sample()
        if self._history is not None:
            self._history.append(TelemetrySample(time.time(), self._node.node, self._telemetry))

    def renew(self, left: bool = False) -> None:
        if self._telemetry.memory_bytes == 0:
            self._sample()
        with self._writing:
            self._node = replace(
                self._node,
                renewal=self._node.renewal + 1,
                used_seconds=self.used_seconds(),
                machine_seconds=self._clock() - self._started,
                left=left,
                telemetry=self._telemetry,
            )
            node = self._node
        try:
            self._run.renew(node)
        except StoreError as error:
            say(f"warning: the lease could not be renewed: {error}")
