"""A worker process: what the launcher starts on every rank. All it needs comes from the environment and the store."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

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
from packtrain.errors import Mistake, PacktrainError
from packtrain.recipes import recipe_class
from packtrain.runs import Run
from packtrain.store import open_store
from packtrain.train.engine import NotANumber
from packtrain.train.trainer import Trainer
from packtrain.train.world import World

_HOPELESS = (Mistake, NotANumber)


def main() -> int:
    end_with_parent(signal.SIGKILL)
    control = Control(Path(os.environ[CONTROL_VARIABLE]))
    rank = int(os.environ["RANK"])
    try:
        work(control)
        return 0
    except PacktrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        control.tell_error(WorkerError(rank, str(error), isinstance(error, _HOPELESS), time.time()))
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        control.tell_error(WorkerError(rank, text, False, time.time()))
    return 1


def work(control: Control) -> None:
    run = Run(open_store(os.environ[STORE_VARIABLE]), os.environ[RUN_VARIABLE])
    job = run.job
    assert job.recipe is not None
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    pack = Pack(run.store, run.pack_name(), cache_directory() / "packs")
    recipe = recipe_class(job.recipe)(job, pack)
    world = World.join()
    try:
        Trainer(run, recipe, world, int(os.environ[GENERATION_VARIABLE]), control).train()
    finally:
        world.leave()


if __name__ == "__main__":
    sys.exit(main())
