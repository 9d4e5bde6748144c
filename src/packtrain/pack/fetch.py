"""Download sources that are not local files into a directory of this machine.

    https://host/path/train.de.gz     also http
    s3://bucket/path/train.tar        with the store's own environment
    store:raw/train.tar               an object of the job's store

A copy is in a folder named after the URL, under a name with the version that the server reports (ETag or date, size).
If that version is already here, nothing is downloaded; a file that changed is downloaded again. The name ends like the
original, because readers of raw formats look at the ending.

docs/decisions.md says why this is not obstore's HTTP store.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import posixpath
import re
import shutil
import socket
import ssl
import string
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection, InvalidURL
from io import BufferedReader, FileIO, RawIOBase
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, printable
from packtrain.job.kinds import Source
from packtrain.pack.archive import split_member
from packtrain.pack.picture import MAX_BYTES as MAX_IMAGE_BYTES
from packtrain.store import Store, StoreError, is_key, open_store
from packtrain.store.base import TEMPORARY
from packtrain.store.directory import make_folder, opened_folder, replace
from packtrain.store.errors import explained
from packtrain.system import FileLock
from packtrain.units import show_bytes

Result = TypeVar("Result")
Say = Callable[[str], None]
"""Prints a line for the user."""

MAX_BYTES = 10**12
MAX_REDIRECTS = 5

_MAX_CHANGES = 10  # mirrors behind one name may report different versions; one of them will answer twice
_ABANDONED_SECONDS = 24 * 3600.0
_NAME_LENGTH = 120
_PARALLEL = 16  # downloads of small files, whose time is mostly spent waiting
_CHUNK_BYTES = 1 << 18
_PROGRESS_BYTES = 1 << 20  # a retry that got less than this counts as no progress: a server could send single bytes
_PROGRESS_SECONDS = 15.0
_MAX_PAUSE_SECONDS = 30.0
_REDIRECTS = {301, 302, 303, 307, 308}
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/([0-9]{1,18}|\*)")
_HOST = re.compile(r"[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}")
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
_CODINGS = {"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"}
_MAX_HEADER_BYTES = 1 << 18
_MAX_OVERHEAD = 8  # times as many bytes may arrive as are asked for: chunks of a few bytes have a header each
_MIN_BYTES_PER_SECOND = 1000


@dataclass(frozen=True)
class FetchPolicy:
    """How long to wait for a silent server, and how many failures in a row without progress to accept."""

    answer_seconds: float = 30.0
    tries: int = 8
    pause_seconds: float = 1.0


def local_copy(
    path: str,
    store: Store,
    directory: Path,
    say: Say,
    *,
    max_bytes: int = MAX_BYTES,
    policy: FetchPolicy | None = None,
) -> Path:
    """Return the local file for a source: the path itself, or a copy below `directory`.

    Raises `Mistake` if a person must fix something, and a temporary `StoreError` if trying later may help.
    """
    fetch = _fetch_from(path, store, directory, policy or FetchPolicy())
    return Path(path) if fetch is None else fetch(path, say, max_bytes)


def local_source(
    source: Source, store: Store, directory: Path, say: Say, *, policy: FetchPolicy | None = None
) -> Source:
    """Return the source with local paths, and with local copies of the files that it names beside its own."""
    paths, fetches = [], []
    for path in source.paths:
        archive, member = split_member(path)
        fetch = _fetch_from(archive, store, directory, policy or FetchPolicy())
        copy = archive if fetch is None else str(fetch(archive, say, MAX_BYTES))
        paths.append(f"{copy}#{member}" if member else copy)
        fetches.append(fetch)
    copied = source.model_copy(update={"paths": tuple(paths)})
    listing, fetch = Path(paths[0]), fetches[0]
    # In place, in a store that is a directory, its neighbors are there too.
    if fetch is None or not listing.is_relative_to(directory) or next(copied.named_files(), None) is None:
        return copied
    folder = listing.with_name(f"{listing.name}.files")
    with explained(folder):
        folder.mkdir(exist_ok=True)
        _link(listing, folder / listing.name)
    beside = copied.model_copy(update={"paths": (str(folder / listing.name), *paths[1:])})
    address = source.paths[0]

    def fetch_beside(name: str) -> Path:
        return fetch(_beside(address, name), lambda _text: None, MAX_IMAGE_BYTES)

    _fetch_named(beside, folder, fetch_beside, lambda count: say(f"fetching the images of {shown(address)}{count}"))
    return beside


Fetch = Callable[[str, Say, int], Path]
"""Downloads an address of one server or bucket, of at most so many bytes, and returns the copy."""


def _fetch_from(path: str, store: Store, directory: Path, policy: FetchPolicy) -> Fetch | None:
    """Return how to download a path and what is beside it; None if it is local."""
    if path.startswith("store:"):
        return lambda path, say, most: _from_store(store, path.removeprefix("store:"), path, directory, say, most)
    scheme, separator, rest = path.partition("://")
    if not separator:
        return None
    if scheme.lower() in ("http", "https"):
        client = Client(policy)
        return lambda path, say, most: _from_web(checked_url(path), client, directory, say, most)
    if scheme.lower() == "s3":
        bucket, _, key = rest.partition("/")
        if "?" in key:  # not shown: it may hold a signature
            raise Mistake("an s3:// URL has no '?'; name only the object")
        with _lasting_errors_as_mistakes():
            opened = open_store(f"s3://{bucket}")
        start = len(f"{scheme}://{bucket}/")
        return lambda path, say, most: _from_store(opened, path[start:], path, directory, say, most)
    hint = "use the plain path" if scheme.lower() == "file" else "use a path, http://, https://, s3:// or store:"
    raise Mistake(f"{printable(scheme[:20])}:// is not supported for data; {hint}")


class MissingFile(Mistake):
    """There is no file at an address."""


def _beside(address: str, name: str) -> str:
    """Return the address of a file that is named by the file at `address`; never outside of its folder."""
    name = posixpath.normpath(name)
    if address.startswith("store:") or address.lower().startswith("s3:"):
        return address[: max(address.rfind("/"), len("store:") - 1) + 1] + name
    return urljoin(address, quote(name))  # quoted: a name such as https://elsewhere/x stays below the folder


def _fetch_named(source: Source, folder: Path, fetch: Callable[[str], Path], tell: Say) -> None:
    """Download all files that a source names to their places below `folder`, several at once; tell their number."""
    left = source.named_files()
    lock, count, told = threading.Lock(), 0, time.monotonic()
    tell("")

    def next_name() -> str | None:
        nonlocal count, told
        with lock:  # a generator runs in one thread at a time
            name, _ = next(left, (None, None))
            count += name is not None
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                tell(f": {count:,} so far")
            return name

    def work() -> None:
        nonlocal left
        try:
            while (name := next_name()) is not None:
                try:
                    copy: Path | None = fetch(name)
                except MissingFile:  # packing drops the sample, and counts it
                    copy = None
                with explained(folder):
                    _link(copy, folder / name)
        except BaseException:
            with lock:
                left = iter(())  # the other threads need not finish
            raise

    with ThreadPoolExecutor(_PARALLEL) as pool:
        for done in [pool.submit(work) for _ in range(_PARALLEL)]:
            done.result()


def _link(copy: Path | None, place: Path) -> None:
    """Let `place` be the same file as the copy, or nothing; atomically, because another process may be reading."""
    if copy is None:
        if os.path.lexists(place):  # false, and no error, for a name that is too long to be here
            place.unlink()
        return
    with suppress(FileNotFoundError):
        if place.samefile(copy):
            return
    place.parent.mkdir(parents=True, exist_ok=True)
    staged = place.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    os.link(copy, staged)
    staged.replace(place)


def _from_store(store: Store, key: str, address: str, directory: Path, say: Say, max_bytes: int) -> Path:
    if not is_key(key):
        raise Mistake(f"{printable(address[:200])}: must name one object, not a folder; make a tar of the folder")
    with _lasting_errors_as_mistakes():
        entry = store.entry(key)
        if entry is None:
            raise MissingFile(f"{printable(address)}: not found in {store.url}")
        if store.is_directory:
            return Path(store.url, key)
        _check_size(address, entry.size, max_bytes)
        target = _target(directory, f"{store.url}/{key}", f"{entry.size} {entry.modified.isoformat()}", key)
        if not target.exists():
            say(f"downloading {address} ({show_bytes(entry.size)})")
            _prepare(target, entry.size)
            store.get_file(key, target)
            if target.stat().st_size != entry.size:
                target.unlink()
                raise StoreError(f"{address}: changed during the download; try again", temporary=True)
            # The same on every machine: packs of large files and images depend on it.
            modified = round(entry.modified.timestamp() * 1e9)
            with explained(target):
                os.utime(target, ns=(modified, modified))
    return target


@contextmanager
def _lasting_errors_as_mistakes() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        if error.temporary:
            raise
        raise Mistake(str(error)) from error


def _from_web(url: str, client: Client, directory: Path, say: Say, max_bytes: int) -> Path:
    version = client.retry(url, lambda: _version_of(client, url))
    for _ in range(_MAX_CHANGES):
        _check_size(shown(url), version.size, max_bytes)
        target = _target(directory, url, str(version), unquote(urlsplit(url).path))
        if target.exists() and version.is_known:
            return target
        _prepare(target, version.size)
        with _partial_file(target, say) as file:
            if target.exists() and version.is_known:  # another process has just downloaded it
                return target
            changed = Download(client, url, version, file, target, max_bytes, say).run()
            if changed is None:
                with explained(target):
                    if version.is_known:
                        os.utime(file.fileno(), ns=(version.time_ns, version.time_ns))
                    os.fsync(file.fileno())
                    with opened_folder(target.parent) as folder:
                        replace(folder, _partial_path(target).name, target.name)
                return target
        version = changed
    raise StoreError(f"{shown(url)}: keeps changing; try again later", temporary=True)


def _target(directory: Path, address: str, version: str, name: str) -> Path:
    """Return the path for the copy of one version."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rstrip("/").rpartition("/")[2])[-_NAME_LENGTH:]
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in (address, version)]
    return directory / digests[0][:32] / f"{digests[1][:16]}-{plain or 'data'}"


