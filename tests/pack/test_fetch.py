from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from packtrain.errors import Mistake
from packtrain.pack.fetch import local_copy, local_source
from packtrain.pack.folder import FolderSource
from packtrain.pack.web import Download, FetchPolicy, Say, redirected
from packtrain.store import Store, StoreError, open_store
from packtrain.store.errors import explained
from parts.proxy import CUT, DROP, REFUSE, Proxy

DATA = bytes(range(256)) * 12_000  # more than what is read at a time
HASTE = FetchPolicy(answer_seconds=1.0, tries=4, pause_seconds=0.01)


@dataclass
class Web:
    """A server of files. `plan` has the trouble for the next requests, one word each; what follows is sound."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    etag: str = '"one"'
    modified: str = ""
    ranges: bool = True
    plan: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def methods(self) -> list[str]:
        return [method for method, _, _ in self.asked]

    def gets(self) -> list[str]:
        """The range that each GET asked for."""
        return [wanted for method, _, wanted in self.asked if method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        web = self.web
        wanted = self.headers.get("Range", "")
        web.asked.append((self.command, self.path, wanted))
        trouble = web.plan.pop(0) if web.plan else ""
        path = self.path.partition("?")[0]
        if trouble.isdigit():
            return self._send(int(trouble), {"Retry-After": "0"}, b"an error page")
        if trouble == "hang":
            time.sleep(1.5)
        if trouble.startswith("to "):
            return self._send(302, {"Location": trouble[3:]}, b"")
        if path.startswith("/loop"):
            return self._send(302, {"Location": f"{path}x"}, b"")
        if path not in web.files:
            return self._send(404, {}, b"nothing here")
        data = web.files[path]
        marks = {"ETag": web.etag, "Last-Modified": web.modified, **web.extra}
        headers = {name: value for name, value in marks.items() if value}
        condition = self.headers.get("If-Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        if trouble == "other part":
            start += 1
        if wanted and web.ranges and (condition is None or condition in (web.etag, web.modified)):
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self._send(206, headers, data[start:], trouble)
        return self._send(200, headers, data, trouble)

    def _send(self, status: int, headers: dict[str, str], body: bytes, trouble: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if trouble == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif trouble != "no size":
            self.send_header("Content-Length", "0" if trouble == "empty head" else str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if self.command == "HEAD":
            return
        if trouble == "half":
            body = body[: len(body) // 2]
        if trouble == "chunked":
            body = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are part of the trouble."""


@pytest.fixture
def web(processes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    web = Web(files={"/train.de.gz": DATA})
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"web": web}))
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield web
    server.shutdown()
    server.server_close()
    thread.join()


Copy = Callable[..., Path]


@pytest.fixture
def copy(tmp_path: Path, directory_store: Store) -> Copy:
    """Fetches an address into the same directory each time."""

    def fetched(path: str, **options: object) -> Path:
        given = {"policy": HASTE, **options}
        return local_copy(path, directory_store, tmp_path / "cache", lambda _text: None, **given)  # type: ignore[arg-type]

    return fetched


def leftovers(copied: Path) -> list[str]:
    return sorted(path.name for path in copied.parent.iterdir() if path != copied)


@pytest.mark.parametrize("path", ["train.de", "/data/train.de", "a:b/c", "./store:x"])
def test_a_local_path_stands_for_itself(path: str, copy: Copy) -> None:
    assert copy(path) == Path(path)


@pytest.mark.parametrize("path", ["file:///etc/passwd", "ftp://host/x", "gopher://x/y", "data://x"])
def test_other_schemes_are_refused(path: str, copy: Copy) -> None:
    with pytest.raises(Mistake, match="is not supported for data"):
        copy(path)


