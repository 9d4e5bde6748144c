"""Append-only streams of records in the store: every flush is a new object, and nothing is rewritten.

A stream (`runs/en-de-1/metrics`) has a folder for each writer, with numbered chunks of JSON lines. Readers remember the
last chunk of each writer, so following costs one listing per writer.
"""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Protocol

from packtrain.store import Entry, Store, StoreError
from packtrain.store.records import DamagedRecord, Record, decode_many
from packtrain.units import show_bytes

MAX_CHUNK_BYTES = 4 << 20
"""What gathers while a store is away becomes several chunks: readers refuse an object of more than `RECORD_BYTES`."""
MAX_STREAM_BYTES = 1 << 30
"""The most that one call reads: millions of steps. A store may have more than a machine has memory."""
_BUSY_LOOKS = 30  # without a new chunk, until a writer is asked less often: workers flush every 1 to 10 s
_STAMPED_LOOKS = 3  # the same where a folder tells that it has changed
_IDLE_LOOKS = 30
_CHUNK = re.compile(r"[0-9]{8,}\.jsonl")  # what has another name is none of ours


class ChunkWriter(Generic[Record]):
    """Collects records of one writer; `flush` puts them into the store. Thread-safe.

    A writer's name is used once: a process that restarts takes another one.
    """

    def __init__(self, store: Store, stream: str, writer: str) -> None:
        self._store, self._folder = store, f"{stream}/{writer}"
        self._lines: list[bytes] = []
        self._chunk = 0  # the number of the next chunk
        self._unsure: deque[bytes] = (
            deque()
        )  # chunks from that number on, of which the put of the first may have failed
        self._collecting, self._flushing = threading.Lock(), threading.Lock()

    def append(self, record: Record) -> None:
        line = encode_line(record)
        with self._collecting:
            self._lines.append(line)

    def flush(self) -> None:
        """Put what was collected; what fails is kept for the next flush.

        A put that failed may have reached the store and been read there, so exactly the same bytes are put again.
        """
        with self._flushing:
            self._put_chunks()  # first what failed, under the numbers that it had
            with self._collecting:  # not held while putting: a slow store must not block `append`
                lines = self._take_lines()
            self._unsure.extend(_joined(lines))
            self._put_chunks()

    def _take_lines(self) -> list[bytes]:
        lines, self._lines = self._lines, []
        return lines

    def _put_chunks(self) -> None:
        while self._unsure:
            self._store.put(f"{self._folder}/{self._chunk:08d}.jsonl", self._unsure[0])
            self._unsure.popleft()
            self._chunk += 1


def encode_line(record: object) -> bytes:
    line = json.dumps(vars(record), default=_plain, ensure_ascii=False)  # without the copies that asdict makes
    return f"{line}\n".encode(errors="replace")


def _plain(value: Any) -> Any:
    return b64encode(value).decode() if isinstance(value, bytes) else vars(value)


