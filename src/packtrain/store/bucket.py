"""A store in a bucket of any server that speaks S3, through obstore."""

from __future__ import annotations

import builtins
import os
import re
import socket
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from packtrain.backoff import Backoff
from packtrain.errors import Mistake
from packtrain.store.base import RECORD_BYTES, Entry, Store, checked_key, checked_prefix, is_key
from packtrain.store.directory import CHUNK_BYTES, opened_folder, replace, stage
from packtrain.store.errors import ObjectNotFound, StoreError, code_of, explain_server, explained, status_of
from packtrain.store.uploads import UploadClient

if TYPE_CHECKING:
    from obstore.store import S3Config

Answer = TypeVar("Answer")

_PARALLEL_PARTS = 4
_MAX_PARTS = 9_000  # S3 allows 10,000
_TRANSFER_SECONDS = 120.0
_SMALL_BYTES = 1 << 20  # larger objects get the client that is patient with slow lines
_RETRIES_INSIDE = 4
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 10.0
_MARK = "packtrain-put"  # the metadata of an object that names the call that created it
_METADATA_SECONDS = 1.0
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
# Set on EKS, ECS and wherever else a machine has an identity of its own; obstore uses them by itself.
_IDENTITIES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class S3Access:
    """The server and the keys for it; without keys obstore uses the machine's own role."""

    region: str
    endpoint: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> S3Access:
        """Read and check the same variables as Amazon's own tools."""

        def first(*names: str) -> str | None:
            return next((environment[name] for name in names if environment.get(name)), None)

        access_key, secret_key = first("AWS_ACCESS_KEY_ID"), first("AWS_SECRET_ACCESS_KEY")
        if (access_key is None) != (secret_key is None):
            missing = "AWS_SECRET_ACCESS_KEY" if access_key else "AWS_ACCESS_KEY_ID"
            raise Mistake(f"the keys for the store are incomplete; set {missing} too")
        endpoint = first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        if endpoint is not None and not _is_endpoint(endpoint):
            raise Mistake("AWS_ENDPOINT_URL: invalid URL; use http://host:port or https://host, without keys")
        region = first("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
        access = cls(region, endpoint, access_key, secret_key, first("AWS_SESSION_TOKEN"))
        if access_key is None and not _has_identity(environment, access):
            raise Mistake(
                "no keys for the store; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "(`aws configure export-credentials --format env` prints those of the aws command)"
            )
        return access

    def uploads(self, bucket: str, answer_seconds: float) -> UploadClient | None:
        """Return a client for the bucket's unfinished uploads; None if only obstore knows the keys."""
        if self.access_key is None or self.secret_key is None:
            return None
        server = self.endpoint or f"https://s3.{self.region}.amazonaws.com"
        keys = self.access_key, self.secret_key, self.session_token
        return UploadClient(f"{server.rstrip('/')}/{bucket}", self.region, *keys, answer_seconds)

    def config(self) -> S3Config:
        config: S3Config = {
            "region": self.region,
            "virtual_hosted_style_request": False,
            # Servers differ in how they want a bulk deletion; this store deletes one object at a time anyway.
            "disable_bulk_delete": True,
        }
        if self.endpoint is not None:
            config["endpoint"] = self.endpoint
        if self.access_key is not None and self.secret_key is not None:
            config["access_key_id"] = self.access_key
            config["secret_access_key"] = self.secret_key
        if self.session_token is not None:
            config["session_token"] = self.session_token
        return config


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text)
        return (
            url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0 and not set(text) & {*"@?"}
        )
    except ValueError:
        return False


