"""The loop in this process, alone, with the smallest recipe: what it leaves in the store, whatever interrupts it."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from packtrain.data.order import Ids
from packtrain.errors import Mistake, PacktrainError
from packtrain.job.kinds import EXCHANGES, OPTIMIZERS, SCHEDULES
from packtrain.observe.history import read_points
from packtrain.recipes import Batch, EvaluationRequest, Measurement, Scores
from packtrain.run.checkpoint import Checkpoint, Superseded, commit, committed, last_step
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train import checkpointer as saver
from packtrain.train.checkpointer import Checkpointer
from packtrain.train.control import STOP_SIGNALS, Control, StopSignal
from packtrain.train.engine import NonFinite
from packtrain.train.recorder import Clock
from packtrain.train.state import MODEL_FILE, STATE_FILE
from packtrain.train.trainer import Trainer, small_share
from packtrain.train.world import World
from parts.faulty import FaultyStore
from parts.runs import a_generation
from parts.sandbox import wait_until
from train.forking import WorkerForker
from train.test_schedule import EXAMPLES
from train.tiny import Tiny, tiny_job, tiny_run
from train.workers import Interrupted, history, losses, weights

STEPS = 10
IN_EPOCH = 6


def train(run: Run, control: Control, recipe: Tiny | None = None, generation: int = 1) -> StopSignal:
    notice = StopSignal().listen()
    Trainer(run, recipe or Tiny(run.job), World(), generation, control, notice).train()
    return notice


def new_control(tmp_path: Path, name: str) -> Control:
    return Control(tmp_path / name)


def train_to_the_end(run: Run, tmp_path: Path) -> None:
    """As agents would: generation after generation until there is a result."""
    for generation in range(2, 6):
        if run.result() is None:
            train(run, new_control(tmp_path, f"later-{generation}"), generation=generation)
    result = run.result()
    assert result is not None
    assert result.status == "finished"


def test_a_stop_works_while_the_loop_waits_for_data(directory_store: Store, control: Control, tmp_path: Path) -> None:
    class Starved(Interrupted):
        batches, go_on = 0, threading.Event()

        def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
            self.batches += 1
            assert self.batches != 5 or self.go_on.wait(60)
            return super().batch(ids, epoch, repeats)

    run = tiny_run(directory_store)
    train(run, control, recipe := Starved(run.job, 4, control.request_stop))
    recipe.go_on.set()
    assert committed(run)[-1].step == 4
    assert list(losses(run)) == [1, 2, 3, 4]
    train_to_the_end(run, tmp_path)
    assert list(losses(run)) == list(range(1, STEPS + 1))


def test_a_failure_does_not_lose_the_checkpoint_that_is_being_committed(
    directory_store: Store, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = threading.Event()
    close = Checkpointer.close

    class Slow(FaultyStore):
        def put_file(self, key: str, path: Path) -> None:
            assert closing.wait(120)
            super().put_file(key, path)

    def watched(*arguments: Any) -> None:
        closing.set()
        close(*arguments)

    def fail() -> None:
        assert not closing.is_set()
        raise RuntimeError("another worker is gone")

    name = tiny_run(directory_store, tiny_job(checkpoint={"every": "4 steps"})).name
    run = Run(Slow(directory_store), name)
    monkeypatch.setattr(Checkpointer, "close", watched)
    with pytest.raises(RuntimeError, match="another worker is gone"):
        train(run, control, Interrupted(run.job, 6, fail))
    assert [one.step for one in committed(run)] == [4]


@pytest.mark.parametrize(("before", "warnings"), [("a", 1), ("ab", 2)], ids=["same size", "another size"])
def test_a_run_warns_once_of_a_batch_that_is_small_for_its_gpus_and_again_with_another_number_of_them(
    directory_store: Store,
    control: Control,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    warnings: int,
) -> None:
    run = tiny_run(directory_store)
    on_gpu, second = World(), World(rank=1, num_ranks=2)
    on_gpu.device = second.device = torch.device("cuda")  # where no stream of a GPU can be made
    line = small_share(run.job.train, on_gpu)
    assert line is not None
    assert line.endswith("too few to keep a GPU busy; set 64 or more and adapt the learning rate")
    assert small_share(run.job.train, World()) is None, "a CPU is busy with any batch"
    assert small_share(run.job.train, second) is None, "the first one tells"
    monkeypatch.setattr("packtrain.train.trainer.small_share", lambda *_: line)
    train(run, control, Interrupted(run.job, 3, control.request_stop))
    for number, names in enumerate((before, "a"), 1):
        run.propose(a_generation(number, *names, step=last_step(run)))
    train_to_the_end(run, tmp_path)
    assert [event.text for event in run.events().read() if event.kind == "warning"] == [line] * warnings


def test_a_nan_score_is_never_the_best(directory_store: Store, control: Control) -> None:
    class Scored(Tiny):
        scores = iter([math.nan, 1.0, 5.0, math.nan, 0.5, 0.5])

        def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:  # noqa: ARG002
            return Scores({"closeness": next(self.scores), "loss": 1.0})

    settings = {"every": "100 steps", "keep_best": 1, "keep_last": 1}
    run = tiny_run(directory_store, tiny_job(evaluate={"every": "2 steps"}, checkpoint=settings))
    train(run, control, Scored(run.job))
    assert [(one.step, one.score) for one in committed(run)] == [(6, 5.0), (10, 0.5)]


def test_the_result_is_the_last_thing_written_at_the_goal(directory_store: Store, control: Control) -> None:
    """Whoever sees the result may end this process at once: nothing else may be missing by then."""
    store = FaultyStore(directory_store)
    run = tiny_run(store)
    train(run, control)
    result = run.result()
    assert result is not None
    assert (result.status, result.step) == ("finished", STEPS)
    assert result.scores.keys() == {"valid.closeness", "valid.loss"}
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert committed(run)[-1].step == STEPS
    assert store.changes()[-1] == ("put_if_absent", run.key("result.json"))
    assert {key.split("/")[2] for _, key in store.changes()} >= {"events", "metrics", "tensorboard", "checkpoints"}


def test_the_time_of_a_run_includes_what_it_used_before_and_its_startup(
    directory_store: Store, control: Control
) -> None:
    run, clock = tiny_run(directory_store), Clock()
    run.propose(replace(a_generation(1), used_seconds=100.0))
    clock.add("start", 20.0)
    Trainer(run, Tiny(run.job), World(), 1, control, StopSignal().listen(), clock).train()
    result = run.result()
    assert result is not None
    assert result.seconds > 120.0


def test_a_request_to_commit_makes_a_checkpoint_and_changes_nothing_else(
    directory_store: Store, control: Control, tmp_path: Path
) -> None:
    job = tiny_job(checkpoint={"every": "100 steps", "keep_last": 5})
    straight, asked = tiny_run(directory_store, job), tiny_run(directory_store, job)
    train(straight, new_control(tmp_path, "straight"))
    train(asked, control, Interrupted(asked.job, 4, control.request_commit))
    assert [one.step for one in committed(straight)] == [STEPS]
    first, last = (one.step for one in committed(asked))
    assert (4 <= first <= 6, last) == (True, STEPS)
    assert history(asked) == history(straight)
    assert weights(asked) == weights(straight)


@pytest.mark.parametrize("at", [1, 2, 5, IN_EPOCH, STEPS - 1, STEPS])
def test_a_run_stopped_at_any_step_resumes_bit_for_bit(
    directory_store: Store, control: Control, tmp_path: Path, at: int
) -> None:
    straight, stopped = tiny_run(directory_store), tiny_run(directory_store)
    train(straight, control)
    train(stopped, control, Interrupted(stopped.job, at, control.request_stop))
    if at < STEPS:
        assert stopped.result() is None
        assert at <= committed(stopped)[-1].step <= at + 1
    train_to_the_end(stopped, tmp_path)
    assert history(stopped) == history(straight)
    assert weights(stopped) == weights(straight)


def test_a_failed_step_is_repeated_from_the_last_checkpoint(directory_store: Store, control: Control) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    job = tiny_job(checkpoint={"every": "3 steps"})
    straight, broken = tiny_run(directory_store, job), tiny_run(directory_store, job)
    train(straight, control)
    with pytest.raises(KeyboardInterrupt):
        train(broken, control, Interrupted(broken.job, 8, die))
    assert broken.result() is None
    train(broken, control, generation=2)
    assert history(broken) == history(straight)


def test_a_run_already_at_its_goal_only_writes_the_result(directory_store: Store, control: Control) -> None:
    run = tiny_run(directory_store)
    train(run, control)
    run.clear_end()
    train(run, control, generation=2)
    result = run.result()
    assert result is not None
    assert (result.status, result.step) == ("finished", STEPS)
    assert len([point for point in read_points(run) if (point.kind, point.step) == ("valid", STEPS)]) == 1


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
        train(run, control, Interrupted(run.job, 5, lambda: run.propose(a_generation(2))))
    assert run.result() is None
    assert committed(run) == []


# Ends.


def test_a_stop_at_the_end_of_an_epoch_neither_repeats_nor_skips_samples(
    directory_store: Store, control: Control, tmp_path: Path
) -> None:
    """The vote of step 5 is counted with step 6, which ends the epoch."""
    job = tiny_job(train={"duration": "2 epochs"}, evaluate={"every": "1 epoch"})
    straight, stopped = tiny_run(directory_store, job), tiny_run(directory_store, job)
    train(straight, control)
    train(stopped, control, Interrupted(job, IN_EPOCH - 1, control.request_stop))
    assert [one.step for one in committed(stopped)] == [IN_EPOCH]
    assert [point.step for point in read_points(stopped) if point.kind == "valid"] == []
    train_to_the_end(stopped, tmp_path)
    assert history(stopped) == history(straight)
    assert [point.step for point in read_points(stopped) if point.kind == "valid"] == [IN_EPOCH, 2 * IN_EPOCH]
    assert weights(stopped) == weights(straight)


def test_an_evaluation_abandoned_for_a_stop_is_made_after_the_resume(directory_store: Store, tmp_path: Path) -> None:
    class Signaled(Tiny):
        """Is told to go in the middle of its first evaluation."""

        def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
            os.kill(os.getpid(), signal.SIGUSR1)
            return super().measure(model, request)

    job = tiny_job(evaluate={"every": "3 steps"})
    straight, stopped = tiny_run(directory_store, job), tiny_run(directory_store, job)
    train(straight, new_control(tmp_path, "straight"))
    train(stopped, new_control(tmp_path, "first"), Signaled(job))
    assert [one.step for one in committed(stopped)] == [3]
    assert [point.step for point in read_points(stopped) if point.kind == "valid"] == []
    train(stopped, new_control(tmp_path, "second"), Signaled(job), generation=2)
    assert stopped.result() is None
    assert losses(stopped).keys() == {1, 2, 3}
    train_to_the_end(stopped, tmp_path)
    assert history(stopped) == history(straight)
    assert weights(stopped) == weights(straight)


def test_a_finished_run_makes_no_step_and_no_second_evaluation(
    directory_store: Store, control: Control, tmp_path: Path
) -> None:
    run = tiny_run(directory_store)
    train(run, control)
    before, saved = history(run), weights(run)
    run.clear_end()
    train(run, new_control(tmp_path, "again"), Interrupted(run.job, 1, pytest.fail), generation=2)
    assert history(run) == before
    assert weights(run) == saved


@pytest.mark.parametrize("schedule", [{"constant": {"rate": 0.01}}, {"noam": {"warmup": "4 steps", "peak": 0.01}}])
def test_an_extended_run_equals_one_with_the_longer_duration_from_the_start(
    directory_store: Store, control: Control, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    settings = {"train": {"schedule": schedule}, "evaluate": {"every": "5 steps"}}
    longer = tiny_job(**{**settings, "train": {"schedule": schedule, "duration": "14 steps"}})
    straight, extended = tiny_run(directory_store, longer), tiny_run(directory_store, tiny_job(**settings))
    train(straight, control)
    train(extended, control)
    directory_store.put(extended.key("job.json"), longer.model_dump_json().encode())
    extended.clear_end()
    extended = Run(directory_store, extended.name)
    train(extended, new_control(tmp_path, "longer"), generation=2)
    assert losses(extended) == losses(straight)
    assert weights(extended) == weights(straight)
    result = extended.result()
    assert result is not None
    assert result.step == 14


def test_a_goal_in_time_ends_the_run(directory_store: Store, control: Control) -> None:
    run = tiny_run(directory_store, tiny_job(train={"duration": "0.01 s"}))
    train(run, control)
    result = run.result()
    assert result is not None
    assert result.step == committed(run)[-1].step >= 1
    assert list(losses(run)) == list(range(1, result.step + 1))


def test_a_run_resumes_within_any_epoch_although_batches_change_by_epoch(
    directory_store: Store, control: Control, tmp_path: Path
) -> None:
    phases = [
        {"until": "1 epoch", "rate": [0.001, 0.01], "batch": "4 samples"},
        {"until": "2 epochs", "rate": 0.005, "batch": "8 samples"},
    ]
    job = tiny_job(train={"duration": "2 epochs", "schedule": {"phases": phases}})
    straight = tiny_run(directory_store, job)
    train(straight, control)
    assert [values["samples"] for (kind, _), values in history(straight).items() if kind == "train"] == [4] * 6 + [
        8
    ] * 3
    for at in (3, 5, 6, 7):
        stopped = tiny_run(directory_store, job)
        asked = new_control(tmp_path, f"asked-{at}")
        train(stopped, asked, Interrupted(job, at, asked.request_stop))
        (tmp_path / str(at)).mkdir()
        train_to_the_end(stopped, tmp_path / str(at))
        assert history(stopped) == history(straight)
        assert weights(stopped) == weights(straight)


# Numbers that are not.


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_is_never_committed(directory_store: Store, control: Control, value: str) -> None:
    class Broken(Interrupted):
        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            loss = super().loss(model, batch)
            return loss * float(value) if self._steps == 5 and model.training else loss

    run = tiny_run(directory_store, tiny_job(checkpoint={"every": "1 steps"}))
    line = r"^the loss of step 5 is not finite; .*; nothing was updated$"
    with pytest.raises(NonFinite, match=line):
        train(run, control, Broken(run.job))
    assert run.result() is None
    assert all(one.step < 5 for one in committed(run))
    assert all(step < 5 for step in losses(run))


@pytest.fixture
def runs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are made as on a GPU: what comes out is read one step later."""
    monkeypatch.setattr("packtrain.train.engine.is_queued", lambda _device: True)


