"""What a program may say to its node and ask of it; without Packtrain, or under another launcher, nothing happens."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from packtrain.train.control import CONTROL_VARIABLE, Control, StopSignal

_signal = StopSignal()


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
