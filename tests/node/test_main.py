"""The life of a node: what it does with its machine at the end, however it ends."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import AlreadyJoined, PacktrainError
from packtrain.node import main
from packtrain.node.directory import NodeSlot
from packtrain.node.main import NodeOptions, take_part
from packtrain.node.mirror_process import MirrorProcess
from packtrain.run.records import Result
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from parts.runs import new_run, recipe_job


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each node that has ended: whether its machine is to shut down."""
    wanted: list[bool] = []
    monkeypatch.setattr(main, "switch_off", wanted.append)
    return wanted


def node_of(run: Run, write_report: Any = lambda _: None, **options: Any) -> int:
    """Take part in a run whose code is accepted; return the exit code."""
    everything = {"address": None, "interface": None, "workers": None, "power_off": False, "code": None}
    given = NodeOptions(**{**everything, "identity": None, **options})
    fresh = Run(run.store, run.name)  # it has not read the job yet
    return take_part(fresh, given, lambda _: None, tuple, lambda *_: nullcontext(), write_report)


@pytest.mark.parametrize("fails", ["node", "report"])
def test_a_machine_that_is_done_is_shut_down_whatever_fails(
    fails: str, directory_store: Store, monkeypatch: pytest.MonkeyPatch, switched_off: list[bool]
) -> None:
    run = new_run(directory_store, recipe_job(fleet={"local": {"power_off": True}}))

    class Ending:
        has_done_its_part = True

        def __init__(self, *_: object, **__: object) -> None:
            self.mirror = MirrorProcess(run, "a")

        def work(self) -> None:
            run.finish(Result("stopped", "enough", 1, 1.0))
            if fails == "node":
                raise RuntimeError

    def broken(_: Run) -> None:
        raise StoreError("the store is away", temporary=True)

    monkeypatch.setattr(main, "Node", Ending)
    with pytest.raises((RuntimeError, StoreError)):
        node_of(run, write_report=broken)
    assert switched_off == [True]


@pytest.mark.parametrize("fails", ["the node's beginning", "the node's work", "the store"])
def test_a_machine_whose_node_crashes_is_shut_down_and_the_crash_is_recorded(
    fails: str, directory_store: Store, monkeypatch: pytest.MonkeyPatch, switched_off: list[bool]
) -> None:
    run = new_run(directory_store, recipe_job(fleet={"local": {"power_off": True}}))

    class Dying:
        has_done_its_part = False

        def __init__(self, *_: object, **__: object) -> None:
            if fails == "the node's beginning":
                raise TypeError("a defect")
            self.mirror = MirrorProcess(run, "a")

        def work(self) -> None:
            raise StoreError("refused") if fails == "the store" else TypeError("a defect")

    monkeypatch.setattr(main, "Node", Dying)
    with pytest.raises((TypeError, StoreError)):
        node_of(run)
    assert switched_off == [True]
    [event] = run.events().read()
    assert event.kind == "failure"
    assert event.text.endswith("StoreError: refused" if fails == "the store" else "TypeError: a defect")


@pytest.mark.parametrize(
    ("options", "off"),
    [({"address": "8.8.8.8"}, False), ({"interface": "no-such-card"}, False), ({"power_off": True}, True)],
)
def test_a_wrong_option_shuts_no_machine_down_but_an_unreadable_job_does_if_the_fleet_says_so(
    options: dict[str, Any], off: bool, directory_store: Store, switched_off: list[bool]
) -> None:
    run = new_run(directory_store, recipe_job(fleet={"local": {"power_off": True}}))
    if off:
        directory_store.put(run.key("job.json"), b"damaged")
    with pytest.raises(PacktrainError):
        node_of(run, **options)
    assert switched_off == [off]


def test_a_second_node_does_not_shut_down_the_machine_of_the_first(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switched_off: list[bool]
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = new_run(directory_store, recipe_job(fleet={"local": {"power_off": True}}))
    monkeypatch.setattr(NodeSlot.__init__, "__defaults__", (0.0,))  # that it waits for the first
    first = NodeSlot(run)
    with pytest.raises(AlreadyJoined):
        node_of(run)
    first.close()
    assert switched_off == [False]
