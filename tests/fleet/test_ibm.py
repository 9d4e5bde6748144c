"""Virtual servers of IBM Cloud: the real SDK over HTTP, and servers that are hosts which the real ssh reaches."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import SoftLayer

from fleet.jobs import left_on, newest, packtrain, write_program
from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet.cloud import label_of
from packtrain.fleet.down import remove_found, take_inventory
from packtrain.fleet.fleet import Check
from packtrain.fleet.ibm import IbmFleet, IbmSettings
from packtrain.fleet.ibm_account import IbmAccount
from packtrain.job import Job
from packtrain.run.run import Run
from packtrain.store import Store
from parts.hosts import Network
from parts.runs import new_run, program_job
from parts.sandbox import wait_until
from parts.softlayer import (
    API_KEY,
    CANCEL_KEY,
    CANCELER,
    GUID,
    NO_CAPACITY,
    QUOTA,
    SoftLayerCloud,
    served,
    write_credentials,
)

CANARY = "canary-of-the-test"
ORDER = "Virtual_Guest.createObject"


@pytest.fixture
def cloud(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SoftLayerCloud]:
    """An account without hosts: its servers cannot be logged in to."""
    made = SoftLayerCloud()
    with served(made) as endpoint:
        enter(tmp_path, endpoint, monkeypatch)
        yield made


def enter(tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_credentials(tmp_path / "home", endpoint)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SL_USERNAME", "SL_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def settings(**given: Any) -> IbmSettings:
    return IbmSettings.model_validate({"datacenter": "dal10", "flavor": "B1_2X4X25", "os": "DEBIAN_12_64", **given})


def ibm_job(**given: Any) -> Job:
    return program_job(fleet={"ibm": settings(**given).model_dump(mode="json")})


def fake_ssh(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/sbin:/usr/bin:/sbin:/bin")


def start(run: Run, **given: Any) -> list[str]:
    """Start the run and return what was said."""
    said: list[str] = []
    fleet = IbmFleet(settings(**given))
    fleet.start(run, fleet.plan(run), tied=False, say=said.append)
    return said


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"flavor": "AC2_8X60X100", "cpus": 2}, "omit cpus and memory"),
        ({"flavor": None}, "or cpus and memory"),
        ({"image": "gpu-image"}, "only one of them"),
        ({"flavor": "AC2_8X60X100", "disks": ["25 GB", "2000 GB"]}, "must begin with the boot disk"),
        ({"power_off": True}, "IBM bills a server that is off"),
        ({"keep": True, "cancel_with": ["A", "B"]}, "the opposite of cancel_with"),
        ({"flavor": "AC2_8X60X100", "transient": True}, "have no GPUs"),
        ({"transient": True, "local_disk": True}, "no local disks"),
        ({"transient": True, "hourly": False}, "by the hour"),
        ({"post_install": "http://example.com/script"}, "https://"),
        ({"disks": [100]}, "such as '100 GB'"),
        ({"disks": ["1.5 GB"]}, "whole number"),
    ],
)
def test_settings_that_ibm_does_not_sell_are_refused(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        settings(**given)


def test_settings_read_back_what_they_write() -> None:
    kind = settings(flavor="AC1_8X60X25", disks=["25 GB", "2 TB"], machines="2..4", keys=["laptop"], provision="20 min")
    assert kind.disks == (25, 2000)
    assert IbmSettings.model_validate(kind.model_dump(mode="json")) == kind


def test_a_dry_run_prints_the_orders_and_asks_nobody(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SL_API_KEY", API_KEY)
    monkeypatch.setenv("SECRET", CANARY)
    run = new_run(directory_store, program_job(environment=["SECRET"]))
    given = {"flavor": "AC2_8X60X100", "os": None, "image": 2263543, "disks": ["100 GB", "2000 GB"], "keys": ["laptop"]}
    plans = IbmFleet(settings(machines=2, network_mbps=1000, **given)).plan(run)
    label = label_of(run)
    assert [plan.machine for plan in plans] == ["IBM Cloud", "IBM Cloud", f"{label}-1", f"{label}-2"]
    words = shlex.join(plans[1].arguments)
    start = f"slcli -y vs create --hostname {label}-2 --domain example.com --datacenter dal10 --billing hourly"
    assert words.startswith(f"{start} --flavor AC2_8X60X100 --image 2263543 --network 1000 --userdata ")
    assert " --san --disk 100 --disk 2000 --key laptop --tag packtrain-label:" in words
    assert plans[2].variables == ("SECRET",)
    assert plans[2].arguments[-1].startswith(f"python -P -m packtrain node {run.name} --store")
    for value in (API_KEY, CANARY):
        assert value not in repr(plans)


def test_an_order_has_what_the_job_says(
    cloud: SoftLayerCloud, directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path / "bin", monkeypatch, "echo 'no NVIDIA driver' >&2; exit 1")
    seen: list[dict[str, Any]] = []
    cloud.after = lambda name: seen.extend(cloud.orders) if name == ORDER else None
    given = {"flavor": "AC2_8X60X100", "os": None, "image": "gpu-image", "disks": ["100 GB", "2 TB"]}
    network = {"network_mbps": 1000, "private": True, "private_vlan": 42, "keys": ["desk"]}
    run = new_run(directory_store)
    with pytest.raises(PacktrainError, match="no NVIDIA driver"):
        start(run, **given, **network, domain="lab.org")
    [order] = seen
    assert order["supplementalCreateObjectOptions"]["flavorKeyName"] == "AC2_8X60X100"
    assert order["blockDeviceTemplateGroup"] == {"globalIdentifier": GUID}
    assert [one["diskImage"]["capacity"] for one in order["blockDevices"]] == [100, 2000]
    assert (order["hourlyBillingFlag"], order["localDiskFlag"], order["privateNetworkOnlyFlag"]) == (True, False, True)
    assert order["networkComponents"] == [{"maxSpeed": 1000}]
    assert order["primaryBackendNetworkComponent"] == {"networkVlan": {"id": 42}}
    assert order["sshKeys"] == [{"id": 8}]
    assert (order["hostname"], order["domain"]) == (f"{label_of(run)}-1", "lab.org")
    notes = json.loads(order["userData"][0]["value"])
    assert (notes["packtrain-run"], notes["packtrain-store"]) == (run.name, run.store.url)
    assert f"packtrain-label:{label_of(run)}" in cloud.tags[1001].split(",")
    assert cloud.hostnames == [], "a server that cannot be used is not kept"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"datacenter": "dal9"}, "fleet.ibm.datacenter: IBM sells no 'dal9'; did you mean 'dal10'?"),
        ({"flavor": "AC9_8X60X100"}, "fleet.ibm.flavor: IBM sells no 'AC9_8X60X100'; did you mean 'AC2_8X60X100'?"),
        ({"flavor": "AC2_8X60X100", "datacenter": "syd04"}, "IBM Cloud: The flavor is not available in syd04"),
        ({"keys": ["lost"]}, "fleet.ibm.keys: no ssh key 'lost' in the account; add it with `slcli sshkey add`"),
        ({"os": None, "image": "lost"}, "fleet.ibm.image: 'lost': no such image; see `slcli image list`"),
        ({"os": None, "image": 12}, "fleet.ibm.image: '12': no such image; see `slcli image list`"),
    ],
)
def test_what_cannot_be_ordered_is_refused_before_anything_is(
    cloud: SoftLayerCloud, directory_store: Store, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(Mistake) as refused:
        IbmFleet(settings(**given)).check(program_job(), directory_store)
    assert str(refused.value) == words
    assert ORDER not in cloud.calls


def test_a_directory_as_the_store_is_pointed_out_before_anything_is_paid_for(
    cloud: SoftLayerCloud, directory_store: Store
) -> None:
    said: list[str] = []
    IbmFleet(settings()).check(program_job(), directory_store, said.append)
    assert said == [
        f"{directory_store.url} is a directory: the servers have to mount it, by image or post_install; or use a bucket"
    ]
    assert cloud.orders == []


def test_credentials_that_are_missing_or_wrong_are_one_line(
    cloud: SoftLayerCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert IbmAccount().resources(None) == []
    monkeypatch.setenv("SL_API_KEY", "another")
    with pytest.raises(Mistake, match="Invalid API token; check SL_USERNAME and SL_API_KEY"):
        IbmAccount().resources(None)
    monkeypatch.delenv("SL_API_KEY")
    (tmp_path / "home" / ".softlayer").unlink()
    with pytest.raises(Mistake, match="no IBM Cloud credentials; set SL_USERNAME"):
        IbmAccount().resources(None)
    assert cloud.calls == ["Account.getVirtualGuests"]


@pytest.mark.parametrize("fault", [NO_CAPACITY, QUOTA])
def test_an_order_that_fails_half_way_is_undone(
    cloud: SoftLayerCloud, directory_store: Store, fault: tuple[str, str]
) -> None:
    cloud.cancel_seconds = 0.5  # IBM lists a server for a while after it was canceled

    def refuse(name: str) -> None:
        if name == ORDER and cloud.orders:
            raise SoftLayer.SoftLayerAPIError(*fault)

    cloud.before = refuse
    run = new_run(directory_store, ibm_job(machines=2))
    with pytest.raises(Mistake, match=fault[1].rstrip(".")):
        start(run, machines=2)
    assert cloud.calls.count(ORDER) == 2
    assert cloud.orders == []
    assert IbmAccount().resources(None) == []


def test_a_range_of_machines_takes_what_ibm_has(
    cloud: SoftLayerCloud, directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.room = 2
    fake_ssh(tmp_path / "bin", monkeypatch, "echo stop here >&2; exit 1")
    said: list[str] = []
    fleet = IbmFleet(settings(machines="2..4"))
    run = new_run(directory_store)
    with pytest.raises(PacktrainError, match="stop here"):
        fleet.start(run, fleet.plan(run), tied=False, say=said.append)
    assert any("try another datacenter or flavor, or later; continuing with 2 of 4 servers" in line for line in said)
    assert "connecting to 2 servers" in said


def test_an_order_whose_answer_is_lost_is_not_placed_again(
    cloud: SoftLayerCloud, directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path / "bin", monkeypatch, "echo stop here >&2; exit 1")

    def lose(name: str) -> None:
        if name == ORDER and cloud.calls.count(ORDER) == 1:
            raise ConnectionError("the answer is lost")

    cloud.after = lose
    with pytest.raises(PacktrainError, match="stop here"):
        start(new_run(directory_store), machines=2)
    assert cloud.calls.count(ORDER) == 2
    assert cloud.hostnames == []


def test_what_two_clients_order_at_once_is_kept_once(
    cloud: SoftLayerCloud, directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store)
    account = IbmAccount()
    order = {"datacenter": "dal10", "flavor": "B1_2X4X25", "os_code": "DEBIAN_12_64", "domain": "example.com"}
    for _ in range(2):
        account.order({**order, "hostname": f"{label_of(run)}-1"}, label_of(run), ["packtrain"])
    fake_ssh(tmp_path / "bin", monkeypatch, "echo stop here >&2; exit 1")
    with pytest.raises(PacktrainError, match="stop here"):
        start(run)
    # They were there before this client came, so it does not end the one that is left.
    assert [(one["id"], bool(one["billingItem"])) for one in cloud.orders] == [(1001, True)]


def test_a_limit_ends_the_wait_for_servers_that_ibm_does_not_provision(
    cloud: SoftLayerCloud, directory_store: Store
) -> None:
    cloud.provision_seconds = 600
    with pytest.raises(PacktrainError, match=r"only 0 of 1 servers are ready.*provisioning \(Assign Host\)"):
        start(new_run(directory_store), provision="1 s")
    assert cloud.hostnames == []


def test_down_waits_for_servers_that_ibm_does_not_cancel_yet(cloud: SoftLayerCloud, directory_store: Store) -> None:
    cloud.provision_seconds, cloud.cancels_while_busy, cloud.cancel_seconds = 1.5, False, 0.5
    run = new_run(directory_store, ibm_job())
    with pytest.raises(PacktrainError):
        start(run, provision="0.5 s")
    assert cloud.orders == []
    assert cloud.calls.count("Virtual_Guest.deleteObject") > 1


def fleet_of(run: Run) -> IbmFleet:
    assert isinstance(run.job.fleet.kind, IbmSettings)
    return run.job.fleet.kind.build()


def test_the_state_of_servers_is_told_in_words(
    cloud: SoftLayerCloud, directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store, ibm_job())
    account, fleet = IbmAccount(), fleet_of(run)
    assert fleet.queue(run) == ""
    cloud.provision_seconds = 600
    order = {"datacenter": "dal10", "flavor": "B1_2X4X25", "os_code": "DEBIAN_12_64", "domain": "example.com"}
    account.order({**order, "hostname": f"{label_of(run)}-1"}, label_of(run), ["packtrain"])
    assert fleet.queue(run) == "1 provisioning (Assign Host)"
    with pytest.raises(Mistake, match="no server to open a shell on"):
        fleet.shell(run, None)
    cloud.provision_seconds = 0
    assert fleet.queue(run) == "1 provisioned"
    cloud.switch_off(f"{label_of(run)}-1")
    [machine] = fleet.machines(run)
    assert (machine.state, machine.is_over) == ("switched off, still billed", True)
    fake_ssh(tmp_path / "bin", monkeypatch, "echo stop here >&2; exit 1")
    with pytest.raises(PacktrainError, match="stop here"):
        start(run)  # which needs it switched on
    assert fleet.queue(run) == "1 provisioned"
    cloud.cancel_seconds = 600
    [resource] = account.resources(None)
    account.delete(resource)
    account.delete(resource)  # one that is being canceled already
    assert [machine.state for machine in fleet.machines(run)] == ["being canceled"]
    cloud.cancel_seconds = 0
    assert account.resources(None) == []
    account.delete(resource)  # and one that is gone


def test_servers_of_others_are_never_listed(cloud: SoftLayerCloud, directory_store: Store) -> None:
    account, run = IbmAccount(), new_run(directory_store)
    manager = SoftLayer.VSManager(SoftLayer.create_client_from_env())
    order = {"datacenter": "dal10", "flavor": "B1_2X4X25", "os_code": "DEBIAN_12_64", "domain": "example.com"}
    for hostname in ("packtrain-gpu", "web", f"{label_of(run)}-1", f"{label_of(run)}-x"):
        manager.create_instance(**order, hostname=hostname)
    assert [one.label for one in account.resources(None)] == [label_of(run)]
    assert account.resources("packtrain-gpu") == []


# Disks.


@pytest.fixture
def disk(needs_root: None, tmp_path: Path) -> Iterator[Path]:
    """A block device of 3 GB that is blank."""
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(3_000_000_000)
    made = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True, check=True)
    try:
        yield Path(made.stdout.strip())
    finally:
        subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


def prepare(run: Run, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start a run on a server whose only free disk is this one; return why it does not start in the end."""
    mount = tmp_path / "data"
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    # No other disk of this computer is ever shown to the script, and what it mounts is gone when it ends.
    (programs / "lsblk").write_text(
        f'#!/bin/sh\n[ "$*" = "-dnpo NAME,TYPE" ] && echo {disk} disk || exec {shutil.which("lsblk")} "$@"\n'
    )
    (programs / "lsblk").chmod(0o755)
    inside = f'exec unshare -m --propagation private env PATH="{programs}:/usr/sbin:/usr/bin:/sbin:/bin" sh -c "$last"'
    other = "echo prepared >&2; exit 1"
    fake_ssh(
        tmp_path / "bin",
        monkeypatch,
        f"for last; do :; done; case $last in *{mount}*gpu*|*{mount}*-) {inside};; esac; {other}",
    )
    with pytest.raises(PacktrainError) as refused:
        start(run, disks=["25 GB", "2 TB"], mount=str(mount))
    return str(refused.value).partition(": ")[2]


