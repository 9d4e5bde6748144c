"""Unfinished multipart uploads of a bucket: list and abort them, which obstore cannot.

A client that is killed during an upload leaves its parts in the bucket, where no listing of objects shows them, and
they are billed. Two requests of S3 are all it takes, signed with the keys that the store has.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import unescape
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import quote, urlsplit

from packtrain.store.aws_keys import AwsKeys
from packtrain.store.errors import StoreError, explain_server

_MAX_ANSWER_BYTES = 8 << 20  # a page has at most a thousand uploads
_MAX_PAGES = 10_000
_NOTHING = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Upload:
    key: str
    id: str


@dataclass(frozen=True)
class UploadClient:
    """`url` is that of the bucket, with the bucket's name as its path."""

    url: str
    region: str
    keys: Callable[[], AwsKeys] = field(repr=False)
    answer_seconds: float
    uploads_per_page: int = 1000

    def list(self, prefix: str) -> Iterator[Upload]:
        marker: dict[str, str] = {}
        for _ in range(_MAX_PAGES):
            # Without encoding-type=url, which servers understand differently: our keys have no control characters.
            page = self._request(
                "GET", "", {"uploads": "", "prefix": prefix, "max-uploads": str(self.uploads_per_page), **marker}
            )
            for text in re.findall(r"<Upload>(.*?)</Upload>", page, re.DOTALL):
                yield Upload(_field(text, "Key"), _field(text, "UploadId"))
            names = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
            following = {name: _field(page, field) for name, field in names.items()}
            if _field(page, "IsTruncated") != "true" or following == marker:
                return
            marker = following

    def abort(self, upload: Upload) -> None:
        try:
            self._request("DELETE", upload.key, {"uploadId": upload.id})
        except StoreError as error:
            if "NoSuchUpload" not in str(error):  # it has been completed or aborted meanwhile
                raise

    def _request(self, method: str, key: str, query: Mapping[str, str]) -> str:
        place = urlsplit(self.url)
        path = quote(f"{place.path}/{key}" if key else place.path)
        words = "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in sorted(query))
        headers = self._signed(method, place.netloc, path, words)
        # http.client follows no redirects: a signature is only for the server that it names.
        connect = HTTPSConnection if place.scheme == "https" else HTTPConnection
        with closing(connect(place.netloc, timeout=self.answer_seconds)) as connection:
            try:
                connection.request(method, f"{path}?{words}", headers=headers)
                answer = connection.getresponse()
                text = answer.read(_MAX_ANSWER_BYTES).decode(errors="replace")
            except (OSError, HTTPException) as error:
                fault = f"{self.url}: the connection broke or timed out; try again later"
                raise StoreError(fault, temporary=True) from error
        if answer.status >= 300:
            raise explain_server(f"status code: {answer.status} {text}", self.url)
        return text

    def _signed(self, method: str, host: str, path: str, query: str) -> dict[str, str]:
        """Return the headers of a request without a body, with Amazon's signature, version 4."""
        moment, keys = datetime.now(UTC), self.keys()
        time, day = moment.strftime("%Y%m%dT%H%M%SZ"), moment.strftime("%Y%m%d")
        headers = {"host": host, "x-amz-content-sha256": _NOTHING, "x-amz-date": time}
        if keys.session_token is not None:
            headers["x-amz-security-token"] = keys.session_token
        names = ";".join(sorted(headers))
        canonical = [f"{name}:{headers[name]}" for name in sorted(headers)]
        request = "\n".join([method, path, query, *canonical, "", names, _NOTHING])
        scope = f"{day}/{self.region}/s3/aws4_request"
        to_sign = "\n".join(["AWS4-HMAC-SHA256", time, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = f"AWS4{keys.secret_key}".encode()
        for word in (day, self.region, "s3", "aws4_request"):
            key = hmac.digest(key, word.encode(), "sha256")
        signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
        credential = f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}, SignedHeaders={names}"
        return {**headers, "authorization": f"{credential}, Signature={signature}"}


def _field(text: str, name: str) -> str:
    # Not a parser of XML: the answer has no attributes or nesting that matters here, and a parser expands entities.
    match = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return unescape(match[1]) if match else ""
