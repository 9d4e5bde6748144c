"""Follow a run in a terminal: one live line, evaluations and events above it, a summary at the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.live import Live
from rich.text import Text

from packtrain.backoff import Backoff
from packtrain.cli.common import hints
from packtrain.cli.screen import Part, Screen, console
from packtrain.errors import EXIT_ALREADY_JOINED, EXIT_INTERRUPTED, NotFinished, PacktrainError, RunFailed, harmless
from packtrain.fleet import Machine, StartedNode, fleet_to_ask, release, states_of
from packtrain.job import Job
from packtrain.observe.follower import RunNews
from packtrain.observe.goodput import Goodput
from packtrain.observe.history import (
    RECENT_STEPS,
    RecentPoints,
    goal_step,
    progress,
    recent_losses,
    seconds_to_goal,
    throughput,
)
from packtrain.observe.measure import of_samples, score_title
from packtrain.observe.spans import COMPUTING, LABELS
from packtrain.observe.status import About, Status, about, read_status
from packtrain.process import Task
from packtrain.report import report_url, write_report
from packtrain.run.liveness import (
    EXIT_CODES,
    LEASE_LOST_SECONDS,
    LEASE_SECONDS,
    WATCH_SECONDS,
    LeaseWatch,
    fail_launch,
    state_now,
    state_of,
)
from packtrain.run.outputs import output_sizes
from packtrain.run.records import Event, LogLine, Point, loss_name
from packtrain.run.run import Run
from packtrain.run.sweeps import sweep_of
from packtrain.store import StoreAway, StoreError
from packtrain.units import Machines, counted, show_bytes, show_score, show_seconds, show_speed, show_time

ASK_FLEET_SECONDS = 30.0
_POLL_SECONDS = 0.5
_MOUNT_SECONDS = 60.0
_PLAIN_LINE_SECONDS = 15.0  # between progress lines where there is no terminal to update one in
_NONE_LEFT_ANSWERS = 2  # in a row, to believe that no machine is left: a requeued job is in no list for a moment
_BAR_WIDTH = 20
_PLAIN_BAR = str.maketrans("━╌", "#-")
_SHOWN_SCORES, _LINE_WIDTH = 20, 79  # of a program, which may log hundreds of numbers
_SHOWN_OUTPUTS = 9
_LABEL_WIDTH = 24  # a score may have any name, and must not push all others to the right
_LOG_LINE_SECONDS = 5.0
_SHOWN_WARNINGS = 3  # the last ones, in the summary of a run
_HISTORY_LINES = 20  # of a run that is followed from its middle


def follow(
    run: Run, nodes: Sequence[StartedNode], foreground: bool, news: RunNews | None = None, quiet: bool = False
) -> int:
    """Show the run until it ends and return its exit code. Ctrl-C detaches, or stops a run in the foreground.

    Without `news`, the last lines of what the run has recorded before are shown first. Unless `quiet`, what rank 0
    of a program prints is shown, too.
    """
    try:
        return _follow(run, nodes, foreground, news, quiet)
    except StoreError as error:
        if not error.temporary:
            raise
        raise NotFinished(
            f"{error}; the run may still be running: try `{run.command('follow')}` when the store is back"
        ) from None


def _follow(run: Run, nodes: Sequence[StartedNode], foreground: bool, news: RunNews | None, quiet: bool) -> int:
    screen = console()
    if not nodes and news is None:
        check_launched(run)
    screen.say((run.name, "bold"), f" in {run.store.url}")
    follower = Follower(run, nodes, screen, news=news, quiet=quiet)
    try:
        try:
            # Nobody waits a minute for machines that left long ago.
            if not nodes and news is None and _is_over(run):
                follower.read()
            else:
                follower.until_ended()
        except KeyboardInterrupt:
            if not foreground:
                screen.say()
                screen.say("Detached from ", (run.name, "bold"), "; it keeps running.")
                screen.say_lines(hints(run, "follow", "status", "stop"))
                return EXIT_INTERRUPTED
            screen.say()
            screen.say("Stopping: waiting for the last checkpoint. Press Ctrl-C again to detach.")
            run.request_stop("stopped by user (Ctrl-C)")
            follower.until_ended()
    except KeyboardInterrupt:
        screen.say()
        screen.say("Detached from ", (run.name, "bold"), " before it stopped.")
        screen.say_lines(hints(run, "follow", "status", "resume"))
        return EXIT_INTERRUPTED
    state = state_of(run)
    if not run.store.exists(run.key("report.html")):  # the machines died before they could write it
        write_report(run)
    print_summary(screen, run, read_status(run, state))
    if run.result() is not None:
        release(run, screen.say)
    if state != "finished":
        screen.say_lines(hints(run, "resume"))
    return EXIT_CODES[state]


def check_launched(run: Run, seconds: float = WATCH_SECONDS) -> None:
    """Refuse a run that no client has launched, and so none will join; one that is being created gets some seconds."""
    backoff = Backoff(0.2, 1.0, limit_seconds=seconds)
    while run.result() is None and not run.launches_by_key() and not run.leases():
        if backoff.wait():
            continue
        if (sweep := sweep_of(run)) is not None:
            advice = f"it is one of the sweep {sweep}; `packtrain sweep {sweep}` starts what is left of it"
        else:
            advice = f"run `{run.command('resume')}`"
        raise NotFinished(f"{run.name} has not been started; {advice}")


def _is_over(run: Run) -> bool:
    """True if no machine works on the run, and none is expected to."""
    state = state_now(run)
    return state == "interrupted" or (state not in ("running", "waiting") and all(lease.left for lease in run.leases()))


@dataclass(frozen=True)
class Shortage:
    """Too few machines for the run to make progress. `none_left`: the run is stuck until a person resumes it."""

    text: str
    none_left: bool = False


def shortage(alive: int, machine_count: Machines, machines: Sequence[Machine] | None, resume: str) -> Shortage | None:
    """Return None if enough machines are alive. `machines` is what the fleet sees; None if it could not say.

    `resume` is the command for when no machine is left.
    """
    if alive >= machine_count.least:
        return None
    if alive or machines is None or not all(machine.is_over for machine in machines):
        states = states_of(machines or ())
        text = f"waiting for {machine_count.least - alive} of {machine_count.least} machines"
        return Shortage(f"{text}: {states}" if states else text)
    ended = f" ({states_of(machines)})" if machines else ""
    return Shortage(f"no machine is left{ended}; run `{resume}` to continue", none_left=True)


class MachineWatch:
    """Watches the leases of a run and, while there are too few machines, asks its fleet about them."""

    def __init__(
        self, run: Run, clock: Callable[[], float] = time.monotonic, ask_seconds: float = ASK_FLEET_SECONDS
    ) -> None:
        self._run, self._clock, self._ask_seconds = run, clock, ask_seconds
        self._leases = LeaseWatch()
        self._looked = float("-inf")
        self._asked = clock()  # machines get this long to start before the fleet is asked
        self.asking: Task | None = None
        self._machines: list[Machine] | None = None
        self._shortage: Shortage | None = None
        self._none_left_times = 0

    @property
    def is_hopeless(self) -> bool:
        """True if no machine will join until a person resumes the run."""
        return self._none_left_times >= _NONE_LEFT_ANSWERS

    def look(self) -> Shortage | None:
        moment = self._clock()
        if moment - self._looked >= LEASE_SECONDS:
            self._looked = moment
            self._leases.observe(self._run.leases(), moment)
        alive = self._leases.count_alive(moment)
        machine_count = self._run.job.fleet.kind.machines
        if alive >= machine_count.least:  # the fleet is asked only while machines are missing: asking takes connections
            self._asked, self._shortage, self._none_left_times = moment, None, 0
        elif self.asking is not None and self.asking.is_done:
            self.asking, self._asked = None, moment
            self._shortage = shortage(alive, machine_count, self._machines, self._run.command("resume"))
            is_none_left = self._shortage is not None and self._shortage.none_left
            self._none_left_times = self._none_left_times + 1 if is_none_left else 0
        elif self.asking is None and moment - self._asked >= self._ask_seconds:
            self.asking = Task(self._ask, "machines")  # in a thread: a host may take long to answer
        return self._shortage

    def _ask(self) -> None:
        try:
            fleet = fleet_to_ask(self._run)
            self._machines = None if fleet is None else fleet.machines(self._run)
        except PacktrainError:
            self._machines = None


class Follower:
    """Reads what is new in a run's folder and prints it."""

    def __init__(
        self,
        run: Run,
        nodes: Sequence[StartedNode],
        screen: Screen,
        machines: MachineWatch | None = None,
        poll_seconds: float = _POLL_SECONDS,
        news: RunNews | None = None,
        quiet: bool = False,
    ) -> None:
        self._run, self._job, self._nodes, self._screen = run, run.job, nodes, screen
        self._poll_seconds = poll_seconds
        self._has_history = news is None
        self._news = news or RunNews(run, history=True)
        self._has_lines = self._job.program is not None and not quiet
        self._recent = RecentPoints(self._job.step_kind)
        self._evaluation: Point | None = None
        self._printed: set[tuple[int, str, str]] = set()
        self._deadline: float | None = None
        self._machines = machines or MachineWatch(run)
        self._shortage: Shortage | None = None
        self._started: float | None = None
        self._plain_at, self._plain_line = time.monotonic(), ""
        self._ended_at: float | None = None

    def until_ended(self) -> None:
        # One line, whatever the width: a live line that wraps scrolls the terminal.
        with Live(Text(), console=self._screen, refresh_per_second=4, transient=True) as live:
            backoff: Backoff | None = None  # while the store is away
            while True:
                try:
                    if self._has_ended(live):
                        self.read()  # machines upload their last lines after the result
                        return
                    backoff = None
                    time.sleep(self._poll_seconds)
                except StoreAway as away:  # a mount may be back soon; a bucket's own client waits just as long
                    if backoff is None:
                        self._print("store", "yellow", str(away))
                        backoff = Backoff(self._poll_seconds, 5.0, limit_seconds=_MOUNT_SECONDS)
                    if not backoff.wait():
                        raise

    def _has_ended(self, live: Live) -> bool:
        """Show what is new; True if the run has a result and its machines are done."""
        result = self._run.result()  # before `read`, so that everything up to the result is shown
        self.read()
        if result is None:
            self._check_machines()
        line = self.line()
        if not self._screen.encoding.lower().startswith("utf"):
            line = line.translate(_PLAIN_BAR)
        live.update(Text(line, style="cyan", no_wrap=True, overflow="ellipsis"))
        if not self._screen.is_terminal and time.monotonic() - self._plain_at > _PLAIN_LINE_SECONDS:
            self._plain_at = time.monotonic()
            if line != self._plain_line:  # during an evaluation nothing of it changes
                self._print("train" if self._recent.latest_steps else "", "dim", line.strip())
            self._plain_line = line
        if result is not None:
            # The last machine writes the report after the result; give it time.
            self._ended_at = self._ended_at or time.monotonic()
            if self._nodes:
                all_gone = all(node.exit_code() is not None for node in self._nodes)
            else:
                all_gone = self._run.store.exists(self._run.key("report.html"))
            return all_gone or time.monotonic() - self._ended_at > LEASE_LOST_SECONDS
        if self._has_died() and self._run.result() is None:
            # A node writes a result before it exits, so this one was killed or crashed.
            how = f"the node {_how_it_ended(self._nodes[0])}"
            fail_launch(self._run, "failed", f"{how} before it joined the run")
            raise RunFailed(f"{how} without a result; try again with `{self._run.command('resume')}`")
        return False

    def _has_died(self) -> bool:
        """True if the nodes of this client are gone. One that found another client's node in its place is not counted:
        that node does its work, and the store shows it."""
        nodes = [node for node in self._nodes if node.exit_code() != EXIT_ALREADY_JOINED]
        if len(nodes) < len(self._nodes):
            self._print("machine", "dim", f"{self._run.name} already has its node here; another client has started it")
        self._nodes = nodes
        return bool(nodes) and all(node.exit_code() is not None for node in nodes)

    def _check_machines(self) -> None:
        missing = self._machines.look()
        # Look again: a result may have been written since, and machines leave right after it.
        if self._machines.is_hopeless and missing is not None and self._run.result() is None:
            raise NotFinished(f"{self._run.name}: {missing.text}")
        if missing != self._shortage:
            self._shortage = missing
            if missing is not None:
                self._print("machines", "yellow", missing.text)

    def read(self) -> None:
        """Print the events and evaluations since the last call in their order, and note the steps."""
        shown = [record for record in self._news.read(self._has_lines) if self._is_shown(record)]
        if self._has_history and len(shown) > _HISTORY_LINES:
            self._print("earlier", "dim", (f"{len(shown) - _HISTORY_LINES:,} lines", "dim"))
            shown = shown[-_HISTORY_LINES:]
        self._has_history = False
        for record in shown:
            if isinstance(record, Event):
                style = "yellow" if record.display == "warning" else "dim"
                self._print(record.kind, style, record.text.removeprefix(f"{record.kind} "))
            elif isinstance(record, LogLine):
                self._screen.say(record.text)
            else:
                self._print(record.kind, "dim", *scores_in_words(record))

    def _is_shown(self, record: Event | Point | LogLine) -> bool:
        """Note it; True if it is something to print."""
        if isinstance(record, Event):
            if record.kind == "generation":
                self._started = record.time  # a program reports no steps: show how long it has been running
                generation = next(iter(self._run.generations(after=max(0, record.generation - 1))), None)
                seconds = generation.seconds_left if generation else None
                self._deadline = None if seconds is None else record.time + seconds
            # Every machine tells of a generation that starts, and several may see that one is lost.
            news = (record.generation, record.kind, record.text)
            if record.display == "report" or news in self._printed:
                return False
            self._printed.add(news)
            return True
        if isinstance(record, LogLine):
            return True
        self._recent.add(record)
        if record.is_evaluation:
            self._evaluation = record
        elif record.kind in ("valid", "test"):
            before, self._evaluation = self._evaluation, record
            # If a periodic evaluation covers the full validation split, the last two evaluations are the same.
            return before is None or ((before.kind, scores_in_words(before)) != (record.kind, scores_in_words(record)))
        return False

    def _print(self, kind: str, style: str, *texts: Part) -> None:
        self._screen.say_row(f"{kind:>10}", style, *texts)

    def line(self) -> str:
        """Return the live line: a shortage of machines, the progress of training, or `starting`."""
        if self._shortage is not None:
            return f"  {self._shortage.text}"
        if steps := self._recent.latest_steps:
            budget = None if self._deadline is None else self._deadline - steps[-1].time
            if self._job.recipe is None:
                return logged_line(steps, budget, self._evaluation)
            return progress_line(self._job, steps, budget, self._screen.width if self._screen.is_terminal else None)
        if self._job.program is not None and self._started is not None:
            return f"  running for {show_seconds(max(0.0, time.time() - self._started))}"
        return "  starting"


