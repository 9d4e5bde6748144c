"""Delivery of an exported model: to folders, to real hosts over ssh, and to an S3 server."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, PacktrainError
from packtrain.export.board import BoardDestination
from packtrain.export.deliver import BucketDestination, FolderDestination, Track, deliver, destination_of
from packtrain.export.model import FORMAT, MANIFEST, ModelManifest, Origin, read_manifest
from packtrain.fleet.remote import Remote
from packtrain.run.checkpoint import StoredFile
from packtrain.store import open_store
from packtrain.store.bucket import BucketStore
from packtrain.store.records import encode
from parts.hosts import Host, Network
from parts.s3 import S3Server, fresh_location

LARGE = "ctranslate2/model.bin"
PROGRAMS = (
    "cat",
    "cut",
    "dd",
    "df",
    "find",
    "head",
    "kill",
    "mkdir",
    "mv",
    "readlink",
    "rm",
    "rmdir",
    "sync",
    "tail",
    "tr",
    "wc",
)
_DIGEST = "0" * 64


def write_model(folder: Path, seed: int = 1, kilobytes: int = 300, name: str = LARGE) -> Path:
    """Write a model: its files hold nothing, but their digests are right."""
    contents = {
        "README.md": f"---\nlicense: cc0-1.0\n---\n# A model, number {seed}\n".encode(),
        "job.json": b"{}",
        name: b"".join(hashlib.sha256(f"{seed} {number}".encode()).digest() * 32 for number in range(kilobytes)),
    }
    for one, data in contents.items():
        (folder / one).parent.mkdir(parents=True, exist_ok=True)
        (folder / one).write_bytes(data)
    files = tuple(StoredFile(one, len(data), hashlib.sha256(data).hexdigest()) for one, data in contents.items())
    origin = Origin("en-de-1", ("1",), seed, "en-de", _DIGEST, "0.1.0", 0.0)
    manifest = ModelManifest(FORMAT, "translate", "ctranslate2", "fp32", (), origin, (), {}, files)
    (folder / MANIFEST).write_bytes(encode(manifest))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def is_same(one: Path, other: Path) -> bool:
    return read_manifest(one) == read_manifest(other) and size_of(one) == size_of(other)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def quiet(text: str) -> None:
    pass


def one_line(error: pytest.ExceptionInfo[PacktrainError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# Places.


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("models/mine", FolderDestination),
        ("./odd:name", FolderDestination),
        ("file:///srv/models/mine", FolderDestination),
        ("hf-folder", FolderDestination),
        ("board:models/mine", BoardDestination),
        ("me@board.example:/srv/mine", BoardDestination),
        ("me@[fe80::1]:mine", BoardDestination),
    ],
)
def test_a_place_is_known_by_how_it_is_written(where: str, kind: type) -> None:
    assert isinstance(destination_of(where), kind)


def test_a_bucket_is_known_by_its_url(s3_environment: S3Server) -> None:
    assert isinstance(destination_of("s3://bucket/prefix"), BucketDestination)


@pytest.mark.parametrize(
    "where", ["", " ", "/", "board:", "board:~", "board:/", "board:models/..", "a\nb", "ftp://a/b"]
)
def test_a_place_that_cannot_hold_a_model_is_refused(where: str) -> None:
    with pytest.raises(Mistake):
        destination_of(where)


# Folders.


def test_a_folder_receives_the_model_and_nothing_else(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    sent = deliver(model, str(tmp_path / "far" / "mine"), said.append)
    assert sent == size_of(model)
    assert is_same(tmp_path / "far" / "mine", model)
    assert names_in(tmp_path / "far") == ["mine"]
    assert said == [f"sending 4 files, 308 kB to {tmp_path}/far/mine"]


def test_a_model_that_is_there_is_not_sent_again(model: Path, tmp_path: Path) -> None:
    deliver(model, str(tmp_path / "mine"), quiet)
    said: list[str] = []
    assert deliver(model, str(tmp_path / "mine"), said.append) == 0
    assert "complete" in said[0]


def test_a_model_replaces_another_one(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "mine")
    new = write_model(tmp_path / "new", seed=2)
    deliver(new, str(tmp_path / "mine"), quiet)
    assert is_same(tmp_path / "mine", new)
    assert names_in(tmp_path) == ["mine", "model", "new"]


def test_without_an_exchange_of_names_a_model_is_replaced_in_two_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.export.deliver._exchange", lambda *_: False)
    test_a_model_replaces_another_one(model, tmp_path)


def test_a_folder_that_is_not_a_model_stays(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(Mistake, match="is not a model"):
        deliver(model, str(tmp_path / "mine"), quiet)
    (tmp_path / "mine" / MANIFEST).write_text('{"weights": []}')
    with pytest.raises(Mistake, match="is not that of a model"):
        deliver(model, str(tmp_path / "mine"), quiet)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"


def test_a_model_with_files_of_somebody_else_stays(model: Path, tmp_path: Path) -> None:
    deliver(model, str(tmp_path / "mine"), quiet)
    (tmp_path / "mine" / "start.sh").write_text("exec packtrain serve")
    with pytest.raises(Mistake, match=r"start\.sh there does not belong"):
        deliver(write_model(tmp_path / "new", seed=2), str(tmp_path / "mine"), quiet)
    assert (tmp_path / "mine" / "start.sh").exists()


def test_a_model_that_was_tampered_with_is_not_sent(model: Path, tmp_path: Path) -> None:
    (model / "job.json").write_text("[]")
    with pytest.raises(Mistake, match="digest"):
        deliver(model, str(tmp_path / "mine"), quiet)
    assert not (tmp_path / "mine").exists()


def test_files_and_links_are_not_replaced(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name, fault in (("file", "is a file"), ("link", "symbolic link"), ("file/mine", "Not a directory")):
        with pytest.raises(Mistake, match=fault):
            deliver(model, str(tmp_path / name), quiet)


def test_a_disk_that_is_too_small_is_left_alone(tmp_path: Path, small_disk: Path) -> None:
    model = write_model(tmp_path / "large", kilobytes=2000)
    with pytest.raises(PacktrainError, match=r"disk is full: 2\.0 MB are needed") as error:
        deliver(model, str(small_disk / "mine"), quiet)
    one_line(error)
    assert names_in(small_disk) == []


def test_a_disk_that_fills_up_meanwhile_gets_its_space_back(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.export.deliver.SPARE_BYTES", -(1 << 30))  # as if there were space at first
    with pytest.raises(PacktrainError, match="disk is full; free some space"):
        deliver(write_model(tmp_path / "large", kilobytes=2000), str(small_disk / "mine"), quiet)
    assert names_in(small_disk) == []


# Boards.


@pytest.fixture
def board(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host that this process reaches as a person does: by the ssh of its PATH."""
    monkeypatch.setenv("PATH", f"{network.search_path()}:/usr/sbin:/sbin")
    board = network[0]
    before = set(board.home.iterdir())
    yield board
    for path in set(board.home.iterdir()) - before:
        shutil.rmtree(path)


