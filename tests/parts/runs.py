"""Small jobs and runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packtrain.job import Job
from packtrain.run.code import archive
from packtrain.run.records import Generation, Lease, Member
from packtrain.run.run import Run, add_run
from packtrain.store import Store

MEASURED = {"loss": 1.0, "rate": 0.1, "epoch": 0.0, "elapsed_seconds": 1.0, "step_seconds": 1.0}
"""The measurements that every step of training has."""


def program_job(name: str = "job", **fields: Any) -> Job:
    return Job.model_validate({"name": name, "program": ["train.py"], **fields})


def recipe_job(name: str = "job", **sections: Any) -> Job:
    """Return a job whose data is never read."""
    train = {"duration": "10 steps", "batch": "4 samples", "schedule": {"constant": {"rate": 0.01}}}
    given = {"model": "tiny", "data": {"train": [{"bitext": ["a", "b"]}]}, **sections}
    return Job.model_validate(
        {"name": name, "recipe": "translate", **given, "train": {**train, **sections.get("train", {})}}
    )


def new_run(store: Store, job: Job | None = None, script: str = "") -> Run:
    return add_run(store, job or program_job(), archive({"train.py": script.encode()}), None)


def a_lease(name: str, renewal: int = 0, **fields: Any) -> Lease:
    given = {"address": "127.0.0.1", "port": 29500, "workers": 1, "joined": 1, "used_seconds": 0.0, **fields}
    return Lease(name, f"host-of-{name}", renewal=renewal, **given)


def a_generation(number: int, *nodes: str, reason: str = "start", workers: int = 1, step: int = 0) -> Generation:
    members = tuple(Member(node, "127.0.0.1", workers) for node in nodes or ("a",))
    return Generation(number, members, 29500, reason, step)


def write_files(directory: Path, files: dict[str, bytes]) -> dict[str, Path]:
    """Write the files and return their paths by name, as a checkpoint takes them."""
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return {name: directory / name for name in files}


def read_files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
