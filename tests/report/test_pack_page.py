from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from pack.pictures import photo, saved
from packtrain.pack.manifest import FORMAT, Drops, Kind, Manifest, ShardFile, Split
from packtrain.pack.picture import to_tiled
from packtrain.pack.shard import Columns, Ragged
from packtrain.pack.tiles import Tiled
from packtrain.pack.vocabulary import BOS, EOS, Vocabulary
from packtrain.report.pack_page import PICTURES, TEXTS, THUMBNAIL_PIXELS, evenly, print_stats, sample_page, thumbnail
from packtrain.report.pack_stats import Measure, PackStats, Tally, stats_of
from report.pages import Page

EVIL = "<script>alert(1)</script>\"'&"
U2, I4 = np.dtype("<u2"), np.dtype("<i4")
VOCABULARY = Vocabulary.fit(["the cat sat on the mat", f"a {EVIL}", "die Katze saß auf der Matte"] * 3, 400)
Shards = Mapping[str, Sequence[Columns]]


def tokens(text: str) -> list[int]:
    return [BOS, *VOCABULARY.encode([text])[0], EOS]


def pairs(*rows: tuple[str, str]) -> Columns:
    sides = {"source": [row[0] for row in rows], "target": [row[1] for row in rows]}
    return Columns({name: Ragged.from_rows([tokens(text) for text in texts], U2) for name, texts in sides.items()})


PICTURE = to_tiled(saved(photo(200, 150), "JPEG"))


def pictures(tiled: Sequence[Tiled], labels: Sequence[int] = (), captions: Sequence[Sequence[str]] = ()) -> Columns:
    ragged = {"jpeg": Ragged.from_rows([one.jpeg for one in tiled], np.dtype("u1"))}
    plain = {name: np.array([getattr(one, name) for one in tiled], I4) for name in ("width", "height")}
    if captions:
        coded = [[tokens(caption) for caption in some] for some in captions]
        ragged["captions"] = Ragged.from_rows([[token for row in some for token in row] for some in coded], U2)
        ragged["caption_lengths"] = Ragged.from_rows([list(map(len, some)) for some in coded], U2)
    else:
        plain["label"] = np.array(labels, I4)
    return Columns(ragged, plain)


def labelled(counts: Iterable[int]) -> Columns:
    """One picture for all, as a shard that is small however many samples it has."""
    given = list(counts)
    labels = np.repeat(np.arange(len(given)), given)
    offsets = np.zeros(len(labels) + 1, np.int64)
    offsets[-1] = len(PICTURE.jpeg)
    sizes = {name: np.full(len(labels), 100 + number, I4) for number, name in enumerate(("width", "height"))}
    return Columns({"jpeg": Ragged(np.frombuffer(PICTURE.jpeg, np.uint8), offsets)}, {**sizes, "label": labels})


def manifest_of(
    kind: Kind, shards: Shards, classes: Sequence[str] = (), name: str = "mine-0123", **split: object
) -> Manifest:
    def described(columns: Sequence[Columns]) -> Split:
        samples = sum(map(len, columns))
        files = tuple(ShardFile("file", 1000, "0" * 64, len(one)) for one in columns)
        given = {"filtered": {}, "dropped": {}, "sources": (samples,), **split}
        return Split(samples=samples, shards=files, **given)  # type: ignore[arg-type]

    splits = {name: described(columns) for name, columns in shards.items()}
    return Manifest(FORMAT, name, kind, {}, splits, tuple(classes))


def stats_for(kind: Kind, shards: Shards, **more: object) -> PackStats:
    return stats_of(manifest_of(kind, shards, **more), shards.__getitem__)  # type: ignore[arg-type]


def page_for(kind: Kind, shards: Shards, vocabulary: Vocabulary | None = VOCABULARY, **more: object) -> Page:
    return Page(sample_page(stats_for(kind, shards, **more), shards.__getitem__, vocabulary))


def printed(stats: PackStats) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    print_stats(console, stats)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def measure(stats: PackStats, split: str, name: str) -> Measure:
    [found] = [one for part in stats.splits if part.name == split for one in part.measures if one.name == name]
    return found


# Numbers.


