"""Write the series of benchmarks/ui.py for one peer, with that peer's Python.

    python ui_series.py tensorboard|mlflow|trackio FOLDER make RUNS POINTS OVERLAY
    python ui_series.py tensorboard|mlflow|trackio FOLDER grow SECONDS

`make` writes that many runs, and prints the runs' identifiers as JSON; `grow` adds ten points a second to the first
one. The runs to overlay have values of their own; the others are copies, which is how 20 million points are made in
minutes. Times of a run begin where those of the one before it end.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

PROJECT, FEW, ONE = "bench", "few", "one"
_START = 1_700_000_000

Append = Callable[[range], None]


def loss(run: int, step: int) -> float:
    return 3 + 5 * math.exp(-step / 5000) + 0.3 * math.sin(step * 7.1 + run)


def name_of(run: int) -> str:
    return f"run-{run + 1:04d}"


# TensorBoard: an event file per run.


def make_tensorboard(folder: Path, runs: int, points: int, overlay: int) -> list[str]:
    for run in range(runs):
        if run < overlay:
            _events(folder, run, range(1, points + 1))
        else:
            shutil.copytree(folder / name_of(run % overlay), folder / name_of(run))
    return [name_of(run) for run in range(runs)]


def grow_tensorboard(folder: Path) -> Append:
    writer: Any = None

    def append(steps: range) -> None:
        nonlocal writer
        writer = _events(folder, 0, steps, writer)

    return append


def _events(folder: Path, run: int, steps: range, writer: Any = None) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = writer or EventFileWriter(str(folder / name_of(run)), flush_secs=1)
    for step in steps:
        summary = Summary(value=[Summary.Value(tag="loss", simple_value=loss(run, step))])
        writer.add_event(Event(wall_time=_START + step / 10, step=step, summary=summary))
    writer.flush()
    return writer


# MLflow: its tables in a file of SQLite; runs are made by its client, and their numbers are inserted in bulk.


def make_mlflow(folder: Path, runs: int, points: int, overlay: int) -> list[str]:
    import mlflow as package

    client = package.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    known = [client.create_run("0", run_name=name_of(run)).info.run_id for run in range(runs)]
    insert = "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) "
    with sqlite3.connect(folder / "mlflow.db") as base:
        _hurry(base)
        for run, identifier in enumerate(known):
            start = 1000 * _START + 100 * points * run
            if run < overlay:
                rows = ((loss(run, step), start + 100 * step, identifier, step) for step in range(1, points + 1))
                base.executemany(insert + "VALUES ('loss', ?, ?, ?, ?, 0)", rows)
            else:
                shift = 100 * points * (run - run % overlay)
                copied = "SELECT key, value, timestamp + ?, ?, step, is_nan FROM metrics WHERE run_uuid = ?"
                base.execute(insert + copied, (shift, identifier, known[run % overlay]))
            latest = (loss(run, points), start + 100 * points, points, identifier)
            base.execute("INSERT INTO latest_metrics VALUES ('loss', ?, ?, ?, 0, ?)", latest)
            base.commit()
    return known


def grow_mlflow(folder: Path) -> Append:
    import mlflow as package
    from mlflow.entities import Metric

    client = package.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    identifier = json.loads((folder / "ids.json").read_text())[0]

    def append(steps: range) -> None:
        now = int(1000 * time.time())
        client.log_batch(identifier, metrics=[Metric("loss", loss(0, step), now, step) for step in steps])

    return append


# Trackio: a file of SQLite per project. A page shows all runs of one, so those to overlay and to watch have their own.


def make_trackio(_: Path, runs: int, points: int, overlay: int) -> list[str]:
    from trackio.sqlite_storage import SQLiteStorage

    for project, many in ((PROJECT, runs), (FEW, overlay), (ONE, 1)):
        for run in range(min(many, overlay)):
            _log(project, run, range(1, points + 1))
        with sqlite3.connect(SQLiteStorage.get_project_db_path(project)) as base:
            _hurry(base)
            for run in range(overlay, many):
                copied = (
                    "INSERT INTO metrics (timestamp, run_id, run_name, step, metrics)"
                    " SELECT timestamp, ?, ?, step, metrics FROM metrics WHERE run_id = ?"
                )
                base.execute(copied, (name_of(run), name_of(run), name_of(run % overlay)))
                base.commit()
    return [name_of(run) for run in range(runs)]


def grow_trackio(_: Path) -> Append:
    return lambda steps: _log(ONE, 0, steps)


def _log(project: str, run: int, steps: Sequence[int]) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    values = [{"loss": loss(run, step)} for step in steps]
    times = [datetime.fromtimestamp(_START + step / 10).isoformat() for step in steps]
    SQLiteStorage.bulk_log(project, name_of(run), values, list(steps), times)


def _hurry(base: sqlite3.Connection) -> None:
    """Trade safety for speed: what is lost in a crash is made again."""
    for setting in ("synchronous = OFF", "cache_size = -1000000", "temp_store = MEMORY"):
        base.execute(f"PRAGMA {setting}")


MAKE = {"tensorboard": make_tensorboard, "mlflow": make_mlflow, "trackio": make_trackio}
GROW = {"tensorboard": grow_tensorboard, "mlflow": grow_mlflow, "trackio": grow_trackio}


def keep_growing(append: Append, folder: Path, seconds: float) -> None:
    """Add ten points a second, after those that are there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step = int((folder / "points").read_text())
        append(range(step + 1, step + 11))
        (folder / "points").write_text(str(step + 10))
        time.sleep(1.0)


def main() -> None:
    kind, place, action, *numbers = sys.argv[1:]
    folder = Path(place)
    if action == "make":
        runs, points, overlay = map(int, numbers)
        print(json.dumps(MAKE[kind](folder, runs, points, min(runs, overlay))))
    else:
        keep_growing(GROW[kind](folder), folder, float(numbers[0]))
        os._exit(0)  # without waiting for threads of the peer


if __name__ == "__main__":
    main()
