"""The door through which the launcher enters: signals are heard before anything large is imported."""

from __future__ import annotations

import sys

from packtrain.train.notice import Notice


def main() -> int:
    notice = Notice().listen()
    from packtrain.train.worker import main as work

    return work(notice)


if __name__ == "__main__":
    sys.exit(main())