def progress_line(job: Job, steps: Sequence[Point], budget_left: float | None = None, width: int | None = None) -> str:
    """Return step, loss, learning rate, speed, time left and budget left of a recipe's run.

    What matters least is left out of a line of `width` columns. Without a width, which is for a log, it has no bar.
    """
    last, unit = steps[-1], job.train.batch.unit
    goal, seconds = goal_step(job, last), seconds_to_goal(job, steps)
    losses = recent_losses(steps)
    bar_width = _BAR_WIDTH if width is not None and width >= 100 else _BAR_WIDTH // 2
    filled = round(bar_width * (progress(job, steps) or 0.0))
    texts = {
        "bar": "" if width is None else "━" * filled + "╌" * (bar_width - filled),
        "step": f"step {last.step:,}" + ("" if goal is None else f" of {goal:,}"),
        "loss": f"loss {sum(losses) / len(losses):.3f}",
        "rate": f"lr {last.values['rate']:.2g}",
        "speed": f"{show_speed(throughput(steps, unit) or 0.0)} {unit}/s",
        "left": f"{'?' if seconds is None else show_seconds(seconds)} left",
        "budget": "" if budget_left is None else f"budget {show_seconds(max(0.0, budget_left))}",
    }
    is_tight = budget_left is not None and seconds is not None and budget_left < seconds
    order = ("step", "loss", "left", *(["budget"] if is_tight else []), "speed", "bar", "budget", "rate")
    shown: set[str] = set()
    for name in order:
        fitting = [texts[key] for key in texts if texts[key] and key in {*shown, name}]
        if width is not None and len("  ".join(fitting)) > width:
            break
        shown.add(name)
    return "  ".join(text for name, text in texts.items() if text and name in shown)


