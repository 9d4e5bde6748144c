"""Following a run in a terminal: one live line, evaluations and events above it, the result at the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from packtrain.cli.common import console
from packtrain.errors import EXIT_UNFINISHED, NotFinished, PacktrainError, RunFailed
from packtrain.fleet import Machine, Started, fleet_of
from packtrain.fleet.slurm import summed_up
from packtrain.job.job import Job
from packtrain.node.attempt import Task
from packtrain.report import report_place, write_report
from packtrain.report.goodput import COMPUTING, Goodput
from packtrain.report.summary import Summary, summarise, units_per_second
from packtrain.run.liveness import EXIT_CODES, LEASE_LOST_SECONDS, LEASE_SECONDS, LeaseWatch, state_of
from packtrain.run.records import Event, Point
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.units import Machines, counted, show_count, show_seconds

_POLL_SECONDS = 0.5
_PLAIN_LINE_SECONDS = 15.0
_SPEED_STEPS = 100
ASK_FLEET_SECONDS = 30.0
_SURE = 2  # answers in a row that no machine is left: a job that is requeued may be in no list for a moment
_ENDED = ("ended", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def how_to_go_on(run: Run) -> str:
    place = f" --store {run.store.url}"
    return (
        f"  follow:  packtrain logs -f {run.name}{place}\n"
        f"  look:    packtrain show {run.name}{place}\n"
        f"  stop:    packtrain stop {run.name}{place}\n"
        f"  go on:   packtrain resume {run.name}{place}"
    )


def follow(run: Run, nodes: Sequence[Started], foreground: bool) -> int:
    """Shows the run until it ends; the exit code that says how. Ctrl-C leaves it, or stops it in the foreground."""
    try:
        return _follow(run, nodes, foreground)
    except StoreError as error:
        if not error.temporary:
            raise
        raise NotFinished(
            f"{error}; the run may go on: `packtrain show {run.name}` tells when the store is back"
        ) from None


def _follow(run: Run, nodes: Sequence[Started], foreground: bool) -> int:
    screen = console()
    screen.print(f"[bold]{run.name}[/bold] in {escape(run.store.url)}")
    follower = Follower(run, nodes, screen)
    try:
        follower.until_ended()
    except KeyboardInterrupt:
        if not foreground:
            screen.print(f"\nleft [bold]{run.name}[/bold]; it goes on without this terminal\n{how_to_go_on(run)}")
            return EXIT_UNFINISHED
        screen.print("\nstopping: the workers commit a checkpoint and end")
        run.request_stop("Ctrl-C in the foreground")
        try:
            follower.until_ended()
        except KeyboardInterrupt:
            screen.print(f"\nleft [bold]{run.name}[/bold] before it had ended; `packtrain resume {run.name}` goes on")
            return EXIT_UNFINISHED
    return conclude(run)


def conclude(run: Run) -> int:
    """Prints how a run ended and makes sure that its report is there."""
    state = state_of(run)
    if not run.store.exists(run.key("report.html")):
        write_report(run)
    print_summary(console(), run, summarise(run, state))
    return EXIT_CODES[state]


@dataclass(frozen=True)
class Shortage:
    """Why a run does not make progress: too few machines. `none_left`: nothing will happen unless somebody acts."""

    text: str
    none_left: bool = False


def shortage(alive: int, wanted: Machines, machines: Sequence[Machine] | None, run: str) -> Shortage | None:
    """Return None if enough machines are alive. `machines` is what the fleet sees; None if it could not say."""
    if alive >= wanted.least:
        return None
    if alive or machines is None or not all(is_over(machine.state) for machine in machines):
        states = summed_up(machines or ())
        text = f"waiting for {wanted.least - alive} of {wanted.least} machines"
        return Shortage(f"{text}: {states}" if states else text)
    return Shortage(f"no machine is left; run `packtrain resume {run}` to continue", none_left=True)


def is_over(state: str) -> bool:
    """True if a machine's state, as its fleet names it, is final. Slurm has several words for a requeued job."""
    words = state.split()
    return "PENDING" not in words and any(word in _ENDED for word in words)


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
        """True if no machine will come unless somebody acts."""
        return self._none_left_times >= _SURE

    def look(self) -> Shortage | None:
        now = self._clock()
        if now - self._looked >= LEASE_SECONDS:
            self._looked = now
            self._leases.observe(self._run.leases(), now)
        alive = self._leases.count_alive(now)
        wanted = self._run.job.fleet.kind.machines
        if alive >= wanted.least:
            self._asked, self._shortage, self._none_left_times = now, None, 0
        elif self.asking is not None and self.asking.is_done:
            self.asking, self._asked = None, now
            self._shortage = shortage(alive, wanted, self._machines, self._run.name)
            is_none_left = self._shortage is not None and self._shortage.none_left
            self._none_left_times = self._none_left_times + 1 if is_none_left else 0
        elif self.asking is None and now - self._asked >= self._ask_seconds:
            self.asking = Task(self._ask, "machines")  # in a thread: a host may take long to answer
        return self._shortage

    def _ask(self) -> None:
        try:
            self._machines = fleet_of(self._run.job.fleet.kind).list(self._run)
        except PacktrainError:
            self._machines = None