def _joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines as chunks of at most `MAX_CHUNK_BYTES`, or of a single line."""
    chunk = bytearray()
    for line in lines:
        if chunk and len(chunk) + len(line) > MAX_CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
        chunk += line
    if chunk:
        yield bytes(chunk)


class ChunkReader(Generic[Record]):
    """Reads a stream; each call of `read` returns what is new since the last one, of all writers or of some."""

    def __init__(self, store: Store, stream: str, record: type[Record]) -> None:
        self._store, self._stream = store, stream
        self._record = record
        self._follower = ChunkFollower(store, stream)
        # Of a read that failed half way: records, and the chunk that could not be decoded.
        self._pending: list[Record] = []
        self._undecoded: list[tuple[str, bytes]] = []

    def read(self, writers: Collection[str] | None = None) -> list[Record]:
        for key, data in chain(self._undecoded, self._follower.take_all(writers, MAX_STREAM_BYTES)):
            self._undecoded = [(key, data)]  # a damaged chunk fails every read, instead of leaving a hole
            self._pending += self._decoded(data, f"{key} in {self._store.url}")
            self._undecoded = []
        records, self._pending = self._pending, []
        return records

    def skip(self, but: int = 0) -> ChunkReader[Record]:
        """Take what is there as read, except the last `but` chunks of each writer, and return the reader."""
        entries = {writer: self._entries(writer) for writer in self._writers()}
        read = (chunks[-1 - but].key for chunks in entries.values() if len(chunks) > but)
        self._follower = ChunkFollower(self._store, self._stream, read)
        return self

    def of(self, writer: str) -> Iterator[list[Record]]:
        """Yield the chunks of one writer, first to last. Independent of `read`."""
        for entry in self._entries(writer):
            yield self._parse(entry.key)

    def backward(self, max_bytes: int = MAX_STREAM_BYTES) -> Iterator[list[Record]]:
        """Yield the chunks from last to first, starting with the writer whose name sorts last, up to a total size.

        Reads only what is consumed, for readers of the end of a stream. Independent of `read`.
        """
        for writer in reversed(self._writers()):
            for entry in reversed(self._entries(writer)):
                max_bytes -= entry.size
                if max_bytes < 0:
                    return
                yield self._parse(entry.key)

    def spread(self, max_bytes: int) -> list[Record]:
        """Return the records of chunks that are evenly spaced over every writer's time, up to a total size.

        For readers of means over a whole run, whatever its length. Independent of `read`.
        """
        entries = {writer: self._entries(writer) for writer in self._writers()}
        size = sum(entry.size for chunks in entries.values() for entry in chunks)
        share = min(1.0, max_bytes / size) if size else 1.0
        chosen = [
            chunks[number * len(chunks) // count]
            for chunks in entries.values()
            if chunks and (count := max(1, int(len(chunks) * share)))
            for number in range(count)
        ]
        return [record for entry in chosen for record in self._parse(entry.key)]

    def _writers(self) -> list[str]:
        return self._store.folders(f"{self._stream}/")

    def _entries(self, writer: str) -> list[Entry]:
        return _chunks_in(self._store, f"{self._stream}/{writer}/")

    def _parse(self, key: str) -> list[Record]:
        return self._decoded(self._store.get(key), f"{key} in {self._store.url}")

    def _decoded(self, data: bytes, subject: str) -> list[Record]:
        return decode_many(self._record, lines_of(data), subject)


@dataclass
class _Cursor:
    """A writer of a stream that is followed: the number of its next chunk, and looks in a row without a new one."""

    next: int = 0
    quiet: int = 0
    stamp: tuple[int, ...] | None = None


class ChunkFollower:
    """Follows a stream, chunk by chunk, and reads nothing twice: for readers that stay for hours.

    A writer's chunks are numbered without gaps. So once a writer was listed, its next chunk is asked for by name, and
    a look costs the same however long the stream is.
    """

    def __init__(self, store: Store, stream: str, known_keys: Iterable[str] = ()) -> None:
        """`known_keys` are the keys of chunks that were read already."""
        self._store, self._stream = store, stream
        self._cursors: dict[str, _Cursor] = {}
        self._listed: deque[Entry] = deque()
        self._looks = 0
        for key in known_keys:
            writer, _, name = key.removeprefix(f"{stream}/").partition("/")
            cursor = self._cursors.setdefault(writer, _Cursor())
            cursor.next = max(cursor.next, _number_of(name) + 1)

    def take(self) -> Iterator[tuple[str, bytes]]:
        """Yield the key and data of each new chunk. What the caller does not ask for is left for the next call.

        A writer that has been quiet for long is asked now and then only.
        """
        return self._take(self._store.find, is_patient=True)

    def take_keys(self) -> Iterator[str]:
        """Yield the key of each new chunk without reading it."""
        keys = self._take(lambda key: b"" if self._store.exists(key) else None, is_patient=True)
        return (key for key, _ in keys)

    def take_all(
        self, writers: Collection[str] | None = None, max_bytes: int | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Yield each chunk that is new now, of all writers or of some. What there is may have `max_bytes`."""
        return self._take(self._store.find, writers, max_bytes)

    def _take(
        self,
        read: Callable[[str], bytes | None],
        writers: Collection[str] | None = None,
        max_bytes: int | None = None,
        is_patient: bool = False,
    ) -> Iterator[tuple[str, bytes]]:
        followed = list(self._cursors.items())  # a writer that is listed now has no more for the moment
        for writer in self._changed():
            if writer not in self._cursors and (writers is None or writer in writers):
                entries = _chunks_in(self._store, f"{self._stream}/{writer}/")
                next_number = _number_of(entries[-1].key.rpartition("/")[2]) + 1 if entries else 0
                self._cursors[writer] = _Cursor(next_number)
                self._listed.extend(entries)
        size = sum(entry.size for entry in self._listed)
        if max_bytes is not None and size > max_bytes:
            raise DamagedRecord(
                f"{self._stream} in {self._store.url} has {show_bytes(size)}, more than {show_bytes(max_bytes)};"
                " delete what does not belong there, or copy it and read it there"
            )
        while self._listed:
            key = self._listed[0].key
            data = read(key)
            self._listed.popleft()
            if data is not None:  # deleted meanwhile, with its run
                yield key, data
        for writer, cursor in followed:
            if (writers is None or writer in writers) and (not is_patient or self._is_due(cursor)):
                yield from self._next_of(writer, cursor, read)
        self._looks += 1

    def _changed(self) -> Iterable[str]:
        """Return the writers, and mark those whose folder has changed as due."""
        stamps = self._store.stamps(f"{self._stream}/")
        if stamps is None:
            return self._store.folders(f"{self._stream}/")
        for writer, cursor in self._cursors.items():
            stamp = stamps.get(writer)
            if stamp != cursor.stamp:
                cursor.quiet = 0
            cursor.stamp = stamp
        return sorted(stamps)

    def _is_due(self, cursor: _Cursor) -> bool:
        """True for writers that wrote something lately; the others are asked now and then: most are long gone."""
        busy = _BUSY_LOOKS if cursor.stamp is None else _STAMPED_LOOKS
        return cursor.quiet < busy or (self._looks + cursor.next) % _IDLE_LOOKS == 0

    def _next_of(
        self, writer: str, cursor: _Cursor, read: Callable[[str], bytes | None]
    ) -> Iterator[tuple[str, bytes]]:
        while True:
            key = f"{self._stream}/{writer}/{cursor.next:08d}.jsonl"
            data = read(key)
            if data is None:
                cursor.quiet += 1
                return
            cursor.next, cursor.quiet = cursor.next + 1, 0
            yield key, data


