"""Append-only streams of records in the store: every flush is a new object, and nothing is rewritten.

A stream (`runs/en-de-1/metrics`) has a folder for each writer, with numbered chunks of JSON lines. Readers remember the
last chunk of each writer, so following costs one listing per writer.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol

from packtrain.run.records import DamagedRecord, Record, decode_many
from packtrain.store import Entry, Store, StoreError
from packtrain.units import show_bytes

MAX_CHUNK_BYTES = 4 << 20
"""What gathers while a store is away becomes several chunks: readers refuse an object of more than `RECORD_BYTES`."""
MAX_STREAM_BYTES = 1 << 30
"""The most that one call reads: millions of steps. A store may have more than a machine has memory."""
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
        line = json.dumps(vars(record), default=vars, ensure_ascii=False)  # without the copies that asdict makes
        with self._collecting:
            self._lines.append(f"{line}\n".encode(errors="replace"))

    def flush(self) -> None:
        """Put what was collected; what fails is kept for the next flush.

        A put that failed may have reached the store and been read there, so exactly the same bytes are put again.
        """
        with self._flushing:
            self._put_chunks()  # first what failed, under the numbers that it had
            with self._collecting:  # not held while putting: a slow store must not block `append`
                lines, self._lines = self._lines, []
            self._unsure.extend(_joined(lines))
            self._put_chunks()

    def _put_chunks(self) -> None:
        while self._unsure:
            self._store.put(f"{self._folder}/{self._chunk:08d}.jsonl", self._unsure[0])
            self._unsure.popleft()
            self._chunk += 1


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

    def skip(self) -> ChunkReader[Record]:
        """Take what is there as read, and return the reader."""
        entries = {writer: self._entries(writer) for writer in self._writers()}
        self._seen = {writer: chunks[-1].key for writer, chunks in entries.items() if chunks}
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

    def _writers(self) -> list[str]:
        return self._store.folders(f"{self._stream}/")

    def _entries(self, writer: str, after: str | None = None) -> list[Entry]:
        folder = f"{self._stream}/{writer}/"
        return [one for one in self._store.list(folder, after) if _CHUNK.fullmatch(one.key.removeprefix(folder))]

    def _parse(self, key: str) -> list[Record]:
        lines = self._store.get(key).splitlines()
        return decode_many(self._record, b"[" + b",".join(lines) + b"]", f"{key} in {self._store.url}")


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
