"""What workers do in the tests of training: runs of the smallest recipe with something that happens on the way."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from packtrain.data.order import Ids
from packtrain.job import Job
from packtrain.observe.history import read_points
from packtrain.recipes import Batch, EvaluationRequest, Measurement, Scores
from packtrain.run.checkpoint import committed
from packtrain.run.records import Sample
from packtrain.run.run import Run
from packtrain.store import open_store
from packtrain.train import engine as engine_module
from packtrain.train import watchdog
from packtrain.train import world as world_module
from packtrain.train.averaging import ENCODINGS, Averaging
from packtrain.train.control import Control, StopSignal
from packtrain.train.engine import Engine
from packtrain.train.evaluator import evaluate
from packtrain.train.progress import Progress
from packtrain.train.recorder import Clock
from packtrain.train.state import STATE_FILE
from packtrain.train.trainer import Trainer
from packtrain.train.world import World
from packtrain.units import Duration
from parts.faulty import FaultyStore
from train.tiny import SAMPLES, WIDTH, Tiny, TinyModel, tiny_engine, tiny_job, tiny_run


class Plain(Tiny):
    """Nothing is left to chance: however many workers there are, they compute the same."""

    dropout = 0.0


class Interrupted(Tiny):
    """Does something in the middle of a step, counted from 1 by this process."""

    def __init__(self, job: Job, at: int = 0, deed: Callable[[], object] = lambda: None) -> None:
        super().__init__(job)
        self._at, self._deed, self._steps = at, deed, 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            self._steps += 1
            if self._steps == self._at:
                self._deed()
        return super().loss(model, batch)


class FromFirstWeights(Plain):
    """Does not begin at random."""

    def initial_weights(self, model: nn.Module) -> dict[str, Tensor]:  # noqa: ARG002
        return {"out.weight": torch.arange(4.0)[None], "mean": torch.ones(WIDTH)}


class WithUnusedWeights(Plain):
    """A part of its model is never used, so that it gets no gradient."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.spare = nn.Linear(2, 2)
        return model


class Normed(Plain):
    """Its losses depend on statistics of what was seen before, which no gradient carries."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        mean = getattr(model, "module", model).get_buffer("mean")
        return super().loss(model, {**batch, "inputs": batch["inputs"] - mean.clone()})


class ChannelsLastModel(TinyModel):
    """Has weights with their channels last in memory, as models of pictures do."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.look = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + self.look(inputs[:, :, None, None]).flatten(1))


class ChannelsLast(Plain):
    def build_model(self) -> nn.Module:
        return ChannelsLastModel(self.dropout)


class WithBadSample(Plain):
    """One of its samples is not a number."""

    sample = 7

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        arrays = super().batch(ids, epoch, repeats)
        arrays["inputs"][ids == self.sample] = np.nan
        return arrays


