"""A machine that the system's ssh reaches, with the person's own configuration: jump hosts, agents, ports, known hosts.

Nothing here switches off a check. Host keys that are not known, or have changed, are refused, and what to do is said.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.errors import Mistake
from packtrain.system import end_with_parent

CONNECT_SECONDS = 10
_OPTIONS = (
    "-T",
    "-o", "BatchMode=yes",
    "-o", f"ConnectTimeout={CONNECT_SECONDS}",
    "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
# $0: the length of the script. Byte by byte: what follows it is the script's own input.
_READ_SCRIPT = 'eval "$(dd bs=1 count="$0" 2>/dev/null)"'
_FAILED = 255  # ssh's own errors; everything else is the command's

# What ssh says, and what a person can do about it; {host} is as in the job.
_ADVICE: Sequence[tuple[str, str]] = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed: ask whoever runs it, then `ssh-keygen -R`"),
    ("host key for .* has changed", "its host key has changed: ask whoever runs it, then `ssh-keygen -R`"),
    ("Host key verification failed", "its host key is not known here: `ssh {host}` once, and compare the fingerprint"),
    ("Permission denied", "it lets nobody in without a password: `ssh-copy-id {host}`, or start ssh-agent"),
    ("Could not resolve hostname", "its name is not known: see ~/.ssh/config"),
    ("Connection refused", "nothing listens there: is sshd running, and is the port right?"),
    ("timed out|No route to host|Network is unreachable", "it does not answer: is it on, and is the network?"),
)


class Unreachable(Mistake):
    """One host that cannot be used, and why; `host` alone says which. `answers`: ssh reached it all the same."""

    def __init__(self, host: str, fault: str, answers: bool = True) -> None:
        super().__init__(f"{host}: {fault}")
        self.host, self.fault, self.answers = host, fault, answers


@dataclass(frozen=True)
class Remote:
    """One destination as a job names it: `gpu-a`, `user@gpu-b:2222`."""

    name: str

    def arguments(self, *options: str) -> tuple[str, ...]:
        """ssh to it, without a command."""
        destination, port = split_destination(self.name)
        return ("ssh", *_OPTIONS, *options, *(("-p", port) if port else ()), destination)

    def run(self, command: Sequence[str], text: bytes = b"", seconds: float = 120.0) -> str:
        """What the command wrote on standard output; `text` is its standard input."""
        try:
            done = subprocess.run(
                [*self.arguments(), shlex.join(command)], input=text, capture_output=True, check=False, timeout=seconds
            )
        except FileNotFoundError:
            raise Mistake("the ssh command is not there: install openssh-client") from None
        except subprocess.TimeoutExpired:
            raise Unreachable(self.name, f"`{command[0]}` did not end within {seconds:g} s", False) from None
        errors = done.stderr.decode(errors="replace")
        if done.returncode == _FAILED:
            raise Unreachable(self.name, advice(self.name, errors), False)
        if done.returncode != 0:
            raise Unreachable(self.name, last_line(errors) or f"`{command[0]}` ended with exit code {done.returncode}")
        return done.stdout.decode(errors="replace")

    def script(
        self, script: str, arguments: Sequence[str], text: bytes = b"", seconds: float = 120.0, lines: int = 1
    ) -> list[str]:
        """The last lines that a shell script wrote; before them may be what the host says to everybody.

        It goes over standard input, with `text` behind it: the login shell may be one that reads nothing of sh.
        """
        data = script.encode()
        said = self.run(["sh", "-c", _READ_SCRIPT, str(len(data)), *arguments], data + text, seconds).splitlines()
        written = [line.strip() for line in said if line.strip()]
        if len(written) < lines:
            raise Unreachable(self.name, f"its answer cannot be read: {' '.join(written)!r}")
        return written[-lines:]

    def ask(self, python: str, verb: str, options: Sequence[str], secrets: Mapping[str, str], **given: Any) -> Any:
        """The answer of `packtrain.fleet.local` there."""
        answer = self.run(agents_command(python, verb, options), secrets_line(secrets), **given)
        try:
            return json.loads(answer.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise Unreachable(self.name, f"its answer to `{verb}` cannot be read: {answer[-200:]!r}") from None

    def hold(self, command: Sequence[str], text: bytes, log: Path) -> subprocess.Popen[bytes]:
        """Starts a command that ends with this process: the connection is what holds it. Its words go to the log."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self.arguments(), shlex.join(command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the client, which asks the run to stop
                preexec_fn=end_with_client,  # noqa: PLW1509 - prctl alone
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and its log says why
            process.stdin.write(text)
            process.stdin.flush()
        return process


def end_with_client() -> None:
    end_with_parent(signal.SIGTERM)


def agents_command(python: str, verb: str, options: Sequence[str]) -> list[str]:
    return [python, "-m", "packtrain.fleet.local", verb, *options]


def secrets_line(secrets: Mapping[str, str]) -> bytes:
    return json.dumps(dict(secrets)).encode() + b"\n"


def split_destination(name: str) -> tuple[str, str | None]:
    """What ssh takes as its destination, and the port beside it."""
    match = re.fullmatch(r"((?:[^@]+@)?)(\[[^]]+\]|[^:]+)(?::([0-9]+))?", name)
    if match is None:
        return name, None
    return match[1] + match[2].strip("[]"), match[3]


def advice(host: str, errors: str) -> str:
    """What ssh's words mean for a person."""
    for pattern, text in _ADVICE:
        if re.search(pattern, errors):
            return text.format(host=host)
    return last_line(errors) or "ssh could not reach it"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("packtrain: ") if lines else ""
