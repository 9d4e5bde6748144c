"""Machines of AWS: planned, created, listed and ended through the real SDK, against moto."""

from __future__ import annotations

import base64
import calendar
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from botocore.exceptions import ClientError
from pydantic import ValidationError

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import release
from packtrain.fleet.aws.checks import quota_code
from packtrain.fleet.aws.fleet import AwsFleet, AwsSettings
from packtrain.fleet.aws.launch import trouble_of
from packtrain.fleet.aws.policy import ALL_RUNS, policy
from packtrain.fleet.aws.region import AwsRefusal, AwsRegion, session_of, tag_value
from packtrain.fleet.cloud import StillInUse, label_of, remove
from packtrain.fleet.doctor import examine
from packtrain.fleet.down import remove_found, take_inventory
from packtrain.fleet.fleet import Check, silent
from packtrain.job.job import BudgetSettings
from packtrain.job.part import faults
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.launch.start import dry_run, start
from packtrain.pack.build import PlainProgress
from packtrain.run.records import Result
from packtrain.run.run import Run
from packtrain.run.trust import remember
from packtrain.store import Store, open_store
from parts.runs import a_lease, new_run, program_job
from parts.s3 import S3Server
from parts.sandbox import wait_until

REGION = "us-east-1"
IMAGE = "ami-785db401"  # an Ubuntu that moto knows
UBUNTU = "ubuntu/images/hvm-ssd/ubuntu-xenial-16.04-amd64-server-*"
REQUEST = "--cli-input-json"
EXAMPLE = Path(__file__).parents[2] / "examples" / "fleets" / "aws.yaml"


@pytest.fixture
def region(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsRegion]:
    """An account of moto's with a role for machines; whatever runs left in it is deleted after the test."""
    monkeypatch.setenv("AWS_REGION", REGION)
    region = AwsRegion(None, REGION)
    with suppress(AwsRefusal):  # the server has it from an earlier test
        region.ask("iam", "create-instance-profile", InstanceProfileName="nodes")
        region.ask("iam", "create-role", RoleName="nodes", AssumeRolePolicyDocument="{}")
        region.ask("iam", "add-role-to-instance-profile", InstanceProfileName="nodes", RoleName="nodes")
    yield region
    remove(lambda: region.resources(None), region)


def settings_of(**given: Any) -> AwsSettings:
    least = {"region": REGION, "instances": ["g5.xlarge"], "image": IMAGE, "role": "nodes"}
    return AwsSettings.model_validate({**least, **given})


def run_on(store: Store, given: dict[str, Any], **fields: Any) -> Run:
    """Create the run of a small job on AWS; nothing is started."""
    kind = settings_of(**given).model_dump(mode="json")
    return new_run(store, program_job(fleet={"aws": kind}, **fields))


def fleet_of(run: Run) -> AwsFleet:
    assert isinstance(run.job.fleet.kind, AwsSettings)
    return run.job.fleet.kind.build()


def requests_of(run: Run) -> dict[str, Any]:
    """Return what each command of the plan sends, by the name of the command."""
    plans = fleet_of(run).plan(run)
    return {plan.arguments[2]: json.loads(plan.arguments[-1]) for plan in plans if REQUEST in plan.arguments}


def kinds_of(region: AwsRegion, run: Run | None = None) -> list[str]:
    return [resource.kind for resource in region.resources(None if run is None else label_of(run))]


@contextmanager
def hooked(region: AwsRegion, event: str, handler: Callable[..., Any]) -> Iterator[None]:
    """Call a handler at an event of the SDK's clients, which all regions of this name share."""
    events = [
        region.client(service).meta.events for service in ("ec2", "autoscaling", "iam", "ssm", "sts", "service-quotas")
    ]
    for one in events:
        one.register(event, handler)
    try:
        yield
    finally:
        for one in events:
            one.unregister(event, handler)


def answering(region: AwsRegion, operation: str, answer: dict[str, Any]) -> Any:
    """Give this answer of AWS instead of moto's."""
    return hooked(region, f"before-call.*.{operation}", lambda **_: (SimpleNamespace(status_code=200), answer))


# A launch.


def test_a_launch_creates_a_group_of_machines_and_down_leaves_nothing(region: AwsRegion, s3_store: Store) -> None:
    asked = {"machines": 2, "spot": True, "instances": ["g5.xlarge", "g4dn.xlarge"]}
    run = run_on(s3_store, asked, budget={"hours": 2})
    said: list[str] = []
    start(run, tied=False, say=said.append)
    assert kinds_of(region, run) == [
        "Auto Scaling group", "instance", "instance", "launch template", "security group",
    ]  # fmt: skip
    assert {resource.run for resource in region.resources(None)} == {run.name}
    assert "g5.xlarge from $" in said[0]
    fleet = fleet_of(run)
    assert [machine.state for machine in fleet.machines(run)] == ["running", "running"]
    assert fleet.queue(run) == "2 running of 2"
    actions = region.ask("autoscaling", "describe-scheduled-actions", AutoScalingGroupName=label_of(run))
    assert [action["MaxSize"] for action in actions["ScheduledUpdateGroupActions"]] == [0]
    fleet.down(run)
    assert region.resources(None) == []


def test_a_second_start_creates_nothing_twice_and_takes_the_new_job(region: AwsRegion, s3_store: Store) -> None:
    run = run_on(s3_store, {"machines": 1})
    start(run, tied=False, say=silent)
    before = [one.title for one in region.resources(label_of(run))]
    start(run, tied=False, say=silent)
    assert [one.title for one in region.resources(label_of(run))] == before
    versions = region.ask("ec2", "describe-launch-template-versions", LaunchTemplateName=label_of(run))
    assert len(versions["LaunchTemplateVersions"]) == 2


