"""Nodes on this machine: what is started, and what survives the client."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from packtrain.errors import Mistake
from packtrain.fleet import Fleet, LaunchPlan, fleet_of
from packtrain.fleet.doctor import describe
from packtrain.fleet.local import LocalFleet, LocalSettings
from packtrain.job.kinds import FLEETS, kind_class
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import Processes
from packtrain.store import Store, open_store
from packtrain.units import Machines
from parts.runs import new_run, program_job, recipe_job, write_files
from parts.sandbox import wait_until


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_kind_of_fleet_in_a_job_file_can_be_built() -> None:
    settings: dict[str, dict[str, object]] = {
        "local": {},
        "slurm": {},
        "ssh": {"hosts": ["a"]},
        "mpi": {"hosts": ["a"]},
        "kubernetes": {"image": "train:1"},
        "aws": {"region": "us-east-1", "instances": ["g5.xlarge"], "role": "train"},
        "ibm": {"datacenter": "dal10", "flavor": "AC2_8X60X100", "image": "mine"},
    }
    assert settings.keys() == FLEETS.keys()
    for word, given in settings.items():
        assert isinstance(fleet_of(kind_class(FLEETS, word).model_validate(given)), Fleet)
    assert isinstance(fleet_of(LocalSettings()), LocalFleet)


def test_a_plan_has_the_node_command_for_each_machine(directory_store: Store) -> None:
    run = new_run(directory_store)
    assert directory_store.identity is not None
    command = (
        sys.executable, "-P", "-m", "packtrain", "node", "job-1", "--store", directory_store.url,
        "--store-id", directory_store.identity, "--code", run.code_digest, "--address", "127.0.0.1",
    )  # fmt: skip
    assert LocalFleet(LocalSettings(machines=Machines(3, 3))).plan(run) == [LaunchPlan("this machine", command)] * 3


def test_a_plan_holds_no_secret(s3_store: Store) -> None:
    """The keys are in the environment, where the node finds them too."""
    plan = LocalFleet(LocalSettings()).plan(new_run(s3_store))
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ[variable]
        assert os.environ[variable] not in repr(plan)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("script", "stop", "left"),
    [("", False, 0), ("import time; time.sleep(600)", True, 0), ("raise SystemExit(3)", False, 1)],
    ids=["finished", "stopped", "failed"],
)
def test_the_log_of_a_node_stays_only_if_the_run_failed(
    script: str, stop: bool, left: int, directory_store: Store, own_cache: Path
) -> None:
    run = new_run(directory_store, program_job(fleet={"failures": 0, "workers": 1}), f"import os\n{script}\n")
    fleet = LocalFleet(LocalSettings())
    [node] = fleet.start(run, fleet.plan(run), tied=True)
    if stop:
        wait_until(run.generations, "the first generation")
        run.request_stop("a person asked for it")
    assert node.process.wait(120) == {0: 0, 1: 100}[left] or stop
    result = run.result()
    assert result is not None
    assert result.status == ("failed" if left else "stopped" if stop else "finished"), result
    assert len(list((own_cache / "logs").iterdir())) == left


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_a_recipe_needs_locks_that_processes_share_and_a_program_does_not(
    number: int, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    fleet = LocalFleet(LocalSettings())
    fleet.check(program_job(), directory_store)
    fault = rf"processes cannot share locks in /dev/shm \({os.strerror(number)}\); mount a tmpfs there"
    with pytest.raises(Mistake, match=fault):
        fleet.check(recipe_job(), directory_store)
    with pytest.raises(Mistake, match=fault):
        next(Processes(1).do(abs, [1]))
    found = {one.name: one.detail for one in describe("./store", create_store=False).traits}
    assert found["shared"] == f"processes cannot share locks in /dev/shm ({os.strerror(number)})"


@pytest.mark.usefixtures("processes")
def test_a_cache_that_cannot_be_written_is_refused_before_there_is_a_run(
    tmp_path: Path, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    write_files(tmp_path, {"job.yaml": b"name: mine\nprogram: [train.py]\nstore: ./store\n", "train.py": b""})
    with pytest.raises(Mistake, match="cannot write to this directory; set PACKTRAIN_CACHE"):
        create(check(load(tmp_path / "job.yaml"), PlainProgress(lambda _: None)))
    assert open_store(str(tmp_path / "store")).folders("runs/") == []
