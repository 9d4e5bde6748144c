"""The numbers of a program become the run's metrics."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from packtrain.job.job import CheckpointSettings
from packtrain.node.event_file import EventFile
from packtrain.node.metrics import (
    MAX_NAMES,
    Logged,
    NumberTable,
    ProgramMetrics,
    found_event_files,
    open_event_files,
    parse_line,
    parse_printed,
)
from packtrain.node.program import ProgramCheckpoints
from packtrain.node.workspace import Workspace
from packtrain.observe.history import read_points
from packtrain.run.checkpoint import FORMAT, Checkpoint
from packtrain.run.records import Generation, LogLine, Point
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from packtrain.store.records import decode
from packtrain.train.control import Control
from parts.faulty import FaultyStore
from parts.runs import a_generation, new_run


class Told(list[tuple[str, str]]):
    def __call__(self, kind: str, text: str) -> None:
        self.append((kind, text))


def a_table(last_step: int = -1, told: Told | None = None) -> NumberTable:
    return NumberTable(1, last_step, Told() if told is None else told)


def values(points: list[Point]) -> dict[int, dict[str, float]]:
    return {point.step: point.values for point in points if point.kind == "log"}


# What was logged, by step.


def test_numbers_of_one_step_are_one_point_also_if_some_come_later() -> None:
    table = a_table()
    table.add(Logged(7, 1.0, {"loss": 0.5}))
    table.add(Logged(7, 2.0, {"accuracy": 0.9}))
    table.add(Logged(8, 3.0, {"loss": 0.4}))
    assert values(table.take()) == {7: {"loss": 0.5, "accuracy": 0.9}, 8: {"loss": 0.4}}
    table.add(Logged(7, 4.0, {"val/loss": 0.6}))
    assert values(table.take()) == {7: {"loss": 0.5, "accuracy": 0.9, "val/loss": 0.6}}
    assert table.take() == []


def test_a_row_has_the_time_of_the_counter_that_counts_most() -> None:
    """As Lightning writes them: the loss of each of 100 steps, and at the end of each of five epochs a score by epochs
    and the number of the epoch by steps."""
    table = a_table()
    for step in range(100):
        table.add(Logged(step, 1000.0 + step / 10, {"train_loss": 1.0}))
        if step % 20 == 19:
            table.add(Logged(step // 20, 1000.0 + step / 10, {"val_accuracy": 0.5}))
            table.add(Logged(step, 1000.0 + step / 10, {"epoch": step // 20}))
            table.take()
    table.add(Logged(50, 2000.0, {"val_accuracy": 0.5}))
    points = {point.step: point for point in table.take()}
    assert points[50].time == 1005.0
    assert points[50].values == {"train_loss": 1.0, "val_accuracy": 0.5}


def test_a_row_has_the_time_of_the_loss_and_not_of_a_score_that_comes_more_often() -> None:
    """As Lightning writes a loss every ten steps, and each batch of a validation under a counter of its own."""
    table = a_table()
    for batch in range(100):
        table.add(Logged(batch, 1000.0, {"val_loss_step": 1.0}))
    table.add(Logged(9, 1.0, {"train_loss": 1.0, "epoch": 0.0}))
    for batch in range(100):
        table.add(Logged(batch, 2000.0, {"val_loss_step": 1.0}))
    points = {point.step: point.time for point in table.take()}
    assert (points[8], points[9]) == (2000.0, 1.0)


def test_without_a_step_each_call_is_the_step_after_the_last() -> None:
    table = a_table(last_step=41)
    for _ in range(2):
        table.add(Logged(None, 1.0, {"loss": 0.5}))
    assert list(values(table.take())) == [42, 43]


def test_a_program_that_invents_names_gets_a_limited_number_of_curves_and_a_warning() -> None:
    told = Told()
    table = a_table(told=told)
    for step in range(MAX_NAMES + 10):
        table.add(Logged(step, 1.0, {f"loss_{step}": 1.0}))
    table.add(Logged(9999, 1.0, {"x" * 201: 1.0, "": 1.0, "loss_0": 2.0}))
    found = values(table.take())
    assert len(found) == MAX_NAMES + 1
    assert found[9999] == {"loss_0": 2.0}
    assert told == [("warning", "the program logs numbers under more than 1,000 names; left some out")]


def test_of_very_many_numbers_only_some_are_kept_but_all_of_a_name_that_is_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("packtrain.node.metrics._KEPT_NUMBERS", 20 * 100)
    table = a_table()
    for step in range(10_000):
        table.add(Logged(step, 1.0, {"loss": 1.0, **({"val/loss": 1.0} if step % 1000 == 0 else {})}))
    found = values(table.take())
    assert 100 < sum("loss" in one for one in found.values()) < 1000
    assert sum("val/loss" in one for one in found.values()) == 10


def test_every_point_can_be_read_again_whatever_was_logged() -> None:
    table = a_table()
    for moment in (math.nan, -1.0, 1e300):
        table.add(Logged(3, moment, {"loss": math.nan, "x": math.inf, "\x1b[31m\n": 1.0, "start_seconds": 1e300}))
    (point,) = table.take()
    again = decode(Point, json.dumps(vars(point)).encode(), "it")
    assert again.values.keys() == {"loss", "x", "\x1b[31m\n"}


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"null", b'{"step": -1, "time": 1, "values": {}}', b'{"step": 1.5, "time": 1, "values": {}}',
     b'{"step": 1, "time": 1, "values": {"a": "x"}}', b'{"step": 1e999, "time": 1, "values": {"a": 1}}',
     b"[" * 100_000, b'{"step": "1", "time": 1, "values": {"a": 1}}'],
)  # fmt: skip
def test_a_line_that_is_not_of_packtrain_is_passed_over(line: bytes) -> None:
    assert parse_line(line) is None


# What was printed.


def printed(text: str, generation: int = 1, rank: int | None = 0, moment: float = 1.0) -> LogLine:
    return LogLine(moment, generation, "a", rank, "out", text)


@pytest.mark.parametrize(
    ("text", "step", "numbers"),
    [
        ("iter 10: loss 4.6401, time 231.12ms, mfu 3.21%", 10, {"loss": 4.6401}),
        ("step 250: train loss 1.9, val loss 2.0312", 250, {"train_loss": 1.9, "val_loss": 2.0312}),
        ("Step 250 | Train Loss: 1.9 | Val Loss: 2.0312", 250, {"train_loss": 1.9, "val_loss": 2.0312}),
        (
            "step 3: training loss=1.9 train acc=0.5 val acc=0.4",
            3,
            {"train_loss": 1.9, "train_acc": 0.5, "val_acc": 0.4},
        ),
        (
            "Step 3, D loss: 1.2, G loss 0.4, learning rate: 1e-4",
            3,
            {"d_loss": 1.2, "g_loss": 0.4, "learning_rate": 1e-4},
        ),
        ("step=7 loss=4.64 lr=1e-3", 7, {"loss": 4.64, "lr": 0.001}),
        ("step 7 loss tensor(4.64, device='cuda:0', grad_fn=<MeanBackward0>)", 7, {"loss": 4.64}),
        ("{'step': 7, 'loss': np.float64(4.64), 'lr': tensor(0.5)}", 7, {"loss": 4.64, "lr": 0.5}),
        ("step:125/1750 val_loss:4.1234 train_time:12ms", 125, {"val_loss": 4.1234}),
        ("{'step': 10, 'loss': 4.64}", 10, {"loss": 4.64}),
        ('{"loss": 4.64, "global_step": 10, "lr": 1e-3}', 10, {"loss": 4.64, "lr": 0.001}),
        ("[Step 1,000/5,000] Loss: 0.5 acc: 0.93", 1000, {"loss": 0.5, "acc": 0.93}),
        ("\x1b[32mglobal_step: 3\x1b[0m {'loss': nan, 'grad_norm': .5}", 3, {"loss": math.nan, "grad_norm": 0.5}),
        ("2026-11-19 12:30:05 INFO iteration 9/500 | loss = -1.5E+01 | eta: 0:10:23", 9, {"loss": -15.0}),
    ],
)
def test_numbers_that_are_printed_beside_a_step_are_read(text: str, step: int, numbers: dict[str, float]) -> None:
    logged = parse_printed(printed(text))
    assert logged is not None
    assert logged.step == step
    assert logged.values == pytest.approx(numbers, nan_ok=True)


@pytest.mark.parametrize(
    "text",
    ["", "loss 4.64", "step 10", "step 0.5 loss", "max_steps=500 loss=2", "footstep 3 loss 2", "step 10 took 5 s",
     "time per step: 12ms, loss", "step 3 host=10.0.0.1 eta: 1:30", "step 1 loss=2 " + "x" * 1000],
)  # fmt: skip
def test_other_lines_have_no_numbers(text: str) -> None:
    assert parse_printed(printed(text)) is None


# Event files.


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """An event file with numbers, a text and a histogram."""
    with SummaryWriter(str(tmp_path / "runs")) as writer:
        writer.add_text("words", "hello")
        for step in range(3):
            writer.add_scalar("loss", 1 / (step + 1), step)
        writer.add_scalar("new style", 0.5, 4, new_style=True)
        writer.add_scalar("broken", math.nan, 5)
    return next((tmp_path / "runs").iterdir())


def test_numbers_are_read_and_everything_else_is_passed_over(written: Path) -> None:
    found = [(one.tag, one.step, one.value) for one in EventFile(written).read()]
    assert found[:4] == [("loss", 0, 1.0), ("loss", 1, 0.5), ("loss", 2, pytest.approx(1 / 3)), ("new style", 4, 0.5)]
    assert found[4][:2] == ("broken", 5)
    assert math.isnan(found[4][2])


def test_a_file_that_is_being_written_is_read_record_by_record(written: Path, tmp_path: Path) -> None:
    data, growing = written.read_bytes(), tmp_path / "growing"
    file, found = EventFile(growing), []
    for end in range(0, len(data) + 1, 7):
        growing.write_bytes(data[:end])
        found += list(file.read())
    growing.write_bytes(data)
    found += list(file.read())
    assert [(one.tag, one.step) for one in found] == [(one.tag, one.step) for one in EventFile(written).read()]
    assert list(file.read()) == []


@pytest.mark.parametrize("place", [3, 9, 20, -2])
def test_a_damaged_record_ends_the_reading_of_its_file(written: Path, place: int) -> None:
    data = bytearray(written.read_bytes())
    data[place] ^= 0xFF
    written.write_bytes(bytes(data))
    file = EventFile(written)
    found = list(file.read())
    assert file.is_damaged
    assert len(found) == (4 if place < 0 else 0)
    assert list(file.read()) == []


def test_checksums_are_not_those_in_pure_python(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [(one.tag, one.step) for one in EventFile(written).read()]
    assert expected
    monkeypatch.setitem(sys.modules, "tensorboard.compat.tensorflow_stub.pywrap_tensorflow", None)
    assert [(one.tag, one.step) for one in EventFile(written).read()] == expected


def test_a_record_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    length = struct.pack("<Q", 2**62)
    (tmp_path / "it").write_bytes(length + struct.pack("<I", masked_crc32c(length)) + b"x" * 100)
    assert list(EventFile(tmp_path / "it").read()) == []


@pytest.mark.usefixtures("processes")
def test_files_are_found_in_folders_and_where_a_worker_has_them_open(tmp_path: Path) -> None:
    (tmp_path / "code" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code" / "deep" / "events.out.tfevents.1").touch()
    (tmp_path / "code" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "events.out.tfevents.2").touch()
    assert found_event_files([tmp_path / "code"]) == [tmp_path / "code" / "deep" / "events.out.tfevents.1"]
    script = "import sys; file = open(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
    starter = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], env={'RANK': '1'})"
    command = [sys.executable, "-c", starter, script, str(tmp_path / "elsewhere" / "events.out.tfevents.2")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        assert open_event_files(launcher.pid) == [(tmp_path / "elsewhere" / "events.out.tfevents.2", "1")]
        assert launcher.stdin is not None
        launcher.stdin.close()
    assert open_event_files(None) == []


# The metrics of a run.


def a_resumed_generation(number: int) -> Generation:
    return Generation(number, a_generation(number).members, 29500, "resumed", step=1)


Begun = tuple[Run, ProgramMetrics, Callable[[int], Control]]


@pytest.fixture
def begun(directory_store: Store, tmp_path: Path) -> Begun:
    run = new_run(directory_store)
    metrics = ProgramMetrics(run, [tmp_path / "code"], Told())

    def begin(number: int) -> Control:
        control = Control(tmp_path / f"control-{number}")
        metrics.begin(a_generation(1) if number == 1 else a_resumed_generation(number), control, lambda: None)
        return control

    return run, metrics, begin


def log(control: Control, *steps: int | None, **numbers: float) -> None:
    with control.numbers.open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "time": time.time(), "values": numbers}) + "\n")


def test_a_line_counts_once_it_is_complete(begun: Begun) -> None:
    run, metrics, begin = begun
    control = begin(1)
    log(control, 0, 1, loss=1.0)
    with control.numbers.open("a") as file:
        file.write('{"step": 2, "time": 1.0,')
        file.flush()
        metrics.flush()
        assert list(values(read_points(run))) == [0, 1]
        file.write(' "values": {"loss": 0.5}}\n')
    metrics.flush()
    assert values(read_points(run))[2] == {"loss": 0.5}


def test_a_generation_replaces_what_an_earlier_one_did_after_its_checkpoint(begun: Begun) -> None:
    run, metrics, begin = begun
    log(begin(1), *range(10), loss=1.0)
    metrics.flush()
    control = begin(2)
    log(control, 0, parameters=5.0)  # before it has read its checkpoint
    log(control, 6, 7, loss=2.0)
    metrics.flush()
    found = values(read_points(run))
    assert [found[step]["loss"] for step in sorted(found)] == [1.0] * 6 + [2.0] * 2


def test_calls_without_a_step_continue_after_a_restart(begun: Begun) -> None:
    run, metrics, begin = begun
    log(begin(1), None, None, loss=1.0)
    metrics.flush()
    log(begin(2), None, loss=2.0)
    metrics.flush()
    assert {step: one["loss"] for step, one in values(read_points(run)).items()} == {0: 1.0, 1: 1.0, 2: 2.0}


def a_checkpoint(reached: int | None) -> Checkpoint:
    return Checkpoint(FORMAT, "x", 1, 1, None, (), reached)


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        ({"loss": 1}, "'loss' is back at step 1 after step 60"),
        ({"loss": 30}, "'loss' is back at step 30 after step 60"),
        ({"epoch loss": 1}, "'epoch loss' is back at step 1 after step 3"),
        ({"loss": 31}, None),
        ({"loss": 0, "epoch loss": 3}, None),  # before it has read its checkpoint
        ({"epoch loss": 4, "new": 1}, None),
    ],
)
def test_a_program_that_starts_from_the_beginning_after_a_restore_is_warned_about_once(
    directory_store: Store, tmp_path: Path, steps: dict[str, int], warned: str | None
) -> None:
    """Each name counts in its own way; what came after the checkpoint does not count."""
    told = Told()
    metrics = ProgramMetrics(new_run(directory_store), [tmp_path / "code"], told)
    before, after = Control(tmp_path / "before"), Control(tmp_path / "after")
    metrics.begin(a_generation(1), before, lambda: None)
    reached = [metrics.reached]
    log(before, *range(101), loss=1.0)
    log(before, 3, **{"epoch loss": 1.0})
    metrics.flush()
    reached.append(metrics.reached)
    metrics.begin(a_resumed_generation(2), after, lambda: None, a_checkpoint(reached=60))
    for name, step in steps.items():
        log(after, step, **{name: 1.0})
    metrics.flush()
    assert [*reached, metrics.reached] == [None, 100, max(steps.values())]
    said = [text.partition("the program did not resume: ")[2].partition(";")[0] for _, text in told]
    assert said == ([] if warned is None else [warned])


@pytest.mark.parametrize(
    ("first", "is_warned"),
    [
        ("Epoch [1/5], Step [100/600], Loss: 2.5", True),
        ("Epoch [4/5], Step [100/600], Loss: 2.5", False),
        ("{'epoch': 4, 'step': 100, 'loss': 2.5}", False),
    ],
)
def test_steps_that_each_epoch_counts_anew_do_not_say_that_a_program_did_not_resume(
    directory_store: Store, tmp_path: Path, first: str, is_warned: bool
) -> None:
    told = Told()
    metrics = ProgramMetrics(new_run(directory_store), [tmp_path / "code"], told)
    metrics.begin(a_generation(1), Control(tmp_path / "before"), lambda: None)
    metrics.hear(printed("Epoch [3/5], Step [600/600], Loss: 2.6"))
    metrics.flush(is_complete=True)
    metrics.begin(a_resumed_generation(2), Control(tmp_path / "after"), lambda: None, a_checkpoint(reached=600))
    metrics.hear(printed(first, generation=2))
    metrics.flush(is_complete=True)
    assert any("did not resume" in text for _, text in told) == is_warned


def test_event_files_of_this_generation_are_read_and_those_from_before_are_not(begun: Begun, tmp_path: Path) -> None:
    run, metrics, begin = begun
    with SummaryWriter(str(tmp_path / "code" / "old")) as writer:
        writer.add_scalar("loss", 9.0, 1)
    control = begin(1)
    with SummaryWriter(str(tmp_path / "code" / "train")) as writer:
        writer.add_scalar("loss", 1.0, 1)
    metrics.flush()
    with SummaryWriter(str(tmp_path / "code" / "validation")) as writer:
        writer.add_scalar("loss", 2.0, 1)
    log(control, 1, accuracy=0.5)
    metrics.flush(is_complete=True)
    assert values(read_points(run)) == {1: {"loss": 1.0, "validation/loss": 2.0, "accuracy": 0.5}}


def test_a_commit_has_all_that_was_printed_before_it(begun: Begun, tmp_path: Path) -> None:
    """A run that resumes from it never logs these steps again."""
    run, metrics, begin = begun
    begin(1)
    workspace = Workspace(run, tmp_path / "code", Told())
    keeping = ProgramCheckpoints(run, tmp_path / "ckpt", CheckpointSettings(), Told(), workspace, metrics)
    keeping.restore(1, is_first=True)
    for step in range(3):
        metrics.hear(printed(f"step {step}: loss 1.5"))
        keeping.commit(1)
    assert list(values(read_points(run))) == [0, 1, 2]


def test_what_rank_0_prints_counts_if_the_program_logs_nothing_else(begun: Begun, tmp_path: Path) -> None:
    run, metrics, begin = begun
    begin(1)
    for step in range(3):
        metrics.hear(printed(f"step {step}: loss {4.5 - step}", moment=10.0 + step))
        metrics.hear(printed(f"step {step}: loss 9", rank=1))
        metrics.hear(printed(f"step {step}: loss 9", generation=7))
    metrics.flush(is_complete=True)
    assert values(read_points(run)) == {0: {"loss": 4.5}, 1: {"loss": 3.5}, 2: {"loss": 2.5}}
    log(begin(2), 3, accuracy=0.5)
    metrics.hear(printed("step 3: loss 1.5", generation=2))
    metrics.flush(is_complete=True)
    assert values(read_points(run))[3] == {"accuracy": 0.5}
    begin(3)
    metrics.hear(printed("step 4: loss 0.5", generation=3))
    with SummaryWriter(str(tmp_path / "code" / "train")):  # nothing is in it yet
        metrics.flush(is_complete=True)
    assert 4 not in values(read_points(run))


def test_numbers_wait_for_a_store_that_is_away(directory_store: Store, tmp_path: Path) -> None:
    store = FaultyStore(directory_store)
    run = new_run(store)
    metrics = ProgramMetrics(run, [], Told())
    controls = [Control(tmp_path / f"control-{number}") for number in (1, 2)]
    store.refuse("put")
    for number, control in enumerate(controls, start=1):  # the second generation begins before the first is written
        metrics.begin(a_generation(number), control, lambda: None)
        log(control, number, loss=1.0)
        with pytest.raises(StoreError):
            metrics.flush()
    store.refuse()
    metrics.flush()
    assert list(values(run.points().read())) == [1, 2]
