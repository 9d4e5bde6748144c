from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from pack.pictures import photo, saved, with_size
from packtrain.data.pack import Pack
from packtrain.job.job import DataSettings
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.manifest import Drops
from packtrain.pack.shard import Columns
from packtrain.pack.workers import InProcess
from packtrain.report.pack_page import PICTURES, TEXTS, THUMBNAIL_PIXELS, evenly, print_stats, sample_page, thumbnail
from packtrain.report.pack_stats import Bar, Measure, PackStats, count, measure, stats_of
from packtrain.store import open_store
from report.pages import Page

EVIL = "<script>alert(1)</script>\"'&"
JPEG = saved(photo(200, 150), "JPEG")
Records = Sequence[dict[str, Any]]
CLASSES: Records = [{"image": f"{number}.jpg", "label": "bee" if number else "ant"} for number in range(4)]


@dataclass(frozen=True)
class Packed:
    """A pack of samples as JSON lines, made in a scratch store."""

    opened: Pack

    def columns(self, split: str) -> Iterator[Columns]:
        return self.opened.split(split).shards()

    @property
    def stats(self) -> PackStats:
        manifest = self.opened.manifest
        return stats_of(manifest, self.columns, [len(self.opened.vocabulary)] if manifest.vocabulary else [])

    def measure(self, name: str) -> Measure:
        [found] = [one for one in self.stats.splits[0].measures if one.name == name]
        return found

    def page(self, stats: PackStats | None = None) -> Page:
        vocabularies = [self.opened.vocabulary] if self.opened.manifest.vocabulary else []
        return Page(sample_page(stats or self.stats, self.columns, vocabularies))


Make = Callable[..., Packed]


