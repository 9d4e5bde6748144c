"""A run's folder in the store: the names of its objects, and how they are read and written.

Any machine that can read the store can follow a run; nothing about it is kept anywhere else.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from packtrain.errors import NotFound, PacktrainError, quoted
from packtrain.job import Job
from packtrain.job.document import MAX_NODES
from packtrain.job.part import is_name
from packtrain.process import to_type
from packtrain.run.chunks import ChunkReader, ChunkWriter
from packtrain.run.code import MAX_SNAPSHOT_BYTES
from packtrain.run.points import PointReader, PointWriter
from packtrain.run.records import (
    MAX_PICTURE_BYTES,
    Event,
    EventKind,
    FleetLaunch,
    Forecast,
    Generation,
    JobSource,
    Lease,
    LogLine,
    MirroredRun,
    Notes,
    Point,
    RemovedRun,
    RenamedRun,
    Result,
    StopRequest,
    TelemetrySample,
    TimeSpent,
)
from packtrain.store import (
    RECORD_BYTES,
    DamagedObject,
    ObjectNotFound,
    Store,
    StoreAway,
    StoreError,
    store_option,
    stores_nearby,
)
from packtrain.store.records import MAX_RECORD_BYTES, DamagedRecord, damaged, decode, decode_name, encode
from packtrain.units import show_time

_FEW = 4  # up to this many objects are read one after the other, ...
_READERS = 16  # ... more by this many threads
_MAX_RECORDS = 100_000  # in one folder, such as the leases of a run
_MAX_RUNS = 999_999  # of a job: its runs are numbered
_RECORD = re.compile(r"([^/]+)\.json")
_DIGEST = re.compile("[0-9a-f]{64}")
_NUMBERED = re.compile(r"([0-9]{6,9})\.json")
_REMOVED, _RENAMED = "removed/", "renamed/"  # folders with a record for each name that was given up, or chosen

Stored = TypeVar("Stored")
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def worker_writer(generation: int, rank: int) -> str:
    """Return the name under which a worker writes to the run's streams; names sort by generation."""
    return f"{generation:06d}-rank-{rank}"


