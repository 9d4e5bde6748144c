"""Questions about speed: where the time went, what limited a step, and whether more workers were worth it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from packtrain.observe.evidence import Evidence, seconds_of, shares, values_of
from packtrain.observe.history import step_seconds, throughput
from packtrain.observe.spans import COMPUTING, LABELS, ON_DEVICE, RANK_WORK, STEP_SPANS
from packtrain.report.finding import Chart, Finding, Rows, Shares, Verdict, unknown
from packtrain.report.page import Series
from packtrain.report.trend import percentile
from packtrain.run.checkpoint import whole_name
from packtrain.run.records import Point, TelemetrySample
from packtrain.units import counted, show_bytes, show_count, show_seconds, show_speed

_MIN_STEPS = 20
_SLOW = 2.0  # times the median: a slower step is explained
_MAX_ROWS = 64  # of a table: a run on hundreds of ranks must still be a page that opens
_ADVICE = {
    "start": "longer runs start less often",
    "evaluation": "evaluate less often (evaluate.every), or fewer samples (evaluate.samples)",
    "save": "save less often (checkpoint.every)",
    "data": "loading limits the speed",
    "communication": "the exchange of gradients limits the speed",
    "wait": "one rank keeps the others waiting",
    "recovery": "machines or workers failed",
    "lost steps": "save more often (checkpoint.every)",
}


def graded(value: float, good: float, note: float) -> Verdict:
    """Return the verdict on a value of which more is better."""
    return "good" if value >= good else "note" if value >= note else "bad"


# Where the time went.


def duration(evidence: Evidence) -> Finding:
    """Account for the time, with every loss."""
    key, question = "duration", "How long did it take, and where did the time go?"
    times, total = evidence.status.goodput, evidence.status.seconds
    if not times.seconds or times.fraction is None:
        used = max([total, *(lease.machine_seconds for lease in evidence.leases)])
        if not used:
            return unknown(key, "speed", question, "no worker has recorded its time yet")
        return Finding(
            key, "speed", question, f"{show_seconds(used)}.", "good",
            ("A program does not say where its time goes; a recipe does.",), (), {"seconds": used},
        )  # fmt: skip
    recorded = [(name, times.parts[name]) for name in LABELS if times.parts.get(name)]
    losses = [(name, value) for name, value in recorded if name in _ADVICE and name not in COMPUTING]
    lost = max(losses, key=lambda loss: loss[1], default=None)
    answer = f"{show_seconds(times.seconds)}; {times.fraction:.0%} of it went into steps that counted."
    if lost is not None and lost[1] > 0.05 * times.seconds:
        share = lost[1] / times.seconds
        answer += f" The largest loss: {LABELS[lost[0]]}, {show_seconds(lost[1])} ({share:.0%}); {_ADVICE[lost[0]]}."
    rows = tuple((LABELS[name], show_seconds(value), f"{value / times.seconds:.1%}") for name, value in recorded)
    return Finding(
        key, "speed", question, answer, graded(times.fraction, 0.8, 0.5),
        ("Every worker's clock is a chain of marks without gaps, so the parts add up; these are the first worker's.",
         "Steps count if no restart discarded them. Communication and waiting inside of such steps count here; the"
         " other answers judge them."),
        (Shares("where the time went", tuple((LABELS[name], value) for name, value in recorded)),
         Rows(("part", "time", "share"), rows)),
        {"seconds": times.seconds, "goodput": times.fraction, **{f"{name}_seconds": value for name, value in recorded}},
    )  # fmt: skip


# Devices.


def devices(evidence: Evidence) -> Finding:
    """Busy or idle, and why."""
    key, question = "devices", "Were the devices busy?"
    samples, times = evidence.training_telemetry, evidence.status.goodput
    if not samples and not times.seconds:
        return unknown(key, "speed", question, "neither telemetry nor times of workers")
    gpus = [gpu.used_fraction for sample in samples for gpu in sample.telemetry.gpus]
    noun = "GPUs" if gpus else "processors"
    numbers: dict[str, float] = {}
    if samples:
        numbers["busy"] = fmean(gpus or (sample.telemetry.cpu_fraction for sample in samples))
        answer = f"The {noun} were {numbers['busy']:.0%} busy while it trained"
    else:
        answer = f"Their use of the {noun} is not known"
    if times.seconds:
        numbers["computing"] = sum(times.parts.get(name, 0.0) for name in ON_DEVICE) / times.seconds
        answer += f"; workers computed {numbers['computing']:.0%} of the whole time"
        losses = {name: seconds for name, seconds in times.parts.items() if name in _ADVICE}
        if losses and numbers["computing"] < 0.8:
            largest = max(losses, key=lambda name: losses[name])
            share = losses[largest] / times.seconds
            answer += f". The main reason for the rest: {LABELS[largest]} ({share:.0%})"
    # The clocks of the workers know better than telemetry what was useful.
    verdict = graded(numbers.get("computing", numbers.get("busy", 0.0)), 0.75, 0.5)
    if not gpus and _is_crowded(samples):
        answer += ". Other programs used the processors, too: see how many cores the workers got"
        verdict = "note" if verdict == "good" else verdict
    facts, flops = list(_device_facts(evidence, samples)), flops_used(evidence)
    if flops is not None:
        numbers["mfu"] = flops.share
        facts.append(flops.in_words)
    figures = (*_device_figures(samples), *_memory_figures(evidence))
    return Finding(key, "speed", question, f"{answer}.", verdict, tuple(facts), figures, numbers)


@dataclass(frozen=True)
class FlopsUsed:
    """The operations per second that a model needs at the speed of the run, beside the peak of its GPUs."""

    needed: float
    peak: float
    device: str

    @property
    def share(self) -> float:
        """Model FLOPs utilization (MFU)."""
        return self.needed / self.peak

    @property
    def in_words(self) -> str:
        return (
            f"The model needs about {self.needed / 1e12:,.1f} TFLOP/s per worker at this speed: {self.share:.0%} of the"
            f" {self.peak / 1e12:,.0f} TFLOP/s of an {self.device} (MFU)."
        )


def flops_used(evidence: Evidence) -> FlopsUsed | None:
    """Return what the steps needed of the GPUs; None where the model's operations or the GPU's peak are not known."""
    from packtrain.plan.devices import gpu_named
    from packtrain.plan.workload import known_model

    latest = {sample.node: sample.telemetry.gpus for sample in evidence.training_telemetry}
    names = {gpu.name for gpus in latest.values() for gpu in gpus}
    device = gpu_named(names.pop()) if len(names) == 1 else None
    model = None if evidence.manifest is None else known_model(evidence.job, evidence.manifest)
    speed = evidence.status.units_per_second
    # More workers than GPUs share them, or each has a part of one (MIG), whose peak is not in the table.
    if device is None or model is None or not speed or evidence.workers > sum(map(len, latest.values())):
        return None
    # In fp32, convolutions and some products compute in TF32, others do not: there is no one peak.
    if evidence.job.train.precision == "fp32" or not device.half_flops:
        return None
    if len({evidence.job.train.in_epoch(int(epoch)).size for _, epoch in values_of(evidence.steps, "epoch")}) > 1:
        return None  # the operations for an image changed with its size
    return FlopsUsed(model.flops * speed / evidence.workers, device.half_flops, device.name)


def _is_crowded(samples: Sequence[TelemetrySample]) -> bool:
    """True if the processors were busy while each worker got less than most of a core: others had the rest."""
    used = [sample.telemetry for sample in samples if sample.telemetry.workers]
    if not used or fmean(telemetry.cpu_fraction for telemetry in used) < 0.9:
        return False
    return fmean(worker.cpu_fraction for telemetry in used for worker in telemetry.workers) < 0.7


def _device_facts(evidence: Evidence, samples: Sequence[TelemetrySample]) -> Iterable[str]:
    gpus = [gpu for sample in samples for gpu in sample.telemetry.gpus]
    if gpus:
        yield (
            "A GPU counts as busy while any kernel runs, and kernels that wait for the network do, too: 100 % is no"
            " proof of computing. The share of computing comes from the workers' clocks."
        )
        fullest = max((gpu.memory_used_bytes / gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=0.0)
        yield f"GPU memory was at most {fullest:.0%} full." + (
            " A larger batch or micro-batch may fit." if fullest < 0.5 else ""
        )
    if samples:
        cores = fmean(sum(worker.cpu_fraction for worker in sample.telemetry.workers) for sample in samples)
        yield (
            f"Workers used {cores:.1f} processor cores per machine; memory was at most"
            f" {max(sample.telemetry.memory_fraction for sample in samples):.0%} full."
        )
        _, machines = evidence.machines_of(sample.node for sample in samples)
        yield f"From {counted(len(samples), 'sample')} of telemetry on {machines}, without startup."
    else:
        yield "No telemetry was recorded while it trained: judged by the workers' clocks alone."


def _device_figures(samples: Sequence[TelemetrySample]) -> Iterable[Chart | Rows]:
    if not samples:
        return
    begin = min(sample.time for sample in samples)
    nodes: defaultdict[str, list[TelemetrySample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.time):
        nodes[sample.node].append(sample)
    rows = []
    for node, node_samples in list(nodes.items())[:_MAX_ROWS]:
        gpus = [gpu.used_fraction for sample in node_samples for gpu in sample.telemetry.gpus]
        rows.append((
            node,
            f"{fmean(sample.telemetry.cpu_fraction for sample in node_samples):.0%}",
            f"{fmean(gpus):.0%}" if gpus else "none",
            f"{max(sample.telemetry.memory_fraction for sample in node_samples):.0%}",
            f"{show_bytes(fmean(sample.telemetry.sent_bytes_per_second for sample in node_samples))}/s",
        ))  # fmt: skip
    used = [
        Series(node, [
            ((sample.time - begin) / 60,
             100 * fmean([gpu.used_fraction for gpu in sample.telemetry.gpus] or [sample.telemetry.cpu_fraction]))
            for sample in node_samples
        ])
        for node, node_samples in list(nodes.items())[:4]
    ]  # fmt: skip
    yield Chart("% busy", tuple(used), "min")
    yield Rows(("machine", "processors", "GPUs", "memory, most", "sent"), tuple(rows))


def _memory_figures(evidence: Evidence) -> Iterable[Rows]:
    """Show the most memory that each worker had."""
    main: defaultdict[int, int] = defaultdict(int)
    for use in (use for sample in evidence.telemetry for use in sample.telemetry.workers):
        main[use.rank] = max(main[use.rank], use.memory_bytes, use.peak_memory_bytes)
    on_gpu: dict[int, tuple[int, int]] = {}
    for record in evidence.spent:
        before = on_gpu.get(record.rank, (0, 0))
        on_gpu[record.rank] = max(before[0], record.gpu_allocated_bytes), max(before[1], record.gpu_reserved_bytes)
    heads = ["worker", "main memory, most"]
    if any(map(any, on_gpu.values())):
        heads += ["GPU memory, most", "held by torch, most"]
    peaks = [(rank, main[rank], *on_gpu.get(rank, (0, 0))) for rank in sorted({*main, *on_gpu})]
    rows = [
        (str(rank), *(show_bytes(size) if size else "none" for size in sizes[: len(heads) - 1]))
        for rank, *sizes in peaks[:_MAX_ROWS]
        if any(sizes)
    ]
    if rows:
        yield Rows(tuple(heads), tuple(rows))


# What a step waits for.


def data_loading(evidence: Evidence) -> Finding | None:
    """Compare loading with computing."""
    key, question = "loading", "Did data loading keep up?"
    if evidence.job.recipe is None:
        return None
    if len(evidence.steps) < _MIN_STEPS:
        return unknown(key, "speed", question, _few_steps(evidence))
    worst, share = max(
        ((rank, shares([spans]).get("data", 0.0)) for rank, spans in evidence.rank_seconds.items()),
        key=lambda rank_share: rank_share[1],
    )
    waits = [seconds_of(point, "data") for point in evidence.steps]
    typical = median(step_seconds(point) for point in evidence.steps)
    # What is waited for in the first tenth: shards that no machine had yet.
    early = sum(waits[: len(waits) // 10]) / sum(waits) if sum(waits) else 0.0
    typical_wait = f"{_short(fmean(waits))} of {_short(fmean(map(step_seconds, evidence.steps)))} per step"
    facts = [
        f"The wait of the slowest rank ({worst}) for its batches is {share:.1%} of its step time;"
        f" rank 0 waited {typical_wait}.",
        f"Loading delivered {show_speed(evidence.status.units_per_second or 0)} {evidence.status.unit}/s, at a median"
        f" step of {_short(typical)}.",
    ]
    if share >= 0.02 and early > 0.5:
        facts.append(f"{early:.0%} of the wait was in the first tenth of the steps: the cache was still empty.")
    if share >= 0.2:
        answer = (
            f"No: waiting for data took {share:.0%} of the step time, so devices were idle. More machines would help"
            " only because each brings loaders; faster storage, a cache or data.stage would help more."
        )
    elif share >= 0.05:
        answer = f"Not quite: waiting for data took {share:.0%} of the step time."
    else:
        answer = f"Yes: waiting for data took {share:.1%} of the step time."
    chart = Chart("seconds waiting for data", (Series("data", _over_steps(evidence.steps, "data")),))
    return Finding(
        key, "speed", question, answer, graded(1 - share, 0.95, 0.8), tuple(facts), (chart,), {"data_share": share}
    )


@dataclass(frozen=True)
class Traffic:
    """The bytes that a worker sends in a step, and what its link was measured to carry; None where it is not known.

    `machine` is what telemetry saw each machine send while it trained, in bytes per second, `peak` its 95th percentile.
    """

    step_seconds: float
    exposed: float
    bytes_per_step: float | None
    link: float | None
    machine: float | None
    peak: float | None

    @property
    def used(self) -> float | None:
        """The share of the link's capacity that was used."""
        if self.bytes_per_step is None or not self.link or self.step_seconds <= 0:
            return None
        return self.bytes_per_step / self.step_seconds / self.link

    @property
    def numbers(self) -> dict[str, float]:
        values = {
            "exposed_share": self.exposed, "bytes_per_step": self.bytes_per_step, "link_bytes_per_second": self.link,
            "link_used": self.used, "machine_bytes_per_second": self.machine, "peak_bytes_per_second": self.peak,
        }  # fmt: skip
        return {name: value for name, value in values.items() if value is not None}


