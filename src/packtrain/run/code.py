"""The snapshot of the user's code that a run carries: a compressed tar of regular files."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Set
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from packtrain.errors import Mistake, PacktrainError
from packtrain.units import show_bytes

MAX_BYTES = 20_000_000
_NEVER = {".git", "__pycache__", "node_modules", ".venv", "venv", ".ssh", ".aws", ".gnupg"}  # even if git lists them
_SECRETS = (
    ".env", ".env.*", ".netrc", ".npmrc", ".pypirc", "credentials", "credentials.*", "*.pem", "*.key", "*.p12", "*.pfx",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
)  # fmt: skip


def snapshot(directory: Path, leave_out: Path | None = None, max_bytes: int = MAX_BYTES) -> bytes:
    """Pack the files that git does not ignore (all, without git), except those that may hold keys.

    `leave_out` is a folder that is not code, such as a store beside the job file. The same files give the same bytes:
    names are sorted, owners and times omitted.
    """
    # Explicitly, because a store inside the directory is often not in .gitignore.
    candidates = [path for path in _candidates(directory) if leave_out is None or leave_out not in path.parents]
    paths = sorted(path for path in candidates if _wanted(directory, path))
    total = sum(path.stat().st_size for path in paths)
    if total > max_bytes:
        largest = max(paths, key=lambda path: path.stat().st_size)
        raise Mistake(
            f"the code in {directory} is {show_bytes(total)}, more than {show_bytes(max_bytes)} (largest:"
            f" {largest.relative_to(directory)}); point `code:` to a smaller directory or exclude data in .gitignore"
        )
    files = {str(path.relative_to(directory)): path for path in paths}
    executable = {name for name, path in files.items() if path.stat().st_mode & 0o100}
    return archive({name: path.read_bytes() for name, path in files.items()}, executable)


def archive(files: Mapping[str, bytes], executable: Set[str] = frozenset()) -> bytes:
    import zstandard

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if name in executable else 0o644
            tar.addfile(entry, io.BytesIO(data))
    return zstandard.ZstdCompressor(level=9).compress(buffer.getvalue())


def unpack(data: bytes, directory: Path, max_bytes: int = 4 * MAX_BYTES) -> None:
    """Write the snapshot's files. Anything but regular files inside the directory is refused.

    The default limit leaves room for many small files, which take more space in a tar.
    """
    import zstandard

    try:
        # Not decompress(): it allocates the size that the data claims.
        content = zstandard.ZstdDecompressor().stream_reader(data).read(max_bytes + 1)
        if len(content) > max_bytes:
            raise PacktrainError(f"the run's code is larger than {show_bytes(max_bytes)} unpacked; refusing it")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for entry in tar:
                name = PurePosixPath(entry.name)
                if not entry.isfile() or entry.issparse() or name.is_absolute() or ".." in name.parts:
                    raise PacktrainError(f"the run's code has an unsafe entry {entry.name!r}; refusing it")
                path = directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                # Written by hand instead of with `extract`, which would apply owners, modes and links of the archive.
                reader = tar.extractfile(entry)
                assert reader is not None
                path.write_bytes(reader.read())
                path.chmod(0o755 if entry.mode & 0o100 else 0o644)
    except (zstandard.ZstdError, tarfile.TarError, OSError, ValueError) as error:
        raise PacktrainError(f"cannot unpack the run's code: {error}") from error


def _candidates(directory: Path) -> Iterable[Path]:
    try:
        listed = subprocess.run(
            ["git", "-C", str(directory), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:  # git is not installed
        return directory.rglob("*")
    if listed.returncode == 0:
        return [directory / name for name in os.fsdecode(listed.stdout).split("\0") if name]
    return directory.rglob("*")


def _wanted(directory: Path, path: Path) -> bool:
    parts = path.relative_to(directory).parts
    return (
        not any(part in _NEVER or part.endswith(".egg-info") for part in parts)
        and not any(fnmatchcase(path.name, pattern) for pattern in _SECRETS)
        and path.is_file()
        and not path.is_symlink()
    )
