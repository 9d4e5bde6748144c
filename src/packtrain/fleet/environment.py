"""The Python environment on a host: find it, or create it from the package index or a bundle of wheels.

Candidates are the job's `python`; or else the `packtrain` on the host's PATH, this machine's own path (for a home
directory shared by all machines), and the host's cache. The environment must have exactly this source of Packtrain.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shlex
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.fleet.remote import Remote, Unreachable
from packtrain.identity import identity, recorded_digest, source, wheel_of

CREATE_SECONDS = 1800.0
_CACHE = "${PACKTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/packtrain}/environments"
_REQUIREMENTS = "python -m packtrain.fleet.environment"  # prints what a host needs, with versions
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date that a zip can hold: the same wheel every time
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^;]*(?:;(.*))?")

# True if a Python has the expected Packtrain and torch. torch is only looked up: importing it takes seconds.
_FITS = """
torch='import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
fits() { [ "$("$1" -m packtrain.identity 2>/dev/null)" = "$expected" ] && "$1" -c "$torch"; }
"""

# Adds the Python of the `packtrain` on the PATH, which is in the first line of that script.
_ADD_FROM_PATH = """path=$(command -v packtrain 2>/dev/null) && set -- "$@" "$(sed -n '1s/^#! *//p' "$path")" """

# $1: the expected identity. $2...: candidates. Prints the path of the first that fits.
_FIND = f"""
expected=$1; shift
{_FITS}
{_ADD_FROM_PATH}
for python in "$@" "{_CACHE}/$expected/bin/python"; do
  fits "$python" && {{ echo "$python"; exit 0; }}
done
echo none
"""

# $1: the Python. Prints its path and the identity of its Packtrain.
_IDENTIFY = """
python=$1; case $python in "~/"*) python=$HOME/${python#"~/"};; esac
echo "$python"; exec "$python" -m packtrain.identity
"""

# $1...: candidates. Any version is accepted: nodes of an older client must be found and ended, too.
_FIND_ANY = f"""
{_ADD_FROM_PATH}
for python in "$@" "{_CACHE}"/*/bin/python; do
  case $python in "~/"*) python=$HOME/${{python#"~/"}};; esac
  "$python" -c 'from packtrain.fleet.local import find_processes' 2>/dev/null && {{ echo "$python"; exit 0; }}
done
echo 'packtrain is not installed there; was its environment removed?' >&2; exit 1
"""

# $1: the expected identity. $2: -, or "offline". Standard input: a tar of own/ (the wheel of Packtrain), wheels/,
# constraints.txt, and identity.py with digests.txt to check what was installed.
# Another run may create the same environment at the same time, here or on a machine that shares the home directory:
# each builds in a directory of its own and renames it; the first rename wins, and an environment that fits is kept.
_CREATE = f"""
set -eu
expected=$1
{_FITS}
umask 077
home="{_CACHE}"; mkdir -p "$home"
part=$(mktemp -d "$home/part-XXXXXX"); trap 'rm -rf "$part"' EXIT
tar -x -C "$part"; mkdir -p "$part/wheels"
for python in python3.13 python3.12 python3.11 python3 none; do
  "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
done
[ "$python" != none ] || {{ echo 'no Python >= 3.11 with venv; install one, or set fleet.ssh.python' >&2; exit 1; }}
"$python" -m venv "$part/made"
offline=; [ "$2" = offline ] && offline=--no-index
# By its path, never by its name: an index or a bundle may have another, newer package of that name, and the node that
# starts from this environment is sent the job's secrets.
wheel=$(echo "$part"/own/*.whl)
"$part/made/bin/python" -m pip install --quiet --disable-pip-version-check --no-input $offline \\
  --only-binary :all: --find-links "$part/wheels" --constraint "$part/constraints.txt" "$wheel[train]" >&2
# With a Python that has none of these packages: as soon as theirs starts, it may run code of them.
"$python" -I "$part/identity.py" "$(echo "$part"/made/lib/python*/site-packages)" < "$part/digests.txt" >&2
fits "$part/made/bin/python" || {{ echo 'the new environment does not have this Packtrain' >&2; exit 1; }}
made="$home/$expected"
if ! mv -T "$part/made" "$made" 2>/dev/null && ! fits "$made/bin/python"; then
  # What is there was interrupted, and another run may be replacing it, too: then one of them fails here, and either
  # environment will do.
  mv -T "$made" "$part/old" 2>/dev/null || true
  mv -T "$part/made" "$made" 2>/dev/null || fits "$made/bin/python"
