"""Answers about speed on records whose truth is known: bound by the network, by data, by one machine, by nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packtrain.job import Job
from packtrain.observe.evidence import Evidence
from packtrain.pack.manifest import FORMAT, Manifest
from packtrain.plan.workload import known_model
from packtrain.report.finding import Rows
from packtrain.report.speed import balance, data_loading, devices, duration, flops_used, network, scaling, step_times
from packtrain.run.checkpoint import Checkpoint, StoredFile
from packtrain.run.records import Gpu, Point, TimeSpent, WorkerUse
from parts.runs import a_generation, program_job, recipe_job
from report.made import SPANS, evidence_of, generation_of, spent_of, steps_of, telemetry_of, trained

TWO_MACHINES = (1, 1)
UNDISTURBED = dict.fromkeys((0, 1), SPANS)
NETWORK_BOUND = {rank: {**SPANS, "communication": 0.1} for rank in (0, 1)}
DATA_BOUND = {rank: {**SPANS, "data": 0.9} for rank in (0, 1)}
STRAGGLER = {0: {**SPANS, "wait": 0.06}, 1: {**SPANS, "backward": 0.12}}


def test_an_undisturbed_run_has_only_good_answers() -> None:
    spent = spent_of(UNDISTURBED)
    evidence = evidence_of(steps_of(), workers=TWO_MACHINES, spent=spent, telemetry=telemetry_of(cpu=0.95, sent=1e6))
    for ask in (duration, devices, data_loading, network, balance, scaling, step_times):
        found = ask(evidence)
        assert found is not None
        assert found.verdict == "good", found


# Where the time went.


def test_the_duration_names_the_largest_loss_and_what_to_do() -> None:
    spent = [TimeSpent(1040.0, 1, 0, 400, {"forward": 20.0, "evaluation": 20.0, "start": 2.0, "communication": 8.0})]
    found = duration(evidence_of(steps_of(), spent=spent))
    assert found.verdict == "note"
    assert found.answer.startswith("50 s; 56% of it went into steps that counted. The largest loss: evaluation, 20 s")
    assert "evaluate less often" in found.answer
    rows = next(one for one in found.figures if isinstance(one, Rows)).rows
    assert ("evaluation", "20 s", "40.0%") in rows
    assert found.numbers["goodput"] == pytest.approx(0.56)


def test_a_program_has_a_duration_without_parts() -> None:
    found = duration(evidence_of(job=program_job()))
    assert found.answer == "40 s."
    assert duration(evidence_of(job=program_job(), status={"seconds": 0.0})).verdict == "unknown"


# Devices.


def test_busy_gpus_that_wait_for_the_network_do_not_compute() -> None:
    evidence = evidence_of(
        steps_of(communication=0.1),
        workers=TWO_MACHINES,
        spent=spent_of(NETWORK_BOUND),
        telemetry=telemetry_of(gpu=1.0),
    )
    found = devices(evidence)
    assert found.verdict == "note"
    assert found.answer.startswith("The GPUs were 100% busy while it trained; workers computed 50% of the whole time")
    assert "communication not overlapped (50%)" in found.answer
    assert "100 % is no proof of computing" in found.evidence[0]


def test_idle_gpus_of_a_data_bound_run_are_explained() -> None:
    evidence = evidence_of(steps_of(data=0.9), spent=spent_of(DATA_BOUND), telemetry=telemetry_of(gpu=0.09))
    found = devices(evidence)
    assert found.verdict == "bad"
    assert "The GPUs were 9% busy" in found.answer
    assert "waiting for data (90%)" in found.answer


def test_a_machine_that_others_use_is_told_from_a_busy_one() -> None:
    busy = telemetry_of(cpu=1.0)
    crowded = [replace(one, telemetry=replace(one.telemetry, workers=(WorkerUse(0, 0.4, 1 << 30),))) for one in busy]
    verdicts = []
    for samples in (busy, crowded):
        found = devices(evidence_of(steps_of(), spent=spent_of(UNDISTURBED), telemetry=samples))
        verdicts.append((found.verdict, "Other programs used the processors" in found.answer))
    assert verdicts == [("good", False), ("note", True)]


def test_telemetry_of_startup_does_not_count() -> None:
    early = telemetry_of(count=50, cpu=0.0)
    late = [sample for sample in telemetry_of(count=20, cpu=1.0) if sample.time > 1000.1]
    shifted = [type(one)(one.time - 500, one.node, one.telemetry) for one in early]
    evidence = evidence_of(steps_of(), spent=spent_of(UNDISTURBED), telemetry=[*shifted, *late])
    assert devices(evidence).numbers["busy"] == pytest.approx(1.0)


def test_nodes_of_two_generations_are_as_many_machines_as_there_were_at_a_time() -> None:
    samples = [sample for node in "abcd" for sample in telemetry_of(node=node)]
    generations = (a_generation(1, "a", "b"), a_generation(2, "c", "d"))
    found = devices(evidence_of(steps_of(), generations=generations, spent=spent_of(UNDISTURBED), telemetry=samples))
    assert any("of telemetry on 2 machines at a time," in line for line in found.evidence)


def on_a_gpu(name: str, job: Job | None = None) -> Evidence:
    gpu = Gpu(name, 1.0, 30 << 30, 40 << 30, 300.0, 60.0)
    samples = [replace(one, telemetry=replace(one.telemetry, gpus=(gpu,))) for one in telemetry_of()]
    manifest = Manifest(FORMAT, "pack-1", "pairs", {"vocabulary": 8000}, {})
    return evidence_of(steps_of(), job or recipe_job(), telemetry=samples, manifest=manifest)


def test_the_flops_of_a_model_are_compared_with_the_peak_of_its_gpu() -> None:
    evidence = on_a_gpu("NVIDIA A100-SXM4-80GB")
    assert evidence.manifest is not None
    model, speed = known_model(evidence.job, evidence.manifest), evidence.status.units_per_second
    assert model is not None
    assert speed is not None
    used = flops_used(evidence)
    assert used is not None
    assert used.share == pytest.approx(model.flops * speed / 312e12)
    assert devices(evidence).numbers["mfu"] == used.share
    assert any("312 TFLOP/s of an NVIDIA A100 80 GB (MFU)" in fact for fact in devices(evidence).evidence)


def test_without_a_known_model_and_gpu_there_is_no_such_share() -> None:
    known = on_a_gpu("NVIDIA A100-SXM4-80GB")
    crowded = replace(known, generations=(generation_of(4),))  # four workers on one GPU
    own_recipe = on_a_gpu("NVIDIA A100-SXM4-80GB", recipe_job(recipe="own:Recipe"))
    in_fp32 = on_a_gpu("NVIDIA A100-SXM4-80GB", recipe_job(train={"precision": "fp32"}))  # some of it in TF32
    for evidence in (
        on_a_gpu("card"),
        crowded,
        own_recipe,
        in_fp32,
        replace(known, manifest=None),
        replace(known, raw=()),
    ):
        assert flops_used(evidence) is None
        assert "mfu" not in devices(evidence).numbers


def test_the_most_memory_of_every_worker_is_shown() -> None:
    spent = [
        TimeSpent(1010.0 + rank, 1, rank, 10, {"forward": 1.0}, size << 30, 8 << 30)
        for rank, size in ((0, 3), (0, 5), (1, 4))
    ]
    table = devices(evidence_of(steps_of(), spent=spent, telemetry=telemetry_of())).figures[-1]
    assert isinstance(table, Rows)
    assert table.rows == (("0", "1.1 GB", "5.4 GB", "8.6 GB"), ("1", "none", "4.3 GB", "8.6 GB"))
    table = devices(evidence_of(steps_of(), telemetry=telemetry_of())).figures[-1]
    assert table == Rows(("worker", "main memory, most"), (("0", "1.1 GB"),))


def test_without_any_record_the_devices_are_unknown() -> None:
    assert devices(evidence_of()).verdict == "unknown"


def test_workers_without_telemetry_are_judged_by_their_clocks() -> None:
    found = devices(evidence_of(steps_of(), spent=spent_of(UNDISTURBED)))
    assert found.verdict == "good"
    assert "judged by the workers' clocks alone" in found.evidence[-1]


# Data.


def test_waiting_for_data_is_told_as_the_limit() -> None:
    found = data_loading(evidence_of(steps_of(data=0.9), spent=spent_of(DATA_BOUND)))
    assert found is not None
    assert found.verdict == "bad"
    assert found.answer.startswith("No: waiting for data took 90% of the step time, so devices were idle.")


def test_a_wait_at_the_beginning_is_the_empty_cache() -> None:
    steps = [trained(step, data=2.0 if step < 30 else 0.0) for step in range(1, 401)]
    spans = {0: {**SPANS, "data": 29 * 2.0 / 400}}
    found = data_loading(evidence_of(steps, spent=spent_of(spans)))
    assert found is not None
    assert any("the cache was still empty" in fact for fact in found.evidence)


def test_the_slowest_rank_decides_about_loading() -> None:
    spent = spent_of({0: SPANS, 1: {**SPANS, "data": 0.3}})
    found = data_loading(evidence_of(steps_of(), spent=spent))
    assert found is not None
    assert found.verdict == "bad"
    assert found.numbers["data_share"] == pytest.approx(0.75)


# The network.


def began(sent: float, link: float) -> Point:
    """Return the start of a generation, where the link is measured."""
    return Point("start", 1, 0, 999.0, {"sent_bytes_per_step": sent, "link_bytes_per_second": link})


def test_communication_that_is_not_hidden_makes_the_network_the_bottleneck() -> None:
    """A person once read 250 MB/s of traffic as a quarter of a card of 1 Gbit/s, and blamed something else."""
    evidence = evidence_of(
        [began(40e6, 250e6), *steps_of(communication=0.1)], workers=TWO_MACHINES, spent=spent_of(NETWORK_BOUND),
        telemetry=telemetry_of(sent=250e6),
    )  # fmt: skip
    found = network(evidence)
    assert found is not None
    assert found.verdict == "bad"
    assert found.answer.startswith(
        "Yes: 50% of the step time was communication that computing did not hide; 80% of the link's capacity was used."
    )
    assert "train.exchange.ddp.compress=bf16" in found.answer
    assert found.numbers["link_used"] == pytest.approx(40e6 / 0.2 / 250e6)
    facts = " ".join(found.evidence)
    assert "The link was measured at 250 MB/s (2 Gbit/s) per worker" in facts
    assert "160 ms of a step is the least that sending takes" in facts
    assert "1 Gbit/s is 125 MB/s" in facts


def test_a_link_that_is_not_full_is_slow_for_another_reason() -> None:
    points = [began(1e6, 1e9), *steps_of(communication=0.1)]
    found = network(evidence_of(points, workers=TWO_MACHINES, spent=spent_of(NETWORK_BOUND)))
    assert found is not None
    assert any("The link was not full: latency" in fact for fact in found.evidence)


def test_without_a_measured_link_the_bytes_are_estimated_from_the_model() -> None:
    files = (StoredFile("model.safetensors", 10_000_000, "0" * 64),)
    saved = Checkpoint(2, "000000400-000001-a", 400, 1, None, files)
    found = network(evidence_of(steps_of(), workers=TWO_MACHINES, spent=spent_of(UNDISTURBED), checkpoints=[saved]))
    assert found is not None
    assert found.numbers["bytes_per_step"] == pytest.approx(10e6)
    assert any("`packtrain doctor` does" in fact for fact in found.evidence)


def test_a_run_on_one_machine_is_warned_only_of_an_exchange_that_takes_much() -> None:
    points = steps_of(communication=0.01)
    few = {rank: {**SPANS, "communication": 0.01} for rank in (0, 1)}
    for workers, verdict in (((2,), "good"), (TWO_MACHINES, "note")):
        found = network(evidence_of(points, workers=workers, spent=spent_of(few)))
        assert found is not None
        assert found.verdict == verdict
    found = network(evidence_of(steps_of(communication=0.1), workers=(2,), spent=spent_of(NETWORK_BOUND)))
    assert found is not None
    assert found.verdict == "note"
    assert "What would help: a larger batch" in found.answer


def test_a_straggler_is_not_the_network() -> None:
    found = network(evidence_of(steps_of(wait=0.06), workers=TWO_MACHINES, spent=spent_of(STRAGGLER)))
    assert found is not None
    assert found.verdict == "good"


def test_workers_of_one_machine_use_no_network() -> None:
    found = network(evidence_of(steps_of(communication=0.1), workers=(2,), spent=spent_of(NETWORK_BOUND)))
    assert found is not None
    assert found.answer.startswith("No network was used: all workers are on one machine.")
    assert "faster network" not in found.answer


def test_one_worker_has_nothing_to_exchange() -> None:
    found = network(evidence_of(steps_of()))
    assert found is not None
    assert found.answer == "No: with one worker there is nothing to exchange."


def test_sharded_weights_hide_what_their_exchange_costs() -> None:
    job = recipe_job(train={"exchange": {"fsdp": {}}})
    found = network(evidence_of(steps_of(), job, TWO_MACHINES, spent=spent_of(UNDISTURBED)))
    assert found is not None
    assert found.verdict == "unknown"
    assert found.answer.startswith("Not enough data: sharded weights")


@pytest.mark.parametrize(("sent", "word"), [(1e6, "Probably not:"), (30e6, "Perhaps:"), (60e6, "Probably:")])
def test_sharded_weights_are_judged_by_the_load_of_the_link(sent: float, word: str) -> None:
    job = recipe_job(train={"exchange": {"fsdp": {}}})
    points = [began(sent, 1e9), *steps_of()]
    found = network(evidence_of(points, job, TWO_MACHINES, spent=spent_of(UNDISTURBED)))
    assert found is not None
    assert found.answer.startswith(word)


# Several workers.


def test_a_straggler_is_named_with_its_machine_and_its_slow_part() -> None:
    found = balance(evidence_of(steps_of(wait=0.06), workers=TWO_MACHINES, spent=spent_of(STRAGGLER)))
    assert found is not None
    assert found.verdict == "bad"
    assert found.answer.startswith("Yes: rank 1 on node-1 took 1.60 times as long as the others (backward), who waited")


def test_ranks_that_wait_in_turns_have_no_straggler() -> None:
    spent = spent_of({rank: {**SPANS, "wait": 0.03} for rank in range(4)})
    found = balance(evidence_of(steps_of(), workers=(2, 2), spent=spent))
    assert found is not None
    assert (found.verdict, found.answer.startswith("No single one")) == ("note", True)


def test_scaling_is_what_is_left_after_communication_and_waiting() -> None:
    found = scaling(evidence_of(steps_of(), workers=TWO_MACHINES, spent=spent_of(NETWORK_BOUND)))
    assert found is not None
    assert found.verdict == "bad"
    assert found.answer == "2 workers did the work of about 1.0 (50% efficiency)."


def test_a_data_bound_run_says_why_more_machines_seem_to_help() -> None:
    """The run whose second machine gave a speed-up of 3.7: it brought loaders."""
    found = scaling(evidence_of(steps_of(data=0.9), workers=TWO_MACHINES, spent=spent_of(DATA_BOUND)))
    assert found is not None
    assert found.verdict == "bad"
    assert "more workers bring more loaders" in found.answer


def test_generations_of_different_sizes_measure_the_speed_up() -> None:
    first = steps_of(40)
    second = [Point("train", 2, one.step + 40, one.time + 4, {**one.values, "step_seconds": 0.0625}) for one in first]
    generations = (generation_of(1), generation_of(1, 1, number=2, cause="joined"))
    evidence = evidence_of([*first, *second], generations=generations, spent=spent_of(UNDISTURBED))
    found = scaling(evidence)
    assert found is not None
    [table] = found.figures
    assert isinstance(table, Rows)
    assert table.rows == (("1", "640", "1.00 x", "100%"), ("2", "1,024", "1.60 x", "80%"))


@pytest.mark.parametrize("ask", [balance, scaling])
def test_one_worker_is_not_compared_with_others(ask: object) -> None:
    assert ask(evidence_of(steps_of())) is None  # type: ignore[operator]


# Steps.


def slow_table(points: list[Point], **fields: object) -> dict[str, str]:
    found = step_times(evidence_of(points, **fields))  # type: ignore[arg-type]
    assert found is not None
    tables = [one for one in found.figures if isinstance(one, Rows)]
    return {row[0]: row[1] for row in tables[-1].rows} if len(tables) > 1 else {}


def test_slow_steps_are_explained_by_what_grew() -> None:
    odd = {
        50: {"evaluation": 3.0}, 60: {"save": 1.0}, 70: {"wait": 2.0}, 80: {"data": 1.0}, 90: {"communication": 1.0},
        100: {"forward": 1.0}, 1: {"start": 9.0}, 2: {"backward": 4.0},
    }  # fmt: skip
    points = [trained(step, 4.0, 1, **odd.get(step, {})) for step in range(1, 201)]
    assert slow_table(points, workers=TWO_MACHINES) == {
        "startup": "1",
        "compilation or warm-up: the first steps, or another size": "1",
        "an evaluation": "1",
        "a checkpoint copy": "1",
        "waiting for another machine": "1",
        "waiting for data": "1",
        "slow communication": "1",
        "slow computing: something else used this machine, or its clock dropped": "1",
    }


def test_a_larger_batch_and_a_new_image_size_explain_slow_computing() -> None:
    def slow(step: int, tokens: float) -> Point:
        one = trained(step, forward=0.9)
        return Point("train", 1, step, one.time, {**one.values, "tokens": tokens})

    phases = [{"until": "1 epochs", "rate": 0.1, "size": 128}, {"until": "2 epochs", "rate": 0.1, "size": 224}]
    job = recipe_job(train={"schedule": {"phases": phases}})
    points = [
        slow(step, 64.0) if step == 100 else slow(step, 640.0) if step == 60 else trained(step)
        for step in range(1, 150)
    ]
    assert slow_table(points, job=job) == {
        "a larger batch": "1",
        "compilation or warm-up: the first steps, or another size": "1",
    }


def test_percentiles_leave_out_what_is_between_steps() -> None:
    points = [trained(step, evaluation=5.0 if step % 50 == 0 else 0.0) for step in range(1, 201)]
    found = step_times(evidence_of(points))
    assert found is not None
    assert found.numbers["p99_seconds"] == pytest.approx(0.1)
    assert found.numbers["slow_seconds"] == pytest.approx(20.0)
    assert found.answer.endswith("4 intervals of more than twice the median cost 20 s together, mostly an evaluation.")
    assert found.verdict == "good", "evaluations are judged by the duration"


@pytest.mark.parametrize("ask", [data_loading, network, balance, scaling, step_times])
def test_a_few_steps_are_too_few(ask: object) -> None:
    found = ask(evidence_of(steps_of(3), workers=TWO_MACHINES, spent=spent_of(UNDISTURBED, 3)))  # type: ignore[operator]
    assert found.verdict == "unknown"
    assert "at least 20 are needed" in found.answer


@pytest.mark.parametrize("ask", [data_loading, network, balance, scaling, step_times])
def test_a_program_has_no_steps(ask: object) -> None:
    assert ask(evidence_of(job=program_job(), workers=TWO_MACHINES)) is None  # type: ignore[operator]
