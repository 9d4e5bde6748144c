"""The launcher process, `python -m packtrain.node.launcher [RECIPE]`: torch's launcher, and what workers import.

The node starts it ahead of time (launch.py), because importing torch takes seconds that a restart would have to wait
for. Workers that train a recipe are forked from it, and so have all of that from their first moment; therefore nothing
here may start a thread or use a device. Its work comes as one line on standard input, so that a password in the
workers' environment is in no file and no process list. If standard input closes without a line, the node is gone, and
it exits. It finds the launchers of the other machines by rendezvous.py, and starts the workers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import import_module

from packtrain.recipes import recipe_class

# What every worker imports before its first step. Optimizers of torch import its compiler, whether they use it or not.
_OF_WORKERS = ("torch._dynamo", "torch.nn.parallel", "packtrain.fleet.local", "packtrain.train.worker")


def main(recipe: str | None) -> None:
    gc.disable()  # looking for garbage among modules takes a fifth of the time of importing them
    from torch.distributed.run import main as launch

    if recipe is not None:
        prepare_workers(recipe)
    gc.freeze()  # nor do workers look there, which would copy the memory that they share
    gc.enable()
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


def prepare_workers(recipe: str) -> None:
    for module in _OF_WORKERS:
        import_module(module)
    if ":" not in recipe:  # a user's own is left to the workers: it may do anything when it is imported
        recipe_class(recipe)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
