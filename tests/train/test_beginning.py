"""Weights that a run begins with where they are not random: once, and the same on every worker."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.control import Control
from packtrain.train.engine import Engine
from packtrain.train.trainer import Trainer
from packtrain.train.world import World
from train.forking import WorkerForker
from train.tiny import tiny_job, tiny_run
from train.workers import FromFirstWeights, Interrupted, history, losses, weights


def test_the_model_and_its_ema_start_from_the_initial_weights() -> None:
    job = tiny_job(train={"ema": 0.9})
    random, begun = (Engine(FromFirstWeights(job), job.train, World()) for _ in range(2))
    begun.load_initial_weights()
    assert begun.ema is not None
    given = FromFirstWeights(job).initial_weights(begun.model)
    for model in (begun.model, begun.ema.model):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, given.get(name, random.model.state_dict()[name]))


@pytest.mark.parametrize(
    ("exchange", "optimizer"),
    [
        ({"ddp": {}}, "adam"),
        ({"fsdp": {}}, "adam"),
        ({"local": {"every": "1 steps", "momentum": 0.0, "rate": 1.0}}, "sgd"),  # as good as an exchange of gradients
    ],
    ids=["ddp", "fsdp", "local"],
)
def test_all_workers_start_from_the_initial_weights(
    directory_store: Store, forker: WorkerForker, tmp_path: Path, exchange: dict[str, Any], optimizer: str
) -> None:
    def run(recipe: str, ranks: int, **train: Any) -> Run:
        job = tiny_job(train={"batch": "4 samples", "optimizer": {optimizer: {}}, **train})
        run = tiny_run(directory_store, job)
        where = {"store": directory_store.url, "run": run.name, "control": str(tmp_path / run.name)}
        forker.succeed("train", ranks, **where, recipe=recipe)
        return run

    alone, random = losses(run("given", 1)), losses(run("plain", 1))
    assert list(losses(run("given", 2, exchange=exchange)).values()) == pytest.approx(list(alone.values()), rel=1e-5)
    assert alone[1] != random[1]


class Counted(Interrupted):
    """Counts how often it is asked what to begin with."""

    asked = 0

    def initial_weights(self, model: nn.Module) -> dict[str, Tensor]:  # noqa: ARG002
        self.asked += 1
        return {"out.weight": torch.arange(4.0)[None]}


def fail() -> None:
    raise InterruptedError


def test_initial_weights_are_loaded_again_only_until_the_first_commit(directory_store: Store, tmp_path: Path) -> None:
    whole, broken = tiny_run(directory_store), tiny_run(directory_store)

    def live(run: Run, generation: int, at: int = 0, stop: bool = False) -> int:
        control = Control(tmp_path / f"{run.name}-{generation}")
        recipe = Counted(run.job, at, control.request_stop if stop else fail)
        with suppress(InterruptedError):
            Trainer(run, recipe, World(), generation, control).train()
        return recipe.asked

    assert live(whole, 1) == 1
    assert [live(broken, 1, at=2), live(broken, 2, at=5, stop=True), live(broken, 3)] == [1, 1, 0]
    for run, times in ((whole, 1), (broken, 2)):
        told = [event.text for event in run.events().read() if event.kind == "restored" and "started" in event.text]
        new = "mean, layers (4 tensors), norm (2 tensors), out.bias"
        assert told == [f"started from given weights: 1 tensor; new: {new}"] * times
    assert broken.result() is not None
    assert history(broken) == history(whole)
    assert weights(broken) == weights(whole)
