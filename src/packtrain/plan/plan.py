"""Plan a run: the size of its job, how fast its machines are, and what that makes on so many of them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from packtrain.data.pack import Pack
from packtrain.errors import FieldMistake, Mistake, PacktrainError
from packtrain.fleet import fleet_of
from packtrain.fleet.doctor import Usable, check_target, measure_links
from packtrain.fleet.fleet import HasTargets, passed_variables, values_of
from packtrain.fleet.host import gather, visible_object
from packtrain.fleet.local import LocalTarget
from packtrain.identity import install_command
from packtrain.job.job import Job
from packtrain.job.load import LoadedJob
from packtrain.job.part import is_address
from packtrain.pack.archive import split_member
from packtrain.pack.build import common_kind, digest, settings_of, splits_of
from packtrain.pack.manifest import Manifest, find_manifest, missing_files
from packtrain.plan.devices import Hardware, Link, device_named, rented_hardware, this_machine
from packtrain.plan.estimate import (
    Advice,
    Estimate,
    Goal,
    Layout,
    Speed,
    Workload,
    choose,
    estimate,
    goal_of,
    show_saves,
    speed_from_table,
    with_efficiency,
)
from packtrain.plan.known import KnownSpeeds, remember_speeds
from packtrain.plan.probe import SECONDS, Measured, ProbeRequest, probe
from packtrain.plan.raw import LargerVocabulary, RawHead, enlarge_vocabulary, file_bytes, pack_head
from packtrain.plan.sets import UnseenData, said_data, unseen_data
from packtrain.plan.workload import DataSize, built_in_model, data_size, estimated_data, model_size, workload_of
from packtrain.recipes import Recipe, recipe_class
from packtrain.recipes.recipe import ModelSize
from packtrain.run.code import snapshot
from packtrain.store import Store, StoreAway, open_store
from packtrain.system import cache_directory
from packtrain.units import counted

Say = Callable[[str], None]

_ETHERNET = Link(125e6, 0.0003, "1 Gbit/s, assumed")
_DEFAULT_MACHINES = (1, 2, 4, 8)
_MOST_MEASURED = 2  # times the cores of this machine: more processes than that are not started to be measured


@dataclass(frozen=True)
class PlanRequest:
    """The options of a plan; None is the default. `link` is in bytes per second; `samples` is a number, or a known set,
    for each source of the training data, and `length` the mean tokens of a target."""

    machines: tuple[int, ...] = ()
    samples: str | None = None
    length: float | None = None
    probe: bool = False
    device: str | None = None
    link: float | None = None
    seconds: float = SECONDS


@dataclass(frozen=True)
class Plan:
    """A job with an estimate for each number of machines. `source` says how its speed is known, `notes` what else."""

    job: str
    recipe: str
    model: str
    pack: str | None
    workload: Workload
    goal: Goal
    save_every: str
    source: str
    link: Link
    notes: tuple[str, ...]
    estimates: tuple[Estimate, ...]
    advice: Advice


def make_plan(loaded: LoadedJob, request: PlanRequest, say: Say) -> Plan:
    """Plan the job of a file. `say` gets a line for each thing that takes a while."""
    job = loaded.job
    if job.recipe is None:
        without = "a program" if job.program is not None else "only data"
        raise loaded.mistake("program" if job.program else "recipe", f"plan needs a recipe; this job has {without}")
    if request.length is not None and recipe_class(job.recipe, loaded.code).unit != "tokens":
        raise Mistake("--length is the mean length of a target text; the samples of this job are images")
    hardware, in_table, notes = _hardware(job, request)
    unseen = _unseen(loaded, request)
    if request.length is not None and unseen is None:
        raise Mistake(
            "--length is for data that is not read; this job's data is here. Add --samples to plan without it"
        )
    with ExitStack() as stack:
        data, model, recipe, store = _sizes(stack, loaded, request, unseen, say)
        unit = recipe_class(job.recipe, loaded.code).unit
        work = workload_of(job.train, unit, model, data, hardware.gpus > 0)
        speeds = _Speeds(loaded, request, recipe, store, hardware, work, say)
        measured, speed_notes = speeds.find(_counts(job, request), in_table)
    goal = goal_of(job, work)
    estimates = with_efficiency(
        [estimate(work, goal, speed, layout, measured.link) for layout, speed in measured.speeds]
    )
    if unseen is not None:
        notes = [*notes, *unseen.notes]
    elif not data.exact:
        notes = [*notes, "the data is not packed: its size is estimated from its first samples"]
    elif request.device is None and request.link is None:  # else it is about machines that the job does not name
        assert recipe is not None
        remember_speeds(job, recipe.pack.name, measured)
    sources = "; ".join(dict.fromkeys(speed.source for _, speed in measured.speeds))
    if job.train.scale_rate is not None:
        notes = [*notes, job.train.scale_rate.in_words(job.train.batch)]
    return Plan(
        job.name, job.recipe, job.model.size, recipe.pack.name if recipe is not None and data.exact else None, work,
        goal, show_saves(job), sources, measured.link, (*notes, *speed_notes), tuple(estimates),
        choose(estimates),
    )  # fmt: skip


# The data, packed or not.


def _unseen(loaded: LoadedJob, request: PlanRequest) -> UnseenData | None:
    """Return the size of data that is not read, because a person says it, or because it is not here; else None."""
    job = loaded.job
    if request.samples is not None:
        return said_data(job, request.samples, request.length)
    paths = [path for split in splits_of(job.data).values() for source in split for path in source.paths]
    if job.data.pack is not None or all(file_bytes(split_member(path)[0]) is not None for path in paths):
        return None
    store = open_store(job.store)
    if any(map(is_address, paths)) and _existing(loaded)[0] is not None:
        return None
    unseen = unseen_data(job, store, request.length)
    if unseen is not None:
        return unseen
    missing = next(path for path in paths if not is_address(path) and file_bytes(split_member(path)[0]) is None)
    raise loaded.mistake("data", f"{missing} does not exist; to plan without it, pass its size: --samples 100000")


def _sizes(
    stack: ExitStack, loaded: LoadedJob, request: PlanRequest, unseen: UnseenData | None, say: Say
) -> tuple[DataSize, ModelSize, Recipe | None, Store | None]:
    """Return the sizes of data and model, and the recipe with the data and its store; None if there is no data."""
    job = loaded.job
    assert job.recipe is not None
    if unseen is not None:
        model = built_in_model(job, job.data.vocabulary, unseen.classes)
        if model is None:
            raise Mistake(f"plan needs the data of the custom recipe {job.recipe}, to build its model")
        return unseen.size, model, None, None
    if find_spec("torch") is None:
        raise Mistake(f"plan builds the job's model, which needs torch; run `{install_command('train')}`")
    recipe, store, head = stack.enter_context(_recipe_of(loaded, request))
    say("building the model")
    if head is None:
        return data_size(recipe), model_size(recipe), recipe, store
    train = head.manifest.splits["train"]
    costs = np.split(recipe.costs, np.cumsum(train.sources)[:-1])
    larger = sum(head.samples["train"]) / train.samples
    valid, test = (sum(head.samples.get(split, ())) for split in ("valid", "test"))
    means = [float(of_source.mean()) if len(of_source) else 1.0 for of_source in costs]
    data = estimated_data(job, head.samples["train"], means, larger * train.shard_bytes, valid, test)
    return data, model_size(recipe), recipe, store


@contextmanager
def _recipe_of(loaded: LoadedJob, request: PlanRequest) -> Iterator[tuple[Recipe, Store, RawHead | None]]:
    """Yield the recipe on the job's pack; or on a pack of its first samples, with what is known of the others."""
    job = loaded.job
    assert job.recipe is not None
    manifest, store = _existing(loaded)
    kind = recipe_class(job.recipe, loaded.code)
    if manifest is not None and store is not None:
        yield kind(job, Pack(store, manifest.name, cache_directory() / "packs", manifest=manifest)), store, None
        return
    if request.probe and not fleet_of(job.fleet.kind).trains_here:
        raise Mistake(f"--probe needs the packed data; run `packtrain pack {loaded.document.name}` first")
    with tempfile.TemporaryDirectory(prefix="packtrain-plan-") as folder:
        store = open_store(folder, create=True)
        try:
            head = pack_head(job.data, store)
        except FieldMistake as mistake:
            raise loaded.mistake(mistake.field, mistake.fault) from None
        pack = Pack(store, head.manifest.name, Path(folder) / "cache", manifest=head.manifest)
        if not head.is_all:
            # A vocabulary of a few samples is smaller than that of all: the model has to have the job's size.
            enlarge_vocabulary(pack, job.data.vocabulary)
        yield kind(job, pack), store, head


