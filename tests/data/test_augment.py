from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.test_images import split_of
from pack.pictures import photo
from packtrain.data import augment
from packtrain.data.augment import (
    OPERATIONS,
    AugmentedBatches,
    Mix,
    Operation,
    erase,
    mix_into,
    mix_of,
    mixes_of,
    randaugment,
    swapped,
    symmetric_beta,
)
from packtrain.data.images import ImageBatches
from packtrain.data.order import philox_words, share
from packtrain.data.pack import SplitReader
from packtrain.job.job import AugmentSettings, RandAugmentSettings
from packtrain.pack.tiles import Box, Coding, Pixels, encode

SIZE = 32
FILL = [124, 116, 104]
ALL: dict[str, Any] = {"randaugment": {"magnitude": 20}, "erasing": 0.5, "mixup": 0.8, "cutmix": 1.0}
WAYS: list[dict[str, Any]] = [{"randaugment": {}}, {"erasing": 1.0}, {"mixup": 1.0}, {"cutmix": 1.0}, ALL]


def settings_of(**fields: Any) -> AugmentSettings:
    return AugmentSettings.model_validate(fields)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> SplitReader:
    tiled = [encode(photo(70, 50, seed=seed), Coding("4:2:0")) for seed in range(7)]
    return split_of(tmp_path_factory.mktemp("images"), tiled)


def augmented(images: SplitReader, ids: list[int], epoch: int = 0, threads: int = 2, **fields: Any) -> Pixels:
    turns = np.array([ids[:at].count(one) for at, one in enumerate(ids)])
    with AugmentedBatches(images, threads, settings=settings_of(**fields)) as batches:
        return batches.random(np.array(ids), 1, epoch, SIZE, 0.5, turns)


def a_picture() -> Pixels:
    return np.array(photo(SIZE, SIZE, seed=3))


# Batches.


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)) if len(way) == 1 else "all")
def test_augmented_images_are_the_same_again_and_different_in_the_next_epoch(
    images: SplitReader, way: dict[str, Any]
) -> None:
    first, again, later = (
        augmented(images, list(range(6)), epoch, threads, **way) for epoch, threads in ((0, 1), (0, 3), (1, 2))
    )
    with ImageBatches(images, 1) as plain:
        crops = plain.random(np.arange(6), 1, 0, SIZE, 0.5)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, crops)
    assert not np.array_equal(first, later)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_number_of_ranks_augments_and_mixes_the_same(images: SplitReader, num_ranks: int) -> None:
    """Seven images are three pairs, and one that stays alone."""
    ids = np.array([4, 2, 6, 0, 1, 5, 3])
    whole = augmented(images, ids.tolist(), **ALL)
    for rank in range(num_ranks):
        mine, at = (share(of, rank, num_ranks, 2) for of in (ids, np.arange(7)))
        assert np.array_equal(augmented(images, mine.tolist(), **ALL), whole[at])


def test_a_repeated_image_is_augmented_differently(images: SplitReader) -> None:
    first, second = augmented(images, [2, 2], randaugment={}, erasing=1.0)
    assert not np.array_equal(first, second)


def test_without_settings_images_are_cropped_as_ever(images: SplitReader) -> None:
    with ImageBatches(images, 1) as plain:
        assert np.array_equal(augmented(images, [0, 1, 2]), plain.random(np.arange(3), 1, 0, SIZE, 0.5))


# RandAugment.


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_keeps_the_size_and_changes_nothing_at_strength_0(name: str) -> None:
    picture = Image.fromarray(a_picture())
    for strength in (-1.0, -0.3, 0.3, 1.0):
        changed = OPERATIONS[name](picture, strength)
        assert (changed.size, changed.mode) == (picture.size, "RGB")
    if name not in ("autocontrast", "equalize"):  # these two have no strength
        assert OPERATIONS[name](picture, 0.0).tobytes() == picture.tobytes()


@pytest.mark.parametrize(
    ("name", "strength", "wanted"),
    [
        ("posterize", 1.0, [176, 80, 16]),  # 4 of 8 bits
        ("solarize", 0.5, [75, 90, 20]),  # from 128 on, inverted
        ("brightness", -1.0, [18, 9, 2]),
        ("brightness", 1.0, [255, 171, 38]),
        ("color", -1.0, [116, 107, 100]),
        ("identity", 1.0, [180, 90, 20]),
    ],
)
def test_operations_have_the_ranges_that_the_documentation_says(name: str, strength: float, wanted: list[int]) -> None:
    changed = OPERATIONS[name](Image.new("RGB", (8, 8), (180, 90, 20)), strength)
    assert np.abs(np.asarray(changed)[4, 4].astype(int) - wanted).max() <= 1


def test_images_move_by_up_to_45_percent_and_the_rest_is_filled() -> None:
    picture = Image.new("RGB", (100, 100), (9, 9, 9))
    right = np.asarray(OPERATIONS["translate_x"](picture, 1.0))
    up = np.asarray(OPERATIONS["translate_y"](picture, -1.0))
    assert right[50, 54].tolist() == [9, 9, 9]
    assert right[50, 56].tolist() == FILL
    assert up[46, 50].tolist() == [9, 9, 9]
    assert up[44, 50].tolist() == FILL


