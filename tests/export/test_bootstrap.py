from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from packtrain.export.bootstrap import RESAMPLES, Difference, Interval, difference_of, interval_of, resampled, widened
from packtrain.recipes.statistics import Statistic, bleu_rows, bleu_statistic, chrf_statistic, mean, ratio

WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "two", "dogs", "were", "sleeping", "in", "sun", ".")


def sentences(count: int) -> list[str]:
    chosen = random.Random(1)  # noqa: S311
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(3, 12))) for _ in range(count)]


def worse(texts: Sequence[str], share: float, seed: int) -> list[str]:
    """Return the texts with a share of their words replaced: the output of a model of that quality."""
    chosen = random.Random(seed)  # noqa: S311
    return [
        " ".join(chosen.choice(WORDS) if chosen.random() < share else word for word in text.split()) for text in texts
    ]


def statistics(outputs: Sequence[str], references: Sequence[str]) -> dict[str, Statistic]:
    rows = bleu_rows(outputs, [[text] for text in references], "13a")
    return {"BLEU": bleu_statistic(rows), "chrF2": chrf_statistic(outputs, references)}


@pytest.mark.parametrize("share", [0.22, 0.25, 0.4])
def test_intervals_and_p_values_are_those_of_sacrebleu(share: float) -> None:
    references = sentences(150)
    first, second = worse(references, 0.2, seed=1), worse(references, share, seed=2)
    metrics = {"BLEU": BLEU(), "chrF2": CHRF()}
    _, found = PairedTest([("first", first), ("second", second)], metrics, [references], "bs")()
    ours = [statistics(texts, references) for texts in (first, second)]
    scores = [resampled(one) for one in ours]
    for name in metrics:
        intervals = [interval_of(one[name]) for one in scores]
        values = [one[name].value for one in ours]
        results = [result for result in found[name] if isinstance(result, Result)]
        assert values == pytest.approx([result.score for result in results], abs=1e-9)
        # SacreBLEU reports half of the interval. It sums in 32 bits, so the last digits differ.
        halves = [(one.high - one.low) / 2 for one in intervals]
        assert halves == pytest.approx([result.ci for result in results], abs=1e-3)
        p_value = difference_of(scores[0][name], scores[1][name], values[1] - values[0]).p_value
        assert p_value == pytest.approx(results[1].p_value, abs=2 / RESAMPLES)


def test_the_scores_of_single_samples_are_those_of_sacrebleu() -> None:
    references = ["yes", "the cat", *sentences(40), "so it is"]
    outputs = ["yes", "the dog", *worse(references[2:-1], 0.3, seed=1), ""]
    found = statistics(outputs, references)
    for name, metric in (("BLEU", BLEU(effective_order=True)), ("chrF2", CHRF())):
        texts = zip(outputs, references, strict=True)
        expected = [metric.sentence_score(output, [reference]).score for output, reference in texts]
        assert found[name].by_sample == pytest.approx(expected, abs=1e-9)
    assert found["BLEU"].by_sample[0] == pytest.approx(100)


def test_a_sample_that_does_not_count_has_no_score() -> None:
    assert ratio([0.5, 0.0, 0.0], [1, 0, 1]).by_sample == [0.5, None, 0.0]


def test_the_interval_of_a_mean_is_that_of_its_normal_distribution() -> None:
    values = np.random.default_rng(7).normal(3.0, 2.0, size=400)
    scores = resampled({"mean": mean(values)})["mean"]
    error = values.std() / np.sqrt(len(values))
    found, expected = interval_of(scores), [values.mean() - 1.96 * error, values.mean() + 1.96 * error]
    assert [found.low, found.high] == pytest.approx(expected, abs=0.03)


def test_the_ends_of_an_interval_are_scores_of_resamples() -> None:
    assert interval_of(np.arange(1000.0)[::-1]) == Interval(25.0, 974.0)
    assert interval_of(np.array([4.0])) == Interval(4.0, 4.0)


