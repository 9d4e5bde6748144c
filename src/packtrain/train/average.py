"""The exponential moving average of the weights: a second model that follows the first."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Average:
    """Early on the average forgets faster, so that the random start does not linger in it."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        self._buffers = list(model.buffers())
        self._followed: list[Tensor] = list(model.parameters())
        self._averages: list[Tensor] = list(self.model.parameters())

    def update(self, step: int) -> None:
        decay = min(self._decay, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._followed, 1 - decay)
            for buffer, followed in zip(self.model.buffers(), self._buffers, strict=True):
                buffer.copy_(followed)  # statistics of norms are averages already