class Follower:
    def __init__(
        self, run: Run, nodes: Sequence[Started], screen: Console, machines: MachineWatch | None = None
    ) -> None:
        self._run, self._job, self._nodes, self._screen = run, run.job, nodes, screen
        self._points, self._events = run.points(), run.events()
        self._steps: list[Point] = []
        self._budget_left: float | None = None
        self._began = 0.0
        self._machines = machines or MachineWatch(run)
        self._shortage: Shortage | None = None
        self._working_since: float | None = None
        self._plain_at = time.monotonic()

    def until_ended(self) -> None:
        with Live(Text(), console=self._screen, refresh_per_second=4, transient=True) as live:
            ended_at: float | None = None
            while True:
                result = self._run.result()
                self._read()
                if result is None:
                    self._look_for_machines()
                self._show(live)
                if result is not None:
                    # The last machine writes the report; wait for it a little.
                    ended_at = ended_at or time.monotonic()
                    waited = time.monotonic() - ended_at
                    if self._all_gone() or waited > LEASE_LOST_SECONDS:
                        return
                else:
                    self._refuse_silence()
                time.sleep(_POLL_SECONDS)

    def _all_gone(self) -> bool:
        if self._nodes:
            return all(node.exit_code() is not None for node in self._nodes)
        return self._run.store.exists(self._run.key("report.html"))

    def _look_for_machines(self) -> None:
        found = self._machines.look()
        if self._machines.is_hopeless and found is not None and self._run.result() is None:
            raise NotFinished(f"{self._run.name}: {found.text}")
        if found != self._shortage:
            self._shortage = found
            if found is not None:
                self._screen.print(f"[yellow]{'machines':>10}[/yellow]  {escape(found.text)}")

    def _refuse_silence(self) -> None:
        """If every node that was started here is gone without a result, something is to be said."""
        if self._nodes and self._all_gone() and self._run.result() is None:
            how = _how_it_ended(self._nodes[0])
            raise RunFailed(f"the node {how}, without a result; `packtrain resume {self._run.name}` tries again")

    def _read(self) -> None:
        for event in sorted(self._events.read(), key=lambda event: event.time):
            if event.kind == "generation":
                self._working_since = event.time
            if event.display != "report":
                self._say(event)
        for point in sorted(self._points.read(), key=lambda point: (point.generation, point.step)):
            if point.kind == "start":
                self._steps.clear()
                self._budget_left, self._began = self._allowed(point.generation), point.time
            elif point.kind == "train":
                self._steps = [*self._steps[-_SPEED_STEPS:], point]
            elif point.kind in ("valid", "test"):
                scores = "  ".join(f"{name} [bold]{value:.3f}[/bold]" for name, value in _scores(point).items())
                self._screen.print(f"[dim]{point.kind:>10}[/dim]  step {point.step:,}  {scores}")

    def _allowed(self, number: int) -> float | None:
        """What the budget left to a generation when it began."""
        since = self._run.generations(after=number - 1)
        return since[0].seconds_left if since else None

    def _left(self) -> float | None:
        return None if self._budget_left is None else self._budget_left - (self._steps[-1].time - self._began)

    def _say(self, event: Event) -> None:
        style = "yellow" if event.display == "warning" else "dim"
        self._screen.print(f"[{style}]{event.kind:>10}[/{style}]  {escape(event.text)}")

    def _show(self, live: Live) -> None:
        line = self._line()
        live.update(Text(line, style="cyan"))
        if not self._screen.is_terminal and time.monotonic() - self._plain_at > _PLAIN_LINE_SECONDS:
            self._plain_at = time.monotonic()
            self._screen.print(line)

    def _line(self) -> str:
        if self._shortage is not None:
            return f"  {self._shortage.text}"
        if self._steps:
            return progress_line(self._job, self._steps, self._left())
        if self._job.program is not None and self._working_since is not None:
            return f"  running for {show_seconds(max(0.0, time.time() - self._working_since))}"
        return "  starting"


