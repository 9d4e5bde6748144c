"""Search for a translation, with the keys and values of earlier positions kept."""

from __future__ import annotations

import torch
from torch import Tensor

from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.translate.model import Transformer

_LONGER_THAN_SOURCE = 50  # a translation has at most this many tokens more than its source
_LENGTH_PENALTY = 0.6


def length_penalty(length: int) -> float:
    """What a hypothesis' log-probability is divided by, so that short ones are not preferred."""
    return float(((5 + length) / 6) ** _LENGTH_PENALTY)


@torch.inference_mode()
def translate(model: Transformer, source_BS: Tensor, beam: int) -> list[list[int]]:
    """The tokens of the best hypothesis for each source row, without the end mark."""
    return greedy(model, source_BS) if beam == 1 else beam_search(model, source_BS, beam)


def greedy(model: Transformer, source_BS: Tensor) -> list[list[int]]:
    memory_BSD, mask = model.encode(source_BS)
    caches = model.start(memory_BSD)
    limits = (source_BS != PAD).sum(1) + _LONGER_THAN_SOURCE
    found: list[list[int]] = [[] for _ in range(len(source_BS))]
    rows = torch.arange(len(source_BS), device=source_BS.device)
    tokens = torch.full_like(rows, BOS)
    for position in range(int(limits.max()) if len(rows) else 0):
        tokens = model.step(tokens, position, caches, mask).argmax(-1)
        going = (tokens != EOS) & (position < limits[rows])
        for row, token in zip(rows[going].tolist(), tokens[going].tolist(), strict=True):
            found[row].append(token)
        if not going.all():  # finished rows leave, so that the last long one does not pay for all
            keep = going.nonzero()[:, 0]
            if not len(keep):
                break
            rows, tokens, mask = rows[keep], tokens[keep], mask[keep]
            for cache in caches:
                cache.select(keep)
    return found


def beam_search(model: Transformer, source_BS: Tensor, beam: int) -> list[list[int]]:
    """Keeps `beam` hypotheses for each sentence; a sentence is done when none that goes on can win.

    K is the beam; rows of a sentence stand together, so row b * K + k is hypothesis k of sentence b.
    """
    memory_BSD, mask = model.encode(source_BS)
    device = source_BS.device
    sentences = torch.arange(len(source_BS), device=device)
    limits = (source_BS != PAD).sum(1) + _LONGER_THAN_SOURCE
    reachable = ((5 + limits) / 6) ** _LENGTH_PENALTY
    rows = sentences.repeat_interleave(beam)
    caches, mask = model.start(memory_BSD[rows]), mask[rows]
    scores_BK = torch.full((len(sentences), beam), -torch.inf, device=device)
    scores_BK[:, 0] = 0.0  # the first step starts from one hypothesis, not from K equal ones
    history = torch.full((len(rows), 1), BOS, device=device)
    best_scores = torch.full((len(sentences),), -torch.inf, device=device)
    best: list[list[int]] = [[] for _ in range(len(source_BS))]

    for position in range(int(limits.max()) if len(sentences) else 0):
        logits = model.step(history[:, -1], position, caches, mask)
        totals = scores_BK[:, :, None] + logits.log_softmax(-1).view(len(sentences), beam, -1)
        # Twice the beam, so that K hypotheses go on even when K of the candidates end here.
        candidate_scores, candidates = totals.flatten(1).topk(2 * beam, dim=1)
        origins, tokens = candidates // logits.shape[-1], candidates % logits.shape[-1]
        ended = tokens == EOS

        ended_scores, ended_at = candidate_scores.masked_fill(~ended, -torch.inf).max(dim=1)
        ended_scores = ended_scores / length_penalty(position + 1)
        for b in (ended_scores > best_scores).nonzero()[:, 0].tolist():
            best_scores[b] = ended_scores[b]
            best[int(sentences[b])] = history[b * beam + int(origins[b, ended_at[b]]), 1:].tolist()

        scores_BK, kept = candidate_scores.masked_fill(ended, -torch.inf).topk(beam, dim=1)
        origins, tokens = origins.gather(1, kept), tokens.gather(1, kept)
        parents = (torch.arange(len(sentences), device=device)[:, None] * beam + origins).flatten()
        history = torch.cat([history[parents], tokens.flatten()[:, None]], dim=1)
        going = (position + 1 < limits) & (scores_BK[:, 0] / reachable > best_scores)
        for b in (~going & best_scores.isneginf()).nonzero()[:, 0].tolist():
            best[int(sentences[b])] = history[b * beam, 1:].tolist()  # nothing ended within the limit
        if not going.any():
            break
        if going.all():
            for cache in caches:
                cache.select(parents, same_sources=True)
            continue
        staying = going.nonzero()[:, 0]
        rows = (staying[:, None] * beam + torch.arange(beam, device=device)).flatten()
        sentences, limits, reachable = sentences[staying], limits[staying], reachable[staying]
        scores_BK, best_scores, history, mask = scores_BK[staying], best_scores[staying], history[rows], mask[rows]
        for cache in caches:
            cache.select(parents[rows])
    return best
