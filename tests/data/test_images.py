from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data.handmade import NAME, Remote, put_file, rot
from pack.pictures import difference, photo, quarters
from packtrain.data.images import (
    Crop,
    ImageBatches,
    center_box,
    random_crop_box,
    random_crops,
    rectangular_plan,
    resize_into,
)
from packtrain.data.order import block, permutation, philox_words, share
from packtrain.data.pack import Pack, SplitReader
from packtrain.errors import PacktrainError
from packtrain.pack.manifest import FORMAT, Manifest, ShardFile, Split, pack_key
from packtrain.pack.shard import Columns, Ragged, encode_shard
from packtrain.pack.tiles import Box, Coding, Tiled, encode

SIZES = [(130, 90), (90, 130), (64, 64), (33, 200), (200, 33), (7, 5), (160, 128), (100, 75), (1, 1), (75, 100)]
SIDES = st.integers(1, 3000)


def shard_of(tiled: list[Tiled]) -> Columns:
    return Columns(
        {
            "jpeg": Ragged.from_rows([one.jpeg for one in tiled], np.dtype("u1")),
            "segments": Ragged.from_rows([one.segments.tolist() for one in tiled], np.dtype("<u4")),
        },
        {
            "width": np.array([one.width for one in tiled], np.int32),
            "height": np.array([one.height for one in tiled], np.int32),
        },
    )


def split_of(folder: Path, *shards: list[Tiled]) -> SplitReader:
    made = [ShardFile(f"{number}", 1, "", len(tiled)) for number, tiled in enumerate(shards)]
    for shard, tiled in zip(made, shards, strict=True):
        (folder / shard.name).write_bytes(encode_shard(shard_of(tiled)))
    return SplitReader(made, lambda shard: folder / shard.name)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> SplitReader:
    """In three shards, one of them empty."""
    tiled = [encode(photo(*size, seed=at), Coding("4:2:0")) for at, size in enumerate(SIZES)]
    return split_of(tmp_path_factory.mktemp("images"), tiled[:4], [], tiled[4:])


def jpeg_of(images: SplitReader, sample: int) -> bytes:
    shard, row = images.at(sample)
    return shard.ragged["jpeg"][row].tobytes()


@pytest.fixture(scope="module")
def batches(images: SplitReader) -> Iterator[ImageBatches]:
    with ImageBatches(images, threads=2) as made:
        yield made


def words(seed: int) -> list[int]:
    made: list[int] = philox_words(40, seed).tolist()
    return made


@given(SIDES, SIDES, st.floats(0.01, 1), st.integers(0, 2**32))
def test_a_random_crop_lies_within_the_image(width: int, height: int, min_scale: float, seed: int) -> None:
    box = random_crop_box(width, height, min_scale, words(seed))
    assert 0 <= box.left < box.left + box.width <= width
    assert 0 <= box.top < box.top + box.height <= height


def test_random_crops_have_the_requested_areas_and_ratios() -> None:
    boxes = [random_crop_box(500, 375, 0.08, words(seed)) for seed in range(2000)]
    areas = np.array([box.width * box.height / (500 * 375) for box in boxes])
    ratios = np.array([box.width / box.height for box in boxes])
    assert 0.075 < areas.min() < 0.1
    assert 0.95 < areas.max() <= 1
    assert 0.73 < ratios.min() < 0.8
    assert 1.25 < ratios.max() < 1.36
    assert abs(np.median(np.log(ratios))) < 0.06
    # Everywhere, and not more to one side: the room left of a crop is half of all room on average.
    left = np.array([box.left / (500 - box.width) for box in boxes if box.width < 450])
    assert abs(left.mean() - 0.5) < 0.03
    assert (left.min(), left.max()) == (0, 1)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1000, 30), Box(480, 0, 40, 30)), ((30, 1000), Box(0, 480, 30, 40)), ((9, 1), Box(4, 0, 1, 1))],
)
def test_the_center_is_cropped_when_no_try_fits(size: tuple[int, int], expected: Box) -> None:
    assert random_crop_box(*size, 0.9, words(5)) == expected