def traffic_of(evidence: Evidence) -> Traffic:
    step, conditions = fmean(map(step_seconds, evidence.steps)), evidence.conditions
    sent = sorted(sample.telemetry.sent_bytes_per_second for sample in evidence.training_telemetry)
    few = len(sent) < 5
    files = evidence.checkpoints[-1].files if evidence.checkpoints else ()
    model_bytes = sum(file.bytes for file in files if whole_name(file.name) == "model.safetensors")
    gradients = evidence.forecast.gradient_bytes if evidence.forecast else model_bytes
    estimate = 2 * (evidence.workers - 1) / evidence.workers * gradients or None  # averaged in a ring, in 32 bits
    return Traffic(
        step,
        evidence.step_shares.get("communication", 0.0),
        conditions.get("sent_bytes_per_step", estimate if evidence.job.train.exchange.syncs_every_step else None),
        conditions.get("link_bytes_per_second"),
        None if few else fmean(sent),
        None if few else percentile(sent, 0.95),
    )


def network(evidence: Evidence) -> Finding | None:
    """Bytes per step, achieved against capacity, exposed communication, verdict."""
    key, question = "network", "Was the network the bottleneck?"
    if evidence.job.recipe is None:
        return None
    if evidence.workers == 1:
        return Finding(key, "speed", question, "No: with one worker there is nothing to exchange.", "good")
    if len(evidence.steps) < _MIN_STEPS:
        return unknown(key, "speed", question, _few_steps(evidence))
    traffic = traffic_of(evidence)
    facts = tuple(_network_facts(evidence, traffic))
    if evidence.job.train.exchange.shards_model:
        if traffic.used is None:
            why = "sharded weights are gathered within forward and backward, and no link was measured"
            return unknown(key, "speed", question, why, facts)
        # Weights are gathered while computing: only the load of the link is known.
        sends = f"sending took at least {traffic.used:.0%} of the step time at the measured speed of the link"
        answer = f"Perhaps: {sends}." if traffic.used >= 0.2 else f"Probably not: {sends}."
        if traffic.used >= 0.5:
            answer = f"Probably: {sends}. A larger batch or a faster network would help."
        verdict = graded(1 - traffic.used, 0.8, 0.5)
    else:
        # On one machine there is no network to be warned of, only an exchange that may take much.
        limits = (0.95, 0.8) if evidence.machines > 1 else (0.8, 0.0)
        answer, verdict = _answer_by_exposure(evidence, traffic), graded(1 - traffic.exposed, *limits)
    line = Series("communication", _over_steps(evidence.steps, "communication"))
    chart = Chart("seconds of communication not overlapped", (line,))
    return Finding(key, "speed", question, answer, verdict, facts, (chart,), traffic.numbers)


