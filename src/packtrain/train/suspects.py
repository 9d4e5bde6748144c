"""Which samples made a loss that is not finite: each is tried by itself, on weights that have not changed."""

from __future__ import annotations

import math

from torch import nn

from packtrain.data.loader import Loaded
from packtrain.learning import Exchange, LocalSteps
from packtrain.recipes import Recipe
from packtrain.train.engine import Engine
from packtrain.train.feed import on_device
from packtrain.train.world import World

_TRIED, _NAMED = 256, 5


def suspects(engine: Engine, recipe: Recipe, world: World, exchange: Exchange, loaded: Loaded) -> str:
    """A few words that name them; where all ranks come here together, those of every rank."""
    alone = isinstance(exchange, LocalSteps)
    model = engine.model if alone else engine.exchange.plain(engine.model, recipe.build_model)
    guilty = _guilty(engine, model, recipe, world, loaded)
    if not alone:
        told = b" ".join(part for part in world.gather(" ".join(map(str, guilty)).encode()) if part)
        guilty = [int(word) for word in told.split()]
    if guilty:
        return f"its samples {_named(recipe, guilty)} make a loss that is not finite"
    return f"none of its samples alone does it; the batch begins with {_named(recipe, loaded.ids.tolist())}"


def _guilty(engine: Engine, model: nn.Module, recipe: Recipe, world: World, loaded: Loaded) -> list[int]:
    found: dict[int, None] = {}  # in their order, each once
    for at, sample in enumerate(loaded.ids[:_TRIED].tolist()):
        arrays = recipe.batch_again(loaded.ids[at : at + 1], loaded.at.epoch, loaded.turns[at : at + 1])
        if not math.isfinite(engine.loss_of(model, on_device(arrays, world.device))):
            found[sample] = None
    return list(found)


def _named(recipe: Recipe, samples: list[int]) -> str:
    """Samples by their source and their place in it, as a person would look for them."""
    names = [_place(recipe.pack.manifest.splits["train"].sources, sample) for sample in samples[:_NAMED]]
    more = f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else ""
    return ", ".join(names) + more


def _place(sources: tuple[int, ...], sample: int) -> str:
    for number, count in enumerate(sources):
        if sample < count:
            return f"{sample} of data.train.{number}"
        sample -= count
    return str(sample)
