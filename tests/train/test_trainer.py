"""The loop in this process, alone, with the smallest recipe: what it leaves in the store, whatever interrupts it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import Tiny, tiny_job, tiny_run
from torch import Tensor, nn

from packtrain.checkpoint import Superseded, committed, fetch
from packtrain.control import Control
from packtrain.errors import PacktrainError
from packtrain.recipes import Batch
from packtrain.runs import Run
from packtrain.store import Store
from packtrain.train import saver
from packtrain.train.engine import NotANumber
from packtrain.train.state import MODEL_FILE
from packtrain.train.trainer import Trainer
from packtrain.train.world import World
from parts.faulty import FaultyStore
from parts.runs import a_generation

STEPS = 10


class Interrupted(Tiny):
    """Does something in the middle of a step, counted from 1 by this process."""

    def __init__(self, run: Run, at: int = 0, deed: Callable[[], object] = lambda: None) -> None:
        super().__init__(run.job)
        self._at, self._deed, self._steps = at, deed, 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            self._steps += 1
            if self._steps == self._at:
                self._deed()
        return super().loss(model, batch)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control(tmp_path / "control")


def train(run: Run, control: Control, recipe: Tiny | None = None, generation: int = 1) -> None:
    Trainer(run, recipe or Tiny(run.job), World(), generation, control).train()


def losses(run: Run) -> dict[int, float]:
    return {point.step: point.values["loss"] for point in run.metrics() if point.kind == "train"}


def last_weights(run: Run, directory: Path) -> dict[str, Tensor]:
    directory.mkdir()
    fetch(run, committed(run)[-1], directory)
    return load_file(directory / MODEL_FILE)


def test_at_the_goal_the_run_is_finished_and_the_result_is_the_last_thing_written(
    directory_store: Store, control: Control
) -> None:
    """Whoever sees the result may end this process at once: nothing else may be missing by then."""
    store = FaultyStore(directory_store)
    run = tiny_run(store)
    train(run, control)
    result = run.result()
    assert result is not None
    assert (result.status, result.step) == ("finished", STEPS)
    assert result.scores.keys() == {"valid.closeness"}
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert committed(run)[-1].step == STEPS
    assert store.changes()[-1] == ("put_if_absent", run.key("result.json"))
    assert {key.split("/")[2] for _, key in store.changes()} >= {"events", "metrics", "tensorboard", "checkpoints"}


@pytest.mark.parametrize("at", [1, 2, 5, STEPS - 1, STEPS])
def test_a_run_that_is_stopped_at_any_step_goes_on_bit_for_bit(
    directory_store: Store, control: Control, tmp_path: Path, at: int
) -> None:
    straight, stopped = tiny_run(directory_store), tiny_run(directory_store)
    train(straight, control)
    train(stopped, control, Interrupted(stopped, at, control.ask_to_stop))
    if at < STEPS - 1:
        assert stopped.result() is None
        assert at <= committed(stopped)[-1].step <= at + 1
        train(stopped, Control(tmp_path / "later"), generation=2)
    result = stopped.result()
    assert result is not None
    assert result.status == "finished"
    assert losses(stopped) == losses(straight)
    wanted = last_weights(straight, tmp_path / "straight")
    for name, tensor in last_weights(stopped, tmp_path / "stopped").items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_commits_and_leaves_without_a_result(directory_store: Store, control: Control, number: int) -> None:
    run = tiny_run(directory_store)
    train(run, control, Interrupted(run, 3, lambda: os.kill(os.getpid(), number)))
    assert run.result() is None
    assert 3 <= committed(run)[-1].step <= 4


def test_a_step_that_dies_is_made_again_from_the_last_checkpoint(directory_store: Store, control: Control) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    job = tiny_job(checkpoint={"every": "3 steps"})
    straight, broken = tiny_run(directory_store, job), tiny_run(directory_store, job)
    train(straight, control)
    with pytest.raises(KeyboardInterrupt):
        train(broken, control, Interrupted(broken, 8, die))
    assert broken.result() is None
    train(broken, control, generation=2)
    assert losses(broken) == losses(straight)


def test_a_run_that_was_at_its_goal_already_only_writes_the_result(directory_store: Store, control: Control) -> None:
    run = tiny_run(directory_store)
    train(run, control)
    run.reopen()
    train(run, control, generation=2)
    result = run.result()
    assert result is not None
    assert (result.status, result.step) == ("finished", STEPS)
    assert len([point for point in run.metrics() if point.kind == "test"]) == 1


def test_without_its_last_checkpoint_a_run_is_not_finished(
    directory_store: Store, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(directory_store)
    monkeypatch.setattr(saver, "commit", refusing_commit)
    with pytest.raises(PacktrainError, match="the last checkpoint did not reach the store"):
        train(run, control)
    assert run.result() is None


def refusing_commit(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_superseded_generation_writes_no_result(directory_store: Store, control: Control) -> None:
    run = tiny_run(directory_store)
    with pytest.raises(Superseded):
        train(run, control, Interrupted(run, 5, lambda: run.propose(a_generation(2))))
    assert run.result() is None
    assert committed(run) == []


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_committed(
    directory_store: Store, control: Control
) -> None:
    class Broken(Interrupted):
        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            loss = super().loss(model, batch)
            return loss * float("nan") if self._steps == 5 and model.training else loss

    run = tiny_run(directory_store, tiny_job(checkpoint={"every": "1 steps"}))
    with pytest.raises(NotANumber, match="the gradient of step 5 is not finite; nothing was updated"):
        train(run, control, Broken(run))
    assert run.result() is None
    assert all(one.step < 5 for one in committed(run))