class Run:
    """A run by its name; nothing is read until it is asked for.

    Job and code are read once: the bytes that were checked (see trust.py) are those that run.
    """

    def __init__(self, store: Store, name: str, job_data: bytes | None = None, code: bytes | None = None) -> None:
        if not is_name(name):
            fault = "names consist of a-z, 0-9 and -, and do not start with -"
            raise NotFound(f"{quoted(name)} is not a valid run name; {fault}")
        self.store, self.name = store, name
        self.folder = f"runs/{name}"
        self._job_data, self._code = job_data, code
        self._job: Job | None = None
        self._steps: dict[str, tuple[int, int]] = {}  # by the key of the generation

    def key(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def command(self, verb: str) -> str:
        """Return the command to type for this run, as in `packtrain follow en-de-1`.

        It names the store if it would not be found from here, or if another one nearby has a run of the same name: the
        command may be typed after a `cd`.
        """
        option = store_option(self.store)
        with suppress(StoreError):
            other_stores = (store for store in stores_nearby() if store.url != self.store.url)
            if not option and any(store.exists(self.key("job.json")) for store in other_stores):
                option = ["--store", self.store.url]
        return to_type(verb, self.name, *option)

    @property
    def job_data(self) -> bytes:
        if self._job_data is None:
            self._job_data = self.store.find(self.key("job.json"), MAX_RECORD_BYTES)
            if self._job_data is None:
                raise NotFound(f"no run {self.name!r} in {self.store.url}; `packtrain ls` lists the runs")
        return self._job_data

    @property
    def job(self) -> Job:
        if self._job is None:
            try:
                document = from_json(self.job_data, allow_inf_nan=False)
                if not _is_small(document):
                    raise DamagedRecord(f"{self._title('job.json')} is damaged: no job has that many values")
                self._job = Job.model_validate(document)
            except ValidationError as error:
                raise damaged(self._title("job.json"), error) from error
            except ValueError as error:
                raise DamagedRecord(f"{self._title('job.json')} is damaged, or from another version") from error
        return self._job

    @property
    def job_digest(self) -> str:
        return hashlib.sha256(self.job_data).hexdigest()

    @property
    def code(self) -> bytes:
        """The archive of the code that the run carries."""
        if self._code is None:
            self._code = self._created("code.tar.zst", MAX_SNAPSHOT_BYTES)
        return self._code

    @property
    def code_digest(self) -> str:
        """A digest of the job and the code: everything that decides what the run's nodes execute."""
        digests = (hashlib.sha256(data).digest() for data in (self.job_data, self.code))
        return hashlib.sha256(b"".join(digests)).hexdigest()

    def pack_name(self) -> str:
        """Return the name of the pack that a recipe trains on."""
        return decode_name(self._created("pack.txt"), self._title("pack.txt"))

    def _created(self, name: str, limit: int = RECORD_BYTES) -> bytes:
        """Read what a client puts after the job, unless it was killed before."""
        try:
            return self.store.get(self.key(name), limit)
        except ObjectNotFound as error:
            advice = f"it was not created completely; run `{self.command('rm')}`, and start the job again"
            raise ObjectNotFound(f"{self.name} has no {name}: {advice}") from error

    # Streams: each has a reader, and a writer for every process that adds to it.

    def events(self) -> ChunkReader[Event]:
        return ChunkReader(self.store, self.key("events"), Event)

    def record_event(self, kind: EventKind, text: str) -> None:
        """Record an event of a process that has no writer of its own, such as a client."""
        writer = self.event_writer(f"client-{uuid.uuid4().hex[:12]}")  # a writer's name is used only once
        writer.append(Event(time.time(), kind, text))
        writer.flush()

    def event_writer(self, writer: str) -> ChunkWriter[Event]:
        return ChunkWriter(self.store, self.key("events"), writer)

    def points(self) -> ChunkReader[Point]:
        return PointReader(self.store, self.key("metrics"))

    def point_writer(self, writer: str) -> ChunkWriter[Point]:
        return PointWriter(self.store, self.key("metrics"), writer)

    def time_spent(self) -> ChunkReader[TimeSpent]:
        return ChunkReader(self.store, self.key("time"), TimeSpent)

    def time_spent_writer(self, writer: str) -> ChunkWriter[TimeSpent]:
        return ChunkWriter(self.store, self.key("time"), writer)

    def log_lines(self) -> ChunkReader[LogLine]:
        return ChunkReader(self.store, self.key("logs"), LogLine)

    def log_writer(self, writer: str) -> ChunkWriter[LogLine]:
        return ChunkWriter(self.store, self.key("logs"), writer)

    def telemetry(self) -> ChunkReader[TelemetrySample]:
        return ChunkReader(self.store, self.key("telemetry"), TelemetrySample)

    def telemetry_writer(self, writer: str) -> ChunkWriter[TelemetrySample]:
        return ChunkWriter(self.store, self.key("telemetry"), writer)

    # Single objects.

    def generations(self, after: int = 0) -> list[Generation]:
        return _read_each(self._generation, self._keys("generations/", _NUMBERED, self._generation_key(after)))

    def latest_generation(self, earlier: Generation | None = None) -> Generation | None:
        """Return the latest generation. With `earlier`, only those after it are listed, and only the last is read."""
        after = None if earlier is None else self._generation_key(earlier.number)
        keys = self._keys("generations/", _NUMBERED, after)
        return self._generation(keys[-1]) if keys else earlier

    def starting_steps(self, after: int) -> dict[int, int]:
        """Return the step that each generation after that number started from, as far as its record can be read.

        Each record is read only once.
        """

        def read(key: str) -> None:
            with suppress(DamagedRecord, DamagedObject):
                generation = self._generation(key)
                self._steps[key] = (generation.number, generation.step)

        keys = self._keys("generations/", _NUMBERED, self._generation_key(after))
        _read_each(read, [key for key in keys if key not in self._steps])
        return dict(self._steps[key] for key in keys if key in self._steps)

    def _generation(self, key: str) -> Generation:
        generation = self._read(key, Generation)
        if self._generation_key(generation.number) != key:
            raise DamagedRecord(f"{self._title(key)} is damaged: it is generation {generation.number}")
        return generation

    def propose(self, generation: Generation) -> bool:
        """True if this proposal is the first for its number, and so wins."""
        return self.store.put_if_absent(self._generation_key(generation.number), encode(generation))

    def _generation_key(self, number: int) -> str:
        return self.key(f"generations/{number:06d}.json")

    def proposer(self, number: int, turn: int, node: str) -> str:
        """Return the node that proposes generation `number`: in each turn, the first node to ask."""
        key = self.key(f"proposers/{number:06d}-{turn:03d}.txt")
        if self.store.put_if_absent(key, node.encode()):
            return node
        return decode_name(self.store.get(key), self._title(key))

    def leases(self) -> list[Lease]:
        return _read_each(
            lambda key: self._lease(key, self.store.get(key, MAX_RECORD_BYTES)), self._keys("nodes/", _RECORD)
        )

    def lease(self, name: str) -> Lease | None:
        key = self.lease_key(name)
        data = self.store.find(key, MAX_RECORD_BYTES)
        return None if data is None else self._lease(key, data)

    def _lease(self, key: str, data: bytes) -> Lease:
        lease = decode(Lease, data, self._title(key))
        if self.lease_key(lease.node) != key:
            raise DamagedRecord(f"{self._title(key)} is damaged: it is the lease of {lease.node}")
        return lease

    def lease_key(self, node: str) -> str:
        return self.key(f"nodes/{node}.json")

    def renew(self, lease: Lease) -> None:
        self.store.put(self.lease_key(lease.node), encode(lease))

    def launches(self) -> list[FleetLaunch]:
        """Return what clients were about to start for this run, oldest first."""
        return list(self.launches_by_key().values())

    def launches_by_key(self) -> dict[str, FleetLaunch]:
        keys = self._keys("launches/", _NUMBERED)
        return dict(zip(keys, _read_each(lambda key: self._read(key, FleetLaunch), keys), strict=True))

    def first_launch(self) -> FleetLaunch | None:
        """Return the launch that `launches` has first, without a list of them all."""
        with suppress(NotFound):
            return self._read(self.key("launches/000001.json"), FleetLaunch)
        return None

    def count_launches(self) -> int:
        return len(self._keys("launches/", _NUMBERED))

    def record_launch(self, launch: FleetLaunch) -> None:
        number = self.count_launches() + 1
        while not self.store.put_if_absent(self.key(f"launches/{number:06d}.json"), encode(launch)):
            number += 1  # another client records one at the same moment

    def result(self) -> Result | None:
        return self._find("result.json", Result)

    def finish(self, result: Result) -> bool:
        """True if this result is the first, and so counts."""
        return self.store.put_if_absent(self.key("result.json"), encode(replace(result, job=self.job_digest)))

    def is_complete(self) -> bool:
        """True if the run has finished its job, and not one that it had before."""
        result = self.result()
        return result is not None and result.status == "finished" and result.job == self.job_digest

    def forecast(self) -> Forecast | None:
        """Return what was expected of this run before it started; None if nobody asked."""
        return self._find("plan.json", Forecast)

    def put_forecast(self, forecast: Forecast) -> None:
        self.store.put(self.key("plan.json"), encode(forecast))

    def source(self) -> JobSource | None:
        """Return the job as it was written; None if the run was not made from a file."""
        return self._find("source.json", JobSource)

    def put_source(self, source: JobSource) -> None:
        self.store.put(self.key("source.json"), encode(source))

    def mirrored(self) -> MirroredRun | None:
        """Return the run of MLflow that mirrors this one, if there is one."""
        return self._find("mlflow.json", MirroredRun)

    def put_mirrored(self, mirrored: MirroredRun) -> None:
        self.store.put(self.key("mlflow.json"), encode(mirrored))

    def notes(self) -> Notes:
        return self._find("notes.json", Notes) or Notes()

    def put_notes(self, notes: Notes) -> None:
        self.store.put(self.key("notes.json"), encode(notes))

    def picture(self, digest: str) -> bytes | None:
        """Return the JPEG of a sample; None if there is none, or another one under its name."""
        data = self.store.find(self._picture_key(digest), MAX_PICTURE_BYTES) if _DIGEST.fullmatch(digest) else None
        return data if data is not None and hashlib.sha256(data).hexdigest() == digest else None

    def put_picture(self, data: bytes) -> None:
        """Put the JPEG of a sample under its digest."""
        self.store.put(self._picture_key(hashlib.sha256(data).hexdigest()), data)

    def _picture_key(self, digest: str) -> str:
        return self.key(f"pictures/{digest}.jpg")

    def stop_request(self) -> StopRequest | None:
        return self._find("stop.json", StopRequest)

    def request_stop(self, reason: str) -> None:
        self.store.put_if_absent(self.key("stop.json"), encode(StopRequest(reason, time.time())))

    def changed(self, job: Job) -> Run:
        """Return this run with another job, which nobody else sees before `put_job`."""
        return Run(self.store, self.name, job.model_dump_json(indent=1).encode(), self.code)

    def put_job(self) -> None:
        """Replace the job in the store by this one, unless the run is being removed or renamed (`removal`)."""
        self._check_stays()
        self.store.put(self.key("job.json"), self.job_data)
        try:
            self._check_stays()
        except NotFound:  # that began in between, and may have deleted the job before this one was put
            self.store.delete(self.key("job.json"))
            raise

    def _check_stays(self) -> None:
        if (removal := removed_run(self.store, self.name)) is not None:
            fate = f"renamed to {removal.renamed_to}" if removal.renamed_to else "removed"
            raise NotFound(f"{self.name} is being {fate} by {removal.client}; its job was not changed")

    def clear_end(self) -> None:
        """Remove the stop request and the result of a run, so that nodes resume it."""
        self.store.delete(self.key("stop.json"))
        self.store.delete(self.key("result.json"))

    def _find(self, name: str, kind: type[Stored]) -> Stored | None:
        data = self.store.find(self.key(name), MAX_RECORD_BYTES)
        return None if data is None else decode(kind, data, self._title(name))

    def _read(self, key: str, kind: type[Stored]) -> Stored:
        return decode(kind, self.store.get(key, MAX_RECORD_BYTES), self._title(key))

    def _keys(self, folder: str, names: re.Pattern[str], after: str | None = None) -> list[str]:
        """Return the keys of the records in a folder, sorted; what has another name is none of ours."""
        start = self.key(folder)
        keys = [entry.key for entry in self.store.list(start, after)]
        keys = [key for key in keys if names.fullmatch(key.removeprefix(start))]
        if len(keys) > _MAX_RECORDS:
            raise DamagedRecord(f"{self._title(folder)} is damaged: it has more than {_MAX_RECORDS:,} records")
        return keys

    def _title(self, name: str) -> str:
        """Return an object's name for an error, given its name or its key."""
        return f"{name.removeprefix(self.key(''))} of run {self.name} in {self.store.url}"


def _is_small(document: object) -> bool:
    """True if a job file could have as many values, defaults included: each wrong one would become an error."""
    values, allowed = [document], 2 * MAX_NODES
    while values and allowed > 0:
        value = values.pop()
        below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        values += below
        allowed -= 1 + len(below)
    return allowed > 0


def _read_each(read: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Return the answers in order. Many requests run in parallel, because each spends its time waiting."""
    if len(items) <= _FEW:
        return [read(item) for item in items]
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(read, items))


def add_run(store: Store, job: Job, code: bytes, pack: str | None) -> Run:
    """Create a folder named after the job with the next free number; `pack` is what a recipe trains on."""
    for run in _new_runs(store, job, code):
        # Two clients may try the same number at the same time: the second one gets False, and takes the next.
        if store.put_if_absent(run.key("job.json"), run.job_data):
            store.put(run.key("code.tar.zst"), code)
            if pack is not None:
                store.put(run.key("pack.txt"), pack.encode())
            return run
    raise PacktrainError(f"no free number left for runs of {job.name!r}")


def next_run(store: Store, job: Job, code: bytes) -> Run:
    """Return the run that `add_run` would create now, also if the store is yet to be created."""
    try:
        return next(_new_runs(store, job, code))
    except StoreAway as away:
        if away.was_there:
            raise
        return Run(store, f"{_stem(job.name)}-1", job.model_dump_json(indent=1).encode(), code)


def unnumbered_name(job: Job) -> str:
    """Return the name of a job's run with a letter in place of its number."""
    return f"{_stem(job.name)}-n"


def _new_runs(store: Store, job: Job, code: bytes) -> Iterator[Run]:
    """Yield runs with free numbers: after the last one, then in the gaps.

    So a folder with the last number that there is does not block the job.
    """
    data = job.model_dump_json(indent=1).encode()
    # Also those of removed runs: a name means one run, for whoever remembers it.
    gone = [entry.key.removeprefix(_REMOVED).removesuffix(".json") for entry in store.list(_REMOVED)]
    split = [split_name(name) for name in [*store.folders("runs/"), *gone]]
    used_numbers = {number for stem, number in split if stem == _stem(job.name)}
    for number in chain(range(max(used_numbers, default=0) + 1, _MAX_RUNS + 1), range(1, _MAX_RUNS + 1)):
        if number not in used_numbers:
            # With what is put, not with what the store has later: nodes are told to run this and nothing else.
            yield Run(store, f"{_stem(job.name)}-{number}", data, code)


def _stem(job_name: str) -> str:
    """Return the start of the names of a job's runs."""
    return job_name[:56]  # a name has at most 63 characters: this leaves room for a hyphen and six digits


def split_name(run_name: str) -> tuple[str, int]:
    """Return the start of a run's name and its number; 0 for a name that a person has chosen."""
    stem, _, number = run_name.rpartition("-")
    return stem, int(number) if is_name(run_name) and number.isdigit() and len(number) <= len(str(_MAX_RUNS)) else 0


def run_names(store: Store) -> list[str]:
    """Return the names of all runs, oldest first.

    Object stores keep times to the second, and the objects of a store that was copied have the times of the copy. So no
    run is taken for older than one of the same job with a lower number.
    """
    names = [name for name in store.folders("runs/") if is_name(name)]
    entries = _read_each(lambda name: store.entry(f"runs/{name}/job.json"), names)
    # A copy under another name, as a bucket makes it, is as old as the original.
    renamed = {entry.key.removeprefix(_RENAMED).removesuffix(".json") for entry in store.list(_RENAMED)}
    numbered = []
    for entry, name in zip(entries, names, strict=True):
        if entry is not None:
            modified = entry.modified
            # A damaged claim gives the run another place in the list, and hides no other run.
            with suppress(DamagedRecord, DamagedObject):
                if name in renamed and (claim := renamed_run(store, name)) is not None:
                    modified = datetime.fromtimestamp(claim.created, UTC)
            numbered.append((*split_name(name), modified, name))
    created = []
    latest: dict[str, datetime] = {}
    for stem, number, modified, name in sorted(numbered):
        latest[stem] = max(modified, latest.get(stem, modified))
        created.append((latest[stem], number, name))
    return [name for *_, name in sorted(created)]


def removed_key(name: str) -> str:
    return f"{_REMOVED}{name}.json"


def removed_run(store: Store, name: str) -> RemovedRun | None:
    """Return who removed or renamed the run that had this name."""
    data = store.find(removed_key(name), MAX_RECORD_BYTES)
    return None if data is None else decode(RemovedRun, data, f"{removed_key(name)} in {store.url}")


def renamed_key(name: str) -> str:
    return f"{_RENAMED}{name}.json"


def renamed_run(store: Store, name: str) -> RenamedRun | None:
    """Return which run got this name later."""
    data = store.find(renamed_key(name), MAX_RECORD_BYTES)
    return None if data is None else decode(RenamedRun, data, f"{renamed_key(name)} in {store.url}")


def open_run(store: Store, name: str | None) -> Run:
    """Return the run of that name, the newest run of the job of that name, or the newest of all."""
    if name is not None and is_name(name) and store.exists(f"runs/{name}/job.json"):
        return Run(store, name)
    names = run_names(store)
    of_job = [run_name for run_name in names if name is not None and split_name(run_name)[0] == _stem(name)]
    if name is not None and not of_job and is_name(name) and (gone := removed_run(store, name)) is not None:
        fate = f"is called {gone.renamed_to} now" if gone.renamed_to else "was removed"
        raise NotFound(f"{name} {fate} (by {gone.client}, {show_time(gone.time)})")
    if not names:
        raise NotFound(f"no runs in {store.url}; start one with `packtrain run JOB`")
    if name is None:
        return Run(store, names[-1])
    if of_job:
        return Run(store, of_job[-1])
    raise NotFound(f"no run {quoted(name)} in {store.url}; newest runs: {', '.join(names[:-4:-1])}")
