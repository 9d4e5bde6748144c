"""The least rights with which machines of the aws fleet can do their part, as a policy of IAM."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from packtrain.fleet.aws.region import AwsRegion, tag_value
from packtrain.fleet.cloud import LABEL_TAG, STORE_TAG

if TYPE_CHECKING:
    from packtrain.fleet.aws.fleet import AwsSettings

ASSUMED_BY_MACHINES = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
ALL_RUNS = "packtrain-*"  # the labels of all runs, for a role that those of a store share
_SESSION = (
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)


def policy(store: str, label: str, settings: AwsSettings, region: AwsRegion) -> dict[str, Any]:
    """Return the policy of the machines' role: what runs of this label, which may have a `*`, need with this store.

    A shared role reaches no machine of a run in another store. In its own, whoever has the role can stop every run.
    """
    start = f"arn:{region.partition}"
    statements = [
        *_store(store, start),
        *_end(store, label, start, region.place),
        *_secrets(settings, start, region.place),
        *_volumes(settings, store, label, start, region.place),
        *([_allow("AttachToTheMachine", _SESSION)] if settings.attach_by == "ssm" else []),
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def _store(url: str, start: str) -> list[dict[str, Any]]:
    if not url.startswith("s3://"):
        return []
    name, _, prefix = url.removeprefix("s3://").partition("/")
    bucket, prefix = f"{start}:s3:::{_literal(name)}", _literal(prefix.strip("/"))
    below = f"{prefix}/*" if prefix else "*"
    objects = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
    return [
        _allow("ReadAndWriteTheStore", objects, f"{bucket}/{below}"),
        _allow("ListTheStore", ("s3:ListBucket",), bucket, {"StringLike": {"s3:prefix": below}}),
        _allow("FindUnfinishedUploads", ("s3:ListBucketMultipartUploads",), bucket),
    ]


def _literal(text: str) -> str:
    """Return a text as a policy names it: in its patterns `*`, `?` and `${...}` stand for something else."""
    return re.sub(r"[*?$]", lambda match: f"${{{match[0]}}}", text)


def _end(store: str, label: str, start: str, region: str) -> list[dict[str, Any]]:
    """A machine ends itself without being replaced; the last one takes the group along."""
    end = ("TerminateInstanceInAutoScalingGroup", "DeleteAutoScalingGroup")
    group = f"{start}:autoscaling:{region}:*:autoScalingGroup:*:autoScalingGroupName/{label}"
    template = f"{start}:ec2:{region}:*:launch-template/*"
    groups = {"StringEquals": {f"autoscaling:ResourceTag/{STORE_TAG}": tag_value(store)}}
    look = ("autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeAutoScalingInstances")
    return [
        _allow("EndTheMachines", [f"autoscaling:{word}" for word in end], group, groups),
        _allow("EndTheTemplate", ("ec2:DeleteLaunchTemplate",), template, _of(store, label)),
        _allow("SeeTheGroup", look),
    ]


def _of(store: str, label: str) -> dict[str, Any]:
    """Return the condition that a thing belongs to runs of this label in the store."""
    return {
        "StringEquals": {f"aws:ResourceTag/{STORE_TAG}": tag_value(store)},
        "StringLike": {f"aws:ResourceTag/{LABEL_TAG}": label},
    }


def _secrets(settings: AwsSettings, start: str, region: str) -> list[dict[str, Any]]:
    by_service: dict[str, list[str]] = {"ssm": [], "secretsmanager": []}
    for reference in settings.secrets.values():
        service, _, name = reference.partition(":")
        # Secrets Manager adds a hyphen and six characters to the name of a secret.
        place = f"parameter/{name.strip('/')}" if service == "ssm" else f"secret:{name}-??????"
        by_service[service].append(f"{start}:{service}:{region}:*:{place}")
    actions = {"ssm": "ssm:GetParameter", "secretsmanager": "secretsmanager:GetSecretValue"}
    return [
        _allow(f"ReadSecretsOf{service.title()}", (actions[service],), names)
        for service, names in by_service.items()
        if names
    ]


def _volumes(settings: AwsSettings, store: str, label: str, start: str, region: str) -> list[dict[str, Any]]:
    if settings.volume is None:
        return []
    ec2 = f"{start}:ec2:{region}:*"
    named = {"StringLike": {"aws:ResourceTag/Name": f"{settings.volume.name}_*"}}
    requested = {"StringLike": {"aws:RequestTag/Name": f"{settings.volume.name}_*"}}
    tagged = {"StringEquals": {"ec2:CreateAction": "CreateVolume"}}
    snapshot = (
        [] if settings.volume.snapshot is None else [f"{start}:ec2:{region}::snapshot/{settings.volume.snapshot}"]
    )
    return [
        _allow("SeeVolumes", ("ec2:DescribeVolumes",)),
        _allow("TakeAVolume", ("ec2:AttachVolume",), f"{ec2}:volume/*", named),
        _allow("TakeItToThisMachine", ("ec2:AttachVolume",), f"{ec2}:instance/*", _of(store, label)),
        _allow("MakeAVolume", ("ec2:CreateVolume",), f"{ec2}:volume/*", requested),
        _allow("NameTheVolume", ("ec2:CreateTags",), f"{ec2}:volume/*", tagged),
        *([_allow("UseTheSnapshot", ("ec2:CreateVolume",), snapshot)] if snapshot else []),
    ]


def _allow(
    name: str, actions: Any, resource: str | list[str] = "*", condition: dict[str, Any] | None = None
) -> dict[str, Any]:
    statement = {"Sid": name, "Effect": "Allow", "Action": list(actions), "Resource": resource}
    return statement if condition is None else {**statement, "Condition": condition}
