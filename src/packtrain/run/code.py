"""The snapshot of the user's code that a run carries: a compressed tar of regular files."""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packtrain.errors import Mistake, PacktrainError
from packtrain.files import FileLock
from packtrain.job.secrets import KEY_FOLDERS, find_secret, is_source, keeps_keys, suggests_keys
from packtrain.store.base import IDENTITY
from packtrain.system import cache_directory
from packtrain.units import counted, show_bytes

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

GITIGNORE = ".gitignore"
IGNORE = ".packtrainignore"  # in the directory of the code
MAX_BYTES = 20_000_000
MAX_SNAPSHOT_BYTES = 4 * MAX_BYTES  # many small files take more space in a tar
MAX_PLACES = 20_000  # files and folders: each takes an inode on every machine, however small it is
_NAME_LENGTH = 4096  # longer paths cannot be made
_MODE_BITS = 0o755  # what a snapshot keeps of a file's mode: nothing that differs with the umask of two machines
_NOT_CODE_FOLDERS = {".git", ".packtrain", "__pycache__", "node_modules", ".venv", "venv"}
_STORE_FOLDERS = {"runs", "packs", "files"}
# Why a file is left out.
_KEYS, _NOT_CODE, _GONE, _BY_GITIGNORE = "may hold keys", "not code", "deleted", f"named in {GITIGNORE}"
_UNTRACKED = "not tracked by git or named in the job"
_NAMED = 3  # files that the summary names for each reason
_LOCK, _TRIES = ".lock", 100
_USED: dict[Path, FileLock] = {}  # directories with code that this process may import


@dataclass(frozen=True)
class CodeSnapshot:
    """An archive, the size of every file in it, and why other files are not: `left_out` names folders once."""

    archive: bytes
    sizes: Mapping[str, int]
    left_out: Mapping[str, str]

    @property
    def summary(self) -> str:
        """Return in one line what was taken and what was not."""
        text = f"{counted(len(self.sizes), 'file')} of code ({show_bytes(sum(self.sizes.values()))})"
        reasons = dict.fromkeys(why for why in self.left_out.values() if why != _NOT_CODE)
        groups = [f"{', '.join(self._named(why))} ({why})" for why in reasons]
        return f"{text}; left out: {'; '.join(groups)}" if groups else text

    def _named(self, why: str) -> list[str]:
        names = [name for name, reason in self.left_out.items() if reason == why]
        return [*names[:_NAMED], f"{len(names) - _NAMED} more"] if len(names) > _NAMED else names


def snapshot(directory: Path, paths: Sequence[str] = (), max_bytes: int = MAX_BYTES) -> CodeSnapshot:
    """Pack the files that git tracks, those at `paths`, which the job's command names, and other source code.

    Without git these are all files that no .gitignore names. Those that may hold keys are left out. Folders whose names
    start with a dot are left out unless git tracks a file in them: tools keep tokens there. A file with a secret in its
    text is refused: a program may need the file. Stores are not code, whichever of them the job uses, and even if the
    directory is one. The same files give the same bytes: names are sorted, owners and times omitted.
    """
    names, left_out = _candidates(directory, paths)
    sizes = {name: (directory / name).lstat().st_size for name in sorted(names)}
    if sum(sizes.values()) > max_bytes:
        raise Mistake(
            f"the code in {directory} is {show_bytes(sum(sizes.values()))}, more than {show_bytes(max_bytes)} (largest:"
            f" {max(sizes, key=sizes.__getitem__)}); point `code:` to a smaller directory, or name data in {GITIGNORE}"
            f" or {IGNORE}"
        )
    if len({place for name in sizes for place in _places(PurePosixPath(name))}) > MAX_PLACES:
        raise Mistake(
            f"the code in {directory} has more than {MAX_PLACES:,} files and folders; point `code:` to a smaller"
            f" directory, or list folders in {GITIGNORE} or {IGNORE}"
        )
    files = {name: _read(directory / name) for name in sizes}
    exceptions = _ignored(directory)
    for name, (data, _) in files.items():
        # No encoding hides the ASCII of a token, except UTF-16.
        encoding = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin-1"
        secret = None if _matches(name, exceptions.allowed) else find_secret(data.decode(encoding, "replace"))
        if secret is not None:
            raise Mistake(
                f"{directory / name}: contains {secret}, and code is copied into the store; read it from a variable"
                f" that the job lists under `environment`, or list the file in {directory / IGNORE} (after a ! if it"
                " is not a secret)"
            )
    modes = {name: mode for name, (_, mode) in files.items()}
    return CodeSnapshot(archive({name: data for name, (data, _) in files.items()}, modes), sizes, left_out)


