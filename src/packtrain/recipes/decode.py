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
        self.at_once = at_once_on(self._device)

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
        token_losses = cross_entropy(logits.float(), target[:, 1:].flatten()[places], reduction="none")
        rows = predicted // (target_BT.shape[1] - 1)
        return sums_by_row(rows, token_losses, len(source_BS))


class TorchSteps(Steps):
    def __init__(self, model: Transformer, source_BS: Tensor, beam: int, decoding: Decoding) -> None:
        super().__init__(decoding)
        self._model, self._beam = model, beam
        memory_BSD, self._mask = model.encode(source_BS)
        self._caches = model.start(memory_BSD)
        self._is_first = True  # the hypotheses of a source are still equal: one row stands for all of them

    def logits(self, written_RT: Ids) -> Floats:
        logits = self._logits(written_RT)[:, : self._model.vocabulary].cpu().numpy()
        return logits.repeat(self._beam, 0) if self._is_first else logits

    def candidates(self, written_RT: Ids, count: int) -> Candidates:
        if self.penalizes:
            return super().candidates(written_RT, count)
        likely = likely_on_device(self._logits(written_RT), min(count, self._model.vocabulary))
        if not self._is_first:
            return likely
        return Candidates(likely.tokens.repeat(self._beam, 0), likely.scores.repeat(self._beam, 0))

    def select(self, rows: Ids, same_sources: bool = False) -> None:
        places, beam = torch.from_numpy(rows).to(self._mask.device), self._beam
        sources = None if same_sources else places[::beam] // beam
        if sources is not None:
            self._mask = self._mask.index_select(0, sources)
        for cache in self._caches:
            cache.select(places // beam if self._is_first else places, sources)
        self._is_first = False

    def _logits(self, written_RT: Ids) -> Tensor:
        last_R = written_RT[:: self._beam, -1] if self._is_first else written_RT[:, -1]
        last = torch.from_numpy(last_R.copy()).to(self._mask.device)
        return self._model.step(last, written_RT.shape[1] - 1, self._caches, self._mask).float()


def at_once_on(device: torch.device) -> int:
    """Return how many batches to compute at the same time: on a CPU, one on each core instead of one on all."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def sums_by_row(rows: Ids, values: Tensor, count: int) -> NDArray[np.float64]:
    sums = np.zeros(count)
    np.add.at(sums, rows, values.cpu().numpy())
    return sums


def likely_on_device(logits_RV: Tensor, count: int) -> Candidates:
    """Choose the most likely tokens before they leave the device: a vocabulary is a thousand times larger."""
    values, indices = _largest(logits_RV, count)
    # The cross entropy of the most likely token: on a CPU this takes half the time of logsumexp.
    divisors = cross_entropy(logits_RV, indices[:, 0], reduction="none") + values[:, 0]
    return Candidates(indices.cpu().numpy(), (values - divisors[:, None]).cpu().numpy())


def _largest(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row and their places, as topk does.

    On a CPU, topk moves all values. The largest `count` are in the `count` columns with the largest maxima, if a row
    is laid out in lines; maxima of columns take little time.
    """
    rows, width = logits_RV.shape
    lines = next((lines for lines in (32, 16, 8) if width % lines == 0 and width // lines >= 4 * count), None)
    if lines is None or logits_RV.is_cuda or not logits_RV.is_contiguous():
        best = logits_RV.topk(min(count, width))
        return best.values, best.indices
    columns = width // lines
    laid_out = logits_RV.view(rows, lines, columns)
    chosen = laid_out.amax(1).topk(count).indices
    few = laid_out.gather(2, chosen[:, None].expand(rows, lines, count)).flatten(1)
    best = few.topk(count)
    lines_of, places = best.indices // count, best.indices % count
    return best.values, lines_of * columns + chosen.gather(1, places)