def _chunks_in(store: Store, folder: str) -> list[Entry]:
    """List the chunks in a writer's folder, first to last."""
    return [entry for entry in store.list(folder) if _CHUNK.fullmatch(entry.key.removeprefix(folder))]


def chunk_keys(store: Store, stream: str) -> list[str]:
    """Return the keys of all chunks of a stream: by writer, first to last."""
    entries = store.list(f"{stream}/")
    return [entry.key for entry in entries if _CHUNK.fullmatch(entry.key.removeprefix(f"{stream}/").partition("/")[2])]


def _number_of(name: str) -> int:
    return int(name.removesuffix(".jsonl"))


def lines_of(data: bytes) -> bytes:
    """Return the lines of a chunk as one JSON list."""
    return b"[" + b",".join(data.splitlines()) + b"]"


class Flushable(Protocol):
    def flush(self) -> None: ...


class Flusher:
    """Flushes writers in the background, so that a slow or absent store never delays the work.

    The interval grows with the age of the run, from `seconds` to `max_seconds`: the start is seen immediately, and a
    run of days does not fill its folder with small objects.
    """

    def __init__(
        self,
        writers: Sequence[Flushable],
        complain: Callable[[StoreError], None],
        seconds: float = 1.0,
        max_seconds: float = 10.0,
    ) -> None:
        self._writers, self._complain = writers, complain
        self._seconds, self._most_seconds = seconds, max_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="flusher", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        seconds = self._seconds
        while not self._over.wait(seconds):
            seconds = min(self._most_seconds, seconds * 1.02)  # from 1 s to 10 s in about eight minutes
            self._flush()

    def _flush(self) -> bool:
        try:
            for writer in self._writers:
                writer.flush()
        except StoreError as error:
            self._complain(error)
            return False
        return True

    def close(self) -> bool:
        """Flush what is left; True if all of it reached the store."""
        self._over.set()
        self._thread.join()
        return self._flush()
