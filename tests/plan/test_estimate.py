"""The estimator, where the truth is known: what bounds a step, what a run takes, what fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packtrain.plan.devices import GPUS, Hardware, Link
from packtrain.plan.estimate import (
    START_SECONDS,
    Advice,
    Estimate,
    Goal,
    Layout,
    Speed,
    StepKind,
    Workload,
    choose,
    estimate,
    forecast_of,
    goal_of,
    lines_of,
    memory_of,
    speed_from_table,
    with_efficiency,
)
from packtrain.units import Duration
from parts.runs import recipe_job

# Ten million weights in 32 bits; a batch of 1,000 tokens, of which each takes a millisecond.
WORK = Workload(
    unit="tokens", parameters=10_000_000, trained=10_000_000, buffer_bytes=0, copies=0, optimizer_copies=2,
    averaged=False, activation_bytes=1000.0, flops=6e7, half=False, exchange_bytes=40_000_000, exchange_every=1,
    exchange_background=0.0, traffic=2, sharded=False, units_per_step=1000.0, samples_per_step=50.0,
    steps_per_epoch=100.0, micro_batch=None, samples=5000, data_bytes=500_000, valid_samples=0, test_samples=0,
    exact=True,
)  # fmt: skip
GOAL = Goal(1000, None, 10.0, (StepKind(1.0, 1.0, 1.0),), None, 0, None, None, None)
SPEED = Speed("made up", "cpu", 0.0, 0.001, 0.0, 0.0, 0.0)
FAST, SLOW = Link(100e9, 0.0, "fast"), Link(10e6, 0.0, "slow")


def on(machines: int, link: Link = FAST, work: Workload = WORK, goal: Goal = GOAL, **speed: Any) -> Estimate:
    return estimate(work, goal, replace(SPEED, **speed), Layout(machines, 1, 0), link)


def test_a_single_worker_is_bound_by_computing() -> None:
    one = on(1)
    assert (one.limit, one.exchange_seconds, one.sent_bytes) == ("compute", 0.0, 0.0)
    assert one.step_seconds == pytest.approx(1.0)
    assert one.units_per_second == pytest.approx(1000.0)
    assert one.seconds == pytest.approx(START_SECONDS + 1000.0)


def test_with_a_fast_network_twice_the_machines_take_half_the_time() -> None:
    one, two = with_efficiency([on(2), on(1)])
    assert (one.machines, two.machines) == (1, 2)
    assert two.step_seconds == pytest.approx(0.5, rel=0.01)
    assert two.efficiency == pytest.approx(1.0, rel=0.01)
    assert two.limit == "compute"


def test_a_slow_network_bounds_a_step_by_the_bytes_of_a_ring() -> None:
    two = on(2, SLOW)
    # Each machine sends 2 (n - 1) / n of 40 MB, at 10 MB/s.
    assert two.sent_bytes == pytest.approx(40e6)
    assert two.exchange_seconds == pytest.approx(4.0)
    assert two.limit == "network"
    assert with_efficiency([on(1), two])[1].efficiency == pytest.approx(1 / 9)


def test_the_network_that_is_needed_makes_communication_a_tenth_of_a_step() -> None:
    needed = on(4).needed_bytes_per_second
    found = on(4, Link(needed, 0.0, "as needed"))
    assert found.exchange_seconds == pytest.approx(found.step_seconds / 10)


def test_a_gpu_computes_while_it_sends_all_but_the_last_bucket() -> None:
    large = replace(WORK, parameters=10**9, trained=10**9, exchange_bytes=4 * 10**9)
    link = Link(40e9, 0.0, "between")
    exposed = [on(2, link, large, kind=kind).exchange_seconds for kind in ("gpu", "cpu")]
    assert exposed[0] < 0.01 < 0.09 < exposed[1]


def test_slow_loading_bounds_a_step_whatever_computes() -> None:
    found = on(2, load_seconds=0.003)
    assert found.limit == "data"
    assert found.step_seconds == pytest.approx(0.003 * 500)
    assert found.compute_seconds == pytest.approx(0.5)


def test_loading_must_keep_up_with_the_steps() -> None:
    found = on(1)
    assert found.samples_per_second == pytest.approx(50.0)
    assert found.load_bytes_per_second == pytest.approx(50.0 * 100)


def test_what_does_not_fit_into_memory_is_bound_by_it_and_never_advised() -> None:
    small = Layout(1, 1, 100_000_000)
    found = estimate(WORK, GOAL, SPEED, small, FAST)
    assert (found.limit, found.fits) == ("memory", False)
    assert choose([found]) == Advice(None, None)


def test_memory_has_weights_gradients_optimizer_and_activations() -> None:
    bare = memory_of(replace(WORK, parameters=0, trained=0, activation_bytes=0.0), "cpu", 1)
    assert memory_of(WORK, "cpu", 1) - bare == 16 * 10_000_000 + 1000 * 1000
    assert memory_of(replace(WORK, averaged=True), "cpu", 1) - memory_of(WORK, "cpu", 1) == 40_000_000
    assert memory_of(replace(WORK, micro_batch=10), "cpu", 1) - bare == 16 * 10_000_000 + 10 * 1000


def test_sharding_divides_the_state_among_workers_and_sends_more() -> None:
    sharded = replace(WORK, sharded=True, traffic=3)
    assert memory_of(sharded, "cpu", 4) < memory_of(WORK, "cpu", 4)
    assert sharded.link_bytes(4) == 1.5 * WORK.link_bytes(4)
    assert replace(sharded, half=True).link_bytes(4) == WORK.link_bytes(4), "weights in 16 bits"
    summed = replace(sharded, whole_gradients=True)
    assert memory_of(summed, "cpu", 4) == memory_of(sharded, "cpu", 4), "one micro-batch"
    in_pieces = [memory_of(replace(one, micro_batch=10), "cpu", 4) for one in (sharded, summed)]
    assert in_pieces[1] - in_pieces[0] == 40_000_000


def test_an_exchange_every_twenty_steps_sends_a_twentieth() -> None:
    assert on(2, SLOW, replace(WORK, exchange_every=20)).exchange_seconds == pytest.approx(4.0 / 20)


def test_an_exchange_beside_further_steps_costs_only_what_they_do_not_hide() -> None:
    """Twenty steps of half a second, and 4 s to send: five steps hide 2.5 of them, ten hide all."""
    beside = [on(2, SLOW, replace(WORK, exchange_every=20, exchange_background=share)) for share in (0.25, 0.5)]
    assert [one.exchange_seconds for one in beside] == pytest.approx([1.5 / 20, 0.0])


def test_what_a_step_costs_besides_its_units_does_not_shrink() -> None:
    two = on(2, fixed_seconds=1.0)
    assert two.compute_seconds == pytest.approx(1.5)


def test_a_measured_exchange_is_taken_as_it_is() -> None:
    assert on(2, SLOW, exchange_seconds=0.25).step_seconds == pytest.approx(0.75)


def test_evaluations_belong_to_the_time_of_a_run() -> None:
    work = replace(WORK, valid_samples=100, test_samples=10)
    goal = replace(GOAL, evaluate_steps=250.0, decoded=20)
    found = on(1, work=work, goal=goal, score_seconds=0.01, decode_seconds=0.1)
    # Four of the validation split, and the test split at the end.
    assert found.evaluation_seconds == pytest.approx(4 * (1.0 + 2.0) + 10 * 0.11)
    assert found.seconds == pytest.approx(START_SECONDS + 1000 + found.evaluation_seconds)


def test_without_a_test_split_the_rest_of_the_validation_split_is_decoded_at_the_end() -> None:
    work, goal = replace(WORK, valid_samples=100), replace(GOAL, decoded=20)
    assert on(1, work=work, goal=goal, decode_seconds=0.1).evaluation_seconds == pytest.approx(10.0)


def test_a_duration_in_time_makes_more_steps_on_more_machines() -> None:
    goal = replace(GOAL, steps=None, seconds=100.0)
    assert [on(count, goal=goal).steps for count in (1, 2)] == [100, pytest.approx(200, abs=2)]


def test_images_that_grow_make_steps_longer_and_larger() -> None:
    grown = on(1, goal=replace(GOAL, phases=(StepKind(0.5, 1.0, 1.0), StepKind(0.5, 1.0, 3.0))))
    assert grown.step_seconds == pytest.approx(2.0)
    assert grown.memory_bytes - on(1).memory_bytes == 2 * 1000 * 1000


def test_batches_that_shrink_have_fewer_samples_per_second() -> None:
    """Half of the steps have the batch of the job, half a quarter of it with the same work."""
    shrunk = on(1, goal=replace(GOAL, phases=(StepKind(0.5, 1.0, 1.0), StepKind(0.5, 0.25, 1.0))))
    assert shrunk.units_per_second == pytest.approx(625.0)
    assert shrunk.samples_per_second == pytest.approx(50 * 0.625)


def test_the_network_bounds_each_phase_by_itself() -> None:
    """Slow steps hide what is sent, and fast steps do not: the mean step would hide all of it."""
    phases = (StepKind(0.5, 1.0, 0.1), StepKind(0.5, 1.0, 1.9))
    work = replace(WORK, parameters=10**9, trained=10**9, exchange_bytes=4 * 10**9)
    link = Link(13e9, 0.0, "between")
    mixed, even = (on(2, link, work, replace(GOAL, phases=one), kind="gpu") for one in (phases, GOAL.phases))
    assert even.exchange_seconds < 0.01 < mixed.exchange_seconds


def test_gpus_of_one_machine_exchange_by_nvlink() -> None:
    work = replace(WORK, parameters=10**9, trained=10**9, exchange_bytes=4 * 10**9)
    layout, speed = Layout(1, 8, 0), replace(SPEED, kind="gpu", unit_seconds=1e-6)
    pcie, nvlink = (estimate(work, GOAL, replace(speed, nvlink=rate), layout, None) for rate in (0.0, 150e9))
    assert pcie.exchange_seconds > 10 * nvlink.exchange_seconds


def test_machines_that_are_all_this_one_have_one_price() -> None:
    goal = replace(GOAL, dollars_per_hour=3.6)
    apart, together = (estimate(WORK, goal, SPEED, Layout(2, 1, 0, shared), FAST) for shared in (False, True))
    assert apart.dollars == pytest.approx(2 * (together.dollars or 0.0))


def test_an_evaluation_needs_memory_for_its_outputs() -> None:
    work = replace(WORK, valid_samples=100, test_samples=200, evaluation_bytes=1e4, evaluation_units=8192)
    # 200 samples of 20 units each, for one worker or for two; at most 8,192 units at once.
    assert memory_of(work, "cpu", 1) - memory_of(WORK, "cpu", 1) == 4000 * 10**4
    assert memory_of(work, "cpu", 2) - memory_of(WORK, "cpu", 2) == 2000 * 10**4
    many = replace(work, test_samples=10**6)
    assert memory_of(many, "cpu", 1) - memory_of(WORK, "cpu", 1) == 8192 * 10**4
    # A GPU's allocator gives it the memory of the activations.
    assert memory_of(many, "gpu", 1) == memory_of(replace(WORK, activation_bytes=0.0), "gpu", 1) + 8192 * 10**4


def test_a_measured_memory_has_not_seen_the_evaluation() -> None:
    work = replace(WORK, test_samples=200, evaluation_bytes=1e4, evaluation_units=8192)
    assert on(1, work=work, memory_bytes=10**9).memory_bytes == 10**9 + 4000 * 10**4
    assert on(1, memory_bytes=10**9).memory_bytes == 10**9


def test_checkpoints_have_weights_their_average_and_the_state_of_the_optimizer() -> None:
    assert WORK.checkpoint_bytes == 120_000_000
    assert replace(WORK, averaged=True).checkpoint_bytes == 160_000_000


# Choices.


def priced(dollars_per_hour: float | None = 3.6, **budget: float) -> list[Estimate]:
    goal = replace(GOAL, dollars_per_hour=dollars_per_hour, **budget)  # type: ignore[arg-type]
    return [on(count, Link(1e9, 0.0, ""), goal=goal) for count in (1, 2, 4)]


def test_the_cheapest_is_the_most_efficient_and_the_fastest_the_largest() -> None:
    estimates = priced()
    assert estimates[0].dollars == pytest.approx((START_SECONDS + 1000) / 1000)
    assert choose(estimates) == Advice(1, 4)


def test_a_budget_rules_out_what_takes_too_long_or_costs_too_much() -> None:
    assert choose(priced(budget_hours=0.2)) == Advice(2, 4)
    assert choose(priced(budget_dollars=1.01)) == Advice(1, 1)
    assert choose(priced(budget_hours=0.2, budget_dollars=1.01)) == Advice(None, None)


def test_without_a_price_machine_hours_count() -> None:
    assert choose(priced(None)) == Advice(1, 4)


# Goals.


@pytest.mark.parametrize(("duration", "steps"), [("500 steps", 500), ("3 epochs", 300), ("1 h", None)])
def test_a_goal_is_a_number_of_steps_or_a_time(duration: str, steps: int | None) -> None:
    goal = goal_of(recipe_job(train={"duration": duration}), WORK)
    assert (goal.steps, goal.seconds) == (steps, None if steps else 3600.0)


def test_an_evaluation_every_epoch_is_due_as_often_as_there_are_epochs() -> None:
    goal = goal_of(recipe_job(train={"duration": "300 steps"}, evaluate={"every": "1 epochs"}), WORK)
    assert goal.evaluate_steps == pytest.approx(100.0)


def test_phases_of_other_sizes_change_steps_and_their_work() -> None:
    phases = [
        {"until": "1 epochs", "rate": 0.1, "size": 32, "batch": "4 samples"},
        {"until": "2 epochs", "rate": 0.1, "size": 64, "batch": "4 samples"},
    ]
    goal = goal_of(recipe_job(train={"duration": "2 epochs", "schedule": {"phases": phases}}), WORK)
    assert (goal.steps, goal.epochs) == (200, 2.0)
    assert goal.phases == (
        StepKind(0.5, 1.0, 1.0),
        StepKind(0.5, 1.0, 4.0),
    )  # the second epoch has four times the pixels


@pytest.mark.parametrize(("duration", "steps", "epochs"), [("28 epochs", 16_399, 28.0), ("16399 steps", 16_399, 28.0)])
def test_phases_of_other_batches_have_epochs_of_other_lengths(duration: str, steps: int, epochs: float) -> None:
    phases = [
        {"until": "13 epochs", "rate": 0.1, "size": 128},
        {"until": "25 epochs", "rate": 0.1, "size": 224, "batch": "1792 samples"},
        {"until": "28 epochs", "rate": 0.1, "size": 288, "batch": "1024 samples"},
    ]
    train = {"duration": duration, "batch": "4096 samples", "schedule": {"phases": phases}}
    work = replace(WORK, steps_per_epoch=1_281_167 / 4096)
    goal = goal_of(recipe_job(train=train), work)
    assert goal.steps == steps
    assert goal.epochs == pytest.approx(epochs, abs=0.01)
    assert sum(phase.share for phase in goal.phases) == pytest.approx(1.0)
    samples = sum(phase.share * steps * phase.batch * 4096 for phase in goal.phases)
    assert samples == pytest.approx(28 * 1_281_167, rel=1e-3)


# The table of devices.


def test_a_device_of_the_table_reaches_a_part_of_its_peak() -> None:
    hardware = Hardware(GPUS["t4"], 1, 4, 0, FAST)
    speed = speed_from_table(WORK, hardware, 1, 4)
    assert 6e7 / 8.1e12 < speed.unit_seconds < 6e7 / 8.1e12 * 5
    half = speed_from_table(replace(WORK, half=True), hardware, 1, 4)
    assert half.unit_seconds < speed.unit_seconds / 3
    images = speed_from_table(replace(WORK, half=True, family="bottleneck"), hardware, 1, 4)
    assert images.unit_seconds > half.unit_seconds, "convolutions reach less of a peak than a Transformer"


# Afterwards.


def test_a_forecast_says_three_lines() -> None:
    lines = lines_of(forecast_of(WORK, priced()[1], Duration(10, "steps")), recipe_job(checkpoint={"every": "5 min"}))
    assert lines == [
        "about 9 min 02 s for 1,000 steps, $1.08 (made up)",
        "540 ms per step, 1,852 samples/s, limited by compute; 40.0 MB of gradients sent per step",
        "10.0 million parameters, 510 MB of memory per worker, checkpoints of 120 MB every 5 min",
    ]
