from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Tiny, tiny_engine, tiny_job

from packtrain.recipes.recipe import no_pulse
from packtrain.train.evaluation import LeftEarly, evaluate, spread
from packtrain.train.world import World


@settings(deadline=None)
@given(st.integers(0, 2000), st.integers(0, 2000))
def test_ids_are_spread_evenly_over_all_and_none_comes_twice(count: int, wanted: int) -> None:
    ids = spread(count, wanted).tolist()
    assert len(ids) == min(count, wanted)
    assert ids == sorted(set(ids))
    assert all(0 <= one < count for one in ids)
    if ids:
        gaps = {after - before for before, after in pairwise([*ids, count])}
        assert ids[0] == 0
        assert max(gaps) - min(gaps) <= 1


def test_all_are_chosen_where_all_are_wanted() -> None:
    assert spread(7, 7).tolist() == list(range(7))
    assert spread(7, 100).tolist() == list(range(7))
    assert spread(0, 5).tolist() == []


def test_an_evaluation_is_the_same_each_time_and_leaves_the_weights_alone() -> None:
    """Dropout must be off, or it would not be."""
    engine, recipe = tiny_engine(), Tiny(tiny_job())
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    first, second = (evaluate(engine, recipe, World(), "valid", 3, 1) for _ in range(2))
    assert first == second
    assert first is not None
    assert first.values.keys() == {"closeness", "loss"}
    assert all(tensor.equal(before[name]) for name, tensor in engine.model.state_dict().items())


def test_an_evaluation_that_is_left_early_has_no_scores_and_leaves_no_pulse_behind() -> None:
    def leave() -> None:
        raise LeftEarly

    engine, recipe = tiny_engine(), Tiny(tiny_job())
    assert evaluate(engine, recipe, World(), "valid", 3, 1, pulse=leave) is None
    assert recipe.pulse is no_pulse


def test_a_worker_that_has_done_its_part_says_so_before_it_waits_for_the_others() -> None:
    """How long the others take is not its fault."""
    said: list[str] = []

    class Listening(World):
        def gather(self, data: bytes) -> list[bytes]:
            said.append("gather")
            return super().gather(data)

    evaluate(
        tiny_engine(), Tiny(tiny_job()), Listening(), "valid", 3, 1, pulse=lambda: said.append("pulse"),
        before_waiting=lambda: said.append("waits"),
    )  # fmt: skip
    assert said == ["pulse", "waits", "gather"]