def test_resamples_are_the_same_however_many_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"mean": mean(np.arange(37.0))}
    whole = resampled(one, resamples=50)["mean"]
    monkeypatch.setattr("packtrain.export.bootstrap._WEIGHTS", 100)
    assert resampled(one, resamples=50)["mean"].tolist() == whole.tolist()
    assert resampled(one, resamples=50, seed=2)["mean"].tolist() != whole.tolist()


def test_scores_of_one_model_are_resampled_together() -> None:
    values = np.arange(20.0)
    scores = resampled({"mean": mean(values), "double": ratio(2 * values, np.ones(20))})
    assert scores["double"] == pytest.approx(2 * scores["mean"])


def test_one_sample_has_no_spread() -> None:
    assert interval_of(resampled({"mean": mean([2.5])})["mean"]) == Interval(2.5, 2.5)


def test_equal_models_do_not_differ() -> None:
    scores = resampled({"mean": mean(np.arange(20.0))})["mean"]
    found = difference_of(scores, scores, 0.0)
    assert found == Difference(0.0, Interval(0.0, 0.0), 1.0)
    assert not found.is_significant


def test_a_constant_difference_is_beyond_noise_and_a_small_one_is_not() -> None:
    noise = np.random.default_rng(3)
    values = noise.normal(size=200)
    own = resampled({"mean": mean(values)})["mean"]
    shifted = difference_of(own, resampled({"mean": mean(values + 1)})["mean"], 1.0)
    assert shifted.is_significant
    assert shifted.p_value == 1 / (RESAMPLES + 1)
    assert [shifted.interval.low, shifted.interval.high] == pytest.approx([1.0, 1.0])
    others = values + noise.normal(scale=0.5, size=200)
    unsure = difference_of(own, resampled({"mean": mean(others)})["mean"], float((others - values).mean()))
    assert not unsure.is_significant
    assert unsure.p_value > 0.05


def test_a_difference_with_zero_in_its_interval_is_noise_whatever_the_test_says() -> None:
    assert not Difference(1.0, Interval(-0.1, 2.1), 0.04).is_significant
    assert Difference(1.0, Interval(0.1, 1.9), 0.04).is_significant
    assert not Difference(1.0, Interval(0.1, 1.9), 0.06).is_significant


@pytest.mark.parametrize("samples", [3, 5, 20])
def test_a_widened_interval_has_the_value_in_19_of_20_small_samples(samples: int) -> None:
    draws, resampled_wrong, widened_wrong = np.random.default_rng(5), 0, 0
    for _ in range(1000):
        values = draws.normal(size=samples)
        interval = interval_of(resampled({"mean": mean(values)}, resamples=200)["mean"])
        resampled_wrong += 0.0 not in interval
        widened_wrong += 0.0 not in widened(Difference(float(values.mean()), interval, 1.0), samples)
    assert 30 < widened_wrong < 75
    assert widened_wrong < resampled_wrong


def test_widening_does_nothing_to_many_samples_and_takes_all_meaning_from_one() -> None:
    many = widened(Difference(0.5, Interval(0.1, 0.9), 0.01), 1000)
    assert [many.low, many.high] == pytest.approx([0.1, 0.9], abs=0.001)
    assert 0.0 in widened(Difference(7.0, Interval(7.0, 7.0), 0.01), 1)


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_sums_are_sacrebleus_scores_of_a_corpus(seed: int) -> None:
    """Corpora so short that n-grams are missing: smoothing and the penalty for brevity matter."""
    chosen = random.Random(seed)  # noqa: S311
    references = sentences(40)[seed::9]
    outputs = [" ".join(text.split()[: chosen.randint(0, 5)]) for text in worse(references, 0.6, seed)]
    found = statistics(outputs, references)
    assert found["BLEU"].value == pytest.approx(BLEU().corpus_score(outputs, [references]).score)
    assert found["chrF2"].value == pytest.approx(CHRF().corpus_score(outputs, [references]).score)


def test_outputs_without_a_match_have_a_score_of_zero() -> None:
    found = statistics(["", "x y"], ["a b", "c"])
    assert [one.value for one in found.values()] == [0.0, 0.0]
