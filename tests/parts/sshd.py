"""A private SSH server on loopback: its own host key, one authorized key, none of the machine's settings."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from parts.loopback import free_port, wait_for_port

_MARK = "PACKTRAIN_TESTS_SSHD"

# Every session has the mark in its environment, so its processes are found even after their parents have ended.
_CONFIGURATION = """
ListenAddress 127.0.0.1
Port {port}
HostKey {scratch}/host_key
AuthorizedKeysFile {scratch}/authorized_keys
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AllowUsers {user}
StrictModes no
UsePAM no
UseDNS no
PidFile none
SetEnv {name}={mark}
"""


def program() -> str | None:
    """The server's path; it is on the PATH of root only."""
    return shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


@dataclass(frozen=True)
class SshServer:
    pid: int
    port: int
    user: str
    scratch: Path
    mark: str

    def connect_options(self) -> dict[str, Any]:
        """Options for `asyncssh.connect`: the host key is checked, and the user's own settings are not read."""
        return {
            "port": self.port,
            "username": self.user,
            "client_keys": [str(self.scratch / "client_key")],
            "known_hosts": str(self.scratch / "known_hosts"),
            "agent_path": None,
            "config": None,
        }

    def processes(self) -> list[psutil.Process]:
        """Return the sessions, and all processes that were started in them."""
        found = set(psutil.Process(self.pid).children(recursive=True))
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark:
                    found.add(process)
        return sorted(found, key=lambda process: process.pid)


@contextmanager
def ssh_server(scratch: Path) -> Iterator[SshServer]:
    """Run a server during the block; all processes that were started through it end with it."""
    user, port, mark = pwd.getpwuid(os.geteuid()).pw_name, free_port(), uuid.uuid4().hex
    for key in ("host_key", "client_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", scratch / key], check=True, timeout=60)
    (scratch / "authorized_keys").write_text((scratch / "client_key.pub").read_text())
    (scratch / "known_hosts").write_text(f"[127.0.0.1]:{port} {(scratch / 'host_key.pub').read_text()}")
    configuration = scratch / "sshd_config"
    configuration.write_text(_CONFIGURATION.format(scratch=scratch, port=port, user=user, name=_MARK, mark=mark))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # for its privilege separation; systemd would create it
    command = [str(program()), "-D", "-E", str(scratch / "sshd.log"), "-f", str(configuration)]
    daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    server = SshServer(daemon.pid, port, user, scratch, mark)
    try:
        wait_for_port(port, [daemon])
        yield server
    finally:
        left = server.processes()
        daemon.kill()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait()
        psutil.wait_procs(left, timeout=10)
