"""The kinds of packs: what each reads from raw data, how it packs that, and how people see its samples.

Adding a kind is one file with a `PackKind` and one line here. A recipe and a raw format name a kind by its word, which
manifests store, too.
"""

# ruff: noqa: ARG002 - methods have the arguments of the interface, used or not

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from packtrain.job.job import DataSettings
from packtrain.job.kinds import Drop, Source, kind_class
from packtrain.pack.shard import Columns

if TYPE_CHECKING:
    from packtrain.pack.build import PackContents, Packing
    from packtrain.pack.manifest import Split
    from packtrain.pack.vocabulary import Vocabulary

PACK_KINDS: dict[str, str] = {
    "pairs": "packtrain.pack.pairs:PairPacks",
    "labels": "packtrain.pack.images:LabelPacks",
    "captions": "packtrain.pack.images:CaptionPacks",
}


def kind_of(word: str) -> PackKind:
    kind: PackKind = kind_class(PACK_KINDS, word)()
    return kind


@dataclass(frozen=True)
class ShownSample:
    """A sample as people see it: its texts and, for an image, its JPEG and size in pixels."""

    texts: Sequence[str]
    jpeg: bytes = b""
    width: int = 0
    height: int = 0


class PackKind(ABC):
    """One kind of pack. A pack with classes has them in the plain column `label`, by their number."""

    noun: ClassVar[str]
    """One sample in a report: `image`."""
    nouns: ClassVar[str]
    """Samples in the messages of packing: `images with captions`."""
    title: ClassVar[str]
    """Samples as the heading of a page."""
    heads: ClassVar[Sequence[str]] = ()
    """What the texts of a sample are, as heads of a table; empty for images, which are shown on a sheet instead."""
    first_samples: ClassVar[int] = 256
    """The number of samples of each source that are enough to plan with."""
    has_sizes: ClassVar[bool] = False
    """True if a pack has copies in the sizes of `data.sizes`."""
    reads_text: ClassVar[bool] = False
    """True if its raw files are text, which takes more room when it is unpacked."""
    drops_samples_only: ClassVar[bool] = True
    """True if everything that is left out is a sample, so that its share of all samples can be told."""

    @abstractmethod
    def settings(self, data: DataSettings) -> dict[str, Any]:
        """Return the settings, beside the sources, that the bytes of a pack depend on."""

    @abstractmethod
    def samples(self, source: Source, drop: Drop, filtered: Drop, classes: Sequence[str] = ()) -> Iterator[Any]:
        """Read the samples of a source. `classes` are those of the training data; by default those of the source."""

    @abstractmethod
    def raw_bytes(self, sample: Any) -> int:
        """Return the bytes of a sample in the raw files."""

    @abstractmethod
    def pack(self, packing: Packing) -> PackContents:
        """Put the shards of all splits into the store, and what is learned from the training data."""

    def warnings(self, splits: Mapping[str, Split]) -> Iterator[str]:
        """Yield what a person should check in the raw data, judging by what was left out."""
        yield from ()

    def mean_cost(self, train: Split) -> float:
        """Return what a training sample adds to a batch on average, as far as a manifest tells."""
        return 1.0

    @abstractmethod
    def measures(self) -> Mapping[str, Callable[[Columns], NDArray[Any]]]:
        """Return the numbers of the samples of a shard whose distribution `pack --stats` shows, by their names."""

    @abstractmethod
    def shown(
        self, shard: Columns, row: int, classes: Sequence[str], vocabularies: Sequence[Vocabulary]
    ) -> ShownSample:
        """Return the sample in a row of a shard as people see it."""
