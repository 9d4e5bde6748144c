"""A real Ceph object gateway on loopback, all in memory: one monitor, one OSD, one radosgw."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parts.loopback import free_port, wait_for_port

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")

_CONFIGURATION = """
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = v1:127.0.0.1:{monitor_port}/0
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
public_addr = 127.0.0.1
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
mon_max_pg_per_osd = 1000
mon_allow_pool_size_one = true
paxos_propose_interval = 0.05
run_dir = {scratch}
admin_socket = {scratch}/$name.asok
pid_file = {scratch}/$name.pid
log_file = {scratch}/$name.log
[mon]
mon_data = {scratch}/mon
mon_data_avail_warn = 1
mon_data_avail_crit = 1
[osd]
osd_data = {scratch}/osd
osd_objectstore = memstore
memstore_device_bytes = 1073741824
[client.rgw.a]
rgw_frontends = beast endpoint=127.0.0.1:{gateway_port}
rgw_enable_ops_log = false
rgw_enable_usage_log = false
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def ceph_gateway(scratch: Path, *, access_key: str, secret_key: str) -> Iterator[str]:
    """Run a gateway that knows these keys, and give its URL."""
    fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
    monitor_port, gateway_port = free_port(), free_port()
    configuration = scratch / "ceph.conf"
    configuration.write_text(
        _CONFIGURATION.format(fsid=fsid, scratch=scratch, monitor_port=monitor_port, gateway_port=gateway_port)
    )
    environment = {**os.environ, "CEPH_CONF": str(configuration)}
    log = (scratch / "output.log").open("ab")
    daemons: list[subprocess.Popen[bytes]] = []

    def run(*command: str) -> None:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True, timeout=60)

    def start(*command: str) -> subprocess.Popen[bytes]:
        daemons.append(subprocess.Popen([*command, "-f"], env=environment, stdout=log, stderr=log))
        return daemons[-1]

    (scratch / "mon").mkdir()
    (scratch / "osd").mkdir()
    try:
        run(
            "monmaptool",
            "--create",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"v1:127.0.0.1:{monitor_port}",
            f"{scratch}/map",
        )
        run("ceph-mon", "-i", "a", "--mkfs", "--monmap", f"{scratch}/map")
        start("ceph-mon", "-i", "a")
        _insist(lambda: _succeeds(run, "ceph", "osd", "new", osd))
        _insist(lambda: _formats(scratch / "osd", fsid, osd, run))
        _insist(lambda: _comes_up(start("ceph-osd", "-i", "0"), scratch / "osd.0.log"))
        daemons[:] = [daemon for daemon in daemons if daemon.poll() is None]
        start("radosgw", "-n", "client.rgw.a")
        wait_for_port(gateway_port, daemons)
        run(
            "radosgw-admin", "user", "create", "--uid=tests", "--display-name=tests",
            f"--access-key={access_key}", f"--secret-key={secret_key}",
        )  # fmt: skip
        yield f"http://127.0.0.1:{gateway_port}"
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()
        log.close()


def _insist(attempt: Callable[[], bool]) -> None:
    """Repeat: just after its start a monitor refuses everything (`wrong fsid`, `Operation not permitted`)."""
    for _ in range(20):
        if attempt():
            return
        time.sleep(0.1)
    raise RuntimeError("Ceph does not come up: see output.log in its scratch directory")


def _succeeds(run: Callable[..., None], *command: str) -> bool:
    try:
        run(*command)
    except subprocess.CalledProcessError:
        return False
    return True


def _formats(folder: Path, fsid: str, osd: str, run: Callable[..., None]) -> bool:
    shutil.rmtree(folder)
    folder.mkdir()
    mark = folder / "ceph_fsid"
    formatted = _succeeds(run, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    return formatted and mark.is_file() and fsid in mark.read_text()


def _comes_up(osd: subprocess.Popen[bytes], log: Path) -> bool:
    while osd.poll() is None:
        if log.is_file() and "done with init" in log.read_text():
            return True
        time.sleep(0.05)
    return False