class SlowToBlame(WithBadSample):
    """To try one of its samples takes longer than a step may."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled():
            time.sleep(1.5)
        return super().loss(model, batch)

    def count(self, split: str) -> int:  # noqa: ARG002
        return 0


class Slow(Tiny):
    """Takes its time, so that there is some to be told."""

    forward_seconds, data_seconds, evaluation_seconds = 0.03, 0.02, 0.05

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        time.sleep(self.data_seconds)
        return super().batch(ids, epoch, repeats)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(self.forward_seconds if model.training else self.evaluation_seconds)
        return super().loss(model, batch)


class SlowOtherRanks(Tiny):
    """Slow on all ranks but the first, by far more than a busy machine slows that one down."""

    seconds = 0.2

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training and os.environ["RANK"] != "0":
            time.sleep(self.seconds)
        return super().loss(model, batch)


class Starved(Plain):
    """Its last rank waits for one of its batches, for longer than a step may take."""

    seconds = 6.0
    batches = 0

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        self.batches += 1
        if self.batches == 8 and os.environ["RANK"] != "0":
            time.sleep(self.seconds)
        return super().batch(ids, epoch, repeats)


def waits_for_data() -> bool:
    """True if the loop, which runs in the main thread, has asked for its next batch and not got it."""
    stack = sys._current_frames()[threading.main_thread().ident or 0]
    return any(frame.f_code is Trainer._next_batch.__code__ for frame, _ in traceback.walk_stack(stack))


class LosesData(Plain):
    """Data does not come to its last rank for its fifth step. When that waits, it is told to go; or another is."""

    steps = batches = 0
    seconds, told_is_first = 30.0, False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.steps += model.training
        return super().loss(model, batch)

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        self.batches += 1
        if self.batches == 5:
            while self.steps < 4:
                time.sleep(0.01)
            while not waits_for_data():
                time.sleep(0.01)
            is_first, is_last = (os.environ["RANK"] == rank for rank in ("0", str(int(os.environ["WORLD_SIZE"]) - 1)))
            if self.told_is_first if is_first else is_last and not self.told_is_first:
                os.kill(os.getpid(), signal.SIGTERM)
            if is_last:
                time.sleep(self.seconds)
        return super().batch(ids, epoch, repeats)


class StopsThenLosesData(LosesData):
    told_is_first = True


class LosesDataBriefly(LosesData):
    seconds = 1.0


class Signaled(Tiny):
    """Its last rank is told to go in the middle of an evaluation."""

    def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().measure(model, request)


RECIPES: dict[str, Callable[[Job], Tiny]] = {
    "tiny": Tiny,
    "plain": Plain,
    "poisoned": WithBadSample,
    "slow": Slow,
    "lame": SlowOtherRanks,
    "called": Signaled,
    "given": FromFirstWeights,
    "starved": Starved,
    "sparing": WithUnusedWeights,
    "accused": SlowToBlame,
    "normed": Normed,
    "looking": ChannelsLast,
    "cut-off": LosesData,
    "cut-off-first-told": StopsThenLosesData,
    "cut-off-shortly": LosesDataBriefly,
}


def warm_up() -> None:
    """Train alone and with another that is imagined: workers share what that imports and keeps in memory."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr):
        store = open_store(directory, create=True)
        job = tiny_job(train={"ema": 0.9}, checkpoint={"every": "2 steps"}, evaluate={"every": "3 steps"})
        train_and_die(store.url, tiny_run(store, job).name, f"{directory}/control")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for kind in ("ddp", "fsdp"):
        job, world = tiny_job(train={"exchange": {kind: {}}}), World(0, 2)
        engine = Engine(Plain(job), job.train, world)
    _make_step(engine, world, Plain(job), 0)
    torch.distributed.destroy_process_group()


def here() -> World:
    torch.set_num_threads(1)
    return World.join() if int(os.environ["WORLD_SIZE"]) > 1 else World()


def join_on_one_machine(control: str) -> list[str]:
    """Join as under a launcher that listens nowhere, and return the addresses that this worker listens on."""
    os.environ.update(GROUP_WORLD_SIZE="1", PACKTRAIN_CONTROL=control, GLOO_SOCKET_IFNAME="lo", MASTER_PORT="1")
    world = World.join()
    assert world.count(True) == [world.num_ranks]
    found = psutil.Process().net_connections("tcp")
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]


def measure_link() -> float | None:
    return here().measure_link()


def sync_bytes(exchange: dict[str, Any]) -> list[float]:
    """Return the bytes of a message, and those that each rank sends in a step."""
    world = here()
    sync = tiny_engine(tiny_job(train={"exchange": exchange}), world).gradient_sync
    world.any(True)  # the first rank keeps the addresses that the others still look up
    return [sync.message_bytes, sync.sent_bytes()]


class KillingClock(Clock):
    """Gets a signal at the mark of that number; of the marks of one span, if one is named."""

    def __init__(self, at: int, number: int = signal.SIGKILL, span: str | None = None) -> None:
        super().__init__()
        self.marks, self._at, self._number, self._span = 0, at, number, span

    def mark(self, span: str) -> None:
        super().mark(span)
        if self._span in (None, span):
            self.marks += 1
            if self.marks == self._at:
                os.kill(os.getpid(), self._number)


def train_behind(**given: Any) -> dict[str, Any]:
    """Train as on a GPU, whose steps are read one step late."""
    engine_module.is_queued = lambda _device: True  # type: ignore[assignment,attr-defined]
    return train(**given)


def train(
    store: str, run: str, control: str, generation: int = 1, recipe: str = "tiny", stop_at: int = 0, die_at: int = 0
) -> dict[str, Any]:
    """A worker as it should be, in steps of this life: the first rank is told to go in one, the last dies in one."""
    world_module._MAX_LINK_BYTES = 0  # how much loopback can carry tells nothing
    world, notice = here(), StopSignal().listen()
    clock = Clock()
    if stop_at and world.is_first:
        clock = KillingClock(stop_at, signal.SIGTERM, "data")
    if die_at and world.rank == world.num_ranks - 1:
        clock = KillingClock(die_at, signal.SIGKILL, "data")
    opened = Run(open_store(store), run)
    made = RECIPES[recipe](opened.job)
    trainer = Trainer(opened, made, world, generation, Control(Path(control)), notice, clock)
    trainer.train()
    world.leave()
    return {"step": trainer.step}


