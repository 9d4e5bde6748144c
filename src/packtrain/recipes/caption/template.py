"""A job to start from that captions images, with toy data: two shapes, and sentences about where they are."""

from __future__ import annotations

import json
from importlib.resources import files as resources

import numpy as np

from packtrain.recipes.template import COLORS, SHAPES, Files, JobTemplate, blank, draw, png


def scenes() -> Files:
    """Return images of two shapes, with two captions each that say which shapes are where."""
    random = np.random.default_rng(3)
    files: Files = {}
    for split, count in (("train", 900), ("valid", 100)):
        images, annotations = [], []
        for number in range(count):
            first, second = (list(SHAPES)[place] for place in random.choice(len(SHAPES), 2, replace=False))
            first_color, second_color = (list(COLORS)[place] for place in random.integers(len(COLORS), size=2))
            upright = bool(random.integers(2))
            image = blank(48)
            for shape, color, place in ((first, first_color, 12.0), (second, second_color, 36.0)):
                across = random.uniform(20, 28)
                draw(image, shape, color, (across, place) if upright else (place, across), random.uniform(8, 11))
            files[f"{split}/{number:03d}.png"] = png(image)
            a, b = f"a {first_color} {first}", f"a {second_color} {second}"
            captions = [f"{a} above {b}", f"{b} below {a}"] if upright else [f"{a} left of {b}", f"{b} right of {a}"]
            images.append({"id": number, "file_name": f"{number:03d}.png"})
            annotations += [{"image_id": number, "caption": text} for text in captions]
        files[f"{split}.json"] = json.dumps({"images": images, "annotations": annotations}).encode()
    return files


TEMPLATE = JobTemplate(
    "caption an image",
    resources(__package__) / "job.yaml",
    "coco",
    ("$split.json", "$split"),
    scenes,
    example="$data/valid/000.png --attention-maps .",
)
