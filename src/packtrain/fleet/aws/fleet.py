"""Machines of AWS: an Auto Scaling group, so that AWS itself replaces what spot takes away."""

from __future__ import annotations

import calendar
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from shutil import which
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import InitErrorDetails

from packtrain.backoff import Backoff
from packtrain.errors import FieldMistake, Mistake, PacktrainError
from packtrain.fleet.aws.checks import check_store, check_types, find_image, find_subnets, launch_checks, lookups
from packtrain.fleet.aws.instance import metadata
from packtrain.fleet.aws.launch import carry_out, find_group, launch_plans, put_environment, trouble_of
from packtrain.fleet.aws.region import AwsRefusal, AwsRegion, default_region
from packtrain.fleet.aws.volumes import DiskSize, VolumeSettings, snapshot_of, volume_zones
from packtrain.fleet.cloud import CloudBuilder, CloudFleet, budget_seconds, label_of, wait_until_left
from packtrain.fleet.fleet import (
    Check,
    DiskSnapshot,
    HasNotices,
    HasVolumes,
    LaunchPlan,
    Machine,
    Python,
    Releases,
    Say,
    Word,
    missing_package,
    silent,
    states_of,
)
from packtrain.fleet.host import session_command
from packtrain.fleet.prices import list_price
from packtrain.job import Job
from packtrain.job.part import (
    Boolean,
    Count,
    Location,
    Seconds,
    StorePath,
    Variable,
    is_set,
    is_true,
    matching,
    problem,
    rules_in_schema,
    text_in_schema,
)
from packtrain.node.preemption import NoticeSource, PreemptionNotice
from packtrain.run.liveness import was_left_before_launch
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.system import expanded, in_home
from packtrain.units import Duration, show_seconds

NEWS_SECONDS = 20.0  # to wait for the first machine, or for the reason that there is none
NOTICE_SECONDS = 120.0  # between EC2's notice and the end of a spot machine
_IMAGE = "ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"

_KEEPS_TRYING = "the group keeps trying: `packtrain ls` shows its state"
_REFERENCE = r"(ssm:/?|secretsmanager:)[A-Za-z0-9/_+=.@-]{1,512}"