def communicate() -> dict[str, Any]:
    """Everything that workers say to each other."""
    world = here()
    mine = [
        b"", b"short" if world.rank else b"a" * 1000, bytes([world.rank]), b"only mine" if world.is_first else b"",
        b"" if world.is_first else b"only the other",
    ]  # fmt: skip
    sums, mean = torch.tensor([1.0, float(world.rank)]), torch.tensor([float(world.rank)])
    counts, more = torch.tensor([2.0 * world.rank], dtype=torch.float64), torch.full((2, 2), float(world.rank))
    work = world.begin_sum(sums)
    assert work is not None
    work.wait()
    world.average_all([mean, counts, more])
    shared = [torch.full((2,), float(world.rank)), torch.tensor([7 + world.rank])]
    world.broadcast_all(shared)
    said = {
        "rank": world.rank,
        "first": world.is_first,
        "gathered": [[one.decode() for one in world.gather(data)] for data in mine],
        "sums": sums.tolist(),
        "means": [mean.tolist(), counts.tolist(), more.tolist()],
        "any": [world.any(False), world.any(world.rank == 1), world.any(True)],
        "counts": world.count(False, world.is_first, True),
        "shared": world.share(f"of rank {world.rank}".encode()).decode(),
        "broadcast": [values.tolist() for values in shared],
        "rows": [row.tolist() for row in world.gather_tensor(torch.tensor([float(world.rank)]))],
    }
    world.leave()
    return said


def score() -> dict[str, Any]:
    """What an evaluation tells every rank, and how often this one computed it."""
    world, times = here(), []

    class Strange(Plain):
        def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:  # noqa: ARG002
            times.append(split)
            return Scores({"third": 1 / 3, "nothing": float("nan")}, {"third": "1/3"}, (Sample("a", "b", "c"),))

    job = tiny_job()
    recipe = Strange(job)
    found = evaluate(Engine(recipe, job.train, world), recipe, world, "valid", None, 1)
    assert found is not None
    world.leave()
    told = {"third": found.values["third"], "nothing": str(found.values["nothing"])}
    return {**told, "signature": found.signatures["third"], "samples": len(found.samples), "scored": len(times)}


# Deaths.


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(
    store: str,
    run: str,
    control: str,
    operation: int = 0,
    after: bool = False,
    mark: int = 0,
    generation: int = 1,
    recipe: str = "tiny",
) -> dict[str, int]:
    """Trains until the store's operation or the clock's mark of that number, and dies; how many there were, if not."""
    torch.set_num_threads(1)
    mortal = FaultyStore(open_store(store))
    mortal.answers_get_lost = after
    opened = Run(mortal, run)
    made = RECIPES[recipe](opened.job)
    before = len(mortal.operations)
    if operation:
        mortal.fault = lambda _name, _key: die() if len(mortal.operations) - before >= operation else None
    clock = KillingClock(mark)
    Trainer(opened, made, World(), generation, Control(Path(control)), StopSignal(), clock).train()
    return {"operations": len(mortal.operations) - before, "marks": clock.marks}


# What is left of a run.


def history(run: Run) -> dict[tuple[str, int], dict[str, float]]:
    """What the surviving line measured, without what depends on the clock."""
    return {
        (point.kind, point.step): {name: it for name, it in point.values.items() if not name.endswith("seconds")}
        for point in read_points(run)
        if point.kind != "start"
    }


def losses(run: Run) -> dict[int, float]:
    return {step: values["loss"] for (kind, step), values in history(run).items() if kind == "train"}


def weights(run: Run) -> dict[str, str]:
    """The digests of the last checkpoint's tensors: weights, averages, the optimizer's state."""
    return {file.name: file.sha256 for file in committed(run)[-1].files if file.name != STATE_FILE}


def engine_weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


# Hangs.


def wait_forever() -> None:
    while True:
        time.sleep(0.05)


def hold_the_interpreter() -> None:
    """A call into C that lets no other thread of Python run."""
    looks = 0
    arm = faulthandler.dump_traceback_later

    def count(seconds: float, **options: Any) -> None:
        nonlocal looks
        arm(seconds, **options)
        looks += 1

    with mock.patch.object(faulthandler, "dump_traceback_later", count):
        while looks < 2:  # the second one surely saw that the step had begun
            time.sleep(0.01)
    ctypes.PyDLL(None).usleep(60_000_000)