def scores_in_words(point: Point) -> tuple[Part, ...]:
    """Return an evaluation as `step 500  loss 2.271 (800 samples)  bleu 20.301  chrf 50.128 (100 samples)`."""
    names = [name for name in point.values if not name.endswith("_seconds")]
    counts = [point.counts.get(name) for name in names]
    words: list[Part] = [f"step {point.step:,}"]
    for name, count, following in zip(names, counts, [*counts, None][1:], strict=True):
        words += [f"  {name} ", (f"{point.values[name]:.3f}", "bold")]
        if count != following:  # once for neighbors of the same samples
            words.append((of_samples("", count), "dim"))
    return tuple(words)


class StepLines:
    """Lines of a log about a recipe's run: scores as they come, and steps every few seconds."""

    def __init__(self, job: Job, every_seconds: float = _LOG_LINE_SECONDS) -> None:
        self._job, self._every_seconds = job, every_seconds
        self._recent = RecentPoints(job.step_kind)
        self._printed_at = 0.0

    def lines(self, points: Iterable[Point]) -> Iterator[tuple[float, str]]:
        """Yield the time and the text of each line."""
        for point in sorted(points, key=lambda point: (point.generation, point.step)):
            self._recent.add(point)
            if point.kind == "train":
                # One step alone tells neither speed nor time left.
                is_due = point.time - self._printed_at >= self._every_seconds
                if is_due and len(steps := self._recent.latest_steps) > 1:
                    self._printed_at = point.time
                    yield point.time, f"[train] {progress_line(self._job, steps)}"
            elif point.kind not in ("start", "log"):  # a program prints what it wants to say
                texts = (text if isinstance(text, str) else text[0] for text in scores_in_words(point))
                yield point.time, f"[{point.kind}] {''.join(texts)}"


