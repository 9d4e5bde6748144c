"""An S3 server for tests, and how to point a process at it."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BUCKET = "packtrain-tests"
MOTO_PAGE = 100  # objects of a listing that moto sends at once; other servers send 1,000


def moto_command(address: str, port: int) -> list[str]:
    # Without the directory of the file among those of modules: some there have the names of packages.
    return [sys.executable, "-P", str(Path(__file__).with_name("moto_server.py")), "-H", address, "-p", str(port)]


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `s3://` mean this server until the end of the test."""
        leave_aws(monkeypatch)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)

    def client(self) -> Any:
        """Amazon's own client, which shows what ours cannot."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )

    def create_bucket(self) -> None:
        self.client().create_bucket(Bucket=BUCKET)

    def uploads(self, location: str) -> list[str]:
        """Return the keys of the unfinished multipart uploads below a location of the tests' bucket."""
        prefix = location.removeprefix(f"s3://{BUCKET}/") + "/"
        found = self.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
        return sorted(upload["Key"].removeprefix(prefix) for upload in found)

    def begin_upload(self, location: str, key: str) -> None:
        """Begin a multipart upload and leave it, as a client does that is killed."""
        name = f"{location}/{key}".removeprefix(f"s3://{BUCKET}/")
        begun = self.client().create_multipart_upload(Bucket=BUCKET, Key=name)
        part = {"Bucket": BUCKET, "Key": name, "UploadId": begun["UploadId"], "PartNumber": 1}
        self.client().upload_part(**part, Body=b"x" * 100)


def leave_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the developer's own AWS settings from the test."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def fresh_location() -> str:
    """Return an unused prefix in the tests' bucket."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"
