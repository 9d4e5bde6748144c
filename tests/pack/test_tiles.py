from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import packtrain.pack.tiles as tiles_module
from pack.pictures import difference, opened, photo, saved, with_size
from packtrain.pack.picture import to_tiled
from packtrain.pack.shard import Columns, Ragged, encode_shard, open_shard
from packtrain.pack.tiles import (
    BadTiles,
    Box,
    Coding,
    Tiled,
    decode_crop,
    encode,
    find_segments,
    read_frame,
    splice,
    tile_mcus,
)

MCUS = {"4:2:0": (16, 16), "4:2:2": (16, 8), "4:4:4": (8, 8)}
SMALL = saved(photo(70, 40), "JPEG", restart_marker_blocks=5)


@pytest.mark.parametrize(
    ("per_row", "mcu_width", "expected"),
    [
        (1, 16, 1), (2, 16, 2), (3, 16, 3), (4, 16, 2), (21, 16, 3), (25, 16, 5), (31, 16, 31), (32, 16, 2),
        (3, 8, 3), (8, 8, 4), (21, 8, 7), (62, 8, 31), (63, 8, 7),
    ],
)  # fmt: skip
def test_a_tile_is_the_narrowest_part_of_32_pixels_that_divides_the_row(
    per_row: int, mcu_width: int, expected: int
) -> None:
    assert tile_mcus(per_row, mcu_width) == expected


