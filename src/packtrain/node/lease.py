"""Renew the node's lease in the store, with the machine's telemetry, until the node exits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from packtrain.node.telemetry import TelemetrySampler
from packtrain.process import say
from packtrain.run.chunks import ChunkWriter
from packtrain.run.liveness import LEASE_SECONDS
from packtrain.run.records import Lease, NodeReport, Telemetry, TelemetrySample
from packtrain.run.run import Run
from packtrain.store import StoreError, open_store

ANSWER_SECONDS = 3.0  # a request without an answer is repeated ...
OUTAGE_SECONDS = 6.0  # ... until then, which is well before other nodes consider this one lost


def hurried(run: Run, answer_seconds: float = ANSWER_SECONDS) -> Run:
    """Return the run with a store client that gives up within seconds: one slow request must not cost the lease."""
    if run.store.is_directory:
        return run
    return Run(open_store(run.store.url, outage_seconds=OUTAGE_SECONDS, answer_seconds=answer_seconds), run.name)


class LeaseRenewer:
    """Renews `lease` every few seconds; if the store is unreachable, the next renewal tries again.

    Telemetry has a thread of its own, so that its history has no gap while the store is slow. Without `background` the
    caller calls `renew`.
    """

    def __init__(
        self,
        run: Run,
        lease: Lease,
        sampler: TelemetrySampler,
        history: ChunkWriter[TelemetrySample] | None = None,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = LEASE_SECONDS,
        background: bool = True,
    ) -> None:
        self._run, self._lease, self._history, self._clock, self._seconds = run, lease, history, clock, seconds
        self.sampler = sampler
        self._telemetry = Telemetry()
        self._started = self._counted_from = clock()
        self._used_before = lease.used_seconds
        self._over, self._news, self._writing = threading.Event(), threading.Event(), threading.Lock()
        run.renew(lease)  # here and not in the thread, so that a store that refuses it is an error at the start
        self._threads = [
            threading.Thread(target=self._renew_often, name="lease", daemon=True),
            threading.Thread(target=self._measure_often, name="telemetry", daemon=True),
        ]
        for thread in self._threads if background else ():
            thread.start()

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def has_news(self) -> bool:
        """True if something changed that other nodes have not read yet."""
        return self._news.is_set()

    def used_seconds(self) -> float:
        """Return the run's time so far, earlier generations included."""
        return self._used_before + self._clock() - self._counted_from

    def count_from(self, used_seconds: float) -> None:
        """Take over the run's time so far from a generation's record."""
        self._used_before, self._counted_from = used_seconds, self._clock()

    def offer_port(self, port: int) -> None:
        """Offer a fresh port for the next rendezvous: the last one may still be in use."""
        self._change(port=port)

    def set_leaving(self) -> None:
        if not self._lease.leaving:
            self._change(leaving=True)

    def set_stopping(self, generation: int) -> None:
        self._change(stopping=generation)

    def set_report(self, report: NodeReport) -> None:
        self._change(report=report)

    def _change(self, **fields: Any) -> None:
        """Change the lease; the next renewal, which comes without a pause, writes it."""
        with self._writing:
            self._lease = replace(self._lease, **fields)
        self._news.set()

    def leave(self) -> None:
        self._over.set()
        self._news.set()
        # Joined first: a renewal after the last one would make the node look alive again.
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.renew(has_left=True)

    def _renew_often(self) -> None:
        while not self._over.is_set():
            self._news.wait(self._seconds)
            if self._over.is_set():
                return
            try:
                self.renew()
            except Exception as error:  # if this thread ended, other nodes would consider this one lost
                say(f"warning: cannot renew the lease: {type(error).__name__}: {error}")

    def _measure_often(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._measure()
            except Exception as error:
                say(f"warning: cannot measure the telemetry of this machine: {type(error).__name__}: {error}")

    def _measure(self) -> None:
        self._telemetry = self.sampler.sample()
        if self._history is not None:
            self._history.append(TelemetrySample(time.time(), self._lease.node, self._telemetry))

    def renew(self, has_left: bool = False) -> None:
        self._news.clear()  # before the lease is read: a change after this sets it again
        if self._telemetry.memory_bytes == 0:  # not measured yet: the first renewal should not show zeros
            self._measure()
        with self._writing:
            lease = self._lease = replace(
                self._lease,
                renewal=self._lease.renewal + 1,
                used_seconds=self.used_seconds(),
                machine_seconds=self._clock() - self._started,
                left=has_left,
                telemetry=self._telemetry,
            )
        try:
            self._run.renew(lease)
        except StoreError as error:
            say(f"warning: cannot renew the lease: {error}")
