from __future__ import annotations

import math

import pytest

from packtrain.errors import Mistake
from packtrain.report.sweep import rungs_in_words
from packtrain.run.sweeps import Rung, RungResult, SweepPlan, Trial
from packtrain.sweep.rungs import Actions, RungScore, TrialState, TrialView, next_actions, ranked, rungs_for
from packtrain.units import Duration

STEPS = Duration(800, "steps")


def a_plan(trials: int = 4, rungs: tuple[Rung, ...] = (Rung(10, 2), Rung(20, 1)), lower: bool = False) -> SweepPlan:
    every = tuple(Trial(number, f"s-{number}", {"a": str(number)}) for number in range(1, trials + 1))
    return SweepPlan("s", "job", "d", ("a",), every, 2, {}, "bleu", lower, rungs)


def seen(number: int, state: TrialState, *scores: float) -> TrialView:
    return TrialView(number, state, tuple(map(RungScore, scores)))


def settled(*kept: int) -> RungResult:
    return RungResult({}, kept)


def test_half_of_the_runs_stop_at_each_rung_and_the_last_rung_is_at_half_of_the_duration() -> None:
    assert rungs_for(8, STEPS, Duration(50, "steps")) == (Rung(100, 4), Rung(200, 2), Rung(400, 1))
    assert rungs_for(5, STEPS, Duration(10, "epochs")) == (Rung(100, 3), Rung(200, 2), Rung(400, 1))


def test_rungs_are_where_an_evaluation_is() -> None:
    assert rungs_for(8, STEPS, Duration(300, "steps")) == (Rung(300, 2), Rung(600, 1))


def test_what_happens_is_said_in_words() -> None:
    assert rungs_in_words(a_plan()) == "4 runs train 10 steps, the best 2 until 20 steps, the best one to the end"
    assert rungs_in_words(a_plan(rungs=())) == "4 runs to the end"


@pytest.mark.parametrize(
    ("trials", "every", "words"),
    [
        (8, None, "set evaluate.every"),
        (1, Duration(1, "steps"), "at least two runs"),
        (8, STEPS, "has to come before the end"),
    ],
)
def test_halving_that_cannot_be_is_refused(trials: int, every: Duration | None, words: str) -> None:
    with pytest.raises(Mistake, match=words):
        rungs_for(trials, STEPS, every)


def test_equal_scores_are_ranked_by_their_loss_and_missing_ones_come_last() -> None:
    scores = {1: None, 2: RungScore(0.0, 3.0), 3: RungScore(0.0, 2.0), 4: RungScore(math.nan), 5: RungScore(1.0, 9.0)}
    assert ranked(scores, lower=False) == [5, 3, 2, 1, 4]
    assert ranked({1: RungScore(2.0), 2: RungScore(1.0)}, lower=True) == [2, 1]


def test_as_many_runs_start_as_there_is_room_for() -> None:
    new = [seen(number, "new") for number in range(1, 5)]
    assert next_actions(a_plan(), new, [], 2) == Actions(start=(1, 2))
    assert next_actions(a_plan(), new, [], -1) == Actions()


def test_a_run_that_was_interrupted_comes_before_new_ones() -> None:
    views = [seen(1, "running"), seen(2, "new"), seen(3, "idle"), seen(4, "new")]
    assert next_actions(a_plan(), views, [], 1).start == (3,)


def test_a_run_stops_at_its_rung_and_waits_for_the_others() -> None:
    views = [seen(1, "running", 5.0), seen(2, "idle", 4.0), seen(3, "running"), seen(4, "ended")]
    assert next_actions(a_plan(), views, [], 0) == Actions(stop=(1,))
    views = [seen(1, "idle", 5.0), seen(2, "idle", 4.0), seen(3, "running"), seen(4, "ended")]
    assert next_actions(a_plan(), views, [], 1) == Actions()


def test_the_better_half_survives_a_rung() -> None:
    views = [seen(1, "idle", 5.0), seen(2, "idle", 7.0), seen(3, "idle", 6.0), seen(4, "ended")]
    found = next_actions(a_plan(), views, [], 2).settled
    assert found == RungResult({"1": 5.0, "2": 7.0, "3": 6.0, "4": None}, (2, 3))
    lower = next_actions(a_plan(lower=True), views, [], 2).settled
    assert lower is not None
    assert lower.survivors == (1, 3)


def test_survivors_train_on_and_the_others_do_not() -> None:
    views = [seen(1, "idle", 5.0), seen(2, "idle", 7.0), seen(3, "idle", 6.0), seen(4, "ended")]
    assert next_actions(a_plan(), views, [settled(2, 3)], 2) == Actions(start=(2, 3))


def test_a_run_that_lost_and_still_trains_is_stopped_again() -> None:
    views = [seen(1, "running", 5.0), seen(2, "running", 7.0), seen(3, "idle", 6.0), seen(4, "ended")]
    assert next_actions(a_plan(), views, [settled(2, 3)], 0) == Actions(stop=(1,))


def test_a_run_that_overtook_the_next_rung_does_not_start_again_for_it() -> None:
    views = [seen(2, "idle", 7.0, 8.0), seen(3, "idle", 6.0, 9.0)]
    found = next_actions(a_plan(), views, [settled(2, 3)], 2)
    assert found.start == ()
    assert found.settled == RungResult({"2": 8.0, "3": 9.0}, (3,))


def test_a_sweep_is_over_when_the_last_survivor_has_ended() -> None:
    views = [seen(1, "idle", 1.0), seen(2, "ended", 7.0, 8.0), seen(3, "running", 6.0, 7.0), seen(4, "ended")]
    both = [settled(2, 3), settled(2)]
    assert next_actions(a_plan(), views, both, 1) == Actions(stop=(3,)), "a loser still has machines"
    views[2] = seen(3, "idle", 6.0, 7.0)
    assert next_actions(a_plan(), views, both, 1) == Actions(over=True)
    ended = [seen(number, "ended") for number in range(1, 5)]
    assert next_actions(a_plan(rungs=()), ended, [], 2) == Actions(over=True)


def test_a_sweep_whose_runs_all_fail_ends() -> None:
    ended = [seen(number, "ended") for number in range(1, 5)]
    results: list[RungResult] = []
    while not (actions := next_actions(a_plan(), ended, results, 2)).over:
        assert actions.settled is not None
        results.append(actions.settled)
    assert [one.survivors for one in results] == [(), ()]