def test_a_resumed_run_has_the_end_of_its_new_budget(region: AwsRegion, s3_store: Store) -> None:
    """An old tag would make it look expired, and an old action would end it."""
    run = run_on(s3_store, {}, budget={"hours": 1})
    start(run, tied=False, say=silent)
    start(run.changed(run.job.model_copy(update={"budget": BudgetSettings(hours=3)})), tied=False, say=silent)
    expires = {one.kind: one.expires for one in region.resources(label_of(run))}
    hours = (end_of(expires["Auto Scaling group"]) - time.time()) / 3600
    assert 2.9 < hours < 3.1
    assert expires["security group"] == expires["Auto Scaling group"]  # moto never changes the tags of a template
    [action] = scheduled(region, run)
    assert 2.9 < (action["StartTime"].timestamp() - time.time()) / 3600 < 3.2


def end_of(text: str) -> float:
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def scheduled(region: AwsRegion, run: Run) -> list[dict[str, Any]]:
    asked = {"AutoScalingGroupName": label_of(run)}
    found: list[dict[str, Any]] = region.ask("autoscaling", "describe-scheduled-actions", **asked)[
        "ScheduledUpdateGroupActions"
    ]
    return found


def test_aws_ends_machines_of_a_run_without_a_budget_after_a_limit(region: AwsRegion, s3_store: Store) -> None:
    """If their role may not make the group smaller, the group would replace the machines of an ended run for ever."""
    said: list[str] = []
    run = run_on(s3_store, {"limit": "2 days"})
    start(run, tied=False, say=said.append)
    assert "no budget: AWS ends the machines after 2 d 00 h at the latest (fleet.aws.limit)" in said
    [action] = scheduled(region, run)
    assert (action["MaxSize"], action["DesiredCapacity"]) == (0, 0)
    assert 47 < (action["StartTime"].timestamp() - time.time()) / 3600 < 49
    assert 47 < (end_of(region.resources(label_of(run))[0].expires) - time.time()) / 3600 < 49


@pytest.mark.parametrize(("status", "left"), [("finished", False), ("failed", True)])
def test_who_sees_the_end_of_a_run_deletes_what_its_machines_could_not(
    region: AwsRegion, s3_store: Store, status: Literal["finished", "failed"], left: bool
) -> None:
    run = run_on(s3_store, {"create_role": True, "role": None})
    remember(run)
    start(run, tied=False, say=silent)
    run.finish(Result(status, "done", 1, 1.0))
    said: list[str] = []
    release(run, said.append)
    assert bool(region.resources(None)) == left
    assert any("stay for 10 min" in line for line in said) == left


def test_a_resumed_run_gets_new_machines_in_place_of_those_that_stay_for_a_look(
    region: AwsRegion, s3_store: Store
) -> None:
    run = run_on(s3_store, {"machines": 2})
    start(run, tied=False, say=silent)
    before = {one["InstanceId"] for one in region.instances(label_of(run))}
    run.renew(a_lease("a", left=True))  # its machine lingers
    second = int(time.time())  # in which the server tells times
    wait_until(lambda: int(time.time()) > second, "the next second")
    # moto starts no machines of the second version of a template.
    region.ask("ec2", "delete-launch-template", LaunchTemplateName=label_of(run))
    start(run, tied=False, say=silent)
    after = {one["InstanceId"] for one in region.instances(label_of(run))}
    assert (len(before), len(after), before & after) == (2, 2, set())


def test_a_group_that_waits_for_the_end_of_its_machines_is_no_error(region: AwsRegion, s3_store: Store) -> None:
    run = run_on(s3_store, {})
    start(run, tied=False, say=silent)
    [group, *_] = region.resources(label_of(run))

    def refuse(**_: object) -> None:
        answer = {"Error": {"Code": "ValidationError", "Message": "the group is pending deletion"}}
        raise ClientError(answer, "DeleteAutoScalingGroup")

    status = {"AutoScalingGroups": [{"AutoScalingGroupName": group.name, "Status": "Delete in progress"}]}
    with hooked(region, "before-call.*.DeleteAutoScalingGroup", refuse):
        with pytest.raises(AwsRefusal, match="pending deletion"):
            region.delete(group)
        with answering(region, "DescribeAutoScalingGroups", status), pytest.raises(StillInUse):
            region.delete(group)


def test_a_group_that_is_changing_is_asked_again(region: AwsRegion, s3_store: Store) -> None:
    asked: list[str] = []

    def refuse_once(**_: object) -> None:
        asked.append("SetDesiredCapacity")
        if len(asked) == 1:
            answer = {"Error": {"Code": "ResourceContention", "Message": "You already have a pending update"}}
            raise ClientError(answer, "SetDesiredCapacity")

    run = run_on(s3_store, {})
    with hooked(region, "before-call.*.SetDesiredCapacity", refuse_once):
        start(run, tied=False, say=silent)
    assert len(asked) == 2
    assert "instance" in kinds_of(region, run)


def test_a_rule_for_ssh_is_added_to_a_security_group_that_is_there(region: AwsRegion, s3_store: Store) -> None:
    run = run_on(s3_store, {})
    start(run, tied=False, say=silent)
    fleet = run.job.fleet.model_copy(update={"kind": settings_of(ssh_from="203.0.113.7/32")})
    start(run.changed(run.job.model_copy(update={"fleet": fleet})), tied=False, say=silent)
    [group] = region.ask("ec2", "describe-security-groups", GroupNames=[label_of(run)])["SecurityGroups"]
    assert [rule.get("FromPort") for rule in group["IpPermissions"]] == [None, 22]


def test_an_interrupted_launch_is_undone(region: AwsRegion, s3_store: Store) -> None:
    run = run_on(s3_store, {"spot": True, "create_role": True, "role": None})

    def interrupt(text: str) -> None:
        if text.startswith("spot prices"):  # after the machines were asked for
            assert "instance" in kinds_of(region, run)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(run, tied=False, say=interrupt)
    assert region.resources(None) == []


CHANGES = 11  # requests of the launch below that change something
ASKED = {"machines": 2, "spot": True, "create_role": True, "role": None}


