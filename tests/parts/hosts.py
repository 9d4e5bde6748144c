"""Several machines on one computer, each with its own address, name, disk, processes and sshd.

A host is a set of namespaces around an overlay of this computer's root, joined to a bridge by a veth pair. Links are
cut and slowed with `ip` and `tc`; a host that is killed sends nothing more, as after a power cut. Everything ends with
the block, or with this process, even if it is killed. Needs root. Imports nothing of the tests.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PATIENCE_SECONDS = 90.0
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "pivot_root", "sshd", "ssh", "ssh-keygen", "mount")
_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOCK = Path("/tmp/packtrain-hosts.lock")  # all users share this computer's subnets
_ALIAS = "packtrain-hosts"

# The first process of a host. It waits twice for its starter: for the network link, and then for the end.
_BOOT = r"""
set -eu
place=$1 name=$2 disk=$3; shift 3
root=$place/root
mount -t tmpfs -o "size=$disk" tmpfs "$place/disk"
mkdir "$place/disk/upper" "$place/disk/work" "$place/disk/tmp"
mount -t overlay overlay -o "lowerdir=/,upperdir=$place/disk/upper,workdir=$place/disk/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/run"; mkdir -p "$root/run/sshd"
chmod 1777 "$place/disk/tmp"; mount --bind "$place/disk/tmp" "$root/tmp"
mount --bind "$place/home" "$root/root"
for path in "$@"; do
  if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$(dirname "$root$path")"; touch "$root$path"; fi
  mount --rbind "$path" "$root$path"
