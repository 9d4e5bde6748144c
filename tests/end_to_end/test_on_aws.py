"""Runs on machines of AWS: moto's instances, played by hosts that run the real user data and the real node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from packtrain.run.checkpoint import committed
from packtrain.run.run import Run, open_run
from packtrain.store import Store, open_store
from parts.ec2 import ROLE_SECRET, ROLE_TOKEN, Cloud, Instance, cloud
from parts.s3 import fresh_location
from parts.sandbox import PACE, Sandbox, history, make_sandbox, set_pace, weights

pytestmark = pytest.mark.timeout(900)

SECRET = "canary-of-the-secret"
IMAGE = "ami-12c6146b"  # one that moto has
SLEEP = "import os, time; assert os.environ['TOKEN'] == 'SECRET'; print('has the token', flush=True); time.sleep(600)"


@dataclass
class AwsRun:
    """A client with a job for the cloud, and the run that it starts."""

    cloud: Cloud
    directory: Path
    settings: dict[str, Any]
    store_url: str = field(default_factory=fresh_location)
    variables: dict[str, str] = field(default_factory=dict)

    def write_job(self, failures: int = 3, **changes: Any) -> None:
        """Write a job of the tests' usual recipe, or with a `program`."""
        fleet = {"image": IMAGE, "create_role": True, "instances": ["c5.large"], "python": sys.executable}
        shared = {
            "store": self.store_url,
            "fleet": {"aws": {**fleet, **self.settings}, "workers": 1, "failures": failures},
        }
        job = {"name": self.directory.name}
        if "program" not in changes:
            make_sandbox(self.directory, self.store_url)
            job = yaml.safe_load((self.directory / "job.yaml").read_text())
        (self.directory / "job.yaml").write_text(yaml.safe_dump({**job, **shared, **changes}))

    def environment(self) -> dict[str, str]:
        own = {"PACKTRAIN_CACHE": str(self.directory / "cache"), "PACKTRAIN_STORE": self.store_url}
        return {**os.environ, **self.cloud.environment(), **own, **self.variables}

    def packtrain(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "packtrain", *words]
        done = subprocess.run(command, cwd=self.directory, env=self.environment(), capture_output=True, text=True)
        print(done.stdout, done.stderr)
        return done

    def start(self) -> None:
        done = self.packtrain("run", "job.yaml", "--detach")
        assert done.returncode == 0, done.stderr + done.stdout

    @cached_property
    def store(self) -> Store:
        return open_store(self.store_url)

    @cached_property
    def run(self) -> Run:
        return open_run(self.store, None)

    def status(self) -> str | None:
        result = self.run.result()
        return None if result is None else result.status

    @property
    def machines(self) -> list[Instance]:
        return self.cloud.of(self.run)

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            seen = "\n\n".join(map(str, (self.cloud.errors, *(machine.log for machine in self.machines))))
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}: {seen}"
            time.sleep(0.5)  # one server answers everybody

    def wait_until_gone(self) -> None:
        """Wait until every machine has ended itself, and nobody replaces it; the last one deletes the group."""
        self.wait_for(lambda: not any(machine.is_on for machine in self.machines), "the machines to end")
        assert self.cloud.group_of(self.run) is None

    def assert_nothing_left(self) -> None:
        assert self.packtrain("down").returncode == 0
        assert self.cloud.leftovers(self.run) == []


def canaries(cloud: Cloud) -> list[str]:
    return [SECRET, ROLE_SECRET, ROLE_TOKEN, cloud.bucket.secret_key]


def assert_no_secrets(one: AwsRun) -> None:
    """Nothing that others can read has a secret: command lines, logs, user data, templates, the store."""
    texts = {f"user data of {machine.id}": machine.user_data for machine in one.machines}
    texts |= {f"log of {machine.id}": machine.log for machine in one.machines}
    texts |= {f"processes of {machine.id}": "\n".join(machine.commands) for machine in one.machines}
    data = {entry.key: one.store.get(entry.key, 1 << 30) for entry in one.store.list()}
    assert all(texts.values())
    for canary in canaries(one.cloud):
        assert [name for name, text in texts.items() if canary in text] == []
        assert [name for name, content in data.items() if canary.encode() in content] == []


