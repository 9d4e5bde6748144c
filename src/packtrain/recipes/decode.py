"""The Transformer of a run as a text network: it searches with cached keys and values, on any device.

Dimensions: R rows being written, V vocabulary, T tokens written so far with BOS, B sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.data.order import Ids
from packtrain.pack.vocabulary import PAD
from packtrain.recipes.pairs import TextNetwork
from packtrain.recipes.recipe import Decoding, Hypothesis
from packtrain.recipes.search import Candidates, Floats, Steps, search
from packtrain.recipes.transformer import Transformer


class TorchText(TextNetwork):
    search_tokens = 4096

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def search(
        self, source_BS: NDArray[np.int64], limits_B: NDArray[np.int64], decoding: Decoding, numbers: Sequence[int]
    ) -> list[list[Hypothesis]]:
        source = torch.from_numpy(source_BS).to(self._device)
        return search(lambda beam: TorchSteps(self._model, source, beam, decoding), limits_B, decoding, numbers)

    @torch.inference_mode()
    def losses(self, source_BS: NDArray[np.int64], target_BT: NDArray[np.int64]) -> NDArray[np.float64]:
        if not len(source_BS):
            return np.zeros(0)
        predicted = np.flatnonzero(target_BT[:, 1:] != PAD)
        target = torch.from_numpy(target_BT).to(self._device)
        places = torch.from_numpy(predicted).to(self._device)
        logits = self._model(torch.from_numpy(source_BS).to(self._device), target[:, :-1], places)
        each = cross_entropy(logits.float(), target[:, 1:].flatten()[places], reduction="none")
        rows = predicted // (target_BT.shape[1] - 1)
        return sums_by_row(rows, each, len(source_BS))


class TorchSteps(Steps):
    def __init__(self, model: Transformer, source_BS: Tensor, beam: int, decoding: Decoding) -> None:
        super().__init__(decoding)
        self._model = model
        memory_BSD, self._mask = model.encode(source_BS)
        self._caches = model.start(memory_BSD)
        if beam > 1:
            self.select(np.repeat(np.arange(len(source_BS)), beam))

    def logits(self, written_RT: Ids) -> Floats:
        return self._logits(written_RT).cpu().numpy()

    def candidates(self, written_RT: Ids, count: int) -> Candidates:
        if self.penalizes:
            return super().candidates(written_RT, count)
        return likely_on_device(self._logits(written_RT), count)

    def select(self, rows: Ids, same_sources: bool = False) -> None:
        kept = torch.from_numpy(rows).to(self._mask.device)
        if not same_sources:
            self._mask = self._mask[kept]
        for cache in self._caches:
            cache.select(kept, same_sources)

    def _logits(self, written_RT: Ids) -> Tensor:
        last = torch.from_numpy(written_RT[:, -1].copy()).to(self._mask.device)
        return self._model.step(last, written_RT.shape[1] - 1, self._caches, self._mask).float()


def sums_by_row(rows: Ids, values: Tensor, count: int) -> NDArray[np.float64]:
    """Return the sum of the values of each row."""
    sums = np.zeros(count)
    np.add.at(sums, rows, values.cpu().numpy())
    return sums


def likely_on_device(logits_RV: Tensor, count: int) -> Candidates:
    """Choose the most likely tokens before they leave the device: a vocabulary is a thousand times larger."""
    best = logits_RV.topk(min(count, logits_RV.shape[1]))
    scores = best.values - logits_RV.logsumexp(-1, keepdim=True)
    return Candidates(best.indices.cpu().numpy(), scores.cpu().numpy())
