"""Entry point of a worker process, `python -m packtrain.train`. What cannot wait comes before torch is imported."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

from packtrain.system import end_with_parent
from packtrain.train.control import StopSignal

# Besides errors, torch only warns of options that are chosen on purpose here and of peers that are gone.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main() -> NoReturn:
    started = time.monotonic()
    end_with_parent(signal.SIGKILL)  # the launcher: without it nothing would supervise this worker
    stop_signal = StopSignal().listen()
    from packtrain.train.worker import main as work

    work(stop_signal, started)


if __name__ == "__main__":
    main()