@pytest.mark.parametrize(
    "path",
    [
        "http://", "http:///x", "http://host:notaport/x", "http://host:99999/", "http://[::1/x", "https://a b/",
        "http://host/with space", "http://host/\r\nX: y", "http://" + "a" * 80 + "/", "http://host\\@evil/",
    ],
)  # fmt: skip
def test_invalid_urls_are_refused_without_a_request(path: str, copy: Copy) -> None:
    with pytest.raises(Mistake) as caught:
        copy(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "path",
    [
        "https://me:hunter2@host/x", "s3://key:hunter2@bucket/x", "s3://bucket/x?t=hunter2", "gs://bucket/x?t=hunter2",
        "az://bucket/x?t=hunter2",
    ],
)  # fmt: skip
def test_urls_with_passwords_are_refused_and_not_shown(path: str, copy: Copy, no_aws: None) -> None:
    with pytest.raises(Mistake) as caught:
        copy(path)
    assert "hunter2" not in str(caught.value)


def test_a_file_is_downloaded_in_full_and_keeps_its_ending(web: Web, copy: Copy) -> None:
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    assert copied.name.endswith("-train.de.gz")
    assert leftovers(copied) == []


def test_the_second_time_only_the_version_is_requested(web: Web, copy: Copy) -> None:
    first = copy(f"{web.url}/train.de.gz")
    web.asked.clear()
    assert copy(f"{web.url}/train.de.gz") == first
    assert web.methods() == ["HEAD"]


@pytest.mark.parametrize("mark", ["etag", "modified", "size"])
def test_a_changed_file_is_downloaded_again(mark: str, web: Web, copy: Copy) -> None:
    web.etag, web.modified = ('"one"', "") if mark == "etag" else ("", "Mon, 01 Jan 2024 00:00:00 GMT")
    if mark == "size":
        web.modified = ""
    first = copy(f"{web.url}/train.de.gz")
    changed = DATA[::-1] if mark != "size" else DATA + b"more"
    web.files["/train.de.gz"] = changed
    if mark == "etag":
        web.etag = '"two"'
    elif mark == "modified":
        web.modified = "Tue, 02 Jan 2024 00:00:00 GMT"
    second = copy(f"{web.url}/train.de.gz")
    assert (first.read_bytes(), second.read_bytes()) == (DATA, changed)


def test_urls_that_differ_in_the_query_have_separate_copies(web: Web, copy: Copy) -> None:
    assert copy(f"{web.url}/train.de.gz?part=1") != copy(f"{web.url}/train.de.gz?part=2")


@pytest.mark.parametrize("path", ["/Größe.txt", "/a%20b.txt", "/empty", "/"])
def test_unusual_names_and_empty_files_are_downloaded(path: str, web: Web, copy: Copy) -> None:
    asked = "/Gr%C3%B6%C3%9Fe.txt" if "ö" in path else path
    web.files[asked] = b"" if path == "/empty" else b"text"
    assert copy(web.url + path).read_bytes() == web.files[asked]


