from __future__ import annotations

from pathlib import Path

import pytest

from data.handmade import NAME, Remote, put_file, put_pack
from packtrain.data.pack import Pack
from packtrain.errors import NotFound, PacktrainError
from packtrain.pack.manifest import Manifest, pack_key
from packtrain.pack.vocabulary import Vocabulary
from packtrain.store import Store

ROWS = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "store")


def rows_of(opened: Pack) -> list[list[int]]:
    column = opened.split("train").column("tokens")
    return [column[number].tolist() for number in range(len(column))]


def with_vocabulary(store: Store, name: str, text: str) -> Manifest:
    """The pack again, with a vocabulary learned from the text."""
    file = put_file(store, f"{name}.json", Vocabulary.fit([text] * 3, 300).to_json().encode())
    manifest = put_pack(store, ROWS, 2)
    changed = Manifest(**{**vars(manifest), name: file, "vocabulary": manifest.vocabulary or file})
    store.put(pack_key(NAME, "manifest.json"), changed.to_json())
    return changed


def test_a_split_is_what_was_packed(any_store: Store, tmp_path: Path) -> None:
    put_pack(any_store, ROWS, 2)
    assert rows_of(Pack(any_store, NAME, tmp_path / "cache")) == ROWS


def test_a_split_that_the_pack_does_not_have_is_named(directory_store: Store, tmp_path: Path) -> None:
    put_pack(directory_store, ROWS, 2)
    with pytest.raises(NotFound, match=f"^pack {NAME} has no split 'test'; it has train$"):
        Pack(directory_store, NAME, tmp_path / "cache").split("test")


def test_files_are_fetched_once_for_all_who_use_the_cache(remote: Remote, tmp_path: Path) -> None:
    with_vocabulary(remote, "vocabulary", "hello")
    for _ in range(3):
        opened = Pack(remote, NAME, tmp_path / "cache")
        assert rows_of(opened) == ROWS
        assert len(opened.vocabulary) > 256
    assert sorted(remote.fetched) == ["train-00000", "train-00001", "train-00002", "vocabulary.json"]


def test_nothing_is_fetched_before_it_is_asked_for(remote: Remote, tmp_path: Path) -> None:
    put_pack(remote, ROWS, 2)
    assert len(Pack(remote, NAME, tmp_path / "cache").split("train")) == len(ROWS)
    assert remote.fetched == []


def test_a_directory_is_read_where_it_is(directory_store: Store, tmp_path: Path) -> None:
    manifest = put_pack(directory_store, ROWS, 2)
    assert rows_of(Pack(directory_store, NAME, tmp_path / "cache")) == ROWS
    assert not any((tmp_path / "cache" / shard.sha256).exists() for shard in manifest.splits["train"].shards)


@pytest.mark.parametrize("name", ["train-00001", "vocabulary.json"])
def test_a_file_that_is_damaged_in_the_store_is_named(any_store: Store, tmp_path: Path, name: str) -> None:
    with_vocabulary(any_store, "vocabulary", "hello")
    data = any_store.get(pack_key(NAME, name))
    any_store.put(pack_key(NAME, name), bytes([data[0] ^ 1]) + data[1:])
    opened = Pack(any_store, NAME, tmp_path / "cache")
    with pytest.raises(PacktrainError) as refused:
        print(rows_of(opened), opened.vocabulary)
    assert str(refused.value).startswith(f"{name} of pack {NAME} in {any_store.url} does not have the hash it should")
    assert str(refused.value).endswith("pack again")


def test_a_pack_that_is_open_stays_in_the_cache(remote: Remote, tmp_path: Path) -> None:
    manifest = put_pack(remote, ROWS, 2)
    opened, other = (Pack(remote, NAME, tmp_path / "cache", cache_bytes=1) for _ in range(2))
    for _ in range(2):
        assert rows_of(opened) == rows_of(other) == ROWS
    assert sorted(remote.fetched) == [shard.name for shard in manifest.splits["train"].shards]


def test_both_sides_share_a_vocabulary_unless_the_target_has_its_own(directory_store: Store, tmp_path: Path) -> None:
    with_vocabulary(directory_store, "vocabulary", "hello")
    shared = Pack(directory_store, NAME, tmp_path / "cache")
    assert shared.target_vocabulary is shared.vocabulary
    with_vocabulary(directory_store, "target_vocabulary", "hallo")
    own = Pack(directory_store, NAME, tmp_path / "cache")
    assert own.target_vocabulary.decode(own.target_vocabulary.encode(["hallo"])) == ["hallo"]
    assert own.target_vocabulary is not own.vocabulary


def test_a_pack_without_a_vocabulary_says_what_it_has(directory_store: Store, tmp_path: Path) -> None:
    put_pack(directory_store, ROWS, 2)
    with pytest.raises(PacktrainError, match=f"^pack {NAME} has no vocabulary: it has pairs$"):
        print(Pack(directory_store, NAME, tmp_path / "cache").vocabulary)


def test_a_pack_that_is_not_there_is_refused(directory_store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no pack nothing-0123"):
        Pack(directory_store, "nothing-0123", tmp_path)