def _read(path: Path) -> tuple[bytes, int]:
    """Return contents and mode; never through a link that took the file's place since it was listed."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mode & _MODE_BITS
    except OSError as error:
        raise Mistake(f"{path}: cannot read it for the run's code: {error.strerror}; name it in {IGNORE}") from error


def _places(name: PurePosixPath) -> tuple[PurePosixPath, ...]:
    return name, *name.parents


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

    def write(self, path: Path) -> None:
        path.write_bytes(self.data)
        path.chmod(self.mode)


def files_of(data: bytes, max_bytes: int = MAX_SNAPSHOT_BYTES) -> Iterator[CodeFile]:
    """Yield the snapshot's files. Anything but regular files inside the directory is refused."""
    import zstandard

    try:
        # Not decompress(): it allocates the size that the data claims.
        content = zstandard.ZstdDecompressor().stream_reader(data).read(max_bytes + 1)
        if len(content) > max_bytes:
            raise PacktrainError(f"the run's code is larger than {show_bytes(max_bytes)} unpacked; refusing it")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            # All names first: what is refused leaves no file behind.
            entries: list[tuple[PurePosixPath, tarfile.TarInfo]] = []
            places: set[PurePosixPath] = set()
            for entry in tar:
                name = PurePosixPath(entry.name)
                is_outside = name.is_absolute() or ".." in name.parts
                if not entry.isfile() or entry.issparse() or is_outside or len(entry.name) > _NAME_LENGTH:
                    raise PacktrainError(f"the run's code has an unsafe entry {entry.name[:100]!r}; refusing it")
                entries.append((name, entry))
                places.update(_places(name))
                if len(places) > MAX_PLACES:
                    raise PacktrainError(f"the run's code has more than {MAX_PLACES:,} files and folders; refusing it")
            for name, entry in entries:
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
            file.write(path)
    except (OSError, ValueError) as error:
        raise PacktrainError(f"cannot unpack the run's code: {error}") from error


def unpacked(data: bytes) -> Path:
    """Return the directory on this machine with the snapshot's files, written on first use.

    It stays as long as this process lives, which may import from it at any time.
    """
    directory = cache_directory() / "code" / hashlib.sha256(data).hexdigest()
    directory.parent.mkdir(parents=True, exist_ok=True)
    _hold(directory)
    if not directory.exists():
        fresh = Path(tempfile.mkdtemp(prefix="unpacking-", dir=directory.parent))
        try:
            unpack(data, fresh)
            with suppress(OSError):  # another process was first
                fresh.rename(directory)  # atomic: other processes see all of it or nothing
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    with suppress(OSError):  # a read-only file system
        os.utime(directory)  # the time of its last use
    return directory


def _hold(directory: Path) -> None:
    """Keep `remove_unpacked` from removing a directory until this process ends."""
    for _ in range(_TRIES):
        if directory in _USED:
            return
        try:
            directory.with_suffix(_LOCK).touch(mode=0o600)
            _USED[directory] = FileLock(directory.with_suffix(_LOCK), shared=True)
        except FileNotFoundError:  # it was removed at this moment, with its lock
            continue
        except OSError:  # a read-only file system, where nobody removes it either
            return


def remove_unpacked(directory: Path) -> bool:
    """Remove a directory that `unpacked` has made, unless a process uses it; True if it is gone."""
    try:
        with FileLock(directory.with_suffix(_LOCK), wait=False):
            shutil.rmtree(directory, ignore_errors=True)
            directory.with_suffix(_LOCK).unlink(missing_ok=True)
    except OSError:
        return False
    return not directory.exists()


