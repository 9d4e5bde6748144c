"""Lookups of what the settings of the aws fleet name, and of what a launch needs, without renting anything.

A missing image, key or subnet is refused before anything exists; `packtrain doctor` has a check for each thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from packtrain.errors import FieldMistake, Mistake
from packtrain.fleet.aws.policy import ALL_RUNS, policy
from packtrain.fleet.aws.region import AwsRefusal, AwsRegion
from packtrain.fleet.aws.volumes import gibibytes, volume_zones
from packtrain.fleet.cloud import Resource
from packtrain.fleet.fleet import Check, fault_and_advice, tried
from packtrain.store import Store
from packtrain.units import counted

if TYPE_CHECKING:
    from packtrain.fleet.aws.fleet import AwsSettings

_NAME = "packtrain-doctor"  # of what dry runs would create
# What a launch and `packtrain down` call, and EC2's dry runs cannot answer without something that exists.
_CALLS = (
    "autoscaling:CreateAutoScalingGroup", "autoscaling:UpdateAutoScalingGroup", "autoscaling:DeleteAutoScalingGroup",
    "autoscaling:SetDesiredCapacity", "autoscaling:SuspendProcesses", "autoscaling:CreateOrUpdateTags",
    "autoscaling:PutScheduledUpdateGroupAction", "autoscaling:DeleteScheduledAction",
    "autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScalingActivities",
    "autoscaling:DescribeScheduledActions", "ec2:AuthorizeSecurityGroupIngress", "ec2:CreateLaunchTemplateVersion",
    "ec2:ModifyLaunchTemplate", "ec2:TerminateInstances", "ec2:DeleteLaunchTemplate", "ec2:DeleteSecurityGroup",
)  # fmt: skip
_ROLE_CALLS = (
    "iam:CreateRole", "iam:TagRole", "iam:PutRolePolicy", "iam:CreateInstanceProfile", "iam:TagInstanceProfile",
    "iam:AddRoleToInstanceProfile", "iam:PassRole", "iam:RemoveRoleFromInstanceProfile", "iam:DeleteInstanceProfile",
    "iam:DeleteRolePolicy", "iam:DeleteRole",
)  # fmt: skip
# Quotas of vCPUs, on demand and spot, by the letters at the beginning of an instance type.
_STANDARD = ("L-1216C47A", "L-34B43A08")
_QUOTAS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("g", "gr", "vt"), ("L-DB2E81BA", "L-3819A6DF")),
    "p": ("L-417A185B", "L-7212CCBC"),
    "p5": ("L-417A185B", "L-C4BD4855"),
    "inf": ("L-1945791B", "L-B5D1601B"),
    "trn": ("L-2C3B7624", "L-6B0D517C"),
    "dl": ("L-6E869C2A", "L-85EED4F7"),
    "f": ("L-74FC7D96", "L-88CF9481"),
    "x": ("L-7295265B", "L-E3A00192"),
    **dict.fromkeys("acdhimrtz", _STANDARD),
}


def check_store(store: Store, mounts: Collection[str]) -> None:
    if store.is_directory and not any(f"{store.url}/".startswith(f"{path.rstrip('/')}/") for path in mounts):
        fault = f"machines of aws do not have the directory {store.url}; use s3://bucket/prefix, or fleet.aws.mounts"
        raise FieldMistake("store", fault)


def find_image(region: AwsRegion, settings: AwsSettings) -> dict[str, Any]:
    name = settings.image
    if name.startswith("ssm:"):
        parameter = name.removeprefix("ssm:")
        ask = partial(region.ask, "ssm", "get-parameter", Name=parameter)
        name = _look_up("image", f"no parameter {parameter}", ask)["Parameter"]["Value"]
    if name.startswith("ami-"):
        ask = partial(region.ask, "ec2", "describe-images", ImageIds=[name])
        images = _look_up("image", f"no image {name}", ask)["Images"]
    else:
        filters = [{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
        images = region.ask_all("ec2", "describe-images", "Images", Owners=[settings.owner], Filters=filters)
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
        kinds = region.ask("ec2", "describe-instance-types", InstanceTypes=names)["InstanceTypes"]
    except AwsRefusal as refusal:
        if refusal.code == "InvalidInstanceType":
            unknown = ", ".join(re.findall(r"[a-z0-9-]+\.[a-z0-9-]+", str(refusal))) or ", ".join(names)
            raise _missing("instances", f"unknown instance type in {region.place}: {unknown}") from None
        raise
    for kind in kinds:
        architecture = None if image is None else image.get("Architecture")
        supported = kind.get("ProcessorInfo", {}).get("SupportedArchitectures", [architecture])
        if image is not None and architecture not in supported:
            fault = f"{image['ImageId']} is for {architecture}, but {kind['InstanceType']} is {supported[0]}"
            raise _missing("image", f"{fault}; use another image")
        if settings.efa > kind.get("NetworkInfo", {}).get("EfaInfo", {}).get("MaximumEfaInterfaces", 0):
            raise _missing("efa", f"{kind['InstanceType']} has fewer EFA interfaces than {settings.efa}")
    by_type = [{"Name": "instance-type", "Values": names}]
    offers = region.ask_all(
        "ec2", "describe-instance-type-offerings", "InstanceTypeOfferings",
        LocationType="availability-zone", Filters=by_type,
    )  # fmt: skip
    return {name: {offer["Location"] for offer in offers if offer["InstanceType"] == name} for name in names}


def find_subnets(
    region: AwsRegion, settings: AwsSettings, volumes: Sequence[str] | None, offers: dict[str, set[str]]
) -> list[dict[str, Any]]:
    """Return the subnets of zones that offer one of the types and, unless None, have volumes."""
    if settings.subnets:
        ask = partial(region.ask, "ec2", "describe-subnets", SubnetIds=list(settings.subnets))
        subnets = _look_up("subnets", f"no subnet {', '.join(settings.subnets)}", ask)["Subnets"]
    else:
        default = [{"Name": "default-for-az", "Values": ["true"]}]
        subnets = region.ask_all("ec2", "describe-subnets", "Subnets", Filters=default)
    if not subnets:
        raise _missing("subnets", f"{region.place} has no default VPC; name subnets of another one")
    if len({subnet["VpcId"] for subnet in subnets}) > 1:
        raise _missing("subnets", "are in different VPCs; machines could not reach each other")
    zones = {subnet["AvailabilityZone"] for subnet in subnets}
    if unknown := set(settings.zones) - zones:
        raise _missing("zones", f"no subnet in {', '.join(sorted(unknown))}; there are {', '.join(sorted(zones))}")
    zones &= set(settings.zones) or zones
    if volumes is not None:
        if not zones & set(volumes):
            raise _missing("volume.name", f"its free volumes are in {', '.join(volumes)}; ask for machines there")
        zones &= set(volumes)
    offering = set().union(*offers.values())
    if not zones & offering:
        types, names = ", ".join(offers), ", ".join(sorted(zones))
        raise _missing("instances", f"{names} do not offer {types}; zones that do: {', '.join(sorted(offering))}")
    return [subnet for subnet in subnets if subnet["AvailabilityZone"] in zones & offering]


Lookup = tuple[str, str, Callable[[], Any]]
"""A field, what it names, and the question that refuses what does not exist; its answer is None for who may not ask."""


def lookups(region: AwsRegion, settings: AwsSettings) -> Iterator[Lookup]:
    """Yield the key pair, the role, the placement group and the secrets that the settings name."""
    group = settings.placement_group
    for field, name, title, service, operation, request in (
        ("key", settings.key, "key pair", "ec2", "describe-key-pairs", {"KeyNames": [settings.key]}),
        ("role", settings.role, "instance profile", "iam", "get-instance-profile",
         {"InstanceProfileName": settings.role}),
        ("placement_group", group, "placement group", "ec2", "describe-placement-groups", {"GroupNames": [group]}),
    ):  # fmt: skip
        if name is not None:
            ask = partial(region.ask, service, operation, **request)
            yield field, f"{title} {name}", partial(_look_up, field, f"no {title} {name}", ask)
    for variable, reference in settings.secrets.items():
        yield f"secrets.{variable}", f"secret {reference}", partial(_find_secret, region, variable, reference)


def _find_secret(region: AwsRegion, variable: str, reference: str) -> Any:
    """Only ask whether it exists: its value is for the machines alone."""
    service, _, name = reference.partition(":")
    field, missing = f"secrets.{variable}", f"no secret {reference}"
    if service == "secretsmanager":
        return _look_up(field, missing, partial(region.ask, "secretsmanager", "describe-secret", SecretId=name))
    filters = [{"Key": "Name", "Values": [name]}]
    answer = _look_up(field, missing, partial(region.ask, "ssm", "describe-parameters", ParameterFilters=filters))
    if answer is not None and not answer["Parameters"]:
        raise _missing(field, f"{missing} in {region.place}")
    return answer


def _look_up(field: str, missing: str, ask: Callable[[], dict[str, Any]]) -> Any:
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


# For doctor, one by one.


def launch_checks(settings: AwsSettings, store: Store | None) -> Iterator[Check]:
    """Yield every check; those that need the answer of one that failed are left out."""
    place = f"aws {settings.region}"
    try:
        region = AwsRegion(settings.profile, settings.region)
    except Mistake as mistake:
        yield Check(place, "region", False, *fault_and_advice(mistake))
        return
    identity = partial(region.ask, "sts", "get-caller-identity")
    check, caller = tried(place, "credentials", identity, lambda who: who["Arn"])
    yield check
    if caller is None:
        return
    zones = partial(region.ask, "ec2", "describe-availability-zones")
    yield tried(place, "region", zones, lambda answer: counted(len(answer["AvailabilityZones"]), "zone"))[0]
    check, image = tried(
        place,
        "image",
        lambda: find_image(region, settings),
        lambda image: f"{image['ImageId']} ({image.get('Name') or 'without a name'}, {image.get('Architecture')})",
    )
    yield check
    check, offers = tried(
        place,
        "instances",
        lambda: check_types(region, settings, image),
        lambda offers: "; ".join(f"{name} in {', '.join(sorted(offers[name])) or 'no zone'}" for name in offers),
    )
    yield check
    yield from _place_checks(region, settings, offers, place)
    for field, title, ask in lookups(region, settings):
        step = field.partition(".")[0]
        check, answer = tried(place, step, ask, f"{title} exists")
        hidden = Check(place, step, False, f"this user may not look for {title}", "look yourself", skipped=True)
        yield hidden if check.ok and answer is None else check
    if offers is not None:
        yield from _quota_checks(region, settings, place)
    if store is not None:
        reach = partial(check_store, store, settings.mounts)
        yield tried(place, "store", reach, f"{store.url} can be used by machines, with their role")[0]
    yield _dry_runs(region, settings, image, place)
    yield from _policy_checks(region, settings, store, caller, place)
    yield tried(place, "leftovers", lambda: region.resources(None), _left_words)[0]


def _left_words(resources: Sequence[Resource]) -> str:
    runs = sorted({resource.run or resource.label for resource in resources})
    return f"machines or other things of {', '.join(runs)}; see `packtrain down --all`" if runs else "nothing"


def _place_checks(
    region: AwsRegion, settings: AwsSettings, offers: dict[str, set[str]] | None, place: str
) -> Iterator[Check]:
    """Check volumes and subnets: machines start in zones that have both, and offer one of the types."""
    zones: list[str] | None = None
    volume = settings.volume
    if volume is not None:
        check, zones = tried(
            place,
            "volume",
            lambda: volume_zones(region, volume, settings.machines),
            lambda zones: "made when a machine starts" if zones is None else f"free ones in {', '.join(zones)}",
        )
        yield check
        if not check.ok:
            return
    if offers is None:
        return

    def addresses() -> str:
        subnets = find_subnets(region, settings, zones, offers)
        free = sum(subnet.get("AvailableIpAddressCount", 0) for subnet in subnets)
        if free < settings.machines.least:
            raise Mistake(f"{counted(free, 'address')} free for {settings.machines} machines; name more subnets")
        names = ", ".join(sorted({subnet["AvailabilityZone"] for subnet in subnets}))
        return f"{counted(len(subnets), 'subnet')} of {subnets[0]['VpcId']} in {names}"

    yield tried(place, "subnets", addresses, str)[0]


# Quotas.


def quota_code(instance_type: str, spot: bool) -> str | None:
    """Return AWS's code of the quota that an instance type counts for; None if it is not known here."""
    letters = re.match(r"(p5|[a-z]+)", instance_type)
    codes = _QUOTAS.get(letters[1]) if letters else None
    return None if codes is None else codes[spot]


