"""A worker process, one per rank, started by torch's launcher. It needs only its environment and the store."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
import traceback
from multiprocessing import synchronize
from multiprocessing.util import Finalize
from pathlib import Path

import torch

from packtrain.data.cache import SIZE_VARIABLE
from packtrain.data.pack import Pack
from packtrain.data.threads import stay_nearby
from packtrain.errors import Mistake, PacktrainError
from packtrain.process import end_process
from packtrain.recipes import recipe_class
from packtrain.run.records import Event
from packtrain.run.run import Run, worker_writer
from packtrain.store import StoreError, open_store
from packtrain.system import cache_directory, private_directory
from packtrain.train.control import (
    CONTROL_VARIABLE,
    GENERATION_VARIABLE,
    JOB_VARIABLE,
    RUN_VARIABLE,
    STORE_ID_VARIABLE,
    STORE_VARIABLE,
    Control,
    StopSignal,
    WorkerCause,
    WorkerError,
)
from packtrain.train.engine import NonFinite
from packtrain.train.numerics import choose_kernels, exactness_mistake_of, set_exact_variables
from packtrain.train.recorder import clock_of
from packtrain.train.trainer import Trainer
from packtrain.train.watchdog import must_end_within
from packtrain.train.world import CONNECT_SECONDS, World, gpu_addresses
from packtrain.units import parse_bytes, show_bytes, show_seconds

_MEMORY_ADVICE = "use a smaller train.micro_batch, train.activation_checkpointing, or more workers"
_CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")
_CONNECT_SECONDS = 2 * CONNECT_SECONDS  # torch gives up before, unless it is stuck
_STAGE_SECONDS = 30.0  # between two lines about how far staging is
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(stop_signal: StopSignal, started: float) -> None:
    """Train until the run is finished or stopped; a failure is reported to the node in one line, and logged."""
    control = Control(Path(os.environ[CONTROL_VARIABLE]))
    trainer: Trainer | None = None
    succeeded = False
    try:
        trainer = build_trainer(control, stop_signal, started)
        stop_signal.end_if_stuck(trainer.heed_seconds, trainer.keep)
        trainer.train()
        succeeded = True
    except Exception as error:
        if not isinstance(error, PacktrainError):
            traceback.print_exc()
        text, cause = in_one_line(error), cause_of(error)
        print(f"error: {text}", file=sys.stderr, flush=True)
        step = None if trainer is None else trainer.step + 1
        fatal = cause in ("number", "mistake")
        control.report_error(WorkerError(int(os.environ["RANK"]), text, fatal, time.time(), cause, step))
    finally:
        # Not by torch's cleanup, which destroys DDP while it holds the interpreter's lock, and joins a gloo thread that
        # may be waiting for that lock: occasionally a worker that was done would hang forever.
        if not succeeded:
            end_process(1)
    # torch's launcher wants this function to return. Its result is in a pipe then; that the launcher has read it is not
    # waited for, because a launcher that is ending never says so.
    synchronize.Event.wait = lambda *_: True  # type: ignore[method-assign]
    # The first thing that happens at the end of the process. The trainer, and with it DDP, is kept until then.
    Finalize(None, lambda _: end_process(0), (trainer,), exitpriority=0)


def build_trainer(control: Control, stop_signal: StopSignal, started: float) -> Trainer:
    store = open_store(os.environ[STORE_VARIABLE], identity=os.environ.get(STORE_ID_VARIABLE) or None)
    run = Run(store, os.environ[RUN_VARIABLE])
    if run.job_digest != os.environ[JOB_VARIABLE]:
        raise Mistake(f"job.json of {run.name} has changed since its node started; its recipe may be another one")
    job = run.job
    assert job.recipe is not None
    set_exact_variables(job.train.exact)  # before CUDA starts
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or "1"))
    pack = _pack_of(run)
    if job.data.stage:
        _stage(run, pack, control, stop_signal)
    # A user's recipe is in this directory, where the node has put the code that it was told to run.
    recipe = recipe_class(job.recipe, Path.cwd())(job, pack)

    def report_hang(text: str) -> None:
        text = f"{text}: check the network and the firewall between the machines"
        control.report_error(WorkerError(int(os.environ["RANK"]), text, False, time.time(), "hang"))

    # Until all ranks are there and have equal weights, they wait for each other in C, where no Python handler runs.
    with stop_signal.fatal():
        world = World.join(must_end_within(_CONNECT_SECONDS, "connecting the workers", report_hang))
        choose_kernels(world.device, job.train.exact)
        workers = int(os.environ["LOCAL_WORLD_SIZE"])
        stay_nearby(gpu_addresses(world.device, workers), world.rank_of_node, workers)
        clock = clock_of(world.device)
        # Imports took seconds before the clock existed. Not from /proc, which may be that of another process namespace.
        clock.add("start", time.monotonic() - started)
        return Trainer(run, recipe, world, int(os.environ[GENERATION_VARIABLE]), control, stop_signal, clock)


def _pack_of(run: Run) -> Pack:
    """Return the run's pack, in the cache that this machine's environment or the job asks for."""
    cache, staged = run.job.fleet.cache, run.job.data.stage
    directory = cache_directory()
    if cache.directory is not None and not os.environ.get("PACKTRAIN_CACHE"):
        # A folder of its own: the directory may be a mount that others use, too.
        directory = private_directory(Path(cache.directory) / "packtrain", "fleet.cache.directory")
    size = None if cache.size is None or os.environ.get(SIZE_VARIABLE) else parse_bytes(cache.size)
    return Pack(run.store, run.pack_name(), directory / "packs", size, staged=staged)


def _stage(run: Run, pack: Pack, control: Control, stop_signal: StopSignal) -> None:
    """Have the whole pack on this machine before the ranks meet; its first worker tells how far it is."""
    local_rank, generation = int(os.environ["LOCAL_RANK"]), int(os.environ[GENERATION_VARIABLE])
    total = sum(file.bytes for file in pack.manifest.files())
    events = run.event_writer(f"{worker_writer(generation, int(os.environ['RANK']))}-stage")
    staged_bytes, told_at, began = 0, 0.0, time.monotonic()

    def tell(text: str) -> None:
        if local_rank == 0:
            events.append(Event(time.time(), "data", f"{text} on {socket.gethostname()}", generation))
            events.flush()

    def advance(count: int) -> None:
        nonlocal staged_bytes, told_at
        if stop_signal.received or control.stop_requested():
            raise PacktrainError("stopped while the pack was being staged")
        staged_bytes += count
        if time.monotonic() - told_at >= _STAGE_SECONDS and staged_bytes < total:
            told_at = time.monotonic()
            tell(f"staged {show_bytes(staged_bytes)} of {show_bytes(total)}")

    pack.stage(advance, local_rank)
    tell(f"staged {show_bytes(total)} in {show_seconds(time.monotonic() - began)}")


def cause_of(error: BaseException) -> WorkerCause:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "memory"
    # torch has no exception of its own for main memory, only these messages.
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_OUT_OF_MEMORY):
        return "memory"
    if _is_disk_full(error):
        return "disk"
    if isinstance(error, StoreError) and error.temporary:
        return "store"
    if isinstance(error, NonFinite):
        return "number"
    return "mistake" if isinstance(error, Mistake) or exactness_mistake_of(error) else "program"


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:  # our own errors hide the system's behind `from`
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        error = error.__cause__
    return False


def in_one_line(error: BaseException) -> str:
    cause = cause_of(error)
    lines = str(error).strip().splitlines()
    first_line = lines[0][:300] if lines else "no message"
    if cause == "memory":
        where = "the GPU" if isinstance(error, torch.OutOfMemoryError) else "this machine"
        return f"{where} is out of memory: {first_line}; {_MEMORY_ADVICE}"
    if cause == "disk" and not isinstance(error, PacktrainError):
        return f"the disk is full: {first_line}"
    if (mistake := exactness_mistake_of(error)) or isinstance(error, PacktrainError):
        return str(mistake or error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line}{where}"
