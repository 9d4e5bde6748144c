"""Check what a launch on AWS needs, without renting anything: one check for each thing, for `packtrain doctor`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from packtrain.errors import Mistake
from packtrain.fleet.aws.lookup import check_store, check_types, find_image, find_subnets, named
from packtrain.fleet.aws.policy import ALL_RUNS, policy
from packtrain.fleet.aws.region import AwsRefusal, AwsRegion
from packtrain.fleet.aws.volumes import volume_zones
from packtrain.fleet.fleet import Check, tried
from packtrain.store import Store
from packtrain.units import Machines, counted

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


def launch_checks(settings: AwsSettings, store: Store | None) -> Iterator[Check]:
    """Yield every check; those that need the answer of one that failed are left out."""
    place = f"aws {settings.region}"
    try:
        region = AwsRegion(settings.profile, settings.region)
    except Mistake as mistake:
        fault, _, advice = str(mistake).partition("; ")
        yield Check(place, "region", False, fault, advice)
        return
    identity = partial(region.ask, "sts", "get-caller-identity")
    check, caller = tried(place, "credentials", identity, lambda who: who["Arn"])
    yield check
    if caller is None:
        return
    zones = partial(region.ask, "ec2", "describe-availability-zones")
    yield tried(place, "region", zones, lambda found: counted(len(found["AvailabilityZones"]), "zone"))[0]
    check, image = tried(place, "image", lambda: find_image(region, settings), _image_words)
    yield check
    check, offers = tried(place, "instances", lambda: check_types(region, settings, image), _offer_words)
    yield check
    yield from _place_checks(region, settings, offers, place)
    for field, title, ask in named(region, settings):
        yield _exists(place, field.partition(".")[0], title, ask)
    if offers is not None:
        yield from _quota_checks(region, settings, place)
    if store is not None:
        reaches = partial(check_store, store, settings.mounts)
        yield tried(place, "store", reaches, lambda _: f"{store.url} can be used by machines, with their role")[0]
    yield _dry_runs(region, settings, image, place)
    yield from _policy_checks(region, settings, store, caller, place)
    yield tried(place, "leftovers", lambda: region.resources(None), _left_words)[0]


def _image_words(image: Mapping[str, Any]) -> str:
    return f"{image['ImageId']} ({image.get('Name') or 'without a name'}, {image.get('Architecture')})"


def _offer_words(offers: Mapping[str, set[str]]) -> str:
    return "; ".join(f"{name} in {', '.join(sorted(zones)) or 'no zone'}" for name, zones in offers.items())


def _left_words(found: Sequence[Any]) -> str:
    runs = sorted({one.run or one.label for one in found})
    return f"machines or other things of {', '.join(runs)}; see `packtrain down --all`" if runs else "nothing"


def _place_checks(
    region: AwsRegion, settings: AwsSettings, offers: dict[str, set[str]] | None, place: str
) -> Iterator[Check]:
    """Check volumes and subnets: machines start in zones that have both, and offer one of the types."""
    zones: list[str] | None = None
    volume = settings.volume
    if volume is not None:
        check, zones = tried(place, "volume", lambda: volume_zones(region, volume, settings.machines), _volume_words)
        yield check
        if not check.ok:
            return
    if offers is None:
        return

    def addresses() -> list[dict[str, Any]]:
        found = find_subnets(region, settings, zones, offers)
        free = sum(one.get("AvailableIpAddressCount", 0) for one in found)
        if free < settings.machines.least:
            raise Mistake(f"{counted(free, 'address')} free for {settings.machines} machines; name more subnets")
        return found

    yield tried(place, "subnets", addresses, _subnet_words)[0]


def _volume_words(zones: Sequence[str] | None) -> str:
    return "made when a machine starts" if zones is None else f"free ones in {', '.join(zones)}"


def _subnet_words(found: Sequence[Mapping[str, Any]]) -> str:
    where = ", ".join(sorted({one["AvailabilityZone"] for one in found}))
    return f"{counted(len(found), 'subnet')} of {found[0]['VpcId']} in {where}"


def _exists(place: str, field: str, title: str, ask: Callable[[], Any]) -> Check:
    check, found = tried(place, field, ask, lambda _: f"{title} exists")
    if check.ok and found is None:
        return Check(place, field, False, f"this user may not look for {title}", "look yourself", skipped=True)
    return check


# Quotas.


def quota_code(instance_type: str, spot: bool) -> str | None:
    """Return AWS's code of the quota that an instance type counts for; None if it is not known here."""
    letters = re.match(r"(p5|[a-z]+)", instance_type)
    codes = _QUOTAS.get(letters[1]) if letters else None
    return None if codes is None else codes[spot]


