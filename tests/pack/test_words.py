from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.pack.words import count_words, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("  ", 0),
        ("Grüße aus Köln!", 3),
        ("추운 겨울", 2),  # Korean has spaces
        ("доброе утро", 2),
        ("你好", 1),
        ("今天天气很好。", 3),
        ("我们使用 GPU 训练模型", 5),
        ("我们使用GPU训练模型", 5),
        ("「你好」", 1),
        ("カタカナ", 1),
        ("日本語を話します", 3),
        ("สวัสดี", 1),
        ("ខ្ញុំ\u200bទៅ", 2),
        ("a\u200bb", 1),
    ],
)
def test_words_are_counted_by_spaces_or_estimated_from_characters(text: str, words: int) -> None:
    assert count_words(text) == words


@given(st.text(st.characters(max_codepoint=0xDFF) | st.sampled_from(" \t\u2028\u3000")))
def test_a_text_in_a_script_with_spaces_has_the_words_between_them(text: str) -> None:
    assert count_words(text) == len(text.split())
    assert split_words(text) == text.split()


def test_letters_without_spaces_are_split_one_by_one() -> None:
    assert split_words("我们用 GPU 训练") == ["我", "们", "用", "GPU", "训", "练"]
