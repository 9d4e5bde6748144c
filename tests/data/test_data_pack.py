from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.handmade import NAME, Remote, Rows, put_file, put_pack, put_shard, rot
from packtrain.data.pack import Pack, SplitReader, pad
from packtrain.errors import NotFound, PacktrainError
from packtrain.pack.manifest import Manifest, ShardFile, pack_key
from packtrain.pack.shard import Columns, Ragged, ShardError, encode_shard
from packtrain.pack.vocabulary import Vocabulary
from packtrain.store import Store, StoreAway, open_store
from parts.mounts import Mounts

ROWS = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13]]
Reader = Callable[[int], SplitReader]


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


def test_a_split_has_the_rows_that_were_packed(any_store: Store, tmp_path: Path) -> None:
    put_pack(any_store, ROWS, 2)
    assert rows_of(Pack(any_store, NAME, tmp_path / "cache")) == ROWS


def test_a_split_that_the_pack_does_not_have_is_named(directory_store: Store, tmp_path: Path) -> None:
    put_pack(directory_store, ROWS, 2)
    with pytest.raises(NotFound, match=f"^pack {NAME} has no split 'test'; it has train$"):
        Pack(directory_store, NAME, tmp_path / "cache").split("test")


def test_files_are_downloaded_once_for_all_users_of_the_cache(remote: Remote, tmp_path: Path) -> None:
    with_vocabulary(remote, "vocabulary", "hello")
    for _ in range(3):
        opened = Pack(remote, NAME, tmp_path / "cache")
        assert rows_of(opened) == ROWS
        assert len(opened.vocabulary) > 256
    assert sorted(remote.fetched) == ["train-00000", "train-00001", "train-00002", "train-00003", "vocabulary.json"]


def test_nothing_is_downloaded_before_it_is_needed(remote: Remote, tmp_path: Path) -> None:
    put_pack(remote, ROWS, 2)
    assert len(Pack(remote, NAME, tmp_path / "cache").split("train")) == len(ROWS)
    assert remote.fetched == []


def test_a_directory_store_is_read_in_place(directory_store: Store, tmp_path: Path) -> None:
    manifest = put_pack(directory_store, ROWS, 2)
    assert rows_of(Pack(directory_store, NAME, tmp_path / "cache")) == ROWS
    assert not any((tmp_path / "cache" / shard.sha256).exists() for shard in manifest.splits["train"].shards)


@pytest.mark.parametrize("change", [{"names": "other"}, {"samples": 3}])
def test_a_pack_whose_copies_have_other_samples_is_refused(
    directory_store: Store, tmp_path: Path, change: dict[str, Any]
) -> None:
    manifest = put_pack(directory_store, ROWS, 2)
    train = manifest.splits["train"]

    def put(*shards: ShardFile) -> None:
        splits = {"train": train, "train@16": replace(train, shards=shards)}
        directory_store.put(pack_key(NAME, "manifest.json"), replace(manifest, splits=splits).to_json())

    put(*train.shards)
    assert len(Pack(directory_store, NAME, tmp_path / "cache").split("train@16")) == len(ROWS)
    put(replace(train.shards[0], **change), *train.shards[1:])
    with pytest.raises(PacktrainError, match=f"^pack {NAME}: train@16 has other samples than train; delete the pack"):
        Pack(directory_store, NAME, tmp_path / "cache")


@pytest.mark.parametrize("name", ["train-00001", "vocabulary.json"])
def test_a_file_that_is_damaged_in_the_store_is_named(any_store: Store, tmp_path: Path, name: str) -> None:
    with_vocabulary(any_store, "vocabulary", "hello")
    data = any_store.get(pack_key(NAME, name))
    any_store.put(pack_key(NAME, name), bytes([data[0] ^ 1]) + data[1:])
    opened = Pack(any_store, NAME, tmp_path / "cache")
    with pytest.raises(PacktrainError) as refused:
        print(rows_of(opened), opened.vocabulary)
    assert str(refused.value).startswith(f"{name} of pack {NAME} in {any_store.url} is damaged")
    assert str(refused.value).endswith("pack again")


def test_a_pack_that_is_open_stays_in_the_cache(remote: Remote, tmp_path: Path) -> None:
    manifest = put_pack(remote, ROWS, 2)
    largest = max(shard.bytes for shard in manifest.splits["train"].shards)
    opened, other = (Pack(remote, NAME, tmp_path / "cache", cache_bytes=largest) for _ in range(2))
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
    with pytest.raises(PacktrainError, match=f"^pack {NAME} has no vocabulary; it contains pairs$"):
        print(Pack(directory_store, NAME, tmp_path / "cache").vocabulary)


def test_a_missing_pack_is_refused(directory_store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="pack nothing-0123 not found"):
        Pack(directory_store, "nothing-0123", tmp_path)


@pytest.fixture
def reader(directory_store: Store, tmp_path: Path) -> Reader:
    """Makes readers of ROWS in shards of so many samples."""

    def make(samples_per_shard: int) -> SplitReader:
        put_pack(directory_store, ROWS, samples_per_shard)
        return Pack(directory_store, NAME, tmp_path / "cache").split("train")

    return make


