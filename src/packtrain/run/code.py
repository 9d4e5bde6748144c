"""The snapshot of the user's code that a run carries: a compressed tar of regular files."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from packtrain.errors import Mistake, PacktrainError
from packtrain.system import cache_directory
from packtrain.units import show_bytes

MAX_BYTES = 20_000_000
MAX_SNAPSHOT_BYTES = 4 * MAX_BYTES  # many small files take more space in a tar
_MODE_BITS = 0o755  # what a snapshot keeps of a file's mode: nothing that differs with the umask of two machines
_NEVER = {
    ".git", "__pycache__", "node_modules", ".venv", "venv",
    ".ssh", ".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".huggingface", ".kube", ".terraform",
}  # fmt: skip
"""Folders that are left out even if git tracks them."""
_SECRETS = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", ".npmrc", ".pypirc", ".pgpass", ".boto", ".s3cfg", ".htpasswd",
    ".git-credentials", ".vault-token", ".*_history", "credentials", "credentials.*", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", "secrets.env", "secrets.ini", "secrets.json", "secrets.toml", "secrets.yaml", "secrets.yml",
    "service-account*.json", "service_account*.json", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks",
    "*.keystore", "*.kdbx", "*.ovpn", "*.tfstate", "*.tfstate.*",
)  # fmt: skip
"""Names that may hold keys, in lower case; left out even if git tracks them."""


def snapshot(directory: Path, leave_out: Path | None = None, max_bytes: int = MAX_BYTES) -> bytes:
    """Pack the files that git does not ignore (all, without git), except those that may hold keys.

    Folders whose names start with a dot are left out unless git tracks a file in them: tools keep tokens there.
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
    modes = {name: path.stat().st_mode & _MODE_BITS for name, path in files.items()}
    return archive({name: path.read_bytes() for name, path in files.items()}, modes)


def archive(files: Mapping[str, bytes], modes: Mapping[str, int] | None = None) -> bytes:
    import zstandard

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), (modes or {}).get(name, 0o644)
            tar.addfile(entry, io.BytesIO(data))
    return zstandard.ZstdCompressor(level=9).compress(buffer.getvalue())


@dataclass(frozen=True)
class CodeFile:
    name: str
    mode: int
    data: bytes


def files_of(data: bytes, max_bytes: int = MAX_SNAPSHOT_BYTES) -> Iterator[CodeFile]:
    """Yield the snapshot's files. Anything but regular files inside the directory is refused."""
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
                reader = tar.extractfile(entry)
                assert reader is not None
                yield CodeFile(str(name), entry.mode & _MODE_BITS | 0o600, reader.read())
    except (zstandard.ZstdError, tarfile.TarError, ValueError) as error:
        raise PacktrainError(f"cannot unpack the run's code: {error}") from error


def unpack(data: bytes, directory: Path, max_bytes: int = MAX_SNAPSHOT_BYTES) -> None:
    """Write the snapshot's files by hand: `extract` would apply owners, modes and links of the archive."""
    try:
        for file in files_of(data, max_bytes):
            path = directory / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            path.chmod(file.mode)
    except (OSError, ValueError) as error:
        raise PacktrainError(f"cannot unpack the run's code: {error}") from error


def unpacked(data: bytes) -> Path:
    """Return the directory on this machine with the snapshot's files, written on first use."""
    directory = cache_directory() / "code" / hashlib.sha256(data).hexdigest()
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="unpacking-", dir=directory.parent))
        try:
            unpack(data, fresh)
            with suppress(OSError):  # another process was first
                fresh.rename(directory)  # atomic: other processes see all of it or nothing
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return directory


def _candidates(directory: Path) -> list[Path]:
    tracked, others = _git_files(directory, "--cached"), _git_files(directory, "--others", "--exclude-standard")
    if tracked is None or others is None:
        tracked, others = [], list(directory.rglob("*"))
    return [*tracked, *(path for path in others if not _is_hidden(directory, path))]


def _git_files(directory: Path, *which: str) -> list[Path] | None:
    """Return the files that git lists; None if it is not installed, or the directory is not in a repository."""
    # A repository's own configuration may name a program as its file system monitor, which git would run.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(directory), "ls-files", "-z", *which]
    try:
        listed = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if listed.returncode != 0:
        return None
    return [directory / name for name in os.fsdecode(listed.stdout).split("\0") if name]


def _is_hidden(directory: Path, path: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(directory).parts[:-1])


def _wanted(directory: Path, path: Path) -> bool:
    parts = path.relative_to(directory).parts
    return (
        not any(part in _NEVER or part.endswith(".egg-info") for part in parts)
        and not any(fnmatchcase(path.name.lower(), pattern) for pattern in _SECRETS)
        and path.is_file()
        and not path.is_symlink()
    )
