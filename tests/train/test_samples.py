"""Samples that a run records: pictures with what the model made of them, and the same training as without them."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from pack.pictures import photo, saved
from packtrain.job import Job
from packtrain.job.job import EvaluateSettings
from packtrain.observe.history import read_points
from packtrain.recipes.recipe import MAX_SHOWN, SHOWN_SAMPLES
from packtrain.run.checkpoint import committed, fetch
from packtrain.run.records import MAX_PICTURE_BYTES, Point, Sample
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from packtrain.train.control import Control
from packtrain.train.recorder import PictureWriter
from packtrain.train.state import MODEL_FILE
from packtrain.train.trainer import Trainer
from packtrain.train.world import World
from parts.faulty import FaultyStore
from parts.models import packed_run, recipe_on
from parts.runs import new_run
from recipes.captioned import THINGS, write_set

CLASSES = ("cat", "dog", "elk")
TRAIN = {"duration": "4 steps", "batch": "4 samples", "size": 32, "schedule": {"constant": {"rate": 0.01}}}
EVERY_STEP = {"every": "1 steps", "samples": 6, "beam": 2}


def classify_job(folder: Path, **sections: Any) -> Job:
    """Return a job on noise, of which no model can tell one from another."""
    for number in range(24):
        path = folder / "photos" / CLASSES[number % 3] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(saved(photo(40 + number, 400 - number, seed=number), "JPEG"))
    source = [{"imagenet": str(folder / "photos")}]
    given = {"data": {"train": source, "valid": source}, "model": {"size": "tiny", "width": 8}, "train": TRAIN}
    return Job.model_validate({"name": "photos", "recipe": "classify", **given, **sections})


def caption_job(folder: Path, **sections: Any) -> Job:
    source = [{"coco": write_set(folder, THINGS)}]
    data = {"train": source, "valid": source, "vocabulary": 300}
    given = {"data": data, "model": {"size": "tiny", "width": 16, "attention": 12}, "train": TRAIN}
    return Job.model_validate({"name": "shapes", "recipe": "caption", **given, **sections})


def trained(folder: Path, job: Job) -> Run:
    folder.mkdir(exist_ok=True)
    run = packed_run(folder, job)
    Trainer(run, recipe_on(run, folder), World(), 1, Control(folder / "control")).train()
    return run


def evaluations(run: Run) -> list[Point]:
    return [point for point in read_points(run) if point.kind == "valid"]


def image_of(run: Run, sample: Sample) -> Image.Image:
    assert sample.picture is not None
    jpeg = run.picture(sample.picture)
    assert jpeg is not None
    assert len(jpeg) <= MAX_PICTURE_BYTES
    return Image.open(io.BytesIO(jpeg), formats=["JPEG"])


def mistakes_of(samples: Iterable[Sample]) -> list[Sample]:
    return [one for one in samples if one.prediction != one.reference]


def test_a_classifier_shows_the_mistakes_that_it_is_most_certain_of_first(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", classify_job(tmp_path, evaluate=EVERY_STEP))
    found = evaluations(run)
    assert len(found) == 4
    for point in found:
        wrong = mistakes_of(point.samples)
        assert 0 < len(wrong) <= len(point.samples) <= MAX_SHOWN
        assert list(point.samples[: len(wrong)]) == wrong
        certain = [one.confidence for one in wrong]
        assert certain == sorted(certain, key=lambda value: -(value or 0.0))
        assert all(1 / 3 - 0.001 <= (one.confidence or 0.0) <= 1 for one in point.samples)
        mistakes = round(24 * (1 - point.values["top1"] / 100))
        assert len(wrong) >= min(mistakes, MAX_SHOWN - SHOWN_SAMPLES)
    shown = found[0].samples[0]
    assert max(image_of(run, shown).size) == 256  # the picture is 400 pixels high
    assert shown.reference in CLASSES
    result = run.result()
    assert result is not None
    wrong = mistakes_of(result.samples)
    assert wrong
    assert wrong == mistakes_of(found[-1].samples)[: len(wrong)]  # more right answers stand beside them


def test_a_caption_says_where_the_model_looked_for_each_word(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", caption_job(tmp_path, evaluate={**EVERY_STEP, "every": "2 steps"}))
    first, last = evaluations(run)[0], evaluations(run)[-1]
    assert len(last.samples) == SHOWN_SAMPLES
    assert [one.picture for one in first.samples] == [one.picture for one in last.samples]  # the same over time
    spoken = [one for point in (first, last) for one in point.samples if one.words]
    assert spoken
    for sample in spoken:
        rows, columns = sample.attention_shape or (0, 0)
        grids = [base64.b64decode(grid) for grid in sample.attention]
        assert (rows, columns) == (4, 4)  # a cell for 8 x 8 of 32 x 32 pixels
        assert len(grids) == len(sample.words)
        assert all(len(grid) == rows * columns and max(grid) == 255 for grid in grids)
        assert set(sample.words) <= set(sample.prediction.replace(",", " ,").replace(".", " .").split())
        assert image_of(run, sample).size[0] == 40
        assert sample.reference.startswith("a ")


@pytest.mark.parametrize("make_job", [classify_job, caption_job])
def test_samples_change_neither_losses_nor_weights(make_job: Any, tmp_path: Path) -> None:
    """Between two steps that are evaluated with samples, and two that are not, there is no difference in any bit."""
    job = make_job(tmp_path)
    often, never = (
        trained(tmp_path / name, job.model_copy(update={"evaluate": EvaluateSettings.model_validate(settings)}))
        for name, settings in (("often", EVERY_STEP), ("never", {"samples": 0}))
    )
    losses = [
        [(point.values["loss"], point.values["gradient_norm"]) for point in read_points(run) if point.kind == "train"]
        for run in (often, never)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    weights = []
    for number, run in enumerate((often, never)):
        (tmp_path / str(number)).mkdir()
        fetch(run, committed(run)[-1], tmp_path / str(number))
        weights.append(load_file(tmp_path / str(number) / MODEL_FILE))
    assert all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())


# The writer.


def jpegs(count: int) -> dict[str, bytes]:
    found = [f"picture {number}".encode() for number in range(count)]
    return {hashlib.sha256(data).hexdigest(): data for data in found}


def test_pictures_wait_for_the_store_and_are_put_once(directory_store: Store) -> None:
    run = new_run(faulty := FaultyStore(directory_store))
    writer, pictures = PictureWriter(run), jpegs(3)
    faulty.refuse("put")
    writer.add(pictures)
    with pytest.raises(StoreError):
        writer.flush()
    faulty.refuse()
    before = len(faulty.changes())
    for _ in range(2):
        writer.add(pictures)
        writer.flush()
    assert all(run.picture(digest) == data for digest, data in pictures.items())
    assert len(faulty.changes()) - before == 3


def test_a_store_that_stays_away_costs_pictures_not_memory(directory_store: Store) -> None:
    run = new_run(directory_store)
    writer = PictureWriter(run)
    writer.add(jpegs(1000))
    writer.flush()
    kept = len(run.store.list(run.key("pictures/")))
    assert 0 < kept < 100
    writer.add(jpegs(1000))
    writer.flush()
    assert len(run.store.list(run.key("pictures/"))) > kept  # a later evaluation may show them again


def test_a_picture_is_found_only_under_the_digest_of_its_contents(directory_store: Store) -> None:
    run = new_run(directory_store)
    [(digest, data)] = jpegs(1).items()
    run.put_picture(data)
    assert run.picture(digest) == data
    for name in ("../job", "0" * 64, digest.upper(), digest + ".jpg", ""):
        assert run.picture(name) is None
    run.store.put(run.key(f"pictures/{digest}.jpg"), b"another one")
    assert run.picture(digest) is None
