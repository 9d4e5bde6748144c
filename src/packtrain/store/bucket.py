"""A store in a bucket of S3, Google Cloud Storage or Azure Blob Storage, through obstore."""

from __future__ import annotations

import builtins
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from packtrain.backoff import SLOW_ANSWERS, Backoff
from packtrain.errors import Mistake
from packtrain.store.base import RECORD_BYTES, Entry, Store, checked_key, checked_prefix, is_key
from packtrain.store.directory import CHUNK_BYTES, opened_folder, replace, stage
from packtrain.store.errors import ObjectNotFound, StoreError, code_of, explain_server, explained, status_of
from packtrain.store.services import SERVICES, BucketClient, BucketService
from packtrain.system import cache_directory

Answer = TypeVar("Answer")

_PARALLEL_PARTS = 4
_MAX_PARTS = 9_000  # S3 allows 10,000
_COPIED_BYTES = 5_000_000_000  # S3 itself copies objects of up to 5 GiB
_TRANSFER_SECONDS = 120.0
_SMALL_BYTES = 1 << 20  # larger objects get the client that is patient with slow lines
_RETRIES_INSIDE = 4
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 10.0
# The metadata of an object that names the call that created it; Azure takes only letters and digits.
_MARK = "packtrainput"
_ABSENT = ("NoSuchKey", "BlobNotFound")  # the bucket is there, and the object is not
_NO_CERTIFICATES = "No CA certificates"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")


def open_bucket(
    scheme: str, location: str, environment: Mapping[str, str], outage_seconds: float, answer_seconds: float
) -> BucketStore:
    """Open `bucket/prefix` of a service with the keys of the environment."""
    bucket, _, prefix = location.partition("/")
    prefix = prefix.removesuffix("/")
    if not _BUCKET.fullmatch(bucket):
        raise Mistake(f"{bucket!r}: invalid bucket name; write {scheme}://bucket or {scheme}://bucket/prefix")
    if prefix and not is_key(prefix):
        raise Mistake(f"{prefix!r}: invalid prefix; use names separated by single slashes, without '.' and '..'")
    return BucketStore(bucket, prefix, SERVICES[scheme].of(environment), outage_seconds, answer_seconds)


