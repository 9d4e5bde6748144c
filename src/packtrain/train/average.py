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
        self._followed = model

    def update(self, step: int, steps: int = 1) -> None:
        """Follows the weights as they are after step number `step`; `steps` were made since the last time."""
        decay = min(self._decay, (step + 1) / (step + 10)) ** steps
        averages: list[Tensor] = list(self.model.parameters())
        followed: list[Tensor] = list(self._followed.parameters())
        with torch.no_grad():
            torch._foreach_lerp_(averages, followed, 1 - decay)
            for buffer, source in zip(self.model.buffers(), self._followed.buffers(), strict=True):
                buffer.copy_(source)  # statistics of norms are averages already
