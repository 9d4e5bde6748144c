"""The loop: batches in, steps, evaluations and checkpoints when they are due, until the goal or a stop.

    for each global batch from the checkpoint's position on:
        where a rank is short of data, wait until all have theirs, or leave together for a stop
        step; start to add up the loss, votes to stop or save and the first rank's clock over all ranks
        read the sums of the step before and record them
        evaluate and save, when due and the weights are the same on all ranks
        stop, when any rank voted for it; end, at the goal

Every decision is a function of numbers that are the same on all ranks, so no rank waits for one that left.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from packtrain.data.loader import STORE_SECONDS, Loaded, Loader, Order, Position, parts
from packtrain.errors import PacktrainError
from packtrain.job.job import Job
from packtrain.job.train import Fsdp
from packtrain.recipes import Recipe, Scores
from packtrain.run.records import Point, Result
from packtrain.run.run import Run
from packtrain.train.checkpointer import Keeper
from packtrain.train.control import Control, Notice, WorkerError
from packtrain.train.engine import Engine, NotANumber, Stepped, on_device, suspects
from packtrain.train.evaluator import Evaluation, Evaluator
from packtrain.train.progress import Progressed, Recurring, reached
from packtrain.train.recorder import SPANS, Books, Clock, clock_of
from packtrain.train.schedule import Moment
from packtrain.train.state import Progress
from packtrain.train.watchdog import DATA, Watch
from packtrain.train.world import ENOUGH, Ballot, Gate, LeftEarly, Outcome, World


@dataclass(frozen=True)
class Pending:
    """A step whose sums over all ranks are still on their way."""

    number: int
    stepped: Stepped
    loaded: Loaded
    seconds: dict[str, float]
    ballot: Ballot
    last: bool


@dataclass(frozen=True)
class Wanted:
    """What has fallen due and waits until the weights are the same on all ranks."""

    evaluation: bool = False
    save: bool = False
    stop: bool = False
    end: bool = False

    def __bool__(self) -> bool:
        return self.evaluation or self.save or self.stop or self.end


class Trainer:
    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        world: World,
        generation: int,
        control: Control,
        notice: Notice | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._run, self._job, self._recipe, self._world = run, run.job, recipe, world
        self._generation, self._control, self._notice = generation, control, notice or Notice()
        self._clock = clock or clock_of(world.device)
        self._clock_start = time.monotonic()
        self._books = Books(run, generation, world.rank)
        self._engine = Engine(recipe, run.job.train, world, self._clock)
        self._progress = Progress()
        self._saved: Progress | None = None
        self._prepared: int | None = None
        self._gate = Gate(world, self._asked_to_stop)
        self._short = True  # until ranks have told each other that they have data
        self._restored_seconds = 0.0
        self._evaluated: tuple[int, Evaluation] | None = None
        self._keeper = Keeper(run, generation, recipe, self._engine, world, self._books, control.directory)
        patience = run.job.train.patience.value
        self._watch = Watch(patience, control.directory / f"stacks-{world.rank}.txt", self._tell_hang, world)
        beam = run.job.evaluate.beam
        self._evaluator = Evaluator(self._engine, recipe, world, beam, self._pulse, self._watch.rest)

    @property
    def step(self) -> int:
        """How many steps have been made."""
        return self._progress.step

    def train(self) -> None:
        """Returns at the goal, with the result written, or once a stop is committed, without a result.

        The result comes last: agents that see it end what is still running.
        """
        result: Result | None = None
        try:
            self._progress = self._keeper.restore()
            self._restored_seconds = self._progress.seconds
            self._saved = self._progress if self._progress.step else None
            self._set_pace()
            self._record("start", self._progress.step, {})
            for note in self._recipe.notes if self._world.is_first else ():
                self._books.tell("data", note)
            self._clock.mark("start")
            reached_goal = self._loop()
            self._watch.rest()
            self._keeper.close()
            self._clock.mark("save")
            if reached_goal:
                result = self._finish()
        finally:
            self._keeper.abandon()
            self._watch.close()
            self._clock.mark("other")
            self._books.spend(self._progress.step, self._clock.take(), now=True)
            self._books.close()
        if result is not None:
            self._run.finish(result)

    def _tell_hang(self, text: str) -> None:
        self._books.tell("hang", text)
        self._control.tell_error(WorkerError(self._world.rank, text, False, time.time(), "hang", self.step + 1))

    def _asked_to_stop(self) -> bool:
        return self._notice.given or self._control.asked_to_stop()

    def _set_pace(self) -> None:
        evaluate, save = self._job.evaluate.every, self._job.checkpoint.every
        self._evaluations = Recurring(evaluate, self._restored_seconds)
        self._saves = Recurring(None if save == "auto" else save, self._restored_seconds)

    # The loop.

    def _loop(self) -> bool:
        """Whether the goal was reached; if not, a stop was asked for."""
        feed, start = Feed(self._recipe, self._job, self._world), self._progress.position
        now = Progressed(self._progress.step, feed.epochs_at(start), self._progress.seconds)
        if self._progress.owes_evaluation:
            if not self._evaluate():
                return False
            self._save()
        if reached(self._job.train.duration, now):
            return True
        loader = feed.from_position(start)
        pending: Pending | None = None
        wanted = Wanted()
        try:
            while True:
                current = self._step(loader)
                outcome = self._settle(pending) if pending else None
                pending = current
                before, now = now, _advanced(current, outcome.seconds if outcome else now.seconds)
                wanted = self._due(wanted, before, now, outcome)
                if wanted and (current.last or self._engine.exchange.is_common(now.steps)):
                    self._settle(pending)
                    pending = None
                    wanted = self._do(wanted)
                    if wanted.stop or wanted.end:
                        return not wanted.stop
                    wanted = Wanted()
        except LeftEarly:
            if pending is not None:
                self._settle(pending)
            if self._saved != self._progress:
                self._save()
            return False
        finally:
            loader.close()

    def _due(self, wanted: Wanted, before: Progressed, now: Progressed, outcome: Outcome | None) -> Wanted:
        end = wanted.end or reached(self._job.train.duration, now)
        evaluation = wanted.evaluation or end or self._evaluations.due(before, now)
        stop = wanted.stop or (outcome is not None and outcome.stop)
        voted = outcome is not None and outcome.save
        save = voted or self._saves.due(before, now)
        return Wanted(evaluation, wanted.save or save or stop or end, stop, end)

    def _do(self, wanted: Wanted) -> Wanted:
        """Does what is due; what to do about stopping and ending may have changed by then."""
        save = wanted.save
        if wanted.evaluation:
            self._progress = replace(self._progress, owes_evaluation=True)
            best = self._progress.best_score
            if not wanted.stop and self._evaluate():
                save |= self._progress.best_score != best and self._job.checkpoint.keep_best > 0
            else:
                wanted, save = replace(wanted, stop=True), True
        if save:
            self._save()
        return wanted

    def _is_last(self, loaded: Loaded) -> bool:
        """Whether the goal is reached with this batch; a goal in time is not known before."""
        goal = self._job.train.duration
        after = Progressed(self._progress.step + 1, _epochs(loaded), 0.0)
        return goal.unit != "seconds" and reached(goal, after)

    def _step(self, loader: Loader) -> Pending:
        number = self._progress.step
        loaded = self._fed(loader)
        # Where pictures or batches have another size, steps have other like: kernels may be compiled anew.
        self._watch.begin(f"step {self._job.train.in_epoch(loaded.at.epoch)}", f"step {number + 1}")
        last = self._is_last(loaded)
        if self._prepared != loaded.at.epoch:
            self._engine.before_update()  # a recipe may change weights between epochs
            self._recipe.prepare(loaded.at.epoch, self._engine.model)
            self._engine.model.train()  # a part that was frozen may be in another mode now
            self._prepared = loaded.at.epoch
        pieces = [on_device(arrays, self._world.device) for arrays in loaded.pieces]
        now = Moment(number, loaded.at.epoch + loaded.at.batch / loaded.batches_in_epoch)
        try:
            stepped = self._engine.step(now, pieces, loaded.cost, loaded.own_cost, last)
        except NotANumber as error:
            self._watch.rest()  # each sample is tried by itself
            raise NotANumber(f"{error}; {self._suspects(loaded)}; nothing was updated") from error
        self._progress = replace(
            self._progress,
            step=number + 1,
            position=loaded.after,
            seconds=self._seconds_so_far(),
            owes_evaluation=False,
        )
        exchange = self._clock.spent("exchange")
        seconds = self._clock.take()
        ballot = Ballot(
            self._world,
            stepped.loss,
            self._asked_to_stop(),
            loader.at_hand < ENOUGH,
            self._keeper.is_due(self._progress.seconds),
            self._progress.seconds,
            exchange,
        )
        return Pending(number, stepped, loaded, seconds, ballot, last)

    def _fed(self, loader: Loader) -> Loaded:
        """The data of the next step; where a rank may lack its own, when all have theirs, or LeftEarly for a stop."""
        name = f"data of step {self._progress.step + 1}"
        self._watch.begin(DATA, f"the {name}", STORE_SECONDS)
        # Where ranks have nothing in common yet there is nothing to leave with.
        together = self._short and self._engine.exchange.is_common(self._progress.step)
        loaded = loader.next(lambda: together and self._gate.vote(ready=False))
        self._clock.mark("data")
        if together and self._world.num_ranks > 1:
            self._watch.begin("gate", f"the wait for the others' {name}")
            while not self._gate.vote(ready=True):
                pass  # those without data take their time between two votes
            self._clock.mark("wait")
        return loaded

    def _suspects(self, loaded: Loaded) -> str:
        return suspects(self._engine, self._recipe, self._world, self._job.train.exchange, loaded)

    def _seconds_so_far(self) -> float:
        """Time spent on the run by this generation and the ones whose work it goes on from."""
        return self._restored_seconds + time.monotonic() - self._clock_start

    def _settle(self, pending: Pending) -> Outcome:
        """Reads a step's sums and records them."""
        self._clock.mark("other")
        outcome = pending.ballot.count()
        self._short = outcome.short
        self._clock.mark("wait")
        waited = outcome.waited(self._world.rank)
        seconds = dict.fromkeys(SPANS, 0.0) | pending.seconds
        seconds["exchange"] -= waited
        seconds["wait"] += waited
        values = {
            "loss": outcome.loss / pending.loaded.cost,
            "rate": pending.stepped.rate,
            "gradient_norm": pending.stepped.gradient_norm,
            self._recipe.unit: float(pending.loaded.cost),
            "epoch": _epochs(pending.loaded),
            "elapsed_seconds": outcome.seconds,
            "step_seconds": sum(seconds.values()),
            **{f"{span}_seconds": spent for span, spent in seconds.items() if spent},
        }
        if pending.stepped.left_out:
            values["gradient_norm"], values["left_out"] = 0.0, 1.0
        self._record("train", pending.number + 1, values)
        self._control.tell_under_way()
        self._books.spend(pending.number + 1, seconds)
        self._clock.mark("other")
        return outcome

    # What interrupts it.

    def _pulse(self) -> None:
        self._watch.begin("batch of an evaluation", least=STORE_SECONDS)
        if self._asked_to_stop():
            raise LeftEarly

    def _measure(self, split: str, decode: int | None, known: Evaluation | None = None) -> Evaluation | None:
        """Measures and records; None if it was left for a stop."""
        self._watch.rest()
        epoch = max(0, self._progress.position.epoch - (self._progress.position.batch == 0))
        found = self._evaluator.evaluate(split, decode, epoch, known)
        self._clock.mark("evaluation")
        if found is not None:
            self._record(split, self._progress.step, found.values, found.scores)
        return found

    def _evaluate(self) -> bool:
        """Measures the validation split; whether that was done, and not left for a stop."""
        if self._recipe.count("valid"):
            found = self._measure("valid", self._job.evaluate.samples)
            if found is None:
                return False
            self._evaluated = (self._progress.step, found)
        self._evaluations.over()
        self._progress = replace(self._progress, owes_evaluation=False)
        score, best = self._score(), self._progress.best_score
        if score is not None and (best is None or score > best):
            self._progress = replace(self._progress, best_score=score)
        return True

    def _score(self) -> float | None:
        """The score of the weights as they are now, if they have been measured: more is better."""
        if self._evaluated is None or self._evaluated[0] != self._progress.step:
            return None
        name = self._job.checkpoint.best_by or self._recipe.measure_of_best
        value = self._evaluated[1].scores.values.get(name)
        if value is None or not math.isfinite(value):
            return None
        return -value if name in self._recipe.lower_is_better else value

    def _save(self) -> None:
        self._keeper.save(self._progress, self._score())
        self._saved = self._progress
        self._saves.over()
        self._clock.mark("save")

    def _finish(self) -> Result | None:
        """The last measure, on the test split or else on all of the validation split; the result, on the first rank.

        None also when the measure was left for a stop: it is made when the run goes on.
        """
        split = "test" if self._recipe.count("test") else "valid"
        scores = Scores({})
        if self._recipe.count(split):
            found = self._measure_all(split)
            if found is None:
                return None
            scores = found.scores
        if not self._world.is_first:
            return None
        if not self._keeper.has_committed(self._progress.step):
            raise PacktrainError("the last checkpoint did not reach the store; the run is not finished")
        self._books.flush_points()
        return Result(
            "finished",
            f"reached {self._job.train.duration}",
            self._progress.step,
            self._seconds_so_far(),
            {f"{split}.{name}": value for name, value in scores.values.items()},
            {f"{split}.{name}": text for name, text in scores.signatures.items()},
            scores.samples,
        )

    def _measure_all(self, split: str) -> Evaluation | None:
        """What the last evaluation has of it is not measured again; without it, it comes in the same parts."""
        known: Evaluation | None = None
        if split == "valid":
            if (self._evaluated is None or self._evaluated[0] != self._progress.step) and not self._evaluate():
                return None
            assert self._evaluated is not None
            known = self._evaluated[1]
            if len(known.decoded) == self._recipe.count(split):
                return known
        if self._world.is_first:
            self._books.tell("evaluation", f"measures all of the {split} split")
        return self._measure(split, None, known)

    def _record(self, kind: str, step: int, values: dict[str, float], scores: Scores | None = None) -> None:
        samples = scores.samples if scores else ()
        self._books.record(Point(kind, self._generation, step, time.time(), values, samples))  # type: ignore[arg-type]