@pytest.mark.parametrize("save_every", [1, 100])
@pytest.mark.usefixtures("runs_behind")
def test_a_bad_step_that_is_noticed_late_leaves_what_was_before_it(
    directory_store: Store, control: Control, save_every: int
) -> None:
    class Broken(Interrupted):
        made = 0

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            self.made = max(self.made, self._steps)
            return super().loss(model, batch) * (math.nan if self._steps == 5 and model.training else 1.0)

    run = tiny_run(directory_store, tiny_job(checkpoint={"every": f"{save_every} steps"}))
    trainer = Trainer(run, recipe := Broken(run.job), World(), 1, control, StopSignal().listen())
    with pytest.raises(NonFinite, match=r"^the loss of step 5 is not finite; .*; nothing was updated$"):
        trainer.train()
    assert trainer.step == 4
    assert recipe.made >= (5 if save_every == 1 else 6)  # before a save the host waits for the step
    assert all(one.step < 5 for one in committed(run))
    assert list(losses(run)) == [1, 2, 3, 4]


def test_a_run_whose_steps_are_read_late_is_the_same(
    directory_store: Store, control: Control, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    job = tiny_job(train={"clip": 0.5, "ema": 0.9}, checkpoint={"every": "4 steps"})
    waiting, behind = tiny_run(directory_store, job), tiny_run(directory_store, job)
    train(waiting, control)
    request.getfixturevalue("runs_behind")
    train(behind, new_control(tmp_path, "behind"))
    assert history(behind) == history(waiting)
    assert weights(behind) == weights(waiting)


# Signals.


class Signalled:
    """Sends a signal to this process at the first operation of that kind on a checkpoint."""

    def __init__(self, store: Store, operation: str, number: int) -> None:
        self.store, self._operation, self._number, self._sent = FaultyStore(store), operation, number, False
        self.store.fault = self._look

    def _look(self, operation: str, key: str) -> None:
        if operation == self._operation and "/checkpoints/" in key and not self._sent:
            self._sent = True
            os.kill(os.getpid(), self._number)


def leaves_well(run: Run, do: Callable[[], StopSignal]) -> None:
    """Commits, leaves without a result, and leaves no thread behind."""
    before = set(threading.enumerate())
    assert do().received
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads of the training to end")
    assert run.result() is None
    assert committed(run)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_during_a_step_commits_and_exits(directory_store: Store, control: Control, number: int) -> None:
    run = tiny_run(directory_store)
    leaves_well(run, lambda: train(run, control, Interrupted(run.job, 3, lambda: os.kill(os.getpid(), number))))
    assert 3 <= committed(run)[-1].step <= 4


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_the_start_commits_and_exits(directory_store: Store, control: Control, number: int) -> None:
    run = tiny_run(directory_store)

    def told_at_once() -> StopSignal:
        notice = StopSignal().listen()
        os.kill(os.getpid(), number)
        Trainer(run, Tiny(run.job), World(), 1, control, notice).train()
        return notice

    leaves_well(run, told_at_once)
    assert committed(run)[-1].step <= 2


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_during_a_save_commits_and_exits(directory_store: Store, control: Control, number: int) -> None:
    job = tiny_job(train={"duration": "500 steps"}, checkpoint={"every": "2 steps"})
    run = tiny_run(Signalled(directory_store, "put_file", number).store, job)
    leaves_well(run, lambda: train(run, control))
    assert committed(run)[-1].step < 500


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_loading_data_commits_and_exits(
    directory_store: Store, control: Control, tmp_path: Path, number: int
) -> None:
    run = tiny_run(directory_store)
    train(run, control, Interrupted(run.job, 3, control.request_stop))
    loading = Run(Signalled(directory_store, "get_file", number).store, run.name)
    leaves_well(run, lambda: train(loading, new_control(tmp_path, "loading"), generation=2))
    assert committed(run)[-1].generation == 2
    assert committed(run)[-1].step <= 6


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_during_the_final_evaluation_defers_it(
    directory_store: Store, control: Control, tmp_path: Path, number: int
) -> None:
    class Last(Tiny):
        measures = 0

        def count(self, split: str) -> int:
            return super().count("valid" if split == "test" else split)

        def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
            self.measures += 1
            if self.measures == 2:
                os.kill(os.getpid(), number)
            return super().measure(model, request)

    run = tiny_run(directory_store)
    leaves_well(run, lambda: train(run, control, Last(run.job)))
    assert [one.step for one in committed(run)] == [STEPS]
    train_to_the_end(run, tmp_path)


@pytest.mark.parametrize(("samples", "decoded"), [(2, [[0, 2], [1, 3, 4]]), (100, [[0, 1, 2, 3, 4]])])
def test_without_a_test_split_the_full_validation_split_is_evaluated_once(
    directory_store: Store, control: Control, samples: int, decoded: list[list[int]]
) -> None:
    class Noted(Tiny):
        measured: ClassVar[list[tuple[int, list[int]]]] = []

        def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
            self.measured.append((len(request.ids), request.decode_ids.tolist()))
            return super().measure(model, request)

    run = tiny_run(directory_store, tiny_job(evaluate={"every": "100 steps", "samples": samples}))
    Noted.measured.clear()
    train(run, control, Noted(run.job))
    assert Noted.measured == [(0 if number else 5, ids) for number, ids in enumerate(decoded)]
    result, [point] = run.result(), [point for point in read_points(run) if point.kind == "valid"]
    assert result is not None
    assert result.scores == {f"valid.{name}": point.values[name] for name in ("closeness", "loss")}
    assert point.counts == {"closeness": min(samples, 5), "loss": 5}, "as in every evaluation before it"
    assert result.counts == {"valid.closeness": 5, "valid.loss": 5}


def test_no_thread_is_left_after_success_or_failure(directory_store: Store, control: Control) -> None:
    before = set(threading.enumerate())
    train(tiny_run(directory_store), control)
    assert set(threading.enumerate()) <= before

    def fail() -> None:
        raise RuntimeError("a fault of the model")

    failing = tiny_run(directory_store, tiny_job(checkpoint={"every": "1 steps"}))
    with pytest.raises(RuntimeError):
        train(failing, control, Interrupted(failing.job, 5, fail))
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), thread.name


