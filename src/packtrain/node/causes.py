"""Why workers ended, and whether to try again: pure decisions over what they left behind.

One worker that fails takes the others with it, on all machines: most of what is reported is a consequence.
"""

from __future__ import annotations

import errno
import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from packtrain.run.records import Cause, Generation, NodeReport
from packtrain.train.control import WorkerError
from packtrain.units import counted

FAILURE = "failure: "
OOM_SECONDS = 60.0  # from a worker's death to the launcher's: it gives the other workers half a minute

# Failures that count toward `fleet.failures`; every other cause passes by itself.
COUNTED: tuple[Cause, ...] = ("machine", "program", "memory", "disk", "hang", "number", "mistake")
# The most specific first: a cause that explains others comes before them.
_BY_SPECIFICITY: tuple[Cause, ...] = (
    "mistake", "number", "memory", "disk", "port", "store", "program", "machine", "preempted", "hang", "joined",
    "ended", "resumed", "start",
)  # fmt: skip
OWN_FAILURES: tuple[Cause, ...] = ("program", "memory", "number", "mistake")
_ADVICE: Mapping[Cause, str] = {
    "memory": "make train.micro_batch smaller, or spread the batch over more workers or machines",
    "disk": "free some space, or set PACKTRAIN_CACHE to a larger disk",
}

_PORT = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_MEMORY = re.compile(
    r"\bMemoryError\b|CUDA out of memory|OutOfMemoryError|[Cc]annot allocate memory|can't allocate memory"
    r"|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating"  # of JAX and TensorFlow
)
_DISK = re.compile(r"No space left on device|Disk quota exceeded")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_KILLED = re.compile(r"exitcode\s*:\s*(-9|137)\b|Signal 9 \(SIGKILL\)")  # 137 is how a shell says it
# How torch's launcher reports each worker that failed; the first one to fail comes last.
_BY_SIGNAL = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*exitcode\s*:\s*-(\d+)")
# An error as Python, R, Julia, Go and others print it. At the end of a traceback its name does not matter.
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b.*|(?:Error(?: in .* )?:|ERROR: |panic: ).*")
_LAST_OF_TRACEBACK = re.compile(r"[^\W\d][\w.<>]*(?::.*)?")
_TRACEBACK = "Traceback (most recent call last)"
_BOX = ("╭", "│", "╰")  # that rich draws around a traceback
_LAUNCHERS_ERROR = "ChildFailedError"
# What Python writes when it ends, after the error that made it end.
_LAST_WORDS = re.compile(r"Exception ignored |Error in (atexit\.|sys\.)")
# Of the lines of tracebacks: colors, the rank once a program has joined its process group, and exception groups.
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^\[rank\d+\]: (?: *[|+] )?|^ *[|+] ", re.MULTILINE)
_EXIT_CODE = re.compile(r"exitcode\s*:\s*(\d+)")
_FRAME = re.compile(r'^\s+File "([^"\n]+)", line (\d+)', re.MULTILINE)
# Errors of a program that another try only repeats; others, such as a lost connection, may pass.
_MISTAKES = re.compile(
    r"(\w+\.)*(SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError|NameError|UnboundLocalError"
    r"|AttributeError|TypeError|KeyError|IndexError|ValueError|AssertionError|NotImplementedError|ZeroDivisionError"
    r"|FileNotFoundError|NotADirectoryError|IsADirectoryError)\b"
)
_USAGE_CODES = (2, 126, 127)  # wrong arguments; a command that cannot be run, or that is not there
_LAST_LINES = 3
# What gloo, NCCL, torch's store and our rendezvous say if another worker is gone or out of reach.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError|ncclSystemError"
    r"|remote process exited|unhandled system error|another worker is gone"
    r"|retrieving ncclUniqueId|wait timeout after|Timeout waiting for key|NCCL communicator (was aborted|encountered)"
    r"|Connection was likely closed|failed to recv|Timed out waiting|connectFullMesh|DistNetworkError|DistStoreError"
    r"|caused pair closure|Connection timed out|No route to host|(network|host) is unreachable"
    r"|does not answer; check the firewall|the first machine did not start",
    re.IGNORECASE,
)
# torch's watchdog of NCCL aborts a worker whose collective waits for one that is gone.
_NCCL_WATCHDOG = re.compile(r"ProcessGroupNCCL.*watchdog|Watchdog caught collective operation timeout", re.IGNORECASE)


def is_consequence(text: str) -> bool:
    """True if an error only says that another worker is gone."""
    return _CONSEQUENCE.search(text) is not None


def only_lost_others(report: NodeReport) -> bool:
    """True if a report only says that the node waited for others, or lost the connection to them."""
    return report.cause == "hang" or (report.cause == "program" and is_consequence(report.text))


def blamed(node: str, report: NodeReport) -> str | None:
    """Return the node to blame by a node's report: itself, or the one that it saw disappear; None for nobody.

    Any of the others may be why a node waited, and no rank can tell whether the one that hangs is itself.
    """
    if report.cause not in COUNTED or only_lost_others(report):
        return None
    return report.lost or node


