"""The whole way, with real processes: a job file to a translated sentence, through every interruption."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from packtrain.run.checkpoint import committed
from packtrain.run.records import Point
from packtrain.run.run import Run, open_run
from packtrain.store import open_store
from parts.s3 import S3Server

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS = 240
SMALL_JOB = f"""
name: small
recipe: translate
store: STORE
data:
  train: [{{bitext: [{EXAMPLES}/data/en-de/valid.en.gz, {EXAMPLES}/data/en-de/valid.de.gz]}}]
  valid: [{{bitext: [{EXAMPLES}/data/en-de/test.en.gz, {EXAMPLES}/data/en-de/test.de.gz]}}]
  vocabulary: 500
model: {{size: tiny, width: 32, heads: 2, feedforward: 64, encoder_layers: 1, decoder_layers: 1, dropout: 0.1}}
train:
  duration: {STEPS} steps
  batch: 600 tokens
  schedule: {{noam: {{warmup: 10 steps, peak: 0.003}}}}
  label_smoothing: 0.1
  ema: 0.9
evaluate: {{every: 100 steps, samples: 20, beam: 2}}
checkpoint: {{every: 30 steps, keep_last: 2, keep_best: 1}}
fleet: {{local: {{}}, workers: 2}}
"""


@dataclass(frozen=True)
class Place:
    """A directory to run commands in, with a store and a cache of its own."""

    directory: Path
    store: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PACKTRAIN_CACHE": str(self.directory / "cache"), "PACKTRAIN_STORE": self.store}

    def packtrain(self, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "packtrain", *arguments]
        return subprocess.run(
            command, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=timeout
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "packtrain", *arguments]
        output = (self.directory / "output.txt").open("wb")
        return subprocess.Popen(command, cwd=self.directory, env=self.environment, stdout=output, stderr=output)

    def run(self) -> Run:
        return open_run(open_store(self.store), None)

    def processes(self) -> list[psutil.Process]:
        """All processes that belong to runs of this place."""
        found = []
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("PACKTRAIN_CACHE") == str(self.directory / "cache"):
                found.append(process)
        return found


def make_place(directory: Path, store: str | None = None) -> Place:
    place = Place(directory, store or str(directory / "store"))
    (directory / "job.yaml").write_text(SMALL_JOB.replace("STORE", place.store))
    return place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The run that all interrupted ones are compared with."""
    place = make_place(tmp_path_factory.mktemp("oracle"))
    done = place.packtrain("run", "job.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    return place


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def history(run: Run) -> list[tuple[str, int, dict[str, float]]]:
    """What must be the same in every run: kinds, steps and all values that are not times."""

    def exact(point: Point) -> dict[str, float]:
        return {name: value for name, value in point.values.items() if not name.endswith("seconds")}

    return [(point.kind, point.step, exact(point)) for point in run.metrics() if point.kind != "start"]


def weights(run: Run) -> dict[str, str]:
    """The hashes of the last checkpoint's tensors."""
    last = committed(run)[-1]
    return {file.name: file.sha256 for file in last.files if file.name.endswith(".safetensors")}


def assert_same_as(oracle: Place, place: Place) -> None:
    assert history(place.run()) == history(oracle.run())
    assert weights(place.run()) == weights(oracle.run())


def assert_nothing_left(place: Place) -> None:
    wait_until(lambda: not place.processes(), "all processes to end", 20)
    assert list((place.directory / "cache" / "nodes").iterdir()) == []


def committed_step(place: Place) -> int:
    try:
        return max((one.step for one in committed(place.run())), default=0)
    except Exception:  # the run is not there yet
        return 0


def test_a_job_becomes_a_model(uninterrupted: Place) -> None:
    run = uninterrupted.run()
    result = run.result()
    assert result is not None
    assert (result.status, result.step) == ("finished", STEPS)
    assert set(result.scores) == {"valid.loss", "valid.bleu", "valid.chrf"}
    assert result.signatures["valid.bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    kinds = [(kind, step) for kind, step, _ in history(run)]
    assert [step for kind, step in kinds if kind == "train"] == list(range(1, STEPS + 1))
    assert [step for kind, step in kinds if kind == "valid"] == [100, 200, 240]
    assert not [step for kind, step in kinds if kind == "test"]  # there is no such split


def test_the_folder_has_what_the_design_names(uninterrupted: Place) -> None:
    store = open_store(uninterrupted.store)
    names = {entry.key.removeprefix("runs/small-1/").split("/")[0] for entry in store.list("runs/small-1")}
    assert names == {
        "job.json", "code.tar.zst", "pack.txt", "proposers", "generations", "nodes", "events", "telemetry",
        "time", "metrics", "logs", "tensorboard", "checkpoints", "result.json", "report.html",
    }  # fmt: skip


def test_checkpoints_are_kept_as_the_job_says(uninterrupted: Place) -> None:
    kept = committed(uninterrupted.run())
    assert kept[-1].step == STEPS
    assert len(kept) <= 3
    assert {one.step for one in kept} <= {*range(30, 241, 30), 100, 200}
    assert {file.name for file in kept[-1].files} == {
        "model.safetensors", "average.safetensors", "optimizer.safetensors", "state.json",
    }  # fmt: skip


def test_commands_tell_of_the_run(uninterrupted: Place) -> None:
    shown = json.loads(uninterrupted.packtrain("show", "--json").stdout)
    assert (shown["run"], shown["state"], shown["step"]) == ("small-1", "finished", STEPS)
    assert {"generation", "checkpoint", "machine"} <= {event["kind"] for event in shown["events"]}
    listed = json.loads(uninterrupted.packtrain("ls", "--json").stdout)
    assert [one["run"] for one in listed] == ["small-1"]
    assert "small-1" in uninterrupted.packtrain("ls").stdout
    logs = uninterrupted.packtrain("logs", "small", "--rank", "0").stdout
    assert "checkpoint: committed" in logs
    assert all(line.startswith("[rank 0]") for line in logs.splitlines())


def test_its_report_stands_alone(uninterrupted: Place) -> None:
    page = open_store(uninterrupted.store).get("runs/small-1/report.html").decode()
    assert "small-1" in page
    assert "<svg" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_tensorboard_reads_its_events(uninterrupted: Place) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(uninterrupted.store) / "runs/small-1/tensorboard"))
    events.Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    expected = [values["loss"] for kind, _, values in history(uninterrupted.run()) if kind == "train"]
    assert losses == pytest.approx(expected)