class BucketStore(Store):
    """`answer_seconds` is how long the server may be silent, `outage_seconds` how long its failures may last."""

    is_directory = False

    def __init__(
        self, bucket: str, prefix: str, service: BucketService, outage_seconds: float, answer_seconds: float
    ) -> None:
        self.url = f"{service.scheme}://{bucket}/{prefix}".rstrip("/")
        self.endpoint, self.key_source = service.endpoint, service.key_source
        self._prefix, self._uploads = prefix, service.uploads(bucket, answer_seconds)
        self._outage_seconds = outage_seconds
        self._bucket_seen = False
        self._pid = os.getpid()

        # No signal reaches Python inside obstore, so a call of one request is retried outside of it.
        # A call of many is retried inside too, or it would never end on a server that often fails.
        self._client = self._connect(service, bucket, 0, answer_seconds)
        self._client_for_lists = self._connect(service, bucket, _RETRIES_INSIDE, answer_seconds)
        # A slow line needs time for a part of a file, but a server that is gone should not delay small requests.
        patient_seconds = max(_TRANSFER_SECONDS, answer_seconds)
        self._client_for_files = self._connect(service, bucket, _RETRIES_INSIDE, patient_seconds)

    def _connect(self, service: BucketService, bucket: str, retries: int, silent_seconds: float) -> BucketClient:
        options = {
            "allow_http": (service.endpoint or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=min(5.0, silent_seconds)),
            # `timeout` covers a whole download and so would end a long one; `read_timeout` covers the time without a
            # byte, and the sending of a whole request.
            "timeout": timedelta(days=1),
            "read_timeout": timedelta(seconds=silent_seconds),
        }
        pauses = {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_SECONDS),
            "max_backoff": timedelta(seconds=_MAX_PAUSE_SECONDS),
            "base": 2,
        }
        limits = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=self._outage_seconds),
            "backoff": pauses,
        }
        try:
            return service.client(bucket, self._prefix or None, options, limits)
        except BaseError as error:
            message = str(error)
            if _NO_CERTIFICATES not in message:
                reason = message.partition("\n")[0].partition(" error: ")[2] or "the client was refused"
                raise Mistake(f"{self.url}: {reason}; correct the keys in the environment") from None
            if not service.is_plain:
                advice = "install the package ca-certificates, or set SSL_CERT_FILE to a file of them"
                raise Mistake(f"{self.url}: this machine has no CA certificates; {advice}") from None
        # obstore reads certificates even where none is ever needed; a small image may have none.
        options["allow_invalid_certificates"] = True
        return service.client(bucket, self._prefix or None, options, limits)

    def put(self, key: str, data: bytes) -> None:
        checked_key(key)
        is_long = len(data) > _SMALL_BYTES
        client = self._client_for_files if is_long else self._client
        self._retry(
            key,
            lambda: obstore.put(client, key, data, chunk_size=CHUNK_BYTES, max_concurrency=_PARALLEL_PARTS),
            is_long=is_long,
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
                # On S3 and GCS several clients are creating it at this moment, and none has won yet.
                if status_of(str(error)) == 409 and code_of(str(error)) != "BlobAlreadyExists":
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
        self._retry(
            key,
            lambda: obstore.put(client, key, path, chunk_size=part_bytes, max_concurrency=_PARALLEL_PARTS),
            is_long=True,
        )

    def copy(self, key: str, target: str) -> None:
        checked_key(target)
        entry = self.entry(key)
        if entry is None:
            raise self.not_found(key)
        if entry.size <= _COPIED_BYTES:
            self._retry(key, lambda: obstore.copy(self._client_for_files, key, target), is_long=True)
            return
        with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
            path = Path(scratch) / "object"
            self.get_file(key, path, entry.size)
            self.put_file(target, path)

    def find(self, key: str, limit: int = RECORD_BYTES) -> bytes | None:
        checked_key(key)

        def read() -> bytes:
            answer = obstore.get(self._client, key)
            self.check_size(key, answer.meta["size"], limit)
            return answer.bytes().to_bytes()

        try:
            return self._retry(key, read)
        except ObjectNotFound:
            return None

    def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
        checked_key(key)

        def fetch(folder: int) -> str:
            answer = obstore.get(self._client_for_files, key)
            self.check_size(key, answer.meta["size"], limit)
            return stage(folder, answer.stream(CHUNK_BYTES))

        with explained(path), opened_folder(path.parent) as folder:
            staged = self._retry(key, lambda: fetch(folder), is_long=True)
            replace(folder, staged, path.name)  # renamed when it is complete

    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        prefix = checked_prefix(prefix)
        objects = self._retry(
            prefix,
            lambda: obstore.list(self._client_for_lists, prefix or None, offset=after or None).collect(),
        )
        entries = (Entry(meta["path"], meta["size"], meta["last_modified"]) for meta in objects)
        # Web consoles mark a folder by an empty object, which obstore lists under the folder's own name.
        return sorted(
            (entry for entry in entries if is_key(entry.key) and entry.key != prefix and entry.key > (after or "")),
            key=lambda entry: entry.key,
        )

    def folders(self, prefix: str) -> builtins.list[str]:
        prefix = checked_prefix(prefix)
        listing = self._retry(prefix, lambda: obstore.list_with_delimiter(self._client_for_lists, prefix or None))
        return sorted(path.rpartition("/")[2] for path in listing["common_prefixes"] if is_key(path))

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
        """Abort multipart uploads. Without keys of its own (a machine's role), the bucket's lifecycle rule has to.

        Google needs such a rule, too; Azure forgets the parts of an unfinished upload after a week.
        """
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

    def _retry(self, key: str, action: Callable[[], Answer], *, is_long: bool = False) -> Answer:
        """Call `action` until it succeeds, fails for good, or the outage has lasted too long.

        `is_long`: it may take minutes although the server answers.
        """
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, jitter=1.0, limit_seconds=self._outage_seconds)
        with nullcontext() if is_long else SLOW_ANSWERS.watched(self.url, self._outage_seconds):
            while True:
                try:
                    return self._once(key, action)
                except StoreError as error:
                    if not error.temporary or not backoff.wait():
                        raise
                    if is_long:  # it has taken its time already
                        SLOW_ANSWERS.late(self.url, self._outage_seconds)

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
            if code not in ("", "NotFound", *_ABSENT):  # not the object but the bucket or an upload is missing
                raise explain_server(str(error), self.url) from None
            self._bucket_seen = self._bucket_seen or code in _ABSENT
            raise self.not_found(key) from None
        except BaseError as error:
            raise explain_server(str(error), self.url) from None
        self._bucket_seen = True
        return answer