def logged_line(steps: Sequence[Point], budget_left: float | None = None, evaluation: Point | None = None) -> str:
    """Return step, last numbers, speed and budget left of a program that logs; `evaluation` may be of other steps."""
    latest: dict[str, float] = {}
    for point in steps:
        latest |= point.values
    losses, name = recent_losses(steps), loss_name(latest)  # of the steps: an evaluation may have a loss of its own
    if evaluation is not None:
        latest |= evaluation.values
    if losses and name is not None:
        latest[name] = sum(losses) / len(losses)
    first, ends = f"  step {steps[-1].step:,}", list[str]()
    if (speed := throughput(steps, "steps")) is not None:
        ends.append(f"{show_speed(speed)} steps/s")
    if budget_left is not None:
        ends.append(f"budget {show_seconds(max(0.0, budget_left))}")
    end = "".join(f"  {text}" for text in ends)
    for name, value in latest.items():
        shown = harmless(f"  {name} {show_score(value)}")
        if name.rpartition("/")[2] not in ("step", "epoch") and len(first) + len(shown) + len(end) <= _LINE_WIDTH:
            first += shown
    return first + end


def _how_it_ended(node: StartedNode) -> str:
    code = node.exit_code() or 0
    if code < 0:  # a signal leaves no trace in its log
        return f"was killed ({signal.Signals(-code).name})"
    lines = node.log.read_text("utf-8", "replace").strip().splitlines() if node.log and node.log.exists() else []
    return f"exited with code {code} ({lines[-1] if lines else 'no output'})"


