from __future__ import annotations

import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms
from PIL.JpegImagePlugin import JpegImageFile, get_sampling

from pack.pictures import difference, opened, photo, quarters, saved, with_size, ycck
from packtrain.pack.picture import MAX_PIXELS, UnusableImage, pixels_to_decode, to_tiled
from packtrain.pack.tiles import QUALITY, find_segments

SUBSAMPLINGS = {0: "4:4:4", 1: "4:2:2", 2: "4:2:0"}
PHOTO = photo(120, 90)
JPEG = saved(PHOTO, "JPEG", quality=90)


def reason_for(data: bytes) -> str:
    with pytest.raises(UnusableImage) as caught:
        to_tiled(data)
    return caught.value.reason


def not_called(*_: object, **__: object) -> None:
    pytest.fail("called")  # what is raised otherwise makes a file unusable, too


def tables_of(image: Image.Image) -> dict[int, list[int]]:
    assert isinstance(image, JpegImageFile)
    return image.quantization


def picture_of(data: bytes, short_side: int | None = None) -> Image.Image:
    """Check that the tiles fit together, and return their pixels."""
    tiled = to_tiled(data, short_side)
    image = opened(tiled.jpeg)
    assert image.size == (tiled.width, tiled.height)
    assert find_segments(tiled.jpeg).tolist() == tiled.segments.tolist()
    return image


def saved_and_opened(image: Image.Image) -> Image.Image:
    return opened(saved(image, "JPEG", quality=QUALITY, subsampling="4:2:0"))


