from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from packtrain.errors import FieldMistake, Mistake, PacktrainError
from packtrain.run.checkpoint import CorruptCheckpoint
from packtrain.store import StoreError
from packtrain.train.control import WorkerCause
from packtrain.train.engine import NonFinite
from packtrain.train.worker import cause_of, in_one_line

ADVICE = "use a smaller train.micro_batch, or more workers"


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


def test_a_worker_dies_with_its_launcher_also_while_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import time; print('importing', flush=True); time.sleep(120)")
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'packtrain.train'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", launcher], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        process.wait()
    [worker] = children
    deadline = time.monotonic() + 60
    while Path(f"/proc/{worker}/cmdline").exists() and Path(f"/proc/{worker}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the worker lives on without its launcher"
        time.sleep(0.05)
