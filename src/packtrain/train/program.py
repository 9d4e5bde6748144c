"""A program's words to its node, and its questions; without Packtrain, or under another launcher, nothing happens."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from packtrain.train.control import CONTROL_VARIABLE, Control, StopSignal

_signal = StopSignal()
_refused: set[str] = set()  # what a warning has named already
_MAX_WARNINGS = 20


def _control() -> Control | None:
    directory = os.environ.get(CONTROL_VARIABLE)
    return Control(Path(directory)) if directory else None


def request_commit() -> None:
    """Have the checkpoint directory committed now; the program continues meanwhile. Only rank 0's word counts."""
    control = _control()
    if control is not None and os.environ.get("RANK", "0") == "0":
        control.request_commit()


def is_stopping() -> bool:
    """True once the run is to stop. From the first call on, the signal that asks for it no longer ends the process."""
    control = _control()
    if control is None:
        return False
    # A handler of the program's own stays, and only the main thread can set one.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _signal.listen()
    return _signal.received or control.stop_requested()


def log_numbers(values: object, named: Mapping[str, object], step: object = None) -> None:
    """Append numbers to the file that the node reads. Only rank 0's count; nothing is raised into the program."""
    directory = os.environ.get(CONTROL_VARIABLE)
    if not directory or os.environ.get("RANK", "0") != "0":
        return
    if values is not None and not isinstance(values, Mapping):
        _warn_once("values", f"{type(values).__name__} is not a mapping of names to numbers")
        values = None
    given = {**(values or {}), **named}
    numbers = {str(name): number for name, value in given.items() if (number := _number(name, value)) is not None}
    at = None if step is None else _number("step", step)
    if not numbers or (step is not None and at is None):
        return
    line = json.dumps({"step": at, "time": time.time(), "values": numbers})
    try:
        # One write for each line: it is complete whatever kills the process, also with threads and forks that log.
        os.write(_opened(directory), f"{line}\n".encode())
    except OSError as error:  # a full disk
        _warn_once("file", f"cannot record numbers: {error}")


@cache
def _opened(directory: str) -> int:
    return os.open(Control(Path(directory)).numbers, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _number(name: object, value: object) -> float | None:
    """Return a number of any library, or of a tensor with one element, as Python's own; None for anything else."""
    try:
        if isinstance(value, (str, bytes, bytearray)):  # `float` would read it
            raise TypeError("is text")
        item = getattr(value, "item", None)  # NumPy, torch, JAX: raises unless there is exactly one element
        return float(value if item is None else item())  # type: ignore[arg-type]
    except Exception:  # whatever a class of the program raises: a log must not end a run
        _warn_once(repr(name), f"{name!r} is not a number ({type(value).__name__})")
        return None


def _warn_once(about: str, text: str) -> None:
    if about not in _refused and len(_refused) < _MAX_WARNINGS:
        _refused.add(about)
        print(f"packtrain.log: {text}; left out", file=sys.stderr, flush=True)
