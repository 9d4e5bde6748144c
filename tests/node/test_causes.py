from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from packtrain.node.causes import (
    OOM_SECONDS,
    LastOutput,
    OomWatch,
    blamed,
    failures_in_a_row,
    is_consequence,
    lost_machine,
    most_specific,
    oom_kills,
    reason_for,
    verdict,
    why_not_started,
    why_they_ended,
)
from packtrain.run.records import Cause, Generation, NodeReport
from packtrain.train.control import WorkerError
from parts.runs import a_generation

KILLED = "exitcode  : -9 (pid: 4242)"
IN_USE = "The server socket has failed to listen (errno: 98 - Address already in use)."
WARNED = "warning: checkpoint not saved: [Errno 28] No space left on device"
SUMMARY = """
Failures:
[1]:
  rank      : {other} (local_rank: {other})
  exitcode  : {code_of_other} (pid: 11)
Root Cause (first observed failure):
[0]:
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 12)  (SIGKILL)
"""
KILLED_ALONE = {"rank": 1, "code": -9, "other": 0, "code_of_other": -15}


def error(text: str, **fields: object) -> WorkerError:
    return WorkerError(**{"rank": 0, "text": text, "fatal": False, "time": 1.0, **fields})  # type: ignore[arg-type]


# What happened on one machine.


