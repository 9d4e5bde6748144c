"""A mirror of a run in MLflow: parameters, metrics, scores and the report, for those whose group has a server.

It only reads the store, so it can run anywhere and start again at any time:

    find the run of MLflow that the run's folder names, or make one
    until the run has a result: log what is certain, which are the steps up to the newest checkpoint
    log the rest, upload the report, end the run of MLflow

MLflow cannot forget a step. A restart discards those after the newest checkpoint, so they are not logged before they
are certain; and what a metric has is never logged again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from packtrain.backoff import Backoff
from packtrain.errors import PacktrainError
from packtrain.identity import install_command
from packtrain.job import Job
from packtrain.job.part import is_tracking_uri
from packtrain.job.secrets import names_secret
from packtrain.observe.history import step_seconds, surviving
from packtrain.process import say
from packtrain.report import write_report
from packtrain.run.checkpoint import last_step
from packtrain.run.records import Generation, MirroredRun, Point, Result
from packtrain.run.run import Run
from packtrain.store.records import DamagedRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

Item = TypeVar("Item")

_SECONDS = 5.0  # between two looks at the store
_LAST_SECONDS = 30.0  # to reach MLflow once the run is over: its machine waits, and may cost money
_SHOWN_CHARACTERS = 160  # of an error of MLflow's, whose beginning says the most
_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_LEFT_OUT = {"name", "store", "code", "environment", "report"}  # sections of the job that are no parameters
_SHOWN_SPANS = {"elapsed_seconds", "step_seconds"}  # of the times; there are many others

# MLflow's limits.
_METRICS_AT_ONCE, _PARAMETERS_AT_ONCE, _VALUE_LENGTH, _NAME_LENGTH = 1000, 100, 6000, 250
_RUN_TAG = "packtrain.run"
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)


# What is mirrored.


def parameters_of(job: Job) -> dict[str, str]:
    """Return every setting of a job that is not null, by its name with dots."""
    document = {key: section for key, section in job.model_dump(mode="json").items() if key not in _LEFT_OUT}
    return {_name(name): text[:_VALUE_LENGTH] for name, text in _flat(document)}


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def metrics_of(point: Point, unit: str) -> dict[str, float]:
    """Return the measurements of a point by the names of their metrics, such as `valid.bleu`."""
    values = {
        name: value for name, value in point.values.items() if name in _SHOWN_SPANS or not name.endswith("_seconds")
    }
    if point.kind == "train" and unit in values and (seconds := step_seconds(point)) > 0:
        values[f"{unit}_per_second"] = values.pop(unit) / seconds
    return {_name(point.column(name)): value for name, value in values.items()}


def _batches(items: Sequence[Item], count: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + count] for start in range(0, len(items), count))


def _name(text: str) -> str:
    return _NOT_IN_NAMES.sub("_", text)[:_NAME_LENGTH]


# The mirror.


class Mirror:
    """`look` logs what is new. After an error it is made again: what MLflow has by then is asked for, not assumed."""

    def __init__(self, run: Run, uri: str) -> None:
        self._run, self._job = run, run.job
        self._uri = uri if is_tracking_uri(uri) else str(Path(uri).absolute())
        self._unit = self._job.train.batch.unit if self._job.recipe is not None else ""
        self._client = _client(self._uri)
        self._points, self._pending = run.points(), list[Point]()
        self._id = self._opened()
        self._client.update_run(self._id, status="RUNNING")
        logged = self._client.get_run(self._id).data
        self._log_parameters(logged.params)
        # The last step of each metric: a run that was resumed, or a mirror that was killed, continues after it.
        self._last = {
            name: max(metric.step for metric in self._client.get_metric_history(self._id, name))
            for name in logged.metrics
        }

    def _opened(self) -> str:
        """Return the id of the run in MLflow, which is made for the first mirror of a run."""
        from mlflow.exceptions import MlflowException

        server = hashlib.sha256(self._uri.encode()).hexdigest()
        try:
            mirrored = self._run.mirrored()
        except DamagedRecord:
            mirrored = None
        if mirrored is not None and mirrored.server == server:
            try:
                run = self._client.get_run(mirrored.run)
                # The store names it: it could be anything that this person may change on the server.
                if run.info.lifecycle_stage == "active" and _RUN_TAG in run.data.tags:
                    return mirrored.run
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        entry = self._run.store.entry(self._run.key("job.json"))
        created = int(1000 * (time.time() if entry is None else entry.modified.timestamp()))
        tags = {_RUN_TAG: self._run.name, "packtrain.store": self._run.store.url}
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._job.name
        experiment = self._client.get_experiment_by_name(name)
        place = str(self._client.create_experiment(name) if experiment is None else experiment.experiment_id)
        run = self._client.create_run(place, created, tags, self._run.name)
        self._run.put_mirrored(MirroredRun(server, run.info.run_id))
        return str(run.info.run_id)

    def _log_parameters(self, logged: Mapping[str, str]) -> None:
        """Log the job. MLflow keeps the first value of a parameter: what `resume --set` changed becomes a tag."""
        from mlflow.entities import Param

        parameters = parameters_of(self._job)
        missing = [Param(name, value) for name, value in parameters.items() if name not in logged]
        for batch in _batches(missing, _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=batch)
        for name, value in parameters.items():
            if logged.get(name, value) != value:
                self._client.set_tag(self._id, f"packtrain.changed.{name}", value)

    def look(self) -> bool:
        """Log what is new and certain; True if the run is over, and all of it is in MLflow."""
        # In this order: what is read last has all points of what was read first.
        result = self._run.result()
        # The steps of a program are its own: which of them a checkpoint has is not known.
        certain = math.inf if result is not None or self._job.program is not None else last_step(self._run)
        self._pending = surviving([*self._pending, *self._points.read()])
        self._log([point for point in self._pending if point.step <= certain])
        # Later starts decide which points before them were discarded.
        self._pending = [point for point in self._pending if point.kind == "start" or point.step > certain]
        if result is not None:
            self._finish(result)
        return result is not None

    def _log(self, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        metrics: list[Metric] = []
        last = dict(self._last)
        for point in points:
            for name, value in metrics_of(point, self._unit).items() if point.kind != "start" else ():
                if point.step > last.get(name, -1):
                    metrics.append(Metric(name, value, int(1000 * point.time), point.step))
                    last[name] = point.step
        for batch in _batches(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=batch)
        self._last = last

    def _finish(self, result: Result) -> None:
        write_report(self._run)
        with tempfile.TemporaryDirectory() as folder:
            self._run.store.get_file(self._run.key("report.html"), Path(folder) / "report.html")
            self._client.log_artifact(self._id, str(Path(folder) / "report.html"))
        self._client.set_tag(self._id, "packtrain.result", f"{result.status}: {result.reason}"[:_VALUE_LENGTH])
        self._client.set_terminated(self._id, _STATUSES[result.status])


def _client(uri: str) -> MlflowClient:
    """Return MLflow's client, with patience for seconds instead of minutes: a mirror tries again by itself."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # who names a directory wants it
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise NoMlflow(f"mlflow is not installed on {socket.gethostname()}") from None
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


