"""Answers about the run: faults and their cost, money, predictions, data, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packtrain.observe.status import Cost
from packtrain.pack.manifest import FORMAT, Drops, Manifest, RawText, ShardFile, Split
from packtrain.report.account import checkpoints, compared, data_set, faults, forecast, money
from packtrain.report.finding import Finding, Rows
from packtrain.run.checkpoint import Checkpoint, StoredFile
from packtrain.run.records import Event, Forecast, Point, TimeSpent
from parts.runs import a_lease, program_job, recipe_job
from report.made import evidence_of, generation_of, steps_of, telemetry_of, trained

PLAN = Forecast(
    source="a table of devices", limit="compute", workers=1, steps=400, step_seconds=0.1, units_per_second=640.0,
    seconds=40.0, dollars=None, memory_bytes=1 << 30, parameters=1000, gradient_bytes=4000, checkpoint_bytes=3000,
    duration="10 steps",
)  # fmt: skip


def rows_of(finding: Finding) -> tuple[tuple[str, ...], ...]:
    return next(one for one in finding.figures if isinstance(one, Rows)).rows


def a_checkpoint(step: int) -> Checkpoint:
    files = (StoredFile("model.safetensors", 1000, "0" * 64), StoredFile("optimizer.safetensors", 2000, "0" * 64))
    return Checkpoint(2, f"{step:09d}-000001-abc", step, 1, None, files)


# Faults.


def killed_run() -> tuple[list[Point], list[TimeSpent]]:
    """One step per second, killed at step 28 after the commit of step 20; 3 s later the next generation resumes."""
    ones = [replace(trained(step, forward=0.93), time=float(step)) for step in range(1, 29)]
    again = [replace(trained(step, forward=0.93, generation=2), time=step + 11.0) for step in range(21, 41)]
    starts = [Point("start", 1, 0, 0.0, {}), Point("start", 2, 20, 31.0, {})]
    spent = [TimeSpent(28.0, 1, 0, 28, {"forward": 28.0}), TimeSpent(51.0, 2, 0, 40, {"start": 1.0, "forward": 20.0})]
    return [*starts, *ones, *again], spent


def test_a_restart_costs_its_recovery_and_the_steps_that_are_made_again() -> None:
    points, spent = killed_run()
    generations = (
        generation_of(2),
        generation_of(2, number=2, cause="program", reason="rank 1 was killed (SIGKILL)", step=20, culprit="node-0"),
    )
    events = [
        Event(31.0, "generation", "2: started 2 workers again", 2),
        Event(30.0, "failure", "rank 1 was killed", 1),
    ]
    found = faults(evidence_of(points, generations=generations, spent=spent, events=events))
    assert found.verdict in ("note", "bad")
    assert found.answer.startswith("1 restart (rank 1 was killed (SIGKILL)), which cost 11 s")
    assert found.numbers == {
        "restarts": 1.0,
        "recovery_seconds": pytest.approx(3.0),
        "lost_seconds": pytest.approx(8.0, rel=0.1),
    }
    [row] = rows_of(found)
    assert row[1:5] == ("program", "rank 1 was killed (SIGKILL)", "node-0", "3.0 s")
    assert "1 warning among the events below." in found.evidence


def test_nothing_failed_if_only_machines_joined() -> None:
    assert faults(evidence_of(steps_of())).answer == "Nothing failed."
    joined = (generation_of(1), generation_of(1, 1, number=2, cause="joined"))
    found = faults(evidence_of(steps_of(), generations=joined))
    assert (found.verdict, found.answer) == ("good", "Nothing failed; 1 planned restart.")


def test_a_failed_run_says_why() -> None:
    found = faults(evidence_of(steps_of(), status={"state": "failed", "reason": "out of memory"}))
    assert (found.verdict, found.answer.startswith("The run failed: out of memory.")) == ("bad", True)


def test_before_the_first_generation_nothing_is_known_of_faults() -> None:
    assert faults(evidence_of(generations=())).verdict == "unknown"


# Money and the plan.


def test_money_that_bought_no_steps_is_told() -> None:
    spent = [TimeSpent(1040.0, 1, 0, 400, {"forward": 30.0, "start": 10.0})]
    cost = Cost(so_far=8.0, per_hour=0.0, expected=None, budget=10.0)
    leases = [a_lease("a", machine_seconds=7200.0, dollars_per_hour=4.0)]
    found = money(evidence_of(steps_of(), spent=spent, leases=leases, status={"cost": cost}))
    assert found.answer.startswith("$8.00, 80% of the budget of $10.00. $2.00 of it bought time that made no steps")
    assert "$20.00 per 1,000 steps." in found.evidence
    assert found.verdict == "good"
    over = replace(cost, budget=7.0)
    assert money(evidence_of(steps_of(), leases=leases, status={"cost": over})).verdict == "bad"


def test_without_a_price_there_are_machine_hours() -> None:
    found = money(evidence_of(steps_of(), leases=[a_lease("a", machine_seconds=1800.0)]))
    assert found.verdict == "unknown"
    assert found.evidence == ("1 machine for 0.5 machine hours together.",)


def test_a_plan_that_was_right_is_confirmed() -> None:
    evidence = evidence_of(
        steps_of(),
        forecast=PLAN,
        telemetry=telemetry_of(),
        checkpoints=[a_checkpoint(400)],
        status={"seconds": 42.0},
    )
    found = forecast(evidence)
    assert found is not None
    assert (found.verdict, found.answer) == ("good", "Yes: everything within 5% of the plan.")
    assert [row.what for row in compared(evidence)] == [
        "time of a step", "whole run", "memory per worker", "checkpoint",
    ]  # fmt: skip


def test_a_plan_that_was_wrong_names_its_worst_number() -> None:
    found = forecast(evidence_of(steps_of(), forecast=replace(PLAN, step_seconds=0.3)))
    assert found is not None
    assert found.verdict == "note"
    assert found.answer.startswith("Not quite: time of a step was planned as 300 ms and was 100 ms (-67%)")


def test_a_speed_that_nobody_measured_may_be_off_by_half_and_a_size_may_not() -> None:
    rough = replace(PLAN, source="rough: peak of a CPU", step_seconds=0.06, seconds=70.0)
    seen: dict[str, Any] = {
        "telemetry": telemetry_of(), "checkpoints": [a_checkpoint(400)], "status": {"seconds": 42.0},
    }  # fmt: skip
    found = forecast(evidence_of(steps_of(), forecast=rough, **seen))
    assert found is not None
    assert (found.verdict, found.answer) == ("good", "Yes: everything within 67% of the rough plan.")
    measured = forecast(evidence_of(steps_of(), forecast=replace(rough, source="20 steps of 1 worker"), **seen))
    assert measured is not None
    assert measured.verdict == "note"
    large = replace(rough, memory_bytes=3 * PLAN.memory_bytes)
    found = forecast(evidence_of(steps_of(), forecast=large, **seen))
    assert found is not None
    assert found.answer.startswith("Not quite: memory per worker was planned as ")


def test_a_run_that_is_not_over_is_compared_without_its_length() -> None:
    evidence = evidence_of(steps_of(), forecast=PLAN, status={"state": "running"})
    assert [row.what for row in compared(evidence)] == ["time of a step"]
    assert forecast(evidence_of(steps_of())) is None
    nothing = forecast(evidence_of(forecast=PLAN, status={"state": "running"}))
    assert nothing is not None
    assert nothing.verdict == "unknown"


@pytest.mark.parametrize("planned", ["3000 steps", "5 steps"])
def test_a_run_whose_duration_was_changed_is_compared_without_its_length(planned: str) -> None:
    plan = replace(PLAN, duration=planned, seconds=12_000.0, dollars=3.0)
    cost = Cost(2.5, 0.0, None, None)
    evidence = evidence_of(steps_of(), forecast=plan, status={"cost": cost})
    assert [row.what for row in compared(evidence)] == ["time of a step"]
    found = forecast(evidence)
    assert found is not None
    assert (found.verdict, found.answer) == ("good", "Yes: everything within 0% of the plan.")
    said = f"It was for {planned}; the run is now set to 10 steps, so total time and cost cannot be compared."
    assert found.evidence[-1] == said
    same = evidence_of(steps_of(), forecast=replace(plan, duration="10 steps"), status={"cost": cost})
    assert [row.what for row in compared(same)] == ["time of a step", "whole run", "cost"]


def test_a_fork_which_trains_only_the_rest_is_compared_without_its_length() -> None:
    parent = {
        "run": "job-0",
        "store": "./store",
        "step": 8,
        "checkpoint": f"{8:09d}-000001-{0:012x}",
        "sha256": "0" * 64,
    }
    plan, cost = replace(PLAN, dollars=3.0), Cost(0.5, 0.0, None, None)
    fork = recipe_job(parent={**parent, "takes": "everything"})
    evidence = evidence_of(steps_of(), fork, forecast=plan, status={"cost": cost, "seconds": 8.0})
    assert [row.what for row in compared(evidence)] == ["time of a step"]
    found = forecast(evidence)
    assert found is not None
    said = (
        "It was for 10 steps from the beginning; the run started at step 8, so total time and cost cannot be compared."
    )
    assert found.evidence[-1] == said
    from_its_weights = recipe_job(parent={**parent, "takes": "weights"})
    whole = compared(evidence_of(steps_of(), from_its_weights, forecast=plan, status={"cost": cost}))
    assert [row.what for row in whole] == ["time of a step", "whole run", "cost"]


def test_a_plan_that_the_store_has_for_a_program_is_no_error() -> None:
    cost = Cost(2.5, 0.0, None, None)
    found = forecast(evidence_of(steps_of(), program_job(), forecast=PLAN, status={"cost": cost}))
    assert found is not None
    assert not [fact for fact in found.evidence if fact.startswith("It was for")]


# Data and checkpoints.


def a_manifest(dropped: int = 0) -> Manifest:
    def split(samples: int, drops: dict[str, Drops]) -> Split:
        shard = ShardFile("train-00000.safetensors", 5_000_000, "0" * 64, samples)
        return Split(samples, {}, drops, (samples,), (shard,))

    drops = {"empty": Drops(dropped, ())} if dropped else {}
    return Manifest(FORMAT, "job-abc", "pairs", {}, {"train": split(1000, drops), "valid": split(50, {})})


def test_the_size_of_the_data_comes_from_the_manifest() -> None:
    found = data_set(evidence_of(steps_of(), manifest=a_manifest()))
    assert found is not None
    assert found.answer == "1,000 pairs to train on (5.0 MB packed), 50 to validate; training went through it 4 times."
    assert (found.verdict, rows_of(found)[0]) == ("good", ("train", "1,000", "0", "0", "1", "5.0 MB"))


def test_the_raw_text_of_each_side_is_stated() -> None:
    manifest = a_manifest()
    raw = (RawText(637_000_000, 4_562_102), RawText(711_000_000, 4_562_102))
    manifest.splits["train"] = replace(manifest.splits["train"], raw=raw)
    found = data_set(evidence_of(steps_of(), manifest=manifest))
    assert found is not None
    assert found.answer.endswith(" The raw training text has 4,562,102 lines per side: 637 MB and 711 MB.")
    tables = [figure.rows for figure in found.figures if isinstance(figure, Rows)]
    assert tables[1] == (("train", "source", "637 MB", "4,562,102"), ("train", "target", "711 MB", "4,562,102"))
    assert (found.numbers["raw_source_bytes"], found.numbers["raw_target_lines"]) == (637e6, 4_562_102)


def test_unusable_samples_are_worth_knowing() -> None:
    found = data_set(evidence_of(steps_of(), manifest=a_manifest(dropped=100)))
    assert found is not None
    assert (found.verdict, "Left out of train: 100 (empty)." in found.evidence) == ("note", True)


def test_a_pack_that_is_gone_is_not_known() -> None:
    found = data_set(evidence_of(steps_of(), pack="job-abc"))
    assert found is not None
    assert found.verdict == "unknown"
    assert data_set(evidence_of(job=program_job())) is None


def test_the_files_of_a_checkpoint_are_explained() -> None:
    events = [Event(float(when), "checkpoint", "committed", 1) for when in (10, 20, 30)]
    found = checkpoints(evidence_of(steps_of(), checkpoints=[a_checkpoint(200), a_checkpoint(400)], events=events))
    assert found.answer == "3.0 kB in 2 files; kept: 2 checkpoints (of steps 200, 400)."
    assert rows_of(found) == (
        ("model.safetensors", "1.0 kB", "the weights"),
        ("optimizer.safetensors", "2.0 kB", "the optimizer's state, to resume"),
    )
    assert "3 commits, every 10 s on average" in found.evidence[1]


def test_a_run_without_checkpoints_says_so() -> None:
    assert checkpoints(evidence_of()).verdict == "bad"
    assert checkpoints(evidence_of(job=program_job())).verdict == "note"
    assert checkpoints(evidence_of(status={"state": "running"})).verdict == "unknown"
