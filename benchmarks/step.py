"""Overhead of Packtrain per training step, against loops with the same model and batches.

    python benchmarks/step.py [--json] [--rounds 5] [--steps 60]

All run in this process on one thread, in turns. The bare loop does what any script does: make the batch, forward,
backward, clip, Adam, EMA; Lightning Fabric and Accelerate do the same with their own calls. Ours is the whole Trainer:
loader, step sync, watchdog, metrics in a store. CPU time counts all threads; on a shared machine it repeats better
than wall time. JoeyNMT has its own model: benchmarks/translate.py.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import bench
from packtrain.data.order import epoch_batches
from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.job.load import load_job
from packtrain.pack.build import PlainProgress
from packtrain.pack.packing import pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import Recipe, recipe_class, recipe_defaults
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


@dataclass(frozen=True)
class LoopCalls:
    """The calls of a library for the parts of a training loop."""

    set_up: Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]] = lambda model, optimizer: (model, optimizer)
    backward: Callable[[Tensor], object] = lambda loss: loss.backward()
    clip: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda model, _: nn.utils.clip_grad_norm_(
        model.parameters(), 1.0
    )


def fabric() -> LoopCalls:
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    return LoopCalls(
        made.setup, made.backward, lambda model, optimizer: made.clip_gradients(model, optimizer, max_norm=1.0)
    )


def accelerate() -> LoopCalls:
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    return LoopCalls(made.prepare, made.backward, lambda model, _: made.clip_grad_norm_(model.parameters(), 1.0))


PEERS = {"Lightning Fabric": ("lightning_fabric", fabric), "Accelerate": ("accelerate", accelerate)}


def loop(job: Job, recipe: Recipe, steps: int, calls: LoopCalls) -> tuple[float, float]:
    torch.manual_seed(1)
    model, optimizer = calls.set_up(*_model_and_optimizer(recipe))
    average = [parameter.detach().clone() for parameter in model.parameters()]
    rate = job.train.schedule.build(recipe.width, job.train.duration)
    batches = epoch_batches(recipe.costs, recipe.sort_keys, job.train.batch.value, job.train.seed, 0)
    timer = Timer()
    for step, ids in enumerate(itertools.islice(batches, steps)):
        batch = {name: torch.from_numpy(array) for name, array in recipe.batch(ids, 0).items()}
        for group in optimizer.param_groups:
            group["lr"] = rate(Progress(step, 0.0))
        loss = recipe.loss(model, batch) / int(recipe.costs[ids].sum())
        calls.backward(loss)
        calls.clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.01)
        loss.item()
        timer.tick()
    return timer.seconds_per_step()


def _model_and_optimizer(recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = recipe.build_model()
    return model, torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)


class TimingClock(Clock):
    def __init__(self, timer: Timer) -> None:
        super().__init__()
        self._timer = timer

    def mark(self, span: str) -> None:
        super().mark(span)
        if span == "optimizer":
            self._timer.tick()


def ours(recipe: Recipe, store: Store) -> tuple[float, float]:
    run = create_run(store, recipe.job, archive({}), recipe.pack.name)
    timer = Timer()
    with tempfile.TemporaryDirectory() as control:
        Trainer(run, recipe, World(), 1, Control(Path(control)), clock=TimingClock(timer)).train()
    return timer.seconds_per_step()


def main() -> None:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--steps", type=int, default=60)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    settings = [f"train.duration={options.steps} steps", "checkpoint.every=1 h", "data.test=[]", "data.valid=[]"]
    peers = {name: make() for name, (module, make) in PEERS.items() if find_spec(module)}
    with tempfile.TemporaryDirectory() as directory:
        job = load_job(EXAMPLE, settings, recipe_defaults).job
        store = open_store(f"{directory}/store", create=True)
        manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
        assert job.recipe is not None
        recipe = recipe_class(job.recipe)(job, Pack(store, manifest.name, Path(directory) / "cache"))
        contenders: dict[str, Callable[[], tuple[float, float]]] = {
            "bare PyTorch loop": lambda: loop(job, recipe, options.steps, LoopCalls()),
            "packtrain": lambda: ours(recipe, store),
            **{name: lambda calls=calls: loop(job, recipe, options.steps, calls) for name, calls in peers.items()},  # type: ignore[misc]
        }
        seconds = {name: [] for name in contenders}  # type: dict[str, list[tuple[float, float]]]
        for _ in range(options.rounds):
            for name, contender in contenders.items():
                seconds[name].append(contender())
    report(job, seconds, options.json)


def report(job: Job, seconds: dict[str, list[tuple[float, float]]], as_json: bool) -> None:
    bare = seconds["bare PyTorch loop"]
    rows, notes = [], []
    for name, rounds in seconds.items():
        ratios = [one[1] / other[1] for one, other in zip(rounds, bare, strict=True)]
        wall, processor = (bench.median(values) for values in zip(*rounds, strict=True))
        low, middle, high = min(ratios) - 1, bench.median(ratios) - 1, max(ratios) - 1
        rows.append(
            {
                "loop": name,
                "ms/step": 1000 * wall,
                "CPU ms/step": 1000 * processor,
                "tokens/CPU s": job.train.batch.value / processor,
                "overhead": f"{middle:+.1%} ({low:+.1%} to {high:+.1%})",
            }
        )
    notes += [f"not installed: {name}" for name, (module, _) in PEERS.items() if not find_spec(module)]
    notes.append(
        f"overhead: CPU time relative to the bare loop, median and range of {len(bare)} rounds; tokens without padding"
    )
    bench.show("Training step", rows, notes, as_json)


if __name__ == "__main__":
    main()
