"""Sources that are not local files, fetched into a directory of this machine.

    https://host/path/train.de.gz     also http
    s3://bucket/path/train.tar        with the store's own environment
    store:raw/train.tar               an object of the job's store

A copy lies in a folder named after the address and what the server says of the version (ETag or date, size), so what
changed there is fetched again, and what did not is only asked about. It keeps its name, whose ending readers go by.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import ipaddress
import os
import random
import re
import shutil
import socket
import ssl
import string
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection, InvalidURL
from io import FileIO
from pathlib import Path
from typing import TypeVar
from urllib.error import URLError
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from packtrain.errors import Mistake, printable
from packtrain.store import Entry, Store, StoreError, is_key, open_store
from packtrain.store.base import TEMPORARY
from packtrain.store.directory import make_folder, replace
from packtrain.store.errors import explained
from packtrain.units import show_bytes

MOST_BYTES = 10**12

_MOST_CHANGES = 10  # mirrors behind one name may give the same file different tags: one of them will answer twice
_ABANDONED_SECONDS = 24 * 3600.0
_NAME_LENGTH = 120


def local_copy(
    path: str,
    store: Store,
    directory: Path,
    tell: Tell,
    *,
    most_bytes: int = MOST_BYTES,
    patience: FetchPolicy | None = None,
) -> Path:
    """The file that a source's path stands for: itself where it is local, else its copy below `directory`.

    Raises `Mistake` for what the person must mend, and a temporary `StoreError` for what may pass.
    """
    if path.startswith("store:"):
        return _from_store(store, path.removeprefix("store:"), path, directory, tell, most_bytes)
    scheme, separator, rest = path.partition("://")
    if not separator:
        return Path(path)
    if scheme.lower() in ("http", "https"):
        client = Client(patience or FetchPolicy())
        return _from_web(checked_address(path), client, directory, tell, most_bytes)
    if scheme.lower() == "s3":
        bucket, _, key = rest.partition("/")
        if "?" in key:  # not repeated: it may hold a signature
            raise Mistake("an s3:// address has no '?': name the object alone, or use a signed https:// address")
        with _as_mistakes():
            return _from_store(open_store(f"s3://{bucket}"), key, path, directory, tell, most_bytes)
    hint = "write its path alone" if scheme.lower() == "file" else "use a path, http://, https://, s3:// or store:"
    raise Mistake(f"data cannot be read from {printable(scheme[:20])}://; {hint}")


# From stores.


def _from_store(store: Store, key: str, address: str, directory: Path, tell: Tell, most_bytes: int) -> Path:
    if not is_key(key):
        raise Mistake(f"{printable(address[:200])}: must name one object, not a folder; pack folders as a tar")
    with _as_mistakes():
        entry = store.entry(key)
        if entry is None:
            raise Mistake(f"{address}: there is no such object in {store.url}")
        if store.is_directory:
            return Path(store.url, key)  # a file already
        check_size(address, entry.size, most_bytes)
        target = _place(directory, f"{store.url}/{key}", f"{entry.size} {entry.modified.isoformat()}", key)
        if not target.exists():
            tell(f"fetching {address} ({show_bytes(entry.size)})")
            _prepare(target, entry.size)
            store.get_file(key, target)
            _check_whole(target, entry, address)
    return target


def _check_whole(target: Path, entry: Entry, address: str) -> None:
    if target.stat().st_size != entry.size:
        target.unlink()
        raise StoreError(f"{address}: was changed while it was fetched; try again", temporary=True)


@contextmanager
def _as_mistakes() -> Iterator[None]:
    """What will not pass by itself is the person's to mend."""
    try:
        yield
    except StoreError as error:
        if error.temporary:
            raise
        raise Mistake(str(error)) from error


# From the web.


def _from_web(address: str, client: Client, directory: Path, tell: Tell, most_bytes: int) -> Path:
    version = client.patiently(address, lambda: describe(client, address))
    for _ in range(_MOST_CHANGES):
        check_size(shown(address), version.size, most_bytes)
        target = _place(directory, address, str(version), unquote(urlsplit(address).path))
        if target.exists() and version.is_known:
            return target
        _prepare(target, version.size)
        with _partial(target, tell) as file:
            if target.exists() and version.is_known:  # another process has just fetched it
                return target
            changed = Download(client, address, version, file, most_bytes, tell).run()
            if changed is None:
                with explained(target):
                    os.fsync(file.fileno())
                    replace(_partial_path(target), target)
                return target
        version = changed
    raise StoreError(f"{shown(address)}: changes all the time; try again later", temporary=True)


# Files.


