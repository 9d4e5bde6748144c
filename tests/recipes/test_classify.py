from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from pack.pictures import photo, quarters, saved, with_size
from packtrain.data.images import random_crops
from packtrain.data.loader import Position, RankBatches
from packtrain.data.order import Ids, share
from packtrain.data.pack import Pack, SplitReader
from packtrain.errors import FieldMistake, Mistake
from packtrain.job import Job
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import (
    Batch,
    Decoding,
    EvaluationRequest,
    Measurement,
    Recipe,
    Scores,
    check_recipe,
    recipe_class,
)
from packtrain.recipes.classify import EVALUATION_BATCH, Classify, read_words, top_prediction
from packtrain.recipes.recipe import training_order
from packtrain.recipes.resnet import normalize
from packtrain.store import open_store
from parts.models import with_files

MakeClassify = Callable[..., Classify]
CLASSES = ("ape", "bee", "cat", "dog", "elk", "fox", "gnu")
TRAIN, VALID = 21, 150  # more than two batches of an evaluation
NO_DATA: dict[str, Any] = {"train": [{"imagenet": ["train"]}]}


def job_of(data: dict[str, Any], **sections: Any) -> Job:
    train = {"duration": "2 epochs", "batch": "8 samples", "size": 32, "schedule": {"constant": {"rate": 0.1}}}
    given = {"model": {"size": "tiny", "width": 8}, **sections, "train": {**train, **sections.get("train", {})}}
    return Job.model_validate({"name": "photos", "recipe": "classify", "data": data, **given})


def write_images(folder: Path, count: int, first: int = 0) -> str:
    """Write images of all shapes from wide to high, the classes in turn."""
    for number in range(first, first + count):
        path = folder / CLASSES[number % len(CLASSES)] / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(saved(photo(40 + number * 7 % 50, 40 + number * 11 % 60, seed=number), "JPEG", quality=85))
    return str(folder)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("raw")
    train, valid = write_images(folder / "train", TRAIN), write_images(folder / "valid", VALID, first=TRAIN)
    return {"train": [{"imagenet": train}], "valid": [{"imagenet": valid}]}


