"""Completion: what shells offer for a word, and that real shells do so."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from packtrain.cli import app
from packtrain.cli.completion import SHELLS, cached_commands, cached_schema, candidates, fields, values
from packtrain.errors import Mistake
from parts.runs import write_files

Offered = Callable[..., list[str]]


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Offered:
    """Returns what is offered for the last of some words, in a directory with a job and three runs."""
    write_files(tmp_path, {"job.yaml": b"name: en-de\nrecipe: translate # mine\n", "store/not a run": b""})
    for name in ("en-de-1", "en-de-2", "chat-1", ".hidden"):
        (tmp_path / "store" / "runs" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACKTRAIN_STORE", raising=False)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(cache))
    tree = cached_commands(typer.main.get_command(app))
    return lambda *words: [one.value for one in candidates(tree, words)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that all tests share: importing all commands takes a second, and so does making the schema."""
    return tmp_path_factory.mktemp("cache")


def test_verbs_are_offered_with_their_help(offered: Offered) -> None:
    assert {"init", "run", "completion", "volume"} <= set(offered(""))
    assert offered("re") == ["resume", "report"]
    [one] = candidates(cached_commands(typer.main.get_command(app)), ["resum"])
    assert one.help == "Resume a run from its last checkpoint."
    assert offered("volume", "") == ["snapshot"]
    assert offered("nothing", "") == []


def test_options_are_offered_unless_they_are_hidden(offered: Offered) -> None:
    assert offered("run", "--d") == ["--detach", "--dry-run"]
    assert "--mlflow" in offered("mirror", "--") and "--store-id" not in offered("mirror", "--")
    assert offered("ui", "--no") == ["--no-open"]
    assert {"--store", "--help"} <= set(offered("ls", ""))


def test_runs_of_the_store_are_offered_where_a_run_is_named(offered: Offered, tmp_path: Path) -> None:
    assert offered("show", "") == offered("compare", "en-de-1", "") == ["chat-1", "en-de-1", "en-de-2"]
    assert offered("predict", "en") == offered("bundle", "--run", "en") == ["en-de-1", "en-de-2"]
    (tmp_path / "other/runs/else-1").mkdir(parents=True)
    assert offered("show", "--store", "other", "") == offered("show", "--store=other", "") == ["else-1"]
    assert offered("run", "") == offered("cp", "chat-1", "") == []  # files


def test_choices_of_an_option_are_offered(offered: Offered) -> None:
    assert offered("export", "--format", "") == ["ctranslate2", "onnx"]
    assert offered("export", "--checkpoint=b") == ["--checkpoint=best"]
    assert offered("init", "c") == ["caption", "chat", "classify"]
    assert offered("completion", "") == list(SHELLS)


def test_fields_of_the_job_and_their_values_are_offered(offered: Offered) -> None:
    set_ = ("run", "job.yaml", "--set")
    assert offered(*set_, "tr") == ["train."]
    assert offered(*set_, "train.mi") == ["train.micro_batch=", "train.min_scale="]
    assert offered(*set_, "train.opt") == ["train.optimizer.", "train.optimizer="]
    assert offered(*set_, "train.optimizer.adam.") == [
        f"train.optimizer.adam.{name}=" for name in ("decay", "betas", "epsilon")
    ]
    assert offered(*set_, "train.precision=b") == ["train.precision=bf16"]
    assert offered(*set_, "data.joint=") == ["data.joint=true", "data.joint=false"]
    assert offered(*set_, "model=") == [f"model={size}" for size in ("tiny", "small", "base", "big")]
    assert offered(*set_, "model.he") == ["model.heads="]
    assert offered("sweep", "job.yaml", "--grid", "fleet.work") == ["fleet.workers="]
    assert offered("run", "--set=budget.h") == ["--set=budget.hours="]
    assert offered(*set_, "no.such.") == offered(*set_, "train.seed=") == []


def test_a_pipe_in_place_of_the_job_file_does_not_block(offered: Offered, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(offered("run", "pipe", "--set", "tr")), daemon=True)
    thread.start()
    thread.join(30)
    assert found == ["train."]


def test_a_name_that_no_file_can_have_does_not_end_the_offers(offered: Offered) -> None:
    assert offered("run", "a" * 5000, "--set", "tr") == ["train."]


def test_fields_of_a_schema_are_found_for_a_recipe(offered: Offered) -> None:
    schema: Any = cached_schema()
    assert fields(schema, "fleet.ssh").keys() >= {"hosts", "machines"}
    assert fields(schema, "data.train.0").keys() >= {"bitext", "weight"}
    assert "cell" in fields(schema, "model", "caption")
    assert fields(schema, "train.batch") == {}
    assert values(schema, fields(schema, "", "chat")["model"]) == ["tiny", "small", "full"]