def _quota_checks(region: AwsRegion, settings: AwsSettings, place: str) -> Iterator[Check]:
    """Compare the account's quotas of vCPUs with what the run needs and what is in use."""
    asked = {"InstanceTypes": list(settings.instances)}
    found = region.ask("ec2", "describe-instance-types", **asked)["InstanceTypes"]
    sizes = {one["InstanceType"]: int(one["VCpuInfo"]["DefaultVCpus"]) for one in found}
    by_code: dict[str | None, list[int]] = {}
    for name, size in sizes.items():
        by_code.setdefault(quota_code(name, settings.spot), []).append(size)
    for code, counts in by_code.items():
        if code is not None:
            yield _quota_check(region, settings, place, code, counts)


def _quota_check(region: AwsRegion, settings: AwsSettings, place: str, code: str, counts: Sequence[int]) -> Check:
    try:
        quota = region.ask("service-quotas", "get-service-quota", ServiceCode="ec2", QuotaCode=code)["Quota"]
        used = _used(region, code, settings.spot)
    except AwsRefusal as refusal:
        advice = f"see {code} under Service Quotas in the console"
        return Check(place, "quota", False, str(refusal).partition("; ")[0], advice, skipped=True)
    limit, needed = int(quota["Value"]), min(counts) * _paid(settings)
    detail = f"{quota['QuotaName']}: {limit} vCPUs, {used} in use; the run needs {needed}"
    if limit - used < needed:
        advice = f"ask for more of {code} under Service Quotas, or use other types or fewer machines"
        return Check(place, "quota", False, detail, advice)
    return Check(place, "quota", True, detail)


def _paid(settings: AwsSettings) -> int:
    """Return how many machines of the kind, spot or on demand, a run needs at least."""
    machines: Machines = settings.machines
    return max(0, machines.least - (settings.on_demand if settings.spot else 0))


def _used(region: AwsRegion, code: str, spot: bool) -> int:
    """Return the vCPUs of the account's machines that count for a quota."""
    running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    total = 0
    for reservation in region.ask_all("ec2", "describe-instances", "Reservations", Filters=running):
        for one in reservation["Instances"]:
            is_spot = one.get("InstanceLifecycle") == "spot"
            if is_spot == spot and quota_code(one["InstanceType"], spot) == code:
                cores = one.get("CpuOptions", {})
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
    faults = []
    for operation, request in requests.items():
        try:
            region.ask("ec2", operation, DryRun=True, **request)
        except AwsRefusal as refusal:
            if refusal.code != "DryRunOperation":  # the answer to who may do it
                faults.append(refusal)
    if not faults:
        return Check(place, "rights", True, f"dry runs of {', '.join(requests)} succeed")
    fault, _, advice = str(faults[0]).partition("; ")
    return Check(place, "rights", False, fault, advice)


def _policy_checks(
    region: AwsRegion, settings: AwsSettings, store: Store | None, caller: Mapping[str, Any], place: str
) -> Iterator[Check]:
    """Ask IAM what the policies of this user, and of the machines' role, allow."""
    asked = [("*", (*_CALLS, *(_ROLE_CALLS if settings.create_role else ())), ())]
    advice = "ask your administrator for these rights"
    yield _simulated(place, "policies", lambda: _denied(region, _principal(region, str(caller["Arn"])), asked), advice)
    if settings.role is None or store is None:
        return
    role = settings.role
    account = str(caller["Account"])
    needed = [
        (_concrete(one["Resource"], account), one["Action"], _context(one.get("Condition", {}), account))
        for one in policy(store.url, ALL_RUNS, settings, region)["Statement"]
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
        denied += [str(one["EvalActionName"]) for one in results if one["EvalDecision"] != "allowed"]
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
    """Return the context of a request that meets the condition."""
    values = [item for operator in condition.values() for item in operator.items()]
    return [
        {"ContextKeyName": key, "ContextKeyValues": [_concrete(value, account)], "ContextKeyType": "string"}
        for key, value in values
    ]
