"""A process that has imported everything, and workers forked from it: each starts in milliseconds.

Nothing is opened before the fork, and there is one thread. What a worker does is a function in workers.py.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 120.0
_LEFT_ALONE_SECONDS = 15.0  # for the others to go, when one worker has failed


@dataclass(frozen=True)
class WorkerExit:
    """A worker's exit code (negative: the signal), what its function returned, and its log."""

    code: int
    returned: Any
    log: str


class WorkerForker:
    def __init__(self, directory: Path) -> None:
        self._directory, self._count = directory, 0
        here = Path(__file__)
        self._process = subprocess.Popen(
            [sys.executable, str(here)],
            # With the sources that the tests themselves use, if these were given so.
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{here.parent.parent}:{os.environ.get('PYTHONPATH', '')}",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, call: str, ranks: int = 1, **arguments: Any) -> list[WorkerExit]:
        """One worker for each rank, at the same time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._count += 1
        directory = self._directory / str(self._count)
        directory.mkdir()
        request = {"call": call, "ranks": ranks, "arguments": arguments, "directory": str(directory)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        return [WorkerExit(code, *_left_in(directory, rank)) for rank, code in enumerate(codes)]

    def succeed(self, call: str, ranks: int = 1, **arguments: Any) -> list[Any]:
        """What the workers' functions returned, all of them."""
        exited = self.run(call, ranks, **arguments)
        assert [one.code for one in exited] == [0] * ranks, "\n".join(one.log for one in exited)
        return [one.returned for one in exited]

    def close(self) -> None:
        """It has nothing to put away."""
        self._process.kill()
        self._process.communicate()


def _left_in(directory: Path, rank: int) -> tuple[Any, str]:
    returned = directory / f"returned-{rank}.json"
    log = (directory / f"log-{rank}").read_text("utf-8", "replace")
    return json.loads(returned.read_text()) if returned.exists() else None, log


# In the process itself.


def serve() -> None:
    gc.disable()
    from train import workers

    workers.warm_up()
    gc.freeze()  # workers do not look for garbage here, which would copy the memory that they share
    gc.enable()
    for line in sys.stdin:
        print(json.dumps(_bring_up(**json.loads(line))), flush=True)


def _bring_up(call: str, ranks: int, arguments: dict[str, Any], directory: str) -> list[int]:
    from parts.loopback import free_port

    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _run_worker(call, arguments, Path(directory), rank, place)
        children[child] = rank
    return _wait(children)


def _wait(children: dict[int, int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(codes) < len(children):
        found = _ended([child for child, rank in children.items() if rank not in codes])
        if found is not None:
            child, code = found
            codes[children[child]] = code
            if code:
                deadline = min(deadline, time.monotonic() + _LEFT_ALONE_SECONDS)
        elif time.monotonic() > deadline:
            for child, rank in children.items():
                if rank not in codes:
                    os.kill(child, signal.SIGKILL)
            deadline += PATIENCE_SECONDS
        else:
            time.sleep(0.002)
    return [codes[rank] for rank in range(len(children))]


def _ended(children: list[int]) -> tuple[int, int] | None:
    for child in children:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return child, os.waitstatus_to_exitcode(status)
    return None


def _run_worker(call: str, arguments: dict[str, Any], directory: Path, rank: int, place: dict[str, str]) -> None:
    """Never returns: what was forked must not go on as its parent."""
    code = 1
    try:
        log = os.open(directory / f"log-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank))

        from train import workers

        returned = getattr(workers, call)(**arguments)
        (directory / f"returned-{rank}.json").write_text(json.dumps(returned))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
