"""The launcher process, `python -m packtrain.node.launcher`: torch's launcher, imported before it is needed.

The node starts it ahead of time (launch.py), because importing torch takes seconds that a restart would have to wait
for. Its work comes as one line on standard input, so that a password in the workers' environment is in no file and no
process list. If standard input closes without a line, the node is gone, and it exits. It finds the launchers of the
other machines by rendezvous.py, and starts the workers.
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
    null = os.open(os.devnull, os.O_RDONLY)  # the workers must not inherit the node's pipe
    os.dup2(null, sys.stdin.fileno())
    os.close(null)
    work = json.loads(line)
    os.environ.clear()  # the workers' environment is exactly what the node decided
    os.environ.update(work["environment"])
    launch(work["arguments"])


if __name__ == "__main__":
    main()
