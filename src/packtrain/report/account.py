"""Questions about the run as a whole: faults, money, what was expected, data, checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from packtrain.observe.evidence import Evidence
from packtrain.observe.goodput import lost_seconds, recovery_seconds
from packtrain.observe.history import step_seconds
from packtrain.pack.kind import kind_of
from packtrain.pack.manifest import is_copy
from packtrain.report.finding import Finding, Rows, Verdict, unknown
from packtrain.report.speed import graded
from packtrain.run.checkpoint import whole_name
from packtrain.run.records import Generation
from packtrain.units import counted, show_bytes, show_count, show_dollars, show_seconds

_MAX_ROWS = 50
_FAULT_HEADS = ("when (UTC)", "cause", "what happened", "machine to blame", "recovery", "steps again")
_FILES = {
    "model.safetensors": "the weights",
    "ema.safetensors": "the moving average of the weights, which is evaluated and exported",
    "optimizer.safetensors": "the optimizer's state, to resume",
    "gradient_sync.safetensors": "the state of the exchange, to resume",
    "worker.safetensors": "the weights of a worker between two exchanges, to resume",
    "state.json": "progress, versions and what the weights belong to",
}
_SIDES = ("source", "target")
_WITHIN = 0.2  # a forecast that is closer is called right
_ROUGHLY = 1.0  # and of a speed that nobody measured, one by less than twice


# Faults.


def faults(evidence: Evidence) -> Finding:
    key, question = "faults", "What went wrong, and what did it cost?"
    failed = evidence.status.state == "failed"
    restarts = [generation for generation in evidence.generations if generation.is_after_fault]
    warnings = sum(event.display == "warning" for event in evidence.events)
    warned = (f"{counted(warnings, 'warning')} among the events below.",) if warnings else ()
    if not restarts and not failed:
        if not evidence.generations:
            return unknown(key, "run", question, "no generation has started yet")
        facts = (f"{counted(len(evidence.generations), 'generation')}, and no restart after a failure.", *warned)
        planned = len(evidence.generations) - 1
        answer = f"Nothing failed; {counted(planned, 'planned restart')}." if planned else "Nothing failed."
        return Finding(key, "run", question, answer, "good", facts)
    recoveries = recovery_seconds(evidence.generations, evidence.raw, evidence.spent)
    lost = lost_seconds(evidence.raw)
    recovering = sum(recoveries.get(generation.number, 0.0) for generation in restarts)
    again = sum(lost.values())
    seconds = evidence.status.goodput.seconds
    share = (recovering + again) / seconds if seconds else 0.0
    answer = f"{counted(len(restarts), 'restart')}"
    if len(restarts) == 1:
        answer += f" ({_reason(restarts[0])})"
    answer += f", which cost {show_seconds(recovering + again)}"
    answer += f" ({share:.0%} of the time): {show_seconds(recovering)} to recover" if seconds else ""
    answer += f", {show_seconds(again)} for steps that were made again." if seconds else "."
    if failed:
        answer = f"The run failed: {evidence.status.reason}. {answer if restarts else ''}".strip()
    rows = tuple(_fault_row(generation, evidence, recoveries, lost) for generation in restarts[:_MAX_ROWS])
    verdict: Verdict = "bad" if failed else graded(1 - share, 0.9, 0.7)
    return Finding(
        key, "run", question, answer, "note" if verdict == "good" else verdict,
        ("Recovery lasts from the last record before a failure to the first step after it. Steps after the last"
         " checkpoint are made again.", *warned),
        (Rows(_FAULT_HEADS, rows),) if rows else (),
        {"restarts": float(len(restarts)), "recovery_seconds": recovering, "lost_seconds": again},
    )  # fmt: skip


def _reason(generation: Generation) -> str:
    return generation.reason.removeprefix("failure: ")


def _fault_row(
    generation: Generation, evidence: Evidence, recoveries: dict[int, float], lost: dict[int, float]
) -> tuple[str, ...]:
    started = next((event.time for event in evidence.events if event.generation == generation.number), None)
    # A generation says why the one before it ended: the steps that were lost are that one's.
    earlier = max((number for number in lost if number < generation.number), default=None)
    is_next = not any((earlier or 0) < between.number < generation.number for between in evidence.generations)
    again = lost[earlier] if earlier is not None and is_next else 0.0
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(started)) if started is not None else "",
        generation.cause,
        _reason(generation),
        generation.culprit or "none",
        show_seconds(recoveries.get(generation.number, 0.0)),
        show_seconds(again) if again else "none",
    )


# Money and predictions.


def money(evidence: Evidence) -> Finding:
    """Add up the money, and the part of it that was useful."""
    key, question = "money", "What did it cost?"
    cost, hours = evidence.status.cost, sum(lease.machine_seconds for lease in evidence.leases) / 3600
    used = f"{counted(len(evidence.leases), 'machine')} for {hours:.2g} machine hours together."
    if cost is None:
        return unknown(key, "run", question, "no price is known; set fleet.price to see dollars", (used,))
    fraction = evidence.status.goodput.fraction
    answer = f"{cost.line}."
    if fraction is not None and cost.so_far:
        answer += f" {show_dollars(cost.so_far * (1 - fraction))} of it bought time that made no steps that counted."
    facts = [used, "A machine is charged from its start to its end, at the price of its own lease."]
    if evidence.steps and cost.so_far:
        facts.append(f"{show_dollars(1000 * cost.so_far / len(evidence.steps))} per 1,000 steps.")
    over = cost.budget is not None and cost.so_far > cost.budget
    numbers = {"dollars": cost.so_far, "machine_hours": hours}
    return Finding(key, "run", question, answer, "bad" if over else "good", tuple(facts), (), numbers)


@dataclass(frozen=True)
class ExpectedAndSeen:
    """Something that was predicted, and what happened. A forecast counts as right if it was `within` that share."""

    what: str
    expected: float
    seen: float
    expected_text: str
    seen_text: str
    within: float = _WITHIN

    @property
    def is_right(self) -> bool:
        return abs(self.off) <= self.within if self.off > 0 else self.expected / self.seen - 1 <= self.within

    @property
    def off(self) -> float:
        """The distance of what happened from the forecast, as a share of it: 0.1 is 10 % more than expected."""
        return self.seen / self.expected - 1


def compared(evidence: Evidence) -> list[ExpectedAndSeen]:
    """Compare what `packtrain plan` expected with what the records say."""
    expected, summary = evidence.forecast, evidence.status
    if expected is None:
        return []
    steps = [step_seconds(point) for point in evidence.steps]
    memory = [
        max(worker.memory_bytes, worker.peak_memory_bytes)
        for sample in evidence.telemetry
        for worker in sample.telemetry.workers
    ]
    size = sum(file.bytes for file in evidence.checkpoints[-1].files) if evidence.checkpoints else 0
    ended = summary.state == "finished" and not _other_length(evidence)

    def short(seconds: float) -> str:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else show_seconds(seconds)

    questions: list[tuple[str, float | None, float | None, Any]] = [
        ("time of a step", expected.step_seconds, fmean(steps) if steps else None, short),
        ("whole run", expected.seconds, summary.seconds if ended else None, show_seconds),
        ("cost", expected.dollars, summary.cost.so_far if ended and summary.cost else None, show_dollars),
        ("memory per worker", expected.memory_bytes, max(memory, default=None), show_bytes),
        ("checkpoint", expected.checkpoint_bytes, size or None, show_bytes),
    ]
    # A rough plan knows only the peak of a processor: it tells a minute from an hour.
    sizes, rough = {"memory per worker", "checkpoint"}, expected.source.startswith("rough")
    return [
        ExpectedAndSeen(
            label, float(before), float(after), show(before), show(after),
            _ROUGHLY if rough and label not in sizes else _WITHIN,
        )
        for label, before, after, show in questions
        if before and after
    ]  # fmt: skip


def _other_length(evidence: Evidence) -> str:
    """Return why the run was not as long as the plan that was made for it, if that is so."""
    plan, job = evidence.forecast, evidence.job
    if plan is None or not plan.duration or job.recipe is None:  # a program's job has no duration
        return ""
    if plan.duration != str(job.train.duration):
        return f"It was for {plan.duration}; the run is now set to {job.train.duration}"
    if job.parent is not None and job.parent.takes == "everything" and job.parent.step:
        return f"It was for {plan.duration} from the beginning; the run started at step {job.parent.step:,}"
    return ""


def forecast(evidence: Evidence) -> Finding | None:
    """Compare the plan with what happened."""
    key, question = "forecast", "Did it go as planned?"
    if evidence.forecast is None:
        return None
    rows = compared(evidence)
    if not rows:
        return unknown(key, "run", question, "nothing that was predicted has been measured yet")
    worst = max(rows, key=lambda row: abs(row.off))
    wrong = [row for row in rows if not row.is_right]
    rough = " rough" if any(row.within == _ROUGHLY for row in rows) else ""
    answer = f"Yes: everything within {abs(worst.off):.0%} of the{rough} plan."
    if wrong:
        worst = max(wrong, key=lambda row: abs(row.off))
        answer = (
            f"Not quite: {worst.what} was planned as {worst.expected_text} and was {worst.seen_text}"
            f" ({worst.off:+.0%}); {len(rows) - len(wrong)} of {len(rows)} predictions were within tolerance."
        )
    table = Rows(
        ("", "expected", "seen", "off"),
        tuple((row.what, row.expected_text, row.seen_text, f"{row.off:+.0%}") for row in rows),
    )
    facts = [f"Predicted from {evidence.forecast.source}, with {evidence.forecast.limit} as the limit of a step."]
    if why := _other_length(evidence):
        facts.append(f"{why}, so total time and cost cannot be compared.")
    return Finding(
        key, "run", question, answer, "note" if wrong else "good", tuple(facts), (table,),
        {f"{row.what} off": row.off for row in rows},
    )  # fmt: skip


# Data, checkpoints.


def data_set(evidence: Evidence) -> Finding | None:
    """Sizes of the splits, and what was left out."""
    key, question = "data", "How big is the data?"
    manifest = evidence.manifest
    if evidence.job.recipe is None:
        return None
    if manifest is None:
        return unknown(key, "run", question, f"the store does not have pack {evidence.pack or 'of this run'} anymore")
    splits = {name: split for name, split in manifest.splits.items() if not is_copy(name)}
    train = splits["train"]
    samples = counted(train.samples, kind_of(manifest.kind).noun)
    answer = f"{samples} to train on ({show_bytes(train.shard_bytes)} packed)"
    for name, word in (("valid", "to validate"), ("test", "to test")):
        answer += f", {show_count(splits[name].samples)} {word}" if name in splits else ""
    epochs = evidence.steps[-1].values["epoch"] if evidence.steps else 0.0
    answer += f"; training went through it {epochs:.3g} times." if epochs else "."
    if train.raw:
        sides = " and ".join(show_bytes(side.bytes) for side in train.raw)
        answer += f" The raw training text has {counted(train.raw[0].lines, 'line')} per side: {sides}."
    rows = tuple(
        (name, show_count(split.samples), show_count(split.num_filtered), show_count(split.num_dropped),
         str(len(split.shards)), show_bytes(split.shard_bytes))
        for name, split in manifest.splits.items()
    )  # fmt: skip
    raw = tuple(
        (name, side, show_bytes(text.bytes), show_count(text.lines))
        for name, split in splits.items()
        for side, text in zip(_SIDES, split.raw, strict=False)
    )
    dropped = train.share_of(sum(drop.count for drop in train.dropped.values()))
    facts = [f"From the manifest of pack {manifest.name}. `packtrain pack --stats` shows lengths and samples."]
    if manifest.classes:
        facts.append(f"{counted(len(manifest.classes), 'class')[:-1]}es." if len(manifest.classes) > 1 else "1 class.")
    facts += [f"Left out of train: {drops.count:,} ({reason})." for reason, drops in train.dropped.items()]
    return Finding(
        key, "run", question, answer, "note" if dropped > 0.01 else "good", tuple(facts),
        (
            Rows(("split", "samples", "filtered", "unusable", "shards", "size"), rows),
            *((Rows(("split", "side", "raw text", "lines"), raw),) if raw else ()),
        ),
        {
            "samples": float(train.samples), "bytes": float(train.shard_bytes), "epochs": epochs,
            **{f"raw_{side}_bytes": float(text.bytes) for side, text in zip(_SIDES, train.raw, strict=False)},
            **{f"raw_{side}_lines": float(text.lines) for side, text in zip(_SIDES, train.raw, strict=False)},
        },
    )  # fmt: skip


def checkpoints(evidence: Evidence) -> Finding:
    """List what is kept, and what is in it."""
    key, question = "checkpoints", "What is in a checkpoint, and how big is it?"
    stored = evidence.checkpoints
    if not stored:
        ended = evidence.status.state in ("finished", "failed", "stopped")
        if not ended:
            return unknown(key, "run", question, "none has been committed yet")
        return Finding(key, "run", question, "None was committed.", "note" if evidence.job.program else "bad")
    newest = stored[-1]
    size = sum(file.bytes for file in newest.files)
    steps = ", ".join(f"{checkpoint.step:,}" for checkpoint in stored[-5:])
    answer = (
        f"{show_bytes(size)} in {counted(len(newest.files), 'file')}; kept: {counted(len(stored), 'checkpoint')}"
        f" (of {'step' if len(stored) == 1 else 'steps'} {steps})."
    )
    rows = tuple(
        (file.name, show_bytes(file.bytes), _FILES.get(whole_name(file.name), "")) for file in newest.files[:_MAX_ROWS]
    )
    times = [event.time for event in evidence.events if event.kind == "checkpoint"]
    facts = [f"From the manifest of {newest.name}, which was committed with the digest of every file."]
    if len(times) > 1:
        gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
        if gaps:
            facts.append(
                f"{counted(len(times), 'commit')}, every {show_seconds(fmean(gaps))} on average: a failure loses"
                " half of that on average."
            )
    return Finding(
        key, "run", question, answer, "good", tuple(facts), (Rows(("file", "size", "what it is"), rows),),
        {"bytes": float(size), "kept": float(len(stored))},
    )  # fmt: skip