def test_operations_are_drawn_alike_and_with_both_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, float]] = []

    def recorded(name: str) -> Operation:
        def record(image: Image.Image, strength: float) -> Image.Image:
            drawn.append((name, strength))
            return image

        return record

    monkeypatch.setattr(augment, "OPERATIONS", {name: recorded(name) for name in OPERATIONS})
    for seed in range(700):
        randaugment(a_picture(), RandAugmentSettings(operations=2, magnitude=15), philox_words(4, seed).tolist())
    assert len(drawn) == 1400
    assert {strength for _, strength in drawn} == {-0.5, 0.5}
    counts = [sum(one == name for one, _ in drawn) for name in OPERATIONS]
    assert min(counts) > 60, counts  # 100 each, on average
    assert max(counts) < 140, counts


# Random erasing.


def test_erasing_replaces_one_box_of_a_third_or_less_by_noise() -> None:
    shares = []
    for sample in range(50):
        pixels = np.zeros((64, 64, 3), np.uint8)
        erase(pixels, 1.0, 1, 0, sample)
        rows, columns = np.nonzero(pixels.any(axis=2))
        if not len(rows):
            continue
        box = pixels[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert (box == 0).mean() < 0.05  # noise has few zeros
        shares.append(box.shape[0] * box.shape[1] / 64**2)
    assert len(shares) >= 48
    assert 0.01 < min(shares) < 0.05
    assert 0.28 < max(shares) < 0.36


def test_erasing_happens_as_often_as_its_chance_says() -> None:
    changed = 0
    for sample in range(400):
        pixels = np.zeros((16, 16, 3), np.uint8)
        erase(pixels, 0.25, 1, 0, sample)
        changed += bool(pixels.any())
    assert 70 < changed < 130


# Mixup and cutmix.


@pytest.mark.parametrize("shape", [0.1, 0.2, 1.0, 4.0])
def test_weights_have_the_beta_distribution(shape: float) -> None:
    uniform = np.random.default_rng(1).random((20_000, 2))
    drawn = np.sort([symmetric_beta(shape, *row) for row in uniform.tolist()])
    wanted = np.sort(np.random.default_rng(2).beta(shape, shape, 20_000))
    assert drawn.var() == pytest.approx(1 / (4 * (2 * shape + 1)), rel=0.03)
    for level in (0.01, 0.1, 0.25, 0.5, 0.75, 0.99):
        assert (drawn < level).mean() == pytest.approx((wanted < level).mean(), abs=0.015)


@given(st.floats(1e-300, 1e300), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_a_weight_is_a_share_whatever_is_drawn(shape: float, first: float, second: float) -> None:
    assert 0 <= symmetric_beta(shape, first, second) <= 1


@pytest.mark.parametrize("weight", [0.0, 0.25, 129 / 256, 1.0])
def test_mixup_blends_pixels_by_the_weight(weight: float) -> None:
    own, other = a_picture(), np.array(photo(SIZE, SIZE, seed=4))
    wanted = weight * own + (1 - weight) * other.astype(float)
    mix_into(own, other, Mix(weight))
    assert np.abs(own - wanted).max() <= 0.5


def test_cutmix_takes_a_box_of_the_other_image_and_weighs_it_by_its_area() -> None:
    settings = settings_of(cutmix=1.0)
    mixes = [mix_of(settings, SIZE, 1, 0, sample) for sample in range(200)]
    for mix in mixes:
        assert mix.box is not None
        own, other = np.zeros((SIZE, SIZE, 3), np.uint8), np.ones((SIZE, SIZE, 3), np.uint8)
        mix_into(own, other, mix)
        assert own.mean() == pytest.approx(1 - mix.weight)
        assert own[mix.box.top :, mix.box.left :].sum() == own.sum()
    assert max(mix.weight for mix in mixes) > 0.95
    assert min(mix.weight for mix in mixes) < 0.15


def test_with_both_half_of_the_images_are_cut() -> None:
    mixes = [mix_of(settings_of(mixup=0.2, cutmix=1.0), SIZE, 1, 0, sample) for sample in range(400)]
    assert 150 < sum(mix.box is not None for mix in mixes) < 250


def test_both_images_of_a_pair_are_mixed_with_the_other_as_it_was(images: SplitReader) -> None:
    with ImageBatches(images, 1) as plain:
        crops = plain.random(np.arange(3), 1, 0, SIZE, 0.5)
    mixes = mixes_of(settings_of(mixup=1.0), SIZE, 1, 0, np.arange(3))
    made = augmented(images, [0, 1, 2], mixup=1.0)
    for at, other in ((0, 1), (1, 0)):
        weight = mixes[at].weight
        wanted = weight * crops[at] + (1 - weight) * crops[other].astype(float)
        assert np.abs(made[at] - wanted).max() <= 0.5
    assert mixes[2] == Mix(1.0, None)
    assert np.array_equal(made[2], crops[2])


def test_the_other_of_a_pair_is_its_neighbor() -> None:
    assert swapped(np.array([5, 6, 7, 8])).tolist() == [6, 5, 8, 7]
    assert swapped(np.array([5, 6, 7])).tolist() == [6, 5, 7]
    assert swapped(np.zeros(0, np.int64)).tolist() == []


def test_a_mix_without_weight_for_the_other_changes_nothing() -> None:
    own = a_picture()
    mix_into(own, np.zeros_like(own), Mix(1.0, Box(3, 3, 0, 4)))
    assert np.array_equal(own, a_picture())