def _read_reference(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(_REFERENCE, value):
        # The value is not repeated: it may be the secret itself.
        raise ValueError("must be where AWS keeps the value: ssm:/name or secretsmanager:name")
    return value


InstanceType = Annotated[str, matching(r"[a-z0-9-]+\.[a-z0-9-]+", "an instance type, such as g5.xlarge")]
_LISTED = Annotated[tuple[InstanceType, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
InstanceTypes = Annotated[
    tuple[InstanceType, ...],
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=InstanceType | _LISTED
    ),
]
_ONE = {"minItems": 1, "maxItems": 1}
_IN_ONE_ZONE = {
    "anyOf": [
        {"required": ["zones"], "properties": {"zones": _ONE}},
        {"required": ["subnets"], "properties": {"subnets": _ONE, "zones": {"maxItems": 0}}},
    ]
}
Zone = Annotated[str, matching(r"[a-z]{2}(-[a-z0-9]+)+[a-z]", "an availability zone, such as us-east-1a")]
Subnet = Annotated[str, matching(r"subnet-[0-9a-f]+", "a subnet, such as subnet-0123456789abcdef0")]
Network = Annotated[str, matching(r"[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}", "a network, such as 203.0.113.7/32")]
ImageName = Annotated[str, matching(r"[A-Za-z0-9 ()\[\]./'@_:*?+-]{3,256}", "an image: its id, its name, or ssm:/name")]
Owner = Annotated[str, matching(r"self|amazon|aws-marketplace|[0-9]{12}", "self, amazon or the number of an account")]
Reference = Annotated[str, PlainValidator(_read_reference, json_schema_input_type=text_in_schema(f"^{_REFERENCE}$"))]
MountSource = Annotated[
    str, matching(r"[A-Za-z0-9.-]+:/[A-Za-z0-9._/-]*", "fs-0123456789abcdef0:/ of EFS, or server:/path of any NFS")
]
MountPath = Annotated[str, matching(r"/[A-Za-z0-9._/-]+", "an absolute path, such as /data")]


class AwsSettings(CloudBuilder):
    """Machines of AWS. `image` is an AMI by its id, by its name (the newest one of `owner`) or by `ssm:/parameter`.

    `on_demand` is how many machines are not spot. `role` is the instance profile of the machines. `secrets` says where
    AWS keeps the values of environment variables. `mounts` are directories, each with the NFS or EFS to mount there.
    `bundle` is a local directory of wheels. `linger` is how long the machines of a failed run stay. `limit` is when AWS
    ends those of a run without a budget.
    """

    model_config = rules_in_schema(
        {"oneOf": [is_set("role"), is_true("create_role")]},
        {"not": is_true("power_off")},
        {"if": {"required": ["on_demand"], "properties": {"on_demand": {"minimum": 1}}}, "then": is_true("spot")},
        {"if": is_set("placement_group"), "then": _IN_ONE_ZONE},
        {"if": {"required": ["attach"], "properties": {"attach": {"const": "ssh"}}}, "then": is_set("key")},
    )

    filled_in = frozenset({"region"})

    region: Word
    profile: Word | None = None
    instances: InstanceTypes
    spot: Boolean = False
    on_demand: Count = 0
    zones: tuple[Zone, ...] = ()
    subnets: tuple[Subnet, ...] = ()
    image: ImageName = _IMAGE
    owner: Owner = "amazon"
    disk: DiskSize = "100 GB"
    role: Word | None = None
    create_role: Boolean = False
    key: Word | None = None
    ssh_from: Network | None = None
    attach: Literal["ssh", "ssm"] | None = None
    user: Word = "ubuntu"
    placement_group: Word | None = None
    efa: Annotated[int, Field(strict=True, ge=0, le=32)] = 0
    secrets: dict[Variable, Reference] = Field(default_factory=dict)
    volume: VolumeSettings | None = None
    mounts: dict[MountPath, MountSource] = Field(default_factory=dict)
    python: Python | None = None
    bundle: StorePath | None = None
    linger: Seconds = Duration(600, "seconds")
    limit: Seconds = Duration(7 * 86400, "seconds")

    @classmethod
    def arrange(cls, fields: dict[str, Any], problems: list[InitErrorDetails]) -> dict[str, Any]:
        # Into the job, so that the machines, and whoever ends them, need not have this person's configuration.
        if fields.get("region") is None:
            profile = fields.get("profile")
            region = default_region(profile if isinstance(profile, str) else None)
            if region is None:
                problems.append(problem("is not set; write one, such as us-east-1, or set AWS_REGION", "region"))
            return {**fields, "region": region or "us-east-1"}
        return fields

    @property
    def attach_by(self) -> str:
        return self.attach or ("ssm" if self.key is None else "ssh")

    def variable_fault(self, variable: str) -> str | None:
        if variable in self.secrets:
            return None
        advice = f"fleet.aws.secrets: {{{variable}: ssm:/name}}"
        return f"{variable} would have to be in the user data, where others can read it; write {advice}"

    def variables_here(self) -> Mapping[str, str]:
        return {} if self.profile is None else {"AWS_PROFILE": self.profile}

    def faults(self) -> Iterator[tuple[Location, str]]:
        if not self.instances:
            yield ("instances",), "must name at least one instance type, such as g5.xlarge"
        elif len(set(self.instances)) != len(self.instances):
            yield ("instances",), "lists a type twice"
        if self.power_off:
            yield ("power_off",), "machines of aws always end with the run; remove it"
        if self.role is None and not self.create_role:
            advice = "name an instance profile, or set create_role: true; `packtrain run --dry-run` prints its policy"
            yield ("role",), f"is needed, so that machines can use the store; {advice}"
        if self.role is not None and self.create_role:
            yield ("create_role",), "a role is named already; remove one of the two"
        if self.attach == "ssh" and self.key is None:
            yield ("attach",), "ssh needs a key pair; set key, or use ssm"
        if self.placement_group is not None and len(self.zones or self.subnets) != 1:
            yield ("zones",), "a placement group is in one zone; name it here"
        if self.on_demand and not self.spot:
            yield ("on_demand",), "all machines are on demand without spot: true; remove it"

    def build(self) -> AwsFleet:
        return AwsFleet(self)

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        variables = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE")
        files = {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
        has_keys = any(os.environ.get(name) for name in variables) or any(
            (expanded(os.environ[name]) if os.environ.get(name) else in_home(usual)).exists()
            for name, usual in files.items()
        )
        keys = {} if has_keys else {"credentials": "run `aws configure`, or set AWS_PROFILE"}
        return missing_package("boto3", "aws") | keys

    @property
    def rented_types(self) -> Sequence[str]:
        return self.instances

    def hourly_prices(self) -> Mapping[str, float | None]:
        """Return the prices on demand: spot costs less, but how much less is known only afterwards."""
        return {f"{kind} in {self.region}": list_price("aws", self.region, kind) for kind in self.instances}

    @classmethod
    def providers(cls, places: Sequence[str]) -> Sequence[AwsRegion]:
        """Return the regions named, or the default one. `all` stands for every region that the account has enabled."""
        default = default_region(None) or "us-east-1"
        if not places:
            return [AwsRegion(None, default)]
        if "all" in places:
            first = AwsRegion(None, default)
            places = [region["RegionName"] for region in first.ask("ec2", "describe-regions")["Regions"]]
        return [AwsRegion(None, place) for place in places]


class AwsFleet(CloudFleet, HasNotices, HasVolumes, Releases):
    def __init__(self, settings: AwsSettings) -> None:
        self._settings = settings

    @cached_property
    def _region(self) -> AwsRegion:
        return AwsRegion(self._settings.profile, self._settings.region)

    def provider(self) -> AwsRegion:
        return self._region

    def plan(self, run: Run) -> list[LaunchPlan]:
        check_store(run.store, self._settings.mounts)  # for a dry run, too
        return launch_plans(run, self._settings, self.provider())

    def create(self, run: Run, plans: Sequence[LaunchPlan], say: Say) -> None:
        region = self.provider()
        names = self._answers(region, run.job, run.store)
        put_environment(run, self._settings)  # before any machine starts
        label = label_of(run)
        past = [] if find_group(region, label) is None else _activities(region, label)
        idle = _end_idle(region, run)
        for plan in plans:
            names |= carry_out(region, plan, names)
        if budget_seconds(run) is None:
            limit = show_seconds(self._settings.limit.value)
            say(f"no budget: AWS ends the machines after {limit} at the latest (fleet.aws.limit)")
        if run.store.key_source is not None:
            say(f"machines open the store with their role, not with {run.store.key_source}")
        if self._settings.spot:
            say(_spot_price(region, self._settings.instances))
        _await_news(region, label, past, idle, say)

    # What is checked before.

    def check(self, job: Job, store: Store, say: Say = silent) -> None:  # noqa: ARG002
        self._answers(self.provider(), job, store)

    def _answers(self, region: AwsRegion, job: Job, store: Store) -> dict[str, str]:
        """Return what the plan's questions ask for, or refuse what is missing. Nothing is created."""
        settings = self._settings
        check_store(store, settings.mounts)
        for number, variable in enumerate(job.environment):
            if (fault := settings.variable_fault(variable)) is not None:
                raise FieldMistake(f"environment.{number}", fault)
        zones = None
        if settings.volume is not None:
            zones = volume_zones(region, settings.volume, settings.machines)
        image = find_image(region, settings)
        kinds = check_types(region, settings, image)
        subnets = find_subnets(region, settings, zones, kinds)
        for _, _, ask in lookups(region, settings):
            ask()
        return {
            "IMAGE": image["ImageId"],
            "ROOT_DEVICE": image.get("RootDeviceName") or "/dev/sda1",
            "SUBNETS": ",".join(subnet["SubnetId"] for subnet in subnets),
            "VPC": subnets[0]["VpcId"],
        }

    # What is there.

    def machines(self, run: Run) -> list[Machine]:
        return [
            Machine(instance["InstanceId"], instance["State"]["Name"], instance["State"]["Name"] == "shutting-down")
            for instance in self.provider().instances(label_of(run))
        ]

    def state_in_queue(self, run: Run) -> str | None:
        """Return the state of the machines, and why there are fewer than wanted."""
        region, label = self.provider(), label_of(run)
        group = find_group(region, label)
        if group is None:
            return None
        machines, size = self.machines(run), group["DesiredCapacity"]
        trouble = trouble_of(_activities(region, label)) if len(machines) < size else None
        state = f"{states_of(machines) or 'no machine'} of {size}"
        return state if trouble is None else f"{state}: {trouble.text}"

    def release(self, run: Run, say: Say = silent) -> None:
        """Delete what machines cannot delete while they are there: their security group, and a role of the run."""
        result = run.result()
        if result is not None and result.status == "failed":
            stay = show_seconds(self._settings.linger.value)
            say(f"The machines of {run.name} stay for {stay} for a look; `{run.command('down')}` ends them now")
            return
        wait_until_left(run)
        self.give_back(run, say)

    def notices(self) -> Sequence[NoticeSource]:
        return (spot_notice,) if self._settings.spot else ()

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        region, settings = self.provider(), self._settings
        if settings.attach_by == "ssm" and which("aws") is None:
            raise Mistake("a session needs the aws command and its Session Manager plugin; install them, or use ssh")
        instance = _chosen(region.instances(label_of(run)), machine, run.name)
        if settings.attach_by == "ssm":
            profile = () if settings.profile is None else ("--profile", settings.profile)
            place = ("--target", instance["InstanceId"], "--region", region.place)
            return ("aws", "ssm", "start-session", *place, *profile)
        address = instance.get("PublicIpAddress") or instance["PrivateIpAddress"]
        return ("ssh", "-t", "--", f"{settings.user}@{address}", session_command(run.name))

    def snapshot(self, run: Run, machine: str | None, pack: str | None) -> DiskSnapshot:
        if self._settings.volume is None:
            raise Mistake(f"{run.name}: its machines have no volume; set fleet.aws.volume")
        region = self.provider()
        instances = region.instances(label_of(run))
        if machine is not None:
            instances = [_chosen(instances, machine, run.name)]
        names = [instance["InstanceId"] for instance in instances]
        used = {entry.key.removeprefix(run.key("volumes/")) for entry in run.store.list(run.key("volumes"))}
        return snapshot_of(region, self._settings.volume, names, set() if machine else used, run.name, pack)

    def checks(self, store: Store | None) -> Iterator[Check]:
        yield from launch_checks(self._settings, store)


def _end_idle(region: AwsRegion, run: Run) -> set[str]:
    """End machines whose nodes have all left, and return their ids.

    After a failure they stay for a look, with the job and the code of then: the group would count them as machines of
    the run that is resumed now.
    """
    names = {instance["InstanceId"] for instance in region.instances(label_of(run))}
    if not names or not was_left_before_launch(run):  # nodes that have yet to join are awaited
        return set()
    for name in sorted(names):
        try:
            smaller = {"InstanceId": name, "ShouldDecrementDesiredCapacity": True}
            region.ask("autoscaling", "terminate-instance-in-auto-scaling-group", **smaller)
        except AwsRefusal:  # it is not in the group any more
            region.ask("ec2", "terminate-instances", InstanceIds=[name])
    return names


def _await_news(region: AwsRegion, label: str, past: Sequence[dict[str, Any]], idle: Collection[str], say: Say) -> None:
    """Return when a machine starts, or after a while; raise if none ever will.

    `past` are activities before this start, and `idle` the machines that it ended.
    """
    backoff, last = Backoff(0.5, 3.0, limit_seconds=NEWS_SECONDS), ""
    while not any(instance["InstanceId"] not in idle for instance in region.instances(label)):
        trouble = trouble_of([activity for activity in _activities(region, label) if activity not in past])
        if trouble is not None and trouble.for_good:
            raise PacktrainError(trouble.text)
        if trouble is not None and trouble.text != last:
            last = trouble.text
            say(f"{last}; {_KEEPS_TRYING}")
        if not backoff.wait():
            if not last:
                say(f"no machine has started yet; {_KEEPS_TRYING}")
            return


def _activities(region: AwsRegion, label: str) -> list[dict[str, Any]]:
    activities: list[dict[str, Any]] = region.ask(
        "autoscaling", "describe-scaling-activities", AutoScalingGroupName=label, MaxRecords=20
    )["Activities"]
    return activities


def _spot_price(region: AwsRegion, instances: Sequence[str]) -> str:
    """Return what spot machines cost now, for the person who starts them; a budget counts the full price."""
    newest = {"StartTime": time.time(), "ProductDescriptions": ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]}
    with suppress(AwsRefusal):
        request = {"InstanceTypes": list(instances), **newest}
        history = region.ask_all("ec2", "describe-spot-price-history", "SpotPriceHistory", **request)
        dearest_first = sorted(history, key=lambda offer: float(offer["SpotPrice"]), reverse=True)
        prices = {offer["InstanceType"]: float(offer["SpotPrice"]) for offer in dearest_first}  # the lowest of any zone
        if prices:
            texts = (f"{kind} from ${price:.4g}/h" for kind, price in prices.items())
            return f"spot prices in {region.place} now: {', '.join(texts)}"
    return "spot prices are not known here"


def _chosen(instances: Sequence[dict[str, Any]], machine: str | None, run: str) -> dict[str, Any]:
    """Find a machine by its id, its address or the node's name in the store, which begins with its hostname."""
    running = [instance for instance in instances if instance["State"]["Name"] == "running"]
    if not running:
        raise Mistake(f"{run}: no machine is running; `packtrain ls` shows the state of its group")
    for instance in running:
        host = str(instance.get("PrivateDnsName") or "").partition(".")[0]
        addresses = (instance.get("PrivateIpAddress"), instance.get("PublicIpAddress"))
        is_meant = machine in (None, instance["InstanceId"], host, *addresses)
        if is_meant or (host and machine is not None and machine.startswith(f"{host}-")):
            return instance
    names = ", ".join(instance["InstanceId"] for instance in running)
    raise Mistake(f"{run}: no machine {machine!r}; there are {names}")


def spot_notice() -> PreemptionNotice | None:
    """Return the notice that EC2 is about to take this machine away, or the advice that it may do so soon.

    The advice may come long before the notice, or together with it, or without one: the group then starts another
    machine first.
    """
    if (text := metadata("spot/instance-action")) is not None:
        action = json.loads(text)
        fault = f"preemption notice: EC2 will {action['action']} this machine"
        seconds = NOTICE_SECONDS
        with suppress(ValueError):
            seconds = calendar.timegm(time.strptime(action["time"], "%Y-%m-%dT%H:%M:%SZ")) - time.time()
        return PreemptionNotice(fault, min(max(seconds, 1.0), NOTICE_SECONDS))  # whatever this machine's clock says
    if metadata("events/recommendations/rebalance") is not None:
        return PreemptionNotice("EC2 recommends rebalancing: it may take this machine away soon", certain=False)
    return None
