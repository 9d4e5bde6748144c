"""Search for a caption, and where the model looked for each of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from packtrain.pack.vocabulary import BOS, EOS
from packtrain.recipes.caption.model import Captioner, Seen
from packtrain.recipes.decode import note_best, texts_of, told_apart

LONGEST_CAPTION = 50  # tokens, with the end mark


@torch.inference_mode()
def captions(model: Captioner, seen: Seen, beam: int, longest: int = LONGEST_CAPTION) -> list[list[int]]:
    """The tokens of the best caption found for each picture, without the end mark.

    A picture has `beam` hypotheses; one that ends is set aside and leaves one fewer to go on, until all have ended.
    The best is the one with the most log-probability per token, its end mark being one. K is the beam; rows of a
    picture stand together, so row b * K + k is hypothesis k of picture b.
    """
    device = seen.features.device
    pictures = torch.arange(len(seen.features), device=device)
    firsts, seen = pictures * beam, seen.select(pictures.repeat_interleave(beam))
    state = model.start(seen)
    scores_BK = torch.full((len(pictures), beam), -torch.inf, device=device)
    scores_BK[:, 0] = 0.0  # the first step starts from one hypothesis, not from K equal ones
    left_B = torch.full((len(pictures),), beam, device=device)
    history = torch.full((len(pictures) * beam, 1), BOS, device=device)
    best_scores = torch.full((len(pictures),), -torch.inf, device=device)
    best_BT = torch.full((len(pictures), longest), EOS, device=device)

    for position in range(longest if len(pictures) else 0):
        logits, state, _ = model.step(history[:, -1], state, seen)
        totals = scores_BK[:, :, None] + logits.float().log_softmax(-1).view(len(pictures), beam, -1)
        scores_BK, candidates = totals.flatten(1).topk(beam, dim=1)
        scores_BK = scores_BK.masked_fill(torch.arange(beam, device=device) >= left_B[:, None], -torch.inf)
        origins, tokens = candidates // logits.shape[-1], candidates % logits.shape[-1]
        ended = (tokens == EOS) & ~scores_BK.isneginf()

        ended_scores, ended_at = (scores_BK.masked_fill(~ended, -torch.inf) / (position + 1)).max(dim=1)
        winners = firsts + origins.gather(1, ended_at[:, None])[:, 0]
        note_best(best_BT, pictures, ended_scores > best_scores, history[winners, 1:])
        best_scores = torch.where(ended_scores > best_scores, ended_scores, best_scores)

        left_B = left_B - ended.sum(1)
        scores_BK, kept = scores_BK.masked_fill(ended, -torch.inf).sort(dim=1, descending=True, stable=True)
        origins, tokens = origins.gather(1, kept), tokens.gather(1, kept)
        parents = (firsts[:, None] + origins).flatten()
        history = torch.cat([history[parents], tokens.flatten()[:, None]], dim=1)
        state = state[parents]
        staying, leaving = told_apart(~scores_BK[:, 0].isneginf())
        if not staying:
            break
        if leaving:  # finished pictures leave, so that the last long one does not pay for all
            keep = torch.tensor(staying, device=device)
            rows = (keep[:, None] * beam + torch.arange(beam, device=device)).flatten()
            pictures, left_B, scores_BK, best_scores = (one[keep] for one in (pictures, left_B, scores_BK, best_scores))
            firsts, history, state, seen = firsts[: len(keep)], history[rows], state[rows], seen.select(rows)
    note_best(best_BT, pictures, best_scores.isneginf(), history[firsts, 1:])  # nothing ended within the limit
    return texts_of(best_BT)


@torch.inference_mode()
def places(model: Captioner, seen: Seen, tokens: list[int]) -> Tensor:
    """How much each place of one picture was looked at for each token: [tokens, P]."""
    state = model.start(seen)
    looked = []
    for token in [BOS, *tokens][: len(tokens)]:
        _, state, places_BP = model.step(torch.tensor([token], device=state.device), state, seen)
        looked.append(places_BP[0])
    return torch.stack(looked) if looked else seen.keys.new_zeros(0, seen.keys.shape[1])
