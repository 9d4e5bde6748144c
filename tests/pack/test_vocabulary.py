from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from packtrain.errors import Mistake, PacktrainError
from packtrain.pack.vocabulary import BOS, EOS, PAD, UNKNOWN, Vocabulary, is_too_long

SPECIAL = {PAD, EOS, BOS, UNKNOWN}
TEXTS = ["the cat sat on the mat", "die Katze saß auf der Matte", "the cat <eos> saw the mat"] * 3
VOCABULARY = Vocabulary.fit(TEXTS, 320)

EXAMPLE_TEXT = Path(__file__).parents[2] / "examples/data/en-de/valid.de.gz"
FIT_AND_ENCODE = """
import gzip, hashlib, sys
from packtrain.pack.vocabulary import Vocabulary
lines = gzip.open(sys.argv[1], "rt", encoding="utf-8").read().split("\\n")
vocabulary = Vocabulary.fit(lines * 4, 2000)
print(hashlib.sha256(vocabulary.to_json().encode()).hexdigest())
print(hashlib.sha256(repr(vocabulary.encode(lines)).encode()).hexdigest())
"""


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("👨\u200d👩\u200d👧 and 🇩🇪")
@example("a\x00b\x07c\x1b[31m")
@example("e\u0301 is not é")
@example("漢字 кириллица العربية")
@example("two  spaces\tand\na line")
@example("\ufeff")
@example("<eos>")
def test_any_text_round_trips_except_for_surrounding_spaces(text: str) -> None:
    [row] = VOCABULARY.encode([text])
    assert VOCABULARY.decode([row]) == [text.strip()]
    assert not SPECIAL & set(row)


@pytest.mark.parametrize("written", ["<pad>", "<eos>", "<bos>", "<unk>"])
def test_a_special_token_in_a_text_is_encoded_as_text(written: str) -> None:
    text = f"mind the {written} in{written}side"
    [row] = VOCABULARY.encode([text])
    assert not SPECIAL & set(row)
    assert VOCABULARY.decode([row]) == [text]


def test_a_vocabulary_read_back_encodes_the_same() -> None:
    again = Vocabulary.from_json(VOCABULARY.to_json())
    texts = [*TEXTS, "<eos> 😀"]
    assert again.encode(texts) == VOCABULARY.encode(texts)
    assert again.to_json() == VOCABULARY.to_json()
    assert len(again) == len(VOCABULARY)


def test_the_library_reads_a_stored_vocabulary_as_its_own() -> None:
    stored = VOCABULARY.to_json()
    assert json.loads(Tokenizer.from_str(stored).to_str()) == json.loads(stored)


def test_special_tokens_have_the_numbers_of_the_recipes() -> None:
    assert (PAD, EOS, BOS, UNKNOWN) == (0, 1, 2, 3)
    special = [(token["id"], token["content"]) for token in json.loads(VOCABULARY.to_json())["added_tokens"]]
    assert special == [(PAD, "<pad>"), (EOS, "<eos>"), (BOS, "<bos>"), (UNKNOWN, "<unk>")]


def test_special_and_unknown_tokens_decode_to_nothing() -> None:
    [row] = VOCABULARY.encode(["the cat"])
    assert VOCABULARY.decode([[BOS, *row, EOS, PAD, len(VOCABULARY), 100_000]]) == ["the cat"]


def test_an_incomplete_character_decodes_without_an_error() -> None:
    [row] = VOCABULARY.encode(["ж"])
    [text] = VOCABULARY.decode([row[:-1]])
    assert "ж" not in text


@pytest.mark.parametrize("text", ["x" * 16_001, "ж" * 8_001, "word " * 4_000])
def test_a_text_that_is_too_long_is_neither_learned_from_nor_encoded(text: str) -> None:
    assert is_too_long(text)
    for attempt in (lambda: Vocabulary.fit(["short", text], 300), lambda: VOCABULARY.encode(["short", text])):
        with pytest.raises(
            Mistake, match=r"^a text has more than 16,000 bytes; shorten it: '(xxx|жжж|word)"
        ) as refused:
            attempt()
        assert len(str(refused.value)) < 150


def test_a_text_of_16_000_bytes_is_encoded() -> None:
    text = "ж" * 8_000
    assert VOCABULARY.decode(VOCABULARY.encode([text])) == [text]


def test_an_empty_text_has_no_tokens() -> None:
    assert VOCABULARY.encode([]) == []
    assert VOCABULARY.encode([""]) == [[]]
    assert VOCABULARY.decode([[]]) == [""]


