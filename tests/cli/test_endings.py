"""How commands end: a store that is not there, Ctrl-C, and a reader that has gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from housekeeping.test_removal import a_sweep
from packtrain.cli import app
from packtrain.errors import EXIT_INTERRUPTED, EXIT_MISTAKE, EXIT_NOT_FOUND, EXIT_UNWRITTEN, PacktrainError
from packtrain.run.records import FleetLaunch, LogLine, Result
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from parts.runs import new_run, program_job
from parts.sandbox import wait_until

READING = [
    "ls", "show", "follow", "logs", "logs -f", "stop", "report", "report --markdown", "resume", "mirror", "tag x",
    "du", "du x", "gc", "gc --delete", "rm x-1 --yes", "mv x-1 y", "compare a b", "sweep", "sweep x", "sweep x --show",
    "get x", "cp x there", "predict x hello", "export x", "evaluate x", "ui --no-open", "tensorboard", "attach", "down",
    "volume snapshot",
]  # fmt: skip


@pytest.mark.parametrize("words", READING)
def test_a_store_that_is_not_there_is_an_error_of_one_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words.split(), "--store", "nowhere"])
    assert isinstance(done.exception, PacktrainError), done.output
    assert str(done.exception).startswith(f"{tmp_path}/nowhere: no store here; check the path and its mount")
    assert (done.exception.exit_code, done.stdout) == (EXIT_NOT_FOUND, "")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("words", ["ls", "du", "gc", "sweep", "ui --no-open"])
def test_a_prefix_of_a_bucket_without_objects_is_no_store(words: str, s3_location: str) -> None:
    done = CliRunner().invoke(app, [*words.split(), "--store", s3_location])
    assert isinstance(done.exception, PacktrainError), done.output
    assert str(done.exception).startswith(f"{s3_location}: no store here; check the name")
    assert done.exception.exit_code == EXIT_NOT_FOUND


def test_a_store_without_runs_is_no_error(directory_store: Store) -> None:
    done = CliRunner().invoke(app, ["ls", "--store", directory_store.url])
    assert (done.exit_code, done.stdout.startswith(f"No runs in {directory_store.url}.")) == (0, True)


# Ctrl-C. Pressed for real where a server or a loop has to notice it, and at the slow part of all other commands.

JOB = "name: mine\nprogram: [train.py]\n"


def a_run_with_output(store: Store) -> None:
    """A run that does not end, because no machine works on it."""
    run = new_run(store, program_job("endless"))
    run.record_launch(FleetLaunch(0.0, "client", {}))
    writer = run.log_writer("a")
    writer.append(LogLine(1.0, 1, "a", 0, "out", "hello"))
    writer.flush()


@pytest.mark.usefixtures("processes")
def test_ctrl_c_ends_a_command_that_follows_with_130_and_says_nothing(tmp_path: Path, directory_store: Store) -> None:
    a_run_with_output(directory_store)
    command = [sys.executable, "-m", "packtrain", "logs", "-f", "--store", directory_store.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == "[rank 0] hello\n"
            process.send_signal(signal.SIGINT)
            assert (process.wait(120), process.stderr.read()) == (EXIT_INTERRUPTED, "")
        finally:
            process.kill()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("words", "slow_part"),
    [
        ("run job.yaml", "packtrain.cli.jobs:check"),
        ("run job.yaml", "packtrain.cli.follow:Follower.until_ended"),
        ("resume", "packtrain.cli.jobs:state_of"),
        ("pack job.yaml", "packtrain.cli.jobs:pack_data"),
        ("plan job.yaml", "packtrain.cli.plan:load"),
        ("sweep lr", "packtrain.sweep.drive:SweepDrive.look"),
        ("predict endless hello", "packtrain.cli.models:load_predictor"),
        ("evaluate endless", "packtrain.cli.reports:run_subject"),
        ("export endless", "packtrain.cli.models:export_run"),
        ("ls", "packtrain.cli.runs:run_names"),
        ("show", "packtrain.cli.runs:read_status"),
        ("follow endless", "packtrain.cli.follow:Follower.until_ended"),
        ("logs", "packtrain.run.run:Run.log_lines"),
        ("stop endless", "packtrain.cli.runs:request_stop"),
        ("report", "packtrain.cli.reports:write_report"),
        ("compare endless lr", "packtrain.cli.common:open_run"),
        ("cp endless there", "packtrain.cli.stored:copy_run"),
        ("down endless", "packtrain.cli.machines:take_down"),
        ("doctor --fleet local", "packtrain.cli.machines:examine"),
        ("rm endless-1 --yes", "packtrain.cli.stored:remove_run"),
        ("mv endless-1 x", "packtrain.cli.stored:rename_run"),
        ("du", "packtrain.cli.stored:store_usage"),
        ("gc", "packtrain.housekeeping.garbage:unused_in_store"),
    ],
)
def test_ctrl_c_ends_every_command_with_130(
    words: str, slow_part: str, tmp_path: Path, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    a_run_with_output(directory_store)
    a_sweep(directory_store)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("packtrain.cli.jobs.start", lambda *_: [])
    module, _, name = slow_part.partition(":")
    place = import_module(module)  # by its name: `packtrain.run` is also a function
    owner, _, method = name.rpartition(".")
    monkeypatch.setattr(getattr(place, owner) if owner else place, method, interrupt)
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == EXIT_INTERRUPTED, done.output
    assert "Traceback" not in done.output


@pytest.fixture(params=["buffered", "unbuffered"])
def environment(processes: None, request: pytest.FixtureRequest) -> dict[str, str]:
    """With a buffer, Python meets a reader that has gone only when the command has ended."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return others if request.param == "buffered" else {**others, "PYTHONUNBUFFERED": "1"}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("words", ["ls", "logs", "ls --json", "--help", "--version", "run --help", "schema"])
