"""A pack opened for reading: its shards are mapped into memory, in place or from the cache of this machine."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.data.cache import FileCache, Prefetch
from packtrain.data.order import Ids
from packtrain.errors import NotFound, PacktrainError
from packtrain.files import FileLock
from packtrain.job.part import FILES, IN_STORE, STORED_FILE
from packtrain.pack.manifest import Manifest, PackFile, ShardFile, check_copies, pack_key, read_manifest
from packtrain.pack.shard import Array, Columns, Ragged, ShardError, open_shard
from packtrain.pack.vocabulary import Vocabulary
from packtrain.store import Store

_MIN_OPEN = 16
_STAGING = 8  # downloads at the same time


class Pack:
    """A pack whose files are in the cache in `directory`; each is checked against its hash on first use."""

    def __init__(
        self,
        store: Store,
        name: str,
        directory: Path,
        cache_bytes: int | None = None,
        *,
        staged: bool = False,
        manifest: Manifest | None = None,
    ) -> None:
        """`staged`: files of a store in a directory are copied into the cache, too. Reads the manifest if not given."""
        self._store, self.name, self._staged = store, name, staged
        self._cache = FileCache(directory, cache_bytes)
        self.manifest: Manifest = manifest or read_manifest(store, name)
        check_copies(self.manifest)
        self._hold: FileLock | None = None  # while it lives, the cache keeps the files of this pack
        self._splits: dict[str, SplitReader] = {}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of both sides of a pair, or of sources only if targets have their own."""
        return self._vocabulary(self.manifest.vocabulary)

    @cached_property
    def target_vocabulary(self) -> Vocabulary:
        file = self.manifest.target_vocabulary
        return self.vocabulary if file is None else self._vocabulary(file)

    def _vocabulary(self, file: PackFile | None) -> Vocabulary:
        if file is None:
            raise PacktrainError(f"pack {self.name} has no vocabulary; it contains {self.manifest.kind}")
        return Vocabulary.from_file(self._path_of(file))

    def split(self, name: str) -> SplitReader:
        if name not in self.manifest.splits:
            raise NotFound(f"pack {self.name} has no split {name!r}; it has {', '.join(self.manifest.splits)}")
        if name not in self._splits:
            recheck = partial(self._path_of, is_suspect=True)
            self._splits[name] = SplitReader(self.manifest.splits[name].shards, self._path_of, recheck)
        return self._splits[name]

    def given_file(self, path: str) -> Path:
        """Return a file that the job of a run names: a copy of one in the store, by its hash.

        Never a path of this machine: the job is in the store, too, and its writers may not read files here.
        """
        key = path.removeprefix(IN_STORE)
        if not path.startswith(STORED_FILE):
            raise PacktrainError(f"the job names the file {path!r}, which is not in {self._store.url}; start it again")
        entry = self._store.entry(key)
        if entry is None:
            raise NotFound(f"{key} not found in {self._store.url}; the run needs it")
        return self._cache.path_of(self._store, key, PackFile(path, entry.size, key.removeprefix(FILES)))

    def _path_of(self, file: PackFile, is_suspect: bool = False) -> Path:
        self._keep()
        key = pack_key(self.name, file.name)
        return self._cache.path_of(self._store, key, file, is_suspect=is_suspect, staged=self._staged)

    def _keep(self) -> None:
        # Without staging, a directory's files are not copied into the cache.
        if self._hold is None and (self._staged or not self._store.is_directory):
            self._hold = self._cache.hold(file.sha256 for file in self.manifest.files())

    def stage(self, advance: Callable[[int], None], turn: int = 0) -> None:
        """Have every file of the pack on this machine; `advance` gets the bytes of each, and may raise to end it.

        Workers of one machine that stage at the same time share the downloads: each starts at another file, by its
        `turn`.
        """
        files = list(self.manifest.files())
        self._keep()
        self._cache.check_room(files)
        start = turn * _STAGING % len(files)
        pool = ThreadPoolExecutor(_STAGING)
        try:
            ordered = files[start:] + files[:start]
            for file, _ in zip(ordered, pool.map(self._path_of, ordered), strict=True):
                advance(file.bytes)
        finally:
            pool.shutdown(cancel_futures=True)


