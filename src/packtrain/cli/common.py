"""Options, stores, hints and output that commands share.

Everything that a command prints passes `SafeStream`, which escapes it unless a `Screen` has. Logs, events, names and
fields of jobs come from whoever writes the store, and the answers of hosts from whoever runs there: none of them may
steer the terminal.
"""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from packtrain.errors import harmless

if TYPE_CHECKING:
    from packtrain.cli.screen import Screen
    from packtrain.run.run import Run
    from packtrain.run.trust import Accept, CodeReview
    from packtrain.store import Store

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="A directory, or s3://, gs:// or az://bucket/prefix. Default: $PACKTRAIN_STORE, else ./store, here or in"
        " the nearest directory above.",
    ),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Run name, or a job name for its newest run. Default: the newest run."),
]
HostOption = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; the default accepts this machine only.")
]
PortOption = Annotated[
    int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port to listen on; 0 picks a free one.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help='Override a field of the job, e.g. train.duration="100 steps"; repeatable.'
    ),
]
DropsOption = Annotated[bool, typer.Option("--allow-drops", help="Drop unusable samples instead of stopping.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-code", help="Run the run's own code even if you have not run it from here before.")
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="best|last|STEP",
        help="Checkpoint of a run, by score, age or step. Default: last.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Hide the program's output.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

STATE_STYLES = {
    "finished": "green", "running": "cyan", "waiting": "cyan", "stopped": "yellow", "interrupted": "yellow",
    "failed": "red",
}  # fmt: skip

_SHOWN_FILES, _SHOWN_CHARACTERS = 20, 500
_HINTS = {"follow": "follow", "status": "show", "stop": "stop", "resume": "resume"}


def find_store(location: str | None, identity: str | None = None) -> Store:
    from packtrain.store import default_store, open_store

    return open_store(location or default_store(), identity=identity)


def existing_store(location: str | None) -> Store:
    """Return a store that is there: a list of nothing would hide that its name is wrong."""
    found = find_store(location)
    with naming_stores_nearby(found, None):
        check_exists(found)
    return found


def check_exists(store: Store) -> None:
    from packtrain.errors import NotFound

    # A directory that is no store is an error by itself; a prefix of a bucket is there if it has objects.
    if not store.folders("") and not store.is_directory:
        raise NotFound(f"{store.url}: no store here; check the name, or start a run there with `packtrain run`")


def find_run(location: str | None, name: str | None) -> Run:
    return run_in(find_store(location), name)


def run_in(store: Store, name: str | None) -> Run:
    """Return a run as `open_run` does; the error names a store around here that has it."""
    from packtrain.run.run import open_run

    with naming_stores_nearby(store, name):
        return open_run(store, name)


@contextmanager
def naming_stores_nearby(store: Store, name: str | None) -> Iterator[None]:
    """Add to the error that a run, or the whole store, was not found which store around here has one."""
    from packtrain.errors import EXIT_NOT_FOUND, NotFound, PacktrainError
    from packtrain.run.run import open_run
    from packtrain.store import stores_nearby

    try:
        yield
    except PacktrainError as error:
        for other in stores_nearby() if error.exit_code == EXIT_NOT_FOUND else ():
            run = None
            if other.url != store.url:
                with suppress(PacktrainError):
                    run = open_run(other, name)
            if run is not None:
                option = f"--store {shlex.quote(other.url)}"
                raise NotFound(f"{error}; {run.name} is in another store; add {option}") from None
        raise


def check_host(host: str, is_protected: bool, advice: str) -> None:
    """Refuse an address that other machines can reach, unless the server is protected."""
    from packtrain.errors import Mistake, printable
    from packtrain.http_server import is_loopback

    if not is_protected and not is_loopback(host):
        raise Mistake(f"--host {printable(host)}: other machines may reach this address; {advice}")


def log_request(line: str) -> None:
    """Print a line of a server's log."""
    print(line, file=sys.stderr, flush=True)


def write_output(path: Path, text: str) -> None:
    """Write a file that `-o` names."""
    from packtrain.errors import Mistake

    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise Mistake(f"-o {path}: cannot write it: {error.strerror}") from None


def hints(run: Run, *words: str) -> list[str]:
    """Return one line for each of follow, status, stop and resume, with the command to type."""
    return [f"  {word + ':':<8} {run.command(_HINTS[word])}" for word in words]


def trusting(given: bool) -> Accept:
    """Return what decides about a run's code that this person has not run before: the option, or the person."""

    def accept(review: CodeReview) -> None:
        advice = "run this in a terminal to look at it, or pass --trust-code"
        confirm(_about(review), "Run it?", review.reason, given, f"{review.run.name}: not run", advice)

    return accept


def _about(review: CodeReview) -> Iterator[str]:
    """Yield what a person needs to know before code runs here."""
    from packtrain.run.code import unpacked
    from packtrain.units import show_bytes

    job = review.job
    yield f"{review.reason}:"
    for change in review.changes[:_SHOWN_FILES]:
        kind = f"{change.kind:<8} " if review.known else ""
        yield f"  {kind}{change.name} ({show_bytes(change.size)})"
    if len(review.changes) > _SHOWN_FILES:
        yield f"  and {len(review.changes) - _SHOWN_FILES} more"
    yield f"It runs: {job.recipe if job.program is None else job.program.in_words}"
    yield f"Fleet: {job.fleet.model_dump_json(exclude_defaults=True)}"
    if job.report.mlflow is not None:
        yield f"MLflow server, which gets your credentials for it: {job.report.mlflow}"
    if job.environment:
        yield f"Environment variables that it gets: {', '.join(job.environment)}"
    if job.has_own_code:
        yield f"Read its code first, in {unpacked(review.run.code)}: it can do everything that you can do here."


def confirm(
    lines: Iterable[str],
    question: str,
    reason: str,
    yes: bool,
    refusal: str,
    advice: str = "run this in a terminal to be asked, or pass --yes",
) -> None:
    """Return if the person agrees; the reason explains a refusal where nobody can be asked.

    Everything is shown on standard error, where it disturbs no output.
    """
    from packtrain.errors import Mistake, printable

    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Mistake(f"{reason}; {advice}")
    for line in lines:
        print(printable(line, _SHOWN_CHARACTERS), file=sys.stderr)
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Mistake(refusal)


def ask(question: str, answers: Sequence[str]) -> str | None:
    """Ask on standard error, and return the answer; None if there is nobody to ask. Enter takes the first one."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    while True:
        print(f"{question} [{'/'.join(answers)}] ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        given = line.strip().lower()
        fitting = [answer for answer in answers if answer.lower().startswith(given)]
        exact = [answer for answer in fitting if answer.lower() == given]
        if not line or not given:
            return answers[0]
        if exact or len(fitting) == 1:
            return (exact or fitting)[0]


class OutputLost(OSError):
    """Standard output cannot be written. It has no `errno`: Typer would end with 1 for the one of a broken pipe."""


class ReaderGone(OutputLost, BrokenPipeError):
    """The reader of standard output, such as `head`, has exited."""


class SafeStream(io.TextIOBase):
    """Standard output. What could steer a terminal is escaped, unless a `Screen` has already done so."""

    def __init__(self, stream: TextIO, escapes: bool = True) -> None:
        self.stream, self.escapes = stream, escapes

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def write(self, text: str) -> int:
        try:
            self.stream.write(harmless(text, keep="\n\t") if self.escapes else text)
        except OSError as error:
            self.fail(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self.fail(error)

    def fail(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from error
        raise OutputLost(f"cannot write standard output: {error.strerror}") from error

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


class SafeErrors(SafeStream):
    """Standard error. When it cannot be written, the exit code still says how the command ended."""

    def fail(self, error: OSError) -> None:
        pass


class UnreadStream(SafeStream):
    """Standard output that drops what cannot be written; `error` is the reason why."""

    error: OSError | None = None

    def fail(self, error: OSError) -> None:
        self.error = error


@contextmanager
def unread_output() -> Iterator[None]:
    """Do everything in the block, even if standard output has no reader or is full; only then raise that error.

    What a command starts must not depend on who reads what it prints.
    """
    out = sys.stdout
    if not isinstance(out, SafeStream):
        yield
        return
    stream, unread = out.stream, UnreadStream(out.stream, escapes=False)
    out.stream = cast("TextIO", unread)
    try:
        yield
        out.flush()
    finally:
        out.stream = stream
    if unread.error is not None:
        out.fail(unread.error)


def prepare_streams() -> None:
    """Make pipes and files UTF-8, whatever the locale, and open the streams that the caller has closed, as by `>&-`.

    A terminal keeps its encoding, and gets escapes for what it cannot show.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - until the command ends
        elif isinstance(stream, io.TextIOWrapper):
            encoding = None if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="surrogateescape" if mode == "r" else "backslashreplace")


