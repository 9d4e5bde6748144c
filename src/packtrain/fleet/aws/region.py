"""A region of an AWS account: one door for all requests, errors in words, and what runs have there."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any

from packtrain.errors import FieldMistake, Mistake, nearest
from packtrain.fleet.cloud import LABEL_TAG, Provider, Resource, StillInUse
from packtrain.identity import install_command

_PATH = "/packtrain/{region}/"  # of roles: IAM has no regions, and lists roles by their path, not by their tags
_LIVING = ("pending", "running", "shutting-down", "stopping", "stopped")  # a terminated one is listed for an hour
_SETTLE_SECONDS = 5.0
# Auto Scaling does one thing at a time, and asks to try again meanwhile.
BUSY = {"ResourceContention", "ScalingActivityInProgress"}
_IN_USE = {"DependencyViolation", "InvalidGroup.InUse", "ResourceInUse", "DeleteConflict", *BUSY}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
_REFUSED = {"AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch"}
_FORBIDDEN = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}
_MAKING = Lock()  # a session makes one client at a time; clients themselves may be used by all threads
_UNSAFE = re.compile(r"[^\w +=.:/@-]")  # in the value of a tag
_MAX_VALUE = 256


class AwsRefusal(Mistake):
    """AWS answered no; `code` is its own word for the reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_missing(self) -> bool:
        """True if what the request names does not exist."""
        # Auto Scaling has one code for every mistake, and says the rest in words.
        return "NotFound" in self.code or self.code == "NoSuchEntity" or "not found" in str(self).lower()

    @property
    def is_forbidden(self) -> bool:
        return self.code in _FORBIDDEN