def test_nothing_is_said_when_nobody_reads_the_output(
    words: str, environment: dict[str, str], directory_store: Store
) -> None:
    a_run_with_output(directory_store)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "packtrain", *words.split()]
    environment["PACKTRAIN_STORE"] = directory_store.url
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, timeout=120, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(("words", "is_full"), [("run", False), ("run --detach", False), ("run", True)])
def test_a_run_starts_whoever_reads_what_is_printed(words: str, is_full: bool, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("print('trained')")
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "packtrain", *words.split(), "job.yaml"]
    environment = {**os.environ, "PACKTRAIN_CACHE": str(tmp_path / "cache")}
    subprocess.run(command, stdout=full if is_full else write, stderr=full, env=environment, cwd=tmp_path, check=False)
    os.close(write)
    os.close(full)
    run = Run(open_store(str(tmp_path / "store")), "mine-1")
    wait_until(run.result, "the run to end")
    result = run.result()
    assert result is not None
    assert (result.status, [launch.failed for launch in run.launches()]) == ("finished", [False])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("words", ["ls", "logs", "ls --json", "show --json", "--help", "--version", "run --help"])
def test_output_that_cannot_be_written_is_an_error_of_one_line(
    words: str, environment: dict[str, str], directory_store: Store
) -> None:
    a_run_with_output(directory_store)
    command = [sys.executable, "-m", "packtrain", *words.split()]
    environment["PACKTRAIN_STORE"] = directory_store.url
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=120, check=False)
        unseen = subprocess.run(command, stdout=full, stderr=full, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (
        EXIT_UNWRITTEN, b"packtrain: cannot write standard output: No space left on device\n",
    )  # fmt: skip
    assert unseen.returncode == EXIT_UNWRITTEN


@pytest.mark.usefixtures("processes")
def test_pipes_and_files_are_utf_8_whatever_the_locale(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store, program_job("endless"))
    run.finish(Result("failed", "Größe 大きさ", 1, 1.0))
    environment = {**os.environ, "PACKTRAIN_STORE": directory_store.url, "PYTHONIOENCODING": "latin-1"}
    # As in any other locale: text in the encoding of the locale is an error.
    python = [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-m", "packtrain"]
    for words in (["show", "--json"], ["report", "--json", "-o", str(tmp_path / "report.json")]):
        done = subprocess.run([*python, *words], env=environment, capture_output=True, timeout=120, check=False)
        assert "Traceback" not in done.stderr.decode()
        text = done.stdout if words[0] == "show" else (tmp_path / "report.json").read_bytes()
        assert "Größe 大きさ" in text.decode()
        json.loads(text)


@pytest.mark.parametrize(("words", "code"), [("badcommand", EXIT_MISTAKE), ("ls --store nowhere", EXIT_NOT_FOUND)])
def test_an_error_that_nobody_reads_keeps_its_exit_code(
    words: str, code: int, environment: dict[str, str], tmp_path: Path
) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "packtrain", *words.split()]
    done = subprocess.run(command, stdout=write, stderr=write, env=environment, cwd=tmp_path, timeout=120, check=False)
    os.close(write)
    assert done.returncode == code


@pytest.mark.parametrize(
    ("words", "code", "errors"),
    [("ls", 0, ""), ("--version", 0, ""), ("ls --store nowhere", EXIT_NOT_FOUND, "no store here")],
)
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_command_works_with_closed_streams(
    words: str, code: int, errors: str, closed: tuple[int, ...], directory_store: Store, tmp_path: Path
) -> None:
    close = f"import os, sys; [os.close(stream) for stream in {closed}]; os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", close, sys.executable, "-m", "packtrain", *words.split()]
    environment = {**os.environ, "PACKTRAIN_STORE": directory_store.url}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0 and 1 not in closed)
    assert (errors in done.stderr) if 2 not in closed else (done.stderr == "")
    assert "Traceback" not in done.stderr