def colors(image: Image.Image) -> list[str]:
    """The colors of the four quarters, from left to right and top to bottom."""
    names = {
        (255, 0, 0): "red",
        (0, 255, 0): "green",
        (0, 0, 255): "blue",
        (255, 255, 255): "white",
        (0, 0, 0): "black",
    }
    width, height = image.size
    pixels = image.convert("RGB").load()
    assert pixels is not None
    seen = []
    for x, y in [(1, 1), (3, 1), (1, 3), (3, 3)]:
        value = pixels[width * x // 4, height * y // 4]
        assert isinstance(value, tuple)
        seen.append(min(names, key=lambda name: sum(abs(a - b) for a, b in zip(name, value, strict=True))))
    return [names[color] for color in seen]


UPRIGHT = ["red", "green", "blue", "white"]


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_keeps_its_subsampling_its_tables_and_nearly_all_its_pixels(subsampling: int, progressive: bool) -> None:
    data = saved(PHOTO, "JPEG", quality=83, subsampling=subsampling, progressive=progressive)
    kept = picture_of(data)
    assert get_sampling(kept) == subsampling
    assert tables_of(kept) == tables_of(opened(data))
    assert "progressive" not in kept.info
    assert difference(kept, opened(data)) < 0.6


@pytest.mark.parametrize("subsampling", [*SUBSAMPLINGS, "gray"])
@pytest.mark.parametrize("size", [(120, 90), (121, 91), (37, 53), (1, 1)])
def test_pixels_stay_the_same_if_no_color_is_out_of_range(subsampling: int | str, size: tuple[int, int]) -> None:
    soft = Image.fromarray(np.asarray(photo(*size)) // 2 + 64).convert("L" if subsampling == "gray" else "RGB")
    data = saved(soft, "JPEG", quality=83, **({} if subsampling == "gray" else {"subsampling": subsampling}))
    assert difference(picture_of(data), opened(data)) == 0


@pytest.mark.parametrize("subsampling", [*SUBSAMPLINGS, "gray"])
def test_colors_out_of_range_and_progressive_files_change_little(subsampling: int | str) -> None:
    image = photo(121, 91).convert("L" if subsampling == "gray" else "RGB")
    for progressive in (False, True):
        options = {} if subsampling == "gray" else {"subsampling": subsampling}
        data = saved(image, "JPEG", quality=83, progressive=progressive, **options)
        assert difference(picture_of(data), opened(data)) < 0.01


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_colors_that_rgb_cannot_hold_stay(subsampling: int) -> None:
    """Beside an edge of a bright color, a JPEG stores colors beyond it, which viewers cut off."""
    bright = Image.fromarray(np.random.default_rng(0).integers(0, 2, (12, 12, 3), np.uint8) * 255)
    data = saved(bright.resize((96, 96), Image.Resampling.BICUBIC), "JPEG", quality=90, subsampling=subsampling)
    assert difference(picture_of(data), opened(data)) < 0.2


@pytest.mark.parametrize("marker", [b"Adobe", b"other"], ids=["marker", "names of components"])
def test_a_jpeg_that_is_stored_as_rgb_keeps_its_colors(marker: bytes) -> None:
    data = saved(photo(121, 91), "JPEG", quality=95, keep_rgb=True).replace(b"Adobe", marker)
    shown = picture_of(data)
    assert get_sampling(shown) == 0
    assert difference(shown, opened(data)) < 0.1


def test_the_marker_of_jfif_says_that_a_jpeg_is_not_stored_as_rgb() -> None:
    data = bytearray(saved(quarters(), "JPEG", quality=95, subsampling=0))
    frame = data.index(b"\xff\xc0")
    scan = data.index(b"\xff\xda")
    for at in (frame + 10, scan + 5):
        for component, name in enumerate(b"RGB"):
            data[at + (3 if at < scan else 2) * component] = name
    assert difference(picture_of(bytes(data)), opened(bytes(data))) < 0.2


def test_a_smaller_copy_is_made_of_blended_colors() -> None:
    """As every viewer shows them: only what is coded again in its own size goes without."""
    data = saved(quarters(), "JPEG", subsampling=2, quality=90)
    shown = Image.fromarray(simplejpeg.decode_jpeg(data)).resize((32, 24), Image.Resampling.LANCZOS)
    assert difference(picture_of(data, 24), saved_and_opened(shown)) == 0


@pytest.mark.parametrize("sampling", ["440", "411"])
def test_a_rare_subsampling_becomes_4_4_4(sampling: str) -> None:
    data = simplejpeg.encode_jpeg(np.asarray(PHOTO), quality=90, colorsubsampling=sampling)
    kept = picture_of(data)
    assert SUBSAMPLINGS[get_sampling(kept)] == "4:4:4"
    assert tables_of(kept) == tables_of(opened(data))
    assert difference(kept, opened(data)) < 1.5


def test_a_gray_jpeg_stays_gray() -> None:
    data = saved(PHOTO.convert("L"), "JPEG", quality=90)
    kept = picture_of(data)
    assert kept.mode == "L"
    assert difference(kept, opened(data)) < 0.6


@pytest.mark.parametrize(
    "data",
    [
        saved(quarters(), "JPEG", quality=95, keep_rgb=True),
        saved(quarters().convert("CMYK"), "JPEG", quality=95),
        ycck(quarters()),
    ],
    ids=["RGB", "CMYK", "YCCK"],
)
def test_a_jpeg_in_another_color_space_becomes_rgb(data: bytes) -> None:
    shown = picture_of(data)
    assert (shown.mode, colors(shown)) == ("RGB", UPRIGHT)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_image_rotated_by_exif_is_turned_upright(orientation: int, kind: str) -> None:
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # orientation to the transposition that leads away from upright
    turned = quarters() if orientation == 1 else quarters().transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = picture_of(saved(turned, kind, exif=exif))
    assert (shown.size, colors(shown)) == ((64, 48), UPRIGHT)


def test_unreadable_exif_is_ignored() -> None:
    data = saved(quarters(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    assert colors(picture_of(data)) == UPRIGHT


def test_metadata_is_removed() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x010E] = "who took this"
    data = saved(PHOTO, "JPEG", exif=exif, icc_profile=profile, comment=b"where", xmp=b"when", dpi=(300, 300))
    kept = picture_of(data)
    assert not kept.info.keys() & {"exif", "icc_profile", "comment", "xmp", "dpi"}
    assert kept.info.keys() == picture_of(saved(PHOTO, "PNG")).info.keys()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_lossless_formats_become_jpeg(kind: str) -> None:
    assert difference(picture_of(saved(PHOTO, kind)), PHOTO) < 8


@pytest.mark.parametrize("mode", ["1", "L"])
@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_black_and_white_becomes_gray(mode: str, kind: str) -> None:
    shown = picture_of(saved(quarters().convert(mode), kind))
    assert shown.mode == "L"
    assert difference(shown, quarters().convert(mode).convert("L")) < 20


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF"])
def test_a_palette_becomes_rgb(kind: str) -> None:
    shown = picture_of(saved(quarters().convert("P"), kind))
    assert (shown.mode, colors(shown)) == ("RGB", UPRIGHT)


def sixteen_bits() -> np.ndarray:
    return np.asarray(quarters().convert("L")).astype(np.uint16) * 256 + 17


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_becomes_8_bit(kind: str) -> None:
    shown = picture_of(saved(Image.fromarray(sixteen_bits()), kind))
    assert shown.mode == "L"
    assert difference(shown, quarters().convert("L")) < 3


def png_of(values: np.ndarray, kind: int, transparent: bytes = b"", bits: int = 16) -> bytes:
    """A PNG of kind 0, gray, 2, RGB, or 4, gray with transparency."""
    height, width = values.shape[:2]
    rows = b""
    for row in values.astype(">u2"):
        last_bits = np.unpackbits(row.view(np.uint8)).reshape(-1, 16)[:, 16 - bits :]
        rows += b"\0" + np.packbits(last_bits).tobytes()
    png = b"\x89PNG\r\n\x1a\n"
    for name, body in [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)),
        *([(b"tRNS", transparent)] if transparent else []),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]:
        png += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return png


def test_16_bit_color_becomes_8_bit() -> None:
    assert colors(picture_of(png_of(np.asarray(quarters()).astype(np.uint16) * 256 + 17, 2))) == UPRIGHT


def test_a_transparent_color_of_16_bits_becomes_white() -> None:
    values = np.asarray(quarters()).astype(np.uint16) * 256 + 17
    red = struct.pack(">HHH", *values[4, 4])
    assert colors(picture_of(png_of(values, 2, red))) == ["white", "green", "blue", "white"]


def half_gray() -> np.ndarray:
    """Gray of 16 bits above a lower half of black."""
    values = np.full((48, 64), 0x8011, np.uint16)
    values[24:] = 0x0011
    return values


@pytest.mark.parametrize(
    "data",
    [
        png_of(half_gray(), 0, b"\x00\x11"),
        png_of(np.stack([half_gray(), (half_gray() > 0x1000) * np.uint16(0xFFFF)], -1), 4),
    ],
    ids=["one value", "transparency of each pixel"],
)
def test_transparent_pixels_of_16_bit_gray_become_white(data: bytes) -> None:
    shown = np.asarray(picture_of(data).convert("L"))
    assert abs(float(shown[:20].mean()) - 0x80) < 2
    assert shown[28:].mean() > 253


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_one_transparent_value_of_gray_becomes_white(bits: int) -> None:
    values = np.zeros((48, 64), np.uint16)
    values[24:] = 1
    shown = np.asarray(picture_of(png_of(values, 0, b"\0\1", bits)).convert("L"))
    assert shown[:20].mean() < 2
    assert shown[28:].mean() > 253


def test_a_tiff_of_a_kind_that_is_not_read_is_not_called_damaged() -> None:
    gray_with_transparency = saved(half_transparent("LA"), "TIFF").replace(b"\x08\0\x08\0", b"\x10\0\x10\0")
    assert reason_for(gray_with_transparency) == "unsupported TIFF"


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_of_unknown_range_are_dropped(mode: str) -> None:
    assert reason_for(saved(quarters().convert(mode), "TIFF")) == "unknown depth"


def half_transparent(mode: str) -> Image.Image:
    image = quarters().convert("RGBA")
    image.putalpha(Image.new("L", image.size, 255))
    image.paste((0, 0, 0, 0), (0, 24, 64, 48))
    return image.convert(mode)


@pytest.mark.parametrize(
    "data",
    [
        saved(half_transparent("RGBA"), "PNG"),
        saved(half_transparent("RGBA"), "WEBP", lossless=True),
        saved(half_transparent("RGBA"), "TIFF"),
        saved(half_transparent("RGBA"), "GIF"),
        saved(half_transparent("RGBA").quantize(), "PNG"),
        saved(quarters(), "PNG", transparency=(0, 0, 255)),
    ],
    ids=["PNG", "WebP", "TIFF", "GIF", "palette", "one color"],
)
def test_transparent_pixels_become_white(data: bytes) -> None:
    assert colors(picture_of(data)) == ["red", "green", "white", "white"]


def test_half_transparent_gray_is_blended_with_white() -> None:
    shown = picture_of(saved(Image.new("LA", (32, 32), (0, 128)), "PNG"))
    assert abs(float(np.asarray(shown).mean()) - 127) < 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_or_page_is_used(kind: str) -> None:
    frames = [Image.new("RGB", (64, 48), "black")] * 2
    assert colors(picture_of(saved(quarters(), kind, save_all=True, append_images=frames))) == UPRIGHT


def test_the_first_of_several_appended_images_is_used() -> None:
    data = saved(quarters(), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 48), "black")])
    assert colors(picture_of(data)) == UPRIGHT


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (3000, 1), (2, 4000), (60_000, 3)])
def test_any_shape_is_kept(size: tuple[int, int]) -> None:
    assert picture_of(saved(Image.new("RGB", size, "red"), "PNG")).size == size


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0" * 4096, "not an image"),
        (b"<html>404 not found</html>", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (saved(PHOTO, "PPM"), "not an image"),
        (saved(PHOTO, "ICO"), "not an image"),
        (saved(PHOTO, "JPEG2000"), "not an image"),
        (b"8BPS\0\x01" + bytes(200), "not an image"),
        (b"\xff\xd8\xff" + bytes(200), "damaged"),
        (with_size(JPEG, 0, 90), "damaged"),
        (with_size(JPEG, 120, 0), "damaged"),
        (with_size(JPEG, 65_000, 65_000), "too many pixels"),
        (with_size(JPEG, 9_434, 9_435), "too many pixels"),
        (with_size(JPEG, 9_000, 9_000), "cut off"),
        (saved(Image.new("1", (70_000, 2)), "PNG"), "too long"),
    ],
)
def test_an_unusable_file_is_dropped_with_a_reason(data: bytes, reason: str) -> None:
    assert reason_for(data) == reason


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("missing", [1, 2])
def test_a_jpeg_without_its_end_marker_keeps_all_pixels(mode: str, progressive: bool, missing: int) -> None:
    data = saved(PHOTO.convert(mode), "JPEG", quality=90, progressive=progressive)
    assert to_tiled(data[:-missing]).jpeg == to_tiled(data).jpeg


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_progressive_jpeg_that_ends_between_two_scans_is_dropped(mode: str) -> None:
    data = saved(PHOTO.convert(mode), "JPEG", quality=90, progressive=True)
    starts = [match.start() for match in re.finditer(rb"\xff\xda", data)]
    ends = [data.index(b"\xff\xc4", start) for start in starts[:-1] if b"\xff\xc4" in data[start:]]
    assert len(ends) > 3
    for end in (*starts[1:], *ends):
        assert reason_for(data[:end]) == "cut off"


