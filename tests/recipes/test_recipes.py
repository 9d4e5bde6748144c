from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pack.corpus import job_of
from packtrain.errors import FieldMistake, Mistake
from packtrain.job import Job
from packtrain.job.kinds import FORMATS, kind_class
from packtrain.pack.imagenet import ImageNetSource
from packtrain.recipes import RECIPES, Recipe, check_recipe, recipe_class, recipe_defaults
from packtrain.recipes.translate import Translate

TRAIN: dict[str, Any] = {"duration": "10 steps", "schedule": {"constant": {"rate": 0.001}}}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_found_by_its_name(name: str) -> None:
    found = recipe_class(name)
    assert issubclass(found, Recipe)
    assert found.unit in ("tokens", "samples")
    assert found.contents
    assert found.best_metric


@pytest.mark.parametrize("name", RECIPES)
def test_with_its_defaults_every_recipe_needs_only_data(name: str) -> None:
    defaults: Any = recipe_defaults(name)
    data = {
        **defaults["data"],
        "train": [
            {word: ["a"] * kind_class(FORMATS, word).path_counts[0]}
            for word in FORMATS
            if kind_class(FORMATS, word).contents & recipe_class(name).contents
        ],
    }
    job = Job.model_validate({**defaults, "name": "mine", "recipe": name, "data": data})
    check_recipe(job)
    assert job.recipe == name


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(Mistake, match=r"^no recipe 'translat'; did you mean 'translate'\?$"):
        recipe_class("translat")


def test_a_supported_job_is_accepted(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    check_recipe(job)
    assert job.train.batch.unit == Translate.unit


def test_batches_counted_in_the_wrong_unit_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, train={**TRAIN, "batch": "64 samples"})
    with pytest.raises(FieldMistake) as refused:
        check_recipe(job)
    assert refused.value.field == "train.batch"
    assert refused.value.fault == "translate counts batches in tokens, not in samples"


@pytest.mark.parametrize("split", ["train", "valid"])
def test_data_that_the_recipe_does_not_support_is_refused(tmp_path: Path, split: str) -> None:
    job = job_of(tmp_path)
    strange = ImageNetSource(paths=("/images",))
    data = job.data.model_copy(update={split: (job.data.train[0], strange)})
    with pytest.raises(FieldMistake) as refused:
        check_recipe(job.model_copy(update={"data": data}))
    assert refused.value.field == f"data.{split}.1"
    assert refused.value.fault == "translate does not support imagenet data; use bitext, folder"


def test_an_unknown_model_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldMistake, match=r"^model\.size: no size 'tinny'; did you mean 'tiny'\?$"):
        check_recipe(job_of(tmp_path, model="tinny"))


def test_a_program_is_not_checked() -> None:
    job = Job.model_validate({"name": "mine", "program": ["train.py"]})
    check_recipe(job)
    assert job.recipe is None
