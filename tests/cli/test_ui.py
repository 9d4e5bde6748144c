"""`packtrain ui`, as a person types it."""

from __future__ import annotations

import os
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
from packtrain.store import Store
from parts.dashboard import trained_run
from parts.service import wait_until

pytestmark = pytest.mark.usefixtures("processes")


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
