from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import packtrain.pack.fetch as fetch
from packtrain.errors import Mistake
from packtrain.pack.fetch import Download, FetchPolicy, local_copy, redirected
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
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
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
        given = {"patience": HASTE, **options}
        return local_copy(path, directory_store, tmp_path / "cache", lambda _text: None, **given)  # type: ignore[arg-type]

    return fetched


def leftovers(copied: Path) -> list[str]:
    return sorted(path.name for path in copied.parent.iterdir() if path != copied)


# Paths.


@pytest.mark.parametrize("path", ["train.de", "/data/train.de", "a:b/c", "./store:x"])
def test_a_local_path_stands_for_itself(path: str, copy: Copy) -> None:
    assert copy(path) == Path(path)


@pytest.mark.parametrize("path", ["file:///etc/passwd", "ftp://host/x", "gopher://x/y", "data://x"])
def test_other_schemes_are_refused(path: str, copy: Copy) -> None:
    with pytest.raises(Mistake, match="cannot be read from"):
        copy(path)


@pytest.mark.parametrize(
    "path",
    [
        "http://", "http:///x", "http://host:notaport/x", "http://host:99999/", "http://[::1/x", "https://a b/",
        "http://host/with space", "http://host/\r\nX: y", "http://" + "a" * 80 + "/", "http://host\\@evil/",
    ],
)  # fmt: skip
def test_impossible_addresses_are_refused_before_anything_is_asked(path: str, copy: Copy) -> None:
    with pytest.raises(Mistake) as caught:
        copy(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["https://me:hunter2@host/x", "s3://key:hunter2@bucket/x", "s3://bucket/x?t=hunter2"])
def test_addresses_with_passwords_are_refused_and_not_repeated(path: str, copy: Copy, no_aws: None) -> None:
    with pytest.raises(Mistake) as caught:
        copy(path)
    assert "hunter2" not in str(caught.value)


# From the web.


def test_a_file_is_fetched_whole_and_keeps_its_ending(web: Web, copy: Copy) -> None:
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    assert copied.name.endswith("-train.de.gz")
    assert leftovers(copied) == []


def test_the_second_time_only_the_version_is_asked_for(web: Web, copy: Copy) -> None:
    first = copy(f"{web.url}/train.de.gz")
    web.asked.clear()
    assert copy(f"{web.url}/train.de.gz") == first
    assert web.methods() == ["HEAD"]


@pytest.mark.parametrize("mark", ["etag", "modified", "size"])
def test_what_changed_is_fetched_again(mark: str, web: Web, copy: Copy) -> None:
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


def test_addresses_that_differ_in_the_query_have_copies_of_their_own(web: Web, copy: Copy) -> None:
    assert copy(f"{web.url}/train.de.gz?part=1") != copy(f"{web.url}/train.de.gz?part=2")


@pytest.mark.parametrize("path", ["/Größe.txt", "/a%20b.txt", "/empty", "/"])
def test_odd_names_and_sizes(path: str, web: Web, copy: Copy) -> None:
    asked = "/Gr%C3%B6%C3%9Fe.txt" if "ö" in path else path
    web.files[asked] = b"" if path == "/empty" else b"text"
    assert copy(web.url + path).read_bytes() == web.files[asked]


