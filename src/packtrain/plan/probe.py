"""The probe: a few real steps of a job's own model and batches, on this machine or on those of its fleet.

Each machine runs it once with its number (`python -m packtrain.plan.probe`), and it starts one process for each worker
there. They meet as the link probe does, through an address in the store; the first one prints what was measured. The
job, the name of its pack and its code are beside that address, and are deleted when the probe has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from packtrain.data.loader import Loader, Order, Position, RankBatches
from packtrain.data.order import Ids, share, spread
from packtrain.errors import PacktrainError
from packtrain.fleet.doctor import Usable, documents
from packtrain.fleet.host import read_secrets, visible_object
from packtrain.fleet.link_probe import probe_parser, reachable_address, rendezvous
from packtrain.job import Job
from packtrain.plan.devices import DeviceKind, gpu_named, this_machine
from packtrain.plan.estimate import Speed
from packtrain.plan.raw import enlarge_vocabulary
from packtrain.process import end_process, run_main
from packtrain.recipes import EvaluationRequest, Recipe, recipe_class
from packtrain.recipes.pairs import PairRecipe
from packtrain.recipes.recipe import training_order
from packtrain.run.code import unpacked
from packtrain.store import Store, open_store
from packtrain.store.records import MAX_RECORD_BYTES, decode, encode
from packtrain.system import cache_directory, usable_cores
from packtrain.units import counted

if TYPE_CHECKING:
    from packtrain.train.engine import Engine, StepResult
    from packtrain.train.world import World

SECONDS = 4.0
"""For which the steps of the job's own batch are repeated."""
_SMALL = 4  # the first steps have this part of a batch: they show what a step costs that does not shrink with it
_MOST_STEP_SECONDS = 15.0  # a longer step of the whole batch is computed from smaller ones instead
_WARM_UP_STEPS, _LEAST_STEPS, _MOST_STEPS = 2, 3, 100
_SCORED, _DECODED = 64, 16  # samples of an evaluation that is timed
_DATA_BOUND = 0.1  # the part of a step that waits for data, from which on loading bounds it
_START_SECONDS = 240.0  # for a machine to import torch, open the pack and build the model
_MAX_CODE_BYTES = 1 << 30


@dataclass(frozen=True)
class ProbeRequest:
    """A measurement to make: a job as JSON, the name of its pack in the same store, and how long.

    `vocabulary` is the size that the job's vocabulary will have, if the pack has only the first samples.
    """

    job: str
    pack: str
    seconds: float
    has_code: bool
    vocabulary: int | None


@dataclass(frozen=True)
class Measured:
    """Means over the steps of the first worker, in seconds; `memory_bytes` is the most that any worker used."""

    machines: int
    ranks: int
    kind: DeviceKind
    device: str
    steps: int
    step_seconds: float
    fixed_seconds: float
    unit_seconds: float
    exchange_seconds: float
    load_seconds: float
    score_seconds: float
    decode_seconds: float
    memory_bytes: int
    memory_limit_bytes: int

    def speed(self, exchange_every: int, where: str) -> Speed:
        """Return the speed for an estimate of the same layout."""
        # An exchange that happens only now and then was hardly measured: the link says how long it takes.
        exchange = self.exchange_seconds if exchange_every == 1 else None
        source = f"{counted(self.steps, 'step')} of {counted(self.ranks, 'worker')} on {where}"
        return Speed(
            source, self.kind, self.fixed_seconds, self.unit_seconds, self.load_seconds, self.score_seconds,
            self.decode_seconds, exchange, self.memory_bytes,
        )  # fmt: skip


# The client's side.


def probe(
    request: ProbeRequest, code: bytes | None, store: Store, usable: Sequence[Usable], workers: int,
    secrets: Mapping[str, str], public_address: bool = False,
) -> Measured:  # fmt: skip
    """Measure on all of these machines together, with so many workers on each."""
    machines = sum(len(place.machines) for place in usable)
    with visible_object(store) as key, ThreadPoolExecutor(len(usable)) as pool:
        store.put(f"{key}-request", encode(request))
        if code is not None:
            store.put(f"{key}-code", code)
        options = ["--store", store.url, "--key", key, "--machines", str(machines), "--workers", str(workers)]
        options += ["--public-address"] if public_address else []

        def join(number: int) -> str:
            place = usable[number]
            link_options = place.target.link_options(number, place.machines[0])
            command = [place.python, "-P", "-m", "packtrain.plan.probe", *options, *link_options]
            return place.target.run(command, dict(secrets), _START_SECONDS + 20 * request.seconds)

        try:
            # A thread for each: all must run at the same time to meet.
            answers = list(pool.map(join, range(len(usable))))
        except (OSError, subprocess.SubprocessError) as error:
            raise PacktrainError(f"the probe did not end: {error}") from error
    return Measured(**documents(answers[0])[-1])


# On a machine.


