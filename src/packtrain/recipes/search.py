"""Searches for outputs, step by step: greedy, by nucleus sampling, or with a beam. NumPy only.

A search keeps the books: what is written, what it scores, what is finished. The network behind `Steps` computes, and
hands over only the most likely tokens of each row: so a GPU is read once per step, and little is copied.

Dimensions: B sources, K hypotheses of each, R rows being written, T tokens written so far with BOS, C candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids, Stream, philox_words
from packtrain.pack.vocabulary import BOS, EOS
from packtrain.recipes.recipe import Decoding, Hypothesis

LENGTH_PENALTY = 0.6

Floats = NDArray[np.float32]


class Candidates(NamedTuple):
    """Tokens that may follow each row, the most likely first: [R, C], with their log-probabilities."""

    tokens: Ids
    scores: Floats


class Steps(ABC):
    """One search, as a network sees it: rows that are being written, with whatever it keeps for each of them."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding

    @abstractmethod
    def logits(self, written_RT: Ids) -> Floats:
        """Return the logits of the token after each row: [R, V]. The caller may change them."""

    @abstractmethod
    def select(self, rows: Ids, same_sources: bool = False) -> None:
        """Keep these rows alone, in this order; with `same_sources` each row stays with its source.

        The rows of a source stay together, and there are as many for each source as at the start.
        """

    @property
    def penalizes(self) -> bool:
        """True if the logits of a row depend on what it has written before."""
        return self.decoding.repetition != 1.0 or self.decoding.no_repeat > 0

    def candidates(self, written_RT: Ids, count: int) -> Candidates:
        """Return the `count` most likely tokens after each row."""
        logits_RV = penalize_repetition(self.logits(written_RT), written_RT, self.decoding)
        return most_likely(logits_RV, count)

    def sample(self, written_RT: Ids, uniform_R: Floats) -> Candidates:
        """Return one token after each row; `uniform_R` in [0, 1) selects it among those of the nucleus."""
        assert self.decoding.nucleus is not None
        logits_RV = penalize_repetition(self.logits(written_RT), written_RT, self.decoding)
        tokens_R1 = sample_nucleus(logits_RV, self.decoding.nucleus, self.decoding.temperature, uniform_R)[:, None]
        return Candidates(tokens_R1, np.take_along_axis(logits_RV, tokens_R1, 1) - log_sum(logits_RV))


# What may follow a row.


def log_sum(logits_RV: Floats) -> Floats:
    """Return the logarithm of the softmax's divisor: [R, 1]."""
    largest_R1 = logits_RV.max(axis=1, keepdims=True)
    sums: Floats = largest_R1 + np.log(np.exp(logits_RV - largest_R1).sum(axis=1, keepdims=True))
    return sums


def most_likely(logits_RV: Floats, count: int) -> Candidates:
    count = min(count, logits_RV.shape[1])
    # Partition, then sort only what is left: a vocabulary is a thousand times larger than a beam.
    tokens_RC = np.argpartition(logits_RV, -count, axis=1)[:, -count:]
    scores_RC = np.take_along_axis(logits_RV, tokens_RC, 1)
    order_RC = np.argsort(-scores_RC, axis=1, kind="stable")
    scores_RC = np.take_along_axis(scores_RC, order_RC, 1) - log_sum(logits_RV)
    return Candidates(np.take_along_axis(tokens_RC, order_RC, 1), scores_RC)


def penalize_repetition(logits_RV: Floats, written_RT: Ids, decoding: Decoding) -> Floats:
    """Lower the logits of tokens that were already written; forbid those that would complete an n-gram again."""
    if decoding.repetition != 1.0:
        before = np.take_along_axis(logits_RV, written_RT, 1)
        lowered = np.where(before > 0, before / decoding.repetition, before * decoding.repetition)
        np.put_along_axis(logits_RV, written_RT, lowered.astype(np.float32), 1)
    size = decoding.no_repeat
    if size and written_RT.shape[1] >= size:
        windows = np.lib.stride_tricks.sliding_window_view(written_RT, size, axis=1)
        prefix = written_RT[:, None, written_RT.shape[1] - (size - 1) :]
        # Where the last n - 1 tokens occurred before, the token that followed them there is forbidden.
        rows, places = np.nonzero((windows[..., :-1] == prefix).all(-1))
        logits_RV[rows, windows[rows, places, -1]] = -np.inf
    return logits_RV