# Which checkpoint it goes on from.


def spoil(run: Run, checkpoint: Checkpoint, file: str, data: bytes) -> None:
    """Changes a file and its digest in the manifest: whoever wrote this wrote it whole."""
    import hashlib

    folder = f"checkpoints/{checkpoint.name}"
    run.store.put(run.key(f"{folder}/files/{file}"), data)
    manifest = json.loads(run.store.get(run.key(f"{folder}/manifest.json")))
    for one in manifest["files"]:
        if one["name"] == file:
            one["sha256"] = hashlib.sha256(data).hexdigest()
    run.store.put(run.key(f"{folder}/manifest.json"), json.dumps(manifest).encode())


def saved_run(store: Store, control: Control) -> tuple[Run, Checkpoint]:
    """A run that was stopped with several checkpoints, and the newest of them."""
    job = tiny_job(checkpoint={"every": "2 steps", "keep_last": 5})
    run = tiny_run(store, job)
    saved = threading.Event()

    def slowly() -> None:
        """Lets the saver come along, so that there are several."""
        assert saved.wait(30)

    def told(*arguments: Any) -> Checkpoint:
        made = commit(*arguments)
        saved.set()
        return made

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saver, "commit", told)
        train(run, control, Halting(job, slowly, control))
    assert len(committed(run)) > 1
    return run, committed(run)[-1]