def _quota_checks(region: AwsRegion, settings: AwsSettings, place: str) -> Iterator[Check]:
    """Compare the account's quotas of vCPUs with what the run needs and what is in use."""
    names = list(settings.instances)
    by_code: dict[str | None, list[int]] = {}
    for kind in region.ask("ec2", "describe-instance-types", InstanceTypes=names)["InstanceTypes"]:
        code = quota_code(kind["InstanceType"], settings.spot)
        by_code.setdefault(code, []).append(int(kind["VCpuInfo"]["DefaultVCpus"]))
    # Of spot machines, or of those on demand.
    count = max(0, settings.machines.least - (settings.on_demand if settings.spot else 0))
    for code, sizes in by_code.items():
        if code is None:
            continue
        try:
            quota = region.ask("service-quotas", "get-service-quota", ServiceCode="ec2", QuotaCode=code)["Quota"]
            used = _used(region, code, settings.spot)
        except AwsRefusal as refusal:
            advice = f"see {code} under Service Quotas in the console"
            yield Check(place, "quota", False, fault_and_advice(refusal)[0], advice, skipped=True)
            continue
        limit, needed = int(quota["Value"]), min(sizes) * count
        fits = limit - used >= needed
        advice = f"ask for more of {code} under Service Quotas, or use other types or fewer machines"
        detail = f"{quota['QuotaName']}: {limit} vCPUs, {used} in use; the run needs {needed}"
        yield Check(place, "quota", fits, detail, "" if fits else advice)


