from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from packtrain.data.order import Ids
from packtrain.job import Job
from packtrain.recipes import EvaluationRequest, Measurement, Scores
from packtrain.train.evaluator import Evaluator, evaluate
from packtrain.train.world import StopRequested, World
from train.forking import WorkerForker
from train.tiny import Tiny, tiny_engine, tiny_job


def test_an_evaluation_is_repeatable_and_does_not_change_the_weights() -> None:
    """Dropout must be off, or it would not be."""
    engine, recipe = tiny_engine(), Tiny(tiny_job())
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    first, second = (evaluate(engine, recipe, World(), "valid", 3, 1) for _ in range(2))
    assert first == second
    assert first is not None
    assert first.values.keys() == {"closeness", "loss"}
    assert all(tensor.equal(before[name]) for name, tensor in engine.model.state_dict().items())


def test_an_evaluation_abandoned_for_a_stop_has_no_scores() -> None:
    def leave() -> None:
        raise StopRequested

    engine, recipe = tiny_engine(), Tiny(tiny_job())
    assert Evaluator(engine, recipe, World(), 1, pulse=leave).evaluate("valid", 3) is None


def test_the_watchdog_is_paused_before_a_rank_waits_for_the_others() -> None:
    """How long the others take is not its fault."""
    said: list[str] = []

    class Listening(World):
        def gather(self, data: bytes) -> list[bytes]:
            said.append("gather")
            return super().gather(data)

    pulse, waits = (lambda: said.append("pulse")), (lambda: said.append("waits"))
    Evaluator(tiny_engine(), Tiny(tiny_job()), Listening(), 1, pulse, waits).evaluate("valid", 3)
    assert said[:3] == ["pulse", "waits", "gather"]


class Seen(Tiny):
    """Notes what it measures, and what it is to score."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.measured: list[tuple[list[int], list[int]]] = []
        self.scored: list[tuple[list[int], list[str]]] = []

    def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
        self.measured.append((request.ids.tolist(), request.decode_ids.tolist()))
        return super().measure(model, request)

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        self.scored.append((decode_ids.tolist(), [output for part in parts for output in part.outputs]))
        return super().score(split, decode_ids, parts)


def test_known_measurements_of_the_same_weights_are_reused() -> None:
    recipe = Seen(tiny_job())
    evaluator = Evaluator(tiny_engine(), recipe, World(), 1)
    few = evaluator.evaluate("valid", 2)
    assert few is not None
    whole = evaluator.evaluate("valid", None, earlier=few)
    assert whole is not None
    assert recipe.measured == [([0, 1, 2, 3, 4], [0, 2]), ([], [1, 3, 4])]
    assert recipe.scored == [([0, 2], ["0", "2"]), ([0, 1, 2, 3, 4], ["0", "1", "2", "3", "4"])]
    assert whole.scores == replace(few.scores, counts={"closeness": 5, "loss": 5})
    assert whole.seconds > few.seconds


def test_outputs_that_match_no_samples_are_measured_again() -> None:
    class Silent(Seen):
        def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
            return replace(super().measure(model, request), outputs=["one for all"])

    recipe = Silent(tiny_job())
    evaluator = Evaluator(tiny_engine(), recipe, World(), 1)
    whole = evaluator.evaluate("valid", None, earlier=evaluator.evaluate("valid", 2))
    assert whole is not None
    assert recipe.measured == [([0, 1, 2, 3, 4], [0, 2]), ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])]
    assert recipe.scored[-1] == ([0, 1, 2, 3, 4], ["one for all"])


def test_the_first_rank_scores_for_all_ranks_exactly(forker: WorkerForker) -> None:
    first, second = forker.succeed("score", 2)
    assert (first.pop("scored"), second.pop("scored")) == (1, 0)
    assert first == second
    assert first["third"] == 1 / 3
    assert first["nothing"] == "nan"
    assert first["samples"] == 1
