from __future__ import annotations

import base64
import io

from PIL import Image

from packtrain.report.sample_view import MAX_SAMPLES, confusions, samples_html
from packtrain.run.records import Sample
from report.pages import Page

RED, BLUE = "a" * 64, "b" * 64
PICTURES = {RED: b"\xff\xd8 red", BLUE: b"\xff\xd8 blue"}


def looked(*cells: int) -> str:
    return base64.b64encode(bytes(cells)).decode()


def test_texts_are_side_by_side_and_differences_are_underlined() -> None:
    html = samples_html([Sample("Hello", "guten Tag euch", "guten Abend euch")], {})
    assert Page(html).text == [
        "input",
        "prediction",
        "reference",
        "Hello",
        "guten ",
        "Abend",
        " euch",
        "guten Tag euch",
    ]
    assert 'class="other">Abend</span>' in html


def test_the_classes_that_are_confused_most_often_come_first() -> None:
    cats = [Sample("", "cat", "dog", RED, confidence=0.9)] * 3
    others = [Sample("", "bird", "cat", RED, confidence=0.5), Sample("", "dog", "dog", RED, confidence=0.8)]
    found = confusions([*others, *cats])
    assert found is not None
    assert found.rows == (("cat", "dog", "3"), ("bird", "cat", "1"))
    assert confusions([Sample("hello", "hallo", "nein")]) is None, "texts have no classes"


def test_a_misclassified_picture_is_shown_with_both_classes_and_the_confidence() -> None:
    html = samples_html([Sample("x.jpg", "cat", "dog", RED, confidence=0.87)], PICTURES)
    text = "".join(Page(html).text)
    assert "dog (87%)" in text
    assert "is cat" in text
    assert base64.b64encode(PICTURES[RED]).decode() in html


def test_where_the_model_looked_is_shown_for_every_word_with_the_picture_stored_once() -> None:
    sample = Sample(
        "x.jpg", "a red car", "a car", RED, ("a", "car"), (looked(0, 0, 0, 255), looked(255, 0, 0, 0)), (2, 2)
    )
    html = samples_html([sample], PICTURES)
    page = Page(html)
    assert html.count(base64.b64encode(PICTURES[RED]).decode()) == 1
    labels = page.values("aria-label")
    assert labels == ["a car", "where the model looked for a", "where the model looked for car"]
    veils = [base64.b64decode(source.partition(",")[2]) for source in page.values("src")]
    with Image.open(io.BytesIO(veils[0])) as veil:
        assert (veil.size, veil.getpixel((1, 1)), veil.getpixel((0, 0))) == ((2, 2), (0, 0), (0, 210))


def test_a_picture_that_the_store_has_lost_leaves_an_empty_place() -> None:
    html = samples_html([Sample("x.jpg", "cat", "dog", RED, confidence=0.5)], {})
    assert "url(" not in html
    assert "is cat" in "".join(Page(html).text)


def test_a_wide_picture_keeps_its_shape_so_that_attention_lies_on_it() -> None:
    wide = io.BytesIO()
    Image.new("RGB", (40, 20)).save(wide, "JPEG")
    sample = Sample("x", "car", "car", RED, ("car",), (looked(1, 2),), (1, 2))
    assert "aspect-ratio: 40 / 20;" in samples_html([sample], {RED: wide.getvalue()})


def test_a_grid_of_zeros_is_dark_everywhere() -> None:
    sample = Sample("x", "car", "car", RED, ("car",), (looked(0, 0, 0, 0),), (2, 2))
    assert "data:image/png" in samples_html([sample], PICTURES)


def test_texts_of_samples_are_escaped_and_cut() -> None:
    evil = "<script>alert(1)</script>"
    samples = [
        Sample(evil, evil, evil, RED, (evil,), (looked(1),), (1, 1)),
        Sample(evil, evil, evil + "!", RED, confidence=0.5),
        Sample(evil, evil + "!", evil),
        Sample("x" * 10_000, "y" * 10_000, "z" * 10_000),
    ]
    for shown in (samples, samples[1:], samples[2:]):
        html = samples_html(shown, PICTURES)
        assert "script" not in Page(html).tags
        assert len(html) < 30_000


def test_only_the_first_samples_are_shown() -> None:
    html = samples_html([Sample(f"input {number}", "a", "b") for number in range(50)], {})
    assert f"input {MAX_SAMPLES - 1}<" in html
    assert f"input {MAX_SAMPLES}<" not in html
