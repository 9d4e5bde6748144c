"""Where ranks wait for each other's data, so that none is inside an exchange of gradients when a stop comes.

A rank that is cannot leave: the others would have to join it, with data that they do not have. So all of them come here
before a step for which one of them may lack its batch, and vote until every one has it, or until a stop takes all of
them along after the same step. How many batches each rank has at hand is told with every step (ballot), and where all
have enough nobody comes here.
"""

from __future__ import annotations

from collections.abc import Callable

from packtrain.train.evaluation import LeftEarly
from packtrain.train.world import World

ENOUGH = 2  # batches at hand after a step: for the next one, and for the one after it, which is begun knowing this


class Gate:
    def __init__(self, world: World, asked_to_stop: Callable[[], bool]) -> None:
        self._world, self._asked_to_stop = world, asked_to_stop

    def vote(self, ready: bool) -> bool:
        """Whether every rank has its data. All of them vote; LeftEarly on all, if one has none and one is to stop."""
        lacking, stop = self._world.count(not ready, self._asked_to_stop())
        if lacking and stop:
            raise LeftEarly
        return not lacking
