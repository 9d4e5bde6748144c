"""Weights that are sharded among the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from packtrain.run.checkpoint import committed, fetch
from packtrain.train.numerics import FIRST_LOSS_SCALE
from packtrain.train.state import MODEL_FILE, STATE_FILE, load_weights
from train.forking import WorkerForker
from train.tiny import TinyModel
from train.training import Training, assert_close


@pytest.mark.parametrize("optimizer", [{"lars": {"trust": 0.1}}, {"lamb": {}}], ids=["lars", "lamb"])
def test_sharded_layers_are_scaled_by_the_norms_of_the_whole_layers(
    training: Training, optimizer: dict[str, Any]
) -> None:
    alone = training.run(1, optimizer=optimizer)
    assert_close(training.run(3, optimizer=optimizer, exchange={"fsdp": {}}), alone, rel=1e-4)


@pytest.mark.parametrize(("precision", "groups"), [("bf16", 4), ("fp16", 4), ("fp32", 3)])
def test_sharded_weights_are_gathered_in_the_precision_that_computes(
    forker: WorkerForker, precision: str, groups: int
) -> None:
    """Norms are the fourth group: they stay in fp32, as do shards and gradients."""
    computes = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[precision]
    for seen in forker.succeed("watch_sharded", 2, precision=precision, accumulate="whole"):
        assert seen["types"] == {"Linear": computes, "LayerNorm": "torch.float32"}
        assert seen["kept bytes"] == 0, "autocast has no copy of a weight"
        assert seen["shards"] == seen["reduced types"] == ["torch.float32"]
        assert (seen["reduced before"], seen["reduced"]) == ([0, 0, 0], groups), "only with the last micro-batch"
        evaluated = {name: dtype for name, dtype in seen["evaluated"].items() if not name.startswith("norm")}
        assert set(evaluated.values()) == {computes}
        assert seen["evaluated"]["norm.weight"] == "torch.float32"


def test_gradients_can_be_accumulated_in_shards_instead(forker: WorkerForker) -> None:
    for seen in forker.succeed("watch_sharded", 2, precision="fp32", accumulate="sharded"):
        assert (seen["reduced before"], seen["reduced"]) == ([0, 3, 6], 9)


def test_only_the_first_worker_has_memory_for_a_whole_model_and_all_begin_with_its_weights(
    forker: WorkerForker,
) -> None:
    begun = {"model": True, "model is tied": True, "average": True, "average is tied": True}
    ranks = [{"built with memory": is_first, **begun} for is_first in (True, False)]
    assert forker.succeed("begin_sharded", 2) == ranks


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sharded_weights_in_16_bits_lead_to_nearly_the_same_losses(training: Training, precision: str) -> None:
    settings: dict[str, Any] = {"precision": precision, "micro_batch": "1 samples", "ema": 0.9}
    assert_close(training.run(2, **settings, exchange={"fsdp": {}}), training.run(2, **settings), rel=3e-2)


def test_a_gradient_that_overflows_on_one_worker_skips_the_step_of_all_shards(forker: WorkerForker) -> None:
    seen = {"skipped": [True, False], "kept": True, "scale": FIRST_LOSS_SCALE / 2}
    assert forker.succeed("overflow_sharded", 2) == [seen, seen]


def test_every_worker_saves_its_part_of_a_sharded_model(training: Training, tmp_path: Path) -> None:
    sharded, whole = training.run(2, exchange={"fsdp": {}}), training.run(2)
    files = {file.name for file in committed(sharded)[-1].files}
    assert files == {STATE_FILE, *(f"{name}-{n}-of-2.safetensors" for name in ("model", "optimizer") for n in (1, 2))}
    models = []
    for run in (sharded, whole):
        where = tmp_path / run.name
        where.mkdir()
        fetch(run, committed(run)[-1], where)
        models.append(TinyModel(0.0))
        load_weights(models[-1], where, MODEL_FILE)
    first = load_file(tmp_path / sharded.name / "model-1-of-2.safetensors")
    assert first["layers.0.weight"].shape == (2, 3), "half of its rows"
    for name, tensor in models[1].state_dict().items():
        assert torch.allclose(models[0].state_dict()[name], tensor, rtol=1e-4, atol=1e-6), name