@pytest.fixture(scope="module")
def region(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with cloud(tmp_path_factory.mktemp("aws"), 4) as made, pytest.MonkeyPatch.context() as monkeypatch:
        made.bucket.enter(monkeypatch)
        made.client("ssm").put_parameter(Name="/team/token", Value=SECRET, Type="SecureString")
        yield made


@pytest.fixture(scope="module")
def scenes(
    region: Cloud, uninterrupted: Sandbox, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """Two scenes run at a time, on machines of their own: they mostly wait."""

    def play(name: str) -> None:
        directory = tmp_path_factory.mktemp("client") / name
        directory.mkdir()
        if name == "taken":
            taken(region, directory, uninterrupted)
        else:
            {"failing": failing, "budget": budget, "altered": altered}[name](region, directory)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(play, name) for name in ("taken", "failing", "budget", "altered")}


def test_a_spot_machine_is_taken_and_replaced_and_the_losses_stay_the_same(scenes: Mapping[str, Future[None]]) -> None:
    scenes["taken"].result()


def test_machines_of_a_failed_run_stay_for_a_while(scenes: Mapping[str, Future[None]]) -> None:
    scenes["failing"].result()


def test_a_machine_takes_a_volume_and_secrets_and_ends_with_the_budget(scenes: Mapping[str, Future[None]]) -> None:
    scenes["budget"].result()


def test_a_machine_that_cannot_start_says_why_and_ends(scenes: Mapping[str, Future[None]]) -> None:
    scenes["altered"].result()


def taken(region: Cloud, directory: Path, uninterrupted: Sandbox) -> None:
    """One of two machines gets the notice and is taken; the group replaces it."""
    pace = region.network.shared / PACE
    given = {"PACE": str(pace), "OMP_NUM_THREADS": "1"}  # as many threads as the other run: sums depend on it
    for name, value in given.items():
        region.client("ssm").put_parameter(Name=f"/team/{name}", Value=value, Type="String")
    settings = {"machines": 2, "spot": True, "instances": ["c5.large", "c5a.large"]}
    one = AwsRun(region, directory, {**settings, "secrets": {name: f"ssm:/team/{name}" for name in given}})
    one.variables.update(given)
    one.write_job(environment=[*given])
    set_pace(pace, 0.2)
    one.start()
    one.wait_for(lambda: max((made.step for made in committed(one.run)), default=0) >= 20, "a checkpoint of step 20")
    _, second = one.machines
    second.warn("events/recommendations/rebalance", {"noticeTime": "2026-01-01T00:00:00Z"})
    one.wait_for(lambda: "committing a checkpoint, and continuing" in second.log, "the early commit")
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 20))
    second.warn("spot/instance-action", {"action": "terminate", "time": end})
    one.wait_for(lambda: not second.is_on, "the machine to leave")
    set_pace(pace, 0.0)
    one.wait_for(one.status, "the end of the run")
    assert one.status() == "finished"
    one.wait_until_gone()
    assert len(one.machines) == 3
    assert [generation.cause for generation in one.run.generations()] == ["start", "preempted"]
    assert history(one.run) == history(uninterrupted.run())
    assert weights(one.run) == weights(uninterrupted.run())
    assert_no_secrets(one)
    one.assert_nothing_left()


def failing(region: Cloud, directory: Path) -> None:
    one = AwsRun(region, directory, {"linger": "4 s"})
    (directory / "bad.py").write_text("raise SystemExit('no such data')\n")
    one.write_job(failures=1, program=["bad.py"], code=".")
    one.start()
    one.wait_for(one.status, "the run to fail")
    assert one.status() == "failed"
    [machine] = one.machines
    one.wait_for(lambda: "this machine stays for 4 s" in machine.log, "the machine to linger")
    assert machine.is_on
    one.wait_until_gone()
    one.assert_nothing_left()


def budget(region: Cloud, directory: Path) -> None:
    """Secrets are only in the environment of the node; the volume outlives the machine."""
    volume = {"name": "data", "size": "1 GB"}
    one = AwsRun(region, directory, {"volume": volume, "secrets": {"TOKEN": "ssm:/team/token"}})
    (directory / "sleep.py").write_text(SLEEP.replace("SECRET", SECRET[::-1]).replace("['TOKEN']", "['TOKEN'][::-1]"))
    one.variables["TOKEN"] = SECRET
    one.write_job(program=["sleep.py"], code=".", environment=["TOKEN"], budget={"hours": 0.01})
    one.start()
    one.wait_for(one.status, "the end of the budget")
    assert one.status() == "stopped"
    one.wait_until_gone()
    [machine] = one.machines
    assert "formatting /dev/loop" in machine.log
    assert "-P +" in machine.scheduled
    assert any("has the token" in line.text for line in one.run.log_lines().read())
    assert_no_secrets(one)
    one.assert_nothing_left()
    assert region.volumes("data_0") == ["available"]
    done = one.packtrain("volume", "snapshot")
    assert "snap-" in done.stdout, done.stderr


def altered(region: Cloud, directory: Path) -> None:
    """What the store has is not what the client has put there: it is not run."""
    one = AwsRun(region, directory, {"linger": "1 s", "python": None})
    (directory / "train.py").write_text("print('trained')\n")
    one.write_job(program=["train.py"], code=".")
    region.has_capacity = False
    try:
        one.start()
        one.store.put(one.run.key("environment.tar"), b"something else")
    finally:
        region.has_capacity = True
    altered = "not what the client has put there"
    one.wait_for(lambda: altered in str(one.run.events().read()), "the machine to say why")
    one.wait_until_gone()
    one.assert_nothing_left()
