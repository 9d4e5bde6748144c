"""Write the series of benchmarks/ui.py for one peer, with that peer's Python.

    python ui_series.py tensorboard|mlflow|trackio FOLDER make RUNS POINTS OVERLAY
    python ui_series.py tensorboard|mlflow|trackio FOLDER grow SECONDS

`make` writes that many runs, and prints the runs' identifiers as JSON; `grow` adds ten points a second to a run.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

PROJECT, FEW = "bench", "few"
_BATCH = 1000
_START = 1_700_000_000


def loss(run: int, step: int) -> float:
    return 3 + 5 * math.exp(-step / 5000) + 0.3 * math.sin(step * 7.1 + run)


def name_of(run: int) -> str:
    return f"run-{run + 1:04d}"


def batches(points: int) -> Iterator[range]:
    return (range(start, min(start + _BATCH, points + 1)) for start in range(1, points + 1, _BATCH))


Append = Callable[[int, range], None]


def tensorboard(folder: Path, _: bool) -> tuple[Append, Callable[[int], str]]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writers: dict[int, Any] = {}

    def append(run: int, steps: range) -> None:
        if run not in writers:
            writers.clear()  # each holds a file and a thread
            writers[run] = EventFileWriter(str(folder / name_of(run)), flush_secs=1)
        for step in steps:
            summary = Summary(value=[Summary.Value(tag="loss", simple_value=loss(run, step))])
            writers[run].add_event(Event(wall_time=_START + step / 10, step=step, summary=summary))
        writers[run].flush()

    return append, name_of


def mlflow(folder: Path, is_new: bool) -> tuple[Append, Callable[[int], str]]:
    import mlflow as package  # type: ignore[import-not-found]
    from mlflow.entities import Metric  # type: ignore[import-not-found]

    client = package.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    file = folder / "runs.json"
    known: dict[str, str] = {} if is_new else json.loads(file.read_text())

    def identifier(run: int) -> str:
        if name_of(run) not in known:
            known[name_of(run)] = client.create_run("0", run_name=name_of(run)).info.run_id
            file.write_text(json.dumps(known))
        return known[name_of(run)]

    def append(run: int, steps: range) -> None:
        metrics = [Metric("loss", loss(run, step), 1000 * _START + 100 * step, step) for step in steps]
        client.log_batch(identifier(run), metrics=metrics)

    return append, identifier


def trackio(folder: Path, _: bool) -> tuple[Append, Callable[[int], str]]:
    # The folder is in TRACKIO_DIR. A page shows all runs of a project, so those to overlay have one of their own.
    from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found]

    few = int((folder / "few").read_text())

    def append(run: int, steps: range) -> None:
        values = [{"loss": loss(run, step)} for step in steps]
        times = [datetime.fromtimestamp(_START + step / 10).isoformat() for step in steps]
        for project in (PROJECT, *([FEW] if run < few else [])):
            SQLiteStorage.bulk_log(project, name_of(run), values, list(steps), times)

    return append, name_of


PEERS = {"tensorboard": tensorboard, "mlflow": mlflow, "trackio": trackio}


def main() -> None:
    kind, folder, action, *numbers = sys.argv[1:]
    if action == "make":
        runs, points, overlay = map(int, numbers)
        (Path(folder) / "few").write_text(str(overlay))
        append, identifier = PEERS[kind](Path(folder), True)
        for run in range(runs):
            for steps in batches(points):
                append(run, steps)
        (Path(folder) / "points").write_text(str(points))
        print(json.dumps([identifier(run) for run in range(runs)]))
        return
    append, _ = PEERS[kind](Path(folder), False)
    step, end = int((Path(folder) / "points").read_text()) + 1, time.monotonic() + float(numbers[0])
    while time.monotonic() < end:
        append(0, range(step, step + 10))
        step += 10
        time.sleep(1.0)


if __name__ == "__main__":
    main()