def _answer_by_exposure(evidence: Evidence, traffic: Traffic) -> str:
    hidden, exposed = "communication that computing did not hide", traffic.exposed
    if evidence.machines == 1:
        advice = f" {_less_traffic(evidence)}" if exposed >= 0.2 else ""
        return (
            f"No network was used: all workers are on one machine. Their exchange took {exposed:.1%} of the step"
            f" time, as {hidden}.{advice}"
        )
    load = f"; {traffic.used:.0%} of the link's capacity was used" if traffic.used is not None else ""
    if exposed >= 0.2:
        return f"Yes: {exposed:.0%} of the step time was {hidden}{load}. {_less_traffic(evidence)}"
    if exposed >= 0.05:
        return f"Partly: {exposed:.0%} of the step time was {hidden}{load}."
    return f"No: only {exposed:.1%} of the step time was {hidden}{load}."


def _less_traffic(evidence: Evidence) -> str:
    exchange = evidence.job.train.exchange
    options = ["a larger batch"]
    if exchange.lighter:
        options.append(exchange.lighter)
    if exchange.syncs_every_step and evidence.machines > 1:
        options.append("train.exchange: local")
    return f"What would help: {', '.join(options)}{', or a faster network' if evidence.machines > 1 else ''}."


def _network_facts(evidence: Evidence, traffic: Traffic) -> Iterable[str]:
    yield (
        f"Communication that was not overlapped: {_short(traffic.exposed * traffic.step_seconds)} of"
        f" {_short(traffic.step_seconds)} per step, over all ranks. Waiting for a slower rank is not counted: that is"
        " not the network."
    )
    sent, link = traffic.bytes_per_step, traffic.link
    if sent is not None and traffic.step_seconds > 0:
        achieved = _speed(sent / traffic.step_seconds)
        yield f"Each worker sends {show_bytes(sent)} per step for the exchange: {achieved} on average."
        if link:
            full = (
                ""
                if (traffic.used or 0.0) > 0.5 or traffic.exposed < 0.2
                else (" The link was not full: latency, or many small messages, cost more than bytes do.")
            )
            yield (
                f"The link was measured at {_speed(link)} per worker when the generation started, while all sent:"
                f" {traffic.used or 0.0:.0%} of it was used, and {_short(sent / link)} of a step is the least that"
                f" sending takes.{full}"
            )
        else:
            yield "The capacity of the link was not measured; `packtrain doctor` does."
    if traffic.machine is not None and traffic.peak is not None:
        yield (
            f"Telemetry saw each machine send {_speed(traffic.machine)} on average and {_speed(traffic.peak)} at its"
            " peak (95 %), everything included."
        )
    if evidence.machines == 1:
        yield "Traffic between workers of one machine stays in its memory and never reaches a network card."
    else:
        yield "Network cards are rated in bits, traffic is counted in bytes: 1 Gbit/s is 125 MB/s."