class SplitReader:
    """The samples of all shards, with continuous numbers. Threads may share it.

    Shards are opened on first use. A mapped file holds a descriptor, so at most half of the descriptors of the process
    are used for shards; beyond that, the least recently used shard is closed, and opened again when needed.
    """

    def __init__(
        self,
        shards: Sequence[ShardFile],
        path_of: Callable[[ShardFile], Path],
        recheck: Callable[[ShardFile], object] = lambda _: None,
        most_open: int | None = None,
    ) -> None:
        """`recheck` hashes the file of a shard that looks damaged, and replaces it if it is."""
        self._shards, self._path_of, self._recheck = tuple(shards), path_of, recheck
        self._ends = np.cumsum([shard.samples for shard in shards], dtype=np.int64)
        self._number_type = np.min_scalar_type(len(shards))  # small integers are sorted faster
        self._open: OrderedDict[int, Columns] = OrderedDict()
        self._most_open = most_open or max(_MIN_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._lock = threading.Lock()
        self._prefetches: list[Prefetch] = []
        self._lengths: dict[str, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def shard(self, number: int) -> Columns:
        with self._lock:
            columns = self._open.get(number)
            if columns is not None:
                self._open.move_to_end(number)
                return columns
            prefetches = list(self._prefetches)
        # Outside of the lock, so that other threads can read while this shard is downloaded.
        # Two threads may open the same shard; `setdefault` below keeps the first.
        columns = self._opened(self._shards[number])
        for prefetch in prefetches:
            prefetch.used(number)
        with self._lock:
            columns = self._open.setdefault(number, columns)
            while len(self._open) > self._most_open:
                self._open.popitem(last=False)
        return columns

    def _opened(self, shard: ShardFile) -> Columns:
        try:
            return self._opened_file(self._path_of(shard), shard)
        except (ShardError, OSError):
            # A disk may change a file but not its size and time, by which it was known to have its hash. Or its mount
            # has just disappeared, which the check says as an error that is temporary.
            self._recheck(shard)
            return self._opened_file(self._path_of(shard), shard)

    def reopen(self, sample: int) -> None:
        """Hash the shard of a sample that looks damaged, and download the shard again if it is."""
        number = int(np.searchsorted(self._ends, sample, side="right"))
        self._recheck(self._shards[number])
        with self._lock:
            self._open.pop(number, None)

    def _opened_file(self, path: Path, shard: ShardFile) -> Columns:
        columns = open_shard(path)
        if len(columns) != shard.samples:
            raise ShardError(f"{path} has {len(columns):,} samples, not {shard.samples:,}; pack the data again")
        # As plain arrays: NumPy needs a microsecond more for every slice of a memmap.
        ragged = {
            name: Ragged(np.asarray(column.values), np.asarray(column.offsets))
            for name, column in columns.ragged.items()
        }
        return Columns(ragged, {name: np.asarray(column) for name, column in columns.plain.items()})

    def at(self, sample: int) -> tuple[Columns, int]:
        """Return the shard of a sample, and its row there."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = int(np.searchsorted(self._ends, sample, side="right"))
        return self.shard(number), sample - self._start(number)

    def by_shard(self, ids: Ids) -> tuple[Ids | None, list[tuple[int, Ids]]]:
        """Group samples by shard: return the place of each in the groups, and the number and the rows of each shard.

        None instead of the places if the order is unchanged.
        """
        numbers = np.searchsorted(self._ends, ids, side="right").astype(self._number_type)
        if not len(ids) or (numbers == numbers[0]).all():
            return None, [(int(number), ids - self._start(int(number))) for number in numbers[:1]]
        # Grouped, so that each shard is looked up once per batch and not once per sample.
        order = numbers.argsort(kind="stable")
        numbers, rows = numbers[order], ids[order]
        edges = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(ids)]
        pieces = [
            (number := int(numbers[start]), rows[start:end] - self._start(number)) for start, end in pairwise(edges)
        ]
        back = np.empty_like(order)
        back[order] = np.arange(len(ids))
        return back, pieces

    def _start(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    def column(self, name: str) -> Column:
        return Column(self, name)

    def lengths(self, name: str) -> NDArray[np.int64]:
        """Return the length of each row of a ragged column. The first call reads all shards."""
        if name not in self._lengths:
            self._lengths[name] = np.concatenate([shard.ragged[name].lengths for shard in self.shards()])
        return self._lengths[name]

    def plain(self, name: str) -> NDArray[Any]:
        """Return a plain column as a whole. Reads all shards."""
        # Copied one by one: views would keep every shard open until the last is read.
        return np.concatenate([shard.plain[name].copy() for shard in self.shards()])

    def shards(self) -> Iterator[Columns]:
        """Yield all shards in order, and download a few ahead of their use."""
        with self.prefetched(range(len(self._shards))):
            for number in range(len(self._shards)):
                yield self.shard(number)

    def order_of_use(self, ids: Ids) -> list[int]:
        """Return the shards in the order in which the samples `ids` first need them, for `prefetched`."""
        numbers, first = np.unique(np.searchsorted(self._ends, ids, side="right"), return_index=True)
        return [int(number) for number in numbers[np.argsort(first)]]

    @contextmanager
    def prefetched(self, order: Sequence[int]) -> Iterator[None]:
        """Inside the block, download shards in this order, a few ahead of their use."""
        with closing(Prefetch(lambda number: self._path_of(self._shards[number]), order)) as prefetch:
            with self._lock:
                self._prefetches.append(prefetch)
            try:
                yield
            finally:
                with self._lock:
                    self._prefetches.remove(prefetch)


class Column:
    """A ragged column over all shards of a split."""

    def __init__(self, split: SplitReader, name: str) -> None:
        self._split, self._name = split, name

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, sample: int) -> Array:
        columns, row = self._split.at(sample)
        return columns.ragged[self._name][row]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._split.lengths(self._name)

    def by_shard(self, ids: Ids) -> tuple[Ids | None, list[tuple[Ragged, Ids]]]:
        """Return the same as SplitReader.by_shard, with this column of each shard."""
        back, pieces = self._split.by_shard(ids)
        return back, [(self._split.shard(number).ragged[self._name], rows) for number, rows in pieces]


def pad(column: Ragged | Column, ids: Ids, filler: int) -> NDArray[np.int64]:
    """Return the rows `ids` as one array, padded with `filler` to the longest."""
    if not len(ids):
        return np.zeros((0, 1), np.int64)
    if isinstance(column, Ragged):
        back, pieces = None, [(column, ids)]
    else:
        back, pieces = column.by_shard(ids)
    bounds = [(piece.offsets[rows], piece.offsets[rows + 1]) for piece, rows in pieces]
    lengths = np.concatenate([ends - starts for starts, ends in bounds])
    width = max(1, int(lengths.max()))
    blocks = [_wide(piece.values, *edges, width) for (piece, _), edges in zip(pieces, bounds, strict=True)]
    batch = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    if back is not None:
        batch, lengths = batch.take(back, axis=0), lengths[back]
    batch = batch.astype(np.int64)
    shortest = int(lengths.min())
    np.copyto(batch[:, shortest:], filler, where=np.arange(shortest, width) >= lengths[:, None])
    return batch


def _wide(values: Array, starts: Ids, ends: Ids, width: int) -> Array:
    """Return `width` values from each start; values after the end of a row are arbitrary.

    Samples of a batch have similar lengths, and copying a little too much is faster than selecting: the values are
    viewed as overlapping windows, each a single item of all its bytes, so that a row is copied as one item.
    """
    last = len(values) - width
    if last < 0:
        values, last = np.concatenate([values, np.zeros(-last, values.dtype)]), 0
    window = np.dtype((np.void, width * values.itemsize))
    windows = np.ndarray((last + 1,), window, values, 0, values.strides)
    rows: Array = windows[np.minimum(starts, last)].view(values.dtype).reshape(len(starts), width)
    for row in np.flatnonzero(starts > last).tolist():  # the last rows of a shard, where no window starts
        rows[row, : ends[row] - starts[row]] = values[starts[row] : ends[row]]
    return rows
