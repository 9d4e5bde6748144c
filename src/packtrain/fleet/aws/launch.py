"""The launch of machines of AWS: every request as a command that a person could run, and their execution.

The order: role, security group, template, a group without machines, its end at the budget's end, and only then the
machines. So whatever interrupts it, nothing runs that AWS would not end by itself.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from string import Template
from typing import IO, TYPE_CHECKING, Any

from packtrain.backoff import Backoff
from packtrain.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MISTAKE,
    EXIT_NOT_FOUND,
    EXIT_STOPPED,
    EXIT_UNFINISHED,
    Mistake,
    PacktrainError,
)
from packtrain.files import sha256_of
from packtrain.fleet.aws.policy import ALL_RUNS, ASSUMED_BY_MACHINES, policy
from packtrain.fleet.aws.region import BUSY, AwsRefusal, AwsRegion, tag_value
from packtrain.fleet.aws.volumes import gibibytes
from packtrain.fleet.cloud import budget_seconds, label_of, tags_of
from packtrain.fleet.environment import FIND, write_archive
from packtrain.fleet.fleet import LaunchPlan, node_arguments, values_of
from packtrain.fleet.scripts import script_text
from packtrain.identity import identity, source
from packtrain.run.run import Run
from packtrain.store.services import checked_endpoint
from packtrain.system import cache_directory

if TYPE_CHECKING:
    from packtrain.fleet.aws.fleet import AwsSettings

MAX_USER_DATA = 16384  # bytes: compressed, which cloud-init undoes, and before they are encoded as text
# A node counts from when it joins, and ends the run itself; AWS ends what is left, after the time to boot.
_START_SECONDS = 300.0
_DELETION_SECONDS = 300.0  # of a former group of the same name
_BUSY_SECONDS = 60.0  # of a group that is changing
_GROUP_ID = ("--query", "GroupId", "--output", "text")
_ENCODE = ("sh", "-c", "gzip -n | base64 -w0")
_REQUEST = "--cli-input-json"
_BETWEEN_MEMBERS = {
    "GroupId": "${SECURITY_GROUP}",
    "IpPermissions": [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "${SECURITY_GROUP}"}]}],
}

ENVIRONMENT = "environment.tar"
"""Name in a run's folder of what a machine makes its Python environment of; `put_environment` puts it there."""

# Of the services that instance.py asks. User data can be read in AWS's console: no address may have a password in it.
_ENDPOINTS = ("AWS_ENDPOINT_URL", *(f"AWS_ENDPOINT_URL_{service}" for service in (
    "S3", "EC2", "AUTO_SCALING", "SSM", "SECRETS_MANAGER",
)))  # fmt: skip
_EXITS = {
    "done": EXIT_DONE,
    "stopped": EXIT_STOPPED,
    "missing": EXIT_NOT_FOUND,
    "failed": EXIT_FAILED,
    "mistake": EXIT_MISTAKE,
    "unfinished": EXIT_UNFINISHED,
}

Tags = Sequence[Mapping[str, str]]


