"""Compressed files: gzip, bzip2, xz and zstd, recognized by their first bytes, or by the ending of their name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from packtrain.errors import Mistake

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_PACKED_BYTES = 1 << 10  # read at once: zstd packs up to 32,768 times as much into them, and gives all of it at once
_READ_BYTES = 1 << 16
_XZ_MEMORY = 256 << 20  # `xz -9` needs 65 MB, and a file could ask for 4 GB; zstandard's own limit is 128 MB
_START_BYTES = 10


class Codec(NamedTuple):
    """`ending` is that of the names of its files, `command` decompresses them, `start` is what they begin with."""

    ending: str
    command: str
    start: re.Pattern[bytes]
    opened: Callable[[BinaryIO], object]


class _ZstdFrame:
    """A zstd frame, with the interface of `bz2.BZ2Decompressor`."""

    def __init__(self) -> None:
        import zstandard  # here: other formats do not wait for it

        self._error, self._frame = zstandard.ZstdError, zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")

    @property
    def needs_input(self) -> bool:
        return not self._ready

    @property
    def eof(self) -> bool:
        return self._frame.eof and not self._ready

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, packed: bytes, max_length: int) -> memoryview:
        if packed:
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(str(error)) from error
        data, self._ready = self._ready[:max_length], self._ready[max_length:]
        return data


class ByteStream(io.RawIOBase):
    """A stream of the bytes that `next_bytes` returns: at most `size` of them, and none at the end."""

    def next_bytes(self, size: int) -> bytes | memoryview:
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        with memoryview(buffer).cast("B") as view:
            data = self.next_bytes(len(view))
            view[: len(data)] = data
        return len(data)


class _Frames(ByteStream):
    """The contents of a file of frames, as a stream; zeros may follow a frame.

    The readers of bz2 and lzma take a damaged frame after the first for the end of the file, and that of zstandard a
    file that was cut off.
    """

    def __init__(self, file: BinaryIO, start: Callable[[], Any]) -> None:
        self._file, self._start, self._frame = file, start, start()

    def next_bytes(self, size: int) -> bytes:
        data = b""
        while not data:
            packed = b""
            if self._frame.eof:
                packed = self._frame.unused_data.lstrip(b"\0")
                while not packed and (read := self._file.read(_PACKED_BYTES)):
                    packed = read.lstrip(b"\0")
                if not packed:
                    break
                self._frame = self._start()
            elif self._frame.needs_input:
                packed = self._file.read(_PACKED_BYTES)
                if not packed:
                    raise EOFError("it ends within its last frame")
            data = self._frame.decompress(packed, size)
        return data


def _framed(start: Callable[[], Any]) -> Callable[[BinaryIO], io.BufferedReader]:
    return lambda file: io.BufferedReader(_Frames(file, start), _READ_BYTES)


CODECS = (
    Codec(".gz", "gunzip", re.compile(rb"\x1f\x8b"), gzip.open),
    # Text may begin with "BZh": the digits of pi follow, or those of its square root in an empty file.
    Codec(".bz2", "bunzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), _framed(bz2.BZ2Decompressor)),
    Codec(".xz", "unxz", re.compile(rb"\xfd7zXZ\0"), _framed(partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY))),
    Codec(".zst", "unzstd", re.compile(rb"\x28\xb5\x2f\xfd"), _framed(_ZstdFrame)),
)


def codec_of(start: bytes) -> Codec | None:
    """Return how the data that starts like this is compressed."""
    return next((codec for codec in CODECS if codec.start.match(start)), None)


def plain_name(name: str) -> str:
    """Return the name in lower case and without the ending of a compressed file."""
    name = name.lower()
    return next((name.removesuffix(codec.ending) for codec in CODECS if name.endswith(codec.ending)), name)


@contextmanager
def decompressed(file: BinaryIO, name: str = "") -> Iterator[BinaryIO]:
    """Close the file in the end, and let its contents be read, decompressed if they or the name say so."""
    with file:
        codec = codec_of(cast(io.BufferedReader, file).peek(_START_BYTES))
        if codec is None:
            codec = next((codec for codec in CODECS if name.lower().endswith(codec.ending)), None)
        if codec is None:
            yield file
        else:
            with cast(BinaryIO, codec.opened(file)) as contents:
                yield contents


@contextmanager
def faults_as_mistakes(shown: object) -> Iterator[None]:
    """Refuse a file that cannot be read, or not be decompressed."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not from a decompressor
            raise Mistake(f"{shown}: {error.strerror or error}") from error
        raise Mistake(f"{shown}: damaged or incomplete compressed file ({error}); download it again") from error
