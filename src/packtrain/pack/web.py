"""Downloads over HTTP: a client that resumes, and that never follows an answer to where it should not.

A server may send anything: endless headers, single bytes, another version of the file, or a redirect into the private
network of this machine.

docs/decisions.md says why this is not obstore's HTTP store.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import socket
import ssl
import string
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection, InvalidURL
from io import BufferedReader, FileIO, RawIOBase
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import AbstractHTTPHandler, OpenerDirector, ProxyHandler, Request

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, printable
from packtrain.store import StoreError
from packtrain.store.errors import explained
from packtrain.units import show_bytes

Result = TypeVar("Result")
Say = Callable[[str], None]
"""Prints a line for the user."""

MAX_REDIRECTS = 5
PROGRESS_SECONDS = 15.0
_CHUNK_BYTES = 1 << 18
_PROGRESS_BYTES = 1 << 20  # a retry that got less than this counts as no progress: a server could send single bytes
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


class MissingFile(Mistake):
    """There is no file at an address."""


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

    def differs(self, current: RemoteVersion) -> bool:
        if None not in (self.size, current.size) and self.size != current.size:
            return True
        # Tags first: dates differ between mirrors. A proxy may turn a strong tag into a weak one.
        if self.etag and current.etag:
            return self.etag.removeprefix("W/") != current.etag.removeprefix("W/")
        return bool(self.modified and current.modified) and self.modified != current.modified

    def __str__(self) -> str:
        return f"{self.etag.removeprefix('W/') or self.modified} {self.size}"


def _range_of(headers: HTTPMessage) -> tuple[int | None, int | None]:
    """Return the first byte of a partial answer, and the size of the whole file."""
    match = _RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if match is None:
        return None, None
    return (int(match[1]) if match[1] else None), (int(match[2]) if match[2] != "*" else None)


def version_of(client: Client, url: str) -> RemoteVersion:
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
        fetched = self._size_here()
        if fetched and fetched == self.version.size:
            return None
        headers: dict[str, str] = {}
        if fetched and self.version.condition:
            headers = {"Range": f"bytes={fetched}-", "If-Range": self.version.condition}
        with self.client.request("GET", self.url, headers) as answer:
            _check_status(answer, self.url, allowed=(200, 206, 416) if headers else (200,))
            # Whatever was asked for, a server may compress; and it may label a .gz file as gzip.
            coding = printable(answer.headers.get("Content-Encoding", "").strip().lower())[:40]
            is_own = coding in ("gzip", "x-gzip") and urlsplit(self.url).path.endswith(("gz", "GZ"))
            if not is_own and _CODINGS & {word.strip() for word in coding.split(",")}:
                advice = "download the file yourself"
                raise Mistake(f"{shown(self.url)}: the server sends it compressed ({coding}); {advice}")
            current = RemoteVersion.of(answer.headers)
            if self.version.differs(current):
                return current
            if answer.status == 416 or (answer.status == 206 and _range_of(answer.headers)[0] != fetched):
                self._clear()
                raise _Temporary("the server sent the wrong part of the file")
            if answer.status == 200:
                self._clear()
            self._receive(answer)
        size = current.size if self.version.size is None else self.version.size
        if size is not None and self._size_here() < size:
            raise _Temporary("connection lost")
        return None

    def _receive(self, answer: HTTPResponse) -> None:
        size, told_at = self._size_here(), time.monotonic()
        while chunk := answer.read(_CHUNK_BYTES):
            size += len(chunk)
            check_size(shown(self.url), size, self.max_bytes)
            self.append(chunk)
            if time.monotonic() - told_at > PROGRESS_SECONDS:
                told_at = time.monotonic()
                self.say(f"downloading {shown(self.url)}: {show_bytes(size)}{self._of_size(' of ')}")

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
        self._opener.add_handler(ProxyHandler())
        self._opener.add_handler(_GuardedHandler())

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
            reached = progress()
            if reached >= furthest + _PROGRESS_BYTES:
                failures, furthest = 0, reached
                backoff.reset()
            failures += 1
            if failures >= self._policy.tries:
                raise StoreError(f"{shown(url)}: {failure}; try again later", temporary=True)
            say(f"downloading {shown(url)}: {failure}; trying again at {show_bytes(reached)}")
            time.sleep(min(failure.pause_seconds, _MAX_PAUSE_SECONDS))
            backoff.wait()


class Reach(IntEnum):
    """How far an address reaches, from the widest network to the most private."""

    INTERNET = 0
    PRIVATE = 1
    LOOPBACK = 2
    METADATA = 3  # link-local, and the services that give cloud machines their keys

    @classmethod
    def of(cls, address: IPv4Address | IPv6Address) -> Reach:
        inner = _embedded(address)
        return max(cls._of_plain(address), cls.INTERNET if inner is None else cls._of_plain(inner))

    @classmethod
    def _of_plain(cls, address: IPv4Address | IPv6Address) -> Reach:
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
        self._source: Reach | None = None

    def check(self, host: str, address: IPv4Address | IPv6Address | None) -> None:
        """Raise a Mistake unless `address` may be reached; None for a name that only a proxy resolves."""
        network = Reach.INTERNET if address is None else Reach.of(address)
        if network is Reach.METADATA:
            raise Mistake(f"{printable(host)}: refused, because it is a link-local or metadata address")
        if self._source is None:
            self._source = network
        if network > self._source:
            where = "this machine" if network is Reach.LOOPBACK else "a private network"
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


class _GuardedHandler(AbstractHTTPHandler):
    """Opens http:// and https:// URLs, all through connections with the same guard."""

    http_request = https_request = AbstractHTTPHandler.do_request_

    def __init__(self) -> None:
        super().__init__()
        self._guard, self._certificates = _Guard(), ssl.create_default_context()

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._connector(_GuardedConnection, req), req)

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._connector(_GuardedSecureConnection, req), req, context=self._certificates)

    def _connector(self, kind: type[_GuardedConnection], request: Request) -> Callable[..., HTTPConnection]:
        """Return the constructor of the connection for a request, after the proxy was chosen."""
        url = urlsplit(request.full_url)
        is_proxied = request.host != url.netloc
        if is_proxied:  # names are up to the proxy, which may be the only one that can resolve them
            self._guard.check(str(url.hostname), _literal(str(url.hostname)))

        def connect(host: str, **options: Any) -> HTTPConnection:
            connection = kind(host, **options)
            connection.guard = None if is_proxied else self._guard
            return connection

        return connect


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
        pause = answer.headers.get("Retry-After", "")
        seconds = float(pause) if re.fullmatch("[0-9]{1,6}", pause) else 0.0
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


def check_size(name: str, size: int | None, max_bytes: int) -> None:
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