def system_of(disk: Path) -> str:
    return subprocess.run(["blkid", "-p", "-o", "export", disk], capture_output=True, text=True).stdout


def test_a_second_disk_is_formatted_once(
    cloud: SoftLayerCloud, directory_store: Store, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store)
    assert prepare(run, tmp_path, disk, monkeypatch) == "prepared"
    made = system_of(disk)
    assert "TYPE=ext4" in made
    assert prepare(run, tmp_path, disk, monkeypatch) == "prepared"
    assert system_of(disk) == made, "a disk with a file system is only mounted"


def test_a_disk_with_other_data_is_not_touched(
    cloud: SoftLayerCloud, directory_store: Store, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.open("r+b") as device:
        device.write(b"a database of its own kind")
    fault = prepare(new_run(directory_store), tmp_path, disk, monkeypatch)
    assert fault == f"{disk} has no file system but is not blank; it was not touched"
    assert disk.open("rb").read(10) == b"a database"
    assert cloud.orders == []


# Servers that can be logged in to.


@pytest.fixture
def environment(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """For a client whose ssh has the key of the servers, and knows none of them."""
    config = tmp_path / "ssh_config"
    lines = (f"IdentityFile {network.scratch}/identity", "IdentitiesOnly yes", "GlobalKnownHostsFile /dev/null")
    config.write_text("\n".join(["Host packtrain-*", *lines, "LogLevel ERROR", ""]))
    fake_ssh(tmp_path / "bin", monkeypatch, f'exec {shutil.which("ssh")} -F {config} "$@"')
    return {"PATH": os.environ["PATH"], "PACKTRAIN_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def account(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SoftLayerCloud]:
    """An account whose servers are the hosts."""
    made = SoftLayerCloud(network)
    with served(made, network.gateway) as endpoint:
        enter(tmp_path, endpoint, monkeypatch)
        yield made


FLEET = "{ibm: {datacenter: dal10, flavor: B1_2X4X25, os: DEBIAN_12_64, keys: [laptop], machines: 2}, workers: 1}"


# Looks for the secret where others could see it, and ends when the test says so.
PROGRAM = """
import os, psutil, time
from pathlib import Path

lines = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
seen = [line for line in lines if os.environ["SECRET"] in line]
own = [name for name in os.environ if name.startswith("SL_")]
print(os.environ.get("RANK", "0"), "of", os.environ.get("WORLD_SIZE", "1"), seen, own, flush=True)
while not Path("END").exists():
    time.sleep(0.1)
"""


def test_two_servers_train_and_are_canceled_at_the_end(
    network: Network, account: SoftLayerCloud, tmp_path: Path, environment: dict[str, str]
) -> None:
    account.provision_seconds = 0.5
    store, end = network.shared / "two", network.shared / "end"
    script = PROGRAM.replace("END", str(end))
    job = write_program(tmp_path / "program", store, FLEET, script, "environment: [SECRET]")
    secrets = {**environment, "SECRET": CANARY}
    done = packtrain("run", job, "--detach", directory=tmp_path, environment=secrets)
    assert done.returncode == 0, done.stderr + done.stdout
    run = newest(store)
    label, fleet = label_of(run), fleet_of(run)
    for said in (f"{label}-2: provisioning (Assign Host)", f"{label}-1: provisioned"):
        assert said in done.stdout, done.stdout
    assert "IBM bills servers until they are canceled; `packtrain down counts-1" in done.stdout
    assert [(one.name, one.state) for one in fleet.machines(run)] == [
        (f"{label}-1", "running"),
        (f"{label}-2", "running"),
    ]

    # A second start orders nothing, starts nothing and ends nothing.
    lines: list[str] = []
    fleet.start(run, fleet.plan(run), tied=False, say=lines.append)
    assert len([line for line in lines if "already has its node there" in line]) == 2
    assert account.calls.count(ORDER) == 2
    first = min(run.leases(), key=lambda lease: lease.address)
    command = fleet.shell(run, first.node)
    assert command[-2] == f"{label}-1"
    assert f"HostName={first.address}" in command

    # A client that sees the end cancels the servers, after the last lines of the logs.
    end.touch()
    ended = packtrain("resume", run.name, "--store", store, directory=tmp_path, environment=secrets)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert f"deleting virtual server {label}-1 (1001) in dal10" in ended.stdout
    said_by = sorted((line.generation, line.text) for line in run.log_lines().read() if line.rank is not None)
    generations = [(one.number, one.reason) for one in run.generations()]
    events = [(event.time, event.kind, event.text) for event in run.events().read()]
    assert said_by == [(1, f"{rank} of 2 [] []") for rank in range(2)], (generations, sorted(events))
    assert all(lease.left for lease in run.leases())
    assert account.orders == []
    assert not list((tmp_path / "state" / "packtrain" / "known_hosts").iterdir())
    for secret in (CANARY, API_KEY):
        places = (tmp_path / "program", tmp_path / "cache", network.shared, *(host.home for host in network))
        found = [path for place in places for path in place.rglob("*") if path.is_file()]
        assert [path for path in found if secret.encode() in path.read_bytes()] == []
        assert secret not in done.stdout + done.stderr + ended.stdout + ended.stderr


def test_a_server_cancels_itself_at_the_end_of_the_budget_if_it_has_a_key_for_that(
    network: Network, account: SoftLayerCloud, tmp_path: Path, environment: dict[str, str]
) -> None:
    store = network.shared / "alone"
    fleet = FLEET.replace("machines: 2", "cancel_with: [CANCELER, CANCEL_KEY]")
    job = write_program(tmp_path / "program", store, fleet, "import time\ntime.sleep(600)\n", "budget: {hours: 0.002}")
    keys = {**environment, "CANCELER": CANCELER, "CANCEL_KEY": CANCEL_KEY}
    done = packtrain("run", job, "--detach", directory=tmp_path, environment=keys)
    assert done.returncode == 0, done.stderr + done.stdout
    wait_until(lambda: not account.orders, "the server to cancel itself")
    run = newest(store)
    result = run.result()
    assert result is not None
    assert "budget" in result.reason
    assert left_on(network) == []
    for place in (tmp_path / "program", tmp_path / "cache", network.shared, *(host.home for host in network)):
        found = [path for path in place.rglob("*") if path.is_file()]
        assert [path for path in found if CANCEL_KEY.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("method", "time"), [(ORDER, 1), ("Virtual_Guest.setTags", 1), (ORDER, 2), ("Account.getVirtualGuests", 5)]
)
def test_nothing_is_left_after_a_client_that_was_killed(
    account: SoftLayerCloud, network: Network, tmp_path: Path, environment: dict[str, str], method: str, time: int
) -> None:
    store = network.shared / f"killed-{method}-{time}"
    job = write_program(tmp_path / "program", store, FLEET, "import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "packtrain", "run", str(job), "--detach"]
    clients: list[subprocess.Popen[bytes]] = []

    def kill(name: str) -> None:
        if name == method and account.calls.count(method) == time:
            clients[0].kill()

    account.after = kill  # IBM has done what it was asked
    clients.append(subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL))
    assert clients[0].wait(60) == -signal.SIGKILL
    account.after = lambda _: None
    assert account.hostnames
    inventory = take_inventory(["ibm"])
    assert {(one.run, one.store) for one in inventory.resources} == {("counts-1", str(store))}
    remove_found(inventory)
    assert account.orders == []
    assert take_inventory(["ibm"]).resources == []
    assert left_on(network) == []


# Doctor.


def checks_of(store: Store | None = None, **given: Any) -> dict[str, Check]:
    return {check.step: check for check in IbmFleet(settings(**given)).checks(store)}


def test_doctor_asks_ibm_for_everything_that_an_order_needs_and_orders_nothing(cloud: SoftLayerCloud) -> None:
    checks = checks_of(keys=["laptop"])
    assert all(check.ok and not check.advice for check in checks.values()), checks
    assert [*checks] == ["credentials", "price list", "datacenter", "flavor", "os", "key", "order", "leftovers"]
    assert checks["credentials"].detail == "user someone"
    assert ORDER not in cloud.calls


def test_doctor_says_what_ibm_does_not_sell_or_know(
    cloud: SoftLayerCloud, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CANCEL_KEY", raising=False)
    given = {"flavor": "B1_2X4X52", "keys": ["lost"], "cancel_with": ["HOME", "CANCEL_KEY"]}
    checks = checks_of(directory_store, **given)
    assert "did you mean 'B1_2X4X25'?" in checks["flavor"].advice
    assert "no ssh key 'lost'" in checks["key"].detail
    assert checks["cancel_with"].detail == "CANCEL_KEY is not set here"
    assert checks["store"].skipped
    assert not checks["order"].ok
    assert checks["datacenter"].ok
    assert all(check.advice for check in checks.values() if not check.ok)
    assert ORDER not in cloud.calls


def test_doctor_stops_at_credentials_that_ibm_refuses(cloud: SoftLayerCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SL_USERNAME", "someone")
    monkeypatch.setenv("SL_API_KEY", "wrong")
    checks = checks_of()
    assert [*checks] == ["credentials"]
    assert "check SL_USERNAME" in checks["credentials"].advice
    assert ORDER not in cloud.calls