def _partial_path(target: Path) -> Path:
    """Return the path of an unfinished download, named after the boot of this machine.

    After a power cut it is unknown which bytes reached the disk, so an earlier boot's file is not resumed.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = str(os.getpid())
    return target.with_name(f"{TEMPORARY}{boot}-{target.name}")


def _prepare(target: Path, size: int | None) -> None:
    """Make the folder of a download, remove abandoned files in it, and check that the download fits on the disk."""
    partial = _partial_path(target)
    with explained(target.parent):
        make_folder(target.parent.absolute())
        for old in target.parent.glob(f"{TEMPORARY}*"):
            with suppress(FileNotFoundError):
                if old != partial and time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                    old.unlink()
        here = partial.stat().st_size if partial.exists() else 0
        free = shutil.disk_usage(target.parent).free
    if size is not None and size - here > free:
        raise Mistake(
            f"{target.parent}: not enough space: {show_bytes(size - here)} needed, {show_bytes(free)} free;"
            " free some, or set PACKTRAIN_CACHE to a directory on another disk"
        )


@contextmanager
def _partial_file(target: Path, say: Say) -> Iterator[FileIO]:
    """Open the file that will be renamed to `target`, locked; if the download fails, it stays for the next try."""
    path = _partial_path(target)
    with explained(path):
        try:
            lock = FileLock(path, wait=False)
        except BlockingIOError:
            say(f"waiting for another process that is downloading {target.name}")
            lock = FileLock(path)
    with lock:
        try:
            yield FileIO(lock.fileno(), "r+", closefd=False)
        except Mistake:  # a retry would not help, so there is nothing to keep
            path.unlink(missing_ok=True)
            raise
        finally:
            if target.exists():
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class RemoteVersion:
    """The version of a file, as a server reports it."""

    etag: str
    modified: str
    size: int | None

    @classmethod
    def of(cls, headers: HTTPMessage) -> RemoteVersion:
        length = headers.get("Content-Length", "")
        size = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
        if headers.get("Content-Range"):
            _, size = _range_of(headers)
        return cls(headers.get("ETag", "").strip(), headers.get("Last-Modified", "").strip(), size)

    @property
    def condition(self) -> str | None:
        """The value of If-Range that makes a server continue only this version; weak tags do not qualify."""
        return self.modified or None if self.etag.startswith("W/") or not self.etag else self.etag

    @property
    def is_known(self) -> bool:
        return bool(self.etag or self.modified or self.size is not None)

    @property
    def time_ns(self) -> int:
        """A time for the copy that is the same on every machine: packs of large files and images depend on it."""
        return int.from_bytes(hashlib.sha256(str(self).encode(errors="replace")).digest()[:7], "big")

    def differs(self, other: RemoteVersion) -> bool:
        if None not in (self.size, other.size) and self.size != other.size:
            return True
        # Tags first: dates differ between mirrors. A proxy may turn a strong tag into a weak one.
        if self.etag and other.etag:
            return self.etag.removeprefix("W/") != other.etag.removeprefix("W/")
        return bool(self.modified and other.modified) and self.modified != other.modified

    def __str__(self) -> str:
        return f"{self.etag.removeprefix('W/') or self.modified} {self.size}"


def _range_of(headers: HTTPMessage) -> tuple[int | None, int | None]:
    """Return the first byte of a partial answer, and the size of the whole file."""
    match = _RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if match is None:
        return None, None
    return (int(match[1]) if match[1] else None), (int(match[2]) if match[2] != "*" else None)


def _version_of(client: Client, url: str) -> RemoteVersion:
    with client.request("HEAD", url, {}) as answer:
        if answer.status == 200:
            return RemoteVersion.of(answer.headers)
        _raise_temporary(answer)
    # Some servers do not support HEAD, and a URL signed for GET refuses it.
    with client.request("GET", url, {"Range": "bytes=0-0"}) as answer:
        _check_status(answer, url, allowed=(200, 206, 416))
        return RemoteVersion.of(answer.headers)


@dataclass
class Download:
    """Fills a file with one version of the data at a URL, and resumes after a lost connection."""

    client: Client
    url: str
    version: RemoteVersion
    file: FileIO
    target: Path
    max_bytes: int
    say: Say

    def run(self) -> RemoteVersion | None:
        """Return None when the file is complete, or the version that the server has instead by now."""
        if self.version.condition is None:
            self._clear()
        self.say(f"downloading {shown(self.url)}{self._of_size(' (', ')')}")
        return self.client.retry(self.url, self._once, self._size_here, self.say)

    def _once(self) -> RemoteVersion | None:
        here = self._size_here()
        if here and here == self.version.size:
            return None
        headers: dict[str, str] = {}
        if here and self.version.condition:
            headers = {"Range": f"bytes={here}-", "If-Range": self.version.condition}
        with self.client.request("GET", self.url, headers) as answer:
            _check_status(answer, self.url, allowed=(200, 206, 416) if headers else (200,))
            _check_encoding(answer, self.url)
            now = RemoteVersion.of(answer.headers)
            if self.version.differs(now):
                return now
            if answer.status == 416 or (answer.status == 206 and _range_of(answer.headers)[0] != here):
                self._clear()
                raise _Temporary("the server sent the wrong part of the file")
            if answer.status == 200:
                self._clear()
            self._receive(answer)
        size = now.size if self.version.size is None else self.version.size
        if size is not None and self._size_here() < size:
            raise _Temporary("connection lost")
        return None

    def _receive(self, answer: HTTPResponse) -> None:
        here, told = self._size_here(), time.monotonic()
        while chunk := answer.read(_CHUNK_BYTES):
            here += len(chunk)
            _check_size(shown(self.url), here, self.max_bytes)
            self.append(chunk)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                self.say(f"downloading {shown(self.url)}: {show_bytes(here)}{self._of_size(' of ')}")

    def _of_size(self, before: str, after: str = "") -> str:
        return "" if self.version.size is None else f"{before}{show_bytes(self.version.size)}{after}"

    def _size_here(self) -> int:
        with explained(self.target):
            return self.file.seek(0, os.SEEK_END)

    def append(self, chunk: bytes) -> None:
        with explained(self.target):
            view = memoryview(chunk)
            while view:
                view = view[self.file.write(view) :]

    def _clear(self) -> None:
        with explained(self.target):
            self.file.truncate(0)


class Client:
    """Sends requests, each from the original URL: what that redirects to may be signed for minutes only."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._opener = OpenerDirector()  # build_opener would add handlers for file://, ftp:// and data:
        guard = _Guard()
        for handler in (ProxyHandler(), _GuardedHTTP(guard), _GuardedHTTPS(guard)):
            self._opener.add_handler(handler)

    def request(self, method: str, url: str, headers: Mapping[str, str]) -> HTTPResponse:
        """Return the answer after all redirects, whatever its status."""
        always = {"User-Agent": "packtrain", "Accept": "*/*", "Accept-Encoding": "identity"}
        place = url
        for _ in range(MAX_REDIRECTS + 1):
            request = Request(place, headers={**always, **headers}, method=method)  # noqa: S310 - checked
            answer = self._opener.open(request, timeout=self._policy.answer_seconds)
            assert isinstance(answer, HTTPResponse)
            if answer.status not in _REDIRECTS or not answer.headers.get("Location"):
                return answer
            answer.close()
            place = redirected(place, answer.headers["Location"])
        raise Mistake(f"{shown(url)}: more than {MAX_REDIRECTS} redirects; check the URL")

    def retry(
        self,
        url: str,
        action: Callable[[], Result],
        progress: Callable[[], int] = lambda: 0,
        say: Say = lambda _text: None,
    ) -> Result:
        """Return the action's result, trying again after temporary errors.

        Failures are counted from the last progress on, because a long download may lose its connection often.
        """
        backoff = Backoff(self._policy.pause_seconds, _MAX_PAUSE_SECONDS, jitter=1.0)
        failures, furthest = 0, progress()
        while True:
            try:
                return action()
            except (_Temporary, OSError, HTTPException) as error:
                failure = error if isinstance(error, _Temporary) else _explained_failure(error, url)
            here = progress()
            if here >= furthest + _PROGRESS_BYTES:
                failures, furthest = 0, here
                backoff.reset()
            failures += 1
            if failures >= self._policy.tries:
                raise StoreError(f"{shown(url)}: {failure}; try again later", temporary=True)
            say(f"downloading {shown(url)}: {failure}; trying again at {show_bytes(here)}")
            time.sleep(min(failure.pause_seconds, _MAX_PAUSE_SECONDS))
            backoff.wait()