def hang(store: str, run: str, control: str, at: int, deaf: bool = False) -> None:
    """Hangs in step number `at`, and is found within seconds."""
    torch.set_num_threads(1)
    watchdog.FIRST_SECONDS, watchdog.LOOK_SECONDS = 20.0, 0.05
    watchdog.OTHERS_SECONDS, watchdog.STUCK_SECONDS = 0.1, 1.0
    opened = Run(open_store(store), run)
    settings = opened.job.train.model_copy(update={"patience": Duration(2.0 if deaf else 1.0, "seconds")})
    opened._job = opened.job.model_copy(update={"train": settings})
    recipe = Interrupted(opened.job, at, hold_the_interpreter if deaf else wait_forever)
    Trainer(opened, recipe, World(), 1, Control(Path(control))).train()


# Local steps, seen from inside.


def _local_engine(every: int, **settings: Any) -> tuple[Engine, World, Plain]:
    world = here()
    job = tiny_job(train={"exchange": {"local": {"every": f"{every} steps", **settings}}})
    recipe = Plain(job)
    return Engine(recipe, job.train, world), world, recipe


def _make_step(engine: Engine, world: World, recipe: Plain, number: int, last: bool = False) -> None:
    ids = (np.arange(2) + 4 * number + 2 * world.rank) % SAMPLES
    batch = {name: torch.from_numpy(array) for name, array in recipe.batch(ids, 0).items()}
    engine.step(Progress(number, 0.0), [batch], 4, 2, last)


def weights_by_step(every: int, steps: int) -> list[list[float]]:
    """All learned weights after every step; the last one says that it is."""
    engine, world, recipe = _local_engine(every)
    seen = []
    for number in range(steps):
        _make_step(engine, world, recipe, number, number + 1 == steps)
        seen.append([float(one) for parameter in engine.model.parameters() for one in parameter.flatten()])
    world.leave()
    return seen


def sync_values() -> list[tuple[float, float, float, float, float]]:
    """One weight at three sync_values: before the steps, the ranks' mean before the meeting, after it; momentum too."""
    engine, world, recipe = _local_engine(2)
    sync = engine.gradient_sync
    inner: list[float] = []
    after_update = sync.after_update

    def watched(steps: int, last: bool) -> None:
        mean = engine.model.get_parameter("out.weight").detach().clone()
        world.average_all([mean])
        inner.append(float(mean[0, 0]))
        after_update(steps, last)

    sync.after_update = watched  # type: ignore[method-assign]
    seen = []
    for meeting in range(3):
        before = float(engine.model.get_parameter("out.weight")[0, 0])
        momentum = float(sync.state()["out.weight"][0, 0])
        for number in (2 * meeting, 2 * meeting + 1):
            _make_step(engine, world, recipe, number)
        after = float(engine.model.get_parameter("out.weight")[0, 0])
        seen.append((before, inner[-1], after, momentum, float(sync.state()["out.weight"][0, 0])))
    world.leave()
    return seen


