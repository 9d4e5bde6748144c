"""The training loop.

    restore the newest checkpoint, or load the first weights
    until the goal is reached or a stop is requested:
        next batch    if a rank may be short of data, all wait at the data barrier, or leave together for a stop
        step          forward, backward with gradient sync, update; start the step sync (loss, votes, clock)
        settle        read the sync of the step before, and record that step
        decide        what is due: an evaluation, a save, the end
        evaluate      when due and all ranks have weights in common, after settling this step, too
        save          likewise; also when an evaluation found a new best, before a stop and at the end
    commit what was saved
    evaluate the full test split, or else the full validation split, and write the result

Every decision depends on numbers that are equal on all ranks, so no rank ever waits for one that has left. The sync of
a step is read while the next step computes, so the loop learns of a stop or a vote to save one step late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

from packtrain.data.loader import STORE_SECONDS, LoadedBatch, Loader, RankBatches
from packtrain.errors import PacktrainError
from packtrain.job.job import TrainSettings
from packtrain.observe.measure import measure_of
from packtrain.observe.spans import RECORDED
from packtrain.recipes import Recipe, Scores
from packtrain.recipes.recipe import training_order
from packtrain.run.checkpoint import Superseded
from packtrain.run.records import Point, Result
from packtrain.run.run import Run
from packtrain.train.checkpointer import Checkpointer
from packtrain.train.control import Control, StopSignal, WorkerError
from packtrain.train.engine import Engine, NonFinite, StepResult, name_bad_samples
from packtrain.train.evaluator import Evaluation, Evaluator
from packtrain.train.progress import Progress, Recurring, reached
from packtrain.train.recorder import Clock, Recorder, StepProfile, clock_of
from packtrain.train.transfer import Feed, SentBatch, pinned
from packtrain.train.watchdog import DATA, Watchdog
from packtrain.train.world import ENOUGH_BATCHES, StepSync, StepTotals, StopRequested, World, pass_data_barrier

_LEAST_HEED_SECONDS = 3.0
_PROFILED = ("start", "resumed")  # generations that a person started: a failure does not record another trace
_KEEP_SECONDS = 20.0  # for a commit in progress when training fails: a launcher gives its workers 30
_PEER_SECONDS = 3.0  # for what another rank, which may have died, has to add to a checkpoint


@dataclass(frozen=True)
class PendingStep:
    """A step that was made `before` it was known to be good; its sync is in progress. `last` if it reaches the goal."""

    before: Progress
    step: int
    epochs: float
    result: StepResult
    batch: LoadedBatch
    seconds: dict[str, float]
    sync: StepSync
    last: bool


@dataclass(frozen=True)
class Due:
    """The work that is due after a step, equal on all ranks. It stays due until they have weights in common."""

    evaluate: bool = False
    save: bool = False
    stop: bool = False
    end: bool = False


class Trainer:
    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        world: World,
        generation: int,
        control: Control,
        stop_signal: StopSignal | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._run, self._job, self._recipe, self._world = run, run.job, recipe, world
        self._generation, self._control, self._stop_signal = generation, control, stop_signal or StopSignal()
        self._clock = clock or clock_of(world.device)
        self._started = time.monotonic()
        self._startup_seconds = self._clock.spent("start")  # before that
        self._recorder = Recorder(run, generation, world.rank)
        self._engine = Engine(recipe, run.job.train, world, self._clock)
        self._checkpointer = Checkpointer(
            run, generation, recipe, self._engine, world, self._recorder, control.directory
        )
        stacks = control.directory / f"stacks-{world.rank}.txt"
        self._watchdog = Watchdog(run.job.train.patience.value, stacks, self._report_hang, world)
        if run.job.train.compile:
            self._watchdog.watch_compiler()
        self._evaluator = Evaluator(
            self._engine, recipe, world, run.job.evaluate.beam, self._pulse, self._watchdog.pause
        )
        self._profile: StepProfile | None = None
        self._short_of_data = True  # until the first step sync says that all ranks have batches ready
        self._progress = self._agreed = Progress()  # here; and as all ranks see it, by the clock of the first one
        self._saved: Progress | None = None
        self._prepared_epoch: int | None = None
        self._evaluated: tuple[int, Evaluation] | None = None  # the step of the last evaluation, and its outcome

    @property
    def step(self) -> int:
        return self._progress.step

    def heed_seconds(self) -> float:
        """Return how long a signal may go unheard: a step may wait for the device that long."""
        return max(_LEAST_HEED_SECONDS, 2 * self._watchdog.usual_seconds())

    def keep(self) -> None:
        """Return when everything that was saved is committed. May be called from any thread."""
        self._checkpointer.close(_PEER_SECONDS)

    def train(self) -> None:
        """Train to the goal and write the result, or commit and return without one when a stop is requested."""
        result: Result | None = None
        try:
            self._restore()
            self._clock.mark("start")
            reached_goal = self._loop()
            self._watchdog.pause()
            self._checkpointer.close()  # before the final evaluation, which may take long: the work is safe by then
            self._clock.mark("save")
            if reached_goal:
                result = self._final_result()
        except Exception:
            # A failure must not cost what is being saved as well.
            with suppress(Superseded):
                self._checkpointer.close(_PEER_SECONDS, _KEEP_SECONDS)
            raise
        finally:
            self._checkpointer.abandon()
            self._watchdog.close()
            self._clock.mark("other")
            self._recorder.time_spent(self._progress.step, self._clock.take(), at_once=True)
            self._recorder.close()
        # Last of all: a node that sees the result ends whatever is still running.
        if result is not None:
            self._run.finish(result)

    def _restore(self) -> None:
        self._progress = self._checkpointer.restore()
        self._restored_seconds = self._progress.seconds
        self._saved = self._progress if self._progress.step else None
        save_every = self._job.checkpoint.every
        self._evaluations = Recurring(self._job.evaluate.every, self._restored_seconds)
        self._saves = Recurring(None if save_every == "auto" else save_every, self._restored_seconds)
        # Readers discard points of earlier generations after this step.
        self._record("start", self._progress.step, self._conditions())
        for note in self._recipe.notes if self._world.is_first else ():
            self._recorder.event("data", note)
        if (warning := small_share(self._job.train, self._world)) is not None and self._is_new_size():
            self._recorder.event("warning", warning)
        latest = self._run.latest_generation() if self._job.train.profile else None
        if self._job.train.profile and self._world.is_first and (latest is None or latest.cause in _PROFILED):
            self._begin_profile(int(self._job.train.profile.value))

    def _is_new_size(self) -> bool:
        """True at the start of a run, and if the generation before had another number of workers."""
        before = [sum(member.workers for member in generation.members) for generation in self._run.generations()[:-1]]
        return before[-1] != self._world.num_ranks if before else self._progress.step == 0

    def _begin_profile(self, steps: int) -> None:
        # A name that TensorBoard's plugin recognizes: worker, milliseconds, and this suffix.
        name = f"generation-{self._generation}-rank-{self._world.rank}.{int(time.time() * 1000)}.pt.trace.json"
        path = self._control.directory / name

        def record() -> None:
            self._recorder.output(f"profile/{name}.gz", path)
            self._recorder.event("data", f"recorded a trace of steps: packtrain get {self._run.name} profile")

        self._profile = StepProfile(steps, self._world.device, path, record)

    def _conditions(self) -> dict[str, float]:
        """Return what this generation trains with: numbers that explain the time of its steps. Collective."""
        sync, capacity = self._engine.gradient_sync, self._world.measure_link()
        values = {
            "workers": float(self._world.num_ranks),
            "gradient_bytes": float(sync.message_bytes),
            "sent_bytes_per_step": sync.sent_bytes(),
        }
        return values if capacity is None else {**values, "link_bytes_per_second": capacity}

    def _loop(self) -> bool:
        """Train until the goal is reached (True) or a stop is requested (False)."""
        if self._progress.owes_evaluation:  # a stop interrupted it, or came first
            if not self._evaluate():
                return False
            self._save()
        if reached(self._job.train.duration, self._progress):
            return True
        feed = Feed(self._open_loader(), self._world.device, self._recipe.on_host)
        pending: PendingStep | None = None
        self._agreed, due = self._progress, Due()
        try:
            while True:
                batch = self._next_batch(feed)
                # The sync of the previous step has had the time of this step to complete: reading it does not wait.
                previous, pending = pending, self._step(batch, feed)
                due = self._decide(due, None if previous is None else self._settle(previous))
                # With local steps the weights differ between syncs: what is due waits for the next one.
                is_common = pending.last or self._engine.gradient_sync.is_common(self._progress.step)
                if due == Due() or not is_common:
                    continue
                # Metrics up to this step must be recorded before it is evaluated or saved.
                self._settle(pending)
                pending = None
                if due.evaluate:
                    due = self._evaluate_due(due)
                if due.save:
                    self._save()
                if due.stop or due.end:
                    return not due.stop
                due = Due()
        except StopRequested:  # at the data barrier
            if pending is not None:
                self._settle(pending)
            if self._saved != self._progress:
                self._save()
            return False
        finally:
            feed.close()
            if self._profile is not None:
                self._profile.close()

    def _decide(self, due: Due, totals: StepTotals | None) -> Due:
        """Add what the step just made, and the sync of the step before it, make due."""
        before = self._agreed
        # Of the clocks, the first rank's counts, so that all ranks make the same decisions.
        agreed = self._agreed = replace(self._progress, seconds=before.seconds if totals is None else totals.seconds)
        end = due.end or reached(self._job.train.duration, agreed)
        stop = due.stop or (totals is not None and totals.stop)
        evaluate = due.evaluate or end or self._evaluations.due(before, agreed)
        is_voted = totals is not None and totals.save
        save = is_voted or self._saves.due(before, agreed) or due.save or stop or end
        return Due(evaluate, save, stop, end)

    def _evaluate_due(self, due: Due) -> Due:
        """Evaluate, and return what is due after that. After a stop the resumed run makes the evaluation."""
        best = self._progress.best_score
        self._progress = replace(self._progress, owes_evaluation=True)
        stop = due.stop or not self._evaluate()
        is_improved = self._progress.best_score != best
        save = due.save or stop or (is_improved and self._job.checkpoint.keep_best > 0)
        return replace(due, save=save, stop=stop)

    # The parts of a step.

    def _open_loader(self) -> Loader:
        """Load this rank's part of every global batch, in the run's order, from the next position on."""
        settings, recipe = self._job.train, self._recipe
        return Loader(
            RankBatches(
                training_order(recipe),
                lambda *batch_arguments: pinned(recipe.batch(*batch_arguments), self._world.device),
                self._progress.position,
                self._world.rank,
                self._world.num_ranks,
                None if settings.micro_batch is None else settings.micro_batch.value,
                recipe.prefetch,
                equal_counts=settings.exchange.shards_model,  # there every forward pass is a collective
            )
        )

    def _next_batch(self, feed: Feed) -> SentBatch:
        """Wait for the data of the next step, together with the other ranks if one may be short of it.

        Raises StopRequested on all ranks if a stop is requested while one of them waits for data.
        """
        name = f"data of step {self._progress.step + 1}"
        self._watchdog.begin(DATA, name, STORE_SECONDS)
        # Between two syncs of local steps there is no common state that all ranks could leave with.
        together = self._short_of_data and self._engine.gradient_sync.is_common(self._progress.step)
        batch = feed.next(lambda: together and self._all_have_data(False))
        self._clock.mark("data")
        if together and self._world.num_ranks > 1:
            self._watchdog.begin("data barrier", f"waiting for the other ranks' {name}")
            while not self._all_have_data(True):
                pass  # a rank without data votes a few times per second
            self._clock.mark("wait")
        return batch

    def _all_have_data(self, ready: bool) -> bool:
        return pass_data_barrier(self._world, ready, self._stop_requested())

    def _step(self, sent: SentBatch, feed: Feed) -> PendingStep:
        """Make a step and start its sync."""
        before, goal, batch = self._progress, self._job.train.duration, sent.loaded
        epochs = batch.after.epoch + batch.after.batch / batch.batches_in_epoch
        after = replace(before, step=before.step + 1, epochs=epochs, position=batch.after, owes_evaluation=False)
        # It is known before the step that it is the last one, except for a goal in wall time.
        last = goal.unit != "seconds" and reached(goal, after)
        # Steps compare only with steps of the same batch and image size: for another size kernels may be compiled.
        self._watchdog.begin(f"step {self._job.train.in_epoch(batch.at.epoch)}", f"step {after.step}")
        if self._prepared_epoch != batch.at.epoch:
            self._engine.before_update()  # a recipe may change weights between epochs
            self._recipe.prepare(batch.at.epoch, self._engine.model)
            self._engine.model.train()  # layers that the recipe has frozen or released change their mode
            self._prepared_epoch = batch.at.epoch
        with self._named_samples(batch):
            result = self._engine.step(before, sent.receive(), batch.cost, batch.own_cost, last)
        feed.send_ahead()
        # The time spent on the run by this generation and by those that it continues.
        self._progress = replace(after, seconds=self._restored_seconds + time.monotonic() - self._started)
        communication, seconds = self._clock.spent("communication"), self._clock.take()
        sync = StepSync(
            self._world,
            result.loss,
            self._stop_requested(),
            feed.ready < ENOUGH_BATCHES,
            self._control.take_commit_request() or self._checkpointer.is_due(self._progress.seconds),
            self._progress.seconds,
            communication,
        )
        if self._profile is not None:
            with self._watchdog.excused():  # the last one writes the trace
                self._profile.step()
        return PendingStep(before, after.step, epochs, result, batch, seconds, sync, last)

    @contextmanager
    def _named_samples(self, batch: LoadedBatch) -> Iterator[None]:
        """Add to NonFinite which samples of the batch cause it. Collective then."""
        try:
            yield
        except NonFinite as error:
            self._watchdog.pause()  # trying every sample alone takes longer than a step
            bad = name_bad_samples(self._engine, self._recipe, self._world, self._job.train.exchange, batch)
            raise NonFinite(f"{error}; {bad}; nothing was updated") from error

    def _settle(self, pending: PendingStep) -> StepTotals:
        """Read a step's sync and record the step. Raises NonFinite if its update was left out."""
        self._clock.mark("other")
        totals = pending.sync.wait()
        try:
            with self._named_samples(pending.batch):
                self._engine.confirm(pending.step, pending.result)
        except NonFinite:
            self._progress = pending.before  # the step after it has been made, and has changed nothing
            raise
        self._short_of_data = totals.short_of_data
        self._clock.mark("wait")
        # Time in the gradient sync until the slowest rank arrived is waiting; only the rest is communication.
        waited = totals.waited(self._world.rank)
        seconds = dict.fromkeys(RECORDED, 0.0) | pending.seconds
        seconds["communication"] -= waited
        seconds["wait"] += waited
        values = {
            "loss": totals.loss / pending.batch.cost,
            "rate": pending.result.rate,
            "gradient_norm": 0.0 if pending.result.skipped else pending.result.gradient_norm,
            self._recipe.unit: float(pending.batch.cost),
            "epoch": pending.epochs,
            "elapsed_seconds": totals.seconds,
            "step_seconds": sum(seconds.values()),
            **{f"{span}_seconds": spent for span, spent in seconds.items() if spent},
        }
        if pending.result.skipped:
            values["skipped"] = 1.0
        self._record("train", pending.step, values)
        self._control.report_step()
        self._recorder.time_spent(pending.step, seconds)
        self._clock.mark("other")
        return totals

    # Evaluate, save, finish.

    def _evaluate(self) -> bool:
        """Evaluate the validation split, if there is one; False if a stop came first."""
        if self._recipe.count("valid"):
            evaluation = self._measure("valid", self._job.evaluate.samples)
            if evaluation is None:
                return False
            self._record("valid", self._progress.step, evaluation.values, evaluation.scores)
            self._evaluated = (self._progress.step, evaluation)
        self._evaluations.restart()
        score, best = self._score(), self._progress.best_score
        if score is not None and (best is None or score > best):
            best = score
        self._progress = replace(self._progress, owes_evaluation=False, best_score=best)
        return True

    def _measure(self, split: str, decode: int | None, earlier: Evaluation | None = None) -> Evaluation | None:
        """Evaluate a split; None if a stop came first. All samples are decoded if `decode` is None."""
        self._watchdog.pause()
        # At the end of an epoch the position is already in the next one.
        epoch = max(0, self._progress.position.epoch - (self._progress.position.batch == 0))
        with nullcontext() if self._profile is None else self._profile.paused():
            evaluation = self._evaluator.evaluate(split, decode, epoch, earlier)
        self._clock.mark("evaluation")
        if evaluation is not None:
            self._recorder.pictures(evaluation.pictures)
        return evaluation

    def _score(self) -> float | None:
        """Return the score of the current weights if they were evaluated; higher is better."""
        if self._evaluated is None or self._evaluated[0] != self._progress.step:
            return None
        measure = measure_of(self._job, type(self._recipe))
        value = self._evaluated[1].scores.values.get(measure.name)
        if value is None or not math.isfinite(value):
            return None
        return -value if measure.lower else value

    def _save(self) -> None:
        self._checkpointer.save(self._progress, self._score())
        self._saved = self._progress
        self._saves.restart()
        self._clock.mark("save")

    def _final_result(self) -> Result | None:
        """Evaluate the full test or validation split; return the result on the first rank.

        Also None if a stop interrupted the evaluation; the resumed run makes it.
        """
        split = "test" if self._recipe.count("test") else "valid"
        scores = Scores({})
        if self._recipe.count(split):
            evaluation = self._measure_all(split)
            if evaluation is None:
                return None
            scores = evaluation.scores
            if split == "test":  # of the validation split it would be a point of other samples than those before it
                self._record(split, self._progress.step, evaluation.values, scores)
        if not self._world.is_first:
            return None
        if not self._checkpointer.has_committed(self._progress.step):
            raise PacktrainError("the last checkpoint did not reach the store; the run is not finished")
        self._recorder.flush_points()
        # The run's time includes its startup, and what failed generations lost.
        latest = self._run.latest_generation()
        used_before = 0.0 if latest is None else latest.used_seconds
        return Result(
            "finished",
            f"reached {self._job.train.duration}",
            self._progress.step,
            used_before + self._startup_seconds + time.monotonic() - self._started,
            {f"{split}.{name}": value for name, value in scores.values.items()},
            {f"{split}.{name}": text for name, text in scores.signatures.items()},
            scores.samples,
            {f"{split}.{name}": count for name, count in scores.counts.items()},
        )

    def _measure_all(self, split: str) -> Evaluation | None:
        """Evaluate a full split; what the last evaluation measured of it is not measured again."""
        earlier: Evaluation | None = None
        if split == "valid":
            # A resumed run does not have it. Evaluating in the same two parts gives the same scores, bit for bit.
            if (self._evaluated is None or self._evaluated[0] != self._progress.step) and not self._evaluate():
                return None
            assert self._evaluated is not None
            earlier = self._evaluated[1]
            if len(earlier.decoded) == self._recipe.count(split):
                return earlier
        if self._world.is_first:
            name = "validation" if split == "valid" else split
            self._recorder.event("evaluation", f"evaluating the full {name} split")
        return self._measure(split, None, earlier)

    # Helpers of the above.

    def _record(self, kind: str, step: int, values: dict[str, float], scores: Scores | None = None) -> None:
        samples, counts = (scores.samples, scores.counts) if scores else ((), {})
        point = Point(kind, self._generation, step, time.time(), values, samples, counts)  # type: ignore[arg-type]
        self._recorder.point(point)

    def _stop_requested(self) -> bool:
        return self._stop_signal.received or self._control.stop_requested()

    def _pulse(self) -> None:
        """Called between two batches of an evaluation: report to the watchdog, and leave if a stop is requested."""
        self._watchdog.begin("evaluation batch", least_seconds=STORE_SECONDS)
        if self._stop_requested():
            raise StopRequested

    def _report_hang(self, text: str) -> None:
        self._recorder.event("hang", text)
        self._control.report_error(WorkerError(self._world.rank, text, False, time.time(), "hang", self.step + 1))


def small_share(settings: TrainSettings, world: World) -> str | None:
    """Return the first rank's warning of a batch that gives each GPU little work; else None."""
    return settings.small_share(world.num_ranks) if world.is_first and world.device.type == "cuda" else None