def killed_at(change: int, run: Run, region: AwsRegion) -> None:
    """Start the run in a process that is killed when AWS has done that many changes, before it sees the answer."""
    process = os.fork()
    if process == 0:
        for service in ("ec2", "autoscaling", "iam", "ssm"):
            region.client(service).close()  # its connections are this process's, too
        done = 0

        def kill(model: Any, **_: Any) -> None:
            nonlocal done
            if not model.name.startswith(("Describe", "Get", "List")):
                done += 1
            if done == change:
                os.kill(os.getpid(), signal.SIGKILL)

        with hooked(region, "after-call", kill):
            start(run, tied=False, say=silent)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) == (change <= CHANGES), "the launch has this many changes"


def test_whenever_a_launch_is_killed_down_all_leaves_nothing(region: AwsRegion, tmp_path: Path) -> None:
    """A store in a directory, since a client of buckets has threads, which do not survive a fork."""
    store = open_store(str(tmp_path / "store"), create=True)
    left = []
    for change in range(1, CHANGES + 2):
        run = run_on(store, {**ASKED, "mounts": {str(tmp_path): "server:/share"}}, budget={"hours": 1})
        fleet_of(run).plan(run)  # here, so that the environment is packed once and not in every process
        killed_at(change, run, region)
        assert len(run.launches()) == 1, "the intent was recorded first"
        inventory = take_inventory([f"aws:{REGION}"])
        left.append(sorted({resource.kind for resource in inventory.resources}))
        remove_found(inventory)
        assert region.resources(None) == []
    assert left[0] == ["role"]
    assert ["instance" in kinds for kinds in left] == [False] * (CHANGES - 1) + [True, True], "machines come last"
    assert left[-1] == [
        "Auto Scaling group",
        "instance",
        "instance profile",
        "launch template",
        "role",
        "security group",
    ]
    groups = region.ask("ec2", "describe-security-groups")["SecurityGroups"]
    assert not [group for group in groups if group["GroupName"].startswith("packtrain-")]


def test_down_all_finds_what_runs_have_in_every_region_that_is_named(region: AwsRegion) -> None:
    tags = [{"ResourceType": "security-group", "Tags": [{"Key": "packtrain-label", "Value": "packtrain-lost-1"}]}]
    places = [region, AwsRegion(None, "us-west-2")]
    for place in places:
        vpc = place.ask("ec2", "describe-vpcs")["Vpcs"][0]["VpcId"]
        asked = {"GroupName": "lost", "Description": "lost", "VpcId": vpc, "TagSpecifications": tags}
        place.ask("ec2", "create-security-group", **asked)
    inventory = take_inventory(["aws:us-east-1,us-west-2"])
    assert [(one.kind, one.place) for one in inventory.resources] == [
        ("security group", "us-east-1"), ("security group", "us-west-2"),
    ]  # fmt: skip
    remove_found(inventory)
    assert [place.resources(None) for place in places] == [[], []]


