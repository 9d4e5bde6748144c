"""Small jobs and their raw data, for tests of packs and of what learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packtrain.job.job import DataSettings, Job

Pairs = Sequence[tuple[str, str]]

GREETINGS: list[tuple[str, str]] = [
    ("good morning", "guten Morgen"),
    ("good evening everybody", "guten Abend zusammen"),
    ("good night", "gute Nacht"),
    ("see you tomorrow morning", "bis morgen früh"),
    ("hello", "hallo"),
    ("thank you very much", "vielen Dank"),
    ("how are you today", "wie geht es dir heute"),
    ("the morning is cold and the evening is warm", "der Morgen ist kalt und der Abend ist warm"),
]
QUESTIONS: Pairs = [
    ("is it cold", "ist es kalt"),
    ("are you warm this morning", "ist dir heute Morgen warm"),
    ("hello, how is the evening", "hallo, wie ist der Abend"),
    ("today", "heute"),
    ("thank you", "danke"),
]


def write_pairs(path: Path, pairs: Pairs) -> str:
    """A TSV of pairs, and its path as a job has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return str(path)


def data_of(paths: Sequence[str], **settings: Any) -> DataSettings:
    """The data section of a job that learns from one source."""
    return DataSettings.model_validate({"train": [{"bitext": list(paths)}], "vocabulary": 300, **settings})


def job_of(folder: Path, pairs: Pairs = GREETINGS, valid: Pairs = QUESTIONS, **sections: Any) -> Job:
    """A translation job that learns from a few pairs; `sections` replace its own as wholes."""
    defaults: dict[str, Any] = {
        "name": "greetings",
        "recipe": "translate",
        "data": {
            "train": [{"bitext": write_pairs(folder / "train.tsv", pairs)}],
            "valid": [{"bitext": write_pairs(folder / "valid.tsv", valid)}] if valid else [],
            "vocabulary": 300,
        },
        "model": {"size": "tiny", "width": 32, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1},
        "train": {
            "duration": "10 steps",
            "batch": "64 tokens",
            "schedule": {"noam": {"warmup": "4 steps", "peak": 0.003}},
        },
    }
    return Job.model_validate(defaults | sections)
