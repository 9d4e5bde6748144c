"""Measuring a model on a split, every rank its part, all samples once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
from pydantic import TypeAdapter

from packtrain.data.order import Ids, block
from packtrain.recipes import Measured, Recipe, Scores
from packtrain.recipes.recipe import no_pulse
from packtrain.train.engine import Engine
from packtrain.train.world import World

_LEFT = b""


class LeftEarly(Exception):
    """Raised by a pulse, to leave an evaluation."""


def evaluate(
    engine: Engine,
    recipe: Recipe,
    world: World,
    split: str,
    decode: int | None,
    beam: int,
    epoch: int = 0,
    pulse: Callable[[], None] = no_pulse,
    before_waiting: Callable[[], None] = no_pulse,
) -> Scores | None:
    """Scores of the evaluated weights, the same on all ranks; None if any of them left early.

    `decode` samples are written out freely, None: all. `pulse` is called between batches and may raise LeftEarly;
    `before_waiting` when this rank has done its part and waits for the others.
    """
    count = recipe.count(split)
    decoded = spread(count, count if decode is None else decode)
    model = engine.evaluated()
    mine = recipe.divide(split, world.num_ranks)[world.rank]
    mine_decoded = decoded[list(block(len(decoded), world.rank, world.num_ranks))]
    recipe.pulse = pulse
    try:
        with engine.precision.compute():
            part = json.dumps(asdict(recipe.measure(model, split, mine, mine_decoded, beam, epoch))).encode()
    except LeftEarly:
        part = _LEFT
    finally:
        recipe.pulse = no_pulse
    before_waiting()
    gathered = world.gather(part)
    if _LEFT in gathered:
        return None
    return recipe.score(split, decoded, [TypeAdapter(Measured).validate_json(data) for data in gathered])


def spread(count: int, wanted: int) -> Ids:
    """`wanted` of `count` ids, evenly spread and always the same, so that scores can be compared."""
    wanted = min(count, wanted)
    return np.arange(wanted, dtype=np.int64) * count // max(1, wanted)
