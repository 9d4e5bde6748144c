from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack.corpus import data_of
from packtrain.pack.pairs import encode, filter_reason, fingerprint, repeated
from packtrain.pack.raw import TextPair
from packtrain.pack.vocabulary import BOS, EOS, Vocabulary

DATA = data_of(["a.tsv"], max_words=6, max_ratio=3.0)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("one two", "eins zwei", None),
        ("", "nichts", "one side is empty"),
        ("nothing", " ", "one side is empty"),
        ("a b c d e f g", "u v w", "more than 6 words"),
        ("short", "a b c d", "one side more than 3 times as long"),
        ("a b c d e f", "u v", None),
        ("five words in this line", "这一行有五个词", None),
        ("five words in this line", "この行には五つの単語があります", None),
        ("five words in this line", "บรรทัดนี้มีห้าคำ", None),
        ("too long", "这一行中文的字数远远超过了限制", "more than 6 words"),
        ("short", "这一行中文字太多了", "one side more than 3 times as long"),
        ("x" * 16_001, "eins", "text of more than 16,000 bytes"),
        ("eins", "ж" * 8_001, "text of more than 16,000 bytes"),
    ],
)
def test_a_pair_is_filtered_for_one_reason(source: str, target: str, reason: str | None) -> None:
    assert filter_reason(TextPair(source, target), DATA) == reason


def test_a_fingerprint_distinguishes_the_sides() -> None:
    assert fingerprint(TextPair("a b", "c")) != fingerprint(TextPair("a", "b c"))
    assert fingerprint(TextPair("a", "b")) == fingerprint(TextPair("a", "b"))


@given(st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=60))
def test_all_but_the_first_of_equal_fingerprints_are_repeated(values: list[int]) -> None:
    expected = [value in values[:place] for place, value in enumerate(values)]
    assert repeated(array("Q", values)).tolist() == expected


def test_sources_end_with_eos_and_targets_also_start_with_bos() -> None:
    pairs = [TextPair("one two", "eins"), TextPair("x", "y"), TextPair("z", "w")]
    vocabulary = Vocabulary.fit(["one two three", "eins zwei"], 300)
    columns = encode(pairs, vocabulary, vocabulary, block_pairs=2).ragged
    sources = vocabulary.encode([pair.source for pair in pairs])
    rows = range(len(columns["source"]))
    assert [columns["source"][row].tolist() for row in rows] == [[*source, EOS] for source in sources]
    for row in rows:
        assert (columns["target"][row][0], columns["target"][row][-1]) == (BOS, EOS)
    assert len(columns["target"]) == 3
