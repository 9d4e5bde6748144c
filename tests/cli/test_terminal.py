"""Escape sequences and markup in what a command prints: no text from a store or a host steers the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from packtrain.cli.common import hints
from packtrain.errors import harmless
from packtrain.run.records import Event, LogLine, Point, Result
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.store.directory import DirectoryStore
from parts.runs import a_generation, a_lease, new_run, program_job

# A window title, a cleared screen, text that goes backward, a C1 control, and a link and a style of Rich's markup.
ATTACK = "\x1b]0;owned\x07 \x1b[2J\x9b2J \u202e \x1b[31mred\x1b[0m [link=http://evil]x[/link] [bold]y"
ESCAPED = r"\x1b]0;owned\x07 \x1b[2J\x9b2J \u202e red [link=http://evil]x[/link] [bold]y"
# What Rich itself writes: styles, the cursor of a live line, erased lines.
RICH = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*A|\x1b\[2K|\r")


def in_a_terminal(*arguments: str, store: Store, columns: int = 1000, encoding: str = "utf-8") -> str:
    """Return everything that a command writes to its terminal."""
    inner, outer = pty.openpty()
    command = [sys.executable, "-m", "packtrain", *arguments, "--store", store.url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen(command, stdin=outer, stdout=outer, stderr=outer, env=environment) as process:
        os.close(outer)
        shown = b""
        with suppress(OSError):  # the terminal of a process that ended
            while piece := os.read(inner, 65536):
                shown += piece
        process.wait(timeout=60)
    os.close(inner)
    return shown.decode(encoding)


@pytest.fixture
def attacked(directory_store: Store) -> Run:
    """A run whose records hold the attack wherever a text is stored."""
    run = new_run(directory_store, program_job(program=["train.py", f"{ATTACK}\nfake line"]))
    run.propose(replace(a_generation(1, "a"), reason=ATTACK))
    run.renew(replace(a_lease("a"), hostname=ATTACK, left=True))
    events, points, lines = run.event_writer("a"), run.point_writer("a"), run.log_writer("a")
    events.append(Event(1.0, "warning", f"{ATTACK}\nfake line", 1))
    points.append(Point("valid", 1, 1, 1.0, {ATTACK: 1.0}))
    lines.append(LogLine(1.0, 1, "a", 0, "out", f"{ATTACK}\nfake line"))
    for writer in (events, points, lines):
        writer.flush()
    run.finish(Result("failed", ATTACK, 1, 1.0, {f"test.{ATTACK}": 1.0}, {f"test.{ATTACK}": ATTACK}))
    return run


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "command", [("ls",), ("show", "job"), ("logs", "job"), ("ls", "--json"), ("show", "job", "--json")]
)
def test_escape_sequences_in_a_store_do_not_reach_the_terminal(
    command: tuple[str, ...], attacked: Run, directory_store: Store
) -> None:
    shown = in_a_terminal(*command, store=directory_store)
    text = RICH.sub("", shown)
    assert harmless(text, keep="\n\t") == text
    assert "\nfake line" not in text
    if "--json" in command:
        assert "\u202e" in json.dumps(json.loads(text), ensure_ascii=False), "scripts get the text as it is"
    elif command[0] != "ls":
        assert ESCAPED in text.replace(r"\nfake line", "")
    assert "\x1b]8" not in shown, "markup made a link"


@pytest.mark.usefixtures("processes")
def test_an_error_is_escaped(directory_store: Store) -> None:
    new_run(directory_store)
    shown = in_a_terminal("show", ATTACK, store=directory_store)
    assert "owned" in shown
    assert harmless(shown.replace("\r", ""), keep="\n\t") == shown.replace("\r", "")


def test_hints_can_be_pasted_whatever_the_store_is_called(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "my runs; rm -rf ~")
    store.create()
    (line,) = hints(new_run(store), "stop")
    assert line == f"  stop:    packtrain stop job-1 --store '{store.url}'"


def test_text_of_other_languages_is_printed_as_it_is() -> None:
    for text in ("Größe\u00a0😀", "おはよう\u3000世界", "क\u200dष", "👩\u200d🔬"):
        assert harmless(text) == text


@pytest.mark.usefixtures("processes")
def test_a_terminal_that_is_not_utf_8_gets_escapes_for_what_it_cannot_show(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    run = new_run(directory_store, program_job("mine"))
    run.finish(Result("failed", "Gr\u00f6\u00dfe \u5927", 1, 1.0))
    shown = in_a_terminal("show", store=directory_store, encoding="latin-1")
    assert "Gr\u00f6\u00dfe \\u5927" in shown


@pytest.mark.usefixtures("processes")
def test_an_error_breaks_between_words(directory_store: Store) -> None:
    shown = in_a_terminal("show", "nothing", store=directory_store, columns=40)
    assert all(len(line) <= 40 or " " not in line.strip() for line in shown.splitlines())
    assert " ".join(shown.split()).startswith("packtrain: ")
    assert len(shown.splitlines()) > 1
