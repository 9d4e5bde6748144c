"""A run in MLflow's file store: the same steps as in ours, each once, whatever happened to the run or to the mirror."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.errors import Mistake
from packtrain.job import Job
from packtrain.observe.history import read_points
from packtrain.report import mirror
from packtrain.report.mirror import Mirror, follow, follow_as_node, metrics_of, parameters_of
from packtrain.run.checkpoint import commit
from packtrain.run.records import Generation, Member, Point, Result
from packtrain.run.run import Run
from packtrain.store import Store
from parts.runs import MEASURED, a_generation, new_run, program_job, recipe_job, write_files

if TYPE_CHECKING:
    from mlflow import MlflowClient


@pytest.fixture(autouse=True)
def environment(needs_mlflow: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give back the variables that the mirror sets for MLflow."""
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true" if "ALLOW" in name else "1")
    yield


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "mlruns")


def job_of(**sections: Any) -> Job:
    return recipe_job("numbers", train={"batch": "64 tokens", "schedule": {"constant": {"rate": 0.1}}}, **sections)


def train(run: Run, generation: int, first: int, last: int, loss: float) -> None:
    """Record the steps of a generation that resumes at `first`."""
    writer = run.point_writer(f"{generation:06d}-rank-0")
    writer.append(Point("start", generation, first, time.time(), {"workers": 1.0}))
    for step in range(first + 1, last + 1):
        values = {**MEASURED, "loss": loss + step, "tokens": 64.0, "step_seconds": 0.5, "forward_seconds": 0.5}
        writer.append(Point("train", generation, step, time.time(), values))
    writer.append(Point("valid", generation, last, time.time(), {"bleu": float(last), "evaluation_seconds": 1.0}))
    writer.flush()


def save(run: Run, folder: Path, step: int, generation: int = 1) -> None:
    commit(run, step, generation, None, write_files(folder / f"files-{step}", {"state.json": b"{}"}))


def client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(uri)


class Seen:
    """What MLflow has of a run."""

    def __init__(self, run: Run, uri: str) -> None:
        self._client = client(uri)
        [experiment] = [one for one in self._client.search_experiments() if one.name == run.job.name]
        [self.run] = self._client.search_runs([experiment.experiment_id])

    def history(self, name: str) -> dict[int, float]:
        found = self._client.get_metric_history(self.run.info.run_id, name)
        assert len({one.step for one in found}) == len(found), "a step is there twice"
        return {one.step: one.value for one in found}

    def report(self) -> str:
        path = self._client.download_artifacts(self.run.info.run_id, "report.html")
        return Path(path).read_text()


def test_parameters_are_the_settings_of_the_job_by_their_names_with_dots() -> None:
    found = parameters_of(job_of(fleet={"local": {}, "workers": 2}))
    assert found["recipe"] == "translate"
    assert found["train.batch"] == "64 tokens"
    assert found["train.schedule.constant.rate"] == "0.1"
    assert found["fleet.workers"] == "2"
    assert found["data.train"].startswith('[{"bitext"')
    assert not {"train.clip", "store", "environment", "report.mlflow"} & found.keys()


def test_metrics_have_the_speed_and_not_every_span() -> None:
    values = {**MEASURED, "tokens": 640.0, "step_seconds": 2.0, "forward_seconds": 1.5, "x%y": 1.0}
    found = metrics_of(Point("train", 1, 3, 0.0, values), "tokens")
    assert found["train.tokens_per_second"] == 320.0
    assert found["train.loss"] == MEASURED["loss"]
    assert found["train.x_y"] == 1.0
    assert not {"train.tokens", "train.forward_seconds"} & found.keys()
    assert metrics_of(Point("valid", 1, 3, 0.0, {"bleu": 9.0}), "tokens") == {"valid.bleu": 9.0}


def test_a_run_is_mirrored_up_to_its_newest_checkpoint_and_to_its_end_when_it_ends(
    directory_store: Store, uri: str, tmp_path: Path
) -> None:
    run = new_run(directory_store, job_of())
    train(run, 1, 0, 10, 0.0)
    opened = Mirror(run, uri)
    assert not opened.look()
    assert Seen(run, uri).history("train.loss") == {}
    save(run, tmp_path, 6)
    assert not opened.look()
    assert list(Seen(run, uri).history("train.loss")) == [1, 2, 3, 4, 5, 6]
    run.finish(Result("finished", "reached 10 steps", 10, 5.0, {"valid.bleu": 10.0}))
    assert opened.look()
    seen = Seen(run, uri)
    assert seen.history("train.loss") == {step: float(step) for step in range(1, 11)}
    assert seen.history("train.tokens_per_second") == dict.fromkeys(range(1, 11), 128.0)
    assert seen.history("valid.bleu") == {10: 10.0}
    assert seen.run.data.params["train.batch"] == "64 tokens"
    assert (seen.run.info.run_name, seen.run.info.status) == (run.name, "FINISHED")
    assert seen.run.data.tags["packtrain.result"] == "finished: reached 10 steps"
    assert run.name in seen.report()


def test_steps_that_a_restart_discarded_are_not_in_mlflow(directory_store: Store, uri: str, tmp_path: Path) -> None:
    run = new_run(directory_store, job_of())
    train(run, 1, 0, 9, 100.0)
    save(run, tmp_path, 6)
    opened = Mirror(run, uri)
    opened.look()
    train(run, 2, 6, 12, 200.0)
    opened.look()  # step 6 is still the newest checkpoint
    run.finish(Result("failed", "no machine", 12, 5.0))
    assert opened.look()
    wanted = {step: (100.0 if step <= 6 else 200.0) + step for step in range(1, 13)}
    assert Seen(run, uri).history("train.loss") == wanted
    assert Seen(run, uri).history("train.loss") == {
        point.step: point.values["loss"] for point in read_points(run) if point.kind == "train"
    }
    assert Seen(run, uri).run.info.status == "FAILED"


