"""Amazon's EC2 and Auto Scaling, with machines that work: moto answers the requests, hosts play its instances.

A thread sees to it that what moto lists and what runs are the same. It boots a host for a new instance, with the user
data of its launch template and a metadata service; cuts the power of a host whose instance is terminated; and
terminates the instance of a host that powers itself off. moto's groups replace what is terminated. What moto does not
do is done here by hand: preemption notices, and detaching the volumes of what is gone.
"""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from packtrain.fleet.cloud import label_of
from packtrain.run.run import Run
from parts import metadata
from parts.host_run import bucket_on
from parts.hosts import Host, Network
from parts.s3 import S3Server

REGION = "us-east-1"
ROLE_KEY, ROLE_SECRET, ROLE_TOKEN = "AKIAROLEROLEROLE", "canary-of-the-role-secret", "canary-of-the-role-token"
_CONTROL_PORT = 5001
_LOOK_SECONDS = 0.5
_ALIVE = ("pending", "running")

# Programs that a host has instead of its computer's: power is the hypervisor's affair.
_POWER = """#!/bin/sh
case "$(basename "$0") $*" in
  "shutdown -P +"*) echo "$*" >> /root/scheduled ;;
  "systemctl poweroff" | "shutdown -P now" | "poweroff -f") touch /root/off ;;
  *) exit 1 ;;
esac
"""
_PREPARE = r"""
set -e
for name in systemctl shutdown poweroff; do cp /root/power /usr/local/sbin/$name; chmod 755 /usr/local/sbin/$name; done
ip addr add ADDRESS/32 dev lo
mkdir -p /dev/disk && mount -t tmpfs tmpfs /dev/disk && mkdir /dev/disk/by-id
"""


@dataclass
class Instance:
    """An instance that a host plays. `folder` keeps its log and its metadata when the host is gone."""

    id: str
    host: Host
    folder: Path
    devices: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    is_on: bool = True
    commands: set[str] = field(default_factory=set)
    """Every command line that was seen on it."""

    def warn(self, path: str, content: Mapping[str, str]) -> None:
        """Put a notice where AWS puts it: spot/instance-action or events/recommendations/rebalance."""
        file = self.folder / "metadata" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".part").write_text(json.dumps(content))
        file.with_suffix(".part").rename(file)

    @property
    def log(self) -> str:
        """The log of the boot script, as of the last look."""
        file = self.folder / "log.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def user_data(self) -> str:
        return (self.folder / "user-data.txt").read_text()

    @property
    def scheduled(self) -> str:
        """The shutdowns that were scheduled on it."""
        return (self.folder / "scheduled.txt").read_text()


