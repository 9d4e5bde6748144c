"""When a generation of a recipe made its first step."""

from __future__ import annotations

import json
import time

from packtrain.runs import Run


def seconds_since_first_step(run: Run, generation: int) -> float | None:
    """By the clock of this machine, if it is the first one, whose worker wrote the moment down; None before that."""
    for entry in run.store.list(run.key(f"metrics/{generation:06d}-rank-0")):
        for line in run.store.get(entry.key).splitlines():
            point = json.loads(line)
            if point["kind"] == "train":
                return max(0.0, time.time() - float(point["time"]))
    return None
