"""Every field of every stored record, damaged in every way: commands answer with a line and an exit code.

Each field gets one of the damages and one of the commands, chosen by a seed. `PACKTRAIN_FUZZ=all` tries all of them,
which takes an hour.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from pack.corpus import job_of
from packtrain.cli import main
from packtrain.launch import start
from packtrain.run import records
from packtrain.run.records import (
    Discarding,
    Event,
    FleetLaunch,
    Forecast,
    Generation,
    Gpu,
    GpuModel,
    JobSource,
    Lease,
    LogLine,
    MachineFacts,
    Member,
    MirroredRun,
    NodeReport,
    Notes,
    Point,
    RemovedRun,
    RenamedRun,
    Result,
    Sample,
    Telemetry,
    TelemetrySample,
    TimeSpent,
    WorkerUse,
)
from packtrain.run.run import Run, add_run
from packtrain.store.records import encode
from parts.models import commit_model, packed_run

CHANCE = np.random.default_rng(11)
TRY_ALL = os.environ.get("PACKTRAIN_FUZZ") == "all"
EXIT_CODES = {0, 2, 100, 101, 102, 103}
MAX_LINE = 2000

# What a field becomes, as it stands in the JSON.
DAMAGES: Mapping[str, bytes] = {
    "null": b"null",
    "true": b"true",
    "zero": b"0",
    "negative": b"-1",
    "fraction": b"1.5",
    "large": b"9" * 18,
    "huge": b"1" + b"0" * 30,
    "endless": b"1" * 10_000,
    "largest float": b"1e308",
    "smallest float": b"-1e308",
    "overflow": b"1e999",
    "not a number": b"NaN",
    "infinity": b"-Infinity",
    "year 10000": b"253402300800",
    "year 99999": b"3093527980800",
    "text": b'"text"',
    "empty text": b'""',
    "time": b'"9999-99-99T99:99:99"',
    "long text": b'"' + b"x" * 200_000 + b'"',
    "escapes": rb'"\u001b[31m\u0007\u009b2J\r\n\u202e\u2028"',
    "nul": rb'"a\u0000b"',
    "half a character": rb'"\ud800"',
    "not UTF-8": b'"\xff\xfe\x80"',
    "path": b'"../../../../etc/passwd"',
    "absolute path": b'"/etc/passwd"',
    "option": b'"--help"',
    "markup": b'"[red]x[/bold]"',
    "list": b"[]",
    "list of nulls": b"[null, null]",
    "mapping": b"{}",
    "odd mapping": rb'{"": 1, "\u001b[31m": 1e308, "a": null}',
    "deep": b"[" * 150 + b"]" * 150,
    "deeper": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}
WHOLE: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda data: data[: len(data) // 2],
    "not UTF-8": lambda data: b"\xff\xfe" + data,
    "NULs": lambda data: b"\0" * len(data),
    "twice": lambda data: data + data,
    "large": lambda data: data + b" " * (17 << 20),
    "a picture": lambda _: b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
}
ODD_NAMES = (b"\xff\xfe", b"\x1b[31mred", b"a\nb", b"-x-1", b"x" * 200, b"greetings-999999", "\u202e".encode(), b" ")
WRITTEN = ("report.html", "result.json", "stop.json")
MARK = "damaged here"

Place = tuple[str | int, ...]
Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Fuzzed:
    """A store with a stopped run, and one that no machine works on."""

    ended: Run
    left: Run

    def path(self, key: str) -> Path:
        return Path(self.ended.store.url) / key


def write_records(run: Run) -> None:
    """Write one of each record, with every field."""
    gpus, workers = (Gpu("A100", 0.5, 1, 2, 300.0, 60.0),), (WorkerUse(0, 1.0, 1 << 30, 1 << 31),)
    telemetry = Telemetry(0.5, 0.5, 1, 1, 1.0, 1.0, gpus, workers, 1.0, 1.0)
    report = NodeReport(1, "program", "exited with code 1", 7, False)
    run.propose(Generation(1, (Member("a", "10.0.0.1", 1),), 29500, "start", 0, "start", 1, 1.0, 60.0, "a"))
    given = {"address": "10.0.0.1", "port": 29500, "workers": 1, "joined": 1, "used_seconds": 60.0, "machine": "m"}
    facts = MachineFacts("Linux", "EPYC", 8, 1 << 30, (GpuModel("A100", 1 << 30),), {"torch": "2.13.0"})
    given |= {"machine_seconds": 60.0, "report": report, "telemetry": telemetry, "facts": facts}
    run.renew(Lease("a", "host-of-a", renewal=9, **given))  # type: ignore[arg-type]
    now = time.time()
    values = {"loss": 2.5, "rate": 0.1, "gradient_norm": 1.0, "tokens": 64.0, "epoch": 0.5, "elapsed_seconds": 9.0}
    spans = {"step_seconds": 1.0, "forward_seconds": 0.5, "start_seconds": 0.1}
    sample = Sample("hello", "hallo", "guten Tag", "0" * 64, ("guten", "Tag"), ("AAAA", "AP8A"), (1, 3), 0.5)
    events, points, spent = run.event_writer("a"), run.point_writer("000001-rank-0"), run.time_spent_writer("a")
    logs, machines = run.log_writer("a"), run.telemetry_writer("a")
    events.append(Event(now, "generation", "generation 1 with 1 worker", 1))
    points.append(Point("start", 1, 0, now, {}))
    for step in (1, 2):
        points.append(Point("train", 1, step, now, values | spans))
    points.append(Point("valid", 1, 2, now, {"loss": 2.0, "bleu": 3.0, "evaluation_seconds": 1.0}, (sample,)))
    spent.append(TimeSpent(now, 1, 0, 2, {"forward": 1.0, "start": 3.0}))
    logs.append(LogLine(now, 1, "a", 0, "out", "hello"))
    machines.append(TelemetrySample(now, "a", telemetry))
    for writer in (events, points, spent, logs, machines):
        writer.flush()
    run.put_forecast(Forecast("table", "compute", 1, 10, 0.5, 64.0, 5.0, 0.1, 1 << 30, 1000, 4000, 12000, "10 steps"))
    run.put_notes(Notes(("tag",), "a sentence"))
    run.put_source(JobSource("job.yaml", "name: job", ("train.seed=2",), "0" * 40, 1))
    run.put_mirrored(MirroredRun("0" * 64, "of mlflow"))
    run.store.put(run.key("proposers/000001-000.txt"), b"a")
    old = time.time() - 3600  # one look is enough to see that no machine is left
    os.utime(Path(run.store.url) / run.lease_key("a"), (old, old))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", str(folder / "cache"))
        patch.setenv("PATH", str(folder))  # no program of a fleet is found
        patch.setattr(start, "start", lambda *_: [])  # resume reads everything, and starts nothing
        ended = packed_run(folder, job_of(folder, evaluate={"every": "2 steps"}))
        slurm = job_of(folder, fleet={"slurm": {"machines": 1}})
        left = add_run(ended.store, slurm, ended.store.get(ended.key("code.tar.zst")), ended.pack_name())
        for run in (ended, left):
            commit_model(run, folder, 2, score=3.0)
            write_records(run)
        ended.record_launch(FleetLaunch(time.time(), "ada@laptop", ended.job.fleet.model_dump(mode="json")))
        ended.request_stop("stopped by user")
        sample = Sample("hello", "hallo", "guten Tag")
        ended.finish(
            Result("stopped", "stopped by user", 2, 9.0, {"test.bleu": 3.0}, {"test.bleu": "sacre"}, (sample,))
        )
        store, now = ended.store, time.time()
        store.put("removed/gone-1.json", encode(RemovedRun(now, "ada@laptop", "kept")))
        claim = RenamedRun(now, "ada@laptop", "gone-2", Path(store.url, left.key("job.json")).stat().st_mtime)
        store.put(f"renamed/{left.name}.json", encode(claim))
        for name in ("a", "b"):  # one is left when `gc` takes the other, once it is damaged, for an old one
            store.put(f"discarding/{name}.json", encode(Discarding(now, "ada@laptop", ("x",), ("files/y",), ("z",))))
        yield Fuzzed(ended, left)


def commands_for(fuzzed: Fuzzed, key: str) -> list[list[str]]:
    """Return the commands that read an object."""
    ended, left = fuzzed.ended.name, fuzzed.left.name
    lists = [["ls"], ["ls", "--json"]]
    shows = [["show", ended], ["show", ended, "--json"], ["report", ended]]
    predict = ["predict", ended, "hello", "--trust-code"]
    if key.startswith(fuzzed.left.key("")):
        return [*lists, ["stop", left]]  # others watch a run without a result for seconds
    by_name = {
        "logs/": [["logs", ended]],
        "events/": shows,
        "time/": shows,
        "metrics/": [*lists, *shows],
        "nodes/": shows,
        "generations/": shows,
        "checkpoints/": [predict],
        "pack.txt": [predict],
        "plan.json": shows,
        "notes.json": [*lists, *shows],
        "mlflow.json": shows,
    }
    for name, commands in by_name.items():
        if key.startswith(fuzzed.ended.key(name)):
            return commands
    by_folder = {
        "removed/": [["show", "gone-1"], ["rm", "gone-1", "--yes"]],
        "renamed/": [*lists, ["mv", ended, left]],
        "discarding/": [["gc", "--delete", "--json"]],
    }
    for name, commands in by_folder.items():
        if key.startswith(name):
            return commands
    if key.startswith("packs/"):
        return [predict]
    return [*lists, *shows, ["logs", ended], ["stop", ended], ["resume", ended, "--detach", "--trust-code"], predict]


def ran(store: str, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run a command as a shell would, in this process; any exception but its exit is a defect."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    before, sys.argv = sys.argv, ["packtrain", *arguments, "--store", store]
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            main()
        code: object = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before
    for stream in (output, errors):
        stream.flush()
    written = [stream.buffer.getvalue().decode() for stream in (output, errors)]
    assert isinstance(code, int)
    return code, *written  # type: ignore[return-value]


def check(fuzzed: Fuzzed, arguments: Sequence[str]) -> None:
    code, output, errors = ran(fuzzed.ended.store.url, arguments)
    assert code in EXIT_CODES, (code, output, errors)
    assert all(len(line) <= MAX_LINE for line in errors.splitlines()), errors[:MAX_LINE]
    assert not re.search(r"[^\n -~\xa0-\uffff]", errors), errors
    said = [line for line in errors.splitlines() if line.startswith("packtrain: ")]
    assert len(said) <= 1, errors
    if "--json" in arguments and output:
        json.loads(output, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    if arguments[0] == "ls":
        assert fuzzed.ended.name in output
        assert fuzzed.left.name in output


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yield the place of every value below this one; of long lists and mappings only the first entries."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for _, (step, below) in zip(range(20), entries, strict=False):
        yield (*at, step)
        if len(at) < 5:
            yield from places(below, (*at, step))


def damaged(document: Any, place: Place, how: str) -> bytes:
    """Return the JSON with the value at that place damaged, or left out."""
    document = json.loads(json.dumps(document))
    inner = document
    for step in place[:-1]:
        inner = inner[step]
    if how == "missing":
        del inner[place[-1]]
    else:
        inner[place[-1]] = MARK
    return json.dumps(document).encode().replace(json.dumps(MARK).encode(), DAMAGES.get(how, b""))


def documents(fuzzed: Fuzzed) -> dict[str, list[Any]]:
    """Return every stored JSON object by its key, and the lines of streams."""
    found = {}
    for entry in fuzzed.ended.store.list():
        data = fuzzed.ended.store.get(entry.key)
        if entry.key.endswith(".json"):
            found[entry.key] = [json.loads(data)]
        elif entry.key.endswith(".jsonl"):
            found[entry.key] = [json.loads(line) for line in data.splitlines()]
    return found


def damages(fuzzed: Fuzzed) -> Iterator[tuple[str, str, bytes]]:
    """Yield the key of an object, what is done to it, and what it becomes."""
    for key, parts in documents(fuzzed).items():
        lines = [json.dumps(one).encode() for one in parts]
        for number, part in enumerate(parts):
            for place in places(part):
                for how in chosen(["missing", *DAMAGES]):
                    made = [*lines[:number], damaged(part, place, how), *lines[number + 1 :]]
                    yield key, f"{'.'.join(map(str, place))}: {how}", b"\n".join(made)
    for entry in fuzzed.ended.store.list():
        for how in chosen(list(WHOLE)):
            yield entry.key, how, WHOLE[how](fuzzed.ended.store.get(entry.key))


def chosen(choices: list[Choice]) -> list[Choice]:
    """Return one of them, or all."""
    return choices if TRY_ALL else [choices[CHANCE.integers(len(choices))]]


def test_every_record_type_is_stored_with_every_field(fuzzed: Fuzzed) -> None:
    """The damages below are made from what is stored, so a record that is not stored would not be tried."""
    stored = [json.dumps(part) for parts in documents(fuzzed).values() for part in parts]
    kinds = [kind for kind in vars(records).values() if is_dataclass(kind) and kind.__module__ == records.__name__]
    for kind in kinds:
        names = [field.name for field in fields(kind)]
        assert any(all(f'"{name}":' in text for name in names) for text in stored), kind


@pytest.mark.usefixtures("processes")
def test_a_damaged_object_gives_a_line_and_an_exit_code(fuzzed: Fuzzed) -> None:
    ended, left = fuzzed.ended, fuzzed.left
    # What commands write or delete, as it was.
    written = {key: ended.store.find(key) for run in (ended, left) for key in map(run.key, WRITTEN)}
    for key, how, data in damages(fuzzed):
        path = fuzzed.path(key)
        before, status = path.read_bytes(), path.stat()
        for arguments in chosen(commands_for(fuzzed, key)):
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            try:
                check(fuzzed, arguments)
            except BaseException as error:
                error.add_note(f"`packtrain {' '.join(arguments)}` after damaging {key}: {how}")
                raise
            for name, was in written.items():
                if was is None:
                    ended.store.delete(name)
                elif not fuzzed.path(name).exists():
                    ended.store.put(name, was)
        path.write_bytes(before)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_files_and_folders_with_odd_names_change_nothing(fuzzed: Fuzzed) -> None:
    ended, left = fuzzed.ended.name, fuzzed.left.name
    before = [ran(fuzzed.ended.store.url, [verb, ended]) for verb in ("show", "logs")]
    store = os.fsencode(fuzzed.ended.store.url)
    folders = ["runs", *(fuzzed.ended.key(name) for name in ("nodes", "generations", "events", "metrics", "logs"))]
    for folder, name in product(map(os.fsencode, folders), ODD_NAMES):
        place = store + b"/" + folder + b"/" + name
        Path(os.fsdecode(place)).mkdir()
        Path(os.fsdecode(place + b"/notes.txt")).write_bytes(b"mine")
        os.utime(place + b"/notes.txt", (9e11, 9e11))
    assert [ran(fuzzed.ended.store.url, [verb, ended]) for verb in ("show", "logs")] == before
    code, output, _ = ran(fuzzed.ended.store.url, ["ls"])
    assert (code, [line.split()[0] for line in output.splitlines()[1:]]) == (0, [left, ended])