@dataclass(frozen=True)
class LastOutput:
    """The end of what the launcher and the workers wrote."""

    launcher: str = ""
    workers: str = ""


def why_they_ended(
    generation: int, code: int, errors: Sequence[WorkerError], output: LastOutput, out_of_memory_kills: int
) -> NodeReport:
    """Judge by the workers' own reports, the last output of launcher and workers, and the number of processes that the
    kernel killed meanwhile because memory was full.

    Only the launcher knows about signals and the rendezvous port: workers may write about others.
    """
    if code == 0:
        return NodeReport(generation, "ended", "the workers exited before the run was complete")
    ordered = sorted(errors, key=lambda error: (not error.fatal, is_consequence(error.text), error.time))
    first = ordered[0] if ordered else None
    if first is not None and (first.fatal or first.cause != "program"):
        return NodeReport(generation, first.cause, first.text, first.step, first.fatal)
    if out_of_memory_kills and _KILLED.search(output.launcher):
        return NodeReport(generation, "memory", "the kernel killed a worker: this machine is out of memory")
    if _PORT.search(output.launcher):
        return NodeReport(generation, "port", "the rendezvous port was taken by another process")
    if first is not None and not is_consequence(first.text):
        return NodeReport(generation, _cause_in(first.text), first.text, first.step)
    # Without a step: the error belongs to another worker, which may have been at another step.
    if (killed := _killed_by(output)) is not None:
        return NodeReport(generation, "program", killed)  # a full disk that was complained about earlier did not do it
    if first is not None:
        return NodeReport(generation, "program", first.text)
    return _by_output(generation, code, output)


def _by_output(generation: int, code: int, output: LastOutput) -> NodeReport:
    """Judge a program, which reports nothing, by the end of what it wrote: its own error, not the launcher's."""
    workers = _DECORATION.sub("", output.workers)
    text = f"{output.launcher}\n{workers}"
    errors = _errors_in(text)
    errors = [(start, error) for start, error in errors if not is_consequence(error)] or errors
    codes = [int(number) for number in _EXIT_CODE.findall(output.launcher)]
    code = codes[-1] if codes else code  # the launcher itself always exits with 1; the root cause comes last
    if errors:
        start, error = errors[-1]
        cause = _cause_in(error)
        if cause == "program" and _MISTAKES.match(error):
            cause = "mistake"
        # Such as `train.py:7: `, the innermost line of the program's own code in the traceback that ends here.
        frames = _FRAME.findall(text[:start].rpartition(_TRACEBACK)[2])
        code_lines = [
            (name.rpartition("/code/")[2], number)
            for name, number in frames
            if "/site-packages/" not in name and "/code/" in name
        ]
        place = "{}:{}: ".format(*code_lines[-1]) if code_lines else ""
        return NodeReport(generation, cause, f"{place}{error}; see `packtrain logs`")
    lines = [line.strip() for line in workers.splitlines()]
    last = [line for line in lines if line and not line.startswith("usage:") and not is_consequence(line)]
    words = f": {' / '.join(last[-_LAST_LINES:])}" if last else ""
    cause = "mistake" if code in _USAGE_CODES else _cause_in(text)
    signalled = f" ({signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""  # by a shell
    return NodeReport(generation, cause, f"the program exited with code {code}{signalled}{words}; see `packtrain logs`")


def _errors_in(output: str) -> list[tuple[int, str]]:
    """Return the errors in an output with the place of each: the lines that end tracebacks, or look like errors."""
    errors, start = list[tuple[int, str]](), 0
    in_traceback = goes_on = is_ignored = False
    for line in output.splitlines(keepends=True):
        text, is_indented = line.strip(), line.startswith((" ", "\t", *_BOX))
        if goes_on and is_indented and text:  # as R breaks the line after `Error in f(x) :`
            errors[-1] = (errors[-1][0], f"{errors[-1][1]} {text}")
        goes_on = False
        # Its beginning may be cut off; but TensorFlow lists frames after the error, too.
        if _TRACEBACK in text or (not errors and _FRAME.match(line)):
            in_traceback = True
        elif _LAST_WORDS.match(text):
            is_ignored = True
        elif text and not is_indented:
            shape = _LAST_OF_TRACEBACK if in_traceback else _ERROR
            is_error = _LAUNCHERS_ERROR not in text and (shape.fullmatch(text) or _ERROR.fullmatch(text))
            if is_error and not is_ignored:
                errors.append((start, text))
                goes_on = text.endswith(":")
            in_traceback = is_ignored = False
        start += len(line)
    return errors


def _cause_in(text: str) -> Cause:
    return "memory" if _MEMORY.search(text) else "disk" if _DISK.search(text) else "program"