def _used(region: AwsRegion, code: str, spot: bool) -> int:
    """Return the vCPUs of the account's machines that count for a quota."""
    running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    total = 0
    for reservation in region.ask_all("ec2", "describe-instances", "Reservations", Filters=running):
        for instance in reservation["Instances"]:
            is_spot = instance.get("InstanceLifecycle") == "spot"
            if is_spot == spot and quota_code(instance["InstanceType"], spot) == code:
                cores = instance.get("CpuOptions", {})
                total += int(cores.get("CoreCount", 1)) * int(cores.get("ThreadsPerCore", 1))
    return total


# Rights.


def _dry_runs(region: AwsRegion, settings: AwsSettings, image: Mapping[str, Any] | None, place: str) -> Check:
    """Ask EC2 whether it would create what a launch creates; a dry run creates nothing."""
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "Name", "Value": _NAME}]}]
    machine = {"InstanceType": settings.instances[0], "MinCount": 1, "MaxCount": 1, "TagSpecifications": tags}
    if settings.role is not None:  # with it, EC2 also asks whether this user may pass the role on
        machine["IamInstanceProfile"] = {"Name": settings.role}
    data = {"InstanceType": settings.instances[0]}
    requests: dict[str, dict[str, Any]] = {
        "create-security-group": {"GroupName": _NAME, "Description": _NAME},
        "create-launch-template": {"LaunchTemplateName": _NAME, "LaunchTemplateData": data},
        **({} if image is None else {"run-instances": {**machine, "ImageId": image["ImageId"]}}),
    }
    for operation, request in requests.items():
        try:
            region.ask("ec2", operation, DryRun=True, **request)
        except AwsRefusal as refusal:
            if refusal.code != "DryRunOperation":  # the answer to who may do it
                return Check(place, "rights", False, *fault_and_advice(refusal))
    return Check(place, "rights", True, f"dry runs of {', '.join(requests)} succeed")


