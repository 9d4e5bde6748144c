"""Classification learns to tell ten kinds of things apart in a thousand photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import EvaluationRequest, recipe_class
from packtrain.store import open_store
from recipes.learn import learn

EXAMPLES = Path(__file__).parents[2] / "examples"
PHOTOS = EXAMPLES / "data" / "photos"
STEPS = 160  # five epochs


@pytest.mark.usefixtures("training")
def test_photographs_are_classified_after_160_steps(tmp_path: Path) -> None:
    job = Job.model_validate(
        {
            "name": "photos",
            "recipe": "classify",
            "data": {
                "train": [{"imagenet": str(PHOTOS / "valid.tar")}],  # the smaller one: packing takes time
                "valid": [{"imagenet": str(PHOTOS / "train.tar")}],
            },
            "model": {"size": "tiny", "width": 16},
            "train": {
                "duration": f"{STEPS} steps",
                "batch": "32 samples",
                "size": 24,
                "min_scale": 0.7,
                "optimizer": {"sgd": {"nesterov": True, "decay": 5e-4}},
                "schedule": {"one_cycle": {"peak": 0.1}},
                "label_smoothing": 0.1,
                "ema": 0.95,
            },
        }
    )
    store = open_store(str(tmp_path / "store"), create=True)
    manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
    recipe = recipe_class("classify")(job, Pack(store, manifest.name, tmp_path / "cache"))
    model = learn(recipe, STEPS)
    ids = np.arange(0, recipe.count("valid"), 10)
    scores = recipe.score("valid", ids, [recipe.measure(model, EvaluationRequest("valid", ids, ids, 1, 0))]).values
    assert scores["top1"] > 33  # 10 by chance
    assert scores["top5"] > 80  # 50 by chance
    assert scores["loss"] < 1.9  # 2.30 by chance


def test_the_small_example_is_a_valid_job() -> None:
    job = load(EXAMPLES / "classify.yaml").job
    assert all(Path(source.paths[0]).is_file() for source in (*job.data.train, *job.data.valid))
    assert [job.train.in_epoch(epoch).size for epoch in (0, 3, 8)] == [24, 24, 32]


@pytest.mark.parametrize(
    ("epoch", "batch", "size", "min_scale", "rectangular"),
    [
        (0, 4096, 128, 0.08, False),
        (12, 4096, 128, 0.08, False),
        (13, 1792, 224, 0.087, False),
        (24, 1792, 224, 0.087, False),
        (25, 1024, 288, 0.5, True),
        (27, 1024, 288, 0.5, True),
    ],
)
def test_the_imagenet_example_has_the_published_phases(
    epoch: int, batch: int, size: int, min_scale: float, rectangular: bool
) -> None:
    settings = load(EXAMPLES / "classify-imagenet.yaml").job.train.in_epoch(epoch)
    found = (settings.batch.value, settings.size, settings.min_scale, settings.rectangular)
    assert found == (batch, size, min_scale, rectangular)
