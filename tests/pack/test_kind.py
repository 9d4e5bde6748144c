"""Every kind of pack says what the rest asks it, and a new one is a class and a line."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from packtrain.data.pack import Pack
from packtrain.job.job import DataSettings
from packtrain.job.kinds import FORMATS, Drop, Source
from packtrain.pack.build import PackContents, Packing, PlainProgress, ShardTarget, empty_contents, pack, splits_of
from packtrain.pack.kind import PACK_KINDS, PackKind, ShownSample, kind_of
from packtrain.pack.manifest import find_manifest, pack_key
from packtrain.pack.raw import DropCounter, read_lines
from packtrain.pack.shard import Columns, Ragged
from packtrain.pack.vocabulary import Vocabulary
from packtrain.pack.workers import InProcess
from packtrain.plan.raw import pack_head
from packtrain.report.pack_page import print_stats, sample_page
from packtrain.report.pack_stats import stats_of
from packtrain.store import open_store
from packtrain.store.records import DamagedRecord

Signal = tuple[list[int], str]


class SignalSource(Source):
    contents = frozenset({"signals"})
    path_counts = (1,)
    example = "signals.txt"

    def pack_kind(self) -> str:
        return "signals"

    def signals(self) -> Iterator[Signal]:
        for line in read_lines(Path(self.paths[0])):
            *numbers, label = line.split()
            yield [int(number) for number in numbers], label


class SignalPacks(PackKind):
    """Rows of numbers in `signal`, with the class of each in `label`."""

    noun, nouns, title = "signal", "signals", "signals with classes"
    heads = ("signal", "class")
    first_samples = 5

    def settings(self, data: DataSettings) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def samples(self, source: Source, drop: Drop, filtered: Drop, classes: Sequence[str] = ()) -> Iterator[Signal]:  # noqa: ARG002
        assert isinstance(source, SignalSource)
        return source.signals()

    def raw_bytes(self, sample: Signal) -> int:
        return 2 * len(sample[0])

    def pack(self, packing: Packing) -> PackContents:
        contents = empty_contents(packing.data)
        read = {
            split: [list(self.samples(source, DropCounter(), DropCounter()))[: packing.first] for source in sources]
            for split, sources in splits_of(packing.data).items()
        }
        contents.classes = tuple(sorted({label for signals in read["train"] for _, label in signals}))
        for split, sources in read.items():
            for number, signals in enumerate(sources):
                rows, labels = zip(*signals, strict=True)
                numbers = np.array([contents.classes.index(label) for label in labels], "<i4")
                columns = Columns({"signal": Ragged.from_rows(rows, np.dtype("<i4"))}, {"label": numbers})
                place = ShardTarget(packing.name, split, number, number)
                contents.splits[split].shards.append(place.put(packing.store, columns, DropCounter()))
        return contents

    def measures(self) -> Mapping[str, Callable[[Columns], NDArray[Any]]]:
        return {"numbers, per signal": lambda shard: shard.ragged["signal"].lengths}

    def shown(
        self,
        shard: Columns,
        row: int,
        classes: Sequence[str],
        vocabularies: Sequence[Vocabulary],  # noqa: ARG002
    ) -> ShownSample:
        return ShownSample([" ".join(map(str, shard.ragged["signal"][row])), classes[int(shard.plain["label"][row])]])


@pytest.fixture
def signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    """The data of a job with signals, of a kind and a format that are registered here."""
    monkeypatch.setitem(PACK_KINDS, "signals", f"{__name__}:SignalPacks")
    monkeypatch.setitem(FORMATS, "signals", f"{__name__}:SignalSource")
    path = tmp_path / "signals.txt"
    path.write_text("".join(f"{number} {number + 1} {'high' if number > 9 else 'low'}\n" for number in range(20)))
    return DataSettings.model_validate({"train": [{"signals": [str(path)]}]})


def test_a_new_kind_is_packed_counted_and_shown(tmp_path: Path, signals: DataSettings) -> None:
    store, told = open_store(str(tmp_path / "store"), create=True), list[str]()
    manifest = pack("beeps", signals, store, InProcess(), PlainProgress(told.append))
    assert told == ["train: 20 signals"]
    assert (manifest.kind, manifest.classes) == ("signals", ("high", "low"))
    opened = Pack(store, manifest.name, tmp_path / "cache").split("train")
    stats = stats_of(manifest, lambda _: [opened.shard(0)])
    printed = io.StringIO()
    print_stats(Console(file=printed, width=100, force_terminal=False), stats)
    assert "signals with classes" in printed.getvalue()
    assert "numbers, per signal" in printed.getvalue()
    page = sample_page(stats, lambda _: [opened.shard(0)])
    assert "<th>signal</th><th>class</th>" in page
    assert '<td class="text" dir="auto">19 20</td><td class="text" dir="auto">high</td>' in page


def test_a_plan_packs_the_first_samples_of_a_new_kind(tmp_path: Path, signals: DataSettings) -> None:
    head = pack_head(signals, open_store(str(tmp_path / "store"), create=True))
    assert head.manifest.splits["train"].samples == 5
    assert head.samples == {"train": [20.0]}
    assert not head.is_all


def test_a_pack_of_an_unknown_kind_is_refused(tmp_path: Path, signals: DataSettings) -> None:
    store = open_store(str(tmp_path / "store"), create=True)
    manifest = pack("beeps", signals, store, InProcess(), PlainProgress(lambda _: None))
    key = pack_key(manifest.name, "manifest.json")
    store.put(key, manifest.to_json().replace(b'"kind": "signals"', b'"kind": "smells"'))
    with pytest.raises(DamagedRecord, match="is damaged; delete it and pack again"):
        find_manifest(store, manifest.name)


@pytest.mark.parametrize("word", PACK_KINDS)
def test_every_kind_has_its_words_and_a_size_to_plan_with(word: str) -> None:
    kind = kind_of(word)
    assert kind.noun
    assert kind.nouns
    assert kind.title
    assert kind.first_samples > 0
    assert kind.measures()