@pytest.mark.parametrize(
    ("code", "errors", "said", "kills", "cause"),
    [
        (0, [], LastOutput(), 0, "ended"),
        (1, [], LastOutput(), 0, "program"),
        (1, [error("full", cause="memory")], LastOutput(), 0, "memory"),
        (1, [error("away", cause="store")], LastOutput(), 0, "store"),
        (1, [error("it broke")], LastOutput(), 0, "program"),
        (1, [], LastOutput(KILLED), 1, "memory"),
        (1, [], LastOutput(KILLED), 0, "program"),
        (1, [], LastOutput("somebody else was killed"), 1, "program"),
        (1, [], LastOutput("", "MemoryError\n"), 0, "memory"),
        (1, [], LastOutput("", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"), 0, "memory"),
        (
            1,
            [],
            LastOutput("", "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes."),
            0,
            "memory",
        ),
        (1, [], LastOutput("", "errors_impl.ResourceExhaustedError: OOM when allocating tensor"), 0, "memory"),
        (1, [], LastOutput("", "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"), 0, "memory"),
        (1, [], LastOutput("", "OSError: [Errno 28] No space left on device"), 0, "disk"),
        (1, [], LastOutput("", "cp: error writing 'x': No space left on device"), 0, "disk"),
        (1, [], LastOutput(IN_USE), 0, "port"),
        # What workers wrote before, or about others, is not why they ended.
        (1, [], LastOutput(SUMMARY.format(**KILLED_ALONE), WARNED), 0, "program"),
        (1, [error("Connection reset by peer")], LastOutput(SUMMARY.format(**KILLED_ALONE), WARNED), 0, "program"),
        (1, [], LastOutput("", f"{WARNED}\nRuntimeError: it broke"), 0, "program"),
        (1, [], LastOutput("", f"{WARNED}\nModuleNotFoundError: No module named 'x'"), 0, "mistake"),
        (1, [], LastOutput("exitcode  : 2 (pid: 7)", "train.py: error: unrecognized arguments: -x"), 0, "mistake"),
        (1, [], LastOutput("exitcode  : 3 (pid: 7)", "it broke"), 0, "program"),
        (1, [], LastOutput("", f"OSError: {IN_USE}"), 0, "program"),
        (1, [], LastOutput("", KILLED), 1, "program"),
    ],
)
def test_each_cause_is_recognized(
    code: int, errors: list[WorkerError], said: LastOutput, kills: int, cause: str
) -> None:
    assert why_they_ended(3, code, errors, said, kills).cause == cause


@pytest.mark.parametrize(
    ("code", "errors", "said", "kills", "report"),
    [
        (0, [], LastOutput(), 0, NodeReport(3, "ended", "the workers exited before the run was complete")),
        (1, [error("full", cause="disk", step=7)], LastOutput(), 0, NodeReport(3, "disk", "full", 7)),
        (1, [error("no", fatal=True, step=7)], LastOutput(), 0, NodeReport(3, "program", "no", 7, fatal=True)),
        (1, [], LastOutput(KILLED), 1,
         NodeReport(3, "memory", "the kernel killed a worker: this machine is out of memory")),
        (1, [], LastOutput(IN_USE), 0, NodeReport(3, "port", "the rendezvous port was taken by another process")),
        (1, [error("it broke", step=7)], LastOutput(), 0, NodeReport(3, "program", "it broke", 7)),
        (1, [], LastOutput(SUMMARY.format(**KILLED_ALONE)), 0, NodeReport(3, "program", "rank 1 was killed (SIGKILL)")),
        (1, [error("Broken pipe", step=7)], LastOutput(), 0, NodeReport(3, "program", "Broken pipe")),
        (1, [], LastOutput("", "RuntimeError: no"), 0,
         NodeReport(3, "program", "RuntimeError: no; see `packtrain logs`")),
        (5, [], LastOutput(), 0, NodeReport(3, "program", "the program exited with code 5; see `packtrain logs`")),
    ],
)  # fmt: skip
def test_a_report_has_the_generation_the_cause_and_the_words_for_the_person(
    code: int, errors: list[WorkerError], said: LastOutput, kills: int, report: NodeReport
) -> None:
    assert why_they_ended(3, code, errors, said, kills) == report


def test_a_fatal_error_is_reported_before_any_that_came_earlier() -> None:
    errors = [error("full", cause="memory", time=1.0), error("no", fatal=True, time=2.0)]
    assert why_they_ended(3, 1, errors, LastOutput(), 0).text == "no"


@pytest.mark.parametrize(
    ("code", "cause"),
    [*((number, "disk") for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)), (errno.EAGAIN, "machine")],
)
def test_workers_that_cannot_be_started_are_the_fault_of_the_disk_or_the_machine(code: int, cause: Cause) -> None:
    report = why_not_started(3, OSError(code, "no", "/logs"))
    assert report == NodeReport(3, cause, f"this machine cannot start its workers: [Errno {code}] no: '/logs'")


@pytest.mark.parametrize(
    ("report", "node"),
    [
        (NodeReport(1, "program", "it broke"), "a"),
        (NodeReport(1, "machine", "this machine cannot start its workers"), "a"),
        (lost_machine(1, "b"), "b"),
        (NodeReport(1, "store", "the store is away"), None),
        (NodeReport(1, "program", "Broken pipe"), None),
        (NodeReport(1, "hang", "step 7 has taken 60 s; treating it as a hang"), None),
        (NodeReport(1, "hang", "connecting the workers has taken 60 s; treating it as a hang"), None),
    ],
)
def test_a_node_blames_itself_or_one_that_is_gone_and_nobody_if_it_only_waited(
    report: NodeReport, node: str | None
) -> None:
    assert blamed("a", report) == node


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:5000",
        "RuntimeError: [../gloo/transport/tcp/buffer.cc:72] Application timeout caused pair closure",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:598] writev [10.0.0.2]:5000: No route to host",
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined.",
        "OSError: [Errno 113] 10.0.0.1:20001 does not answer; check the firewall and the routes between the machines",
        "TimeoutError: [Errno 110] nothing listens at 10.0.0.1:20001; the first machine did not start",
    ],
)
def test_a_program_that_only_lost_the_others_says_so_and_blames_nobody(error: str) -> None:
    traceback = f"Traceback (most recent call last):\n{error}\n"
    report = why_they_ended(1, 1, [], LastOutput(SUMMARY.format(**KILLED_ALONE | {"code": 1}), traceback), 0)
    assert report.text == f"{error}; see `packtrain logs`"
    assert blamed("a", report) is None
    assert most_specific([report, lost_machine(1, "b")]).lost == "b"


def test_an_error_is_reported_with_its_step_but_a_lost_connection_without() -> None:
    own = why_they_ended(3, 1, [error("it broke", step=7)], LastOutput(), 0)
    assert (own.generation, own.text, own.step) == (3, "it broke", 7)
    lost = why_they_ended(3, 1, [error("[gloo] Connection closed by peer", step=7)], LastOutput(), 0)
    assert (lost.cause, lost.step) == ("program", None)


