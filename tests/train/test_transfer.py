"""Copies to and from a GPU: which call is queued where, and in which order. Torch's calls are recorded, not made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from packtrain.data.loader import LoadedBatch, Loader, Position
from packtrain.errors import PacktrainError
from packtrain.train.transfer import Feed, Reading, SideStream, on_device, pinned
from packtrain.train.world import StepSync, World

GPU, CPU = torch.device("cuda", 3), torch.device("cpu")


class Gpu:
    """Records what torch is asked to do on a GPU; `stream` is where it would be queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.stream, self._streams, self._events = "computing", 0, 0
        gpu = self

        class Stream:
            def __init__(self, device: torch.device | None = None, name: str = "") -> None:
                assert name or device == GPU
                gpu._streams += not name
                self.name = name or f"side {gpu._streams}"

            def wait_stream(self, other: Stream) -> None:
                gpu.calls.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Event) -> None:
                gpu.calls.append(f"{self.name} waits for {event.name}")

        class Event:
            def __init__(self, **_options: bool) -> None:
                gpu._events += 1
                self.name = f"event {gpu._events}"

            def record(self) -> None:
                gpu.calls.append(f"{gpu.stream}: {self.name}")

            def synchronize(self) -> None:
                gpu.calls.append(f"host waits for {self.name}")

        @contextmanager
        def stream(used: Stream) -> Iterator[None]:
            before, gpu.stream = gpu.stream, used.name
            yield
            gpu.stream = before

        @contextmanager
        def device(used: torch.device) -> Iterator[None]:
            gpu.calls.append(f"use {used}")
            yield

        def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            gpu.calls.append(f"{gpu.stream}: copy to {device}")
            return tensor.clone()

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            gpu.calls.append("pin")
            return tensor.clone()

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: Stream(name=gpu.stream))
        for name in ("tensor", "empty"):
            monkeypatch.setattr(torch, name, self._on_cpu(getattr(torch, name)))
        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, used: self.calls.append(f"kept for {used.name}"))
        # Tensors stay in main memory: they are taken for those of the GPU.
        monkeypatch.setattr("packtrain.train.transfer.is_queued", lambda _device: True)
        monkeypatch.setattr("packtrain.train.world.is_queued", lambda _device: True)

    def _on_cpu(self, make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            self.calls += ["pin"] * pin_memory
            tensor: torch.Tensor = make(*args, **options)
            return tensor

        return made

    def take(self) -> list[str]:
        taken, self.calls = self.calls, []
        return taken


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def batch(number: int) -> LoadedBatch:
    ids = np.array([number])
    return LoadedBatch(({"ids": ids},), ids, ids, 1, 1, 1, Position(0, number), Position(0, number + 1), 9)


def loader_of(*batches: LoadedBatch | BaseException) -> Loader:
    """A loader whose batches are all ready."""

    def source() -> Iterator[LoadedBatch]:
        for one in batches:
            if isinstance(one, BaseException):
                raise one
            yield one

    loader = Loader(source(), ahead=len(batches))
    loader._thread.join(60 if isinstance(batches[-1], BaseException) else 0)
    while loader.ready < len(batches):
        pass
    return loader


def test_a_batch_is_pinned_with_the_gpu_of_its_worker(gpu: Gpu) -> None:
    arrays = pinned({"ids": np.arange(3)}, GPU)
    assert gpu.take() == ["use cuda:3", "pin"]  # and not with the first GPU, which belongs to another worker
    assert arrays["ids"].tolist() == [0, 1, 2]


def test_on_a_cpu_nothing_is_copied() -> None:
    arrays = {"ids": np.arange(3)}
    assert pinned(arrays, CPU) is arrays
    tensor = on_device(arrays, CPU)["ids"]
    assert tensor.data_ptr() == torch.from_numpy(arrays["ids"]).data_ptr()
    assert not SideStream(CPU)


def test_the_next_batch_is_copied_beside_the_computing(gpu: Gpu) -> None:
    feed = Feed(loader_of(batch(0), batch(1)), GPU)
    first = feed.next()
    assert gpu.take() == ["side 1: copy to cuda:3", "side 1: event 1"]
    assert first.receive()[0]["ids"].tolist() == [0]
    # Its memory belongs to the side stream, and may be used again only after the computing that is queued now.
    assert gpu.take() == ["computing waits for event 1", "kept for computing"]
    feed.send_ahead()
    assert gpu.take() == ["side 1: copy to cuda:3", "side 1: event 2"]
    assert feed.ready >= 1, "what the loader has by now comes on top"
    second = feed.next()
    assert gpu.take() == []
    assert second.receive()[0]["ids"].tolist() == [1]
    assert gpu.take() == ["computing waits for event 2", "kept for computing"]
    feed.close()


def test_arrays_that_the_host_needs_stay_with_it(gpu: Gpu) -> None:
    feed = Feed(loader_of(batch(0)), GPU, on_host=frozenset({"ids"}))
    assert feed.next().receive()[0]["ids"].tolist() == [0]
    assert gpu.take() == ["side 1: event 1", "computing waits for event 1"]
    feed.close()


def test_one_batch_and_no_more_is_copied_ahead(gpu: Gpu) -> None:
    feed = Feed(loader_of(batch(0), batch(1)), GPU)
    feed.send_ahead()
    feed.send_ahead()
    assert gpu.take() == ["side 1: copy to cuda:3", "side 1: event 1"]
    assert feed.ready >= 2
    assert [feed.next().loaded.at.batch for _ in range(2)] == [0, 1]
    feed.close()


@pytest.mark.usefixtures("gpu")
def test_an_error_of_the_loader_waits_for_the_step_that_needs_the_batch() -> None:
    feed = Feed(loader_of(batch(0), PacktrainError("the shard is damaged")), GPU)
    feed.send_ahead()
    assert feed.next().loaded.at.batch == 0
    feed.send_ahead()
    for _ in range(2):
        with pytest.raises(PacktrainError, match="damaged"):
            feed.next()
    feed.close()


def test_a_number_is_read_without_waiting_for_what_is_queued_behind_it(gpu: Gpu) -> None:
    reading = Reading(torch.ones((), dtype=torch.float64))
    assert gpu.take() == ["pin", "computing: event 1"]
    assert reading.read() == [1.0]
    assert gpu.take() == ["host waits for event 1"]


def test_the_step_sync_goes_beside_the_computing_and_waits_for_no_later_step(gpu: Gpu) -> None:
    class Alone(World):
        def begin_sum(self, values: torch.Tensor) -> Any:  # noqa: ARG002
            gpu.calls.append(f"{gpu.stream}: sum")
            return Sum()

    class Sum:
        def wait(self) -> None:
            gpu.calls.append(f"{gpu.stream}: waits for the sum")

    sync = StepSync(Alone(device=GPU), torch.tensor(7.0), True, False, False, 2.0, 0.5)
    assert gpu.take() == [
        "side 1 waits for computing",
        "pin",
        "side 1: copy to cuda:3",
        "side 1: sum",
        "side 1: waits for the sum",
        "pin",
        "side 1: event 1",
    ]
    totals = sync.wait()
    assert gpu.take() == ["host waits for event 1"]
    assert (totals.loss, totals.stop, totals.save, totals.seconds) == (7.0, True, False, 2.0)