def in_memory(rows: Rows, samples_per_shard: int, folder: Path) -> SplitReader:
    store = open_store(str(folder), create=True)
    manifest = put_pack(store, rows, samples_per_shard)
    return SplitReader(manifest.splits["train"].shards, lambda shard: folder / "packs" / NAME / shard.name)


@pytest.mark.parametrize("samples_per_shard", [1, 2, 3, 7, 100])
def test_a_split_is_the_same_however_it_is_cut_into_shards(reader: Reader, samples_per_shard: int) -> None:
    split = reader(samples_per_shard)
    tokens = split.column("tokens")
    assert len(split) == len(tokens) == len(ROWS)
    assert [tokens[number].tolist() for number in range(len(ROWS))] == ROWS
    assert tokens.lengths.tolist() == [len(row) for row in ROWS]
    assert tokens.lengths.dtype == np.int64
    assert split.plain("number").tolist() == list(range(len(ROWS)))


@given(
    st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=7), min_size=1, max_size=12),
    st.integers(1, 12),
    st.data(),
)
def test_a_padded_batch_over_several_shards_is_that_of_one(
    tmp_path_factory: pytest.TempPathFactory, rows: Rows, samples_per_shard: int, data: st.DataObject
) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=15)), np.int64)
    split = in_memory(rows, samples_per_shard, tmp_path_factory.mktemp("split"))
    whole = pad(Ragged.from_rows(rows, np.dtype("<u2")), ids, 9)
    cut = pad(split.column("tokens"), ids, 9)
    assert (cut.tolist(), cut.shape, cut.dtype) == (whole.tolist(), whole.shape, whole.dtype)


def test_every_sample_is_found_in_its_shard_and_row(reader: Reader) -> None:
    split = reader(3)
    for number, row in enumerate(ROWS):
        columns, at = split.at(number)
        assert columns.plain["number"][at] == number
        assert columns.ragged["tokens"][at].tolist() == row


@pytest.mark.parametrize("sample", [-1, len(ROWS)])
def test_a_sample_outside_of_the_split_is_an_index_error(reader: Reader, sample: int) -> None:
    with pytest.raises(IndexError):
        reader(3).column("tokens")[sample]


@pytest.mark.parametrize("ids", [[6, 0, 3, 1, 6, 5], [4, 5], [2], []])
def test_by_shard_divides_a_batch_into_rows_of_single_shards(reader: Reader, ids: list[int]) -> None:
    back, pieces = reader(2).by_shard(np.array(ids, np.int64))
    found = [number * 2 + row for number, rows in pieces for row in rows.tolist()]
    assert [found[place] for place in (range(len(ids)) if back is None else back)] == ids
    shards = [number for number, _ in pieces]
    assert shards == sorted({one // 2 for one in ids})


def test_reading_copies_nothing(reader: Reader) -> None:
    split = reader(100)
    column = split.shard(0).ragged["tokens"]
    assert not column.values.flags.owndata
    assert not column.values.flags.writeable
    assert np.shares_memory(split.column("tokens")[0], column.values)


def test_shards_are_opened_when_they_are_needed(tmp_path: Path) -> None:
    store = Remote(tmp_path / "store")
    put_pack(store, ROWS, 2)
    split = Pack(store, NAME, tmp_path / "cache").split("train")
    assert len(split) == len(ROWS)
    assert store.fetched == []
    assert split.column("tokens")[3].tolist() == ROWS[3]
    assert pad(split.column("tokens"), np.array([2, 3]), 0).shape == (2, 2)
    assert store.fetched == ["train-00001"]


def test_shards_are_listed_in_the_order_of_their_first_use(reader: Reader) -> None:
    assert reader(2).order_of_use(np.array([5, 0, 4, 6, 1])) == [2, 0, 3]


def test_shards_are_downloaded_ahead_of_their_use(tmp_path: Path) -> None:
    store = Remote(tmp_path / "store")
    put_pack(store, ROWS, 1)
    split = Pack(store, NAME, tmp_path / "cache").split("train")
    with split.prefetched([6, 2, 4]):
        assert split.column("tokens")[6].tolist() == ROWS[6]
        while len(store.fetched) < 3:
            threading.Event().wait(0.01)
        assert split.column("tokens")[4].tolist() == ROWS[4]
    assert sorted(store.fetched) == ["train-00002", "train-00004", "train-00006"]
    assert [thread.name for thread in threading.enumerate()].count("prefetch") == 0


def test_more_shards_than_can_be_open_are_closed_and_reopened(tmp_path: Path) -> None:
    shards, opened = put_pack(open_store(str(tmp_path), create=True), ROWS, 1).splits["train"].shards, []

    def path_of(shard: ShardFile) -> Path:
        opened.append(shard.name)
        return tmp_path / "packs" / NAME / shard.name

    split = SplitReader(shards, path_of, most_open=2)
    for _ in range(2):
        assert pad(split.column("tokens"), np.arange(len(ROWS)), 0)[:, 0].tolist() == [1, 0, 4, 5, 7, 11, 12]
    assert split.column("tokens").lengths.tolist() == [len(row) for row in ROWS]
    assert split.plain("number").tolist() == list(range(len(ROWS)))
    assert len(opened) > 2 * len(shards)


def test_threads_may_read_a_split_together(reader: Reader) -> None:
    split = reader(1)
    seen: list[list[list[int]]] = []

    def read() -> None:
        seen.append([split.column("tokens")[number].tolist() for number in range(len(ROWS))])

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [ROWS] * 6


def test_a_shard_with_another_number_of_samples_than_the_manifest_says_is_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), create=True)
    shard = put_shard(store, "train-00000", ROWS)
    (tmp_path / "short").write_bytes(encode_shard(Columns({"tokens": Ragged.from_rows(ROWS[:2], np.dtype("<u2"))})))
    with pytest.raises(ShardError, match=r"short has 2 samples, not 7; pack the data again"):
        SplitReader([shard], lambda _: tmp_path / "short").shard(0)


