"""A host reached by the system's ssh with the user's own configuration: jump hosts, ssh-agent, ports, known hosts.

No check is switched off: a host key that is unknown or has changed is refused, and the error says what to do. (For
machines that a fleet has just rented, and only for those, `options` may have ssh accept the first key it sees.)
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from packtrain.errors import Mistake
from packtrain.process import end_with_parent

CONNECT_SECONDS = 10
_OPTIONS = (
    "-T",
    "-o", "BatchMode=yes",
    "-o", f"ConnectTimeout={CONNECT_SECONDS}",
    "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
# $0: the length of the script. dd reads byte by byte, because what follows the script is the script's own input.
_READ_SCRIPT = 'eval "$(dd bs=1 count="$0" 2>/dev/null)"'
SSH_FAILED = 255  # ssh's own errors; every other code is the command's

_KEY_CHANGED = "its host key has changed; ask its administrator, then run `ssh-keygen -R`"
# Patterns of ssh's errors, and what to do about them; {host} is as in the job.
_ADVICE: Sequence[tuple[str, str]] = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", _KEY_CHANGED),
    ("host key for .* has changed", _KEY_CHANGED),
    ("Host key verification failed", "unknown host key; run `ssh {host}` once and compare the fingerprint"),
    ("Permission denied", "cannot log in without a password; run `ssh-copy-id {host}`, or start ssh-agent"),
    ("Could not resolve hostname", "unknown host name; check ~/.ssh/config"),
    ("Connection refused", "connection refused; check that sshd is running and that the port is right"),
    ("timed out|No route to host|Network is unreachable", "no answer; check that it is on and that the network is up"),
)


class Unreachable(Mistake):
    """A host that cannot be used, and why. `answers`: ssh could reach it."""

    def __init__(self, host: str, fault: str, answers: bool = True) -> None:
        super().__init__(f"{host}: {fault}")
        self.host, self.fault, self.answers = host, fault, answers


@dataclass(frozen=True)
class Remote:
    """A destination as a job names it: `gpu-a`, `user@gpu-b:2222`.

    `options` are more of ssh's own; `variables` are set for every command there, and seen by everyone on that machine.
    """

    name: str
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def arguments(self, *options: str) -> tuple[str, ...]:
        """Return the ssh command line up to the destination, which ssh must not take for an option."""
        destination, port = split_destination(self.name)
        return ("ssh", *_OPTIONS, *self.options, *options, *(("-p", port) if port else ()), "--", destination)

    def words(self, command: Sequence[str]) -> str:
        """Return the command as the one argument that ssh passes to the login shell."""
        assignments = [f"{name}={value}" for name, value in self.variables]
        return shlex.join(["env", *assignments, *command] if assignments else command)

    def run(self, command: Sequence[str], text: bytes | IO[bytes] = b"", seconds: float = 120.0) -> str:
        """Return what the command wrote to standard output; `text` is its standard input, or a file with it."""
        words = [*self.arguments(), self.words(command)]
        try:
            if isinstance(text, bytes):
                ended = subprocess.run(words, input=text, capture_output=True, check=False, timeout=seconds)
            else:
                ended = subprocess.run(words, stdin=text, capture_output=True, check=False, timeout=seconds)
        except FileNotFoundError:
            raise Mistake("the ssh command is missing; install openssh-client") from None
        except subprocess.TimeoutExpired:
            raise Unreachable(self.name, f"`{command[0]}` timed out after {seconds:g} s", False) from None
        errors = ended.stderr.decode(errors="replace")
        if ended.returncode == SSH_FAILED:
            raise Unreachable(self.name, advice(self.name, errors), False)
        if ended.returncode != 0:
            raise Unreachable(self.name, last_line(errors) or f"`{command[0]}` exited with code {ended.returncode}")
        return ended.stdout.decode(errors="replace")

    def script(
        self,
        script: str,
        arguments: Sequence[str],
        text: bytes | IO[bytes] = b"",
        seconds: float = 120.0,
        lines: int | None = 1,
    ) -> list[str]:
        """Return the last lines that a shell script wrote, or all; a host's greeting may come before them.

        The script goes over standard input, followed by `text`: the login shell may not understand sh. A
        file begins with the script itself.
        """
        data = script.encode()
        stdin = data + text if isinstance(text, bytes) else text
        output = self.run(["sh", "-c", _READ_SCRIPT, str(len(data)), *arguments], stdin, seconds)
        written = [line.strip() for line in output.splitlines() if line.strip()]
        if lines is None:
            return written
        if len(written) < lines:
            raise Unreachable(self.name, f"unexpected answer: {' '.join(written)!r}")
        return written[-lines:]

    def hold(self, command: Sequence[str], text: bytes, log: Path) -> subprocess.Popen[bytes]:
        """Start a command that lives as long as this connection, and so as this process; its output goes to the log."""
        log.touch(mode=0o600)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self.arguments(), self.words(command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach the client alone, which asks the run to stop
                preexec_fn=end_with_client,  # noqa: PLW1509 - prctl alone
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has already ended, and its log says why
            process.stdin.write(text)
            process.stdin.flush()
        return process


def end_with_client() -> None:
    """Run between fork and exec: the kernel sends SIGTERM when the client ends, even if it is killed."""
    end_with_parent(signal.SIGTERM)


def split_destination(name: str) -> tuple[str, str | None]:
    """Split a host of a job into the destination and the port that ssh takes."""
    match = re.fullmatch(r"((?:[^@]+@)?)(\[[^]]+\]|[^:]+)(?::([0-9]+))?", name)
    if match is None:
        return name, None
    return match[1] + match[2].strip("[]"), match[3]


def advice(host: str, errors: str) -> str:
    """Translate ssh's errors into what to do."""
    for pattern, text in _ADVICE:
        if re.search(pattern, errors):
            return text.format(host=host)
    return last_line(errors) or "ssh cannot reach it"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("packtrain: ") if lines else ""
