"""Run a tier of the tests several times, each time with the files in another order, and print a row for each run.

    python tests/repeat.py test --times 5
    python tests/repeat.py test-system --times 2 --busy 4

The rows are those of docs/test-runs.md. A failed run's output stays in test-runs/. Exits with 1 if any run failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

OUTPUTS = Path("test-runs")
HEADER = "| started (UTC) | commit | make | order | busy | load | minutes | passed | failed |\n" + "| --- " * 9 + "|"
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?)\b")
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("target", choices=["quick", "test", "test-system"])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--first", type=int, default=1, help="The number that the first order of files follows from.")
    parser.add_argument("--busy", type=int, default=0, help="Processes that compute meanwhile.")
    options = parser.parse_args()
    OUTPUTS.mkdir(exist_ok=True)
    print(HEADER, flush=True)
    codes = [run(options.target, order, options.busy) for order in range(options.first, options.first + options.times)]
    return int(any(codes))


def run(target: str, order: int, busy: int) -> int:
    """Run the tests once, print the row, and return the exit code of make."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    started, load = datetime.now(UTC), os.getloadavg()[0]
    since = time.monotonic()
    with busy_processes(busy):
        command = ["make", target, f"PYTEST_OPTIONS=--shuffle {order}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    minutes = (time.monotonic() - since) / 60
    output = OUTPUTS / f"{target}-{started:%Y%m%d-%H%M%S}.txt"
    output.write_text(done.stdout)
    summary = next((line for line in reversed(done.stdout.splitlines()) if _COUNTS.search(line)), "")
    counts = {name.rstrip("s"): int(number) for number, name in _COUNTS.findall(summary)}
    failures = "<br>".join(f"`{name}`" for name in _FAILURE.findall(done.stdout))
    failed = failures or ("" if done.returncode == 0 else f"make exited with {done.returncode}; see {output}")
    cells = [f"{started:%m-%d %H:%M}", commit.strip(), target, order, busy, f"{load:.1f}", f"{minutes:.1f}",
             counts.get("passed", 0), failed]  # fmt: skip
    print("|", *(f"{cell} |" for cell in cells), flush=True)
    if done.returncode == 0:
        output.unlink()
    return done.returncode


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
