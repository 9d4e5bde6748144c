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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
        self._seen: dict[str, str] = {}
        self._follower: ChunkFollower | None = None

    def read(self, writers: Iterable[str] | None = None) -> list[Record]:
        chosen = self._writers() if writers is None else writers
        entries = {writer: self._entries(writer, self._seen.get(writer)) for writer in chosen}
        size = sum(entry.size for chunks in entries.values() for entry in chunks)
        if size > MAX_STREAM_BYTES:
            raise DamagedRecord(
                f"{self._stream} in {self._store.url} has {show_bytes(size)}, more than"
                f" {show_bytes(MAX_STREAM_BYTES)}; delete what does not belong there, or copy it and read it there"
            )
        records = [record for chunks in entries.values() for entry in chunks for record in self._parse(entry.key)]
        # Not before: after an error the next call reads all of it again.
        self._seen |= {writer: chunks[-1].key for writer, chunks in entries.items() if chunks}
        return records

    def chunks(self) -> Iterator[list[Record]]:
        """Yield what is new chunk by chunk, for readers that stay and keep little; what is not consumed stays new.

        Begins after what `read` or `skip` has taken, and goes on independently of them.
        """
        if self._follower is None:
            self._follower = ChunkFollower(self._store, self._stream, self._seen.values())
        for key, data in self._follower.take():
            yield self._decoded(data, f"{key} in {self._store.url}")

    def skip(self, but: int = 0) -> ChunkReader[Record]:
        """Take what is there as read, except the last `but` chunks of each writer, and return the reader."""
        entries = {writer: self._entries(writer) for writer in self._writers()}
        self._seen = {writer: chunks[-1 - but].key for writer, chunks in entries.items() if len(chunks) > but}
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

    def _entries(self, writer: str, after: str | None = None) -> list[Entry]:
        folder = f"{self._stream}/{writer}/"
        return [one for one in self._store.list(folder, after) if _CHUNK.fullmatch(one.key.removeprefix(folder))]

    def _parse(self, key: str) -> list[Record]:
        return self._decoded(self._store.get(key), f"{key} in {self._store.url}")

    def _decoded(self, data: bytes, what: str) -> list[Record]:
        return decode_many(self._record, lines_of(data), what)


@dataclass
class _Followed:
    """A writer of a stream that is followed: the number of its next chunk, and looks in a row without a new one."""

    next: int = 0
    quiet: int = 0
    stamp: tuple[int, ...] | None = None


class ChunkFollower:
    """Follows a stream, chunk by chunk, and reads nothing twice: for readers that stay for hours.

    A writer's chunks are numbered without gaps. So once a writer was listed, its next chunk is asked for by name, and
    a look costs the same however long the stream is.
    """

    def __init__(self, store: Store, stream: str, seen: Iterable[str] = ()) -> None:
        """`seen` are the keys of chunks that were read already."""
        self._store, self._stream = store, stream
        self._writers: dict[str, _Followed] = {}
        self._listed: deque[str] = deque()
        self._looks = 0
        for key in seen:
            writer, _, name = key.removeprefix(f"{stream}/").partition("/")
            followed = self._writers.setdefault(writer, _Followed())
            followed.next = max(followed.next, _number_of(name) + 1)

    def take(self) -> Iterator[tuple[str, bytes]]:
        """Yield the key and data of each new chunk. What the caller does not ask for is left for the next call."""
        return self._take(self._store.find)

    def take_keys(self) -> Iterator[str]:
        """Yield the key of each new chunk without reading it."""
        return (key for key, _ in self._take(lambda key: b"" if self._store.exists(key) else None))

    def _take(self, read: Callable[[str], bytes | None]) -> Iterator[tuple[str, bytes]]:
        for writer in self._changed():
            if writer not in self._writers:
                self._list(writer)
        while self._listed:
            data = read(self._listed[0])
            key = self._listed.popleft()
            if data is not None:  # deleted meanwhile, with its run
                yield key, data
        for writer, followed in self._writers.items():
            if self._is_due(followed):
                yield from self._next_of(writer, followed, read)
        self._looks += 1

    def _changed(self) -> Iterable[str]:
        """Return the writers, and mark those whose folder has changed as due."""
        stamps = self._store.stamps(f"{self._stream}/")
        if stamps is None:
            return self._store.folders(f"{self._stream}/")
        for writer, followed in self._writers.items():
            stamp = stamps.get(writer)
            if stamp != followed.stamp:
                followed.quiet = 0
            followed.stamp = stamp
        return sorted(stamps)

    def _list(self, writer: str) -> None:
        folder = f"{self._stream}/{writer}/"
        keys = [one.key for one in self._store.list(folder) if _CHUNK.fullmatch(one.key.removeprefix(folder))]
        self._writers[writer] = _Followed(_number_of(keys[-1].removeprefix(folder)) + 1 if keys else 0)
        self._listed.extend(keys)

    def _is_due(self, followed: _Followed) -> bool:
        """True for writers that wrote something lately; the others are asked now and then: most are long gone."""
        busy = _BUSY_LOOKS if followed.stamp is None else _STAMPED_LOOKS
        return followed.quiet < busy or (self._looks + followed.next) % _IDLE_LOOKS == 0

    def _next_of(
        self, writer: str, followed: _Followed, read: Callable[[str], bytes | None]
    ) -> Iterator[tuple[str, bytes]]:
        while True:
            key = f"{self._stream}/{writer}/{followed.next:08d}.jsonl"
            data = read(key)
            if data is None:
                followed.quiet += 1
                return
            followed.next, followed.quiet = followed.next + 1, 0
            yield key, data


def chunk_keys(store: Store, stream: str) -> list[str]:
    """Return the keys of all chunks of a stream: by writer, first to last."""
    entries = store.list(f"{stream}/")
    return [one.key for one in entries if _CHUNK.fullmatch(one.key.removeprefix(f"{stream}/").partition("/")[2])]


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
