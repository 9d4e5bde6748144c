"""Run every benchmark, one after the other, and print its table; exit with 1 if any fails or measures nothing.

    sudo make benchmarks [SHORT=1]
    sudo python benchmarks/all.py [--short] [--only NAME...]

Without --short it takes hours and prints the figures of docs/benchmarks.md. With --short it takes some ten minutes:
every benchmark works from end to end, but with too few steps and data for its figures to mean anything. Some benchmarks
need root, for network namespaces.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import bench

SHORT_LINES = 2000  # of the 75,000 that the example learns from
SHORT_LIMIT_SECONDS = 600

# The arguments of each run of a benchmark, as in docs/benchmarks.md.
COMMANDS: dict[str, list[list[str]]] = {
    "start": [[]],
    "step": [[], ["classify", "--steps", "10"]],
    "checkpoint": [[]],
    "faults": [[]],
    "soak": [[]],
    "recover": [[]],
    "translate": [["--rounds", "2"]],
    "recipes": [[]],
    "scale": [[]],
    "ui": [[]],
    "home": [
        ["translate"],
        ["int8", "--rounds", "15"],
        ["classify", "--inputs", "1000"],
        ["serve", "--inputs", "2000"],
    ],
    "pack": [[], ["--gigabytes", "5.2"], ["--pairs", "2000000"]],
    "input_text": [[]],
    "input": [["--images", "512"]],
    "exchange": [[]],
    "plan": [["--steps", "200"]],
    "published": [[]],
}
LITTLE_TRAINING = ("train.duration=5 steps", "evaluate.samples=5", "data.test=[]", "fleet.workers=1")
SHORT: dict[str, list[list[str]]] = {
    "start": [[]],
    "step": [["--bursts", "1", "--steps", "2"]],
    "checkpoint": [["--megabytes", "20", "--steps", "25"]],
    "faults": [["--only", "worker"]],
    "soak": [["--minutes", "0.15", "--every", "2", "3", "--machines", "1"]],
    "recover": [["--seconds", "2", "--every", "2", "--save-every", "3"]],
    "translate": [["--seconds", "2", "--sentences", "20"]],
    "recipes": [["translate", "--share", "0.005", "--decoded", "20"]],
    "scale": [["--nodes", "2", "4"]],
    "ui": [["--runs", "3", "--points", "400", "--overlay", "2", "--watch", "1", "--only", "packtrain"]],
    "home": [["serve", "--inputs", "20", *(word for setting in LITTLE_TRAINING for word in ("--set", setting))]],
    "pack": [["--images", "40"], ["--pairs", "500"]],
    "input_text": [["--pairs", "2000"]],
    "input": [["--images", "16"]],
    "exchange": [["--steps", "2", "--quality-steps", "4", "--links", "1 Gbit/s", "--only", "local, 4 fragments, int8"]],
    "plan": [["--steps", "6", "--seconds", "0.2", "--only", "1 worker"]],
    "published": [[]],
}


def copy_with_less_data(root: Path) -> Path:
    """Copy the benchmarks beside an example with less to pack: nine of them pack it, for ten seconds each."""
    for name in ("benchmarks", "examples", "tests/parts"):
        leave_out = shutil.ignore_patterns("__pycache__", "emoji", "chitchat")
        shutil.copytree(bench.REPOSITORY / name, root / name, ignore=leave_out)
    for file in (root / "examples" / "data" / "en-de").glob("train.*.gz"):
        with gzip.open(file, "rb") as whole:
            lines = list(islice(whole, SHORT_LINES))
        file.write_bytes(gzip.compress(b"".join(lines)))
    return root / "benchmarks"


def fault_of(script: Path, arguments: Sequence[str], scratch: Path | None) -> str | None:
    """Run a benchmark and print its table; return what is wrong with it. `scratch` is for its files in a short run."""
    command = [sys.executable, str(script), "--json", *arguments]
    environment = dict(os.environ)
    if scratch is not None:
        environment |= {"OMP_NUM_THREADS": "1", "PACKTRAIN_CACHE": str(scratch), "PACKTRAIN_UI_CACHE": str(scratch)}
    limit = None if scratch is None else SHORT_LIMIT_SECONDS
    try:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, text=True, timeout=limit, cwd=scratch, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {limit} s"
    lines = done.stdout.splitlines()
    if not lines:
        return f"exited with {done.returncode} and printed nothing"
    result = bench.Report(**json.loads(lines[-1]))
    bench.show(result, as_json=False)
    if done.returncode != 0:
        return f"exited with {done.returncode}"
    return None if result.rows else "measured nothing"


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), metavar="NAME")
    arguments.add_argument("--short", action="store_true", help="one round with little data")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    commands = SHORT if options.short else COMMANDS
    print("load average: {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()))
    faults = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = copy_with_less_data(Path(name)) if options.short else bench.REPOSITORY / "benchmarks"
        for benchmark in options.only:
            for arguments in commands[benchmark]:
                words = ["--rounds", "1", *arguments] if options.short else arguments
                title = shlex.join([f"benchmarks/{benchmark}.py", *words])
                print(f"\n$ python {title}", flush=True)
                scratch = Path(tempfile.mkdtemp(dir=name)) if options.short else None
                if fault := fault_of(folder / f"{benchmark}.py", words, scratch):
                    faults.append(f"{title}: {fault}")
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