@given(st.lists(st.lists(st.integers(0, 300), max_size=30), min_size=1, max_size=5).filter(any))
def test_a_measure_is_exact_however_the_numbers_are_divided_into_shards(parts: list[list[int]]) -> None:
    tally = Tally()
    for part in parts:
        tally.add(np.array(part, np.int32))
    got = tally.measure("source", "tokens")
    numbers = np.array([number for part in parts for number in part])
    assert got is not None
    assert (got.count, got.least, got.most) == (len(numbers), numbers.min(), numbers.max())
    assert got.mean == pytest.approx(numbers.mean())
    assert got.median == np.percentile(numbers, 50, method="inverted_cdf")
    assert got.percentile_95 == np.percentile(numbers, 95, method="inverted_cdf")
    assert sum(one.count for one in got.bins) == len(numbers)
    assert got.bins[0].low <= got.least
    assert 1 <= len(got.bins) <= 40
    for one in got.bins[:-1]:
        assert one.count == ((numbers >= one.low) & (numbers <= one.high)).sum()


def test_no_numbers_are_no_measure() -> None:
    assert Tally().measure("source", "tokens") is None


def test_a_few_huge_values_do_not_flatten_the_histogram() -> None:
    tally = Tally()
    tally.add(np.array([*range(1, 1000), 10**9]))
    got = tally.measure("width", "pixels")
    assert got is not None
    assert got.most == 10**9
    assert len(got.bins) > 10
    assert got.bins[-1].high < 1100


def test_pairs_are_measured_in_tokens() -> None:
    shards = {"train": [pairs(("the cat", "die Katze")), pairs(("the cat sat on the mat", "die"))]}
    stats = stats_for("pairs", shards)
    lengths = [len(tokens("the cat")), len(tokens("the cat sat on the mat"))]
    source = measure(stats, "train", "source")
    assert (source.least, source.most, source.count) == (min(lengths), max(lengths), 2)
    assert (stats.splits[0].samples, stats.splits[0].shards, stats.splits[0].bytes) == (2, 2, 2000)
    assert stats.vocabulary is None
    assert stats_of(manifest_of("pairs", shards), shards.__getitem__, VOCABULARY).vocabulary == len(VOCABULARY)


def test_classes_are_counted_the_empty_ones_too() -> None:
    stats = stats_for("labels", {"train": [labelled([3, 0, 5]), labelled([1])]}, classes=["ant", "bee", "cat"])
    [train] = stats.splits
    assert [(one.name, one.count) for one in train.classes] == [("ant", 4), ("bee", 0), ("cat", 5)]
    assert train.smallest_class is train.classes[1]
    assert train.largest_class is train.classes[2]
    assert measure(stats, "train", "height").median == 101


def test_captions_are_measured_one_by_one() -> None:
    shards = {"train": [pictures([PICTURE, PICTURE], captions=[["the cat", "the cat sat on the mat"], ["a"]])]}
    stats = stats_for("captions", shards)
    assert measure(stats, "train", "caption").count == 3
    assert measure(stats, "train", "caption").most == len(tokens("the cat sat on the mat"))
    assert measure(stats, "train", "captions").mean == 1.5
    assert measure(stats, "train", "width").least == 200


def test_shards_may_come_one_at_a_time() -> None:
    shards = {"train": [labelled([2, 3]), labelled([4, 1])], "valid": [labelled([1, 1])]}
    manifest = manifest_of("labels", shards, ["ant", "bee"])

    def one_by_one(split: str) -> Iterator[Columns]:
        return iter(shards[split])

    stats = stats_of(manifest, one_by_one)
    assert stats == stats_of(manifest, shards.__getitem__)
    assert sample_page(stats, one_by_one) == sample_page(stats, shards.__getitem__)


# In the terminal.


