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
        self._pairs: tuple[list[Tensor], list[Tensor], list[tuple[Tensor, Tensor]]] | None = None

    def update(self, step: int, steps: int = 1) -> None:
        """Follows the weights as they are after step number `step`; `steps` were made since the last time."""
        decay = min(self._decay, (step + 1) / (step + 10)) ** steps
        # Found at the first step, when weights have been divided among ranks or not: to find them takes a while.
        self._pairs = averages, followed, buffers = self._pairs or (
            list(self.model.parameters()),
            list(self._followed.parameters()),
            list(zip(self.model.buffers(), self._followed.buffers(), strict=True)),
        )
        with torch.no_grad():
            torch._foreach_lerp_(averages, followed, 1 - decay)
            for buffer, source in buffers:
                buffer.copy_(source)  # statistics of norms are averages already