def test_no_secret_reaches_aws_by_way_of_a_launch(
    region: AwsRegion, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "/team/wandb"
    region.ask("ssm", "put-parameter", Name=name, Value="canary-in-aws", Type="SecureString", Overwrite=True)
    monkeypatch.setenv("WANDB_API_KEY", "canary-here")
    run = run_on(s3_store, {"secrets": {"WANDB_API_KEY": f"ssm:{name}"}}, environment=["WANDB_API_KEY"])
    sent: list[str] = []
    with hooked(region, "before-send", lambda request, **_: sent.append(f"{request.url} {request.body!r}")):
        start(run, tied=False, say=silent)
    [template] = region.ask("ec2", "describe-launch-template-versions", LaunchTemplateName=label_of(run))[
        "LaunchTemplateVersions"
    ]
    script = gzip.decompress(base64.b64decode(template["LaunchTemplateData"]["UserData"])).decode()
    assert f"ssm:{name}" in script
    everything = " ".join([script, *sent, repr(fleet_of(run).plan(run))])
    assert len(sent) > 10
    for secret in ("canary-in-aws", "canary-here", "secret-of-moto"):
        assert secret not in everything


def test_the_profile_of_a_job_opens_its_store_and_machines_use_their_role(
    region: AwsRegion, s3_location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = "[profile diux]\naws_access_key_id = AKDIUX\naws_secret_access_key = canary\nregion = us-west-2\n"
    (tmp_path / "config").write_text(profile)
    (tmp_path / "train.py").touch()
    kind = settings_of(profile="diux").model_dump(mode="json", exclude_defaults=True)
    job = {"name": "job", "program": ["train.py"], "store": s3_location, "fleet": {"aws": kind}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    said: list[str] = []
    with monkeypatch.context() as without_keys:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            without_keys.delenv(name)
        without_keys.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        without_keys.setenv("AWS_PROFILE", "of-another-account")
        without_keys.delenv("AWS_REGION")
        loaded = load(tmp_path / "job.yaml")
        run = create(check(loaded, PlainProgress(silent)))
        start(run, tied=False, say=said.append)
        [user_data] = [plan.script or "" for plan in fleet_of(run).plan(run) if plan.gives == "USER_DATA"]
        with answering(AwsRegion("diux", region.place), "SimulatePrincipalPolicy", judged("ec2:RunInstances")):
            checks = {check.detail for check in examine(loaded.job.fleet.kind, s3_location) if check.step == "store"}
    assert loaded.notes == ("commands that do not read the job also need: export AWS_PROFILE=diux",)
    assert "machines open the store with their role, not with the AWS profile diux" in said
    assert "export AWS_REGION=us-west-2\n" in user_data
    assert not {"canary", "AKDIUX", "diux"} & {*user_data.replace("=", " ").split()}
    assert checks == {
        "reachable with the AWS profile diux, which machines do not get",
        f"{s3_location} can be used by machines, with their role",
    }


# The plan.


def test_spot_machines_come_from_several_types_and_are_replaced_early(region: AwsRegion, s3_store: Store) -> None:
    run = run_on(s3_store, {"machines": "2..4", "spot": True, "on_demand": 1, "instances": ["g5.xlarge", "g6.xlarge"]})
    requests = requests_of(run)
    group = requests["create-auto-scaling-group"]
    assert (group["MinSize"], group["DesiredCapacity"], group["MaxSize"]) == (0, 0, 4)
    assert requests["set-desired-capacity"]["DesiredCapacity"] == 4
    assert group["CapacityRebalance"]
    mixed = group["MixedInstancesPolicy"]
    assert mixed["LaunchTemplate"]["Overrides"] == [{"InstanceType": "g5.xlarge"}, {"InstanceType": "g6.xlarge"}]
    assert mixed["InstancesDistribution"]["SpotAllocationStrategy"] == "price-capacity-optimized"
    assert mixed["InstancesDistribution"]["OnDemandBaseCapacity"] == 1
    assert mixed["InstancesDistribution"]["OnDemandPercentageAboveBaseCapacity"] == 0
    assert all(tag["PropagateAtLaunch"] for tag in group["Tags"])


def test_machines_require_tokens_for_their_metadata_and_leave_no_disk(region: AwsRegion, s3_store: Store) -> None:
    requests = requests_of(run_on(s3_store, {"key": "me", "disk": "200 GB"}))
    data = requests["create-launch-template"]["LaunchTemplateData"]
    assert data["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 2}
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["KeyName"] == "me"
    [disk] = data["BlockDeviceMappings"]
    assert disk["Ebs"] == {"VolumeType": "gp3", "VolumeSize": 200, "DeleteOnTermination": True}
    tags = {tag["Key"] for specification in data["TagSpecifications"] for tag in specification["Tags"]}
    assert {"packtrain-label", "packtrain-run", "packtrain-store", "packtrain-owner", "packtrain-expires"} <= tags


@pytest.mark.parametrize(("network", "rules"), [(None, 1), ("203.0.113.7/32", 2)])
def test_only_members_reach_a_machine_unless_ssh_is_asked_for(
    region: AwsRegion, s3_store: Store, network: str | None, rules: int
) -> None:
    run = run_on(s3_store, {"ssh_from": network})
    plans = [plan for plan in AwsFleet(settings_of(ssh_from=network)).plan(run) if "-ingress" in plan.arguments[2]]
    asked = [rule for plan in plans for rule in json.loads(plan.arguments[-1])["IpPermissions"]]
    assert len(asked) == rules
    assert asked[0] == {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "${SECURITY_GROUP}"}]}
    assert [rule["IpRanges"][0]["CidrIp"] for rule in asked[1:]] == ([network] if network else [])


def test_efa_and_a_placement_group_are_used_where_asked(region: AwsRegion, s3_store: Store) -> None:
    asked = {"efa": 2, "placement_group": "near", "zones": ["us-east-1a"], "instances": ["p4d.24xlarge"]}
    requests = requests_of(run_on(s3_store, asked))
    data = requests["create-launch-template"]["LaunchTemplateData"]
    assert data["Placement"] == {"GroupName": "near"}
    assert [card["InterfaceType"] for card in data["NetworkInterfaces"]] == ["efa", "efa"]
    assert "SecurityGroupIds" not in data
    assert "authorize-security-group-egress" in requests


def test_the_budget_in_dollars_is_an_end_that_aws_keeps(region: AwsRegion, s3_store: Store) -> None:
    kind = settings_of(machines=2).model_dump(mode="json")
    job = program_job(fleet={"aws": kind, "price": 3.0}, budget={"dollars": 6.0})
    run = new_run(s3_store, job)
    end = requests_of(run)["put-scheduled-update-group-action"]
    assert (end["MaxSize"], end["DesiredCapacity"]) == (0, 0)


def test_the_printed_plan_can_be_typed_and_is_valid_for_the_aws_command(
    region: AwsRegion, s3_store: Store, tmp_path: Path
) -> None:
    """A shell runs it with an `aws` that only notes what it gets; botocore checks the requests as the command does."""
    from botocore.validate import ParamValidator

    asked = {**ASKED, "efa": 1, "key": "me", "ssh_from": "10.0.0.0/8"}
    run = run_on(s3_store, asked, budget={"hours": 1})
    plans = fleet_of(run).plan(run)
    noted = tmp_path / "noted"
    aws = f"aws() {{ printf '%s\\0' \"$@\" >> {noted}; printf '\\1' >> {noted}; echo \"answer-to-$2\"; }}"
    script = "\n".join([aws, *(plan.in_shell() for plan in plans)])
    subprocess.run(["bash", "-euc", script], check=True, stdout=subprocess.DEVNULL)
    calls = [call.split("\0")[:-1] for call in noted.read_text().split("\1")[:-1]]
    assert [call[1] for call in calls] == [plan.arguments[2] for plan in plans if plan.arguments[0] == "aws"]
    requests = {}
    for service, operation, *options in calls:
        assert options[options.index("--region") + 1] == REGION
        if REQUEST not in options:
            continue
        requests[operation] = json.loads(options[-1])
        client = session_of(None).client(service, region_name=REGION)
        name = client.meta.method_to_api_mapping[operation.replace("-", "_")]
        shape = client.meta.service_model.operation_model(name).input_shape
        assert not ParamValidator().validate(requests[operation], shape).has_errors()
    data = requests["create-launch-template"]["LaunchTemplateData"]
    assert f"run={run.name}" in gzip.decompress(base64.b64decode(data["UserData"])).decode()
    assert data["NetworkInterfaces"][0]["Groups"] == ["answer-to-create-security-group"]
    group = requests["create-auto-scaling-group"]
    assert group["VPCZoneIdentifier"] == "answer-to-describe-subnets"
    assert "$Default" in json.dumps(group)


def test_the_policy_allows_the_store_the_secrets_and_the_end_and_no_more(region: AwsRegion, s3_store: Store) -> None:
    asked = {
        "secrets": {"A": "ssm:/team/a", "B": "secretsmanager:team/b"},
        "volume": {"name": "imagenet", "snapshot": "snap-0123456789abcdef0"},
    }
    rights = policy(s3_store.url, ALL_RUNS, settings_of(**asked), region)
    statements = {one["Sid"]: one for one in rights["Statement"]}
    assert statements["ReadAndWriteTheStore"]["Resource"] == f"arn:aws:s3:::{s3_store.url.removeprefix('s3://')}/*"
    assert statements["ReadSecretsOfSsm"]["Resource"] == [f"arn:aws:ssm:{REGION}:*:parameter/team/a"]
    assert statements["ReadSecretsOfSecretsmanager"]["Resource"] == [
        f"arn:aws:secretsmanager:{REGION}:*:secret:team/b-??????"
    ]
    unbounded = {name for name, one in statements.items() if one["Resource"] == "*"}
    assert unbounded == {"SeeTheGroup", "SeeVolumes", "AttachToTheMachine"}
    assert "create-policy" in requests_of(run_on(s3_store, asked)), "a dry run prints it for whoever manages the role"


def test_a_store_s_prefix_is_no_pattern_in_the_policy(region: AwsRegion) -> None:
    rights = policy("s3://bucket/a*/${aws:username}/b?", ALL_RUNS, settings_of(), region)
    statements = {one["Sid"]: one for one in rights["Statement"]}
    below = "a${*}/${$}{aws:username}/b${?}/*"
    assert statements["ReadAndWriteTheStore"]["Resource"] == f"arn:aws:s3:::bucket/{below}"
    assert statements["ListTheStore"]["Condition"] == {"StringLike": {"s3:prefix": below}}


def test_a_shared_role_ends_no_machine_of_another_store(region: AwsRegion, s3_store: Store) -> None:
    asked = settings_of(volume={"name": "imagenet", "size": "8 GB"})
    statements = {one["Sid"]: one for one in policy(s3_store.url, ALL_RUNS, asked, region)["Statement"]}
    start(run := run_on(s3_store, {"machines": 1}), tied=False)
    [group] = region.ask_all("autoscaling", "describe-auto-scaling-groups", "AutoScalingGroups")
    tags = {tag["Key"]: tag["Value"] for tag in group["Tags"]}
    [(key, value)] = statements["EndTheMachines"]["Condition"]["StringEquals"].items()
    assert (key, tags["packtrain-store"]) == ("autoscaling:ResourceTag/packtrain-store", value), run.name
    for name in ("EndTheTemplate", "TakeItToThisMachine"):
        assert statements[name]["Condition"]["StringEquals"] == {"aws:ResourceTag/packtrain-store": value}


@pytest.mark.parametrize(("one", "other"), [("a*", "a_"), ("a*", "a?"), ("a" * 300 + "1", "a" * 300 + "2")])
def test_tags_of_two_stores_differ_whatever_is_in_their_names(one: str, other: str) -> None:
    assert tag_value(f"s3://bucket/{one}") != tag_value(f"s3://bucket/{other}")
    assert len(tag_value(f"s3://bucket/{one}")) <= 256
    assert tag_value("s3://bucket/team/a_1") == "s3://bucket/team/a_1"


def test_the_example_can_be_planned(region: AwsRegion, s3_location: str) -> None:
    loaded = load(EXAMPLE, [f"store={s3_location}"])
    commands = [plan.arguments[2] for plan in dry_run(loaded).plans if plan.arguments[0] == "aws"]
    assert commands[-1] == "set-desired-capacity"


# What is refused, before anything exists.


@pytest.mark.parametrize(
    ("given", "place", "told"),
    [
        ({"instances": []}, "instances", "must name at least one"),
        ({"instances": ["g5.xlarge", "g5.xlarge"]}, "instances", "twice"),
        ({"role": None}, "role", "set create_role: true"),
        ({"create_role": True}, "create_role", "remove one of the two"),
        ({"attach": "ssh"}, "attach", "needs a key pair"),
        ({"on_demand": 1}, "on_demand", "without spot"),
        ({"placement_group": "near"}, "zones", "in one zone"),
        ({"secrets": {"X": "hunter2"}}, "secrets", "ssm:/name"),
        ({"volume": {"name": "a", "type": "io2"}}, "volume", "is required"),
        ({"volume": {"name": "a", "type": "st1", "iops": 5}}, "volume", "no iops"),
        ({"volume": {"name": "a", "size": 600}}, "volume", "a size, such as '600 GB'"),
        ({"mounts": {"/data": "fs-1"}}, "mounts", "of EFS"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], place: str, told: str) -> None:
    with pytest.raises(ValidationError) as error:
        settings_of(**given)
    location, text, _ = faults(error.value)[0]
    assert location[0] == place
    assert told in text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"instances": ["g5.xlarge", "zz9.top"]}, "fleet.aws.instances: unknown instance type in us-east-1: zz9.top"),
        ({"image": "ami-00000000000000000"}, "fleet.aws.image: no image ami-00000000000000000"),
        ({"image": "nothing-of-that-name-*"}, "fleet.aws.image: no image 'nothing-of-that-name-*' of amazon"),
        ({"image": "ssm:/no/such"}, "fleet.aws.image: no parameter /no/such"),
        ({"disk": "1 GB"}, "fleet.aws.disk: 1 GB is too small"),
        ({"instances": ["g5g.xlarge"]}, "is for x86_64, but g5g.xlarge is arm64"),
        ({"efa": 1}, "fleet.aws.efa: g5.xlarge has fewer EFA interfaces than 1"),
        ({"key": "nobody"}, "fleet.aws.key: no key pair nobody"),
        ({"role": "nobody"}, "fleet.aws.role: no instance profile nobody"),
        ({"subnets": ["subnet-123"]}, "fleet.aws.subnets: no subnet subnet-123"),
        ({"zones": ["us-east-1z"]}, "fleet.aws.zones: no subnet in us-east-1z"),
        ({"zones": ["us-east-1e"]}, "us-east-1e do not offer g5.xlarge; zones that do: us-east-1a"),
        ({"secrets": {"X": "ssm:/no/such"}}, "fleet.aws.secrets.X: no secret ssm:/no/such"),
        ({"secrets": {"X": "secretsmanager:none"}}, "fleet.aws.secrets.X: no secret secretsmanager:none"),
        ({"volume": {"name": "none"}}, "fleet.aws.volume.name: no volume named none_0"),
        (
            {"volume": {"name": "x", "snapshot": "snap-00000000"}},
            "fleet.aws.volume.snapshot: no snapshot snap-00000000",
        ),
        ({"region": "us-east-11"}, "fleet.aws.region: unknown region 'us-east-11'; did you mean 'us-east-1'?"),
        ({"profile": "nobody"}, "fleet.aws.profile: The config profile (nobody) could not be found"),
    ],
)
def test_what_is_missing_in_the_account_is_named(
    region: AwsRegion, s3_store: Store, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(Mistake) as error:
        AwsFleet(settings_of(**given)).check(program_job(), s3_store)
    assert told in str(error.value)
    assert region.resources(None) == []


def test_a_mistake_is_shown_with_its_line(region: AwsRegion, s3_location: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    text = EXAMPLE.read_text().replace("spot: true", "spot: true\n    image: ami-00000000000000000")
    job.write_text(text.replace("s3://my-bucket/store", s3_location))
    (tmp_path / "meet.py").touch()
    line = next(number for number, line in enumerate(job.read_text().splitlines(), 1) if "image: ami" in line)
    with pytest.raises(Mistake, match=f"job.yaml:{line}: fleet.aws.image: no image ami-00000000000000000"):
        create(check(load(job), PlainProgress(silent)))


def test_a_failed_resume_is_undone_though_a_security_group_was_left(region: AwsRegion, s3_store: Store) -> None:
    run = run_on(s3_store, {"machines": 1})
    start(run, tied=False, say=silent)
    for resource in region.resources(label_of(run)):
        if resource.kind != "security group":  # as the last machine of a run does
            region.delete(resource)
    assert kinds_of(region, run)[-1] == "security group"
    with (
        answering(region, "DescribeInstances", {"Reservations": []}),
        answering(region, "DescribeScalingActivities", {"Activities": [failed(NO_QUOTA)]}),
        pytest.raises(PacktrainError, match="quota of vCPUs"),
    ):
        start(run, tied=False, say=silent)
    assert region.resources(None) == []


def test_a_variable_without_a_reference_is_refused(region: AwsRegion, s3_store: Store) -> None:
    with pytest.raises(Mistake, match=r"environment.0: HF_TOKEN .*write fleet.aws.secrets: {HF_TOKEN: ssm:/name}"):
        AwsFleet(settings_of()).check(program_job(environment=["HF_TOKEN"]), s3_store)


def test_a_directory_that_machines_do_not_mount_is_refused(region: AwsRegion, directory_store: Store) -> None:
    with pytest.raises(Mistake, match="store: machines of aws do not have the directory"):
        AwsFleet(settings_of()).check(program_job(), directory_store)
    AwsFleet(settings_of(mounts={directory_store.url: "fs-0123:/"})).check(program_job(), directory_store)


def test_without_credentials_there_is_one_line(
    region: AwsRegion, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(Mistake, match="no valid AWS credentials; run `aws configure`"):
        AwsFleet(settings_of()).check(program_job(), s3_store)


def test_an_image_is_found_by_name_and_by_parameter(region: AwsRegion, s3_store: Store) -> None:
    region.ask("ssm", "put-parameter", Name="/images/mine", Value=IMAGE, Type="String", Overwrite=True)
    for image in (UBUNTU, "ssm:/images/mine"):
        run = run_on(s3_store, {"image": image})
        start(run, tied=False, say=silent)
        [machine] = region.instances(label_of(run))
        assert machine["ImageId"] == IMAGE


def test_who_may_not_is_told_which_right_is_missing(region: AwsRegion, s3_store: Store) -> None:
    denied = {"Error": {"Code": "UnauthorizedOperation", "Message": "You are not authorized"}}

    def refuse(**_: Any) -> tuple[Any, dict[str, Any]]:
        return SimpleNamespace(status_code=403), denied

    with hooked(region, "before-call.*.CreateLaunchTemplate", refuse), pytest.raises(Mistake) as error:
        start(run_on(s3_store, {}), tied=False, say=silent)
    assert "aws ec2 create-launch-template in us-east-1: not allowed" in str(error.value)
    assert "ask for the right to ec2:CreateLaunchTemplate" in str(error.value)
    assert region.resources(None) == []


# Capacity.

NO_CAPACITY = "Could not launch Spot Instances. InsufficientInstanceCapacity - There is no Spot capacity available"
NO_QUOTA = (
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows. Launching EC2 instance failed."
)


def failed(message: str) -> dict[str, Any]:
    return {"StatusCode": "Failed", "StatusMessage": message}


@pytest.mark.parametrize(
    ("message", "told", "for_good"),
    [
        (NO_CAPACITY, "AWS has no free machines of these types in these zones", False),
        (NO_QUOTA, "quota of vCPUs", True),
        ("Could not launch Spot Instances. MaxSpotInstanceCountExceeded - Max spot instance count exceeded.",
         "quota of spot machines", True),
        ("The image id '[ami-1]' does not exist. Launching EC2 instance failed.", "the image is gone", True),
        ("Something new. Launching EC2 instance failed.", "Something new", False),
    ],
)  # fmt: skip
def test_why_a_group_has_no_machines_is_said_in_words(message: str, told: str, for_good: bool) -> None:
    trouble = trouble_of([{"StatusCode": "InProgress"}, failed(message)])
    assert trouble is not None
    assert told in trouble.text
    assert trouble.for_good == for_good
    assert trouble_of([{"StatusCode": "Successful"}, failed(message)]) is None


def test_a_quota_ends_the_launch_and_leaves_nothing(region: AwsRegion, s3_store: Store) -> None:
    nothing: dict[str, Any] = {"Reservations": []}
    news = {"Activities": [failed(NO_QUOTA)]}
    run = run_on(s3_store, {})
    with (
        answering(region, "DescribeInstances", nothing),
        answering(region, "DescribeScalingActivities", news),
        pytest.raises(PacktrainError, match="quota of vCPUs"),
    ):
        start(run, tied=False, say=silent)
    assert region.resources(None) == []


def test_without_capacity_the_group_keeps_trying_and_ls_says_why(
    region: AwsRegion, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.fleet.aws.fleet.NEWS_SECONDS", 0.1)
    said: list[str] = []
    run = run_on(s3_store, {"machines": 2})
    with (
        answering(region, "DescribeInstances", {"Reservations": []}),
        answering(region, "DescribeScalingActivities", {"Activities": [failed(NO_CAPACITY)]}),
    ):
        start(run, tied=False, say=said.append)
        state = fleet_of(run).queue(run)
    assert "AWS has no free machines" in said[-1]
    assert "the group keeps trying" in said[-1]
    assert state is not None
    assert state.startswith("no machine of 2: AWS has no free machines")
    assert "Auto Scaling group" in kinds_of(region, run)


# Machines that are there.


def test_a_shell_is_opened_by_ssh_or_by_ssm(
    region: AwsRegion, s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with suppress(AwsRefusal):
        region.ask("ec2", "create-key-pair", KeyName="me")
    run = run_on(s3_store, {"key": "me"})
    with pytest.raises(Mistake, match="no machine is running"):
        fleet_of(run).shell(run, None)
    start(run, tied=False, say=silent)
    [machine] = region.instances(label_of(run))
    by_ssh = fleet_of(run).shell(run, machine["PrivateIpAddress"])
    assert by_ssh[:3] == ("ssh", "-t", "--")
    assert by_ssh[3].startswith("ubuntu@")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Mistake, match="needs the aws command"):
        AwsFleet(settings_of(attach="ssm")).shell(run, None)
    (tmp_path / "aws").touch(mode=0o755)
    by_ssm = AwsFleet(settings_of(attach="ssm")).shell(run, None)
    assert by_ssm == ("aws", "ssm", "start-session", "--target", machine["InstanceId"], "--region", REGION)
    with pytest.raises(Mistake, match="no machine 'other'"):
        fleet_of(run).shell(run, "other")


# Volumes.


@pytest.fixture
def volumes(region: AwsRegion) -> Iterator[list[str]]:
    """imagenet_0 and imagenet_1 in us-east-1b."""
    made = []
    for number in range(2):
        tags = [{"ResourceType": "volume", "Tags": [{"Key": "Name", "Value": f"imagenet_{number}"}]}]
        asked = {"AvailabilityZone": "us-east-1b", "Size": 10, "TagSpecifications": tags}
        made.append(region.ask("ec2", "create-volume", **asked)["VolumeId"])
    yield made
    for volume in region.ask("ec2", "describe-volumes", VolumeIds=made)["Volumes"]:
        for place in volume["Attachments"]:
            region.ask("ec2", "detach-volume", VolumeId=volume["VolumeId"], InstanceId=place["InstanceId"])
        region.ask("ec2", "delete-volume", VolumeId=volume["VolumeId"])


def test_machines_are_asked_for_where_their_volumes_are(region: AwsRegion, s3_store: Store, volumes: list[str]) -> None:
    run = run_on(s3_store, {"machines": 2, "volume": {"name": "imagenet"}})
    start(run, tied=False, say=silent)
    [group] = region.ask("autoscaling", "describe-auto-scaling-groups", AutoScalingGroupNames=[label_of(run)])[
        "AutoScalingGroups"
    ]
    assert group["AvailabilityZones"] == ["us-east-1b"]
    fleet_of(run).down(run)
    left = region.ask("ec2", "describe-volumes", VolumeIds=volumes)["Volumes"]
    assert len(left) == 2, "volumes outlive their runs"


def test_volumes_that_are_too_few_are_refused_unless_more_can_be_made(
    region: AwsRegion, s3_store: Store, volumes: list[str]
) -> None:
    asked: dict[str, Any] = {"machines": 3, "volume": {"name": "imagenet"}}
    with pytest.raises(Mistake, match="only 2 of 2 volumes imagenet_\\* are free, for 3 machines"):
        AwsFleet(settings_of(**asked)).check(program_job(), s3_store)
    asked["volume"]["size"] = "600 GB"
    AwsFleet(settings_of(**asked)).check(program_job(), s3_store)


def test_a_snapshot_of_a_pack_is_made_once(region: AwsRegion, s3_store: Store, volumes: list[str]) -> None:
    run = run_on(s3_store, {"volume": {"name": "imagenet"}})
    fleet = fleet_of(run)
    start(run, tied=False, say=silent)
    with pytest.raises(Mistake, match="no volume imagenet_\\* is attached"):
        fleet.snapshot(run, None, "pack-1")
    [machine] = region.instances(label_of(run))
    region.ask("ec2", "attach-volume", VolumeId=volumes[1], InstanceId=machine["InstanceId"], Device="/dev/sdp")
    taken = fleet.snapshot(run, None, f"pack-of-{run.name}")
    assert taken.is_new
    assert fleet.snapshot(run, None, f"pack-of-{run.name}") == replace(taken, is_new=False)
    [snapshot] = region.ask("ec2", "describe-snapshots", SnapshotIds=[taken.name])["Snapshots"]
    assert snapshot["VolumeId"] == volumes[1]
    command = ["packtrain", "volume", "snapshot", run.name, "--store", s3_store.url, "--yes", "--json"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["new"], "a program has no pack: each snapshot is a new one"


def test_a_volume_that_a_finished_run_had_is_still_its_own_to_snapshot(
    region: AwsRegion, s3_store: Store, volumes: list[str]
) -> None:
    run = run_on(s3_store, {"volume": {"name": "imagenet"}})
    fleet = fleet_of(run)
    run.finish(Result("finished", "the program ended", 0, 1.0))
    [unnamed] = [region.ask("ec2", "create-volume", AvailabilityZone="us-east-1b", Size=1)["VolumeId"]]
    s3_store.put(run.key(f"volumes/{unnamed}"), b"")  # by somebody who may write the store
    with pytest.raises(Mistake, match="none that they used is free; wait until they have started"):
        fleet.snapshot(run, None, None)
    s3_store.put(run.key(f"volumes/{volumes[1]}"), b"i-0123")  # as its machine has
    taken = fleet.snapshot(run, None, None)
    [snapshot] = region.ask("ec2", "describe-snapshots", SnapshotIds=[taken.name])["Snapshots"]
    assert (snapshot["VolumeId"], taken.is_new) == (volumes[1], True)
    later = run_on(s3_store, {})
    start(later, tied=False, say=silent)
    [machine] = region.instances(label_of(later))
    region.ask("ec2", "attach-volume", VolumeId=volumes[1], InstanceId=machine["InstanceId"], Device="/dev/sdp")
    with pytest.raises(Mistake, match="until the run that uses it has ended"):
        fleet.snapshot(run, None, None)
    region.ask("ec2", "delete-volume", VolumeId=unnamed)


def test_a_region_that_is_not_set_is_asked_for(no_aws: None) -> None:
    with pytest.raises(ValidationError) as error:
        AwsSettings.model_validate({"instances": ["g5.xlarge"], "role": "nodes"})
    assert faults(error.value)[0][1] == "is not set; write one, such as us-east-1, or set AWS_REGION"


# Doctor.

QUOTA = {"Quota": {"QuotaName": "Running On-Demand G and VT instances", "Value": 8.0}}


def judged(*actions: str, decision: str = "allowed") -> dict[str, Any]:
    """Return an answer of IAM's policy simulator."""
    results = [{"EvalActionName": action, "EvalDecision": decision} for action in actions]
    return {"EvaluationResults": results, "IsTruncated": False}


def checks_of(store: Store | None, **given: Any) -> dict[str, Check]:
    return {check.step: check for check in AwsFleet(settings_of(**given)).checks(store)}


def test_doctor_asks_aws_for_everything_that_a_launch_needs_and_creates_nothing(
    region: AwsRegion, s3_store: Store
) -> None:
    simulated: list[dict[str, Any]] = []
    with (
        answering(region, "GetServiceQuota", QUOTA),
        answering(region, "SimulatePrincipalPolicy", judged("ec2:RunInstances")),
        hooked(region, "provide-client-params.iam.*", lambda params, **_: simulated.append(params)),
    ):
        checks = checks_of(s3_store, machines=2)
    [end] = [asked for asked in simulated if "autoscaling:DeleteAutoScalingGroup" in asked.get("ActionNames", ())[1:2]]
    named = [(entry["ContextKeyName"], entry["ContextKeyValues"]) for entry in end["ContextEntries"]]
    assert named == [("autoscaling:ResourceTag/packtrain-store", [s3_store.url])]
    assert all(check.ok and not check.advice for check in checks.values()), checks
    assert [*checks] == [
        "credentials", "region", "image", "instances", "subnets", "role", "quota", "store", "rights", "policies",
        "leftovers",
    ]  # fmt: skip
    assert checks["credentials"].detail.startswith("arn:aws:")
    assert checks["instances"].detail.startswith("g5.xlarge in us-east-1")
    assert checks["quota"].detail.endswith("8 vCPUs, 0 in use; the run needs 8")
    assert region.resources(None) == []


def test_doctor_says_what_aws_lacks_and_forbids(region: AwsRegion, directory_store: Store) -> None:
    def forbid(**_: Any) -> Any:
        raise ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "RunInstances")

    with (
        answering(region, "GetServiceQuota", QUOTA),
        answering(region, "SimulatePrincipalPolicy", judged("autoscaling:SetDesiredCapacity", decision="implicitDeny")),
        hooked(region, "before-call.ec2.RunInstances", forbid),
    ):
        checks = checks_of(directory_store, machines=3, key="lost", instances=["g5.xlarge", "c5.large"])
    failed = {step: (check.detail, check.advice) for step, check in checks.items() if not check.ok}
    assert "no key pair lost" in failed["key"][0]
    assert "ask for more of L-" in failed["quota"][1]
    assert "machines of aws do not have the directory" in failed["store"][0]
    assert failed["rights"] == (
        f"aws ec2 run-instances in {REGION}: not allowed",
        "ask for the right to ec2:RunInstances",
    )
    assert failed["policies"][0] == "not allowed: autoscaling:SetDesiredCapacity"
    assert checks["image"].ok


def test_doctor_knows_no_more_than_aws_tells_this_user(region: AwsRegion, s3_store: Store) -> None:
    def forbid(**_: Any) -> Any:
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "any")

    with (
        hooked(region, "before-call.*.GetServiceQuota", forbid),
        hooked(region, "before-call.*.SimulatePrincipalPolicy", forbid),
    ):
        checks = checks_of(s3_store)
    hidden = {step for step, check in checks.items() if check.skipped}
    assert hidden >= {"quota", "policies"}
    assert all(check.ok or check.skipped for check in checks.values()), checks


@pytest.mark.parametrize(
    ("name", "spot", "code"),
    [
        ("g5.xlarge", False, "L-DB2E81BA"), ("p4d.24xlarge", True, "L-7212CCBC"), ("p5.48xlarge", True, "L-C4BD4855"),
        ("m7i.large", False, "L-1216C47A"), ("trn1.2xlarge", False, "L-2C3B7624"), ("mac2.metal", False, None),
    ],
)  # fmt: skip
def test_an_instance_type_counts_for_the_quota_of_its_family(name: str, spot: bool, code: str | None) -> None:
    assert quota_code(name, spot) == code


def test_doctor_stops_at_a_region_or_credentials_that_aws_does_not_know(
    region: AwsRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert region.place == REGION
    assert [*checks_of(None, region="us-nowhere-1")] == ["region"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    checks = checks_of(None)
    assert [*checks] == ["credentials"]
    assert "aws configure" in checks["credentials"].advice


def test_doctor_checks_the_store_from_here_and_a_cloud_without_machines(region: AwsRegion, s3_store: Store) -> None:
    given = settings_of(image="ami-00000000")
    with (
        answering(region, "GetServiceQuota", QUOTA),
        answering(region, "SimulatePrincipalPolicy", judged("ec2:RunInstances")),
    ):
        checks = {check.step: check for check in examine(given, s3_store.url)}
    assert checks["atomic create"].ok
    assert [step for step, check in checks.items() if not check.ok] == ["image"]
    assert "no image ami-00000000" in checks["image"].detail
    assert region.resources(None) == []
    assert s3_store.list("scratch/") == []