def sample_nucleus(logits_RV: Floats, mass: float, temperature: float, uniform_R: Floats) -> Ids:
    """Sample a token per row among the most likely that add up to `mass`; `uniform_R` in [0, 1) selects it."""
    scaled_RV = logits_RV / np.float32(temperature)
    likely_RV = np.exp(scaled_RV - log_sum(scaled_RV))
    order_RV = np.argsort(-likely_RV, axis=1, kind="stable")
    likely_RV = np.take_along_axis(likely_RV, order_RV, 1)
    kept_RV = np.cumsum(likely_RV, axis=1) - likely_RV < mass  # the mass of all tokens before this one
    kept_RV[:, 0] = True  # even if the mass is 0
    sums_RV = np.cumsum(likely_RV * kept_RV, axis=1)
    place_R = (sums_RV <= uniform_R[:, None] * sums_RV[:, -1:]).sum(1)
    place_R = np.minimum(place_R, kept_RV.sum(1) - 1)  # a number close to 1 may be rounded up to it
    chosen: Ids = np.take_along_axis(order_RV, place_R[:, None], 1)[:, 0]
    return chosen


def length_penalty(length: int) -> float:
    """Return the divisor of a hypothesis' log-probability; without it, short ones would win."""
    return float(((5 + length) / 6) ** LENGTH_PENALTY)


