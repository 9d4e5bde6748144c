"""Buckets of Google and Azure: where their keys come from, and what their servers' errors mean."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.fleet.fleet import passed_variables
from packtrain.fleet.kubernetes.manifests import PLAIN_VARIABLES
from packtrain.store import Store, StoreError, open_store
from packtrain.store.errors import explain_server
from parts import azure, gcs
from parts.loopback import free_port, served
from parts.proxy import LOSE_ANSWER


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the developer's own accounts from the tests, and the metadata service of the machine."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_", "STORAGE_EMULATOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{free_port()}")


@pytest.fixture
def emulator(processes: None) -> Iterator[str]:
    """The emulator of Google Cloud Storage on PyPI, which speaks only the JSON interface."""
    code = "import sys; from gcp_storage_emulator.server import create_server as make; "
    code += "make('127.0.0.1', int(sys.argv[1]), in_memory=True, default_bucket='bucket').run()"
    with served(lambda port: [sys.executable, "-c", code, str(port)]) as url:
        yield url


def test_missing_keys_of_google_are_reported_after_one_short_look_at_the_metadata_service(
    metadata_looks: list[float | None],
) -> None:
    with pytest.raises(Mistake, match="no keys for the store; set GOOGLE_APPLICATION_CREDENTIALS to a key file"):
        open_store("gs://bucket")
    assert metadata_looks == [1.0]


def test_a_key_file_of_google_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(Mistake, match=r"^GOOGLE_APPLICATION_CREDENTIALS: there is no file .*key\.json; correct it"):
        open_store("gs://bucket")


def test_an_azure_store_needs_its_account(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Mistake, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=canary")
    store = open_store("az://container/prefix/")
    assert (store.url, store.is_directory) == ("az://container/prefix", False)
    assert "canary" not in repr(vars(store))


@pytest.mark.parametrize(("scheme", "variable"), [("gs", "GOOGLE_BASE_URL"), ("az", "AZURE_STORAGE_ENDPOINT")])
def test_an_endpoint_with_keys_is_refused_without_repeating_it(
    scheme: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(variable, "http://u:canary@127.0.0.1")
    with pytest.raises(Mistake, match=f"^{variable}: invalid URL") as caught:
        open_store(f"{scheme}://bucket")
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "advice"),
    [("gs://b?key=canary", "GOOGLE_APPLICATION_CREDENTIALS"), ("az://b?sv=canary", "AZURE_STORAGE_SAS_TOKEN")],
)
def test_keys_in_a_url_are_refused_with_the_variable_for_them(location: str, advice: str) -> None:
    with pytest.raises(Mistake, match=f"must not contain keys; set .*{advice}") as caught:
        open_store(location)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("google_server", marks=pytest.mark.local),
        pytest.param("azure_server", marks=pytest.mark.system),
    ],
)
def test_a_missing_bucket_and_wrong_keys_are_told_apart(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: gcs.GoogleServer | azure.AzureServer = request.getfixturevalue(server)
    service.enter(monkeypatch)
    scheme = "gs" if server == "google_server" else "az"
    store = open_store(f"{scheme}://no-such-bucket/prefix")
    use: Callable[[], object]
    for use in (lambda: store.exists("a"), lambda: store.put("a", b""), store.list):
        with pytest.raises(StoreError, match=r"(bucket|container) not found; create it or correct its name"):
            use()
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "canary")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "Y2FuYXJ5")
    store = open_store(f"{scheme}://packtrain-tests/prefix")
    for use in (lambda: store.put("a", b""), lambda: store.get("a"), store.list):
        with pytest.raises(StoreError, match=r"access denied|wrong account key") as caught:
            use()
        assert not caught.value.temporary
        assert "canary" not in str(caught.value)


def test_put_if_absent_recognizes_its_own_object_on_google_after_a_lost_answer(
    google_store: Store, google_server: gcs.GoogleServer
) -> None:
    google_server.proxy.first(LOSE_ANSWER)
    assert google_store.put_if_absent("generation", b"same bytes")
    assert not google_store.put_if_absent("generation", b"same bytes")


def test_an_emulator_without_the_xml_interface_is_refused_in_one_line(
    emulator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither checks conditions nor lists what obstore asks for: nothing is created there."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.removeprefix("http://"))
    store = open_store("gs://bucket/x")
    for use in (store.supports_put_if_absent, store.list):
        with pytest.raises(StoreError, match="the server does not know this request; use another server") as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "message", "advice", "temporary"),
    [
        ("az://c", "status code: 403 Forbidden: <Code>AuthenticationFailed</Code>", "AZURE_STORAGE_ACCOUNT_KEY", False),
        ("az://c", "status code: 403: <Code>AuthorizationPermissionMismatch</Code>", "access denied", False),
        ("az://c", "status code: 503: <Code>ServerBusy</Code>", "try again later", True),
        ("az://c", "status code: 409: <Code>ContainerBeingDeleted</Code>", "try again later", True),
        ("az://c", "HTTP error: kind: Connect", "check AZURE_STORAGE_ENDPOINT", True),
        ("gs://b", "status code: 401 Unauthorized: <Code>AuthenticationRequired</Code>", "access denied", False),
        ("gs://b", "status code: 429: <Code>SlowDown</Code>", "try again later", True),
        ("gs://b", "HTTP error: kind: Connect dns error", "check GOOGLE_BASE_URL", True),
        (
            "gs://b",
            "token request: GET http://metadata.google.internal/token status code: 404",
            "attach an instance role, or set GOOGLE_APPLICATION_CREDENTIALS",
            True,
        ),
    ],
)
def test_a_message_of_google_or_azure_becomes_one_line(where: str, message: str, advice: str, temporary: bool) -> None:
    error = explain_server(message, where)
    assert str(error).startswith(f"{where}: ")
    assert advice in str(error)
    assert "{" not in str(error)
    assert error.temporary is temporary


def test_machines_get_the_keys_of_the_store_s_service_and_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "GOOGLE_BEARER_TOKEN", "GOOGLE_API_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "OTHER"):
        monkeypatch.setenv(name, "canary")
    assert "AWS_ACCESS_KEY_ID" in passed_variables((), "s3://b")
    assert passed_variables((), "gs://b") == ("GOOGLE_BEARER_TOKEN",)
    assert passed_variables(("OTHER",), "az://b") == ("AZURE_STORAGE_ACCOUNT_KEY", "OTHER")
    assert passed_variables((), "/data/store") == ()


def test_machines_get_the_endpoint_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = {
        "s3://b": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
        "gs://b": ("GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"),
        "az://b": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
    }
    for store, names in endpoints.items():
        for name in names:
            monkeypatch.setenv(name, "http://127.0.0.1:9")
            assert {*names} & {*passed_variables((), store)} == {name}, "the last one is the one in use"
        assert set(names) <= set(PLAIN_VARIABLES)


def test_machines_get_no_other_keys_that_begin_like_those_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    others = (
        "AWS_BEARER_TOKEN_BEDROCK", "AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_ACCESS_KEY_ID_OF_BILLING", "AWS_PROFILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE", "GOOGLE_SERVICE_ACCOUNT_OF_BILLING", "AZURE_STORAGE_KEY_OF_BILLING",
        "AZURE_CLIENT_CERTIFICATE_PASSWORD",
    )  # fmt: skip
    for name in ("AWS_ACCESS_KEY_ID", *others):
        monkeypatch.setenv(name, "canary")
    for store in ("s3://b", "gs://b", "az://b"):
        assert {*others} & {*passed_variables((), store)} == set()


def test_a_key_that_cannot_be_one_is_told_in_one_line_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "canary!")
    with pytest.raises(Mistake, match=r"^az://container: Invalid Access Key: .*; correct the keys") as refused:
        open_store("az://container")
    assert "canary" not in str(refused.value)
