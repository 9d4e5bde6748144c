"""The code of runs that this person has accepted, remembered on this machine.

Whoever writes the store can change the job and the code of a run, and so what its nodes and `predict` execute, where
secrets are sent, and which machines are contacted. What this person started here is remembered by its digest; anything
else that could do harm is shown first, and runs only if accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.job import Job
from packtrain.job.kinds import FLEETS, FleetKind, word_of
from packtrain.job.part import Part
from packtrain.run.code import CodeFile, files_of
from packtrain.run.run import Run
from packtrain.system import state_directory
from packtrain.units import counted, show_bytes

_NAMED = 3  # files that a refusal in one line names


@dataclass(frozen=True)
class Change:
    """A file of a run's code compared with what was accepted before: added, changed or removed."""

    kind: str
    name: str
    size: int


@dataclass(frozen=True)
class CodeReview:
    """A job and code that this person has not accepted. `is_known`: others of the same run were.

    `job` is what the run is about to get, and `fields` are those that need trust.
    """

    run: Run
    job: Job
    is_known: bool
    changes: tuple[Change, ...]
    fields: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Return why the code is not run, in one line."""
        name = self.run.name
        if self.is_known:
            names = [change.name for change in self.changes] or ["the archive, or its sweep's fleet,"]
            further = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            return f"{name} is not what you ran before: {', '.join(names[:_NAMED])}{further} changed"
        if not self.job.has_own_code:
            return f"{name} was not started from here, and its job sets {', '.join(self.fields)}"
        size = show_bytes(sum(change.size for change in self.changes))
        return f"{name} was not started from here, and runs its own code ({counted(len(self.changes), 'file')}, {size})"


Accept = Callable[[CodeReview], None]
"""Raises Mistake unless the code may run."""


def refuse(review: CodeReview) -> None:
    raise Mistake(f"{review.reason}; someone has to accept it first")


def risks(job: Job, sections: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the fields with which a job could run code, send secrets, or reach machines and files of this person.

    Those are all that no part of the job calls harmless, unless they have their defaults. `sections` are what the
    caller reads of the job; None is all of it.
    """
    fields = [*_risks(job, ""), *(["recipe"] if job.has_own_code and job.recipe is not None else [])]
    return tuple(field for field in fields if sections is None or field.partition(".")[0] in sections)


def _risks(settings: Part, place: str) -> Iterator[str]:
    declared = [vars(base)["harmless"] for base in type(settings).__mro__ if "harmless" in vars(base)]
    if not declared:
        yield place.removesuffix(".")
        return
    harmless = frozenset[str]().union(*declared)
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        inner = f"{place}{word_of(FLEETS, value) if isinstance(value, FleetKind) else name}"
        if name in harmless:
            for member in value if isinstance(value, tuple) else (value,):
                if isinstance(member, Part):
                    yield from _risks(member, f"{inner}.")
        elif field.is_required() or value != field.get_default(call_default_factory=True):
            yield inner


def require_trust(
    run: Run,
    accept: Accept,
    job: Job | None = None,
    sections: Collection[str] | None = None,
    fleet: FleetKind | None = None,
) -> None:
    """Return if the run needs no trust, or if its job and code are those remembered, or are accepted now.

    `job` is what the run is about to get. What its store has counts as well: nobody may have accepted that. `fleet` is
    one that the plan of a sweep names, which is in the store, too.
    """
    jobs = [run.job] if job is None else [run.job, job]
    fields = dict.fromkeys(field for risky in jobs for field in risks(risky, sections))
    is_same_fleet = fleet is None or trusts_fleet(run, fleet) or not any(name.startswith("fleet.") for name in fields)
    if not fields or (is_remembered(run) and is_same_fleet):
        return
    accept(_review(run, job or run.job, _read(_path(run)), tuple(fields)))
    remember(run, fleet)


def is_remembered(run: Run) -> bool:
    digest = run.code_digest  # reads the run, so that the id of its store is known
    remembered = _read(_path(run))
    return remembered is not None and digest in remembered.digests


def trusts_fleet(run: Run, kind: FleetKind) -> bool:
    """True if the run was started from here on this fleet, or was accepted with it.

    Only such machines are contacted without asking: whoever writes the store could name others.
    """
    remembered = _read(_path(run))
    return remembered is not None and _fleet_digest(kind) in remembered.fleets


def remember(run: Run, fleet: FleetKind | None = None, *, instead: bool = True) -> None:
    """Accept the code of a run from now on, and its fleet: one that it had before stays accepted, too.

    Without `instead`, so does the code that was accepted last, for a client that may be killed before it changes it.
    """
    path, files = _path(run), {name: digest for name, (digest, _) in _files(run).items()}
    before = _read(path)
    kinds = [run.job.fleet.kind] if fleet is None else [run.job.fleet.kind, fleet]
    fleets = sorted({*(before.fleets if before is not None else ()), *map(_fleet_digest, kinds)})
    digests = {run.code_digest, *(() if before is None or instead else before.digests)}
    record = {
        "store": run.store.url, "run": run.name, "digests": sorted(digests), "files": files, "fleets": fleets,
    }  # fmt: skip
    # Without a home that can be written, as in some containers, the person is asked again.
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # 0600; renamed when it is complete
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
        Path(temporary).rename(path)


def forget(run: Run) -> None:
    """Forget what was accepted of a run that has left its name."""
    with suppress(OSError):
        _path(run).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Record:
    digests: frozenset[str]
    files: Mapping[str, str]
    fleets: frozenset[str]


def _fleet_digest(kind: FleetKind) -> str:
    text = f"{type(kind).__qualname__}\n{kind.model_dump_json()}"
    return hashlib.sha256(text.encode()).hexdigest()


def _path(run: Run) -> Path:
    # A store in a directory has many paths (links, mounts, `..`), and may be moved: its id stays the same.
    store = run.store.identity or run.store.url
    key = hashlib.sha256(f"{store}\0{run.name}".encode()).hexdigest()
    return state_directory() / "code" / f"{key}.json"


def _read(path: Path) -> _Record | None:
    try:
        record = json.loads(path.read_bytes())
        digests, fleets = (frozenset(map(str, record[name])) for name in ("digests", "fleets"))
        return _Record(digests, dict(record["files"]), fleets)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _files(run: Run) -> dict[str, tuple[str, int]]:
    """Return digest and size of everything that decides what the run executes."""
    files = {f"code/{file.name}": file for file in files_of(run.code)}
    files["job.json"] = CodeFile("job.json", 0, run.job_data)
    return {
        name: (hashlib.sha256(f"{file.mode:o}\0".encode() + file.data).hexdigest(), len(file.data))
        for name, file in files.items()
    }


def _review(run: Run, job: Job, remembered: _Record | None, fields: tuple[str, ...]) -> CodeReview:
    present, before = _files(run), remembered.files if remembered is not None else {}
    changes = [
        Change("changed" if name in before else "added", name, size)
        for name, (digest, size) in present.items()
        if before.get(name) != digest
    ]
    changes += [Change("removed", name, 0) for name in before if name not in present]
    return CodeReview(run, job, remembered is not None, tuple(changes), fields)
