"""The samples of a run for its report: texts beside each other, confused pictures, where a model looked per word."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from packtrain.report.finding import Rows
from packtrain.report.page import TEXT_LENGTH, cut, escape, style_sheet, wide
from packtrain.run.records import Sample

STYLE = style_sheet("samples.css")
MAX_SAMPLES = 16
_CONFUSIONS = 12
_VEIL = 210  # how dark a place is that the model did not look at, of 255


def confusions(samples: Sequence[Sample]) -> Rows | None:
    """Count which class was taken for which, most often first; None if no sample is a picture with a class."""
    wrong = Counter(
        (sample.reference, sample.prediction)
        for sample in samples
        if sample.confidence is not None and sample.reference != sample.prediction
    )
    if not wrong:
        return None
    rows = tuple((is_, predicted, str(count)) for (is_, predicted), count in wrong.most_common(_CONFUSIONS))
    return Rows(("is", "model said", "times"), rows)


def samples_html(samples: Sequence[Sample], pictures: Mapping[str, bytes]) -> str:
    """Show the samples: as pictures if there are any. `pictures` are JPEG files by their digests."""
    shown = samples[:MAX_SAMPLES]
    styles = []
    for number, sample in enumerate(shown):
        data = pictures.get(sample.picture or "")
        if data is not None:
            # In a style, so that a picture that is shown once for every word is in the page once.
            source = base64.b64encode(data).decode()
            styles.append(f".p{number} {{ background-image: url(data:image/jpeg;base64,{source}); {_shape(data)} }}")
    if not any(sample.picture for sample in shown):
        rows = "".join(
            f'<tr><td class="text" dir="auto">{cut(sample.input)}</td>'
            f'<td class="text" dir="auto">{_marked(sample.prediction, sample.reference)}</td>'
            f'<td class="text" dir="auto">{cut(sample.reference)}</td></tr>'
            for sample in shown
        )
        return wide(f"<tr><th>input</th><th>prediction</th><th>reference</th></tr>{rows}") if rows else ""
    captioned = [sample for sample in shown if sample.attention]
    shown_samples = [
        _caption(number, sample) if captioned else _classified(number, sample) for number, sample in enumerate(shown)
    ]
    body = "".join(shown_samples) if captioned else f'<div class="sheet">{"".join(shown_samples)}</div>'
    return f"<style>{''.join(styles)}</style>{body}"


def _shape(jpeg: bytes) -> str:
    """Return the shape of a picture as a style, so that what is laid over it covers it and nothing else."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
            return f"aspect-ratio: {image.width} / {image.height};"
    except Exception:  # Pillow raises anything on hostile bytes; the browser will show nothing then
        return ""


def _marked(prediction: str, reference: str) -> str:
    """Underline the words that the reference does not have there."""
    if max(len(prediction), len(reference)) > TEXT_LENGTH:  # comparing takes the square of the length
        return cut(prediction)
    predicted, meant = prediction.split(), reference.split()
    marked = []
    for kind, start, end, _, _ in SequenceMatcher(None, predicted, meant, autojunk=False).get_opcodes():
        words = escape(" ".join(predicted[start:end]))
        if words:
            marked.append(words if kind == "equal" else f'<span class="other">{words}</span>')
    return " ".join(marked)


def _classified(number: int, sample: Sample) -> str:
    sure = f" ({sample.confidence:.0%})" if sample.confidence is not None else ""
    right = sample.reference == sample.prediction
    prediction = f"{cut(sample.prediction)}{sure}"
    caption = f'<span class="said">{prediction}</span>' if right else f'<span class="said other">{prediction}</span>'
    truth = "" if right else f'<span class="truth">is {cut(sample.reference)}</span>'
    label = escape(f"{sample.reference}, taken for {sample.prediction}" if not right else sample.reference)
    return (
        f'<figure><span class="picture p{number}" role="img" aria-label="{label}"></span>'
        f'<figcaption dir="auto">{caption}{truth}</figcaption></figure>'
    )


def _caption(number: int, sample: Sample) -> str:
    looks = []
    for word, grid in zip(sample.words, sample.attention, strict=False):
        label = escape(f"where the model looked for {word}")
        looks.append(
            f'<figure><span class="picture p{number}" role="img" aria-label="{label}">'
            f'<img alt="" src="data:image/png;base64,{_veil(grid, sample.attention_shape)}"></span>'
            f'<figcaption dir="auto">{cut(word)}</figcaption></figure>'
        )
    predicted, meant = cut(sample.prediction), cut(sample.reference)
    return (
        f'<div class="caption"><span class="picture p{number}" role="img" aria-label="{predicted}"></span>'
        f'<div><p class="said" dir="auto">{predicted}</p><p class="dim" dir="auto">{meant}</p>'
        f'<div class="looks">{"".join(looks)}</div></div></div>'
    )


def _veil(grid: str, shape: tuple[int, int] | None) -> str:
    """Return a tiny PNG, as base64, that darkens what the model did not look at; browsers scale it up smoothly."""
    from PIL import Image

    cells = base64.b64decode(grid)
    assert shape is not None  # a sample with attention has one, and every grid has that size
    brightest = max(*cells, 1)
    pixels = bytes(byte for cell in cells for byte in (0, _VEIL - _VEIL * cell // brightest))
    out = io.BytesIO()
    Image.frombytes("LA", (shape[1], shape[0]), pixels).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()