def _killed_by(output: LastOutput) -> str | None:
    # Not SIGTERM: the launcher ends the other workers with it.
    ended = [(rank, int(number)) for rank, number in _BY_SIGNAL.findall(output.launcher)]
    killed = [(rank, number) for rank, number in ended if number != signal.SIGTERM]
    if not killed:
        return None
    if _NCCL_WATCHDOG.search(output.workers):
        not_aborted = [(rank, number) for rank, number in killed if number != signal.SIGABRT]
        if not not_aborted:
            return f"NCCL's watchdog ended rank {killed[-1][0]}: another worker is gone or hangs"
        killed = not_aborted
    rank, number = killed[-1]
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"rank {rank} was killed ({name})"


def why_not_started(generation: int, error: OSError) -> NodeReport:
    cause: Cause = "disk" if error.errno in _DISK_ERRORS else "machine"
    return NodeReport(generation, cause, f"this machine cannot start its workers: {error}")


def lost_machine(generation: int, node: str) -> NodeReport:
    return NodeReport(generation, "machine", f"machine {node} was lost", lost=node)


def most_specific(reports: Sequence[NodeReport]) -> NodeReport:
    """Return the report that explains the others."""
    return min(reports, key=lambda report: (not report.fatal, _rank(report), is_consequence(report.text)))


def _rank(report: NodeReport) -> int:
    # A lost or preempted machine explains that the others lost the connection to it.
    if report.cause == "program" and only_lost_others(report):
        return _BY_SPECIFICITY.index("joined") * 2 + 1  # odd: between two causes
    return _BY_SPECIFICITY.index(report.cause) * 2


def reason_for(report: NodeReport) -> str:
    return f"{FAILURE}{report.text}" if report.cause in COUNTED else report.text


def verdict(tried: Sequence[Generation], failed: NodeReport, step: int, failures: int) -> str | None:
    """Return why the run is given up after this failure; None to try again.

    `tried` are all generations up to the one that failed, `step` is the last committed step.
    """
    if failed.fatal:
        return failed.text
    if failed.cause not in COUNTED:
        return None
    last = tried[-1] if tried else None
    if failed.cause == "mistake" and last is not None and last.cause in ("start", "resumed") and last.step == step:
        return failed.text  # at its first try, with nothing committed: it would fail again
    if last is not None and failed.cause in OWN_FAILURES and last.cause == failed.cause and last.step == step:
        at = f"step {failed.step} failed" if failed.step is not None else f"after step {step} it failed"
        same_step = failed.step is not None and failed.step == last.failed_step
        if same_step or failed.cause == "memory":
            return _with_advice(f"{failed.text} ({at} twice in the same way)", failed.cause)
    if failures_in_a_row(tried, step, failed.restarted) >= failures:
        restarts = f"{counted(failures, 'restart')}{' from the beginning' if failed.restarted else ''}"
        return _with_advice(f"{failed.text} (after {restarts})", failed.cause)
    return None


def _with_advice(text: str, cause: Cause) -> str:
    return f"{text}: {_ADVICE[cause]}" if cause in _ADVICE else text


def failures_in_a_row(generations: Sequence[Generation], step: int, restarted: bool = False) -> int:
    """Count the generations that started because of a failure, with nothing committed since.

    Commits of a generation whose program `restarted` do not count, or it could fail and start again for ever.

    Other causes (a preemption, an unreachable store) neither count nor reset the count; a person who resumes the run
    resets it. A node that a service starts again is no person: no client has launched anything since.
    """
    count = 0
    for before, generation in reversed([*pairwise([None, *generations])]):
        assert generation is not None
        is_launched = before is None or generation.launches > before.launches
        if (generation.step != step and not restarted) or (generation.cause == "resumed" and is_launched):
            break
        count += generation.cause in COUNTED
        step, restarted = generation.step, generation.restarted
    return count


class OomWatch:
    """Counts the processes that the kernel killed a moment ago: one of hours earlier did not end these workers."""

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        self._count = count or oom_kills
        self._looks = [(-math.inf, self._count())]  # the first one is what `recent` compares with

    def look(self, time_now: float) -> None:
        self._looks.append((time_now, self._count()))
        while time_now - self._looks[1][0] >= OOM_SECONDS:  # which ends at the look that was just added
            self._looks.pop(0)

    def recent(self) -> int:
        """Return how many were killed in the last `OOM_SECONDS` before the last look, and since."""
        return self._count() - self._looks[0][1]


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed because memory was full: on the machine, and in our cgroup."""
    groups = (root / "proc/self/cgroup").read_text("utf-8").splitlines() if (root / "proc/self/cgroup").exists() else []
    files = [root / "proc/vmstat", root / "sys/fs/cgroup/memory/memory.oom_control"]
    for line in groups:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            files.append(root / "sys/fs/cgroup" / relative / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "sys/fs/cgroup/memory" / relative / "memory.oom_control")
    count = 0
    for file in dict.fromkeys(files):
        with suppress(OSError):
            count += sum(map(int, re.findall(r"^oom_kill +(\d+)$", file.read_text("utf-8"), re.MULTILINE)))
    return count