@pytest.fixture(scope="module")
def make(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> MakeClassify:
    folder = tmp_path_factory.mktemp("packs")
    store = open_store(str(folder / "store"), create=True)

    def make(data: dict[str, Any] | None = None, **sections: Any) -> Classify:
        job = job_of({**raw, **(data or {})}, **sections)
        manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
        recipe = recipe_class("classify")(with_files(job, store), Pack(store, manifest.name, folder / "cache"))
        assert isinstance(recipe, Classify)
        return recipe

    return make


def model_of(recipe: Recipe) -> nn.Module:
    """Return an untrained model whose outputs differ from image to image."""
    torch.manual_seed(1)
    model = recipe.build_model()
    for name, value in model.named_parameters():
        if name.endswith("bn2.weight"):
            nn.init.ones_(value)
    nn.init.normal_(model.get_parameter("fc.weight"))
    return model.eval()


def tensors(recipe: Recipe, ids: Ids, epoch: int = 0) -> Batch:
    return {name: torch.from_numpy(rows) for name, rows in recipe.batch(ids, epoch).items()}


# Batches.


def test_a_batch_has_bytes_of_pixels_and_labels(make: MakeClassify) -> None:
    recipe = make()
    batch = recipe.batch(np.array([3, 0, 20]), 0)
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ((3, 32, 32, 3), np.dtype(np.uint8))
    assert batch["label"].tolist() == [1, 0, 6]  # three of each class, in the order of the classes
    assert recipe.costs.tolist() == [1] * TRAIN


def test_every_epoch_crops_an_image_differently(make: MakeClassify) -> None:
    recipe = make()
    first, again, other = (recipe.batch(np.arange(4), epoch)["pixels"] for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    crops = [random_crops(np.array([3]), 0.08, 1, epoch, None)(0, 90, 60) for epoch in (0, 1)]
    assert crops[0] != crops[1]


def test_a_repeated_image_is_cropped_differently(make: MakeClassify) -> None:
    recipe = make()
    batch = recipe.batch(np.array([2, 5, 2]), 0, np.array([0, 0, 1]))
    assert np.array_equal(batch["pixels"][:2], recipe.batch(np.array([2, 5]), 0)["pixels"])
    assert not np.array_equal(batch["pixels"][0], batch["pixels"][2])
    assert batch["label"][0] == batch["label"][2]


def test_phases_change_the_image_size(make: MakeClassify) -> None:
    phases = [
        {"until": "1 epochs", "rate": 0.1, "size": 16},
        {"until": "2 epochs", "rate": 0.1, "size": 24, "min_scale": 1.0},
    ]
    recipe = make(train={"schedule": {"phases": {"phases": phases}}})
    assert [recipe.batch(np.arange(2), epoch)["pixels"].shape[1] for epoch in (0, 1, 2)] == [16, 24, 24]


@pytest.mark.parametrize(("size", "copy"), [(16, "train@20"), (20, "train@30"), (26, "train@30"), (28, "train")])
def test_images_come_from_the_smallest_copy_that_is_large_enough(make: MakeClassify, size: int, copy: str) -> None:
    """As ImageNet's at 128 come from copies of 160, and those at 224 and 288 from copies of 352."""
    recipe = make({"sizes": [30, 20]}, train={"size": size})
    opened: list[str] = []
    split = recipe.pack.split

    def noted(name: str) -> SplitReader:
        opened.append(name)
        return split(name)

    recipe.pack.split = noted  # type: ignore[method-assign]
    recipe.batch(np.arange(2), 0)
    assert set(opened) == {copy}


def test_shards_are_fetched_ahead_from_the_copy_in_use(make: MakeClassify) -> None:
    recipe = make({"sizes": [20]}, train={"size": 16})
    reader = recipe.pack.split("train@20")
    orders: list[list[int]] = []
    prefetched = reader.prefetched

    def noted(order: Sequence[int]) -> Any:
        orders.append(list(order))
        return prefetched(order)

    reader.prefetched = noted  # type: ignore[method-assign]
    with recipe.prefetch(np.arange(4), 0):
        recipe.batch(np.arange(2), 0)
        recipe.batch(np.arange(2, 4), 0)
    assert orders == [[0]]


# The loss.


def test_the_loss_is_a_sum_over_the_samples(make: MakeClassify) -> None:
    recipe = make(train={"label_smoothing": 0.1})
    model = recipe.build_model().eval()
    nn.init.zeros_(model.get_parameter("fc.weight"))  # every class is as likely as any other
    for ids in (np.arange(5), np.arange(1)):
        loss = recipe.loss(model, tensors(recipe, ids)).item()
        assert loss == pytest.approx(len(ids) * math.log(len(CLASSES)), rel=1e-5)


MIXED: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0, "erasing": 0.5, "randaugment": {"magnitude": 15}}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_images_is_the_cross_entropy_with_both_classes(make: MakeClassify, smoothing: float) -> None:
    recipe = make(train={"label_smoothing": smoothing, "augment": MIXED})
    model, batch = model_of(recipe), tensors(recipe, np.arange(9))
    with torch.no_grad():
        likely = model(normalize(batch["pixels"])).log_softmax(1)
        found = recipe.loss(model, batch)
    own, other = (nn.functional.one_hot(batch[name], len(CLASSES)) for name in ("label", "other_label"))
    weight = batch["weight"][:, None]
    target = (1 - smoothing) * (weight * own + (1 - weight) * other) + smoothing / len(CLASSES)
    assert 0 < weight[:8].min() < weight[:8].max() < 1
    assert weight[8] == 1
    assert found.item() == pytest.approx(-(target * likely).sum().item(), rel=1e-5)


def test_evaluations_are_neither_augmented_nor_mixed(make: MakeClassify) -> None:
    plain, mixed = make(), make(train={"augment": MIXED})
    model = model_of(plain)
    assert measured(plain, model, 1)[0].values == measured(mixed, model, 1)[0].values


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_mixed_batches_do_not_depend_on_workers_and_micro_batches(make: MakeClassify, num_ranks: int) -> None:
    """Of 21 images in batches of 7, one of each batch has no other; a micro-batch of 3 has room for one pair."""
    recipe = make(train={"augment": MIXED, "batch": "7 samples"})

    def epoch(ranks: int, budget: int | None) -> dict[int, list[Any]]:
        order, found = training_order(recipe), dict[int, list[Any]]()
        for rank in range(ranks):
            for loaded in islice(RankBatches(order, recipe.batch, Position(), rank, ranks, budget), 3):
                rows = [zip(*part.values(), strict=True) for part in loaded.micro_batches]
                seen = [[value.tolist() for value in row] for part in rows for row in part]
                found.update(zip(loaded.ids.tolist(), seen, strict=True))
        return found

    assert len(epoch(1, None)) == TRAIN
    assert epoch(num_ranks, 3) == epoch(1, None)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"augment": MIXED, "micro_batch": "1 samples"}, "must be at least 2 samples: mixup and cutmix mix pairs"),
        ({"augment": {"mixup": -0.1}}, "must be at least 0"),
        ({"augment": {"erasing": 1.5}}, "must be at most 1"),
        ({"augment": {"randaugment": {"magnitude": 31}}}, "must be at most 30"),
        ({"augment": {"randaugment": {"operations": 0}}}, "must be at least 1"),
        ({"augment": {"randaugment": 2}}, "must be a mapping, not an integer"),
        ({"augment": {"cut_mix": 1.0}}, "unknown key; did you mean 'cutmix'?"),
    ],
)
def test_augmentation_that_makes_no_sense_is_refused(train: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        job_of(NO_DATA, train=train)


def test_a_recipe_that_does_not_augment_says_so() -> None:
    job = job_of({"train": [{"coco": ["captions.json", "images"]}]}, train={"augment": MIXED}, model={"size": "tiny"})
    with pytest.raises(FieldMistake, match="caption does not support it; remove it") as refused:
        check_recipe(job.model_copy(update={"recipe": "caption"}))
    assert refused.value.field == "train.augment"


# Evaluation.


def measured(recipe: Recipe, model: nn.Module, num_ranks: int, epoch: int = 0) -> tuple[Scores, list[Measurement]]:
    decoded = np.arange(recipe.count("valid"))[::10]
    parts = [
        recipe.measure(model, EvaluationRequest("valid", ids, share_of(decoded, rank, num_ranks), 1, epoch))
        for rank, ids in enumerate(recipe.divide("valid", num_ranks))
    ]
    return recipe.score("valid", decoded, parts), parts


def share_of(decoded: Ids, rank: int, num_ranks: int) -> Ids:
    return np.array_split(decoded, num_ranks)[rank]


@pytest.mark.parametrize("rectangular", [False, True])
def test_scores_do_not_depend_on_the_number_of_workers(make: MakeClassify, rectangular: bool) -> None:
    recipe = make(train={"rectangular": rectangular})
    model = model_of(recipe)
    alone, _ = measured(recipe, model, 1)
    assert set(alone.values) == {"loss", "top1", "top5"}
    assert 0 < alone.values["top1"] < alone.values["top5"] < 100
    for num_ranks in (2, 3, 7):
        together, parts = measured(recipe, model, num_ranks)
        assert sum(part.sums["samples"] for part in parts) == VALID
        assert together.values == pytest.approx(alone.values, rel=1e-5)
        assert together.samples == alone.samples


@pytest.mark.parametrize("rectangular", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 200])
def test_every_image_is_measured_once(make: MakeClassify, rectangular: bool, num_ranks: int) -> None:
    parts = make(train={"rectangular": rectangular}).divide("valid", num_ranks)
    assert len(parts) == num_ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(VALID))


