from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from packtrain.fleet.mpi import MpiSettings
from packtrain.fleet.slurm import SlurmSettings
from packtrain.fleet.ssh import SshSettings
from packtrain.job import Job
from packtrain.job.kinds import FLEETS, word_of
from packtrain.job.part import faults
from packtrain.units import Machines


def job_with(fleet: Any) -> Job:
    return Job.model_validate({"name": "job", "program": ["train.py"], "fleet": fleet})


@pytest.mark.parametrize("word", ["ssh", "mpi"])
def test_a_fleet_uses_all_hosts_unless_the_job_says_how_many(word: str) -> None:
    assert job_with({word: {"hosts": ["a", "b", "c"]}}).fleet.kind.machines == Machines(3, 3)
    assert job_with({word: {"hosts": ["a", "b", "c"], "machines": "1..2"}}).fleet.kind.machines == Machines(1, 2)


@pytest.mark.parametrize(
    "kind",
    [
        SshSettings(hosts=("gpu-a", "me@gpu-b:2222", "[fe80::1]"), python="~/train/bin/python", bundle="./wheels"),
        MpiSettings(hosts=("a", "me@b"), interface="ib0", options=("--mca", "x", "y")),
        SlurmSettings.model_validate({"machines": "2..4", "time": "4 h", "gpus": 2, "options": ["--constraint=a100"]}),
    ],
    ids=lambda kind: type(kind).__name__,
)
def test_a_fleet_reads_back_what_it_writes(kind: Any) -> None:
    written = job_with({word_of(FLEETS, kind): kind.model_dump(mode="json")}).model_dump_json()
    assert Job.model_validate_json(written).fleet.kind == kind


@pytest.mark.parametrize(
    ("fleet", "place", "words"),
    [
        ({"ssh": {}}, ("ssh", "hosts"), "is required"),
        ({"ssh": {"hosts": []}}, ("ssh", "hosts"), "at least one host"),
        ({"ssh": {"hosts": ["a", "a"]}}, ("ssh", "hosts"), "lists a host twice"),
        ({"ssh": {"hosts": ["a"], "machines": 2}}, ("ssh", "machines"), "asks for 2 machines, but hosts lists only 1"),
        ({"ssh": {"hosts": ["-oProxyCommand=x"]}}, ("ssh", "hosts", 0), "is not a host"),
        ({"ssh": {"hosts": ["-x@a"]}}, ("ssh", "hosts", 0), "is not a host"),
        ({"ssh": {"hosts": ["me@-oProxyCommand=x"]}}, ("ssh", "hosts", 0), "is not a host"),
        ({"mpi": {"hosts": ["-x"]}}, ("mpi", "hosts", 0), "is not a host"),
        ({"local": {"machines": "1..1025"}}, ("local", "machines"), "at most 1,024: each is a process"),
        ({"local": {}, "workers": 1_000_000}, ("workers",), "must be at most 1024"),
        ({"ssh": {"hosts": ["a b"]}}, ("ssh", "hosts", 0), "is not a host"),
        ({"ssh": {"hosts": ["a"], "python": "python; rm"}}, ("ssh", "python"), "is not the path of a Python"),
        ({"mpi": {"hosts": ["a:22"]}}, ("mpi", "hosts", 0), "takes no port"),
        ({"slurm": {"options": ["-w x"]}}, ("slurm", "options", 0), "one long option"),
        ({"slurm": {"options": ["--a\n--b"]}}, ("slurm", "options", 0), "one long option"),
        ({"slurm": {"time": "1 min"}}, ("slurm", "time"), "at least 5 min"),
        ({"slurm": {"partition": "--x"}}, ("slurm", "partition"), "is not a name"),
    ],
)
def test_impossible_settings_are_refused_with_their_place(fleet: Any, place: tuple[str | int, ...], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        job_with(fleet)
    [(where, text, _)] = faults(refused.value)
    assert where == ("fleet", *place)
    assert words in text
