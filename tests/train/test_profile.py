"""The trace of a run's steps: what it has, where it is kept, and when none is made."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.profiler import record_function

from packtrain.housekeeping.usage import usage_of
from packtrain.recipes import Batch, EvaluationRequest, Measurement
from packtrain.run.outputs import chosen, fetch_file, kept_files
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.control import Control, StopSignal
from packtrain.train.trainer import Trainer
from packtrain.train.world import World
from parts.runs import a_generation
from train.tiny import Tiny, tiny_job, tiny_run


def traced(store: Store, control: Control, steps: int, cause: Any = "start") -> Run:
    run = tiny_run(store, tiny_job(train={"profile": f"{steps} steps"}))
    run.propose(replace(a_generation(1), cause=cause))
    Trainer(run, Tiny(run.job), World(), 1, control, StopSignal().listen()).train()
    return run


def trace_of(run: Run, directory: Path) -> dict[str, Any]:
    """The trace as `packtrain get` brings it."""
    [(name, file)] = chosen(run, kept_files(run), ["profile"]).items()
    assert name.startswith("profile/generation-1-rank-0.")
    assert name.endswith(".pt.trace.json.gz")
    fetch_file(run, name, file, directory)
    trace: dict[str, Any] = json.loads(gzip.decompress((directory / name).read_bytes()))
    return trace


@pytest.mark.parametrize(("asked", "recorded"), [(2, range(5, 7)), (50, range(5, 11))])
def test_a_run_keeps_a_trace_of_its_steps_after_the_first(
    directory_store: Store, control: Control, tmp_path: Path, asked: int, recorded: range
) -> None:
    """Of ten steps the first five are not in it; a run that is over before keeps what there is."""
    run = traced(directory_store, control, asked)
    names = {event["name"] for event in trace_of(run, tmp_path)["traceEvents"] if "name" in event}
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{number}" for number in recorded}
    assert any(name.startswith("Optimizer.step") for name in names)
    assert usage_of(run.name, directory_store.list(run.key(""))).parts["outputs"] > 0
    assert not list(control.directory.glob("*trace*"))
    assert any("packtrain get" in event.text for event in run.events().read())


def test_an_evaluation_between_steps_is_left_out(directory_store: Store, control: Control, tmp_path: Path) -> None:
    class Named(Tiny):
        def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
            with record_function("measuring"):
                return super().measure(model, request)

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            with record_function(f"loss with {len(batch['inputs'])}"):
                return super().loss(model, batch)

    run = tiny_run(directory_store, tiny_job(train={"profile": "3 steps"}, evaluate={"every": "6 steps"}))
    Trainer(run, Named(run.job), World(), 1, control, StopSignal().listen()).train()
    names = [event.get("name") for event in trace_of(run, tmp_path)["traceEvents"]]
    assert "measuring" not in names
    assert names.count("loss with 4") == 3


def test_a_generation_after_a_failure_makes_no_other_trace(directory_store: Store, control: Control) -> None:
    run = traced(directory_store, control, 2, cause="machine")
    assert not [name for name in kept_files(run) if name.startswith("profile/")]