def _speed(bytes_per_second: float) -> str:
    return f"{show_bytes(bytes_per_second)}/s ({bytes_per_second * 8 / 1e9:.2g} Gbit/s)"


# Several workers.


def balance(evidence: Evidence) -> Finding | None:
    """A rank that keeps the others waiting."""
    key, question = "balance", "Did one worker slow the others down?"
    if evidence.job.recipe is None or evidence.workers < 2:
        return None
    ranks = evidence.rank_seconds
    if len(ranks) < 2 or len(evidence.steps) < _MIN_STEPS:
        return unknown(key, "speed", question, _few_steps(evidence) if len(ranks) > 1 else "times of one worker only")
    work = {rank: sum(seconds[span] for span in RANK_WORK) for rank, seconds in ranks.items()}
    slowest = max(work, key=lambda rank: work[rank])
    times_of_others = [seconds for rank, seconds in work.items() if rank != slowest]
    ratio = work[slowest] / median(times_of_others) if median(times_of_others) > 0 else 1.0
    waits = {rank: shares([seconds]).get("wait", 0.0) for rank, seconds in ranks.items()}
    waited = fmean(share for rank, share in waits.items() if rank != slowest)
    where = _node_of(evidence, slowest)
    facts = (
        f"Rank {slowest}{where} worked {ratio:.2f} times as long as the median of the others, who waited"
        f" {waited:.1%} of their step time; it waited {waits[slowest]:.1%} itself.",
        "Work is data, forward, backward and optimizer. A slow worker is named if it takes 10 % longer and the others"
        " wait at least 5 % of the time.",
    )
    spans = [span for span in STEP_SPANS if any(spans_of_rank.get(span, 0.0) > 0 for spans_of_rank in ranks.values())]
    rows = []
    for rank, seconds in sorted(ranks.items())[:_MAX_ROWS]:
        rank_shares = shares([seconds])
        rows.append((str(rank), *(f"{rank_shares.get(span, 0.0):.1%}" for span in spans)))
    grid = Rows(("rank", *(LABELS[span] for span in spans)), tuple(rows))
    numbers = {"slowest_rank": float(slowest), "slowest_ratio": ratio, "waiting_share": waited}
    if ratio > 1.1 and waited >= 0.05:
        why = max(RANK_WORK, key=lambda span: ranks[slowest][span] - median(ranks[rank][span] for rank in ranks))
        answer = (
            f"Yes: rank {slowest}{where} took {ratio:.2f} times as long as the others ({LABELS[why]}), who waited"
            f" {waited:.0%} of the step time for it."
        )
        return Finding(key, "speed", question, answer, "bad" if waited >= 0.15 else "note", facts, (grid,), numbers)
    waiting = fmean(waits.values())
    if waiting >= 0.1:
        answer = (
            f"No single one, but workers waited {waiting:.0%} of the step time for whichever was last: their batches,"
            " or the load of their machines, vary from step to step."
        )
        return Finding(key, "speed", question, answer, "note", facts, (grid,), numbers)
    answer = f"No: workers waited {waiting:.1%} of the step time for each other."
    return Finding(key, "speed", question, answer, "good", facts, (grid,), numbers)