def test_a_vocabulary_has_the_requested_size_or_what_the_texts_allow() -> None:
    assert len(VOCABULARY) <= 320
    assert len(Vocabulary.fit(TEXTS, 270)) == 270
    assert len(Vocabulary.fit(["x"], 5000)) < 300


def test_frequent_words_are_one_token() -> None:
    assert [len(row) for row in VOCABULARY.encode(["the", "cat", "the cat"])] == [1, 1, 2]


def test_both_languages_share_one_vocabulary() -> None:
    assert VOCABULARY.encode(["mat the"]) == [VOCABULARY.encode(["mat"])[0] + VOCABULARY.encode(["the"])[0]]


def test_a_damaged_vocabulary_is_refused_in_one_line() -> None:
    with pytest.raises(PacktrainError, match="pack the data again") as refused:
        Vocabulary.from_json('{"model":')
    assert "\n" not in str(refused.value)


EXPANDING = {"type": "Replace", "pattern": {"Regex": "."}, "content": "xxxxxxxxxxxxxxxx"}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["normalizer"], {"type": "Sequence", "normalizers": [EXPANDING] * 12}),
        (["pre_tokenizer"], {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]}),
        (["pre_tokenizer", "use_regex"], False),
        (["post_processor"], {"type": "ByteLevel", "trim_offsets": True}),
        (["decoder"], {"type": "Sequence", "decoders": [EXPANDING] * 12}),
        (["padding"], {"strategy": {"Fixed": 1 << 40}}),
        (["truncation"], {"max_length": 1}),
        (["added_tokens"], []),
        (["added_tokens", 0, "content"], "a"),
        (["model", "type"], "Unigram"),
        (["model", "dropout"], 0.5),
        (["model", "vocab"], {}),
        (["model", "vocab"], []),
        (["model", "vocab", "Ġ"], 10**9),
        (["model", "vocab", "Ġ"], -1),
        (["model", "vocab", "Ġ"], 3.5),
        (["model", "vocab", "Ġ"], True),
        (["model", "vocab", "one more"], 5),
        (["model", "vocab", "\ud800"], len(VOCABULARY)),
        (["model", "merges"], [["no such token", "a"]]),
        (["model", "merges"], [["z", "z"]]),
        (["model", "merges"], ["a b"]),
        (["model", "merges"], {}),
        (["model"], None),
        (["another"], None),
    ],
    ids=str,
)
def test_only_a_vocabulary_in_the_form_that_is_written_is_read(place: list[str], value: object) -> None:
    document = json.loads(VOCABULARY.to_json())
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(PacktrainError, match=r"vocabulary is damaged.*pack the data again") as refused:
        Vocabulary.from_json(json.dumps(document))
    assert "\n" not in str(refused.value)


def test_a_huge_or_garbled_vocabulary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(VOCABULARY.to_json())
    assert Vocabulary.from_file(path).to_json() == VOCABULARY.to_json()
    path.write_bytes(b'{"model": "\xff"}')
    with pytest.raises(PacktrainError, match=r"vocabulary is damaged \(not UTF-8 at byte 11\); pack the data again"):
        Vocabulary.from_file(path)
    os.truncate(path, 40 << 30)
    with pytest.raises(PacktrainError, match=r"vocabulary is damaged \(it has 42,949,672,960 bytes\); pack the data"):
        Vocabulary.from_file(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", '{"model": []}', "\x00"])
def test_a_file_that_is_no_vocabulary_is_refused(text: str) -> None:
    with pytest.raises(PacktrainError, match=r"vocabulary is damaged.*pack the data again"):
        Vocabulary.from_json(text)


@pytest.mark.usefixtures("processes")
def test_the_number_of_threads_changes_nothing() -> None:
    settings = [
        {"TOKENIZERS_PARALLELISM": "false"},
        {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "1"},
        {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "7"},
    ]
    command = [sys.executable, "-c", FIT_AND_ENCODE, str(EXAMPLE_TEXT)]
    digests = [
        subprocess.run(command, env={**os.environ, **one}, check=True, capture_output=True, text=True).stdout.split()
        for one in settings
    ]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1] == digests[2]


def test_a_text_encoded_mostly_in_bytes_is_strange() -> None:
    vocabulary = Vocabulary.fit(["schöne Grüße", "größer und schöner"] * 3, 320)
    for text in ("", "hello", "Größe", "plain words and 你", "a\x00b"):
        assert not vocabulary.is_strange(text)
    for text in ("你今天好吗", "доброе утро", "😀"):
        assert vocabulary.is_strange(text)
