"""torch's launcher, ready before it is needed: to import torch takes seconds, which a run that lost a worker misses.

The agent starts it, and gives it its work on the standard input: one line, so that a password in the environment of
the workers stands in no file and no list of processes. Without one it ends when the agent does.
"""

from __future__ import annotations

import json
import os
import sys

from torch.distributed.run import main as launch


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    work = json.loads(line)
    os.environ.clear()
    os.environ.update(work["environment"])
    launch(work["arguments"])


if __name__ == "__main__":
    main()