def print_summary(screen: Screen, run: Run, summary: Status, events: Sequence[Event] = ()) -> None:
    """Print what is known of a run, with the last warnings among the events."""
    rows: list[tuple[str, *tuple[Part, ...]]] = [
        ("run", (summary.run, "bold"), f"  {summary.outcome}"),
        ("job", summary.description),
        *_about_rows(about(run)),
    ]
    if run.job.parent is not None:
        rows.append(("from", run.job.parent.identified))
    goal = f" of {summary.goal:,}" if summary.goal else ""
    # Of a program that logs nothing, only its commits are known.
    rows.append(("step" if summary.unit else "commits", f"{summary.step:,}{goal} in {show_seconds(summary.seconds)}"))
    if summary.units_per_second:
        scope = "mean of all steps" if run.result() else f"mean of the last {RECENT_STEPS} steps"
        rows.append(("speed", f"{show_speed(summary.units_per_second)} {summary.unit}/s", (f"  {scope}", "dim")))
    if summary.cost is not None:
        rows.append(("cost", summary.cost.line))
    if summary.goodput.fraction is not None:
        rows.append(("time", _time_line(summary.goodput)))
    rows += _score_rows(summary)
    for machine in summary.machines:
        if machine.working:
            use = f"CPU {machine.cpu_fraction:.0%}, memory {machine.memory_fraction:.0%}"
            rows.append(("machine", f"{machine.node}: {counted(machine.workers, 'worker')}, {use}"))
    warnings = [event.text for event in events if event.kind == "warning"]
    rows += [("warning", text) for text in warnings[-_SHOWN_WARNINGS:]]
    outputs = output_sizes(run)
    for label, (name, sizes) in zip(["outputs", *[""] * _SHOWN_OUTPUTS], outputs.items(), strict=False):
        rows.append((label, f"{name}  {counted(len(sizes), 'file')}, {show_bytes(sum(sizes))}"))
    if len(outputs) > _SHOWN_OUTPUTS + 1:
        rows.append(("", f"and {len(outputs) - _SHOWN_OUTPUTS - 1} more; see `{run.command('get')}`"))
    if run.store.exists(run.key("report.html")):
        rows.append(("report", report_url(run)))
    width = min(_LABEL_WIDTH, max(len(label) for label, *_ in rows))
    for label, *texts in rows:
        screen.say_row(f"{label:<{width}}", "dim", *texts)