class Cloud:
    """One account in one region."""

    def __init__(self, network: Network, bucket: S3Server, control: S3Server) -> None:
        self.network, self.bucket, self._control = network, bucket, control
        self.instances: dict[str, Instance] = {}
        self.errors: list[str] = []
        self.has_capacity = True
        self._clients: dict[str, Any] = {}
        self._making, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="hypervisor")

    def environment(self) -> dict[str, str]:
        """Return the variables with which AWS is this one."""
        endpoints = {"AWS_ENDPOINT_URL": self._control.endpoint, "AWS_ENDPOINT_URL_S3": self.bucket.endpoint}
        return {**self.bucket.environment(), **endpoints, "AWS_REGION": REGION}

    def client(self, service: str) -> Any:
        keys = {"aws_access_key_id": self.bucket.access_key, "aws_secret_access_key": self.bucket.secret_key}
        with self._making:  # which is slow, and not safe in several threads
            if service not in self._clients:
                where = {"endpoint_url": self._control.endpoint, "region_name": REGION}
                self._clients[service] = boto3.client(service, **where, **keys)
        return self._clients[service]

    @property
    def alive(self) -> list[Instance]:
        return [instance for instance in self.instances.values() if instance.is_on]

    def of(self, run: Run) -> list[Instance]:
        """Return all instances that the run has had, oldest first."""
        named = [{"Name": "tag:packtrain-run", "Values": [run.name]}]
        pages = self.client("ec2").describe_instances(Filters=named)["Reservations"]
        names = {one["InstanceId"] for page in pages for one in page["Instances"]}
        return [instance for name, instance in self.instances.items() if name in names]

    def described(self) -> list[dict[str, Any]]:
        pages = self.client("ec2").describe_instances()["Reservations"]
        return [one for page in pages for one in page["Instances"]]

    def group_of(self, run: Run) -> dict[str, Any] | None:
        asked = self.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        return next((group for group in asked if group["AutoScalingGroupName"] == label_of(run)), None)

    def leftovers(self, run: Run) -> list[str]:
        """Return what the run has, as AWS's own inventory of tags and names lists it."""
        label = [{"Name": "tag:packtrain-label", "Values": [label_of(run)]}]
        ec2, iam = self.client("ec2"), self.client("iam")
        pages = ec2.describe_instances(Filters=label)["Reservations"]
        instances = [one for page in pages for one in page["Instances"] if one["State"]["Name"] != "terminated"]
        return [
            *(one["InstanceId"] for one in instances),
            *(one["LaunchTemplateName"] for one in ec2.describe_launch_templates(Filters=label)["LaunchTemplates"]),
            *(one["GroupId"] for one in ec2.describe_security_groups(Filters=label)["SecurityGroups"]),
            *(one["RoleName"] for one in iam.list_roles()["Roles"] if one["RoleName"] == label_of(run)),
            *([label_of(run)] if self.group_of(run) else []),
        ]

    def volumes(self, name: str) -> list[str]:
        """Return the states of the volumes of that name."""
        named = [{"Name": "tag:Name", "Values": [name]}]
        return [volume["State"] for volume in self.client("ec2").describe_volumes(Filters=named)["Volumes"]]

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        for instance in self.alive:
            self._cut_power(instance)

    # The hypervisor.

    def _work(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self._look()
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        states = {one["InstanceId"]: one for one in self.described()}
        for instance in self.alive:
            self._watch(instance)
            if states[instance.id]["State"]["Name"] not in _ALIVE:
                self._cut_power(instance)
            elif (instance.host.home / "off").exists():
                # As AWS does with an instance whose shutdown behavior is to terminate.
                self.client("ec2").terminate_instances(InstanceIds=[instance.id])
        self._plug_volumes()
        for name, state in states.items():
            if self.has_capacity and name not in self.instances and state["State"]["Name"] in _ALIVE:
                self._boot(name, state)

    def _boot(self, name: str, state: Mapping[str, Any]) -> None:
        free = [host for host in self.network if host not in [instance.host for instance in self.alive]]
        if not free:
            return  # no capacity now
        host = free[0]
        folder = self.network.shared / name
        for file in ("off", "scheduled"):
            (host.home / file).unlink(missing_ok=True)
        host.start()
        instance = self.instances[name] = Instance(name, host, folder)
        self._write_metadata(instance, state)
        (host.home / "power").write_text(_POWER)
        done = host.run(["bash", "-c", _PREPARE.replace("ADDRESS", metadata.ADDRESS)])
        assert done.returncode == 0, done.stderr
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        instance.processes.append(host.popen([sys.executable, metadata.__file__, folder / "metadata"], **quiet))
        host.run(["bash", "-c", f"until (: > /dev/tcp/{metadata.ADDRESS}/80) 2>/dev/null; do sleep 0.1; done"])
        asked = self.client("ec2").describe_instance_attribute(InstanceId=name, Attribute="userData")
        data = base64.b64decode(asked["UserData"]["Value"])
        script = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data  # as cloud-init does
        (folder / "user-data.txt").write_bytes(script)
        (host.home / "user-data").write_bytes(script)
        with (folder / "console.txt").open("wb") as console:
            quiet["stdout"] = console
            instance.processes.append(host.popen(["bash", "/root/user-data"], **quiet, stderr=console))

    def _write_metadata(self, instance: Instance, state: Mapping[str, Any]) -> None:
        keys = {"AccessKeyId": ROLE_KEY, "SecretAccessKey": ROLE_SECRET, "Token": ROLE_TOKEN}
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 6 * 3600))
        role = {"Code": "Success", "Type": "AWS-HMAC", "Expiration": expires, **keys}
        entries = {
            "instance-id": instance.id,
            "placement/region": REGION,
            "placement/availability-zone": state["Placement"]["AvailabilityZone"],
            "iam/security-credentials/packtrain": json.dumps(role),
        }
        for path, text in entries.items():
            file = instance.folder / "metadata" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def _watch(self, instance: Instance) -> None:
        """Keep what a machine would take with it: its log, and all command lines."""
        with suppress(OSError):
            (instance.folder / "log.txt").write_bytes((instance.host.root / "var/log/packtrain.log").read_bytes())
        with suppress(OSError):
            (instance.folder / "scheduled.txt").write_bytes((instance.host.home / "scheduled").read_bytes())
        for process in instance.host.processes():
            with suppress(Exception):
                instance.commands.add(" ".join(process.cmdline()))

    def _plug_volumes(self) -> None:
        claimed = [{"Name": "tag-key", "Values": ["Name"]}]
        for volume in self.client("ec2").describe_volumes(Filters=claimed)["Volumes"]:
            for attached in volume["Attachments"]:
                instance = self.instances.get(attached["InstanceId"])
                if instance is not None and instance.is_on and volume["VolumeId"] not in instance.devices:
                    self._plug(instance, volume["VolumeId"])

    def _plug(self, instance: Instance, name: str) -> None:
        disk = self.network.scratch / f"{name}.img"
        if not disk.exists():
            with disk.open("wb") as file:
                file.truncate(64 << 20)  # whatever size was asked for: nobody fills it
        found = subprocess.run(["losetup", "-f", "--show", disk], capture_output=True, text=True, check=True)
        instance.devices[name] = found.stdout.strip()
        link = f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{name.replace('-', '')}"
        instance.host.run(["ln", "-s", instance.devices[name], link])

    def _cut_power(self, instance: Instance) -> None:
        self._watch(instance)
        instance.host.kill()
        instance.is_on = False
        for process in instance.processes:
            process.wait()
        for name, device in instance.devices.items():
            subprocess.run(["losetup", "-d", device])
            with suppress(Exception):
                self.client("ec2").detach_volume(VolumeId=name, InstanceId=instance.id)


@contextmanager
def cloud(scratch: Path, count: int) -> Iterator[Cloud]:
    """Give an account whose region has room for so many machines, and the tests' bucket."""
    network = Network(scratch.resolve(), count, (), 4_000_000_000)
    try:
        network.prepare()
        # Two servers: moto answers one request at a time, and lists of instance types take it seconds.
        with bucket_on(network) as bucket, bucket_on(network, _CONTROL_PORT) as control:
            made = Cloud(network, bucket, control)
            made.start()
            try:
                yield made
            finally:
                made.end()
    finally:
        network.end()
