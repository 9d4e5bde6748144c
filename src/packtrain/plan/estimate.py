"""From the size of a job and the speed of a worker to time, memory and money on any number of machines. Pure.

A step of one worker: its part of the batch is computed, gradients are exchanged as far as that does not overlap with
computing, and the next batch has to be loaded by then.

    compute   fixed + seconds per unit x units of the batch / workers
    exchange  bytes on each link / its speed, minus what overlaps with the backward pass, or with further steps
    step      compute + exchange, or the time to load a batch if that is longer
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.job.job import Job
from packtrain.plan.devices import DeviceKind, Hardware, Link
from packtrain.recipes.recipe import Family
from packtrain.run.records import Forecast
from packtrain.store.records import Many
from packtrain.units import Duration, show_bytes, show_dollars, show_seconds, show_speed

Limit = Literal["compute", "network", "data", "memory"]

_BUCKET_BYTES = 25 * 2**20  # of DDP: the last one is sent when there is nothing left to compute
_BACKWARD = 2 / 3  # of the computing of a step
_EXPOSED = 0.1  # of a step, the communication that a network may add and still be good enough
_BASE_BYTES = {"gpu": 900_000_000, "cpu": 350_000_000}  # of a worker without a model: Python, torch, CUDA
_INSIDE = {"gpu": Link(10e9, 2e-5, "PCIe, assumed"), "cpu": Link(1.5e9, 1e-4, "loopback, assumed")}
START_SECONDS = 2.5  # until the first step: workers join, open the pack and build the model (benchmarks/plan.py)
_MOST_EPOCHS = 10_000  # whose sizes are looked at: more change nothing
_HALF_ACTIVATIONS = 0.6  # of the bytes in 32 bits: sums and norms stay as they are


@dataclass(frozen=True)
class Workload:
    """A job's model, data and step, whoever computes it. Bytes of activations and operations are for one unit.

    `copies` are further copies of all weights on each worker; `optimizer_copies` those of the weights that learn, which
    a checkpoint has, too. `traffic` is how many times an exchange moves `exchange_bytes`; it happens every
    `exchange_every` steps, of which the share `exchange_background` is made meanwhile. `exact`: the data is packed, so
    nothing about it is extrapolated. `whole_gradients`: those of a sharded model are whole until the last micro-batch.
    `evaluation_bytes` are those of the outputs of an evaluation, for each of at most `evaluation_units` at once. The
    batch and the images are those of the first epoch.
    """

    unit: str
    parameters: int
    trained: int
    buffer_bytes: int
    copies: int
    optimizer_copies: int
    averaged: bool
    activation_bytes: float
    flops: float
    half: bool
    exchange_bytes: int
    exchange_every: int
    exchange_background: float
    traffic: int
    sharded: bool
    units_per_step: float
    samples_per_step: float
    steps_per_epoch: float
    micro_batch: int | None
    samples: int
    data_bytes: int
    valid_samples: int
    test_samples: int
    exact: bool
    whole_gradients: bool = False
    family: Family = "transformer"
    evaluation_bytes: float = 0.0
    evaluation_units: int = 0

    @property
    def weight_bytes(self) -> int:
        return 4 * self.parameters + self.buffer_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Weights, their average if there is one, and the state of the optimizer."""
        return self.weight_bytes * (2 if self.averaged else 1) + 4 * self.trained * self.optimizer_copies

    def link_bytes(self, ranks: int) -> float:
        """Return the bytes that each machine sends per step, on average: those of a ring over all workers."""
        if ranks < 2:
            return 0.0
        statistics = self.buffer_bytes if self.exchange_every == 1 else 0
        # A sharded model's weights are gathered twice, in the precision that computes.
        traffic = self.traffic - 1 if self.sharded and self.half else self.traffic
        return traffic * (ranks - 1) / ranks * self.exchange_bytes / self.exchange_every + statistics


@dataclass(frozen=True)
class StepKind:
    """Steps of a run that are alike: their share of all steps, and the batch and the computing of a step,
    relative to those of the `Workload`. Both the batch and the size of images may change."""

    share: float
    batch: float
    work: float


