"""EBS volumes with data that outlive a run: `imagenet_0`, `imagenet_1` and so on, one for each machine.

A machine takes a free one of its zone when it starts, or makes one. The client checks that this can work, and asks for
machines in the zones that have volumes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from packtrain.errors import FieldMistake, Mistake
from packtrain.fleet.aws.region import AwsRefusal, AwsRegion
from packtrain.fleet.fleet import DiskSnapshot
from packtrain.job.part import Location, Ordinal, Part, matching, must_be, text_in_schema
from packtrain.units import BYTES_PATTERN, Machines, parse_bytes

PACK = "packtrain-pack"  # tag of a snapshot: the pack that is on it
_FIELD = "fleet.aws.volume"


def gibibytes(size: str) -> int:
    """Return a size as EBS counts it: what AWS, and a job, call 600 GB are 600 GiB."""
    return math.ceil(parse_bytes(re.sub("i(?=B$)", "", size.strip())) / 1e9)


def _read_size(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(must_be("a size, such as '600 GB'", value))
    gibibytes(value)
    return value


DiskSize = Annotated[str, PlainValidator(_read_size, json_schema_input_type=text_in_schema(BYTES_PATTERN, "600 GB"))]
VolumeName = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "a name, such as imagenet")]
SnapshotName = Annotated[str, matching(r"snap-[0-9a-f]{8,17}", "a snapshot, such as snap-0123456789abcdef0")]


class VolumeSettings(Part):
    """Volumes by the prefix of their names. One that is missing is made from the snapshot, or blank with `size`."""

    name: VolumeName
    snapshot: SnapshotName | None = None
    size: DiskSize | None = None
    type: Literal["gp2", "gp3", "io1", "io2", "st1", "sc1"] = "gp3"
    iops: Ordinal | None = None
    throughput: Ordinal | None = None

    @property
    def can_be_made(self) -> bool:
        return self.snapshot is not None or self.size is not None

    @property
    def parameters(self) -> Mapping[str, str | int]:
        """The request to EC2, if a machine has to make one."""
        parameters = {
            "SnapshotId": self.snapshot,
            "Size": None if self.size is None else gibibytes(self.size),
            "VolumeType": self.type,
            "Iops": self.iops,
            "Throughput": self.throughput,
        }
        return {name: value for name, value in parameters.items() if value is not None}

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.iops is not None and self.type not in ("gp3", "io1", "io2"):
            yield ("iops",), f"{self.type} volumes have no iops to set; use gp3, io1 or io2"
        if self.iops is None and self.type in ("io1", "io2"):
            yield ("iops",), f"is required for {self.type} volumes"
        if self.throughput is not None and self.type != "gp3":
            yield ("throughput",), f"{self.type} volumes have no throughput to set; use gp3"


def volume_zones(region: AwsRegion, volume: VolumeSettings, machines: Machines) -> list[str] | None:
    """Return the zones in which machines find volumes; None if they can be made in any. Refuses what cannot work."""
    if volume.snapshot is not None:
        try:
            region.ask("ec2", "describe-snapshots", SnapshotIds=[volume.snapshot])
        except AwsRefusal as refusal:
            if refusal.is_missing:
                raise FieldMistake(f"{_FIELD}.snapshot", f"no snapshot {volume.snapshot} in {region.place}") from None
            raise
    volumes = named_volumes(region, volume.name)
    free = Counter(existing["AvailabilityZone"] for existing in volumes if existing["State"] == "available")
    if sum(free.values()) >= machines.most:
        return sorted(free)  # enough for all machines: none has to be made
    if volume.can_be_made:
        return None
    if not volumes:
        fault = f"no volume named {volume.name}_0, _1, ... in {region.place}; give a snapshot, or a size for blank ones"
        raise FieldMistake(f"{_FIELD}.name", fault)
    if sum(free.values()) < machines.least:
        fault = f"only {sum(free.values())} of {len(volumes)} volumes {volume.name}_* are free, for {machines} machines"
        raise FieldMistake(f"{_FIELD}.name", f"{fault}; end the runs that use them, or give a snapshot")
    return sorted(free)


def named_volumes(region: AwsRegion, name: str) -> list[dict[str, Any]]:
    named = {"Name": "tag:Name", "Values": [f"{name}_*"]}
    numbered = re.compile(rf"{re.escape(name)}_[0-9]+")
    return [
        volume
        for volume in region.ask_all("ec2", "describe-volumes", "Volumes", Filters=[named])
        if any(tag["Key"] == "Name" and numbered.fullmatch(str(tag["Value"])) for tag in volume.get("Tags", ()))
    ]


def snapshot_of(
    region: AwsRegion,
    volume: VolumeSettings,
    instances: Sequence[str],
    used: Collection[str],
    run: str,
    pack: str | None,
) -> DiskSnapshot:
    """Return a snapshot of a volume of a run; of a pack there is only one.

    The volume is one that these instances have, or that machines of the run have `used` and that is free now.
    """
    if pack is not None:
        filters = [{"Name": f"tag:{PACK}", "Values": [pack]}, {"Name": "tag:Name", "Values": [volume.name]}]
        snapshots = region.ask_all("ec2", "describe-snapshots", "Snapshots", OwnerIds=["self"], Filters=filters)
        if good := [snapshot["SnapshotId"] for snapshot in snapshots if snapshot["State"] != "error"]:
            return DiskSnapshot(good[0], False, f"{_FIELD}.snapshot")
    # By their name as well: whoever can write the store can write which ones were used.
    named = named_volumes(region, volume.name)
    attached = [
        existing
        for existing in named
        if any(attachment["InstanceId"] in instances for attachment in existing.get("Attachments", ()))
    ]
    free = [existing for existing in named if existing["VolumeId"] in used and existing["State"] == "available"]
    if not attached and not free:
        fault = f"{run}: no volume {volume.name}_* is attached to its machines, and none that they used is free"
        raise Mistake(f"{fault}; wait until they have started, or until the run that uses it has ended")
    tags = {"Name": volume.name, "packtrain-run": run, **({PACK: pack} if pack else {})}
    snapshot = region.ask(
        "ec2",
        "create-snapshot",
        VolumeId=(attached or free)[0]["VolumeId"],
        Description=f"{volume.name} of {run}",
        TagSpecifications=[{"ResourceType": "snapshot", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}],
    )
    return DiskSnapshot(snapshot["SnapshotId"], True, f"{_FIELD}.snapshot")