def test_a_broken_download_goes_on_where_it_broke(web: Web, copy: Copy) -> None:
    web.plan = ["", "half", "half"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA
    half, rest = len(DATA) // 2, len(DATA) - len(DATA) // 2
    assert web.gets() == ["", f"bytes={half}-", f"bytes={half + rest // 2}-"]


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(web: Web, copy: Copy) -> None:
    web.plan = ["", "half", "503", "503", "503", "503"]
    with pytest.raises(StoreError, match="503"):
        copy(f"{web.url}/train.de.gz")
    web.asked.clear()
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    assert web.gets() == [f"bytes={len(DATA) // 2}-"]
    assert leftovers(copied) == []


def test_a_download_begins_anew_where_the_server_knows_no_ranges(web: Web, copy: Copy) -> None:
    web.ranges = False
    web.plan = ["", "half"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA


def test_a_download_begins_anew_where_nothing_tells_the_version(web: Web, copy: Copy) -> None:
    web.etag = ""
    web.plan = ["", "half"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA
    assert web.gets() == ["", ""]


def test_a_weak_tag_is_no_ground_to_go_on_but_a_date_is(web: Web, copy: Copy) -> None:
    web.etag, web.modified = 'W/"one"', "Mon, 01 Jan 2024 00:00:00 GMT"
    web.plan = ["", "half"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA
    assert web.gets() == ["", f"bytes={len(DATA) // 2}-"]


def test_a_file_that_changes_half_way_is_never_put_together_from_both(web: Web, copy: Copy) -> None:
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


def test_a_server_that_sends_another_part_is_not_believed(web: Web, copy: Copy) -> None:
    web.plan = ["", "half", "other part"]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA


@pytest.mark.parametrize("trouble", ["503", "500", "429", "hang"])
def test_a_server_in_trouble_is_tried_again(trouble: str, web: Web, copy: Copy) -> None:
    web.plan = [trouble, "", trouble]
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA


def test_a_server_that_stays_in_trouble_is_given_up(web: Web, copy: Copy) -> None:
    web.plan = ["503"] * 100
    with pytest.raises(StoreError, match=r"out of order \(503\); try again later") as caught:
        copy(f"{web.url}/train.de.gz?signature=hunter2")
    assert caught.value.temporary
    assert "hunter2" not in str(caught.value)
    assert len(web.asked) == HASTE.tries


def test_breaking_off_without_end_is_given_up_too(web: Web, copy: Copy) -> None:
    web.ranges = False
    web.plan = ["", *["half"] * 100]
    with pytest.raises(StoreError, match="connection broke"):
        copy(f"{web.url}/train.de.gz")
    assert len(web.asked) < 10


def test_no_server_at_all(copy: Copy) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            copy(f"http://127.0.0.1:{taken.getsockname()[1]}/x")
    assert caught.value.temporary


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [(socket.EAI_NONAME, Mistake, "no such host"), (socket.EAI_AGAIN, StoreError, "no name server answers")],
)
def test_a_name_that_cannot_be_found(
    number: int, kind: type[Exception], words: str, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "not found")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(kind, match=words):
        copy("http://nowhere.invalid/x")


@pytest.mark.parametrize(("status", "words"), [(404, "nothing"), (410, "nothing"), (403, "nobody"), (401, "nobody")])
def test_a_refusal_is_the_callers_mistake(status: int, words: str, web: Web, copy: Copy) -> None:
    web.plan = [str(status)] * 9
    with pytest.raises(Mistake, match=rf"{words}.*\({status}\)"):
        copy(f"{web.url}/train.de.gz")
    assert len(web.asked) == 2


@pytest.mark.parametrize("status", ["403", "404", "405", "501"])
def test_a_server_that_only_knows_get(status: str, web: Web, copy: Copy) -> None:
    web.plan = [status]
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    web.plan = [status]
    assert copy(f"{web.url}/train.de.gz") == copied


@pytest.mark.parametrize("ending", ["chunked", "no size"])
def test_a_file_whose_size_nobody_tells(ending: str, web: Web, copy: Copy) -> None:
    web.plan = ["no size", ending]
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    web.plan = ["no size"]
    assert copy(f"{web.url}/train.de.gz") == copied


def test_a_file_of_which_nothing_is_told_is_fetched_each_time(web: Web, copy: Copy) -> None:
    web.etag = ""
    for data in (DATA, DATA[::-1]):
        web.files["/train.de.gz"] = data
        web.plan = ["no size", "chunked"]
        assert copy(f"{web.url}/train.de.gz").read_bytes() == data


def test_a_head_that_tells_another_size_than_get(web: Web, copy: Copy) -> None:
    web.plan = ["empty head"]
    copied = copy(f"{web.url}/train.de.gz")
    assert copied.read_bytes() == DATA
    web.plan = ["empty head"]
    assert copy(f"{web.url}/train.de.gz") == copied


def test_a_file_over_the_limit_is_not_fetched(web: Web, copy: Copy) -> None:
    with pytest.raises(Mistake, match=r"more than 1.0 MB, the most"):
        copy(f"{web.url}/train.de.gz", most_bytes=10**6)
    assert web.methods() == ["HEAD"]


def test_a_file_without_a_size_ends_at_the_limit(web: Web, copy: Copy, tmp_path: Path) -> None:
    web.plan = ["no size", "chunked"]
    with pytest.raises(Mistake, match=r"more than 1.0 MB, the most"):
        copy(f"{web.url}/train.de.gz", most_bytes=10**6)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_that_does_not_fit_on_the_disk_is_not_begun(
    web: Web, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _path: Usage)
    with pytest.raises(Mistake, match=r"3.1 MB are needed and 1.0 kB are free"):
        copy(f"{web.url}/train.de.gz")


def test_a_full_disk_is_said_and_not_tried_again(web: Web, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_self: object, _chunk: bytes) -> None:
        with explained(Path("cache")):
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Download, "_write", write)
    with pytest.raises(StoreError, match="disk is full"):
        copy(f"{web.url}/train.de.gz")
    assert web.methods() == ["HEAD", "GET"]


def test_what_the_server_compresses_unasked_is_refused(web: Web, copy: Copy) -> None:
    web.files["/train.de"] = DATA
    web.extra = {"Content-Encoding": "gzip"}
    with pytest.raises(Mistake, match="compresses it unasked"):
        copy(f"{web.url}/train.de")
    assert copy(f"{web.url}/train.de.gz").read_bytes() == DATA


# Redirections.


def test_redirections_are_followed_each_time_from_the_start(web: Web, copy: Copy) -> None:
    web.plan = ["to /train.de.gz", "", f"to {web.url}/train.de.gz", "half", "to /train.de.gz"]
    copied = copy(f"{web.url}/moved")
    assert copied.read_bytes() == DATA
    assert copied.name.endswith("-moved")
    assert [path for _, path, _ in web.asked] == ["/moved", "/train.de.gz"] * 3


def test_redirections_without_end_are_given_up(web: Web, copy: Copy) -> None:
    with pytest.raises(Mistake, match="redirected more than 5 times"):
        copy(f"{web.url}/loop")
    assert len(web.asked) == 6


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://host/x", "data:text/plain,x", "FILE:/etc/passwd"])
def test_redirections_to_other_schemes_are_refused(place: str, web: Web, copy: Copy) -> None:
    web.plan = [f"to {place}"]
    with pytest.raises(Mistake, match="only http:// and https:// are followed"):
        copy(f"{web.url}/train.de.gz")


def test_redirections_to_addresses_with_passwords_are_refused(web: Web, copy: Copy) -> None:
    web.plan = ["to http://me:hunter2@host/x"]
    with pytest.raises(Mistake) as caught:
        copy(f"{web.url}/train.de.gz")
    assert "hunter2" not in str(caught.value)


def test_redirections_that_give_up_https_are_refused() -> None:
    with pytest.raises(Mistake, match="from https:// to http://"):
        redirected("https://host/a?secret", "http://host/a")
    assert redirected("http://host/a", "https://host/b c") == "https://host/b%20c"


@pytest.mark.parametrize("peer", ["169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "fe80::1%eth0"])
def test_the_services_that_give_machines_their_keys_are_never_asked(
    peer: str, web: Web, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "getpeername", lambda _self: (peer, 80))
    with pytest.raises(Mistake, match="holds no data"):
        copy(f"{web.url}/train.de.gz")
    assert web.asked == []


# Several at once, and what was left behind.


def test_two_that_fetch_the_same_fetch_it_once(web: Web, copy: Copy) -> None:
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


def test_what_others_abandoned_long_ago_is_removed(web: Web, copy: Copy) -> None:
    copied = copy(f"{web.url}/train.de.gz")
    old, young = copied.parent / ".tmp-old", copied.parent / ".tmp-young"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (1, 1))
    web.etag = '"two"'
    copy(f"{web.url}/train.de.gz")
    assert (old.exists(), young.exists()) == (False, True)


def test_progress_is_told_without_the_query(web: Web, directory_store: Store, tmp_path: Path) -> None:
    told: list[str] = []
    web.plan = ["", "half"]
    local_copy(f"{web.url}/train.de.gz?key=hunter2", directory_store, tmp_path, told.append, patience=HASTE)
    shown = f"fetching {web.url}/train.de.gz"
    assert told == [f"{shown} (3.1 MB)", f"{shown}: the connection broke; trying again at 1.5 MB"]


# From stores.


def test_an_object_of_a_directory_is_a_file_already(directory_store: Store, copy: Copy) -> None:
    directory_store.put("raw/train.de", b"text")
    assert copy("store:raw/train.de") == Path(directory_store.url, "raw/train.de")


def test_an_object_of_a_bucket_is_copied(s3_store: Store, tmp_path: Path) -> None:
    s3_store.put("raw/train.de", b"text")
    told: list[str] = []
    first = local_copy("store:raw/train.de", s3_store, tmp_path, told.append)
    again = local_copy("store:raw/train.de", s3_store, tmp_path, told.append)
    assert (first, first.read_bytes()) == (again, b"text")
    assert told == ["fetching store:raw/train.de (4 B)"]


def test_an_s3_address_is_fetched_and_fetched_again_when_it_changed(s3_location: str, copy: Copy) -> None:
    place = open_store(s3_location)
    place.put("raw/train.de.gz", b"text")
    first = copy(f"{s3_location}/raw/train.de.gz")
    assert copy(f"{s3_location}/raw/train.de.gz") == first
    place.put("raw/train.de.gz", b"longer text")
    second = copy(f"{s3_location}/raw/train.de.gz")
    assert (first.read_bytes(), second.read_bytes()) == (b"text", b"longer text")
    assert second.name.endswith("-train.de.gz")


@pytest.mark.parametrize("trouble", [REFUSE, DROP, CUT])
def test_a_bucket_in_trouble_is_tried_again(trouble: str, s3_proxy: Proxy, s3_location: str, copy: Copy) -> None:
    open_store(s3_location).put("train.de", DATA)
    s3_proxy.first(trouble, method="GET")
    assert copy(f"{s3_location}/train.de").read_bytes() == DATA


def test_an_object_that_is_not_there(s3_location: str, copy: Copy) -> None:
    for address in (f"{s3_location}/missing", "store:missing", "s3://no-such-bucket-here/x"):
        with pytest.raises(Mistake):
            copy(address)


@pytest.mark.parametrize("address", ["store:", "store:raw/", "store:../x", "store:/etc/passwd", "s3://bucket/a//b"])
def test_what_names_no_object_is_refused(address: str, copy: Copy, s3_environment: object) -> None:
    with pytest.raises(Mistake, match="must name one object"):
        copy(address)


def test_an_object_over_the_limit_is_not_fetched(s3_location: str, copy: Copy) -> None:
    open_store(s3_location).put("big", DATA)
    with pytest.raises(Mistake, match="the most that is fetched"):
        copy(f"{s3_location}/big", most_bytes=1000)
