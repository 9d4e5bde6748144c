"""Why a worker gave up, in one line, with the causes told apart."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

import torch

from packtrain.control import WorkerCause
from packtrain.errors import Mistake, PacktrainError
from packtrain.store import StoreError
from packtrain.train.engine import NotANumber

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