def made_on(board: Host) -> list[str]:
    """Return what is in its home; what begins with a dot and is no delivery was there before."""
    names = names_in(board.home)
    return [name for name in names if not name.startswith(".") or name.endswith((".delivery", ".old"))]


def test_a_board_receives_the_model(board: Host, model: Path) -> None:
    assert deliver(model, f"{board.name}:models/it's mine", quiet) == size_of(model)
    assert is_same(board.home / "models" / "it's mine", model)
    assert names_in(board.home / "models") == ["it's mine"]
    assert deliver(model, f"{board.name}:models/it's mine", quiet) == 0


def test_a_model_on_a_board_is_replaced(board: Host, model: Path, tmp_path: Path) -> None:
    deliver(model, f"{board.name}:mine", quiet)
    new = write_model(tmp_path / "new", seed=2)
    deliver(new, f"{board.name}:~/mine/", quiet)
    assert is_same(board.home / "mine", new)
    assert made_on(board) == ["mine"]


def test_what_is_not_a_model_stays_on_a_board(board: Host, model: Path) -> None:
    (board.home / "photos").mkdir()
    (board.home / "photos" / "1.jpg").touch()
    (board.home / "odd").mkdir()
    (board.home / "odd" / "link").symlink_to("/root/photos")
    for where, fault in {
        "photos": "is not a model",
        "photos/1.jpg": "is a file",
        "photos/1.jpg/mine": "a part of the path is a file",
        "odd/link": "symbolic link",
        "/proc/mine": "cannot create directory|permission denied|No such file",
    }.items():
        with pytest.raises(Mistake, match=fault) as error:
            deliver(model, f"{board.name}:{where}", quiet)
        assert one_line(error).startswith(f"{board.name}:")
    assert names_in(board.home / "photos") == ["1.jpg"]