def random_crop(width: int, height: int, min_scale: float, seed: int, epoch: int, sample: int) -> Crop:
    return random_crops(np.array([sample]), min_scale, seed, epoch, None)(0, width, height)


def test_a_crop_depends_only_on_seed_epoch_and_sample() -> None:
    seen = [random_crop(500, 375, 0.08, *key) for key in [(1, 2, 3), (1, 2, 3), (9, 2, 3), (1, 9, 3), (1, 2, 9)]]
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4


def test_every_turn_has_another_crop_and_turn_0_is_the_default(
    batches: ImageBatches,
) -> None:
    ids, repeats = np.array([0, 1, 0, 1, 0]), np.array([0, 0, 1, 1, 2])
    seen = batches.random(ids, 1, 0, 40, 0.08, repeats)
    plain = batches.random(ids[:2], 1, 0, 40, 0.08)
    assert np.array_equal(seen[:2], plain)
    assert len({picture.tobytes() for picture in seen}) == len(ids)


def test_half_of_the_samples_are_mirrored() -> None:
    flips = [random_crop(50, 40, 0.5, 1, 0, sample).flip for sample in range(1000)]
    assert 450 < sum(flips) < 550


@pytest.mark.parametrize(
    ("size", "out", "expected"),
    [
        ((510, 255), (224, 224), Box(143, 15, 224, 224)),
        ((255, 510), (224, 224), Box(15, 143, 224, 224)),
        ((500, 375), (224, 224), Box(85, 23, 329, 329)),
        ((500, 375), (384, 288), Box(30, 23, 439, 329)),
        ((100, 100), (384, 288), Box(0, 12, 100, 75)),
        ((1, 1), (224, 224), Box(0, 0, 1, 1)),
        ((5000, 1), (224, 224), Box(2499, 0, 1, 1)),
    ],
)
def test_validation_crops_the_center(size: tuple[int, int], out: tuple[int, int], expected: Box) -> None:
    assert center_box(*size, *out) == expected


@given(SIDES, SIDES, st.integers(8, 512), st.integers(8, 512))
def test_the_center_crop_lies_within_the_image_and_has_the_shape_of_the_output(
    width: int, height: int, out_width: int, out_height: int
) -> None:
    box = center_box(width, height, out_width, out_height)
    assert 0 <= box.left < box.left + box.width <= width
    assert 0 <= box.top < box.top + box.height <= height
    assert abs(box.width - max(1, box.height * out_width / out_height)) <= 1 + out_width / out_height


def test_rectangular_batches_group_by_shape_and_have_every_image_once() -> None:
    widths, heights = np.array([500, 375, 500, 300, 600, 800]), np.array([375, 500, 375, 300, 300, 400])
    plan = rectangular_plan(widths, heights, 288, 2)
    assert [batch.ids.tolist() for batch in plan] == [[1, 3], [0, 2], [4, 5]]
    # Ratios 7/8, 4/3 and 2: the short side stays, the long one is rounded down to a multiple of 8.
    assert [(batch.height, batch.width) for batch in plan] == [(328, 288), (288, 384), (288, 576)]


@given(st.lists(st.tuples(st.integers(1, 65_500), st.integers(1, 65_500)), max_size=40), st.integers(1, 7))
def test_rectangular_sizes_are_multiples_of_eight_and_bounded(sizes: list[tuple[int, int]], batch: int) -> None:
    widths, heights = np.array([w for w, _ in sizes], np.int64), np.array([h for _, h in sizes], np.int64)
    plan = rectangular_plan(widths, heights, 132, batch)
    assert sorted(row for part in plan for row in part.ids) == list(range(len(sizes)))
    assert all(len(part.ids) == batch for part in plan[:-1])
    for part in plan:
        assert part.height % 8 == part.width % 8 == 0
        assert (min(part.height, part.width), max(part.height, part.width) <= 396) == (128, True)