@pytest.mark.parametrize("filling", [b"\0", b"Error 503, try again later. "])
def test_a_truncated_jpeg_that_is_filled_up_is_dropped(filling: bytes) -> None:
    data = saved(PHOTO, "JPEG", quality=95)
    assert reason_for(data[: len(data) // 2] + filling * 10_000) == "cut off"


def test_zeros_are_not_taken_for_the_last_pixels() -> None:
    """A decoder may find as many pixels in them as are missing, and says nothing."""
    data = saved(PHOTO, "JPEG", quality=50)
    assert {reason_for(data[:-10] + bytes(zeros)) for zeros in range(2, 90)} == {"cut off"}


@pytest.mark.parametrize("kept", [20, 160, 300, 640, 1500, len(JPEG) - 8, len(JPEG) - 4])
def test_a_truncated_jpeg_is_dropped(kept: int) -> None:
    assert reason_for(JPEG[:kept]) in ("cut off", "damaged")


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_truncated_jpeg_with_an_end_marker_is_dropped(progressive: bool, mode: str) -> None:
    data = saved(photo(200, 150).convert(mode), "JPEG", progressive=progressive)
    assert reason_for(data[: len(data) // 2] + b"\xff\xd9") == "cut off"


def test_extra_bytes_are_ignored() -> None:
    data = saved(quarters(), "JPEG", restart_marker_blocks=2)
    at = data.index(b"\xff\xd0")
    assert colors(picture_of(data[:at] + b"more" + data[at:] + b"and more")) == UPRIGHT


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_truncated_files_of_all_formats_are_dropped(kind: str) -> None:
    data = saved(PHOTO, kind)
    assert reason_for(data[: len(data) // 2]) == ("damaged" if kind == "WEBP" else "cut off")


def test_too_many_pixels_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: Image.Image) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    side = int(MAX_PIXELS**0.5) + 1
    for data in (
        with_size(JPEG, side, side),
        saved(Image.new("1", (8, 8)), "PNG").replace((8).to_bytes(4, "big") * 2, side.to_bytes(4, "big") * 2),
    ):
        with pytest.raises(UnusableImage):
            to_tiled(data)


def test_a_progressive_jpeg_with_too_many_scans_is_dropped() -> None:
    data = saved(PHOTO, "JPEG", progressive=True)
    scan = data.index(b"\xff\xda")
    end = data.index(b"\xff", scan + 2)
    assert reason_for(data[:end] + data[scan:end] * 600 + data[end:]) == "damaged"


def in_empty_scans(count: int) -> bytes:
    """Return a sequential JPEG with a component in each scan, of which none has any data."""
    colors = [bytes([number, 0x11, 0]) for number in (1, 2, 3)]
    frame = bytes([8, 0, 200, 0, 200, 3]) + b"".join(colors)
    head = segment(0xDB, bytes([0, *[1] * 64])) + segment(0xC0, frame)
    codes = b"".join(segment(0xC4, bytes([kind, 1, *[0] * 15, 0])) for kind in (0x00, 0x10))
    scans = (segment(0xDA, bytes([1, 1 + number % 3, 0, 0, 63, 0])) + b"\0" for number in range(count))
    return b"\xff\xd8" + head + codes + b"".join(scans) + b"\xff\xd9"


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def test_a_sequential_jpeg_with_too_many_scans_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_for(in_empty_scans(30)) == "cut off"
    monkeypatch.setattr("simplejpeg.decode_jpeg", not_called)
    assert reason_for(in_empty_scans(600)) == "damaged"


def test_a_jpeg_with_too_many_parts_of_metadata_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = segment(0xE1, b"Exif\0\0")
    assert to_tiled(JPEG[:2] + exif * 10 + JPEG[2:]).jpeg == to_tiled(JPEG).jpeg
    monkeypatch.setattr(Image, "open", not_called)
    assert reason_for(JPEG[:2] + exif * 2000 + JPEG[2:]) == "damaged"


def test_a_png_with_too_many_color_profiles_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(PHOTO, "PNG", icc_profile=b"profile")
    start, end = data.index(b"iCCP") - 4, data.index(b"IDAT") - 4
    several, many = (data[:end] + data[start:end] * count + data[end:] for count in (3, 30))
    assert to_tiled(several).jpeg == to_tiled(data).jpeg
    monkeypatch.setattr(Image, "open", not_called)
    assert reason_for(many) == "damaged"


PNG = saved(PHOTO, "PNG")


@pytest.mark.parametrize(
    "data",
    [
        JPEG[:2] + b"\xff\xfe\0\2" * 150_000 + JPEG[2:],
        JPEG[:2] + b"\xff" * 500_000 + JPEG[2:],
        PNG[:33] + (b"\0\0\0\0none" + zlib.crc32(b"none").to_bytes(4, "big")) * 250_000 + PNG[33:],
        PNG[:-12] + (b"\0\0\0\0none" + zlib.crc32(b"none").to_bytes(4, "big")) * 250_000 + PNG[-12:],
    ],
    ids=["comments", "padding", "chunks", "chunks at the end"],
)
def test_a_file_of_too_many_parts_is_dropped(data: bytes) -> None:
    assert reason_for(data) == "damaged"


def test_a_file_costs_its_pixels_its_scans_and_its_texts() -> None:
    assert pixels_to_decode(b"no image") == 0
    assert pixels_to_decode(in_empty_scans(3)) == 200 * 200
    assert pixels_to_decode(in_empty_scans(100)) == 5 * 200 * 200
    png = saved(Image.new("1", (8, 8)), "PNG")
    assert pixels_to_decode(png) == 64
    # A text in front of the pixels or after them: the second kind is expanded only when the image is decoded.
    for start in (png.index(b"IDAT") - 4, png.index(b"IEND") - 4):
        data = b"zTXta\0\0" + zlib.compress(bytes(1 << 20))
        chunk = (len(data) - 4).to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")
        assert pixels_to_decode(png[:start] + chunk * 3 + png[start:]) == 64 + 3 * (1 << 20)


@pytest.mark.parametrize(
    ("size", "short_side", "expected"),
    [
        ((120, 90), 45, (60, 45)),
        ((90, 120), 45, (45, 60)),
        ((120, 90), 90, (120, 90)),
        ((120, 90), 160, (120, 90)),
        ((2000, 8), 4, (1000, 4)),
        ((333, 500), 160, (160, 240)),
    ],
)
def test_a_smaller_copy_keeps_its_shape_and_is_never_larger(
    size: tuple[int, int], short_side: int, expected: tuple[int, int]
) -> None:
    assert picture_of(saved(photo(*size), "JPEG"), short_side).size == expected


def test_a_smaller_copy_shows_the_same_image_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(quarters(128, 96).transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif)
    shown = picture_of(data, 24)
    assert (shown.size, colors(shown)) == ((32, 24), UPRIGHT)


def test_the_same_file_always_gives_the_same_bytes() -> None:
    assert to_tiled(JPEG).jpeg == to_tiled(JPEG).jpeg


def warning_files() -> list[bytes]:
    """Files at which Pillow warns: of their size, of their EXIF, of their palette."""
    cut_exif = (
        b"Exif\0\0" + b"II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0\0\0\x01\0\0\0\x0e\x01\x02\0\xff\xff\0\0\xff\xff\0\0"
    )
    palette = quarters().convert("P")
    return [
        with_size(JPEG, 10_000, 10_000),
        saved(quarters(), "JPEG", exif=cut_exif),
        saved(palette, "PNG", transparency=b"\xff" * 10 + b"\x80" * 3),
    ]


def test_warnings_of_the_decoder_do_not_leak() -> None:
    def attempt(data: bytes) -> None:
        try:
            to_tiled(data)
        except UnusableImage as unusable:
            assert unusable.reason == "too many pixels"

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        workers = [threading.Thread(target=attempt, args=(data,)) for data in warning_files() * 4]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert list(warnings.filters) == before
    assert [str(warning.message) for warning in seen] == []


def test_only_a_few_formats_are_ever_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real: Callable[..., Image.Image] = Image.open

    def open_image(*arguments: object, **options: object) -> Image.Image:
        asked.append(options["formats"])
        return real(*arguments, **options)

    monkeypatch.setattr(Image, "open", open_image)
    to_tiled(JPEG)
    assert asked == [["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]]


KINDS = [saved(photo(40, 30), kind) for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP")] + [
    saved(photo(40, 30), "JPEG", progressive=True),
    saved(photo(40, 30).convert("CMYK"), "JPEG"),
    saved(photo(40, 30), "TIFF", compression="tiff_lzw"),
]


@settings(max_examples=300)
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), min_size=1, max_size=5),
)
def test_a_mutated_file_gives_good_tiles_or_a_reason(data: bytes, changes: list[tuple[float, bytes]]) -> None:
    mutated = bytearray(data)
    for where, value in changes:
        at = int(where**2 * len(mutated))  # mostly headers
        mutated[at : at + len(value)] = value
    try:
        tiled = to_tiled(bytes(mutated))
    except UnusableImage as unusable:
        assert unusable.reason in {
            "not an image", "damaged", "cut off", "too many pixels", "too long", "unknown depth", "unsupported TIFF",
        }  # fmt: skip
        return
    assert opened(tiled.jpeg).size == (tiled.width, tiled.height)