@pytest.mark.parametrize("tool", ["sha256sum", "openssl", "python3"])
def test_a_board_needs_only_a_shell_and_one_program_for_digests(
    board: Host, model: Path, tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other programs are those of busybox, whose shell has a sha256sum of its own; dash has none."""
    programs = board.root / "opt" / tool
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        (programs / name).symlink_to("/usr/bin/busybox")
    (programs / "sh").symlink_to("/usr/bin/busybox" if tool == "sha256sum" else "/usr/bin/dash")
    if tool != "sha256sum":
        (programs / tool).symlink_to(f"/usr/bin/{tool}")
    monkeypatch.setattr("packtrain.export.board.Remote", partial(Remote, variables=(("PATH", f"/opt/{tool}"),)))
    deliver(model, f"{board.name}:mine", quiet)
    new = write_model(tmp_path / "new", seed=2)
    deliver(new, f"{board.name}:mine", quiet)
    assert is_same(board.home / "mine", new)
    assert made_on(board) == ["mine"]


def test_a_greeting_of_the_board_does_no_harm(board: Host, model: Path) -> None:
    (board.home / ".bashrc").write_text("echo 'Welcome!'; echo done; echo 'altered job.json'\n")
    try:
        deliver(model, f"{board.name}:mine", quiet)
    finally:
        (board.home / ".bashrc").unlink()
    assert is_same(board.home / "mine", model)


def test_a_board_behind_a_jump_host_is_reached_by_the_persons_own_configuration(
    network: Network, board: Host, model: Path
) -> None:
    before = network.ssh_config.read_text()
    own = before[before.index(f"Host {board.name}\n") : before.index(f"Host {network[1].name}\n")]
    network.ssh_config.write_text(f"{before}{own.replace(board.name, 'far', 1)}  ProxyJump {network[1].name}\n")
    board.run(["ip", "route", "add", "blackhole", f"{network.gateway}/32"])  # its answers do not find this computer
    try:
        deliver(model, "root@far:mine", quiet)
    finally:
        board.run(["ip", "route", "del", "blackhole", f"{network.gateway}/32"])
        network.ssh_config.write_text(before)
    assert is_same(board.home / "mine", model)


def when_moved(least_bytes: int, act: Callable[[], object]) -> Track:
    """Return what calls `act` once, when so many bytes of a delivery have gone."""
    total, done = 0, False

    def advance(count: int) -> None:
        nonlocal total, done
        total += count
        if total >= least_bytes and not done:
            done = True
            act()

    @contextmanager
    def track(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        yield advance

    return track


@pytest.fixture
def slow_link(board: Host) -> Iterator[None]:
    board.rate(20e6)
    yield
    board.rate(None)


@pytest.mark.usefixtures("slow_link")
def test_a_delivery_continues_by_itself_when_the_connection_breaks(board: Host, tmp_path: Path) -> None:
    model = write_model(tmp_path / "large", kilobytes=12_000)

    def break_connection() -> None:
        for process in board.processes():
            with suppress(psutil.NoSuchProcess):
                if process.name() == "sshd":
                    process.kill()

    said: list[str] = []
    pauses = Backoff(0.01, 0.1, limit_seconds=20)
    sent = deliver(model, f"{board.name}:mine", said.append, when_moved(5_000_000, break_connection), pauses)
    assert is_same(board.home / "mine", model)
    assert [line.partition(" ")[0] for line in said] == ["sending", f"{board.name}:", "sending"]
    assert "connection lost" in said[1]
    assert "are there" in said[2]
    assert sent < 1.6 * size_of(model), said  # the rest of it, not all of it, was sent again


@pytest.mark.usefixtures("slow_link")
def test_after_a_cut_cable_the_same_command_continues(
    board: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=2", "-o", "ServerAliveInterval=1")
    monkeypatch.setattr("packtrain.fleet.remote._OPTIONS", impatient)
    model = write_model(tmp_path / "large", kilobytes=12_000)
    try:
        with pytest.raises(PacktrainError, match="run the same command again to continue") as error:
            pauses = Backoff(0.01, 0.1, limit_seconds=0.1)
            deliver(model, f"{board.name}:mine", quiet, when_moved(5_000_000, board.cut), pauses)
        assert one_line(error).startswith(f"{board.name}: connection lost")
    finally:
        board.restore()
    assert made_on(board) == [".mine.delivery"]
    arrived = size_of(board.home / ".mine.delivery")
    assert arrived > 1_000_000
    sent = deliver(model, f"{board.name}:mine", quiet)
    assert sent <= size_of(model) - arrived + 1000
    assert is_same(board.home / "mine", model)
    assert made_on(board) == ["mine"]


def test_what_another_model_has_left_is_not_continued(board: Host, model: Path, tmp_path: Path) -> None:
    stage = board.home / ".mine.delivery"
    (stage / "ctranslate2").mkdir(parents=True)
    (stage / "job.json").write_bytes((model / "job.json").read_bytes())
    (stage / LARGE).write_bytes((write_model(tmp_path / "other", seed=2) / LARGE).read_bytes()[:1000])
    (stage / "old.onnx").write_bytes(b"old")
    assert deliver(model, f"{board.name}:mine", quiet) == size_of(model) - 2  # all but job.json
    assert is_same(board.home / "mine", model)


def test_a_model_that_is_altered_on_its_way_never_appears(board: Host, model: Path) -> None:
    bad = board.root / "usr/local/bin/cat"
    bad.write_text("#!/bin/sh\nexec tr a b\n")
    bad.chmod(0o755)
    said: list[str] = []
    try:
        with pytest.raises(PacktrainError, match="arrives altered") as error:
            deliver(model, f"{board.name}:mine", said.append)
    finally:
        bad.unlink()
    assert "check the disk" in one_line(error)
    assert any("sending it again" in line for line in said)
    assert not (board.home / "mine").exists()
    deliver(model, f"{board.name}:mine", quiet)
    assert is_same(board.home / "mine", model)


@contextmanager
def disk_on(board: Host, options: str) -> Iterator[Path]:
    board.run(["mkdir", "/root/disk"])
    assert board.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/root/disk"]).returncode == 0
    try:
        yield board.root / "root/disk"
    finally:
        board.run(["umount", "/root/disk"])


def test_a_board_whose_disk_is_full_is_left_as_it_was(
    board: Host, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk_on(board, "size=100k") as disk:
        with pytest.raises(PacktrainError, match="disk is full: 308 kB are needed, and") as error:
            deliver(model, f"{board.name}:disk/mine", quiet)
        one_line(error)
        assert names_in(disk) == []
        monkeypatch.setattr("packtrain.export.board.SPARE_BYTES", -(1 << 30))  # as if others had written meanwhile
        with pytest.raises(PacktrainError, match="disk is full; free some space there") as error:
            deliver(model, f"{board.name}:disk/mine", quiet)
        one_line(error)
        assert names_in(disk) == []


def test_a_directory_that_cannot_be_written_is_refused(board: Host, model: Path) -> None:
    with disk_on(board, "ro"), pytest.raises(Mistake, match="permission denied; choose a directory"):
        deliver(model, f"{board.name}:disk/mine", quiet)


def test_a_host_that_is_unknown_or_is_another_one_is_refused(network: Network, board: Host, model: Path) -> None:
    with pytest.raises(Mistake, match="unknown host name"):
        deliver(model, "no-such-host.invalid:mine", quiet)
    before = network.ssh_config.read_text()
    network.ssh_config.write_text(before.replace(f"HostKeyAlias {board.name}\n", f"HostKeyAlias {network[1].name}\n"))
    try:
        with pytest.raises(Mistake, match="host key has changed"):
            deliver(model, f"{board.name}:mine", quiet)
    finally:
        network.ssh_config.write_text(before)


# Buckets.


def test_a_bucket_receives_the_model(s3_environment: S3Server, model: Path) -> None:
    where = fresh_location()
    assert deliver(model, where, quiet) == size_of(model)
    store = open_store(where)
    assert sorted(entry.key for entry in store.list()) == sorted([LARGE, "README.md", "job.json", MANIFEST])
    assert store.get(LARGE) == (model / LARGE).read_bytes()
    assert deliver(model, where, quiet) == 0


def test_a_model_in_a_bucket_is_replaced_with_all_its_files(
    s3_environment: S3Server, model: Path, tmp_path: Path
) -> None:
    where, old = fresh_location(), write_model(tmp_path / "old", seed=2, name="onnx/decoder.onnx")
    deliver(old, where, quiet)
    deliver(model, where, quiet)
    assert sorted(entry.key for entry in open_store(where).list()) == sorted([LARGE, "README.md", "job.json", MANIFEST])


def test_a_delivery_to_a_bucket_continues_with_the_files_that_are_missing(
    s3_environment: S3Server, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = fresh_location()
    put_file = BucketStore.put_file

    def failing(store: BucketStore, key: str, path: Path) -> None:
        if key == LARGE:
            raise KeyboardInterrupt
        put_file(store, key, path)

    with monkeypatch.context() as broken:
        broken.setattr(BucketStore, "put_file", failing)
        with pytest.raises(KeyboardInterrupt):
            deliver(model, where, quiet)
    assert not open_store(where).exists(MANIFEST)
    sizes = [(model / name).stat().st_size for name in (LARGE, MANIFEST)]
    assert deliver(model, where, quiet) == sum(sizes)


def test_an_object_that_is_altered_on_its_way_is_found(
    s3_environment: S3Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, put_file = fresh_location(), BucketStore.put_file
    other = tmp_path / "other"
    other.write_bytes(bytes((model / LARGE).stat().st_size))
    monkeypatch.setattr(
        BucketStore, "put_file", lambda store, key, path: put_file(store, key, other if key == LARGE else path)
    )
    with pytest.raises(PacktrainError, match="arrives altered"):
        deliver(model, where, quiet)
    assert not open_store(where).exists(MANIFEST)


def test_a_prefix_with_other_objects_is_left_alone(s3_environment: S3Server, model: Path) -> None:
    where = fresh_location()
    open_store(where).put("runs/en-de-1/job.json", b"{}")
    with pytest.raises(Mistake, match="is not a model"):
        deliver(model, where, quiet)
    assert [entry.key for entry in open_store(where).list()] == ["runs/en-de-1/job.json"]
