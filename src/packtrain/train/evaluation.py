"""Measuring a model on a split, every rank its part, all samples once."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
from pydantic import TypeAdapter

from packtrain.data.order import Ids, block
from packtrain.recipes import Measured, Recipe, Scores
from packtrain.train.engine import Engine
from packtrain.train.world import World


def evaluate(engine: Engine, recipe: Recipe, world: World, split: str, decode: int | None, beam: int) -> Scores:
    """Scores of the evaluated weights; the same on all ranks. `decode` samples are written out freely, None: all."""
    ids = np.arange(recipe.count(split))
    decoded = spread(len(ids), len(ids) if decode is None else decode)
    model = engine.evaluated
    model.eval()
    mine = ids[list(block(len(ids), world.rank, world.num_ranks))]
    mine_decoded = decoded[list(block(len(decoded), world.rank, world.num_ranks))]
    part = recipe.measure(model, split, mine, mine_decoded, beam)
    gathered = world.gather(json.dumps(asdict(part)).encode())
    return recipe.score(split, decoded, [TypeAdapter(Measured).validate_json(data) for data in gathered])


def spread(count: int, wanted: int) -> Ids:
    """`wanted` of `count` ids, evenly spread and always the same, so that scores can be compared."""
    wanted = min(count, wanted)
    return np.arange(wanted, dtype=np.int64) * count // max(1, wanted)