def test_the_model_translates(uninterrupted: Place) -> None:
    done = uninterrupted.packtrain("predict", "small", "Open the file.", "", "--json")
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    assert [one["input"] for one in outputs] == ["Open the file.", ""]
    assert outputs[1]["output"] == ""
    again = uninterrupted.packtrain("predict", "small-1", "Open the file.")
    assert again.stdout == outputs[0]["output"] + "\n"


def test_resuming_a_finished_run_does_nothing(uninterrupted: Place) -> None:
    before = history(uninterrupted.run())
    done = uninterrupted.packtrain("resume", "small")
    assert done.returncode == 0
    assert done.stdout == "small-1 is already complete\n"
    assert history(uninterrupted.run()) == before


def test_a_stopped_run_goes_on_bit_for_bit(place: Place, uninterrupted: Place) -> None:
    started = place.packtrain("run", "job.yaml", "--detach")
    assert started.returncode == 0
    assert "packtrain stop small-1" in started.stdout
    wait_until(lambda: committed_step(place) >= 30, "the first checkpoint")
    stopped = place.packtrain("stop")
    assert stopped.returncode == 0
    result = place.run().result()
    assert result is not None
    assert result.status == "stopped"
    assert 30 <= result.step < STEPS
    assert place.packtrain("show").returncode == 103
    assert_nothing_left(place)

    resumed = place.packtrain("resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_as(uninterrupted, place)
    assert_nothing_left(place)


def test_a_killed_worker_is_replaced_and_nothing_changes(place: Place, uninterrupted: Place) -> None:
    client = place.start("run", "job.yaml")
    wait_until(lambda: committed_step(place) >= 30, "the first checkpoint")
    workers = [one for one in place.processes() if "packtrain.train" in one.cmdline()]
    workers[-1].send_signal(signal.SIGKILL)
    assert client.wait(timeout=150) == 0
    assert [one.number for one in place.run().generations()] == [1, 2]
    assert_same_as(uninterrupted, place)
    assert_nothing_left(place)


def test_killing_everything_loses_nothing_that_was_committed(place: Place, uninterrupted: Place) -> None:
    client = place.start("run", "job.yaml")
    wait_until(lambda: committed_step(place) >= 30, "the first checkpoint")
    for process in place.processes():
        process.kill()
    client.wait(timeout=60)
    wait_until(lambda: not place.processes(), "all processes to end", 20)
    shown = place.packtrain("show", "--json")
    assert shown.returncode == 101
    assert json.loads(shown.stdout)["state"] == "interrupted"

    assert place.packtrain("resume").returncode == 0
    assert_same_as(uninterrupted, place)


def test_leaving_with_control_c_does_not_end_the_run(place: Place) -> None:
    client = place.start("run", "job.yaml")
    wait_until(lambda: committed_step(place) >= 30, "the first checkpoint")
    client.send_signal(signal.SIGINT)
    assert client.wait(timeout=60) == 101
    output = (place.directory / "output.txt").read_text()
    assert "Detached from small-1; it keeps running." in output
    for verb in ("logs -f", "show", "stop"):
        assert f"packtrain {verb} small-1" in output
    wait_until(lambda: place.run().result() is not None, "the end of the run", 120)
    result = place.run().result()
    assert result is not None
    assert result.status == "finished"
    assert_nothing_left(place)


def test_in_the_foreground_control_c_stops_it(place: Place) -> None:
    client = place.start("run", "job.yaml", "--foreground", "--set", "train.duration=1000000 steps")
    wait_until(lambda: committed_step(place) >= 30, "the first checkpoint")
    client.send_signal(signal.SIGINT)
    assert client.wait(timeout=60) == 103
    result = place.run().result()
    assert result is not None
    assert result.status == "stopped"
    assert_nothing_left(place)


def test_another_number_of_workers_sees_the_same_batches(place: Place, uninterrupted: Place) -> None:
    done = place.packtrain("run", "job.yaml", "--set", "fleet.workers=1")
    assert done.returncode == 0, done.stderr
    theirs = [one for one in history(uninterrupted.run()) if one[0] == "train"]
    ours = [one for one in history(place.run()) if one[0] == "train"]
    assert [values["tokens"] for _, _, values in ours] == [values["tokens"] for _, _, values in theirs]
    # Drop-out differs by rank, so losses agree only in size; the first comes before any update.
    assert ours[0][2]["loss"] == pytest.approx(theirs[0][2]["loss"], rel=0.05)


def test_a_bucket_serves_as_well_and_no_secret_is_written(
    tmp_path: Path, s3_environment: S3Server, s3_location: str, uninterrupted: Place
) -> None:
    place = make_place(tmp_path, f"{s3_location}/runs-of-a-test")
    done = place.packtrain("run", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert history(place.run()) == history(uninterrupted.run())
    assert weights(place.run()) == weights(uninterrupted.run())
    secret = s3_environment.secret_key.encode()
    store = open_store(place.store)
    for entry in store.list():
        assert secret not in store.get(entry.key), f"{entry.key} holds the secret"
    assert secret not in done.stdout.encode() + done.stderr.encode()


def test_a_loss_that_is_not_a_number_ends_the_run_and_is_not_saved(place: Place) -> None:
    done = place.packtrain(
        "run", "job.yaml", "--set", "train.schedule={constant: {rate: 1.0e30}}", "--set", "checkpoint.every=1 steps"
    )
    assert done.returncode == 100
    result = place.run().result()
    assert result is not None
    assert "is not finite" in result.reason
    assert f"step {result.step + 1} " in result.reason
    assert len(place.run().generations()) == 1


def digest_of(store: str) -> str:
    return hashlib.sha256(b"".join(sorted(entry.key.encode() for entry in open_store(store).list("packs")))).hexdigest()


def test_a_second_run_uses_the_pack_that_is_there(uninterrupted: Place) -> None:
    before = digest_of(uninterrupted.store)
    done = uninterrupted.packtrain("pack", "job.yaml")
    assert "already exists" in done.stdout
    assert digest_of(uninterrupted.store) == before
