"""The code of runs that this person has accepted, remembered on this machine.

Whoever writes the store can change the job and the code of a run, and so what its nodes and `predict` execute. What
this person started here is remembered by its digest; anything else is shown first, and runs only if accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.job.kinds import FleetKind
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
    """Code that this person has not accepted. `known`: other code of the same run was."""

    run: Run
    known: bool
    changes: tuple[Change, ...]

    @property
    def reason(self) -> str:
        """Return why the code is not run, in one line."""
        name = self.run.name
        if self.known:
            names = [change.name for change in self.changes] or ["the archive"]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            return f"{name} is not what you ran before: {', '.join(names[:_NAMED])}{more} changed"
        if not self.run.job.has_own_code:
            return f"{name} was not started from here, and its job decides which machines get which variables"
        size = show_bytes(sum(change.size for change in self.changes))
        return f"{name} was not started from here, and runs its own code ({counted(len(self.changes), 'file')}, {size})"


Accept = Callable[[CodeReview], None]
"""Raises Mistake unless the code may run."""


def refuse(review: CodeReview) -> None:
    raise Mistake(f"{review.reason}; somebody has to accept it first")


def require_trust(run: Run, accept: Accept) -> None:
    """Return if the code of the run is the one remembered, or is accepted now."""
    if is_remembered(run):
        return
    accept(_review(run, _read(_path(run))))
    remember(run)


def is_remembered(run: Run) -> bool:
    digest = run.code_digest  # reads the run, so that the id of its store is known
    remembered = _read(_path(run))
    return remembered is not None and remembered.digest == digest


def trusts_fleet(run: Run, kind: FleetKind) -> bool:
    """True if the run was started from here on this fleet, or was accepted with it.

    Only such machines are contacted without asking: whoever writes the store could name others.
    """
    remembered = _read(_path(run))
    return remembered is not None and _fleet_digest(kind) in remembered.fleets


def remember(run: Run) -> None:
    """Accept the code of a run from now on, and its fleet: one that it had before stays accepted, too."""
    path, files = _path(run), {name: digest for name, (digest, _) in _files(run).items()}
    before = _read(path)
    fleets = sorted({*(before.fleets if before is not None else ()), _fleet_digest(run.job.fleet.kind)})
    record = {"store": run.store.url, "run": run.name, "digest": run.code_digest, "files": files, "fleets": fleets}
    # Without a home that can be written, as in some containers, the person is asked again.
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent)  # 0600; renamed when it is complete
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
        Path(part).rename(path)


def forget(run: Run) -> None:
    """Forget what was accepted of a run that has left its name."""
    with suppress(OSError):
        _path(run).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Record:
    digest: str
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
        return _Record(str(record["digest"]), dict(record["files"]), frozenset(map(str, record["fleets"])))
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


def _review(run: Run, remembered: _Record | None) -> CodeReview:
    now, before = _files(run), remembered.files if remembered is not None else {}
    changes = [
        Change("changed" if name in before else "added", name, size)
        for name, (digest, size) in now.items()
        if before.get(name) != digest
    ]
    changes += [Change("removed", name, 0) for name in before if name not in now]
    return CodeReview(run, remembered is not None, tuple(changes))