def test_what_went_in_and_what_was_left_out_is_printed() -> None:
    left_out = {
        "filtered": {"duplicate pair": Drops(1312, tuple(f"train.en:{number}" for number in range(10)))},
        "dropped": {"cut off": Drops(2, ("a.jpg", "b.jpg"))},
        "sources": (1, 1),
    }
    text = printed(stats_for("pairs", {"train": [pairs(("the cat", "die Katze"), ("a", "a"))]}, **left_out))
    for words in ("mine-0123", "1,312", "duplicate pair", "train.en:9", "cut off", "a.jpg, b.jpg", "1 + 1"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_thousand_classes_are_printed_from_both_ends() -> None:
    names = [f"n{number:08d}" for number in range(1000)]
    text = printed(stats_for("labels", {"train": [labelled(range(1, 1001))]}, classes=names))
    assert "classes of train: 1,000, from 1 to 1,000 samples each" in text
    assert "... 980 more ..." in text
    assert [name for name in names if name in text] == names[:10] + names[-10:]


@pytest.mark.parametrize("number", [2, 10, 11, 20, 21])
def test_no_class_is_printed_twice_or_left_out_silently(number: int) -> None:
    names = [f"class-{one}." for one in range(number)]
    text = printed(stats_for("labels", {"train": [labelled([1] * number)]}, classes=names))
    assert sum(text.count(name) for name in names) == min(number, 20)
    assert ("1 more" in text) == (number == 21)


def test_names_are_neither_markup_nor_do_they_steer_the_terminal() -> None:
    names = ["[red]cat[/red]", "\x1b[2Jdog", "[/]"]
    drops = {"dropped": {"[bold]why": Drops(1, ("\x1b]0;title\x07",))}}
    text = printed(
        stats_for("labels", {"train@[/x]": [labelled([1])], "train": [labelled([1, 2, 3])]}, classes=names, **drops)
    )
    assert "[red]cat[/red]" in text
    assert "[bold]why" in text
    assert "\x1b" not in text


def test_copies_in_other_sizes_show_only_their_sizes() -> None:
    shards = {"train": [labelled([1, 2])], "train@160": [labelled([1, 2])]}
    stats = stats_for("labels", shards, classes=["ant", "bee"], dropped={"cut off": Drops(1, ("x",))})
    text = printed(stats)
    assert "train@160   width" in text
    assert text.count("cut off") == 1
    assert text.count("classes of") == 1
    assert page_for("labels", shards, classes=["ant", "bee"]).tags.count("h2") == 2


# The page.


def test_the_page_may_fetch_and_run_nothing() -> None:
    page = page_for("labels", {"train": [pictures([PICTURE] * 3, [0, 1, 1])]}, classes=["ant", "bee"])
    policies = [value for value in page.values("content") if "default-src" in value]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert not {"script", "link", "iframe", "object", "form", "a"} & set(page.tags)
    assert page.tags.count("img") == 3
    assert all(value.startswith("data:image/jpeg;base64,") for value in page.values("src"))
    assert not page.values("href")
    assert not re.search(r"url\(|@import", "".join(page.text))


@pytest.mark.parametrize("kind", ["pairs", "labels", "captions"])
def test_every_text_is_escaped(kind: Kind) -> None:
    columns = {
        "pairs": pairs((EVIL, EVIL)),
        "labels": pictures([PICTURE] * 2, [0, 1]),
        "captions": pictures([PICTURE], captions=[[EVIL, EVIL]]),
    }[kind]
    left_out = {"dropped": {EVIL: Drops(1, (EVIL,))}, "filtered": {EVIL: Drops(1, (EVIL,))}}
    classes = [EVIL, f"{EVIL}2"] if kind == "labels" else []
    page = page_for(kind, {EVIL: [columns]}, classes=classes, name=EVIL, **left_out)
    assert "<script" not in page.html
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "".join(page.text).count("<script>alert(1)</script>") >= 8


def test_texts_are_decoded_and_cut() -> None:
    page = page_for("pairs", {"train": [pairs(("the cat", "a\x00\x1b\nb"), ("mat " * 400, ""))]})
    assert "the cat" in page.text
    assert "a\ufffd\ufffd\nb" in page.text
    [long] = [text for text in page.text if text.startswith("mat mat")]
    assert len(long) < 600
    assert long.endswith(" ...")


def test_each_side_has_its_own_vocabulary_if_there_are_two() -> None:
    other = Vocabulary.fit(["zebra zebra zebra"], 300)
    row = Columns({name: Ragged.from_rows([VOCABULARY.encode(["the cat"])[0]], U2) for name in ("source", "target")})
    manifest = manifest_of("pairs", {"train": [row]})
    stats = stats_of(manifest, lambda _split: [row], VOCABULARY, other)
    assert (stats.vocabulary, stats.target_vocabulary) == (len(VOCABULARY), len(other))
    assert Page(sample_page(stats, lambda _split: [row], VOCABULARY, other)).text.count("the cat") == 1
    assert Page(sample_page(stats, lambda _split: [row], VOCABULARY)).text.count("the cat") == 2


def test_without_a_vocabulary_texts_are_numbers() -> None:
    page = page_for("pairs", {"train": [pairs(("the cat", "a"))]}, vocabulary=None)
    assert " ".join(map(str, tokens("the cat"))) in page.text


def test_a_picture_has_its_class_or_its_first_caption_below_it() -> None:
    labels = page_for("labels", {"train": [pictures([PICTURE] * 2, [1, 7])]}, classes=["ant", "bee"])
    assert "class 7, which has no name" in labels.text
    assert labels.text.count("bee") >= 2
    captions = page_for("captions", {"train": [pictures([PICTURE], captions=[["the cat", "the mat"]])]})
    assert "the cat" in captions.text
    assert "the mat" not in captions.text
    assert "200 x 150\nthe cat\nthe mat" in captions.values("title")


def test_thumbnails_are_small_and_show_the_whole_picture() -> None:
    page = page_for("labels", {"train": [pictures([PICTURE], [0])]}, classes=["ant", "bee"])
    [source] = page.values("src")
    image = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert image.size == (THUMBNAIL_PIXELS, THUMBNAIL_PIXELS * 150 // 200)
    assert image.mode == "RGB"


def test_grey_pictures_have_thumbnails_too() -> None:
    assert thumbnail(saved(photo(300, 300, mode="L"), "JPEG")) is not None


@pytest.mark.parametrize("data", [b"", b"not a picture", PICTURE.jpeg[:300], saved(photo(9, 9), "PNG")])
def test_what_is_no_jpeg_has_no_thumbnail(data: bytes) -> None:
    assert thumbnail(data) is None
    broken = Tiled(data, PICTURE.segments, 10, 10)
    page = page_for("labels", {"train": [pictures([broken, PICTURE], [0, 1])]}, classes=["ant", "bee"])
    assert page.tags.count("img") == 1
    assert "cannot be opened" in page.text


def test_a_picture_that_claims_too_many_pixels_is_not_decoded() -> None:
    at = PICTURE.jpeg.index(b"\xff\xc0") + 5
    huge = PICTURE.jpeg[:at] + (60000).to_bytes(2, "big") * 2 + PICTURE.jpeg[at + 4 :]
    assert thumbnail(huge) is None


def test_samples_are_taken_evenly_from_all_shards() -> None:
    shards = [pairs(*((f"the {number}", "a") for number in range(start, start + 50))) for start in range(0, 150, 50)]
    page = page_for("pairs", {"train": shards})
    shown = [int(text[4:]) for text in page.text if re.fullmatch("the [0-9]+", text)]
    assert len(shown) == TEXTS
    assert (shown[0], shown[-1]) == (0, 149)
    assert {3, 4} >= set(np.diff(shown).tolist())
    sheet = page_for("labels", {"train": [labelled([50, 50])]}, classes=["ant", "bee"])
    assert sheet.html.count('<div class="frame">') == PICTURES


@given(st.integers(0, 10**7), st.integers(1, 100))
def test_evenly_has_both_ends_and_no_number_twice(total: int, most: int) -> None:
    numbers = evenly(total, most)
    assert len(numbers) == min(total, most)
    assert numbers == sorted(set(numbers))
    assert set(numbers[:1]) <= {0}
    assert total < 2 or most < 2 or numbers[-1] == total - 1
    assert not numbers or np.ptp(np.diff(numbers) if len(numbers) > 1 else [0]) <= 1


def test_a_thousand_classes_are_charted_from_both_ends() -> None:
    names = [f"n{number:08d}" for number in range(1000)]
    page = page_for("labels", {"train": [labelled(range(1, 1001))]}, classes=names)
    shown = [text for text in page.text if re.fullmatch("n[0-9]{8}: [0-9,]+", text)]
    assert [text.partition(":")[0] for text in shown] == [*names[:-21:-1], *names[19::-1]]
    assert len(page.html) < 200_000


def test_charts_hold_numbers_only_and_stay_inside() -> None:
    shards = {"train": [pictures([PICTURE, to_tiled(saved(photo(20, 30), "JPEG"))] * 4, [0] * 8)]}
    page = page_for("labels", shards, classes=["ant", "a class with a name that is much longer than there is room for"])
    for name in ("x", "y", "width", "height", "x1", "y1"):
        for value in page.values(name):
            assert 0 <= float(value) <= 560
    assert "a class with a name that is..." in page.text


def test_names_that_are_no_text_do_not_break_the_page() -> None:
    page = page_for("labels", {"train": [labelled([1, 1])]}, classes=["\udcff", "\u202eright"])
    assert page.html.encode()
    assert "\u202e" not in page.html
