from __future__ import annotations

import json
from dataclasses import replace

import pytest

from packtrain.errors import EXIT_NOT_FOUND, NotFound, PacktrainError
from packtrain.pack.manifest import (
    FORMAT,
    Drops,
    Manifest,
    PackFile,
    ShardFile,
    Split,
    find_manifest,
    pack_key,
    read_manifest,
)
from packtrain.store import Store

SHARD = ShardFile("train-00000.safetensors", 99, "f" * 64, 3)
MANIFEST = Manifest(
    FORMAT,
    "toy-0123",
    "pairs",
    {"vocabulary": 300, "splits": {"train": [["bitext", "ab"]]}},
    {"train": Split(3, {"one side is empty": Drops(2, ("a:1",))}, {}, (3,), (SHARD,))},
    (),
    PackFile("vocabulary.json", 7, "e" * 64),
)


def stored(store: Store, data: bytes) -> None:
    store.put(pack_key("toy-0123", "manifest.json"), data)


def test_a_manifest_round_trips(any_store: Store) -> None:
    stored(any_store, MANIFEST.to_json())
    assert find_manifest(any_store, "toy-0123") == MANIFEST
    assert read_manifest(any_store, "toy-0123") == MANIFEST


@pytest.mark.parametrize(
    "change",
    [{"bytes": 10**30}, {"bytes": 2**62}, {"bytes": -1}, {"bytes": "99"}, {"sha256": "../x"}, {"samples": -3}],
    ids=str,
)
def test_an_impossible_file_is_refused(directory_store: Store, change: dict[str, object]) -> None:
    """A cache makes room for as many bytes as a manifest says."""
    document = json.loads(MANIFEST.to_json())
    document["splits"]["train"]["shards"][0] |= change
    stored(directory_store, json.dumps(document).encode())
    with pytest.raises(PacktrainError, match=r"^the manifest of pack toy-0123 in .* is damaged; delete it and pack"):
        find_manifest(directory_store, "toy-0123")


def test_a_pack_without_a_manifest_is_not_found(directory_store: Store) -> None:
    directory_store.put(pack_key("toy-0123", "train-00000.safetensors"), b"data")
    assert find_manifest(directory_store, "toy-0123") is None
    with pytest.raises(NotFound, match=r"pack toy-0123 not found in .*; make it with `packtrain pack JOB`") as refused:
        read_manifest(directory_store, "toy-0123")
    assert refused.value.exit_code == EXIT_NOT_FOUND


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00\xff", id="not JSON"),
        pytest.param(MANIFEST.to_json()[:-20], id="cut off"),
        pytest.param(b"[]", id="a list"),
        pytest.param(MANIFEST.to_json().replace(b'"samples": 3', b'"samples": "many"'), id="a word for a number"),
        pytest.param(MANIFEST.to_json().replace(b'"sha256"', b'"md5"'), id="without hashes"),
        pytest.param(b"[" * 100_000, id="a nest without end"),
        pytest.param(MANIFEST.to_json().replace(b'"bytes": 99', b'"bytes": -1'), id="a negative size"),
        pytest.param(MANIFEST.to_json().replace(b'"name": "toy-0123"', b'"name": "toy-4567"'), id="of another pack"),
        pytest.param(replace(MANIFEST, splits={}).to_json(), id="without training samples"),
        pytest.param(
            replace(MANIFEST, splits={"train": replace(MANIFEST.splits["train"], samples=4)}).to_json(),
            id="a wrong sum",
        ),
    ],
)
def test_a_damaged_manifest_is_refused_in_one_line_that_says_what_to_do(directory_store: Store, data: bytes) -> None:
    stored(directory_store, data)
    with pytest.raises(PacktrainError) as refused:
        find_manifest(directory_store, "toy-0123")
    assert str(refused.value) == (
        f"the manifest of pack toy-0123 in {directory_store.url} is damaged; delete it and pack again"
    )


def test_a_manifest_of_another_format_is_refused(directory_store: Store) -> None:
    stored(directory_store, json.dumps({**json.loads(MANIFEST.to_json()), "format": FORMAT + 1}).encode())
    with pytest.raises(PacktrainError, match=f"has format {FORMAT + 1}, but this version reads format {FORMAT}"):
        find_manifest(directory_store, "toy-0123")


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "a/b", ""])
def test_a_file_name_cannot_point_outside(directory_store: Store, name: str) -> None:
    stored(directory_store, MANIFEST.to_json().replace(b'"vocabulary.json"', json.dumps(name).encode()))
    with pytest.raises(PacktrainError, match="is damaged"):
        find_manifest(directory_store, "toy-0123")


def test_a_newer_format_is_not_called_damaged(directory_store: Store) -> None:
    stored(directory_store, json.dumps({"format": FORMAT + 1, "other": "fields"}).encode())
    with pytest.raises(PacktrainError, match=f"has format {FORMAT + 1}"):
        find_manifest(directory_store, "toy-0123")
