"""Train a recipe for some steps in this process, as a worker does."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn

from packtrain.data.loader import Order, Position, RankBatches
from packtrain.recipes import Recipe
from packtrain.train.engine import Engine
from packtrain.train.progress import Progress
from packtrain.train.world import World


def learn(recipe: Recipe, steps: int) -> nn.Module:
    """Return the model with the weights that would be exported."""
    train = recipe.job.train
    engine = Engine(recipe, train, World())
    order = Order(recipe.costs, recipe.sort_keys, lambda _: train.batch.value, train.seed, recipe.lengths)
    for number, loaded in enumerate(islice(RankBatches(order, recipe.batch, Position(), 0, 1), steps)):
        pieces = [{name: torch.from_numpy(rows) for name, rows in piece.items()} for piece in loaded.micro_batches]
        engine.step(Progress(number, float(loaded.at.epoch)), pieces, loaded.cost, loaded.cost)
    return engine.evaluation_model()