fi
echo "$made/bin/python"
"""


def find(remote: Remote, python: str | None) -> str | None:
    """Return the host's Python with this Packtrain; None if an environment has to be created."""
    if python is None:  # use any that fits; this machine's own path is one of the candidates
        [found] = remote.script(_FIND, [identity(), sys.executable])
        return None if found == "none" else found
    path, theirs = remote.script(_IDENTIFY, [python], lines=2)
    if theirs != identity():
        fault = f"{python} has packtrain {theirs}, this machine has {identity()}; install the same version there"
        raise Unreachable(remote.name, fault)
    return path


def find_any(remote: Remote, python: str | None) -> str:
    """Return a Python of the host with any version of Packtrain, to list and end nodes."""
    return remote.script(_FIND_ANY, [python or sys.executable])[0]


def create(remote: Remote, bundle: Path | None) -> str:
    """Install this Packtrain there, and its dependencies in the versions of the bundle or of this machine."""
    mode = "-" if bundle is None else "offline"
    return remote.script(_CREATE, [identity(), mode], _archive(bundle), CREATE_SECONDS)[0]


def check_bundle(bundle: Path) -> None:
    if not bundle.is_dir() or not any(bundle.glob("*.whl")):
        raise Mistake(
            f"fleet.ssh.bundle: {bundle} has no wheels; get them with"
            f" `{_REQUIREMENTS} > needed.txt; pip download -d {shlex.quote(str(bundle))} -r needed.txt`"
        )


def _archive(bundle: Path | None) -> bytes:
    """Return a tar of our own wheel, the constraints and the wheels of the bundle."""
    name, wheel = own_wheel()
    # A bundle has one version of each already, and the person has chosen its files.
    lines = {"constraints.txt": [] if bundle else constraints(), "digests.txt": [] if bundle else digests()}
    files = {path: "\n".join([*texts, ""]).encode() for path, texts in lines.items()}
    files |= {f"own/{name}": wheel, "identity.py": source()["identity.py"]}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        for file in sorted(bundle.glob("*.whl")) if bundle else []:
            if not file.name.startswith("packtrain-"):  # our own wheel has exactly the source that runs here
                archive.add(file, f"wheels/{file.name}", recursive=False)
    return buffer.getvalue()


def own_wheel() -> tuple[str, bytes]:
    """Return the installed package as a wheel, editable or not: the same bytes for the same source."""
    installed = distribution("packtrain")
    folder = f"packtrain-{installed.version}.dist-info"
    files = {f"packtrain/{name}": data for name, data in source().items()}
    files[f"{folder}/METADATA"] = (installed.read_text("METADATA") or "").encode()
    files[f"{folder}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: packtrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{folder}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    record = [f"{name},sha256={_record_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{folder}/RECORD"] = "\n".join([*record, f"{folder}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"packtrain-{installed.version}-py3-none-any.whl", buffer.getvalue()


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def constraints() -> list[str]:
    """Return `name==version` of everything that training needs here; a build such as 2.8.0+cpu is 2.8.0."""
    return [f"{name}=={package.version.partition('+')[0]}" for name, package in sorted(_needed().items())]


def digests() -> list[str]:
    """Return the wheels that these dependencies were installed from, each with a digest of its files."""
    wheels = ((wheel_of(package), package) for package in _needed().values())
    return sorted(f"{wheel} {recorded_digest(package)}" for wheel, package in wheels if wheel is not None)


def _needed() -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    waiting = list(_requirements(distribution("packtrain"), {"train"}))
    while waiting:
        name = waiting.pop()
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # needed on another platform only
        if name not in found:
            found[name] = installed
            waiting += _requirements(installed, set())  # without the extras of a dependency
    return found


def _requirements(installed: Distribution, extras: set[str]) -> Iterable[str]:
    for requirement in installed.requires or ():
        match = _REQUIREMENT.fullmatch(requirement.strip())
        marker = (match[2] or "") if match else ""
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if match and (extra is None or extra[1] in extras):
            yield re.sub(r"[-_.]+", "-", match[1]).lower()


if __name__ == "__main__":
    print("\n".join(constraints()))
