from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from packtrain.errors import Mistake
from packtrain.store import StoreError
from packtrain.store.errors import explained
from packtrain.system import (
    COMPILED,
    cache_directory,
    expanded,
    in_home,
    keep_compiled_code,
    machine_id,
    readable_cache,
    state_directory,
    usable_cores,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "shared" / "my cache"))
    return tmp_path / "shared" / "my cache"


def test_the_cache_is_private_also_if_it_was_readable_before(cache: Path) -> None:
    assert cache_directory() == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o755)
    cache_directory()
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode", "advice"),
    [(0o777, "run `chmod 700 '{cache}'`, or "), (0o770, "run `chmod 700 '{cache}'`, or "), (0o1777, "")],
)
def test_a_cache_that_others_can_write_to_is_refused(cache: Path, mode: int, advice: str) -> None:
    cache_directory().chmod(mode)
    with pytest.raises(Mistake) as refused:
        cache_directory()
    assert str(refused.value) == (
        f"{cache}: other users can write to it; {advice.format(cache=cache)}"
        "set PACKTRAIN_CACHE to a directory of your own"
    )


def test_a_cache_of_another_user_is_refused(needs_root: None, cache: Path) -> None:
    os.chown(cache_directory(), 12345, 12345)
    with pytest.raises(Mistake, match="belongs to another user; set PACKTRAIN_CACHE to a directory of your own"):
        cache_directory()


def test_a_cache_that_cannot_be_created_is_refused_and_not_there_for_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    assert not readable_cache().exists()
    with pytest.raises(Mistake, match="file/cache: cannot write to this directory; set PACKTRAIN_CACHE to one of your"):
        cache_directory()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files of a user who cannot write to a home directory."""
    (tmp_path / "home").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("PACKTRAIN_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_without_a_home_that_can_be_written_cache_and_state_are_temporary_and_private(temporary: Path) -> None:
    place = temporary / f"packtrain-{os.geteuid()}"
    assert cache_directory() == place / ".cache" / "packtrain"
    assert state_directory() == place / ".local" / "state" / "packtrain"
    assert [path.stat().st_mode & 0o777 for path in (place, cache_directory(), state_directory())] == [0o700] * 3


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_temporary_place_that_is_not_of_this_user_alone_is_refused(kind: str, temporary: Path) -> None:
    place = temporary / f"packtrain-{os.geteuid()}"
    if kind == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(temporary / "elsewhere")
    elif kind == "open":
        place.mkdir(mode=0o755)
    else:
        place.touch(mode=0o600)
    for directory, variable in ((cache_directory, "PACKTRAIN_CACHE"), (state_directory, "XDG_STATE_HOME")):
        with pytest.raises(
            Mistake, match=rf"{place}: is not a directory that only .*; remove it, or set {variable} to"
        ):
            directory()


def test_a_temporary_place_of_another_user_is_refused(needs_root: None, temporary: Path) -> None:
    (temporary / f"packtrain-{os.geteuid()}").mkdir(mode=0o700)
    os.chown(temporary / f"packtrain-{os.geteuid()}", 12345, 12345)
    with pytest.raises(Mistake, match="is not a directory that only this user can read"):
        cache_directory()


def test_a_user_whom_the_system_does_not_know_has_no_home(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> NoReturn:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert cache_directory().is_relative_to(temporary)
    assert not in_home(".ssh").parent.is_dir()
    assert expanded("/data") == Path("/data")
    with pytest.raises(Mistake, match="~/data: this user has no home directory; set HOME, or use an absolute path"):
        expanded("~/data")


@pytest.mark.usefixtures("temporary")
def test_torch_keeps_what_it_compiles_in_the_cache_unless_the_user_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/scratch"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == cache_directory() / COMPILED / machine_id()


def test_a_full_disk_names_the_variable_that_moves_what_is_on_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for place, told in (
        (cache / "packs", "set PACKTRAIN_CACHE to a directory on another disk"),
        (tmp_path / "packtrain-export-abc" / "model.safetensors", "set TMPDIR to a directory on another disk"),
        (tmp_path / "store", "another store"),
    ):
        with pytest.raises(StoreError, match=told), explained(place):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_container_has_the_cores_of_its_limit(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path) == (limit or len(os.sched_getaffinity(0)))
