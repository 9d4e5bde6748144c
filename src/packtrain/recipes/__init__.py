"""Recipes by name. Adding one is a folder here and a line in RECIPES."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from packtrain.errors import FieldMistake, Mistake, nearest
from packtrain.job import Job
from packtrain.recipes.recipe import Batch, Measured, Recipe, Scores

__all__ = [
    "RECIPES",
    "Batch",
    "Measured",
    "Recipe",
    "Scores",
    "check_recipe",
    "recipe_class",
    "recipe_defaults",
]

RECIPES: Mapping[str, str] = {
    "translate": "packtrain.recipes.translate:Translate",
}


def recipe_class(name: str) -> type[Recipe]:
    if name not in RECIPES:
        raise Mistake(f"no recipe {name!r}; {nearest(name, RECIPES)}")
    module, _, attribute = RECIPES[name].partition(":")
    found: type[Recipe] = getattr(import_module(module), attribute)
    return found


def recipe_defaults(name: str) -> Mapping[str, object]:
    return recipe_class(name).defaults


def check_recipe(job: Job) -> None:
    """Refuses a job that its recipe cannot do; a program is its author's business."""
    if job.recipe is None:
        return
    recipe = recipe_class(job.recipe)
    if job.train.batch.unit != recipe.unit:
        raise FieldMistake(
            "train.batch", f"{job.recipe} counts its batches in {recipe.unit}, not in {job.train.batch.unit}"
        )
    for split in ("train", "valid", "test"):
        for number, source in enumerate(getattr(job.data, split)):
            if source.kind not in recipe.sources:
                raise FieldMistake(
                    f"data.{split}.{number}",
                    f"{job.recipe} does not learn from {source.kind}; it takes {', '.join(sorted(recipe.sources))}",
                )
    recipe.check(job)
