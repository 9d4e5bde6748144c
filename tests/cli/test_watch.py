"""A run in the terminal while it trains."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.cli.watch import Canvas, _fitting, board, chart
from packtrain.errors import EXIT_FAILED, harmless
from packtrain.report.live import LiveRun, RunView
from packtrain.report.page import Series
from packtrain.run.records import Event, Gpu, LogLine, Point, Result, Telemetry
from packtrain.run.run import Run
from packtrain.store import Store
from parts.runs import MEASURED, a_generation, a_lease, new_run, program_job, recipe_job

ATTACK = "\x1b]0;owned\x07 \x1b[2J\x9b2J \u202e 世界 [bold]y\nfake line" + "x" * 500
SIZES = [(80, 24), (100, 30), (160, 50), (200, 60), (40, 10), (20, 3), (200, 24), (80, 60)]


@pytest.fixture
def run(directory_store: Store) -> Run:
    """A run of two machines with everything that can be drawn, and the attack wherever a text is stored."""
    run = new_run(directory_store, recipe_job(budget={"dollars": 8}, fleet={"local": {}, "price": 2.0}))
    run.propose(a_generation(1, "a", "b"))
    gpu = Gpu("A100", 0.9, 30 << 30, 40 << 30, 300.0, 60.0)
    for name in "ab":
        run.renew(a_lease(name, telemetry=Telemetry(0.5, 0.25, 1 << 30, 1 << 40, 1e6, 1e6, (gpu,))))
    points, events, lines = run.point_writer("000001-rank-0"), run.event_writer("a"), run.log_writer("a")
    points.append(Point("start", 1, 0, 9.0, {}))
    for step in range(1, 9):
        values = {"loss": 9.0 - step, "samples": 64.0, "forward_seconds": 0.4, "data_seconds": 0.6}
        points.append(Point("train", 1, step, 10.0 + step, {**MEASURED, **values}))
        points.append(Point("valid", 1, step, 10.0 + step, {"bleu": 2.0 * step, ATTACK[:200]: 1.0}))
        events.append(Event(float(step), "warning", ATTACK, 1))
        lines.append(LogLine(float(step), 1, "a", 0, "out", ATTACK))
    for writer in (points, events, lines):
        writer.flush()
    return run


@pytest.fixture
def view(run: Run) -> RunView:
    return LiveRun(run).look()


def plain(lines: Sequence[Text]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("trouble", ["", "the store does not answer"])
def test_the_picture_fills_a_terminal_of_any_size_exactly(view: RunView, trouble: str, width: int, height: int) -> None:
    lines = board(view, trouble, width, height)
    assert [line.cell_len for line in lines] == [width] * height
    assert harmless(plain(lines), keep="\n") == plain(lines)


def test_a_small_terminal_has_every_part(view: RunView) -> None:
    shown = plain(board(view, "", 80, 24))
    for words in ("job-1  ● ", "80%", "$0.00", "bleu 16.00", "data 60%", "loss", "valid bleu", "machines",
                  "2 working", "GPU  90%", "events", "warning", "output", "q quits"):  # fmt: skip
        assert words in shown


def test_a_store_that_is_away_is_said_above_what_was_last_seen(view: RunView) -> None:
    shown = plain(board(view, "the store does not answer", 80, 24))
    assert "the store does not answer" in shown
    assert "valid bleu" in shown
    assert "the store does not answer" in plain(board(None, "the store does not answer", 80, 24))


def test_a_program_without_curves_has_room_for_its_output(directory_store: Store) -> None:
    run = new_run(directory_store, program_job())
    writer = run.log_writer("a")
    for number in range(30):
        writer.append(LogLine(float(number), 1, "a", 0, "out", f"line {number}"))
    writer.flush()
    shown = plain(board(LiveRun(run).look(), "", 80, 24))
    assert "line 29" in shown
    assert "line 20" in shown


# Curves.


def test_a_line_is_drawn_from_corner_to_corner() -> None:
    canvas = Canvas(2, 1)
    canvas.line([(0, 3), (3, 0)], "cyan")
    assert [row.plain for row in canvas.rows()] == ["⡠⠊"]


@pytest.mark.parametrize("values", [[1.0], [3.0, 3.0], [-1e308, 1e308], [0.0, 5e-324], [1e12, 2e12]])
def test_a_chart_has_its_size_whatever_its_values(values: list[float]) -> None:
    lines = chart("loss", [Series("train", [(float(step), value) for step, value in enumerate(values)])], 40, 8)
    assert len(lines) == 8
    assert all(line.cell_len <= 40 for line in lines[1:])


def test_a_chart_names_its_lines_and_their_last_values() -> None:
    both = [Series("train", [(0.0, 9.0), (10.0, 2.0)]), Series("valid", [(10.0, 3.0)], True)]
    lines = chart("loss", both, 60, 8)
    assert lines[0].plain == "loss  ● train 2  ● valid 3"
    assert lines[1].plain.strip().startswith("9 ┤")
    assert lines[-1].plain.strip().startswith("└0 ─")


# The command.


class Terminal:
    """`packtrain show -w` in a terminal of its own."""

    def __init__(self, run: Run, columns: int = 80, rows: int = 24) -> None:
        self._outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        command = [sys.executable, "-m", "packtrain", "show", "-w", run.name, "--store", run.store.url]
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env={**environment, "TERM": "xterm-256color"},
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - Ctrl-C needs it
        )  # fmt: skip
        os.close(inner)
        self.shown = b""

    def until(self, words: str) -> None:
        while words.encode() not in self.shown:
            self.shown += os.read(self._outer, 65536)

    def type(self, keys: str) -> None:
        os.write(self._outer, keys.encode())

    def end(self) -> tuple[int, str]:
        """Return the exit code, and what is on the screen after the picture is gone."""
        with suppress(OSError):  # the terminal of a process that ended
            while piece := os.read(self._outer, 65536):
                self.shown += piece
        os.close(self._outer)
        code = self.process.wait()
        return code, self.shown.decode().rpartition("\x1b[?1049l")[2]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("keys", "exit_code"), [("q", 0), ("\x03", 130)], ids=["q", "ctrl-c"])
def test_a_person_quits_and_the_run_keeps_running(run: Run, keys: str, exit_code: int) -> None:
    terminal = Terminal(run)
    terminal.until("quits; the run keeps running")
    terminal.until("valid bleu")
    terminal.type(keys)
    code, after = terminal.end()
    assert (code, run.result(), run.stop_request()) == (exit_code, None, None)
    assert "job-1" in after
    assert "packtrain" in after
    assert b"\x1b[?1049h" in terminal.shown, "the picture is on a screen of its own"
    steering = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", terminal.shown).replace(b"\r", b"").decode()
    assert harmless(steering, keep="\n\t") == steering


@pytest.mark.usefixtures("processes")
def test_it_ends_with_the_run_and_its_exit_code(run: Run) -> None:
    terminal = Terminal(run, 160, 50)
    terminal.until("valid bleu")
    run.finish(Result("failed", "out of memory", 8, 1.0))
    code, after = terminal.end()
    assert code == EXIT_FAILED
    assert "failed: out of memory" in after


def test_where_there_is_no_terminal_lines_are_printed(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    run.finish(Result("finished", "done", 1, 1.0))
    directory_store.put(run.key("report.html"), b"")
    done = CliRunner().invoke(app, ["show", "-w", run.name, "--store", directory_store.url])
    assert (done.exit_code, "\x1b" in done.output) == (0, False)
    assert "job-1  finished: done" in done.output


def test_watching_and_json_exclude_each_other(directory_store: Store) -> None:
    run = new_run(directory_store)
    done = CliRunner().invoke(app, ["show", "-w", "--json", run.name, "--store", directory_store.url])
    assert "--watch and --json exclude each other" in str(done.exception)


def test_parts_for_which_there_is_no_room_are_left_out_whole() -> None:
    assert _fitting(["step 1 of 2", "5 min left", "$3"], 80) == "step 1 of 2  5 min left  $3"
    assert _fitting(["step 1 of 2", "5 min left", "$3"], 16) == "step 1 of 2  $3"