done
mkdir -p "$root/etc/packtrain-host"; cp "$place"/etc/* "$root/etc/packtrain-host/"
chmod 600 "$root/etc/packtrain-host/host_key"
rm -f "$root/etc/resolv.conf"; : > "$root/etc/resolv.conf"  # no name server would answer, and a query would take long
cp "$place/etc/hosts" "$root/etc/hosts"; echo "$name" > "$root/etc/hostname"; hostname "$name"
ip link set lo up
cd "$root"; pivot_root . .; umount -l .; cd /
echo ready
read -r line
/usr/sbin/sshd -D -E /run/sshd.log -f /etc/packtrain-host/sshd_config </dev/null >/dev/null 2>&1 &
cat <&0 >/dev/null & wait $!
"""

_SERVER = """
HostKey /etc/packtrain-host/host_key
AuthorizedKeysFile /etc/packtrain-host/authorized_keys
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
Subsystem sftp internal-sftp
"""

_CLIENT = """
Host {name}
  HostName {address}
  HostKeyAlias {name}
  User root
  IdentityFile {identity}
  IdentitiesOnly yes
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""


def missing() -> str | None:
    """Return why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "hosts need root"
    absent = [program for program in _PROGRAMS if shutil.which(program, path=_SEARCH) is None]
    return f"hosts need {', '.join(absent)}: run tests/parts/install" if absent else None


def _command(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class _HostProcess(subprocess.Popen[Any]):
    """A command on a host. This is the nsenter process outside of it; signals go to its child inside."""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.pid).children():
                    child.send_signal(number)


@dataclass
class Host:
    """A machine. Its home directory survives `kill`; the rest of its disk does not."""

    name: str
    address: str
    place: Path
    _network: Network
    _link: str
    _process: subprocess.Popen[bytes] | None = None
    _init: psutil.Process | None = None
    _blocked: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """Its /root, as seen from outside."""
        return self.place / "home"

    @property
    def is_on(self) -> bool:
        return self._process is not None

    @property
    def root(self) -> Path:
        """Its whole disk, as seen from outside while it is on."""
        return Path(f"/proc/{self._pid()}/root")

    def start(self) -> None:
        """Switch it on, and return when its sshd answers."""
        arguments = [str(self.place), self.name, str(self._network.disk_bytes), *map(str, self._network.mounted)]
        namespaces = ["unshare", "-m", "-u", "-p", "-i", "-n", "-f", "--kill-child", "--propagation", "private"]
        with (self.place / "boot.log").open("ab") as log:
            process = subprocess.Popen(
                [*namespaces, "bash", "-c", _BOOT, "boot", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"PATH": _SEARCH},
                start_new_session=True,
            )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{self.name} did not boot: {(self.place / 'boot.log').read_text()}")
            [self._init] = psutil.Process(process.pid).children()
            # The same hardware address after every start, or the other hosts would use the old one for a while.
            card = ["address", _hardware_address(self.address), "netns", str(process.pid)]
            _command("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", *card)
            _command("ip", "link", "set", self._link, "master", self._network.bridge, "up")
            self._inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
            self._inside("ip", "link", "set", "eth0", "up")
            self._inside("ip", "route", "add", "default", "via", self._network.gateway)
            process.stdin.write(b"go\n")
            process.stdin.flush()
            self._wait_for_sshd()
        except BaseException:
            self.kill()
            raise

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((self.address, 22), timeout=1):
                return
            time.sleep(0.02)
        raise RuntimeError(f"{self.name}: sshd does not answer")

    def kill(self) -> None:
        """Cut its power: nothing it sends afterwards reaches the others. Does nothing if it is off."""
        if self._process is None:
            return
        process, init = self._process, self._init
        self._process, self._init, self._blocked = None, None, []
        subprocess.run(["ip", "link", "set", self._link, "down"], stderr=subprocess.DEVNULL)
        with suppress(psutil.NoSuchProcess):
            (init or process).kill()  # the first process of a namespace ends all others in it
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        # It also goes with the namespace, but maybe after the next `start` needs its name.
        subprocess.run(["ip", "link", "del", self._link], stderr=subprocess.DEVNULL)

    def cut(self, *others: Host) -> None:
        """Take its link down; with `others`, block only the traffic between this host and them."""
        if not others:
            _command("ip", "link", "set", self._link, "down")
        for other in others:
            for one, far in ((self, other), (other, self)):
                one._inside("ip", "route", "replace", "blackhole", f"{far.address}/32")
                one._blocked.append(far.address)

    def restore(self) -> None:
        """Undo every `cut` that concerns this host."""
        _command("ip", "link", "set", self._link, "up")
        for other in (self, *self._network):
            for far in [far for far in other._blocked if other is self or far == self.address]:
                other._inside("ip", "route", "del", "blackhole", f"{far}/32")
                other._blocked.remove(far)

    def rate(self, bits_per_second: float | None) -> None:
        """Limit the link in both directions; None removes the limit."""
        inside = ["nsenter", "-t", str(self._pid()), "-n"]
        for prefix, device in (([], self._link), (inside, "eth0")):
            if bits_per_second is None:
                subprocess.run([*prefix, "tc", "qdisc", "del", "dev", device, "root"], stderr=subprocess.DEVNULL)
            else:
                limit = ["rate", f"{bits_per_second:.0f}bit", "burst", "256kb", "latency", "50ms"]
                _command(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def run(
        self,
        arguments: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        text: str | None = None,
        timeout: float | None = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on it to its end and return its output."""
        given = {"stdin": subprocess.DEVNULL if text is None else subprocess.PIPE}
        process = self.popen(arguments, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **given)
        try:
            output, errors = process.communicate(text, timeout)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(map(str, arguments)), process.returncode, output, errors)

    def popen(
        self, arguments: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on it. `options` are those of `subprocess.Popen`."""
        return _HostProcess(self._in_namespaces(arguments), env=self._environment(env), **options)

    def processes(self) -> list[psutil.Process]:
        """Return what runs on it, except for what its first process started: sshd, and the wait for its starter."""
        if self._init is None:
            return []
        own, found = _namespace(self._init.pid), []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if _namespace(process.pid) == own and process.pid != self._init.pid:
                    found.append(process)
        return [process for process in found if not self._is_own(process)]

    def _is_own(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.ppid() == self._pid() and process.name() in ("sshd", "cat")
        return True

    def _pid(self) -> int:
        if self._init is None:
            raise RuntimeError(f"{self.name} is off")
        return self._init.pid

    def _inside(self, *arguments: str) -> str:
        return _command("nsenter", "-t", str(self._pid()), "-n", *arguments)

    def _in_namespaces(self, arguments: Sequence[str | Path]) -> list[str]:
        # Without one of these namespaces, a path or an address would be this computer's.
        into = ["nsenter", "-t", str(self._pid()), "-m", "-u", "-i", "-n", "-p"]
        return [*into, "env", "-C", "/root", "setpriv", "--pdeathsig", "KILL", *map(str, arguments)]

    def _environment(self, given: Mapping[str, str] | None) -> dict[str, str]:
        return {"PATH": _SEARCH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", **(given or {})}


class Network(Sequence[Host]):
    """The hosts; this computer reaches them by `ssh -F ssh_config NAME` or by their addresses."""

    def __init__(self, scratch: Path, count: int, shared: Iterable[Path], disk_bytes: int) -> None:
        token = uuid.uuid4().hex[:8]
        self.scratch, self.bridge, self.disk_bytes = scratch, f"pt{token}b", disk_bytes
        self.shared = scratch / "shared"
        self.ssh_config, self.known_hosts = scratch / "ssh_config", scratch / "known_hosts"
        self.shared.mkdir(parents=True, exist_ok=True)
        self.mounted = _mounted([self.shared, *shared])
        self.prefix = self._take_subnet()
        self.gateway = f"{self.prefix}.254"
        self._hosts = [
            Host(f"host{number}", f"{self.prefix}.{number}", scratch / f"host{number}", self, f"pt{token}h{number}")
            for number in range(1, count + 1)
        ]

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def search_path(self) -> str:
        """Return a PATH whose `ssh` and `scp` read the configuration of the hosts and not the user's."""
        directory = self.scratch / "bin"
        directory.mkdir(exist_ok=True)
        for name in ("ssh", "scp"):
            script = directory / name
            script.write_text(f'#!/bin/sh\nexec {shutil.which(name)} -F {self.ssh_config} "$@"\n')
            script.chmod(0o755)
        return f"{directory}:/usr/bin:/bin"

    def _take_subnet(self) -> str:
        """Create a bridge with a subnet of its own, and delete bridges that killed processes left."""
        with _LOCK.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _delete_orphans()
            used = {entry["local"] for link in _links("addr") for entry in link["addr_info"] if "local" in entry}
            taken = {address.rpartition(".")[0] for address in used}
            prefix = next(one for one in (f"10.77.{number}" for number in range(256)) if one not in taken)
            # With an address of its own: it would take the lowest of its ports', and when that port's host loses power,
            # the others would send to the old address for up to a minute.
            own = _hardware_address(f"{prefix}.254")
            _command("ip", "link", "add", self.bridge, "address", own, "type", "bridge")
            _command("ip", "link", "set", self.bridge, "alias", f"{_ALIAS} {os.getpid()} {_birth(os.getpid())}")
            _command("ip", "addr", "add", f"{prefix}.254/24", "dev", self.bridge)
            _command("ip", "link", "set", self.bridge, "up")
        return prefix

    def prepare(self) -> None:
        """Write keys and configuration, for this computer and for every host."""
        identity = self.scratch / "identity"
        _make_key(identity)
        for host in self._hosts:
            for name in ("etc", "home", "root", "disk"):
                (host.place / name).mkdir(parents=True, exist_ok=True)
            _make_key(host.place / "etc" / "host_key")
        names = "".join(f"{host.address} {host.name}\n" for host in self._hosts)
        keys = {host.name: (host.place / "etc" / "host_key.pub").read_text() for host in self._hosts}
        known = "".join(f"{name} {key}" for name, key in keys.items())
        self.known_hosts.write_text(known)
        self.ssh_config.write_text(self._configuration(identity, self.known_hosts))
        for host in self._hosts:
            (host.place / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{self.gateway} client\n{names}")
            (host.place / "etc" / "sshd_config").write_text(_SERVER)
            shutil.copy(identity.with_suffix(".pub"), host.place / "etc" / "authorized_keys")
            own = host.home / ".ssh"
            own.mkdir(mode=0o700)
            shutil.copy(identity, own / "identity")
            (own / "identity").chmod(0o600)
            (own / "known_hosts").write_text(known)
            inside = Path("/root/.ssh")
            (own / "config").write_text(self._configuration(inside / "identity", inside / "known_hosts"))

    def _configuration(self, identity: Path, known_hosts: Path) -> str:
        return "".join(
            _CLIENT.format(name=host.name, address=host.address, identity=identity, known_hosts=known_hosts)
            for host in self._hosts
        )

    def end(self) -> None:
        for host in self._hosts:
            host.kill()
        subprocess.run(["ip", "link", "del", self.bridge], stderr=subprocess.DEVNULL)


@contextmanager
def hosts(scratch: Path, count: int, shared: Iterable[Path] = (), disk_bytes: int = 4_000_000_000) -> Iterator[Network]:
    """Start so many hosts. `shared` directories, and `network.shared`, are the same on all of them and here."""
    network = Network(scratch.resolve(), count, shared, disk_bytes)
    with ExitStack() as stack:
        stack.callback(network.end)
        network.prepare()
        for host in network:
            host.start()
        yield network


def _mounted(shared: Iterable[Path]) -> list[Path]:
    """Return what hosts share with this computer: its Python, the environment of the tests, the repository."""
    repository = Path(__file__).resolve().parents[2]
    paths = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), repository, *shared]
    distinct = list(dict.fromkeys(path.resolve() for path in paths))
    hidden = [Path("/root"), Path("/tmp"), Path("/run"), Path("/dev/shm")]  # hosts have their own
    # The overlay shows everything else; but only in a bind mount are later changes visible on both sides.
    return [path for path in distinct if path != Path("/usr") and (path in distinct[2:] or _within(path, hidden))]


def _hardware_address(address: str) -> str:
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def _namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def _within(path: Path, directories: Iterable[Path]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)


def _make_key(path: Path) -> None:
    _command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.parent.name, "-f", str(path))


def _links(what: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_command("ip", "-j", what))
    return [link for link in found if link]


def _birth(pid: int) -> float:
    return psutil.Process(pid).create_time()


def _delete_orphans() -> None:
    """Delete bridges whose owners were killed; their hosts ended with them."""
    for link in _links("link"):
        mark, _, owner = link.get("ifalias", "").partition(" ")
        if mark != _ALIAS:
            continue
        pid, birth = owner.split()
        try:
            alive = abs(_birth(int(pid)) - float(birth)) < 1  # or another process has got its number
        except psutil.NoSuchProcess:
            alive = False
        if not alive:
            subprocess.run(["ip", "link", "del", link["ifname"]], stderr=subprocess.DEVNULL)