def _existing(loaded: LoadedJob) -> tuple[Manifest | None, Store | None]:
    """Return the job's pack if its store has it complete."""
    job, store = loaded.job, open_store(loaded.job.store)
    manifest = None
    try:
        name = _pack_name(job, store)
        manifest = None if name is None else find_manifest(store, name)
        complete = manifest is not None and not missing_files(store, manifest)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None
    except StoreAway as away:
        if away.was_there:
            raise
        complete = False  # the first run creates it
    if not complete and job.data.pack is not None:
        raise loaded.mistake("data.pack", f"no such pack in {store.url}; copy it there, or remove this field")
    return (manifest, store) if complete else (None, None)


def _pack_name(job: Job, store: Store) -> str | None:
    """Return the name that the job's pack has, or would have; None if that cannot be said from here."""
    if job.data.pack is not None:
        return job.data.pack
    sources = [source for split in splits_of(job.data).values() for source in split]
    if not any(is_address(path) for source in sources for path in source.paths):
        return f"{job.name}-{digest(settings_of(job.data, common_kind(splits_of(job.data))))}"
    # The name depends on what is behind the addresses, which is not downloaded for a plan.
    packed = [name for name in store.folders("packs/") if re.fullmatch(rf"{re.escape(job.name)}-[0-9a-f]{{12}}", name)]
    return packed[0] if len(packed) == 1 else None


