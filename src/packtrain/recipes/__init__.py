"""Recipes by name: RECIPES has the built-in ones; `module:Class` names a recipe of the user's own.

Its module is imported from the directory `code` of the job, or from the code archive of a run.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from importlib import import_module, invalidate_caches
from inspect import isclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from packtrain.errors import FieldMistake, Mistake, nearest
from packtrain.job import Job
from packtrain.job.kinds import FORMATS, kind_class
from packtrain.recipes.recipe import (
    Batch,
    Decoding,
    EvaluationRequest,
    Measurement,
    Prediction,
    Recipe,
    Scores,
)
from packtrain.run.code import unpacked
from packtrain.run.run import Run

if TYPE_CHECKING:
    from packtrain.recipes.template import JobTemplate

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
    "recipe_template",
    "use_code",
]

# Names of classes, not the classes: importing this package imports no recipe.
RECIPES: dict[str, str] = {
    "caption": "packtrain.recipes.caption:Caption",
    "classify": "packtrain.recipes.classify:Classify",
    "translate": "packtrain.recipes.translate:Translate",
    "chat": "packtrain.recipes.chat:Chat",
}

_REQUIRED_ATTRIBUTES = ("defaults", "unit", "contents", "kind", "best_metric")

_searched: Path | None = None  # the directory of users' recipes that is on Python's path now


def built_in(name: str | None) -> type[Recipe] | None:
    """Return the class of a recipe of Packtrain, None for any other: to show a run must not execute its user's code."""
    return recipe_class(name) if name is not None and name in RECIPES else None


def recipe_class(name: str, code: Path | None = None) -> type[Recipe]:
    """Return the class of a recipe. `code` is searched first for a user's recipe; None searches only Python's path."""
    if ":" in name:
        return _own_recipe(name, code)
    if name not in RECIPES:
        raise Mistake(f"no recipe {name!r}; {nearest(name, RECIPES)}")
    module, _, attribute = RECIPES[name].partition(":")
    recipe: type[Recipe] = getattr(import_module(module), attribute)
    return recipe


def recipe_of(run: Run) -> type[Recipe]:
    """Return the recipe of a run on any machine: a user's recipe comes from the run's code archive.

    Importing it runs its code: the caller has made sure that it may (`run/trust.py`).
    """
    name = run.job.recipe
    if name is None:
        raise Mistake(f"{run.name} runs a program, not a recipe")
    return recipe_class(name, unpacked(run.code) if run.job.has_own_code else None)


def recipe_defaults(
    name: str, code: Path | None = None, model: Mapping[str, object] | None = None
) -> Mapping[str, object]:
    return recipe_class(name, code).defaults_for(model or {})


def recipe_template(name: str) -> JobTemplate:
    """Return the job that a recipe of Packtrain starts from: TEMPLATE in the file template.py of its folder."""
    module = RECIPES[name].partition(":")[0]
    template: JobTemplate = import_module(f"{module}.template").TEMPLATE
    return template


def check_recipe(job: Job, code: Path | None = None) -> None:
    """Raise FieldMistake if the recipe does not support the job. Programs are not checked."""
    if job.recipe is None:
        return
    recipe = recipe_class(job.recipe, code)
    if job.train.batch.unit != recipe.unit:
        raise FieldMistake(
            "train.batch", f"{job.recipe} counts batches in {recipe.unit}, not in {job.train.batch.unit}"
        )
    if job.train.augment is not None and not recipe.supports_augment:
        raise FieldMistake("train.augment", f"{job.recipe} does not support it; remove it")
    for split in ("train", "valid", "test"):
        for number, source in enumerate(getattr(job.data, split)):
            if not source.contents & recipe.contents:
                supported = sorted(word for word in FORMATS if kind_class(FORMATS, word).contents & recipe.contents)
                raise FieldMistake(
                    f"data.{split}.{number}",
                    f"{job.recipe} does not support {source.kind} data; use {', '.join(supported)}",
                )
    recipe.check(job)


# Users' recipes.


def _own_recipe(name: str, code: Path | None) -> type[Recipe]:
    module, _, attribute = name.partition(":")
    if code is not None:
        use_code(code)
    recipe = getattr(imported := _import(module, code), attribute, None)
    if recipe is None:
        classes = {key for key, value in vars(imported).items() if isclass(value) and issubclass(value, Recipe)}
        raise Mistake(f"{module} has no {attribute}; {nearest(attribute, classes - {'Recipe'})}")
    if not isclass(recipe) or not issubclass(recipe, Recipe):
        raise Mistake(f"{name} is not a recipe; derive the class from packtrain.recipes.Recipe")
    missing = [required for required in _REQUIRED_ATTRIBUTES if not hasattr(recipe, required)]
    missing += sorted(getattr(recipe, "__abstractmethods__", ()))
    if missing:
        raise Mistake(f"{name} lacks {', '.join(missing)}; docs/recipes.md lists what a recipe needs")
    return recipe


def use_code(code: Path | None) -> None:
    """Put `code` first on Python's path and forget the modules of the code before: jobs may use the same names."""
    global _searched  # noqa: PLW0603 - as global as sys.path and sys.modules
    code = code.resolve() if code else None
    if code == _searched:
        return
    if _searched is not None:
        # A second job in this process, as in a notebook, may have a module of the same name.
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and _searched in Path(file).parents:
                del sys.modules[name]
        if str(_searched) in sys.path:
            sys.path.remove(str(_searched))
    if code is not None:
        sys.path.insert(0, str(code))
    invalidate_caches()
    _searched = code


def _import(module: str, code: Path | None) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # The recipe's own module is missing, as opposed to a module that it imports.
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            where = f" in {code}" if code else ""
            raise Mistake(f"no module {module!r}{where}; put it in the directory that `code` names") from None
        raise Mistake(f"{module} imports {error.name}, which is not installed here") from None
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        if isinstance(error, SyntaxError):
            where = f"{Path(error.filename or module).name}:{error.lineno}"
        raise Mistake(f"cannot import {module}: {type(error).__name__}: {error} ({where})") from None
