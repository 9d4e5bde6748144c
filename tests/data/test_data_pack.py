from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pack.corpus import GREETINGS, QUESTIONS, job_of
from packtrain.data.pack import Pack
from packtrain.errors import NotFound, PacktrainError
from packtrain.pack import text
from packtrain.pack.manifest import pack_key
from packtrain.pack.packing import pack
from packtrain.store import Store


def packed(store: Store, folder: Path) -> str:
    return pack(job_of(folder), store, lambda _: None).name


def spelled(opened: Pack, split: str, column: str) -> list[str]:
    return opened.vocabulary.decode([row.tolist() for row in opened.columns(split)[column]])


@pytest.fixture
def fetched(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were brought from the store, as they are brought."""
    names: list[str] = []
    get_file = directory_store.get_file

    def noted(key: str, path: Path) -> None:
        names.append(key.rpartition("/")[2])
        get_file(key, path)

    monkeypatch.setattr(directory_store, "get_file", noted)
    return names


def test_the_columns_of_a_split_are_what_was_packed(any_store: Store, tmp_path: Path) -> None:
    opened = Pack(any_store, packed(any_store, tmp_path), tmp_path / "cache")
    assert spelled(opened, "train", "source") == [source for source, _ in GREETINGS]
    assert spelled(opened, "train", "target") == [target for _, target in GREETINGS]
    assert spelled(opened, "valid", "source") == [source for source, _ in QUESTIONS]


def test_a_split_that_the_pack_does_not_have_has_no_columns(directory_store: Store, tmp_path: Path) -> None:
    assert Pack(directory_store, packed(directory_store, tmp_path), tmp_path / "cache").columns("test") == {}


def test_files_are_fetched_once_for_all_who_use_the_directory(
    directory_store: Store, tmp_path: Path, fetched: list[str]
) -> None:
    name = packed(directory_store, tmp_path)
    for _ in range(3):
        opened = Pack(directory_store, name, tmp_path / "cache")
        assert len(opened.columns("train")["source"]) == len(GREETINGS)
        assert len(opened.vocabulary) > 256
    assert sorted(fetched) == ["train-00000.safetensors", "vocabulary.json"]


def test_nothing_is_fetched_before_it_is_asked_for(directory_store: Store, tmp_path: Path, fetched: list[str]) -> None:
    opened = Pack(directory_store, packed(directory_store, tmp_path), tmp_path / "cache")
    assert opened.manifest.splits["valid"].samples == len(QUESTIONS)
    assert fetched == []
    opened.columns("valid")
    assert fetched == ["valid-00000.safetensors"]


def test_a_damaged_copy_is_fetched_again(directory_store: Store, tmp_path: Path, fetched: list[str]) -> None:
    name = packed(directory_store, tmp_path)
    Pack(directory_store, name, tmp_path / "cache").columns("train")
    copy = tmp_path / "cache" / name / "train-00000.safetensors"
    copy.write_bytes(copy.read_bytes()[:-1] + b"\xff")
    opened = Pack(directory_store, name, tmp_path / "cache")
    assert spelled(opened, "train", "source") == [source for source, _ in GREETINGS]
    assert fetched.count("train-00000.safetensors") == 2


@pytest.mark.parametrize("file", ["train-00000.safetensors", "vocabulary.json"])
def test_a_file_that_is_damaged_in_the_store_is_named(any_store: Store, tmp_path: Path, file: str) -> None:
    name = packed(any_store, tmp_path)
    data = any_store.get(pack_key(name, file))
    any_store.put(pack_key(name, file), bytes([data[0] ^ 1]) + data[1:])
    opened = Pack(any_store, name, tmp_path / "cache")
    with pytest.raises(PacktrainError) as refused:
        spelled(opened, "train", "source")
    assert str(refused.value).startswith(f"{file} of pack {name} in {any_store.url} does not have the hash it should")
    assert str(refused.value).endswith("pack again")


def test_the_shards_of_a_split_are_joined(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_SHARD_SAMPLES", 3)
    opened = Pack(directory_store, packed(directory_store, tmp_path), tmp_path / "cache")
    assert [shard.samples for shard in opened.manifest.splits["train"].shards] == [3, 3, 2]
    column = opened.columns("train")["target"]
    assert len(column) == len(GREETINGS)
    assert column.offsets[-1] == len(column.values)
    assert (column.lengths == np.diff(column.offsets)).all()
    assert spelled(opened, "train", "target") == [target for _, target in GREETINGS]
    assert spelled(opened, "train", "source") == [source for source, _ in GREETINGS]


def test_a_pack_that_is_not_there_is_refused(directory_store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no pack nothing-0123"):
        Pack(directory_store, "nothing-0123", tmp_path)
