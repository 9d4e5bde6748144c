"""Overhead of Packtrain per training step, against loops with the same model and batches.

    python benchmarks/step.py [--json] [--rounds 300] [translate|classify|chat|caption]

The bare loop does what any script does: make the batch, forward, backward, clip, Adam, EMA; Lightning Fabric and
Accelerate do the same with their own calls. Ours is the whole Trainer: loader, step sync, watchdog, metrics in a store.

A round is one step of every contender on the same batch, in random order, on one thread each, one after the other: what
else the machine does falls on all of them alike. Measured is the CPU time of the thread that makes the steps. What
other threads need (those that decode images, our loader, those that write metrics by the second) is measured before the
rounds, in steps of one contender alone. The overhead is the median of the differences to the bare loop in the same
round, with a bootstrap interval, plus the difference of the other threads. `bare loop, again` shows what this
measurement can tell. JoeyNMT has its own model: benchmarks/translate.py.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn

import bench
from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.job.load import load_job
from packtrain.pack.build import PlainProgress
from packtrain.pack.packing import pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import Recipe, recipe_class, recipe_defaults
from packtrain.recipes.recipe import training_order
from packtrain.run.code import archive
from packtrain.run.run import create_run
from packtrain.store import Store, open_store
from packtrain.train.control import Control
from packtrain.train.progress import Progress
from packtrain.train.recorder import Clock
from packtrain.train.trainer import Trainer
from packtrain.train.world import World

EXAMPLE = Path(__file__).parent.parent / "examples" / "translate.yaml"
WARM_UP_STEPS = 5
BOOTSTRAPS = 2000
BARE, OURS = "bare PyTorch loop", "packtrain"


@dataclass
class Timer:
    """Wall time and CPU time after every step."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def tick(self) -> None:
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())

    def seconds_per_step(self) -> tuple[float, float]:
        steps = len(self.wall) - WARM_UP_STEPS
        return tuple((one[-1] - one[WARM_UP_STEPS - 1]) / steps for one in (self.wall, self.processor))  # type: ignore[return-value]


class Contender:
    """A training loop in a thread, which makes one step at a time: `work` calls what it is given after each."""

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._work = work
        self._go, self._made = threading.Semaphore(0), threading.Semaphore(0)
        self._since = self._seconds = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> float:
        """Let it make a step; return the CPU seconds of its thread."""
        self._go.release()
        self._made.acquire()
        if self._error is not None:
            raise self._error
        return self._seconds

    def end(self) -> None:
        """Let it make what is left of its steps."""
        for _ in range(10_000):
            self._go.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._begin()
            self._work(self._tick)
        except BaseException as error:
            self._error = error
        self._made.release()

    def _begin(self) -> None:
        self._go.acquire()
        self._since = time.thread_time()

    def _tick(self) -> None:
        self._seconds = time.thread_time() - self._since
        self._made.release()
        self._begin()


@dataclass(frozen=True)
class LoopCalls:
    """The calls of a library for the parts of a training loop."""

    set_up: Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]] = lambda model, optimizer: (model, optimizer)
    backward: Callable[[Tensor], object] = lambda loss: loss.backward()
    clip: Callable[[nn.Module, torch.optim.Optimizer, float], object] = lambda model, _, most: nn.utils.clip_grad_norm_(
        model.parameters(), most
    )


def fabric() -> LoopCalls:
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    return LoopCalls(
        made.setup, made.backward, lambda model, optimizer, most: made.clip_gradients(model, optimizer, max_norm=most)
    )


def accelerate() -> LoopCalls:
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    return LoopCalls(made.prepare, made.backward, lambda model, _, most: made.clip_grad_norm_(model.parameters(), most))


PEERS = {"Lightning Fabric": ("lightning_fabric", fabric), "Accelerate": ("accelerate", accelerate)}