def _score_rows(summary: Status) -> Iterator[tuple[str, *tuple[Part, ...]]]:
    """Yield the training loss and every score, each with what it is of."""
    logged_loss = loss_name(summary.scores)  # of a program; what a recipe measures has a split before its name
    shown: list[tuple[str, str, str]] = []
    if summary.loss is not None:
        scope = f"mean of the last {counted(summary.loss_steps, 'step')}"
        shown.append((logged_loss or "train loss", f"{summary.loss:.3f}", scope))
    for name, value in summary.scores.items():
        scope = counted(summary.counts[name], "sample") if name in summary.counts else ""
        if name != logged_loss:
            about_it = filter(None, (scope, summary.signatures.get(name, "")))
            shown.append((score_title(name), show_score(value), "  ".join(about_it)))
        if summary.best is not None and name == summary.best.name and value != summary.best.value:
            best = summary.best
            shown.append(
                (f"best {best.title}", show_score(best.value), of_samples(f"at step {best.step:,}", best.samples))
            )
    width = max((len(value) for _, value, _ in shown), default=0)
    for name, text, scope in shown[:_SHOWN_SCORES]:
        yield (
            harmless(name),
            (f"{text:<{width}}" if scope else text, "bold"),
            (f"  {scope}".rstrip(), "dim"),
        )
    if len(shown) > _SHOWN_SCORES:
        yield "", f"and {len(shown) - _SHOWN_SCORES} more; see the report"


def _about_rows(facts: About) -> Iterator[tuple[str, str]]:
    by = f" by {facts.started_by}" if facts.started_by else ""
    if facts.overrides:
        yield "set", harmless("; ".join(facts.overrides))
    yield "started" if by else "created", f"{show_time(facts.created)}{by}"
    if facts.tags:
        yield "tags", " ".join(facts.tags)
    if facts.note:
        yield "note", facts.note


def _time_line(times: Goodput) -> str:
    """Return the share of useful time and the three largest overheads: `87% training; startup 8%, ...`."""
    overhead = {name: seconds / times.seconds for name, seconds in times.parts.items() if name not in COMPUTING}
    largest = sorted(overhead, key=lambda name: -overhead[name])[:3]
    shares = ", ".join(f"{LABELS[name]} {overhead[name]:.0%}" for name in largest if overhead[name] >= 0.005)
    return f"{times.fraction:.0%} training" + (f"; {shares}" if shares else "")