@pytest.fixture
def packed(tmp_path: Path) -> Make:
    def make(records: Records, **settings: Any) -> Packed:
        for record in records:
            if "image" in record:
                (tmp_path / record["image"]).write_bytes(JPEG)
        (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        train = [{"folder": str(tmp_path / "samples.jsonl")}]
        data = DataSettings.model_validate({"train": train, "vocabulary": 400, "max_words": 999, **settings})
        store = open_store(str(tmp_path / "store"), create=True)
        manifest = pack("mine", data, store, InProcess(), PlainProgress(lambda _: None))
        return Packed(Pack(store, manifest.name, tmp_path / "cache"))

    return make


def printed(stats: PackStats) -> str:
    out = io.StringIO()
    print_stats(Console(file=out, width=100, force_terminal=False), stats)
    return out.getvalue()


def with_classes(stats: PackStats, counts: dict[str, int]) -> PackStats:
    classes = sorted((Bar(name, number) for name, number in counts.items()), key=lambda bar: -bar.count)
    return replace(stats, splits=(replace(stats.splits[0], classes=tuple(classes)),))


@given(st.lists(st.lists(st.integers(0, 300), max_size=30), min_size=1, max_size=5).filter(any))
def test_a_measure_is_exact_however_the_numbers_are_divided_into_shards(parts: list[list[int]]) -> None:
    counted: Counter[int] = Counter()
    for part in parts:
        count(np.array(part, np.int32), counted)
    got = measure("source, tokens", counted)
    numbers = np.array([number for part in parts for number in part])
    assert (got.minimum, got.maximum) == (numbers.min(), numbers.max())
    assert got.mean == pytest.approx(numbers.mean())
    assert got.median == np.percentile(numbers, 50, method="inverted_cdf")
    assert got.percentile_95 == np.percentile(numbers, 95, method="inverted_cdf")
    assert sum(bar.count for bar in got.bins) == len(numbers)
    for bar in got.bins[:-1]:
        low, _, high = bar.name.partition(" to ")
        assert bar.count == ((numbers >= int(low)) & (numbers <= int(high or low))).sum()


def test_a_few_huge_values_do_not_flatten_the_histogram() -> None:
    got = measure("width, pixels", Counter([*range(1, 1000), 10**9]))
    assert got.maximum == 10**9
    assert len(got.bins) > 10
    assert got.bins[-1].name == "950 or more"


def test_pairs_and_captions_are_measured_in_tokens_and_images_in_pixels(packed: Make) -> None:
    texts = packed([{"source": "cat", "target": "Katze"}, {"source": "the cat sat on the mat", "target": "Matte"}])
    longest = len(texts.opened.vocabulary.encode(["the cat sat on the mat"])[0])
    assert texts.measure("source, tokens").maximum == longest + 1
    captions = packed([{"image": "1.jpg", "caption": ["a", "cat"]}, {"image": "2.jpg", "caption": "mat"}])
    assert captions.measure("captions, per image").mean == 1.5
    assert (captions.measure("width, pixels").median, captions.measure("height, pixels").median) == (200, 150)


def test_the_terminal_shows_splits_measures_classes_and_what_was_left_out(packed: Make) -> None:
    stats = packed(CLASSES, sizes=[100]).stats
    drops = {"duplicate pair": Drops(1312, tuple(f"train.en:{number}" for number in range(10)))}
    train = replace(stats.splits[0], split=replace(stats.splits[0].split, filtered=drops))
    text = printed(replace(stats, splits=(train, *stats.splits[1:])))
    for words in ("images with classes", "2 classes", "1,312", "duplicate pair", "train.en:9", "75.0%"):
        assert words in text
    assert "train@100   width, pixels    133" in text
    assert "classes of train: 2, 1 to 3 samples each" in text
    assert text.count("classes of") == 1  # copies in other sizes show only their sizes
    assert max(map(len, text.splitlines())) <= 100


def test_what_was_left_out_of_pairs_is_shown_with_its_share_and_its_line(packed: Make) -> None:
    kept = [{"source": f"line {number}", "target": f"Zeile {number}"} for number in range(3)]
    made = packed([*kept, {"source": "这一行中文太长了一点", "target": "lang"}], max_words=4)
    [row] = [line.split() for line in printed(made.stats).splitlines() if "more than 4 words" in line]
    assert row == ["train", "filtered", "1", "25.0%", *["more", "than", "4", "words", "samples.jsonl:4"]]
    assert {"25.0%", "samples.jsonl:4"} <= set(made.page().text)


@pytest.mark.parametrize("number", [2, 10, 11, 20, 21, 1000])
def test_many_classes_are_shown_from_both_ends_and_none_twice(number: int, packed: Make) -> None:
    made = packed(CLASSES)
    names = [f"n{one:08d}" for one in range(number)]
    stats = with_classes(made.stats, {name: one + 1 for one, name in enumerate(names)})
    text = printed(stats)
    assert sum(text.count(name) for name in names) == min(number, 20)
    assert (f"... {number - 20} more ..." in text) == (number > 20)
    shown = [one.partition(":")[0] for one in made.page(stats).text if re.fullmatch("n[0-9]{8}: [0-9,]+", one)]
    assert shown == (names[::-1] if number <= 40 else [*names[:-21:-1], *names[19::-1]])


def test_names_are_never_markup_or_control_characters(packed: Make) -> None:
    made = packed(CLASSES)
    stats = with_classes(made.stats, {"[red]cat[/red]": 1, "\x1b[2Jdog": 1, "\udcff": 1, "\u202eright": 1})
    text = printed(stats)
    assert "[red]cat[/red]" in text
    assert "\x1b" not in text
    page = made.page(stats)
    assert page.html.encode()
    assert "\u202e" not in page.html


@pytest.mark.parametrize(
    "record",
    [{"source": EVIL, "target": EVIL}, {"image": "x.jpg", "label": EVIL}, {"image": "x.jpg", "caption": [EVIL, EVIL]}],
)
def test_a_page_escapes_all_text_and_loads_nothing(record: dict[str, Any], packed: Make) -> None:
    made = packed([record, *CLASSES] if "label" in record else [record])
    stats, drops = made.stats, {EVIL: Drops(1, (EVIL,))}
    split = replace(stats.splits[0], name=EVIL, split=replace(stats.splits[0].split, dropped=drops))
    made.opened.manifest.splits[EVIL] = split.split
    page = made.page(replace(stats, splits=(split,)))
    assert "<script" not in page.html
    assert "".join(page.text).count("<script>alert(1)</script>") >= 5
    assert not {"script", "link", "iframe", "object", "form", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "href"]
    assert all(value.startswith("data:image/jpeg;base64,") for value in page.values("src"))
    policies = [value for value in page.values("content") if "default-src" in value]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_each_side_of_a_pair_is_decoded_with_its_vocabulary_and_shortened(packed: Make) -> None:
    made = packed([{"source": "the cat", "target": "a\x00\x1b\nb"}, {"source": "mat " * 400, "target": "m " * 99}])
    page = made.page()
    assert "the cat" in page.text
    assert r"a\x00\x1b" "\nb" in page.text
    [long] = [text for text in page.text if text.startswith("mat mat")]
    assert len(long) < 600
    assert long.endswith(" ...")


def test_an_image_has_its_class_or_first_caption_below_it_and_its_thumbnail(packed: Make) -> None:
    captions = packed([{"image": "1.jpg", "caption": ["the cat", "the mat"]}]).page()
    assert "the cat" in captions.text
    assert "the mat" not in captions.text
    assert "200 x 150\nthe cat\nthe mat" in captions.values("title")
    [source] = captions.values("src")
    image = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert (image.size, image.mode) == ((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS * 150 // 200), "RGB")
    labels = packed(CLASSES)
    assert labels.page().text.count("bee") >= 3
    few = replace(labels.opened.manifest, classes=("ant",))
    assert "unknown class 1" in labels.page(replace(labels.stats, manifest=few)).text


def test_only_a_sound_jpeg_of_reasonable_size_has_a_thumbnail() -> None:
    assert thumbnail(saved(photo(300, 300, mode="L"), "JPEG")) is not None
    for data in (b"", b"not an image", JPEG[:300], saved(photo(9, 9), "PNG"), with_size(JPEG, 60000, 60000)):
        assert thumbnail(data) is None


def test_samples_are_evenly_spaced(packed: Make) -> None:
    page = packed([{"source": f"the {number}", "target": "a"} for number in range(150)]).page()
    shown = [int(text[4:]) for text in page.text if re.fullmatch("the [0-9]+", text)]
    assert (len(shown), shown[0], shown[-1]) == (TEXTS, 0, 149)
    assert set(np.diff(shown).tolist()) <= {3, 4}
    images = packed([{"image": f"{number}.jpg", "label": str(number % 2)} for number in range(70)]).page()
    assert images.html.count('<div class="frame">') == PICTURES


@given(st.integers(0, 10**7), st.integers(1, 100))
def test_evenly_spaced_numbers_include_both_ends(total: int, most: int) -> None:
    numbers = evenly(total, most)
    assert len(numbers) == min(total, most)
    assert total < 2 or most < 2 or (numbers[0], numbers[-1]) == (0, total - 1)
    assert not numbers or np.ptp(np.diff(numbers) if len(numbers) > 1 else [0]) <= 1


def test_charts_stay_inside_their_frame_and_shorten_long_names(packed: Make) -> None:
    made = packed(CLASSES)
    page = made.page(with_classes(made.stats, {"a class with a name that is far too long": 10**9, "b": 0}))
    for name in ("x", "y", "width"):
        assert all(0 <= float(value) <= 560 for value in page.values(name) if value.replace(".", "").isdigit())
    assert "a class with a name that is..." in page.text
