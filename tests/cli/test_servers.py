"""`packtrain ui` and `packtrain tensorboard`, as a person types them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from packtrain.cli import app
from packtrain.cli.servers import EventFolder
from packtrain.errors import Mistake
from packtrain.run.records import Point
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.recorder import TensorBoardWriter
from parts.dashboard import trained_run
from parts.runs import MEASURED, new_run, program_job, recipe_job
from parts.sandbox import wait_until


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_the_dashboard_prints_its_address_and_ends_at_a_signal(sign: signal.Signals, directory_store: Store) -> None:
    trained_run(directory_store)
    command = [sys.executable, "-m", "packtrain", "ui", "--store", directory_store.url, "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            found = re.search(r"(http://127\.0\.0\.1:\d+)/(\S{32})/  ", process.stdout.readline())
            assert found is not None
            with httpx.Client(base_url=found[1], timeout=30) as client:
                assert client.get("/api/runs").status_code == 401
                assert client.get(f"/{found[2]}/api/runs").json()["store"] == directory_store.url
                process.send_signal(sign)
                assert process.wait(60) == (130 if sign == signal.SIGINT else 0)
            assert "401" in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.usefixtures("processes")
def test_every_dashboard_has_another_token(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.web.server.DashboardServer.run", lambda _, sockets: sockets[0].close())
    done = [run("ui", "--store", directory_store.url, "--port", "0", "--no-open") for _ in range(2)]
    tokens = re.findall(r"http://[^/]+/(\S{32})/ ", "".join(one.output for one in done))
    assert len(tokens) == len(set(tokens)) == 2


BROWSER = """#!/bin/sh
file=${1#file://}
stat -c %a "$file" "${file%/*}" > SEEN.new
cat "$file" >> SEEN.new
printf '\\n%s' "$*" >> SEEN.new
mv SEEN.new SEEN
"""


@pytest.mark.usefixtures("processes")
def test_a_browser_gets_a_private_file_that_leads_to_the_page(directory_store: Store, tmp_path: Path) -> None:
    """Every user of the machine sees the arguments of every process."""
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(BROWSER.replace("SEEN", str(seen)))
    browser.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "packtrain", "ui", "--store", directory_store.url, "--port", "0"]
    variables = {**os.environ, "BROWSER": str(browser), "DISPLAY": ":0", "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/\S{32}/", process.stdout.readline())
            assert found is not None
            wait_until(seen.exists, "the browser was started")
            file_mode, folder_mode, page, arguments = seen.read_text().splitlines()
            assert (file_mode, folder_mode) == ("600", "700")
            assert f"url={found[0]}" in page
            assert found[0].split("/")[3] not in arguments
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_address_needs_a_certificate(host: str, directory_store: Store, tmp_path: Path) -> None:
    done = run("ui", "--store", directory_store.url, "--host", host)
    assert isinstance(done.exception, Mistake) and "--certificate" in str(done.exception)
    (tmp_path / "bad.pem").write_text("no certificate")
    for file, words in (("none.pem", "no such file"), ("bad.pem", "PEM")):
        done = run("ui", "--store", directory_store.url, "--host", host, "--certificate", str(tmp_path / file))
        assert isinstance(done.exception, Mistake) and words in str(done.exception)


@pytest.mark.usefixtures("processes")
def test_mistakes_are_one_line(directory_store: Store, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("ui", "--store", directory_store.url, "--port", port)
        assert f"port {port}: Address already in use" in str(done.exception)
    assert "no store here" in str(run("ui", "--store", str(tmp_path / "none")).exception)
    assert "needs --certificate" in str(run("ui", "--store", directory_store.url, "--key", "key.pem").exception)


# TensorBoard.


def record(run: Run, step: int, generation: int = 1) -> None:
    """Write an event file of one step, as a worker does."""
    writer = TensorBoardWriter(run, generation)
    writer.append(Point("train", generation, step, 1.0, MEASURED))
    writer.flush(at_once=True)


def files(folder: EventFolder) -> dict[str, bytes]:
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.path.glob("*/*")}


def test_the_folder_has_the_files_of_every_run_as_they_come(any_store: Store, tmp_path: Path) -> None:
    first, second = new_run(any_store, recipe_job()), new_run(any_store, recipe_job())
    folder = EventFolder([first, second], tmp_path / "runs")
    assert not folder.update()
    record(first, 1)
    assert folder.update()
    record(first, 2, generation=2)
    record(second, 1)
    folder.update()
    stored = {
        entry.key.removeprefix("runs/").replace("/tensorboard", ""): any_store.get(entry.key)
        for entry in any_store.list("runs")
        if "tfevents" in entry.key
    }
    assert len(stored) == 3
    assert files(folder) == stored


def test_a_file_of_a_bucket_is_fetched_once_and_others_never(s3_store: Store, tmp_path: Path) -> None:
    run = new_run(s3_store, recipe_job())
    record(run, 1)
    s3_store.put(run.key("tensorboard/other.txt"), b"no event file")
    folder = EventFolder([run], tmp_path / "runs")
    folder.update()
    (name,) = files(folder)
    (tmp_path / "runs" / name).write_bytes(b"read")
    folder.update()
    assert files(folder) == {name: b"read"}


@pytest.mark.parametrize(
    ("job", "words"),
    [(program_job(), "a program writes its own"), (recipe_job(), "the first is written 30 s after the first step")],
)
def test_a_run_without_event_files_is_refused_in_one_line(job: object, words: str, directory_store: Store) -> None:
    run = new_run(directory_store, job)  # type: ignore[arg-type]
    done = CliRunner().invoke(app, ["tensorboard", run.name, "--store", directory_store.url])
    assert isinstance(done.exception, Mistake)
    assert words in str(done.exception)


def test_a_missing_package_is_named_in_one_line(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    done = CliRunner().invoke(app, ["tensorboard", "--store", directory_store.url])
    assert "pip install tensorboard" in str(done.exception)


@pytest.mark.usefixtures("processes")
def test_tensorboard_shows_the_runs_until_it_is_interrupted_and_leaves_nothing(
    directory_store: Store, tmp_path: Path
) -> None:
    for _ in range(2):
        record(new_run(directory_store, recipe_job()), 1)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "packtrain", "tensorboard", "job-1", "job-2", "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [*command, "--store", directory_store.url], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("TensorBoard: http://127.0.0.1:")
        address = line.split()[1]
        wait_until(lambda: sorted(runs_at(address)) == ["job-1", "job-2"], "the runs, which it reads in the background")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert list(scratch.iterdir()) == []
    with pytest.raises(OSError, match="refused"):
        runs_at(address)


def runs_at(address: str) -> list[str]:
    with urllib.request.urlopen(f"{address}data/runs", timeout=60) as answer:  # noqa: S310 - an address of this machine
        names: list[str] = json.load(answer)
    return names