def _policy_checks(
    region: AwsRegion, settings: AwsSettings, store: Store | None, caller: Mapping[str, Any], place: str
) -> Iterator[Check]:
    """Ask IAM what the policies of this user, and of the machines' role, allow."""
    calls = [("*", (*_CALLS, *(_ROLE_CALLS if settings.create_role else ())), ())]
    advice = "ask your administrator for these rights"
    yield _simulated(place, "policies", lambda: _denied(region, _principal(region, str(caller["Arn"])), calls), advice)
    if settings.role is None or store is None:
        return
    role = settings.role
    account = str(caller["Account"])
    needed = [
        (_concrete(right["Resource"], account), right["Action"], _context(right.get("Condition", {}), account))
        for right in policy(store.url, ALL_RUNS, settings, region)["Statement"]
    ]
    advice = "`packtrain run --dry-run` prints the policy; without it machines cannot use the store, or end themselves"
    yield _simulated(place, "role", lambda: _denied(region, _role_of(region, role), needed), advice)


def _simulated(place: str, step: str, ask: Callable[[], list[str]], advice: str) -> Check:
    try:
        denied = ask()
    except AwsRefusal as refusal:
        fault = "not known: IAM does not tell this user" if refusal.is_forbidden else str(refusal)
        look = "the right to iam:SimulatePrincipalPolicy and iam:Get* would tell; a launch shows it, too"
        return Check(place, step, False, fault, look, skipped=True)
    if denied:
        return Check(place, step, False, f"not allowed: {', '.join(denied)}", advice)
    return Check(place, step, True, "allow all that is needed")


