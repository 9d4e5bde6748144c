"""Gradient syncs over slow links: tokens/s on two hosts against one alone, and the quality after the same samples.

    sudo python benchmarks/exchange.py [--json] [--rounds 1] [--steps 40] [--quality-steps 300] [--loss-only]

The hosts are two network namespaces (tests/parts/hosts.py) with one worker each; the link between them is limited to 1
Gbit/s and to 100 Mbit/s. The speed is that of a run in full swing: the sync of its last step is not in it. The quality
is the validation loss after the same steps with the same global batches, which does not depend on the link and is
measured without a limit. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import bench
import example
import packtrain
from packtrain.data.loader import Order, Position, RankBatches
from packtrain.process import end_process
from packtrain.recipes import Recipe
from packtrain.train.engine import Engine
from packtrain.train.evaluator import evaluate
from packtrain.train.progress import Progress
from packtrain.train.world import World

ALONE = "one machine"
GENTLE = "rate: 1.0, momentum: 0.5"  # learned more than the defaults after 300 steps, with and without an overlap
BESIDE, EIGHT_BITS = "every: 20 steps, overlap: 10 steps", f"compress: int8, {GENTLE}"
EXCHANGES = {
    ALONE: "{ddp: {}}",
    "ddp": "{ddp: {}}",
    "ddp, bf16": "{ddp: {compress: bf16}}",
    "ddp, fp16": "{ddp: {compress: fp16}}",
    "fsdp": "{fsdp: {}}",
    "local, every 20 steps": "{local: {every: 20 steps}}",
    "local, every 20 steps, gentle": f"{{local: {{every: 20 steps, {GENTLE}}}}}",
    "local, beside 10 steps": f"{{local: {{{BESIDE}, {GENTLE}}}}}",
    "local, beside 10 steps, bf16": f"{{local: {{{BESIDE}, compress: bf16, {GENTLE}}}}}",
    "local, beside 10 steps, int8": f"{{local: {{{BESIDE}, {EIGHT_BITS}}}}}",
    "local, every 5 steps, beside 4, int8": (
        "{local: {every: 5 steps, overlap: 4 steps, compress: int8, rate: 1.0, momentum: 0.3}}"
    ),
    "local, 4 fragments, int8": f"{{local: {{every: 20 steps, fragments: 4, overlap: 4 steps, {EIGHT_BITS}}}}}",
}
LINKS = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
WARM_UP_STEPS = 15  # so that 40 more contain two whole exchanges of `local`, with the steps beside them
PATIENCE_SECONDS = 900


def recipe_of(directory: Path, exchange: str) -> Recipe:
    job = example.load(
        "translate",
        f"train.exchange={EXCHANGES[exchange]}",
        "train.optimizer={adamw: {decay: 0.0, betas: [0.9, 0.98], epsilon: 1e-9}}",
        "train.ema=null",  # which would lag behind differently after few steps
    )
    recipe, _ = example.packed(job, directory)
    return recipe


def work(directory: Path, exchange: str, steps: int, measured: bool) -> NoReturn:
    """Run one worker: make the steps, print their speed, and exit as the workers of a run do."""
    torch.set_num_threads(1)
    world = World.join()
    recipe = recipe_of(directory, exchange)
    settings = recipe.job.train
    engine = Engine(recipe, settings, world)
    order = Order(recipe.costs, recipe.sort_keys, lambda _: settings.batch.value, settings.seed, recipe.lengths)
    started, tokens = 0.0, 0
    for number, loaded in enumerate(RankBatches(order, recipe.batch, Position(), world.rank, world.num_ranks)):
        if number == WARM_UP_STEPS:
            started = time.perf_counter()
        if number == steps:
            break
        batches = [{name: torch.from_numpy(array) for name, array in piece.items()} for piece in loaded.micro_batches]
        last = measured and number + 1 == steps
        engine.step(Progress(number, 0.0), batches, loaded.cost, loaded.own_cost, last)
        tokens += loaded.cost if number >= WARM_UP_STEPS else 0
    world.barrier()  # the slower one counts
    found = {"tokens/s": tokens / (time.perf_counter() - started)}
    if measured:
        scores = evaluate(engine, recipe, world, "valid", 0, 1)
        assert scores is not None
        found["loss"] = scores.values["loss"]
    print(json.dumps(found))
    end_process(0)


def train(network: Any, directory: Path, exchange: str, steps: int, measured: bool) -> dict[str, float]:
    """Make the steps with a worker on each host, or on the first one alone; return what the first one found."""
    hosts = network[:1] if exchange == ALONE else network
    processes = []
    for rank, host in enumerate(hosts):
        variables = {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": network[0].address,
            "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(packtrain.__file__).parent.parent),
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__)), "--work", str(directory), exchange, str(steps)]
        command.append(str(int(measured)))
        processes.append(host.popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(errors[-2000:] for _, errors in outputs))
    found: dict[str, float] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def measure_exchange(network: Any, directory: Path, exchange: str, options: argparse.Namespace) -> dict[str, object]:
    row: dict[str, object] = {"exchange": exchange}
    for link in [] if options.loss_only else options.links:
        for host in network:
            host.rate(LINKS[link])
        rounds = [
            train(network, directory, exchange, options.steps + WARM_UP_STEPS, False)["tokens/s"]
            for _ in range(options.rounds)
        ]
        row[f"tokens/s at {link}"] = float(np.median(rounds))
    for host in network:
        host.rate(None)
    row["validation loss"] = train(network, directory, exchange, options.quality_steps, True)["loss"]
    return row


def compared(row: dict[str, object], alone: dict[str, object]) -> dict[str, object]:
    """Return a row with the speeds as multiples of one machine's beside them."""
    found: dict[str, object] = {}
    for name, value in row.items():
        found[name] = value
        if name.startswith("tokens/s") and isinstance(value, float) and isinstance(one := alone[name], float):
            found[name.replace("tokens/s", "x one")] = value / one
    return found


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=1)
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--quality-steps", type=int, default=300)
    arguments.add_argument("--only", nargs="*", choices=EXCHANGES, default=list(EXCHANGES))
    arguments.add_argument("--links", nargs="*", choices=LINKS, default=list(LINKS))
    arguments.add_argument("--loss-only", action="store_true", help="do not measure the speed")
    return arguments