def test_a_mirrored_image_has_left_and_right_swapped() -> None:
    pixels = np.array(photo(60, 50))
    plain, mirrored = np.empty((32, 32, 3), np.uint8), np.empty((32, 32, 3), np.uint8)
    resize_into(plain, pixels, flip=False)
    resize_into(mirrored, pixels, flip=True)
    assert np.array_equal(mirrored, plain[:, ::-1])
    assert not np.array_equal(mirrored, plain)


def test_shrinking_averages_pixels() -> None:
    lines = np.zeros((64, 64, 3), np.uint8)
    lines[::2] = 255
    out = np.empty((16, 16, 3), np.uint8)
    resize_into(out, lines, flip=False)
    assert np.abs(out.astype(int) - 127).max() < 12


def test_resizing_equals_floating_point_resizing_except_for_rounding() -> None:
    pixels = np.array(photo(90, 70))
    out = np.empty((40, 56, 3), np.uint8)
    resize_into(out, pixels[5:65, 10:80], flip=False)
    source = torch.from_numpy(pixels[5:65, 10:80].copy()).permute(2, 0, 1)[None].double()
    exact = torch.nn.functional.interpolate(source, size=(40, 56), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    assert float((torch.from_numpy(out).double() - exact).abs().max()) <= 1.1


@given(st.tuples(*[st.integers(1, 120)] * 4), st.booleans(), st.integers(0, 9))
def test_pillow_resizes_as_torch_does_within_1_of_255(sides: tuple[int, int, int, int], flip: bool, seed: int) -> None:
    height, width, out_height, out_width = sides
    pixels = np.random.default_rng(seed).integers(0, 256, (height + 3, width + 5, 3), np.uint8)[1:-2, 2:-3]
    with_torch, without = (np.empty((out_height, out_width, 3), np.uint8) for _ in range(2))
    resize_into(with_torch, pixels, flip)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        resize_into(without, pixels, flip)
    assert np.abs(with_torch.astype(int) - without).max() <= 1


def test_a_batch_holds_each_sample_as_its_crop_resized(images: SplitReader, batches: ImageBatches) -> None:
    ids = permutation(len(images), 7)
    made = batches.random(ids, seed=3, epoch=1, size=48, min_scale=0.3)
    assert (made.shape, made.dtype) == ((len(SIZES), 48, 48, 3), np.dtype(np.uint8))
    for at, row in enumerate(ids.tolist()):
        width, height = SIZES[row]
        box, flip = random_crop(width, height, 0.3, 3, 1, row)
        full = simplejpeg.decode_jpeg(jpeg_of(images, row))
        expected = np.empty((48, 48, 3), np.uint8)
        resize_into(expected, full[box.top : box.top + box.height, box.left : box.left + box.width], flip)
        assert np.array_equal(made[at], expected), row


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_makes_the_same_pixels(images: SplitReader, batches: ImageBatches, threads: int) -> None:
    ids = permutation(len(images), 1)
    with ImageBatches(images, threads) as others:
        assert np.array_equal(others.random(ids, 1, 2, 40, 0.08), batches.random(ids, 1, 2, 40, 0.08))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_number_of_ranks_makes_the_same_pixels(images: SplitReader, batches: ImageBatches, num_ranks: int) -> None:
    ids = permutation(len(images), 1)
    whole = batches.random(ids, 1, 2, 40, 0.08)
    for rank in range(num_ranks):
        mine = batches.random(share(ids, rank, num_ranks), 1, 2, 40, 0.08)
        assert np.array_equal(mine, whole[rank::num_ranks])


def test_every_epoch_has_other_crops(batches: ImageBatches) -> None:
    ids = np.array([0, 1, 2])
    first, second = (batches.random(ids, 1, epoch, 40, 0.08) for epoch in (0, 1))
    assert all(not np.array_equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_rectangular_batches_are_the_same_on_any_number_of_ranks(
    images: SplitReader, batches: ImageBatches, num_ranks: int
) -> None:
    for part in rectangular_plan(images.plain("width"), images.plain("height"), 32, 4):
        whole = batches.centered(part.ids, part.height, part.width)
        assert whole.shape == (len(part.ids), part.height, part.width, 3)
        blocks = [block(len(part.ids), rank, num_ranks) for rank in range(num_ranks)]
        parts = [batches.centered(part.ids[list(rows)], part.height, part.width) for rows in blocks if rows]
        assert np.array_equal(np.concatenate(parts), whole)


def test_the_center_of_an_image_has_the_right_colors(tmp_path: Path) -> None:
    with ImageBatches(split_of(tmp_path, [encode(quarters(128, 96), Coding("4:4:4", 95))]), 1) as batches:
        seen = batches.centered(np.array([0]), 32, 32)[0]
    corners = seen[4, 4], seen[4, 27], seen[27, 4], seen[27, 27]
    expected = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    assert all(difference(np.array(one), np.array(other)) < 6 for one, other in zip(corners, expected, strict=True))


def test_an_empty_share_is_an_empty_batch(batches: ImageBatches) -> None:
    assert batches.random(np.array([], np.int64), 1, 0, 32, 0.08).shape == (0, 32, 32, 3)


def test_images_are_numbered_through_all_shards(images: SplitReader) -> None:
    assert len(images) == len(SIZES)
    assert [*zip(images.plain("width").tolist(), images.plain("height").tolist(), strict=True)] == SIZES
    for row, (width, height) in enumerate(SIZES):
        assert simplejpeg.decode_jpeg(jpeg_of(images, row)).shape == (height, width, 3)


def test_an_image_that_does_not_decode_is_named(tmp_path: Path) -> None:
    tiled = encode(photo(64, 64), Coding())
    broken = Tiled(tiled.jpeg[:-30] + b"\xff" * 28 + b"\xff\xd9", tiled.segments, 64, 64)
    with (
        ImageBatches(split_of(tmp_path, [tiled, broken]), 2) as batches,
        pytest.raises(PacktrainError, match="image 1 of the pack"),
    ):
        batches.centered(np.array([0, 1]), 32, 32)


@pytest.mark.usefixtures("processes")
def test_plans_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from packtrain.data.images import random_crops, center_box\n"
        "crop = random_crops(np.array([3]), 0.08, 1, 2, None)(0, 500, 375)\n"
        "print(crop.box.width > 0, center_box(500, 375, 224, 224).width)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True 329\n"


def test_batches_need_no_torch(images: SplitReader, batches: ImageBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(len(images))
    expected = batches.random(ids, 1, 0, 40, 0.3), batches.centered(ids, 24, 32)
    monkeypatch.setitem(sys.modules, "torch", None)
    with ImageBatches(images, 2) as made:
        found = made.random(ids, 1, 0, 40, 0.3), made.centered(ids, 24, 32)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1


def test_an_image_that_the_disk_has_changed_is_downloaded_again(tmp_path: Path) -> None:
    remote = Remote(tmp_path / "store")
    tiled = [encode(photo(*size, seed=at), Coding("4:2:0")) for at, size in enumerate(SIZES[:3])]
    file = put_file(remote, "train-00000", encode_shard(shard_of(tiled)))
    shards = (ShardFile(file.name, file.bytes, file.sha256, len(tiled)),)
    split = Split(samples=3, filtered={}, dropped={}, sources=(3,), shards=shards)
    manifest = Manifest(format=FORMAT, name=NAME, kind="labels", settings={}, splits={"train": split})
    remote.put(pack_key(NAME, "manifest.json"), manifest.to_json())

    def batch() -> NDArray[np.uint8]:
        with ImageBatches(Pack(remote, NAME, tmp_path / "cache").split("train"), threads=2) as batches:
            return batches.centered(np.arange(3), 32, 32)

    sound = batch()
    cached = tmp_path / "cache" / file.sha256
    rot(cached, at=cached.read_bytes().index(b"\xff\xd8"))  # the first bytes of a JPEG
    assert np.array_equal(batch(), sound)
    assert remote.fetched == ["train-00000"] * 2
