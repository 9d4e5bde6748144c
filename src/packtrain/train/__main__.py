"""The door through which the launcher enters: signals are heard before anything large is imported."""

from __future__ import annotations

import os
from typing import NoReturn

from packtrain.train.control import Notice

# What torch warns of, beside errors, are options that were chosen on purpose and peers that are gone.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main() -> NoReturn:
    notice = Notice().listen()
    from packtrain.train.worker import main as work

    work(notice)


if __name__ == "__main__":
    main()