def _denied(
    region: AwsRegion,
    principal: str | None,
    needed: Sequence[tuple[str, Sequence[str], Sequence[Mapping[str, object]]]],
) -> list[str]:
    """Return the actions that the policies of a user or a role do not allow; None stands for root.

    `needed` is a resource, the actions on it, and the context that conditions look at.
    """
    denied = []
    for resource, actions, context in needed if principal is not None else ():
        request: dict[str, Any] = {"PolicySourceArn": principal, "ActionNames": list(actions)}
        request |= {"ResourceArns": [resource], **({"ContextEntries": list(context)} if context else {})}
        results = region.ask_all("iam", "simulate-principal-policy", "EvaluationResults", **request)
        denied += [str(result["EvalActionName"]) for result in results if result["EvalDecision"] != "allowed"]
    return denied


def _principal(region: AwsRegion, caller: str) -> str | None:
    """Return the user or the role behind a caller, which IAM knows by another name than STS; None for root."""
    if caller.endswith(":root"):
        return None
    session = re.fullmatch(r"arn:[^:]*:sts::[0-9]*:assumed-role/([^/]+)/.*", caller)
    if session is None:
        return caller
    role: str = region.ask("iam", "get-role", RoleName=session[1])["Role"]["Arn"]  # it may be below a path
    return role


def _role_of(region: AwsRegion, profile: str) -> str:
    roles = region.ask("iam", "get-instance-profile", InstanceProfileName=profile)["InstanceProfile"]["Roles"]
    if not roles:
        raise AwsRefusal("NoRole", f"the instance profile {profile} has no role")
    role: str = roles[0]["Arn"]
    return role


def _concrete(resource: str | list[str], account: str) -> str:
    """Return the name of one thing that a pattern stands for: IAM simulates requests, and those have no patterns."""
    pattern = resource if isinstance(resource, str) else resource[0]
    if pattern == "*":
        return pattern
    named = pattern.replace(":*:", f":{account}:", 1)
    # `${*}` stands for the character itself.
    return re.sub(r"\$\{([*?$])\}|[*?]", lambda match: match[1] or {"*": "doctor", "?": "d"}[match[0]], named)


def _context(condition: Mapping[str, Mapping[str, str]], account: str) -> list[Mapping[str, object]]:
    values = [item for operator in condition.values() for item in operator.items()]
    return [
        {"ContextKeyName": key, "ContextKeyValues": [_concrete(value, account)], "ContextKeyType": "string"}
        for key, value in values
    ]
