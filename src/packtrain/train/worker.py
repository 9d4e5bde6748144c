"""A worker process: what the launcher starts on every rank. All it needs comes from the environment and the store."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import psutil
import torch

from packtrain.data.pack import Pack
from packtrain.errors import Mistake, PacktrainError
from packtrain.recipes import recipe_class
from packtrain.run.run import Run
from packtrain.store import StoreError, open_store
from packtrain.system import cache_directory, end_with_parent
from packtrain.train.control import (
    CONTROL_VARIABLE,
    GENERATION_VARIABLE,
    RUN_VARIABLE,
    STORE_VARIABLE,
    Control,
    Notice,
    WorkerCause,
    WorkerError,
)
from packtrain.train.engine import NotANumber
from packtrain.train.recorder import clock_of
from packtrain.train.trainer import Trainer
from packtrain.train.world import World


def main(notice: Notice) -> NoReturn:
    end_with_parent(signal.SIGKILL)
    control = Control(Path(os.environ[CONTROL_VARIABLE]))
    worker = Worker(control, notice)
    code = 1
    try:
        worker.work()
        code = 0
    except Exception as error:
        if not isinstance(error, PacktrainError):
            traceback.print_exc()
        text = in_one_line(error)
        print(f"error: {text}", file=sys.stderr, flush=True)
        rank = int(os.environ["RANK"])
        control.tell_error(
            WorkerError(rank, text, is_hopeless(error), time.time(), cause_of(error), worker.step_of_failure())
        )
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """Ends this process now, without what Python and torch do at their end: all that is to be kept is in the store.

    torch takes down its exchange of gradients while it holds Python's lock, and waits for a thread that may want that
    lock for the last message it sent: now and then a worker that has done its part would wait for ever.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def compute_exactly(device: torch.device) -> None:
    """On a GPU many kernels add up in whatever order threads come: runs would differ, killed or not."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # it is to find mistakes
        torch.backends.cudnn.benchmark = False


class Worker:
    def __init__(self, control: Control, notice: Notice) -> None:
        self._control, self._notice = control, notice
        self._trainer: Trainer | None = None

    def work(self) -> None:
        run = Run(open_store(os.environ[STORE_VARIABLE]), os.environ[RUN_VARIABLE])
        job = run.job
        assert job.recipe is not None
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or "1"))
        pack = Pack(run.store, run.pack_name(), cache_directory() / "packs")
        recipe = recipe_class(job.recipe)(job, pack)
        with self._notice.at_once():
            world = World.join()
        compute_exactly(world.device)
        generation = int(os.environ[GENERATION_VARIABLE])
        clock = clock_of(world.device)
        clock.add("start", time.time() - psutil.Process().create_time())
        self._trainer = Trainer(run, recipe, world, generation, self._control, self._notice, clock)
        self._trainer.train()

    def step_of_failure(self) -> int | None:
        """The step that was to be made; None before the first."""
        return None if self._trainer is None else self._trainer.step + 1


# Why a worker gave up, in one line, with the causes told apart.


_ADVICE_ON_MEMORY = "use a smaller train.micro_batch, or more workers"
_NO_MEMORY_ON_CPU = ("can't allocate memory", "not enough memory")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def cause_of(error: BaseException) -> WorkerCause:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY_ON_CPU):
        return "memory"
    if _is_full(error):
        return "disk"
    if isinstance(error, StoreError) and error.temporary:
        return "store"
    if isinstance(error, NotANumber):
        return "number"
    return "mistake" if isinstance(error, Mistake) else "program"


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


def in_one_line(error: BaseException) -> str:
    cause = cause_of(error)
    if cause == "memory":
        where = "the GPU" if isinstance(error, torch.OutOfMemoryError) else "this machine"
        return f"{where} is out of memory: {_first_line(error)}; {_ADVICE_ON_MEMORY}"
    if cause == "disk" and not isinstance(error, PacktrainError):
        return f"the disk is full: {_first_line(error)}"
    if isinstance(error, PacktrainError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_first_line(error)}{where}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no more is known"


def is_hopeless(error: BaseException) -> bool:
    """Whether starting again would end the same way."""
    return cause_of(error) in ("number", "mistake")
