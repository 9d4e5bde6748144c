"""Runs whose truth is known, made of records: nothing here trains or reads a store."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from packtrain.job import Job
from packtrain.observe.evidence import Evidence
from packtrain.observe.goodput import goodput
from packtrain.observe.history import throughput
from packtrain.observe.status import Status
from packtrain.run.records import (
    Generation,
    Gpu,
    Member,
    Point,
    Telemetry,
    TelemetrySample,
    TimeSpent,
    WorkerUse,
)
from parts.runs import recipe_job

SPANS = {"data": 0.0, "forward": 0.03, "backward": 0.06, "optimizer": 0.01, "communication": 0.0, "wait": 0.0}


def falling(step: int) -> float:
    return 2.0 + 6.0 * math.exp(-step / 150)


def trained(step: int, loss: float = 4.0, generation: int = 1, **seconds: float) -> Point:
    spans = {**SPANS, **seconds}
    values = {f"{span}_seconds": amount for span, amount in spans.items() if amount}
    whole = sum(spans.values())
    measured = {"loss": loss, "rate": 0.001, "epoch": step / 100, "gradient_norm": 0.8, "tokens": 64.0}
    return Point(
        "train", generation, step, 1000.0 + step * 0.1,
        {**measured, **values, "elapsed_seconds": step * 0.1, "step_seconds": whole},
    )  # fmt: skip


def steps_of(count: int = 400, loss: Callable[[int], float] = falling, **seconds: float) -> list[Point]:
    """Return steps whose losses scatter a little, always in the same way."""
    noise = np.random.default_rng(1)
    return [trained(step, loss(step) + float(noise.normal(0, 0.05)), 1, **seconds) for step in range(1, count + 1)]


def evaluations_of(
    curve: Callable[[int], float], count: int = 20, every: int = 20, name: str = "loss", noise: float = 0.004
) -> list[Point]:
    chance = np.random.default_rng(2)
    return [
        Point("valid", 1, step, 1000.0 + step * 0.1, {name: curve(step) + float(chance.normal(0, noise))})
        for step in range(every, every * count + 1, every)
    ]


def spent_of(ranks: Mapping[int, Mapping[str, float]], steps: int = 400) -> list[TimeSpent]:
    """Return the time of each rank, given its seconds per step."""
    return [
        TimeSpent(1000.0 + steps * 0.1, 1, rank, steps, {span: steps * seconds for span, seconds in spans.items()})
        for rank, spans in ranks.items()
    ]


def telemetry_of(
    count: int = 20, node: str = "a", cpu: float = 0.5, gpu: float | None = None, sent: float = 0.0
) -> list[TelemetrySample]:
    gpus = () if gpu is None else (Gpu("card", gpu, 30 << 30, 40 << 30, 300.0, 60.0),)
    return [
        TelemetrySample(1000.0 + 2 * number, node, Telemetry(
            cpu_fraction=cpu, memory_fraction=0.4, sent_bytes_per_second=sent, gpus=gpus,
            workers=(WorkerUse(0, 0.9, 1 << 30),),
        ))
        for number in range(count)
    ]  # fmt: skip


def generation_of(*workers: int, number: int = 1, **fields: Any) -> Generation:
    members = tuple(Member(f"node-{index}", "::1", count) for index, count in enumerate(workers))
    return Generation(number, members, 1, **{"reason": "", **fields})


def evidence_of(
    points: Sequence[Point] = (),
    job: Job | None = None,
    workers: Sequence[int] = (1,),
    measure: str = "bleu",
    **fields: Any,
) -> Evidence:
    """Return the evidence of a run with these records."""
    generations = fields.pop("generations", (generation_of(*workers),))
    spent = fields.pop("spent", ())
    steps = [point for point in points if point.kind == "train"]
    summary = Status(
        run="job-1", state="finished", reason="reached 10 steps", description="a job",
        step=steps[-1].step if steps else 0, goal=None, loss=None, loss_steps=0, rate=None, measure=measure,
        lower=False, unit="tokens", seconds=40.0, score=None, test=None, scores={}, counts={}, signatures={}, cost=None,
        best=None, generations=len(generations),
        units_per_second=throughput(steps, "tokens"), machines=(),
        goodput=goodput(generations, points, spent),
    )  # fmt: skip
    own = replace(summary, **fields.pop("status", {}))
    return Evidence(job or recipe_job(), own, raw=points, spent=spent, generations=generations, **fields)
