"""Decoding: greedy and beam search and nucleus sampling, with cached keys and values.

The host reads one value from the GPU per step, which rows are unfinished: every read waits until the GPU is idle.

Dimensions: R rows being written, V vocabulary, T tokens written so far with BOS, B sources, K hypotheses of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from packtrain.data.order import Stream, philox_words
from packtrain.pack.vocabulary import BOS, EOS
from packtrain.recipes.recipe import Decoding
from packtrain.recipes.transformer import Transformer

LENGTH_PENALTY = 0.6


def length_penalty(length: int) -> float:
    """Return the divisor of a hypothesis' log-probability; without it, short ones would win."""
    return float(((5 + length) / 6) ** LENGTH_PENALTY)


@torch.inference_mode()
def decode(
    model: Transformer, source_BS: Tensor, limits_B: Tensor, decoding: Decoding, numbers: Sequence[int]
) -> list[list[int]]:
    """Return the output tokens for each source row: at most `limits_B`, without EOS.

    `numbers` identify the rows, so that a sampled output does not depend on the other rows of the batch.
    """
    if not len(source_BS):
        return []
    if decoding.nucleus is not None:
        uniform = _uniform(decoding.seed, numbers, int(limits_B.max())).to(source_BS.device)
        mass, temperature = decoding.nucleus, decoding.temperature
        return _decode_rows(
            model,
            source_BS,
            limits_B,
            decoding,
            lambda logits, rows, position: sample_nucleus(logits, mass, temperature, uniform[rows, position]),
        )
    if decoding.beam == 1:
        return _decode_rows(model, source_BS, limits_B, decoding, lambda logits, _, __: logits.argmax(-1))
    return _beam_search(model, source_BS, limits_B, decoding)


# One hypothesis per source.


def _decode_rows(
    model: Transformer,
    source_BS: Tensor,
    limits_B: Tensor,
    decoding: Decoding,
    choose: Callable[[Tensor, Tensor, int], Tensor],
) -> list[list[int]]:
    memory_BSD, mask = model.encode(source_BS)
    caches = model.start(memory_BSD)
    rows = torch.arange(len(source_BS), device=source_BS.device)
    written_RT = torch.full((len(rows), 1), BOS, device=source_BS.device)
    found: list[list[int]] = [[] for _ in range(len(source_BS))]
    for position in range(int(limits_B.max())):
        logits_RV = penalize_repetition(model.step(written_RT[:, -1], position, caches, mask), written_RT, decoding)
        tokens = choose(logits_RV, rows, position)
        written_RT = torch.cat([written_RT, tokens[:, None]], dim=1)
        unfinished = (tokens != EOS) & (position + 1 < limits_B[rows])
        staying, leaving = split_flags(unfinished)
        if not leaving:
            continue
        for row, text in zip(rows[leaving].tolist(), written_RT[leaving, 1:].tolist(), strict=True):
            found[row] = text[:-1] if text[-1] == EOS else text
        if not staying:
            break
        keep = torch.tensor(staying, device=rows.device)
        # Finished rows leave the batch, so that one long row does not keep all of them computing.
        rows, written_RT, mask = rows[keep], written_RT[keep], mask[keep]
        for cache in caches:
            cache.select(keep)
    return found


def sample_nucleus(logits_RV: Tensor, mass: float, temperature: float, uniform_R: Tensor) -> Tensor:
    """Sample a token per row among the most likely that add up to `mass`; `uniform_R` in [0, 1) selects it."""
    likely_RV, order_RV = (logits_RV.float() / temperature).softmax(-1).sort(stable=True, dim=-1, descending=True)
    kept_RV = likely_RV.cumsum(-1) - likely_RV < mass  # the mass of all tokens before this one
    kept_RV[:, 0] = True  # even if the mass is 0
    sums_RV = (likely_RV * kept_RV).cumsum(-1)
    place_R = (sums_RV <= uniform_R[:, None] * sums_RV[:, -1:]).sum(-1)
    place_R = place_R.minimum(kept_RV.sum(-1) - 1)  # a number close to 1 may be rounded up to it
    return order_RV.gather(1, place_R[:, None])[:, 0]


def _uniform(seed: int, numbers: Sequence[int], count: int) -> Tensor:
    """Return random numbers in [0, 1) for every row and position: a function of the seed and the row's number."""
    words = np.stack([philox_words(count, seed, number, 0, Stream.DECODING) for number in numbers])
    return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) / 2**24)


