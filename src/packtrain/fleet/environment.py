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

# $1...: candidates. Prints the Python, and its module that ends nodes. Any version is accepted, also with the name that
# the module had in older ones: nodes of an older client must be found and ended, too. Without Packtrain and without a
# node, the client was stopped before it installed it: nothing is there to list or end.
_FIND_ANY = f"""
{_ADD_FROM_PATH}
for python in "$@" "{_CACHE}"/*/bin/python; do
  case $python in "~/"*) python=$HOME/${{python#"~/"}};; esac
  for module in {MODULE} packtrain.fleet.local; do
    "$python" -P -c "from $module import find_processes" 2>/dev/null && {{ echo "$python"; echo "$module"; exit 0; }}
  done
done
for process in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < "$process"; echo; done 2>/dev/null |
  grep -q 'packtrain.* nod[e] ' || {{ echo none; echo none; exit 0; }}
echo 'a node runs there, but packtrain is not installed; was its environment removed?' >&2; exit 1
"""

# $1: the expected identity. $2: -, or "offline". Standard input: a tar of own/ (the wheel of Packtrain), wheels/,
# constraints.txt, and identity.py with digests.txt to check what was installed; of a bundle also its lock and pip.
# $3: or else, the path of a bundle on this machine.
# Another run may create the same environment at the same time, here or on a machine that shares the home directory:
# each builds in a directory of its own and renames it; the first rename wins, and an environment that fits is kept.
_CREATE = f"""
set -eu
expected=$1
{_FITS}
umask 077
home="{_CACHE}"; mkdir -p "$home"
part=$(mktemp -d "$home/part-XXXXXX"); trap 'rm -rf "$part"' EXIT
if [ -n "${{3:-}}" ]; then # without the bundle's store, which may be large
  tar -x -C "$part" -f "$3" --strip-components 1 --wildcards --exclude '*/store/*' --exclude '*/job/*'
  (cd "$part" && sha256sum --check --quiet --ignore-missing {SUMS} >&2) || {{ echo "$3 is damaged" >&2; exit 1; }}
else
  tar -x -C "$part"
fi
mkdir -p "$part/wheels"
lock=$part/{LOCK}
if [ -f "$lock" ]; then # a bundle is for one version of Python, and brings pip
  wanted=$(sed -n '1s/^# Python \\([0-9.]*\\) .*/\\1/p' "$lock")
  pythons="python$wanted python3" check='import sys, venv; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])'
else
  wanted='>= 3.11 with venv' pythons="python3.13 python3.12 python3.11 python3"
  check='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
fi
for python in $pythons none; do
  "$python" -I -c "$check" "$wanted" 2>/dev/null && break
done
[ "$python" != none ] || {{ echo "no Python $wanted; install one, or set python in the fleet" >&2; exit 1; }}
# By its path, never by its name: an index or a bundle may have another, newer package of that name, and the node that
# starts from this environment is sent the job's secrets.
wheel=$(echo "$part"/own/*.whl)
if [ -f "$lock" ]; then
  "$python" -I -m venv --without-pip "$part/made"
  pip() {{ "$part/made/bin/python" "$(echo "$part"/{TOOLS}/pip-*.whl)/pip" {INSTALL} "$@" >&2; }}
  pip --require-hashes --find-links "$part/wheels" --requirement "$lock"
  pip "$wheel"
else
  "$python" -I -m venv "$part/made"
  offline=; [ "$2" = offline ] && offline=--no-index
  "$part/made/bin/python" -I -m pip install --quiet --disable-pip-version-check --no-input $offline \\
    --only-binary :all: --find-links "$part/wheels" --constraint "$part/constraints.txt" "$wheel[train]" \\
    > "$part/errors" 2>&1 || {{
    cat "$part/errors" >&2
    # pip's last words are that a package does not exist.
    ! grep -Eq '{NO_INDEX.pattern}' "$part/errors" || echo 'cannot reach the package index from there;' \\
      'make a bundle with `packtrain bundle JOB` and set fleet.ssh.bundle, or set python in the fleet' >&2
    exit 1
  }}
fi
# With a Python that has none of these packages: as soon as theirs starts, it may run code of them.
[ -f "$lock" ] || \\
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
        [path] = remote.script(FIND, [identity(), sys.executable])
        return None if path == "none" else path
    path, theirs = remote.script(_IDENTIFY, [python], lines=2)
    if theirs != identity():
        fault = f"{python} has packtrain {theirs}, this machine has {identity()}; install the same version there"
        raise Unreachable(remote.name, fault)
    return path


def find_any(remote: Remote, python: str | None) -> Host | None:
    """Return the host with any version of Packtrain, to list and end nodes; None if it has neither."""
    path, module = remote.script(_FIND_ANY, [python or sys.executable], lines=2)
    return None if path == "none" else Host(remote, path, module)


def create(remote: Remote, bundle: Path | None) -> str:
    """Install this Packtrain there, and its dependencies in the versions of the bundle or of this machine."""
    mode = "-" if bundle is None else "offline"
    # By way of a file: with CUDA the wheels have several gigabytes.
    with tempfile.TemporaryFile(dir=cache_directory()) as file:
        file.write(_CREATE.encode())
        write_archive(bundle, file)
        file.seek(0)
        return remote.script(_CREATE, [identity(), mode], file, CREATE_SECONDS)[0]


def create_commands(bundle: Path, launcher: str) -> str:
    """Return lines of a shell script that create the environment from a bundle and set `python` to its Python.

    `launcher` runs a command on every machine; all of them see the bundle under the same path.
    """
    words = shlex.join([identity(), "offline", str(bundle.absolute())])
    assignment = f'python="{_CACHE}/{identity()}/bin/python"'
    return f"""{assignment}
create={shlex.quote(f'{assignment}; [ -x "$python" ] || {{ {_CREATE} }}')}
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
    files |= {f"own/{name}": wheel, "identity.py": source()["identity.py"], "create.sh": _CREATE.encode()}
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
