"""A translation job to start from, with toy data: sentences with numbers in English and German."""

from __future__ import annotations

from importlib.resources import files as resources

import numpy as np

from packtrain.recipes.template import Files, JobTemplate, divided, english, german, lines

_FRAMES = [
    ("I see", ".", "Ich sehe", "."),
    ("we need", ".", "Wir brauchen", "."),
    ("there are", " here.", "Hier sind", "."),
    ("who has", "?", "Wer hat", "?"),
]
_THINGS = [("apples", "Äpfel"), ("books", "Bücher"), ("cats", "Katzen"), ("chairs", "Stühle"), ("stars", "Sterne")]


def counting() -> Files:
    """Return sentences with numbers in English and German."""
    random = np.random.default_rng(4)
    rows: list[tuple[str, str]] = []
    for number in range(2, 1000):
        for place in random.choice(len(_FRAMES) * len(_THINGS), 2, replace=False):
            before, after, davor, danach = _FRAMES[place // len(_THINGS)]
            noun, noun_de = _THINGS[place % len(_THINGS)]
            rows.append((f"{before} {english(number)} {noun}{after}", f"{davor} {german(number)} {noun_de}{danach}"))
    files: Files = {}
    for split, sentences in divided(rows):
        files[f"{split}.en"] = lines(source for source, _ in sentences)
        files[f"{split}.de"] = lines(target for _, target in sentences)
    return files


TEMPLATE = JobTemplate(
    "translate a sentence",
    resources(__package__) / "job.yaml",
    "bitext",
    ("$split.en", "$split.de"),
    counting,
    example='"we need two hundred and six chairs."',
    duration="500 steps",
)