def progress_line(job: Job, steps: Sequence[Point], budget_left: float | None = None) -> str:
    """Where a run of a recipe is: step, loss, rate, speed, time left, budget left in seconds."""
    last = steps[-1].values
    duration = job.train.duration
    done = {"steps": float(steps[-1].step), "epochs": last["epoch"], "seconds": last["elapsed_seconds"]}[duration.unit]
    speed = units_per_second(steps, job.train.batch.unit) or 0.0
    recent = steps[-20:]
    loss = sum(point.values["loss"] for point in recent) / len(recent)
    left = _seconds_left(steps, duration.unit, duration.value - done)
    width = 20
    filled = round(width * min(1.0, done / duration.value))
    bar = "━" * filled + "╌" * (width - filled)
    return (
        f"{bar} step {steps[-1].step:,}  loss {loss:.3f}  rate {last['rate']:.2g}"
        f"  {show_count(speed)} {job.train.batch.unit}/s  {left} left"
        + ("" if budget_left is None else f"  budget {show_seconds(max(0.0, budget_left))}")
    )


def _seconds_left(steps: Sequence[Point], unit: str, amount: float) -> str:
    if unit == "seconds":
        return show_seconds(max(0.0, amount))
    first, last = steps[0], steps[-1]
    passed = last.values["elapsed_seconds"] - first.values["elapsed_seconds"]
    made = (last.step - first.step) if unit == "steps" else last.values["epoch"] - first.values["epoch"]
    return show_seconds(amount * passed / made) if made > 0 else "?"


def _scores(point: Point) -> dict[str, float]:
    return {name: value for name, value in point.values.items() if not name.endswith("_seconds")}


def _how_it_ended(node: Started) -> str:
    code = node.exit_code() or 0
    if code < 0:  # its log does not know of it
        return f"was ended by {signal.Signals(-code).name}"
    log = node.log
    lines = log.read_text(errors="replace").strip().splitlines() if log is not None and log.exists() else []
    return f"ended with exit code {code} ({lines[-1] if lines else 'it wrote nothing'})"


def _where_time_went(times: Goodput) -> str:
    """The share of useful time, and the three largest of the rest."""
    losses = sorted(((part, name) for name, part in times.parts.items() if name not in COMPUTING), reverse=True)
    named = ", ".join(f"{name} {part / times.seconds:.0%}" for part, name in losses[:3])
    return f"{times.fraction:.0%} in steps" + (f"; {named}" if named else "")


def print_summary(screen: Console, run: Run, summary: Summary) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row(
        "run",
        f"[bold]{summary.run}[/bold]  {summary.state}" + (f": {escape(summary.reason)}" if summary.reason else ""),
    )
    table.add_row("what", escape(summary.what))
    goal = f" of {summary.goal:,}" if summary.goal else ""
    counts = "step" if summary.unit else "commits"  # what a program calls a step, nobody knows
    table.add_row(counts, f"{summary.step:,}{goal}  in {show_seconds(summary.seconds)}")
    if summary.units_per_second:
        table.add_row("speed", f"{show_count(summary.units_per_second)} {summary.unit} a second")
    if summary.goodput.fraction is not None:
        table.add_row("time", _where_time_went(summary.goodput))
    for name, value in summary.scores.items():
        signature = summary.signatures.get(name, "")
        table.add_row(name.replace(".", " "), f"[bold]{value:.2f}[/bold]  [dim]{escape(signature)}[/dim]")
    for machine in summary.machines:
        if machine.working:
            table.add_row(
                "machine",
                f"{machine.node}: {counted(machine.workers, 'worker')}, CPU {machine.cpu_fraction:.0%},"
                f" memory {machine.memory_fraction:.0%}",
            )
    if run.store.exists(run.key("report.html")):
        table.add_row("report", escape(report_place(run)))
    screen.print(table)