def test_the_schema_is_kept_for_the_same_code_only(
    offered: Offered, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cached_schema()
    [kept] = cache.glob("*.schema.json")
    monkeypatch.setattr("packtrain.cli.template.current_schema", lambda: {"other": "code"})
    assert cached_schema() == made
    monkeypatch.setattr("packtrain.cli.completion.identity", lambda: "1.0-abc")
    assert cached_schema() == {"other": "code"}
    assert not kept.exists()


def complete(words: list[str], directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packtrain", "completion", "bash", "--", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("processes")
def test_nothing_is_said_where_a_store_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = complete(["show", "--store", "s3://bucket", ""], tmp_path, AWS_ENDPOINT_URL=address, **keys)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.usefixtures("processes")
def test_completion_imports_nothing_heavy(offered: Offered, tmp_path: Path) -> None:
    cached_schema()
    program = (
        "import sys, typer, packtrain.cli as cli\n"
        "from packtrain.cli.completion import cached_commands, candidates\n"
        "tree = cached_commands(typer.main.get_command(cli.app))\n"
        "found = list(candidates(tree, ['run', 'job.yaml', '--set', 'train.']))\n"
        "print(len(found) > 10, [name for name in ('pydantic', 'numpy', 'torch', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True []\n", done.stderr


def test_an_unknown_shell_is_refused() -> None:
    with pytest.raises(Mistake, match=r"unknown shell 'bsh'; did you mean 'bash'\?"):
        app(["completion", "bsh"], standalone_mode=False)


# Real shells.


@pytest.fixture
def shell_directory(offered: Offered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a job and runs, and a `packtrain` on the path."""
    program = write_files(
        tmp_path, {"bin/packtrain": f'#!/bin/sh\nexec "{sys.executable}" -m packtrain "$@"\n'.encode()}
    )
    program["bin/packtrain"].chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    cached_schema()
    return tmp_path


@contextmanager
def typing_in(command: list[str]) -> Iterator[Callable[[str, str], None]]:
    """Start a shell in a terminal; what is yielded types some keys, and waits until a text shows."""
    terminal, inner = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
    )
    os.close(inner)
    shown = b""

    def type_keys(keys: str, expected: str) -> None:
        nonlocal shown
        shown = b""
        os.write(terminal, keys.encode())
        deadline = time.monotonic() + 120
        while expected not in re.sub("[\x07\r]", "", shown.decode(errors="replace")):
            ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{expected} is not in {shown!r}"
            shown += os.read(terminal, 4096)

    try:
        yield type_keys
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


CLEAR = "\x15"  # Ctrl-U empties the line


def complete_in(shell: str, start: list[str], before: str = "") -> None:
    with typing_in(start) as type_keys:
        # The quotes keep what is typed from being taken for what is printed.
        type_keys(f"{before}packtrain completion {shell} > script; source ./script; echo so''urced\n", "sourced")
        type_keys("packtrain resu\t", "packtrain resume ")
        type_keys(f"{CLEAR}packtrain show chat\t", "packtrain show chat-1 ")
        type_keys(f"{CLEAR}packtrain run job.yaml --set train.prec\tb\t", "--set train.precision=bf16 ")
        type_keys(f"{CLEAR}packtrain run jo\t", "packtrain run job.yaml ")


def test_bash_completes_verbs_runs_fields_values_and_files(processes: None, shell_directory: Path) -> None:
    complete_in("bash", ["bash", "--norc", "--noprofile", "-i"])


def test_zsh_completes_verbs_runs_fields_values_and_files(needs_zsh: None, shell_directory: Path) -> None:
    complete_in("zsh", ["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -d ./dump; ")


def test_fish_completes_verbs_runs_fields_values_and_files(needs_fish: None, shell_directory: Path) -> None:
    lines = [
        "packtrain resu", "packtrain show chat", "packtrain run job.yaml --set train.prec",
        "packtrain run job.yaml --set train.precision=b", "packtrain run jo",
    ]  # fmt: skip
    script = "packtrain completion fish | source; for line in $argv; complete --do-complete $line; end"
    done = subprocess.run(
        ["fish", "--no-config", "--command", script, *lines], capture_output=True, text=True, timeout=120
    )
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == [
        "resume", "chat-1", "train.precision=", "train.precision=bf16", "job.yaml",
    ]  # fmt: skip
