"""The Python environment on a host: find it, or create it from the package index or a bundle of wheels.

Candidates are the job's `python`; or else the `packtrain` on the host's PATH, this machine's own path (for a home
directory shared by all machines), and the host's cache. The environment must have exactly this source of Packtrain.
"""

from __future__ import annotations

import io
import shlex
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from packtrain.errors import EXIT_MISTAKE, Mistake
from packtrain.fleet.bundle import SUMS, BundleFile
from packtrain.fleet.host import MODULE, Host
from packtrain.fleet.remote import Remote, Unreachable
from packtrain.fleet.scripts import script_text
from packtrain.fleet.wheels import INSTALL, LOCK, NO_INDEX, TOOLS, constraints, digests, own_wheel
from packtrain.identity import identity, source
from packtrain.system import cache_directory

CREATE_SECONDS = 1800.0
_CACHE = "${PACKTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/packtrain}/environments"

# True if a Python has the expected Packtrain and torch. torch is only looked up: importing it takes seconds.
_FITS = """
torch='import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
fits() { [ "$("$1" -P -m packtrain.identity 2>/dev/null)" = "$expected" ] && "$1" -P -c "$torch"; }
"""

# Adds the Python of the `packtrain` on the PATH, which is in the first line of that script.
_ADD_FROM_PATH = """path=$(command -v packtrain 2>/dev/null) && set -- "$@" "$(sed -n '1s/^#! *//p' "$path")" """

# $1: the expected identity. $2...: candidates. Prints the path of the first that fits.
FIND = f"""
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
echo "$python"; exec "$python" -P -m packtrain.identity
"""


def find(remote: Remote, python: str | None) -> str | None:
    """Return the host's Python with this Packtrain; None if an environment has to be created."""
    if python is None:  # use any that fits; this machine's own path is one of the candidates
        [path] = remote.script(FIND, [identity(), sys.executable])
        return None if path == "none" else path
    path, theirs = remote.script(_IDENTIFY, [python], lines=2)
    if theirs != identity():
        fault = f"{python} has packtrain {theirs}, this machine has {identity()}; install the same version there"
        raise Unreachable(remote.name, fault)
    return path


def find_any(remote: Remote, python: str | None) -> Host | None:
    """Return the host with any version of Packtrain, to list and end nodes; None if it has neither.

    Any version is accepted, also with the name that the module had in older ones: nodes of an older client must be
    found and ended, too. Without Packtrain and without a node, the client was stopped before it installed it: nothing
    is there to list or end.
    """
    script = script_text("find_any.sh", add_from_path=_ADD_FROM_PATH, environments=_CACHE, module=MODULE)
    path, module = remote.script(script, [python or sys.executable], lines=2)
    return None if path == "none" else Host(remote, path, module)


def create(remote: Remote, bundle: Path | None) -> str:
    """Install this Packtrain there, and its dependencies in the versions of the bundle or of this machine."""
    mode = "-" if bundle is None else "offline"
    # By way of a file: with CUDA the wheels have several gigabytes.
    with tempfile.TemporaryFile(dir=cache_directory()) as file:
        script = _create_script()
        file.write(script.encode())
        write_archive(bundle, file)
        file.seek(0)
        return remote.script(script, [identity(), mode], file, CREATE_SECONDS)[0]


def _create_script() -> str:
    """Return the script that creates an environment.

    $1: the expected identity. $2: -, or "offline". Standard input: a tar of own/ (the wheel of Packtrain), wheels/,
    constraints.txt, and identity.py with digests.txt to check what was installed; of a bundle also its lock and pip.
    $3: or else, the path of a bundle on this machine.

    Another run may create the same environment at the same time, here or on a machine that shares the home directory:
    each builds in a directory of its own and renames it; the first rename wins, and an environment that fits is kept.
    """
    values = {"sums": SUMS, "lock": LOCK, "tools": TOOLS, "install": INSTALL, "no_index": NO_INDEX.pattern}
    return script_text("create.sh", fits=_FITS, environments=_CACHE, **values)


def create_commands(bundle: Path, launcher: str) -> str:
    """Return lines of a shell script that create the environment from a bundle and set `python` to its Python.

    `launcher` runs a command on every machine; all of them see the bundle under the same path.
    """
    words = shlex.join([identity(), "offline", str(bundle.absolute())])
    assignment = f'python="{_CACHE}/{identity()}/bin/python"'
    return f"""{assignment}
create={shlex.quote(f'{assignment}; [ -x "$python" ] || {{ {_create_script()} }}')}
{launcher} sh -c "$create" create {words} || exit {EXIT_MISTAKE}"""


def check_bundle(bundle: Path) -> None:
    """Refuse what is neither a bundle nor a directory of wheels, before anything is sent."""
    if bundle.is_file():
        with BundleFile(bundle) as opened:
            opened.check_packages()
    elif not bundle.is_dir() or not any(bundle.glob("*.whl")):
        raise Mistake(f"fleet.ssh.bundle: {bundle} has no wheels; make a bundle with `packtrain bundle JOB`")


def write_archive(bundle: Path | None, output: IO[bytes]) -> None:
    """Write a tar of our own wheel, the constraints, the wheels of the bundle, and the script that installs them.

    The same bytes for the same source.
    """
    name, wheel = own_wheel()
    # A bundle has one version of each already, and the person has chosen its files.
    lines = {"constraints.txt": [] if bundle else constraints(), "digests.txt": [] if bundle else digests()}
    files = {path: "\n".join([*texts, ""]).encode() for path, texts in lines.items()}
    files |= {f"own/{name}": wheel, "identity.py": source()["identity.py"], "create.sh": _create_script().encode()}
    with tarfile.open(fileobj=output, mode="w") as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        if bundle is not None and bundle.is_file():
            with BundleFile(bundle) as opened:
                opened.copy_packages(tar)
            return
        for file in sorted(bundle.glob("*.whl")) if bundle else []:
            if not file.name.startswith("packtrain-"):  # our own wheel has exactly the source that runs here
                tar.add(file, f"wheels/{file.name}", recursive=False)
