"""`packtrain ui` and `packtrain tag`, as a person types them."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from packtrain.cli import app
from packtrain.errors import Mistake
from packtrain.run.records import Notes
from packtrain.run.run import Run
from packtrain.store import Store
from parts.dashboard import trained_run
from parts.runs import new_run


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_the_dashboard_prints_its_address_and_ends_at_a_signal(sign: signal.Signals, directory_store: Store) -> None:
    trained_run(directory_store)
    command = [sys.executable, "-m", "packtrain", "ui", "--store", directory_store.url, "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S{32})", process.stdout.readline())
            assert found is not None
            with httpx.Client(base_url=found[1], timeout=30) as client:
                assert client.get("/api/runs").status_code == 401
                assert client.get(f"/?token={found[2]}").status_code == 303
                assert client.get("/api/runs").json()["store"] == directory_store.url
                process.send_signal(sign)
                assert process.wait(60) == 0
            assert "401" in process.stderr.read()
        finally:
            process.kill()


def test_every_dashboard_has_another_token(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.web.server.DashboardServer.run", lambda _, sockets: sockets[0].close())
    done = [run("ui", "--store", directory_store.url, "--port", "0", "--no-open") for _ in range(2)]
    tokens = {re.search(r"token=(\S+)", one.output)[1] for one in done}  # type: ignore[index]
    assert len(tokens) == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_address_needs_a_certificate(host: str, directory_store: Store, tmp_path: Path) -> None:
    done = run("ui", "--store", directory_store.url, "--host", host)
    assert isinstance(done.exception, Mistake) and "--certificate" in str(done.exception)
    (tmp_path / "bad.pem").write_text("no certificate")
    for file, words in (("none.pem", "no such file"), ("bad.pem", "PEM")):
        done = run("ui", "--store", directory_store.url, "--host", host, "--certificate", str(tmp_path / file))
        assert isinstance(done.exception, Mistake) and words in str(done.exception)


def test_mistakes_are_one_line(directory_store: Store, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("ui", "--store", directory_store.url, "--port", port)
        assert f"port {port}: Address already in use" in str(done.exception)
    assert "no store here" in str(run("ui", "--store", str(tmp_path / "none")).exception)
    assert "needs --certificate" in str(run("ui", "--store", directory_store.url, "--key", "key.pem").exception)


# tag


def tag(store: Store, *arguments: str) -> Result:
    return run("tag", "--store", store.url, "job-1", *arguments)


def test_tags_and_a_note_are_kept_with_the_run(any_store: Store) -> None:
    tagged = new_run(any_store)
    assert tag(any_store).output == "job-1: no tags\n"
    assert tag(any_store, "good", "paper", "good").output == "job-1: good paper\n"
    assert tag(any_store, "--note", "the  one\nto keep").output == "job-1: good paper (the one to keep)\n"
    assert tag(any_store, "final", "--remove", "good", "--remove", "other").output.startswith("job-1: paper final (")
    assert Run(any_store, tagged.name).notes() == Notes(("paper", "final"), "the one to keep")
    tag(any_store, "--note", "")
    assert Run(any_store, tagged.name).notes().text == ""


@pytest.mark.parametrize("word", ["", "two words", "x" * 61, "\x1b[31m", "a\nb"])
def test_a_tag_is_one_word(word: str, directory_store: Store) -> None:
    tagged = new_run(directory_store)
    assert isinstance(tag(directory_store, word).exception, Mistake)
    assert isinstance(tag(directory_store, *map(str, range(51))).exception, Mistake)
    assert isinstance(tag(directory_store, "--note", "x" * 2001).exception, Mistake)
    assert tagged.notes() == Notes()
