"""A worker process: what the launcher starts on every rank. All it needs comes from the environment and the store."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import psutil
import torch

from packtrain.control import (
    CONTROL_VARIABLE,
    GENERATION_VARIABLE,
    RUN_VARIABLE,
    STORE_VARIABLE,
    Control,
    WorkerError,
    cache_directory,
    end_with_parent,
)
from packtrain.data.pack import Pack
from packtrain.errors import PacktrainError
from packtrain.recipes import recipe_class
from packtrain.runs import Run
from packtrain.store import open_store
from packtrain.train.clock import clock_of
from packtrain.train.failure import cause_of, in_one_line, is_hopeless
from packtrain.train.notice import Notice
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
