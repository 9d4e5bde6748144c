"""Scores as functions of sums over samples, so that a score of any resample costs one product of matrices.

The formulas of BLEU and chrF are SacreBLEU's, for many corpora at once. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packtrain.data.order import Ids

Floats = NDArray[np.float64]

BLEU_ORDERS = 4
CHRF_ORDERS = 6
_CHRF_BETA = 2
_MAX_EXPONENT = 700.0  # beyond that, exp overflows


@dataclass(frozen=True, eq=False)
class Statistic:
    """The parts of a score: a row for each sample, and the score as a function of sums of rows.

    `score` takes sums [corpora, columns] and returns scores [corpora]; `score_alone` does for samples by themselves, if
    that is another formula.
    """

    rows: Floats
    score: Callable[[Floats], Floats]
    score_alone: Callable[[Floats], Floats] | None = None

    @property
    def value(self) -> float:
        return float(self.score(self.rows.sum(axis=0, keepdims=True))[0])

    @property
    def by_sample(self) -> list[float | None]:
        """The score of each sample by itself; None if the sample does not count for this score."""
        scores = (self.score_alone or self.score)(self.rows).tolist()
        return [score if row.any() else None for score, row in zip(scores, self.rows, strict=True)]


def ratio(numerators: ArrayLike, denominators: ArrayLike, scale: float = 1.0) -> Statistic:
    """Return the statistic of a mean: the sum of the parts divided by that of the wholes."""
    return Statistic(_columns(numerators, denominators), lambda sums: scale * _quotient(sums[:, 0], sums[:, 1]))


def mean(values: ArrayLike, scale: float = 1.0) -> Statistic:
    return ratio(values, np.ones_like(np.asarray(values, np.float64)), scale)


def perplexity(losses: ArrayLike, tokens: ArrayLike) -> Statistic:
    def score(sums: Floats) -> Floats:
        exponential: Floats = np.exp(np.minimum(_quotient(sums[:, 0], sums[:, 1]), _MAX_EXPONENT))
        return exponential

    return Statistic(_columns(losses, tokens), score)


def bleu_statistic(rows: Floats, order: int = BLEU_ORDERS, smooth: bool = True) -> Statistic:
    """Return BLEU up to an order, smoothed as mteval does (SacreBLEU's `exp`) or not at all.

    A row is the length of the output, that of its reference, the matching n-grams of each order, and all n-grams. An
    output that is shorter than the order is scored alone by the orders that it has (SacreBLEU's effective order).
    """

    def score(sums: Floats, effective: bool = False) -> Floats:
        lengths, reference_lengths = sums[:, 0], sums[:, 1]
        correct, total = sums[:, 2 : 2 + order], sums[:, 2 + BLEU_ORDERS : 2 + BLEU_ORDERS + order]
        # The n-th order without a match counts as if it had 1 / 2 ** n of one.
        smoothed = 0.5 ** np.cumsum((correct == 0) & (total > 0), axis=1) if smooth else 0.0
        precisions = _quotient(np.where(correct == 0, smoothed, correct), total)
        with np.errstate(divide="ignore"):  # a precision of 0 makes the score 0
            counted = (total > 0) | (not effective)
            logarithms = np.log(precisions, out=np.zeros_like(precisions), where=counted).sum(axis=1)
            logarithms /= np.maximum(1, counted.sum(axis=1))
            penalty = np.minimum(
                0.0, 1 - np.where(lengths > 0, reference_lengths / np.where(lengths > 0, lengths, 1), np.inf)
            )
        bleu: Floats = np.where(correct.any(axis=1), 100 * np.exp(penalty + logarithms), 0.0)
        return bleu

    return Statistic(rows, score, partial(score, effective=True))


def bleu_rows(outputs: Sequence[str], references: Sequence[Sequence[str]], tokenize: str) -> Floats:
    """Return the row of each output, which has one reference or more, for `bleu_statistic`."""
    from sacrebleu.metrics.bleu import BLEU

    # The effective order concerns the score of a sentence, not its counts; without it, SacreBLEU warns.
    metric = BLEU(tokenize=tokenize, max_ngram_order=BLEU_ORDERS, effective_order=True)
    scored = [metric.sentence_score(output, texts) for output, texts in zip(outputs, references, strict=True)]
    rows = [[sentence.sys_len, sentence.ref_len, *sentence.counts, *sentence.totals] for sentence in scored]
    return np.array(rows, np.float64).reshape(-1, 2 + 2 * BLEU_ORDERS)


def chrf_statistic(outputs: Sequence[str], references: Sequence[str]) -> Statistic:
    """Return chrF2 over characters without spaces."""
    rows: list[list[int]] = []  # the n-grams of an output, of its reference, and of both, for each order
    for pair in zip(outputs, references, strict=True):
        texts, row = ["".join(text.split()) for text in pair], list[int]()
        for order in range(1, CHRF_ORDERS + 1):
            output, reference = (
                Counter(text[at : at + order] for at in range(len(text) - order + 1)) for text in texts
            )
            # SacreBLEU leaves out what has no reference of that length to match.
            row += [output.total() if reference else 0, reference.total(), (output & reference).total()]
        rows.append(row)

    def score(sums: Floats) -> Floats:
        written, expected, matching = (sums[:, column::3] for column in range(3))
        counted = ((written > 0) & (expected > 0)).astype(np.float64)
        orders = counted.sum(axis=1)
        precision = _quotient((_quotient(matching, written) * counted).sum(axis=1), orders)
        recall = _quotient((_quotient(matching, expected) * counted).sum(axis=1), orders)
        return 100 * _quotient((1 + _CHRF_BETA**2) * precision * recall, _CHRF_BETA**2 * precision + recall)

    return Statistic(np.array(rows, np.float64).reshape(-1, 3 * CHRF_ORDERS), score)


def rows_in_order(ids: Ids, measured: Sequence[tuple[Ids, Mapping[str, ArrayLike]]]) -> dict[str, list[float]]:
    """Return the values of samples, which were measured in any order, in that of `ids`."""
    places = {
        sample: place
        for place, sample in enumerate(sample_id for batch_ids, _ in measured for sample_id in batch_ids.tolist())
    }
    order = [places[sample] for sample in ids.tolist()]
    names = measured[0][1] if measured else ()
    columns = {name: np.concatenate([np.asarray(values[name], np.float64) for _, values in measured]) for name in names}
    return {name: column[order].tolist() for name, column in columns.items()}


def _columns(*columns: ArrayLike) -> Floats:
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def _quotient(numerators: Floats, denominators: Floats) -> Floats:
    """Return 0 where the whole is 0."""
    quotient: Floats = np.divide(
        numerators, denominators, out=np.zeros(np.broadcast(numerators, denominators).shape), where=denominators > 0
    )
    return quotient
