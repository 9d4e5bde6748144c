"""Search for what a model writes, with the keys and values of earlier positions kept.

The host asks a GPU one thing a step, what goes on: each question waits until the GPU has done all that it was given.

Shapes: R rows that are being written, V vocabulary, T tokens written so far with the mark of the beginning,
B sources, K hypotheses of each.
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

_LENGTH_PENALTY = 0.6


def length_penalty(length: int) -> float:
    """What a hypothesis' log-probability is divided by, so that short ones are not preferred."""
    return float(((5 + length) / 6) ** _LENGTH_PENALTY)


@torch.inference_mode()
def decode(
    model: Transformer, source_BS: Tensor, limits_B: Tensor, decoding: Decoding, numbers: Sequence[int]
) -> list[list[int]]:
    """What the model writes to each source row: at most so many tokens, without the mark of the end.

    `numbers` tell the rows apart where they are drawn by chance, so that a row's neighbours do not matter to it.
    """
    if not len(source_BS):
        return []
    if decoding.nucleus is not None:
        chance = _chances(decoding.seed, numbers, int(limits_B.max())).to(source_BS.device)
        share, temperature = decoding.nucleus, decoding.temperature
        return _one_by_one(
            model,
            source_BS,
            limits_B,
            decoding,
            lambda logits, rows, position: draw(logits, share, temperature, chance[rows, position]),
        )
    if decoding.beam == 1:
        return _one_by_one(model, source_BS, limits_B, decoding, lambda logits, _, __: logits.argmax(-1))
    return _beam_search(model, source_BS, limits_B, decoding)


# One hypothesis for each source.