def _candidates(directory: Path, paths: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of the files to take, and of what is left out with the reason."""
    left_out: dict[str, str] = {}
    names: list[str] = []
    tracked, untracked = _git_files(directory, "--cached"), _git_files(directory, "--others", "--exclude-standard")
    tracked, untracked = tracked or [], untracked or []
    if not tracked and not untracked:  # there is no git, or the repository around this directory ignores it
        untracked = list(_walk(directory, left_out))
    exceptions, in_git, named = _ignored(directory), set(tracked), set(paths)
    for name in [*tracked, *untracked]:
        path, parents = PurePosixPath(name), [str(parent) for parent in PurePosixPath(name).parents][:-1]
        subject, why = name, ""
        for folder in reversed(parents):  # the outermost folder that is left out stands for all files in it
            why = _why_no_folder(directory / folder, name in in_git)
            if why:
                subject = f"{folder}/"
                break
        is_named = any(place in named for place in (name, *parents))
        why = why or _why_no_file(directory / name, is_named)
        # Nothing is added yet in a new repository, and in a folder that somebody's repository does not know.
        is_code = is_source(path.name) or path.name in (IGNORE, GITIGNORE)
        if not why and tracked and not (name in in_git or is_named or is_code):
            why = _UNTRACKED
        if why in (_KEYS, _UNTRACKED) and _matches(name, exceptions.allowed):
            why, subject = "", name
        if not why and _matches(name, exceptions.left_out):
            why = f"named in {IGNORE}"
        if why:
            left_out[subject] = why
        else:
            names.append(name)
    return names, {name: why for name, why in left_out.items() if why != _GONE}


def _is_store(path: Path) -> bool:
    """True for a store in a directory, and for a copy that another tool made of one: that may lack the id."""
    if (path / IDENTITY).is_file():
        return True
    return any(any(path.glob(pattern)) for pattern in ("runs/*/code.tar.zst", "packs/*/train-*.safetensors"))


def _why_no_folder(path: Path, is_tracked: bool) -> str:
    if path.name in _NOT_CODE_FOLDERS or path.name.endswith(".egg-info") or _is_store(path):
        return _NOT_CODE
    if path.name in _STORE_FOLDERS and _is_store(path.parent):  # the directory of the code is a store, too
        return _NOT_CODE
    if path.name in KEY_FOLDERS:
        return _KEYS
    return "hidden, not tracked by git" if path.name.startswith(".") and not is_tracked else ""


def _why_no_file(path: Path, is_named: bool) -> str:
    if path.name == IDENTITY:
        return _NOT_CODE
    if keeps_keys(path.name) or (not is_named and suggests_keys(path.name)):
        return _KEYS
    if path.is_symlink():
        return "a link"
    if not path.exists():
        return _GONE
    return "" if path.is_file() else "not a regular file"


@dataclass(frozen=True)
class _Exceptions:
    """Patterns of the directory's own list: what to leave out, and after a `!` what is no secret."""

    left_out: Sequence[str]
    allowed: Sequence[str]


def _ignored(directory: Path) -> _Exceptions:
    """Read the directory's own list: names or paths with wildcards, one per line."""
    path = directory / IGNORE
    lines = _lines(path) if path.exists() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return _Exceptions(
        [pattern.strip("/") for pattern in patterns if not pattern.startswith("!")],
        [pattern[1:].strip("/") for pattern in patterns if pattern.startswith("!")],
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    places = (name, path.name, *(str(parent) for parent in path.parents[:-1]))
    return any(fnmatchcase(place, pattern) for pattern in patterns for place in places)


def _walk(directory: Path, left_out: dict[str, str]) -> Iterator[str]:
    """Yield the names of all files, except those that are ignored or in folders that are left out.

    Such a folder is not entered: it may have many thousands of files.
    """
    rules: dict[Path, GitIgnoreSpec] = {}
    for folder, folders, files in os.walk(directory):
        place = Path(folder).relative_to(directory)
        if GITIGNORE in files:
            rules[place] = _git_rules(directory / place / GITIGNORE)
        for name in list(folders):
            path = Path(folder) / name
            why = "a link" if path.is_symlink() else _why_no_folder(path, is_tracked=False)
            why = why or (_BY_GITIGNORE if _git_ignores(rules, place / name, is_folder=True) else "")
            if why:
                left_out[f"{place / name}/"] = why
                folders.remove(name)
        for name in files:
            if _git_ignores(rules, place / name, is_folder=False):
                left_out[str(place / name)] = _BY_GITIGNORE
            else:
                yield str(place / name)


def _git_rules(path: Path) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(_lines(path))
    except ValueError as error:
        raise Mistake(f"{path}: cannot read it: {error}") from error


def _lines(path: Path) -> list[str]:
    if not path.is_file():  # a pipe would block
        raise Mistake(f"{path}: is not a regular file")
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise Mistake(f"{path}: cannot read it: {error}") from error


def _git_ignores(rules: Mapping[Path, GitIgnoreSpec], path: Path, is_folder: bool) -> bool:
    """True if the rules that apply to a path, which is relative to the code, ignore it; the nearest ones decide."""
    for folder in path.parents:
        if folder in rules:
            ignored = rules[folder].check_file(f"{path.relative_to(folder)}{'/' if is_folder else ''}").include
            if ignored is not None:
                return ignored
    return False


def git_commit(directory: Path) -> tuple[str, int]:
    """Return the commit that a directory is at, and how many of its tracked files differ; "" and 0 without git."""
    commit = _git(directory, "rev-parse", "--verify", "--quiet", "HEAD")
    if commit is None or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", commit.strip()):
        return "", 0
    # A repository's own configuration may name programs as filters, which git would run to compare files.
    listed = _git(directory, "config", "--name-only", "-z", "--get-regexp", r"^filter\..*\.(clean|process)$") or ""
    names = [name for name in listed.split("\0") if name]
    if any("=" in name for name in names):  # `-c` could not switch it off
        return "", 0
    no_filters = [word for name in names for word in ("-c", f"{name}=")]
    words = ("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames")
    # Not in submodules: their configuration may name other filters.
    changed = _git(directory, *words, "--ignore-submodules=dirty", before=no_filters)
    return commit.strip(), len([entry for entry in (changed or "").split("\0") if entry])


def _git_files(directory: Path, *options: str) -> list[str] | None:
    """Return the files that git lists; None if it is not installed, or the directory is not in a repository."""
    listed = _git(directory, "ls-files", "-z", *options)
    return None if listed is None else [name for name in listed.split("\0") if name]


def _git(directory: Path, *words: str, before: Sequence[str] = ()) -> str | None:
    """Return what git prints; None if it is not installed, or refuses.

    A repository that somebody else has made must not start a program: not as its file system monitor, not as a hook
    (when git updates the index), and not to connect to a server (when it fetches what is missing).
    """
    no_programs = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
    command = ["git", "--no-optional-locks", *no_programs, *before, "-C", str(directory), *words]
    try:
        git = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "GIT_ALLOW_PROTOCOL": ""})
    except FileNotFoundError:
        return None
    return os.fsdecode(git.stdout) if git.returncode == 0 else None