def _place(directory: Path, address: str, version: str, name: str) -> Path:
    """Where the copy of a version belongs. Its name ends as the original's does."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rstrip("/").rpartition("/")[2])[-_NAME_LENGTH:]
    return directory / _digest(address)[:32] / f"{_digest(version)[:16]}-{plain or 'data'}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _partial_path(target: Path) -> Path:
    """Named after the machine's boot: after a power cut nobody knows which of the bytes reached the disk."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = str(os.getpid())
    return target.with_name(f"{TEMPORARY}{boot}-{target.name}")


def _prepare(target: Path, size: int | None) -> None:
    """The folder of a file to come, without what was abandoned in it, and with room for the file."""
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
        raise Mistake(f"{target.parent}: {show_bytes(size - here)} are needed and {show_bytes(free)} are free")


@contextmanager
def _partial(target: Path, tell: Tell) -> Iterator[FileIO]:
    """The file that will be renamed to `target`, for this process alone; kept for the next try if this one fails."""
    path = _partial_path(target)
    with explained(path):
        file = _locked(path, tell)
    try:
        yield file
    except Mistake:
        path.unlink(missing_ok=True)
        raise
    finally:
        if target.exists():
            path.unlink(missing_ok=True)
        file.close()


def _locked(path: Path, tell: Tell) -> FileIO:
    while True:
        file = FileIO(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waiting for another process that fetches {path.parent.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # whoever had it has renamed or removed it


# Files on the web: asked for with patience, fetched in parts, from where data may lie and nowhere else.


Answer = TypeVar("Answer")
Tell = Callable[[str], None]

MOST_REDIRECTS = 5

_CHUNK_BYTES = 1 << 18
_PROGRESS_BYTES = 1 << 20  # less does not count: a server could send a byte a time
_PROGRESS_SECONDS = 15.0
_LONGEST_PAUSE_SECONDS = 30.0
_REDIRECTS = {301, 302, 303, 307, 308}
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/([0-9]{1,18}|\*)")
_KEPT = string.punctuation  # of an address that is made of ASCII
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_METADATA = ipaddress.ip_address("fd00:ec2::254")  # the one such service that is not link-local


@dataclass(frozen=True)
class FetchPolicy:
    """How long a silent server is waited for, and how often in a row it may fail before it has sent anything new."""

    answer_seconds: float = 30.0
    tries: int = 8
    pause_seconds: float = 0.5


class _Trouble(Exception):
    """What may pass: a server out of order, a connection that broke. `pause_seconds` is what the server asks for."""

    def __init__(self, words: str, pause_seconds: float = 0.0) -> None:
        super().__init__(words)
        self.pause_seconds = pause_seconds


@dataclass(frozen=True)
class RemoteVersion:
    """What a server says of the file it has now."""

    etag: str
    modified: str
    size: int | None

    @classmethod
    def of(cls, headers: HTTPMessage) -> RemoteVersion:
        told = headers.get("Content-Length", "")
        size = int(told) if re.fullmatch("[0-9]{1,18}", told) else None
        if headers.get("Content-Range"):
            _, size = _range_of(headers)
        return cls(headers.get("ETag", "").strip(), headers.get("Last-Modified", "").strip(), size)

    @property
    def condition(self) -> str | None:
        """What makes a server send the rest of this very version only."""
        return self.modified or None if self.etag.startswith("W/") or not self.etag else self.etag

    @property
    def is_known(self) -> bool:
        return bool(self.etag or self.modified or self.size is not None)

    def differs(self, other: RemoteVersion) -> bool:
        """A tag counts more than a date, in which mirrors differ; and proxies weaken tags."""
        if None not in (self.size, other.size) and self.size != other.size:
            return True
        if self.etag and other.etag:
            return self.etag.removeprefix("W/") != other.etag.removeprefix("W/")
        return bool(self.modified and other.modified) and self.modified != other.modified

    def __str__(self) -> str:
        return f"{self.etag.removeprefix('W/') or self.modified} {self.size}"


def _range_of(headers: HTTPMessage) -> tuple[int | None, int | None]:
    """The first byte that a partial answer has, and the size of the whole."""
    match = _RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if match is None:
        return None, None
    return (int(match[1]) if match[1] else None), (int(match[2]) if match[2] != "*" else None)


def describe(client: Client, address: str) -> RemoteVersion:
    with client.ask("HEAD", address, {}) as answer:
        if answer.status == 200:
            return RemoteVersion.of(answer.headers)
        _refuse_trouble(answer)
    # Some servers know no HEAD, and addresses that are signed for GET refuse it.
    with client.ask("GET", address, {"Range": "bytes=0-0"}) as answer:
        _refuse_status(answer, address, allowed=(200, 206, 416))
        return RemoteVersion.of(answer.headers)


@dataclass
class Download:
    """Fills a file with a version of what is at an address, going on where an earlier try broke off."""

    client: Client
    address: str
    version: RemoteVersion
    file: FileIO
    most_bytes: int
    tell: Tell

    def run(self) -> RemoteVersion | None:
        """None when the file is whole; else the version that the server has instead by now."""
        if self.version.condition is None:
            self._cut()
        self.tell(f"fetching {shown(self.address)}{self._of_size(' (', ')')}")
        return self.client.patiently(self.address, self._once, self._here, self.tell)

    def _once(self) -> RemoteVersion | None:
        here = self._here()
        if here and here == self.version.size:
            return None
        headers: dict[str, str] = {}
        if here and self.version.condition:
            headers = {"Range": f"bytes={here}-", "If-Range": self.version.condition}
        with self.client.ask("GET", self.address, headers) as answer:
            _refuse_status(answer, self.address, allowed=(200, 206, 416) if headers else (200,))
            _refuse_encoding(answer, self.address)
            now = RemoteVersion.of(answer.headers)
            if self.version.differs(now):
                return now
            if answer.status == 416 or (answer.status == 206 and _range_of(answer.headers)[0] != here):
                self._cut()
                raise _Trouble("the server sent another part than it was asked for")
            if answer.status == 200:
                self._cut()
            self._receive(answer)
        wanted = now.size if self.version.size is None else self.version.size
        if wanted is not None and self._here() < wanted:
            raise _Trouble("the connection broke")
        return None

    def _receive(self, answer: HTTPResponse) -> None:
        here, told = self._here(), time.monotonic()
        while chunk := answer.read(_CHUNK_BYTES):
            here += len(chunk)
            check_size(shown(self.address), here, self.most_bytes)
            self._write(chunk)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                self.tell(f"fetching {shown(self.address)}: {show_bytes(here)}{self._of_size(' of ')}")

    def _of_size(self, before: str, after: str = "") -> str:
        return "" if self.version.size is None else f"{before}{show_bytes(self.version.size)}{after}"

    def _here(self) -> int:
        with explained(Path(str(self.file.name))):
            return self.file.seek(0, os.SEEK_END)

    def _write(self, chunk: bytes) -> None:
        with explained(Path(str(self.file.name))):
            view = memoryview(chunk)
            while view:
                view = view[self.file.write(view) :]

    def _cut(self) -> None:
        with explained(Path(str(self.file.name))):
            self.file.truncate(0)


class Client:
    """Asks servers on the web, each time from the first address: what it leads to may be signed for minutes only."""

    def __init__(self, patience: FetchPolicy) -> None:
        self._patience = patience
        self._opener = OpenerDirector()  # build_opener would add what opens file://, ftp:// and data:
        for handler in (ProxyHandler(), _GuardedHTTP(), _GuardedHTTPS(context=ssl.create_default_context())):
            self._opener.add_handler(handler)

    def ask(self, method: str, address: str, headers: Mapping[str, str]) -> HTTPResponse:
        """The answer at the end of all redirections, whatever its status."""
        always = {"User-Agent": "packtrain", "Accept": "*/*", "Accept-Encoding": "identity"}
        place = address
        for _ in range(MOST_REDIRECTS + 1):
            request = Request(place, headers={**always, **headers}, method=method)  # noqa: S310 - checked
            answer = self._opener.open(request, timeout=self._patience.answer_seconds)
            assert isinstance(answer, HTTPResponse)
            if answer.status not in _REDIRECTS or not answer.headers.get("Location"):
                return answer
            answer.close()
            place = redirected(place, answer.headers["Location"])
        raise Mistake(f"{shown(address)}: redirected more than {MOST_REDIRECTS} times; is the address right?")

    def patiently(
        self,
        address: str,
        action: Callable[[], Answer],
        progress: Callable[[], int] = lambda: 0,
        tell: Tell = lambda _text: None,
    ) -> Answer:
        """The action's answer, tried again after jittered pauses while what failed may pass.

        Tries are counted anew when they got further: long downloads may break often.
        """
        failures, furthest = 0, progress()
        while True:
            try:
                return action()
            except (_Trouble, OSError, HTTPException) as error:
                trouble = error if isinstance(error, _Trouble) else _trouble_of(error, address)
            here = progress()
            if here >= furthest + _PROGRESS_BYTES:
                failures, furthest = 0, here
            failures += 1
            if failures >= self._patience.tries:
                raise StoreError(f"{shown(address)}: {trouble}; try again later", temporary=True)
            tell(f"fetching {shown(address)}: {trouble}; trying again at {show_bytes(here)}")
            pause = min(self._patience.pause_seconds * 2**failures, _LONGEST_PAUSE_SECONDS)
            asked = min(trouble.pause_seconds, _LONGEST_PAUSE_SECONDS)
            time.sleep(asked + random.uniform(0, pause))  # noqa: S311


class _GuardedConnection(HTTPConnection):
    """Never to the services that give machines their keys: no data set lies there, but redirections lead there."""

    def connect(self) -> None:
        super().connect()
        peer = ipaddress.ip_address(str(self.sock.getpeername()[0]).partition("%")[0])
        peer = getattr(peer, "ipv4_mapped", None) or peer
        if peer.is_link_local or peer == _METADATA:
            self.close()
            raise Mistake(f"{printable(self.host)} is an address inside this machine's network that holds no data")


class _GuardedSecureConnection(HTTPSConnection, _GuardedConnection):
    pass


class _GuardedHTTP(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_GuardedConnection, req)


class _GuardedHTTPS(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_GuardedSecureConnection, req, context=self._context)  # type: ignore[attr-defined]


# Addresses. What is shown of them has no query, which may hold a signature.


def checked_address(text: str) -> str:
    try:
        url = urlsplit(text)
        sound = bool(url.hostname and url.hostname.encode("idna")) and (url.port or 1) > 0
    except ValueError:
        raise Mistake("a source's address is not one that can be: write https://host/path") from None
    if "@" in url.netloc:  # not repeated: it may hold a secret
        raise Mistake("a source's address holds no user or password: fetch the file yourself, or use a signed address")
    if not sound or _UNSAFE.search(text):
        raise Mistake(f"{shown(text)}: not an address that can be; spaces are written as %20")
    return url._replace(
        scheme=url.scheme.lower(), path=quote(url.path, _KEPT), query=quote(url.query, _KEPT), fragment=""
    ).geturl()


def redirected(place: str, location: str) -> str:
    # Headers are bytes, and some servers put UTF-8 and spaces there.
    target = urljoin(place, quote(location.encode("latin-1", "replace"), _KEPT))
    scheme = urlsplit(target).scheme
    if scheme not in ("http", "https"):
        raise Mistake(f"{shown(place)}: leads to {scheme[:20]}://, and only http:// and https:// are followed")
    if place.startswith("https:") and scheme != "https":
        raise Mistake(f"{shown(place)}: leads from https:// to http://, where anybody could change the data")
    return checked_address(target)


def shown(address: str) -> str:
    return printable(address.partition("?")[0].partition("#")[0])[:200]


# What goes wrong.


def _refuse_trouble(answer: HTTPResponse) -> None:
    if answer.status in (408, 425, 429) or (answer.status >= 500 and answer.status not in (501, 505)):
        asked = answer.headers.get("Retry-After", "")
        seconds = float(asked) if re.fullmatch("[0-9]{1,6}", asked) else 0.0
        raise _Trouble(f"the server is busy or out of order ({answer.status})", seconds)


def _refuse_status(answer: HTTPResponse, address: str, allowed: tuple[int, ...]) -> None:
    if answer.status in allowed:
        return
    _refuse_trouble(answer)
    words = "the server refused"
    if answer.status in (404, 410):
        words = "there is nothing at this address"
    elif answer.status in (401, 403, 407):
        words = "the server gives it to nobody, or not to you; a signed address may have run out"
    raise Mistake(f"{shown(address)}: {words} ({answer.status})")


def _refuse_encoding(answer: HTTPResponse, address: str) -> None:
    """Servers that compress unasked would change the file; those that name a .gz's own compression do not."""
    coding = answer.headers.get("Content-Encoding", "").strip().lower()
    is_own = coding in ("gzip", "x-gzip") and urlsplit(address).path.endswith(("gz", "GZ"))
    if coding in ("gzip", "x-gzip", "deflate", "br", "zstd", "compress") and not is_own:
        raise Mistake(f"{shown(address)}: the server compresses it unasked ({coding}); fetch the file yourself")


def _trouble_of(error: OSError | HTTPException, address: str) -> _Trouble:
    """Why no answer came, or not all of it; raises what will not pass by itself."""
    cause: object = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, InvalidURL):
        raise Mistake(f"{shown(address)}: not an address that can be") from None
    if isinstance(cause, socket.gaierror):
        if cause.errno != socket.EAI_AGAIN:
            raise Mistake(f"{shown(address)}: there is no such host") from None
        return _Trouble("no name server answers")
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise Mistake(f"{shown(address)}: the server's certificate is not trusted here") from None
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        raise Mistake(f"{shown(address)}: the server does not speak https") from None
    if isinstance(cause, TimeoutError):
        return _Trouble("the server does not answer")
    if isinstance(cause, ConnectionRefusedError) or (isinstance(cause, OSError) and cause.errno in _UNREACHABLE):
        return _Trouble("the server cannot be reached")
    return _Trouble("the connection broke")


def check_size(name: str, size: int | None, most_bytes: int) -> None:
    if size is not None and size > most_bytes:
        raise Mistake(f"{name}: has more than {show_bytes(most_bytes)}, the most that is fetched")
