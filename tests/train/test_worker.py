from __future__ import annotations

import errno
import subprocess
import sys

import psutil
import pytest
import torch

from packtrain.errors import FieldMistake, Mistake, PacktrainError
from packtrain.node.telemetry import rank_of
from packtrain.run.checkpoint import CorruptCheckpoint
from packtrain.store import StoreError
from packtrain.train.control import WorkerCause
from packtrain.train.engine import NonFinite
from packtrain.train.worker import cause_of, in_one_line

ADVICE = "use a smaller train.micro_batch, train.activation_checkpointing, or more workers"


def full_below_a_store() -> StoreError:
    error = StoreError("./store: no space left on device")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


CASES: list[tuple[BaseException, WorkerCause, str]] = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more"), "memory",
     f"the GPU is out of memory: CUDA out of memory. Tried to allocate 2 GiB; {ADVICE}"),
    (MemoryError(), "memory", f"this machine is out of memory: no message; {ADVICE}"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "memory",
     "this machine is out of memory: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
     f"8 bytes; {ADVICE}"),
    (OSError(errno.ENOSPC, "No space left on device"), "disk", "the disk is full: [Errno 28] No space left on device"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk", "the disk is full: [Errno 122] Disk quota exceeded"),
    (full_below_a_store(), "disk", "./store: no space left on device"),
    (StoreError("s3://b: no answer", temporary=True), "store", "s3://b: no answer"),
    (StoreError("s3://b: access denied"), "program", "s3://b: access denied"),
    (NonFinite("the loss of step 5 is not finite"), "number", "the loss of step 5 is not finite"),
    (Mistake("that cannot be"), "mistake", "that cannot be"),
    (FieldMistake("train.batch", "is too small"), "mistake", "train.batch: is too small"),
    (CorruptCheckpoint("it does not fit"), "program", "it does not fit"),
    (PacktrainError("two\nlines"), "program", "two lines"),
    (ValueError("bad value\nwith details"), "program", "ValueError: bad value"),
    (OSError(errno.EIO, "Input/output error"), "program", "OSError: [Errno 5] Input/output error"),
    (KeyError(), "program", "KeyError: no message"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "cause", "line"), CASES, ids=lambda one: type(one).__name__)
def test_every_cause_is_recognized_and_reported_in_one_line(
    error: BaseException, cause: WorkerCause, line: str
) -> None:
    assert cause_of(error) == cause
    assert in_one_line(error) == line
    assert "\n" not in in_one_line(error)


def test_a_programming_error_is_reported_with_its_file_and_line() -> None:
    try:
        raise ValueError("too odd")
    except ValueError as error:
        assert in_one_line(error).startswith("ValueError: too odd (test_worker.py:")


def test_a_long_message_is_cut() -> None:
    assert len(in_one_line(RuntimeError("x" * 10_000))) < 400


def test_torch_running_out_of_cpu_memory_is_recognized() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58)
    assert cause_of(raised.value) == "memory"


LAUNCHER = """
import os, runpy, sys, time, types
import packtrain.train
sys.modules["packtrain.train.worker"] = worker = types.ModuleType("worker")
worker.main = lambda *_: (print(os.getpid(), flush=True), time.sleep(600))
os.environ["RANK"] = "3"
if os.fork() == 0:
    runpy.run_path(os.path.join(os.path.dirname(packtrain.train.__file__), "__main__.py"), run_name="__main__")
os.wait()
"""


@pytest.mark.usefixtures("processes")
def test_a_worker_is_named_after_its_rank_and_dies_with_its_launcher() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        worker = psutil.Process(int(launcher.stdout.readline()))
        assert worker.name() == "packtrain-3"
        assert rank_of(worker) == 3
        launcher.kill()
    gone, _ = psutil.wait_procs([worker], timeout=60)
    assert gone == [worker]
