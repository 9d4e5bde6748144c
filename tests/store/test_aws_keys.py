"""Keys that Amazon's SDK finds: profiles, keys that a command prints, roles; renewed before they end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from packtrain.errors import Mistake
from packtrain.fleet.fleet import passed_keys, passed_variables, values_of
from packtrain.launch.load import load
from packtrain.launch.start import dry_run
from packtrain.store import StoreError, open_store
from parts.loopback import free_port
from parts.proxy import Proxy, ProxyHandler, proxy_before
from parts.runs import write_files
from parts.s3 import S3Server, fresh_location, leave_aws

_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


@dataclass
class Account:
    """The files of a person's profiles, and what the server sees of the keys in them."""

    folder: Path
    proxy: Proxy
    used: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    def write(self, **profiles: dict[str, str]) -> None:
        sections = [
            "\n".join([f"[profile {name}]", *(f"{key} = {value}" for key, value in lines.items())])
            for name, lines in profiles.items()
        ]
        (self.folder / "config").write_text("\n".join(sections))

    def keys_by_command(self, seconds: int) -> dict[str, str]:
        """Return a profile with a command that prints other keys each time: AKIA1, AKIA2 and so on."""
        script = self.folder / "keys.py"
        script.write_text(f"""
import json, sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

if Path("{self.folder}/logged-out").exists():
    sys.exit("your login has expired")
count = Path("{self.folder}/count")
count.write_text(str(number := int(count.read_text() if count.exists() else 0) + 1))
end = (datetime.now(UTC) + timedelta(seconds={seconds})).isoformat()
keys = {{"AccessKeyId": f"AKIA{{number}}", "SecretAccessKey": "canary", "SessionToken": f"token-{{number}}"}}
print(json.dumps({{"Version": 1, **keys, "Expiration": end}}))
""")
        return {"credential_process": f"{sys.executable} {script}"}


