"""The whole way with real processes: from a job file to a translated sentence, through every interruption."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from packtrain.errors import NotFound
from packtrain.node.telemetry import rank_of
from packtrain.observe.history import read_points
from packtrain.run.checkpoint import committed
from packtrain.run.records import Point
from packtrain.run.run import Run
from packtrain.store import open_store
from packtrain.store.errors import StoreAway
from parts.s3 import S3Server
from parts.sandbox import EXAMPLES, Sandbox, assert_nothing_left, kill, make_sandbox, wait_until, weights

STEPS = 160
JOB = f"""
name: small
recipe: RECIPE
store: STORE
data:
  train: [{{bitext: [{EXAMPLES}/data/en-de/valid.en.gz, {EXAMPLES}/data/en-de/valid.de.gz]}}]
  valid: [{{bitext: [valid.en, valid.de]}}]
  vocabulary: 500
model: {{size: tiny, width: 32, heads: 2, feedforward: 64, encoder_layers: 1, decoder_layers: 1, dropout: 0.1}}
train:
  duration: {STEPS} steps
  batch: 200 tokens
  schedule: {{noam: {{warmup: 10 steps, peak: 0.003}}}}
  label_smoothing: 0.1
  ema: 0.9
evaluate: {{every: 60 steps, samples: 20, beam: 2}}
checkpoint: {{every: 20 steps, keep_last: 2, keep_best: 1}}
fleet: {{local: {{}}, workers: 2}}
"""


def translate_sandbox(directory: Path, store: str | None = None, recipe: str = "translate") -> Sandbox:
    sandbox = make_sandbox(directory, store)
    (directory / "job.yaml").write_text(JOB.replace("STORE", sandbox.store).replace("RECIPE", recipe))
    for language in ("en", "de"):
        with gzip.open(EXAMPLES / f"data/en-de/test.{language}.gz", "rb") as lines:
            (directory / f"valid.{language}").write_bytes(b"".join(next(lines) for _ in range(100)))
    return sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = translate_sandbox(tmp_path)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def uninterrupted(training: None, processes: None, tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Return a finished run: tests read it, and compare interrupted runs with it."""
    sandbox = translate_sandbox(tmp_path_factory.mktemp("uninterrupted"))
    done = sandbox.packtrain("run", "job.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    return sandbox


def start(sandbox: Sandbox, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command and leave it running; its output is in output.txt."""
    with (sandbox.directory / "output.txt").open("wb") as output:
        command = [sys.executable, "-m", "packtrain", *arguments]
        return subprocess.Popen(command, cwd=sandbox.directory, env=sandbox.environment, stdout=output, stderr=output)


def wait_for_commit(sandbox: Sandbox, generation: int) -> None:
    """Wait for a checkpoint of that generation or a later one."""

    def reached() -> bool:
        with suppress(NotFound, StoreAway):  # the run, or the store, has yet to be created
            return any(one.generation >= generation for one in committed(sandbox.run()))
        return False

    wait_until(reached, f"a checkpoint of generation {generation}")


def history(run: Run) -> list[tuple[str, int, dict[str, float]]]:
    """Return everything that must be the same in every run: kinds, steps and all values that are not times."""

    def exact(point: Point) -> dict[str, float]:
        return {name: value for name, value in point.values.items() if not name.endswith("seconds")}

    return [(point.kind, point.step, exact(point)) for point in read_points(run) if point.kind != "start"]


def assert_same_as(oracle: Sandbox, sandbox: Sandbox) -> None:
    assert history(sandbox.run()) == history(oracle.run())
    assert weights(sandbox.run()) == weights(oracle.run())


# A run that nothing interrupts.


def test_a_job_becomes_a_model(uninterrupted: Sandbox) -> None:
    run = uninterrupted.run()
    result = run.result()
    assert result is not None
    assert (result.status, result.step) == ("finished", STEPS)
    assert set(result.scores) == {"valid.loss", "valid.bleu", "valid.chrf"}
    assert result.signatures["valid.bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    kinds = [(kind, step) for kind, step, _ in history(run)]
    assert [step for kind, step in kinds if kind == "train"] == list(range(1, STEPS + 1))
    assert [step for kind, step in kinds if kind == "valid"] == [60, 120, STEPS]
    assert not [step for kind, step in kinds if kind == "test"]  # the job has no test split


def test_the_folder_of_a_run_has_the_documented_names(uninterrupted: Sandbox) -> None:
    store = open_store(uninterrupted.store)
    names = {entry.key.removeprefix("runs/small-1/").split("/")[0] for entry in store.list("runs/small-1")}
    assert names == {
        "job.json", "code.tar.zst", "pack.txt", "launches", "proposers", "generations", "nodes", "events", "telemetry",
        "time", "metrics", "logs", "tensorboard", "checkpoints", "plan.json", "source.json", "result.json",
        "report.html",
    }  # fmt: skip


def test_the_last_two_checkpoints_and_the_best_are_kept(uninterrupted: Sandbox) -> None:
    kept = committed(uninterrupted.run())
    assert kept[-1].step == STEPS
    assert len(kept) <= 3
    assert {one.step for one in kept} <= set(range(20, STEPS + 1, 20))
    assert {file.name for file in kept[-1].files} == {
        "model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json",
    }  # fmt: skip


def test_show_ls_and_logs_read_the_run(uninterrupted: Sandbox) -> None:
    shown = json.loads(uninterrupted.here("show", "--json").stdout)
    assert (shown["run"], shown["state"], shown["step"]) == ("small-1", "finished", STEPS)
    assert {"generation", "checkpoint", "machine"} <= {event["kind"] for event in shown["events"]}
    assert [one["run"] for one in json.loads(uninterrupted.here("ls", "--json").stdout)] == ["small-1"]
    assert "small-1" in uninterrupted.here("ls").stdout
    logs = uninterrupted.here("logs", "small", "--rank", "0").stdout
    assert "checkpoint: committed" in logs
    assert all(line.startswith("[rank 0]") for line in logs.splitlines())


def test_the_report_stands_alone(uninterrupted: Sandbox) -> None:
    page = open_store(uninterrupted.store).get("runs/small-1/report.html").decode()
    assert "small-1" in page
    assert "<svg" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_tensorboard_reads_the_losses(uninterrupted: Sandbox) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(uninterrupted.store) / "runs/small-1/tensorboard"))
    events.Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    expected = [values["loss"] for kind, _, values in history(uninterrupted.run()) if kind == "train"]
    assert losses == pytest.approx(expected)


def test_the_model_translates(uninterrupted: Sandbox) -> None:
    done = uninterrupted.here("predict", "small", "Open the file.", "", "--json")
    assert done.exit_code == 0, done.output
    outputs = json.loads(done.stdout)
    assert [one["input"] for one in outputs] == ["Open the file.", ""]
    assert outputs[0]["output"]
    assert outputs[1]["output"] == ""


def test_resuming_a_finished_run_does_nothing(uninterrupted: Sandbox) -> None:
    before = history(uninterrupted.run())
    done = uninterrupted.here("resume", "small")
    assert (done.exit_code, done.stdout) == (0, "small-1 is already complete\n")
    assert history(uninterrupted.run()) == before


def test_packing_again_uses_the_pack_in_the_store(uninterrupted: Sandbox) -> None:
    before = open_store(uninterrupted.store).folders("packs/")
    assert "already exists" in uninterrupted.here("pack", str(uninterrupted.directory / "job.yaml")).stdout
    assert open_store(uninterrupted.store).folders("packs/") == before


# Interruptions.


def test_a_run_that_is_detached_killed_stopped_and_resumed_ends_bit_for_bit_the_same(
    tmp_path: Path, uninterrupted: Sandbox
) -> None:
    """Everything happens to one run, slowed down so that it has not ended before."""
    sandbox = translate_sandbox(tmp_path, recipe="paced:Paced\ncode: code")
    sandbox.pace(0.1)
    client = start(sandbox, "run", "job.yaml")
    wait_for_commit(sandbox, 1)
    detach(sandbox, client)
    kill_a_worker(sandbox)
    stop(sandbox)
    client = start(sandbox, "resume")
    wait_for_commit(sandbox, 3)
    kill_everything(sandbox, client)
    sandbox.pace(0)
    resumed = sandbox.packtrain("resume")
    assert resumed.returncode == 0, resumed.stderr
    assert [one.number for one in sandbox.run().generations()] == [1, 2, 3, 4]
    assert_same_as(uninterrupted, sandbox)
    assert_nothing_left(sandbox)


def detach(sandbox: Sandbox, client: subprocess.Popen[bytes]) -> None:
    """Ctrl-C ends the command and not the run."""
    client.send_signal(signal.SIGINT)
    assert client.wait(timeout=60) == 130
    output = (sandbox.directory / "output.txt").read_text()
    assert "Detached from small-1; it keeps running." in output
    for verb in ("follow", "show", "stop"):
        assert f"packtrain {verb} small-1\n" in output


def kill_a_worker(sandbox: Sandbox) -> None:
    """The node starts another generation."""
    kill([one for one in sandbox.processes() if rank_of(one) is not None][-1:])
    wait_for_commit(sandbox, 2)


def stop(sandbox: Sandbox) -> None:
    stopped = sandbox.here("stop")
    assert (stopped.exit_code, stopped.stderr) == (0, "")
    assert "  resume:  packtrain resume small-1\n" in stopped.stdout
    result = sandbox.run().result()
    assert result is not None
    assert result.status == "stopped"
    assert 40 <= result.step < STEPS
    assert sandbox.here("show").exit_code == 103
    assert_nothing_left(sandbox)


def kill_everything(sandbox: Sandbox, client: subprocess.Popen[bytes]) -> None:
    """Only what was committed is left."""
    kill(sandbox.processes())
    client.wait(timeout=60)
    wait_until(lambda: not sandbox.processes(), "all processes to end", 20)
    shown = sandbox.here("show", "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["state"]) == (101, "interrupted")


@pytest.mark.usefixtures("processes")
def test_ctrl_c_stops_a_run_in_the_foreground(sandbox: Sandbox) -> None:
    client = start(sandbox, "run", "job.yaml", "--foreground", "--set", "train.duration=1000000 steps")
    wait_for_commit(sandbox, 1)
    client.send_signal(signal.SIGINT)
    assert client.wait(timeout=60) == 103
    result = sandbox.run().result()
    assert result is not None
    assert result.status == "stopped"
    assert_nothing_left(sandbox)


# Other circumstances.


def test_another_number_of_workers_sees_the_same_batches(sandbox: Sandbox, uninterrupted: Sandbox) -> None:
    steps = 50
    change = ("--set", "fleet.workers=1", "--set", f"train.duration={steps} steps", "--set", "evaluate.every=null")
    done = sandbox.packtrain("run", "job.yaml", *change)
    assert done.returncode == 0, done.stderr
    theirs = [values for kind, _, values in history(uninterrupted.run()) if kind == "train"][:steps]
    ours = [values for kind, _, values in history(sandbox.run()) if kind == "train"]
    assert [values["tokens"] for values in ours] == [values["tokens"] for values in theirs]
    # Dropout differs by rank, so losses agree only roughly; the first is measured before any update.
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=0.05)


def test_a_run_in_a_bucket_is_the_same_and_writes_no_secret(
    tmp_path: Path, s3_environment: S3Server, s3_location: str, uninterrupted: Sandbox
) -> None:
    sandbox = translate_sandbox(tmp_path, f"{s3_location}/runs-of-a-test")
    done = sandbox.packtrain("run", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert_same_as(uninterrupted, sandbox)
    secret = s3_environment.secret_key.encode()
    store = open_store(sandbox.store)
    for entry in store.list():
        assert secret not in store.get(entry.key), f"{entry.key} holds the secret"
    assert secret not in done.stdout.encode() + done.stderr.encode()


@pytest.mark.usefixtures("processes")
def test_a_loss_that_is_not_finite_fails_the_run_without_another_try(sandbox: Sandbox) -> None:
    done = sandbox.packtrain(
        "run", "job.yaml", "--set", "train.schedule={constant: {rate: 1.0e30}}", "--set", "checkpoint.every=1 steps"
    )
    assert done.returncode == 100
    result = sandbox.run().result()
    assert result is not None
    assert "is not finite" in result.reason
    assert f"step {result.step + 1} " in result.reason
    assert len(sandbox.run().generations()) == 1