class NoMlflow(PacktrainError):
    """MLflow's client is missing, which no second try changes."""


# The loop.

Tell = Callable[[str], None]


def follow(run: Run, uri: str, tell: Tell, is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Mirror a run until it ends; False if not all of it is in MLflow.

    Whatever fails is told once, and tried again. Nothing is raised: a mirror must not disturb what it mirrors.
    """
    mirror: Mirror | None = None
    backoff = Backoff(1.0, 30.0)
    failure = ""  # the kind of the last failure: its text may differ each time, such as by an address in memory
    ended = math.inf  # when the run was first seen to be over while MLflow was not there
    while True:
        try:
            if not is_wanted():
                return False
            mirror = mirror or Mirror(run, uri)
            if mirror.look():
                return True
            backoff.reset()
            failure, pause = "", _SECONDS
        except NoMlflow as error:
            tell(f"{error}; `{install_command('mlflow')}` there, or `packtrain mirror {run.name}` where it is")
            return False
        except Exception as error:  # MLflow's client raises anything; the store may be away, too
            mirror, pause = None, backoff.next_pause() or _SECONDS
            if (kind := type(error).__name__) != failure:
                tell(f"cannot mirror to MLflow: {_in_one_line(error)}; trying again")
                failure = kind
            with suppress(PacktrainError):  # the store is away, or its record is damaged
                if run.result() is not None:
                    ended, pause = min(ended, time.monotonic()), min(pause, _SECONDS)
            if time.monotonic() - ended > _LAST_SECONDS:
                tell(f"gave up on mirroring to MLflow; `packtrain mirror {run.name}` mirrors the rest")
                return False
        time.sleep(pause)


def follow_as_node(run: Run, uri: str, node: str) -> None:
    """Mirror as the process of a node, for as long as it is the first one of the run; warnings become events."""
    latest: Generation | None = None

    def is_first() -> bool:
        nonlocal latest
        latest = run.latest_generation(latest)
        return latest is None or latest.members[0].node == node

    def tell(text: str) -> None:
        try:
            run.record_event("warning", text)
        except PacktrainError:  # the store is away
            say(f"warning: {text}")

    follow(run, uri, tell, is_first)


def _in_one_line(error: Exception) -> str:
    """Return what went wrong without any secret of this process: a client may repeat what it has sent."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    for name, value in os.environ.items():
        if names_secret(name) and len(value) > 3:
            text = text.replace(value, "***")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
