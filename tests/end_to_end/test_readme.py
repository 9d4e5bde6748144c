"""Every command of the README, as written and in its order, in what `make demo` installs.

Left out are other `make` targets and `pip`. The jobs train for fewer steps; nothing else differs.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from parts.hosts import Network
from test_house import ROOT

DEMO_STEPS = 60
JOB_STEPS = 240  # a sweep stops runs after their first evaluation, at step 100
README = (ROOT / "README.md").read_text()
SERVERS = ("ui", "serve")  # run until Ctrl-C, and print their address


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Typed:
    """A line that a person types, and what the README says it prints, if it says so."""

    words: list[str]
    output: str


def typed() -> Iterator[Typed]:
    for block in blocks("console"):
        for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = text.partition("\n")
            yield Typed(shlex.split(line, comments=True), output)


@dataclass
class Shell:
    """A person's shell in the checkout."""

    directory: Path
    environment: dict[str, str]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self.directory, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=850, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}"
        return done.stdout

    def serve(self, *words: str) -> None:
        """Start a server, open its page, and press Ctrl-C."""
        server = subprocess.Popen(words, cwd=self.directory, env=self.environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address, shlex.join(words)
            page = httpx.get(address[0], follow_redirects=True, timeout=60)
            assert (page.status_code, "<html" in page.text) == (200, True)
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) in (0, 130)
        finally:
            server.kill()
            server.wait()

    def end_nodes(self) -> None:
        for process in psutil.process_iter(["cwd", "environ"]):
            if (process.info["environ"] or {}).get("PACKTRAIN_CACHE") == self.environment["PACKTRAIN_CACHE"]:
                process.kill()


def shorten(text: str, steps: int) -> str:
    assert "2000 steps" in text
    return text.replace("2000 steps", f"{steps} steps").replace("500 steps", f"{steps // 2} steps")


@pytest.fixture(scope="module")
def shell(network: Network, training: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A new checkout, with the README's job in it and a board that ssh reaches."""
    place = tmp_path_factory.mktemp("readme")
    checkout = place / "a checkout"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.split("\0")[:-1]:
        source, copy = ROOT / name, checkout / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    example = checkout / "examples" / "translate.yaml"
    example.write_text(shorten(example.read_text(), DEMO_STEPS))
    [job] = [block for block in blocks("yaml") if "recipe:" in block]
    (checkout / "job.yaml").write_text(shorten(job, JOB_STEPS))
    config, board = network.ssh_config.read_text(), network[0].name
    network.ssh_config.write_text(config.replace(f"Host {board}\n", f"Host {board} board\n"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PACKTRAIN", "PYTHON"))}
    changed = {"PATH": f"{network.search_path()}:/usr/sbin:/sbin", "PACKTRAIN_CACHE": str(place / "cache")}
    environment = {**inherited, **changed, "OMP_NUM_THREADS": "1"}
    shell = Shell(checkout, environment)
    try:
        yield shell
    finally:
        shell.end_nodes()
        network.ssh_config.write_text(config)


@pytest.mark.timeout(2700)  # some forty commands, several of which train
def test_every_command_works_as_written_and_a_second_demo_starts_no_run(shell: Shell, network: Network) -> None:
    lines, checkout = list(typed()), shell.directory
    # Ctrl-C may have ended an earlier try before the environment had pip.
    shell.run("/usr/bin/python3", "-m", "venv", "--without-pip", ".venv")
    assert lines[0].words == ["make", "demo"]
    assert "in German, by the model that was just trained:" in shell.run("make", "demo")
    names = set()
    for line in lines:
        match line.words:
            case ["make" | "pip", *_]:
                continue
            case ["source", activate]:
                scripts = (shell.directory / activate).parent
                assert (shell.directory / activate).is_file()
                shell.environment["PATH"] = f"{scripts}:{shell.environment['PATH']}"
            case ["cd", directory]:
                shell.directory /= directory
            case ["packtrain", verb, *_] if verb in SERVERS:
                shell.serve(*line.words)
            case words if line.output:
                done = subprocess.run(
                    words, cwd=shell.directory, env=shell.environment, capture_output=True, text=True, check=False
                )
                assert (done.returncode, done.stderr) == (2, line.output)
            case words:
                shell.run(*words)
        names.add(line.words[1])
        if "--detach" in line.words:
            with pytest.raises(AssertionError, match=r"a run in ./store uses \.venv; stop it first"):
                shell.run("make", "clean")
    assert len(names) > 15
    shell.directory = checkout
    assert (checkout / "model" / "model.json").is_file()
    assert (network[0].home / "models" / "en-de" / "model.json").is_file()

    before = shell.run("packtrain", "ls", "--json")
    assert "is already complete" in shell.run("make", "demo")
    assert shell.run("packtrain", "ls", "--json") == before
