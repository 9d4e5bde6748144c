from __future__ import annotations

from pathlib import Path

import pytest

from pack.corpus import Pairs, data_of, write_pairs
from packtrain.job import Bitext, Data
from packtrain.pack import text
from packtrain.pack.raw import TextPair
from packtrain.pack.shard import Ragged, open_shard
from packtrain.pack.text import Selection, encode_pairs, fit_vocabulary, select
from packtrain.pack.vocabulary import BOS, EOS

MIXED: Pairs = [
    ("one two", "eins zwei"),
    ("", "nichts"),
    ("nothing", " "),
    ("one two", "eins zwei"),
    ("one two", "eins und zwei"),
    ("a b c d e f", "viel zu lang"),
    ("short", "a b c d"),
]


def selected(folder: Path, pairs: Pairs, training: bool, **settings: object) -> Selection:
    data = data_of([write_pairs(folder / "a.tsv", pairs)], **settings)
    return select(data.train, data, training)


def kept(selection: Selection) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in selection.pairs]


def test_training_pairs_are_filtered_and_every_drop_has_its_reason(tmp_path: Path) -> None:
    selection = selected(tmp_path, MIXED, True, max_words=5, max_ratio=3.0)
    assert kept(selection) == [("one two", "eins zwei"), ("one two", "eins und zwei")]
    assert selection.dropped == {
        "one side is empty": 2,
        "the same pair again": 1,
        "more than 5 words": 1,
        "one side more than 3 times as long": 1,
    }


def test_what_is_evaluated_stays_whole(tmp_path: Path) -> None:
    selection = selected(tmp_path, MIXED, False, max_words=5, max_ratio=3.0)
    assert kept(selection) == list(MIXED)
    assert not selection.dropped


def test_limits_are_the_last_that_is_kept(tmp_path: Path) -> None:
    pairs = [("a b c d e f", "u v"), ("a b c d e f g", "u v w")]
    selection = selected(tmp_path, pairs, True, max_words=6, max_ratio=3.0)
    assert kept(selection) == [("a b c d e f", "u v")]
    assert selection.dropped == {"more than 6 words": 1}


def test_the_same_pair_is_found_across_sources(tmp_path: Path) -> None:
    one, other = (write_pairs(tmp_path / name, [("hello", "hallo")]) for name in ("one.tsv", "other.tsv"))
    sources = (Bitext(paths=(one,)), Bitext(paths=(other,)))
    selection = select(sources, data_of([one]), training=True)
    assert kept(selection) == [("hello", "hallo")]
    assert selection.dropped == {"the same pair again": 1}


def test_sources_follow_each_other_in_order(tmp_path: Path) -> None:
    one = write_pairs(tmp_path / "one.tsv", [("a", "b"), ("c", "d")])
    other = write_pairs(tmp_path / "other.tsv", [("e", "f")])
    data: Data = data_of([one])
    selection = select((Bitext(paths=(other,)), Bitext(paths=(one,))), data, training=True)
    assert kept(selection) == [("e", "f"), ("a", "b"), ("c", "d")]


def encoded(folder: Path, pairs: list[TextPair]) -> tuple[list[dict[str, Ragged]], list[int], list[list[int]]]:
    vocabulary = fit_vocabulary(pairs, 300)
    shards, counts = [], []
    for number, (data, samples) in enumerate(encode_pairs(pairs, vocabulary)):
        (folder / str(number)).write_bytes(data)
        shards.append(open_shard(folder / str(number)))
        counts.append(samples)
    return shards, counts, vocabulary.encode([pair.source for pair in pairs])


def test_sources_end_and_targets_begin_and_end_with_a_mark(tmp_path: Path) -> None:
    pairs = [TextPair("one two", "eins"), TextPair("x", "y")]
    [columns], counts, rows = encoded(tmp_path, pairs)
    assert counts == [2]
    assert [row.tolist() for row in columns["source"]] == [[*row, EOS] for row in rows]
    for row in columns["target"]:
        assert (row[0], row[-1]) == (BOS, EOS)


def test_a_large_split_is_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_SHARD_SAMPLES", 2)
    pairs = [TextPair(letter, letter) for letter in "abcde"]
    shards, counts, rows = encoded(tmp_path, pairs)
    assert counts == [2, 2, 1]
    joined = [row.tolist() for shard in shards for row in shard["source"]]
    assert joined == [[*row, EOS] for row in rows]
