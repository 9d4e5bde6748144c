"""Recipes by name: adding one is a folder here and a line in RECIPES. Or anybody's own, as `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from packtrain.errors import FieldMistake, Mistake, nearest
from packtrain.job.job import Job
from packtrain.job.kinds import FORMATS, kind_class
from packtrain.recipes.own import own_recipe, unpacked_code
from packtrain.recipes.recipe import Batch, Decoding, EvaluationRequest, Measurement, Prediction, Recipe, Scores
from packtrain.run.run import Run

__all__ = [
    "RECIPES",
    "Batch",
    "Decoding",
    "EvaluationRequest",
    "Measurement",
    "Prediction",
    "Recipe",
    "Scores",
    "check_recipe",
    "recipe_class",
    "recipe_defaults",
    "recipe_of",
]

RECIPES: Mapping[str, str] = {
    "caption": "packtrain.recipes.caption:Caption",
    "classify": "packtrain.recipes.classify:Classify",
    "translate": "packtrain.recipes.translate:Translate",
    "chat": "packtrain.recipes.chat:Chat",
}


def recipe_class(name: str, code: Path | None = None) -> type[Recipe]:
    """`code` is where modules of own recipes lie; without it, where Python finds modules: a worker starts there."""
    if ":" in name:
        return own_recipe(name, code)
    if name not in RECIPES:
        raise Mistake(f"no recipe {name!r}; {nearest(name, RECIPES)}")
    module, _, attribute = RECIPES[name].partition(":")
    found: type[Recipe] = getattr(import_module(module), attribute)
    return found


def recipe_of(run: Run) -> type[Recipe]:
    """The recipe of a run, on any machine: an own one comes from the code that the run took along."""
    name = run.job.recipe
    if name is None:
        raise Mistake(f"{run.name} runs a program, which only its author knows")
    return recipe_class(name, unpacked_code(run) if ":" in name else None)


def recipe_defaults(name: str, code: Path | None = None) -> Mapping[str, object]:
    return recipe_class(name, code).defaults


def check_recipe(job: Job, code: Path | None = None) -> None:
    """Refuses a job that its recipe cannot do; a program is its author's business."""
    if job.recipe is None:
        return
    recipe = recipe_class(job.recipe, code)
    if job.train.batch.unit != recipe.unit:
        raise FieldMistake(
            "train.batch", f"{job.recipe} counts its batches in {recipe.unit}, not in {job.train.batch.unit}"
        )
    for split in ("train", "valid", "test"):
        for number, source in enumerate(getattr(job.data, split)):
            if not source.contents & recipe.contents:
                fitting = sorted(word for word in FORMATS if kind_class(FORMATS, word).contents & recipe.contents)
                raise FieldMistake(
                    f"data.{split}.{number}",
                    f"{job.recipe} does not learn from {source.kind}; it takes {', '.join(fitting)}",
                )
    recipe.check(job)