def penalize_repetition(logits_RV: Tensor, written_RT: Tensor, decoding: Decoding) -> Tensor:
    """Lower the logits of tokens that were already written; forbid those that would complete an n-gram again."""
    if decoding.repetition != 1.0:
        before = logits_RV.gather(1, written_RT)
        lowered = torch.where(before > 0, before / decoding.repetition, before * decoding.repetition)
        logits_RV = logits_RV.scatter(1, written_RT, lowered)
    size = decoding.no_repeat
    if size and written_RT.shape[1] >= size:
        windows = written_RT.unfold(1, size, 1)
        prefix = written_RT[:, None, written_RT.shape[1] - (size - 1) :]
        # Where the last n - 1 tokens occurred before, the token that followed them there is forbidden.
        again = (windows[..., :-1] == prefix).all(-1)
        ceiling = logits_RV.new_full(again.shape, torch.inf).masked_fill(again, -torch.inf)
        logits_RV = logits_RV.scatter_reduce(1, windows[..., -1], ceiling, "amin")
    return logits_RV


# Several hypotheses per source.


def _beam_search(model: Transformer, source_BS: Tensor, limits_B: Tensor, decoding: Decoding) -> list[list[int]]:
    """Keep `beam` hypotheses per source; a source is done when no unfinished one can win.

    The rows of a source are adjacent: row b * K + k is hypothesis k of source b.
    """
    beam, device = decoding.beam, source_BS.device
    memory_BSD, mask = model.encode(source_BS)
    sources, limits = torch.arange(len(source_BS), device=device), limits_B
    reachable = ((5 + limits) / 6) ** LENGTH_PENALTY
    firsts, rows = sources * beam, sources.repeat_interleave(beam)
    caches, mask = model.start(memory_BSD[rows]), mask[rows]
    scores_BK = torch.full((len(sources), beam), -torch.inf, device=device)
    scores_BK[:, 0] = 0.0  # the first step starts from one hypothesis, not from K equal ones
    written_RT = torch.full((len(rows), 1), BOS, device=device)
    best_scores = torch.full((len(sources),), -torch.inf, device=device)
    best_BT = torch.full((len(sources), int(limits.max())), EOS, device=device)

    for position in range(best_BT.shape[1]):
        logits_RV = penalize_repetition(model.step(written_RT[:, -1], position, caches, mask), written_RT, decoding)
        totals = scores_BK[:, :, None] + logits_RV.float().log_softmax(-1).view(len(sources), beam, -1)
        # Twice the beam, so that K hypotheses continue even if K of the candidates end here.
        candidate_scores, candidates = totals.flatten(1).topk(2 * beam, dim=1)
        origins, tokens = candidates // logits_RV.shape[-1], candidates % logits_RV.shape[-1]
        ended = tokens == EOS
        ended_scores, ended_at = candidate_scores.masked_fill(~ended, -torch.inf).max(dim=1)
        ended_scores = ended_scores / length_penalty(position + 1)
        winners = firsts + origins.gather(1, ended_at[:, None])[:, 0]
        keep_best(best_BT, sources, ended_scores > best_scores, written_RT[winners, 1:])
        best_scores = torch.where(ended_scores > best_scores, ended_scores, best_scores)
        scores_BK, kept = candidate_scores.masked_fill(ended, -torch.inf).topk(beam, dim=1)
        origins, tokens = origins.gather(1, kept), tokens.gather(1, kept)
        parents = (firsts[:, None] + origins).flatten()
        written_RT = torch.cat([written_RT[parents], tokens.flatten()[:, None]], dim=1)
        # Scores only fall, so the best that a hypothesis can reach is its score now at the most favorable length.
        unfinished = (position + 1 < limits) & (scores_BK[:, 0] / reachable > best_scores)
        staying, leaving = split_flags(unfinished)
        if not leaving:
            for cache in caches:
                cache.select(parents, same_sources=True)
            continue
        keep_best(best_BT, sources, ~unfinished & best_scores.isneginf(), written_RT[firsts, 1:])  # none ended in time
        if not staying:
            break
        keep = torch.tensor(staying, device=device)
        rows = (keep[:, None] * beam + torch.arange(beam, device=device)).flatten()
        sources, limits, reachable, firsts = sources[keep], limits[keep], reachable[keep], firsts[: len(keep)]
        scores_BK, best_scores, written_RT, mask = scores_BK[keep], best_scores[keep], written_RT[rows], mask[rows]
        for cache in caches:
            cache.select(parents[rows])
    return cut_at_end(best_BT)


# Helpers of every search.


def split_flags(flags: Tensor) -> tuple[list[int], list[int]]:
    """Return the indices of true flags, and those of false ones."""
    on_host = flags.tolist()
    return [at for at, flag in enumerate(on_host) if flag], [at for at, flag in enumerate(on_host) if not flag]


def keep_best(best_BT: Tensor, sources: Tensor, is_best: Tensor, texts: Tensor) -> None:
    """Overwrite the best texts with better ones; texts only get longer, so nothing of the old ones remains."""
    length = texts.shape[1]
    best_BT[sources, :length] = torch.where(is_best[:, None], texts, best_BT[sources, :length])


def cut_at_end(best_BT: Tensor) -> list[list[int]]:
    """Return the tokens before EOS, or all if there is none."""
    return [text[: text.index(EOS)] if EOS in text else text for text in best_BT.tolist()]