class Network(IntEnum):
    """The networks that an address may belong to, from the widest to the most private."""

    INTERNET = 0
    PRIVATE = 1
    LOOPBACK = 2
    METADATA = 3  # link-local, and the services that give cloud machines their keys

    @classmethod
    def of(cls, address: IPv4Address | IPv6Address) -> Network:
        inner = _embedded(address)
        return max(cls._of_plain(address), cls.INTERNET if inner is None else cls._of_plain(inner))

    @classmethod
    def _of_plain(cls, address: IPv4Address | IPv6Address) -> Network:
        if address.is_link_local or any(address in network for network in _METADATA_NETWORKS):
            return cls.METADATA
        if address.is_loopback or address in _THIS_MACHINE or address.is_unspecified:
            return cls.LOOPBACK
        return cls.INTERNET if address.is_global else cls.PRIVATE


_THIS_MACHINE = ip_network("0.0.0.0/8")
_METADATA_NETWORKS = [
    ip_network(text)
    for text in (
        "100.100.100.200/32",  # Alibaba Cloud
        "168.63.129.16/32",  # Azure
        "192.0.0.192/32",  # Oracle Cloud
        "fd00:ec2::/32",  # AWS
        "fd20:ce::/32",  # Google Cloud
    )
]
# Prefixes of IPv6 addresses that end in the IPv4 address to which gateways (NAT64) or the system translate them.
_TRANSLATED = [ip_network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")]


def _embedded(address: IPv4Address | IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that packets to an IPv6 address may really go to."""
    if isinstance(address, IPv4Address) or address.is_loopback or address.is_unspecified:
        return None
    if any(address in network for network in _TRANSLATED):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


class _Guard:
    """Keeps redirects, and names whose address changes, from leading into a more private network than the source.

    The first connection decides: a source on this machine may redirect to this machine. The services that give cloud
    machines their keys never get a request: no data is there.
    """

    def __init__(self) -> None:
        self._source: Network | None = None

    def check(self, host: str, address: IPv4Address | IPv6Address | None) -> None:
        """Raise a Mistake unless `address` may be reached; None for a name that only a proxy resolves."""
        network = Network.INTERNET if address is None else Network.of(address)
        if network is Network.METADATA:
            raise Mistake(f"{printable(host)}: refused, because it is a link-local or metadata address")
        if self._source is None:
            self._source = network
        if network > self._source:
            where = "this machine" if network is Network.LOOPBACK else "a private network"
            raise Mistake(
                f"{printable(host)}: refused, because a redirect leads from outside to {where} ({address});"
                " name that URL as the source if you trust it"
            )


class _BoundedStream(RawIOBase):
    """The bytes that a server sends, with limits on their number and on how slowly they arrive."""

    def __init__(self, raw: RawIOBase, most_bytes: int, seconds: float) -> None:
        self._raw = raw
        self.expect(most_bytes, seconds)

    def expect(self, most_bytes: int, seconds: float) -> None:
        """Begin a read of at most so many bytes; after so many seconds of waiting they must arrive at some speed."""
        self._most_bytes, self._seconds = most_bytes, seconds
        self._bytes, self._waited = 0, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        started = time.monotonic()
        size = int(self._raw.readinto(buffer) or 0)
        # Only the time that was spent waiting for the server: the reader may be slow itself, as with a slow disk.
        self._waited += time.monotonic() - started
        self._bytes += size
        if self._bytes > self._most_bytes:
            raise HTTPException("more bytes than an answer needs")
        if self._waited > self._seconds and self._bytes < self._waited * _MIN_BYTES_PER_SECOND:
            raise TimeoutError
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


class _BoundedResponse(HTTPResponse):
    """An answer that ends. http.client limits each line and each wait, but neither endless lines nor single bytes."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._seconds = sock.gettimeout() or math.inf
        # Twice: a server may take all the time to think, and then it sends its headers quickly.
        self._stream = _BoundedStream(self.fp.detach(), _MAX_HEADER_BYTES, 2 * self._seconds)
        self.fp = BufferedReader(self._stream)

    def read(self, amt: int | None = None) -> bytes:
        self._stream.expect(_MAX_OVERHEAD * (amt or 0) + _MAX_HEADER_BYTES, self._seconds)
        try:
            return super().read(amt)
        except ValueError as error:  # a chunk of a negative size
            raise HTTPException(str(error)) from error


class _GuardedConnection(HTTPConnection):
    """Checks the peer before the request. To look up the name before would prove nothing: the next lookup may differ.

    Without a guard it leads to the proxy of the environment, whose own address is the choice of the person.
    """

    response_class = _BoundedResponse
    guard: _Guard | None = None

    def connect(self) -> None:
        super().connect()
        try:
            if self.guard is not None:
                self.guard.check(self.host, ip_address(str(self.sock.getpeername()[0]).partition("%")[0]))
        except BaseException:
            self.close()
            raise


class _GuardedSecureConnection(HTTPSConnection, _GuardedConnection):
    pass


def _guarded(kind: type[_GuardedConnection], guard: _Guard, request: Request) -> Callable[..., HTTPConnection]:
    """Return the constructor of the connection for a request, after the proxy was chosen."""
    place = urlsplit(request.full_url)
    is_proxied = request.host != place.netloc
    if is_proxied:  # names are up to the proxy, which may be the only one that can resolve them
        guard.check(str(place.hostname), _literal(str(place.hostname)))

    def connection(host: str, **options: Any) -> HTTPConnection:
        made = kind(host, **options)
        made.guard = None if is_proxied else guard
        return made

    return connection


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a host is written as, in any notation that systems accept; None for a name."""
    if host == "localhost" or host.endswith(".localhost"):
        return IPv4Address("127.0.0.1")
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        with suppress(OSError):
            return IPv4Address(socket.inet_aton(host))  # 0x7f.1, 2130706433
    return None


class _GuardedHTTP(HTTPHandler):
    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self._guard = guard

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_guarded(_GuardedConnection, self._guard, req), req)


class _GuardedHTTPS(HTTPSHandler):
    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self._guard, self._certificates = guard, ssl.create_default_context()

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_guarded(_GuardedSecureConnection, self._guard, req), req, context=self._certificates)


def checked_url(text: str) -> str:
    """Return the URL with everything quoted that needs it; refuse an invalid one and one with a password."""
    try:
        url = urlsplit(text)
        # In ASCII and without quotes, as it is looked up: urllib would change it only after it was checked.
        host = unquote(url.hostname or "").encode("idna").decode().lower()
        port = url.port
    except ValueError:
        raise Mistake("invalid URL; expected https://host/path") from None
    if "@" in url.netloc:  # not shown: it may hold a secret
        raise Mistake("a source's URL must not contain a user or password; download the file and name its path")
    if not _HOST.fullmatch(host) or _UNSAFE.search(text):
        raise Mistake(f"{shown(text)}: invalid URL; write spaces as %20")
    netloc = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    path, query = quote(url.path, string.punctuation), quote(url.query, string.punctuation)
    return url._replace(scheme=url.scheme.lower(), netloc=netloc, path=path, query=query, fragment="").geturl()


def redirected(place: str, location: str) -> str:
    """Return the URL that a redirect leads to."""
    # Headers are bytes, and some servers send UTF-8 and spaces in them.
    try:
        target = urljoin(place, quote(location.encode("latin-1", "replace"), string.punctuation))
        scheme = urlsplit(target).scheme
    except ValueError:
        raise Mistake(f"{shown(place)}: redirects to an invalid URL") from None
    if scheme not in ("http", "https"):
        raise Mistake(f"{shown(place)}: redirects to {scheme[:20]}://; only http:// and https:// are followed")
    if place.startswith("https:") and scheme != "https":
        raise Mistake(f"{shown(place)}: redirects from https:// to http://, where anyone could change the data")
    return checked_url(target)


def shown(url: str) -> str:
    """Return the URL for messages, without its query, which may hold a signature."""
    return printable(url.partition("?")[0].partition("#")[0])[:200]


class _Temporary(Exception):
    """A failure that may pass. `pause_seconds` is the pause that the server asks for."""

    def __init__(self, words: str, pause_seconds: float = 0.0) -> None:
        super().__init__(words)
        self.pause_seconds = pause_seconds


def _raise_temporary(answer: HTTPResponse) -> None:
    if answer.status in (408, 425, 429) or (answer.status >= 500 and answer.status not in (501, 505)):
        asked = answer.headers.get("Retry-After", "")
        seconds = float(asked) if re.fullmatch("[0-9]{1,6}", asked) else 0.0
        raise _Temporary(f"the server is overloaded or failing ({answer.status})", seconds)


def _check_status(answer: HTTPResponse, url: str, allowed: tuple[int, ...]) -> None:
    if answer.status in allowed:
        return
    _raise_temporary(answer)
    if answer.status in (404, 410):
        raise MissingFile(f"{shown(url)}: not found ({answer.status})")
    words = "the server refused the request"
    if answer.status in (401, 403, 407):
        words = "access denied; a signed URL may have expired"
    raise Mistake(f"{shown(url)}: {words} ({answer.status})")


def _check_encoding(answer: HTTPResponse, url: str) -> None:
    """Refuse a file that the server compresses although it was not asked to; a .gz file may be labeled as gzip."""
    coding = printable(answer.headers.get("Content-Encoding", "").strip().lower())[:40]
    is_own = coding in ("gzip", "x-gzip") and urlsplit(url).path.endswith(("gz", "GZ"))
    if not is_own and _CODINGS & {word.strip() for word in coding.split(",")}:
        raise Mistake(f"{shown(url)}: the server sends it compressed ({coding}); download the file yourself")


def _check_size(name: str, size: int | None, max_bytes: int) -> None:
    if size is not None and size > max_bytes:
        raise Mistake(f"{name}: larger than {show_bytes(max_bytes)}, the limit for downloads")


def _explained_failure(error: OSError | HTTPException, url: str) -> _Temporary:
    """Return why no complete answer came; raise a Mistake if trying again cannot help."""
    cause: object = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, InvalidURL):
        raise Mistake(f"{shown(url)}: invalid URL") from None
    if isinstance(cause, socket.gaierror):
        if cause.errno != socket.EAI_AGAIN:
            raise Mistake(f"{shown(url)}: unknown host; check the URL") from None
        return _Temporary("the name server does not answer")
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise Mistake(f"{shown(url)}: the server's certificate is not trusted on this machine") from None
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        raise Mistake(f"{shown(url)}: the server does not speak https") from None
    if isinstance(cause, TimeoutError):
        return _Temporary("the server does not answer")
    if isinstance(cause, ConnectionRefusedError) or (isinstance(cause, OSError) and cause.errno in _UNREACHABLE):
        return _Temporary("the server is unreachable")
    return _Temporary("connection lost")