def overlapped_values(settings: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """One weight in each step: before the sync, after it, as all ranks have it in common, and as it is evaluated."""
    engine, world, recipe = _local_engine(**{**settings, "every": int(settings["every"].split()[0])})
    sync, after_update = engine.gradient_sync, engine.gradient_sync.after_update
    seen: dict[str, list[float]] = {"before": [], "own": [], "common": [], "evaluated": []}

    def look(name: str, weights: dict[str, Tensor]) -> None:
        seen[name].append(float(weights["out.weight"][0, 0]))

    def watched(made: int, last: bool) -> None:
        look("before", engine.model.state_dict())
        after_update(made, last)
        look("own", engine.model.state_dict())
        look("common", sync.common_weights())
        look("evaluated", engine.evaluation_model().state_dict())

    sync.after_update = watched  # type: ignore[assignment,method-assign]
    for number in range(steps):
        _make_step(engine, world, recipe, number, number + 1 == steps)
    world.leave()
    return seen


def average(compress: str, size: int, rounds: int) -> list[list[float]]:
    """The sums of a vector's means over some rounds, in which each rank adds what rounding took from the last one."""
    world = here()
    channel = world.new_channel()
    own = torch.linspace(-1, 1, size) ** 3 * (1 + world.rank)
    rounded, total = torch.zeros(size), torch.zeros(size)
    for _ in range(rounds):
        mean, error = Averaging(own + rounded, ENCODINGS[compress], world, channel).finish()
        rounded = torch.zeros(size) if error is None else error
        total += mean
    world.leave()
    return [(total / rounds).tolist(), mean.tolist()]


# Sharded weights, seen from inside.


class Watched(Plain):
    """Notes what a forward pass of its sharded model computes with, and what it keeps for the backward pass."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.reduced, self.reduced_before = 0, list[int]()
        self.types: dict[str, str] = {}
        self.kept_bytes = 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, TinyModel)
        self.reduced_before.append(self.reduced)
        saved: list[Tensor] = []

        def note(module: nn.Module, _args: object, _output: object) -> None:
            self.types[type(module).__name__.removeprefix("FSDP")] = str(module.weight.dtype)

        handles = [module.register_forward_hook(note, prepend=True) for module in (model.norm, *model.layers)]

        def save(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda one: one):
            loss = super().loss(model, batch)
        for handle in handles:
            handle.remove()
        # The layers of the list are no longer gathered: what is kept of their weights must not have memory.
        sizes = [tuple(layer.get_parameter("weight").shape) for layer in model.layers]
        shapes = [{size, size[::-1]} for size in sizes]
        weights = [one for one in saved if any(tuple(one.shape) in pair for pair in shapes)]
        assert weights
        self.kept_bytes += sum(one.untyped_storage().size() for one in weights)
        return loss


def watch_sharded(precision: str, accumulate: str) -> dict[str, Any]:
    """Make a step of three micro-batches with a sharded model, and return what was seen."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    world = here()
    job = tiny_job(train={"exchange": {"fsdp": {"accumulate": accumulate}}, "precision": precision})
    recipe = Watched(job)
    engine = Engine(recipe, job.train, world)
    reducing: Any = _fsdp_param_group
    foreach_reduce = reducing.foreach_reduce
    reduced_types = set()

    def counted(*arguments: Any, **options: Any) -> Any:
        recipe.reduced += 1
        found = foreach_reduce(*arguments, **options)
        reduced_types.add(str(found[0].dtype))
        return found

    reducing.foreach_reduce = counted
    batches = [
        {name: torch.from_numpy(array) for name, array in recipe.batch(np.arange(2) + 2 * number, 0).items()}
        for number in range(3)
    ]
    engine.step(Progress(), batches, 12, 6)
    plain = engine.evaluation_model()
    seen = {
        "reduced before": recipe.reduced_before,
        "reduced": recipe.reduced,
        "reduced types": sorted(reduced_types),
        "types": recipe.types,
        "kept bytes": recipe.kept_bytes,
        "evaluated": {name: str(one.dtype) for name, one in plain.named_parameters()},
        "shards": sorted({str(one.dtype) for one in engine.model.parameters()}),
    }
    world.leave()
    return seen


class Tied(ChannelsLast):
    """Two of its modules have one weight; its buffers are not all zero."""

    on_meta: list[bool]

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.twin = nn.Linear(4, 1)
        model.twin.weight = model.get_parameter("out.weight")
        model.register_buffer("places", torch.arange(3.0), persistent=False)
        self.on_meta = [one.is_meta for one in (*model.parameters(), *model.buffers())]
        return model


def begin_sharded() -> dict[str, Any]:
    """Build a sharded model with an average, and compare it with a whole one."""
    world = here()
    job = tiny_job(train={"exchange": {"fsdp": {}}, "ema": 0.9})
    recipe = Tied(job)
    engine = Engine(recipe, job.train, world)
    seen = {"built with memory": not any(recipe.on_meta)}
    torch.manual_seed(job.train.seed)
    whole = dict(recipe.build_model().named_parameters())
    assert engine.ema is not None
    for name, model in (("model", engine.model), ("average", engine.ema.model)):
        plain = engine.gradient_sync.plain(model)
        equal = {name: torch.equal(one, whole[name]) for name, one in plain.named_parameters()}
        seen[name] = equal == dict.fromkeys(whole, True) and plain.get_buffer("places").tolist() == [0.0, 1.0, 2.0]
        seen[f"{name} is tied"] = model.get_parameter("twin.weight") is model.get_parameter("out.weight")
    world.leave()
    return seen


def overflow_sharded() -> dict[str, Any]:
    """Make a step whose gradients overflow fp16 on the first rank alone, and one that fits."""
    world = here()
    job = tiny_job(train={"exchange": {"fsdp": {}}, "precision": "fp16"})
    recipe = Plain(job)
    engine = Engine(recipe, job.train, world)

    def shards() -> list[Tensor]:
        parameters: Iterable[Any] = engine.model.parameters()
        return [one.to_local().clone() for one in parameters]

    before, skipped = shards(), []
    for number, factor in enumerate((1e6, 1.0)):
        batch = {name: torch.from_numpy(array) for name, array in recipe.batch(np.arange(2), 0).items()}
        batch["outputs"] *= factor if world.is_first else 1.0
        skipped.append(engine.step(Progress(number, 0.0), [batch], 4, 2).skipped)
        if number == 0:
            kept = all(map(torch.equal, before, shards()))
    world.leave()
    return {"skipped": skipped, "kept": kept, "scale": engine.precision.scale.value}
