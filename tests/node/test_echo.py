"""The output of workers on their node's own, for those who read `kubectl logs` or Slurm's file."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.node import echo
from packtrain.node.echo import OutputEcho
from packtrain.pack.build import PlainProgress
from packtrain.process import say
from packtrain.run.records import LogLine
from parts.sandbox import make_sandbox


def a_line(text: str, rank: int | None = 0) -> LogLine:
    return LogLine(0.0, 1, "node-a", rank, "out", text)


def test_lines_are_printed_in_order_after_the_rank_that_wrote_them(capsys: pytest.CaptureFixture[str]) -> None:
    printer = OutputEcho("job-1")
    for line in (a_line("one"), a_line("two\n[rank 9] forged", rank=3), a_line("torch", rank=None)):
        printer.add(line)
    printer.close()
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] one",
        "[rank 3] two\\n[rank 9] forged",
        "[launcher] torch",
    ]


def test_output_that_is_too_long_ends_with_the_command_that_has_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    printer = OutputEcho("job-1", limit_bytes=100)
    for number in range(50):
        printer.add(a_line(f"line {number}"))
    printer.close()
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank 0] line {number}" for number in range(len(lines))]
    assert 0 < sum(map(len, lines)) < 100
    assert "packtrain logs job-1" in last


def test_a_reader_that_is_stuck_does_not_hold_the_node_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released, printed = threading.Event(), list[str]()

    def stuck(text: str) -> None:
        released.wait()
        printed.append(text)

    monkeypatch.setattr(echo, "say", stuck)  # as a full pipe
    printer = OutputEcho("job-1")
    for number in range(20_000):
        printer.add(a_line(str(number)))
    released.set()
    printer.close()
    assert printed[0] == "[rank 0] 0"
    assert len(printed) < 20_000


def test_half_of_a_pipe_stays_free_for_the_lines_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        printer = OutputEcho("job-1")
        for number in range(500):
            printer.add(a_line(f"{number:1000}"))
        say("x" * 20_000)  # nobody reads, and it returns
        printer.close()
    with os.fdopen(read, encoding="utf-8") as text:
        lines = text.read().splitlines()
    assert "x" * 20_000 in lines
    assert 10 < len(lines) < 100


def test_each_node_prints_what_its_workers_write_and_the_first_one_the_steps(
    training: None, processes: None, tmp_path: Path, monkeypatch: Any
) -> None:
    sandbox = make_sandbox(tmp_path)
    with (tmp_path / "code" / "paced.py").open("a") as code:
        code.write("\nprint('loaded', flush=True)\n")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = create(check(load(tmp_path / "job.yaml"), PlainProgress(lambda _: None)))
    assert [node.wait(150) for node in (sandbox.add_node(run.name), sandbox.add_node(run.name))] == [0, 0]
    texts = [(tmp_path / f"node-{number}.txt").read_text() for number in (0, 1)]
    assert sorted(re.findall(r"^\[rank \d\] loaded$", text, re.MULTILINE) for text in texts) == [
        ["[rank 0] loaded"], ["[rank 1] loaded"],
    ]  # fmt: skip
    assert sorted("[train] step " in text for text in texts) == [False, True]
