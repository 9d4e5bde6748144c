"""Google Cloud Storage for tests, and how to point a process at it.

Google's XML interface, which obstore speaks, is that of S3 with other headers: so a proxy that translates them makes a
strict server of moto. The emulator on PyPI speaks the JSON interface alone: it can neither list nor condition a PUT.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote, unquote

import pytest

from parts.proxy import Proxy, ProxyHandler, proxy_before
from parts.s3 import BUCKET

TOKEN = "token-of-the-tests"
_SAME = re.compile("^x-goog-(?=meta-|copy-source$)")  # headers that only have another name
_ANYBODY = "AWS4-HMAC-SHA256 Credential=AK/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class _GoogleHandler(ProxyHandler):
    def ask(self, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {}, b"<Error><Code>AuthenticationRequired</Code></Error>"
        asked = {_SAME.sub("x-amz-", name): value for name, value in headers.items()}
        asked["authorization"] = _ANYBODY
        if asked.pop("x-goog-if-generation-match", None) == "0":
            asked["if-none-match"] = "*"
        path, separator, query = self.path.partition("?")
        self.path = quote(unquote(path)) + separator + query  # moto takes `%2D` for the name of another bucket
        status, answered, data = super().ask(body, asked)
        answered = {name.lower().replace("x-amz-meta-", "x-goog-meta-"): value for name, value in answered.items()}
        return status, {**answered, "x-goog-generation": "1"}, data


@dataclass(frozen=True)
class GoogleServer:
    proxy: Proxy

    @property
    def endpoint(self) -> str:
        return self.proxy.url

    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": self.proxy.url, "GOOGLE_BEARER_TOKEN": TOKEN}

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `gs://` mean this server until the end of the test."""
        for name in [name for name in os.environ if name.startswith(("GOOGLE_", "STORAGE_EMULATOR"))]:
            monkeypatch.delenv(name)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)


def fresh_location() -> str:
    """Return an unused prefix in the tests' bucket."""
    return f"gs://{BUCKET}/{uuid.uuid4().hex}"


@contextmanager
def google_before(s3_endpoint: str) -> Iterator[GoogleServer]:
    with proxy_before(s3_endpoint, _GoogleHandler) as proxy:
        yield GoogleServer(proxy)
