"""What many tests of training need: a forker for workers, and signals as they were."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtrain.store import Store
from packtrain.train.control import STOP_SIGNALS, Control
from train.forking import WorkerForker
from train.training import Training


@pytest.fixture(scope="session")
def forker(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerForker]:
    forker = WorkerForker(tmp_path_factory.mktemp("forker"))
    yield forker
    forker.close()


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control(tmp_path / "control")


@pytest.fixture
def training(directory_store: Store, forker: WorkerForker, tmp_path: Path) -> Training:
    return Training(directory_store, forker, tmp_path)