def _node_of(evidence: Evidence, rank: int) -> str:
    first = 0
    for member in evidence.generations[-1].members if evidence.generations else ():
        if rank < first + member.workers:
            return f" on {member.node}"
        first += member.workers
    return ""


def scaling(evidence: Evidence) -> Finding | None:
    """Measure how much of the work of that many workers arrived, and estimate what twice as many would bring."""
    key, question = "scaling", f"Were {evidence.workers} workers worth it?"
    if evidence.job.recipe is None or evidence.workers < 2:
        return None
    in_step = evidence.step_shares
    if not in_step or len(evidence.steps) < _MIN_STEPS:
        return unknown(key, "speed", question, _few_steps(evidence))
    exchange = in_step.get("communication", 0.0) + in_step.get("wait", 0.0)
    efficiency = 1 - exchange
    computing = 1 - exchange - in_step.get("data", 0.0)
    twice = 1 / (computing / 2 + in_step.get("data", 0.0) / 2 + exchange)
    facts = [
        f"Communication not overlapped took {in_step.get('communication', 0.0):.1%} of the step time, waiting for the"
        f" slowest {in_step.get('wait', 0.0):.1%}; the rest is work that one worker would have to do, too.",
        f"Twice the workers on the same batch would make steps about {twice:.2g} times faster, if exchange takes as"
        " long as now.",
    ]
    if evidence.machines < evidence.workers:
        facts.append("Workers of one machine share its memory and processors; what that costs shows only in a run with"
                     " fewer of them: `packtrain compare`.")  # fmt: skip
    figures = _speed_ups(evidence)
    if figures:
        facts.append("Measured in generations of this run with different numbers of workers.")
    answer = (
        f"{evidence.workers} workers did the work of about {evidence.workers * efficiency:.1f} ({efficiency:.0%}"
        f" efficiency)."
    )
    data = in_step.get("data", 0.0)
    if data >= 0.2:
        answer += (
            f" But {data:.0%} of a step is waiting for data: more workers bring more loaders, so they will seem to"
            " scale better than the devices do. Fix loading first."
        )
    verdict = "bad" if data >= 0.2 else graded(efficiency, 0.85, 0.6)
    return Finding(key, "speed", question, answer, verdict, tuple(facts), figures, {"efficiency": efficiency})