class Halting(Interrupted):
    def __init__(self, job: Any, wait: Callable[[], None], control: Control) -> None:
        super().__init__(job, 6, control.request_stop)
        self._wait = wait

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training and self._steps == 3:
            self._wait()
        return super().loss(model, batch)


def of_another(run: Run, checkpoint: Checkpoint, **changes: Any) -> bytes:
    data = json.loads(run.store.get(run.key(f"checkpoints/{checkpoint.name}/files/{STATE_FILE}")))
    return json.dumps({**data, **changes}).encode()


PICKLE = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94"


@pytest.mark.parametrize(
    ("file", "data", "line"),
    [
        (MODEL_FILE, PICKLE, "model.safetensors cannot be read"),
        (MODEL_FILE, b"", "model.safetensors cannot be read"),
        (MODEL_FILE, (90 << 20).to_bytes(8, "little") + b"{}", "model.safetensors cannot be read: its header has"),
        (STATE_FILE, b"{", "the checkpoint's state.json cannot be read"),
        (STATE_FILE, {"recipe": "classify"}, "the checkpoint's recipe is 'classify', but the run's is 'translate'"),
        (STATE_FILE, {"pack": "other"}, "the checkpoint's pack is 'other', but the run's is 'pack-1'"),
        (STATE_FILE, {"model": {"size": "big"}}, "the checkpoint's model is {'size': 'big'}, but the run's is"),
    ],
)
def test_an_unusable_checkpoint_is_skipped_for_the_newest_usable_one(
    directory_store: Store, control: Control, tmp_path: Path, file: str, data: bytes | dict[str, Any], line: str
) -> None:
    straight = tiny_run(directory_store)
    train(straight, new_control(tmp_path, "straight"))
    run, newest = saved_run(directory_store, control)
    good = committed(run)[-2]
    spoil(run, newest, file, data if isinstance(data, bytes) else of_another(run, newest, **data))
    train(run, new_control(tmp_path, "again"), generation=2)
    told = [event.text for event in run.events().read() if event.kind in ("warning", "restored")]
    assert told[0].startswith(f"checkpoint {newest.name}: {line}")
    assert told[0].endswith("; skipped")
    assert told[1] == f"restored checkpoint {good.step} ({good.name})"
    assert losses(run) == losses(straight)
    assert weights(run)[MODEL_FILE] == weights(straight)[MODEL_FILE]


