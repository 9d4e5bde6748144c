"""Changes of a run that exists: where it runs, what it may cost, how long it trains.

Everything else decides the losses, or is already done: the code is stored, the data packed, the weights have a shape.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from packtrain.errors import Mistake
from packtrain.job.document import Document
from packtrain.job.job import Job
from packtrain.job.load import apply_overrides

_DECIDES = ("recipe", "program", "environment", "model", "train")  # beside the data and the code
MAY_CHANGE = (
    "fleet", "budget", "train.duration", "train.exact", "train.patience", "train.profile", "checkpoint", "evaluate",
    "data.stage", "report", "program.resume",
)  # fmt: skip

# Why not, by the longest part of the field's name that is listed here.
_FIXED = {
    "name": "the run is named after it",
    "recipe": "its code is stored and its checkpoints are of this recipe",
    "program": "its code is stored",
    "code": "its code is stored",
    "directory": "its code is stored",
    "store": "the run is there; `packtrain cp` copies it to another one",
    "environment": "its code reads these variables",
    "inputs": "its machines have it",
    "origin": "its code came from there",
    "weights": "it has started",
    "parent": "it has started from there",
    "data": "its pack is made",
    "model": "its checkpoints have the weights of this model",
    "train": "the losses depend on it, and would be those of two runs",
    "checkpoint.best_by": "its checkpoints have scores of the present kind, and would be compared with others",
}


@dataclass(frozen=True)
class FieldChange:
    """A field of the job, or the whole `fleet`, with its old and its new value in plain data."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.before)} -> {_shown(self.after)}"


def changed_job(job_data: bytes, overrides: Sequence[str]) -> tuple[Job, list[FieldChange]]:
    """Return a stored job with each `field.path=value` set and what differs; a Mistake names what must not."""
    stored = json.loads(job_data)
    document = apply_overrides(Document("", "", stored, {(): None}), overrides)  # no lines: errors name `--set`
    try:
        before, after = Job.model_validate(stored), Job.model_validate(document.data)
    except ValidationError as error:
        raise document.first_mistake(error) from None
    stored_fields, changed_fields = _fields(before), _fields(after)
    names = [
        name for name in {**stored_fields, **changed_fields} if stored_fields.get(name) != changed_fields.get(name)
    ]
    for name in names:
        reason = next((_FIXED[prefix] for prefix in (name, name.split(".")[0]) if prefix in _FIXED), None)
        if reason is not None and name not in MAY_CHANGE:
            may = ", ".join(MAY_CHANGE)
            refusal = f"--set {name}: cannot change in a run that exists: {reason}"
            raise Mistake(f"{refusal}; start a new run (--from takes its weights), or set {may}")
    return after, [FieldChange(name, stored_fields.get(name), changed_fields.get(name)) for name in names]


def other_training(before: Job, after: Job) -> list[str]:
    """Return the fields that make one job train differently from the other; data and code are compared elsewhere."""
    fields_before, fields_after = _fields(before), _fields(after)
    differ = [name for name in {**fields_before, **fields_after} if fields_before.get(name) != fields_after.get(name)]
    return [name for name in differ if name.split(".")[0] in _DECIDES and name not in MAY_CHANGE]


def _fields(job: Job) -> dict[str, Any]:
    """Return every field of every section; the fleet is one, since its kinds have nothing in common."""
    fields: dict[str, Any] = {"fleet": job.fleet.model_dump(mode="json", exclude_defaults=True)}
    for section, value in job.model_dump(mode="json", exclude={"fleet"}).items():
        if isinstance(value, dict):
            fields |= {f"{section}.{name}": field_value for name, field_value in value.items()}
        else:
            fields[section] = value
    return fields


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (dict, list)):
        return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)).strip()
    return str(value)