class AwsRegion(Provider):
    """The account that `profile` (or the environment) gives access to, in one region."""

    idle_kinds = frozenset({"launch template", "security group", "instance profile", "role"})

    def __init__(self, profile: str | None, region: str) -> None:
        self.place, self._session = region, session_of(profile)
        regions = self._session.get_available_regions("ec2", self.partition)
        if region not in regions:
            raise FieldMistake("fleet.aws.region", f"unknown region {region!r}; {nearest(region, regions)}")
        # AWS lists what is new only after some seconds; any other server lists what it has.
        is_amazon = ".amazonaws." in self.client("ec2").meta.endpoint_url
        self.settle_seconds = _SETTLE_SECONDS if is_amazon else 0.0

    @property
    def partition(self) -> str:
        """The first part of all names: `aws`, or another one in China and for governments."""
        from botocore.exceptions import UnknownRegionError

        try:
            return str(self._session.get_partition_for_region(self.place))
        except UnknownRegionError:
            return "aws"

    def ask(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        """Send one request. `operation` is in the form of the aws command, such as `describe-images`."""
        name = operation.replace("-", "_")
        answer: dict[str, Any] = self._sent(service, operation, lambda client: getattr(client, name)(**request))
        return answer

    def ask_all(self, service: str, operation: str, key: str, **request: Any) -> list[dict[str, Any]]:
        """Return the items below `key` of all pages of an answer."""

        def pages(client: Any) -> list[dict[str, Any]]:
            paginator = client.get_paginator(operation.replace("-", "_"))
            return [item for page in paginator.paginate(**request) for item in page.get(key, ())]

        items: list[dict[str, Any]] = self._sent(service, operation, pages)
        return items

    def _sent(self, service: str, operation: str, send: Callable[[Any], Any]) -> Any:
        from botocore import exceptions
        from botocore.parsers import ResponseParserError

        try:
            return send(self.client(service))
        except exceptions.ClientError as error:
            raise _refusal(error, service, operation, self.place) from None
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.TokenRetrievalError,
                exceptions.SSOError, exceptions.CredentialRetrievalError):  # fmt: skip
            advice = "run `aws configure` or `aws sso login`, or set AWS_PROFILE"
            raise Mistake(f"no valid AWS credentials; {advice}") from None
        except exceptions.HTTPClientError as error:
            endpoint = error.kwargs.get("endpoint_url") or service
            raise Mistake(
                f"cannot reach {endpoint}; check fleet.aws.region, AWS_ENDPOINT_URL and the network"
            ) from None
        except ResponseParserError:
            raise Mistake(f"aws {service} {operation}: no answer of AWS; check AWS_ENDPOINT_URL and proxies") from None
        except exceptions.BotoCoreError as error:
            raise Mistake(f"aws {service} {operation}: {error}") from None

    def client(self, service: str) -> Any:
        with _MAKING:
            return _client(self._session, service, self.place)

    # What runs have here.

    def resources(self, label: str | None) -> list[Resource]:
        groups = ("autoscaling", "describe-auto-scaling-groups", "AutoScalingGroups", "AutoScalingGroupName")
        templates = ("ec2", "describe-launch-templates", "LaunchTemplates", "LaunchTemplateId")
        firewalls = ("ec2", "describe-security-groups", "SecurityGroups", "GroupId")
        return [
            *self._tagged("Auto Scaling group", *groups, label),
            *(self._resource("instance", instance["InstanceId"], instance) for instance in self.instances(label)),
            *self._tagged("launch template", *templates, label),
            *self._tagged("security group", *firewalls, label),
            *self._roles(label),
        ]

    def instances(self, label: str | None) -> list[dict[str, Any]]:
        """Return the machines of a run, or of all runs, as EC2 describes them."""
        states = {"Name": "instance-state-name", "Values": list(_LIVING)}
        reservations = self.ask_all("ec2", "describe-instances", "Reservations", Filters=[_filter_of(label), states])
        return [instance for reservation in reservations for instance in reservation["Instances"]]

    def _tagged(
        self, kind: str, service: str, operation: str, key: str, name: str, label: str | None
    ) -> Iterator[Resource]:
        for description in self.ask_all(service, operation, key, Filters=[_filter_of(label)]):
            yield self._resource(kind, description[name], description)

    def _roles(self, label: str | None) -> Iterator[Resource]:
        """Yield the roles that runs have created for themselves; who may not list roles has created none."""
        for kind, operation, key, name in (
            ("instance profile", "list-instance-profiles", "InstanceProfiles", "InstanceProfileName"),
            ("role", "list-roles", "Roles", "RoleName"),
        ):
            try:
                roles = self.ask_all("iam", operation, key, PathPrefix=self.role_path)
            except AwsRefusal as refusal:
                if refusal.is_forbidden:
                    return
                raise
            for role in roles:
                # A role is named after its run. The path is compared again: not every server does.
                if role["Path"] == self.role_path and label in (None, role[name]):
                    yield Resource(kind, role[name], self.place, role[name])

    def _resource(self, kind: str, name: str, description: Mapping[str, Any]) -> Resource:
        tags = {tag["Key"]: tag["Value"] for tag in description.get("Tags", ())}
        return Resource.tagged(kind, name, self.place, tags)

    def delete(self, resource: Resource) -> None:
        try:
            self._delete(resource.kind, resource.name)
        except AwsRefusal as refusal:
            if refusal.is_missing:
                return
            if refusal.code in _IN_USE or self._is_ending(resource):
                raise StillInUse(str(refusal)) from None
            raise

    def _is_ending(self, resource: Resource) -> bool:
        """True for a group that waits for the end of its machines, which takes minutes."""
        if resource.kind != "Auto Scaling group":
            return False
        named = {"AutoScalingGroupNames": [resource.name]}
        groups = self.ask("autoscaling", "describe-auto-scaling-groups", **named)["AutoScalingGroups"]
        return all(group.get("Status") for group in groups)

    def _delete(self, kind: str, name: str) -> None:
        if kind == "Auto Scaling group":
            # First of all, or it would replace the machines. It takes them along.
            self.ask("autoscaling", "delete-auto-scaling-group", AutoScalingGroupName=name, ForceDelete=True)
        elif kind == "instance":
            self.ask("ec2", "terminate-instances", InstanceIds=[name])
        elif kind == "launch template":
            self.ask("ec2", "delete-launch-template", LaunchTemplateId=name)
        elif kind == "security group":
            self.ask("ec2", "delete-security-group", GroupId=name)
        elif kind == "instance profile":
            profile = self.ask("iam", "get-instance-profile", InstanceProfileName=name)["InstanceProfile"]
            for role in profile["Roles"]:
                request = {"InstanceProfileName": name, "RoleName": role["RoleName"]}
                self.ask("iam", "remove-role-from-instance-profile", **request)
            self.ask("iam", "delete-instance-profile", InstanceProfileName=name)
        elif kind == "role":
            for policy in self.ask("iam", "list-role-policies", RoleName=name)["PolicyNames"]:
                self.ask("iam", "delete-role-policy", RoleName=name, PolicyName=policy)
            self.ask("iam", "delete-role", RoleName=name)

    @property
    def role_path(self) -> str:
        """The path of roles that runs create here, by which they are found again."""
        return _PATH.format(region=self.place)