def test_a_run_never_starts_over_if_all_its_checkpoints_are_unusable(
    directory_store: Store, control: Control, tmp_path: Path
) -> None:
    run, _ = saved_run(directory_store, control)
    for one in committed(run):
        spoil(run, one, STATE_FILE, of_another(run, one, pack="other"))
    with pytest.raises(Mistake, match="the checkpoint's pack is 'other', but the run's is 'pack-1'"):
        train(run, new_control(tmp_path, "again"), generation=2)


# Which checkpoints are kept.


@pytest.mark.parametrize(("best_by", "sign"), [(None, 1), ("closeness", 1), ("loss", -1)])
def test_keep_best_follows_the_metric_named_in_the_job(
    directory_store: Store, control: Control, best_by: str | None, sign: int
) -> None:
    kept = {"keep_best": 1, "keep_last": 1, **({"best_by": best_by} if best_by else {})}
    settings = {"schedule": {"constant": {"rate": 0.3}}}
    run = tiny_run(directory_store, tiny_job(train=settings, evaluate={"every": "1 steps"}, checkpoint=kept))
    train(run, control)
    name = best_by or "closeness"
    measured = {point.step: sign * point.values[name] for point in read_points(run) if point.kind == "valid"}
    scores = {one.step: one.score for one in committed(run)}
    assert set(scores) == {max(measured, key=lambda step: measured[step]), STEPS}
    assert all(score == measured[step] for step, score in scores.items())