def test_top1_and_top5_count_single_images(make: MakeClassify) -> None:
    recipe = make()
    model = model_of(recipe)
    labels = recipe.pack.split("valid").plain("label")
    one_by_one = [
        recipe.measure(model, EvaluationRequest("valid", np.array([row]), np.array([row]), 1, 0)) for row in range(30)
    ]
    together = recipe.measure(model, EvaluationRequest("valid", np.arange(30), np.arange(30), 1, 0))
    guesses = [part.outputs[0] for part in one_by_one]
    assert together.outputs == [*guesses[:5], *[""] * 25]  # reports show no more
    assert together.sums["top1"] == sum(CLASSES[label] == name for label, name in zip(labels, guesses, strict=False))
    assert together.sums["top5"] == sum(part.sums["top5"] for part in one_by_one)


def test_rectangular_batches_crop_less_of_long_images(make: MakeClassify) -> None:
    recipe = make(train={"rectangular": True})
    seen: list[tuple[int, ...]] = []
    model = model_of(recipe)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    recipe.measure(model, EvaluationRequest("valid", np.arange(VALID), np.arange(0), 1, 0))
    assert sum(shape[0] for shape in seen) == VALID
    assert all(shape[0] <= EVALUATION_BATCH for shape in seen)
    assert seen[0][2] > seen[0][3] == 32  # tall images first
    assert seen[-1][3] > seen[-1][2] == 32
    assert all(side % 8 == 0 for shape in seen for side in shape[2:])


