"""Evaluates a model on a split: every rank measures its part, and every sample counts once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from packtrain.data.order import Ids, block, spread
from packtrain.recipes import EvaluationRequest, Measurement, Recipe, Scores
from packtrain.recipes.recipe import SHOWN_SAMPLES
from packtrain.train.engine import Engine
from packtrain.train.world import StopRequested, World

_ABANDONED = b""  # what a rank sends if a stop interrupted its part; a measurement is never empty
_NONE = np.zeros(0, np.int64)
_MEASUREMENT, _SCORES = TypeAdapter(Measurement), TypeAdapter(Scores)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The outcome on a split, equal on all ranks: the measurements of every rank, and the scores of all of them.

    Only `pictures` are this rank's own: those of the samples in the scores that it measured, by their digests.
    """

    measurements: Sequence[Measurement]
    decoded: Ids
    scores: Scores
    seconds: float
    pictures: Mapping[str, bytes]

    @property
    def outputs(self) -> list[str]:
        """Return the outputs of `decoded`, in that order; a recipe may have others, or none."""
        return [output for measurement in self.measurements for output in measurement.outputs]

    @property
    def values(self) -> dict[str, float]:
        return {**self.scores.values, "evaluation_seconds": self.seconds}


class Evaluator:
    """`pulse` is called between batches and may raise StopRequested; `before_waiting` when a rank's part is done."""

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        world: World,
        beam: int,
        pulse: Callable[[], None] = lambda: None,
        before_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._recipe, self._world, self._beam = engine, recipe, world, beam
        self._pulse, self._before_waiting = pulse, before_waiting

    def evaluate(
        self, split: str, decode: int | None, epoch: int = 0, earlier: Evaluation | None = None
    ) -> Evaluation | None:
        """Evaluate the model; None if a stop came first on any rank.

        `decode` samples are decoded without the reference, all if None. What an `earlier` evaluation of the same
        weights on the same split has is not measured again.
        """
        started = time.perf_counter()
        if earlier is not None and len(earlier.outputs) != len(earlier.decoded):
            earlier = None  # this recipe's outputs cannot be matched to samples
        count = self._recipe.count(split)
        decoded = spread(count, count if decode is None else decode)
        missing = decoded if earlier is None else np.setdiff1d(decoded, earlier.decoded)
        pictures: dict[str, bytes] = {}
        measurements = self._measured(split, missing, epoch, pictures, outputs_alone=earlier is not None)
        if measurements is None:
            return None
        if earlier is not None:
            # Merge the missing outputs into the known ones, in sample order.
            ids = np.concatenate([earlier.decoded, missing])
            outputs = [*earlier.outputs, *(output for measurement in measurements for output in measurement.outputs)]
            ordered = [outputs[at] for at in np.argsort(ids, kind="stable").tolist()]
            first, *following = earlier.measurements
            measurements = [replace(first, outputs=ordered), *(replace(later, outputs=[]) for later in following)]
        if self._world.is_first:  # for all: comparing outputs with a corpus takes a while
            scores = self._recipe.score(split, decoded, measurements)
            self._world.share(json.dumps(asdict(scores)).encode())
        else:
            scores = _SCORES.validate_json(self._world.share(b""))
        seconds = time.perf_counter() - started + (earlier.seconds if earlier else 0.0)
        shown = {sample.picture for sample in scores.samples}
        shown_pictures = {digest: jpeg for digest, jpeg in pictures.items() if digest in shown}
        return Evaluation(measurements, decoded, scores, seconds, shown_pictures)

    def _measured(
        self, split: str, decoded: Ids, epoch: int, pictures: dict[str, bytes], outputs_alone: bool
    ) -> list[Measurement] | None:
        """Return the measurements of every rank, on all ranks; `pictures` gets those of this rank."""
        rank, num_ranks = self._world.rank, self._world.num_ranks
        model = self._engine.evaluation_model()
        mine = _NONE if outputs_alone else self._recipe.divide(split, num_ranks)[rank]
        # Divided separately: decoding takes far longer than a loss, so each rank gets its share of both.
        mine_decoded = decoded[list(block(len(decoded), rank, num_ranks))]
        # Of the same weights the same samples are shown: a second part adds only outputs.
        shown = None if outputs_alone else np.intersect1d(mine_decoded, decoded[:SHOWN_SAMPLES])
        try:
            with self._engine.precision.compute():
                request = EvaluationRequest(split, mine, mine_decoded, self._beam, epoch, self._pulse, show_ids=shown)
                measured = self._recipe.measure(model, request)
            pictures.update(measured.pictures)
            message = json.dumps(asdict(replace(measured, pictures={}))).encode()
        except StopRequested:
            message = _ABANDONED
        # The other ranks may need much longer: what follows is not this rank's hang.
        self._before_waiting()
        gathered = self._world.gather(message)
        return None if _ABANDONED in gathered else [_MEASUREMENT.validate_json(data) for data in gathered]


def evaluate(engine: Engine, recipe: Recipe, world: World, split: str, decode: int | None, beam: int) -> Scores | None:
    """Return the scores of the model, equal on all ranks."""
    evaluation = Evaluator(engine, recipe, world, beam).evaluate(split, decode)
    return None if evaluation is None else evaluation.scores