def _has_identity(environment: Mapping[str, str], access: S3Access) -> bool:
    """True if the machine seems to have a role of its own.

    Where there is no metadata service, obstore would ask for it for minutes: so only Amazon's own S3 counts, and
    only if the service can be reached.
    """
    if any(environment.get(name) for name in _IDENTITIES):
        return True
    host = urlsplit(access.endpoint or "https://s3.amazonaws.com").hostname or ""
    disabled = environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if disabled or not host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return False
    metadata = urlsplit(environment.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254")
    try:
        socket.create_connection((metadata.hostname or "", metadata.port or 80), _METADATA_SECONDS).close()
    except OSError:
        return False
    return True


def open_bucket(
    location: str, environment: Mapping[str, str], outage_seconds: float, answer_seconds: float
) -> BucketStore:
    """Open `bucket/prefix` with the keys of the environment."""
    bucket, _, prefix = location.partition("/")
    prefix = prefix.removesuffix("/")
    if not _BUCKET.fullmatch(bucket):
        raise Mistake(f"{bucket!r}: invalid bucket name; write s3://bucket or s3://bucket/prefix")
    if prefix and not is_key(prefix):
        raise Mistake(f"{prefix!r}: invalid prefix; use names separated by single slashes, without '.' and '..'")
    return BucketStore(bucket, prefix, S3Access.of(environment), outage_seconds, answer_seconds)


class BucketStore(Store):
    """`answer_seconds` is how long the server may be silent, `outage_seconds` how long its failures may last."""

    is_directory = False

    def __init__(
        self, bucket: str, prefix: str, access: S3Access, outage_seconds: float, answer_seconds: float
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.endpoint = access.endpoint
        self._prefix, self._uploads = prefix, access.uploads(bucket, answer_seconds)
        self._outage_seconds = outage_seconds
        self._bucket_seen = False
        self._pid = os.getpid()

        def client(retries: int, silent_seconds: float) -> S3Store:
            return S3Store(
                bucket,
                prefix=prefix or None,
                config=access.config(),
                client_options={
                    "allow_http": (access.endpoint or "").startswith("http://"),
                    "connect_timeout": timedelta(seconds=min(5.0, silent_seconds)),
                    # `timeout` covers a whole download and so would end a long one; `read_timeout` covers
                    # the time without a byte, and the sending of a whole request.
                    "timeout": timedelta(days=1),
                    "read_timeout": timedelta(seconds=silent_seconds),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=outage_seconds),
                    "backoff": {
                        "init_backoff": timedelta(seconds=_FIRST_PAUSE_SECONDS),
                        "max_backoff": timedelta(seconds=_MAX_PAUSE_SECONDS),
                        "base": 2,
                    },
                },
            )

        # No signal reaches Python inside obstore, so a call of one request is retried outside of it.
        # A call of many is retried inside too, or it would never end on a server that often fails.
        self._client = client(0, answer_seconds)
        self._client_for_lists = client(_RETRIES_INSIDE, answer_seconds)
        # A slow line needs time for a part of a file, but a server that is gone should not delay small requests.
        self._client_for_files = client(_RETRIES_INSIDE, max(_TRANSFER_SECONDS, answer_seconds))

    def put(self, key: str, data: bytes) -> None:
        checked_key(key)
        client = self._client if len(data) <= _SMALL_BYTES else self._client_for_files
        self._retry(
            key,
            lambda: obstore.put(client, key, data, chunk_size=CHUNK_BYTES, max_concurrency=_PARALLEL_PARTS),
        )

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create the object; False if it already exists. After an error it is unknown whether it was created.

        A try whose answer got lost may have succeeded, and then the next try finds the object: the mark that all
        tries of this call carry shows if it is ours.
        """
        checked_key(key)
        mark = uuid.uuid4().hex
        tries = 0

        def create() -> bool:
            nonlocal tries
            tries += 1
            try:
                obstore.put(self._client, key, data, mode="create", use_multipart=False, attributes={_MARK: mark})
            except AlreadyExistsError as error:
                if status_of(str(error)) == 409:  # several clients are creating it at this moment, and none has won yet
                    raise explain_server(str(error), self.url) from None
                return tries > 1 and self._mark_of(key) == mark
            return True

        return self._retry(key, create)

    def put_file(self, key: str, path: Path) -> None:
        checked_key(key)
        with explained(path):
            size = path.stat().st_size
            path.open("rb").close()
        part_bytes = max(CHUNK_BYTES, size // _MAX_PARTS + 1)  # larger parts for files beyond 75 GB
        client = self._client_for_files
        self._retry(key, lambda: obstore.put(client, key, path, chunk_size=part_bytes, max_concurrency=_PARALLEL_PARTS))

    def find(self, key: str, limit: int = RECORD_BYTES) -> bytes | None:
        checked_key(key)

        def read() -> bytes:
            found = obstore.get(self._client, key)
            self.check_size(key, found.meta["size"], limit)
            return found.bytes().to_bytes()

        try:
            return self._retry(key, read)
        except ObjectNotFound:
            return None

    def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
        checked_key(key)

        def fetch(folder: int) -> str:
            found = obstore.get(self._client_for_files, key)
            self.check_size(key, found.meta["size"], limit)
            return stage(folder, found.stream(CHUNK_BYTES))

        with explained(path), opened_folder(path.parent) as folder:
            replace(folder, self._retry(key, lambda: fetch(folder)), path.name)  # renamed when it is complete

    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        prefix = checked_prefix(prefix)
        found = self._retry(
            prefix,
            lambda: obstore.list(self._client_for_lists, prefix or None, offset=after or None).collect(),
        )
        entries = (Entry(meta["path"], meta["size"], meta["last_modified"]) for meta in found)
        # Web consoles mark a folder by an empty object, which obstore lists under the folder's own name.
        return sorted(
            (entry for entry in entries if is_key(entry.key) and entry.key != prefix and entry.key > (after or "")),
            key=lambda entry: entry.key,
        )

    def folders(self, prefix: str) -> builtins.list[str]:
        prefix = checked_prefix(prefix)
        found = self._retry(prefix, lambda: obstore.list_with_delimiter(self._client_for_lists, prefix or None))
        return sorted(path.rpartition("/")[2] for path in found["common_prefixes"] if is_key(path))

    def entry(self, key: str) -> Entry | None:
        checked_key(key)
        try:
            meta = self._retry(key, lambda: obstore.head(self._client, key))
        except ObjectNotFound:
            if not self._bucket_seen:
                self.find(key)  # an answer to HEAD has no text and could mean a missing bucket; one to GET has
            return None
        return Entry(key, meta["size"], meta["last_modified"])

    def delete(self, key: str) -> None:
        checked_key(key)
        with suppress(ObjectNotFound):
            self._retry(key, lambda: obstore.delete(self._client, key))

    def remove_unfinished(self, prefix: str, is_dead: Callable[[str], bool] = lambda _: True) -> None:
        """Abort multipart uploads. Without keys of its own (a machine's role), the bucket's lifecycle rule has to."""
        if self._uploads is None:
            return
        uploads, prefix = self._uploads, checked_prefix(prefix)
        above = f"{self._prefix}/" if self._prefix else ""
        for upload in self._retry(prefix, lambda: [*uploads.list(f"{above}{prefix}/" if prefix else above)]):
            if is_dead(upload.key.removeprefix(above)):
                self._retry(prefix, partial(uploads.abort, upload))

    def _mark_of(self, key: str) -> object:
        try:
            return obstore.get(self._client, key).attributes.get(_MARK)
        except FileNotFoundError:
            raise StoreError(f"{self.url}: {key!r} was deleted meanwhile", temporary=True) from None

    def _retry(self, key: str, action: Callable[[], Answer]) -> Answer:
        """Call `action` until it succeeds, fails for good, or the outage has lasted too long."""
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, jitter=1.0, limit_seconds=self._outage_seconds)
        while True:
            try:
                return self._once(key, action)
            except StoreError as error:
                if not error.temporary or not backoff.wait():
                    raise

    def _once(self, key: str, action: Callable[[], Answer]) -> Answer:
        # obstore's threads do not exist in a forked process, and a call would wait for them forever.
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.url}: was opened before this process was forked, and obstore would hang in it; "
                "start workers with spawn or forkserver, and open the store in each"
            )
        try:
            answer = action()
        except FileNotFoundError as error:
            if error.errno is not None:  # a local file is missing; obstore's own have no number
                raise
            code = code_of(str(error))
            if code not in ("", "NoSuchKey", "NotFound"):  # not the object but the bucket or an upload is missing
                raise explain_server(str(error), self.url) from None
            self._bucket_seen = self._bucket_seen or code == "NoSuchKey"
            raise self.not_found(key) from None
        except BaseError as error:
            raise explain_server(str(error), self.url) from None
        self._bucket_seen = True
        return answer
