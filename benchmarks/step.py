"""Overhead of Packtrain per training step, against loops with the same model and batches.

    python benchmarks/step.py [--json] [--rounds 8] [--bursts 3] [--steps 20] [translate|classify|chat|caption]

The bare loop does what any script does: make the batch, forward, backward, clip, Adam, EMA; Lightning Fabric and
Accelerate do the same with their own calls. Ours is the whole Trainer: loader, step sync, watchdog, metrics in a store.

Every contender is a process of its own with one thread to compute. They take turns in random order, a burst of steps
each, so that what else the machine does falls on all alike. Measured is the CPU time of the whole process: the loader,
the threads that decode images and those that write metrics are part of it. Where its tensors are in memory makes the
same loop faster or slower for as long as a process lives; so a round starts all of them anew, and what counts is the
median over the rounds of the difference to the bare loop, with a bootstrap interval. `bare loop, again` shows what this
measurement can tell. JoeyNMT has its own model: benchmarks/translate.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn

import bench
import example
from example import WARM_UP_STEPS, Tick
from packtrain.recipes import Recipe
from packtrain.recipes.recipe import training_order
from packtrain.store import Store
from packtrain.train.progress import Progress

SETTINGS = ["checkpoint.every=1 h", "evaluate.every=null", "data.test=[]", "data.valid=[]"]
SETTLED_SECONDS = 0.3  # after a burst, until our loader has made the batches that are ready at the start of the next
BOOTSTRAPS = 2000
BARE, AGAIN, OURS = "bare PyTorch loop", "bare loop, again", "packtrain"


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


def loop(make_calls: Callable[[], LoopCalls], recipe: Recipe, _: Store, tick: Tick) -> None:
    calls, settings = make_calls(), recipe.job.train
    torch.manual_seed(1)
    plain = recipe.build_model()
    model, optimizer = calls.set_up(plain, settings.optimizer.build(plain))
    average = [] if settings.ema is None else [parameter.detach().clone() for parameter in model.parameters()]
    rate = settings.schedule.build(recipe.width, settings.duration)
    recipe.prepare(0, plain)
    model.train()
    batches = training_order(recipe).batches(0)
    for step in count():
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


def ours(recipe: Recipe, store: Store, tick: Tick) -> None:
    example.train(recipe, store, tick)


CONTENDERS: dict[str, Callable[[Recipe, Store, Tick], None]] = {
    BARE: partial(loop, LoopCalls),
    AGAIN: partial(loop, LoopCalls),
    "Lightning Fabric": partial(loop, fabric),
    "Accelerate": partial(loop, accelerate),
    OURS: ours,
}
MODULES = {"Lightning Fabric": "lightning_fabric", "Accelerate": "accelerate"}


def contend(name: str, recipe_name: str, directory: Path, turns: Connection) -> None:
    """Be a contender: for each number received make so many steps, and send their CPU seconds."""
    torch.set_num_threads(1)
    left, since = 0, 0.0

    def begin() -> None:
        nonlocal left, since
        left, since = turns.recv(), time.process_time()

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            time.sleep(SETTLED_SECONDS)
            turns.send(time.process_time() - since)
            begin()

    recipe, store = example.packed(example.load(recipe_name, *SETTINGS), directory)
    begin()
    CONTENDERS[name](recipe, store, tick)


class Process:
    """A contender, from here."""

    def __init__(self, *arguments: Any) -> None:
        processes = multiprocessing.get_context("spawn")
        self._turns, its_end = processes.Pipe()
        self._process = processes.Process(target=contend, args=(*arguments, its_end), daemon=True)
        self._process.start()
        its_end.close()  # so that its death is seen

    def seconds(self, steps: int) -> float:
        """Let it make steps; return their CPU seconds."""
        self._turns.send(steps)
        found: float = self._turns.recv()
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def seconds_per_step(
    processes: dict[str, Process], bursts: int, steps: int, numbers: np.random.Generator
) -> dict[str, float]:
    """Return the CPU seconds per step of every contender."""
    for process in processes.values():
        process.seconds(WARM_UP_STEPS)
    seconds = dict.fromkeys(processes, 0.0)
    for _ in range(bursts):
        for name in numbers.permutation(list(processes)).tolist():
            seconds[name] += processes[name].seconds(steps) / (bursts * steps)
    return seconds


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap interval of the median, at 95%."""
    numbers = np.random.default_rng(1)
    medians = np.median(numbers.choice(values, (BOOTSTRAPS, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=8)
    arguments.add_argument("recipe", nargs="?", default="translate", help="the recipe whose example is trained")
    arguments.add_argument("--bursts", type=int, default=3, help="for each contender in a round")
    arguments.add_argument("--steps", type=int, default=20, help="in a burst")
    return arguments


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the CPU seconds per step of every contender, for each round."""
    present = [name for name in CONTENDERS if name not in MODULES or find_spec(MODULES[name])]
    numbers, rounds = np.random.default_rng(1), []
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        example.packed(example.load(options.recipe, *SETTINGS), directory)
        for _ in range(options.rounds):
            processes = {name: Process(name, options.recipe, directory) for name in present}
            try:
                rounds.append(seconds_per_step(processes, options.bursts, options.steps, numbers))
            finally:
                for process in processes.values():
                    process.end()
    return rounds


def report(options: argparse.Namespace, rounds: list[dict[str, float]]) -> bench.Report:
    rows: list[dict[str, object]] = []
    for name in rounds[0]:
        relative = [seconds[name] / seconds[BARE] - 1 for seconds in rounds]
        low, high = interval(relative)
        rows.append(
            {
                "contender": name,
                "CPU ms per step": 1000 * bench.median([seconds[name] for seconds in rounds]),
                "overhead": "" if name == BARE else f"{bench.median(relative):+.1%}",
                "95% interval": "" if name == BARE else f"{low:+.1%} to {high:+.1%}",
            }
        )
    each = f"{options.bursts} bursts of {options.steps} steps each"
    notes = [
        *bench.not_installed(CONTENDERS, rounds[0]),
        f"medians of {options.rounds} rounds of {each}; batches of {example.load(options.recipe).train.batch}",
    ]
    return bench.Report("Training step", rows, notes)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