def _speed_ups(evidence: Evidence) -> tuple[Rows, ...]:
    """Return a table of what was measured with different numbers of workers, if there were."""
    counts = {
        generation.number: sum(member.workers for member in generation.members) for generation in evidence.generations
    }
    steps: defaultdict[int, list[Point]] = defaultdict(list)
    for point in evidence.raw:
        if point.kind == "train" and point.generation in counts:
            steps[counts[point.generation]].append(point)
    groups = sorted((count, group) for count, group in steps.items() if len(group) >= _MIN_STEPS)
    speeds = ((count, throughput(group, evidence.status.unit)) for count, group in groups)
    measured = [(count, speed) for count, speed in speeds if speed]
    if len(measured) < 2:
        return ()
    base, base_speed = measured[0]
    rows = tuple(
        (str(count), show_speed(speed), f"{speed / base_speed:.2f} x", f"{speed / base_speed / count * base:.0%}")
        for count, speed in measured
    )
    return (Rows(("workers", f"{evidence.status.unit}/s", "speed-up", "efficiency"), rows),)


# Steps.


def step_times(evidence: Evidence) -> Finding | None:
    """Percentiles, and why the slow ones were slow."""
    key, question = "steps", "How long is a step, and why are some slower?"
    if evidence.job.recipe is None:
        return None
    steps = evidence.steps
    if len(steps) < _MIN_STEPS:
        return unknown(key, "speed", question, _few_steps(evidence))
    pure = sorted(map(step_seconds, steps))
    middle = percentile(pure, 0.5)
    slow = [point for point in steps if point.values["step_seconds"] > _SLOW * middle]
    reasons: defaultdict[str, list[float]] = defaultdict(list)
    explain = _Explainer(evidence)
    for point in slow:
        reasons[explain.why(point)].append(point.values["step_seconds"] - middle)
    ordered = sorted(reasons.items(), key=lambda item: -sum(item[1]))
    lost = sum(sum(excess) for excess in reasons.values())
    total = sum(point.values["step_seconds"] for point in steps)
    answer = f"{_short(middle)} in the median; 95 % take at most {_short(percentile(pure, 0.95))}."
    if slow:
        answer += (
            f" {counted(len(slow), 'interval')} of more than twice the median cost {show_seconds(lost)} together,"
            f" mostly {ordered[0][0]}."
        )
    rows = tuple(
        (why, show_count(len(excess)), show_seconds(sum(excess)), _short(max(excess))) for why, excess in ordered
    )
    quantiles = (("min", 0.0), ("5 %", 0.05), ("median", 0.5), ("95 %", 0.95), ("99 %", 0.99), ("max", 1.0))
    outside = lost - sum(sum(reasons[why]) for why in _BETWEEN.values() if why in reasons)
    return Finding(
        key, "speed", question, answer, graded(1 - outside / total if total > 0 else 1.0, 0.9, 0.75),
        ("Percentiles are of steps alone. The intervals between steps that are explained include evaluations,"
         " checkpoint copies and startup; each is attributed to the part that grew the most over its own median.",),
        (Chart("seconds per step", (Series("step", [(float(point.step), step_seconds(point)) for point in steps]),)),
         Rows(tuple(name for name, _ in quantiles), (tuple(_short(percentile(pure, at)) for _, at in quantiles),)),
         *((Rows(("slow because of", "times", "cost", "longest"), rows),) if rows else ())),
        {"median_seconds": middle, "p95_seconds": percentile(pure, 0.95), "p99_seconds": percentile(pure, 0.99),
         "slow": float(len(slow)), "slow_seconds": lost},
    )  # fmt: skip