def launch_plans(run: Run, settings: AwsSettings, region: AwsRegion) -> list[LaunchPlan]:
    """Return the commands of a person who would do it by hand, in order. Requests are part of them, as JSON."""
    label = label_of(run)
    tags = [{"Key": key, "Value": tag_value(value)} for key, value in tags_of(run, settings.limit.value).items()]
    # AWS ends the machines when the budget is used up, or after `limit`. Even a run that finishes needs this: machines
    # whose role may not make the group smaller are replaced for ever.
    budget = budget_seconds(run)
    ends = time.time() + (settings.limit.value if budget is None else budget) + _START_SECONDS
    firewall = {
        "GroupName": label,
        "Description": f"Machines of {run.name} reach each other, and nobody else reaches them",
        "VpcId": "${VPC}",
        "TagSpecifications": [{"ResourceType": "security-group", "Tags": tags}],
    }
    group = {"AutoScalingGroupName": label}
    end = {
        **group,
        "ScheduledActionName": "budget",
        "StartTime": datetime.fromtimestamp(ends, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "MinSize": 0,
        "MaxSize": 0,
        "DesiredCapacity": 0,
    }
    ranges = [{"CidrIp": settings.ssh_from, "Description": "ssh"}]
    ssh_rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": ranges}
    ssh = {"GroupId": "${SECURITY_GROUP}", "IpPermissions": [ssh_rule]}
    requests: list[tuple[str, str, Mapping[str, Any]]] = [
        *_role(run, settings, region, tags),
        ("ec2", "create-security-group", firewall),
        # One request for each rule: AWS refuses all of a request if the group has one of its rules already.
        ("ec2", "authorize-security-group-ingress", _BETWEEN_MEMBERS),
        *([] if settings.ssh_from is None else [("ec2", "authorize-security-group-ingress", ssh)]),
        *([("ec2", "authorize-security-group-egress", _BETWEEN_MEMBERS)] if settings.efa else []),
        ("ec2", "create-launch-template", _template(settings, label, tags)),
        ("autoscaling", "create-auto-scaling-group", _group(settings, label, tags)),
        # It would end healthy machines only to spread them evenly over the zones.
        ("autoscaling", "suspend-processes", {**group, "ScalingProcesses": ["AZRebalance"]}),
        ("autoscaling", "put-scheduled-update-group-action", end),
        ("autoscaling", "set-desired-capacity",
         {**group, "DesiredCapacity": settings.machines.most, "HonorCooldown": False}),
    ]  # fmt: skip
    title = f"AWS {region.place}"
    where = ("--region", region.place, *(("--profile", settings.profile) if settings.profile else ()))

    def command(service: str, operation: str, request: Mapping[str, Any]) -> LaunchPlan:
        gives, output = ("SECURITY_GROUP", _GROUP_ID) if request is firewall else (None, ())
        body = (_REQUEST, json.dumps(request, indent=2))
        return LaunchPlan(title, ("aws", service, operation, *output, *where, *body), gives=gives)

    return [
        *(LaunchPlan(title, (*words, *where), gives=name) for name, words in _questions(settings)),
        LaunchPlan(title, _ENCODE, script=boot_script(run, settings, ends), gives="USER_DATA"),
        *(command(*request) for request in requests),
    ]


def _questions(settings: AwsSettings) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the commands that find the image and the subnets."""
    text = ("--output", "text")
    if settings.image.startswith("ssm:"):
        name = settings.image.removeprefix("ssm:")
        yield "IMAGE", ("aws", "ssm", "get-parameter", "--name", name, "--query", "Parameter.Value", *text)
    elif not settings.image.startswith("ami-"):
        newest = "sort_by(Images, &CreationDate)[-1].ImageId"
        where = ("--owners", settings.owner, "--filters", f"Name=name,Values={settings.image}")
        yield "IMAGE", ("aws", "ec2", "describe-images", *where, "--query", newest, *text)
    root = ("aws", "ec2", "describe-images", "--image-ids", _image(settings), "--query", "Images[0].RootDeviceName")
    yield "ROOT_DEVICE", (*root, *text)
    subnets: tuple[str, ...] = ("aws", "ec2", "describe-subnets")
    if settings.subnets:
        subnets = (*subnets, "--subnet-ids", *settings.subnets)
    else:
        zones = (f"Name=availability-zone,Values={','.join(settings.zones)}",) if settings.zones else ()
        subnets = (*subnets, "--filters", "Name=default-for-az,Values=true", *zones)
    yield "SUBNETS", (*subnets, "--query", "join(',', Subnets[].SubnetId)", *text)
    yield "VPC", (*subnets, "--query", "Subnets[0].VpcId", *text)


def _image(settings: AwsSettings) -> str:
    return settings.image if settings.image.startswith("ami-") else "${IMAGE}"


def _role(
    run: Run, settings: AwsSettings, region: AwsRegion, tags: Tags
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    rights = policy(run.store.url, label_of(run) if settings.create_role else ALL_RUNS, settings, region)
    if not settings.create_role:
        # Only printed: what whoever manages the role has to allow, once.
        yield "iam", "create-policy", {"PolicyName": "packtrain", "PolicyDocument": json.dumps(rights)}
        return
    name, path = label_of(run), region.role_path
    role = {"RoleName": name, "Path": path, "AssumeRolePolicyDocument": json.dumps(ASSUMED_BY_MACHINES)}
    yield "iam", "create-role", {**role, "Tags": tags}
    inline = {"RoleName": name, "PolicyName": "packtrain", "PolicyDocument": json.dumps(rights)}
    yield "iam", "put-role-policy", inline
    yield "iam", "create-instance-profile", {"InstanceProfileName": name, "Path": path, "Tags": tags}
    yield "iam", "add-role-to-instance-profile", {"InstanceProfileName": name, "RoleName": name}


def _template(settings: AwsSettings, label: str, tags: Tags) -> dict[str, Any]:
    # Some images leave their disk behind.
    disk = {"VolumeType": "gp3", "VolumeSize": gibibytes(settings.disk), "DeleteOnTermination": True}
    data: dict[str, Any] = {
        "ImageId": _image(settings),
        "InstanceType": settings.instances[0],
        "IamInstanceProfile": {"Name": settings.role or label},
        "UserData": "${USER_DATA}",
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},  # 2: also from a container
        "BlockDeviceMappings": [{"DeviceName": "${ROOT_DEVICE}", "Ebs": disk}],
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": [{"Key": "Name", "Value": label}, *tags]}
            for kind in ("instance", "volume", "network-interface")
        ],
    }
    if settings.key is not None:
        data["KeyName"] = settings.key
    if settings.placement_group is not None:
        data["Placement"] = {"GroupName": settings.placement_group}
    if settings.efa:
        data["NetworkInterfaces"] = [
            {"NetworkCardIndex": card, "DeviceIndex": int(card > 0), "InterfaceType": "efa",
             "Groups": ["${SECURITY_GROUP}"], "DeleteOnTermination": True}
            for card in range(settings.efa)
        ]  # fmt: skip
    else:
        data["SecurityGroupIds"] = ["${SECURITY_GROUP}"]
    about = [{"ResourceType": "launch-template", "Tags": tags}]
    return {"LaunchTemplateName": label, "LaunchTemplateData": data, "TagSpecifications": about}


def _group(settings: AwsSettings, label: str, tags: Tags) -> dict[str, Any]:
    template = {"LaunchTemplateName": label, "Version": "$Default"}
    group: dict[str, Any] = {
        "AutoScalingGroupName": label,
        "MinSize": 0,
        "MaxSize": settings.machines.most,
        "DesiredCapacity": 0,
        "VPCZoneIdentifier": "${SUBNETS}",
        # AWS brings the replacement of a spot machine that it is likely to take away.
        "CapacityRebalance": settings.spot,
        "Tags": [{**tag, "PropagateAtLaunch": True} for tag in tags],
    }
    if not settings.spot and len(settings.instances) == 1:
        return {**group, "LaunchTemplate": template}
    overrides = [{"InstanceType": kind} for kind in settings.instances]
    shares = {
        "OnDemandBaseCapacity": settings.on_demand,
        "OnDemandPercentageAboveBaseCapacity": 0 if settings.spot else 100,
        "OnDemandAllocationStrategy": "prioritized",
        "SpotAllocationStrategy": "price-capacity-optimized",
    }
    mixed = {"LaunchTemplateSpecification": template, "Overrides": overrides}
    return {**group, "MixedInstancesPolicy": {"LaunchTemplate": mixed, "InstancesDistribution": shares}}


# What a machine is given: boot.sh, with the values of a run before it, and what it makes its Python environment of. The
# script has names of secrets, never their values. EC2 accepts only 16 KB, so a launch template has it compressed, which
# cloud-init undoes.


def boot_script(run: Run, settings: AwsSettings, ends: float) -> str:
    """Return the script. `ends` is when the machine has to be gone at the latest, in seconds since 1970."""
    head = ["#!/bin/bash", f"# Packtrain: takes part in {run.name} and then ends this machine."]
    return "\n".join([*head, *_variables(run, settings, ends), script_text("aws/boot.sh", **_EXITS)])


def put_environment(run: Run, settings: AwsSettings) -> None:
    """Put what machines make their Python environment of into the run's folder, before a machine starts."""
    with _archive(settings.bundle) as file:
        run.store.put_file(run.key(ENVIRONMENT), Path(file.name))


def _variables(run: Run, settings: AwsSettings, ends: float) -> Iterator[str]:
    # Without the Python, which the machine finds or makes.
    command = node_arguments(run, "python", run.job.fleet.kind)[1:]
    plain = {
        "run": run.name,
        "identity": identity(),
        "python": settings.python or "",
        "environment": run.key(ENVIRONMENT),
        "digest": _digest(settings.bundle),
        "mode": "-" if settings.bundle is None else "offline",
        "linger": f"{settings.linger.value:.0f}",
        "ends": f"{ends:.0f}",
        "find": FIND,
        "instance": source()["fleet/aws/instance.py"].decode(),
    }
    yield from (f"{name}={shlex.quote(value)}" for name, value in plain.items())
    yield f"command=({shlex.join(command)})"
    volume = settings.volume
    claim = [] if volume is None else [volume.name, *(f"{name}={value}" for name, value in volume.parameters.items())]
    yield f"volume=({shlex.join(claim)})"
    yield f"mounts=({shlex.join(f'{source} {path}' for path, source in settings.mounts.items())})"
    pairs = (f"[{name}]={shlex.quote(reference)}" for name, reference in settings.secrets.items())
    yield f"declare -A secrets=({' '.join(pairs)})"
    yield from (f"export {name}={shlex.quote(value)}" for name, value in _environment(run).items())


def _environment(run: Run) -> dict[str, str]:
    """Return the variables by which the machine finds the store, and AWS if it is not at its usual place."""
    endpoints = {name: url for name in _ENDPOINTS if (url := checked_endpoint(os.environ, name)) is not None}
    of_profile = values_of(("AWS_REGION", "AWS_ENDPOINT_URL_S3"))  # or of the environment
    region = of_profile.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    if of_profile.get("AWS_ENDPOINT_URL_S3"):
        endpoints["AWS_ENDPOINT_URL_S3"] = of_profile["AWS_ENDPOINT_URL_S3"]
    # Set even to the usual address: it says that this machine has a role, also for another S3 server.
    role = {"AWS_METADATA_ENDPOINT": "http://169.254.169.254"}
    return {"PACKTRAIN_STORE": run.store.url, "AWS_REGION": region, **role, **dict(sorted(endpoints.items()))}


@contextmanager
def _archive(bundle: str | None) -> Iterator[IO[bytes]]:
    """Give a file with the archive: with a bundle it may have several gigabytes."""
    with tempfile.NamedTemporaryFile(dir=cache_directory()) as file:
        if bundle is None:
            file.write(_small_archive())
        else:
            write_archive(Path(bundle), file)
        file.flush()
        yield file


@cache
def _small_archive() -> bytes:
    """Return the archive without a bundle. Kept: it takes a second to make, and a launch needs it twice."""
    buffer = io.BytesIO()
    write_archive(None, buffer)
    return buffer.getvalue()


@cache
def _digest(bundle: str | None) -> str:
    with _archive(bundle) as file:
        return sha256_of(Path(file.name))


# Execution.


def carry_out(region: AwsRegion, plan: LaunchPlan, names: Mapping[str, str]) -> dict[str, str]:
    """Do one step of the plan, unless it was done before; return the answer that later steps need."""
    if plan.arguments == _ENCODE:
        packed = gzip.compress((plan.script or "").encode(), mtime=0)
        if len(packed) > MAX_USER_DATA:
            fault = f"the user data has {len(packed):,} bytes, and AWS takes {MAX_USER_DATA:,}"
            raise Mistake(f"{fault}; name fewer secrets and mounts")
        return {"USER_DATA": base64.b64encode(packed).decode()}
    _, service, operation, *options = plan.arguments
    if _REQUEST not in options or operation == "create-policy":
        return {}  # a question, answered already; or what somebody else does for the role
    request = json.loads(Template(options[-1]).safe_substitute(names))
    if operation == "create-security-group":
        return {"SECURITY_GROUP": _security_group(region, request)}
    if operation == "create-launch-template":
        if not _create(region, service, operation, request):
            # A new version of it: the job may have changed since the run was stopped.
            name = request["LaunchTemplateName"]
            change = {"LaunchTemplateName": name, "LaunchTemplateData": request["LaunchTemplateData"]}
            version = region.ask("ec2", "create-launch-template-version", **change)["LaunchTemplateVersion"]
            number = str(version["VersionNumber"])
            region.ask("ec2", "modify-launch-template", LaunchTemplateName=name, DefaultVersion=number)
            _tag(region, version["LaunchTemplateId"], request)
    elif operation == "create-auto-scaling-group":
        _scaling_group(region, request)
    else:
        _create(region, service, operation, request)
    return {}


_THERE_ALREADY = {
    "AlreadyExists", "EntityAlreadyExists", "InvalidGroup.Duplicate", "InvalidPermission.Duplicate",
    "InvalidLaunchTemplateName.AlreadyExistsException",
}  # fmt: skip


def _create(region: AwsRegion, service: str, operation: str, request: Mapping[str, Any]) -> bool:
    """True if it is new; False if it was there already."""
    try:
        _ask_until_free(region, service, operation, request)
    except AwsRefusal as refusal:
        # An instance profile has one role, and the same one again is one too many.
        is_second = operation == "add-role-to-instance-profile" and refusal.code == "LimitExceeded"
        if refusal.code in _THERE_ALREADY or is_second:
            return False
        raise
    return True


def _ask_until_free(region: AwsRegion, service: str, operation: str, request: Mapping[str, Any]) -> None:
    backoff = Backoff(0.5, 5.0, limit_seconds=_BUSY_SECONDS)
    while True:
        try:
            region.ask(service, operation, **request)
            return
        except AwsRefusal as refusal:
            if refusal.code not in BUSY or not backoff.wait():
                raise


def _tag(region: AwsRegion, resource: str, request: Mapping[str, Any]) -> None:
    """Give the tags of a request to what was there before: the budget, and so the expiry, may have changed."""
    region.ask("ec2", "create-tags", Resources=[resource], Tags=request["TagSpecifications"][0]["Tags"])


def _security_group(region: AwsRegion, request: Mapping[str, Any]) -> str:
    is_new = _create(region, "ec2", "create-security-group", request)
    named = {"group-name": request["GroupName"], "vpc-id": request["VpcId"]}
    filters = [{"Name": name, "Values": [value]} for name, value in named.items()]
    backoff = Backoff(0.5, 3.0, limit_seconds=30.0)  # what was just created may not be listed yet
    while not (groups := region.ask("ec2", "describe-security-groups", Filters=filters)["SecurityGroups"]):
        if not backoff.wait():
            raise PacktrainError(f"AWS created the security group {request['GroupName']}, but does not list it")
    group: str = groups[0]["GroupId"]
    if not is_new:
        _tag(region, group, request)
    return group


def _scaling_group(region: AwsRegion, request: Mapping[str, Any]) -> None:
    """Create the group, or change the one that the run had before."""
    name = request["AutoScalingGroupName"]
    backoff = Backoff(1.0, 10.0, limit_seconds=_DELETION_SECONDS)
    while (former := find_group(region, name)) is not None and former.get("Status"):  # it is being deleted
        if not backoff.wait():
            raise PacktrainError(f"the former group {name} is still being deleted; run `packtrain resume` later")
    if former is None:
        backoff = Backoff(2.0, 5.0, limit_seconds=60.0)
        while True:
            try:
                if _create(region, "autoscaling", "create-auto-scaling-group", request):
                    return
                break  # another client was faster
            except AwsRefusal as refusal:
                # A role that was just created is not known everywhere yet.
                if not re.search("instance.?profile", str(refusal), re.IGNORECASE) or not backoff.wait():
                    raise
    changes = {key: value for key, value in request.items() if key not in ("Tags", "DesiredCapacity")}
    _ask_until_free(region, "autoscaling", "update-auto-scaling-group", changes)
    group = {"ResourceId": name, "ResourceType": "auto-scaling-group"}
    region.ask("autoscaling", "create-or-update-tags", Tags=[{**tag, **group} for tag in request["Tags"]])
    # The end of a former budget; that of the present one is set next.
    scheduled = region.ask("autoscaling", "describe-scheduled-actions", AutoScalingGroupName=name)
    for action in scheduled["ScheduledUpdateGroupActions"]:
        former_end = {"AutoScalingGroupName": name, "ScheduledActionName": action["ScheduledActionName"]}
        region.ask("autoscaling", "delete-scheduled-action", **former_end)


def find_group(region: AwsRegion, label: str) -> dict[str, Any] | None:
    """Return the Auto Scaling group of a run."""
    answer = region.ask("autoscaling", "describe-auto-scaling-groups", AutoScalingGroupNames=[label])
    return next(iter(answer["AutoScalingGroups"]), None)


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