def _epochs(loaded: Loaded) -> float:
    return loaded.after.epoch + loaded.after.batch / loaded.batches_in_epoch


def _advanced(pending: Pending, seconds: float) -> Progressed:
    return Progressed(pending.number + 1, _epochs(pending.loaded), seconds)


# What a rank is fed: its part of every global batch, in the order of the run.


class Feed:
    def __init__(self, recipe: Recipe, job: Job, world: World) -> None:
        self._recipe, self._settings, self._world = recipe, job.train, world
        self._order = Order(
            recipe.costs,
            recipe.likeness,
            lambda epoch: job.train.in_epoch(epoch).batch.value,
            job.train.seed,
            recipe.lengths,
            recipe.pack.manifest.splits["train"].sources,
            tuple(source.weight for source in job.data.train),
        )

    def epochs_at(self, position: Position) -> float:
        if not position.batch:
            return position.epoch
        return position.epoch + position.batch / len(self._order.batches(position.epoch))

    def from_position(self, start: Position) -> Loader:
        piece = self._settings.micro_batch
        return Loader(
            parts(
                self._order,
                self._recipe.batch,
                start,
                self._world.rank,
                self._world.num_ranks,
                None if piece is None else piece.value,
                self._recipe.fetching,
                alike=isinstance(self._settings.exchange, Fsdp),  # every pass through the model is a meeting there
            )
        )