_BETWEEN = {"start": "startup", "evaluation": "an evaluation", "save": "a checkpoint copy"}


class _Explainer:
    """Says why a step was slow, by what its spans and its batch usually are."""

    def __init__(self, evidence: Evidence) -> None:
        steps = evidence.steps
        self._job, self._unit, self._machines = evidence.job, evidence.status.unit, evidence.machines
        self._usual = {span: median(seconds_of(point, span) for point in steps) for span in (*_BETWEEN, *STEP_SPANS)}
        self._batch = median(point.values.get(self._unit, 0.0) for point in steps)
        self._first: dict[int, int] = {}  # the first step of each generation
        self._new_size: set[int] = set()  # steps that are the first with their batch and image size
        settings_before = set()
        for point in steps:
            self._first[point.generation] = min(point.step, self._first.get(point.generation, point.step))
            epoch = max(0, int(point.values["epoch"]))
            if (point.generation, settings := self._job.train.in_epoch(epoch)) not in settings_before:
                settings_before.add((point.generation, settings))
                self._new_size.add(point.step)

    def why(self, point: Point) -> str:
        grew = {span: seconds_of(point, span) - usual for span, usual in self._usual.items()}
        span = max(grew, key=lambda name: grew[name])
        if span in _BETWEEN:
            return _BETWEEN[span]
        if span == "wait":
            return "waiting for another machine" if self._machines > 1 else "waiting for another worker"
        if span in ("data", "communication", "other"):
            return {"data": "waiting for data", "communication": "slow communication", "other": "bookkeeping"}[span]
        if point.step - self._first[point.generation] < 2 or point.step in self._new_size:
            return "compilation or warm-up: the first steps, or another size"
        if self._batch and point.values.get(self._unit, 0.0) > 1.3 * self._batch:
            return "a larger batch"
        return "slow computing: something else used this machine, or its clock dropped"


def _over_steps(steps: Sequence[Point], span: str) -> list[tuple[float, float]]:
    return [(float(point.step), seconds_of(point, span)) for point in steps]


def _few_steps(evidence: Evidence) -> str:
    return f"{counted(len(evidence.steps), 'step')}, and at least {_MIN_STEPS} are needed"


def _short(seconds: float) -> str:
    """Show the time of a step: `133 ms`, `1.52 s`."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
