"""The lease: a record that a thread renews as long as the agent lives."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

from packtrain.node.telemetry import TelemetrySampler
from packtrain.runs import LEASE_SECONDS, Node, Run
from packtrain.store import StoreError


class Lease:
    """Renews `node` every few seconds; a store that is away is tried again at the next renewal."""

    def __init__(self, run: Run, node: Node, disk: Path) -> None:
        self._run, self._node = run, node
        self._sampler = TelemetrySampler(disk)
        self._started, self._used_before = time.monotonic(), node.used_seconds
        self._over, self._writing = threading.Event(), threading.Lock()
        run.renew(node)
        self._thread = threading.Thread(target=self._work, name="lease", daemon=True)
        self._thread.start()

    @property
    def node(self) -> Node:
        return self._node

    def used_seconds(self) -> float:
        """How long the run has had a machine, earlier attempts included."""
        return self._used_before + time.monotonic() - self._started

    def offer_port(self, port: int) -> None:
        """A fresh port, on which this node could host the next generation."""
        with self._writing:
            self._node = replace(self._node, port=port)

    def leave(self) -> None:
        self._over.set()
        self._thread.join()
        self._renew(left=True)

    def _work(self) -> None:
        while not self._over.wait(LEASE_SECONDS):
            self._renew()

    def _renew(self, left: bool = False) -> None:
        with self._writing:
            self._node = replace(
                self._node,
                renewal=self._node.renewal + 1,
                used_seconds=self.used_seconds(),
                left=left,
                telemetry=self._sampler.sample(),
            )
            try:
                self._run.renew(self._node)
            except StoreError as error:
                print(f"warning: the lease could not be renewed: {error}", flush=True)