def test_a_resumed_run_continues_the_same_run_of_mlflow(directory_store: Store, uri: str, tmp_path: Path) -> None:
    """Also one that was stopped after steps that it then made again, and whose job was changed."""
    run = new_run(directory_store, job_of())
    train(run, 1, 0, 8, 0.0)
    save(run, tmp_path, 6)
    run.finish(Result("stopped", "stopped by user", 8, 5.0))
    assert Mirror(run, uri).look()
    assert Seen(run, uri).run.info.status == "KILLED"

    settings = run.job.train.model_validate({**run.job.train.model_dump(), "duration": "20 steps"})
    run = run.changed(run.job.model_copy(update={"train": settings}))
    run.put_job()
    run.clear_end()
    train(run, 2, 6, 20, 0.0)
    save(run, tmp_path, 20, generation=2)
    for _ in range(2):  # the first is killed, as it were
        opened = Mirror(run, uri)
        assert not opened.look()
    seen = Seen(run, uri)
    assert seen.history("train.loss") == {step: float(step) for step in range(1, 21)}
    assert seen.history("valid.bleu") == {8: 8.0, 20: 20.0}
    assert seen.run.info.status == "RUNNING"
    assert seen.run.data.params["train.duration"] == "10 steps"
    assert seen.run.data.tags["packtrain.changed.train.duration"] == "20 steps"


def test_a_run_that_somebody_deleted_in_mlflow_is_made_again(directory_store: Store, uri: str) -> None:
    run = new_run(directory_store, program_job())
    Mirror(run, uri).look()
    first = Seen(run, uri).run.info.run_id
    client(uri).delete_run(first)
    Mirror(run, uri).look()
    second = Seen(run, uri).run.info.run_id
    assert second != first
    client(uri).delete_run(second)
    run.store.put(run.key("mlflow.json"), b"what?")  # nor does a damaged record stop it
    Mirror(run, uri).look()
    assert run.mirrored() is not None
    assert Seen(run, uri).run.info.run_id not in (first, second)


def test_a_run_of_mlflow_that_is_no_mirror_is_not_changed(directory_store: Store, uri: str) -> None:
    """Whoever writes the store could name any run there: the mirror has this person's rights."""
    run = new_run(directory_store, program_job())
    Mirror(run, uri).look()
    mirrored = run.mirrored()
    assert mirrored is not None
    other = client(uri).create_run(client(uri).create_experiment("other")).info.run_id
    run.put_mirrored(replace(mirrored, run=other))
    Mirror(run, uri).look()
    mirrored = run.mirrored()
    assert mirrored is not None and mirrored.run != other
    assert client(uri).get_run(other).data.params == {}


# Without MLflow.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_LAST_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_away_costs_a_warning_without_its_keys(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hush-hush-1")
    run = new_run(directory_store, job_of())
    run.propose(a_generation(1, "a"))
    run.finish(Result("finished", "done", 1, 1.0))
    follow_as_node(run, f"http://127.0.0.1:{closed_port()}/hush-hush-1", "a")
    events = sorted(run.events().read(), key=lambda event: event.time)
    said = [event.text for event in events if event.kind == "warning"]
    assert len(said) == 2  # each once, however often it was tried
    assert said[0].startswith("cannot mirror to MLflow: ")
    assert said[1].endswith(f"`packtrain mirror {run.name}` mirrors the rest")
    assert "hush" not in " ".join(said)
    assert "***" in said[0]


def test_without_the_package_there_is_one_warning(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    run, said = new_run(directory_store, job_of()), list[str]()
    assert not follow(run, "http://127.0.0.1:1", said.append)
    assert len(said) == 1
    assert said[0].startswith(f"mlflow is not installed on {socket.gethostname()}; `pip install")
    assert said[0].endswith(f"`packtrain mirror {run.name}` where it is")


def test_a_node_that_is_not_the_first_anymore_leaves_the_mirror_to_the_one_that_is(
    directory_store: Store, uri: str
) -> None:
    run = new_run(directory_store, job_of())
    run.propose(Generation(1, (Member("b", "127.0.0.1", 1), Member("a", "127.0.0.1", 1)), 29500, "start"))
    follow_as_node(run, uri, "a")  # returns
    assert not Path(uri).exists()


# The command.


def test_the_command_mirrors_a_run_that_is_over(directory_store: Store, uri: str) -> None:
    run = new_run(directory_store, job_of())
    train(run, 1, 0, 3, 0.0)
    run.finish(Result("finished", "reached 3 steps", 3, 5.0))
    command = ["mirror", run.name, "--store", directory_store.url]
    refused = CliRunner().invoke(app, command)
    assert str(refused.exception) == f"{run.name} does not say where MLflow is; pass --mlflow URI"
    done = CliRunner().invoke(app, [*command, "--mlflow", uri])
    assert (done.exit_code, done.output) == (0, f"{run.name} is in MLflow\n")
    assert list(Seen(run, uri).history("train.loss")) == [1, 2, 3]


def test_where_mlflow_is_is_taken_only_from_a_job_that_this_person_knows(directory_store: Store, uri: str) -> None:
    """Whoever writes the store could send this person's keys for MLflow elsewhere."""
    run = new_run(directory_store, job_of(report={"mlflow": uri}))
    run.finish(Result("finished", "done", 3, 5.0))
    command = ["mirror", run.name, "--store", directory_store.url]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, Mistake)
    assert "--trust-code" in str(refused.exception)
    assert CliRunner().invoke(app, [*command, "--trust-code"]).exit_code == 0
    assert Seen(run, uri).run.info.status == "FINISHED"
