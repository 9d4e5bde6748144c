"""Look up what the settings of the aws fleet name: a missing image, key or subnet is refused before anything exists."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from packtrain.errors import FieldMistake
from packtrain.fleet.aws.region import AwsRefusal, AwsRegion
from packtrain.fleet.aws.volumes import gibibytes
from packtrain.store import Store

if TYPE_CHECKING:
    from packtrain.fleet.aws.fleet import AwsSettings


def check_store(store: Store, mounts: Collection[str]) -> None:
    if store.is_directory and not any(f"{store.url}/".startswith(f"{path.rstrip('/')}/") for path in mounts):
        fault = f"machines of aws do not have the directory {store.url}; use s3://bucket/prefix, or fleet.aws.mounts"
        raise FieldMistake("store", fault)


def find_image(region: AwsRegion, settings: AwsSettings) -> dict[str, Any]:
    """Return the image as EC2 describes it."""
    name = settings.image
    if name.startswith("ssm:"):
        asked = {"Name": name.removeprefix("ssm:")}
        found = _known("image", f"no parameter {asked['Name']}", lambda: region.ask("ssm", "get-parameter", **asked))
        name = found["Parameter"]["Value"]
    if name.startswith("ami-"):
        found = _known("image", f"no image {name}", lambda: region.ask("ec2", "describe-images", ImageIds=[name]))
        images = found["Images"]
    else:
        named = [{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
        images = region.ask_all("ec2", "describe-images", "Images", Owners=[settings.owner], Filters=named)
    if not images:
        raise _missing("image", f"no image {name!r} of {settings.owner} in {region.place}; see fleet.aws.owner")
    newest: dict[str, Any] = max(images, key=lambda image: str(image.get("CreationDate", "")))
    disks = {disk.get("DeviceName"): disk.get("Ebs", {}) for disk in newest.get("BlockDeviceMappings", ())}
    needed = disks.get(newest.get("RootDeviceName"), {}).get("VolumeSize", 0)
    if gibibytes(settings.disk) < needed:
        raise _missing("disk", f"{settings.disk} is too small for {newest['ImageId']}, which needs {needed} GB")
    return newest


def check_types(region: AwsRegion, settings: AwsSettings, image: dict[str, Any] | None) -> dict[str, set[str]]:
    """Refuse instance types that are unknown or do not fit the image, if it is known; return the zones of each."""
    names = list(settings.instances)
    try:
        found = region.ask("ec2", "describe-instance-types", InstanceTypes=names)["InstanceTypes"]
    except AwsRefusal as refusal:
        if refusal.code == "InvalidInstanceType":
            unknown = ", ".join(re.findall(r"[a-z0-9-]+\.[a-z0-9-]+", str(refusal))) or ", ".join(names)
            raise _missing("instances", f"unknown instance type in {region.place}: {unknown}") from None
        raise
    for kind in found:
        architecture = None if image is None else image.get("Architecture")
        known = kind.get("ProcessorInfo", {}).get("SupportedArchitectures", [architecture])
        if image is not None and architecture not in known:
            fault = f"{image['ImageId']} is for {architecture}, but {kind['InstanceType']} is {known[0]}"
            raise _missing("image", f"{fault}; use another image")
        if settings.efa > kind.get("NetworkInfo", {}).get("EfaInfo", {}).get("MaximumEfaInterfaces", 0):
            raise _missing("efa", f"{kind['InstanceType']} has fewer EFA interfaces than {settings.efa}")
    by_type = [{"Name": "instance-type", "Values": names}]
    offers = region.ask_all(
        "ec2", "describe-instance-type-offerings", "InstanceTypeOfferings",
        LocationType="availability-zone", Filters=by_type,
    )  # fmt: skip
    return {name: {one["Location"] for one in offers if one["InstanceType"] == name} for name in names}


def find_subnets(
    region: AwsRegion, settings: AwsSettings, volumes: Sequence[str] | None, offers: dict[str, set[str]]
) -> list[dict[str, Any]]:
    """Return the subnets of zones that offer one of the types and, unless None, have volumes."""
    if settings.subnets:
        wanted = list(settings.subnets)
        found = _known(
            "subnets", f"no subnet {', '.join(wanted)}", lambda: region.ask("ec2", "describe-subnets", SubnetIds=wanted)
        )["Subnets"]
    else:
        own = [{"Name": "default-for-az", "Values": ["true"]}]
        found = region.ask_all("ec2", "describe-subnets", "Subnets", Filters=own)
    if not found:
        raise _missing("subnets", f"{region.place} has no default VPC; name subnets of another one")
    if len({subnet["VpcId"] for subnet in found}) > 1:
        raise _missing("subnets", "are in different VPCs; machines could not reach each other")
    zones = {subnet["AvailabilityZone"] for subnet in found}
    if unknown := set(settings.zones) - zones:
        raise _missing("zones", f"no subnet in {', '.join(sorted(unknown))}; there are {', '.join(sorted(zones))}")
    zones &= set(settings.zones) or zones
    if volumes is not None:
        if not zones & set(volumes):
            raise _missing("volume.name", f"its free volumes are in {', '.join(volumes)}; ask for machines there")
        zones &= set(volumes)
    offering = set().union(*offers.values())
    if not zones & offering:
        types, there = ", ".join(offers), ", ".join(sorted(zones))
        raise _missing("instances", f"{there} do not offer {types}; zones that do: {', '.join(sorted(offering))}")
    return [subnet for subnet in found if subnet["AvailabilityZone"] in zones & offering]


Named = tuple[str, str, Callable[[], Any]]
"""A field, what it names, and the question that refuses what does not exist; its answer is None for who may not ask."""


def named(region: AwsRegion, settings: AwsSettings) -> Iterator[Named]:
    """Yield the key pair, the role, the placement group and the secrets that the settings name."""
    asked: list[tuple[str, str, str, str, dict[str, Any]]] = []
    if settings.key is not None:
        asked.append(("key", f"key pair {settings.key}", "ec2", "describe-key-pairs", {"KeyNames": [settings.key]}))
    if settings.role is not None:
        role = {"InstanceProfileName": settings.role}
        asked.append(("role", f"instance profile {settings.role}", "iam", "get-instance-profile", role))
    if settings.placement_group is not None:
        group = {"GroupNames": [settings.placement_group]}
        title = f"placement group {settings.placement_group}"
        asked.append(("placement_group", title, "ec2", "describe-placement-groups", group))
    for field, title, service, operation, request in asked:
        ask = partial(region.ask, service, operation, **request)
        yield field, title, partial(_known, field, f"no {title}", ask)
    for variable, reference in settings.secrets.items():
        yield f"secrets.{variable}", f"secret {reference}", partial(_find_secret, region, variable, reference)


def _find_secret(region: AwsRegion, variable: str, reference: str) -> Any:
    """Only ask whether it exists: its value is for the machines alone."""
    service, _, name = reference.partition(":")
    field, missing = f"secrets.{variable}", f"no secret {reference}"
    if service == "secretsmanager":
        return _known(field, missing, lambda: region.ask("secretsmanager", "describe-secret", SecretId=name))
    filters = [{"Key": "Name", "Values": [name]}]
    found = _known(field, missing, lambda: region.ask("ssm", "describe-parameters", ParameterFilters=filters))
    if found is not None and not found["Parameters"]:
        raise _missing(field, f"{missing} in {region.place}")
    return found


def _known(field: str, missing: str, ask: Callable[[], dict[str, Any]]) -> Any:
    """Return the answer, or None if this person may not ask: then the machines show it."""
    try:
        return ask()
    except AwsRefusal as refusal:
        # A parameter's and a secret's own words; everything else of EC2 has NotFound in its code.
        if refusal.is_missing or refusal.code in ("InvalidAMIID.Malformed", "InvalidPlacementGroup.Unknown"):
            raise _missing(field, f"{missing} in this region and account") from None
        if refusal.is_forbidden and field not in ("image", "subnets"):
            return None
        raise


def _missing(field: str, fault: str) -> FieldMistake:
    return FieldMistake(f"fleet.aws.{field}", fault)


# Why a group gets no machines.


@dataclass(frozen=True)
class Trouble:
    """The last failure of a group, in words. `for_good`: no other type or zone, and no waiting, will help."""

    text: str
    for_good: bool


_TROUBLES = (
    (r"vcpu|VcpuLimitExceeded", True, "the account's quota of vCPUs for these instance types is used up"
     "; ask for more under Service Quotas, or use other types"),
    (r"MaxSpotInstanceCountExceeded|spot instance count", True, "the account's quota of spot machines is used up"
     "; ask for more under Service Quotas, or set spot: false"),
    (r"image id .* does not exist|InvalidAMIID", True, "the image is gone; set another fleet.aws.image"),
    (r"IAM Instance Profile|iamInstanceProfile", True, "AWS refuses the instance profile; check fleet.aws.role"),
    (r"UnauthorizedOperation|not authorized", True, "AWS may not start machines for this account; check the role"
     " AWSServiceRoleForAutoScaling, and the key of encrypted disks"),
    (r"sufficient .*capacity|InsufficientInstanceCapacity|no Spot capacity|UnfulfillableCapacity", False,
     "AWS has no free machines of these types in these zones; more instances and zones help"),
    (r"Unsupported|not supported in your requested", False, "a zone does not offer the instance type"),
)  # fmt: skip


def trouble_of(activities: Sequence[dict[str, Any]]) -> Trouble | None:
    """Return what keeps a group from starting machines, from its activities, newest first; None if nothing does."""
    for activity in activities:
        if activity.get("StatusCode") == "Successful":
            return None
        if activity.get("StatusCode") == "Failed":
            message = str(activity.get("StatusMessage") or "")
            for pattern, for_good, text in _TROUBLES:
                if re.search(pattern, message, re.IGNORECASE):
                    return Trouble(text, for_good)
            return Trouble(message, for_good=False)
    return None