def test_a_download_resumes_after_a_lost_connection(web: Web, copy: Copy) -> None:
    web.plan = ["", "half", "half"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA
    half, rest = len(DATA) // 2, len(DATA) - len(DATA) // 2
    assert web.gets() == ["", f"bytes={half}-", f"bytes={half + rest // 2}-"]


def test_a_later_call_resumes_the_download_that_an_earlier_one_gave_up(web: Web, copy: Copy) -> None:
    web.plan = ["", "half", "503", "503", "503", "503"]
    with pytest.raises(StoreError, match="503"):
        copy(f"{web.url}/train.de.gz")
    web.asked.clear()
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    assert web.gets() == [f"bytes={len(DATA) // 2}-"]
    assert leftovers(copied) == []


def test_a_download_starts_over_if_the_server_does_not_support_ranges(web: Web, copy: Copy) -> None:
    web.ranges = False
    web.plan = ["", "half"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA


def test_a_download_starts_over_if_the_version_is_unknown(web: Web, copy: Copy) -> None:
    web.etag = ""
    web.plan = ["", "half"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA
    assert web.gets() == ["", ""]


def test_a_download_resumes_by_date_but_not_by_a_weak_tag(web: Web, copy: Copy) -> None:
    web.etag, web.modified = 'W/"one"', "Mon, 01 Jan 2024 00:00:00 GMT"
    web.plan = ["", "half"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA
    assert web.gets() == ["", f"bytes={len(DATA) // 2}-"]


def test_two_versions_of_a_file_are_never_mixed(web: Web, copy: Copy) -> None:
    changed = bytes(reversed(DATA))

    class Plan(list[str]):
        def pop(self, _index: object = 0) -> str:
            word = super().pop(0)
            if word == "change":
                web.files["/train.de.gz"], web.etag = changed, '"two"'
                return ""
            return word

    web.plan = Plan(["", "half", "change"])
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == changed
    web.asked.clear()
    assert copy(f"{web.url}/train.de.gz") == copied
    assert web.methods() == ["HEAD"]


def test_a_wrong_part_of_the_file_is_requested_again(web: Web, copy: Copy) -> None:
    web.plan = ["", "half", "other part"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA


@pytest.mark.parametrize("trouble", ["503", "500", "429", "hang"])
def test_a_failing_server_is_tried_again(trouble: str, web: Web, copy: Copy) -> None:
    web.plan = [trouble, "", trouble]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA


def test_a_server_that_keeps_failing_is_given_up(web: Web, copy: Copy) -> None:
    web.plan = ["503"] * 100
    with pytest.raises(StoreError, match=r"overloaded or failing \(503\); try again later") as caught:
        copy(f"{web.url}/train.de.gz?signature=hunter2")
    assert caught.value.temporary
    assert "hunter2" not in str(caught.value)
    assert len(web.asked) == HASTE.tries


def test_a_connection_that_is_always_lost_is_given_up(web: Web, copy: Copy) -> None:
    web.ranges = False
    web.plan = ["", *["half"] * 100]
    with pytest.raises(StoreError, match="connection lost"):
        copy(f"{web.url}/train.de.gz")
    assert len(web.asked) < 10


def test_an_unreachable_server_is_a_temporary_error(copy: Copy) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StoreError, match="the server is unreachable") as caught:
            copy(f"http://127.0.0.1:{taken.getsockname()[1]}/x")
    assert caught.value.temporary


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [(socket.EAI_NONAME, Mistake, "unknown host"), (socket.EAI_AGAIN, StoreError, "name server does not answer")],
)
def test_an_unknown_host_is_a_mistake_and_a_silent_name_server_is_temporary(
    number: int, kind: type[Exception], words: str, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "not found")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(kind, match=words):
        copy("http://nowhere.invalid/x")


@pytest.mark.parametrize(
    ("status", "words"), [(404, "not found"), (410, "not found"), (403, "access denied"), (401, "access denied")]
)
def test_a_file_that_is_missing_or_denied_is_a_mistake(status: int, words: str, web: Web, copy: Copy) -> None:
    web.plan = [str(status)] * 9
    with pytest.raises(Mistake, match=rf"{words}.*\({status}\)"):
        copy(f"{web.url}/train.de.gz")
    assert len(web.asked) == 2


@pytest.mark.parametrize("status", ["403", "404", "405", "501"])
def test_a_server_without_head_is_supported(status: str, web: Web, copy: Copy) -> None:
    web.plan = [status]
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    web.plan = [status]
    assert copy(f"{web.url}/train.de.gz") == copied


@pytest.mark.parametrize("ending", ["chunked", "no size"])
def test_a_file_of_unknown_size_is_downloaded(ending: str, web: Web, copy: Copy) -> None:
    web.plan = ["no size", ending]
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    web.plan = ["no size"]
    assert copy(f"{web.url}/train.de.gz") == copied


def test_a_file_of_unknown_version_is_downloaded_each_time(web: Web, copy: Copy) -> None:
    web.etag = ""
    for data in (DATA, DATA[::-1]):
        web.files["/train.de.gz"] = data
        web.plan = ["no size", "chunked"]
        assert copy(f"{web.url}/train.de.gz").read_bytes() == data


def test_a_head_that_reports_another_size_than_get_is_ignored(web: Web, copy: Copy) -> None:
    web.plan = ["empty head"]
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    web.plan = ["empty head"]
    assert copy(f"{web.url}/train.de.gz") == copied


def test_a_file_over_the_limit_is_not_downloaded(web: Web, copy: Copy) -> None:
    with pytest.raises(Mistake, match=r"larger than 1.0 MB, the limit"):
        copy(f"{web.url}/train.de.gz", max_bytes=10**6)
    assert web.methods() == ["HEAD"]


def test_a_file_of_unknown_size_stops_at_the_limit(web: Web, copy: Copy, tmp_path: Path) -> None:
    web.plan = ["no size", "chunked"]
    with pytest.raises(Mistake, match=r"larger than 1.0 MB, the limit"):
        copy(f"{web.url}/train.de.gz", max_bytes=10**6)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_file_that_does_not_fit_on_the_disk_is_refused(web: Web, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage)
    with pytest.raises(Mistake, match=r"3.1 MB needed, 1.0 kB free"):
        copy(f"{web.url}/train.de.gz")


def test_a_full_disk_is_reported_without_a_retry(web: Web, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(_self: object, _chunk: bytes) -> None:
        with explained(Path("cache")):
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Download, "append", append)
    with pytest.raises(StoreError, match="disk is full"):
        copy(f"{web.url}/train.de.gz")
    assert web.methods() == ["HEAD", "GET"]


def test_a_file_that_the_server_compresses_is_refused(web: Web, copy: Copy) -> None:
    web.files["/train.de"] = DATA
    for coding in ("gzip", "gzip, gzip", "br"):
        web.extra = {"Content-Encoding": coding}
        with pytest.raises(Mistake, match="sends it compressed"):
            copy(f"{web.url}/train.de")
    web.extra = {"Content-Encoding": "gzip"}
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA


def test_redirects_are_followed_from_the_original_url_each_time(web: Web, copy: Copy) -> None:
    web.plan = ["to /train.de.gz", "", f"to {web.url}/train.de.gz", "half", "to /train.de.gz"]
    copied = copy(f"{web.url}/moved")
    assert copied.read_bytes() == DATA
    assert copied.name.endswith("-moved")
    assert [path for _, path, _ in web.asked] == ["/moved", "/train.de.gz"] * 3


def test_a_redirect_loop_is_refused(web: Web, copy: Copy) -> None:
    with pytest.raises(Mistake, match="more than 5 redirects"):
        copy(f"{web.url}/loop")
    assert len(web.asked) == 6


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://host/x", "data:text/plain,x", "FILE:/etc/passwd"])
def test_redirects_to_other_schemes_are_refused(place: str, web: Web, copy: Copy) -> None:
    web.plan = [f"to {place}"]
    with pytest.raises(Mistake, match="only http:// and https:// are followed"):
        copy(f"{web.url}/train.de.gz")


def test_redirects_to_urls_with_passwords_are_refused(web: Web, copy: Copy) -> None:
    web.plan = ["to http://me:hunter2@host/x"]
    with pytest.raises(Mistake) as caught:
        copy(f"{web.url}/train.de.gz")
    assert "hunter2" not in str(caught.value)


def test_redirects_from_https_to_http_are_refused() -> None:
    with pytest.raises(Mistake, match="from https:// to http://"):
        redirected("https://host/a?secret", "http://host/a")
    assert redirected("http://host/a", "https://host/b c") == "https://host/b%20c"


# A network of its own, in which this machine has addresses of the internet, of a private network and of the services
# that give cloud machines their keys. One server answers on all of them, and notes who was asked.
ELSEWHERE = """
set -eu
mount --bind "$2" /etc/hosts
ip link set lo up
for address in 8.8.8.8 10.0.0.5 169.254.169.254 169.254.170.2 100.100.100.200 168.63.129.16 192.0.0.192; do
  ip addr add $address/32 dev lo
done
for address in fd00:ec2::254 fd20:ce::254 64:ff9b::a9fe:a9fe 64:ff9b::7f00:1 2606:4700::1111; do
  ip addr add $address/128 dev lo nodad
done
exec "$1" -c "$4" "$2" "$3"
"""
VISITOR = """
import json, socket, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote
from packtrain.errors import Mistake
from packtrain.pack.fetch import local_copy
from packtrain.pack.web import FetchPolicy
from packtrain.store import open_store

hosts, folder = Path(sys.argv[1]), Path(sys.argv[2])
asked = []

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.connection.getsockname()[0].removeprefix("::ffff:"))
        to = unquote(self.path.partition("?")[2])
        if to == "rebind":
            hosts.write_text("127.0.0.1 changing.test\\n")
        self.send_response(302 if "//" in to else 200)
        if "//" in to:
            self.send_header("Location", to)
        self.send_header("Content-Length", "4")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"text")
    do_HEAD = do_GET
    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6

server = Server(("::", 80), Handler)
Thread(target=server.serve_forever, daemon=True).start()
store = open_store(str(folder))
for number, url in enumerate(json.loads(sys.stdin.readline())):
    asked.clear()
    try:
        policy = FetchPolicy(answer_seconds=5.0, tries=1, pause_seconds=0.0)
        local_copy(url, store, folder / str(number), lambda _: None, policy=policy)
        told = "fetched"
    except Mistake as mistake:
        told = str(mistake)
    print(json.dumps([told, sorted(set(asked))]))
"""


def visited(folder: Path, urls: list[str]) -> list[tuple[str, set[str]]]:
    """Fetch each URL elsewhere; return what was told, and which addresses were asked."""
    hosts = folder / "hosts"
    hosts.write_text("8.8.8.8 changing.test\n169.254.169.254 metadata.test\n127.0.0.1 inside.test localhost\n")
    command = ["unshare", "-n", "-m", "sh", "-c", ELSEWHERE, "sh", sys.executable, str(hosts), str(folder), VISITOR]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        command, input=json.dumps(urls) + "\n", capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [(told, set(asked)) for told, asked in map(json.loads, done.stdout.splitlines())]


INTERNET = "8.8.8.8"
METADATA = [
    "169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192", "[fd00:ec2::254]",
    "[fd20:ce::254]", "[64:ff9b::a9fe:a9fe]", "[::ffff:169.254.169.254]", "2852039166", "0xa9fea9fe",
    "0251.0376.0251.0376", "%31%36%39.254.169.254", "metadata.test",
]  # fmt: skip
INSIDE = [
    "127.0.0.1", "127.0.0.9", "localhost", "0.0.0.0", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]",
    "[64:ff9b::7f00:1]", "inside.test",
]  # fmt: skip


def test_redirects_never_lead_to_metadata_services_nor_from_outside_into_private_networks(
    needs_root: None, tmp_path: Path
) -> None:
    refused = [*METADATA, *INSIDE, "10.0.0.5"]
    urls = [f"http://{INTERNET}/x?http://{host}/latest" for host in refused]
    for host, (told, asked) in zip(refused, visited(tmp_path, urls), strict=True):
        kind = "metadata address" if host in METADATA else "from outside to"
        assert kind in told, (host, told)
        assert asked == {INTERNET}, host


def test_redirects_are_followed_within_a_network_and_to_the_outside(needs_root: None, tmp_path: Path) -> None:
    pairs = [
        (INTERNET, "[2606:4700::1111]"), ("10.0.0.5", "10.0.0.5"), ("10.0.0.5", INTERNET), ("127.0.0.1", "localhost"),
        ("127.0.0.1", "10.0.0.5"),
    ]  # fmt: skip
    urls = [f"http://{first}/x?http://{second}/y" for first, second in pairs]
    assert [told for told, _ in visited(tmp_path, urls)] == ["fetched"] * len(pairs)


def test_a_source_on_a_metadata_service_is_refused(needs_root: None, tmp_path: Path) -> None:
    for told, asked in visited(tmp_path, [f"http://{host}/latest" for host in METADATA]):
        assert "metadata address" in told
        assert asked == set()


def test_a_name_that_changes_its_address_to_this_machine_is_refused(needs_root: None, tmp_path: Path) -> None:
    [(told, asked)] = visited(tmp_path, ["http://changing.test/x?rebind"])
    assert "from outside to this machine (127.0.0.1)" in told
    assert asked == {INTERNET}


def test_a_proxy_is_used_and_is_not_asked_for_metadata_services(
    web: Web, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", web.url)
    place = "http://data.test/train.de.gz"
    web.files[place] = DATA
    assert copy(place).read_bytes() == DATA
    for host in ("169.254.169.254", "2852039166", "[fd00:ec2::254]", "127.0.0.1", "localhost", "10.1.1.1"):
        web.asked.clear()
        web.plan = [f"to http://{host}/x"]
        with pytest.raises(Mistake, match="refused, because"):
            copy("http://data.test/other")
        assert [path for _, path, _ in web.asked] == ["http://data.test/other"]


# Servers that do not keep to the rules: what each sends after the request.
UNRULY = {
    "endless continues": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, "connection lost"),
    "endless headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 100, "connection lost"),
    "one long header": (b"HTTP/1.1 200 OK\r\nX: ", b"y" * 10_000, "connection lost"),
    "slow headers": (b"HTTP/1.1 200 OK\r\n", b"X", "does not answer"),
    "slow body": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x", "does not answer"),
    "endless trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"X: y\r\n" * 100,
        "connection lost",
    ),
    "a negative chunk": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"x" * 1000,
        "connection lost",
    ),
    "a chunk without end": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"x" * 10_000,
        "connection lost",
    ),
    "no http": (b"SSH-2.0-OpenSSH_9.2\r\n", b"", "connection lost"),
}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("trouble", UNRULY)
def test_an_answer_that_would_never_end_is_given_up(trouble: str, copy: Copy) -> None:
    start, more, told = UNRULY[trouble]
    policy = FetchPolicy(answer_seconds=0.3, tries=2, pause_seconds=0.0)

    class Unruly(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            is_head = self.request.recv(65536).startswith(b"HEAD")
            if is_head and ("body" in trouble or "chunk" in trouble or "trailers" in trouble):
                self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                return
            with suppress(OSError):
                self.request.sendall(start)
                while more:
                    self.request.sendall(more)
                    time.sleep(0.1 if len(more) == 1 else 0.0)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Unruly) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(StoreError, match=told):
            copy(f"http://127.0.0.1:{server.server_address[1]}/x", policy=policy)
        server.shutdown()