def test_with_five_classes_or_fewer_there_is_no_top5(make: MakeClassify, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(saved(quarters(), "PNG"))
    recipe = make({"train": [{"imagenet": str(tmp_path)}], "valid": [{"imagenet": str(tmp_path)}]})
    part = recipe.measure(model_of(recipe), EvaluationRequest("valid", np.arange(2), np.arange(2), 1, 0))
    assert set(recipe.score("valid", np.arange(2), [part]).values) == {"loss", "top1"}


def test_a_validation_set_of_other_classes_is_refused(make: MakeClassify, tmp_path: Path) -> None:
    strange = tmp_path / "valid" / "zebra"
    strange.mkdir(parents=True)
    (strange / "1.png").write_bytes(saved(quarters(), "PNG"))
    with pytest.raises(Mistake, match=r"valid: class 'zebra' is not among the 7 classes of the training data$"):
        make({"valid": [{"imagenet": str(tmp_path / "valid")}]})


# Predictions.


def test_a_prediction_names_five_classes_with_their_probabilities(make: MakeClassify, raw: dict[str, Any]) -> None:
    recipe = make()
    paths = sorted(Path(raw["valid"][0]["imagenet"]).rglob("*.jpg"))[:5]
    model = model_of(recipe)
    found = recipe.predict(model, [str(path) for path in paths], Decoding())
    expected = recipe.measure(model, EvaluationRequest("valid", np.arange(5), np.arange(5), 1, 0)).outputs
    assert [prediction.details["top5"][0]["class"] for prediction in found] == expected
    for prediction in found:
        best = prediction.details["top5"]
        assert len(best) == 5
        assert [row["probability"] for row in best] == sorted((row["probability"] for row in best), reverse=True)
        assert prediction.text.startswith(f"{best[0]['class']} {best[0]['probability']:.0%}")


@pytest.mark.parametrize("rectangular", [False, True])
def test_images_of_all_shapes_are_predicted_as_if_alone(make: MakeClassify, tmp_path: Path, rectangular: bool) -> None:
    recipe = make(train={"rectangular": rectangular})
    model, sizes = model_of(recipe), [(40, 30), (90, 20), (32, 32), (20, 90), (41, 30), (300, 200)]
    files = [saved(photo(*size, seed=number), "PNG") for number, size in enumerate(sizes)]
    (tmp_path / "first.png").write_bytes(files[0])
    found = recipe.predict(
        model, [str(tmp_path / "first.png"), files[1], recipe.read(files[2]), *files[3:]], Decoding()
    )
    for file, together in zip(files, found, strict=True):
        [alone] = recipe.predict(model, [file], Decoding())
        rows = zip(together.details["top5"], alone.details["top5"], strict=True)
        assert all(one["probability"] == pytest.approx(other["probability"], abs=1e-4) for one, other in rows)
    with pytest.raises(Mistake, match=r"^the image: not an image; use a JPEG"):
        recipe.predict(model, [files[0], b"words"], Decoding())


def test_five_classes_are_shown_however_unlikely_they_are() -> None:
    text = top_prediction(CLASSES[:5], [0.994, 0.0099, 0.003, 0.0, 0.0]).text
    assert text == f"{CLASSES[0]} 99%, " + ", ".join(f"{name} < 1%" for name in CLASSES[1:5])


def test_a_file_of_words_gives_classes_their_names(make: MakeClassify, raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("".join(f"{name} great {name}, {name} proper\n" for name in CLASSES[:6]))
    recipe = make(model={"size": "tiny", "width": 8, "words": str(tmp_path / "words.txt")})
    path = next(Path(raw["valid"][0]["imagenet"]).rglob("*.jpg"))
    [found] = recipe.predict(model_of(recipe), [str(path)], Decoding())
    names = {row["class"] for row in found.details["top5"]}
    assert names < {*(f"great {name}" for name in CLASSES[:6]), "gnu"}


def test_a_file_of_words_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "words").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Mistake, match=r"^model\.words: not UTF-8"):
        read_words(tmp_path / "words", "model.words")
    with pytest.raises(Mistake, match=r"^model\.words: cannot read: No such file"):
        read_words(tmp_path / "none", "model.words")


