"""The state of a run at a step: what a checkpoint holds, as safetensors and JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from packtrain.checkpoint import CorruptCheckpoint
from packtrain.data.loader import Position
from packtrain.errors import Mistake
from packtrain.train.engine import Engine
from packtrain.train.optimizer import load_optimizer, optimizer_tensors

MODEL_FILE, AVERAGE_FILE, OPTIMIZER_FILE = "model.safetensors", "average.safetensors", "optimizer.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Random states are not part of it: every step draws its own from its number."""

    step: int = 0
    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    loss_scale: float | None = None
    clean_steps: int = 0
    best_score: float | None = None


@dataclass(frozen=True)
class Description:
    """What the weights belong to, so that they are not loaded into something else."""

    recipe: str
    pack: str
    model: dict[str, bool | int | float | str]
    versions: dict[str, str]
    progress: Progress


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything, taken between two steps."""

    description: Description
    tensors: Mapping[str, dict[str, Tensor]]

    @property
    def step(self) -> int:
        return self.description.progress.step

    def write(self, directory: Path) -> dict[str, Path]:
        files = {STATE_FILE: directory / STATE_FILE}
        files[STATE_FILE].write_text(json.dumps(asdict(self.description), indent=1))
        for name, tensors in self.tensors.items():
            files[name] = directory / name
            save_file(tensors, files[name])
        return files


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "packtrain": version("packtrain"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def take(engine: Engine, description: Description) -> Snapshot:
    tensors = {
        MODEL_FILE: _copied(engine.model.state_dict()),
        OPTIMIZER_FILE: _copied(optimizer_tensors(engine.optimizer, engine.model)),
    }
    if engine.average is not None:
        tensors[AVERAGE_FILE] = _copied(engine.average.model.state_dict())
    return Snapshot(description, tensors)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def restore(engine: Engine, directory: Path, expected: Description) -> Progress:
    """Puts a fetched checkpoint into the engine and says how far it had come."""
    description = read_description(directory)
    for trait in ("recipe", "pack", "model"):
        found, wanted = getattr(description, trait), getattr(expected, trait)
        if found != wanted:
            raise Mistake(f"the checkpoint's {trait} is {found!r} and not the run's {wanted!r}")
    load_weights(engine.model, directory / MODEL_FILE)
    if engine.average is not None:
        load_weights(engine.average.model, directory / AVERAGE_FILE)
    load_optimizer(engine.optimizer, engine.model, _load(directory / OPTIMIZER_FILE))
    engine.precision.restore(description.progress.loss_scale, description.progress.clean_steps)
    return description.progress


def read_description(directory: Path) -> Description:
    try:
        return TypeAdapter(Description).validate_json((directory / STATE_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise CorruptCheckpoint(f"the checkpoint's {STATE_FILE} cannot be read") from error


def load_weights(model: nn.Module, path: Path) -> None:
    try:
        model.load_state_dict(_load(path))
    except RuntimeError as error:
        raise CorruptCheckpoint(f"{path.name} does not fit the model: {str(error).splitlines()[-1].strip()}") from error


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{path.name} cannot be read: {error}") from error