# How fast the machines are.


def _hardware(job: Job, request: PlanRequest) -> tuple[Hardware, bool, list[str]]:
    """Return the type of machine that is planned with, True if the table knows it, and what is assumed about it."""
    local, fleet = this_machine(), fleet_of(job.fleet.kind)
    link = None if request.link is None else Link(request.link, _ETHERNET.latency_seconds, "--link")
    if request.device is not None:
        device = device_named(request.device)
        return Hardware(device, job.fleet.workers or 1, local.cores, 0, link or _ETHERNET), True, []
    if fleet.trains_here:
        return local if link is None else replace(local, link=link), False, []
    hardware = rented_hardware(job.fleet.kind)
    if hardware is not None:
        return hardware if link is None else replace(hardware, link=link), True, []
    link = link or _ETHERNET
    if request.probe:
        return replace(local, link=link), False, []
    types = job.fleet.kind.rented_types
    rented = f"{types[0]} is not in the table of devices" if types else "its machines are not known"
    assumed = f"{rented}: assumed to be like this one; measure with --probe, or set --device"
    return replace(local, link=link), False, [assumed]


def _counts(job: Job, request: PlanRequest) -> list[int]:
    if request.machines:
        return sorted(set(request.machines))
    kind = job.fleet.kind
    bounds = {kind.machines.least, kind.machines.most}
    if fleet_of(kind).trains_here:
        return sorted({1, *bounds})
    # A list of hosts ends where it ends; of what can be rented or queued for, more is possible.
    return sorted(bounds | {count for count in _DEFAULT_MACHINES if count <= max(bounds) or not hasattr(kind, "hosts")})