@pytest.mark.parametrize(
    ("launcher", "text"),
    [
        ({"other": 0, "code_of_other": 1, "rank": 3, "code": -9}, "rank 3 was killed (SIGKILL)"),
        ({"other": 1, "code_of_other": -11, "rank": 0, "code": 1}, "rank 1 was killed (SIGSEGV)"),
        ({"other": 1, "code_of_other": -9, "rank": 0, "code": -6}, "rank 0 was killed (SIGABRT)"),
        ({"other": 1, "code_of_other": -15, "rank": 0, "code": 1}, "Connection reset by peer"),
        ({"other": 1, "code_of_other": 1, "rank": 0, "code": -99}, "rank 0 was killed (signal 99)"),
    ],
)
def test_a_killed_rank_explains_the_connections_that_others_lost(launcher: dict[str, int], text: str) -> None:
    ended = why_they_ended(3, 1, [error("Connection reset by peer", step=7)], LastOutput(SUMMARY.format(**launcher)), 0)
    assert (ended.cause, ended.text, ended.step) == ("program", text, None)


@pytest.mark.parametrize(
    "said",
    [
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a "
        "network error, NCCL version 2.27.5",
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled system error (run "
        "with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
        "store by key '0', but store->get('0') got error: wait timeout after 60000ms, keys: /default_pg/0//cuda//0",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_nccl_complains_about_others(said: str) -> None:
    assert is_consequence(said)


@pytest.mark.parametrize(
    "said",
    [
        "[rank0]:[E1117 12:00:00.0 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600029 milliseconds before timing out.",
        "[rank0]:[E1117 12:00:00.0 ProcessGroupNCCL.cpp:2091] [PG ID 0 Rank 0] Process group watchdog thread "
        "terminated with exception: NCCL error: remote process exited",
    ],
)
def test_a_worker_that_nccls_watchdog_aborted_is_not_the_culprit(said: str) -> None:
    aborted = SUMMARY.format(rank=0, code=-6, other=1, code_of_other=-15)
    report = why_they_ended(1, 1, [], LastOutput(aborted, said), 0)
    assert report.text == "NCCL's watchdog ended rank 0: another worker is gone or hangs"
    assert blamed("a", report) is None
    assert blamed("a", why_they_ended(1, 1, [], LastOutput(aborted, "corrupted double-linked list"), 0)) == "a"
    killed = SUMMARY.format(rank=0, code=-6, other=1, code_of_other=-9)
    assert why_they_ended(1, 1, [], LastOutput(killed, said), 0).text == "rank 1 was killed (SIGKILL)"


@pytest.mark.parametrize("prefix", ["", "[rank12]: "])  # torch writes it once a program has joined the others
def test_only_a_programs_own_error_is_reported(prefix: str) -> None:
    said = """
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED
Traceback (most recent call last):
  File "/cache/nodes/a/code/train.py", line 7, in <module>
    load(name)
  File "/usr/lib/python3/site-packages/pandas/code/frame.py", line 99, in load
    raise ValueError(name)
ValueError: no such column: 'price'
Traceback (most recent call last):
torch.distributed.DistNetworkError: Connection was likely closed
"""
    said = "\n".join(prefix + line for line in said.splitlines())
    text = why_they_ended(3, 1, [], LastOutput("", said), 0).text
    assert text == "train.py:7: ValueError: no such column: 'price'; see `packtrain logs`"


FRAME = """Traceback (most recent call last):
  File "{}", line {}, in f
"""


@pytest.mark.parametrize(
    ("said", "place"),
    [
        (FRAME.format("/code/cache/nodes/a/code/train.py", 7), "train.py:7: "),  # the last such folder is the program's
        (FRAME.format("/cache/code/deep/part.py", 9), "deep/part.py:9: "),
        (FRAME.format("/cache/code/a.py", 1) + "KeyError: 1\n" + FRAME.format("/usr/lib/b.py", 2), ""),
        ('  File "/cache/code/a.py", line 1, in f\n', "a.py:1: "),  # the traceback began before the last lines
    ],
)
def test_the_place_of_an_error_is_in_the_programs_code_and_in_the_same_traceback(said: str, place: str) -> None:
    report = why_they_ended(3, 1, [], LastOutput("", f"{said}ValueError: no"), 0)
    assert report.text == f"{place}ValueError: no; see `packtrain logs`"


@pytest.mark.parametrize(
    "last",
    [
        "subprocess.TimeoutExpired: Command 'make' timed out after 5 seconds",
        "KeyboardInterrupt",
        "mine.TooFewSamples: 3",
        "__main__.main.<locals>.Stop: enough",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "StopIteration",
    ],
)
def test_the_last_line_of_a_traceback_is_the_error_whatever_its_name(last: str) -> None:
    trace = FRAME.format("/cache/code/train.py", 7) + f"    work()\n    ^^^^^^\n{last}\n"
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    for said in (trace, f"step 1: loss 2\n{trace}cleaning up: done\n", f"{FRAME}    f()\nKeyError: 1\n{during}{trace}"):
        report = why_they_ended(3, 1, [], LastOutput("", said), 0)
        assert report.text == f"train.py:7: {last}; see `packtrain logs`"
    assert report.cause == ("memory" if "OutOfMemory" in last else "program")


@pytest.mark.parametrize(
    ("after", "text"),
    [
        ("mine.Stop: x\nException ignored in: <function Pool.__del__>\nTraceback (most recent call last):\n"
         '  File "/lib/pool.py", line 3, in __del__\nImportError: Python is likely shutting down\n', "mine.Stop: x"),
        ("mine.Stop: x\nError in atexit._run_exitfuncs:\nTraceback (most recent call last):\n"
         '  File "/lib/log.py", line 3, in flush\nValueError: I/O operation on closed file.\n', "mine.Stop: x"),
        ('tensorflow.errors.InvalidArgumentError: Graph execution error:\n\nDetected at node x defined at:\n'
         '  File "/cache/code/train.py", line 9, in <module>\nNode: x\nno such node\n',
         "tensorflow.errors.InvalidArgumentError: Graph execution error:"),
        ("RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for w\n",
         "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for w"),
        ("\x1b[1;35mmine.Stop\x1b[0m: \x1b[35mx\x1b[0m\n", "mine.Stop: x"),
        ("Übel: x\n", "Übel: x"),
    ],
)  # fmt: skip
def test_what_follows_the_end_of_a_traceback_is_not_the_error(after: str, text: str) -> None:
    said = FRAME.format("/cache/code/train.py", 7) + f"    work()\n{after}"
    assert why_they_ended(3, 1, [], LastOutput("", said), 0).text == f"train.py:7: {text}; see `packtrain logs`"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("╭───── Traceback (most recent call last) ─────╮\n│ /cache/code/train.py:7 in run │\n│ ❱ 7 run() │\n╰─────╯\n"
         "Stop: enough\n", "Stop: enough"),
        ('  + Exception Group Traceback (most recent call last):\n  |   File "/cache/code/train.py", line 7, in run\n'
         "  |     run()\n  | ExceptionGroup: 2 tasks (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n"
         "    | mine.Stop: a\n    +---------------- 2 ----------------\n    | OSError: b\n    +--------\n",
         "train.py:7: OSError: b"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_a_traceback_in_a_box_and_that_of_a_group_are_recognized(said: str, text: str, prefix: str) -> None:
    lines = "".join(f"{prefix}{line}" for line in said.splitlines(keepends=True))
    assert why_they_ended(3, 1, [], LastOutput("", lines), 0).text == f"{text}; see `packtrain logs`"


@pytest.mark.parametrize(
    ("code", "said", "text"),
    [
        (1, "Error in log(-1, base) : \n  non-numeric argument\nExecution halted\n",
         "Error in log(-1, base) : non-numeric argument"),
        (1, "Error: object 'x' not found\nExecution halted\n", "Error: object 'x' not found"),
        (1, "ERROR: LoadError: UndefVarError: `x` not defined\nStacktrace:\n [1] top-level scope\n",
         "ERROR: LoadError: UndefVarError: `x` not defined"),
        (2, "panic: index out of range\n\ngoroutine 1 [running]:\nmain.main()\n\t/cache/code/a.go:5\nexit status 2\n",
         "panic: index out of range"),
        (139, "./train.sh: line 2: 71 Segmentation fault  ./train\n",
         "the program exited with code 139 (SIGSEGV): ./train.sh: line 2: 71 Segmentation fault  ./train"),
        (1, "ERROR:root:cannot read a.txt\nno data left\n",
         "the program exited with code 1: ERROR:root:cannot read a.txt / no data left"),
        (1, "epoch: 3\nlearning rate too high: stopping\n",
         "the program exited with code 1: epoch: 3 / learning rate too high: stopping"),
    ],
)  # fmt: skip
def test_errors_of_other_languages_are_recognized(code: int, said: str, text: str) -> None:
    report = why_they_ended(3, 1, [], LastOutput(f"exitcode  : {code} (pid: 7)", said), 0)
    assert report == NodeReport(3, "program", f"{text}; see `packtrain logs`")


def test_a_shell_whose_program_was_killed_because_memory_was_full_says_137() -> None:
    said = LastOutput("exitcode  : 137 (pid: 7)", "./train.sh: line 2: 71 Killed  ./train\n")
    assert why_they_ended(3, 1, [], said, 1).cause == "memory"
    assert why_they_ended(3, 1, [], said, 0).text.startswith("the program exited with code 137 (SIGKILL): ./train.sh")


def test_the_usage_of_a_program_is_not_its_message() -> None:
    said = LastOutput("exitcode  : 2 (pid: 7)", "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: -x\n")
    assert why_they_ended(3, 1, [], said, 0).text == (
        "the program exited with code 2: train.py: error: unrecognized arguments: -x; see `packtrain logs`"
    )


def test_a_mistake_at_the_first_try_of_a_program_is_not_tried_again() -> None:
    failed = NodeReport(1, "mistake", "NameError: x")
    assert verdict(tried("start"), failed, 0, 3) == "NameError: x"
    assert verdict(tried("start", "program", "resumed"), failed, 0, 3) == "NameError: x"
    assert verdict(tried("start"), failed, 30, 3) is None, "there was a commit since"
    assert verdict(tried("start", "preempted"), failed, 0, 3) is None, "it worked before"


def test_without_an_error_of_python_the_last_lines_are_the_message() -> None:
    said = LastOutput("exitcode  : 3 (pid: 7)", "one\ntwo\n\nthree\nfour\n")
    assert why_they_ended(3, 1, [], said, 0).text == (
        "the program exited with code 3: two / three / four; see `packtrain logs`"
    )


def test_the_error_that_explains_the_others_comes_first() -> None:
    errors = [error("Connection reset by peer", time=1.0), error("it broke", time=2.0, step=7)]
    assert why_they_ended(3, 1, errors, LastOutput(), 0).text == "it broke"


# What happened to all of them.


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([("program", "Connection closed by peer"), ("machine", "b was lost")], "machine"),
        ([("program", "it broke"), ("machine", "b was lost")], "program"),
        ([("program", "Connection closed by peer"), ("memory", "full")], "memory"),
        ([("program", "Broken pipe"), ("preempted", "b was preempted")], "preempted"),
        ([("program", "Broken pipe"), ("joined", "b joined")], "joined"),
        ([("ended", ""), ("program", "Broken pipe")], "program"),
        ([("ended", ""), ("hang", "no step for 60 s")], "hang"),
        ([("program", "Broken pipe"), ("hang", "no step for 60 s")], "hang"),
        ([("program", "it broke"), ("hang", "no step for 60 s")], "program"),
        ([("machine", "b was lost"), ("hang", "no step for 60 s")], "machine"),
        ([("preempted", "b was preempted"), ("hang", "no step for 60 s")], "preempted"),
    ],
)
def test_the_most_telling_report_explains_the_rest(told: list[tuple[Cause, str]], expected: str) -> None:
    reports = [NodeReport(1, cause, text) for cause, text in told]
    assert most_specific(reports).cause == most_specific(reports[::-1]).cause == expected


def test_a_fatal_report_explains_all_others() -> None:
    reports = [NodeReport(1, "memory", "full"), NodeReport(1, "program", "no", fatal=True)]
    assert most_specific(reports) == most_specific(reports[::-1]) == reports[1]


def test_only_failures_that_count_are_called_failures() -> None:
    assert reason_for(NodeReport(1, "program", "it broke")) == "failure: it broke"
    assert reason_for(NodeReport(1, "joined", "machine b joined")) == "machine b joined"


# Whether to try again.


def tried(*causes: Cause, step: int = 0, failed_step: int | None = None) -> list[Generation]:
    return [
        Generation(number, a_generation(1).members, 1, "", step, cause, failed_step)
        for number, cause in enumerate(causes, 1)
    ]


def test_failures_without_a_commit_between_them_are_counted() -> None:
    assert failures_in_a_row([], 0) == 0
    assert failures_in_a_row(tried("start"), 0) == 0
    assert failures_in_a_row(tried("start", "program", "machine"), 0) == 2
    assert failures_in_a_row(tried("start", "program", "machine"), 30) == 0
    assert failures_in_a_row([*tried("start", "program"), *tried("program", step=30)], 30) == 1


def test_commits_of_a_program_that_started_again_do_not_end_a_row_of_failures() -> None:
    first, second = tried("start", "program", step=30)
    third, fourth = (replace(second, step=step, restarted=True) for step in (60, 90))
    assert failures_in_a_row([first, second, third, fourth], 120, restarted=True) == 3
    assert failures_in_a_row([first, second, third, fourth], 120) == 0, "the last one has resumed, and committed"
    resumed = replace(third, cause="resumed", launches=1)
    assert failures_in_a_row([first, second, resumed, replace(fourth, launches=1)], 120, restarted=True) == 1


def test_preemptions_joins_and_an_absent_store_are_not_counted() -> None:
    assert failures_in_a_row(tried("start", "preempted", "joined", "store", "port", "ended"), 0) == 0
    assert failures_in_a_row(tried("start", "program", "store", "preempted", "hang"), 0) == 2


def test_a_person_who_resumes_the_run_resets_the_count_and_a_service_does_not() -> None:
    *before, resumed, after = tried("start", "program", "program", "resumed", "disk")
    launched = [replace(generation, launches=2) for generation in (resumed, after)]
    assert failures_in_a_row([*before, *launched], 0) == 1
    assert failures_in_a_row([*before, resumed, after], 0) == 3


def test_a_run_is_given_up_after_as_many_restarts_as_the_job_allows() -> None:
    failed = NodeReport(9, "program", "it broke")
    assert verdict(tried("start"), failed, 0, 2) is None
    assert verdict(tried("start", "program"), failed, 0, 2) is None
    assert verdict(tried("start", "program", "program"), failed, 0, 2) == "it broke (after 2 restarts)"
    assert verdict(tried("start", "program", "program"), failed, 30, 2) is None, "there was a commit since"
    assert verdict(tried("start"), failed, 0, 0) == "it broke (after 0 restarts)"
    assert verdict([], failed, 0, 2) is None
    assert verdict(tried("start", "disk"), NodeReport(9, "disk", "full"), 0, 1) == (
        "full (after 1 restart): free some space, or set PACKTRAIN_CACHE to a larger disk"
    )


def test_a_fatal_error_is_given_up_immediately_and_a_preemption_never() -> None:
    assert verdict(tried("start"), NodeReport(1, "number", "the loss is not finite", fatal=True), 0, 9) is not None
    failures: list[Cause] = ["program"] * 9
    assert verdict(tried("start", *failures), NodeReport(1, "preempted", "it leaves"), 0, 0) is None


def test_an_error_at_the_same_step_twice_is_given_up() -> None:
    failed = NodeReport(2, "program", "it broke", step=7)
    before = tried("start", "program", failed_step=7)
    assert verdict(before, failed, 0, 9) == "it broke (step 7 failed twice in the same way)"
    assert verdict(tried("start", "program", failed_step=6), failed, 0, 9) is None
    assert verdict(tried("start", "machine", failed_step=7), failed, 0, 9) is None


def test_out_of_memory_twice_is_given_up_with_advice_even_if_the_step_is_unknown() -> None:
    said = verdict(tried("start", "memory"), NodeReport(2, "memory", "the kernel killed a worker"), 0, 9)
    assert said == (
        "the kernel killed a worker (after step 0 it failed twice in the same way): make train.micro_batch smaller, or "
        "spread the batch over more workers or machines"
    )
    assert verdict(tried("start", "program"), NodeReport(2, "memory", "full"), 0, 9) is None


# The kernel's counters.


def test_out_of_memory_kills_are_read_from_the_kernels_counters(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 5\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job\n0::/pod\n")
    for name, text in (
        ("memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n"),
        ("pod/memory.events", "oom 1\noom_kill 4\n"),
    ):
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert oom_kills(tmp_path) == 9


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("", "memory/memory.oom_control"),  # in a container, its own group is at the top
        ("4:cpu,memory:/job", "memory/job/memory.oom_control"),
        ("0::/a:b/c:d", "a:b/c:d/memory.events"),
        ("0::/X", "X/memory.events"),
    ],
)
def test_the_kernels_counters_are_those_of_our_control_group(tmp_path: Path, groups: str, file: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text("oom_kill 3\n")
    assert oom_kills(tmp_path) == 3


def test_only_recent_out_of_memory_kills_explain_why_a_worker_was_killed() -> None:
    kills = [7]  # before these workers began
    watch = OomWatch(lambda: kills[0])
    assert watch.recent() == 0
    kills[0] += 1
    assert watch.recent() == 1
    for second in range(0, int(OOM_SECONDS), 2):  # the launcher takes its time to end the other workers
        watch.look(1000.0 + second)
        assert watch.recent() == 1
    watch.look(1000.0 + OOM_SECONDS)
    assert watch.recent() == 0
    kills[0] += 1
    assert watch.recent() == 1