def loop(job: Job, recipe: Recipe, steps: int, calls: LoopCalls, tick: Callable[[], None]) -> None:
    torch.manual_seed(1)
    settings = job.train
    plain = recipe.build_model()
    model, optimizer = calls.set_up(plain, settings.optimizer.build(plain))
    average = [] if settings.ema is None else [parameter.detach().clone() for parameter in model.parameters()]
    rate = settings.schedule.build(recipe.width, settings.duration)
    recipe.prepare(0, plain)
    model.train()
    batches = training_order(recipe).batches(0)
    for step in range(steps):
        ids = batches[step % len(batches)]
        batch = {name: torch.from_numpy(array) for name, array in recipe.batch(ids, step // len(batches)).items()}
        for group in optimizer.param_groups:
            group["lr"] = rate(Progress(step, 0.0))
        loss = recipe.loss(model, batch) / int(recipe.costs[ids].sum())
        calls.backward(loss)
        if settings.clip is not None:
            calls.clip(model, optimizer, settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        if average:
            with torch.no_grad():
                torch._foreach_lerp_(average, list(model.parameters()), 0.01)
        loss.item()
        tick()


class TimingClock(Clock):
    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self._tick = tick

    def mark(self, span: str) -> None:
        super().mark(span)
        if span == "optimizer":
            self._tick()


def ours(recipe: Recipe, store: Store, tick: Callable[[], None]) -> None:
    run = create_run(store, recipe.job, archive({}), recipe.pack.name)
    with tempfile.TemporaryDirectory() as control:
        Trainer(run, recipe, World(), 1, Control(Path(control)), clock=TimingClock(tick)).train()


def others_per_step(contender: Contender, steps: int) -> tuple[float, float]:
    """Let one contender make steps; return the CPU seconds per step of our loader's thread, and of all other threads.

    Those of the contender itself and of this function are not counted.
    """
    for _ in range(WARM_UP_STEPS):
        contender.step()
    loaders = [thread.ident for thread in threading.enumerate() if thread.name == "loader" and thread.ident]
    clocks = [time.pthread_getcpuclockid(ident) for ident in loaders]
    everything, loading = time.process_time(), -sum(map(time.clock_gettime, clocks))
    counted = -time.thread_time()
    for _ in range(steps):
        counted += contender.step()
    loading += sum(map(time.clock_gettime, clocks))
    others = time.process_time() - everything - counted - time.thread_time() - loading
    return loading / steps, max(0.0, others) / steps


def main() -> None:
    arguments = bench.parser(__doc__)
    arguments.set_defaults(rounds=300)
    arguments.add_argument("recipe", nargs="?", default="translate", help="the recipe whose example is trained")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    alone = max(20, options.rounds // 3)
    steps = WARM_UP_STEPS + alone + options.rounds
    # Ours makes one step more: it ends with a checkpoint, which is not part of a step.
    settings = [f"train.duration={steps + 1} steps", "checkpoint.every=1 h", "data.test=[]", "data.valid=[]"]
    example = EXAMPLE.with_stem(options.recipe)
    peers = {name: make() for name, (module, make) in PEERS.items() if find_spec(module)}
    with tempfile.TemporaryDirectory() as directory:
        job = load_job(example, settings, recipe_defaults).job
        store = open_store(f"{directory}/store", create=True)
        manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
        assert job.recipe is not None
        recipe = recipe_class(job.recipe)(job, Pack(store, manifest.name, Path(directory) / "cache"))
        loops = {BARE: LoopCalls(), "bare loop, again": LoopCalls(), **peers}
        contenders = {name: Contender(partial(loop, job, recipe, steps, calls)) for name, calls in loops.items()}
        contenders[OURS] = Contender(partial(ours, recipe, store))
        others = {name: others_per_step(contender, alone) for name, contender in contenders.items()}  # ours is last
        seconds = rounds_of(contenders, options.rounds)
        contenders[OURS].end()
    report(job, seconds, others, options.json)


def rounds_of(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of every contender's thread, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    numbers = np.random.default_rng(1)
    for _ in range(rounds):
        for name in numbers.permutation(list(contenders)).tolist():
            seconds[name].append(contenders[name].step())
    return seconds


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap interval of the median, at 95%."""
    numbers = np.random.default_rng(1)
    medians = np.median(numbers.choice(values, (BOOTSTRAPS, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def report(job: Job, seconds: dict[str, list[float]], others: dict[str, tuple[float, float]], as_json: bool) -> None:
    bare = seconds[BARE]
    usual = bench.median(bare) + sum(others[BARE])
    rows = []
    for name, rounds in seconds.items():
        loader, other = others[name]
        more = loader + other - sum(others[BARE])
        differences = [one - its + more for one, its in zip(rounds, bare, strict=True)]
        low, high = (f"{end / usual:+.1%}" for end in interval(differences))
        rows.append(
            {
                "CPU ms per step": name,
                "its thread": 1000 * bench.median(rounds),
                "loader": 1000 * loader,
                "others": 1000 * other,
                "overhead": "" if name == BARE else f"{bench.median(differences) / usual:+.1%}",
                "95% interval": "" if name == BARE else f"{low} to {high}",
            }
        )
    notes = [f"not installed: {name}" for name, (module, _) in PEERS.items() if not find_spec(module)]
    notes.append(f"overhead: median of the differences in {len(bare)} rounds; batches of {job.train.batch}")
    bench.show("Training step", rows, notes, as_json)


if __name__ == "__main__":
    main()
