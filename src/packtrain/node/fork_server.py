"""The fork server, `python -m packtrain.node.fork_server [RECIPE]`: one per machine, and the parent of its launchers.

With `--plain` in place of a recipe it starts programs by plain_launcher.py and never imports torch.

Importing torch takes seconds of CPU time, which a restart would have to wait for. So the node starts this process ahead
of time (launcher.py); it imports what launchers and workers need, and forks a launcher for each generation. That is
torch's: it finds the launchers of the other machines by rendezvous.py and starts the workers. Those of a recipe are
forked, too, and so have every import from their first moment; therefore nothing here may start a thread or use a
device.

The work of a generation comes as one line on standard input, and not in a file: it may have passwords. The answers are
two lines on standard output: the launcher's process id, and its exit code. When standard input closes, the node is
gone, and this process exits.

Signals that the system sends to every process of a service, such as SIGTERM when it shuts down, are ignored here: the
launcher and its workers heed them, and this process must outlive them to tell how they ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from packtrain.node.plain_launcher import PLAIN, run_workers
from packtrain.process import end_process, end_with_parent, exit_code_of
from packtrain.recipes import recipe_class

if TYPE_CHECKING:  # its imports are the node's, and would only delay the launcher of a program
    from packtrain.node.launcher import Work

# What every worker imports. Optimizers of torch import its compiler, whether they use it or not; the first checkpoint
# and the first evaluation import parts of NumPy. The first worker writes TensorBoard's files, the last of them
# while the next generation waits for its end.
_OF_WORKERS = (
    "torch._dynamo", "torch.nn.parallel", "packtrain.fleet.local", "packtrain.train.worker",
    "numpy.ctypeslib", "numpy.ma", "tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.event_pb2",
)  # fmt: skip


def main(recipe: str | None) -> None:
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an import prints is no answer
    gc.disable()  # looking for garbage among modules takes a fifth of the time of importing them
    if recipe != PLAIN:
        import_module("torch.distributed.run")
    if recipe is not None and recipe != PLAIN:
        prepare_workers(recipe)
        leave_gpus_alone()
    gc.freeze()  # nor do workers look there, which would copy the memory that they share
    gc.enable()
    work = serve(answers)
    if work is not None:
        become_launcher(work)
        end_process(exit_code_of(lambda: run_launcher(work)))  # cleaning up all modules would take a while


def run_launcher(work: Work) -> None:
    if work["workers"] is not None:
        run_workers(work["arguments"], work["workers"], Path(work["logs"]))
        return
    from torch.distributed.run import main

    main(work["arguments"])


def prepare_workers(recipe: str) -> None:
    for module in _OF_WORKERS:
        import_module(module)
    if ":" not in recipe:  # a user's own is left to the workers: it may do anything when it is imported
        recipe_class(recipe)


def leave_gpus_alone() -> None:
    """Keep torch's launcher from looking for GPUs: the workers that it forks could not use them after that.

    It looks in order to bind each worker to the cores near its GPU, which ours do themselves.
    """
    from torch.distributed.launcher.api import LaunchConfig

    plain = LaunchConfig.__post_init__

    def post_init(config: Any) -> None:
        config.numa_options = "as the workers decide"  # it looks only if nothing is decided
        plain(config)  # type: ignore[no-untyped-call]
        config.numa_options = None

    LaunchConfig.__post_init__ = post_init  # type: ignore[method-assign]


def serve(answers: int) -> Work | None:
    """Fork a launcher for each line of standard input. Return its work in the launcher, and None in the server."""
    server = os.getpid()
    while (line := sys.stdin.buffer.readline()).endswith(b"\n"):
        work: Work = json.loads(line)
        # Before the fork, so that why it failed is in this generation's log.
        _redirect(os.open(work["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stdout, sys.stderr)
        launcher = os.fork()
        if launcher == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            end_with_parent(signal.SIGTERM)
            if os.getppid() != server:  # it died before that
                return None
            os.close(answers)
            return work
        os.write(answers, b"%d\n" % launcher)
        _, status = os.waitpid(launcher, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
    return None


def become_launcher(work: Work) -> None:
    _redirect(os.open(os.devnull, os.O_RDONLY), sys.stdin)  # the workers must not inherit the node's pipe
    os.environ.clear()  # the workers' environment is exactly what the node decided
    os.environ.update(work["environment"])


def _redirect(source: int, *streams: TextIO) -> None:
    for stream in streams:
        os.dup2(source, stream.fileno())
    os.close(source)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
