"""Aligned text: two files whose lines n are translations of each other, or one file of tab-separated pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.job.kinds import Drop, Source
from packtrain.pack.manifest import Kind
from packtrain.pack.raw import TextPair, read_lines


class BitextSource(Source):
    """Two aligned text files, or one TSV of pairs."""

    contents = frozenset({"pairs"})
    path_counts = (1, 2)
    example = "[train.en, train.de]"

    def pack_kind(self) -> Kind:
        return "pairs"

    def pairs(self, drop: Drop) -> Iterator[TextPair]:  # noqa: ARG002
        """Yield all pairs; refuse files of unequal length, invalid UTF-8 and lines without a tab."""
        if len(self.paths) == 1:
            yield from read_tsv(Path(self.paths[0]))
        else:
            yield from _read_two(Path(self.paths[0]), Path(self.paths[1]))


def read_tsv(path: Path) -> Iterator[TextPair]:
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split("\t")
        if len(fields) != 2:
            raise Mistake(f"{path}:{number}: expected two texts separated by a tab, found {len(fields)}")
        yield TextPair(fields[0], fields[1])


def _read_two(source: Path, target: Path) -> Iterator[TextPair]:
    for one, other in zip_longest(read_lines(source), read_lines(target)):
        if one is None or other is None:
            counts = [sum(1 for _ in read_lines(path)) for path in (source, target)]
            raise Mistake(
                f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,};"
                " aligned files must have the same number of lines"
            )
        yield TextPair(one, other)
