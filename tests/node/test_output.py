"""The output of workers, in the store and on the output of their node."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.node import output
from packtrain.node.output import FileTail, LogShipper, OutputEcho
from packtrain.pack.build import PlainProgress
from packtrain.process import say
from packtrain.run.records import LogLine
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from parts.sandbox import make_sandbox


class Shipping:
    """A shipper, the folder that it follows, and a reader at the other end."""

    def __init__(self, store: Store, folder: Path, first_rank: int = 0) -> None:
        run = Run(store, "job-1")
        self.folder = folder
        folder.mkdir()
        self._writer, self._reader = run.log_writer("node-a"), run.log_lines()
        self._shipper = LogShipper(folder, self._writer, "node-a", 3, first_rank)

    def write(self, data: bytes, name: str = "run/attempt_0/0/stdout.log") -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("ab") as file:
            file.write(data)

    def arrived(self, is_complete: bool = False) -> list[LogLine]:
        self._shipper.ship(is_complete)
        self._writer.flush()
        return self._reader.read()

    def texts(self, is_complete: bool = False) -> list[str]:
        return [line.text for line in self.arrived(is_complete)]


@pytest.fixture
def shipping(directory_store: Store, tmp_path: Path) -> Shipping:
    return Shipping(directory_store, tmp_path / "logs")


def test_complete_lines_are_shipped_once(shipping: Shipping) -> None:
    assert shipping.texts() == []
    shipping.write(b"one\ntwo\n")
    assert shipping.texts() == ["one", "two"]
    assert shipping.texts() == []


def test_an_incomplete_line_is_not_shipped_yet(shipping: Shipping) -> None:
    shipping.write(b"one\nhalf a ")
    assert shipping.texts() == ["one"]
    shipping.write(b"line\n\n")
    assert shipping.texts() == ["half a line", ""]


def test_a_last_line_without_a_newline_is_shipped_at_the_end(shipping: Shipping) -> None:
    shipping.write(b"one\nkilled in the mid")
    assert shipping.texts(is_complete=True) == ["one", "killed in the mid"]
    assert shipping.texts(is_complete=True) == []


def test_only_the_last_state_of_a_progress_bar_is_kept(shipping: Shipping) -> None:
    shipping.write(b"\r 10%\r 50%")
    assert shipping.texts() == []
    shipping.write(b"\r100%\nwindows\r\n\rgone back\r\n")
    assert shipping.texts() == ["100%", "windows", "gone back"]


@pytest.mark.parametrize("end", [b"", b"\r"])
def test_a_progress_bar_that_never_ends_its_line_takes_no_memory(end: bytes, tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    tail = FileTail(log, 0, "err")
    for percent in range(100):
        with log.open("ab") as file:
            file.write(b"\r %d%%" % percent + end)
        assert list(tail.lines(is_complete=False)) == []
        assert len(tail.unfinished) < 10
    assert list(tail.lines(is_complete=True)) == [" 99%"]


def test_bytes_that_are_not_text_do_not_stop_the_rest(shipping: Shipping) -> None:
    shipping.write(b"\xff\xfe\n" + "ä".encode()[:1])
    shipping.write("ä".encode()[1:] + b"\nafter\n")
    assert shipping.texts() == ["\ufffd\ufffd", "ä", "after"]


def test_lines_carry_their_generation_node_rank_and_stream(directory_store: Store, tmp_path: Path) -> None:
    """Ranks are counted over all machines: the first worker of this one is number 4."""
    shipping = Shipping(directory_store, tmp_path / "logs", first_rank=4)
    shipping.write(b"a\n", "run/attempt_0/0/stdout.log")
    shipping.write(b"b\n", "run/attempt_0/11/stderr.log")
    shipping.write(b"c\n", "launcher.log")
    lines = {line.text: line for line in shipping.arrived()}
    assert {text: (line.rank, line.stream) for text, line in lines.items()} == {
        "a": (4, "out"),
        "b": (15, "err"),
        "c": (None, "err"),
    }
    assert {(line.node, line.generation) for line in lines.values()} == {("node-a", 3)}


def test_files_that_appear_later_are_followed(shipping: Shipping) -> None:
    shipping.write(b"first\n", "run/attempt_0/0/stdout.log")
    assert shipping.texts() == ["first"]
    shipping.write(b"second\n", "run/attempt_0/1/stdout.log")
    assert shipping.texts() == ["second"]


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"a", "ü".encode(), b"\n", b"bc\n", b"\r\n", b"\xff", None]), max_size=25))
def test_no_line_is_lost_or_repeated_however_the_output_is_cut(tmp_path_factory, pieces) -> None:  # type: ignore[no-untyped-def]
    """None stands for a look at the file between two pieces."""
    folder = tmp_path_factory.mktemp("shipping")
    shipping = Shipping(open_store(str(folder / "store"), create=True), folder / "logs")
    texts = []
    for piece in pieces:
        if piece is None:
            texts += shipping.texts()
        else:
            shipping.write(piece)
    texts += shipping.texts(is_complete=True)
    written = b"".join(piece for piece in pieces if piece is not None)
    lines = written.split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    assert texts == [line.rstrip(b"\r").decode(errors="replace") for line in expected]


# On the output of the node.


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

    monkeypatch.setattr(output, "say", stuck)  # as a full pipe
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
