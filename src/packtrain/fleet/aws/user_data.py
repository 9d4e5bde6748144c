"""User data of an EC2 machine: the script that prepares it, runs the node, and ends the machine.

The script is boot.sh with the values of a run before it. It has names of secrets, never their values. EC2 accepts only
16 KB, so a launch template has it compressed, which cloud-init undoes.
"""

from __future__ import annotations

import io
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from packtrain.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MISTAKE,
    EXIT_NOT_FOUND,
    EXIT_STOPPED,
    EXIT_UNFINISHED,
)
from packtrain.files import sha256_of
from packtrain.fleet.environment import FIND, write_archive
from packtrain.fleet.fleet import node_arguments, values_of
from packtrain.identity import identity, source
from packtrain.run.run import Run
from packtrain.store.services import checked_endpoint
from packtrain.system import cache_directory

if TYPE_CHECKING:
    from packtrain.fleet.aws.fleet import AwsSettings

ENVIRONMENT = "environment.tar"
"""Name in a run's folder of what a machine makes its Python environment of; `put_environment` puts it there."""

# Of the services that instance.py asks. User data can be read in AWS's console: no address may have a password in it.
_ENDPOINTS = ("AWS_ENDPOINT_URL", *(f"AWS_ENDPOINT_URL_{service}" for service in (
    "S3", "EC2", "AUTO_SCALING", "SSM", "SECRETS_MANAGER",
)))  # fmt: skip
_EXITS = {
    "done": EXIT_DONE,
    "stopped": EXIT_STOPPED,
    "missing": EXIT_NOT_FOUND,
    "failed": EXIT_FAILED,
    "mistake": EXIT_MISTAKE,
    "unfinished": EXIT_UNFINISHED,
}


def boot_script(run: Run, settings: AwsSettings, ends: float) -> str:
    """Return the script. `ends` is when the machine has to be gone at the latest, in seconds since 1970."""
    head = ["#!/bin/bash", f"# Packtrain: takes part in {run.name} and then ends this machine."]
    body = source()["fleet/aws/boot.sh"].decode()
    for word, code in _EXITS.items():
        body = body.replace(f"@{word}@", str(code))
    return "\n".join([*head, *_variables(run, settings, ends), body])


def put_environment(run: Run, settings: AwsSettings) -> None:
    """Put what machines make their Python environment of into the run's folder, before a machine starts."""
    with _archive(settings.bundle) as file:
        run.store.put_file(run.key(ENVIRONMENT), Path(file.name))


def _variables(run: Run, settings: AwsSettings, ends: float) -> Iterator[str]:
    # Without the Python, which the machine finds or makes.
    command = node_arguments(run, "python", run.job.fleet.kind)[1:]
    plain = {
        "run": run.name,
        "identity": identity(),
        "python": settings.python or "",
        "environment": run.key(ENVIRONMENT),
        "digest": _digest(settings.bundle),
        "mode": "-" if settings.bundle is None else "offline",
        "linger": f"{settings.linger.value:.0f}",
        "ends": f"{ends:.0f}",
        "find": FIND,
        "instance": source()["fleet/aws/instance.py"].decode(),
    }
    yield from (f"{name}={shlex.quote(value)}" for name, value in plain.items())
    yield f"command=({shlex.join(command)})"
    volume = settings.volume
    claim = [] if volume is None else [volume.name, *(f"{name}={value}" for name, value in volume.parameters.items())]
    yield f"volume=({shlex.join(claim)})"
    yield f"mounts=({shlex.join(f'{source} {path}' for path, source in settings.mounts.items())})"
    pairs = (f"[{name}]={shlex.quote(reference)}" for name, reference in settings.secrets.items())
    yield f"declare -A secrets=({' '.join(pairs)})"
    yield from (f"export {name}={shlex.quote(value)}" for name, value in _environment(run).items())


def _environment(run: Run) -> dict[str, str]:
    """Return the variables by which the machine finds the store, and AWS if it is not at its usual place."""
    endpoints = {name: url for name in _ENDPOINTS if (url := checked_endpoint(os.environ, name)) is not None}
    of_profile = values_of(("AWS_REGION", "AWS_ENDPOINT_URL_S3"))  # or of the environment
    region = of_profile.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    if of_profile.get("AWS_ENDPOINT_URL_S3"):
        endpoints["AWS_ENDPOINT_URL_S3"] = of_profile["AWS_ENDPOINT_URL_S3"]
    # Set even to the usual address: it says that this machine has a role, also for another S3 server.
    role = {"AWS_METADATA_ENDPOINT": "http://169.254.169.254"}
    return {"PACKTRAIN_STORE": run.store.url, "AWS_REGION": region, **role, **dict(sorted(endpoints.items()))}


@contextmanager
def _archive(bundle: str | None) -> Iterator[IO[bytes]]:
    """Give a file with the archive: with a bundle it may have several gigabytes."""
    with tempfile.NamedTemporaryFile(dir=cache_directory()) as file:
        if bundle is None:
            file.write(_small_archive())
        else:
            write_archive(Path(bundle), file)
        file.flush()
        yield file


@cache
def _small_archive() -> bytes:
    """Return the archive without a bundle. Kept: it takes a second to make, and a launch needs it twice."""
    buffer = io.BytesIO()
    write_archive(None, buffer)
    return buffer.getvalue()


@cache
def _digest(bundle: str | None) -> str:
    with _archive(bundle) as file:
        return sha256_of(Path(file.name))