FoundSpeeds = tuple[KnownSpeeds, Sequence[str]]
"""The speed for each number of machines with the link between them, and notes about them."""


class _Speeds:
    """Finds the speeds: measured on the fleet, measured here, or from the table of devices."""

    def __init__(
        self, loaded: LoadedJob, request: PlanRequest, recipe: Recipe | None, store: Store | None, hardware: Hardware,
        work: Workload, say: Say,
    ) -> None:  # fmt: skip
        self._loaded, self._job, self._request, self._recipe = loaded, loaded.job, request, recipe
        self._store, self._hardware, self._work, self._say = store, hardware, work, say
        self._fleet = fleet_of(self._job.fleet.kind)

    def find(self, counts: Sequence[int], in_table: bool) -> FoundSpeeds:
        if self._request.probe:
            return self._on_fleet(counts)
        if in_table:
            return self._from_table(counts)
        if self._recipe is None:
            return self._from_table(counts, ["speed not measured: measuring needs the data"])
        return self._on_this_machine(counts)

    def _workers(self, gpus: int) -> int:
        return self._job.fleet.workers or max(1, gpus)

    def _from_table(self, counts: Sequence[int], notes: Sequence[str] = ()) -> FoundSpeeds:
        hardware, workers = self._hardware, self._workers(self._hardware.gpus)
        shared = self._fleet.trains_here and self._request.device is None
        speeds = []
        for count in counts:
            sharing = workers * (count if shared else 1)  # of the cores or GPUs of one machine
            speed = speed_from_table(self._work, hardware, sharing, self._job.evaluate.beam)
            speeds.append((Layout(count, workers, hardware.worker_memory_bytes(sharing), shared), speed))
        return KnownSpeeds(self._work, hardware.link, tuple(speeds)), [*notes, *self._sharing(counts)]

    def _sharing(self, counts: Sequence[int]) -> list[str]:
        """Return a note if several machines of the plan are this one."""
        if max(counts) == 1 or not self._fleet.trains_here or self._request.device is not None:
            return []
        shared = "GPUs" if self._hardware.gpus else "cores"
        note = "the local fleet's machines are all this one: they share its"
        return [f"{note} {shared}; for other machines, set fleet or --device"]

    def _on_this_machine(self, counts: Sequence[int]) -> FoundSpeeds:
        """Measure on this machine, which is the fleet's, or stands for one of its machines."""
        workers, cores = self._workers(self._hardware.gpus), self._hardware.cores
        is_own, busy = self._fleet.trains_here, os.getloadavg()[0]
        notes = [f"this machine is busy (load {busy:.1f}): it may be faster than measured"] if busy > cores / 2 else []
        measured: dict[int, Measured] = {}
        facts = gather("", "")
        for count in counts if is_own else [1]:
            if measured and count * workers > _MOST_MEASURED * cores:
                break
            self._say(f"measuring steps with {counted(count * workers, 'worker')} on this machine")
            machines = [Usable(LocalTarget("this machine"), sys.executable, [facts]) for _ in range(count)]
            try:
                measured[count] = self._probe(machines, workers)
            except PacktrainError as error:
                if not measured:
                    return self._from_table(counts, [f"could not be measured here: {error}"])
                break
        speeds = tuple(self._nearest(measured, count, is_own) for count in counts)
        return KnownSpeeds(self._work, self._hardware.link, speeds), [*notes, *self._sharing(counts)]

    def _on_fleet(self, counts: Sequence[int]) -> FoundSpeeds:
        """Measure on as many machines of the fleet as there are, and the links between them."""
        if self._store is None:
            raise Mistake("--probe needs the data; plan without it")
        targets = self._fleet.targets() if isinstance(self._fleet, HasTargets) else []
        if not targets:
            raise Mistake("--probe: the machines of this fleet exist only while a run rents them; plan without it")
        store = self._store
        secrets = values_of(passed_variables(self._job.environment, store.url))
        self._say(f"connecting to {counted(len(targets), 'machine')}")
        notes, usable = [], []
        with ExitStack() as stack:
            key = stack.enter_context(visible_object(store))
            pool = stack.enter_context(ThreadPoolExecutor(32))  # a host that does not answer takes ten seconds
            for checks, machines in pool.map(lambda target: check_target(target, store.url, key, secrets), targets):
                usable += [machines] if machines else []
                notes += [f"{check.machine}: {check.step}: {check.detail}" for check in checks if not check.ok]
            if not usable:
                raise Mistake(f"--probe: no machine can be used: {notes[0]}")
            link = self._measured_link(usable, store, key, secrets)
        workers = self._workers(max(machine.gpus for place in usable for machine in place.machines))
        measured: dict[int, Measured] = {}
        for count in counts:
            # The first targets with exactly so many machines, if there are such.
            firsts = (usable[:number] for number in range(1, len(usable) + 1))
            chosen = next((places for places in firsts if sum(len(place.machines) for place in places) == count), None)
            if chosen is not None:
                self._say(f"measuring steps on {counted(count, 'machine')}")
                measured[count] = self._probe(chosen, workers, secrets)
        if not measured:
            measured[len(usable)] = self._probe(usable, workers, secrets)
        speeds = tuple(self._nearest(measured, count, self._fleet.trains_here) for count in counts)
        return KnownSpeeds(self._work, link, speeds), notes

    def _measured_link(self, usable: Sequence[Usable], store: Store, key: str, secrets: dict[str, str]) -> Link:
        count = sum(len(place.machines) for place in usable)
        if count < 2:
            return self._hardware.link
        self._say(f"measuring the links between {counted(count, 'machine')}")
        options = ["--store", store.url, "--key", f"{key}-link", "--world", str(count)]
        options += ["--public-address"] if self._job.fleet.public_address else []
        speed = measure_links(usable, options, secrets)
        return Link(speed.bytes_per_second, speed.latency_seconds, f"measured between {counted(count, 'machine')}")

    def _probe(self, usable: Sequence[Usable], workers: int, secrets: dict[str, str] | None = None) -> Measured:
        assert self._recipe is not None
        assert self._store is not None
        job, pack = self._recipe.job, self._recipe.pack
        size = len(pack.vocabulary) if isinstance(vars(pack).get("vocabulary"), LargerVocabulary) else None
        code = snapshot(self._loaded.code, job.named_paths).archive if job.has_own_code else None
        request = ProbeRequest(job.model_dump_json(), pack.name, self._request.seconds, code is not None, size)
        return probe(request, code, self._store, usable, workers, secrets or {}, job.fleet.public_address)

    def _nearest(self, measured: dict[int, Measured], count: int, shared: bool) -> tuple[Layout, Speed]:
        """Return the speed that was measured with this number of machines, or else with one that is near.

        `shared`: all of them are this machine, and share its cores.
        """
        where = "this machine" if self._fleet.trains_here or not self._request.probe else "the fleet"
        near = min(measured, key=lambda machines: abs(machines - count))
        measurement = measured[near]
        workers = measurement.ranks // measurement.machines
        memory = (
            measurement.memory_limit_bytes
            if measurement.kind == "gpu" or not shared
            else measurement.memory_limit_bytes // count
        )
        layout = Layout(count, workers, memory, shared)
        speed = measurement.speed(self._work.exchange_every, where)
        if near == count:
            return layout, speed
        slower = count / near if shared and measurement.kind == "cpu" else 1.0
        scaled = replace(
            speed,
            fixed_seconds=speed.fixed_seconds * slower,
            unit_seconds=speed.unit_seconds * slower,
            exchange_seconds=None,
            memory_bytes=None,
        )
        return layout, scaled
