"""The version of Packtrain and a digest of its source, so that two machines can tell whether they run the same code.

`python -m packtrain.identity` prints it. With a directory of packages and digests as lines of standard input, it checks
that packages from the same wheels have the same files: a package index may give another machine other files.

The module imports only the standard library and is outside of every package: it must work as a file of its own and in
an environment that is only half installed, and must be fast, because ssh asks several Pythons in turn.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, version
from pathlib import Path, PurePosixPath


@cache
def source() -> dict[str, bytes]:
    """Return every file of the installed package, in the same order everywhere. Read once, so that callers agree."""
    root = Path(__file__).parent
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return dict(sorted((path.relative_to(root).as_posix(), path.read_bytes()) for path in files))


@cache
def identity() -> str:
    digest = hashlib.sha256()
    for name, data in source().items():
        # The name ends with a NUL, so that no two sets of files give the same bytes.
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(data).digest())
    try:
        number = version("packtrain")
    except PackageNotFoundError:
        number = "0"
    return f"{number}-{digest.hexdigest()[:12]}"


def install_command(extra: str, *only: str) -> str:
    """Return the command that installs what an extra of Packtrain needs, or only some of it.

    By the names of those packages, not as `packtrain` with an extra: on an index that name may be somebody else's.
    """
    needed = (requirement.partition(";") for requirement in distribution("packtrain").requires or ())
    marked = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    packages = [name.strip() for name, _, marker in needed if marked.search(marker)]
    chosen = [name for name in packages if not only or re.split(r"[^\w.-]", name)[0] in only]
    return shlex.join(["pip", "install", *chosen])


# Files that an installer adds to those of the wheel.
_ADDED = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json"}


def wheel_of(package: Distribution) -> str | None:
    """Return the name, version and tags of the wheel that a package was installed from; None if not from a wheel."""
    installer, wheel = package.read_text("INSTALLER") or "", package.read_text("WHEEL")
    if wheel is None or installer.strip() not in ("pip", "uv"):  # conda and others build their own files
        return None
    tags = ",".join(sorted(re.findall(r"^Tag: *(\S+)", wheel, re.MULTILINE)))
    return f"{re.sub('[-_.]+', '-', package.metadata['Name']).lower()}=={package.version}({tags})"


def recorded_digest(package: Distribution) -> str:
    """Return a digest of the files of a package, as its installer has recorded them."""
    return _digest(package, lambda _, recorded: recorded.partition("=")[2])


def installed_digest(package: Distribution) -> str:
    """Return a digest of the files of a package, as they are."""
    return _digest(package, lambda file, _: _hash(Path(str(package.locate_file(file)))))


def _digest(package: Distribution, hash_of: Callable[[str, str], str]) -> str:
    lines = []
    # Not by `files`: some versions of that leave out what is missing, and some packages replace it by theirs.
    for path, recorded, *_ in csv.reader((package.read_text("RECORD") or "").splitlines()):
        file = PurePosixPath(path)
        name = re.sub(r"^(\.\./)+", "", path)
        is_added = file.name in _ADDED and file.parent.name.endswith(".dist-info")
        if is_added or "__pycache__" in file.parts:
            continue
        # Scripts begin with the path of their Python, which differs: their names count.
        lines.append(name if name.startswith("bin/") else f"{name}\0{hash_of(path, recorded)}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return base64.urlsafe_b64encode(hashlib.file_digest(opened, "sha256").digest()).rstrip(b"=").decode()


def altered(directory: str, expected: Iterable[str]) -> list[str]:
    """Return the packages of a directory whose files are not the expected ones; a line is a wheel and its digest."""
    digests = dict(line.split() for line in expected)
    packages = {wheel_of(package): package for package in distributions(path=[directory])}
    same = {wheel: package for wheel, package in packages.items() if wheel is not None and wheel in digests}
    return sorted(wheel for wheel, package in same.items() if installed_digest(package) != digests[wheel])


if __name__ == "__main__" and len(sys.argv) == 1:
    print(identity())
elif __name__ == "__main__":
    for wheel in altered(sys.argv[1], sys.stdin):
        sys.exit(f"the package index has other files than this machine's for {wheel}; check the index of that host")
