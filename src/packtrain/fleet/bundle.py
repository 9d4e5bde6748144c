"""The bundle: one tar with everything that a network without internet needs to train a job.

    NAME/install.sh                     makes the environment, after checking every file
    NAME/wheels, tools, own             every package, pip, and this Packtrain
    NAME/requirements.txt sbom.cdx.json the wheels with their hashes
    NAME/job/job.yaml ...               the job, with its code beside it
    NAME/store/packs/... files/...      a store with the job's pack; with a run, also runs/RUN and a checkpoint
    NAME/SHA256SUMS                     the hash of every file, last: without it the bundle is incomplete

The same contents give the same bytes. Files are copied one by one, however many gigabytes they are.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet.scripts import script_text
from packtrain.fleet.wheels import INSTALL, LOCK, SBOM, TOOLS, WHEELS, WheelSet, WheelTarget
from packtrain.pack.manifest import Manifest, pack_key
from packtrain.run.checkpoint import Checkpoint, committed
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.system import cache_directory

SUMS = "SHA256SUMS"
_CHUNK = 1 << 20
_MAX_SUMS_BYTES = 64 << 20
_SUM = re.compile(r"([0-9a-f]{64})  (.+)")
# Of a run's folder: who was alive, and what machines printed and used, is of no use elsewhere.
_RUN_FILES = re.compile(r"(?:job\.json|code\.tar\.zst|pack\.txt|result\.json|(?:generations|events|metrics|time)/.+)")


class BundleWriter:
    """A tar that is written file by file and gets its name when it is complete."""

    def __init__(self, tar: tarfile.TarFile, root: str) -> None:
        self._tar, self._root = tar, root
        self.sums: dict[str, str] = {}  # of what is in it so far

    def add_bytes(self, name: str, data: bytes, mode: int = 0o644) -> None:
        self._add(name, io.BytesIO(data), len(data), mode)
        self.sums[name] = hashlib.sha256(data).hexdigest()

    def add_file(self, name: str, path: Path, sha256: str | None = None) -> None:
        """Add a file; one that does not have the expected digest is refused."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 is not None and digest != sha256:
                raise PacktrainError(f"{name}: does not have the hash that its manifest says; is the store damaged?")
            file.seek(0)
            self._add(name, file, path.stat().st_size, 0o644)
        self.sums[name] = digest

    def add_object(self, store: Store, key: str, sha256: str | None = None) -> None:
        """Add an object of a store, by way of a file: one at a time is on the disk."""
        with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
            copy = Path(scratch) / "object"
            store.get_file(key, copy)
            self.add_file(f"store/{key}", copy, sha256)

    def _add(self, name: str, file: IO[bytes], size: int, mode: int) -> None:
        entry = tarfile.TarInfo(f"{self._root}/{name}")
        entry.size, entry.mode = size, mode
        self._tar.addfile(entry, file)


@contextmanager
def new_bundle(file: Path, root: str) -> Iterator[BundleWriter]:
    """Write a bundle; after an error or a kill there is none of that name, rather than half of one."""
    if not file.parent.is_dir():
        raise Mistake(f"--output {file}: there is no directory {file.parent}")
    unfinished = file.with_name(f".{file.name}.part")
    try:
        with tarfile.open(unfinished, "w", format=tarfile.PAX_FORMAT) as tar:
            writer = BundleWriter(tar, root)
            yield writer
            lines = [f"{digest}  {name}\n" for name, digest in sorted(writer.sums.items())]
            writer.add_bytes(SUMS, "".join(lines).encode())
        unfinished.replace(file)
    except OSError as error:
        raise Mistake(f"{file}: {error.strerror or error}; free some space, or choose another place") from None
    finally:
        unfinished.unlink(missing_ok=True)


