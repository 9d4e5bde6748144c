from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack.pictures import difference, opened, photo, saved, with_size
from packtrain.pack.tiles import BadTiles, Coding, encode, find_segments, read_frame, tile_mcus

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


def test_grey_is_stored_as_one_component_in_blocks_of_eight() -> None:
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


def test_comments_stay_behind() -> None:
    image = opened(saved(photo(64, 64), "JPEG", comment=b"somebody's name"))
    assert b"somebody" not in encode(image, Coding()).jpeg


@pytest.mark.parametrize(
    ("jpeg", "reason"),
    [
        (b"", "starts"),
        (b"\xff\xd8", "damaged at byte 2"),
        (b"\xff\xd8" + b"\xff" * 100, "damaged"),
        (b"\xff\xd8\xff\xe0\x00\x00" + bytes(20), "damaged at byte 2"),
        (b"\xff\xd8\xff\xe0\xff\xff" + bytes(20), "damaged at byte 2"),
        (b"\xff\xd8\xff\xda\x00\x08\x03" + bytes(20), "one scan"),
        (saved(photo(64, 64), "PNG"), "starts"),
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
def test_what_is_not_made_of_tiles_is_refused(jpeg: bytes, reason: str) -> None:
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
def test_hostile_bytes_give_offsets_within_the_file_or_a_refusal(changes: list[tuple[int, int]], end: int) -> None:
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
