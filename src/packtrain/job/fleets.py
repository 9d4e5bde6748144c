"""Where machines come from: the kinds of fleets, as a job file names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator
from pydantic_core import InitErrorDetails

from packtrain.job.part import Argument, Location, MachineCount, Ordinal, Part, Seconds, StorePath, quoted, what_is
from packtrain.units import Machines

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:]+\])"
_USER = r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?"
_DESTINATION = re.compile(rf"{_USER}{_HOST}(?::[0-9]{{1,5}})?")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,126}")
_PYTHON = re.compile(r"[A-Za-z0-9_./~+-]+")


def _matching(pattern: re.Pattern[str], what: str) -> PlainValidator:
    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be a text, not {what_is(value)}")
        if not pattern.fullmatch(value) or value.startswith("-"):
            raise ValueError(f"{quoted(value)} is not {what}")
        return value

    return PlainValidator(read)


Destination = Annotated[str, _matching(_DESTINATION, "a host, as in gpu-a, user@gpu-b or gpu-c:2222")]
Word = Annotated[str, _matching(_WORD, "a name")]
Python = Annotated[str, _matching(_PYTHON, "the path of a Python, as in /opt/train/bin/python")]


class FleetKind(Part):
    """Where the machines come from, and how many there are to be. `power_off`: a machine ends with its part of the run.

    A kind that knows what its machines cost gives `price`, in dollars for a machine and an hour.
    """

    price: ClassVar[float | None] = None

    machines: MachineCount = Machines(1, 1)
    power_off: Annotated[bool, Field(strict=True)] = False


class Local(FleetKind):
    """This one; several agents on it stand for as many machines."""


class _Listed(FleetKind):
    """Machines by their names; all of them, unless the job says how many."""

    hosts: tuple[Destination, ...]

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:  # noqa: ARG003
        hosts = given.get("hosts")
        if "machines" not in given and isinstance(hosts, Sequence) and not isinstance(hosts, str) and hosts:
            return {**given, "machines": len(hosts)}
        return given

    def faults(self) -> Iterator[tuple[Location, str]]:
        if not self.hosts:
            yield ("hosts",), "must name at least one host"
        elif len(set(self.hosts)) != len(self.hosts):
            yield ("hosts",), "has a host twice"
        elif self.machines.most > len(self.hosts):
            yield ("machines",), f"asks for {self.machines.most} of {len(self.hosts)} hosts"


class Ssh(_Listed):
    """Hosts that the system's ssh reaches. `bundle` is a directory of wheels for those without a package index."""

    python: Python | None = None
    bundle: StorePath | None = None
    interface: Word | None = None


class Mpi(_Listed):
    """Hosts that `mpirun` reaches; Python has the same path on all of them. `options` go to mpirun as they are."""

    python: Python | None = None
    interface: Word | None = None
    options: tuple[Argument, ...] = ()

    def faults(self) -> Iterator[tuple[Location, str]]:
        yield from super().faults()
        for number, host in enumerate(self.hosts):
            if ":" in host:
                yield ("hosts", number), "mpirun takes no port; name it in ~/.ssh/config"


class Slurm(FleetKind):
    """Nodes of a Slurm cluster. `time` is the limit of one job, which is queued again; `gpus` are per machine."""

    partition: Word | None = None
    account: Word | None = None
    time: Seconds | None = None
    gpus: Ordinal | None = None
    python: Python | None = None
    interface: Word | None = None
    options: tuple[Argument, ...] = ()

    def faults(self) -> Iterator[tuple[Location, str]]:
        for number, option in enumerate(self.options):
            if not option.startswith("--") or "\n" in option:
                yield ("options", number), "must be one long option of sbatch, such as --constraint=a100"
        if self.time is not None and self.time.value < _LEAST_SECONDS:
            yield (
                ("time",),
                f"must be at least {_LEAST_SECONDS // 60} min: two of them are kept for the last checkpoint",
            )


_LEAST_SECONDS = 300

FLEETS: Mapping[str, type[FleetKind]] = {"local": Local, "ssh": Ssh, "mpi": Mpi, "slurm": Slurm}
