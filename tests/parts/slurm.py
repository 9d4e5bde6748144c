"""A Slurm cluster on hosts; the first one runs the controller too. It ends with them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parts.hosts import PATIENCE_SECONDS, Host, Network

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "munged")

_CONFIGURATION = """
ClusterName=parts
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=30
KillWait=20
GresTypes=gpu
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation=/var/spool/slurm-state
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_PREPARE = """
set -e
mkdir -p /etc/slurm /var/spool/slurm-state /var/spool/slurmd /run/munge /var/log/munge /var/lib/munge
cp "$1"/slurm.conf "$1"/gres.conf "$1"/cgroup.conf /etc/slurm/
cp "$1"/munge.key /etc/munge/munge.key
chown -R munge: /etc/munge /run/munge /var/log/munge /var/lib/munge
chmod 700 /etc/munge /var/log/munge /var/lib/munge; chmod 755 /run/munge; chmod 400 /etc/munge/munge.key
setpriv --reuid munge --regid munge --clear-groups munged
"""


def missing() -> str | None:
    absent = [program for program in _PROGRAMS if shutil.which(program, path="/usr/sbin:/usr/bin") is None]
    return f"Slurm needs {', '.join(absent)}: run tests/parts/install" if absent else None


@dataclass(frozen=True)
class Cluster:
    """`login` is where users submit jobs."""

    login: Host
    nodes: tuple[Host, ...]

    def command(self, *arguments: str) -> str:
        done = self.login.run(arguments)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def logs(self) -> str:
        """The last lines of all daemons, for the message of a failed test."""
        found = [self.login.run(["tail", "-n", "40", "/var/log/slurmctld.log"]).stdout]
        return "\n".join(found + [host.run(["tail", "-n", "40", "/var/log/slurmd.log"]).stdout for host in self.nodes])


@contextmanager
def slurm(network: Network) -> Iterator[Cluster]:
    """Start a cluster whose nodes are all of the hosts."""
    place = network.shared / "slurm"
    place.mkdir(exist_ok=True)
    hosts = tuple(network)
    size = "CPUs=2 RealMemory=2000 Gres=gpu:1"
    nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} {size}" for host in hosts)
    configuration = _CONFIGURATION.format(controller=hosts[0].name, address=hosts[0].address, nodes=nodes)
    (place / "slurm.conf").write_text(configuration)
    (place / "gres.conf").write_text("Name=gpu File=/dev/null\n")  # nobody uses it
    (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (place / "munge.key").write_bytes(os.urandom(1024))
    cluster = Cluster(hosts[0], hosts)
    for host in hosts:
        _start(host, "bash", "-c", _PREPARE, "prepare", str(place))
    _start(hosts[0], "slurmctld", "-c")
    for host in hosts:
        _start(host, "slurmd", "-N", host.name)
    _wait_until_idle(cluster)
    yield cluster


def _start(host: Host, *arguments: str) -> None:
    # Into a file: daemons inherit their output, and a pipe would stay open as long as they run.
    log = host.place / "daemons.log"
    with Path(log).open("ab") as output:
        process = host.popen(arguments, stdin=-3, stdout=output, stderr=output)
        if process.wait(60) != 0:
            raise RuntimeError(f"{host.name}: {arguments[0]}: {log.read_text()}")


def _wait_until_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        states = cluster.login.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout.split()
        if states == ["idle"] * len(cluster.nodes):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the cluster did not start: {cluster.logs()}")