def session_of(profile: str | None) -> Any:
    """Return boto3's session of a profile, or of the environment. One is kept: it takes a second to read its files."""
    return _session(profile, frozenset(item for item in os.environ.items() if item[0].startswith("AWS_")))


@lru_cache(maxsize=4)
def _session(profile: str | None, _environment: frozenset[tuple[str, str]]) -> Any:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise Mistake(f"the aws fleet needs boto3; run `{install_command('aws')}`") from None
    try:
        return boto3.Session(profile_name=profile)
    except BotoCoreError as error:
        fault = f"{str(error).rstrip('.')}; `aws configure list-profiles` lists those there are"
        raise FieldMistake("fleet.aws.profile", fault) from None


@lru_cache(maxsize=256)
def _client(session: Any, service: str, region: str) -> Any:
    # Kept as well: a client is made of a description of every request that there is.
    from botocore.config import Config

    config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard", "max_attempts": 5})
    return session.client(service, region_name=region, config=config)


def default_region(profile: str | None) -> str | None:
    """Return the region of the environment or of the profile, as the tools of AWS find it."""
    # boto3 itself does not know AWS_REGION.
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or session_of(profile).region_name


def tag_value(text: str) -> str:
    """Return a text as a tag can hold it. What does not fit gets a digest: a policy compares tags of stores."""
    value = _UNSAFE.sub("_", text)
    if value == text and len(text) <= _MAX_VALUE:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{value[: _MAX_VALUE - len(digest) - 1]}-{digest}"


def _filter_of(label: str | None) -> dict[str, Any]:
    """Return the filter of a run's things, or of those of all runs."""
    if label is None:
        return {"Name": "tag-key", "Values": [LABEL_TAG]}
    return {"Name": f"tag:{LABEL_TAG}", "Values": [label]}


def _refusal(error: Any, service: str, operation: str, region: str) -> AwsRefusal:
    code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message") or ""
    request = f"aws {service} {operation} in {region}"
    if code in _EXPIRED:
        clock = ", or the clock of this computer is wrong" if code == "RequestExpired" else ""
        return AwsRefusal(code, f"the AWS credentials have expired{clock}; renew them, as with `aws sso login`")
    if code in _REFUSED:
        return AwsRefusal(code, f"AWS does not accept the credentials ({code}); check AWS_PROFILE and the keys")
    if code in _FORBIDDEN:
        action = f"{service}:{operation.title().replace('-', '')}"
        return AwsRefusal(code, f"{request}: not allowed; ask for the right to {action}")
    if code == "OptInRequired":
        return AwsRefusal(code, f"{request}: the account has not enabled this region; enable it, or use another one")
    return AwsRefusal(code, f"{request}: {message} ({code})")