@contextmanager
def safe_output() -> Iterator[None]:
    """Escape what is printed, to standard output and to standard error."""
    streams = sys.stdout, sys.stderr
    out, err = cast("TextIO", SafeStream(sys.stdout)), cast("TextIO", SafeErrors(sys.stderr))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                # Python flushes once more as it exits, and would complain that it cannot.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def console(stream: TextIO | None = None) -> Screen:
    """Return the screen of commands: standard output, unless another stream is given."""
    from packtrain.cli.screen import Screen

    stream = stream or sys.stdout
    if isinstance(stream, SafeStream):
        stream = cast("TextIO", type(stream)(stream.stream, escapes=False))
    return Screen(stream)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, for commands that have to clean up: the terminal, or files."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_json(value: Any) -> None:
    print(json_text(value))


def print_json_list(rows: Iterable[Any]) -> None:
    """Print a list as `print_json` does, each row as soon as it is there."""
    separator = "["
    for row in rows:
        print(separator, textwrap.indent(json_text(row), "  "), sep="\n", end="", flush=True)
        separator = ","
    print("[]" if separator == "[" else "\n]")


def json_line(value: Any) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def json_text(value: Any) -> str:
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    if text == harmless(text, keep="\n"):
        return text
    # JSON leaves characters above 7f as they are; those that the stream would escape get the escapes of JSON.
    return "".join(one if one == "\n" or one == harmless(one) else json.dumps(one)[1:-1] for one in text)


def _finite(value: Any) -> Any:
    """Return the value with null for each number that JSON cannot write: a loss may be NaN."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
