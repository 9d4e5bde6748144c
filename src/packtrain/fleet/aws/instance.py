"""An EC2 machine's view of itself: metadata, its role, and the requests of AWS that its boot script makes.

The boot script carries this file and runs it with any Python since 3.8, before Packtrain is installed, so it imports
only the standard library. Keys and answers never appear in arguments: a list of processes would show them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import shutil
import sys
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

_HOURS_6 = "21600"
_VERSIONS = {"ec2": "2016-11-15", "autoscaling": "2011-01-01"}
_DEVICE = "/dev/sdp"  # the last name that EC2 accepts; AMIs use the first ones


class Refused(Exception):
    """An answer of AWS that is an error: its code, such as VolumeInUse, and its message."""

    def __init__(self, status: int, text: str) -> None:
        code_match = re.search(r"<Code>(.*?)</Code>|\"__type\": *\"(?:[^\"]*#)?([^\"]*)\"", text)
        message = re.search(r"<Message>(.*?)</Message>|\"[mM]essage\": *\"([^\"]*)\"", text, re.DOTALL)
        self.code = (code_match[1] or code_match[2]) if code_match else str(status)
        super().__init__(f"{self.code}: {(message[1] or message[2]) if message else text[:200]}")


def _ask(
    url: str, method: str, headers: dict[str, str], body: bytes, seconds: float, file: str | None = None
) -> tuple[int, str]:
    """Return the status and the answer, as Latin-1; with a file, a good answer goes there, whatever its size."""
    # http.client follows no redirects and uses no proxy: a signature, and the metadata, are for one server only.
    place = urlsplit(url)
    connect = HTTPSConnection if place.scheme == "https" else HTTPConnection
    with closing(connect(place.netloc, timeout=seconds)) as connection:
        connection.request(method, place.path, body or None, headers)
        answer = connection.getresponse()
        if file is not None and answer.status == 200:
            with Path(file).open("wb") as output:
                shutil.copyfileobj(answer, output, 1 << 20)
            return 200, ""
        return answer.status, answer.read().decode("latin-1")


def metadata(path: str) -> str | None:
    """Return an entry of the metadata service (IMDSv2), such as `instance-id`; None if there is no such entry."""
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
    url = base.rstrip("/") + "/latest/"
    _, token = _ask(url + "api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": _HOURS_6}, b"", 5)
    status, text = _ask(url + "meta-data/" + path, "GET", {"X-aws-ec2-metadata-token": token}, b"", 5)
    if status not in (200, 404):
        raise Refused(status, f"the metadata service refuses {path}")
    return text if status == 200 else None


def _entry(path: str) -> str:
    for pause in (1, 2, 5, 10, 0):
        try:
            entry = metadata(path)
            break
        except (OSError, HTTPException):  # early in the boot the network may not be up
            if not pause:
                raise
            time.sleep(pause)
    if entry is None:
        raise Refused(404, f"the metadata service has no {path}")
    return entry


def _keys(service: str) -> tuple[str, str, str]:
    """Return the role's keys; for another S3 server than Amazon's, the job's secrets may name keys of its own."""
    if service == "s3" and os.environ.get("AWS_ACCESS_KEY_ID"):
        return os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"], ""
    role = metadata("iam/security-credentials/")
    if not role:
        raise Refused(404, "this machine has no role; give fleet.aws an instance profile")
    keys = json.loads(_entry("iam/security-credentials/" + role.split()[0]))
    return keys["AccessKeyId"], keys["SecretAccessKey"], keys["Token"]


def request(
    service: str,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    file: str | None = None,
) -> bytes:
    """Send a request with Amazon's signature, version 4, and return the answer. Tries again for a minute."""
    name = {"autoscaling": "AUTO_SCALING", "secretsmanager": "SECRETS_MANAGER"}.get(service, service.upper())
    region = os.environ["AWS_REGION"] if service == "s3" else _entry("placement/region")
    server = os.environ.get("AWS_ENDPOINT_URL_" + name) or os.environ.get("AWS_ENDPOINT_URL")
    server = server or f"https://{service}.{region}.{metadata('services/domain') or 'amazonaws.com'}"
    for pause in (1, 2, 5, 10, 20, 20, 0):
        signed = _signed(service, region, method, urlsplit(server).netloc, path, body, headers or {})
        try:
            status, text = _ask(server.rstrip("/") + path, method, signed, body, 60, file)
        except (OSError, HTTPException) as error:
            status, text = 0, f"{server}: {error}"
        if 200 <= status < 300:
            return text.encode("latin-1")
        refused = Refused(status, text)
        # A new role takes seconds to be known everywhere.
        if 400 <= status < 500 and refused.code not in ("RequestLimitExceeded", "Throttling", "InvalidAccessKeyId"):
            break
        time.sleep(pause)
    raise refused


