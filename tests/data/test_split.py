from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.handmade import NAME, Remote, Rows, put_pack, put_shard
from packtrain.data.pack import Pack, SplitReader
from packtrain.data.text import pad
from packtrain.pack.shard import Columns, Ragged, ShardError, encode_shard
from packtrain.store import Store, open_store

ROWS = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13]]
Reader = Callable[[int], SplitReader]


@pytest.fixture
def reader(directory_store: Store, tmp_path: Path) -> Reader:
    """Makes readers of ROWS in shards of so many samples."""

    def make(samples_per_shard: int) -> SplitReader:
        put_pack(directory_store, ROWS, samples_per_shard)
        return Pack(directory_store, NAME, tmp_path / "cache").split("train")

    return make


def in_memory(rows: Rows, samples_per_shard: int, folder: Path) -> SplitReader:
    store = open_store(str(folder))
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
def test_there_is_no_sample_before_the_first_or_behind_the_last(reader: Reader, sample: int) -> None:
    with pytest.raises(IndexError):
        reader(3).column("tokens")[sample]


@pytest.mark.parametrize("ids", [[6, 0, 3, 1, 6, 5], [4, 5], [2], []])
def test_the_pieces_of_a_batch_are_all_of_it_each_in_one_shard(reader: Reader, ids: list[int]) -> None:
    back, pieces = reader(2).by_shard(np.array(ids, np.int64))
    found = [number * 2 + row for number, rows in pieces for row in rows.tolist()]
    assert [found[place] for place in (range(len(ids)) if back is None else back)] == ids
    shards = [number for number, _ in pieces]
    assert shards == sorted({one // 2 for one in ids})


def test_nothing_is_copied_to_be_read(reader: Reader) -> None:
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


def test_shards_are_fetched_ahead_of_their_use(tmp_path: Path) -> None:
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


def test_more_shards_than_may_be_open_at_once_are_read_all_the_same(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.data.pack._OPEN_AT_LEAST", 2)
    monkeypatch.setattr("packtrain.data.pack.resource.getrlimit", lambda _: (4, 4))
    split = reader(1)
    for _ in range(2):
        assert pad(split.column("tokens"), np.arange(len(ROWS)), 0)[:, 0].tolist() == [1, 0, 4, 5, 7, 11, 12]
    assert split.column("tokens").lengths.tolist() == [len(row) for row in ROWS]
    assert split.plain("number").tolist() == list(range(len(ROWS)))
    assert len(split._open) == 2


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
    store = open_store(str(tmp_path))
    shard = put_shard(store, "train-00000", ROWS)
    (tmp_path / "short").write_bytes(encode_shard(Columns({"tokens": Ragged.from_rows(ROWS[:2], np.dtype("<u2"))})))
    with pytest.raises(ShardError, match=r"short has 2 samples, not 7; pack the data again"):
        SplitReader([shard], lambda _: tmp_path / "short").shard(0)