def _one_by_one(
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
        logits_RV = restrain(model.step(written_RT[:, -1], position, caches, mask), written_RT, decoding)
        tokens = choose(logits_RV, rows, position)
        written_RT = torch.cat([written_RT, tokens[:, None]], dim=1)
        going = (tokens != EOS) & (position + 1 < limits_B[rows])
        staying, leaving = told_apart(going)
        if not leaving:
            continue
        for row, text in zip(rows[leaving].tolist(), written_RT[leaving, 1:].tolist(), strict=True):
            found[row] = text[:-1] if text[-1] == EOS else text
        if not staying:
            break
        keep = torch.tensor(staying, device=rows.device)
        # Finished rows leave, so that the last long one does not pay for all.
        rows, written_RT, mask = rows[keep], written_RT[keep], mask[keep]
        for cache in caches:
            cache.select(keep)
    return found


def draw(logits_RV: Tensor, share: float, temperature: float, chance_R: Tensor) -> Tensor:
    """A token for each row, from the likeliest that make up `share` together; `chance_R` in [0, 1) says which."""
    likely_RV, order_RV = (logits_RV.float() / temperature).softmax(-1).sort(stable=True, dim=-1, descending=True)
    among_RV = likely_RV.cumsum(-1) - likely_RV < share
    among_RV[:, 0] = True
    heap_RV = (likely_RV * among_RV).cumsum(-1)
    place_R = (heap_RV <= chance_R[:, None] * heap_RV[:, -1:]).sum(-1)
    place_R = place_R.minimum(among_RV.sum(-1) - 1)  # a chance next to 1 may be rounded up to it
    return order_RV.gather(1, place_R[:, None])[:, 0]


def _chances(seed: int, numbers: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1) for every row and position, a function of the seed and of which row it is."""
    words = np.stack([philox_words(count, seed, number, 0, Stream.DECODING) for number in numbers])
    return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) / 2**24)


# Repetition.


def restrain(logits_RV: Tensor, written_RT: Tensor, decoding: Decoding) -> Tensor:
    """Logits with what was written before made less likely, or impossible where it would end a row of tokens again."""
    if decoding.repetition != 1.0:
        before = logits_RV.gather(1, written_RT)
        lowered = torch.where(before > 0, before / decoding.repetition, before * decoding.repetition)
        logits_RV = logits_RV.scatter(1, written_RT, lowered)
    size = decoding.no_repeat
    if size and written_RT.shape[1] >= size:
        windows = written_RT.unfold(1, size, 1)
        beginning = written_RT[:, None, written_RT.shape[1] - (size - 1) :]
        again = (windows[..., :-1] == beginning).all(-1)
        ceiling = logits_RV.new_full(again.shape, torch.inf).masked_fill(again, -torch.inf)
        logits_RV = logits_RV.scatter_reduce(1, windows[..., -1], ceiling, "amin")
    return logits_RV


# Several.


def _beam_search(model: Transformer, source_BS: Tensor, limits_B: Tensor, decoding: Decoding) -> list[list[int]]:
    """Keeps `beam` hypotheses for each source; a source is done when none that goes on can win.

    Rows of a source stand together, so row b * K + k is hypothesis k of source b.
    """
    beam, device = decoding.beam, source_BS.device
    memory_BSD, mask = model.encode(source_BS)
    sources, limits = torch.arange(len(source_BS), device=device), limits_B
    reachable = ((5 + limits) / 6) ** _LENGTH_PENALTY
    firsts, rows = sources * beam, sources.repeat_interleave(beam)
    caches, mask = model.start(memory_BSD[rows]), mask[rows]
    scores_BK = torch.full((len(sources), beam), -torch.inf, device=device)
    scores_BK[:, 0] = 0.0  # the first step starts from one hypothesis, not from K equal ones
    written_RT = torch.full((len(rows), 1), BOS, device=device)
    best_scores = torch.full((len(sources),), -torch.inf, device=device)
    best_BT = torch.full((len(sources), int(limits.max())), EOS, device=device)

    for position in range(best_BT.shape[1]):
        logits_RV = restrain(model.step(written_RT[:, -1], position, caches, mask), written_RT, decoding)
        totals = scores_BK[:, :, None] + logits_RV.float().log_softmax(-1).view(len(sources), beam, -1)
        # Twice the beam, so that K hypotheses go on even when K of the candidates end here.
        candidate_scores, candidates = totals.flatten(1).topk(2 * beam, dim=1)
        origins, tokens = candidates // logits_RV.shape[-1], candidates % logits_RV.shape[-1]
        ended = tokens == EOS
        ended_scores, ended_at = candidate_scores.masked_fill(~ended, -torch.inf).max(dim=1)
        ended_scores = ended_scores / length_penalty(position + 1)
        winners = firsts + origins.gather(1, ended_at[:, None])[:, 0]
        note_best(best_BT, sources, ended_scores > best_scores, written_RT[winners, 1:])
        best_scores = torch.where(ended_scores > best_scores, ended_scores, best_scores)
        scores_BK, kept = candidate_scores.masked_fill(ended, -torch.inf).topk(beam, dim=1)
        origins, tokens = origins.gather(1, kept), tokens.gather(1, kept)
        parents = (firsts[:, None] + origins).flatten()
        written_RT = torch.cat([written_RT[parents], tokens.flatten()[:, None]], dim=1)
        going = (position + 1 < limits) & (scores_BK[:, 0] / reachable > best_scores)
        staying, leaving = told_apart(going)
        if not leaving:
            for cache in caches:
                cache.select(parents, same_sources=True)
            continue
        note_best(best_BT, sources, ~going & best_scores.isneginf(), written_RT[firsts, 1:])  # none ended in time
        if not staying:
            break
        keep = torch.tensor(staying, device=device)
        rows = (keep[:, None] * beam + torch.arange(beam, device=device)).flatten()
        sources, limits, reachable, firsts = sources[keep], limits[keep], reachable[keep], firsts[: len(keep)]
        scores_BK, best_scores, written_RT, mask = scores_BK[keep], best_scores[keep], written_RT[rows], mask[rows]
        for cache in caches:
            cache.select(parents[rows])
    return texts_of(best_BT)


# Of all searches.


def told_apart(flags: Tensor) -> tuple[list[int], list[int]]:
    """Where flags are true, and where they are not."""
    told = flags.tolist()
    return [place for place, flag in enumerate(told) if flag], [place for place, flag in enumerate(told) if not flag]


def note_best(best_BT: Tensor, sources: Tensor, is_best: Tensor, texts: Tensor) -> None:
    """Puts those of the texts that are the best so far in the place of earlier ones, none of which is longer."""
    length = texts.shape[1]
    best_BT[sources, :length] = torch.where(is_best[:, None], texts, best_BT[sources, :length])


def texts_of(best_BT: Tensor) -> list[list[int]]:
    """Up to the mark of the end, where there is one."""
    return [text[: text.index(EOS)] if EOS in text else text for text in best_BT.tolist()]
