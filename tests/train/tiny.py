"""The smallest recipe there is: a line through points, learned in milliseconds."""

# ruff: noqa: ARG002 - a recipe has what the loop asks for, needed or not

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from packtrain.data.order import Ids
from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.pack.manifest import FORMAT, Manifest, ShardFile, Split
from packtrain.recipes import Batch, Decoding, EvaluationRequest, Measurement, Prediction, Recipe, Scores
from packtrain.run.run import Run, add_run
from packtrain.store import Store
from packtrain.train.engine import Engine
from packtrain.train.world import World
from parts.runs import recipe_job

SAMPLES, WIDTH = 24, 3


def tiny_job(**sections: Any) -> Job:
    return recipe_job("tiny", **sections)


def tiny_run(store: Store, job: Job | None = None) -> Run:
    return add_run(store, job or tiny_job(), b"", "pack-1")


def tiny_engine(job: Job | None = None, world: World | None = None) -> Engine:
    job = job or tiny_job()
    return Engine(Tiny(job), job.train, world or World())


class TinyModel(nn.Module):
    """With a list of layers, a norm and a statistic, so that every kind of tensor is there."""

    mean: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(4, 4)])
        self.norm, self.dropout, self.out = nn.LayerNorm(4), nn.Dropout(dropout), nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs):
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        out: Tensor = self.out(self.dropout(self.norm(hidden)))
        return out


class Tiny(Recipe):
    unit = "samples"
    kind = "pairs"
    best_metric = "closeness"
    dropout = 0.2

    def __init__(self, job: Job) -> None:
        super().__init__(job, cast(Pack, _NamedPack()))
        numbers = np.random.default_rng(5)
        self._inputs = numbers.normal(size=(SAMPLES, WIDTH)).astype(np.float32)
        self._outputs = self._inputs.sum(axis=1, keepdims=True)

    @classmethod
    def check(cls, job: Job) -> None:
        pass

    @property
    def costs(self) -> NDArray[np.int64]:
        return np.ones(SAMPLES, np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.costs

    @property
    def sort_keys(self) -> NDArray[np.int64]:
        return np.arange(SAMPLES)

    @property
    def width(self) -> int:
        return WIDTH

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        return {"inputs": self._inputs[ids], "outputs": self._outputs[ids]}

    def build_model(self) -> nn.Module:
        return TinyModel(self.dropout)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        outputs: Tensor = model(batch["inputs"])
        return (outputs - batch["outputs"]).square().sum()

    def count(self, split: str) -> int:
        return 5 if split == "valid" else 0

    def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
        request.on_batch()
        with torch.no_grad():
            arrays = self.batch(request.ids, request.epoch)
            loss = float(self.loss(model, {name: torch.from_numpy(array) for name, array in arrays.items()}))
        return Measurement({"loss": loss}, [str(one) for one in request.decode_ids])

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        loss = sum(part.sums["loss"] for part in parts)
        counts = {"closeness": len(decode_ids), "loss": self.count(split)}
        return Scores({"closeness": -loss, "loss": loss}, counts=counts)

    def predict(self, model: nn.Module, inputs: Sequence[str], decoding: Decoding) -> list[Prediction]:
        return []


class _NamedPack:
    name = "pack-1"
    manifest = Manifest(
        FORMAT, name, "pairs", {}, {"train": Split(SAMPLES, {}, {}, (SAMPLES,), (ShardFile("train", 1, "", SAMPLES),))}
    )