def _signed(
    service: str, region: str, method: str, host: str, path: str, body: bytes, extra: dict[str, str]
) -> dict[str, str]:
    key_id, secret, session = _keys(service)
    timestamp, digest = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), hashlib.sha256(body).hexdigest()
    headers = {name.lower(): value for name, value in extra.items()}
    headers.update({"host": host, "x-amz-content-sha256": digest, "x-amz-date": timestamp})
    if session:
        headers["x-amz-security-token"] = session
    names = ";".join(sorted(headers))
    canonical = [f"{name}:{headers[name]}" for name in sorted(headers)]
    canonical_request = "\n".join([method, path, "", *canonical, "", names, digest])
    scope = "/".join((timestamp[:8], region, service, "aws4_request"))
    to_sign = "\n".join(["AWS4-HMAC-SHA256", timestamp, scope, hashlib.sha256(canonical_request.encode()).hexdigest()])
    key = ("AWS4" + secret).encode()
    for word in scope.split("/"):
        key = hmac.new(key, word.encode(), "sha256").digest()
    signature = hmac.new(key, to_sign.encode(), "sha256").hexdigest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return headers


def query(service: str, action: str, **values: object) -> str:
    """Call an action of EC2 or Auto Scaling. `Filter_1_Name` stands for the parameter `Filter.1.Name`."""
    parameters = {name.replace("_", "."): str(value) for name, value in values.items() if value not in (None, "")}
    body = urlencode({"Action": action, "Version": _VERSIONS[service], **parameters}).encode()
    kind = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
    return request(service, "POST", "/", body, kind).decode()


# The store, before Packtrain can open it.


def _place(key: str) -> str:
    store = os.environ["PACKTRAIN_STORE"]
    return quote("/" + store[len("s3://") :] + "/" + key) if store.startswith("s3://") else store + "/" + key


def fetch(key: str, file: str) -> None:
    path = _place(key)
    is_bucket = os.environ["PACKTRAIN_STORE"].startswith("s3://")
    if is_bucket:
        request("s3", "GET", path, file=file)
    else:
        shutil.copyfile(path, file)


def tell(run: str, text: str) -> None:
    """Record an event of the run, such as why this machine could not start."""
    me = _entry("instance-id")
    event = {"time": time.time(), "kind": "failure", "text": f"machine {me}: {text}"}
    _put(f"runs/{run}/events/{me}-{int(time.time())}/00000000.jsonl", (json.dumps(event) + "\n").encode())


def _put(key: str, data: bytes) -> None:
    path = _place(key)
    if os.environ["PACKTRAIN_STORE"].startswith("s3://"):
        request("s3", "PUT", path, data)
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)


def secret(reference: str) -> str:
    """Return the value behind `ssm:/team/wandb`, a parameter, or `secretsmanager:team/wandb`."""
    service, _, name = reference.partition(":")
    action, parameters = "AmazonSSM.GetParameter", {"Name": name, "WithDecryption": True}
    if service == "secretsmanager":
        action, parameters = "secretsmanager.GetSecretValue", {"SecretId": name}
    headers = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": action}
    answer = json.loads(request(service, "POST", "/", json.dumps(parameters).encode(), headers))
    return str(answer["SecretString"] if service == "secretsmanager" else answer["Parameter"]["Value"])


# Volumes.


def attach(name: str, **parameters: object) -> str:
    """Attach a free volume `name_0`, `name_1`... of this zone, or a new one made as given; return its id.

    Machines race for volumes: whoever attaches first has it, and the others take the next one.
    """
    me, zone = _entry("instance-id"), _entry("placement/availability-zone")
    attached = _attached(name)
    if attached:  # this machine was restarted
        return attached[0][1]
    free = {"Filter_2_Name": "status", "Filter_2_Value_1": "available"}
    lost: set[str] = set()
    for _ in range(50):
        volumes = _volumes(name, **free, Filter_3_Name="availability-zone", Filter_3_Value_1=zone)
        volume = next((volume for _, volume in volumes if volume not in lost), None) or _new_volume(
            name, zone, lost, **parameters
        )
        try:
            query("ec2", "AttachVolume", VolumeId=volume, InstanceId=me, Device=_DEVICE)
            return volume
        except Refused as error:
            if error.code == "IncorrectState" and volume not in lost:
                pass  # it may still be in creation
            elif error.code not in ("VolumeInUse", "IncorrectState", "InvalidVolume.NotFound"):
                raise
        lost.add(volume)
        time.sleep(1)
    raise Refused(409, f"all volumes {name}_* of {zone} are taken")


def _attached(name: str) -> list[tuple[int, str]]:
    return _volumes(name, Filter_2_Name="attachment.instance-id", Filter_2_Value_1=_entry("instance-id"))


def note_volume(run: str, name: str) -> None:
    """Record in the run's folder which volume this machine has: nothing else tells once the machine is gone."""
    for _, volume in _attached(name):
        _put(f"runs/{run}/volumes/{volume}", _entry("instance-id").encode())


