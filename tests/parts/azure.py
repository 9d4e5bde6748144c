"""Azurite, Microsoft's own emulator of Azure Blob Storage, and how to point a process at it.

tests/parts/install puts it into a cache directory with npm.
"""

from __future__ import annotations

import base64
import hmac
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from parts.loopback import served

CONTAINER = "packtrain-tests"
ACCOUNT = "packtraintests"
KEY = base64.b64encode(b"secret-of-azurite-secret-of-azur").decode()
_VERSION = "2021-08-06"


_CACHE = Path(os.environ.get("PACKTRAIN_TEST_CACHE") or Path.home() / ".cache/packtrain-tests")
PROGRAM = _CACHE / "azurite/node_modules/.bin/azurite-blob"


@dataclass(frozen=True)
class AzureServer:
    endpoint: str

    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{ACCOUNT}",
        }

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `az://` mean this server until the end of the test."""
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            monkeypatch.delenv(name)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)

    def create_container(self) -> None:
        """Create the tests' container; obstore cannot, and Microsoft's client is large for one request."""
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        words = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{_VERSION}"]
        words += [f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}", "restype:container"]
        signature = hmac.digest(base64.b64decode(KEY), "\n".join(words).encode(), "sha256")
        signed = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": _VERSION, "Authorization": signed, "Content-Length": "0"}
        connection = HTTPConnection(urlsplit(self.endpoint).netloc, timeout=30)
        connection.request("PUT", f"/{ACCOUNT}/{CONTAINER}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()


def fresh_location() -> str:
    """Return an unused prefix in the tests' container."""
    return f"az://{CONTAINER}/{uuid.uuid4().hex}"


@contextmanager
def azurite() -> Iterator[AzureServer]:
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry"]
    command = [str(PROGRAM), *options, "--blobHost", "127.0.0.1", "--blobPort"]
    with served(lambda port: [*command, str(port)], {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}) as url:
        server = AzureServer(url)
        server.create_container()
        yield server
