"""A store in a bucket of any server that speaks S3, through obstore."""

from __future__ import annotations

import builtins
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from packtrain.backoff import Backoff
from packtrain.store.base import Entry, Store, absent, checked_key, checked_prefix, checked_range, is_key
from packtrain.store.errors import ObjectNotFound, StoreError, explain_server, status_of, tells_of_absence
from packtrain.store.staging import CHUNK_BYTES, explained, replace, stage

if TYPE_CHECKING:
    from obstore.store import S3Config

Answer = TypeVar("Answer")

PARTS_AT_ONCE = 4
PARTS_AT_MOST = 9_000  # S3 allows 10,000
TRANSFER_SECONDS = 120.0
SMALL_BYTES = 1 << 20
RETRIES_INSIDE = 4
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0
MARK = "packtrain-put"


@dataclass(frozen=True)
class Server:
    """Where the bucket is and what opens it; without keys obstore asks for the machine's own role."""

    region: str
    endpoint: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server: for an answer to begin or go on, and for failures to pass."""

    answer_seconds: float = 15.0
    outage_seconds: float = 60.0


class BucketStore(Store):
    is_directory = False

    def __init__(self, bucket: str, prefix: str, server: Server, patience: Patience) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._outage_seconds = patience.outage_seconds
        self._bucket_seen = False
        self._pid = os.getpid()

        def client(retries: int, answer_seconds: float) -> S3Store:
            return S3Store(
                bucket,
                prefix=prefix or None,
                config=_config(server),
                client_options={
                    "allow_http": (server.endpoint or "").startswith("http://"),
                    "connect_timeout": timedelta(seconds=min(5.0, answer_seconds)),
                    # `timeout` covers a whole download and so would end a long one; `read_timeout` covers
                    # the time without a byte, and the sending of a whole request.
                    "timeout": timedelta(days=1),
                    "read_timeout": timedelta(seconds=answer_seconds),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=patience.outage_seconds),
                    "backoff": {
                        "init_backoff": timedelta(seconds=FIRST_PAUSE_SECONDS),
                        "max_backoff": timedelta(seconds=LONGEST_PAUSE_SECONDS),
                        "base": 2,
                    },
                },
            )

        # No signal reaches Python inside obstore, so what takes one request is retried outside of it.
        # What takes many is retried inside too, or a server that often fails would never let it end.
        self._client = client(0, patience.answer_seconds)
        self._client_for_lists = client(RETRIES_INSIDE, patience.answer_seconds)
        # Slow lines need their time for a part, but a lost server should not delay what is small.
        self._client_for_files = client(RETRIES_INSIDE, max(TRANSFER_SECONDS, patience.answer_seconds))

    def put(self, key: str, data: bytes) -> None:
        checked_key(key)
        client = self._client if len(data) <= SMALL_BYTES else self._client_for_files
        self._patiently(
            key,
            lambda: obstore.put(client, key, data, chunk_size=CHUNK_BYTES, max_concurrency=PARTS_AT_ONCE),
        )

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """A try whose answer got lost may have succeeded, and then the next one finds the object there.

        The mark that every try of this call carries tells whether it is ours. After an error nobody knows.
        """
        checked_key(key)
        mark = uuid.uuid4().hex
        tries = 0

        def attempt() -> bool:
            nonlocal tries
            tries += 1
            try:
                obstore.put(
                    self._client,
                    key,
                    data,
                    mode="create",
                    use_multipart=False,
                    attributes={MARK: mark},
                )
            except AlreadyExistsError as error:
                if status_of(str(error)) == 409:  # others are at it this moment, and nobody has won yet
                    raise explain_server(str(error), self.url) from None
                return tries > 1 and self._mark_of(key) == mark
            return True

        return self._patiently(key, attempt)

    def put_file(self, key: str, path: Path) -> None:
        checked_key(key)
        with explained(path):
            size = path.stat().st_size
            path.open("rb").close()
        part_bytes = max(CHUNK_BYTES, size // PARTS_AT_MOST + 1)
        self._patiently(
            key,
            lambda: obstore.put(
                self._client_for_files,
                key,
                path,
                chunk_size=part_bytes,
                max_concurrency=PARTS_AT_ONCE,
            ),
        )

    def find(self, key: str) -> bytes | None:
        checked_key(key)
        try:
            return self._patiently(key, lambda: obstore.get(self._client, key).bytes().to_bytes())
        except ObjectNotFound:
            return None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        checked_key(key)
        checked_range(start, length)

        def fetch() -> bytes:
            try:
                # S3 knows no empty range.
                piece = obstore.get_range(self._client, key, start=start, length=max(length, 1))
            except BaseError as error:
                if status_of(str(error)) == 416:
                    return b""
                raise
            return piece.to_bytes()[:length]

        return self._patiently(key, fetch)

    def get_file(self, key: str, path: Path) -> None:
        checked_key(key)

        def fetch() -> Path:
            return stage(path.parent, obstore.get(self._client_for_files, key).stream(CHUNK_BYTES))

        with explained(path):
            replace(self._patiently(key, fetch), path)

    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        prefix = checked_prefix(prefix)
        found = self._patiently(
            prefix,
            lambda: obstore.list(self._client_for_lists, prefix or None, offset=after or None).collect(),
        )
        entries = (Entry(meta["path"], meta["size"], meta["last_modified"]) for meta in found)
        # Consoles mark a folder by an empty object that obstore shows under the folder's own name.
        return sorted(
            (entry for entry in entries if is_key(entry.key) and entry.key != prefix and entry.key > (after or "")),
            key=lambda entry: entry.key,
        )

    def folders(self, prefix: str) -> builtins.list[str]:
        prefix = checked_prefix(prefix)
        found = self._patiently(prefix, lambda: obstore.list_with_delimiter(self._client_for_lists, prefix or None))
        return sorted(path.rpartition("/")[2] for path in found["common_prefixes"] if is_key(path))

    def entry(self, key: str) -> Entry | None:
        checked_key(key)
        try:
            meta = self._patiently(key, lambda: obstore.head(self._client, key))
        except ObjectNotFound:
            if not self._bucket_seen:
                self.find(key)  # the answer to HEAD has no text that would tell a missing bucket; that to GET has
            return None
        return Entry(key, meta["size"], meta["last_modified"])

    def delete(self, key: str) -> None:
        checked_key(key)
        with suppress(ObjectNotFound):
            self._patiently(key, lambda: obstore.delete(self._client, key))

    def _mark_of(self, key: str) -> object:
        try:
            return obstore.get(self._client, key).attributes.get(MARK)
        except FileNotFoundError:
            raise StoreError(f"{self.url}: {key!r} was deleted meanwhile", temporary=True) from None

    def _patiently(self, key: str, action: Callable[[], Answer]) -> Answer:
        """The action's answer, tried again with jittered pauses while what failed is temporary."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, jitter=1.0, limit_seconds=self._outage_seconds)
        while True:
            try:
                return self._once(key, action)
            except StoreError as error:
                if not error.temporary or not backoff.wait():
                    raise

    def _once(self, key: str, action: Callable[[], Answer]) -> Answer:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.url}: was opened before this process was forked, and obstore would hang in it: "
                "start workers with spawn or forkserver, and open the store in each"
            )
        try:
            answer = action()
        except FileNotFoundError as error:
            if error.errno is not None:  # of a local file; those that obstore raises have no number
                raise
            if tells_of_absence(str(error)):
                self._bucket_seen = self._bucket_seen or "NoSuchKey" in str(error)
                raise absent(self, key) from None
            raise explain_server(str(error), self.url) from None
        except BaseError as error:
            raise explain_server(str(error), self.url) from None
        self._bucket_seen = True
        return answer


def _config(server: Server) -> S3Config:
    config: S3Config = {
        "region": server.region,
        "virtual_hosted_style_request": False,
        # Servers differ in what they want of a bulk deletion; we delete one at a time anyway.
        "disable_bulk_delete": True,
    }
    if server.endpoint is not None:
        config["endpoint"] = server.endpoint
    if server.access_key is not None and server.secret_key is not None:
        config["access_key_id"] = server.access_key
        config["secret_access_key"] = server.secret_key
    if server.session_token is not None:
        config["session_token"] = server.session_token
    return config