def bad_images(folder: Path) -> dict[str, bytes]:
    good = saved(photo(64, 48), "JPEG")
    return {
        "empty": b"",
        "not an image": b"not an image at all",
        "cut off": good[: len(good) // 2],
        "too many pixels": with_size(good, 60_000, 60_000),
    }


@pytest.mark.parametrize("reason", bad_images(Path()))
def test_a_file_that_is_not_an_image_is_refused_in_one_line(make: MakeClassify, tmp_path: Path, reason: str) -> None:
    recipe = make()
    path = tmp_path / "image.jpg"
    path.write_bytes(bad_images(tmp_path)[reason])
    with pytest.raises(Mistake) as refused:
        recipe.predict(model_of(recipe), [str(path)], Decoding())
    assert str(refused.value) == f"{path}: {reason}; use a JPEG, PNG, WebP, GIF, BMP or TIFF file"


def test_a_path_without_a_file_is_refused(make: MakeClassify, tmp_path: Path) -> None:
    recipe = make()
    model = model_of(recipe)
    for path, reason in (
        (tmp_path / "none.jpg", "no such file"),
        (tmp_path, "not a file"),
        ("a\0b", "no such file"),
    ):
        with pytest.raises(Mistake, match=reason):
            recipe.predict(model, [str(path)], Decoding())


# The job.


@pytest.mark.parametrize(
    ("model", "field", "fault"),
    [
        ({"size": "resnet52"}, "model.size", "did you mean 'resnet50'?"),
        ({"size": "tiny", "steem": "small"}, "model.steem", "unknown option; did you mean 'stem'?"),
        ({"size": "tiny", "stem": "tall"}, "model.stem", "must be one of large, small, not 'tall'"),
        ({"size": "tiny", "width": 0}, "model.width", "must be an integer of at least 1, not 0"),
        ({"size": "resnet50", "weights": 3}, "model.weights", "must be a string, not 3"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(model: dict[str, Any], field: str, fault: str) -> None:
    with pytest.raises(FieldMistake) as refused:
        check_recipe(job_of(NO_DATA, model=model))
    assert refused.value.field == field
    assert fault in refused.value.fault


def test_an_image_looks_the_same_on_any_rank(make: MakeClassify) -> None:
    recipe = make()
    ids = np.arange(7)
    whole = recipe.batch(ids, 0)["pixels"]
    for rank in range(3):
        part = share(ids, rank, 3)
        assert np.array_equal(recipe.batch(part, 0)["pixels"], whole[part])
