"""What ranks tell each other with every step: one row of numbers, added up while the next step is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from packtrain.train.world import World

_LOSS, _STOP, _SHORT, _SAVE, _SECONDS, _EXCHANGE = range(6)


@dataclass(frozen=True)
class Outcome:
    """The same on all ranks. `seconds` is the first rank's clock, and `save` its wish; `short` if one is of data."""

    loss: float
    stop: bool
    short: bool
    save: bool
    seconds: float
    exchange_seconds: tuple[float, ...]

    def waited(self, rank: int) -> float:
        """How long a rank waited for the slowest, which itself only exchanged: all of them are done at once."""
        return self.exchange_seconds[rank] - min(self.exchange_seconds)


class Ballot:
    def __init__(
        self, world: World, loss: Tensor, stop: bool, short: bool, save: bool, seconds: float, exchange: float
    ) -> None:
        row = [0.0] * (_EXCHANGE + world.num_ranks)
        row[_STOP], row[_SHORT] = float(stop), float(short)
        if world.is_first:
            row[_SAVE], row[_SECONDS] = float(save), seconds
        row[_EXCHANGE + world.rank] = exchange
        self._row = torch.tensor(row, dtype=torch.float64, device=world.device)
        self._row[_LOSS] = loss
        self._work: dist.Work | None = world.begin_sum(self._row)

    def count(self) -> Outcome:
        if self._work is not None:
            self._work.wait()
        loss, stop, short, save, seconds, *exchange = self._row.tolist()
        return Outcome(loss, stop > 0, short > 0, save > 0, seconds, tuple(exchange))