def add_wheels(writer: BundleWriter, wheels: WheelSet, target: WheelTarget, identity: str, run: str | None) -> None:
    hints = ['echo "  cd $PWD"', 'echo "  $program run job/job.yaml"']
    if run is not None:
        hints.append(f'echo "  $program resume {run} --trust-code      # or continue the run, from its checkpoint"')
    script = script_text(
        "install.sh",
        identity=identity,
        python=target.python,
        version=target.python.replace(".", ", "),
        machine=target.machine,
        pip=wheels.pip.file,
        install=INSTALL,
        own=wheels.own.file,
        own_digest=wheels.own.sha256,
        hints="\n".join(hints),
    )
    writer.add_bytes("install.sh", script.encode(), 0o755)
    for name in (LOCK, SBOM):
        writer.add_file(name, wheels.directory / name)
    folders = {TOOLS: (wheels.pip,), "own": (wheels.own,), WHEELS: wheels.wheels}
    for folder, packages in folders.items():
        for wheel in packages:
            writer.add_file(f"{folder}/{wheel.file}", wheels.directory / folder / wheel.file, wheel.sha256)


def add_pack(writer: BundleWriter, store: Store, manifest: Manifest) -> None:
    for file in manifest.files():
        writer.add_object(store, pack_key(manifest.name, file.name), file.sha256)
    writer.add_object(store, pack_key(manifest.name, "manifest.json"))  # last, as in every store


def add_run(writer: BundleWriter, run: Run) -> Checkpoint | None:
    """Add a run's job, code and history, and its newest checkpoint; return that checkpoint."""
    newest = next(iter(reversed(committed(run))), None)
    for entry in run.store.list(run.key("")):
        if _RUN_FILES.fullmatch(entry.key.removeprefix(run.key(""))):
            writer.add_object(run.store, entry.key)
    if newest is not None:
        place = f"checkpoints/{newest.name}"
        for file in newest.files:
            writer.add_object(run.store, run.key(f"{place}/files/{file.name}"), file.sha256)
        writer.add_object(run.store, run.key(f"{place}/manifest.json"))
    return newest


class BundleFile:
    """A finished bundle, read for its packages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._tar = tarfile.open(path, "r:")  # noqa: SIM115 - closed by `__exit__`
            self._members = {self._name(member): member for member in self._tar}
        except (OSError, tarfile.TarError) as error:
            raise Mistake(f"{path}: is not a bundle ({error}); make it with `packtrain bundle`") from None
        self._sums = dict(self._read_sums())

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def names(self, *folders: str) -> list[str]:
        return sorted(name for name in self._members if name.partition("/")[0] in folders)

    def check_packages(self) -> None:
        """Refuse a bundle without wheels."""
        if LOCK not in self._members or not self.names(WHEELS):
            raise Mistake(f"{self.path}: has no wheels; make it again with `packtrain bundle`")

    def check_own(self, wheel: bytes) -> None:
        """Refuse a bundle whose Packtrain is not this one."""
        self.check_packages()
        digests = [self._sums.get(name) for name in self.names("own")]
        if digests != [hashlib.sha256(wheel).hexdigest()]:
            raise Mistake(f"{self.path}: has another Packtrain than this one; make it again, or run the one in it")

    def copy_packages(self, tar: tarfile.TarFile) -> None:
        """Add the wheels, pip and the lock to a tar, each of them checked, but not the bundle's own Packtrain."""
        self.check_packages()
        for name in (LOCK, *self.names(TOOLS, WHEELS)):
            reader = self._tar.extractfile(self._members[name])
            assert reader is not None  # only files are members
            entry, digest = tarfile.TarInfo(name), hashlib.sha256()
            with tempfile.TemporaryFile(dir=cache_directory()) as file:
                while chunk := reader.read(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                if digest.hexdigest() != self._sums.get(name):
                    raise Mistake(f"{self.path}: {name} is damaged; copy the bundle again")
                entry.size = file.tell()
                file.seek(0)
                tar.addfile(entry, file)

    def _name(self, member: tarfile.TarInfo) -> str:
        folders = PurePosixPath(member.name).parts
        if not member.isfile() or len(folders) < 2 or ".." in folders or folders[0] == "/":
            raise Mistake(f"{self.path}: is not a bundle; make it with `packtrain bundle`")
        return "/".join(folders[1:])

    def _read_sums(self) -> Iterator[tuple[str, str]]:
        member = self._members.get(SUMS)
        reader = None if member is None else self._tar.extractfile(member)
        if member is None or reader is None or member.size > _MAX_SUMS_BYTES:
            raise Mistake(f"{self.path}: has no {SUMS}, so it is incomplete; copy it again")
        for line in reader.read().decode(errors="replace").splitlines():
            match = _SUM.fullmatch(line)
            if match is not None:
                yield match[2], match[1]
