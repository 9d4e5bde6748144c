"""One line of advice for each message of the system or of a server."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from packtrain.store import StoreError, open_store
from packtrain.store.errors import explain_server, explain_system
from parts.s3 import S3Server, fresh_location
from parts.stores import MEGABYTE, output_of, python


@pytest.mark.parametrize(
    ("message", "advice", "temporary"),
    [
        ("status code: 403 Forbidden: <Code>AccessDenied</Code>", "access denied; check the keys", False),
        ("status code: 400 Bad Request: <Code>ExpiredToken</Code>", "renew the keys", False),
        ("status code: 301 Moved: <Code>PermanentRedirect</Code>", "set AWS_REGION", False),
        ("Received redirect without LOCATION, this normally indicates", "set AWS_REGION", False),
        ("status code: 400 Bad Request: <Code>RequestTimeout</Code>", "try again later", True),
        ("status code: 403 Forbidden: <Code>QuotaExceeded</Code>", "bucket quota exceeded", True),
        ("status code: 409 Conflict: <Code>ConditionalRequestConflict</Code>", "try again later", True),
        ("status code: 503 Slow Down: <Code>SlowDown</Code>", "try again later (503 SlowDown)", True),
        ("status code: 400 Bad Request: <Code>Odd</Code>", "the server refused the request (400 Odd)", False),
        ("HTTP error: kind: Connect invalid peer certificate", "certificate is not trusted", False),
        ("HTTP error: kind: Connect dns error", "cannot resolve the server's name", True),
        ("PUT http://169.254.169.254/latest/api/token", "attach an instance role", True),
        ("Something new\n\nDebug source: Secrets {}", "request failed: Something new", False),
    ],
)
def test_a_server_message_becomes_one_line_of_advice(message: str, advice: str, temporary: bool) -> None:
    error = explain_server(message, "s3://bucket")
    assert str(error).startswith("s3://bucket: ")
    assert advice in str(error)
    assert "\n" not in str(error)
    assert "Debug" not in str(error)
    assert error.temporary is temporary


@pytest.mark.parametrize(
    ("number", "advice", "temporary"),
    [
        (errno.EDQUOT, "disk quota exceeded", True),
        (errno.ESTALE, "mount it again", True),
        (errno.EIO, "the disk or the network mount failed", True),
        (errno.EXDEV, os.strerror(errno.EXDEV), False),
    ],
)
def test_a_system_error_becomes_one_line_of_advice(number: int, advice: str, temporary: bool) -> None:
    error = explain_system(OSError(number, "canary"), "/data")
    assert str(error).startswith("/data: ")
    assert advice in str(error)
    assert error.temporary is temporary


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("moto_server", marks=pytest.mark.local),
        pytest.param("ceph_server", marks=pytest.mark.system),
    ],
)
def test_a_missing_bucket_is_not_reported_as_a_missing_object(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server: S3Server = request.getfixturevalue(kind)
    server.enter(monkeypatch)
    store = open_store("s3://no-such-bucket/prefix")
    (tmp_path / "big").write_bytes(b"1" * 9 * MEGABYTE)
    for use in (
        lambda: store.exists("a"),
        lambda: store.find("a"),
        lambda: store.get_file("a", tmp_path / "a"),
        lambda: store.put("a", b""),
        lambda: store.put_if_absent("a", b""),
        lambda: store.put_file("a", tmp_path / "big"),
        lambda: store.delete("a"),
        store.list,
        lambda: store.folders(""),
    ):
        with pytest.raises(StoreError, match="bucket not found; create it") as caught:
            use()
        assert not caught.value.temporary


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("AWS_ACCESS_KEY_ID", "AKUNKNOWN", "unknown access key; check AWS_ACCESS_KEY_ID"),
        ("AWS_SECRET_ACCESS_KEY", "canary", "wrong secret key; check AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_the_error_says_which_key_is_wrong_and_shows_neither(
    ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str, value: str, advice: str
) -> None:
    ceph_server.enter(monkeypatch)
    monkeypatch.setenv(name, value)
    store = open_store(fresh_location())
    for use in (lambda: store.put("a", b""), lambda: store.get("a"), store.list):
        with pytest.raises(StoreError, match=advice) as caught:
            use()
        assert not caught.value.temporary
        assert "canary" not in str(caught.value)
        assert ceph_server.secret_key not in str(caught.value)
    with pytest.raises(StoreError, match="access denied; check the keys, their permissions"):
        store.exists("a")
    assert "canary" not in repr(vars(store))


def test_the_error_says_that_the_clock_is_wrong(
    needs_faketime: None, ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceph_server.enter(monkeypatch)
    code = """
import sys
from packtrain.store import StoreError, open_store
try:
    open_store(sys.argv[1]).get("a")
except StoreError as error:
    print(error.temporary, error)
"""
    output = output_of(python(code, fresh_location(), before=("faketime", "-f", "+1h")))
    assert output.startswith("False")
    assert "this machine's clock is wrong according to the server; set it" in output