@pytest.mark.parametrize("subsampling", MCUS)
@pytest.mark.parametrize("width", [1, 16, 128, 131, 499])
def test_every_segment_starts_after_a_marker_and_ends_with_one(subsampling: str, width: int) -> None:
    tiled = encode(photo(width, 50), Coding(subsampling))
    mcu_width, mcu_height = MCUS[subsampling]
    per_row, rows = -(-width // mcu_width), -(-50 // mcu_height)
    assert tiled.segments.dtype == np.uint32
    assert len(tiled.segments) - 1 == rows * per_row // tile_mcus(per_row, mcu_width)
    ends = [tiled.jpeg[end - 2 : end] for end in tiled.segments[1:]]
    assert ends[:-1] == [bytes([0xFF, 0xD0 + number % 8]) for number in range(len(ends) - 1)]
    assert (ends[-1], int(tiled.segments[-1])) == (b"\xff\xd9", len(tiled.jpeg))
    assert (tiled.width, tiled.height) == (width, 50)


def test_gray_is_stored_as_one_component_in_blocks_of_eight() -> None:
    tiled = encode(photo(64, 24, mode="L"), Coding())
    frame = read_frame(tiled.jpeg)
    assert (frame.mcu_width, frame.mcu_height, frame.interval, len(tiled.segments)) == (8, 8, 4, 7)
    assert opened(tiled.jpeg).mode == "L"


def test_any_tool_can_read_the_jpeg() -> None:
    image = photo(200, 120)
    tiled = encode(image, Coding("4:4:4", quality=95))
    assert opened(tiled.jpeg).size == (200, 120)
    assert difference(opened(tiled.jpeg), image) < 5


def test_restart_markers_cost_little() -> None:
    image = photo(500, 375)
    plain = saved(image, "JPEG", quality=92, subsampling="4:2:0")
    assert len(plain) < len(encode(image, Coding()).jpeg) < 1.04 * len(plain)


def test_comments_are_removed() -> None:
    image = opened(saved(photo(64, 64), "JPEG", comment=b"somebody's name"))
    assert b"somebody" not in encode(image, Coding()).jpeg


@pytest.mark.parametrize(
    ("jpeg", "reason"),
    [
        (b"", "not a JPEG"),
        (b"\xff\xd8", "damaged at byte 2"),
        (b"\xff\xd8" + b"\xff" * 100, "damaged"),
        (b"\xff\xd8\xff\xe0\x00\x00" + bytes(20), "damaged at byte 2"),
        (b"\xff\xd8\xff\xe0\xff\xff" + bytes(20), "damaged at byte 2"),
        (b"\xff\xd8\xff\xda\x00\x08\x03" + bytes(20), "one scan"),
        (saved(photo(64, 64), "PNG"), "not a JPEG"),
        (saved(photo(64, 64), "JPEG"), "do not divide"),
        (saved(photo(64, 64), "JPEG", restart_marker_blocks=3), "do not divide"),
        (saved(photo(64, 64), "JPEG", progressive=True), "progressive"),
        (with_size(SMALL, 70, 0), "no pixels"),
        (with_size(SMALL, 0, 40), "no pixels"),
        (with_size(SMALL, 65535, 65535), "do not divide"),
        (SMALL[:-2], "do not divide"),
        (SMALL[: len(SMALL) // 2], "damaged|do not divide"),
    ],
)
def test_a_jpeg_without_tiles_is_refused(jpeg: bytes, reason: str) -> None:
    with pytest.raises(BadTiles, match=reason):
        find_segments(jpeg)


def test_bytes_after_the_end_marker_belong_to_no_tile() -> None:
    assert find_segments(SMALL + b"\xff\xd0 and more").tolist() == find_segments(SMALL).tolist()


def test_padding_before_a_marker_is_allowed() -> None:
    assert find_segments(SMALL[:2] + b"\xff\xff" + SMALL[2:]).tolist() == [at + 2 for at in find_segments(SMALL)]


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, len(SMALL))
)
def test_hostile_bytes_are_refused_or_give_offsets_within_the_file(changes: list[tuple[int, int]], end: int) -> None:
    jpeg = bytearray(SMALL)
    for at, value in changes:
        jpeg[at % len(jpeg)] = value
    jpeg = jpeg[:end] if end > 100 else jpeg
    try:
        found = find_segments(bytes(jpeg))
    except BadTiles:
        return
    assert (np.diff(found.astype(np.int64)) >= 2).all()
    assert 0 < found[0] < found[-1] <= len(jpeg)


SUBSAMPLINGS = ["4:2:0", "4:2:2", "4:4:4", "gray"]


def tiles(width: int, height: int, subsampling: str = "4:2:0", quality: int = 90) -> Tiled:
    gray = subsampling == "gray"
    image = photo(width, height, seed=width * height, mode="L" if gray else "RGB")
    return encode(image, Coding("4:2:0" if gray else subsampling, quality))


def crop(tiled: Tiled, box: Box) -> np.ndarray:
    return decode_crop(tiled.jpeg, tiled.segments, tiled.width, tiled.height, box)


@settings(max_examples=250)
@given(st.data(), st.sampled_from(SUBSAMPLINGS), st.integers(1, 300), st.integers(1, 200), st.integers(20, 100))
def test_a_crop_has_the_pixels_of_a_full_decode(
    data: st.DataObject, subsampling: str, width: int, height: int, quality: int
) -> None:
    tiled = tiles(width, height, subsampling, quality)
    full = simplejpeg.decode_jpeg(tiled.jpeg, colorspace="RGB")
    for _ in range(4):
        left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
        box = Box(left, top, data.draw(st.integers(1, width - left)), data.draw(st.integers(1, height - top)))
        expected = full[top : top + box.height, left : left + box.width]
        assert np.array_equal(crop(tiled, box), expected), box


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_every_edge_of_every_tile_is_exact(subsampling: str) -> None:
    tiled = tiles(160, 64, subsampling)
    full = simplejpeg.decode_jpeg(tiled.jpeg, colorspace="RGB")
    for left in range(0, 152):
        top = left % 60
        assert np.array_equal(crop(tiled, Box(left, top, 8, 4)), full[top : top + 4, left : left + 8]), left


@pytest.mark.parametrize(
    ("mode", "subsampling", "side", "tiles_in_crop"),
    [("L", "4:2:0", 4_224, 69_168), ("RGB", "4:4:4", 4_224, 69_168), ("RGB", "4:2:0", 5_888, 67_344)],
)
def test_a_crop_of_a_very_large_image_has_the_pixels_of_a_full_decode(
    mode: str, subsampling: str, side: int, tiles_in_crop: int
) -> None:
    image = Image.new(mode, (side, side), "gray")
    image.paste(photo(200, 100, mode=mode), (side - 250, side - 150))
    tiled = encode(image, Coding(subsampling))
    box = Box(40, 0, side - 40, side)  # all tiles but the first column
    small, _, _ = splice(memoryview(tiled.jpeg), tiled.segments, side, side, box)
    assert len(find_segments(bytes(small))) - 1 == tiles_in_crop
    full = simplejpeg.decode_jpeg(tiled.jpeg, colorspace="RGB")
    assert np.array_equal(crop(tiled, box), full[:, 40:])


def test_gray_comes_back_as_three_equal_channels() -> None:
    pixels = crop(tiles(100, 80, "gray"), Box(10, 10, 50, 40))
    assert pixels.shape == (40, 50, 3)
    assert np.array_equal(pixels[..., 0], pixels[..., 2])
    assert len(np.unique(pixels)) > 10


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_a_packed_image_can_be_cropped(subsampling: int) -> None:
    tiled = to_tiled(saved(photo(250, 130), "JPEG", quality=77, subsampling=subsampling, optimize=True))
    full = simplejpeg.decode_jpeg(tiled.jpeg)
    assert np.array_equal(crop(tiled, Box(101, 33, 97, 55)), full[33:88, 101:198])


def test_only_the_tiles_under_the_crop_are_decoded() -> None:
    tiled = tiles(640, 480)
    small, left, top = splice(memoryview(tiled.jpeg), tiled.segments, 640, 480, Box(200, 100, 60, 50))
    frame = read_frame(bytes(small))
    # Tiles are 32 x 16 pixels: columns 6 to 8, rows 6 to 9.
    assert (frame.width, frame.height, left, top) == (96, 64, 8, 4)
    assert len(small) < len(tiled.jpeg) / 10


def test_a_box_that_touches_every_tile_needs_no_copy() -> None:
    tiled = tiles(200, 100)
    view = memoryview(tiled.jpeg)
    assert splice(view, tiled.segments, 200, 100, Box(3, 3, 190, 94))[0] is view


def test_a_jpeg_is_read_in_place_from_a_mapped_shard(tmp_path: Path) -> None:
    several = [tiles(100, 70), tiles(90, 110, "4:4:4")]
    columns = {
        "jpeg": Ragged.from_rows([tiled.jpeg for tiled in several], np.dtype("u1")),
        "segments": Ragged.from_rows([tiled.segments.tolist() for tiled in several], np.dtype("<u4")),
    }
    (tmp_path / "shard").write_bytes(encode_shard(Columns(columns)))
    opened = open_shard(tmp_path / "shard").ragged
    for row, tiled in enumerate(several):
        box = Box(5, 50, 70, 20)
        read = decode_crop(opened["jpeg"][row], opened["segments"][row], tiled.width, tiled.height, box)
        assert np.array_equal(read, crop(tiled, box))


@pytest.mark.parametrize("room", [0, 3 * 100 * 80 - 1, 3 * 100 * 80, 10**6])
def test_pixels_are_decoded_into_scratch_memory_if_it_is_large_enough(room: int) -> None:
    tiled, box, scratch = tiles(100, 80), Box(10, 20, 40, 30), np.zeros(room, np.uint8)
    pixels = decode_crop(tiled.jpeg, tiled.segments, 100, 80, box, scratch)
    assert np.array_equal(pixels, crop(tiled, box))
    assert np.shares_memory(pixels, scratch) == (room >= 3 * 100 * 80)


@pytest.mark.parametrize(
    "box", [Box(-1, 0, 5, 5), Box(0, -1, 5, 5), Box(0, 0, 0, 5), Box(0, 0, 5, -1), Box(96, 0, 5, 5), Box(0, 76, 5, 5)]
)
def test_a_box_outside_the_image_is_refused(box: Box) -> None:
    with pytest.raises(ValueError, match="not within 100 x 80"):
        crop(tiles(100, 80), box)


def test_offsets_that_do_not_match_the_image_are_refused() -> None:
    tiled, other = tiles(160, 80), tiles(80, 80)
    box = Box(0, 0, 20, 20)
    wrong = [
        (tiled.jpeg, other.segments, 160, 80),
        (tiled.jpeg, tiled.segments[:-1], 160, 80),
        (tiled.jpeg, tiled.segments + np.uint32(1), 160, 80),
        (tiled.jpeg, tiled.segments[:1], 160, 80),
        (tiled.jpeg, tiled.segments, 80, 160),
        (tiled.jpeg[:-5], tiled.segments, 160, 80),
        (b"", tiled.segments, 160, 80),
    ]
    for jpeg, segments, width, height in wrong:
        with pytest.raises(BadTiles):
            decode_crop(jpeg, segments, width, height, box)


def test_without_its_margin_a_crop_would_not_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin earns its place, and the tests of exactness would notice if it went."""
    monkeypatch.setattr(tiles_module, "MARGIN_PIXELS", 0)
    tiled = tiles(256, 128)
    full = simplejpeg.decode_jpeg(tiled.jpeg)
    assert not np.array_equal(crop(tiled, Box(64, 32, 64, 32)), full[32:64, 64:128])