def main(arguments: Sequence[str]) -> None:
    parser = probe_parser("packtrain.plan.probe")
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--worker", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        _work(options)
        return
    read_secrets()
    threads = max(1, usable_cores() // options.workers)
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    command = [sys.executable, "-P", "-m", "packtrain.plan.probe", *arguments]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "--worker", str(number)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                )
            )
            for number in range(options.workers)
        ]
        outputs = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise PacktrainError((lines or [f"exit code {process.returncode}"])[-1].removeprefix("packtrain: "))
    print(outputs[0][0].decode(), end="")


def _work(options: argparse.Namespace) -> None:
    """Run one worker, from joining the others to the answer."""
    from packtrain.data.pack import Pack
    from packtrain.train.numerics import choose_kernels, set_exact_variables
    from packtrain.train.worker import in_one_line

    store = open_store(options.store)
    origin = "the request of this probe"
    request = decode(ProbeRequest, store.get(f"{options.key}-request", MAX_RECORD_BYTES), origin)
    job = Job.model_validate_json(request.job)
    assert job.recipe is not None
    code = unpacked(store.get(f"{options.key}-code", _MAX_CODE_BYTES)) if request.has_code else None
    try:
        set_exact_variables(job.train.exact)
        world = _join(options, store)
        choose_kernels(world.device, job.train.exact)
        pack = Pack(store, request.pack, cache_directory() / "packs")
        if request.vocabulary is not None:
            enlarge_vocabulary(pack, request.vocabulary)
        recipe = recipe_class(job.recipe, code)(job, pack)
        measured = measure(recipe, world, options.machines, options.workers, request.seconds)
    except Exception as error:  # of torch too: the client prints one line
        raise PacktrainError(in_one_line(error)) from error
    if world.is_first:
        print(json.dumps(asdict(measured)), flush=True)
    end_process(0)


def _join(options: argparse.Namespace, store: Store) -> World:
    """Join the other workers at the address that the first one puts into the store."""
    import torch
    import torch.distributed as dist

    from packtrain.train.world import World

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or "1"))
    ranks, rank = options.machines * options.workers, options.rank * options.workers + options.worker
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", options.worker) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        shared = rendezvous(store, f"{options.key}-address", rank, ranks, reachable_address(options))
        dist.init_process_group("nccl" if on_gpu else "gloo", store=shared, rank=rank, world_size=ranks)
    return World(rank, ranks, device, options.worker)


