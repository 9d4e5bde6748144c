"""The systemd unit that serves a model on a board: started with it, restarted after a failure, locked in."""

from __future__ import annotations

import ipaddress
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from packtrain.errors import Mistake, printable, quoted
from packtrain.export.model import read_model
from packtrain.system import expanded

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"), Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - not written

# MemoryDenyWriteExecute is absent on purpose: runtimes compile their inner loops for the processor while they run.
_UNIT = Path(__file__).with_name("packtrain.service").read_text("utf-8")


@dataclass(frozen=True)
class UnitRequest:
    """The model to serve, and to whom. Other addresses than loopback need a file with a token."""

    model: Path
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: Path | None = None


def unit(request: UnitRequest, program: Path | None = None) -> str:
    """Return the unit for a model on this machine; `program` is the packtrain that serves it, by default this one."""
    folder = expanded(request.model).absolute()
    model = read_model(folder)
    name = request.name or folder.name
    if not _NAME.fullmatch(name):
        raise Mistake(f"{quoted(name)}: cannot be part of a unit's name; give another one with --name")
    try:
        is_loopback = request.host == "localhost" or ipaddress.ip_address(request.host).is_loopback
    except ValueError:
        fault = "must be an address, such as 127.0.0.1 or 0.0.0.0"
        raise Mistake(f"--host {quoted(request.host)}: {fault}") from None
    if not is_loopback and request.token_file is None:
        raise Mistake(f"--host {request.host}: other machines may reach this address; give a token with --token-file")
    beside = Path(sys.executable).with_name("packtrain")
    program_path = program or (beside if beside.is_file() else shutil.which("packtrain"))
    if program_path is None:
        raise Mistake("there is no packtrain command here; install Packtrain on the machine that serves the model")
    words = [str(Path(program_path)), "serve", str(folder), "--host", request.host, "--port", str(request.port)]
    command = " ".join(map(_word, words))
    credential = ""
    if request.token_file is not None:
        credential = f"LoadCredential=token:{_specifiers(str(expanded(request.token_file).absolute()))}\n"
        command += " --token-file ${CREDENTIALS_DIRECTORY}/token"
    # What ProtectHome and PrivateTmp would hide: the model, and the Python that serves it.
    places = dict.fromkeys([folder, Path(sys.prefix).absolute(), Path(sys.base_prefix).resolve()])
    hidden = [place for place in places if any(place.is_relative_to(root) for root in _HIDDEN)]
    again = ["packtrain", "unit", str(folder)]  # the command that prints the same unit
    for field in fields(UnitRequest):
        value = getattr(request, field.name)
        if field.name != "model" and value != field.default:
            path = expanded(value).absolute() if isinstance(value, Path) else value
            again += [f"--{field.name.replace('_', '-')}", str(path)]
    return _UNIT.format(
        run=printable(model.manifest.origin.run),
        again=shlex.join(again),
        name=name,
        command=command,
        credential=credential,
        mounts="".join(f"BindReadOnlyPaths={_mounted(str(place))}\n" for place in hidden),
        network="IPAddressDeny=any\nIPAddressAllow=localhost\n" if is_loopback else "",
    )


def _specifiers(text: str) -> str:
    if not text.isprintable():
        raise Mistake(f"{quoted(text)}: contains a control character; rename it")
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """Return a word as systemd reads it."""
    escaped = _specifiers(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./$-]+", escaped) else f'"{escaped}"'


def _mounted(text: str) -> str:
    """Return a path as systemd reads it where it is no part of a command: without variables, and twice.

    Newer versions read the quotes first, in which a backslash means nothing, and then the backslashes.
    """
    return shlex.quote(re.sub(r"[\\:]", r"\\\g<0>", _specifiers(text)))