def measure(options: argparse.Namespace) -> list[dict[str, object]] | str:
    """Return a row for each exchange, or why there are no hosts here."""
    sys.path.insert(0, str(bench.REPOSITORY / "tests"))
    from parts.hosts import hosts, missing

    if reason := missing():
        return str(reason)
    with tempfile.TemporaryDirectory() as name:
        scratch, shared = Path(name) / "scratch", Path(name) / "shared"
        scratch.mkdir()
        shared.mkdir()
        recipe_of(shared, "ddp")
        with hosts(scratch, 2, shared=[shared, bench.REPOSITORY, Path(packtrain.__file__).parent]) as network:
            return [measure_exchange(network, shared, exchange, options) for exchange in options.only]


def report(options: argparse.Namespace, measured: list[dict[str, object]] | str) -> bench.Report:
    if isinstance(measured, str):
        return bench.Report("Gradient syncs", [], [measured])
    rows = measured
    if alone := [row for row in rows if row["exchange"] == ALONE]:
        rows = [compared(row, alone[0]) for row in rows]
    notes = [f"speed over {options.steps} steps, loss after {options.quality_steps}; two hosts, one thread each"]
    return bench.Report("Gradient syncs", rows, notes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:  # on a host
        directory, exchange, steps, measured = sys.argv[2:]
        work(Path(directory), exchange, int(steps), measured == "1")
    bench.main(parser(), measure, report)
