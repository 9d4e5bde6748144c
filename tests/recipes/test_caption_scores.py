"""BLEU and CIDEr against values computed by hand from their definitions."""

from __future__ import annotations

import math

import pytest
from sacrebleu.metrics.bleu import BLEU

from packtrain.recipes.caption.scores import Cider, ngrams, words
from recipes.captioned import bleu, mean_cider

REFERENCES = [
    ["a dog runs on the grass", "the brown dog is running over grass"],
    ["two men ride a red motorcycle", "men on a motorcycle", "two people riding one motorcycle down the road"],
    ["a plate of food"],
]
OUTPUTS = ["a dog is running on the grass", "two men on a red motorcycle", "a bowl of hot food on a table"]


def test_words_are_lower_case_and_without_punctuation() -> None:
    said = words("A cat\u2019s “red” medium-dark coat isn't, (No. 7)!")
    assert said == ["a", "cat", "'s", "red", "medium-dark", "coat", "is", "n't", "no", "7"]
    assert words("Ein Mädchen, 黑猫") == ["ein", "mädchen", "黑", "猫"]
    assert words(" .,- ") == []


def test_clitics_are_words_of_their_own_and_numbers_stay_whole() -> None:
    assert words("I can't, they'll; we shouldn't've") == ["i", "ca", "n't", "they", "'ll", "we", "should", "n't", "'ve"]
    assert words("you cannot read the dogs' 'sign'") == ["you", "can", "not", "read", "the", "dogs", "sign"]
    assert words("At 7 o'clock, mother-in-law's tea") == ["at", "7", "o'clock", "mother-in-law", "'s", "tea"]
    assert words("7:30pm, 3.5 or 1,000. 1/2 12.5-inch") == ["7:30", "pm", "3.5", "or", "1,000", "1/2", "12.5-inch"]


def test_n_grams_are_counted() -> None:
    assert ngrams(["a", "b", "a", "b"], 2) == {("a", "b"): 2, ("b", "a"): 1}
    assert ngrams(["a"], 2) == {}


# BLEU.


def test_a_right_caption_has_a_bleu_of_100() -> None:
    assert bleu(["A dog runs on the grass."], [REFERENCES[0]]) == pytest.approx((100.0,) * 4)


def test_a_word_counts_no_more_often_than_in_any_one_reference() -> None:
    """The example of the paper: 2 of 7 words."""
    said = ["the the the the the the the"]
    references = [["the cat is on the mat", "there is a cat on the mat"]]
    assert bleu(said, references)[0] == pytest.approx(100 * 2 / 7)


def test_the_brevity_penalty_uses_the_reference_of_the_closest_length() -> None:
    one, two, *_ = bleu(["a dog"], [["a dog runs on grass", "the very brown dog is running over grass"]])
    assert one == pytest.approx(100 * math.exp(1 - 5 / 2))
    assert two == pytest.approx(one)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_outputs_may_have_different_numbers_of_references(order: int) -> None:
    most = max(len(references) for references in REFERENCES)
    streams = [[references[at] if at < len(references) else None for references in REFERENCES] for at in range(most)]
    peer = BLEU(max_ngram_order=order, smooth_method="none", tokenize="none", lowercase=True)
    assert bleu(OUTPUTS, REFERENCES)[order - 1] == pytest.approx(peer.corpus_score(OUTPUTS, streams).score)  # type: ignore[arg-type]


def test_empty_outputs_score_0() -> None:
    assert bleu([""], [["a dog"]]) == (0.0, 0.0, 0.0, 0.0)
    assert bleu([], []) == (0.0, 0.0, 0.0, 0.0)
    assert mean_cider(Cider([["a dog"]]), [""], [["a dog"]]) == 0.0
    assert mean_cider(Cider([]), [], []) == 0.0


# CIDEr.


def test_cider_of_one_word_by_hand() -> None:
    """Three images; `dog` is in one of them. Only n-grams of one word exist, so the other three orders give 0."""
    cider = Cider([["dog"], ["cat"], ["cat"]])
    assert cider.score_of("dog", ["dog"]) == pytest.approx(1000 / 4)
    assert cider.score_of("dog", ["cat"]) == 0.0


def test_cider_of_two_words_by_hand() -> None:
    cider = Cider([["red dog", "old dog"], ["red cat"], ["blue bird"]])
    once, twice = math.log(3), math.log(3 / 2)  # weights of what one image has, and of what two have
    cosine = once * once / math.hypot(once, twice) / math.hypot(once, once)
    assert cider.score_of("red dog", ["old dog"]) == pytest.approx(1000 * cosine / 4)
    assert cider.score_of("red dog", ["red dog"]) == pytest.approx(1000 * 2 / 4)
    both = (1000 * cosine / 4 + 1000 * 2 / 4) / 2
    assert cider.score_of("red dog", ["old dog", "red dog"]) == pytest.approx(both)


def test_cider_clips_repeated_words_and_penalizes_the_length() -> None:
    """Written three times, the word counts once; three words are two more than one."""
    cider = Cider([["dog"], ["cat"]])
    weight = math.log(2)
    similarity = weight * weight / (3 * weight * weight) * math.exp(-(2**2) / (2 * 6**2))
    assert cider.score_of("dog dog dog", ["dog"]) == pytest.approx(1000 * similarity / 4)


def test_joined_cider_equals_that_of_all_references() -> None:
    joined, whole = Cider.joined([Cider(REFERENCES[:1]), Cider(REFERENCES[1:])]), Cider(REFERENCES)
    assert mean_cider(joined, OUTPUTS, REFERENCES) == mean_cider(whole, OUTPUTS, REFERENCES) > 0.0


def test_ngrams_of_every_image_have_no_weight() -> None:
    assert Cider([["a dog"], ["a cat"]]).score_of("a", ["a dog"]) == 0.0


def test_cider_is_the_mean_over_images() -> None:
    cider = Cider(REFERENCES)
    each = [cider.score_of(output, references) for output, references in zip(OUTPUTS, REFERENCES, strict=True)]
    assert mean_cider(cider, OUTPUTS, REFERENCES) == pytest.approx(sum(each) / 3)
    assert each[0] > each[2] > 0.0