def _volumes(name: str, **filters: object) -> list[tuple[int, str]]:
    """Return the number and the id of the volumes `name_0`, `name_1`..., by number."""
    answer = query("ec2", "DescribeVolumes", Filter_1_Name="tag:Name", Filter_1_Value_1=name + "_*", **filters)
    numbered = []
    # Elements come in any order, and an attached volume has its id twice.
    for volume in ElementTree.fromstring(answer).findall("{*}volumeSet/{*}item"):  # noqa: S314 - it is that of AWS
        tags = {tag.findtext("{*}key"): tag.findtext("{*}value") for tag in volume.findall("{*}tagSet/{*}item")}
        stem, _, number = (tags.get("Name") or "").rpartition("_")
        if stem == name and number.isdecimal():
            numbered.append((int(number), volume.findtext("{*}volumeId") or ""))
    return sorted(numbered)


def _new_volume(name: str, zone: str, lost: set[str], **parameters: object) -> str:
    numbers = {number for number, _ in _volumes(name)}
    number = next(number for number in range(len(numbers) + 1) if number not in numbers)
    tag = {"TagSpecification_1_ResourceType": "volume", "TagSpecification_1_Tag_1_Key": "Name"}
    # The token makes two machines that ask for the same volume at the same time get one volume, not two. EC2 refuses
    # the same token with other parameters, and gives the old volume for it even if somebody has deleted that: it is
    # lost then, and the next token is another one.
    wording = f"{name}_{number} {zone} {sorted(lost)} {sorted(parameters.items())}"
    token = hashlib.sha256(wording.encode()).hexdigest()
    value = {"TagSpecification_1_Tag_1_Value": f"{name}_{number}", "ClientToken": token}
    answer = query("ec2", "CreateVolume", AvailabilityZone=zone, **tag, **value, **parameters)
    volume = _value(answer, "volumeId")
    for _ in range(120):
        try:
            if "<status>creating<" not in query("ec2", "DescribeVolumes", VolumeId_1=volume):
                break
        except Refused as error:
            if error.code != "InvalidVolume.NotFound":  # what is new may not be listed yet
                raise
        time.sleep(1)
    return volume


def device_of(volume: str) -> str:
    """Wait for the device of a volume: an NVMe disk with the volume's id, or on older types the given name."""
    names = ["/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_" + volume.replace("-", ""), "/dev/xvdp", _DEVICE]
    for _ in range(600):
        for path in names:
            if Path(path).exists():
                return path
        time.sleep(0.2)
    raise Refused(404, f"{volume} is attached, but its device does not appear")


# The end.


def terminate(replace: bool) -> None:
    """Terminate this machine. Unless it is to be replaced, its group becomes smaller, and the last one deletes it."""
    me = _entry("instance-id")
    instance = query("autoscaling", "DescribeAutoScalingInstances", InstanceIds_member_1=me)
    group = "" if replace else _value(instance, "AutoScalingGroupName")
    if group and _is_last(me, group) and _delete(group):
        return
    smaller = "false" if replace else "true"
    query("autoscaling", "TerminateInstanceInAutoScalingGroup", InstanceId=me, ShouldDecrementDesiredCapacity=smaller)
    # Of two that end at the same time, neither was the last before, and both have seconds left.
    if group and _is_last(me, group):
        _delete(group)


def _delete(group: str) -> bool:
    try:
        query("ec2", "DeleteLaunchTemplate", LaunchTemplateName=group)
        query("autoscaling", "DeleteAutoScalingGroup", AutoScalingGroupName=group, ForceDelete="true")
    except Refused as error:
        print(f"the group stays until `packtrain down`: {error}", file=sys.stderr)
        return False
    return True


def _is_last(me: str, group: str) -> bool:
    """True if the group wants no other machine and has none. Those that are ending are listed for minutes."""
    description = query("autoscaling", "DescribeAutoScalingGroups", AutoScalingGroupNames_member_1=group)
    members = [member for member in description.split("<member>") if "<LifecycleState>" in member]
    states = [_value(member, "LifecycleState") for member in members if _value(member, "InstanceId") != me]
    return _value(description, "DesiredCapacity") in ("0", "1") and all(state.startswith("Termin") for state in states)


def _value(text: str, name: str) -> str:
    return text.partition(f"<{name}>")[2].partition("<")[0]


def main(command: str, *words: str) -> None:
    if command == "metadata":
        print(_entry(words[0]))
    elif command == "fetch":
        fetch(*words)
    elif command == "tell":
        tell(*words)
    elif command == "secret":
        print(secret(words[0]))
    elif command == "claim":
        print(device_of(attach(words[0], **dict(word.split("=", 1) for word in words[1:]))))
    elif command == "note-volume":
        note_volume(*words)
    elif command == "terminate":
        terminate(words[0] == "replace")
    elif command == "noticed":
        sys.exit(1 if metadata("spot/instance-action") is None else 0)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (Refused, OSError, KeyError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")
