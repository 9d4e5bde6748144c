"""Locations as people write them, valid and invalid."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.errors import EXIT_NOT_FOUND, Mistake
from packtrain.store import StoreAway, default_store, open_store, store_option, stores_nearby
from parts.s3 import BUCKET
from parts.stores import keys, output_of, python


def test_a_directory_store_has_an_absolute_url_and_is_made_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("new/store")
    assert store.is_directory
    assert store.url == str(tmp_path / "new/store")
    for use in (store.list, lambda: store.get("a"), lambda: store.put("a", b"1")):
        with pytest.raises(StoreAway, match="no store here; check the path and its mount; `packtrain run`") as caught:
            use()
        assert caught.value.exit_code == EXIT_NOT_FOUND
    assert not (tmp_path / "new").exists()
    open_store("new/store", create=True)
    assert (store.list(), store.folders("")) == ([], [])
    store.put("a", b"1")
    assert open_store(f"file://{tmp_path}/new/store").get("a") == b"1"
    assert open_store((tmp_path / "new/store").as_uri().replace("new", "%6eew")).get("a") == b"1"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a store and the current directory two levels below it."""
    monkeypatch.delenv("PACKTRAIN_STORE", raising=False)
    open_store(str(tmp_path / "project/store"), create=True)
    (tmp_path / "project/a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project/a/b")
    return tmp_path / "project"


def test_without_a_store_here_the_default_is_the_nearest_one_above(project: Path) -> None:
    assert default_store() == str(project / "store")
    open_store(str(project / "a/store"), create=True)
    assert default_store() == str(project / "a/store")
    Path("store").mkdir()  # also if it is no store: the error then says what is wrong with it
    assert default_store() == "./store"


def test_a_variable_names_the_default_store(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_STORE", "s3://bucket/prefix")
    assert default_store() == "s3://bucket/prefix"
    monkeypatch.setenv("PACKTRAIN_STORE", "")
    assert default_store() == str(project / "store")


def test_a_store_of_another_user_above_is_not_the_default(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: project.stat().st_uid + 1)
    assert (default_store(), stores_nearby()) == ("./store", [])


def test_a_directory_that_is_gone_has_no_stores_above(project: Path) -> None:
    (project / "a/b").rmdir()
    assert (default_store(), stores_nearby()) == ("./store", [])


def test_a_command_names_its_store_only_where_it_would_use_another_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(project / "store"))
    assert store_option(store) == []
    monkeypatch.chdir(project)
    assert store_option(store) == []
    open_store(str(project / "a/store"), create=True)
    monkeypatch.chdir(project / "a/b")
    assert store_option(store) == ["--store", str(project / "store")]


def test_stores_nearby_are_those_above_and_directly_below_the_nearest_first(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/store", "z/store", "c/d/store"):
        open_store(str(project / name), create=True)
    monkeypatch.chdir(project)
    assert [store.url for store in stores_nearby()] == [str(project / name) for name in ("store", "a/store", "z/store")]


@pytest.mark.usefixtures("s3_environment")
def test_a_bucket_store_has_the_url_it_was_opened_with() -> None:
    store = open_store(f"s3://{BUCKET}/some/prefix/")
    assert not store.is_directory
    assert store.url == f"s3://{BUCKET}/some/prefix"


def test_stores_under_different_prefixes_of_a_bucket_are_separate(s3_location: str) -> None:
    one, other = open_store(s3_location + "/one"), open_store(s3_location + "/one-more")
    one.put("a", b"1")
    assert keys(other) == []
    assert keys(open_store(s3_location)) == ["one/a"]


@pytest.mark.parametrize(
    ("location", "advice"),
    [
        ("", "location is empty"),
        ("ftp://bucket", "ftp:// is not supported; use a directory, or s3://, gs:// or az://bucket/prefix"),
        ("http://127.0.0.1:9000/bucket", "AWS_ENDPOINT_URL"),
        ("file://host/path", "three slashes"),
        ("s3://", "invalid bucket name"),
        ("s3://B/prefix", "invalid bucket name"),
        ("s3://bucket/a//b", "invalid prefix"),
        ("s3://bucket/../b", "invalid prefix"),
        ("s3://bucket/a\nb", "contains a control character"),
        ("a\nb", "contains a control character"),
        ("file:///a%0Ab", "contains a control character"),
        ("/a\x1b[2Jb", "contains a control character"),
    ],
)
@pytest.mark.usefixtures("s3_environment")
def test_an_invalid_location_is_refused_with_advice(location: str, advice: str) -> None:
    with pytest.raises(Mistake, match=advice):
        open_store(location)


def test_a_relative_location_in_a_directory_with_a_line_break_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a\nb").mkdir()
    monkeypatch.chdir(tmp_path / "a\nb")
    with pytest.raises(Mistake, match="contains a control character"):
        open_store("store")


def test_a_file_is_refused_as_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Mistake, match="file: is a file, and a store is a directory"):
        open_store(str(tmp_path / "file"))


@pytest.mark.parametrize("location", ["s3://AK:canary@bucket/x", "file://u:canary@h/x", "s3://b?key=canary"])
def test_keys_in_a_url_are_refused_without_repeating_them(location: str) -> None:
    with pytest.raises(Mistake, match="must not contain keys") as caught:
        open_store(location)
    assert "canary" not in str(caught.value)


@pytest.mark.usefixtures("processes")
def test_importing_the_package_does_not_import_obstore() -> None:
    code = "import sys, packtrain.store; print('obstore' in sys.modules)"
    assert output_of(python(code)) == "False"