_FIRST = StepKind(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Goal:
    """How far a run goes: `steps` in so many `epochs`, or `seconds` of training. The price is that of a machine."""

    steps: int | None
    seconds: float | None
    epochs: float | None
    phases: Many[StepKind]
    evaluate_steps: float | None
    decoded: int
    dollars_per_hour: float | None
    budget_dollars: float | None
    budget_hours: float | None


@dataclass(frozen=True)
class Speed:
    """How fast a worker computes and loads, and where that is known from.

    `exchange_seconds`, if measured, are those that did not overlap, in the layout that was measured; so are
    `memory_bytes`. `score_seconds` and `decode_seconds` are for one sample of an evaluation; `nvlink` is the device's.
    """

    source: str
    kind: DeviceKind
    fixed_seconds: float
    unit_seconds: float
    load_seconds: float
    score_seconds: float
    decode_seconds: float
    exchange_seconds: float | None = None
    memory_bytes: int | None = None
    nvlink: float = 0.0


@dataclass(frozen=True)
class Layout:
    """So many machines with so many workers each; `memory_bytes` is what each worker has, 0 if not known.

    `shared`: they are all this machine, which has one price.
    """

    machines: int
    workers: int
    memory_bytes: int
    shared: bool = False

    @property
    def ranks(self) -> int:
        return self.machines * self.workers


@dataclass(frozen=True)
class Estimate:
    """A run on so many machines. Rates are of all of them together; `sent_bytes` are those of one machine per step.

    `needed_bytes_per_second` is the network with which communication takes a tenth of a step. `efficiency` is the speed
    per worker, relative to the smallest number of machines.
    """

    machines: int
    workers: int
    source: str
    limit: Limit
    compute_seconds: float
    exchange_seconds: float
    data_seconds: float
    step_seconds: float
    units_per_second: float
    samples_per_second: float
    load_bytes_per_second: float
    sent_bytes: float
    needed_bytes_per_second: float
    memory_bytes: int
    memory_limit_bytes: int
    steps: int
    evaluation_seconds: float
    seconds: float
    dollars: float | None
    fits: bool
    in_budget: bool
    efficiency: float = 1.0


def goal_of(job: Job, work: Workload) -> Goal:
    """Return how far the job goes. Epochs may have batches and images of different sizes."""
    duration = job.train.duration
    first = job.train.in_epoch(0)
    steps_of: dict[tuple[float, float], float] = {}  # of each kind of step, by its batch and work
    epochs = total = 0.0
    for epoch in range(_MOST_EPOCHS):
        settings = job.train.in_epoch(epoch)
        batch = settings.batch.value / first.batch.value
        in_epoch = work.steps_per_epoch / batch
        remaining = 1.0
        if duration.unit != "seconds":
            remaining = duration.value - epochs if duration.unit == "epochs" else (duration.value - total) / in_epoch
        share = remaining if epoch == _MOST_EPOCHS - 1 else min(1.0, remaining)
        kind = (batch, batch * (settings.size / first.size) ** 2)
        steps_of[kind] = steps_of.get(kind, 0.0) + share * in_epoch
        epochs, total = epochs + share, total + share * in_epoch
        if share == remaining:
            break
    mean_steps = total / epochs  # of an epoch
    steps = None if duration.unit == "seconds" else int(duration.value)
    if duration.unit == "epochs":
        steps = max(1, math.ceil(total - 1e-6))
    every, evaluate_steps = job.evaluate.every, None
    if every is not None and every.unit != "seconds":
        evaluate_steps = every.value * (1 if every.unit == "steps" else mean_steps)
    return Goal(
        steps,
        duration.value if duration.unit == "seconds" else None,
        None if duration.unit == "seconds" else epochs,
        tuple(StepKind(count / total, *kind) for kind, count in steps_of.items()),
        evaluate_steps,
        job.evaluate.samples,
        job.fleet.dollars_per_hour,
        job.budget.dollars,
        job.budget.hours,
    )


def speed_from_table(work: Workload, hardware: Hardware, workers: int, beam: int) -> Speed:
    """Return the speed that a worker has by the peaks of its device."""
    flops = hardware.worker_flops(workers, work.half, work.family)
    unit_seconds = work.flops / flops
    per_sample = unit_seconds * work.units_per_step / max(1.0, work.samples_per_step)
    updated = 4 * work.parameters * (3 + work.optimizer_copies)  # bytes that an update of the weights reads and writes
    return Speed(
        f"table of devices: {hardware.device.basis(work.half, work.family)}",
        hardware.device.kind,
        updated / (300e9 if hardware.device.kind == "gpu" else 8e9) + 0.002,
        unit_seconds,
        0.0,
        per_sample * (1 - _BACKWARD),
        per_sample * (1 - _BACKWARD) * beam,
        nvlink=hardware.device.nvlink,
    )


def estimate(work: Workload, goal: Goal, speed: Speed, layout: Layout, link: Link | None) -> Estimate:
    """Estimate a run. `link` connects the machines; it is not needed for a single one."""
    ranks = layout.ranks
    share = work.units_per_step / ranks
    sent = work.link_bytes(ranks)
    used = link if layout.machines > 1 and link is not None else _INSIDE[speed.kind]
    if layout.machines == 1 and speed.nvlink:
        used = Link(speed.nvlink, 2e-5, "NVLink")
    compute = exchange = data = needed = batch = 0.0
    for phase in goal.phases:
        computed = speed.fixed_seconds + speed.unit_seconds * share * phase.work
        measured = speed.exchange_seconds
        exposed = _exposed(work, speed, computed, sent, used, ranks) if measured is None else measured
        compute += phase.share * computed
        exchange += phase.share * exposed
        data += phase.share * max(0.0, speed.load_seconds * share * phase.work - computed - exposed)
        needed = max(needed, _needed(work, speed, computed, sent))
        batch += phase.share * phase.batch
    step = compute + exchange + data
    memory = max(memory_of(work, speed.kind, ranks, phase) for phase in goal.phases)
    if speed.memory_bytes is not None:
        # Measured in steps of the first epoch, which evaluated only a few samples.
        unmeasured = memory_of(replace(work, evaluation_bytes=0.0), speed.kind, ranks)
        memory = speed.memory_bytes + max(0, memory - unmeasured)
    fits = not layout.memory_bytes or memory <= layout.memory_bytes
    steps, evaluation, seconds = _whole_run(work, goal, speed, ranks, step)
    paid = 1 if layout.shared else layout.machines
    dollars = None if goal.dollars_per_hour is None else goal.dollars_per_hour * paid * seconds / 3600
    late = goal.budget_hours is not None and seconds > goal.budget_hours * 3600
    dear = goal.budget_dollars is not None and dollars is not None and dollars > goal.budget_dollars
    limit: Limit = "network" if exchange > compute else "compute"
    if not fits or data > 0:
        limit = "data" if fits else "memory"
    samples = batch * work.samples_per_step / step
    return Estimate(
        layout.machines, ranks, speed.source, limit, compute, exchange, data, step,
        batch * work.units_per_step / step, samples, samples * work.data_bytes / max(1, work.samples), sent,
        needed, memory, layout.memory_bytes, steps, evaluation, seconds, dollars, fits,
        not late and not dear,
    )  # fmt: skip


def _tail(work: Workload, sent: float) -> float:
    """Return the bytes that are sent while nothing can be computed: the last bucket of ddp, else all or nothing."""
    if work.exchange_background:
        return 0.0
    overlaps = work.exchange_every == 1 and not work.sharded
    last = min(1.0, _BUCKET_BYTES / max(1, work.exchange_bytes)) if overlaps else 1.0
    return sent * last


def _hidden(work: Workload, speed: Speed, compute: float) -> float:
    """Return the seconds of each step, on average, in which the rest can be sent."""
    if work.exchange_background:
        return work.exchange_background * compute
    # A core that sends does not compute: without a GPU nothing is gained by doing both at once.
    return _BACKWARD * compute if speed.kind == "gpu" else 0.0


def _exposed(work: Workload, speed: Speed, compute: float, sent: float, link: Link, ranks: int) -> float:
    if ranks < 2:
        return 0.0
    tail, rate = _tail(work, sent), link.bytes_per_second
    unhidden = max(0.0, (sent - tail) / rate - _hidden(work, speed, compute))
    messages = max(1.0, work.exchange_bytes / _BUCKET_BYTES) / work.exchange_every
    return tail / rate + unhidden + 2 * link.latency_seconds * (1 + messages)


def _needed(work: Workload, speed: Speed, compute: float, sent: float) -> float:
    """Return the bytes per second of a link with which communication takes a tenth of a step."""
    allowed = compute * _EXPOSED / (1 - _EXPOSED)
    hidden = _hidden(work, speed, compute)
    return max(_tail(work, sent) / allowed, sent / (allowed + hidden)) if allowed > 0 else 0.0


def memory_of(work: Workload, kind: DeviceKind, ranks: int, phase: StepKind = _FIRST) -> int:
    """Return the bytes that a worker holds: weights, gradients, optimizer, copies, activations, and the libraries."""
    state = work.weight_bytes * (1 + work.copies + int(work.averaged)) + 4 * work.trained * (1 + work.optimizer_copies)
    share = phase.batch * work.units_per_step / ranks
    at_once = share if work.micro_batch is None else min(share, work.micro_batch)
    if work.sharded:
        state = state // ranks + (4 * work.trained if work.whole_gradients and at_once < share else 0)
    activations = work.activation_bytes * at_once * phase.work / phase.batch
    units = max(work.valid_samples, work.test_samples) * work.units_per_step / max(1.0, work.samples_per_step)
    evaluation = work.evaluation_bytes * min(work.evaluation_units, units / ranks)
    if kind == "gpu":  # its allocator gives the memory of activations to the evaluation
        return int(_BASE_BYTES[kind] + state + max(activations * (_HALF_ACTIVATIONS if work.half else 1.0), evaluation))
    return int(_BASE_BYTES[kind] + state + activations + evaluation)


def _whole_run(work: Workload, goal: Goal, speed: Speed, ranks: int, step: float) -> tuple[int, float, float]:
    """Return the steps, the seconds of all evaluations, and those of the run."""
    decoded = min(goal.decoded, work.valid_samples)
    evaluation_seconds = (work.valid_samples * speed.score_seconds + decoded * speed.decode_seconds) / ranks
    last = (work.test_samples * (speed.score_seconds + speed.decode_seconds)) / ranks
    if not work.test_samples:  # then the rest of the validation split is decoded
        last = (work.valid_samples - decoded) * speed.decode_seconds / ranks
    per_step = evaluation_seconds / goal.evaluate_steps if goal.evaluate_steps else 0.0
    if goal.steps is None:
        assert goal.seconds is not None
        steps = max(1, int(goal.seconds / (step + per_step)))
        return (
            steps,
            steps * per_step + evaluation_seconds + last,
            START_SECONDS + goal.seconds + evaluation_seconds + last,
        )
    times = 1 if goal.evaluate_steps is None else max(1, math.ceil(goal.steps / goal.evaluate_steps - 1e-9))
    evaluation = times * evaluation_seconds + last
    return goal.steps, evaluation, START_SECONDS + goal.steps * step + evaluation


def with_efficiency(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates in the order of machines, each compared with the first."""
    ordered = sorted(estimates, key=lambda estimated: estimated.machines)
    base = ordered[0].units_per_second / ordered[0].workers
    return [
        replace(estimated, efficiency=estimated.units_per_second / estimated.workers / base) for estimated in ordered
    ]


@dataclass(frozen=True)
class Advice:
    """The numbers of machines to choose from; None if none fits into memory and budget."""

    cheapest: int | None
    fastest: int | None


def choose(estimates: Sequence[Estimate]) -> Advice:
    """Return the cheapest and the fastest that fit and meet the budget; without a price, machine hours count."""
    able = [candidate for candidate in estimates if candidate.fits and candidate.in_budget]
    if not able:
        return Advice(None, None)

    def cost(candidate: Estimate) -> float:
        return candidate.seconds * candidate.machines if candidate.dollars is None else candidate.dollars

    # A tie goes to fewer machines: for a duration in time, they all take equally long.
    cheapest = min(able, key=lambda candidate: (round(cost(candidate), 6), candidate.machines))
    fastest = min(
        able, key=lambda candidate: (round(candidate.seconds, 3), -candidate.units_per_second, candidate.machines)
    )
    return Advice(cheapest.machines, fastest.machines)


# What a run stores and says.


def forecast_of(work: Workload, planned: Estimate, duration: Duration) -> Forecast:
    """Return what a run of this estimate remembers of it."""
    return Forecast(
        planned.source[:200], planned.limit, planned.workers, planned.steps, planned.step_seconds,
        planned.units_per_second, planned.seconds, planned.dollars, planned.memory_bytes, work.parameters,
        int(planned.sent_bytes), work.checkpoint_bytes, str(duration),
    )  # fmt: skip


def lines_of(forecast: Forecast, job: Job) -> list[str]:
    """Return the three lines that a person reads before a run starts."""
    cost = "" if forecast.dollars is None else f", {show_dollars(forecast.dollars)}"
    sent = f"; {show_bytes(forecast.gradient_bytes)} of gradients sent per step" if forecast.gradient_bytes else ""
    return [
        f"about {show_seconds(forecast.seconds)} for {forecast.steps:,} steps{cost} ({forecast.source})",
        f"{show_step(forecast.step_seconds)} per step, {show_speed(forecast.units_per_second)}"
        f" {job.train.batch.unit}/s, limited by {forecast.limit}{sent}",
        f"{show_parameters(forecast.parameters)}, {show_bytes(forecast.memory_bytes)} of memory per worker,"
        f" checkpoints of {show_bytes(forecast.checkpoint_bytes)} {show_saves(job)}",
    ]


def show_step(seconds: float) -> str:
    """Show the time of a step: `42 ms`, `1.23 s`, `14 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def show_saves(job: Job) -> str:
    """Show how often a job saves: `every 5 min`; `auto` is decided while it runs."""
    every = job.checkpoint.every
    if every == "auto":
        return "as often as it pays"
    if every.unit == "seconds" and every.value % 60 == 0:
        return f"every {every.value / 60:g} min"
    return f"every {every}"


def show_parameters(count: int) -> str:
    if count < 999_500:
        return f"{count / 1e3:.0f} thousand parameters"
    return f"{count / 1e6:.1f} million parameters" if count < 999.5e6 else f"{count / 1e9:.2f} billion parameters"


# Afterwards.
