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
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from packtrain.errors import Mistake

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_ZSTD_BYTES = 1 << 10  # read at once: zstd packs up to 32,768 times as much into them, and gives all of it at once
_START_BYTES = 10


class Codec(NamedTuple):
    """`ending` is that of the names of its files, `command` decompresses them, `start` is what they begin with."""

    ending: str
    command: str
    start: re.Pattern[bytes]
    opened: Callable[[BinaryIO], object]


class _Unzstd(io.RawIOBase):
    """The contents of a zstd file, as a stream; unlike zstandard's own reader, it refuses a truncated file."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard  # here: other formats do not wait for it

        self._file, self._error, self._decompressor = file, zstandard.ZstdError, zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._is_inside = False  # of a frame
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._ready:
            packed = self._packed or self._file.read(_ZSTD_BYTES)
            if not packed:
                if self._is_inside:
                    raise EOFError("ended before the end of its last frame")
                return 0
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(str(error)) from error
            self._packed, self._is_inside = self._frame.unused_data, not self._frame.eof
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
        with memoryview(buffer).cast("B") as view:
            size = min(len(view), len(self._ready))
            view[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


CODECS = (
    Codec(".gz", "gunzip", re.compile(rb"\x1f\x8b"), gzip.open),
    # Text may begin with "BZh": the digits of pi follow, or those of its square root in an empty file.
    Codec(".bz2", "bunzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.open),
    Codec(".xz", "unxz", re.compile(rb"\xfd7zXZ\0"), lzma.open),
    Codec(".zst", "unzstd", re.compile(rb"\x28\xb5\x2f\xfd"), lambda file: io.BufferedReader(_Unzstd(file))),
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
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(shown, error) from error
    except OSError as error:
        if error.errno is None:  # from a decompressor
            raise _damaged(shown, error) from error
        raise Mistake(f"{shown}: {error.strerror or error}") from error


def _damaged(shown: object, error: Exception) -> Mistake:
    return Mistake(f"{shown}: damaged or incomplete compressed file ({error}); download it again")