@pytest.fixture
def account(moto_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """Profiles without any key in the environment; the server refuses keys that have ended."""

    class Handler(ProxyHandler):
        def ask(self, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
            signed = re.search(r"Credential=(\w+)/", headers.get("authorization", headers.get("Authorization", "")))
            files.used.append(signed[1] if signed else "")
            if files.used[-1] in files.ended:
                return 400, {"Content-Type": "application/xml"}, _EXPIRED
            return super().ask(body, headers)

    with proxy_before(moto_server.endpoint, Handler) as proxy:
        files = Account(tmp_path, proxy)
        leave_aws(monkeypatch)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield files


def static(key: str, **more: str) -> dict[str, str]:
    return {"aws_access_key_id": key, "aws_secret_access_key": "canary", **more}


def test_a_profile_opens_the_store_also_for_what_obstore_cannot_do(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.write(diux=static("AKDIUX"), other=static("AKOTHER"))
    monkeypatch.setenv("AWS_PROFILE", "diux")
    store = open_store(fresh_location())
    store.put("a", b"1")
    store.remove_unfinished("")
    assert {*account.used} == {"AKDIUX"}
    assert account.proxy.requests[-1][1].find("uploads=") > 0
    assert store.key_source == "the AWS profile diux"
    assert "canary" not in repr(vars(store))


def test_the_default_profile_opens_the_store(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = account.folder / "credentials"
    credentials.write_text("[default]\naws_access_key_id = AKDEFAULT\naws_secret_access_key = canary\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    open_store(fresh_location()).put("a", b"1")
    assert {*account.used} == {"AKDEFAULT"}


def test_keys_of_the_environment_come_before_a_profile(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.write(diux=static("AKDIUX"))
    for name, value in {"PROFILE": "diux", "ACCESS_KEY_ID": "AKHERE", "SECRET_ACCESS_KEY": "canary"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    open_store(fresh_location()).put("a", b"1")
    assert {*account.used} == {"AKHERE"}


def test_a_profile_names_the_server_and_the_region(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.write(minio=static("AKMINIO", region="eu-west-1", endpoint_url=account.proxy.url))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_PROFILE", "minio")
    open_store(fresh_location()).put("a", b"1")
    assert {*account.used} == {"AKMINIO"}
    assert values_of(passed_variables((), "s3://b"))["AWS_REGION"] == "eu-west-1"


def test_keys_that_end_are_renewed_under_an_open_store(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.write(sso=account.keys_by_command(seconds=300))  # the SDK renews ten minutes before the end
    monkeypatch.setenv("AWS_PROFILE", "sso")
    store = open_store(fresh_location())
    store.put("a", b"1")
    account.ended |= {*account.used}
    store.put("b", b"2")
    store.remove_unfinished("")
    assert store.get("b") == b"2"
    assert len({*account.used}) > 1
    assert account.used[-1] not in account.ended


def test_keys_are_kept_until_shortly_before_their_end(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.write(sso=account.keys_by_command(seconds=3600))
    monkeypatch.setenv("AWS_PROFILE", "sso")
    location = fresh_location()
    for name in ("a", "b", "c"):
        open_store(location).put(name, b"1")
    assert {*account.used} == {"AKIA1"}


def test_a_role_that_a_profile_assumes_opens_the_store(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    role = {"role_arn": "arn:aws:iam::123456789012:role/nodes", "source_profile": "diux"}
    account.write(diux=static("AKDIUX"), nodes=role)
    monkeypatch.setenv("AWS_PROFILE", "nodes")
    open_store(fresh_location()).put("a", b"1")
    assert account.used[0] == "AKDIUX", "asks for the keys of the role"
    assert account.used[1].startswith("ASIA")


def test_a_login_that_has_ended_is_reported_with_the_command_for_another(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.write(sso=account.keys_by_command(seconds=300))
    monkeypatch.setenv("AWS_PROFILE", "sso")
    store = open_store(fresh_location())
    (account.folder / "logged-out").touch()
    use: Callable[[], object]
    for use in (lambda: store.find("a"), lambda: store.remove_unfinished("")):
        with pytest.raises(StoreError, match=r"profile sso gives no keys: .*login has expired; .*--profile sso"):
            use()
    with pytest.raises(StoreError) as refused:
        store.list()
    assert not refused.value.temporary
    assert "\n" not in str(refused.value)
    (account.folder / "logged-out").unlink()
    store.put("a", b"1")  # after the login, without opening it again


def test_a_service_for_keys_that_does_not_answer_is_a_temporary_failure(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = {"role_arn": "arn:aws:iam::123456789012:role/nodes", "source_profile": "diux"}
    account.write(diux=static("AKDIUX"), nodes=role)
    monkeypatch.setenv("AWS_PROFILE", "nodes")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreError, match="the AWS profile nodes cannot be renewed") as refused:
        open_store(fresh_location(), outage_seconds=0).find("a")
    assert refused.value.temporary


def test_an_unknown_profile_and_a_missing_sdk_are_reported(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.write(diux=static("AKDIUX"))
    monkeypatch.setenv("AWS_PROFILE", "duix")
    with pytest.raises(Mistake, match=r"^AWS_PROFILE: no profile duix; `aws configure list-profiles`"):
        open_store("s3://bucket")
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    monkeypatch.setenv("AWS_PROFILE", "diux")
    with pytest.raises(Mistake, match=r"^AWS_PROFILE: needs boto3; run `pip install .*boto3.* --profile diux"):
        open_store("s3://bucket")


def test_machines_get_the_keys_of_a_profile_and_not_its_name(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.write(diux=static("AKDIUX"), sso=account.keys_by_command(seconds=3600))
    monkeypatch.setenv("AWS_PROFILE", "diux")
    names = passed_variables((), "s3://b")
    assert not {"AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"} & {*names}
    passed = values_of(names)
    assert (passed["AWS_ACCESS_KEY_ID"], passed["AWS_SESSION_TOKEN"]) == ("AKDIUX", "")
    assert passed_keys(names) == "machines open the store with the current keys of the AWS profile diux"
    monkeypatch.setenv("AWS_PROFILE", "sso")
    assert values_of(names)["AWS_SESSION_TOKEN"] == "token-1"
    assert re.search(r"profile sso; the keys expire at 20.* UTC, and machines cannot renew", passed_keys(names) or "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # as containers have it
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    passed = values_of(passed_variables((), "s3://b"))
    assert (passed["AWS_ACCESS_KEY_ID"], passed["AWS_SESSION_TOKEN"]) == ("AKIA2", "token-2")
    assert passed_variables((), "/data/store") == ()


def test_the_role_of_this_machine_is_not_passed_to_others_as_keys(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.credentials import Credentials, InstanceMetadataProvider

    (account.folder / "config").write_text("[default]\nregion = eu-west-1\n")
    role = Credentials("ASIAROLE", "canary", "token", method="iam-role")
    monkeypatch.setattr(InstanceMetadataProvider, "load", lambda _: role)
    names = passed_variables((), "s3://b")
    assert "AWS_ACCESS_KEY_ID" not in names
    assert passed_keys(names) is None


def test_pods_get_the_server_and_the_region_of_a_profile_and_no_key(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.write(minio=static("AKMINIO", region="eu-west-1", endpoint_url=account.proxy.url))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_PROFILE", "minio")
    fleet = "{kubernetes: {image: 'registry/image:1', store_secret: keys}}"
    job = f"name: a\nprogram: [train.py]\nstore: {fresh_location()}\nfleet: {fleet}\n"
    write_files(tmp_path, {"job.yaml": job.encode(), "train.py": b""})
    [plan] = dry_run(load(tmp_path / "job.yaml")).plans
    [document] = yaml.safe_load_all(plan.script or "")
    [container] = document["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["AWS_REGION"] == "eu-west-1"
    assert variables["AWS_ENDPOINT_URL_S3"] == account.proxy.url
    assert not {"AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_CONFIG_FILE"} & {*variables}
    assert "canary" not in (plan.script or "")


def test_the_server_of_a_profile_has_no_password_in_it(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines are told of it in manifests and user data, which many can read."""
    account.write(minio=static("AKMINIO", endpoint_url="https://me:canary@host"))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_PROFILE", "minio")
    for tell in (lambda: open_store("s3://bucket"), lambda: values_of(("AWS_REGION", "AWS_ENDPOINT_URL_S3"))):
        with pytest.raises(Mistake, match=r"^endpoint_url of the AWS profile minio: invalid URL; .* without keys$"):
            tell()


def test_a_job_can_pass_the_name_of_a_profile_that_machines_have(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.write(diux=static("AKDIUX"))
    monkeypatch.setenv("AWS_PROFILE", "diux")
    names = passed_variables(("AWS_PROFILE",), "s3://b")
    assert "AWS_ACCESS_KEY_ID" not in names
    assert values_of(names)["AWS_PROFILE"] == "diux"
    assert passed_keys(names) is None
