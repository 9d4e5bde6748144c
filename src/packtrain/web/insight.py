"""The dashboard's view of what the report knows: findings, how far the forecast was off, sweeps."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.observe.evidence import gather
from packtrain.report import finding_json, findings_of
from packtrain.report.account import compared
from packtrain.report.sweep import sweep_table
from packtrain.run.run import Run
from packtrain.run.sweeps import sweep_names
from packtrain.store import Store

_MAX_KEPT = 64
_SHARE = 0.05  # of the time may go into answers about a run that is watched: they read all of it


@dataclass(frozen=True)
class Answers:
    findings: list[dict[str, Any]]
    forecast: list[dict[str, Any]]


class Answering:
    """Answers about runs, found anew when the run has changed, and less often the longer that takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[object, float, Answers]] = OrderedDict()

    def of(self, run: Run, version: object) -> Answers:
        """Return the answers; `version` is another one when the run has something new."""
        with self._lock:
            kept = self._kept.get(run.name)
            if kept is not None and (kept[0] == version or time.monotonic() < kept[1]):
                return kept[2]
            started = time.monotonic()
            evidence = gather(run)
            answers = Answers(
                [finding_json(one) for one in findings_of(evidence)],
                [{**asdict(one), "off": one.off} for one in compared(evidence)],
            )
            ended = time.monotonic()
            self._kept[run.name] = (version, ended + (ended - started) / _SHARE, answers)
            self._kept.move_to_end(run.name)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return answers


def sweeps(store: Store) -> list[dict[str, Any]]:
    """Return all sweeps: name, job, runs, finished, best."""
    found = [sweep_table(store, name) for name in sweep_names(store)]
    return [
        {
            "name": table.name,
            "job": table.job,
            "runs": len(table.rows),
            "finished": table.finished,
            "best": None if table.best is None else table.best.run,
        }
        for table in found
    ]


def sweep(store: Store, name: str) -> dict[str, Any] | None:
    """Return the table of a sweep: name, parameters, measure, rows; None if there is none of that name."""
    return asdict(sweep_table(store, name)) if name in sweep_names(store) else None
