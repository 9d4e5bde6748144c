"""Why workers ended, and whether to try again: pure decisions over what they left behind."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from packtrain.run.records import Cause, Generation, NodeReport
from packtrain.train.control import WorkerError
from packtrain.units import counted

FAILURE = "failure: "

# Every other reason for a new generation is nobody's failure.
COUNTED: tuple[Cause, ...] = ("machine", "program", "memory", "disk", "hang", "number", "mistake")
# The most telling first: one worker that gives up takes the others with it, and they only know that it is gone.
_TELLING: tuple[Cause, ...] = (
    "mistake", "number", "memory", "disk", "hang", "port", "store", "program", "machine", "preempted", "joined",
    "ended", "resumed", "start",
)  # fmt: skip
_SAME_AGAIN: tuple[Cause, ...] = ("program", "memory", "number", "mistake")
_ADVICE: Mapping[Cause, str] = {
    "memory": "make train.micro_batch smaller, or spread the batch over more workers or machines",
    "disk": "free some space, or set PACKTRAIN_CACHE to a larger disk",
}

_PORT = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_MEMORY = re.compile(r"\bMemoryError\b|CUDA out of memory|OutOfMemoryError|[Cc]annot allocate memory")
_DISK = re.compile(r"No space left on device|Disk quota exceeded")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)")
# What torch's launcher says of each worker that failed, the one that did so first at the end.
_BY_SIGNAL = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*exitcode\s*:\s*-(\d+)")
_ERROR = re.compile(r"^(?!.*ChildFailedError)[A-Za-z_][\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
# What gloo, NCCL and torch's store say when it is another worker that is gone.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError|ncclSystemError"
    r"|Connection was likely closed|failed to recv|Timed out waiting|connectFullMesh|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)


def is_consequence(text: str) -> bool:
    """Whether an error only says that another worker is gone."""
    return _CONSEQUENCE.search(text) is not None


def is_own_failure(report: NodeReport) -> bool:
    """Whether a machine tells of an error that came up on itself, and counts."""
    return report.cause in COUNTED and report.cause != "machine" and not is_consequence(report.text)


def why_they_ended(
    generation: int, code: int, errors: Sequence[WorkerError], said: str, out_of_memory_kills: int
) -> NodeReport:
    """How the workers of this machine ended: from what they told, what launcher and workers last wrote (`said`), and
    how often the kernel killed for want of memory meanwhile."""
    if code == 0:
        return NodeReport(generation, "ended", "the workers ended before the goal")
    told = sorted(errors, key=lambda error: (not error.fatal, is_consequence(error.text), error.time))
    first = told[0] if told else None
    if first is not None and (first.fatal or first.cause != "program"):
        return NodeReport(generation, first.cause, first.text, first.step, first.fatal)
    if out_of_memory_kills and _KILLED.search(said):
        return NodeReport(generation, "memory", "the kernel killed a worker: this machine is out of memory")
    if _PORT.search(said):
        return NodeReport(generation, "port", "the port at which the workers were to meet was taken meanwhile")
    if first is None or is_consequence(first.text):
        # Without a step: it would be the step of another's error.
        text = _ended_by_signal(said) or (first.text if first is not None else _ended_with(code, said))
        step = None
    else:
        text, step = first.text, first.step
    for cause, pattern in (("memory", _MEMORY), ("disk", _DISK)):
        if pattern.search(said if first is None else text):
            return NodeReport(generation, cause, text, step)  # type: ignore[arg-type]
    return NodeReport(generation, "program", text, step)


def _ended_by_signal(said: str) -> str | None:
    """Who was killed, by what the launcher says; it ends the others itself, by SIGTERM."""
    killed = [(rank, int(number)) for rank, number in _BY_SIGNAL.findall(said) if int(number) != signal.SIGTERM]
    if not killed:
        return None
    rank, number = killed[-1]
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"rank {rank} was ended by {name}"


def _ended_with(code: int, said: str) -> str:
    own = [line for line in _ERROR.findall(said) if not is_consequence(line)]
    error = f" ({own[-1]})" if own else ""
    return f"a worker ended with exit code {code}{error}; `packtrain logs` has its output"


def why_not_started(generation: int, error: OSError) -> NodeReport:
    """That this machine could not even start its workers."""
    cause: Cause = "disk" if error.errno in _DISK_ERRORS else "machine"
    return NodeReport(generation, cause, f"this machine cannot start its workers: {error}")


def most_telling(reports: Sequence[NodeReport]) -> NodeReport:
    """Of all that machines say about how a generation ended, what explains the rest."""
    return min(reports, key=lambda one: (not one.fatal, _rank(one), is_consequence(one.text)))


def _rank(report: NodeReport) -> int:
    # That a machine is gone, or was asked to go, explains that its peers lost the connection to it.
    if report.cause == "program" and is_consequence(report.text):
        return _TELLING.index("joined") * 2 + 1
    return _TELLING.index(report.cause) * 2


def reason_for(report: NodeReport) -> str:
    """What the next generation's record says."""
    return f"{FAILURE}{report.text}" if report.cause in COUNTED else report.text


def verdict(tried: Sequence[Generation], failed: NodeReport, step: int, failures: int) -> str | None:
    """Why the run is given up after this failure; None: it is tried again. `step` is the one committed by now.

    `tried` are all generations up to the one that failed.
    """
    if failed.fatal:
        return failed.text
    if failed.cause not in COUNTED:
        return None
    last = tried[-1] if tried else None
    if last is not None and failed.cause in _SAME_AGAIN and last.cause == failed.cause and last.step == step:
        at = f"step {failed.step} failed" if failed.step is not None else f"after step {step} it failed"
        same_step = failed.step is not None and failed.step == last.failed_step
        if same_step or failed.cause == "memory":
            return _with_advice(f"{failed.text} ({at} twice in the same way)", failed.cause)
    if failures_in_a_row(tried, step) >= failures:
        return _with_advice(f"{failed.text} (after {counted(failures, 'more attempt')})", failed.cause)
    return None


def _with_advice(text: str, cause: Cause) -> str:
    return f"{text}: {_ADVICE[cause]}" if cause in _ADVICE else text


def failures_in_a_row(generations: Sequence[Generation], step: int) -> int:
    """How many generations up to the latest began because the one before had failed, with nothing committed since.

    Those that began for other reasons (a notice, a store that was away) neither count nor start the count anew,
    but a person who resumes the run does.
    """
    count = 0
    for generation in reversed(generations):
        if generation.step != step or generation.cause in ("start", "resumed"):
            break
        count += generation.cause in COUNTED
    return count


def oom_kills(root: Path = Path("/")) -> int:
    """How often the kernel has killed for want of memory: on the machine, and in this process's group."""
    groups = (root / "proc/self/cgroup").read_text().splitlines() if (root / "proc/self/cgroup").exists() else []
    files = [root / "proc/vmstat", root / "sys/fs/cgroup/memory/memory.oom_control"]
    for line in groups:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            files.append(root / "sys/fs/cgroup" / relative / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "sys/fs/cgroup/memory" / relative / "memory.oom_control")
    return sum(_count(path) for path in dict.fromkeys(files))


def _count(path: Path) -> int:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(pair[1]) for pair in words if len(pair) == 2 and pair[0] == "oom_kill")
