"""Runs of a tiny model by some workers, whose losses can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packtrain.run.run import Run
from packtrain.store import Store
from train.forking import WorkerForker
from train.tiny import tiny_job, tiny_run
from train.workers import losses


class Training:
    def __init__(self, store: Store, forker: WorkerForker, directory: Path) -> None:
        self.store, self._forker, self._directory = store, forker, directory
        self._runs = 0

    def run(self, ranks: int, sections: dict[str, Any] | None = None, **train: Any) -> Run:
        run = tiny_run(self.store, tiny_job(train=train, **(sections or {})))
        self.resume(run, ranks)
        return run

    def resume(self, run: Run, ranks: int, generation: int = 1, **more: Any) -> list[Any]:
        self._runs += 1
        control = str(self._directory / f"control-{self._runs}")
        where = {"store": run.store.url, "run": run.name, "control": control, "generation": generation}
        return self._forker.succeed("train", ranks, **where, recipe="plain", **more)


def assert_close(found: Run, wanted: Run, rel: float = 1e-5) -> None:
    assert losses(found).keys() == losses(wanted).keys()
    assert list(losses(found).values()) == pytest.approx(list(losses(wanted).values()), rel=rel)
