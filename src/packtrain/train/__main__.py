"""Entry point of a worker process, `python -m packtrain.train`: signals are handled before torch is imported."""

from __future__ import annotations

import os
from typing import NoReturn

from packtrain.train.control import StopSignal

# Besides errors, torch only warns of options that are chosen on purpose here and of peers that are gone.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main() -> NoReturn:
    stop_signal = StopSignal().listen()
    from packtrain.train.worker import main as work

    work(stop_signal)


if __name__ == "__main__":
    main()