def test_the_trainer_chooses_the_save_interval_if_it_is_auto(
    directory_store: Store, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.train.checkpointer.save_interval", lambda *_: 0.0)
    run = tiny_run(directory_store, tiny_job(checkpoint={"every": "auto", "keep_last": 20}))
    train(run, control)
    assert len([event for event in run.events().read() if event.kind == "checkpoint"]) > 1
    assert committed(run)[-1].step == STEPS


WAYS_TO_EXCHANGE: dict[str, list[dict[str, Any]]] = {
    "ddp": [{}, {"compress": "fp16"}, {"compress": "bf16"}],
    "local": [
        {"every": "4 steps"},
        {"every": "4 steps", "overlap": "1 steps", "compress": "int8", "fragments": 2},
    ],
    "fsdp": [{}],
}
KINDS: dict[str, dict[str, Any]] = {
    **{f"schedule-{kind}": {"schedule": {kind: EXAMPLES[kind]}} for kind in SCHEDULES},
    **{f"optimizer-{kind}": {"optimizer": {kind: {"decay": 0.01}}} for kind in OPTIMIZERS},
    **{f"precision-{name}": {"precision": name} for name in ("fp32", "bf16", "fp16")},
    "in-pieces": {"micro_batch": "1 samples"},
    "averaged": {"ema": 0.9},
    "clipped": {"clip": 0.5},
    "recomputed": {"activation_checkpointing": True},
    "compiled": {"compile": True, "compile_backend": "aot_eager"},
    "averaged-in-fp16-pieces": {"ema": 0.9, "precision": "fp16", "micro_batch": "3 samples"},
}
SHARED: dict[str, dict[str, Any]] = {
    f"{kind}-{number}": {"exchange": {kind: way}, "ema": 0.9, "micro_batch": "1 samples"}
    for kind in EXCHANGES
    for number, way in enumerate(WAYS_TO_EXCHANGE[kind])
} | {"ddp-fp16": {"precision": "fp16"}, "fsdp-bf16": {"exchange": {"fsdp": {}}, "precision": "bf16"}}
SHARED |= {f"fsdp-{kind}": {"exchange": {"fsdp": {}}, "optimizer": {kind: {"decay": 0.01}}} for kind in OPTIMIZERS}


class StraightAndStopped:
    """Two runs of the same job: one straight to its end, and one that is stopped and goes on."""

    def __init__(self, store: Store, forker: WorkerForker, directory: Path, train: dict[str, Any]) -> None:
        job = tiny_job(train=train, evaluate={"every": "3 steps"}, checkpoint={"every": "4 steps"})
        self.straight, self.stopped = tiny_run(store, job), tiny_run(store, job)
        self._forker, self._directory = forker, directory

    def run(self, run: Run, generation: int = 1, ranks: int = 1, **more: Any) -> None:
        control = str(self._directory / f"{run.name}-{generation}")
        where = {"store": run.store.url, "run": run.name, "control": control, "generation": generation}
        self._forker.succeed("train", ranks, **where, **more)

    def compare(self, ranks: int = 1, stop_at: int = 5, recipe: str = "tiny") -> None:
        self.run(self.straight, ranks=ranks, recipe=recipe)
        self.run(self.stopped, ranks=ranks, stop_at=stop_at, recipe=recipe)
        assert self.stopped.result() is None
        assert stop_at <= committed(self.stopped)[-1].step < 10
        self.run(self.stopped, 2, ranks, recipe=recipe)
        assert self.stopped.result() is not None
        assert list(losses(self.stopped)) == list(range(1, 11))
        assert history(self.stopped) == history(self.straight)
        assert weights(self.stopped) == weights(self.straight)


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_optimizer_and_exchange_resumes_bit_for_bit(
    directory_store: Store, forker: WorkerForker, tmp_path: Path, kind: str
) -> None:
    StraightAndStopped(directory_store, forker, tmp_path, KINDS[kind]).compare()


@pytest.mark.parametrize("kind", SHARED)
def test_every_exchange_resumes_bit_for_bit_on_three_workers(
    directory_store: Store, forker: WorkerForker, tmp_path: Path, kind: str
) -> None:
    """Two would not do: of two numbers the sum is the same in any order."""
    StraightAndStopped(directory_store, forker, tmp_path, SHARED[kind]).compare(ranks=3)


@pytest.mark.parametrize("recipe", ["sparing", "normed", "looking"])
@pytest.mark.parametrize("kind", EXCHANGES)
def test_unused_weights_norm_statistics_and_channels_last_resume_bit_for_bit(
    directory_store: Store, forker: WorkerForker, tmp_path: Path, kind: str, recipe: str
) -> None:
    settings = {"exchange": {kind: WAYS_TO_EXCHANGE[kind][0]}}
    StraightAndStopped(directory_store, forker, tmp_path, settings).compare(ranks=2, recipe=recipe)


@pytest.mark.parametrize("recipe", ["sparing", "looking"])
def test_unused_weights_and_channels_last_resume_bit_for_bit_on_one_worker(
    directory_store: Store, forker: WorkerForker, tmp_path: Path, recipe: str
) -> None:
    StraightAndStopped(directory_store, forker, tmp_path, {}).compare(recipe=recipe)


@pytest.mark.parametrize("exchange", ["ddp", "fsdp"])
def test_a_killed_worker_ends_the_others_and_the_run_resumes_bit_for_bit(
    directory_store: Store, forker: WorkerForker, tmp_path: Path, exchange: str
) -> None:
    lines = StraightAndStopped(directory_store, forker, tmp_path, {"exchange": {exchange: {}}})
    lines.run(lines.straight, ranks=2)
    run = lines.stopped
    exited = forker.run("train", 2, store=run.store.url, run=run.name, control=str(tmp_path / "killed"), die_at=7)
    assert [one.code for one in exited][1] == -9
    assert exited[0].code != 0
    assert run.result() is None
    lines.run(run, 2, ranks=2)
    assert history(run) == history(lines.straight)
    assert weights(run) == weights(lines.straight)


@pytest.mark.parametrize(("kind", "told"), [*((kind, "cut-off") for kind in EXCHANGES), ("ddp", "cut-off-first-told")])
def test_a_stop_works_while_one_of_three_workers_has_no_data(
    directory_store: Store, forker: WorkerForker, tmp_path: Path, kind: str, told: str
) -> None:
    lines = StraightAndStopped(directory_store, forker, tmp_path, {"exchange": {kind: WAYS_TO_EXCHANGE[kind][0]}})
    lines.run(lines.straight, ranks=3, recipe="plain")
    lines.run(lines.stopped, ranks=3, recipe=told)
    assert [one.step for one in committed(lines.stopped)].count(4) == 1, "what was saved is not saved again"
    assert committed(lines.stopped)[-1].step == 4
    lines.run(lines.stopped, 2, ranks=3, recipe="plain")
    assert lines.stopped.result() is not None
    assert history(lines.stopped) == history(lines.straight)
    assert weights(lines.stopped) == weights(lines.straight)


def test_between_syncs_of_local_steps_a_stop_waits_for_data(
    directory_store: Store, forker: WorkerForker, tmp_path: Path
) -> None:
    """Their weights differ there: there is nothing that all of them could go on from."""
    lines = StraightAndStopped(directory_store, forker, tmp_path, {"exchange": {"local": {"every": "3 steps"}}})
    lines.run(lines.stopped, ranks=2, recipe="cut-off-shortly")
    assert committed(lines.stopped)[-1].step == 6


def test_a_signal_to_one_worker_during_an_evaluation_stops_all_of_them(
    directory_store: Store, forker: WorkerForker, tmp_path: Path
) -> None:
    lines = StraightAndStopped(directory_store, forker, tmp_path, {})
    run = lines.stopped
    lines.run(run, ranks=2, recipe="called")
    assert run.result() is None
    assert committed(run)[-1].step == 3
    assert not [point for point in read_points(run) if point.kind == "valid"]
    lines.run(run, 2, ranks=2)
    lines.run(lines.straight, ranks=2)
    assert history(run) == history(lines.straight)
    assert weights(run) == weights(lines.straight)
