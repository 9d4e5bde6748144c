"""The Python environment on a host: found where it is, or made there from the package index or from a bundle of wheels.

Candidates are the job's `python`; else the `packtrain` on the host's PATH, this machine's own path (one home directory
on all machines), and the host's cache. What is found must be the same Packtrain as here, to the last line.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.fleet.facts import identity, source
from packtrain.fleet.remote import Remote, Unreachable

MAKE_SECONDS = 1800.0
_CACHE = "${PACKTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/packtrain}/environments"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^;]*(?:;(.*))?")

# Whether a Python is the one that is wanted, and can train.
_FITS = """
torch='import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
fits() { [ "$("$1" -m packtrain.fleet.facts 2>/dev/null)" = "$wanted" ] && "$1" -c "$torch"; }
"""

# $1: what it must be. $2...: where to look. Prints the path of the first that fits.
_FIND = f"""
wanted=$1; shift
{_FITS}
path=$(command -v packtrain 2>/dev/null) && set -- "$@" "$(sed -n '1s/^#! *//p' "$path")"
for python in "$@" "{_CACHE}/$wanted/bin/python"; do
  fits "$python" && {{ echo "$python"; exit 0; }}
done
echo none
"""

# $1: the Python. Prints its path, and which Packtrain it has.
_NAME = """
python=$1; case $python in "~/"*) python=$HOME/${python#"~/"};; esac
echo "$python"; exec "$python" -m packtrain.fleet.facts
"""

# $1...: where to look. Any version will do: agents of an older client are to be found and ended as well.
_FIND_ANY = f"""
path=$(command -v packtrain 2>/dev/null) && set -- "$@" "$(sed -n '1s/^#! *//p' "$path")"
for python in "$@" "{_CACHE}"/*/bin/python; do
  case $python in "~/"*) python=$HOME/${{python#"~/"}};; esac
  "$python" -c 'import packtrain.fleet.local' 2>/dev/null && {{ echo "$python"; exit 0; }}
done
echo 'no packtrain there to ask: is its environment gone?' >&2; exit 1
"""

# $1: what it will be. $2: -, or "offline". Standard input: a tar of wheels and constraints.txt.
# Another run may make the same one meanwhile, here or on a machine with the same home: whoever is first has made it,
# and what fits stays where it is.
_MAKE = f"""
set -eu
wanted=$1
{_FITS}
home="{_CACHE}"; mkdir -p "$home"
part=$(mktemp -d "$home/part-XXXXXX"); trap 'rm -rf "$part"' EXIT
tar -x -C "$part"
for python in python3.13 python3.12 python3.11 python3 none; do
  "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
done
[ "$python" != none ] || {{ echo 'no Python 3.11 with venv there: install one, or give fleet.ssh.python' >&2; exit 1; }}
"$python" -m venv "$part/made"
offline=; [ "$2" = offline ] && offline=--no-index
"$part/made/bin/python" -m pip install --quiet --disable-pip-version-check --no-input $offline \\
  --find-links "$part/wheels" --constraint "$part/constraints.txt" 'packtrain[train]' >&2
made="$home/$wanted"
if ! mv -T "$part/made" "$made" 2>/dev/null && ! fits "$made/bin/python"; then
  mv -T "$made" "$part/old" && mv -T "$part/made" "$made"
fi
echo "$made/bin/python"
"""


def find(remote: Remote, python: str | None) -> str | None:
    """The Python of the same Packtrain there; None where one has to be made."""
    if python is None:
        [found] = remote.script(_FIND, [identity(), sys.executable])
        return None if found == "none" else found
    path, there = remote.script(_NAME, [python], lines=2)
    if there != identity():
        raise Unreachable(remote.name, f"{python} has packtrain {there}, and here it is {identity()}: install the same")
    return path


def find_any(remote: Remote, python: str | None) -> str:
    """A Python there that knows about agents, of whatever version."""
    return remote.script(_FIND_ANY, [python or sys.executable])[0]


def make(remote: Remote, bundle: Path | None) -> str:
    """Installs this very Packtrain there, and all else in the versions of the bundle, or of this machine."""
    mode = "-" if bundle is None else "offline"
    return remote.script(_MAKE, [identity(), mode], _tar(bundle), MAKE_SECONDS)[0]


def check_bundle(bundle: Path) -> None:
    if not bundle.is_dir() or not any(bundle.glob("*.whl")):
        raise Mistake(
            f"fleet.ssh.bundle: {bundle} has no wheels; `pip download -d {bundle} 'packtrain[train]'` gets them"
        )


def _tar(bundle: Path | None) -> bytes:
    """Our own wheel, the constraints, and what the bundle has."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        name, wheel = own_wheel()
        _add(archive, f"wheels/{name}", wheel)
        pinned = [] if bundle else constraints()  # a bundle has one version of each already
        _add(archive, "constraints.txt", "\n".join(pinned).encode() + b"\n")
        for path in sorted(bundle.glob("*.whl")) if bundle else []:
            if not path.name.startswith("packtrain-"):
                archive.add(path, f"wheels/{path.name}", recursive=False)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def own_wheel() -> tuple[str, bytes]:
    """The installed package as a wheel, editable or not: the same bytes for the same source."""
    installed = distribution("packtrain")
    folder = f"packtrain-{installed.version}.dist-info"
    files = {f"packtrain/{name}": data for name, data in source().items()}
    files[f"{folder}/METADATA"] = (installed.read_text("METADATA") or "").encode()
    files[f"{folder}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: packtrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{folder}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    files[f"{folder}/RECORD"] = _record(files, f"{folder}/RECORD")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"packtrain-{installed.version}-py3-none-any.whl", buffer.getvalue()


def _record(files: dict[str, bytes], own: str) -> bytes:
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{own},,", ""]).encode()


def constraints() -> list[str]:
    """`name==version` of all that `packtrain[train]` brings here. Of a build such as 2.8.0+cpu, the release."""
    found: dict[str, str] = {}
    waiting = list(_needs(distribution("packtrain"), {"train"}))
    while waiting:
        name = waiting.pop()
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # of another system, or not wanted here
        if name not in found:
            found[name] = installed.version.partition("+")[0]
            waiting += _needs(installed, set())
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _needs(installed: Distribution, extras: set[str]) -> Iterable[str]:
    for requirement in installed.requires or ():
        match = _REQUIREMENT.fullmatch(requirement.strip())
        marker = (match[2] or "") if match else ""
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if match and (extra is None or extra[1] in extras):
            yield re.sub(r"[-_.]+", "-", match[1]).lower()
