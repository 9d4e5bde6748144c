"""Answers about where a run comes from: machines and versions, the job as written, how to repeat it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from pack.corpus import job_of
from packtrain.job.load import load_job
from packtrain.recipes import recipe_defaults
from packtrain.report import finding_json
from packtrain.report.finding import Finding, Rows, Text
from packtrain.report.origin import command_of, job_text, machines, reproduce
from packtrain.run.records import Event, GpuModel, JobSource, Lease, MachineFacts
from parts.runs import a_generation, a_lease, program_job, recipe_job
from report.made import evidence_of, steps_of

VERSIONS = {"packtrain": "1.0-abc", "python": "3.12.1", "torch": "2.13.0", "cuda": "12.8"}


def tables_of(finding: Finding) -> list[Rows]:
    return [one for one in finding.figures if isinstance(one, Rows)]


def pairs_of(table: Rows) -> dict[str, str]:
    rows: Any = table.rows
    return dict(rows)


def machine(name: str, **fields: object) -> Lease:
    given = {"system": "Linux 6", "processor": "EPYC", "cores": 8, "memory_bytes": 64 << 30, "versions": VERSIONS}
    return a_lease(name, facts=MachineFacts(**{**given, **fields}))  # type: ignore[arg-type]


# Machines and versions.


def test_machines_of_one_kind_are_told_together() -> None:
    gpus = (GpuModel("A100", 80_000_000_000),) * 4
    found = machines(evidence_of(leases=[machine(name, gpus=gpus) for name in "abcdef"]))
    assert found.answer == (
        "6 machines, each with 4 x A100 (80.0 GB), 8 cores (EPYC), 68.7 GB RAM;"
        " packtrain 1.0-abc, python 3.12.1, torch 2.13.0, cuda 12.8."
    )
    [hardware, versions] = tables_of(found)
    [row] = hardware.rows
    assert row[0] == "host-of-a, host-of-b, host-of-c, host-of-d and 2 more"
    assert versions.rows == tuple(VERSIONS.items())


def test_machines_that_differ_are_told_apart() -> None:
    old = {**VERSIONS, "torch": "2.12.0"}
    found = machines(evidence_of(leases=[machine("a"), machine("b", cores=4, versions=old), machine("c")]))
    assert found.answer.startswith("3 machines of 2 kinds. They have different versions of torch,")
    assert found.verdict == "note"
    [hardware, versions] = tables_of(found)
    assert [(row[0], row[2]) for row in hardware.rows] == [("host-of-a, host-of-c", "8"), ("host-of-b", "4")]
    assert versions.heads == ("machine", "packtrain", "python", "torch", "cuda")
    assert [(row[0], row[3]) for row in versions.rows] == [("host-of-a, host-of-c", "2.13.0"), ("host-of-b", "2.12.0")]


def test_pods_of_two_generations_are_as_many_machines_as_there_were_at_a_time() -> None:
    generations = (a_generation(1, "a", "b"), a_generation(2, "c", "d"))
    found = machines(evidence_of(leases=[machine(name) for name in "abcd"], generations=generations))
    assert found.answer.startswith("2 machines at a time, each with 8 cores")
    assert found.numbers == {"machines": 2.0}


def test_a_machine_that_came_back_is_one_machine() -> None:
    [first, second] = machine("a"), machine("a")
    assert machines(evidence_of(leases=[first, second])).answer.startswith("1 machine with 8 cores")


def test_without_facts_the_versions_are_those_of_the_checkpoint() -> None:
    found = machines(evidence_of(leases=[a_lease("a")], versions={"torch": "2.13.0"}))
    assert tables_of(found)[0].rows == (("torch", "2.13.0"),)
    assert machines(evidence_of()).verdict == "unknown"


# How to repeat it.


def test_the_job_in_the_report_is_the_job(tmp_path: Path) -> None:
    job = job_of(tmp_path, fleet={"local": {}, "workers": 2}, checkpoint={"every": "1 min"})
    (tmp_path / "job.yaml").write_text(job_text(job))
    assert load_job(tmp_path / "job.yaml", (), recipe_defaults).job == job
    assert job.evaluate.every is None
    assert "every: null" in job_text(job), "the recipe's default is not"
    own = job.model_copy(update={"recipe": "mine:Mine"})
    (tmp_path / "own.yaml").write_text(job_text(own))
    assert load_job(tmp_path / "own.yaml", (), lambda *_: {"train": {"clip": 5.0}}).job == own


def test_a_run_is_repeated_with_its_pack_and_its_digests() -> None:
    evidence = evidence_of(
        steps_of(), recipe_job(), workers=(2, 2), pack="job-abc", job_digest="1" * 64, code_digest="2" * 64,
    )  # fmt: skip
    found = reproduce(evidence)
    command = next(one for one in found.figures if isinstance(one, Text))
    assert command.text == "packtrain run job.yaml --set data.pack=job-abc"
    assert pairs_of(tables_of(found)[0]) == {
        "job": f"sha256 {'1' * 64}", "job and code": f"sha256 {'2' * 64}", "data": "job-abc",
        "fleet": "2 machines, 4 workers in all", "seed": "1",
    }  # fmt: skip


def test_a_run_on_gpus_says_whether_it_was_exact() -> None:
    lease = a_lease("a", facts=MachineFacts(gpus=(GpuModel("A100", 80 << 30),)))
    for exact, row, words in (
        (True, "exact", "the same, bit for bit"),
        (False, "fastest (train.exact: false)", "differ slightly: train.exact was off"),
    ):
        job = recipe_job(train={"exact": exact})
        found = reproduce(evidence_of(steps_of(), job, leases=[lease]))
        assert pairs_of(tables_of(found)[0])["kernels"] == row
        assert words in found.answer
    on_cpus = reproduce(evidence_of(steps_of(), job, leases=[a_lease("a")]))
    assert "bit for bit" in on_cpus.answer, "on CPUs it makes no difference"
    assert "kernels" not in pairs_of(tables_of(on_cpus)[0])


def test_the_job_is_shown_as_it_was_written_with_what_was_set_on_top() -> None:
    text = "# because of the noise\nname: job\n"
    source = JobSource("mine.yaml", text, ("train.seed=7", "train.duration=9 steps"), "c" * 40, 2)
    found = reproduce(evidence_of(steps_of(), recipe_job(), source=source))
    assert finding_json(found)["texts"] == [
        {"title": "command", "text": "packtrain run mine.yaml --set train.seed=7 --set 'train.duration=9 steps'"},
        {"title": "mine.yaml", "text": text},
    ]
    rows = tables_of(found)[0].rows
    assert rows[:2] == (("--set", "train.seed=7"), ("--set", "train.duration=9 steps"))
    assert ("git commit", f"{'c' * 40} and 2 changed files") in rows
    assert "2 files were changed since the commit." in found.evidence


def test_a_run_that_was_resumed_with_other_settings_is_repeated_with_the_last_ones() -> None:
    source = JobSource("job.yaml", "", ("train.duration=9 steps", "train.seed=7", "train.duration=20 steps"))
    changed = Event(1.0, "changed", "train.duration: 9 steps -> 20 steps")
    found = reproduce(evidence_of(steps_of(), recipe_job(), source=source, events=[changed]))
    assert command_of(source) == "packtrain run job.yaml --set train.seed=7 --set 'train.duration=20 steps'"
    assert "bit for bit" not in found.answer
    assert "It was resumed with other settings" in found.evidence[0]


def test_a_long_command_has_a_line_for_each_part() -> None:
    source = JobSource("job.yaml", "", ("model.size=small", "fleet={ssh: {hosts: [a, b]}}"))
    assert command_of(source, "job-0123456789ab").splitlines() == [
        "packtrain run job.yaml \\",
        "    --set model.size=small \\",
        "    --set 'fleet={ssh: {hosts: [a, b]}}' \\",
        "    --set data.pack=job-0123456789ab",
    ]


@pytest.mark.parametrize(("takes", "words"), [("everything", ""), ("weights", " --fresh"), ("ema", " --fresh")])
def test_a_run_that_began_with_another_is_repeated_from_its_checkpoint(takes: str, words: str) -> None:
    parent = {"run": "old-1", "store": "/data/store", "step": 40, "checkpoint": "000000040-000001-0123456789ab"}
    job = recipe_job(parent={**parent, "sha256": "a" * 64, "takes": takes})
    assert (
        command_of(JobSource("job.yaml", ""), job=job) == f"packtrain run job.yaml --from /data/store/old-1:40{words}"
    )


def test_the_code_of_a_program_is_in_the_store() -> None:
    found = reproduce(evidence_of(job=program_job()))
    assert any("runs/job-1/code.tar.zst" in fact for fact in found.evidence)
    assert "bit for bit" not in found.answer


def test_a_command_has_no_characters_that_a_terminal_would_run() -> None:
    text = "a'\x1b[201~\rtouch owned\n\u202e"
    command = command_of(JobSource(text, "", (f"note={text}",)), text).replace("\\\n", "")
    assert command.isprintable()
    assert [words.count("touch owned") for words in shlex.split(command)] == [0, 0, 1, 0, 1, 0, 1]