def test_a_store_that_is_unmounted_before_a_shard_is_opened_is_away(tmp_path: Path, mounts: Mounts) -> None:
    mounts.mount("disk")
    store = open_store(str(mounts.point), create=True)
    shards = put_pack(store, ROWS, 1).splits["train"].shards
    split = Pack(store, NAME, tmp_path / "cache").split("train")
    assert split.column("tokens")[0].tolist() == ROWS[0]
    paths = {shard.name: Path(store.url, pack_key(NAME, shard.name)) for shard in shards}

    def check(shard: ShardFile) -> None:
        store.entry(shard.name)

    late = SplitReader(shards, lambda shard: paths[shard.name], check)
    mounts.unmount()
    for reader in (split, late):  # the second one was unmounted after the shard was checked
        with pytest.raises(StoreAway):
            reader.shard(1)
    mounts.mount("disk")
    assert split.column("tokens")[2].tolist() == ROWS[2]


def test_a_shard_that_the_disk_has_changed_is_downloaded_again_once_and_told(
    remote: Remote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [shard] = put_pack(remote, ROWS, len(ROWS)).splits["train"].shards
    for _ in range(2):
        split = Pack(remote, NAME, tmp_path / "cache").split("train")
        assert split.column("tokens")[0].tolist() == ROWS[0]
        rot(tmp_path / "cache" / shard.sha256, at=0)
    assert remote.fetched == ["train-00000"] * 2
    assert capsys.readouterr().out.count("is damaged; downloading") == 1


def test_a_shard_that_a_disk_has_changed_in_a_directory_store_is_named(directory_store: Store, tmp_path: Path) -> None:
    put_pack(directory_store, ROWS, len(ROWS))
    Pack(directory_store, NAME, tmp_path / "cache").split("train").shard(0)
    rot(Path(directory_store.url) / "packs" / NAME / "train-00000", at=0)
    with pytest.raises(PacktrainError, match=r"train-00000 of pack .* is damaged \(wrong hash\)"):
        Pack(directory_store, NAME, tmp_path / "cache").split("train").shard(0)


def naive(rows: Rows, ids: list[int], filler: int) -> Rows:
    chosen = [rows[number] for number in ids]
    longest = max([1, *map(len, chosen)])
    return [[*row, *[filler] * (longest - len(row))] for row in chosen]


@st.composite
def rows_and_ids(draw: st.DrawFn) -> tuple[Rows, list[int]]:
    rows = draw(st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=7), min_size=1, max_size=9))
    return rows, draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))


@given(rows_and_ids(), st.integers(0, 9))
def test_rows_are_padded_to_the_longest(drawn: tuple[Rows, list[int]], filler: int) -> None:
    rows, ids = drawn
    padded = pad(Ragged.from_rows(rows, np.dtype("<u2")), np.array(ids, np.int64), filler)
    assert padded.dtype == np.int64
    assert padded.shape[0] == len(ids)
    assert padded.tolist() == naive(rows, ids, filler)


def test_no_rows_make_an_empty_batch_of_one_position() -> None:
    column = Ragged.from_rows([[1, 2]], np.dtype("<u2"))
    assert pad(column, np.array([], np.int64), 0).shape == (0, 1)


def test_a_padded_batch_can_be_written_to_without_touching_the_column() -> None:
    column = Ragged.from_rows([[1, 2], [3, 4]], np.dtype("<i8"))
    pad(column, np.array([0, 1]), 0)[:] = 9
    assert column.values.tolist() == [1, 2, 3, 4]


def test_empty_rows_are_all_padding() -> None:
    column = Ragged.from_rows([[], []], np.dtype("<u2"))
    assert pad(column, np.array([1, 0]), 7).tolist() == [[7], [7]]


def test_the_last_row_of_a_column_is_padded_like_any_other() -> None:
    column = Ragged.from_rows([[1, 2, 3], [4]], np.dtype("<u2"))
    assert pad(column, np.array([1, 0]), 0).tolist() == [[4, 0, 0], [1, 2, 3]]