def search(
    start: Callable[[int], Steps], limits_B: Ids, decoding: Decoding, numbers: Sequence[int]
) -> list[list[Hypothesis]]:
    """Return the outputs for each source, the best first, of at most `limits_B` tokens.

    `start` begins with that many equal rows for each source. `numbers` identify the sources: what is sampled for one
    does not depend on the others.
    """
    if not len(limits_B):
        return []
    if decoding.nucleus is not None:
        count, seed = int(limits_B.max()), decoding.seed
        words = np.stack([philox_words(count, seed, number, 0, Stream.DECODING) for number in numbers])
        # Random numbers in [0, 1) for every row and position: a function of the seed and the row's number.
        uniform = (words >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        steps = start(1)
        return _write_rows(
            steps, limits_B, lambda written, rows: steps.sample(written, uniform[rows, written.shape[1] - 1])
        )
    if decoding.beam == 1:
        steps = start(1)
        return _write_rows(steps, limits_B, lambda written, _: steps.candidates(written, 1))
    return _beam_search(start(decoding.beam), limits_B, decoding, length_penalty)


# One hypothesis per source.


def _write_rows(steps: Steps, limits_B: Ids, choose: Callable[[Ids, Ids], Candidates]) -> list[list[Hypothesis]]:
    rows = np.arange(len(limits_B))
    written_RT = np.full((len(rows), 1), BOS)
    scores_R = np.zeros(len(rows), np.float32)
    written_by_source: list[list[Hypothesis]] = [[] for _ in rows]
    while len(rows):
        steps.decoding.check_wanted()
        chosen = choose(written_RT, rows)
        scores_R = scores_R + chosen.scores[:, 0]
        written_RT = np.concatenate([written_RT, chosen.tokens[:, :1]], axis=1)
        length = written_RT.shape[1] - 1
        is_over = (chosen.tokens[:, 0] == EOS) | (length >= limits_B[rows])
        for at in np.flatnonzero(is_over).tolist():
            written_by_source[rows[at]] = [
                _hypothesis(written_RT[at, 1:], float(scores_R[at]) / length_penalty(length))
            ]
        if is_over.any():
            # Finished rows leave the batch, so that one long row does not keep all of them computing.
            keep = np.flatnonzero(~is_over)
            rows, written_RT, scores_R = rows[keep], written_RT[keep], scores_R[keep]
            steps.select(keep)
    return written_by_source


def _hypothesis(tokens: Ids, score: float) -> Hypothesis:
    written = tokens.tolist()
    return Hypothesis(written[:-1] if written and written[-1] == EOS else written, score)


# Several hypotheses per source.


class _Finished:
    """The best finished hypotheses of one source."""

    def __init__(self, count: int) -> None:
        self._wanted, self.best = count, list[Hypothesis]()

    @property
    def bar(self) -> float:
        """The score that a further hypothesis must exceed."""
        return self.best[-1].score if len(self.best) == self._wanted else -np.inf

    def add(self, tokens: Ids, score: float) -> None:
        if score > self.bar:
            hypotheses = [*self.best, _hypothesis(tokens, score)]
            self.best = sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[: self._wanted]

    def settle(self, unfinished_KT: Ids, scores_K: Floats) -> None:
        """If none ended in time, take the best of those that did not."""
        if not self.best:
            rows = zip(unfinished_KT[: self._wanted], scores_K.tolist(), strict=False)
            self.best = [_hypothesis(tokens, score) for tokens, score in rows if score > -np.inf]


def narrowing_search(steps: Steps, count: int, beam: int, longest: int, n_best: int = 1) -> list[list[Hypothesis]]:
    """Return the best outputs for each of `count` sources, of at most `longest` tokens with EOS.

    A source has `beam` hypotheses; a finished one is set aside and narrows the beam by one, until all have finished.
    The best has the highest log-probability per token, EOS included.
    """
    return _beam_search(steps, np.full(count, longest), Decoding(beam=beam, n_best=n_best), float, narrows=True)


def _beam_search(
    steps: Steps, limits_B: Ids, decoding: Decoding, divisor: Callable[[int], float], narrows: bool = False
) -> list[list[Hypothesis]]:
    """Keep `beam` hypotheses per source; a source is done when no unfinished one can win.

    If the beam narrows, all hypotheses finish instead. `divisor` is that of log-probabilities, by the length. The rows
    of a source are adjacent: row b * K + k is hypothesis k of source b.
    """
    beam = decoding.beam
    # Twice the beam, so that K hypotheses continue even if K of the candidates end here.
    num_candidates = beam if narrows else 2 * beam
    sources, limits, widths_B = np.arange(len(limits_B)), limits_B, np.full(len(limits_B), num_candidates)
    reachable = np.array([divisor(limit) for limit in limits.tolist()])
    finished = [_Finished(min(decoding.n_best, beam)) for _ in sources]
    scores_BK = np.full((len(sources), beam), -np.inf, np.float32)
    scores_BK[:, 0] = 0.0  # the first step starts from one hypothesis, not from K equal ones
    written_RT = np.full((len(sources) * beam, 1), BOS)
    while len(sources):
        decoding.check_wanted()
        origins, tokens, totals = _best_of_beam(steps.candidates(written_RT, num_candidates), scores_BK, num_candidates)
        length = written_RT.shape[1]
        totals = np.where(np.arange(totals.shape[1]) < widths_B[:, None], totals, -np.inf)
        ended = (tokens == EOS) & (totals > -np.inf)
        firsts = np.arange(len(sources)) * beam
        for source, at in np.argwhere(ended).tolist():
            text = written_RT[firsts[source] + origins[source, at], 1:]
            finished[sources[source]].add(text, float(totals[source, at]) / divisor(length))
        totals = np.where(ended, -np.inf, totals)
        chosen_BK = np.argsort(-totals, axis=1, kind="stable")[:, :beam]
        scores_BK = np.take_along_axis(totals, chosen_BK, 1)
        parents = (firsts[:, None] + np.take_along_axis(origins, chosen_BK, 1)).ravel()
        chosen = np.take_along_axis(tokens, chosen_BK, 1).reshape(-1, 1)
        written_RT = np.concatenate([written_RT[parents], chosen], axis=1)
        if narrows:
            widths_B = widths_B - ended.sum(1)
            bars = np.full(len(sources), -np.inf)
        else:
            # Scores only fall, so the best that a hypothesis can reach is its score now at the most favorable length.
            bars = np.array([finished[source].bar for source in sources.tolist()])
        unfinished = (length < limits) & (scores_BK[:, 0] / reachable > bars)
        if unfinished.all():
            steps.select(parents, same_sources=True)
            continue
        for at in np.flatnonzero(~unfinished).tolist():
            hypotheses = written_RT[firsts[at] : firsts[at] + beam, 1:]
            finished[sources[at]].settle(hypotheses, scores_BK[at] / divisor(length))
        keep = np.flatnonzero(unfinished)
        rows = (keep[:, None] * beam + np.arange(beam)).ravel()
        sources, limits, widths_B, reachable = sources[keep], limits[keep], widths_B[keep], reachable[keep]
        scores_BK, written_RT = scores_BK[keep], written_RT[rows]
        steps.select(parents[rows])
    return [of_source.best for of_source in finished]


def _best_of_beam(following: Candidates, scores_BK: Floats, count: int) -> tuple[Ids, Ids, Floats]:
    """Return the `count` best continuations of each source: their hypotheses, tokens and total log-probabilities."""
    sources, beam = scores_BK.shape
    width = following.tokens.shape[1]
    totals = (scores_BK[:, :, None] + following.scores.reshape(sources, beam, width)).reshape(sources, -1)
    order = np.argsort(-totals, axis=1, kind="stable")[:, :count]
    tokens = np.take_along_axis(following.tokens.reshape(sources, -1), order, 1)
    return order // width, tokens, np.take_along_axis(totals, order, 1)
