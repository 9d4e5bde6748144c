"""The launch of machines of AWS: every request as a command that a person could run, and their execution.

The order: role, security group, template, a group without machines, its end at the budget's end, and only then the
machines. So whatever interrupts it, nothing runs that AWS would not end by itself.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from string import Template
from typing import TYPE_CHECKING, Any

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet.aws.policy import ALL_RUNS, ASSUMED_BY_MACHINES, policy
from packtrain.fleet.aws.region import BUSY, AwsRefusal, AwsRegion, tag_value
from packtrain.fleet.aws.user_data import boot_script
from packtrain.fleet.aws.volumes import gibibytes
from packtrain.fleet.cloud import budget_seconds, label_of, tags_of
from packtrain.fleet.fleet import LaunchPlan
from packtrain.run.run import Run

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


def launch_plans(run: Run, settings: AwsSettings, region: AwsRegion) -> list[LaunchPlan]:
    """Return the commands of a person who would do it by hand, in order. Requests are part of them, as JSON."""
    label, ends = label_of(run), _ends(run, settings)
    tags = {key: tag_value(value) for key, value in tags_of(run, settings.limit.value).items()}
    ec2, scaling = ("aws", "ec2"), ("aws", "autoscaling")
    steps: list[tuple[str, tuple[str, ...], Any]] = [
        *_questions(settings),
        ("USER_DATA", _ENCODE, boot_script(run, settings, ends)),
        *_role(run, settings, region, tags),
        ("SECURITY_GROUP", (*ec2, "create-security-group", *_GROUP_ID), _firewall(run, tags)),
        *(("", (*ec2, "authorize-security-group-ingress"), rule) for rule in _ingress(settings)),
        *([("", (*ec2, "authorize-security-group-egress"), _between_members())] if settings.efa else []),
        ("", (*ec2, "create-launch-template"), _template(settings, label, tags)),
        ("", (*scaling, "create-auto-scaling-group"), _group(settings, label, tags)),
        # It would end healthy machines only to spread them evenly over the zones.
        ("", (*scaling, "suspend-processes"), {"AutoScalingGroupName": label, "ScalingProcesses": ["AZRebalance"]}),
        ("", (*scaling, "put-scheduled-update-group-action"), _end_of(label, ends)),
        ("", (*scaling, "set-desired-capacity"), _wanted(label, settings.machines.most)),
    ]
    where = ("--region", region.place, *(("--profile", settings.profile) if settings.profile else ()))
    return [_plan(where, *step) for step in steps]


def _ends(run: Run, settings: AwsSettings) -> float:
    """Return when AWS ends the machines at the latest: the budget is used up, or `limit` has passed without one.

    Even a run that finishes needs this: machines whose role may not make the group smaller are replaced for ever.
    """
    left = budget_seconds(run)
    return time.time() + (settings.limit.value if left is None else left) + _START_SECONDS


def _questions(settings: AwsSettings) -> Iterator[tuple[str, tuple[str, ...], None]]:
    """Yield the commands that find the image and the subnets."""
    text = ("--output", "text")
    if settings.image.startswith("ssm:"):
        name = settings.image.removeprefix("ssm:")
        yield "IMAGE", ("aws", "ssm", "get-parameter", "--name", name, "--query", "Parameter.Value", *text), None
    elif not settings.image.startswith("ami-"):
        newest = "sort_by(Images, &CreationDate)[-1].ImageId"
        where = ("--owners", settings.owner, "--filters", f"Name=name,Values={settings.image}")
        yield "IMAGE", ("aws", "ec2", "describe-images", *where, "--query", newest, *text), None
    root = ("aws", "ec2", "describe-images", "--image-ids", _image(settings), "--query", "Images[0].RootDeviceName")
    yield "ROOT_DEVICE", (*root, *text), None
    subnets: tuple[str, ...] = ("aws", "ec2", "describe-subnets")
    if settings.subnets:
        subnets = (*subnets, "--subnet-ids", *settings.subnets)
    else:
        zones = (f"Name=availability-zone,Values={','.join(settings.zones)}",) if settings.zones else ()
        subnets = (*subnets, "--filters", "Name=default-for-az,Values=true", *zones)
    yield "SUBNETS", (*subnets, "--query", "join(',', Subnets[].SubnetId)", *text), None
    yield "VPC", (*subnets, "--query", "Subnets[0].VpcId", *text), None


def _image(settings: AwsSettings) -> str:
    return settings.image if settings.image.startswith("ami-") else "${IMAGE}"


def _role(
    run: Run, settings: AwsSettings, region: AwsRegion, tags: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    rights = policy(run.store.url, label_of(run) if settings.create_role else ALL_RUNS, settings, region)
    if not settings.create_role:
        # Only printed: what whoever manages the role has to allow, once.
        yield "", ("aws", "iam", "create-policy"), {"PolicyName": "packtrain", "PolicyDocument": json.dumps(rights)}
        return
    name, path = label_of(run), region.role_path
    role = {"RoleName": name, "Path": path, "AssumeRolePolicyDocument": json.dumps(ASSUMED_BY_MACHINES)}
    profile = {"InstanceProfileName": name, "Path": path}
    yield "", ("aws", "iam", "create-role"), {**role, "Tags": _listed(tags)}
    inline = {"RoleName": name, "PolicyName": "packtrain", "PolicyDocument": json.dumps(rights)}
    yield "", ("aws", "iam", "put-role-policy"), inline
    yield "", ("aws", "iam", "create-instance-profile"), {**profile, "Tags": _listed(tags)}
    yield "", ("aws", "iam", "add-role-to-instance-profile"), {"InstanceProfileName": name, "RoleName": name}


def _ingress(settings: AwsSettings) -> Iterator[dict[str, Any]]:
    """Yield a request for each rule: AWS refuses all of a request if the group has one of its rules already."""
    yield _between_members()
    if settings.ssh_from is not None:
        ranges = [{"CidrIp": settings.ssh_from, "Description": "ssh"}]
        ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": ranges}
        yield {"GroupId": "${SECURITY_GROUP}", "IpPermissions": [ssh]}


def _template(settings: AwsSettings, label: str, tags: Mapping[str, str]) -> dict[str, Any]:
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
            {"ResourceType": kind, "Tags": _listed({"Name": label, **tags})}
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
    about = [{"ResourceType": "launch-template", "Tags": _listed(tags)}]
    return {"LaunchTemplateName": label, "LaunchTemplateData": data, "TagSpecifications": about}


def _group(settings: AwsSettings, label: str, tags: Mapping[str, str]) -> dict[str, Any]:
    template = {"LaunchTemplateName": label, "Version": "$Default"}
    group: dict[str, Any] = {
        "AutoScalingGroupName": label,
        "MinSize": 0,
        "MaxSize": settings.machines.most,
        "DesiredCapacity": 0,
        "VPCZoneIdentifier": "${SUBNETS}",
        # AWS brings the replacement of a spot machine that it is likely to take away.
        "CapacityRebalance": settings.spot,
        "Tags": [{**tag, "PropagateAtLaunch": True} for tag in _listed(tags)],
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


def _plan(where: tuple[str, ...], gives: str, arguments: tuple[str, ...], request: Any) -> LaunchPlan:
    title = f"AWS {where[1]}"
    if isinstance(request, str):
        return LaunchPlan(title, arguments, script=request, gives=gives)
    asked = () if request is None else (_REQUEST, json.dumps(request, indent=2))
    return LaunchPlan(title, (*arguments, *where, *asked), gives=gives or None)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _listed(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _firewall(run: Run, tags: Mapping[str, str]) -> dict[str, Any]:
    return {
        "GroupName": label_of(run),
        "Description": f"Machines of {run.name} reach each other, and nobody else reaches them",
        "VpcId": "${VPC}",
        "TagSpecifications": [{"ResourceType": "security-group", "Tags": _listed(tags)}],
    }


def _between_members() -> dict[str, Any]:
    everything = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "${SECURITY_GROUP}"}]}
    return {"GroupId": "${SECURITY_GROUP}", "IpPermissions": [everything]}


def _end_of(label: str, ends: float) -> dict[str, Any]:
    return {
        "AutoScalingGroupName": label,
        "ScheduledActionName": "budget",
        "StartTime": _time(ends),
        "MinSize": 0,
        "MaxSize": 0,
        "DesiredCapacity": 0,
    }


def _wanted(label: str, machines: int) -> dict[str, Any]:
    return {"AutoScalingGroupName": label, "DesiredCapacity": machines, "HonorCooldown": False}


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
        _template_version(region, request)
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
    while not (found := region.ask("ec2", "describe-security-groups", Filters=filters)["SecurityGroups"]):
        if not backoff.wait():
            raise PacktrainError(f"AWS created the security group {request['GroupName']}, but does not list it")
    group: str = found[0]["GroupId"]
    if not is_new:
        _tag(region, group, request)
    return group


def _template_version(region: AwsRegion, request: Mapping[str, Any]) -> None:
    """Create the template, or a new version of it: the job may have changed since the run was stopped."""
    name = request["LaunchTemplateName"]
    if not _create(region, "ec2", "create-launch-template", request):
        data = request["LaunchTemplateData"]
        asked = {"LaunchTemplateName": name, "LaunchTemplateData": data}
        made = region.ask("ec2", "create-launch-template-version", **asked)["LaunchTemplateVersion"]
        number = str(made["VersionNumber"])
        region.ask("ec2", "modify-launch-template", LaunchTemplateName=name, DefaultVersion=number)
        _tag(region, made["LaunchTemplateId"], request)


def _scaling_group(region: AwsRegion, request: Mapping[str, Any]) -> None:
    """Create the group, or change the one that the run had before."""
    name = request["AutoScalingGroupName"]
    backoff = Backoff(1.0, 10.0, limit_seconds=_DELETION_SECONDS)
    while (known := find_group(region, name)) is not None and known.get("Status"):  # it is being deleted
        if not backoff.wait():
            raise PacktrainError(f"the former group {name} is still being deleted; run `packtrain resume` later")
    if known is None:
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
    _change_group(region, name, request)


def _change_group(region: AwsRegion, name: str, request: Mapping[str, Any]) -> None:
    changed = {key: value for key, value in request.items() if key not in ("Tags", "DesiredCapacity")}
    _ask_until_free(region, "autoscaling", "update-auto-scaling-group", changed)
    group = {"ResourceId": name, "ResourceType": "auto-scaling-group"}
    region.ask("autoscaling", "create-or-update-tags", Tags=[{**tag, **group} for tag in request["Tags"]])
    # The end of a former budget; that of the present one is set next.
    old = region.ask("autoscaling", "describe-scheduled-actions", AutoScalingGroupName=name)
    for action in old["ScheduledUpdateGroupActions"]:
        one = {"AutoScalingGroupName": name, "ScheduledActionName": action["ScheduledActionName"]}
        region.ask("autoscaling", "delete-scheduled-action", **one)


def find_group(region: AwsRegion, label: str) -> dict[str, Any] | None:
    """Return the Auto Scaling group of a run."""
    answer = region.ask("autoscaling", "describe-auto-scaling-groups", AutoScalingGroupNames=[label])
    return next(iter(answer["AutoScalingGroups"]), None)
