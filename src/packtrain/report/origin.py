"""Questions about where a run comes from: its machines and their programs, its job as written, how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from packtrain.errors import harmless
from packtrain.job import Job
from packtrain.job.job import expand
from packtrain.observe.evidence import Evidence
from packtrain.recipes import built_in
from packtrain.report.finding import Finding, Rows, Text, unknown
from packtrain.run.records import GpuModel, JobSource, Lease, MachineFacts
from packtrain.units import counted, show_bytes

_MAX_NAMES = 4  # of machines in one line
_MAX_COLUMNS = 80
_PROGRAMS = ("packtrain", "python", "torch", "cuda", "driver")
_HARDWARE_HEADS = ("machine", "processor", "cores", "memory", "GPUs", "system")


# Machines and versions.


def machines(evidence: Evidence) -> Finding:
    """List the machines by what they are, and the versions of what ran on them."""
    key, question = "machines", "What did it run on?"
    described = [lease for lease in evidence.leases if lease.facts != MachineFacts()]
    if not described:
        if not evidence.versions:
            return unknown(key, "run", question, "its machines did not say what they are")
        table = Rows(("program", "version"), tuple(sorted(evidence.versions.items())))
        source = "The versions are those of the newest checkpoint."
        return Finding(key, "run", question, f"{_listed(evidence.versions)}.", "good", (source,), (table,))
    hardware, programs = _kinds(described, _hardware), _kinds(described, lambda facts: _versions(facts.versions))
    count, answer = evidence.machines_of(lease.node for lease in described)
    if len(hardware) == 1:
        facts = described[0].facts
        words = f"{counted(facts.cores, 'core')} ({facts.processor or 'unknown'}), {show_bytes(facts.memory_bytes)} RAM"
        words = f"{_gpus(facts.gpus)}, {words}" if facts.gpus else f"{words}, no GPU"
        answer += f"{', each' if count > 1 else ''} with {words}"
    else:
        answer += f" of {len(hardware)} kinds"
    names = [name for name in _PROGRAMS if any(name in lease.facts.versions for lease in described)]
    different = [name for name in names if len({lease.facts.versions.get(name, "none") for lease in described}) > 1]
    if different:
        answer += f". They have different versions of {' and '.join(different)}, so losses may differ in a repetition."
        rows = tuple(
            (who, *(dict(installed).get(name, "none") for name in names)) for installed, who in programs.items()
        )
        versions = Rows(("machine", *names), rows)
    else:
        answer += f"; {_listed(described[0].facts.versions)}."
        versions = Rows(("program", "version"), next(iter(programs)))
    return Finding(
        key, "run", question, answer, "note" if different else "good",
        ("Each machine says what it is when it joins. Cores are those that the run could use.",),
        (Rows(_HARDWARE_HEADS, tuple((who, *hardware_cells) for hardware_cells, who in hardware.items())), versions),
        {"machines": float(count)},
    )  # fmt: skip


def _kinds(leases: Sequence[Lease], kind_of: Callable[[MachineFacts], Any]) -> dict[Any, str]:
    """Return the names of the machines of each kind; a machine that came back with another kind has both."""
    kinds: dict[Any, dict[str, None]] = {}
    for lease in leases:
        kinds.setdefault(kind_of(lease.facts), {})[lease.hostname] = None
    hidden = {kind: len(names) - _MAX_NAMES for kind, names in kinds.items()}
    return {
        kind: ", ".join(list(names)[:_MAX_NAMES]) + (f" and {hidden[kind]} more" if hidden[kind] > 0 else "")
        for kind, names in kinds.items()
    }


def _hardware(facts: MachineFacts) -> tuple[str, ...]:
    memory = show_bytes(facts.memory_bytes)
    return facts.processor or "unknown", str(facts.cores), memory, _gpus(facts.gpus) or "none", facts.system


def _gpus(gpus: Sequence[GpuModel]) -> str:
    models = dict.fromkeys((gpu.name, gpu.memory_bytes) for gpu in gpus)
    count = {model: sum((gpu.name, gpu.memory_bytes) == model for gpu in gpus) for model in models}
    return ", ".join(f"{count[name, size]} x {name} ({show_bytes(size)})" for name, size in models)


def _versions(versions: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, versions[name]) for name in _PROGRAMS if name in versions)


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in _versions(versions))


# The job, and how to repeat it.


def reproduce(evidence: Evidence) -> Finding:
    """The job as written, what was set on top of it, digests of code and data, the command."""
    run, job = evidence.status.run, evidence.job
    source = evidence.source or generated_source(job)
    on_gpus = job.recipe is not None and any(lease.facts.gpus for lease in evidence.leases)
    is_dirty = source.uncommitted > 0
    rows = [
        *(("--set", override) for override in source.last_overrides),
        ("git commit", source.commit + (f" and {counted(source.uncommitted, 'changed file')}" if is_dirty else "")),
        ("job", f"sha256 {evidence.job_digest}" if evidence.job_digest else ""),
        ("job and code", f"sha256 {evidence.code_digest}" if evidence.code_digest else ""),
        ("data", evidence.pack),
        ("store", evidence.store),
        ("fleet", f"{counted(evidence.machines, 'machine')}, {counted(evidence.workers, 'worker')} in all"),
        *([("seed", str(job.train.seed))] if job.recipe is not None else []),
        *([("kernels", "exact" if job.train.exact else "fastest (train.exact: false)")] if on_gpus else []),
    ]
    answer = f"Save the job below as {source.file}, and run it on the same number of workers."
    is_changed = any(event.kind == "changed" for event in evidence.events)
    if on_gpus and not job.train.exact:
        answer += " Losses then differ slightly: train.exact was off, and the fastest kernels sum in any order."
    elif job.recipe is not None and not is_changed:
        answer += " Every loss is then the same, bit for bit, on the same hardware and versions."
    facts = []
    if is_changed:
        facts.append("It was resumed with other settings (see the events); a new run has them from its start.")
    if evidence.source is None:
        facts.append("The file was not kept: the job below has the same fields, without comments.")
    if is_dirty:
        changed = counted(source.uncommitted, "file")
        facts.append(f"{changed} {'was' if source.uncommitted == 1 else 'were'} changed since the commit.")
    if job.has_own_code:
        facts.append(f"The code that ran is in runs/{run}/code.tar.zst of the store; unpack it beside the job.")
    if evidence.pack:
        facts.append("With data.pack the pack in the store is used as it is, without the raw data.")
    return Finding(
        "reproduce", "run", "How can I repeat it?", answer, "good", tuple(facts),
        (Text("command", command_of(source, evidence.pack, job)),
         Rows(("what", "which"), tuple(row for row in rows if row[1])), Text(source.file, source.text)),
    )  # fmt: skip


def command_of(source: JobSource, pack: str = "", job: Job | None = None) -> str:
    """Return the command that starts the same run again, with a line for each part if it is long.

    People paste it into a shell, which would run control characters: they are escaped.
    """
    packed = replace(source, overrides=(*source.overrides, f"data.pack={pack}")) if pack else source
    commands = [["packtrain", "run", source.file], *(["--set", override] for override in packed.last_overrides)]
    if job is not None and job.parent is not None and job.weights is None:  # otherwise the file says it
        fresh = [] if job.parent.takes == "everything" else ["--fresh"]
        commands.append(["--from", f"{job.parent.store}/{job.parent.run}:{job.parent.step}", *fresh])
    lines = [shlex.join(map(harmless, words)) for words in commands]
    line = " ".join(lines)
    return line if len(line) <= _MAX_COLUMNS else " \\\n    ".join(lines)


def generated_source(job: Job) -> JobSource:
    """Return the file of a job whose own was not kept."""
    return JobSource("job.yaml", job_text(job))


def job_text(job: Job) -> str:
    """Return the job as a file: what differs from the defaults, without fields that are not set.

    What a recipe has defaults of its own for is always written; for a user's recipe, which is not asked, everything is.
    """
    full = job.model_dump(mode="json")
    short = _without_nulls(job.model_dump(mode="json", exclude_defaults=True))
    defaults: Mapping[str, Any] = full if job.recipe is not None else {}
    if (recipe := built_in(job.recipe)) is not None:
        defaults = expand(recipe.defaults_for(full["model"]))
    for section, fields in defaults.items():
        values = full.get(section)
        if isinstance(fields, Mapping) and isinstance(values, Mapping):
            for field in fields:
                short.setdefault(section, {}).setdefault(field, _without_nulls(values[field]))
    return yaml.safe_dump(short, sort_keys=False, allow_unicode=True, width=100)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