@pytest.mark.parametrize(
    "place",
    [
        "http://[", "http://[::1", "http://[zz]/", "http://h:99999999999/", "http://h:-1/", "http://:80/", "http://",
        "http:///x", "//", "http://a..b/", "http://%00/", "http://" + "a" * 64 + "/", "http://" + "a." * 200 + "/",
        "http://\u2100/", "http://%0d%0aX:y/", "http://h:\u0668/", "https://\ud800/", "https://h/\ud800", "http://./",
        "http://h\r\nX: y/", "http://h\x00/",
    ],
)  # fmt: skip
def test_odd_urls_are_refused_in_one_line(place: str, web: Web, copy: Copy) -> None:
    with pytest.raises((Mistake, StoreError)) as caught:
        copy(place if place.startswith("http") else f"http:{place}")
    assert str(caught.value).isprintable()
    with suppress(Mistake, StoreError):  # some are relative, and lead back
        web.plan = [f"to {place.encode('utf-8', 'replace').decode('latin-1')}".replace("\r\n", "").replace("\x00", "")]
        copy(f"{web.url}/train.de.gz")


def test_a_name_in_another_alphabet_is_asked_for_in_ascii(
    web: Web, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", web.url)
    web.files["http://xn--mgbh0fb.xn--kgbechtv/x"] = b"text"
    assert copy("http://مثال.إختبار/x").read_bytes() == b"text"


def test_parallel_downloads_of_one_file_download_it_once(web: Web, copy: Copy) -> None:
    found: list[Path] = []
    threads = [Thread(target=lambda: found.append(copy(f"{web.url}/train.de.gz"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0].read_bytes() == DATA
    assert len(web.gets()) == 1
    assert leftovers(found[0]) == []


def test_old_abandoned_downloads_are_removed(web: Web, copy: Copy) -> None:
    copied = copy(f"{web.url}/train.de.gz")
    old, young = copied.parent / ".tmp-old", copied.parent / ".tmp-young"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (1, 1))
    web.etag = '"two"'
    copy(f"{web.url}/train.de.gz")
    assert (old.exists(), young.exists()) == (False, True)


def test_progress_does_not_show_the_query(web: Web, directory_store: Store, tmp_path: Path) -> None:
    told: list[str] = []
    web.plan = ["", "half"]
    local_copy(f"{web.url}/train.de.gz?key=hunter2", directory_store, tmp_path, told.append, policy=HASTE)
    shown = f"downloading {web.url}/train.de.gz"
    assert told == [f"{shown} (3.1 MB)", f"{shown}: connection lost; trying again at 1.5 MB"]


def test_an_object_of_a_directory_store_is_used_in_place(directory_store: Store, copy: Copy) -> None:
    directory_store.put("raw/train.de", b"text")
    assert copy("store:raw/train.de") == Path(directory_store.url, "raw/train.de")


def test_an_object_of_a_bucket_is_downloaded_once(s3_store: Store, tmp_path: Path) -> None:
    s3_store.put("raw/train.de", b"text")
    told: list[str] = []
    first = local_copy("store:raw/train.de", s3_store, tmp_path, told.append)
    again = local_copy("store:raw/train.de", s3_store, tmp_path, told.append)
    assert (first, first.read_bytes()) == (again, b"text")
    assert told == ["downloading store:raw/train.de (4 B)"]


def test_an_s3_object_is_downloaded_again_after_a_change(s3_location: str, copy: Copy) -> None:
    place = open_store(s3_location)
    place.put("raw/train.de.gz", b"text")
    first = copy(f"{s3_location}/raw/train.de.gz")
    assert copy(f"{s3_location}/raw/train.de.gz") == first
    place.put("raw/train.de.gz", b"longer text")
    second = copy(f"{s3_location}/raw/train.de.gz")
    assert (first.read_bytes(), second.read_bytes()) == (b"text", b"longer text")
    assert second.name.endswith("-train.de.gz")


@pytest.mark.parametrize("trouble", [REFUSE, DROP, CUT])
def test_a_failing_bucket_is_tried_again(trouble: str, s3_proxy: Proxy, s3_location: str, copy: Copy) -> None:
    open_store(s3_location).put("train.de", DATA)
    s3_proxy.first(trouble, method="GET")
    assert copy(f"{s3_location}/train.de").read_bytes() == DATA


def test_a_missing_object_is_a_mistake(s3_location: str, copy: Copy) -> None:
    for address in (f"{s3_location}/missing", "store:missing", "s3://no-such-bucket-here/x"):
        with pytest.raises(Mistake):
            copy(address)


@pytest.mark.parametrize("address", ["store:", "store:raw/", "store:../x", "store:/etc/passwd", "s3://bucket/a//b"])
def test_a_path_that_names_no_object_is_refused(address: str, copy: Copy, s3_environment: object) -> None:
    with pytest.raises(Mistake, match="must name one object"):
        copy(address)


def test_an_object_over_the_limit_is_not_downloaded(s3_location: str, copy: Copy) -> None:
    open_store(s3_location).put("big", DATA)
    with pytest.raises(Mistake, match="the limit for downloads"):
        copy(f"{s3_location}/big", max_bytes=1000)


# Files that a source names: the images beside a file of JSON lines.
LINES = "".join(f'{{"image": "{name}", "label": "cat"}}\n' for name in ("a.jpg", "cats/b c.jpg", "./cats//d.jpg"))
Local = Callable[..., FolderSource]


@pytest.fixture
def local(tmp_path: Path, directory_store: Store) -> Local:
    """Fetches a file of JSON lines and its images."""

    def fetched(path: str, cache: str = "cache", say: Say = lambda _text: None) -> FolderSource:
        source = FolderSource(paths=(path,))
        found = local_source(source, directory_store, tmp_path / cache, say, policy=HASTE)
        assert isinstance(found, FolderSource)
        return found

    return fetched


def images(source: FolderSource) -> dict[str, bytes | None]:
    return {name: None if path is None else Path(path).read_bytes() for name, path in source.named_files()}


def serve_images(web: Web) -> None:
    web.files["/set/samples.jsonl"] = LINES.encode()
    web.files |= {f"/set/{name}": name.encode() for name in ("a.jpg", "cats/b%20c.jpg", "cats/d.jpg")}


def test_the_images_beside_a_file_of_json_lines_are_downloaded_too(web: Web, local: Local) -> None:
    serve_images(web)
    told: list[str] = []
    source = local(f"{web.url}/set/samples.jsonl?key=hunter2", say=told.append)
    assert images(source) == {
        "a.jpg": b"a.jpg",
        "cats/b c.jpg": b"cats/b%20c.jpg",
        "./cats//d.jpg": b"cats/d.jpg",
    }
    place = f"{web.url}/set/samples.jsonl"
    assert told == [f"downloading {place} ({len(LINES)} B)", f"fetching the images of {place}"]
    web.asked.clear()
    assert images(local(f"{web.url}/set/samples.jsonl?key=hunter2")) == images(source)
    assert set(web.methods()) == {"HEAD"}


def test_an_image_that_is_missing_on_the_server_is_missing_here(web: Web, local: Local) -> None:
    serve_images(web)
    local(f"{web.url}/set/samples.jsonl")
    del web.files["/set/a.jpg"]
    assert images(local(f"{web.url}/set/samples.jsonl"))["a.jpg"] is None


def test_the_digest_of_images_changes_with_them_and_is_the_same_on_every_machine(web: Web, local: Local) -> None:
    serve_images(web)

    def digest(cache: str) -> list[tuple[int, int]]:
        found = [Path(str(path)).stat() for _, path in local(f"{web.url}/set/samples.jsonl", cache).named_files()]
        return [(status.st_size, status.st_mtime_ns) for status in found]

    first = digest("one")
    assert digest("other") == first
    web.files["/set/a.jpg"], web.etag = b"b.jpg", '"two"'
    assert digest("one")[0] != first[0]


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/passwd", "a/../../x"])
def test_images_outside_of_the_folder_are_refused_and_not_asked_for(name: str, web: Web, local: Local) -> None:
    web.files["/set/samples.jsonl"] = f'{{"image": "{name}", "label": "cat"}}\n'.encode()
    with pytest.raises(Mistake, match="must be a path below"):
        local(f"{web.url}/set/samples.jsonl")
    assert {path for _, path, _ in web.asked} == {"/set/samples.jsonl"}


def test_an_image_with_an_odd_name_is_looked_for_below_the_folder(web: Web, local: Local) -> None:
    names = ("http://127.0.0.1:1/x.jpg", "long" * 100)
    web.files["/set/samples.jsonl"] = "".join(f'{{"image": "{name}", "label": "cat"}}\n' for name in names).encode()
    assert images(local(f"{web.url}/set/samples.jsonl")) == dict.fromkeys(names)
    assert "/set/http%3A/127.0.0.1%3A1/x.jpg" in {path for _, path, _ in web.asked}


def test_a_server_that_fails_for_an_image_ends_the_downloads(web: Web, local: Local) -> None:
    names = [f"{number}.jpg" for number in range(200)]
    web.files["/set/samples.jsonl"] = "".join(f'{{"image": "{name}", "label": "x"}}\n' for name in names).encode()
    web.plan = ["", "", *["403"] * 1000]
    with pytest.raises(Mistake, match="access denied"):
        local(f"{web.url}/set/samples.jsonl")
    assert len(web.asked) < 100


def test_texts_in_json_lines_name_no_files(web: Web, local: Local) -> None:
    web.files["/set/samples.jsonl"] = b'{"source": "good morning", "target": "guten Morgen"}\n' * 2
    assert images(local(f"{web.url}/set/samples.jsonl")) == {}
    assert len(web.asked) == 2


def test_the_images_beside_an_object_are_downloaded_too(s3_location: str, s3_store: Store, tmp_path: Path) -> None:
    place = open_store(s3_location)
    for store, prefix, address in ((place, "set/", f"{s3_location}/set/"), (s3_store, "", "store:")):
        store.put(f"{prefix}samples.jsonl", b'{"image": "cats/a.jpg", "label": "cat"}\n')
        store.put(f"{prefix}cats/a.jpg", b"image")
        source = FolderSource(paths=(f"{address}samples.jsonl",))
        found = local_source(source, s3_store, tmp_path / "cache", lambda _text: None)
        assert isinstance(found, FolderSource)
        assert images(found) == {"cats/a.jpg": b"image"}


def test_images_of_a_directory_store_are_used_in_place(directory_store: Store, local: Local) -> None:
    directory_store.put("set/samples.jsonl", b'{"image": "a.jpg", "label": "cat"}\n')
    directory_store.put("set/a.jpg", b"image")
    assert local("store:set/samples.jsonl").path == f"{directory_store.url}/set/samples.jsonl"
