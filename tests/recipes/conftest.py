from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pack.corpus import job_of
from packtrain.data.pack import Pack
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import Recipe, recipe_class
from packtrain.recipes.chat import ChatShape
from packtrain.recipes.chat.model import DialogueTransformer
from packtrain.recipes.pairs import TransformerShape
from packtrain.recipes.transformer import Transformer
from packtrain.store import open_store
from parts.models import with_files

MakeRecipe = Callable[..., Recipe]
MakeModel = Callable[..., Transformer]


@pytest.fixture(scope="session")
def make_recipe(tmp_path_factory: pytest.TempPathFactory) -> MakeRecipe:
    """Return a function that builds the recipe of a small job on its pack; its arguments are those of `job_of`."""

    def make(**changes: Any) -> Recipe:
        folder: Path = tmp_path_factory.mktemp("recipe")
        job = job_of(folder, **changes)
        store = open_store(str(folder / "store"), create=True)
        manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
        return recipe_class(str(job.recipe))(with_files(job, store), Pack(store, manifest.name, folder / "cache"))

    return make


@pytest.fixture(scope="session")
def recipe(make_recipe: MakeRecipe) -> Recipe:
    return make_recipe()


@pytest.fixture(scope="session", params=["translate", "chat"])
def make_model(request: pytest.FixtureRequest) -> MakeModel:
    """Return a function that builds a small untrained model with large attention weights, so that context matters."""

    def make(seed: int = 1, vocabulary: int = 24, dropout: float = 0.0) -> Transformer:
        torch.manual_seed(seed)
        dimensions = (32, 4, 64, 2, 2, dropout, dropout)
        if request.param == "translate":
            model = Transformer(TransformerShape(*dimensions), vocabulary).eval()
        else:
            model = DialogueTransformer(ChatShape(*dimensions, prompt=12, reply=64), vocabulary).eval()
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if "attention" in name and weights.ndim == 2:
                    weights.mul_(4)
        return model

    return make