def measure(recipe: Recipe, world: World, machines: int, workers: int, seconds: float) -> Measured:
    """Make steps of a part of the batch, then of all of it; load and evaluate a little. Collective."""
    from packtrain.train.engine import Engine

    engine = Engine(recipe, recipe.job.train, world)
    recipe.prepare(0, engine.model)
    order = training_order(recipe)
    load = _load_seconds(recipe, order, world)
    smaller = replace(order, budget=lambda epoch: max(1, order.budget(epoch) // _SMALL))
    small = _steps(engine, recipe, world, smaller, seconds / 4)
    few = small.mean("wall") * _SMALL > _MOST_STEP_SECONDS
    # All ranks must do the same, and their clocks differ.
    full = None if world.any(few) else _steps(engine, recipe, world, order, seconds)
    score, decode_ = _evaluation_seconds(engine, recipe, world)
    fixed, unit = _line(small, full)
    last = full or small
    memory, limit, kind, device = _memory(world, workers)
    used = [int(text) for text in world.gather(str(memory).encode())]
    batches = order.batches(0)[:_MOST_STEPS]
    own_units = fmean(order.costs[share(batch, world.rank, world.num_ranks)].sum() for batch in batches)
    exchange, waited = last.mean("communication"), last.mean("data")
    step = fixed + unit * own_units + exchange + waited * (own_units / max(1.0, fmean(last.units)))
    if waited > _DATA_BOUND * last.mean("wall"):
        # Beside the computing, loading is slower than alone: what counts is how long a whole step had to wait for it.
        load = max(load, step / max(1.0, own_units))
    else:
        fixed += waited
    return Measured(
        machines, world.num_ranks, kind, device, len(last.walls), step, fixed, unit, exchange, load, score, decode_,
        max(used), limit,
    )  # fmt: skip


@dataclass(frozen=True)
class _MeasuredSteps:
    """The spans of each step, with its wall time, and the units of this rank's part."""

    walls: list[dict[str, float]]
    units: list[int]

    def mean(self, *spans: str) -> float:
        return fmean(sum(wall.get(span, 0.0) for span in spans) for wall in self.walls)


def _steps(engine: Engine, recipe: Recipe, world: World, order: Order, seconds: float) -> _MeasuredSteps:
    """Make steps as the training loop does, for that long by the first rank's clock."""
    from packtrain.train.progress import Progress
    from packtrain.train.transfer import Feed, pinned
    from packtrain.train.world import StepSync

    settings = recipe.job.train
    micro = None if settings.micro_batch is None else settings.micro_batch.value
    source = RankBatches(
        order, lambda *request: pinned(recipe.batch(*request), world.device), Position(), world.rank, world.num_ranks,
        micro, recipe.prefetch,
        equal_counts=settings.exchange.shards_model,
    )  # fmt: skip
    feed, clock = Feed(Loader(source), world.device, recipe.on_host), engine.clock
    measured = _MeasuredSteps([], [])
    pending: tuple[dict[str, float], int, StepSync, StepResult] | None = None
    started, began = time.perf_counter(), time.perf_counter()
    clock.take()
    try:
        for number in range(_WARM_UP_STEPS + _MOST_STEPS):
            sent = feed.next()
            clock.mark("data")
            loaded = sent.loaded
            result = engine.step(Progress(number), sent.receive(), loaded.cost, loaded.own_cost)
            feed.send_ahead()
            communication, spans = clock.spent("communication"), clock.take()
            elapsed = time.perf_counter() - started
            sync = StepSync(world, result.loss, False, False, False, elapsed, communication)
            previous, pending = pending, (spans, loaded.own_cost, sync, result)
            if number == _WARM_UP_STEPS - 1:
                began = time.perf_counter()
            if previous is None:
                continue
            totals = previous[2].wait()
            engine.confirm(number, previous[3])
            clock.mark("wait")
            waited = totals.waited(world.rank)
            if number > _WARM_UP_STEPS:  # of the step before
                ended = time.perf_counter()
                spans_of_step = {**previous[0], "communication": previous[0].get("communication", 0.0) - waited}
                spans_of_step["wait"] = spans_of_step.get("wait", 0.0) + waited
                measured.walls.append({**spans_of_step, "wall": ended - began})
                measured.units.append(previous[1])
                began = ended
            if totals.seconds > seconds and number >= _WARM_UP_STEPS + _LEAST_STEPS:
                break
    finally:
        feed.close()
    if pending is not None:
        pending[2].wait()
    return measured


def _line(small: _MeasuredSteps, full: _MeasuredSteps | None) -> tuple[float, float]:
    """Return the seconds of a step that do not depend on its units, and those of each unit."""
    computing, outside = ("forward", "backward", "wait"), ("optimizer", "other")
    if full is None:
        return small.mean(*outside), small.mean(*computing) / max(1.0, fmean(small.units))
    first, last = max(1.0, fmean(small.units)), max(1.0, fmean(full.units))
    at_last = full.mean(*computing)
    # Between the two measurements; noise must make neither of the two parts negative.
    slope = (at_last - small.mean(*computing)) / (last - first) if last > 1.2 * first else at_last / last
    unit = min(at_last / last, max(0.5 * at_last / last, slope))
    return full.mean(*outside) + at_last - unit * last, unit


def _load_seconds(recipe: Recipe, order: Order, world: World) -> float:
    """Return how long a unit takes to load by itself; the first batch opens files, and is not counted."""
    batches, spent, units = order.batches(0)[:4], 0.0, 0
    for number, batch in enumerate(batches):
        rank_ids = share(batch, world.rank, world.num_ranks)
        began = time.perf_counter()
        recipe.batch(rank_ids, 0)
        if number or len(batches) == 1:
            spent, units = spent + time.perf_counter() - began, units + int(order.costs[rank_ids].sum())
    return spent / max(1, units)


def _evaluation_seconds(engine: Engine, recipe: Recipe, world: World) -> tuple[float, float]:
    """Return how long a sample of the validation split takes to score, and to decode."""
    count = recipe.count("valid")
    if not count:
        return 0.0, 0.0
    model, nothing = engine.evaluation_model(), spread(count, 0)

    def seconds(ids: Ids, decoded: Ids) -> float:
        began = time.perf_counter()
        with engine.precision.compute():
            recipe.measure(model, EvaluationRequest("valid", ids, decoded, recipe.job.evaluate.beam))
        return time.perf_counter() - began

    seconds(spread(count, 2), nothing)  # once before it counts
    scored, decoded = spread(count, _SCORED), spread(count, 1)
    score = seconds(scored, nothing) / len(scored)
    first = seconds(nothing, decoded)
    if first < 1.0:
        decoded = spread(count, _DECODED)
        first = seconds(nothing, decoded)
    world.barrier()
    decode_seconds = first / len(decoded)
    if isinstance(recipe, PairRecipe):  # new weights write the longest possible outputs; usual ones are shorter
        pairs = recipe.pairs["valid"]
        written, longest = pairs.target.lengths[decoded].sum(), recipe.max_lengths(pairs.source.lengths[decoded]).sum()
        decode_seconds *= min(1.0, float(written) / max(1.0, float(longest)))
    return score, decode_seconds


def _memory(world: World, workers: int) -> tuple[int, int, DeviceKind, str]:
    """Return the most memory that this worker used, what there is, and the kind and the name of its device."""
    import torch

    if world.device.type == "cuda":
        about = torch.cuda.get_device_properties(world.device)
        used, total = torch.cuda.max_memory_reserved(world.device), about.total_memory
        gpu = gpu_named(about.name)
        return used, total, "gpu", gpu.name if gpu else about.name
    machine = this_machine()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return used, machine.memory_bytes // workers, "cpu", machine.device.name


if __name__ == "__main__":
    run_main(main)
