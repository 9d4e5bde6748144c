"""A board, or any machine that ssh reaches, as the place of a model. It needs a shell, and a program for SHA-256."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from packtrain.errors import Mistake, PacktrainError, quoted
from packtrain.export.deliver import (
    AGAIN,
    SPARE_BYTES,
    ConnectionLost,
    Destination,
    Staged,
    full_disk,
    missing_bytes,
    staging_name,
)
from packtrain.export.model import MAX_MANIFEST_BYTES
from packtrain.fleet.remote import SSH_FAILED, Remote, Unreachable, advice, last_line
from packtrain.run.checkpoint import StoredFile

_ANSWER = "packtrain-answer"  # what comes before it is a greeting of that machine
_ANSWER_SECONDS, _SLOWEST_BYTES_PER_SECOND = 120.0, 4 << 20  # of reading a file there for its digest
_POLL_SECONDS = 0.2


def _script(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


# Any sh, such as busybox's. $1: the directory above the model's, $2: its name, $3: the hidden name beside it.
_COMMON = "\n" + _script("board_common.sh")

# $4 ...: the digest of model.json, the names of the files. A sender whose connection was cut may live for a while and
# write what is still on its way: it ends before anything is measured.
_LOOK = _COMMON + "\n" + _script("board_look.sh")

# $4 ...: the name and the digest of every file. The folder of a model before goes when the new one has its name; where
# there is no Python to exchange the two names in one step, there is none for a moment.
_COMMIT = _COMMON + "\n" + _script("board_commit.sh")
_FORGET = _COMMON + 'rm -rf "$stage"; echo packtrain-answer\n'

# On the command line, since the file follows on standard input: one line that csh and fish pass on as well.
_SEND = 'LC_ALL=C; export LC_ALL; mkdir -p "${1%/*}" && echo $$ >"$0/.sender" && exec cat '

_FULL = re.compile("No space left on device|[Qq]uota exceeded")
# Patterns of the system's messages, and what to do about them.
_ADVICE = (
    ("Permission denied|not permitted", "permission denied; choose a directory that this user can write to"),
    ("Read-only file system", "the file system there is read-only; choose another directory"),
    ("Not a directory|File exists", "a part of the path is a file; choose another directory"),
)


@dataclass
class BoardDestination(Destination):
    """`path` is that of the model's folder; a relative one begins at the user's home."""

    host: str
    path: str
    where: str = field(init=False)

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path.removeprefix("~/"))
        self.where = f"{self.host}:{path}"
        if path.name in ("", "..") or str(path).startswith("~"):
            raise Mistake(f"--to {quoted(self.where)}: name a directory for the model, such as {self.host}:models/mine")
        parent = str(path.parent)
        # Neither may look like an option to a program there.
        self._place = (parent if parent.startswith("/") else f"./{parent}", path.name, staging_name(path.name))
        self._stage = f"{self._place[0]}/{self._place[2]}"
        self._remote, self._has_answered = Remote(self.host), False

    def look(self, files: Sequence[StoredFile]) -> Mapping[str, Staged] | None:
        names = [file.name for file in files]
        lines = self._script(_LOOK, [files[-1].sha256, *names], files)
        self._has_answered = True
        end = lines.index("manifest") if "manifest" in lines else len(lines)
        manifest = "\n".join(lines[end + 1 :]).encode() if end < len(lines) else None
        if "link" in lines[:end]:
            raise Mistake(f"{self.where}: is a symbolic link; name the directory that it leads to")
        if "file" in lines[:end]:
            raise Mistake(f"{self.where}: is a file; choose another name")
        if "foreign" in lines[:end]:
            raise Mistake(f"{self.host}: {self._stage} belongs to somebody else; choose another directory")
        digests: dict[str, str] = {}  # if the folder holds this model already
        staged: dict[str, Staged] = {}
        present, free = [], None  # all files of the folder; without df there nobody knows what is free
        for line in lines[:end]:
            word, _, detail = line.partition(" ")
            if word == "there":
                digest, _, name = detail.partition(" ")
                digests[name] = digest
            elif word == "staged":
                digest, size, name = detail.split(" ", 2)
                staged[name] = Staged(int(size), digest)
            elif word == "other":
                present.append(detail)
            elif word == "free" and detail.isdecimal():
                free = int(detail) * 1024
        if present:
            is_small = manifest is not None and len(manifest) <= MAX_MANIFEST_BYTES
            self.check_replaced(manifest if is_small else None, present)
        if all(digests.get(file.name) == file.sha256 for file in files):
            self._script(_FORGET, (), ())
            return None
        needed = missing_bytes(files, staged)
        if free is not None and needed > free - SPARE_BYTES:
            self._script(_FORGET, (), ())
            raise full_disk(self.where, needed, free - SPARE_BYTES)
        return staged

    def send(self, file: StoredFile, path: Path, start: int, moved: Callable[[int], None]) -> None:
        command = ["sh", "-c", f'{_SEND}{">>" if start else ">"}"$1"', self._stage, f"{self._stage}/{file.name}"]
        words = [*self._remote.arguments(), self._remote.words(command)]
        # ssh itself reads the file, from where it is told to; the two share the position in it.
        with path.open("rb", buffering=0) as source:
            position = source.seek(start)
            with subprocess.Popen(words, stdin=source, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
                try:
                    errors: bytes | None = None
                    while errors is None:
                        with suppress(subprocess.TimeoutExpired):
                            _, errors = process.communicate(timeout=_POLL_SECONDS)
                        before, position = position, os.lseek(source.fileno(), 0, os.SEEK_CUR)
                        moved(position - before)
                except BaseException:
                    process.kill()  # or leaving the block would wait for the rest of the file
                    raise
        error_text = errors.decode(errors="replace")
        if process.returncode == SSH_FAILED:
            raise ConnectionLost(f"{self.host}: connection lost ({advice(self.host, error_text)})")
        if process.returncode != 0:
            raise self._explained(last_line(error_text) or f"cannot write there (code {process.returncode})")

    def commit(self, files: Sequence[StoredFile]) -> list[str]:
        pairs = [word for file in files for word in (file.name, file.sha256)]
        answer = self._script(_COMMIT, pairs, files)
        altered = [line.removeprefix("altered ") for line in answer if line.startswith("altered ")]
        if not altered and "done" not in answer:
            raise PacktrainError(f"{self.where}: cannot put the model in its place; {AGAIN}")
        return altered

    def _script(self, script: str, words: Sequence[str], files: Sequence[StoredFile]) -> list[str]:
        seconds = _ANSWER_SECONDS + sum(file.bytes for file in files) / _SLOWEST_BYTES_PER_SECOND
        try:
            lines = self._remote.script(script, [*self._place, *words], seconds=seconds, lines=None)
        except Unreachable as error:
            if error.answers:
                raise self._explained(error.fault) from None
            # What has never worked will not work in a moment: a name, a key or a port is wrong.
            if not self._has_answered:
                raise
            raise ConnectionLost(f"{self.host}: connection lost ({error.fault})") from None
        if _ANSWER not in lines:
            raise ConnectionLost(f"{self.host}: the answer is not complete")
        return lines[lines.index(_ANSWER) + 1 :]

    def _explained(self, fault: str) -> PacktrainError:
        if _FULL.search(fault):
            self._script(_FORGET, (), ())  # a board with a full disk does not work for long
            return full_disk(self.where, 0)
        text = next((text for pattern, text in _ADVICE if re.search(pattern, fault)), fault)
        return Mistake(f"{self.where}: {text}")
