"""The data of a program: from the person's machine or a bucket to every machine of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.run.inputs import keys_of, put_input, staged
from packtrain.store import DamagedObject, Store
from parts.runs import read_files, write_files


def quiet(_: str) -> None:
    pass


def test_a_folder_arrives_as_it_is_and_is_stored_once(any_store: Store, tmp_path: Path) -> None:
    files = {"a.txt": b"same", "deep/b.txt": b"same", "c.bin": bytes(1000), "empty": b""}
    write_files(tmp_path / "corpus", files)
    (tmp_path / "corpus/deep/loop").symlink_to(tmp_path / "corpus")
    address = put_input(any_store, tmp_path / "corpus", quiet)
    path = staged(address, any_store, tmp_path / "cache")
    assert path.name == "corpus"
    assert read_files(path) == files
    before = [entry.key for entry in any_store.list("files/")]
    assert sorted(keys_of(any_store, address)) == before
    assert len(before) == 4, "three contents and the listing"
    assert put_input(any_store, tmp_path / "corpus", quiet) == address
    assert staged(address, any_store, tmp_path / "cache") == path


def test_a_single_file_is_data_too(directory_store: Store, tmp_path: Path) -> None:
    write_files(tmp_path, {"corpus.txt": b"text"})
    address = put_input(directory_store, tmp_path / "corpus.txt", quiet)
    assert staged(address, directory_store, tmp_path / "cache").read_bytes() == b"text"
    assert staged(str(tmp_path / "corpus.txt"), directory_store, tmp_path / "cache") == tmp_path / "corpus.txt"


def test_data_that_is_damaged_in_the_store_or_not_on_this_machine_is_refused(
    directory_store: Store, tmp_path: Path
) -> None:
    write_files(tmp_path, {"corpus.txt": b"text"})
    address = put_input(directory_store, tmp_path / "corpus.txt", quiet)
    listing, file = keys_of(directory_store, address)
    directory_store.put(file, b"tex!")
    with pytest.raises(DamagedObject, match="does not match its digest"):
        staged(address, directory_store, tmp_path / "cache")
    directory_store.put(listing, directory_store.get(listing).replace(b"corpus.txt", b"../../etc"))
    with pytest.raises(DamagedObject, match="does not match its digest"):
        staged(address, directory_store, tmp_path / "cache")
    with pytest.raises(Mistake, match="is not on this machine"):
        staged(str(tmp_path / "gone"), directory_store, tmp_path / "cache")


def test_a_bucket_is_fetched_and_what_changed_there_is_fetched_again(s3_store: Store, tmp_path: Path) -> None:
    s3_store.put("corpus/a.txt", b"1")
    s3_store.put("corpus/deep/b.txt", b"2")
    address = f"{s3_store.url}/corpus"
    path = staged(address, s3_store, tmp_path / "cache")
    assert read_files(path) == {"a.txt": b"1", "deep/b.txt": b"2"}
    s3_store.put("corpus/a.txt", b"other")
    assert read_files(staged(address, s3_store, tmp_path / "cache"))["a.txt"] == b"other"
    with pytest.raises(Mistake, match="no objects there"):
        staged(f"{s3_store.url}/nothing", s3_store, tmp_path / "cache")
