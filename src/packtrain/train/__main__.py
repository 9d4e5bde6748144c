"""A worker process from its first moment: the launcher forks it and runs this file."""

from __future__ import annotations

import os
import signal
import time

from packtrain.process import end_with_parent, name_process
from packtrain.train.control import WORKER_NAME, StopSignal
from packtrain.train.worker import main as work


def main() -> None:
    started = time.monotonic()
    end_with_parent(signal.SIGKILL)  # the launcher: without it nothing would supervise this worker
    name_process(f"{WORKER_NAME}{os.environ['RANK']}")
    for inherited in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # the launcher's own handlers
        signal.signal(inherited, signal.SIG_DFL)
    work(StopSignal().listen(), started)


if __name__ == "__main__":
    main()
